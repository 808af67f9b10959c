"""KV events: whatever happens to tiers, a view that hears of it has what they have, or knows that it lacks some."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from examples.shared_pool.view import CacheView
from gdscache import CacheEngine
from gdscache.errors import InvalidValueError
from gdscache.events.base import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEventHub, Place
from gdscache.pages.keys import Page
from tests.support.helpers import WAIT, Host, OpenEngine, OpenHost, drop_from, prompt, quiet, raising, run, until

ON: dict[str, Any] = {}
CPU, SSD = Place("CPU", "LOCAL", "cpu"), Place("STORAGE", "LOCAL", "ssd")


class Heard:
    """A view for each tier, and the batches that made them."""

    def __init__(self, engine: CacheEngine) -> None:
        self.engine = engine
        self.view = CacheView()
        self.batches: list[KVEventBatch] = []
        engine.on_events(self._hear)

    def _hear(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)
        assert self.view.apply(batch)

    def agrees(self) -> bool:
        manager = self.engine.manager
        with manager.lock:
            there = {(entry.key, name) for name, tier in manager.tiers.items() for entry in tier.index}
        return {(key, name) for key, names in self.view._pages.items() for name in names} == there

    def settled(self) -> None:
        quiet(self.engine)
        until(self.agrees, "the view has what the tiers have")


@pytest.fixture
def host(open_host: OpenHost) -> Host:
    return open_host(cpu=8, ssd=16, events=ON)


def test_a_stored_prompt_is_told_tier_by_tier(host: Host) -> None:
    heard = Heard(host.engine)
    tokens = prompt(1, 4)
    host.store(tokens)
    heard.settled()
    pages = host.engine.pages(tokens)
    keys = [page.key for page in pages]
    events = [event for batch in heard.batches for event in batch.events]
    for medium, name in (("CPU", "cpu"), ("STORAGE", "ssd")):
        mine = [event for event in events if isinstance(event, BlockStored) and event.ownership == name]
        assert {(event.medium, event.locality) for event in mine} == {(medium, "LOCAL")}
        assert [key for event in mine for key in event.block_hashes] == keys
        assert mine[0].parent_block_hash is None
        assert {event.block_size for event in mine} == {4}
    assert [batch.seq for batch in heard.batches] == list(range(len(heard.batches)))
    longer = host.engine.pages([*tokens, *prompt(2, 1)])
    host.store([*tokens, *prompt(2, 1)], start=16)
    heard.settled()
    last = heard.batches[-1].events[-1]
    assert isinstance(last, BlockStored)
    assert last.parent_block_hash == keys[-1]
    assert heard.view.prefix([page.key for page in longer]) == 5
    drop_from(host.engine, "cpu")
    heard.settled()
    assert heard.view.prefix(keys) == 4
    assert heard.view.prefix(keys, ["cpu"]) == 0
    host.engine.clear()
    heard.settled()
    assert heard.view.prefix(keys) == 0
    assert [e for e in heard.batches[-1].events if isinstance(e, AllBlocksCleared)] == [AllBlocksCleared()]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_view_has_what_the_tiers_have(open_host: OpenHost, seed: int) -> None:
    rng = random.Random(seed)
    host = open_host(cpu=6, ssd=10, events=ON, store={"write_policy": rng.choice(["write_through", "write_back"])})
    heard = Heard(host.engine)
    for _ in range(80):
        tokens = prompt(rng.randrange(6), rng.randint(1, 4))
        match rng.randrange(8):
            case 0 | 1 | 2:
                host.store(tokens)
            case 3 | 4:
                host.load(tokens)
            case 5:
                host.engine.prefetch(tokens).result(WAIT)
            case 6:
                drop_from(host.engine, rng.choice(["cpu", "ssd"]))
            case 7:
                rng.choice([host.engine.clear, lambda: host.engine.invalidate(host.engine.namespace())])()
    heard.settled()


def test_an_engine_with_a_pool_of_its_own_tells_of_it(open_engine: OpenEngine) -> None:
    engine = open_engine(events=ON, gpu=6)
    heard = Heard(engine)
    for seed in range(4):
        run(engine, prompt(seed, 2, extra=1))
    heard.settled()
    assert any("gpu" in tiers for tiers in heard.view._pages.values())


def test_what_a_restart_brings_back_is_told(open_host: OpenHost, tmp_path: Any) -> None:
    host = open_host(cpu=8, ssd=16, events=ON, path=tmp_path)
    host.keep(prompt(1, 4))
    keys = [page.key for page in host.engine.pages(prompt(1, 4))]
    host.engine.close()
    again = open_host(cpu=8, ssd=16, path=tmp_path)
    hub, view = KVEventHub(4, queue=3), CacheView()  # there may be more pages than may wait later
    hub.add(view.apply)
    with again.engine.manager.lock:
        hub.watch(again.engine.manager.tiers.values())
    until(lambda: view.prefix(keys, ["ssd"]) == 4, "what it had is told")
    hub.close()
    assert hub.describe()["dropped_pages"] == 0


def test_without_the_setting_there_are_none(open_host: OpenHost) -> None:
    with pytest.raises(InvalidValueError, match="there are no events"):
        open_host().engine.on_events(print)


# -- the hub and the view --------------------------------------------------------------------------------------------


def page(n: int) -> Page:
    return Page(n.to_bytes(32, "big"), (n - 1).to_bytes(32, "big") if n else bytes(32), bytes(32))


def held_up(*, alone: bool = True) -> tuple[KVEventHub, list[KVEventBatch], threading.Event]:
    """A hub with room for four pages, what its callback has heard, and the event that the callback waits for."""
    hub, heard, gate = KVEventHub(4, queue=4, alone=alone), list[KVEventBatch](), threading.Event()

    def slow(batch: KVEventBatch) -> None:
        heard.append(batch)
        gate.wait(WAIT)

    hub.add(slow)
    return hub, heard, gate


def test_what_finds_no_room_leaves_a_number_out() -> None:
    hub, heard, gate = held_up()
    view = CacheView()
    hub.note(CPU, "stored", [page(0)])
    until(lambda: len(heard) == 1, "the first is told")
    hub.note(CPU, "stored", [page(1), page(2)])
    hub.note(CPU, "stored", [page(3), page(4), page(5)])  # two more than there is room for
    gate.set()
    until(lambda: len(heard) == 3, "the second is told, and that one is missing")
    hub.note(CPU, "stored", [page(6), page(7)])
    hub.close()
    assert [batch.seq for batch in heard] == [0, 1, 3, 4]
    assert hub.describe()["dropped_pages"] == 3
    assert [view.apply(batch) for batch in heard] == [True, True, False, False]
    assert view.lacking == 2
    view.reset(3)
    assert [view.apply(batch) for batch in heard[2:]] == [True, True]
    assert view.prefix([page(6).key, page(7).key]) == 2


def test_what_is_lost_is_missing_behind_what_came_before() -> None:
    """A page whose removal is lost is not in a view that began anew at the missing number."""
    hub, heard, gate = held_up()
    view = CacheView()
    hub.note(CPU, "stored", [page(9)])
    until(lambda: len(heard) == 1, "the first is told")
    hub.note(CPU, "stored", [page(0), page(1), page(2)])
    hub.note(CPU, "removed", [page(0).key, page(1).key])  # finds no room
    hub.note(CPU, "stored", [page(5)])  # would find some
    gate.set()
    hub.close()
    assert hub.describe()["dropped_pages"] == 3
    for batch in heard:
        if not view.apply(batch):
            view.reset(batch.seq)
            assert view.apply(batch)
    assert [n for n in range(10) if view.prefix([page(n).key])] == []


def test_a_callback_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    hub, heard = KVEventHub(4, queue=100), list[KVEventBatch]()
    hub.add(raising(ValueError("no")))
    remove = hub.add(heard.append)
    hub.note(CPU, "stored", [page(0)])
    until(lambda: len(heard) == 1, "the other hears")
    remove()
    for n in range(1, 4):  # each a batch
        hub.note(CPU, "stored", [page(n)])
        until(lambda n=n: hub.describe()["batches"] == n + 1, "it is told")
    hub.close()
    assert len(heard) == 1
    first, others = (record.getMessage() for record in caplog.records)
    assert "ValueError: no" in first
    assert "(2 more of this cause within 1 s)" in others


def test_a_callback_that_was_added_twice_is_removed_once() -> None:
    hub, heard = KVEventHub(4, queue=100), list[KVEventBatch]()
    hear = heard.append
    remove, _ = hub.add(hear), hub.add(hear)
    remove()
    hub.note(CPU, "stored", [page(0)])
    hub.close()
    assert len(heard) == 1


def test_pages_that_do_not_follow_each_other_are_events_of_their_own() -> None:
    hub, heard = KVEventHub(4, queue=100), list[KVEventBatch]()
    hub.add(heard.append)
    hub.note(CPU, "stored", [page(0), page(1), page(5), page(6)])
    hub.note(SSD, "removed", [page(1).key])
    hub.note(CPU, "cleared", ())
    hub.note(SSD, "cleared", ())
    hub.close()
    events = [event for batch in heard for event in batch.events]
    first, second, removed, cleared = events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.block_hashes) == (None, [page(0).key, page(1).key])
    assert (second.parent_block_hash, second.block_hashes) == (page(4).key, [page(5).key, page(6).key])
    assert removed == BlockRemoved([page(1).key], *SSD)
    assert cleared == AllBlocksCleared()


def test_pages_of_a_clear_that_is_lost_count_as_dropped() -> None:
    hub, heard, gate = held_up(alone=False)
    hub.note(CPU, "stored", [page(9)])
    until(lambda: len(heard) == 1, "the first is told")
    hub.note(CPU, "stored", [page(n) for n in range(5)])  # finds no room
    hub.note(CPU, "cleared", {page(n).key: n for n in range(6)})
    gate.set()
    hub.close()
    assert hub.describe()["dropped_pages"] == 11


def test_a_clear_of_one_of_several_pools_names_its_pages_however_many() -> None:
    hub, heard = KVEventHub(4, queue=3, alone=False), list[KVEventBatch]()
    hub.add(heard.append)
    hub.note(CPU, "stored", [page(0), page(1)])
    hub.note(CPU, "cleared", {page(n).key: n for n in range(5)})
    hub.note(SSD, "cleared", {})
    hub.note(CPU, "stored", [page(0)])
    hub.close()
    removed, again = [event for batch in heard for event in batch.events][1:]
    assert removed == BlockRemoved([page(n).key for n in range(5)], *CPU)
    assert isinstance(again, BlockStored)
    assert [batch.seq for batch in heard] == [*range(len(heard))]
    assert hub.describe()["dropped_pages"] == 0
