"""Prefetches in an engine whose disk is slow on order: loads first, turns, every way to end, nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from gdscache import CacheEngine, Prefetch, PrefetchEnd
from gdscache.errors import DeadlineError, EngineClosedError
from gdscache.gate.busy_periods import BusyPeriods
from gdscache.limits import EngineLimits
from gdscache.load.loader import Loader
from gdscache.prefetch import queue as prefetching
from gdscache.prefetch.queue import DEMAND_PAUSE_S, MOST
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    LONG,
    PACKED,
    SMALL,
    WAIT,
    Host,
    OpenEngine,
    OpenHost,
    drop_from,
    kept,
    make_config,
    prompt,
    run,
    settle,
    stored,
    together,
    tokens_of,
    until,
)
from tests.support.pages import lose
from tests.support.slow_prefetch import EXTENT, FAULTY, PAGEWISE, slow_host, stocked

# -- an engine whose disk is slow --------------------------------------------------------------------------------------


def offsets(host: Host, tokens: list[int]) -> set[int]:
    index = host.engine.manager.ssd.index  # type: ignore[union-attr]
    return {slot * EXTENT for page in host.engine.pages(tokens) if (slot := index.slot(page.key)) is not None}


def ended(prefetch: Prefetch, seconds: float = WAIT) -> tuple[int, str]:
    report = prefetch.result(seconds)
    return report.tokens // 4, report.end.value


def prefetch_stats(engine: CacheEngine) -> dict[str, Any]:
    stats: dict[str, Any] = engine.stats()["prefetch"]
    return stats


def nothing_held(engine: CacheEngine) -> None:
    until(lambda: engine.stats()["leases"] == [], "leases end")
    assert engine.check().problems == ()


def test_the_gate_learns_from_a_prefetch_what_the_ssd_takes(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 6)
    costs = host.engine.manager.costs
    assert "ssd" not in costs.bandwidths()
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.02):
        assert ended(host.engine.prefetch(tokens)) == (6, "complete")
    until(lambda: "ssd" in costs.bandwidths(), "it is learned from")
    assert 0 < costs.bandwidths()["ssd"] <= host.layout.page_bytes / 0.02


@contextlib.contextmanager
def periods(host: Host) -> Iterator[list[tuple[str, int, float]]]:
    """The periods in which tiers were busy, once the block has ended: tier, pages, seconds."""
    seen: list[tuple[str, int, float]] = []
    size = host.layout.bytes_in("ssd")
    busy = BusyPeriods(lambda tier, nbytes, seconds: seen.append((tier, nbytes // size, seconds)))
    with mock.patch.object(host.engine.manager, "busy", busy):
        yield seen
        until(lambda: not any(busy._under_way.values()), "all is measured")
        busy.tell()


def test_many_at_once_do_not_make_the_disk_look_fast(open_host: OpenHost) -> None:
    """They have moved before their period when they end in it."""
    host = slow_host(open_host, cpu=48)
    prompts = [stored(host, seed, 2) for seed in range(12)]
    with periods(host) as seen, PLAN.rule(Op.READ, Fault.DELAY, seconds=0.02):
        for prefetch in [host.engine.prefetch(tokens) for tokens in prompts]:
            assert ended(prefetch) == (2, "complete")
    assert sum(pages for _, pages, _ in seen) == 24
    assert all(seconds > 0.015 * pages for _, pages, seconds in seen)


def test_pauses_for_loads_are_not_the_disk_s_time(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host, tokens = stocked(open_host, 3)
    monkeypatch.setattr(Loader, "loads", 1)
    with periods(host) as seen:
        assert ended(host.engine.prefetch(tokens)) == (3, "complete")
    assert [pages for _, pages, _ in seen] == [1, 1, 1]


@pytest.mark.parametrize(("chunk", "moved"), [(1, {"ssd": 3, "dict": 1}), (4, {})])
def test_each_tier_is_told_its_own_pages(open_host: OpenHost, chunk: int, moved: dict[str, int]) -> None:
    """A chunk of which the slowest tier has less than half says nothing."""
    limits = dataclasses.replace(SMALL, prefetch_bytes=chunk * EXTENT, prefetch_first=chunk * EXTENT)
    more = [{"tier": "tests.support.dict_tier:DictTier", "capacity": 16 * EXTENT}]
    host = slow_host(open_host, tiers=more, limits=limits)
    tokens = stored(host, 1, 4)
    with host.engine.manager.lock:
        index = host.engine.manager.tiers["ssd"].index
        index.drop(index.find(host.engine.pages(tokens)[-1].key))
    assert host.engine.lookup(tokens).tiers == ("ssd",) * 3 + ("dict",)
    found = Counter[str]()
    with periods(host) as seen:
        assert ended(host.engine.prefetch(tokens)) == (4, "complete")
    for tier, pages, _ in seen:
        found[tier] += pages
    assert found == moved


def test_packed_pages_are_told_with_those_of_their_disk_that_do_not_fit(open_host: OpenHost) -> None:
    """Their chunk's time is for both."""
    limits = dataclasses.replace(SMALL, prefetch_bytes=16 * EXTENT, prefetch_first=16 * EXTENT)
    host = slow_host(open_host, model=PACKED, cpu=320, ssd=320, bounce=64, limits=limits)
    tokens, size = stored(host, 1, 8), host.layout.bytes_in
    tiers = host.engine.lookup(tokens).tiers
    assert {*tiers} == {"ssd", "ssd_plain"}
    seen = list[tuple[str, int]]()
    busy = BusyPeriods(lambda tier, nbytes, _: seen.append((tier, nbytes)))
    with mock.patch.object(host.engine.manager, "busy", busy):
        assert ended(host.engine.prefetch(tokens)) == (8, "complete")
        until(lambda: not any(busy._under_way.values()), "all is measured")
        busy.tell()
    assert seen == [("ssd", sum(map(size, tiers)))]


def test_it_finishes_by_itself_and_its_tokens_grow(open_host: OpenHost, device: str) -> None:
    host, tokens = stocked(open_host, 6, device=device)
    with (
        PLAN.rule(Op.READ, Fault.HANG, skip=4, times=1) as fifth,
        PLAN.rule(Op.READ, Fault.HANG, skip=2, times=1) as third,
    ):
        prefetch = host.engine.prefetch(tokens)
        for rule, there in ((third, 8), (fifth, 16)):
            until(lambda: PLAN.held == 1, "a chunk hangs")
            assert prefetch.tokens == there
            assert not prefetch.done()
            rule.release()
            until(lambda there=there: prefetch.tokens > there, "it goes on")
    until(prefetch.done, "it has ended")
    assert prefetch.tokens == 24
    nothing_held(host.engine)
    assert host.engine.lookup(tokens).tiers == ("cpu",) * 6
    report = prefetch.result(0)
    assert (report.tokens, report.pages, report.end) == (24, {"loaded": 6}, PrefetchEnd.COMPLETE)
    assert report.nbytes == 6 * host.layout.page_bytes
    assert 0 < report.seconds < WAIT


def test_slots_are_taken_for_what_the_ssd_has_chunk_by_chunk(open_host: OpenHost) -> None:
    host = slow_host(open_host, limits=dataclasses.replace(PAGEWISE, prefetch_bytes=2 * EXTENT))
    tokens = stored(host, 1, 5) + prompt(9, 40)  # 40 pages that no tier has
    index = host.engine.manager.cpu.index  # type: ignore[union-attr]
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 2, "a chunk is under way")
        assert len(index) == 2
        assert [lease["pages"] for lease in host.engine.stats()["leases"]] == [4]  # two pages, at both ends
        assert prefetch.tokens == 0
    assert ended(prefetch) == (5, "complete")
    assert len(index) == 5


@pytest.mark.parametrize(("measured", "begun"), [(3, 1 + 2), (4, 4 + 4)])
def test_first_chunks_are_small_until_a_tier_is_measured(open_host: OpenHost, measured: int, begun: int) -> None:
    limits = dataclasses.replace(PAGEWISE, prefetch_bytes=4 * EXTENT, prefetch_first=EXTENT, prefetch_chunks=2)
    host, tokens = stocked(open_host, 12, limits=limits)
    for _ in range(measured):
        host.engine.manager.costs.observe_load("ssd", 4 * EXTENT, 0.1)
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == begun, "two chunks are under way")
        assert prefetch.begun == begun
    assert ended(prefetch) == (12, "complete")


def test_what_is_there_already_is_not_read(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 6)
    assert host.load(tokens[:8]).tokens == 8
    before = len(PLAN.moved[Op.READ])
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetch = host.engine.prefetch(tokens)
        assert prefetch.tokens == 8
    assert prefetch.result(WAIT).pages == {"present": 2, "loaded": 4}
    assert len(PLAN.moved[Op.READ]) - before == 4
    again = host.engine.prefetch(tokens)
    assert again.done()
    assert again.result(0).pages == {"present": 6}
    assert ended(again) == (6, "complete")
    assert len(PLAN.moved[Op.READ]) - before == 4


def test_a_page_of_the_gpu_pool_between_others_is_not_read(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=16, transport=FAULTY, cpu=8, ssd=12)
    tokens = prompt(1, 5)
    run(engine, tokens)
    drop_from(engine, "cpu")
    lose(engine, tokens, (1, 3), "gpu")
    report = engine.prefetch(tokens).result(WAIT)
    assert (report.tokens, report.pages) == (20, {"present": 3, "loaded": 2})
    assert len(PLAN.moved[Op.READ]) == 2


# -- loads first -------------------------------------------------------------------------------------------------------


def test_a_load_waits_for_one_chunk_at_most(open_host: OpenHost) -> None:
    host = slow_host(open_host, cpu=48)
    other, tokens = stored(host, 1, 40), stored(host, 2, 3)
    theirs = offsets(host, other)
    with (
        PLAN.rule(Op.READ, Fault.DELAY, lambda offset: offset in theirs, seconds=0.005),
        PLAN.rule(Op.READ, Fault.DELAY, lambda offset: offset not in theirs, seconds=0.4),
    ):
        prefetch = host.engine.prefetch(other)
        until(lambda: prefetch.tokens > 0, "it has begun")
        begun = time.monotonic()
        load, blocks, names = host.begin(tokens)
        before = len(PLAN.moved[Op.READ])
        load.result(WAIT)
        meanwhile = PLAN.moved[Op.READ][before:]
    under_way = 1
    guaranteed = (time.monotonic() - begun) / DEMAND_PAUSE_S
    assert sum(offset in theirs for offset in meanwhile) <= under_way + guaranteed
    assert sum(offset not in theirs for offset in meanwhile) == 3
    assert ended(prefetch) == (40, "complete")
    assert host.finish(load, blocks, names).tokens == 12


def test_when_the_last_load_has_ended_it_goes_on(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "DEMAND_PAUSE_S", 1000.0)
    host = slow_host(open_host)
    other, tokens = stored(host, 1, 6), stored(host, 2, 1)
    theirs = offsets(host, other)
    with PLAN.rule(Op.READ, Fault.HANG, lambda offset: offset not in theirs):
        load, blocks, names = host.begin(tokens)
        prefetch = host.engine.prefetch(other)
        time.sleep(0.1)
        assert prefetch.tokens == 0
        assert PLAN.moved[Op.READ] == []
    assert ended(prefetch) == (6, "complete")
    assert host.finish(load, blocks, names).tokens == 4


def test_while_loads_hang_a_few_chunks_move_and_no_more(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    other, tokens = stored(host, 1, 20), stored(host, 2, 1)
    theirs = offsets(host, other)
    with PLAN.rule(Op.READ, Fault.HANG, lambda offset: offset not in theirs):
        load, blocks, names = host.begin(tokens)
        until(lambda: PLAN.held == 1, "the load hangs")
        begun = time.monotonic()
        prefetch = host.engine.prefetch(other)
        until(lambda: prefetch.tokens >= 8, "it is not starved")
        chunks, seconds = prefetch.tokens // 4, time.monotonic() - begun
        assert chunks <= seconds / DEMAND_PAUSE_S + 1
    assert host.finish(load, blocks, names).tokens == 4
    assert ended(prefetch) == (20, "complete")


def test_a_load_that_needs_the_page_under_way_waits_for_it(open_host: OpenHost, device: str) -> None:
    host, tokens = stocked(open_host, 3, device=device)
    with PLAN.rule(Op.READ, Fault.HANG, times=1):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1, "a chunk is under way")
        load, blocks, names = host.begin(tokens)
        time.sleep(0.05)
        assert not load.done()
    assert host.finish(load, blocks, names).tokens == 12
    assert prefetch.result(WAIT).tokens == 12
    assert len(PLAN.moved[Op.READ]) == 3, "a page was read twice"


def test_two_prefetches_of_a_prefix_read_it_once(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 8, limits=dataclasses.replace(PAGEWISE, prefetch_chunks=3))
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.01):
        both = [host.engine.prefetch(tokens), host.engine.prefetch(tokens)]
        assert [ended(prefetch) for prefetch in both] == [(8, "complete")] * 2
    assert len(PLAN.moved[Op.READ]) == 8


def test_a_prefetch_waits_for_pages_that_a_load_is_reading(open_host: OpenHost, device: str) -> None:
    host, tokens = stocked(open_host, 4, device=device)
    with PLAN.rule(Op.READ, Fault.HANG):
        load, blocks, names = host.begin(tokens[:8])
        until(lambda: PLAN.held == 2, "the load hangs")
        prefetch = host.engine.prefetch(tokens)
        time.sleep(0.15)
        assert not prefetch.done()
        assert PLAN.held == 2
    assert host.finish(load, blocks, names).tokens == 8
    assert prefetch.result(WAIT).tokens == 16
    assert len(PLAN.moved[Op.READ]) == 4


def test_many_at_once_take_turns(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    prompts = [stored(host, seed, pages) for seed, pages in ((1, 7), (2, 7), (3, 4), (4, 6))]
    owner = {offset: n for n, tokens in enumerate(prompts) for offset in offsets(host, tokens)}
    with PLAN.rule(Op.READ, Fault.HANG, times=1) as first:
        prefetches = [host.engine.prefetch(tokens) for tokens in prompts]
        until(lambda: PLAN.held == 1, "the first chunk is under way")
        first.release()
        assert [ended(prefetch) for prefetch in prefetches] == [
            (7, "complete"), (7, "complete"), (4, "complete"), (6, "complete"),
        ]  # fmt: skip
    counts = [0] * 4
    for offset in PLAN.moved[Op.READ][1:]:  # the others came after the first chunk had begun
        counts[owner[offset]] += 1
        waiting = [n for n, total in zip(counts, (6, 7, 4, 6), strict=True) if n < total]
        assert max(counts) <= min(waiting, default=7) + 1
    assert counts == [6, 7, 4, 6]


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("by", ["cancel", "block"])
def test_cancelled_at_any_point_it_ends_after_the_chunk_under_way(open_host: OpenHost, chunks: int, by: str) -> None:
    host, tokens = stocked(open_host, 6)
    with PLAN.rule(Op.READ, Fault.HANG, skip=chunks):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1 or prefetch.done(), "so many chunks are there")
        assert prefetch.tokens == 4 * chunks
        if by == "cancel":
            prefetch.cancel()
            prefetch.cancel()
        else:
            with prefetch:
                pass
        assert prefetch.done() == (chunks == 6)
    moved = min(6, chunks + 1)
    assert ended(prefetch) == (moved, "complete" if chunks == 6 else "cancelled")
    report = prefetch.result(0)
    assert report.pages == {"loaded": moved, **({"left": 6 - moved} if moved < 6 else {})}
    nothing_held(host.engine)
    assert host.engine.lookup(tokens).tiers == ("cpu",) * moved + ("ssd",) * (6 - moved)
    assert len(PLAN.moved[Op.READ]) == moved


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_wait_takes_what_is_there_by_then_and_stops(open_host: OpenHost, seconds: float) -> None:
    host, tokens = stocked(open_host, 6)
    with PLAN.rule(Op.READ, Fault.HANG, skip=2):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1, "the third chunk hangs")
        begun = time.monotonic()
        assert (prefetch.wait(seconds) if seconds else prefetch.wait()) == 8
        assert seconds <= time.monotonic() - begun < WAIT / 2
        assert not prefetch.done()
    assert ended(prefetch) == (3, "stopped")
    assert prefetch.wait() == 12


@pytest.mark.parametrize("seconds", [None, WAIT])
def test_wait_takes_as_long_as_the_pages_take(open_host: OpenHost, seconds: float | None) -> None:
    host, tokens = stocked(open_host, 6)
    begun = time.monotonic()
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.02):
        prefetch = host.engine.prefetch(tokens)
        assert prefetch.wait(seconds) == 24
    assert prefetch.done()
    assert time.monotonic() - begun < WAIT / 2
    assert ended(prefetch) == (6, "complete")


def test_wait_without_a_limit_gives_up_after_the_deadline(open_host: OpenHost) -> None:
    host = slow_host(open_host, deadline=0.4)
    other, tokens = stored(host, 1, 20), stored(host, 2, 1)
    theirs = offsets(host, other)
    with PLAN.rule(Op.READ, Fault.DELAY, lambda offset: offset in theirs, seconds=0.1):
        prefetch = host.engine.prefetch(other)
        begun = time.monotonic()
        there = prefetch.wait(None)
        assert 0.4 <= time.monotonic() - begun < WAIT / 2
        assert there < 80
        assert ended(prefetch)[1] == "deadline"
    assert host.load(tokens).tokens == 4


def test_the_quota_holds_until_somebody_uses_what_is_there(open_host: OpenHost) -> None:
    host = slow_host(open_host, cpu=10, limits=dataclasses.replace(PAGEWISE, prefetch_share=0.5, prefetch_chunks=2))
    one, two, three = stored(host, 1, 8), stored(host, 2, 4), stored(host, 3, 2)
    assert ended(host.engine.prefetch(one)) == (5, "quota")
    assert ended(host.engine.prefetch(two)) == (0, "quota")
    stats = prefetch_stats(host.engine)
    assert (stats["held_pages"], stats["unused_pages"], stats["quota_pages"]) == (5, 5, 5)
    assert host.engine.lookup(one).tiers == ("cpu",) * 5 + ("ssd",) * 3
    assert prefetch_stats(host.engine)["unused_pages"] == 5, "a lookup is no use"
    assert host.load(one[:12]).tokens == 12
    stats = prefetch_stats(host.engine)
    assert (stats["used_pages"], stats["unused_pages"], stats["lost_pages"]) == (3, 2, 0)
    assert ended(host.engine.prefetch(two)) == (3, "quota")
    drop_from(host.engine, "cpu")
    assert ended(host.engine.prefetch(three)) == (2, "complete"), "pages that are gone hold nothing"
    stats = prefetch_stats(host.engine)
    assert (stats["used_pages"], stats["unused_pages"], stats["lost_pages"]) == (3, 2, 5)
    assert ended(host.engine.prefetch(one)) == (3, "quota")
    stats = prefetch_stats(host.engine)
    assert stats["ended"] | {"quota": 4, "complete": 1} == stats["ended"]
    assert sum(stats["ended"].values()) == stats["requests"] == 5
    assert stats["pages"] == {"loaded": 13}
    assert stats["bytes"] == 13 * host.layout.page_bytes
    assert stats["used_pages"] + stats["lost_pages"] + stats["unused_pages"] == 13


def test_a_page_that_is_used_on_its_way_counts_as_used(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 1)
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1, "a chunk is under way")
        load, blocks, names = host.begin(tokens)
    assert host.finish(load, blocks, names).bytes_by_tier == {"cpu": host.layout.page_bytes}
    prefetch.result(WAIT)
    stats = prefetch_stats(host.engine)
    assert (stats["used_pages"], stats["held_pages"]) == (1, 0)


def test_without_a_slot_that_may_go_it_ends(open_host: OpenHost) -> None:
    host = slow_host(open_host, cpu=6)
    tokens, other = stored(host, 1, 5), stored(host, 2, 4)
    host.load(other)
    planner = host.engine.loader.planner
    plan = planner.plan([host.engine.pages(other)], "somebody")
    try:
        report = host.engine.prefetch(tokens).result(WAIT)
        assert (report.tokens, report.end, report.pages) == (8, PrefetchEnd.NO_ROOM, {"loaded": 2, "left": 3})
    finally:
        planner.end(plan)


def test_it_does_not_push_out_what_comes_before_it(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 8, cpu=4)
    host.load(tokens[:8])
    other = prompt(2, 2)
    host.keep(other)
    report = host.engine.prefetch(tokens, start=4).result(WAIT)
    assert report.pages == {"present": 1, "loaded": 2, "left": 4}
    assert report.end is PrefetchEnd.NO_ROOM
    assert host.engine.lookup(tokens).tiers == ("cpu",) * 4 + ("ssd",) * 4


def test_more_than_the_queue_holds_end_at_once(open_host: OpenHost) -> None:
    host = slow_host(open_host)
    tokens, other = (stored(host, seed, 2) for seed in range(2))
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetches = [host.engine.prefetch(tokens) for _ in range(MOST)]
        more = host.engine.prefetch(other)
        assert not any(p.done() for p in prefetches)
        assert ended(more) == (0, "queue_full")
        assert prefetch_stats(host.engine)["under_way"] == MOST
    assert {ended(p)[1] for p in prefetches} == {"complete"}
    assert ended(host.engine.prefetch(other)) == (2, "complete")


@pytest.mark.parametrize(
    ("fault", "status"), [(Fault.FLIP, "checksum"), (Fault.EIO, "io_error"), (Fault.SHORT, "short_read")]
)
@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_a_page_that_cannot_be_read_ends_it_and_one_whose_bytes_are_bad_goes(
    open_host: OpenHost, fault: Fault, status: str, chunk: int
) -> None:
    """Behind bad bytes the other pages come: they may be bad, too, and whoever computes them finds that out here."""
    host, tokens = stocked(open_host, 6, limits=dataclasses.replace(PAGEWISE, prefetch_bytes=chunk * EXTENT))
    slot = host.engine.manager.ssd.index.slot(host.engine.pages(tokens)[2].key)  # type: ignore[union-attr]
    with PLAN.rule(Op.READ, fault, lambda offset: offset == slot * EXTENT, bit=11):
        report = host.engine.prefetch(tokens).result(WAIT)
    begun = 6 if fault is Fault.FLIP else min(6, (2 // chunk + 1) * chunk)
    assert (report.tokens, report.end) == (8, PrefetchEnd.ERROR)
    assert report.pages == {"loaded": begun - 1, status: 1, **({"left": 6 - begun} if begun < 6 else {})}
    nothing_held(host.engine)
    left = 8 if fault is Fault.FLIP else 24
    assert tokens_of(host.engine, tokens) == left
    assert host.load(tokens).tokens == left
    assert prefetch_stats(host.engine)["pages"] == {"loaded": begun - 1, status: 1}


def test_late_reads_go_to_quarantine(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 3, deadline=0.3)
    with PLAN.rule(Op.READ, Fault.HANG, times=1):
        prefetch = host.engine.prefetch(tokens)
        report = prefetch.result(WAIT)
        assert (report.pages, report.end) == ({"deadline": 1, "left": 2}, PrefetchEnd.ERROR)
        assert [lease["owner"] for lease in host.engine.stats()["leases"]] == ["quarantine"]
        assert host.engine.prefetch(tokens).result(0).pages == {}
        assert host.engine.check().problems == ()
    nothing_held(host.engine)
    assert ended(host.engine.prefetch(tokens)) == (3, "complete")


@pytest.mark.parametrize("invalidate", [False, True])
def test_what_is_cleared_under_way_does_not_come_back(open_host: OpenHost, invalidate: bool) -> None:
    host, tokens = stocked(open_host, 5)
    with PLAN.rule(Op.READ, Fault.HANG, skip=1):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1, "the second chunk is under way")
        host.engine.invalidate(host.engine.namespace()) if invalidate else host.engine.clear()
        assert not prefetch.done()
    report = prefetch.result(WAIT)
    assert (report.pages, report.end) == ({"loaded": 1, "cleared": 1, "left": 3}, PrefetchEnd.MISSING)
    assert tokens_of(host.engine, tokens) == 0
    nothing_held(host.engine)
    assert prefetch_stats(host.engine)["held_pages"] == 0


def test_pages_that_leave_the_ssd_meanwhile_end_it(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 5)
    with PLAN.rule(Op.READ, Fault.HANG, skip=1):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1, "the second chunk is under way")
        drop_from(host.engine, "ssd")
    assert ended(prefetch) == (2, "missing")
    assert prefetch.result(0).pages == {"loaded": 2, "left": 3}


@pytest.mark.parametrize("where", ["chunk", "turn"])
def test_something_unforeseen_ends_it_and_the_next_call_begins_anew(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    host, tokens = stocked(open_host, 4)
    loader = host.engine.loader
    with monkeypatch.context() as patch:
        broken = (loader, "bring") if where == "chunk" else (loader.planner, "plan_prefetch")
        patch.setattr(*broken, lambda *args, **options: 1 // 0)
        assert ended(host.engine.prefetch(tokens)) == (0, "error")
        until(lambda: "ZeroDivisionError" in caplog.text, "the log says what it ended with")
    nothing_held(host.engine)
    assert len(host.engine.manager.cpu.index) == 0
    assert ended(host.engine.prefetch(tokens)) == (4, "complete")


def test_ctrl_c_in_a_call_leaves_no_request_behind(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the interrupted call still undoes what it has begun, or was interrupted as it undid it. A turn that fails
    on such a request would keep the manager's lock, and the engine could not be closed."""
    host, tokens = stocked(open_host, 4)
    prefetcher, pages = host.engine._parts.prefetcher, host.engine.pages(tokens)
    add = prefetching.PrefetchQueue.add

    def interrupted(queue: prefetching.PrefetchQueue, request: prefetching.PrefetchRequest) -> None:
        add(queue, request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefetching.PrefetchQueue, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prefetcher.start(pages)
        patch.setattr(prefetching.PrefetchQueue, "drop", lambda queue, request: None)
        with pytest.raises(KeyboardInterrupt):
            prefetcher.start(pages)
    assert ended(host.engine.prefetch(tokens)) == (4, "complete")
    until(lambda: prefetch_stats(host.engine)["under_way"] == 0, "no request is left")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    nothing_held(host.engine)


def test_a_report_that_is_late_says_what_to_do(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 4)
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetch = host.engine.prefetch(tokens)
        until(lambda: PLAN.held == 1, "a chunk is under way")
        with pytest.raises(DeadlineError, match="3 of 4 pages have not begun") as caught:
            prefetch.result(0.02)
        assert "cancel()" in caught.value.hint
    assert ended(prefetch) == (4, "complete")


# -- the engine's end --------------------------------------------------------------------------------------------------


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gdscache-prefetch"))


@pytest.mark.parametrize("drain", [False, True])
def test_close_ends_prefetches_after_the_chunk_under_way(slab: Any, drain: bool) -> None:
    host = Host(make_config(slab, transport=FAULTY, cpu=24, ssd=64), limits=PAGEWISE)
    prompts = [stored(host, seed, 4) for seed in (1, 2)]
    with PLAN.rule(Op.READ, Fault.HANG):
        prefetches = [host.engine.prefetch(tokens) for tokens in prompts]
        until(lambda: PLAN.held == 1, "a chunk is under way")
        closer = threading.Thread(target=host.engine.close, args=(drain,))
        closer.start()
        until(prefetches[1].done, "what has no chunk under way ends at once")
        assert not prefetches[0].done()
    closer.join(WAIT)
    assert not closer.is_alive()
    assert [ended(p) for p in prefetches] == [(1, "closed"), (0, "closed")]
    assert threads() == []
    for use in (prefetches[0].cancel, prefetches[0].wait, prefetches[1].done):
        use()
    with pytest.raises(EngineClosedError):
        host.engine.prefetch(prompts[0])


def test_the_threads_are_there_before_there_is_something_to_do(open_host: OpenHost) -> None:
    host, tokens = stocked(open_host, 2)
    host.load(tokens)
    assert ended(host.engine.prefetch(tokens)) == (2, "complete")
    assert ended(host.engine.prefetch(prompt(2, 2))) == (0, "complete")
    begun = threads()
    assert len(begun) == 2
    drop_from(host.engine, "cpu")
    assert ended(host.engine.prefetch(tokens)) == (2, "complete")
    assert threads() == begun


@pytest.mark.parametrize(("cpu", "ssd"), [(None, 8), (4, None)])
def test_without_both_tiers_there_is_nothing_to_bring(open_host: OpenHost, cpu: int | None, ssd: int | None) -> None:
    host, tokens = kept(open_host, 3, cpu=cpu, ssd=ssd)
    assert ended(host.engine.prefetch(tokens)) == (3 if cpu else 0, "complete")
    assert threads() == []


@pytest.mark.parametrize("seconds", LONG)
@pytest.mark.parametrize("transport", ["tests.support.faulty:FaultyMerging", "tests.support.faulty:FaultyUring"])
def test_many_threads_prefetch_load_cancel_and_clear(open_host: OpenHost, transport: str, seconds: float) -> None:
    host = slow_host(
        open_host,
        transport=transport,
        cpu=10,
        ssd=32,
        blocks=128,
        limits=EngineLimits(prefetch_bytes=2 * EXTENT, prefetch_share=0.4, ssd_reserve=0),
    )
    engine, end = host.engine, time.monotonic() + seconds
    prompts = [prompt(seed, 6) for seed in range(5)]
    limit = prefetch_stats(engine)["quota_pages"]
    assert limit == 4
    blocks = [host.take(6) for _ in range(4)]

    def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            tokens, action = rng.choice(prompts), rng.random()
            if action < 0.35:
                with engine.prefetch(tokens, start=4 * rng.randrange(3)) as prefetch:
                    if rng.random() < 0.5:
                        report = prefetch.result(WAIT)
                        assert report.end in PrefetchEnd
                    elif rng.random() < 0.5:
                        prefetch.wait()
            elif action < 0.6:
                hit = engine.lookup(tokens)
                engine.load(hit, blocks[number][: len(hit.pages)]).result(WAIT)
            elif action < 0.9:
                engine.store(tokens, blocks[number]).release_event.synchronize(WAIT)
            elif action < 0.93:
                engine.clear()
            elif action < 0.96:
                drop_from(engine, "cpu")
            else:
                assert prefetch_stats(engine)["held_pages"] <= limit

    with (
        PLAN.rule(Op.READ, Fault.DELAY, rate=0.2, seconds=0.003),
        PLAN.rule(Op.READ, Fault.EIO, rate=0.02),
        PLAN.rule(Op.READ, Fault.FLIP, rate=0.02),
    ):
        together(work, 4)
    until(lambda: prefetch_stats(engine)["under_way"] == 0, "prefetches end")
    settle(engine)
    stats = prefetch_stats(engine)
    assert sum(stats["ended"].values()) == stats["requests"] > 0
    assert stats["used_pages"] + stats["lost_pages"] + stats["unused_pages"] == stats["pages"].get("loaded", 0)
