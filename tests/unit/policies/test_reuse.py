"""Lifetimes of classes of pages: what is watched against a log of all uses, what is concluded against every choice."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.native import ReuseSample
from gdscache.policies.guarded import (
    AGES,
    CERTAIN,
    PRIOR,
    SLIGHT,
    Classes,
    Lifetimes,
    ReuseMonitor,
    best_lifetimes,
)

GRID = np.array([0.0, 1, 2, 4, 8])


def curves(chances: list[list[float]], arrived: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Hits and room of each class for each lifetime of `GRID`."""
    hits, room = np.zeros((len(arrived), len(GRID))), np.zeros((len(arrived), len(GRID)))
    for c, row in enumerate(chances):
        gone = 0.0
        for i, chance in enumerate(row):
            now = min(gone + chance, 1.0)
            hits[c, i + 1] = arrived[c] * now
            room[c, i + 1] = room[c, i] + arrived[c] * (1 - (gone + now) / 2) * (GRID[i + 1] - GRID[i])
            gone = now
    return hits, room


def mean(found: Lifetimes, curve: np.ndarray) -> float:
    """What all classes have of it, each page with one of its two lifetimes."""
    return float(
        sum(
            part * np.interp(ages[c], GRID, curve[c])
            for ages, part in ((found.less, 1 - found.share), (found.more, found.share))
            for c in range(len(curve))
        )
    )


def test_ranges_are_those_of_the_bounds() -> None:
    assert list(np.diff(AGES) > 0) == [True] * (len(AGES) - 1)
    for age in [*range(3000), 10**6, 10**7, 10**12]:
        sample = ReuseSample(1, 1, 1)
        sample.see([(0, 0, 0), (0, 0, age)], False)
        _, hits = sample.take()
        assert hits[0].nonzero()[0].tolist() == [np.searchsorted(AGES, age, side="right") - 1]


def test_one_class_gets_all_the_room() -> None:
    found = best_lifetimes(GRID, np.array([[0.1, 0.1, 0.1, 0.1]]), np.array([100.0]), 250.0)
    _, room = curves([[0.1] * 4], [100.0])
    assert mean(found, room) == pytest.approx(250)


def test_equal_classes_get_the_same() -> None:
    found = best_lifetimes(GRID, np.array([[0.1, 0.2, 0.1, 0.1]] * 3), np.array([100.0, 10, 3]), 250.0)
    for lifetimes in (found.less, found.more):
        assert lifetimes[0] == lifetimes[1] == lifetimes[2]


def test_a_class_that_never_comes_again_gets_nothing() -> None:
    found = best_lifetimes(GRID, np.array([[0.0] * 4, [0.1, 0.1, 0.2, 0.3]]), np.array([1000.0, 100.0]), 500.0)
    assert found.less[0] == found.more[0] == 0
    assert found.less[1] == found.more[1] == 8


def test_nothing_known_is_one_lifetime() -> None:
    found = best_lifetimes(GRID, np.zeros((3, 4)), np.array([5.0, 7, 0]), 12.0)
    assert list(found.less) == list(found.more) == [1, 1, 1]
    empty = best_lifetimes(GRID, np.zeros((2, 4)), np.zeros(2), 0.0)
    assert np.isfinite(empty.less).all()
    assert np.isfinite(empty.more).all()


def test_what_is_worth_nothing_before_its_last_age_is_kept_in_part() -> None:
    """A round of documents that is larger than the tier: LRU finds nothing, and a third of the room a third of them."""
    chances = np.array([[0.0, 0.0, 0.0, 1.0]])
    found = best_lifetimes(GRID, chances, np.array([300.0]), 600.0)
    hits, room = curves(chances.tolist(), [300.0])
    assert (found.less[0], found.more[0]) == (0, 8)
    assert mean(found, room) == pytest.approx(600)
    assert mean(found, hits) == pytest.approx(300 * 600 / room[0, -1])


@settings(max_examples=10 * settings.default.max_examples, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 0.2), min_size=4, max_size=4), min_size=2, max_size=3),
    st.lists(st.floats(1, 1000), min_size=3, max_size=3),
    st.floats(0.05, 0.95),
)
def test_no_choice_of_lifetimes_is_much_better(rates: list[list[float]], arrived: list[float], part: float) -> None:
    """Where a use becomes less likely with age, so that a part of a longer life is worth its part."""
    arrived = arrived[: len(rates)]
    chances = []
    for row in rates:
        alive, uses = 1.0, []
        for rate, (begin, end) in zip(sorted(row, reverse=True), itertools.pairwise(GRID), strict=True):
            use = alive * (1 - (1 - rate) ** (end - begin))
            uses.append(use)
            alive -= use
        chances.append(uses)
    hits, room = curves(chances, arrived)
    given_room = part * room[:, -1].sum()
    rows = range(len(arrived))
    best = max(
        sum(hits[c, i] for c, i in zip(rows, choice, strict=True))
        for choice in itertools.product(range(len(GRID)), repeat=len(arrived))
        if sum(room[c, i] for c, i in zip(rows, choice, strict=True)) <= given_room
    )
    found = best_lifetimes(GRID, np.array(chances), np.array(arrived), given_room)
    had = mean(found, hits)
    assert had >= best - 2 * CERTAIN * (best + SLIGHT * sum(arrived)) - 1e-9


class Unfading(ReuseMonitor):
    FADE = 1e12
    ROUND = 7
    SAMPLES = 10**9
    __slots__ = ()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_watched_is_what_a_log_says(seed: int) -> None:
    draw = random.Random(seed)
    monitor = Unfading(Classes(groups=1, sizes=2, uses=2, gaps=1), 0)
    log: list[tuple[int, int, int]] = []  # time, key, class
    stored, stored_at, concluded = 0, [(-1, [0, 0, 0, 0])], 0
    for _ in range(400):
        key, number, store = int(60 * draw.random() ** 2), draw.randrange(4), draw.random() < 0.5
        stored += store
        log.append((stored, key, number))
        monitor.sample.see([(key, number, stored)], store)
        lifetimes = monitor.learn(20, stored)
        if lifetimes is None:
            continue
        concluded += 1
        for ages in lifetimes[:2]:
            assert ages[2] <= ages[3]
        stored_at.append((stored, [sum(c == other for _, _, other in log) for c in range(4)]))
        hits = np.zeros((4, len(AGES)))
        last: dict[int, tuple[int, int]] = {}
        for time, known, c in log:
            if known in last:
                before, was = last[known]
                hits[was, max(i for i, age in enumerate(AGES) if age <= time - before)] += 1
            last[known] = (time, c)
        ages = AGES[:12]
        times = [time for time, _ in stored_at]
        expected = np.zeros((4, 11))
        middle = [(a + b) / 2 for a, b in itertools.pairwise(ages)]
        old = np.array([[np.interp(stored - m, times, [n[c] for _, n in stored_at]) for m in middle] for c in range(4)])
        for i in range(11):
            if old[:, i].sum() > 0:
                pooled = hits[:, i].sum() / old[:, i].sum()
                for alike in ([0, 1], [2], [3]):  # of one group, or of as many uses
                    some = (hits[alike, i].sum() + PRIOR * pooled) / (old[alike, i].sum() + PRIOR)
                    expected[alike, i] = (hits[alike, i] + PRIOR * some) / (old[alike, i] + PRIOR)
        assert monitor.chances(ages) == pytest.approx(expected)
    assert concluded > 20


def test_memory_is_bounded_and_large_tiers_are_sampled() -> None:
    class Small(ReuseMonitor):
        SAMPLES = 64
        __slots__ = ()

    monitor = Small(Classes(1, 1, 2, 1), 1000)
    draw = random.Random(0)
    keys = [draw.getrandbits(64) for _ in range(20_000)]
    for now, key in enumerate(keys, 1):
        if key >> 36 & 0xFFFF < monitor.sample.limit:
            monitor.sample.see([(key, 0, now)], True)
        monitor.learn(1000, now)
    assert len(monitor.sample) <= 64
    chosen = sum(bits >> 36 & 0xFFFF < monitor.sample.limit for bits in keys)
    assert chosen == pytest.approx(20_000 * 64 / 8000, rel=0.3)
    assert len(monitor._past) < 200


def test_what_was_counted_fades() -> None:
    class Fading(ReuseMonitor):
        FADE = 1.0
        __slots__ = ()

    monitor = Fading(Classes(1, 1, 1, 1), 0)
    for i in range(5000):
        monitor.sample.see([(i, 0, i + 1)], True)
        monitor.learn(256, i + 1)
    before = monitor._arrived[0]
    for i in range(2560):
        monitor.sample.see([(10_000 + i, 1, 5001 + i)], True)
        monitor.learn(256, 5001 + i)
    assert monitor._arrived[0] < before / 500
