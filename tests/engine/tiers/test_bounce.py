"""The bounce reserve: slots of one page each, cut for parts of several."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.extents.device import DeviceExtents
from gdscache.extents.host import HostExtents
from gdscache.index.free_slots import SlotShare
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.layout import EXTENT_ALIGNMENT, PageLayout, Plane
from gdscache.tiers.cpu import Bounce
from gdscache.tiers.quarantine import Quarantine
from tests.support.window import Window

SLOTS = 12


def uneven() -> PageLayout:
    """Layers of 2,560 bytes, so that no group but the last ends with a sector."""
    return PageLayout(tuple((Plane("kv", (640,), "uint8"),) for _ in range(9)), 4)


@pytest.fixture
def bounce(device: str) -> Iterator[Bounce]:
    layout = uneven()
    capacity = SLOTS * layout.extent_bytes
    extents = (
        HostExtents(layout, capacity, "off")
        if device == "cpu"
        else DeviceExtents(layout, capacity, torch.device("cuda", 0))
    )
    yield Bounce(extents, Quarantine(threading.RLock()))
    extents.close()


def every_span(layout: PageLayout) -> list[tuple[range, tuple[int, int]]]:
    groups = [range(first, stop) for first in range(layout.n_layers) for stop in range(first + 1, layout.n_layers + 1)]
    return [(group, layout.read_span(group, alone=True)) for group in groups]


def test_parts_of_pages_lie_side_by_side_in_the_slots_they_are_cut_from(bounce: Bounce) -> None:
    """For every group of layers and every run of slots: what a transport writes is what copies read, and nothing
    lies elsewhere than in the slots."""
    layout = bounce.extents.layout
    extent, memory = layout.extent_bytes, bounce.extents.rows.view(-1)
    half = SLOTS // 2
    assert extent % EXTENT_ALIGNMENT == 0
    rng = np.random.default_rng(1)
    for group, (start, stop) in every_span(layout):
        for run in (range(half, half + 1), range(half + 1, half + 4), range(half, SLOTS)):
            window = Window(bounce.extents, run, (start, stop))
            assert window.slots == len(run) * extent // (stop - start) >= len(run)
            memory.zero_()
            pages = rng.integers(1, 256, (window.slots, extent), dtype=np.uint8)
            places = window.where(np.arange(window.slots), start)
            assert np.array_equal(places, run.start * extent + np.arange(window.slots) * (stop - start))
            for page, place in zip(pages, places.tolist(), strict=True):
                memory[place : place + stop - start] = torch.from_numpy(page[start:stop]).to(memory.device)
            used = torch.nonzero(memory.view(SLOTS, extent).any(dim=1)).flatten().tolist()
            assert used == list(run)
            first, end = layout.layer_bounds[group.start][0], layout.layer_bounds[group.stop - 1][1]
            assert np.array_equal(window.rows[:, first:end].cpu().numpy(), pages[:, first:end])
            bounds = layout.layer_bounds[group.start : group.stop]
            for slot in {0, window.slots // 2, window.slots - 1}:
                assert np.array_equal(window.digest(slot, group), layer_checksums(pages[slot].data, bounds))


def test_loads_and_stores_have_a_half_each(bounce: Bounce) -> None:
    assert bounce.stores.try_take(SLOTS) == list(range(SLOTS // 2))
    assert bounce.loads == range(SLOTS // 2, SLOTS)
    assert bounce.stores.try_take(1) == []


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
