"""The ways to the CPU tier and to the SSD are bounded apart: an SSD that does not keep up starves no other tier."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.hierarchy import Hierarchy, Ledger
from gdscache.errors import IOFailedError
from gdscache.index.retention import Retention
from gdscache.pages.keys import Page
from gdscache.storage.base import Op
from gdscache.store import plan
from gdscache.store.parcel import Parcel, StoreJob
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import MHA, PACKED, SMALL, WAIT, Host, OpenHost, layout_of, prompt, quiet, settle, until
from tests.support.replays import PAGE, make, problems, run, work_of
from tests.support.write_parts import dirty, on, written

PAGES = 5  # of each prompt
PROMPTS = [[Page(b"%d.%d" % (p, i), b"%d.%d" % (p, i - 1) if i else b"", b"") for i in range(PAGES)] for p in range(4)]


# -- the planner against a model of the two bounds -------------------------------------------------------------------


class Bounds:
    """What `write_through` with `all` does where no tier is ever full. Lists, searched."""

    def __init__(self, limit: int, slots: int) -> None:
        self.limit, self.slots = limit, slots
        self.coming: list[Page] = []  # accepted, and not placed
        self.to_ssd: list[Page] = []
        self.cpu: list[Page] = []
        self.ssd: list[Page] = []
        self.lately: list[bytes] = []
        self.refused: Counter[str] = Counter()
        self.dropped = 0
        self.behind = False

    def accept(self, pages: Sequence[Page]) -> None:
        room = self.limit - len(self.coming)
        missing = [p for p in pages if p not in self.cpu or p not in self.to_ssd + self.ssd]
        self.coming += missing[:room]
        self.dropped += len(missing[room:])
        self.used(missing[:room])

    def used(self, pages: Sequence[Page]) -> list[Page]:
        again = [p for p in pages if p.key in self.lately]
        self.lately = [key for key in self.lately if key not in [p.key for p in pages]]
        return again

    def begin(self) -> None:
        self.behind = len(self.to_ssd) > self.slots // 2

    def place(self) -> None:
        page = self.coming.pop(0)
        if page not in self.cpu:
            self.cpu.append(page)
        self.offer(page, self.behind)

    def hit(self, pages: Sequence[Page]) -> None:
        found = 0
        while found < len(pages) and pages[found] in self.cpu:
            found += 1
        behind = len(self.to_ssd) > self.slots // 2
        for page in self.used(pages[:found]):
            self.offer(page, behind)

    def offer(self, page: Page, behind: bool) -> None:
        if page in self.to_ssd + self.ssd:
            return
        cause = "no_prefix" if page.parent in self.lately else ""
        if behind or len(self.to_ssd) >= self.limit:
            cause = "queue_full"
        if cause:
            self.refused[cause] += 1
            self.lately += [page.key] if page.key not in self.lately else []
        else:
            self.to_ssd.append(page)
            self.lately = [key for key in self.lately if key != page.key]

    def write(self, pages: int) -> None:
        self.ssd += self.to_ssd[:pages]
        del self.to_ssd[:pages]


class Driven:
    """A real planner, whose pages are moved one by one when the test says so."""

    def __init__(self, limit: int, slots: int) -> None:
        config = make(slots, 64, store={"queue": limit * PAGE})
        self.tiers = Hierarchy(config, MachineModel(), Clock(), limits=SMALL)
        self.planner, self.manager = self.tiers.planner, self.tiers.manager
        self.ledger, self.out = Ledger(), deque[Parcel]()
        self.jobs: deque[tuple[StoreJob, int]] = deque()
        self.tiers.loads._due = [lambda: self.out.extend(self.planner.earned())]

    def accept(self, pages: Sequence[Page]) -> None:
        self.ledger.offered += len(pages)
        self.out.extend(self.planner.earned())
        job = StoreJob(self.ledger, pages, 0)
        self.planner.queued += len(pages)
        self.planner.accept(job)
        if job.pages:
            self.jobs.append((job, 0))

    def place(self) -> bool:
        """One page; True when it is the first of its store."""
        job, i = self.jobs.popleft()
        if i == 0:
            self.planner.begin()
        slots = self.planner.cpu_slots(job.pages[i : i + 1])
        placed: list[Parcel] = []
        assert self.planner.place(job, i, i + 1, slots, [], placed) == i + 1
        self.planner.free(slots)
        self.out.extend(parcel for parcel in placed if self.planner.publish(parcel))
        if i + 1 < len(job.pages):
            self.jobs.appendleft((job, i + 1))
        return i == 0

    def write(self) -> int:
        """What goes out together; how many pages."""
        if not self.out:
            return 0
        parcel = self.out.popleft()
        self.tiers.storer._send([parcel])
        self.tiers.clock.run()
        return len(parcel)


_operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 3), st.integers(1, PAGES)),
        st.tuples(st.just("place"), st.integers(1, PAGES), st.just(0)),
        st.tuples(st.just("write"), st.integers(1, PAGES), st.just(0)),
        st.tuples(st.just("hit"), st.integers(0, 3), st.integers(1, PAGES)),
    ),
    max_size=60,
)


@settings(max_examples=10 * settings.default.max_examples, deadline=None)
@given(st.sampled_from([1, 2, 3, 6, 30]), _operations)
def test_the_planner_keeps_both_bounds_and_is_its_model(limit: int, operations: list[tuple[str, int, int]]) -> None:
    slots = len(PROMPTS) * PAGES
    real, model = Driven(limit, slots), Bounds(limit, slots)

    def place() -> None:
        if model.coming:
            if real.jobs[0][1] == 0:
                model.begin()
            real.place()
            model.place()

    def agree() -> None:
        counts = real.manager.counts
        assert set(real.planner.keys) == {page.key for page in model.to_ssd}
        assert real.planner.queued - len(real.planner.keys) == len(model.coming) <= limit
        assert len(model.to_ssd) <= limit
        assert {cause: counts["refused", cause] for cause in ("queue_full", "no_prefix")} == {
            cause: model.refused[cause] for cause in ("queue_full", "no_prefix")
        }
        assert counts["dropped", "queue_full"] == model.dropped
        assert [p for pages in PROMPTS for p in pages if real.manager.landing.index.has(p.key)] == sorted(model.cpu)

    for what, n, pages in operations:
        if what == "store":
            real.accept(PROMPTS[n][:pages])
            model.accept(PROMPTS[n][:pages])
        elif what == "hit":
            real.manager.lookup(PROMPTS[n][:pages], 0)
            real.tiers.loads.end(real.tiers.loads.plan([[]], "load"))  # which offers what the lookup noted
            model.hit(PROMPTS[n][:pages])
        else:
            for _ in range(n):
                if what == "place":
                    place()
                else:
                    model.write(real.write())
        agree()
    while model.coming:
        place()
    while real.out:
        model.write(real.write())
    agree()
    ssd = real.tiers.ssd
    assert {p.key for p in model.ssd} == {entry.key for entry in ssd.index}
    assert (real.planner.queued, real.ledger.finished, real.ledger.dropped["queue_full"]) == (
        0,
        real.ledger.offered,
        model.dropped,
    )
    assert real.manager.stats()["leases"] == []
    assert real.manager.check() == []


# -- in virtual time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("queue", [4, 1000])
def test_an_ssd_that_is_too_slow_finds_no_fewer_pages_than_none(policy: str, queue: int) -> None:
    """Forty conversations of three turns; the SSD writes a page in ten seconds."""
    work = work_of(*([100 * c + i for i in range(2 + 2 * turn)] for c in range(40) for turn in range(3)))
    times = [float(i) for i in range(len(work.prompts))]
    machine = MachineModel(ssd_write=PAGE / 10)
    store = {"queue": queue * PAGE, "write_policy": policy}
    one, both = (
        make(32, ssd, store=some, deadline=1e6, eviction="lru")
        for ssd, some in ((None, {**store, "write_policy": "never"}), (128, store))
    )
    limits = dataclasses.replace(SMALL, write_hits=1)
    alone, _ = run(work, one, machine, times, serial=False)
    tiers, outcome = run(work, both, machine, times, serial=False, limits=limits)
    counts = tiers.manager.counts
    assert problems(tiers) == []
    assert counts["stored", "cpu"] == alone.manager.counts["stored", "cpu"] > 32
    assert outcome.hits("cpu") + outcome.hits("ssd") >= alone.manager.counts["hits", "cpu"] == 40 * (2 + 4)
    assert tiers.ledger.dropped == alone.ledger.dropped == {}
    assert tiers.moved.most_to_ssd <= queue
    assert counts["refused", "queue_full"] > 0
    assert tiers.moved.to_ssd == counts["stored", "ssd"]


def test_a_prompt_as_large_as_the_cpu_tier_goes_to_an_idle_ssd_whole() -> None:
    tiers, _ = run(work_of(list(range(8))), make(cpu=8, ssd=16), MachineModel(ssd_write=PAGE))
    assert tiers.ledger.stored == {"cpu": 8, "ssd": 8}
    assert tiers.manager.counts["refused", "queue_full"] == 0


def test_a_page_without_a_cpu_slot_takes_a_bounce_slot_and_does_not_wait_for_one() -> None:
    """The first prompt holds the whole tier until it is written, at four seconds; there is one bounce slot."""
    machine = MachineModel(ssd_write=PAGE)
    work = work_of([1, 2, 3, 4], [5, 6, 7], [8], [8, 9])
    config = make(cpu=4, ssd=16, host_buffer=2 * PAGE)
    tiers, _ = run(work, config, machine, [0.0, 0.5, 1.0, 20.0], serial=False)
    assert tiers.ledger.dropped == {"queue_full": 3}
    assert tiers.ledger.stored == {"cpu": 6, "ssd": 4 + 1 + 2}
    assert tiers.manager.counts["refused", "queue_full"] == 3
    assert problems(tiers) == []


def test_a_page_without_a_cpu_slot_is_dropped_at_once_where_the_queue_is_full() -> None:
    """1 to 4 hold the CPU tier, 5 the bounce slot; that makes five on their way, and 6 does not wait."""
    config = make(cpu=4, ssd=16, host_buffer=2 * PAGE, store={"queue": 5 * PAGE})
    tiers, _ = run(work_of([1], [2, 3, 4, 5, 6]), config, MachineModel(ssd_write=PAGE), [0.0, 0.5], serial=False)
    assert tiers.ledger.dropped == {"queue_full": 1}
    assert tiers.ledger.stored == {"cpu": 4, "ssd": 5}
    assert problems(tiers) == []


def test_dirty_pages_wait_for_room_while_the_cpu_tier_has_some() -> None:
    """Six dirty pages of eight, four too many, of which two at a time may be on their way."""
    config = make(cpu=8, ssd=16, store={"queue": 2 * PAGE, "write_policy": "write_back"})
    tiers, _ = run(work_of([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]), config, MachineModel(ssd_write=PAGE / 10))
    assert (tiers.moved.demoted, tiers.moved.most_to_ssd) == (2, 2)
    assert tiers.manager.counts["refused", "queue_full"] == 0
    assert tiers.cpu.index.dirty_pages == 4


@given(st.integers(1, 12), st.integers(1, 30), st.sampled_from([PAGE, PAGE / 5]))
@settings(max_examples=max(20, settings.default.max_examples), deadline=None)
def test_without_a_cpu_tier_both_ways_together_are_the_queue(queue: int, pages: int, rate: float) -> None:
    work = work_of(list(range(pages)), list(range(100, 100 + pages)))
    config = make(None, 64, store={"queue": queue * PAGE}, deadline=1e6)
    tiers, _ = run(work, config, MachineModel(ssd_write=rate), [0.0, 0.0], serial=False)
    dropped = tiers.ledger.dropped["queue_full"]
    assert tiers.ledger.stored["ssd"] + dropped == 2 * pages
    assert dropped == max(0, 2 * pages - queue)
    assert tiers.manager.counts["refused", "queue_full"] == 0


# -- in an engine whose SSD stalls -----------------------------------------------------------------------------------


def refused(host: Host) -> dict[str, int]:
    return dict(host.engine.stats().get("refused", {}))


def in_cpu(host: Host) -> int:
    """Pages that the CPU tier has got so far."""
    return int(host.engine.stats().get("stored", {}).get("cpu", 0))


def stored(host: Host, *prompts: list[int]) -> list[Any]:
    """Stores one after the other, each of which ends although nothing is written."""
    return [host.store(tokens).result(WAIT) for tokens in prompts]


@pytest.mark.parametrize(("queue", "first"), [(3, (3,)), (64, (3, 3))])
def test_pages_are_found_in_the_cpu_tier_while_the_ssd_stalls(
    policy_host: OpenHost, queue: int, first: Sequence[int]
) -> None:
    """By `store.queue`, or by half of the CPU tier, which is four pages."""
    host = policy_host("write_through", cpu=8, ssd=24, queue=queue)
    early = [prompt(seed, n) for seed, n in enumerate(first, 1)]
    with PLAN.rule(Op.WRITE, Fault.HANG):
        under_way = [host.store(tokens) for tokens in early]
        until(lambda: in_cpu(host) == sum(first), "the first pages are in the CPU tier")
        for seed in range(10, 16):
            late = prompt(seed, 2)
            [report] = stored(host, late)
            assert (report.tiers, report.dropped) == ((("cpu",),) * 2, {})
            assert host.load(late).bytes_by_tier.keys() == {"cpu"}, "a page was not found in the CPU tier"
        assert refused(host)["queue_full"] >= 12
        assert not any(handle.done() for handle in under_way)
        queued = host.engine.stats()["store_queue"]
        assert queued["bytes"] == queued["to_ssd_bytes"] == sum(first) * host.layout.extent_bytes
    assert all(handle.result(WAIT).tiers == (("cpu", "ssd"),) * n for handle, n in zip(under_way, first, strict=True))
    quiet(host.engine)
    stats = host.engine.stats()
    assert stats["stored"] == {"cpu": sum(first) + 12, "ssd": sum(first) == written() and written()}
    assert "dropped" not in stats
    assert stats["store_queue"]["bytes"] == stats["store_queue"]["to_ssd_bytes"] == 0
    assert on(host, "ssd", late) == []
    again = refused(host)
    host.load(late)  # a hit offers it again, and now there is room
    quiet(host.engine)
    assert (on(host, "ssd", late), refused(host)) == ([0, 1], again)
    settle(host.engine)


def test_the_next_store_offers_what_was_refused(policy_host: OpenHost) -> None:
    host = policy_host("write_through", cpu=8, ssd=24, queue=3)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        host.store(prompt(1, 3))
        until(lambda: host.engine.stats()["store_queue"]["to_ssd_bytes"] > 0, "the first pages are on their way")
        stored(host, prompt(2, 2))
    quiet(host.engine)
    assert stored(host, prompt(2, 2))[0].tiers == (("ssd",),) * 2
    quiet(host.engine)
    assert refused(host) == {"queue_full": 2}


def test_hits_that_find_no_room_count_and_the_next_one_offers_again(policy_host: OpenHost) -> None:
    host = policy_host("write_through_selective", hits=1, cpu=8, queue=2)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        for seed in (1, 2):
            stored(host, prompt(seed, 2))
            host.load(prompt(seed, 2))
        assert refused(host) == {"queue_full": 2}
        host.load(prompt(2, 2))
        assert refused(host) == {"queue_full": 4}
    quiet(host.engine)
    assert (on(host, "ssd", prompt(1, 2)), on(host, "ssd", prompt(2, 2))) == ([0, 1], [])
    host.load(prompt(2, 2))
    quiet(host.engine)
    assert on(host, "ssd", prompt(2, 2)) == [0, 1]
    assert host.engine.stats()["stored"] == {"cpu": 4, "ssd": 4}
    settle(host.engine)


@pytest.mark.parametrize("queue", [2, 64])
def test_dirty_pages_do_not_fill_the_cpu_tier_while_the_ssd_stalls(policy_host: OpenHost, queue: int) -> None:
    host = policy_host("write_back", cpu=8, ssd=40, queue=queue)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        for seed in range(1, 13):
            [report] = stored(host, prompt(seed, 2))
            assert report.tiers[0] == ("cpu",), f"store {seed} found no room"
            until(lambda: not host.engine._parts.storer._jobs, "the store is gathered")
            assert dirty(host) <= 6 + 2, "a store more than halfway from the high watermark to the tier"
        assert host.load(prompt(12, 2)).bytes_by_tier.keys() == {"cpu"}
        assert refused(host)["queue_full"] > 0
    host.engine.flush(WAIT)
    stats = host.engine.stats()
    assert dirty(host) == 0
    assert stats["stored"]["ssd"] == written()
    assert stats["stored"]["ssd"] + sum(stats["refused"].values()) == stats["stored"]["cpu"] == 24
    assert "dropped" not in stats
    settle(host.engine)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("drain", [True, False])
def test_what_is_reported_as_written_survives_a_close(policy_host: OpenHost, policy: str, drain: bool) -> None:
    host = policy_host(policy, cpu=8, ssd=24, queue=3)
    handles = []
    with PLAN.rule(Op.WRITE, Fault.HANG):
        for n, seed in enumerate((1, 2), 1):
            handles.append(host.store(prompt(seed, 3)))
            until(lambda n=n: in_cpu(host) == 3 * n, "its pages are in the CPU tier")  # type: ignore[misc]
    host.engine.close(drain=drain)
    reported = [i for handle in handles for i, tiers in enumerate(handle.result(0).tiers) if "ssd" in tiers]
    again = policy_host(policy, cpu=8, ssd=24, queue=3)
    kept = [i for seed in (1, 2) for i in on(again, "ssd", prompt(seed, 3))]
    if policy == "write_through":
        assert kept == reported
        assert kept == [0, 1, 2] or not drain
    elif drain:
        assert kept == [0, 1, 2, 0, 1, 2]


def test_clear_while_the_ssd_stalls_leaves_nothing(policy_host: OpenHost) -> None:
    host = policy_host("write_through", cpu=8, ssd=24, queue=3)
    with PLAN.rule(Op.WRITE, Fault.HANG):
        host.store(prompt(1, 3))
        until(lambda: host.engine.stats()["store_queue"]["to_ssd_bytes"] > 0, "the first pages are on their way")
        stored(host, prompt(2, 2))
        assert host.engine.clear() == {"cpu": 5, "ssd": 0}
    quiet(host.engine)
    assert (on(host, "cpu", prompt(2, 2)), on(host, "ssd", prompt(1, 3))) == ([], [])
    assert host.engine.stats()["dropped"] == {"cleared": 3}
    settle(host.engine)


def test_pages_that_do_not_fit_into_packed_extents_have_the_queue_again(policy_host: OpenHost) -> None:
    host = policy_host("write_through", model=PACKED, cpu=200, ssd=400, bounce=400, queue=8)
    queue, told = host.engine.config.store.queue, host.engine._parts.storer.queue
    with PLAN.rule(Op.WRITE, Fault.HANG):
        for number in range(8):
            host.store(prompt(number, 4))
        until(lambda: told()["to_ssd_bytes"] > queue, "pages of both kinds are on their way")
        assert told()["to_ssd_bytes"] <= told()["limit_bytes"] == 2 * queue
    quiet(host.engine)


def budget_left(host: Host) -> int:
    """Pages that `ssd.endurance` still has room for."""
    left = host.engine.stats()["store_policy"]["admission"]["endurance"]["left_bytes"]
    return int(left) // host.engine.layout.extent_bytes


def test_pages_that_are_cleared_before_their_write_cost_no_endurance(policy_host: OpenHost) -> None:
    extent = layout_of(MHA).extent_bytes
    host = policy_host("write_through", cpu=24, ssd=24, ssd_options={"endurance": 8 * 20 * extent})
    flights = host.engine._parts.storer.writers["ssd"]._flying
    with PLAN.rule(Op.WRITE, Fault.HANG):
        for number in range(1, 4):  # three batches are in flight at most
            host.store(prompt(number, 1))
            until(lambda number=number: len(flights) == number, "its write has begun")  # type: ignore[misc]
        host.store(prompt(4, 4))
        until(lambda: budget_left(host) == 13, "the last pages wait for their write")
        host.engine.clear()
    quiet(host.engine)
    assert budget_left(host) == 17


@pytest.mark.parametrize("refused", [False, True])
def test_pages_that_lose_their_slots_before_their_write_cost_no_endurance(
    policy_host: OpenHost, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    extent = layout_of(MHA).extent_bytes
    host = policy_host("write_through", cpu=24, ssd=24, ssd_options={"endurance": 8 * 20 * extent})
    manager = host.engine.manager
    ssd = manager.files[0]
    reserve = ssd.reserve

    def reserved(*call: Any) -> Any:
        if refused:
            raise IOFailedError("the disk is full", errno=errno.ENOSPC)
        entries = reserve(*call)
        manager.clearing.clear()
        return entries

    monkeypatch.setattr(ssd, "reserve", reserved)
    host.store(prompt(1, 4))
    quiet(host.engine)
    assert host.engine.stats()["dropped"] == {"disk_full" if refused else "cleared": 4}
    assert budget_left(host) == 20


@pytest.mark.parametrize("policy", ["write_through", "write_back", "never"])
def test_the_first_rounds_are_small_where_the_writer_has_nothing_to_do(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "round_pages", lambda extent_bytes, waiting: iter([waiting]))
    tiers = Hierarchy(make(8, 64, store={"write_policy": policy}), MachineModel(), Clock(), limits=SMALL)
    assert next(tiers.planner.begin()) == (policy == "write_through")
    tiers.planner.outlets[0].keys[b"on its way"] = 0
    assert not next(tiers.planner.begin())


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 1), (8, 4)])
def test_the_ssd_is_behind_when_pages_on_their_way_hold_more_than_half_of_the_cpu_tier(slots: int, most: int) -> None:
    """A tier of one slot may have one page on its way."""
    planner = Hierarchy(make(slots, 64), MachineModel(), Clock(), limits=SMALL).planner
    for page in range(most + 1):
        planner.begin()
        assert not planner.behind
        planner.outlets[0].keys[bytes([page])] = 0
    planner.begin()
    assert planner.behind


# -- without a CPU tier: pages on their way to the SSD are in no tier --------------------------------------------------


@contextlib.contextmanager
def reserving_waits(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A first page has no slot of the SSD before the end, and the pages behind it wait for their batch."""
    tier, came, goes_on = host.engine.manager.tiers["ssd"], threading.Event(), threading.Event()
    reserve = tier.reserve

    def held(*args: Any) -> Any:
        came.set()
        assert goes_on.wait(WAIT)
        return reserve(*args)

    with monkeypatch.context() as patch, contextlib.ExitStack() as last:
        last.callback(goes_on.set)
        patch.setattr(tier, "reserve", held)
        host.store(prompt(1, 1))
        assert came.wait(WAIT)
        yield


def test_a_page_on_its_way_gets_the_greater_priority_of_a_second_store(
    policy_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = policy_host("write_through", cpu=None, ssd=24, bounce=16)
    with reserving_waits(host, monkeypatch):
        handles = [host.store(prompt(seed, 1), **kept) for seed in (1, 2) for kept in ({}, {"priority": 1})]
        assert host.engine.stats()["store_queue"]["to_ssd_bytes"] == 2 * host.engine.layout.extent_bytes
    assert not any(handle.result(WAIT).dropped for handle in handles)
    quiet(host.engine)
    index = host.engine.manager.tiers["ssd"].index
    kept = [index.retention(page.key) for seed in (1, 2) for page in host.engine.pages(prompt(seed, 1))]
    assert kept == [Retention(1)] * 2
    assert not host.engine._parts.storer._planner.outlets[0].retained


def test_a_store_behind_a_clear_comes_though_its_page_was_on_its_way(
    policy_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = policy_host("write_through", cpu=None, ssd=24, bounce=16)
    with reserving_waits(host, monkeypatch):
        host.store(prompt(2, 1))
        until(lambda: host.engine.stats()["store_queue"]["to_ssd_bytes"] > 4096, "it is on its way, too")
        host.engine.clear()
        handles = [host.store(prompt(seed, 1)) for seed in (1, 2)]
    assert [handle.result(WAIT).tiers for handle in handles] == [(("ssd",),)] * 2
    quiet(host.engine)
    assert [on(host, "ssd", prompt(seed, 1)) for seed in (1, 2)] == [[0], [0]]
    assert host.engine.stats()["dropped"] == {"cleared": 2}
    assert not host.engine._parts.storer._planner.outlets[0].keys
    settle(host.engine)
