"""The allocator of free slots against a plain set: nothing lost, nothing twice, and runs where there are runs."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gdscache.index import free_slots as slots_module
from gdscache.index.free_slots import FreeSlots


def runs_of(slots: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if found and sum(found[-1]) == slot:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found


def pieces(slots: list[int]) -> int:
    return len(runs_of(set(slots)))


def fewest(runs: list[tuple[int, int]], n: int) -> int:
    """Into how few pieces `n` slots can be taken from runs."""
    total = count = 0
    for _, length in sorted(runs, key=lambda run: -run[1]):
        if total >= n:
            break
        total += length
        count += 1
    return count


class SlotsMachine(RuleBasedStateMachine):
    """`free` and `taken` are all there is; `known` are the runs that the allocator may know of."""

    @initialize(slots=st.integers(0, 200), used=st.sets(st.integers(0, 199)), restore=st.booleans())
    def start(self, slots: int, used: set[int], restore: bool) -> None:
        self.slots = FreeSlots(slots)
        self.free, self.taken = set(range(slots)), list[int]()
        if restore:
            self.slots = FreeSlots.beside(np.array([i in used for i in range(slots)], np.bool_))
            self.taken = [slot for slot in used if slot < slots]
            self.free -= used

    @rule(n=st.integers(0, 150), near=st.booleans(), pick=st.randoms())
    def take(self, n: int, near: bool, pick: random.Random) -> None:
        after = pick.choice(self.taken) if near and self.taken else None
        free = self.free
        got = self.slots.take(n, after)
        assert len(got) == len(set(got)) == min(n, len(free))
        assert set(got) <= free
        if after is not None and after + 1 in free and n and len(got) < len(free):
            assert after + 1 in got
        elif n <= slots_module.EXACT or n >= len(free):  # the shortest run that is long enough, or the longest ones
            assert pieces(got) <= max(1, fewest(runs_of(free), n))
        assert all(b > a for a, b in itertools.pairwise(got)) or pieces(got) > 1
        self.free = free - set(got)
        self.taken += got

    @rule(n=st.integers(0, 80), pick=st.randoms(), together=st.booleans())
    def give(self, n: int, pick: random.Random, together: bool) -> None:
        pick.shuffle(self.taken)
        some, self.taken = self.taken[:n], self.taken[n:]
        if together:
            self.slots.give_all(some)
        else:
            for slot in some:
                self.slots.give_all([slot])
        self.free |= set(some)

    @rule()
    def look(self) -> None:
        assert self.slots.runs() == runs_of(self.free)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "slots"):
            assert len(self.slots) == len(self.free)
            assert sorted(self.slots) == sorted(self.free)
            assert self.slots.check() == []


TestSlotsMachine = SlotsMachine.TestCase


def test_the_shortest_run_that_is_long_enough() -> None:
    slots = FreeSlots(1000)
    slots.take(1000)
    for start, length in [(0, 3), (10, 8), (30, 5), (100, 300), (500, 70), (600, 90)]:
        slots.give_all(range(start, start + length))
    assert slots.take(4) == [30, 31, 32, 33]
    assert slots.take(8) == list(range(10, 18))
    assert slots.take(80) == list(range(600, 680))
    assert slots.take(1) == [34]
    assert slots.take(2) == [0, 1]


def test_all_that_there_is_comes_in_order_but_for_what_goes_on_behind_a_slot() -> None:
    slots = FreeSlots(10)
    for after, expected in [(None, [0, 1, 5, 6]), (4, [5, 6, 0, 1])]:
        slots.take(10)
        slots.give_all([6, 0, 5, 1])
        assert slots.runs() == [(0, 2), (5, 2)]
        assert slots.take(4, after) == expected
        assert len(slots) == 0
        assert slots.check() == []


@pytest.mark.parametrize("damage", ["_count", "_mask"])
def test_check_sees_what_is_wrong(damage: str) -> None:
    slots = FreeSlots(10)
    setattr(slots, damage, getattr(slots, damage) + 1)
    assert slots.check()


def test_check_sees_runs_that_touch() -> None:
    slots = FreeSlots(10)
    slots.take(10)
    for start in (0, 5):
        slots._runs[start] = 5
        slots._ends[start + 5] = start
        slots._file(start, 5)
    slots._count = 10
    assert slots.check() == ["free runs touch each other"]


def test_a_run_that_is_lost_ends_a_call_with_fewer_slots_and_not_never() -> None:
    slots = FreeSlots(10)
    slots.take(2)
    slots._bins[8].clear()  # as when what files a run breaks off
    slots._mask = 0
    slots.give_all([0])
    assert slots.take(4) == [0]
    assert slots.check()


class Counted(FreeSlots):
    """Counts the runs that are filed."""

    filed = 0

    def _add(self, *run: int) -> None:
        type(self).filed += 1
        super()._add(*run)


def test_a_call_is_bounded_when_many_slots_come_back_apart() -> None:
    """Every other slot: no two can be joined, so there would be 65,536 runs."""
    slots = Counted(1 << 17)
    slots.take(1 << 17)
    slots.give_all(range(0, 1 << 17, 2))
    filed = []
    for _ in range(200):
        Counted.filed = 0
        assert len(slots.take(64)) == 64
        filed.append(Counted.filed)
    assert 0 < max(filed) <= slots_module.JOINED


def test_taking_from_many_runs_does_not_walk_over_those_that_are_gone() -> None:
    """65,536 single slots, one by one: a walk over gaps would take hours."""
    slots = FreeSlots(1 << 17)
    slots.take(1 << 17)
    slots.give_all(range(0, 1 << 17, 2))
    assert sorted(slots.take(1)[0] for _ in range(1 << 16)) == list(range(0, 1 << 17, 2))
    assert slots.take(1) == []
