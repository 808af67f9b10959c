"""`gdscache bench ttft --engine vllm`, small: what it says is cached is cached, and restarts come before traffic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import vllm_parts as parts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(580)]


def test_a_quick_run(tmp_path: Path) -> None:
    if not parts.PYTHON.exists():
        pytest.skip(parts.MISSING)
    command = [sys.executable, "-m", "gdscache", "bench", "ttft", "--engine", "vllm", "--python", str(parts.PYTHON)]
    options = ["--quick", "--preset", "tiny", "--way", "none", "--way", "gdscache", "--dir", str(tmp_path)]
    environment = {**os.environ, **parts.SETTINGS, "PYTHONPATH": parts.path()}
    report = tmp_path / "r.json"
    done = subprocess.run(
        [*command, *options, "--report", str(report)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    plain, first, again = json.loads(report.read_text())["rows"]
    for row, ways in (
        (plain, ["recomputed", "resident"]),
        (first, ["recomputed", "resident", "loaded"]),
        (again, ["loaded"]),
    ):
        assert {way: found["cached"] for way, found in row["first"].items()} == {
            way: [0 if way == "recomputed" else 896] * 3 for way in ways
        }
    assert plain["shared_cached"] == again["shared_cached"] == [pytest.approx(1 / 3)]
    assert plain["lone_cached"] == again["lone_cached"] == [0.0]
    assert "shared_requests_per_s" not in first
    assert "after a restart" in done.stdout
