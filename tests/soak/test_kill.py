"""Kill -9: after each one the directory is whole, serves what was committed, and nothing else."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from gdscache.config.pools import PLAIN_PARTS
from gdscache.disk import slab
from tests.support.helpers import PACKED, SEED, make_config, until
from tests.support.kill_check import LAYOUT, ROOMY, TIGHT, USUAL, verify
from tests.support.kill_child import run
from tests.support.kill_record import Record
from tests.support.processes import Child

PACKED_ROOMY = 64 * PLAIN_PARTS  # with 64 slots for pages that do not fit, more than there are
SETUPS = USUAL | {
    "over two directories": {"cpu": None, "ssd": ROOMY},
    "packed": {"gpu": 16, "cpu": 20, "ssd": PACKED_ROOMY, "model": PACKED},
    "packed, ssd only": {"cpu": None, "ssd": PACKED_ROOMY, "model": PACKED},
}
STRIPED = "over two directories"
STRETCH = 2 * LAYOUT.extent_bytes  # tiny slabs lie in all their directories
# What some rounds wait for before their random instant, by the round's number, so that it happens on slow machines too.
GOALS = {2: "cleared", 4: "kept"}
GOAL_EVERY = 5


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "STRETCH_BYTES", STRETCH)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(
    "rounds", [pytest.param(5, marks=pytest.mark.suite), pytest.param(125, marks=pytest.mark.soak)]
)
def test_kills(tmp_path: Path, setup: str, rounds: int, record_property: Any) -> None:
    config = make_config(tmp_path / "cache", **SETUPS[setup])
    if setup == STRIPED:
        config["ssd"]["stripes"] = [str(tmp_path / "more")]
    attached, roomy = "cpu" not in config, SETUPS[setup]["ssd"] != TIGHT
    log, rng, pages, found = tmp_path / "log", random.Random(f"{setup} {SEED}"), 0, Record()
    log.touch()
    for round_ in range(rounds):
        begun = log.stat().st_size
        with Child(run, config, attached, log, rng.randrange(1 << 32), STRETCH) as child:
            if round_ % 8:
                child.receive()
            if goal := GOALS.get(round_ % GOAL_EVERY):
                _wait_for(goal, log, child, begun)
            time.sleep(rng.uniform(0, 0.3))
            child.kill()
        found = Record.replay(log)
        pages += verify(config, found.allowed, found.required if roomy else set())
    assert pages, "no page survived any kill: nothing was tested"
    assert found.cleared, "nothing was cleared: nothing was tested"
    assert found.kept >= rounds // GOAL_EVERY, "hardly a store was acknowledged"
    summary = f"{rounds} kills, {pages} pages verified, {found.kept} pages acknowledged, {found.cleared} clears"
    record_property("kills", summary)
    print(f"{setup}: {summary}")


def _wait_for(what: str, log: Path, child: Child, begun: int) -> None:
    """Until the child has written a line of a kind (`kept`: of some page) to its log, from the byte `begun` on, or has
    ended, which its kill then reports."""

    def there() -> bool:
        lines = [json.loads(line) for line in log.read_bytes()[begun:].splitlines(keepends=True) if line[-1:] == b"\n"]
        return any(kind == what and values[-1] != [] for kind, *values in lines) or not child.process.is_alive()

    until(there, f"the child logs {what!r}")
