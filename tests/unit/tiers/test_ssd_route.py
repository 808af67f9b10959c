"""Which slots a trial of the routes reads."""

from __future__ import annotations

from gdscache.index.index import PageIndex
from gdscache.tiers import ssd_route
from tests.support.index_machine import chain, put


def test_free_slots_are_tried_where_there_are_enough_and_may_be_written() -> None:
    index = PageIndex(6)
    put(index, chain(1, 3))
    slots, free = ssd_route._slots(index, 2)
    assert (slots.tolist(), free) == ([3, 4], True)
    slots, free = ssd_route._slots(index, 4)
    assert (slots.tolist(), free) == ([0, 1, 2, 3], False)
