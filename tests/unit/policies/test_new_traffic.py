"""The default order on traffic that nobody tuned it to, held against plain LRU. `-m soak -s` prints the figures.

docs/design/lifetime.md has them, and says how they are compared.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from gdscache.commands.replay.trace import expand
from gdscache.policies import POLICIES
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.guarded import Guarded
from tests.support.bounds import optimum, plain_lru
from tests.support.families import FAMILIES, REFERENCES, drawn
from tests.support.one_tier import simulate

SEED = int(os.environ.get("GDSCACHE_SEED", "0"))
PERCENT = (1, 2, 5, 10, 25, 50)  # of the unique pages
LEAST_PAGES = 200
SLACK = 0.01  # of the page references: added to hits before they are compared, so that few hits of few do not count
DECIDED = 1.01  # where the optimum is not above this, LRU is as good as it: only the worst counts
WORST, FIFTH = 0.98, 0.995


class Row(NamedTuple):
    """A trace in a tier of `pages`. Ratios to plain LRU: of hits, of the optimum's hits, of the pages written."""

    family: str
    seed: int
    pages: int
    ratio: float
    optimum: float
    written: float


class Worth(NamedTuple):
    """What rows come to: the worst of all; of those in which there is something to gain, the others."""

    pairs: int
    worst: Row
    fifth_percentile: float
    geometric_mean: float
    optimum: float
    written: float


def rows_of(
    policy: type[EvictionPolicy],
    seeds: Iterable[int],
    families: Iterable[str] = tuple(FAMILIES),
    percent: Iterable[int] = PERCENT,
    references: int = REFERENCES,
) -> list[Row]:
    found = []
    for seed in seeds:
        for family in families:
            work = expand(drawn(family, seed, references))
            sizes = {max(LEAST_PAGES, len(work.names) * n // 100) for n in percent}
            for pages in sorted(size for size in sizes if size < len(work.names)):
                ours, base, best = simulate(work, pages, policy()), plain_lru(work, pages), optimum(work, pages)
                slack = SLACK * work.references
                ratios = [(counts.hits + slack) / (base.hits + slack) for counts in (ours, best)]
                found.append(Row(family, seed, pages, *ratios, ours.written / base.written))
    return found


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def worth(rows: list[Row]) -> Worth:
    some = [row for row in rows if row.optimum > DECIDED]
    ratios = sorted(row.ratio for row in some)
    found = Worth(
        len(rows),
        min(rows, key=lambda row: row.ratio),
        ratios[int(0.05 * (len(ratios) - 1))],
        mean(ratios),
        mean(row.optimum for row in some),
        mean(row.written for row in rows),
    )
    print(f"\n{found}")
    return found


@pytest.mark.suite
def test_the_default_does_not_lose_to_lru_on_traffic_that_is_drawn() -> None:
    """Few traces, of every family, short ones: losing is a matter of a few pages there."""
    found = worth(rows_of(Guarded, [1000], percent=(5, 25), references=8_000))
    assert found.worst.ratio >= WORST
    assert found.fifth_percentile >= 0.99
    assert found.geometric_mean > 1.02


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_the_default_meets_its_targets_on_fixed_seeds(policy: str) -> None:
    found = worth(rows_of(POLICIES[policy], [0, 1]))
    assert found.worst.ratio >= WORST
    assert found.fifth_percentile >= FIFTH
    assert policy != "lifetime" or found.geometric_mean >= 1.08


@pytest.mark.soak
def test_the_default_meets_its_targets_on_fresh_seeds() -> None:
    seed = random.Random(SEED).randrange(1 << 30)
    found = worth(rows_of(Guarded, range(seed, seed + 4)))
    assert found.worst.ratio >= WORST, (seed, found)
    assert found.fifth_percentile >= FIFTH, (seed, found)


@pytest.mark.soak
def test_lru_in_the_index_is_lru() -> None:
    """What stands for LRU here, the textbook's, and the order `lru` differ by tails before heads alone."""
    for row in rows_of(LRU, [SEED], references=20_000):
        assert row.ratio >= 0.99, row
