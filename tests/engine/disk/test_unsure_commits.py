"""A commit whose last sync fails may be in the log all the same: an open that finds it finds the bytes of its pages, or
nothing, and never a page that was cleared since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT, SUPPORT
from tests.support.shims import shim


def test_what_an_open_finds_behind_commits_whose_syncs_failed(tmp_path: Path) -> None:
    library = str(shim("io_shim", tmp_path))
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "unsure_child.py"), library, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"LD_PRELOAD": library, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found.pop("causes") == ["io_error"] * 8, "no sync failed: the shim does not reach them"
    assert found.pop("over") == [True, True], "a store behind the fault is refused"
    assert found.pop("over, killed") == {"first": [], "second": ["loaded"] * 4}
    assert found.pop("unsure, killed")["first"] == ["loaded"] * 4, "the log had no commit: this shows nothing"
    for when, served in found.items():
        pages = [*served["first"], *served["second"]]
        assert all(status == "loaded" for status in pages), (when, served)
        assert not (when.startswith("cleared") and pages), (when, served)
