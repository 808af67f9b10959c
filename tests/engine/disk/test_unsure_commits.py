"""A commit whose last sync fails may be in the log all the same: an open that finds it finds the bytes of its pages, or
nothing, and never a page that was cleared since."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.shims import shim, under


def test_what_an_open_finds_behind_commits_whose_syncs_failed(tmp_path: Path) -> None:
    library = shim("io_shim")
    found = json.loads(under([library], "unsure_child.py", library, tmp_path))
    assert found.pop("causes") == ["io_error"] * 8, "no sync failed: the shim does not reach them"
    assert found.pop("over") == [True, True], "a store behind the fault is refused"
    assert found.pop("over, killed") == {"first": [], "second": ["loaded"] * 4}
    assert found.pop("unsure, killed")["first"] == ["loaded"] * 4, "the log had no commit: this shows nothing"
    for when, served in found.items():
        pages = [*served["first"], *served["second"]]
        assert all(status == "loaded" for status in pages), (when, served)
        assert not (when.startswith("cleared") and pages), (when, served)
