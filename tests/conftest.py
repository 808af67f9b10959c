"""Fixtures of all tests: the device, hypothesis profiles, engines that are checked and closed at the end of a test."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from gdscache import CacheEngine
from gdscache.errors import TransportUnavailableError
from gdscache.limits import EngineLimits
from gdscache.storage import cufile, probe
from tests.support.faces import Attached, Face, Pool
from tests.support.faulty import PLAN
from tests.support.helpers import SMALL, Host, close_kept, make_config, settle
from tests.support.hybrid import MODELS, HybridHost, hybrid_config

gc.disable()  # until all tests are there: see `pytest_collection_finish`
# Tests run beside each other, and threads of torch that have no core to themselves spin. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a shell; its children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# What hypothesis tries: the same few examples each time in `make test`, more in `make suites`, many new ones in
# `make soak`.
for name, examples, steps in (("test", 7, 15), ("suites", 20, 25), ("soak", 400, 50)):
    settings.register_profile(
        name,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=name != "soak",
        deadline=None,
        suppress_health_check=_SLOW,
    )
settings.load_profile(os.environ.get("GDSCACHE_EXAMPLES", "test"))


_LONGEST = [
    "sglang_linker_ranks", "ranks_random", "native_library", "packaging", "plan", "state_machine", "bench_io",
    "moves_stepped", "index_costs", "ranks_messages", "exits", "hostile_rows", "examples", "lending", "cufile_faults",
    "replay_tiers", "docs", "loads_stepped", "fuzz", "hybrid_machine", "faults_that_pass", "power", "bench_copy",
    "doctor", "native_against_reference", "kernels_compile", "links", "soak", "bench_ttft",
    "no_memory", "transports", "processes", "native_leaks", "kill", "transformers_hybrids",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: of several workers, none is left alone with it at the end."""
    order = {f"test_{name}.py": at for at, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """What is there by now stays until the end: no collection of garbage looks at it, which takes 0.5 s each time."""
    gc.enable()
    gc.freeze()


# Why tests are skipped: the first kind whose pattern a reason has.
_SKIPS = {
    "for other reasons": r"without a? ?CUDA|there is a |a real libcuda",
    "for want of a GPU": r"GPU|CUDA|libcuda|cuFile|GDS_MT",
    "for want of a package or program": r"install|no [\w-]+ (at|for)|C compiler|matplotlib|GDSCACHE_|kvikio|nixl",
    "by what this system or user cannot do": r"root|io_uring|O_DIRECT|RAM disk|processor|kernel|file|user|memory",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Why tests were skipped, in four sums; `-rs` lists every reason."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    kinds = [next((kind for kind, words in _SKIPS.items() if re.search(words, one)), "") for one in reasons]
    sums = Counter(kind or "for other reasons" for kind in kinds)
    if reasons:
        said = ", ".join(f"{sums[kind]:,} {kind}" for kind in sorted(_SKIPS))
        terminalreporter.write_line(f"skipped: {said} (PYTEST_ARGS=-rs lists them)")


@pytest.fixture(autouse=True)
def _no_faults_on_order() -> Iterator[None]:
    """No fault on order is left from the test before, nor for the next one."""
    PLAN.reset()
    yield
    PLAN.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the planes lie. The tests that take it run on a GPU too, by `pytest -m gpu`."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(scope="session")
def gds_mt(tmp_path_factory: pytest.TempPathFactory) -> None:
    """NIXL's plugin GDS_MT moves GPU memory here. A probe takes seconds, so there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not (found := probe.probe("nixl", tmp_path_factory.mktemp("probe"), 0, 60)).ok:
        pytest.skip(f"GDS_MT does not work here: {found.reason}")


@pytest.fixture(scope="session")
def real_cufile(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The transport cufile moves GPU memory here, by whatever path. A probe takes seconds, so there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        cufile.find_cufile()
    except TransportUnavailableError as error:
        pytest.skip(error.message)
    if not (found := probe.probe("cufile", tmp_path_factory.mktemp("probe"), 0, 60)).ok:
        pytest.skip(f"cuFile does not work here: {found.reason}")


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """The directory of the SSD tier."""
    return tmp_path / "cache"


@pytest.fixture
def open_engine(slab: Path) -> Iterator[Callable[..., CacheEngine]]:
    """`open_engine(**make_config arguments)`: an engine with its own pool, at rest, whole and kept at the end."""
    opened: list[CacheEngine] = []

    def opens(path: Path | None = None, limits: EngineLimits = SMALL, **options: Any) -> CacheEngine:
        opened.append(CacheEngine.from_config(make_config(path or slab, **options), limits=limits))
        return opened[-1]

    yield from _closing(opened, opens)


@pytest.fixture
def open_host(slab: Path) -> Iterator[Callable[..., Host]]:
    """`open_host(**make_config arguments)`: planes and an engine attached to them, checked as `open_engine` does."""
    opened: list[CacheEngine] = []

    def opens(
        path: Path | None = None,
        blocks: int = 64,
        block_tokens: int | None = None,
        order: str = "plain",
        limits: EngineLimits = SMALL,
        **options: Any,
    ) -> Host:
        host = Host(make_config(path or slab, **options), blocks, block_tokens, order, limits)
        opened.append(host.engine)
        return host

    yield from _closing(opened, opens)


@pytest.fixture(params=["pool", "attached"])
def open_face(request: pytest.FixtureRequest, slab: Path) -> Iterator[Callable[..., Face[Any]]]:
    """`open_face(**make_config arguments)`: an engine by one of its two faces; a test that takes it runs on both.

    Given indirectly, `attached:N` has blocks of N tokens.
    """
    name, _, block_tokens = request.param.partition(":")
    opened: list[CacheEngine] = []

    def opens(path: Path | None = None, limits: EngineLimits = SMALL, **options: Any) -> Face[Any]:
        config = make_config(path or slab, **{"gpu": 24} | options)
        attached = functools.partial(Attached, block_tokens=int(block_tokens or 0) or None)
        face: Face[Any] = (Pool if name == "pool" else attached)(config, limits)
        opened.append(face.engine)
        return face

    yield from _closing(opened, opens)


def _closing(opened: list[CacheEngine], opens: Callable[..., Any]) -> Iterator[Any]:
    try:
        yield opens
        for engine in opened:
            if not engine._closing.begun:
                settle(engine)
                close_kept(engine)
    finally:
        for engine in opened:
            engine.close()


@pytest.fixture
def open_hybrid(slab: Path) -> Iterator[Callable[..., HybridHost]]:
    """`open_hybrid("apart", **hybrid_config arguments)`: a hybrid model's planes and an engine, as `open_host` does."""
    opened: list[CacheEngine] = []

    def opens(
        model: str | dict[str, Any],
        path: Path | None = None,
        blocks: int = 64,
        per_page: int = 1,
        limits: EngineLimits = SMALL,
        **options: Any,
    ) -> HybridHost:
        fields = MODELS[model] if isinstance(model, str) else model
        host = HybridHost(hybrid_config(path or slab, fields, **options), blocks, per_page, limits)
        opened.extend(host.engine.engines)
        return host

    yield from _closing(opened, opens)
