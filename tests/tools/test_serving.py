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
        ("none", "ram"): None,
        ("hicache", "ram"): "wait_complete",
        ("storage", "ram"): "wait_complete",
        ("linker", "ram"): None,
        ("storage", "disk"): "best_effort",
    }
    rows = ran("sglang", "--turns", "0", "--policy", "timeout", "--ways", "storage")
    assert {row["policy"] for row in rows if row["way"] == "storage"} == {"timeout"}
    assert {row["policy"] for row in ran("vllm", "--stages", "1", "--turns", "0")} == {None}


def test_the_policy_reaches_sglang(bench: ModuleType, tmp_path: Path) -> None:
    cache = importlib.import_module("sglang_run").cache
    order = {"folder": str(tmp_path), "cpu": 1 << 30, "ssd": "1GiB", "threads": 8, "host_buffer": "64MiB"}
    for way in bench.HICACHE:
        found = cache({**order, "way": way, "policy": "best_effort"})
        assert found["hicache_storage_prefetch_policy"] == "best_effort"
    assert "hicache_storage_prefetch_policy" not in cache({**order, "way": "linker", "policy": None})
