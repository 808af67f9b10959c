"""Faults of every kind that pass, alone and in twos: nothing wrong is served, nothing hangs, and all is there again.

Whatever fails, and whatever fails while the engine recovers from it: when it is over every page that was committed is
there, in use, behind a restart and in what a kill leaves, but for those whose bytes were really damaged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import SEED
from tests.support.shims import shim, under

HANGS_S = 600.0  # beyond the time that it is given, and that of its last episode

Soak = Callable[[int, float], dict[str, Any]]


@pytest.fixture
def soak(tmp_path: Path, record_property: Any) -> Soak:
    """`soak(seed, seconds)`: what was counted, with nothing among it that must not be."""
    shims = [shim(name) for name in ("io_shim", "memory_shim")]

    def run(seed: int, seconds: float) -> dict[str, Any]:
        print(f"seed {seed}: a status other than 0 is a call that hung, or worse")
        said = under(shims, "faults_child.py", *shims, tmp_path, 0, seed, seconds, seconds=seconds + HANGS_S)
        found: dict[str, Any] = json.loads(said)
        found["hung"] = 0  # what hangs ends the process
        for what in ("rounds", "faults", "met", "compared", "wrong", "lost", "hung", "left"):
            record_property(what, str(found[what]))
        print({what: value for what, value in found.items() if what != "said"})
        bad = {what: found[what] for what in ("wrong", "lost", "left", "unnamed")}
        assert not any(bad.values()), f"{bad}, seed {seed}:\n" + "\n".join(found["said"])
        return found

    return run


@pytest.mark.suite
def test_each_kind_once_or_from_now_on(soak: Soak) -> None:
    """The short form; the long one begins with each kind in both ways."""
    found = soak(5, 0)
    assert {fault.split(", ")[1] for fault in found["faults"]} >= {"once", "from now on"}
    assert {"calls", "plan", "damage", "memory", "thread"} <= {means for means, n in found["met"].items() if n}
    assert found["switched_off"] > 0, "no tier was ever switched off"
    assert {"io_error", "short_read", "checksum"} <= found["statuses"].keys()
    # Who waits for a load has a deadline, too, which comes first where the machine is busy.
    assert found["statuses"].get("deadline") or found["errors"].get("load: DeadlineError")
    assert found["compared"] > 1000
    assert found["stored"]["ssd_plain"] > 50
    assert found["killed"] > 0


@pytest.mark.soak
def test_a_long_time_of_faults_that_pass(soak: Soak) -> None:
    """For `GDSCACHE_SOAK_SECONDS`, twice as long as the other soaks: with 900 and --timeout 0 half an hour."""
    found = soak(SEED, 2 * float(os.environ.get("GDSCACHE_SOAK_SECONDS", "30")))
    assert found["rounds"] > 0
