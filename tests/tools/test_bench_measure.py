"""What the benches share: medians with intervals, pairs that take turns, children in fresh processes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gdscache.commands.bench import measure

pytestmark = pytest.mark.suite


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    [
        (1, 1, 1, 0.0),
        (3, 1, 3, 0.75),
        (5, 1, 5, 0.9375),  # all of them cover less than was asked for
        (6, 1, 6, 0.96875),
        (8, 1, 8, 0.9921875),
        (9, 2, 8, 0.9609375),
        (30, 10, 21, 0.957226),  # as in tables of the sign test
    ],
)
def test_intervals_are_order_statistics(count: int, low: int, high: int, coverage: float) -> None:
    values = [float(i) for i in range(1, count + 1)]
    random.Random(1).shuffle(values)
    found = measure.median_interval(values)
    assert (found.median, found.low, found.high) == ((count + 1) / 2, low, high)
    assert found.coverage == pytest.approx(coverage, abs=1e-6)


def test_an_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    within = 0
    for _ in range(2000):
        found = measure.median_interval(rng.lognormal(0, 1, 30).tolist())  # its median is 1
        within += found.low <= 1 <= found.high
    assert abs(within / 2000 - 0.957) < 0.015


def test_pairs_change_their_order_and_keep_their_places() -> None:
    order: list[str] = []
    found = measure.turns(lambda: order.append("a") or "A", lambda: order.append("b") or "B", 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == (["A"] * 3, ["B"] * 3)


def test_a_ratio_is_that_of_pairs() -> None:
    """A machine that slows down by half in the middle of it: each pair still says 0.9."""
    found = measure.paired([9.0, 4.5, 4.5, 9.0, 18.0], [10.0, 5.0, 5.0, 10.0, 20.0])
    assert found == {"ratio": 0.9, "ratio_low": 0.9, "ratio_high": 0.9, "coverage": 0.9375, "pairs": 5}
