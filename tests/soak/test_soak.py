"""Random requests on small tiers, under faults and every policy: nothing wrong is served, and nothing grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import MHA, PACKED, SEED, make_config
from tests.support.processes import Child
from tests.support.soak_child import Sample, most_threads, soak

GROWTH = 8 << 20  # bytes that an allocator may add while its arenas settle


@pytest.mark.parametrize("model", [MHA, PACKED])
@pytest.mark.parametrize(
    ("share", "rounds"),
    [pytest.param(1 / 3, 15, marks=pytest.mark.suite), pytest.param(20, 600, marks=pytest.mark.soak)],
)
def test_a_time_under_faults(
    slab: Path, model: dict[str, Any], share: float, rounds: int, record_property: Any
) -> None:
    seconds = share * float(os.environ.get("GDSCACHE_SOAK_SECONDS", "30"))
    config = make_config(slab, model=model, gpu=16, cpu=8, ssd=20, transport="tests.support.faulty:FaultyTransport")
    with Child(soak, config, seconds, rounds, 5 + SEED) as child:
        before: Sample = child.receive()
        samples: list[Sample] = [child.receive(60 + seconds) for _ in range(rounds)]
        after: Sample = child.receive()
        done, misses = child.receive()
        child.end()
    settled = 2 * rounds // 3  # until then engines of other kinds come for the first time
    early, late = samples[:settled], samples[settled:]
    assert max(s.files for s in late) <= max(s.files for s in early), "descriptors grow"
    assert max(s.threads for s in samples) <= before.threads + most_threads(config), "threads grow"
    assert (after.threads, after.files) == (before.threads, before.files), "a closed engine keeps threads or files"
    grown = max(s.resident for s in late) - max(s.resident for s in early)
    assert grown < GROWTH, f"resident memory grew by {grown:,} bytes: {[s.resident >> 10 for s in samples]} KiB"
    assert done["requests"] > 5 * seconds, "hardly a request was served"
    damage = [misses[cause] for cause in ("checksum", "io_error", "short_read")]
    assert any(damage), f"not a fault was met: {dict(misses)}"
    assert all(damage) or seconds < 100, f"not every fault was met: {dict(misses)}"
    assert max(s.queued for s in samples) > 0, "nothing was ever queued"
    met = ("prefetches", "refused second_offer", "refused tinylfu", "expired ssd", "stored ssd")
    assert all(done[what] for what in met) or seconds < 100, f"not everything was met: {dict(done)}"
    summary = f"{dict(done)}, misses {dict(misses)}, memory {grown >> 10:+,} KiB"
    record_property("soak", summary)
    print(summary)
