"""Several ranks as processes, led by one engine: what is stored comes back on each, or on none."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdscache
from gdscache import CacheEngine, PageStatus, Rank
from gdscache.disk.directory import FileLock
from gdscache.disk.slab import SlabIO
from gdscache.errors import (
    CapacityError,
    InvalidValueError,
    NotARegularFileError,
    PlanesError,
    RankError,
    RankLostError,
    RankMismatchError,
    RankProtocolError,
)
from gdscache.gate.busy_periods import BusyPeriods
from gdscache.load import loader
from gdscache.load.handle import LayerwiseLoad
from gdscache.pages.layout import PageLayout
from gdscache.ranks import executor, wire
from gdscache.ranks.address import StoreMark
from gdscache.ranks.executor import RanksMoving
from gdscache.ranks.leader import Link, RankSet
from gdscache.ranks.loads import MixedMoving
from gdscache.ranks.rank import Service
from gdscache.storage.base import Op
from tests.support.faults import Fault, FaultPlan, FaultRule
from tests.support.faulty import PLAN as FAULTS
from tests.support.helpers import (
    MHA,
    MLA,
    PACKED,
    WAIT,
    drop_from,
    flip_file,
    layout_of,
    make_config,
    new_planes,
    our_threads,
    prompt,
    read_page,
    until,
    write_page,
)
from tests.support.pages import FAULTY, lose
from tests.support.pairs import pairs
from tests.support.ranks import RanksHost, bytes_of, fits

Open = Callable[..., RanksHost]
GOOD = PageStatus.LOADED


@pytest.fixture
def ranks_host(tmp_path: Path) -> Iterator[Open]:
    hosts: list[RanksHost] = []

    def open_(shards: list[int], **options: Any) -> RanksHost:
        hosts.append(RanksHost(tmp_path / "cache", shards, **options))
        return hosts[-1]

    yield open_
    for host in hosts:
        host.close()


class Here:
    """An engine and its ranks in this process, one for each of `pools`, its planes."""

    def __init__(self, stack: contextlib.ExitStack, config: dict[str, Any], pools: list[Any]) -> None:
        self.ranks = [stack.enter_context(Rank(planes, rank)) for rank, planes in enumerate(pools)]
        addresses = [rank.address for rank in self.ranks]
        self.engine = stack.enter_context(CacheEngine.from_config(config, ranks=addresses))

    def store(self, tokens: list[int], blocks: range) -> None:
        handle = self.engine.store(tokens, [*blocks])
        for rank in self.ranks:
            rank.store(handle.order)
        assert not handle.result(WAIT).dropped

    def begin(self, tokens: list[int], blocks: range) -> LayerwiseLoad:
        return self.engine.load(self.engine.lookup(tokens), [*blocks])


@contextlib.contextmanager
def here(config: dict[str, Any], *pools: Any) -> Iterator[Here]:
    with contextlib.ExitStack() as stack:
        yield Here(stack, config, [*pools])


def pool(layout: PageLayout, blocks: int = 6) -> Any:
    return new_planes(layout, blocks, layout.page_tokens)


def come_back(host: RanksHost, some: list[list[int]]) -> None:
    """Behind a restart these prompts of five pages are brought, pinned and loaded."""
    host.restart()
    for tokens in some:
        with host.engine.prefetch(tokens, pin=WAIT) as prefetch:
            prefetch.result(WAIT)
            assert prefetch.hit().tokens == len(tokens)
        assert host.load(tokens)[0].pages == (GOOD,) * 5
    assert not host.engine.check().problems


@pytest.mark.parametrize("shards", [[0, 1], [0, 1, 2, 3], [0, 0], [0, 0, 1, 1]])
def test_what_is_stored_comes_back_on_every_rank_also_behind_a_restart(
    ranks_host: Open, device: str, shards: list[int]
) -> None:
    host = ranks_host(shards, model=MLA if max(shards) == 0 else MHA, rank_device=device)
    some = [prompt(number, 5) for number in range(1 if device == "cpu" else 3)]
    for tokens in some:
        assert host.store(tokens).tiers == (("cpu", "ssd"),) * 5
        assert host.load(tokens)[0].pages == (GOOD,) * 5
    for _ in range(1 if device == "cpu" else 2):
        drop_from(host.engine, "cpu")
        for tokens in some:
            report, _ = host.load(tokens)
            assert (report.pages, report.bytes_by_tier) == ((GOOD,) * 5, {"ssd": 5 * host.layout.page_bytes})
    come_back(host, some)


@pytest.mark.parametrize("shards", [[0, 1], [0, 0], pytest.param([0, 0, 1, 1], marks=pytest.mark.suite)])
def test_packed_pages_come_back_on_every_rank(ranks_host: Open, shards: list[int]) -> None:
    """A page that does not fit on one rank is kept as it is on all."""
    model = MLA | {"pack": "on"} if max(shards) == 0 else PACKED
    host = ranks_host(shards, model=model, cpu=256, ssd=512, bounce=64)
    some, unfit = [prompt(number, 5) for number in range(2)], []  # the plain tiers hold eight pages
    for tokens in some:
        keys = [page.key for page in host.engine.pages(tokens)]
        there = [all(fits(key, shard) for shard in shards) for key in keys]
        unfit += [key for key, fit in zip(keys, there, strict=True) if not fit]
        assert host.store(tokens).tiers == tuple(("cpu", "ssd") if fit else ("cpu_plain", "ssd_plain") for fit in there)
        assert host.load(tokens)[0].pages == (GOOD,) * 5
    assert 0 < len(unfit) <= 8
    assert host.engine.stats()["stores"]["unfit"] == len(unfit)
    assert not host.engine.check().problems
    drop_from(host.engine, "cpu")
    drop_from(host.engine, "cpu_plain")
    for tokens in some:
        assert host.load(tokens)[0].pages == (GOOD,) * 5
    come_back(host, some)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("shards", [[0, 0], pytest.param([0, 0, 1, 1], marks=pytest.mark.suite)])
def test_ranks_with_equal_bytes_do_not_meet_in_the_bounce_reserve(
    ranks_host: Open, shards: list[int], pack: bool
) -> None:
    """They map one memory, and each reads pages through it at a time of its own, some slots again and again."""
    parts, model = 1 + max(shards), MHA if max(shards) else MLA
    host = ranks_host(shards, model=model | {"pack": "on" if pack else "off"}, cpu=None, ssd=600, bounce=8 * parts)
    tokens = prompt(1, 14 if pack else 40)  # packed, half of them are plain pages
    assert not host.store(tokens).dropped
    for _ in range(10 if pack else 3):
        assert host.load(tokens)[0].pages == (GOOD,) * (len(tokens) // host.layout.page_tokens)
    host.engine.close()
    few = host.config | {"host_buffer": 2 * parts * host.layout.extent_bytes}
    with pytest.raises(CapacityError, match="host_buffer") as caught:
        CacheEngine.from_config(few, ranks=host.addresses)
    assert "raise host_buffer" in caught.value.hint


def test_each_rank_has_blocks_of_its_own(ranks_host: Open) -> None:
    """The leader names places, and each rank says which blocks these are: before the leader's move comes, and behind
    it."""
    host = ranks_host([0, 1])
    some, count = [prompt(number, 5) for number in range(6)], 5
    own = [[7, 3, 20, 11, 4], [40, 9, 2, 33, 21]]
    for number, tokens in enumerate(some, 1):
        keys = [page.key for page in host.engine.pages(tokens)]
        for rank, blocks in zip(host.ranks, own, strict=True):
            rank.tell("compute", blocks, keys)
            rank.hear()
        first, last = host.ranks if number % 2 else host.ranks[::-1]
        first.tell("place", -number, own[first.rank])
        first.hear()
        handle = host.engine.store(tokens, [*range(count)], after=StoreMark(-number, b""))
        assert not handle.release_event.done()
        last.tell("place", -number, own[last.rank])
        assert handle.result(WAIT).tiers == (("cpu", "ssd"),) * count
        last.hear()
    for tokens in some:
        hit = host.engine.lookup(tokens)
        load = host.engine.load(hit, [*range(count)])
        for rank, blocks in zip(host.ranks, own[::-1], strict=True):
            rank.tell("load into", load.order, blocks, [page.key for page in hit.pages], WAIT)
        assert [rank.hear() for rank in host.ranks] == [([GOOD.value] * count, [True] * count)] * 2
        assert load.result(WAIT).pages == (GOOD,) * count


def test_blocks_that_are_none_fail_on_their_rank_alone(ranks_host: Open) -> None:
    host = ranks_host([0, 1])
    tokens = prompt(1, 2)
    host.store(tokens)
    hit = host.engine.lookup(tokens)
    load = host.engine.load(hit, [0, 1])
    keys = [page.key for page in hit.pages]
    for rank, blocks in zip(host.ranks, ([5, 6], [5, 5]), strict=True):
        rank.tell("load into", load.order, blocks, keys, WAIT)
    good, bad = (rank.hear() for rank in host.ranks)
    assert good == ([GOOD.value] * 2, [True] * 2)
    assert GOOD.value not in bad[0]
    assert GOOD not in load.result(WAIT).pages
    assert host.load(tokens)[0].pages == (GOOD,) * 2, "the pages are as good as before"


def test_what_a_leader_tells_is_heard_by_its_number(ranks_host: Open) -> None:
    host = ranks_host([0, 1])
    for rank in host.ranks:
        rank.tell("told", 1, WAIT)
    for number in (1, 2, 3, 4):
        host.engine.tell_ranks(number, b"%d" % number)
    assert [rank.hear() for rank in host.ranks] == [b"1"] * 2
    assert host.every("told", 3, WAIT) == [b"3"] * 2
    assert host.every("told", 2, 0.01) == [b""] * 2, "that is over"
    assert host.every("told", 4, WAIT) == [b"4"] * 2
    assert host.every("told", 5, 0.01) == [b""] * 2
    for rank in host.ranks:
        rank.tell("told", 6, 10 * WAIT)
    host.engine.close()
    assert [rank.hear() for rank in host.ranks] == [b""] * 2, "the leader has gone"


def test_a_page_is_bad_everywhere_when_it_is_bad_on_one(ranks_host: Open, tmp_path: Path) -> None:
    host = ranks_host([0, 1])
    tokens = prompt(1, 4)
    host.store(tokens)
    drop_from(host.engine, "cpu")
    slot = host.engine.manager.tiers["ssd"].index.slot(host.engine.pages(tokens)[2].key)
    assert slot is not None
    flip_file(tmp_path / "cache" / "slab-0.0.1.bin", slot * host.layout.extent_bytes + 5, 3)
    report, ranks = host.load(tokens)
    assert [status.value for status in report.pages] == ["loaded", "loaded", "checksum", "loaded"]
    assert ranks == [["loaded"] * 4, ["loaded", "loaded", "checksum", "loaded"]]
    assert host.engine.lookup(tokens).tokens == 2 * host.layout.page_tokens


def test_each_shard_has_its_own_bytes_and_a_latent_has_them_once(ranks_host: Open, tmp_path: Path) -> None:
    host = ranks_host([0, 0], model=MLA)
    host.store(prompt(1, 3))
    assert sorted(path.name for path in (tmp_path / "cache").glob("slab*")) == ["slab-0.bin"]
    host.engine.close()
    host.shards = [0]  # its directory serves any number of ranks
    host.start_ranks()
    host.engine = host.open()
    assert host.load(prompt(1, 3))[0].pages == (GOOD,) * 3


@pytest.mark.parametrize(("how", "when"), pairs([signal.SIGSTOP, signal.SIGKILL], ["load", "store", "prefetch"]))
def test_a_rank_that_ends_or_hangs_costs_pages_and_no_more(
    ranks_host: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: int, when: str
) -> None:
    monkeypatch.setattr(executor, "GRACE_S", 0.3)
    host = ranks_host([0, 1], deadline=0.5)
    kept, fresh = prompt(1, 4), prompt(2, 4)
    until(lambda: not host.store(kept).dropped, "the pages are stored")
    until(lambda: not host.engine.stats()["leases"], "late writes of earlier tries have ended")
    drop_from(host.engine, "cpu")
    host.ranks[1].signal(how)
    began = time.monotonic()
    if when == "load":
        hit = host.engine.lookup(kept)
        load = host.engine.load(hit, [*range(len(hit.pages))])
        host.ranks[0].tell("load", load.order, [], [], 5.0)
        assert GOOD not in load.result(WAIT).pages
        host.ranks[0].hear()
    elif when == "store":
        handle = host.engine.store(fresh, [8, 9, 10, 11])
        host.ranks[0].tell("store", handle.order)
        assert len(handle.result(WAIT).dropped) == 4
        host.ranks[0].hear()
    else:
        with host.engine.prefetch(kept) as prefetch:
            assert prefetch.result(WAIT).tokens == 0
    assert time.monotonic() - began < 30
    until(lambda: host.engine.stats()["ranks"][1]["state"] != "running", "the rank is missed")
    assert host.engine.lookup(kept).tokens == 0  # nothing is promised that one rank cannot bring
    cause = "rank_away" if how == signal.SIGSTOP else "rank_lost"
    caplog.clear()
    for number in range(3, 6):
        assert {*host.engine.store(prompt(number, 2), [8, 9]).result(WAIT).dropped.values()} == {cause}
    assert not [one for one in caplog.records if one.levelname == "ERROR"], "it was said once"
    if how == signal.SIGSTOP:
        host.ranks[1].signal(signal.SIGCONT)
        until(lambda: host.engine.stats()["ranks"][1]["state"] == "running", "the rank is back")
        assert host.load_all(kept)
        until(lambda: not host.store(fresh).dropped, "stores are taken again")
        assert host.load_all(fresh)
    host.restart()
    assert host.load_all(kept)


@pytest.mark.parametrize(("what", "told"), [("load", None), ("load", 0), ("load", 2), ("store", 0), ("store", 2)])
def test_a_rank_that_dies_while_another_waits_for_its_order_costs_no_time(
    ranks_host: Open, what: str, told: int | None
) -> None:
    """`told`: the one rank that the order is passed on to. Who gets it behind that moves nothing."""
    host, tokens = ranks_host([0, 1, 2], model=MHA | {"kv_heads": 3}, deadline=30.0), prompt(1, 4)
    until(lambda: not host.store(tokens).dropped, "the pages are stored")
    began = time.monotonic()
    if what == "load":
        load = host.engine.load(host.engine.lookup(tokens), [*range(4)])
        given: tuple[Any, ...] = ("load", load.order if told is not None else b"", [], [], 5.0)
    else:
        handle = host.engine.store(prompt(2, 4), [*range(4)])
        given = "store", handle.order
    if told is not None:
        host.ranks[told].tell(*given)
    host.ranks[2].kill()
    if what == "load":
        assert GOOD not in load.result(WAIT).pages
    else:
        assert len(handle.result(WAIT).dropped) == 4
    assert time.monotonic() - began < 10
    if told is not None:
        late = host.ranks[1]
        late.tell(*given)
        answer = late.hear()
        assert what == "store" or GOOD.value not in answer[0]


def test_a_rank_that_answers_while_it_is_given_up_is_not_away_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GRACE_S", 0.1)
    late, tokens = RankSet.late, prompt(1, 2)

    def after_its_answer(ranks: RankSet, link: Link, number: int, owing: Container[int]) -> None:
        of.arm.set()
        until(lambda: link.rank not in owing, "it has answered")
        late(ranks, link, number, owing)

    with here(make_config(tmp_path, deadline=0.1), pool(layout_of(MHA))) as one:
        one.store(tokens, range(2))
        of = Held(one.ranks[0]._service, monkeypatch)
        monkeypatch.setattr(RankSet, "late", after_its_answer)
        load = one.begin(tokens, range(2, 4))
        one.ranks[0].load(load.order)
        load.result(WAIT)
        until(lambda: not one.engine.stats()["leases"], "the load is over")
        assert one.engine.stats()["ranks"][0]["state"] == "running"
        assert one.engine.lookup(tokens).tokens == len(tokens)


class Held:
    """A service whose ends of moves are told from `arm` on."""

    def __init__(self, service: Service | None, patch: pytest.MonkeyPatch) -> None:
        assert service is not None
        self.arm, self._tell = threading.Event(), service._tell
        patch.setattr(service, "_tell", self._held)

    def _held(self, *given: Any, **told: Any) -> None:
        self.arm.wait(WAIT)
        self._tell(*given, **told)


def test_what_late_reads_kept_is_free_when_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader dies while a disk hangs: the directory is its successor's when the reads have ended."""
    monkeypatch.setattr("gdscache.ranks.rank.CLOSE_S", 0.05)
    planes, config = pool(layout_of(MHA)), make_config(tmp_path / "cache", deadline=0.2, transport=FAULTY, cpu=None)
    tokens = prompt(1, 2)
    with here(config, planes) as one, FAULTS.rule(Op.READ, Fault.HANG) as rule:
        one.store(tokens, range(2))
        rank, ranks = one.ranks[0], one.engine._parts.ranks
        load = one.begin(tokens, range(2, 4))
        assert GOOD not in rank.load(load.order).result(WAIT).pages
        load.result(WAIT)
        for link in ranks.links:  # as the kernel ends a process that was killed
            link.channel._socket.shutdown(2)
        assert rank.left(WAIT)
        path = tmp_path / "cache" / "slab-0.bin"
        until(lambda: "gdscache-rank-late" in our_threads(), "the rank serves the next leader")
        with pytest.raises(BlockingIOError):
            FileLock(path, create=False)
        rule.release()
        until(lambda: "gdscache-rank-late" not in our_threads(), "memory and files are free")
        FileLock(path, create=False).close()
    with here(config, planes) as one:
        load = one.begin(tokens, range(2, 4))
        assert one.ranks[0].load(load.order).result(WAIT).pages == load.result(WAIT).pages == (GOOD,) * 2


def test_orders_of_another_call_are_refused(tmp_path: Path) -> None:
    with here(make_config(tmp_path), pool(layout_of(MHA))) as one:
        rank, handle = one.ranks[0], one.engine.store(prompt(1, 2), [0, 1])
        others = "an order has .* and no requests", "an order is None", "an order is 'text'", "no head"
        for wrong, said in zip((handle.order, None, "text", b""), others, strict=True):
            with pytest.raises(RankProtocolError, match=said) as caught:
                rank.load(wrong)  # type: ignore[arg-type]
            assert caught.value.hint
        rank.store(handle.order)
        handle.result(WAIT)
        load = one.begin(prompt(1, 2), range(2, 4))
        for order, said in ((load.order, "an order has .* and no store"), ("text", "an order is 'text'")):
            with pytest.raises(RankProtocolError, match=said):
                rank.store(order)  # type: ignore[arg-type]
        assert rank.load(load.order).result(WAIT).pages == (GOOD,) * 2


def test_a_rank_that_a_forked_child_closes_serves_on(ranks_host: Open) -> None:
    host = ranks_host([0, 1])
    tokens = prompt(1, 4)
    assert all(host.store(tokens).tiers)
    assert host.every("close in a fork") == [0, 0]
    assert host.load_all(tokens)
    host.engine.close()  # and the ranks' sockets take another leader
    host.engine = host.open()
    assert host.load_all(tokens)


def test_a_rank_that_is_closed_first_finishes_what_it_has(ranks_host: Open, caplog: pytest.LogCaptureFixture) -> None:
    """As Ctrl-C ends processes: it takes leave, and is not missed."""
    host, tokens = ranks_host([0, 1]), prompt(1, 4)
    keys = [page.key for page in host.engine.pages(tokens)]
    host.every("compute", [*range(4)], keys)
    handle = host.engine.store(tokens, [*range(4)])
    host.every("store", handle.order)
    for rank in host.ranks:
        rank.line.close()
        rank.process.join(WAIT)
    until(lambda: {rank["state"] for rank in host.engine.stats()["ranks"]} == {"lost"}, "the ranks have left")
    told = [record for record in caplog.records if record.name == "gdscache.ranks"]
    assert [record.levelname for record in told] == ["WARNING"] * 2
    assert all("was closed" in record.getMessage() for record in told)
    stored = 4 - len(handle.result(WAIT).dropped)
    host.restart()
    assert host.engine.lookup(tokens).tokens == stored * host.layout.page_tokens


def test_a_rank_that_is_lost_in_a_flush_is_a_failed_write(
    ranks_host: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = ranks_host([0, 1], cpu=None, ssd_options={"durability": "power"})
    call = RankSet.call

    def lost(ranks: RankSet, do: str, *given: Any, **more: Any) -> Any:
        if do == "flush":
            raise RankLostError("rank 1 is lost", "see the log of its process")
        return call(ranks, do, *given, **more)

    monkeypatch.setattr(RankSet, "call", lost)
    assert host.store(prompt(1, 4)).dropped == dict.fromkeys(range(4), "io_error")
    until(lambda: "commits no pages: rank 1 is lost" in caplog.text, "the log has it")
    assert not any(record.exc_info for record in caplog.records)


def test_a_flush_that_hangs_on_a_rank_fails_the_write_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, flush = threading.Event(), SlabIO.flush
    config = make_config(tmp_path, cpu=None, ssd_options={"durability": "power"}, deadline=1.2)
    with here(config, pool(layout_of(MHA))) as one, contextlib.ExitStack() as last:
        last.callback(goes_on.set)
        with monkeypatch.context() as disk:
            disk.setattr(SlabIO, "flush", lambda io: (goes_on.wait(), flush(io)))
            handle = one.engine.store(prompt(1, 4), range(4))
            one.ranks[0].store(handle.order)
            assert handle.result(WAIT / 2).dropped == dict.fromkeys(range(4), "io_error")
            goes_on.set()
        one.store(prompt(1, 4), range(4))


def test_a_leader_that_dies_leaves_ranks_that_serve_the_next(ranks_host: Open) -> None:
    host = ranks_host([0, 1])
    host.store(prompt(1, 4))
    for link in host.engine._parts.ranks.links:  # as the kernel ends a process that was killed
        link.channel._socket.shutdown(2)
    until(lambda: host.engine.stats()["ranks"][0]["state"] == "lost", "the leader sees it")
    host.engine.close()
    host.engine = host.open()
    assert host.load(prompt(1, 4))[0].pages == (GOOD,) * 4


def test_loads_are_measured_from_when_ranks_come_to_them(ranks_host: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before a load, which ranks are still busy with, are not what a tier takes."""
    host, tokens = ranks_host([0, 1]), prompt(1, 5)
    told: list[tuple[str, int, float]] = []
    monkeypatch.setattr(host.engine.manager, "busy", BusyPeriods(lambda *period: told.append(period)))
    host.store(tokens)
    every, came, ended = host.every, list[float](), list[float]()

    def after_a_while(what: str, *given: Any, **more: Any) -> list[Any]:
        if what == "load":
            time.sleep(0.1)
            came.append(time.monotonic())
        return every(what, *given, **more)

    monkeypatch.setattr(host, "every", after_a_while)
    for _ in range(3):
        assert host.load(tokens)[0].pages == (GOOD,) * 5
        ended.append(time.monotonic())
    until(lambda: (host.engine.manager.busy.tell(), len(told))[1] == 3, "loads are measured")
    assert {period[:2] for period in told} == {("cpu", 5 * host.layout.page_bytes)}
    assert all(seconds <= end - begin for (*_, seconds), begin, end in zip(told, came, ended, strict=True))


def test_a_store_that_no_rank_was_told_of_is_dropped(ranks_host: Open) -> None:
    host = ranks_host([0, 1], deadline=0.5)
    handle = host.engine.store(prompt(1, 2), [0, 1])
    host.ranks[0].tell("store", handle.order)
    assert len(handle.result(WAIT).dropped) == 2
    assert host.engine.stats()["ranks"][1]["state"] == "running"
    host.ranks[0].hear()


def test_another_version_or_protocol_is_refused_with_both(ranks_host: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ranks_host([0, 1])
    host.engine.close()
    with monkeypatch.context() as other:
        other.setattr(gdscache, "__version__", "9.9.9")
        with pytest.raises(RankMismatchError, match=r"leader is gdscache 9\.9\.9 .*, and rank 0 is "):
            host.open()
    with monkeypatch.context() as other:
        other.setattr(wire, "PROTOCOL", wire.PROTOCOL + 1)
        with pytest.raises(RankMismatchError, match=rf"\(protocol {wire.PROTOCOL}\), and rank 0 is "):
            host.open()
    host.engine = host.open()  # the ranks serve the next leader
    assert host.store(prompt(1, 2)).tiers == (("cpu", "ssd"),) * 2


def test_an_open_that_is_refused_changes_no_shard(ranks_host: Open, tmp_path: Path) -> None:
    """And one that is not cuts them all."""
    host, tokens = ranks_host([0, 1], cpu=None), prompt(1, 5)
    host.store(tokens)
    host.engine.close()
    config, path = host.config, Path(host.config["ssd"]["path"])
    lower = {**config, "ssd": config["ssd"] | {"capacity": 2 * 3 * host.layout.extent_bytes}}
    away = {**config, "ssd": config["ssd"] | {"path": str(tmp_path / "away")}}
    before = [file.stat().st_size for file in sorted(path.glob("slab-*"))]
    for host.config, where in ((lower, path), (away, tmp_path / "away")):
        (where / "status").mkdir(parents=True)
        where.chmod(0o700)
        with pytest.raises(NotARegularFileError):
            host.open()
        (where / "status").rmdir()
    assert [file.stat().st_size for file in sorted(path.glob("slab-*"))] == before
    assert [file.name for file in (tmp_path / "away").iterdir()] == ["lock"]
    for host.config, slots, pages in ((away, 64, 0), (config, 64, 5), (lower, 3, 3)):
        host.engine = host.open()
        files = Path(host.config["ssd"]["path"]).glob("slab-*")
        assert [file.stat().st_size for file in files] == [slots * host.layout.extent_bytes] * 2
        assert host.load(tokens)[0].pages == (GOOD,) * pages
        assert host.engine.check().ok
        host.engine.close()


def test_an_order_of_another_leader_brings_nothing(ranks_host: Open) -> None:
    host, tokens = ranks_host([0, 1]), prompt(1, 2)
    host.store(tokens)
    hit = host.engine.lookup(tokens)
    load = host.engine.load(hit, [0, 1])
    order = load.order
    answers = host.every("load", order, [], [], 5.0)
    assert [statuses for statuses, _ in answers] == [[GOOD.value] * 2] * 2
    host.engine.close()
    host.engine = host.open()
    answers = host.every("load", order, [], [], 5.0)
    assert [statuses for statuses, _ in answers] == [[PageStatus.RANK_LOST.value] * 2] * 2


def test_what_ranks_cannot_do_is_refused_by_name(ranks_host: Open, tmp_path: Path) -> None:
    host = ranks_host([0, 1])
    some = host.addresses
    with pytest.raises(RankError, match="number them 0 to n - 1"):
        CacheEngine.from_config(host.config, ranks=[some[0], some[0]])
    with pytest.raises(PlanesError, match="planes are of type list"):
        Rank([1])  # type: ignore[list-item]
    for none in ([], some[0]):  # the address itself, without a list around it
        with pytest.raises(RankError, match="ranks holds nothing, not RankAddress"):
            CacheEngine.from_config(host.config, ranks=none)
    with pytest.raises(InvalidValueError, match="gds is on"):
        CacheEngine.from_config(host.config | {"ssd": host.config["ssd"] | {"gds": "on"}}, ranks=some)
    with pytest.raises(InvalidValueError, match="after is given"):
        host.engine.store(prompt(1, 1), [0], after=object())
    host.engine.close()
    with pytest.raises(PlanesError, match="expected"):
        CacheEngine.from_config(host.config | {"model": MHA | {"kv_heads": 2}}, ranks=some)
    host.engine = host.open()  # the ranks are as they were
    assert host.store(prompt(1, 2)).tiers == (("cpu", "ssd"),) * 2


def test_pages_that_a_cancel_left_unread_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load's plain pages are read first. It is cancelled meanwhile, and has slots of the CPU tier for the others."""
    cancelled, cancel = threading.Event(), MixedMoving.cancel
    monkeypatch.setattr(MixedMoving, "cancel", lambda moving: (cancel(moving), cancelled.set()))
    layout, tokens = layout_of(PACKED), prompt(1, 6)
    planes, options = pool(layout, 12), {"transport": FAULTY, "load": {"verify": "once"}}
    config = make_config(tmp_path / "cache", model=PACKED, cpu=256, ssd=512, bounce=64, **options)
    with here(config, planes) as one:
        keys = [page.key for page in one.engine.pages(tokens)]
        assert {fits(key, 0) for key in keys} == {True, False}
        for block, key in enumerate(keys):
            write_page(planes, layout, [block], bytes_of(layout, key, 0))
        one.store(tokens, range(6))
    with here(config, planes) as one:
        with FAULTS.rule(Op.READ, Fault.HANG):
            load = one.begin(tokens, range(6, 12))
            one.ranks[0].load(load.order)
            until(lambda: FAULTS.held, "plain pages are read")
            load.cancel()
            assert cancelled.wait(WAIT)
        load.release_event.synchronize(WAIT)
        load = one.begin(tokens, range(6, 12))
        assert one.ranks[0].load(load.order).result(WAIT).pages == load.result(WAIT).pages == (GOOD,) * 6
        for block, key in enumerate(keys, 6):
            assert np.array_equal(read_page(planes, layout, [block]), bytes_of(layout, key, 0))
        assert not one.engine.check().problems


def test_a_load_that_is_cancelled_before_a_rank_begins_it_is_no_error_of_a_disk(tmp_path: Path) -> None:
    tokens = prompt(1, 3)
    with here(make_config(tmp_path, cpu=None), pool(layout_of(MHA))) as one:
        one.store(tokens, range(3))
        load = one.begin(tokens, range(3, 6))
        order = load.order
        load.cancel()
        assert load.result(WAIT).pages == (PageStatus.ABORTED,) * 3
        assert not one.engine.manager.quarantine.failed_reads.watching
        assert one.ranks[0].load(order).result(WAIT).tokens == 0
        load = one.begin(tokens, range(3, 6))
        assert one.ranks[0].load(load.order).result(WAIT).pages == (GOOD,) * 3


def test_a_load_that_begins_while_its_rank_ends_has_a_verdict_and_writes_nothing_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1, 3)
    with here(make_config(tmp_path, cpu=None), pool(layout_of(MHA))) as one:
        one.store(tokens, range(3))
        (rank,), load, begun = one.ranks, one.begin(tokens, range(3, 6)), Service._begun
        service, ending = rank._service, threading.Thread(target=rank.close)
        assert service is not None

        def late(service: Service, *move: Any) -> Any:
            ending.start()
            until(lambda: service._workers._closed, "its threads end")
            return begun(service, *move)

        monkeypatch.setattr(Service, "_begun", late)
        assert len(rank.load(load.order).result(WAIT).pages) == 3
        assert not service._moving
        ending.join(WAIT)
        assert not ending.is_alive()


def test_a_page_that_is_bad_on_one_rank_is_bad_behind_a_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has read its part on into the CPU tier, and says so first."""
    told, cancel = threading.Semaphore(0), Service._cancel
    monkeypatch.setattr(Service, "_cancel", lambda service, number: (cancel(service, number), told.release()))
    tokens, layout = prompt(1, 3), layout_of(MHA)
    pools = [pool(layout) for _ in range(2)]
    config = make_config(tmp_path / "cache", ssd=64, cpu=32, transport=FAULTY, load={"verify": "once"})

    def hang(name: str) -> contextlib.AbstractContextManager[FaultRule]:
        return FaultPlan.rule(FAULTS, Fault.HANG, Op.READ, where=lambda path, offset: path.endswith(name))

    with here(config, *pools) as both:
        both.store(tokens, range(3))
    with here(config, *pools) as both:
        flip_file(tmp_path / "cache" / "slab-0.0.1.bin", 5)
        with hang("slab-0.0.1.bin"):
            with hang("slab-0.bin"):
                load = both.begin(tokens, range(3, 6))
                loads = [rank.load(load.order) for rank in both.ranks]
                until(lambda: FAULTS.held >= 2, "both ranks read")
                load.cancel()
                assert all(told.acquire(timeout=WAIT) for _ in both.ranks)
            loads[0].result(WAIT)
            until(lambda: _answered(both.engine, 0), "the first one says so")
        assert load.result(WAIT).pages[0] is PageStatus.CHECKSUM
        assert both.engine.lookup(tokens).tokens == 0
        assert not both.engine.check().problems


def test_a_load_whose_packed_pages_another_brings_has_plain_ones_of_its_own(tmp_path: Path) -> None:
    layout = layout_of(PACKED)
    planes, config = pool(layout), make_config(tmp_path, model=PACKED, cpu=256, ssd=512, bounce=64)
    data = np.random.default_rng(1).integers(0, 256, layout.plane_bytes, dtype=np.uint8)
    write_page(planes, layout, [1], data)  # a page that does not fit
    with here(config, planes) as ranks:
        tokens = prompt(1, 2)
        ranks.store(tokens, range(2))
        drop_from(ranks.engine, "cpu")
        loads = [ranks.begin(tokens[:4], range(2, 3)), ranks.begin(tokens, range(3, 5))]
        for load in loads:
            ranks.ranks[0].load(load.order)
        assert [load.result(WAIT).pages for load in loads] == [(GOOD,), (GOOD, GOOD)]
        assert np.array_equal(read_page(planes, layout, [4]), data)


def test_a_load_that_shares_some_pages_with_another_is_ordered_as_soon_as_they_are_there(tmp_path: Path) -> None:
    """Its own pages wait for these, since ranks begin a load as a whole."""
    tokens, layout = prompt(1, 4), layout_of(MHA)
    planes = pool(layout, 16)
    with here(make_config(tmp_path, cpu=32, ssd=64), planes) as one:
        keys = [page.key for page in one.engine.pages(tokens)]
        for block, key in enumerate(keys):
            write_page(planes, layout, [block], bytes_of(layout, key, 0))
        one.store(tokens, range(4))
        lose(one.engine, tokens, [0, 1], "cpu")
        loads = [one.begin(tokens[:8], range(4, 6)), one.begin(tokens, range(6, 10))]
        assert not loads[1].ordered
        one.ranks[0].load(loads[0].order)
        until(lambda: loads[1].ordered, "the order comes", 10)
        assert one.ranks[0].load(loads[1].order).result(WAIT).pages == loads[1].result(WAIT).pages == (GOOD,) * 4
        for block, key in enumerate(keys, 6):
            assert np.array_equal(read_page(planes, layout, [block]), bytes_of(layout, key, 0))
        lose(one.engine, tokens, range(4), "cpu")  # from now on no page of a batch is in memory
        hits = [one.engine.lookup(some) for some in (tokens, tokens[:8])]
        load = one.engine.load_many([(hits[0], [*range(10, 14)]), (hits[1], [14, 15])])
        assert load.ordered
        assert one.ranks[0].load(load.order).result(WAIT).pages == load.result(WAIT).pages == (GOOD,) * 6
        for block, key in enumerate([*keys, *keys[:2]], 10):
            assert np.array_equal(read_page(planes, layout, [block]), bytes_of(layout, key, 0))
        assert not one.engine.check().problems


@pytest.mark.parametrize("hears", [[], [0], [0, 1]])
def test_no_page_of_a_load_in_parts_is_good_that_no_rank_was_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hears: list[int]
) -> None:
    """Ranks answer its cancel: all of them before its second part is planned, one, or none."""
    monkeypatch.setattr(loader, "FIRST_PAGES", 1)
    monkeypatch.setattr(loader, "FIRST_BYTES", 1)
    tokens, layout, extend = prompt(1, 8), layout_of(MHA), RanksMoving.extend

    def late(moving: RanksMoving, ways: Any, *, last: bool) -> None:
        links = [part.link for part in [*moving._parts.values()] if part.link.rank in hears]
        if len(moving) == 1:
            for link in links:
                link.channel.send(wire.pack({"do": "cancel", "id": moving.number}))
            until(lambda: {link.rank for link in links}.isdisjoint(moving._waiting), "the ranks answer")
        extend(moving, ways, last=last)

    with here(make_config(tmp_path, cpu=32, ssd=64), pool(layout, 16), pool(layout, 16)) as both:
        both.store(tokens, range(8))
        monkeypatch.setattr(RanksMoving, "extend", late)
        load = both.begin(tokens, range(8, 16))
        load.cancel()
        assert load.result(WAIT).pages == (PageStatus.ABORTED,) * 8
        monkeypatch.setattr(RanksMoving, "extend", extend)
        load = both.begin(tokens, range(8, 16))
        for rank in both.ranks:
            rank.load(load.order)
        assert load.result(WAIT).pages == (GOOD,) * 8


def test_an_order_is_the_same_when_it_is_asked_for_again_while_a_rank_answers(tmp_path: Path) -> None:
    tokens, layout = prompt(1, 3), layout_of(MHA)
    with here(make_config(tmp_path, cpu=None), pool(layout), pool(layout)) as both:
        both.store(tokens, range(3))
        flip_file(tmp_path / "slab-0.bin", 5)
        load = both.begin(tokens, range(3, 6))
        assert both.ranks[0].load(load.order).result(WAIT).pages == (PageStatus.CHECKSUM, GOOD, GOOD)
        until(lambda: _answered(both.engine, 0), "the leader has heard it")
        assert both.ranks[1].load(load.order).result(WAIT).pages == (GOOD,) * 3
        assert load.result(WAIT).pages == (PageStatus.CHECKSUM, GOOD, GOOD)


def test_memory_that_ranks_shared_goes_with_their_leader(tmp_path: Path) -> None:
    """A descriptor that stays open would keep the whole CPU pool for as long as the rank's process lives."""
    layout = layout_of(MLA)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Rank(new_planes(layout, 6, 4), rank, shard=0)) for rank in range(2)]
        for _ in range(2):
            config = make_config(tmp_path, model=MLA)
            CacheEngine.from_config(config, ranks=[rank.address for rank in ranks]).close()
            until(lambda: not _memory_files(), "the ranks have let their memory go")


def _answered(engine: CacheEngine, rank: int) -> bool:
    return all(rank not in moving._waiting for moving in engine._parts.executor._under_way.values())  # type: ignore[union-attr]


def _memory_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [file for file in found if file.startswith("/memfd:gdscache")]


def test_cancels_that_cross_the_ends_of_their_moves_are_remembered_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdscache.ranks.rank.REFUSED_KEPT", 2)
    with here(make_config(tmp_path), pool(layout_of(MHA))) as one:
        of = one.ranks[0]._service
        for number in range(101, 111):
            of._cancel(number)
        assert of._refused == {109, 110}
        assert not any(of._may_begin(number) for number in range(101, 111))
        one.engine._parts.executor._numbers = itertools.count(111)
        one.store(prompt(1, 2), range(2))
