"""A call gives the interpreter's lock up nowhere: beside a thread that runs Python, each time may cost it 5 ms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT, SUPPORT
from tests.support.shims import shim


@pytest.fixture(scope="module", name="shim")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shim("lock_shim", tmp_path_factory.mktemp("shim"))


def test_no_call_gives_the_lock_up(shim: Path) -> None:
    """Of 64 pages, in the main thread, which signals interrupt, and in another."""
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, SUPPORT / "lock_child.py", shim]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == 4
    for case, found in told.items():
        assert min(found.pop("os.stat")) > 0, "the shim counts nothing"
        assert len(found) == 5, "kinds of calls"
        # What a call waits for (a lock that a thread of ours has just then) is not its own doing. It is rare, but for
        # loads in parts, whose first pages land while it takes the lock for the next: there one call without it tells.
        place = 2 if case.startswith("at once") else 0
        usual = {call: sorted(times)[len(times) * place // 4] for call, times in found.items()}
        assert not any(usual.values()), (case, found)
