"""What the shared pool gives through its tier, and what it costs when its master is dead. `-s` prints the figures.

docs/performance.md has the targets. These tests ask for less: a machine that does other things too is slower, and what
they are to find is what is broken.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.scale.pool_parts import RealPool

pytestmark = [pytest.mark.scale, pytest.mark.throughput]


def test_pages_move_nearly_as_fast_as_by_the_bare_calls(pool: RealPool) -> None:
    pages = 128
    pool.new_owner(5 * pages)
    engine = pool.new_engine(large=True, cpu=2 * pages, store="write_back")  # pages stay here until they are flushed
    engine.begin("rates", master=pool.address, pages=pages, rounds=7)
    found = engine.end(120.0)
    rate = {name: np.median(values) for name, values in found.items()}
    print(f"\nGB/s: {', '.join(f'{name} {value:.2f}' for name, value in rate.items())}")
    for way in ("put", "get"):
        assert rate[f"tier {way}"] >= 0.6 * rate[f"bare {way}"]


def test_lookups_and_loads_do_not_wait_for_a_dead_master(pool: RealPool) -> None:
    """99th percentiles beside those of an engine without the tier. The median of turns: the machine disturbs some."""
    pool.new_owner()
    engines = {"with": pool.new_engine(), "without": pool.new_engine(pool=False)}
    for engine in engines.values():
        engine.call("store", seed=1, pages=8)
    pool.master.kill()
    for engine in engines.values():
        engine.call("store", seed=2, pages=1)
    turns = [
        {name: engine.call("lookups", seed=1, pages=8, rounds=200) for name, engine in engines.items()}
        for _ in range(30)
    ]
    for what in ("lookup", "load"):
        over = float(np.median([turn["with"][what] / turn["without"][what] for turn in turns]))
        print(f"\np99 of {what} with the master dead, against an engine without the tier: {over:.3f}")
        assert over <= 1.5
