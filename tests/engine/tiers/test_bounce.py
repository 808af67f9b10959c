"""The bounce reserve: slots of one page each."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.extents import HostExtents
from gdscache.index.free_slots import SlotShare
from gdscache.tiers.cpu import Bounce
from gdscache.tiers.quarantine import Quarantine
from tests.support.helpers import MHA, layout_of

SLOTS = 12


def test_loads_and_stores_have_a_half_each() -> None:
    layout = layout_of(MHA)
    bounce = Bounce(HostExtents(layout, SLOTS * layout.extent_bytes, "off"), Quarantine(threading.RLock()))
    assert bounce.stores.try_take(SLOTS) == list(range(SLOTS // 2))
    assert bounce.loads == range(SLOTS // 2, SLOTS)
    assert bounce.stores.try_take(1) == []
    bounce.close()


# -- slots ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_a_pool_gives_each_slot_to_one_at_a_time(slots: int, acts: list[tuple[bool, int]]) -> None:
    pool = SlotShare(slots)
    held: list[list[int]] = []
    for taking, number in acts:
        if taking:
            some = pool.try_take(number)
            assert some == sorted(some)
            assert len(some) == min(number, slots - sum(map(len, held)))
            held.append(some)
        elif held:
            pool.give(held.pop(number % len(held)))
        out = [slot for some in held for slot in some]
        assert len(set(out)) == len(out)
        assert set(pool._free) == set(range(slots)) - set(out)
        assert pool.free_slots == slots - len(out)


def test_what_came_back_last_is_taken_next() -> None:
    """Memory that is still in the processor's cache goes before memory that is not."""
    pool = SlotShare(64)
    rounds = [pool.try_take(8) for _ in range(4)]
    for _ in range(20):
        pool.give(rounds.pop(0))
        rounds.append(pool.try_take(8))
    assert {slot for some in rounds for slot in some} == set(range(32))


def test_whoever_waits_for_a_slot_gets_the_first_that_comes_back() -> None:
    pool = SlotShare(2)
    assert pool.try_take(2) == [0, 1]
    assert not pool.wait(0.001)
    found: list[int] = []
    thread = threading.Thread(target=lambda: pool.wait(10) and found.extend(pool.try_take(2)))
    thread.start()
    pool.give([1])
    thread.join(10)
    assert found == [1]
