"""I/O that hangs: a miss or a drop at its deadline; slots come back when it ends, not before; no wait without end."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache import CacheEngine, PageStatus
from gdscache.errors import DeadlineError, DirectoryInUseError, GdsCacheError
from gdscache.load.plan import LoadReport
from gdscache.storage.base import Op
from gdscache.store.outlets import BatchSize
from gdscache.tiers.quarantine import Late, Quarantine
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    LONG,
    MHA,
    PACKED,
    WAIT,
    Host,
    OpenEngine,
    OpenHost,
    drop_from,
    expected,
    fill,
    make_config,
    our_threads,
    prompt,
    quiet,
    raising,
    read_page,
    reserve_used,
    settle,
    tokens_of,
    until,
    write_page,
)
from tests.support.pages import FAULTY
from tests.support.pairs import pairs
from tests.support.places import ROOT

SOON = 0.5  # seconds of a deadline that is to pass
ENDS_SOON: dict[str, Any] = {"transport": FAULTY, "deadline": SOON}
DEADLINE, LOADED, OFF = PageStatus.DEADLINE, PageStatus.LOADED, PageStatus.SWITCHED_OFF


def quarantine(engine: CacheEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.stats()["tiers"]["ssd"]["quarantine"]
    return found


def late(engine: CacheEngine) -> int:
    state = quarantine(engine)
    return int(state["late_reads"] + state["late_writes"])


def ended(engine: CacheEngine) -> None:
    """Everything in quarantine has come back, and the tiers are whole."""
    until(lambda: late(engine) == 0, "late I/O ends")
    state = quarantine(engine)
    assert state["held"] == state["ended"] > 0
    assert set(state["held_slots"].values()) == {0}
    settle(engine)


def held_slots(engine: CacheEngine, tier: str) -> set[int]:
    """Slots of a tier that only the quarantine still knows."""
    index = engine.manager.tiers[tier].index
    with engine.manager.lock:
        return set(index._leaving)


def used_slots(engine: CacheEngine, tier: str) -> set[int]:
    index = engine.manager.tiers[tier].index
    with engine.manager.lock:
        return {entry.slot for entry in index}


def stored(host: Host, seed: int, pages: int) -> list[int]:
    tokens = prompt(seed, pages)
    host.keep(tokens)
    return tokens


def offsets(engine: CacheEngine, tokens: list[int]) -> list[int]:
    """Where the pages lie in the slab."""
    slots = [engine.manager.tiers["ssd"].index.slot(page.key) for page in engine.pages(tokens)]
    return [slot * engine.layout.extent_bytes for slot in slots if slot is not None]


def load_slowly(host: Host, tokens: list[int]) -> LoadReport:
    """Load, with patience for a verdict that comes at the deadline."""
    load, blocks, keys = host.begin(tokens)
    load.result(WAIT)
    return host.finish(load, blocks, keys)


# -- reads ------------------------------------------------------------------------------------------------------------


def test_a_hung_read_into_the_cpu_tier_keeps_its_slots_until_it_ends(open_host: OpenHost) -> None:
    host = open_host(cpu=16, ssd=24, **ENDS_SOON)
    tokens = stored(host, 1, 3)
    drop_from(host.engine, "cpu")
    lying = {offset // host.layout.extent_bytes for offset in offsets(host.engine, tokens)}
    with PLAN.rule(Op.READ, Fault.HANG, times=3):
        assert load_slowly(host, tokens).pages == (DEADLINE,) * 3
        state = quarantine(host.engine)
        assert (state["late_reads"], state["held_slots"]["cpu"], state["switched_off"]) == (3, 3, False)
        held = held_slots(host.engine, "cpu")
        assert len(held) == 3
        assert [lease["owner"] for lease in host.engine.stats()["leases"]] == ["quarantine"] * 3
        assert tokens_of(host.engine, tokens) == 0, "a page whose read hangs is read again, and hangs again"
        assert host.engine.stats()["misses"]["quarantined"] == 3
        assert host.engine.prefetch(tokens).result(WAIT).pages == {}
        for seed in range(10, 30):  # more than the tiers hold
            other = stored(host, seed, 3)
            assert host.load(other).tokens == 12
            assert not used_slots(host.engine, "cpu") & held, "a slot in quarantine was handed out"
            assert lying <= used_slots(host.engine, "ssd"), "a page of which a read hangs was evicted"
            assert host.engine.check().problems == ()
        assert held_slots(host.engine, "cpu") >= held
        assert late(host.engine) == 3
    ended(host.engine)
    assert host.engine.stats()["tiers"]["ssd"]["quarantine"]["ended"] == 3
    assert host.load(tokens).tokens == 12, "late is not bad: the pages stay"


def test_a_hung_read_into_the_bounce_reserve_keeps_its_slot_until_it_ends(open_host: OpenHost) -> None:
    host = open_host(cpu=None, bounce=16, ssd=24, **ENDS_SOON)
    tokens, other = stored(host, 1, 2), stored(host, 2, 5)
    with PLAN.rule(Op.READ, Fault.HANG, times=2):
        assert load_slowly(host, tokens).pages == (DEADLINE,) * 2
        assert quarantine(host.engine)["held_slots"] == {"bounce_loads": 2, "bounce_stores": 0}
        assert reserve_used(host.engine) == 2
        for _ in range(5):
            assert host.load(other).tokens == 20
            assert reserve_used(host.engine) == 2, "a slot in quarantine came back early"
            assert host.engine.check().problems == ()
        assert late(host.engine) == 2
    ended(host.engine)
    assert host.load(tokens).tokens == 8


def test_cleared_pages_whose_reads_hang_come_back_once(open_host: OpenHost) -> None:
    host = open_host(cpu=16, ssd=4, **ENDS_SOON)
    tokens = stored(host, 1, 3)
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG, times=3):
        load_slowly(host, tokens)
        assert host.engine.clear()["ssd"] == 3
        held = held_slots(host.engine, "ssd")
        assert len(held) == 3
        host.keep(tokens)
        assert len(used_slots(host.engine, "ssd") - held) == 1, "one slot of four is there for the pages"
        assert tokens_of(host.engine, tokens) == 12
        assert host.engine.check().problems == ()
    ended(host.engine)
    host.keep_on_ssd(tokens)
    assert host.load(tokens).tokens == 12


def test_a_sequence_goes_on_without_what_hangs(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=16, cpu=16, **ENDS_SOON)
    tokens = prompt(1, 3, extra=1)
    with engine.sequence(tokens) as seq:
        fill(engine, seq)
        seq.commit()
    quiet(engine)
    drop_from(engine, "gpu", "cpu")
    with PLAN.rule(Op.READ, Fault.HANG, times=3):
        with engine.sequence(tokens) as seq:
            assert seq.cached_tokens == 12
            assert seq.verify(WAIT) == 0
            fill(engine, seq)
            seq.commit()
        assert late(engine) == 3
        assert engine.stats()["tiers"]["gpu"]["private_slots"] == 0
        assert tokens_of(engine, tokens) == 12
    ended(engine)


# -- writes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", [None, 16])
def test_a_hung_write_is_dropped_and_keeps_its_slots_until_it_ends(open_host: OpenHost, cpu: int | None) -> None:
    host = open_host(cpu=cpu, bounce=16, ssd=12, **ENDS_SOON)
    tokens = prompt(1, 2)
    with PLAN.rule(Op.WRITE, Fault.HANG, times=2):
        handle = host.store(tokens)
        assert handle.result(WAIT).dropped == {0: "deadline", 1: "deadline"}
        host.engine.drain(WAIT)
        assert host.engine.stats()["store_queue"]["bytes"] == 0
        assert host.engine.stats()["dropped"] == {"deadline": 2}
        state = quarantine(host.engine)
        pool = "cpu" if cpu else "bounce_stores"
        assert (state["late_writes"], state["held_slots"][pool], state["switched_off"]) == (2, 2, False)
        assert tokens_of(host.engine, tokens) == (8 if cpu else 0)
        held = held_slots(host.engine, "ssd")
        assert len(held) == 2
        for seed in range(10, 20):  # more than the tiers hold
            other = stored(host, seed, 3)
            assert host.load(other).tokens == 12
            assert not used_slots(host.engine, "ssd") & held, "a slot that a late write may still hit was handed out"
            assert host.engine.check().problems == ()
        if cpu:
            assert tokens_of(host.engine, tokens) == 8, "memory that a late write reads was evicted"
            assert host.load(tokens).tokens == 8
        bounce = host.engine._parts.bounces[0]
        assert bounce.stores.free_slots == bounce.stores.slots - (0 if cpu else 2)
        last = [stored(host, seed, 3) for seed in (31, 32, 33)]
        assert late(host.engine) == 2
    ended(host.engine)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    assert [host.load(t).tokens for t in last] == [12] * 3, "a late write hit another page"
    assert tokens_of(host.engine, tokens) == 0, "a page whose write was late was published"
    assert not held_slots(host.engine, "ssd")
    host.keep(tokens)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    assert host.load(tokens).tokens == 8


def test_one_hung_write_costs_its_own_page(open_host: OpenHost) -> None:
    host = open_host(cpu=16, ssd=6, **ENDS_SOON)
    fillers = [stored(host, seed, 1) for seed in range(6)]
    index = host.engine.manager.tiers["ssd"].index
    with host.engine.manager.lock:  # leave every second slot free
        for filler in fillers[::2]:
            entry = index.find(host.engine.pages(filler)[0].key)
            assert entry is not None
            index.drop(entry)
    host.engine.manager.ssd.commit_waiting()
    tokens = prompt(99, 3)
    with PLAN.rule(Op.WRITE, Fault.HANG, times=1):
        report = host.store(tokens).result(WAIT)
        assert sorted(report.dropped.values()) == ["deadline"]
        assert host.engine.stats()["stored"]["ssd"] == 8
        host.store(tokens).result(WAIT)  # again, while the first try hangs: it takes another slot, or none is left
        assert host.engine.check().problems == ()
    ended(host.engine)
    host.keep_on_ssd(tokens)
    assert host.load(tokens).tokens == 12


def test_the_writer_goes_on_with_the_next_batch(open_host: OpenHost) -> None:
    host = open_host(cpu=64, ssd=64, **ENDS_SOON)
    writer = host.engine._parts.storer.writers["ssd"]
    writer.size = BatchSize(2, 2, 2)
    with PLAN.rule(Op.WRITE, Fault.HANG, times=1):
        begun = time.monotonic()
        handles = [host.store(prompt(seed, 2)) for seed in range(6)]
        reports = [handle.result(WAIT) for handle in handles]
        assert time.monotonic() - begun < WAIT / 2
        dropped = [cause for report in reports for cause in report.dropped.values()]
        assert dropped == ["deadline"]
        assert sum(tiers == ("cpu", "ssd") for report in reports for tiers in report.tiers) == 12 - len(dropped)
    ended(host.engine)
    drop_from(host.engine, "cpu")
    left = {index for index, report in enumerate(reports) if not report.dropped}
    assert all(host.load(prompt(seed, 2)).tokens == 8 for seed in left)


@pytest.mark.parametrize(
    ("code", "cause"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "io_error"), (errno.EDQUOT, "disk_full")]
)
@pytest.mark.parametrize("cpu", [None, 6])
def test_a_refused_write_leaks_nothing(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, code: int, cause: str, cpu: int | None
) -> None:
    host = open_host(cpu=cpu, ssd=6, transport="tests.support.posix_transport:PosixTransport")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", raising(OSError(code, os.strerror(code))))
        for seed in range(8):  # more pages than there are slots
            report = host.store(prompt(seed, 3)).result(WAIT)
            assert report.dropped == dict.fromkeys(range(3), cause)
            settle(host.engine)
        assert host.engine.stats()["tiers"]["ssd"]["free_slots"] == 6
    assert host.engine.stats()["dropped"] == {cause: 24}
    tokens = stored(host, 1, 6)
    drop_from(host.engine, *(["cpu"] if cpu else []))
    assert host.load(tokens).tokens == 24


# -- switching off and on ---------------------------------------------------------------------------------------------


def test_too_many_hung_reads_switch_the_ssd_tier_off_until_they_end(
    open_host: OpenHost, caplog: pytest.LogCaptureFixture
) -> None:
    host = open_host(cpu=8, ssd=24, **ENDS_SOON)
    tokens, other = stored(host, 1, 3), stored(host, 2, 3)
    for times in (1, 2):
        host.engine.manager.log.clock = lambda later=61.0 * times: time.monotonic() + later  # each cause once a minute
        caplog.clear()
        drop_from(host.engine, "cpu")
        with PLAN.rule(Op.READ, Fault.HANG, times=3):
            assert load_slowly(host, tokens).pages == (DEADLINE,) * 3
            state = quarantine(host.engine)
            assert (state["switched_off"], state["switch_offs"]) == (True, times)
            moved = {op: len(done) for op, done in PLAN.moved.items()}
            before = dict(host.engine.stats()["misses"])
            assert tokens_of(host.engine, other) == 0
            misses = host.engine.stats()["misses"]
            assert misses["switched_off"] == before.get("switched_off", 0) + 3
            assert misses.get("absent", 0) == before.get("absent", 0)
            assert host.engine.prefetch(other).result(WAIT).pages == {}
            fresh = prompt(50 + times, 3)
            report = host.store(fresh).result(WAIT)
            assert report.tiers == (("cpu",),) * 3
            assert report.dropped == dict.fromkeys(range(3), "switched_off")
            assert host.load(fresh).bytes_by_tier == {"cpu": 3 * host.layout.page_bytes}
            assert {op: len(done) for op, done in PLAN.moved.items()} == moved, "I/O began while it was switched off"
            assert host.engine.check().problems == ()
        ended(host.engine)
        assert not quarantine(host.engine)["switched_off"]
        errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert "3 of 8 slots of cpu" in errors[0]
        assert "ssd.path" in errors[0]
        assert sum("switched on again" in record.message for record in caplog.records) == 1
        host.keep_on_ssd(fresh)
        assert host.load(tokens).tokens == host.load(other).tokens == host.load(fresh).tokens == 12


def test_without_a_cpu_tier_hung_writes_switch_off_and_nothing_waits_for_their_slots(open_host: OpenHost) -> None:
    host = open_host(cpu=None, bounce=4, ssd=24, **ENDS_SOON)
    kept = stored(host, 1, 2)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        report = host.store(prompt(2, 6)).result(WAIT)
        assert set(report.dropped.values()) == {"deadline", "switched_off"}
        assert len(report.dropped) == 6
        host.engine.drain(WAIT)
        assert quarantine(host.engine)["switched_off"]
        assert set(host.store(prompt(3, 6)).result(WAIT).dropped.values()) == {"switched_off"}
        assert host.load(kept).tokens == 0
    ended(host.engine)
    assert host.load(kept).tokens == 8
    assert host.load(stored(host, 2, 6)).tokens == 24


def test_no_request_waits_for_a_slow_log_when_a_tier_is_switched_off_and_on(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(cpu=None, bounce=4, ssd=24, **ENDS_SOON)
    said: dict[str, bool] = {}
    lock = host.engine.manager.lock

    def slow(record: logging.LogRecord) -> bool:
        got: list[bool] = []
        other = threading.Thread(target=lambda: got.append(lock.acquire(timeout=1.0) and not lock.release()))
        other.start()
        other.join()
        said[record.getMessage().partition(":")[0]] = got == [True]
        return True

    log = logging.getLogger("gdscache.ssd")
    monkeypatch.setattr(log, "filters", [slow])
    with PLAN.rule(Op.WRITE, Fault.HANG):
        host.store(prompt(2, 6)).result(WAIT)
        until(lambda: "the SSD tier is switched off" in said, "a line about it")
    ended(host.engine)
    host.engine.drain(WAIT)
    host.store(prompt(3, 1)).result(WAIT)
    until(lambda: "the SSD tier is switched on again" in said, "a line about that")
    assert all(said.values()), said


class Pending:
    """I/O of pages, which ends when it is told to."""

    def __init__(self) -> None:
        self._ended: list[int] = []
        self._told: list[Callable[[int], None]] = []

    def finish(self, *pages: int) -> None:
        self._ended += pages
        for page, told in itertools.product(pages, self._told):
            told(page)

    def on_end(self, callback: Callable[[int], None]) -> None:
        self._told.append(callback)
        for page in self._ended:
            callback(page)


def a_batch(n: int) -> tuple[Pending, dict[int, Late], list[int]]:
    given: list[int] = []
    return Pending(), {i: Late("read", "cpu", "ssd", i, functools.partial(given.append, i)) for i in range(n)}, given


def test_off_above_a_quarter_and_on_again_at_an_eighth() -> None:
    keeper = Quarantine(threading.RLock())
    keeper.add_memory("cpu", 16)
    keeper.add_memory("bounce_loads", 1000)
    submission, requests, given = a_batch(5)
    keeper.hold(submission, {i: requests[i] for i in range(4)})
    assert not keeper.off, "a quarter is not more than a quarter"
    keeper.hold(submission, {4: requests[4]})
    assert keeper.off
    for i in (3, 0):
        assert not keeper.hides("ssd", 99) or keeper.off
        submission.finish(i)
        assert keeper.off, "switched on again at more than an eighth"
    submission.finish(1)
    assert not keeper.off
    assert [keeper.hides("ssd", i) for i in range(5)] == [False, False, True, False, True]
    submission.finish(2, 4)
    assert sorted(given) == [0, 1, 2, 3, 4]
    assert keeper.requests == 0
    assert keeper.describe()["switch_offs"] == 1


def test_what_ended_meanwhile_is_given_back_at_once() -> None:
    keeper = Quarantine(threading.RLock())
    keeper.add_memory("cpu", 1)
    submission, requests, given = a_batch(2)
    submission.finish(0)
    keeper.hold(submission, requests)
    assert given == [0]
    submission.finish(1)
    assert given == [0, 1]
    assert not keeper.off


def test_two_late_reads_of_one_page_hide_it_until_both_end() -> None:
    keeper = Quarantine(threading.RLock())
    keeper.add_memory("cpu", 100)
    batches = [a_batch(1) for _ in range(2)]
    for submission, requests, _ in batches:
        keeper.hold(submission, requests)
    batches[0][0].finish(0)
    assert keeper.hides("ssd", 0)
    batches[1][0].finish(0)
    assert not keeper.hides("ssd", 0)


def test_what_waits_for_the_end_of_late_requests_is_done_in_order() -> None:
    keeper, done, begun, gate = Quarantine(threading.RLock()), list[int](), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        gate.wait(WAIT)
        done.append(1)

    for action in (first, functools.partial(done.append, 2)):
        submission, requests, _ = a_batch(1)
        keeper.hold(submission, requests)
        keeper.afterwards(action)
        submission.finish(0)
        assert begun.wait(WAIT)
    closing = sum(thread.name == "gdscache-late-close" for thread in threading.enumerate())
    assert (closing, done) == (1, [])
    gate.set()
    until(lambda: done == [1, 2], "both are done")


def test_a_pool_that_knows_what_late_requests_hold_is_believed() -> None:
    keeper = Quarantine(threading.RLock())
    keeper.add_memory("cpu", 16, lambda: 5)
    assert keeper.describe()["held_slots"] == {"cpu": 5}


# -- draining and closing ---------------------------------------------------------------------------------------------


def test_drain_with_a_limit_says_so_while_a_write_hangs(open_host: OpenHost) -> None:
    host = open_host(transport=FAULTY)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        handle = host.store(prompt(1, 2))
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match=r"0\.2 s"):
            host.engine.drain(0.2)
        with pytest.raises(DeadlineError):
            handle.result(0.05)
        assert time.monotonic() - begun < WAIT / 2
    host.engine.drain(WAIT)
    assert handle.result(0).dropped == {}


@pytest.fixture
def open_impatient(open_host: OpenHost) -> OpenHost:
    """`open_host`, with engines that hardly wait for what hangs when they close."""

    def opens(**options: Any) -> Host:
        host = open_host(**options)
        host.engine.manager.close_s = 0.3
        return host

    return opens


def mapped(address: int) -> bool:
    """Whether the process has memory at an address."""
    with open("/proc/self/maps") as maps:
        spans = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


@pytest.mark.parametrize(("op", "cpu"), pairs([Op.READ, Op.WRITE], [None, 16]))
def test_close_with_a_hang_ends_in_time_and_keeps_what_the_io_may_touch(
    open_impatient: OpenHost, slab: Path, caplog: pytest.LogCaptureFixture, op: Op, cpu: int | None
) -> None:
    host = open_impatient(cpu=cpu, bounce=16, ssd=24, **ENDS_SOON)
    kept, tokens = stored(host, 1, 3), prompt(2, 2)
    if op is Op.READ:
        stored(host, 2, 2)
        drop_from(host.engine, *(["cpu"] if cpu else []))
    parts = host.engine._parts
    extents = parts.manager.cpu.extents if parts.manager.cpu is not None else parts.bounces[0].extents  # type: ignore[union-attr]
    buffer, bounce = extents.buffer, parts.bounces[0]  # type: ignore[union-attr]
    assert bounce is not None
    address, ssd = buffer.address, parts.manager.ssd
    assert ssd is not None
    with PLAN.rule(op, Fault.HANG):
        if op is Op.READ:
            assert set(load_slowly(host, tokens).pages) == {DEADLINE}
        else:
            assert set(host.store(tokens).result(WAIT).dropped.values()) == {"deadline"}
        begun = time.monotonic()
        host.engine.close()
        host.engine.close()
        assert time.monotonic() - begun < WAIT / 2
        said = [record.message for record in caplog.records if "closed with " in record.message]
        assert len(said) == 1
        assert f"{2 if op is Op.READ else 0} reads and {2 if op is Op.WRITE else 0} writes" in said[0]
        assert buffer._map is not None, "memory was given back under I/O that hangs"
        assert mapped(address)
        assert len(extents.memory(0)) == host.layout.extent_bytes
        assert os.fstat(ssd.io._files[0]).st_size > 0
        if op is Op.WRITE:
            with pytest.raises(DirectoryInUseError):  # a late write must not hit the slots of another owner
                CacheEngine.from_config(make_config(slab, cpu=cpu, ssd=24))
        else:
            again = open_impatient(cpu=cpu, bounce=16, ssd=24)
            assert again.load(kept).tokens == 12
            again.engine.close()
    until(lambda: buffer._map is None, "memory goes back when the I/O has ended")
    until(lambda: not our_threads(), f"threads end: {our_threads()}")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ssd.io._files[0])
    again = open_impatient(cpu=cpu, bounce=16, ssd=24)
    assert again.load(kept).tokens == 12
    assert tokens_of(again.engine, tokens) == (8 if op is Op.READ else 0)


def test_close_waits_a_little_for_what_is_only_slow(open_host: OpenHost, caplog: pytest.LogCaptureFixture) -> None:
    host = open_host(cpu=16, **ENDS_SOON)
    host.engine.manager.close_s = WAIT
    tokens = stored(host, 1, 3)
    drop_from(host.engine, "cpu")
    cpu = host.engine.manager.cpu
    with PLAN.rule(Op.READ, Fault.HANG) as rule:
        load_slowly(host, tokens)
        threading.Timer(0.3, rule.gate.set).start()
        host.engine.close()
    assert cpu.extents.buffer._map is None
    assert not our_threads()
    assert "closed with " not in caplog.text


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("cpu", [64, pytest.param(None, marks=pytest.mark.suite)])
def test_close_with_a_long_queue_to_a_hung_device_costs_about_one_deadline(
    open_impatient: OpenHost, cpu: int | None, drain: bool
) -> None:
    host = open_impatient(cpu=cpu, bounce=64, ssd=64, transport=FAULTY, deadline=0.5)
    writer = host.engine._parts.storer.writers["ssd"]
    writer.size = BatchSize(1, 1, 1)  # a batch a page: waiting for each would take a deadline a pair
    with PLAN.rule(Op.WRITE, Fault.HANG):
        handles = [host.store(prompt(seed, 5)) for seed in range(6)]
        begun = time.monotonic()
        host.engine.close(drain=drain)
        assert time.monotonic() - begun < 5, "a deadline a pair of batches would be 7.5 s"
        for handle in handles:
            assert set(handle.result(0).dropped) == set(range(5))
            assert set(handle.result(0).dropped.values()) <= {"deadline", "closed", "switched_off"}
    until(lambda: not our_threads(), f"threads end: {our_threads()}")


def test_close_does_not_wait_for_a_catalogue_on_a_device_that_hangs(
    open_impatient: OpenHost, monkeypatch: pytest.MonkeyPatch, slab: Path
) -> None:
    host = open_impatient(cpu=16, **ENDS_SOON)
    tokens = stored(host, 1, 2)
    drop_from(host.engine, "cpu")
    ssd = host.engine.manager.ssd
    ssd.close_s = 0.3
    gate, commit = threading.Event(), ssd._catalog.commit

    def stuck(*args: Any) -> None:
        assert gate.wait(WAIT)
        commit(*args)

    with PLAN.rule(Op.READ, Fault.HANG):
        load_slowly(host, tokens)
        monkeypatch.setattr(ssd._catalog, "commit", stuck)
        begun = time.monotonic()
        host.engine.close()
        assert time.monotonic() - begun < WAIT / 2
        with pytest.raises(DirectoryInUseError):
            CacheEngine.from_config(make_config(slab, cpu=16))
        gate.set()
    until(lambda: not our_threads(), f"threads end: {our_threads()}")
    assert open_impatient(cpu=16).load(tokens).tokens == 8


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.parametrize(("cpu", "model"), [(None, MHA), (12, MHA), (128, PACKED)])
def test_many_threads_while_io_hangs_now_and_then(
    open_host: OpenHost, cpu: int | None, model: dict[str, Any], seconds: float
) -> None:
    """No wrong byte, no lost slot, no wait without end, whatever hangs and for how long."""
    tiers: dict[str, Any] = {"cpu": cpu, "bounce": 32, "ssd": 24, "model": model}
    if model is PACKED:  # eight slots, which are a sixteenth, for pages that do not fit
        tiers |= {"bounce": 128, "ssd": 128}
    host = open_host(**tiers, blocks=64, transport=FAULTY, deadline=0.1)
    engine, layout = host.engine, host.layout
    prompts = [prompt(seed, 1 + seed % 4) for seed in range(12)]
    stop = time.monotonic() + seconds
    failures: list[Exception] = []
    loaded = [0] * 4

    def work(number: int) -> None:
        rng = random.Random(number)
        mine = list(range(8 * number, 8 * number + 8))
        try:
            while time.monotonic() < stop or not (loaded[number] or time.monotonic() > stop + WAIT):
                tokens = rng.choice(prompts)
                hit = engine.lookup(tokens)
                if hit.tokens and rng.random() < 0.7:
                    load = engine.load(hit, mine[: len(hit.pages)])
                    good = load.result(WAIT).tokens // 4
                    load.release_event.synchronize(WAIT)
                    for i in range(good):
                        got = read_page(host.planes, layout, [mine[i]])
                        assert np.array_equal(got, expected(layout, hit.pages[i].key)), "another page's bytes"
                    loaded[number] += good
                else:
                    pages = engine.pages(tokens)
                    for i, page in enumerate(pages):
                        write_page(host.planes, layout, [mine[4 + i]], expected(layout, page.key))
                    handle = engine.store(tokens, mine[4 : 4 + len(pages)])
                    handle.release_event.synchronize(WAIT)
                    handle.result(WAIT)
                if cpu and rng.random() < 0.2:
                    drop_from(engine, "cpu")
        except (AssertionError, GdsCacheError) as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    rng = random.Random(7)
    while any(worker.is_alive() for worker in workers):
        op = rng.choice([Op.READ, Op.WRITE])
        with PLAN.rule(op, Fault.HANG, lambda _: rng.random() < 0.3, times=2):
            time.sleep(rng.choice([0.02, 0.1, 0.4]))
        time.sleep(0.02)
    assert not failures, failures
    assert all(loaded)
    ended(engine)
    engine.close()
    host = open_host(**tiers, blocks=64)
    for tokens in prompts:
        host.keep(tokens)
        assert host.load(tokens).tokens == len(tokens)


def test_a_tier_that_has_stopped_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Quarantine(threading.RLock())
    told: list[bool] = []
    keeper.switched = lambda: told.append(keeper.off)
    with caplog.at_level(logging.ERROR, "gdscache"):
        for why in ("the first cause", "another"):
            keeper.stop(why)
    assert (keeper.stopped, told) == ("the first cause", [True])
    assert ["the first cause" in record.getMessage() for record in caplog.records] == [True]


def test_a_tier_that_has_stopped_is_not_switched_on_by_i_o_that_ends() -> None:
    keeper = Quarantine(threading.RLock())
    keeper.add_memory("cpu", 16)
    submission, requests, given = a_batch(5)
    keeper.hold(submission, requests)
    keeper.stop("another process has the lock")
    submission.finish(*range(5))
    assert len(given) == 5
    assert keeper.off


ENDING = """
import ctypes, pathlib, sys
import gdscache.engine.closing as closing
from gdscache import CacheEngine
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import MHA, layout_of, make_config, new_planes

closing.EXIT_S = 0.5
rule = PLAN.rule(Op.WRITE, Fault.HANG)
rule.__enter__()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(rule))  # it never ends
layout = layout_of(MHA)
config = make_config(pathlib.Path(sys.argv[1]), transport="tests.support.faulty:FaultyTransport")
engine = CacheEngine.from_config(config, new_planes(layout, 4, layout.page_tokens))
engine.store(list(range(2 * layout.page_tokens)), [0, 1])
sys.exit(3)
"""


RETURNING = """
import ctypes, pathlib, sys, time
import gdscache.engine.closing as closing
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, drop_from, make_config, prompt, until

class Last:
    def __del__(self, sleep=time.sleep):  # Python has begun to end, and threads may no more have its lock
        sleep(2)

closing.EXIT_S = closing._LEAVE_S = 0.1
host = Host(make_config(pathlib.Path(sys.argv[1]), transport="tests.support.faulty:FaultyTransport"))
host.keep(prompt(1, 2))
drop_from(host.engine, "cpu")
last = Last()
for op, begin in (("READ", lambda: host.begin(prompt(1, 2))), ("WRITE", lambda: host.store(prompt(2, 2)))):
    held, rule = PLAN.held, PLAN.rule(Op[op], Fault.DELAY, seconds=1.2)
    rule.__enter__()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(rule))  # it never ends
    begun = begin()
    until(lambda: PLAN.held > held, f"{op} is under way")
sys.exit(3)
"""


def test_processes_whose_i_o_hangs_or_returns_too_late_end_with_their_own_status(tmp_path: Path) -> None:
    """Stores that never end; a read and a write that return to an interpreter that has ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as undo:
        begun = []
        for name, code in (("ending", ENDING), ("returning", RETURNING)):
            command = [sys.executable, "-c", code, str(tmp_path / name)]
            begun.append(
                undo.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
            )
            undo.callback(begun[-1].kill)
        said = [process.communicate(timeout=4 * WAIT)[1] for process in begun]
    assert [process.returncode for process in begun] == [3, 3], said
    assert said[0].splitlines() == ["stores are still on their way after 0.5 s: they are lost when the process ends"]
