"""tools/serving/bench.py: what its runs are told, and the figures it draws. The engines have stand-ins."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.places import ROOT

# A run that answers at once: every value follows from its order.
RUN = """
import json, pathlib, sys
order = json.loads(pathlib.Path(sys.argv[1]).read_text())
found = {"first": {"loaded": {"ms": [9.0, 7.0, 8.0], "cached": [640] * 3}}}
if not order["restarted"]:
    found["first"] |= {name: {"ms": [ms], "cached": [0]} for name, ms in (("recomputed", 20.0), ("resident", 5.0))}
if order["traffic"]:
    found |= {f"{kind}_requests_per_s": [4.0, 6.0] for kind in ("shared", "lone")}
pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
pathlib.Path(sys.argv[2] + ".ready").touch()
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "serving"))
    module = importlib.import_module("bench")
    for name in ("sglang_run.py", "vllm_run.py"):
        (tmp_path / name).write_text(RUN)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return module


@pytest.fixture
def ran(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run the bench: the rows of its report."""

    def start(*arguments: str) -> list[dict[str, Any]]:
        folders = ["--ram", str(tmp_path / "ram"), "--disk", str(tmp_path / "disk")]
        command = ["bench.py", *arguments, *folders, "--json", str(tmp_path / "r.json")]
        monkeypatch.setattr(sys, "argv", command)
        bench.main()
        rows: list[dict[str, Any]] = json.loads((tmp_path / "r.json").read_text())["rows"]
        return rows

    return start


def test_hicache_does_not_wait_for_a_slow_disk(ran: Callable[..., list[dict[str, Any]]]) -> None:
    rows = ran("sglang", "--turns", "0")
    told = {(row["way"], row["where"]): row["policy"] for row in rows}
    assert told == {
        ("none", "ram"): None, ("hicache", "ram"): "wait_complete", ("storage", "ram"): "wait_complete",
        ("linker", "ram"): None, ("storage", "disk"): "best_effort", ("linker", "disk"): None,
    }  # fmt: skip
    rows = ran("sglang", "--turns", "0", "--policy", "timeout", "--ways", "storage")
    assert {row["policy"] for row in rows if row["way"] == "storage"} == {"timeout"}
    assert {row["policy"] for row in ran("vllm", "--stages", "1", "--turns", "0")} == {None}


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    about = {"engine": "sglang", "versions": {"sglang": "0.5.23"}, "tokens": 1024, "machine": {"gpus": ["a GPU"]}}
    return {**about, "rows": [{"restarted": False, "where": "ram", **row} for row in rows]}


FIRST = {"recomputed": {"ms": [20.0]}, "resident": {"ms": [5.0]}}
TRAFFIC = {"shared_requests_per_s": [4.0, 7.5], "lone_requests_per_s": [3.0, 3.5]}
PANELS = ("to the first token", "half of each prompt shared", "nothing shared")
LOADED = {"way": "storage", "restarted": True, "where": "disk", "first": {"loaded": {"ms": [9.0, 8.0, 33.0]}}}


def drawn(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *reports: dict[str, Any]) -> str:
    """What `--from` (and `--also`) draw, as an SVG in which text is text."""
    import matplotlib

    for name, content in zip(("one.json", "other.json"), reports, strict=False):
        (folder / name).write_text(json.dumps(content))
    also = ["--also", str(folder / "other.json")] if len(reports) > 1 else []
    command = ["bench.py", "--from", str(folder / "one.json"), "--plot", str(folder / "plot.svg"), *also]
    monkeypatch.setattr(sys, "argv", command)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        bench.main()
    return (folder / "plot.svg").read_text()


def test_a_plot_has_the_panels_that_there_are_values_for(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, lone = {"way": "none", "first": FIRST}, {"lone_requests_per_s": TRAFFIC["lone_requests_per_s"]}
    for rows, panels in (
        ([first | TRAFFIC, {"way": "linker", **TRAFFIC}], PANELS),
        ([first, LOADED], PANELS[:1]),
        ([{"way": "hicache", **TRAFFIC}], PANELS[1:]),
        ([{"way": "hicache", **lone}], PANELS[2:]),
        ([{"way": "hicache", "error": "status -9"}], ()),
    ):
        text = drawn(bench, monkeypatch, tmp_path, report(*rows))
        assert tuple(words for words in PANELS if words in text) == panels
        assert "sglang 0.5.23, a GPU" in text


def test_a_plot_has_another_report_beside(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = report({"way": "none", "first": FIRST})
    other = {**report({"way": "cpu", **TRAFFIC}), "engine": "vllm", "versions": {"vllm": "0.33.0"}}
    text = drawn(bench, monkeypatch, tmp_path, one, other)
    for words in ("sglang 0.5.23, a GPU", "to the first token", "vllm 0.33.0, a GPU", "vLLM's CPU offloading"):
        assert words in text.replace("&#x27;", "'"), words


def test_bars_are_medians_of_prompts_and_turns(bench: ModuleType) -> None:
    found = report({"way": "none", "first": FIRST} | TRAFFIC, LOADED | {"policy": "best_effort"}, LOADED, LOADED)
    assert [(name, values) for name, values, _ in bench.first_bars(found)] == [
        ("recomputed", [20.0]),
        ("gdscache under HiCache\nafter a restart, root disk, best_effort", [9.0, 8.0, 33.0]),
        ("gdscache under HiCache\nafter a restart, root disk", [9.0, 8.0, 33.0]),
        ("gdscache under HiCache\nafter a restart, root disk, again", [9.0, 8.0, 33.0]),
        ("resident on the GPU", [5.0]),
    ]
    assert bench.traffic_bars(found, "shared") == [("no cache", [4.0, 7.5], "0.6")]
    one_turn = report({"way": "linker", "restarted": True, "shared_requests_per_s": 7.25})  # schema 1
    assert bench.traffic_bars(one_turn, "shared") == [
        ("gdscache's linker, after a restart, RAM disk", [7.25], "tab:green")
    ]
    on_disk = report({"way": "linker", "where": "disk", "shared_requests_per_s": [7.0]})
    assert bench.traffic_bars(on_disk, "shared") == [("gdscache's linker, root disk", [7.0], "tab:green")]

    import matplotlib.figure

    axes = matplotlib.figure.Figure().subplots()
    bench.draw(axes, [("a", [9.0, 8.0, 33.0], "0.6"), ("b", [4.0, 7.5], "0.6")], 33.0, "ms", "%.1f")
    assert [bar.get_width() for bar in axes.patches] == [9.0, 5.75]
    assert [text.get_text() for text in axes.texts] == ["9.0", "5.8"]
    assert [list(dots.get_xdata()) for dots in axes.lines] == [[9.0, 8.0, 33.0], [4.0, 7.5]]


def test_a_bench_draws_what_it_measured(
    bench: ModuleType, ran: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    ran("sglang", "--stages", "1", "--turns", "2", "--plot", str(tmp_path / "r.png"))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--from", "r.json"], ["--plot", "r.png"]], ids=["no plot", "no engine"])
def test_a_command_that_lacks_something(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "kept").touch()
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments, "--ram", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench.main()
    assert (tmp_path / "kept").exists()


def test_the_policy_reaches_sglang(bench: ModuleType, tmp_path: Path) -> None:
    cache = importlib.import_module("sglang_run").cache
    order = {"folder": str(tmp_path), "cpu": 4 << 30, "ssd": "1GiB", "threads": 8, "host_buffer": "64MiB", "tp": 2}
    for way in bench.HICACHE:
        found = cache({**order, "way": way, "policy": "best_effort"})
        assert found["hicache_storage_prefetch_policy"] == "best_effort"
        assert found["hicache_size"] == 2, "of each rank"
    assert "hicache_storage_prefetch_policy" not in cache({**order, "way": "linker", "policy": None})
