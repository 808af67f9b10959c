"""A tier of files is measured when an engine opens whose gate decides, and nobody waits for a disk that hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gdscache.disk.costs_file import COSTS_NAME
from gdscache.gate.fit import ENOUGH
from gdscache.prefetch import trial
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import Host, OpenHost, kept, quiet

FAULTY = "tests.support.faulty:FaultyTransport"


def left(open_host: OpenHost, slab: Path) -> list[int]:
    """A directory with eight pages, of which nobody knows what loads from it take."""
    host, tokens = kept(open_host, 8, transport=FAULTY, cpu=16, ssd=32)
    host.engine.close()
    (slab / COSTS_NAME).unlink(missing_ok=True)
    return tokens


def observed(host: Host) -> int:
    found = host.engine.stats()["gate"]["tiers"]
    return int(found["ssd"]["observations"]) if "ssd" in found else 0


def test_a_disk_is_measured_before_the_first_request(open_host: OpenHost, slab: Path) -> None:
    tokens = left(open_host, slab)
    host = open_host(transport=FAULTY, cpu=16, ssd=32, load={"gate": "enforcing"})
    assert observed(host) == ENOUGH
    stats = host.engine.stats()
    assert stats["prefetch"]["pages"] == {"loaded": ENOUGH}
    assert (stats["leases"], stats["prefetch"]["held_pages"]) == ([], 0)
    assert host.load(tokens).tokens == len(tokens)
    quiet(host.engine)
    host.engine.close()
    again = open_host(transport=FAULTY, cpu=16, ssd=32, load={"gate": "enforcing"})
    assert again.engine.stats()["prefetch"]["requests"] == 0  # costs.json has it


@pytest.mark.parametrize("options", [{"load": {"gate": "advisory"}}, {"cpu": None}])
def test_it_is_not_where_that_is_of_no_use(open_host: OpenHost, slab: Path, options: dict[str, object]) -> None:
    left(open_host, slab)
    host = open_host(**{"transport": FAULTY, "cpu": 16, "ssd": 32, "load": {"gate": "enforcing"}} | options)
    assert observed(host) == 0


def test_a_disk_that_hangs_keeps_nobody_from_opening(
    open_host: OpenHost, slab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = left(open_host, slab)
    monkeypatch.setattr(trial, "TRIAL_S", 0.2)
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        start = time.monotonic()
        host = open_host(transport=FAULTY, cpu=16, ssd=32, load={"gate": "enforcing"})
        assert time.monotonic() - start < 10  # a read has 30 s
        assert rule.met
        rule.release()
    quiet(host.engine)
    assert host.load(tokens).tokens == len(tokens)
