"""The linker's parts on several ranks, which are in this process: what is promised is loaded on each, or on none."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdscache.errors import RankError
from gdscache.integrations.sglang import linker_ranks as parts
from gdscache.integrations.sglang.linker_ranks import LinkerRanks, shard_of
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.sglang.ranks import place_in, together
from gdscache.ranks.rank import _Awaited as Mark
from gdscache.runtime.threads import Flag
from tests.support.helpers import drop_from, raising, until
from tests.support.sglang_linker_ranks import BLOCKS, LAYERS, Ranks, keys_of

Open = Callable[..., Ranks]
KEYS = keys_of(range(6))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    found: list[Ranks] = []

    def open_(shards: list[int] | None = None, **config: Any) -> Ranks:
        found.append(Ranks(tmp_path / "cache", shards or [0, 1], **config))
        return found[-1]

    yield open_
    for ranks in found:
        ranks.close()


def computed(ranks: Ranks, keys: list[str]) -> None:
    """These pages are stored, and their blocks free."""
    blocks = ranks.take(len(keys))
    for one, its in zip(ranks.of, blocks, strict=True):
        one.compute(keys, its)
    ranks.offload(keys, blocks)
    ranks.settle()


def served(ranks: Ranks, rid: str, keys: list[str]) -> int:
    """A request whose cached pages are loaded, checked on every rank; how many."""
    found = ranks.lookup(rid, keys)
    if not found:
        return 0
    blocks = ranks.load(rid, keys[:found])
    assert ranks.run(ranks.start()) == [True] * len(ranks.of)
    for one, its in zip(ranks.of, blocks, strict=True):
        one.check(keys[:found], its)
    ranks.give(blocks)
    return found


@pytest.mark.parametrize("shards", [[0, 1], [0, 0], [0, 0, 1, 1]])
def test_pages_come_back_on_every_rank_into_its_own_blocks(opened: Open, shards: list[int]) -> None:
    ranks = opened(shards)
    assert ranks.of[0].free != ranks.of[1].free
    assert served(ranks, "a", KEYS) == 0
    computed(ranks, KEYS)
    assert served(ranks, "b", KEYS) == len(KEYS)
    ranks.engine.drain(30)
    drop_from(ranks.engine, "cpu")
    assert served(ranks, "c", KEYS) == len(KEYS), "a lookup waits for the SSD"


def test_a_promise_that_the_leader_has_lost_fails_on_every_rank_and_is_no_other_length_on_any(opened: Open) -> None:
    ranks = opened()
    computed(ranks, KEYS)
    assert ranks.lookup("a", KEYS) == len(KEYS)
    ranks.table.reset()
    blocks = ranks.load("a", KEYS)
    assert ranks.run(ranks.start()) == [False, False]
    assert [one.counts["failed_loads"] for one in ranks.of] == [1, 1]
    ranks.give(blocks)
    assert served(ranks, "b", KEYS) == len(KEYS)


@pytest.mark.parametrize("left", [0, 2, 5])
def test_pages_that_are_dropped_while_their_order_is_made_count_as_missing_on_every_rank(
    opened: Open, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The order has fewer pages than were promised, and the other request's pages would lie in blocks of the first."""
    ranks, other = opened(), keys_of([9])
    computed(ranks, KEYS)
    computed(ranks, other)
    assert (ranks.lookup("a", KEYS), ranks.lookup("b", other)) == (len(KEYS), 1)
    blocks = [*map(list.__add__, ranks.load("a", KEYS), ranks.load("b", other))]
    leading = ranks.of[0].leading
    assert leading is not None
    plan = leading.plan

    def planned(hits: list[Any]) -> Any:
        with ranks.engine.manager.lock:
            for tier in ranks.engine.manager.tiers.values():
                for page in hits[0].pages[left:]:
                    if (entry := tier.index.get(page.key)) is not None:
                        tier.index.drop(entry)
        return plan(hits)

    monkeypatch.setattr(leading, "plan", planned)
    assert ranks.run(ranks.start()) == [False, False]
    monkeypatch.undo()
    ranks.give(blocks)
    assert served(ranks, "c", other) == 1


def test_a_process_that_stops_between_lookup_load_and_order_breaks_no_promise(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which process does makes no difference: SGLang's reductions have the others wait, and time passes for the
    leader's pins."""
    ranks, passed = opened(), 0.0
    clock = ranks.engine.manager.pins.clock
    monkeypatch.setattr(ranks.engine.manager.pins, "clock", lambda: clock() + passed)
    computed(ranks, KEYS)
    computed(ranks, keys_of([9]))
    for stops in ((290.0, 0.0), (0.0, 290.0), (290.0, 290.0)):  # SGLang's watchdog ends a scheduler after 300 s
        assert ranks.lookup("a", KEYS) == len(KEYS)
        passed += stops[0]
        assert ranks.lookup("b", keys_of([9])) == 1, "another lookup ends the pins whose time is up"
        blocks = ranks.load("a", KEYS)
        passed += stops[1]
        ranks.lookup("b", keys_of([9]))
        assert ranks.run(ranks.start()) == [True, True]
        ranks.give(blocks)


def test_a_rank_that_stops_behind_a_promise_begins_the_load_later(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's pass has its pages, and the other rank's comes minutes later: the leader cancels nothing."""
    ranks = opened()
    computed(ranks, KEYS)
    assert ranks.lookup("a", KEYS) == len(KEYS)
    blocks = ranks.load("a", KEYS)
    number, waited = ranks.start(), list[float]()
    whole = Flag.wait

    def stopped(flag: Flag, seconds: float | None = None) -> bool:
        """The leader's wait for the ranks passes 300 s in no time."""
        if threading.current_thread().name.startswith("gdscache-") and seconds == 1.0 and sum(waited) < 300:
            waited.append(1.0)
            return False
        return whole(flag, seconds)

    monkeypatch.setattr(Flag, "wait", stopped)
    first, last = ranks.of
    first.layers.set_consumer(number)
    for layer in range(LAYERS):
        first.layers.wait_until(layer)
    until(lambda: sum(waited) >= 300, "time passes")
    assert first.layers.finish(number)
    last.layers.set_consumer(number)
    for layer in range(LAYERS):
        last.layers.wait_until(layer)
    assert last.layers.finish(number)
    for one, its in zip(ranks.of, blocks, strict=True):
        one.check(KEYS, its)
    ranks.give(blocks)


def test_an_order_that_waits_behind_a_stopped_process_is_heard(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process goes on after minutes: the time of its wait is over, and its thread has not read the order yet."""
    ranks, asked = opened(), list[float]()
    service = ranks.of[1].rank._service
    assert service is not None
    whole = Flag.wait

    def stopped(flag: Flag, seconds: float | None = None) -> bool:
        if flag is not service._told[7].there:
            return whole(flag, seconds)
        asked.append(seconds or 0.0)
        if len(asked) == 1:  # it was stopped for as long as it would have waited
            ranks.engine.tell_ranks(7, b"order")
            return False
        return whole(flag, 30.0)

    monkeypatch.setattr(Flag, "wait", stopped)
    assert ranks.of[1].rank.told(7, parts.ORDER_S) == b"order"
    assert asked[0] <= 1.0


def test_a_load_that_no_pass_begins_is_let_go_with_the_next_one(opened: Open) -> None:
    ranks = opened()
    computed(ranks, KEYS)
    ranks.lookup("a", KEYS)
    blocks = ranks.load("a", KEYS)
    number = ranks.start()
    assert [one.layers.finish(number) for one in ranks.of] == [False, False]
    ranks.give(blocks)
    assert served(ranks, "b", KEYS) == len(KEYS)
    until(lambda: ranks.engine.stats()["leases"] == [], "nothing is held")


def test_loads_that_are_cancelled_or_flushed_hold_nothing(opened: Open) -> None:
    ranks = opened()
    computed(ranks, KEYS)
    ranks.lookup("a", KEYS)
    blocks = ranks.load("a", KEYS)
    assert [one.table.cancel("a") for one in ranks.of] == [True, True]
    assert [one.table.cancel("a") for one in ranks.of] == [False, False]
    assert ranks.start() == -1
    ranks.give(blocks)
    for begin in (False, True):
        ranks.lookup("b", KEYS)
        blocks = ranks.load("b", KEYS)
        if begin:
            ranks.start()
        ranks.reset()
        ranks.give(blocks)
        until(lambda: ranks.engine.stats()["leases"] == [], "nothing is held")
    assert [len(one.table) for one in ranks.of] == [0, 0]
    assert served(ranks, "c", KEYS) == len(KEYS)


def test_a_rank_waits_no_longer_than_that_for_an_order(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ORDER_S", 0.1)
    ranks = opened()
    computed(ranks, KEYS)
    ranks.lookup("a", KEYS)
    blocks = ranks.load("a", KEYS)
    monkeypatch.setattr(ranks.engine, "tell_ranks", lambda number, what: None)
    begun = time.monotonic()
    assert ranks.run(ranks.start()) == [False, False]
    assert time.monotonic() - begun < 5
    monkeypatch.undo()
    ranks.give(blocks)
    ranks.reset()
    assert served(ranks, "b", KEYS) == len(KEYS), "a late order is not taken for the next one"


def test_an_order_that_comes_late_is_of_its_own_batch(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ORDER_S", 0.1)
    ranks, other = opened(), keys_of([7, 8, 9])
    computed(ranks, KEYS)
    computed(ranks, other)
    held: list[tuple[int, bytes]] = []
    monkeypatch.setattr(ranks.engine, "tell_ranks", lambda *told: held.append(told))
    ranks.lookup("a", KEYS)
    blocks = ranks.load("a", KEYS)
    assert ranks.run(ranks.start()) == [False, False]
    ranks.give(blocks)
    monkeypatch.undo()
    for told in held:
        ranks.engine.tell_ranks(*told)
    assert served(ranks, "b", other) == len(other)


def test_a_rank_that_has_left_costs_hits_alone(opened: Open) -> None:
    ranks = opened()
    computed(ranks, KEYS)
    ranks.of[1].rank.close()
    until(lambda: ranks.engine.stats()["ranks"][1]["state"] == "lost", "it is heard of")
    assert ranks.lookup("a", KEYS) == 0
    computed(ranks, keys_of([1]))
    ranks.reset()


def test_a_load_that_one_pool_cannot_begin_is_waited_for_in_the_others() -> None:
    """SGLang uses the blocks again as soon as the batch has failed."""
    planes = PoolPlanes([], {}, [], [{"name": "kv", "layers": [0]}, {"name": "swa", "layers": [1]}], {0: [0], 1: [1]})
    waited = list[str]()

    def begun(order: bytes, blocks: list[int]) -> Any:
        return SimpleNamespace(release_event=SimpleNamespace(synchronize=lambda: waited.append("kv")))

    fails = raising(RankError("no leader has connected to this rank", "open the engine first"))
    several: Any = [SimpleNamespace(load=begun), SimpleNamespace(load=fails)]
    queued: Any = SimpleNamespace(pages=1, blocks=lambda: {"kv": [1], "swa": [2]})
    with pytest.raises(RankError):
        LinkerRanks(planes, several).load([b"a", b"b"], [queued])
    assert waited == ["kv"]


def test_a_rank_ends_while_its_own_threads_come_to_stores(opened: Open) -> None:
    rank = opened().of[1].rank
    service = rank._service
    assert service is not None

    class Coming(Flag):
        def set(self) -> None:
            service.mark(-8, None)
            super().set()

    service._marks[-7] = Mark(there=Coming())
    rank.close()
    assert not any(thread.is_alive() for thread in service._workers._threads)
    assert service._mark(-9).there.is_set(), "a store that comes later waits for nobody"


def test_a_store_is_over_when_the_last_rank_has_come_to_it(opened: Open) -> None:
    ranks = opened()
    blocks = ranks.take(len(KEYS))
    first, last = ranks.of
    first.compute(KEYS, blocks[0])
    first.offloads.start(ranks.links.named(KEYS), lambda: {"kv": blocks[0]}, "", None)
    time.sleep(0.1)
    assert first.offloads.completed() == 0
    last.compute(KEYS, blocks[1])
    last.offloads.start(KEYS, lambda: {"kv": blocks[1]}, "", None)
    ranks.reading.append(blocks)
    ranks.settle()
    assert served(ranks, "a", KEYS) == len(KEYS)


class Done:
    """Pages that were loaded."""

    loaded = 0


def traffic(ranks: Ranks, operations: int, seed: int) -> Done:
    """Against a plain model: what was offered may be found, nothing else, and each byte is its page's."""
    source, offered, done = random.Random(seed), set[str](), Done()
    for number in range(operations):
        tokens = [source.randrange(2) for _ in range(source.randrange(1, 10))]
        keys, rid, what = keys_of(tokens), f"r{number}", source.random()
        ranks.alone = source.random() < 0.7
        ranks.poll()
        if what < 0.03:
            ranks.reset()
        elif what < 0.12:
            ranks.lookup(rid, keys)  # never heard of again
        elif what < 0.2:
            if found := ranks.lookup(rid, keys):
                blocks = ranks.load(rid, keys[:found])
                assert all(one.table.cancel(rid) for one in ranks.of)
                ranks.give(blocks)
        elif what < 0.6:
            found = served(ranks, rid, keys)
            assert offered >= {*keys[:found]}
            done.loaded += found
        else:
            blocks = ranks.take(len(keys))
            for one, its in zip(ranks.of, blocks, strict=True):
                one.compute(keys, its)
            ranks.offload(keys, blocks)
            offered |= {*keys}
    ranks.settle()
    ranks.reset()
    assert [sorted(one.free) for one in ranks.of] == [[*range(BLOCKS)]] * len(ranks.of)
    assert [one.counts["failed_loads"] for one in ranks.of] == [0] * len(ranks.of)
    until(lambda: ranks.engine.stats()["leases"] == [], "nothing is held")
    assert ranks.engine.check().ok
    return done


@pytest.mark.parametrize("shards", [[0, 1], [0, 0]])
def test_random_operations(opened: Open, shards: list[int]) -> None:
    assert traffic(opened(shards, cpu=24, ssd=64), 250, 1).loaded > 100


@pytest.mark.timeout(1800)
@pytest.mark.suite
@pytest.mark.parametrize("shards", [[0, 1], [0, 0], [0, 0, 1, 1]])
def test_ten_thousand_random_operations_in_all(opened: Open, shards: list[int]) -> None:
    assert traffic(opened(shards, cpu=24, ssd=64), 3_400, 2).loaded > 1_700


def test_shards() -> None:
    heads, latents = SimpleNamespace(k_buffer=[], head_num=1), SimpleNamespace(kv_buffer=[])
    assert [shard_of(heads, 8, rank, 8) for rank in range(8)] == [*range(8)]
    assert [shard_of(heads, 2, rank, 8) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [shard_of(heads, 1, rank, 2) for rank in range(2)] == [0, 0]
    assert [shard_of(heads, 3, rank, 4) for rank in range(4)] == [0, 1, 2, 3], "nobody knows how these are spread"
    assert [shard_of(SimpleNamespace(k_buffer=[], head_num=4), 8, rank, 2) for rank in range(2)] == [0, 1]
    assert [shard_of(latents, 8, rank, 8) for rank in range(8)] == [0] * 8


def test_who_is_alone_enters_no_collective() -> None:
    assert place_in(None) == (0, 1)
    assert together(None, lambda: 3) == [3]
    with pytest.raises(RankError, match="mine"):
        together(None, lambda: (_ for _ in ()).throw(RankError("mine")))
