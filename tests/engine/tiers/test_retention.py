"""Priorities and times to live: indexes and managers against models with a virtual clock, then the engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import operator
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gdscache import CacheEngine
from gdscache.commands.inspect.reading import inspect
from gdscache.errors import InvalidValueError, IOFailedError
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, LONGEST_TTL, PRIORITIES, Retention
from gdscache.index.table import Entry, PageState
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.planner import LoadPlanner
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES
from gdscache.policies.base import EvictionPolicy
from gdscache.store.handle import StoreHandle
from gdscache.tiers import expiry as keeping
from gdscache.tiers.expiry import Expiry
from tests.support.bare_manager import Clock, bare_manager, set_clock
from tests.support.helpers import WAIT, OpenEngine, OpenHost, drop_from, fill, prompt, quiet, run, settle, tokens_of
from tests.support.index_machine import IndexMachine, chain, name, restore
from tests.support.pairs import pairs
from tests.support.policy_models import MODELS, Model

T = TypeVar("T")

priorities = st.sampled_from(PRIORITIES)
ends = st.one_of(st.none(), st.integers(0, 12).map(float))
retentions = st.builds(Retention, priorities, ends)


# -- values ----------------------------------------------------------------------------------------------------------


def test_what_a_request_may_ask_for() -> None:
    clock = Clock(100.0)
    assert Retention.of() is DEFAULT
    assert Retention.of(2, wall_clock=clock) == (2, None)
    assert Retention.of(-1, 0.5, clock) == (-1, 100.5)
    assert Retention.of(ttl=LONGEST_TTL, wall_clock=clock).expires == 100.0 + LONGEST_TTL
    assert PRIORITIES == (-1, 0, 1, 2)


@pytest.mark.parametrize("priority", [-2, 3, 1.0, True, None, "high"])
def test_a_priority_that_is_none(priority: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"priority is .*\n.*-1 .*2"):
        Retention.of(priority)


@pytest.mark.parametrize("ttl", [0, -1.0, math.nan, math.inf, True, "60", LONGEST_TTL + 1])
def test_a_ttl_that_is_none(ttl: Any) -> None:
    with pytest.raises(InvalidValueError, match="ttl is"):
        Retention.of(0, ttl)


@given(one=retentions, two=retentions, three=retentions)
def test_the_longer_wish_wins_in_any_order(one: Retention, two: Retention, three: Retention) -> None:
    assert one.joined(one) == one
    assert one.joined(two) == two.joined(one)
    assert one.joined(two).joined(three) == one.joined(two.joined(three))
    joined = one.joined(two)
    assert joined.priority == max(one.priority, two.priority)
    assert (joined.expires is None) == (one.expires is None or two.expires is None)
    if joined.expires is not None:
        assert joined.expires in (one.expires, two.expires)
        assert joined.expires >= max(one.expires or 0, two.expires or 0)


# -- one index -------------------------------------------------------------------------------------------------------


class ByPriority:
    """A model of each priority's order."""

    def __init__(self, policy: type[EvictionPolicy], retention: dict[bytes, Retention]) -> None:
        self.retention = retention
        self.models: dict[int, Model] = {priority: MODELS[policy]() for priority in PRIORITIES}

    def of(self, key: bytes) -> Model:
        return self.models[self.retention[key].priority]

    def insert(self, key: bytes) -> None:
        self.of(key).insert(key)

    def touch(self, key: bytes) -> None:
        self.of(key).touch(key)

    def remove(self, key: bytes) -> None:
        self.of(key).remove(key)
        del self.retention[key]

    def defer(self, key: bytes) -> None:
        self.of(key).defer(key)

    def hasten(self, key: bytes) -> None:
        self.of(key).hasten(key)

    def is_deferred(self, key: bytes) -> bool:
        return self.of(key).is_deferred(key)

    def order(self) -> list[bytes]:
        return [key for priority in PRIORITIES for key in self.models[priority].order()]


class RetentionMachine(IndexMachine):
    """The machine of an index, whose pages have priorities and an end."""

    def __init__(self) -> None:
        self.retention: dict[bytes, Retention] = {}
        self.asked = DEFAULT
        self.now = 0.0
        super().__init__()

    def new_model(self) -> Model:
        self.retention.clear()
        return ByPriority(self.policy, self.retention)

    def put(self, page: Page, slot: int, state: PageState) -> None:
        self.index.insert(page, slot, state, self.asked)
        self.retention[page.key] = self.asked
        self.model.insert(page.key)

    @rule(priority=priorities, ttl=ends)
    def ask(self, priority: int, ttl: float | None) -> None:
        self.asked = Retention(priority, None if ttl is None else self.now + ttl)

    @rule(number=st.integers(0, 3), pages=st.integers(1, 3), priority=priorities, ttl=ends)
    def store(self, number: int, pages: int, priority: int, ttl: float | None) -> None:
        self.ask(priority, ttl)
        for page in chain(number, pages):
            if page.key not in self.known:
                self.insert(page, pending=False)

    @rule(page=IndexMachine.names)
    def retain_what_may_be_there(self, page: Page) -> None:
        if page.key in self.known:
            self.retain(page)
        else:
            assert self.index.retention(page.key) is None
            assert not self.index.retain(page.key, self.asked)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), priority=priorities, ttl=ends)
    def retain_one(self, data: st.DataObject, priority: int, ttl: float | None) -> None:
        self.ask(priority, ttl)
        self.retain(self.known[data.draw(st.sampled_from(sorted(self.known)))].page)

    def retain(self, page: Page) -> None:
        old = self.retention[page.key]
        assert self.index.retention(page.key) == old
        changed = self.index.retain(page.key, self.asked)
        new = Retention(
            max(old.priority, self.asked.priority),
            None if None in (old.expires, self.asked.expires) else max(old.expires, self.asked.expires),  # type: ignore[type-var]
        )
        assert changed == (new != old)
        if new.priority != old.priority:
            self.model.remove(page.key)
            self.retention[page.key] = new
            self.model.insert(page.key)
        self.retention[page.key] = new

    def due(self, now: float) -> dict[bytes, float]:
        return {key: r.expires for key, r in self.retention.items() if r.expires is not None and r.expires <= now}

    def gone_by(self, keys: Sequence[bytes], entries: dict[bytes, Entry], reported: list[bytes]) -> None:
        assert sorted(reported) == sorted(key for key in keys if not self.known[key].pending)
        for key in keys:
            self.gone += [entries[key]] if self.known[key].leases else []
            self.leave(self.known[key])
            assert self.index.find(key) is None

    @rule(seconds=st.integers(0, 5), most=st.integers(0, 4))
    def expire(self, seconds: int, most: int) -> None:
        self.now += seconds
        due, entries = self.due(self.now), dict(self.index._entries)
        reported = self.index.expire(self.now, most)
        keys = [key for key in due if self.index.find(key) is None]
        assert sorted(due[key] for key in keys) == sorted(due.values())[:most]
        self.gone_by(keys, entries, reported)

    @rule(seconds=st.integers(0, 5), number=st.integers(0, 3), pages=st.lists(IndexMachine.names, max_size=2))
    def expire_among(self, seconds: int, number: int, pages: list[Page]) -> None:
        self.now += seconds
        pages = chain(number, 3) + pages
        due, entries = self.due(self.now), dict(self.index._entries)
        reported = self.index.expire_among(pages, self.now)
        self.gone_by([key for key in due if key in {p.key for p in pages}], entries, reported)

    @invariant()
    def ends_agree(self) -> None:
        ends = [r.expires for r in self.retention.values() if r.expires is not None]
        expiries = self.index.orders.expiries
        assert (expiries.first, len(expiries._times) <= 2 * len(ends) + 17) == (min(ends, default=math.inf), True)
        assert len(self.index.orders.retained) == sum(r != DEFAULT for r in self.retention.values())
        assert {e.key: e.retention for e in self.index} == self.retention


@pytest.mark.parametrize("policy", MODELS)
def test_an_index_with_retentions_is_its_model(policy: type[EvictionPolicy]) -> None:
    machine = type("Machine", (RetentionMachine,), {"policy": policy})
    suppressed = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(machine, settings=settings(deadline=None, suppress_health_check=suppressed))


@given(data=st.data())
@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_index_has_its_priorities_and_ends(policy: str, data: st.DataObject) -> None:
    pages = [page for i in range(4) for page in chain(i, 2)]
    order = data.draw(st.permutations(range(8)))
    wished = data.draw(st.lists(retentions, min_size=8, max_size=8))
    restored, filled = PageIndex(8, POLICIES[policy]()), PageIndex(8, POLICIES[policy]())
    restore(restored, [pages[i] for i in order], order, [wished[i] for i in order])
    filled.take_free(8)
    for i in order:
        filled.insert(pages[i], i, PageState.VERIFIED, wished[i])
    assert restored.check() == filled.check() == []
    assert {(e.page, e.slot, e.retention) for e in restored} == {(e.page, e.slot, e.retention) for e in filled}
    now = data.draw(st.integers(0, 12)) + 0.5
    over = {pages[i].key for i in range(8) if (at := wished[i].expires) is not None and at <= now}
    for index in (restored, filled):
        taken = [index.expire(now, most) for most in (1, 1, 2, 8)]
        assert all(map(operator.le, map(len, taken), (1, 1, 2, 8)))
        assert sorted(itertools.chain.from_iterable(taken)) == sorted(over)
    if policy == "lru":  # others lose what they know beside the order of uses
        while len(filled):
            assert restored.evict(1) == filled.evict(1) == 1
            assert {e.key for e in restored} == {e.key for e in filled}
            assert restored.check() == []


def another_order(index: PageIndex, key: bytes) -> None:
    index.orders._of_priority[2].remove(key)
    index.orders._of_priority[1].insert_all([(key, b"")])


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda index, key: None, False),
        (lambda index, key: index.orders.retained.update({key: Retention(1, 6.0)}), True),
        (lambda index, key: index.orders.expiries.remove(key, 5.0), True),
        (another_order, True),
        (lambda index, key: index.orders.retained.update({name("nobody"): Retention(1)}), True),
    ],
)
def test_check_sees_wrong_retentions(damage: Callable[[PageIndex, bytes], object], wrong: bool) -> None:
    index = PageIndex(2)
    damage(index, index.insert(chain(1, 1)[0], index.take_free(1)[0], PageState.VERIFIED, Retention(1, 5.0)).key)
    assert bool(index.check()) is wrong


# -- a manager over indexes, against a dict --------------------------------------------------------------------------


paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def pages_at(path: tuple[int, ...]) -> list[Page]:
    keys = [b"n" * 32, *(name("page", path[: i + 1]) for i in range(len(path)))]
    return [Page(key, parent, b"n" * 32) for parent, key in itertools.pairwise(keys)]


class ManagerMachine(RuleBasedStateMachine):
    """Tiers of 30 slots, as many as there are pages: nothing is evicted but by a rule."""

    SLOTS = 30

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.manager = bare_manager(self.SLOTS, self.clock)
        self.planner = LoadPlanner(self.manager)
        self.there: dict[str, dict[bytes, Retention]] = {"cpu": {}, "ssd": {}}
        self.pins: list[tuple[Any, float, dict[bytes, set[str]]]] = []
        self.expired: set[bytes] = set()
        self.misses: Counter[str] = Counter()

    def live(self, tier: str, key: bytes) -> bool:
        retention = self.there[tier].get(key)
        return retention is not None and (retention.expires is None or retention.expires > self.clock.now)

    def settle(self) -> None:
        for tier, pages in self.there.items():
            for key in [key for key in pages if not self.live(tier, key)]:
                del pages[key]
                self.expired.add(key)

    @rule(path=paths, tiers=st.sampled_from([("cpu",), ("ssd",), ("cpu", "ssd")]), priority=priorities, ttl=ends)
    def store(self, path: tuple[int, ...], tiers: tuple[str, ...], priority: int, ttl: float | None) -> None:
        pages = pages_at(path)
        retention = Retention(priority, None if ttl is None else self.clock.now + ttl)
        with self.manager.lock:
            self.manager.retain(pages, retention)
            self.settle()
            for page in pages:
                self.expired.discard(page.key)
                joined = self.manager.expiry.joined(page, retention)
                for tier, known in self.there.items():
                    index = self.manager.tiers[tier].index
                    if page.key in known:
                        known[page.key] = known[page.key].joined(retention)
                    elif tier in tiers:
                        slots = index.allocate(1)
                        if slots is None:
                            assert self.pinned(tier) == self.SLOTS
                            continue
                        index.insert(page, slots[0], PageState.VERIFIED, joined)
                        known[page.key] = joined

    def pinned(self, tier: str) -> int:
        index = self.manager.tiers[tier].index
        return sum(e.leases > 0 for e in index._entries.values()) + len(index._leaving)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(path=paths)
    def lookup(self, path: tuple[int, ...]) -> None:
        pages = pages_at(path)
        found = self.manager.lookup(pages, 0)
        self.settle()
        fastest = [next((t for t in ("cpu", "ssd") if self.live(t, p.key)), None) for p in pages]
        expected = fastest[: fastest.index(None)] if None in fastest else fastest
        assert found == expected
        if len(found) < len(pages):
            cause = "expired" if pages[len(found)].key in self.expired else "absent"
            self.misses[cause] += len(pages) - len(found)

    @rule(path=paths)
    def plan(self, path: tuple[int, ...]) -> None:
        pages = pages_at(path)
        plan = self.planner.plan([pages], "load", keep=False)
        self.settle()
        live = [any(self.live(t, p.key) for t in self.there) for p in pages]
        assert len(plan) == next((i for i, there in enumerate(live) if not there), len(live))
        self.planner.end(plan)

    @rule(path=paths, seconds=st.integers(1, 6))
    def pin(self, path: tuple[int, ...], seconds: int) -> None:
        pages = pages_at(path)
        pin = self.manager.pin(pages, seconds, 1)
        self.settle()
        held: dict[bytes, set[str]] = {}
        for page in pages:
            on = {tier for tier in self.there if self.live(tier, page.key)}
            if not on:
                break
            held[page.key] = on
        if all(self.pinned(tier) < self.SLOTS // 2 for tier in self.there):
            assert pin.tokens == len(held)
        assert pin.tokens <= len(held)
        self.pins.append((pin, self.clock.now + seconds, dict(list(held.items())[: pin.tokens])))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.pins:
            pin, _, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            pin.release()
            pin.release()
            assert pin.tokens == 0

    @rule()
    def press(self) -> None:
        """Evict all that can go: what pins hold stays."""
        with self.manager.lock:
            self.manager.expire([page for path in self.all_paths() for page in pages_at(path)])
            self.settle()
            for tier, known in self.there.items():
                index = self.manager.tiers[tier].index
                index.evict(self.SLOTS)
                for key in [key for key in known if key not in index]:
                    del known[key]
        for pin, end, held in self.pins:
            if end > self.clock.now:
                for key in list(held)[: pin.tokens]:
                    assert any(key in self.there[tier] for tier in held[key])

    @staticmethod
    def all_paths() -> list[tuple[int, ...]]:
        return [tuple(int(bit) for bit in f"{i:04b}") for i in range(16)]

    @rule()
    def clear(self) -> None:
        self.settle()
        with self.manager.lock:
            for tier in self.manager.tiers.values():
                tier.index.retire(tier.index.detach().slots)
        self.there = {"cpu": {}, "ssd": {}}
        assert all(pin.tokens == 0 for pin, _, _ in self.pins)

    @invariant()
    def adds_up(self) -> None:
        counts = self.manager.stats()
        self.settle()
        misses = {cause: n for cause, n in counts.get("misses", {}).items() if n}
        assert misses == {cause: n for cause, n in self.misses.items() if n}
        looked = counts.get("lookups", {}).get("pages", 0)
        assert looked == sum(misses.values()) + sum(counts.get("hits", {}).values())
        alive = sum(end > self.clock.now for _, end, _ in self.pins)
        assert len([lease for lease in counts["leases"] if lease["owner"] == "pin"]) == alive
        assert len(self.manager.pins._ends) <= 2 * alive + 17
        for name_, tier in self.manager.tiers.items():
            assert tier.index.check() == []
            pinned = self.manager.pins._held[name_]
            assert len(pinned) <= self.SLOTS // 2
            leased = [some for lease in self.manager._leases for index, _, some in lease.runs() if index is tier.index]
            assert pinned == Counter(itertools.chain.from_iterable(leased))
            assert {e.key: e.retention for e in tier.index} == self.there[name_]


TestManager = ManagerMachine.TestCase


def test_what_is_asked_for_is_invisible_at_once_however_much_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "PIECE", 3)
    clock = Clock()
    manager = bare_manager(40, clock)
    pages = [chain(i, 1)[0] for i in range(20)]
    index = manager.tiers["cpu"].index
    for page in pages:
        slots = index.allocate(1)
        index.insert(page, slots[0], PageState.VERIFIED, Retention(0, clock.now + 1))
    clock.now += 1
    for page in pages:  # the other end than the one from which they are dropped
        assert manager.lookup([page], 0) == []
    assert manager.stats()["misses"] == {"expired": 20}
    assert manager.stats()["expired"] == {"cpu": 20}
    assert index.free_slots == 40


def test_keys_of_expired_pages_are_bounded() -> None:
    clock = Clock()
    manager = bare_manager(40, clock)
    manager.expiry = Expiry(manager, clock, kept=5)
    pages = [chain(i, 1)[0] for i in range(20)]
    for i, page in enumerate(pages):
        manager.tiers["cpu"].index.insert(page, i, PageState.VERIFIED, Retention(0, clock.now + 1))
    clock.now += 1
    for page in pages:
        manager.lookup([page], 0)
    assert len(manager.expiry._expired) == 5


# -- the engine ------------------------------------------------------------------------------------------------------


def resident(engine: CacheEngine, tier: str) -> dict[bytes, Retention]:
    with engine.manager.lock:
        return {e.key: e.retention for e in engine.manager.tiers[tier].index}


def test_an_expired_page_is_a_miss_on_every_tier(open_host: OpenHost) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 4)
    host.keep(tokens, ttl=60)
    clock.now += 59.9
    assert host.load(tokens).tokens == 16
    hit = engine.lookup(tokens)
    clock.now += 0.1
    assert tokens_of(engine, tokens) == 0
    assert engine.load(hit, host.take(4)).tokens == 0  # the hit is stale
    drop_from(engine, "cpu")
    assert engine.prefetch(tokens).result(WAIT).tokens == 0
    stats = engine.stats()
    assert stats["misses"]["expired"] == 4
    assert stats["expired"] == {"cpu": 4, "ssd": 4}
    assert stats["lookups"]["pages"] == sum(stats["hits"].values()) + sum(stats["misses"].values())
    host.keep(prompt(2, 12))  # all slots are free again
    assert tokens_of(engine, prompt(2, 12)) == 48
    assert engine.stats()["tiers"]["ssd"]["evictions"] == 0
    host.keep(tokens)
    assert tokens_of(engine, tokens) == 16
    assert engine.stats()["misses"]["expired"] == 4


def while_nothing_ends(engine: CacheEngine, work: Callable[[], T]) -> T:
    """What `work` returns, in a thread that has the manager's lock: no load and no store ends meanwhile."""

    def locked() -> T:
        with engine.manager.lock:
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(locked).result(WAIT)


def test_a_load_under_way_keeps_its_bytes_when_they_expire(open_host: OpenHost) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 4)
    host.keep(tokens, ttl=60)
    drop_from(engine, "cpu")

    def begin() -> tuple[LayerwiseLoad, list[int], list[bytes]]:
        begun = host.begin(tokens)
        clock.now += 60
        assert tokens_of(engine, tokens) == 0
        assert engine.stats()["tiers"]["ssd"]["pages"] == 0
        return begun

    load, blocks, keys = while_nothing_ends(engine, begin)
    assert host.finish(load, blocks, keys).tokens == 16
    assert tokens_of(engine, tokens) == 0


def test_a_page_that_expires_on_its_way_never_shows(open_host: OpenHost) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 4)
    blocks = host.compute(tokens)

    def begin() -> StoreHandle:
        handle = engine.store(tokens, blocks, ttl=1)
        clock.now += 1
        engine.lookup(tokens)
        return handle

    handle = while_nothing_ends(engine, begin)
    handle.release_event.synchronize(WAIT)
    handle.result(WAIT)
    host.give(blocks)
    quiet(engine)
    assert tokens_of(engine, tokens) == 0
    stats = engine.stats()["tiers"]
    assert stats["ssd"]["pages"] == stats["cpu"]["pages"] == 0


def test_a_copy_in_the_cpu_tier_ends_with_the_page_of_the_ssd(open_host: OpenHost) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 4)
    host.keep(tokens, ttl=60, priority=2)
    drop_from(engine, "cpu")
    assert host.load(tokens).tokens == 16
    expected = {page.key: Retention(2, clock.now + 60) for page in engine.pages(tokens)}
    assert resident(engine, "cpu") == resident(engine, "ssd") == expected
    clock.now += 60
    assert tokens_of(engine, tokens) == 0
    assert resident(engine, "cpu") == {}


def test_a_store_of_what_is_there_gives_it_the_longer_life(open_host: OpenHost) -> None:
    host = open_host()
    engine, clock = host.engine, set_clock(host.engine)
    tokens = prompt(1, 2)
    for options, wanted in (
        ({"priority": -1, "ttl": 60}, Retention(-1, clock.now + 60)),
        ({"priority": -1, "ttl": 30}, Retention(-1, clock.now + 60)),
        ({"priority": 2, "ttl": 60}, Retention(2, clock.now + 60)),
        ({"priority": 1, "ttl": 90}, Retention(2, clock.now + 90)),
        ({}, Retention(2, None)),
        ({"ttl": 1}, Retention(2, None)),
    ):
        host.keep(tokens, **options)
        for tier in ("cpu", "ssd"):
            assert set(resident(engine, tier).values()) == {wanted}
        assert engine.check().ok
    assert engine.stats()["stored"] == {"cpu": 2, "ssd": 2}


def test_stores_of_the_same_pages_that_wait_together_give_them_the_longer_life(open_host: OpenHost) -> None:
    host, tokens = open_host(), prompt(1, 3)
    manager, go = host.engine.manager, threading.Event()
    blocks = host.compute(tokens)
    host.engine._parts.storer._lane.start(drive_when(go))
    handles = [host.engine.store(tokens, blocks, **kept) for kept in ({"ttl": 60.0}, {"priority": 1})]
    go.set()
    for handle in handles:
        assert handle.result(WAIT).dropped == {}
    quiet(host.engine)
    with manager.lock:
        for tier in manager.tiers.values():
            kept = {tier.index.retention(page.key) for page in host.engine.pages(tokens)}
            assert kept == {Retention(1)}, tier.name
    assert host.engine.manager.check() == []


def test_a_store_with_an_end_gives_none_to_pages_that_had_none(open_host: OpenHost) -> None:
    host, tokens = open_host(), prompt(1, 3)
    for lost in ("ssd", "cpu"):
        host.keep(tokens)
        drop_from(host.engine, lost)
        host.keep(tokens, ttl=60.0, priority=-1)
        assert set(resident(host.engine, lost).values()) == {DEFAULT}, lost
    assert host.engine.check().ok


def drive_when(go: threading.Event) -> Iterator[Callable[[], object]]:
    yield go.wait


def test_a_page_that_is_about_to_get_a_slot_on_the_ssd_gets_the_longer_life_there_too(open_host: OpenHost) -> None:
    host, tokens = open_host(), prompt(1, 3)
    manager, pages = host.engine.manager, host.engine.pages(tokens)
    reserve = manager.ssd.reserve

    def later(*given: Any) -> Any:
        with manager.lock:
            manager.retain(pages, Retention(1))
        return reserve(*given)

    with mock.patch.object(manager.ssd, "reserve", later):
        host.keep(tokens, ttl=60.0)
    with manager.lock:
        assert {manager.ssd.index.retention(page.key) for page in pages} == {Retention(1)}
    assert manager.check() == []


def test_the_lower_priority_goes_first_on_every_tier(open_host: OpenHost) -> None:
    host = open_host(cpu=6, ssd=6)
    engine = host.engine
    high, low, normal = prompt(1, 2), prompt(2, 2), prompt(3, 2)
    host.keep(high, priority=1)
    host.keep(normal)
    host.keep(low, priority=-1)
    for _ in range(5):
        assert tokens_of(engine, low) == 8
    host.keep(prompt(4, 2))
    assert [tokens_of(engine, t) for t in (prompt(4, 2), low)] == [8, 0]
    host.keep(prompt(5, 2))
    assert [tokens_of(engine, t) for t in (high, normal, prompt(4, 2))] == [8, 0, 8]
    for i in range(6, 20):
        host.keep(prompt(i, 3))
    assert engine.lookup(high).tiers == ("cpu", "cpu")
    drop_from(engine, "cpu")
    assert engine.lookup(high).tiers == ("ssd", "ssd")


def test_priorities_and_ends_survive_a_restart(open_host: OpenHost) -> None:
    host = open_host(cpu=None, ssd=8)
    clock = set_clock(host.engine)
    clock.now = float(int(time.time())) - 1000
    over, on, high, plain = prompt(1, 2), prompt(2, 2), prompt(3, 2), prompt(4, 2)
    host.keep(high, priority=2)
    host.keep(over, ttl=900)
    host.keep(on, ttl=5000.0005, priority=1)
    host.keep(plain)
    host.engine.close()
    kept = inspect(host.engine.config.ssd.path)["retention"]  # type: ignore[union-attr]
    assert kept == {"priorities": {"0": 4, "1": 2, "2": 2}, "expiring_pages": 4, "expired_pages": 2}

    host = open_host(cpu=None, ssd=8)
    engine = host.engine
    stats = engine.stats()["tiers"]["ssd"]
    assert (stats["pages"], stats["free_slots"]) == (6, 2)
    assert stats["lost_at_recovery"] == {"expired": 2}
    assert [tokens_of(engine, t) for t in (over, on, high, plain)] == [0, 8, 8, 8]
    expected = dict.fromkeys((p.key for p in engine.pages(high)), Retention(2))
    expected |= dict.fromkeys((p.key for p in engine.pages(on)), Retention(1, clock.now + 5000))  # whole milliseconds
    expected |= dict.fromkeys((p.key for p in engine.pages(plain)), DEFAULT)
    assert resident(engine, "ssd") == expected
    for i in range(10, 16):  # under pressure the order holds
        host.keep(prompt(i, 2))
    assert [tokens_of(engine, t) for t in (on, high, plain)] == [8, 8, 0]
    later = set_clock(engine)
    later.now = clock.now + 5000
    assert [tokens_of(engine, t) for t in (on, high)] == [0, 8]


def test_a_transport_that_does_not_close_loses_no_wish(open_host: OpenHost) -> None:
    host, tokens = open_host(), prompt(1, 2)
    host.keep(tokens)
    host.keep(tokens, priority=2)
    with mock.patch.object(host.engine.manager.ssd.io, "close", side_effect=OSError), contextlib.suppress(OSError):
        host.engine.close()
    assert set(resident(open_host().engine, "ssd").values()) == {Retention(2)}


def test_a_commit_that_fails_loses_no_wish(open_host: OpenHost) -> None:
    host = open_host(cpu=None)
    tokens = prompt(1, 2)
    host.keep(tokens, ttl=3600)
    host.keep(tokens, priority=1)  # waits for the next commit
    ssd = host.engine.manager.ssd
    with mock.patch.object(ssd._catalog, "commit", side_effect=IOFailedError("the disk is full")):
        host.keep(prompt(2, 1))
    assert tokens_of(host.engine, prompt(2, 1)) == 0
    for slot in range(12):
        ssd._retained.setdefault(slot, name("gone"))  # as of pages that left their slots while the commit failed
    host.keep(prompt(3, 6), ttl=3600)
    assert host.engine.check().problems == ()
    host.engine.close()
    engine = open_host(cpu=None).engine
    assert [resident(engine, "ssd")[p.key] for p in engine.pages(tokens)] == [Retention(1)] * 2
    kept = [resident(engine, "ssd")[p.key].expires for p in engine.pages(prompt(3, 6))]
    assert None not in kept


def test_check_finds_a_catalogue_with_another_retention(open_host: OpenHost) -> None:
    host = open_host()
    host.keep(prompt(1, 2), ttl=3600)
    with sqlite3.connect(host.engine.config.ssd.path / "catalog.sqlite") as connection:
        connection.execute("UPDATE retention SET priority = 1 WHERE place = (SELECT min(place) FROM retention)")
    connection.close()
    [problem] = host.engine.check().problems
    assert "retention" in problem
    host.engine.close()


def test_a_sequence_commits_with_a_retention(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=12)
    clock = set_clock(engine)
    tokens = prompt(1, 3, extra=1)
    with engine.sequence(tokens) as seq:
        fill(engine, seq)
        for bad in ({"priority": 9}, {"ttl": 0}):
            with pytest.raises(InvalidValueError):
                seq.commit(**bad)
        seq.commit(priority=1, ttl=60)
    quiet(engine)
    wanted = {p.key: Retention(1, clock.now + 60) for p in engine.pages(tokens)}
    assert resident(engine, "gpu") == resident(engine, "cpu") == resident(engine, "ssd") == wanted
    drop_from(engine, "gpu")
    assert run(engine, tokens) == 12  # a request without wishes takes the priority over, and knows no end
    wanted = dict.fromkeys(wanted, Retention(1))
    assert resident(engine, "gpu") == resident(engine, "cpu") == resident(engine, "ssd") == wanted
    clock.now += 60
    assert run(engine, tokens) == 12


def test_what_a_sequence_shares_may_expire_under_it(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=12)
    clock = set_clock(engine)
    tokens = prompt(1, 3, extra=1)
    with engine.sequence(tokens) as seq:
        fill(engine, seq)
        seq.commit(ttl=60)
    quiet(engine)
    with engine.sequence(tokens) as seq:
        assert seq.cached_tokens == 12
        clock.now += 60
        assert tokens_of(engine, tokens) == 0
        assert engine.stats()["tiers"]["gpu"]["free_slots"] == 8
        seq.append(prompt(2, 2))
        fill(engine, seq)
        report = seq.commit().result(WAIT)  # it has all bytes, and asks for no end
        assert ([*map(bool, report.tiers)], report.dropped) == ([True] * 5, {})
        tokens = seq.tokens
        assert tokens_of(engine, tokens) == 20
    quiet(engine)
    assert engine.stats()["tiers"]["gpu"]["free_slots"] == 10
    clock.now += 60
    assert [run(engine, [*tokens, 1]) for _ in range(2)] == [20, 20]


# -- a clock that somebody sets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jump", "restart"), pairs([-86_400.0, -1_740_000_000.0, 2_000_000_000.0, 3600.0], [False, True])
)
def test_a_time_to_live_holds_however_the_clock_is_set(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, jump: float, restart: bool
) -> None:
    """Within a process by a clock that nobody sets; over a restart not before the directory was last written."""
    host, real = open_host(cpu=None, ssd=24), time.time
    for seed, ttl in ((1, None), (2, 0.3), (3, 7 * 86_400.0)):
        tokens = prompt(seed, 2)
        blocks = host.compute(tokens)
        host.engine.store(tokens, blocks, ttl=ttl).result(WAIT)
    if restart:
        host.engine.close()
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    if restart:
        host = open_host(cpu=None, ssd=24)
    assert tokens_of(host.engine, prompt(1, 2)) == 8
    tokens = prompt(4, 2)
    host.engine.store(tokens, host.compute(tokens), ttl=0.3).result(WAIT)
    time.sleep(0.5)
    assert [tokens_of(host.engine, prompt(seed, 2)) for seed in (1, 2, 4)] == [8, 0, 0]
    if jump < 0 or not restart:
        assert tokens_of(host.engine, prompt(3, 2)) == 8
    settle(host.engine)
    host.engine.close()
    monkeypatch.setattr(time, "time", real)
    assert tokens_of(open_host(cpu=None, ssd=24).engine, prompt(1, 2)) == 8


def test_a_clock_that_is_behind_the_directory_is_said(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, real = open_host(cpu=None), time.time
    host.keep(prompt(1, 2))
    host.engine.close()
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    with caplog.at_level(logging.WARNING, "gdscache"):
        open_host(cpu=None)
    assert any("was last written 3" in record.message for record in caplog.records)
