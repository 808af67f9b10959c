"""What a load plans, against the same decisions taken page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.index.index import PageIndex
from gdscache.index.table import Entry, PageState
from gdscache.load.planner import LoadPlanner
from gdscache.moves import PageStatus
from gdscache.pages.keys import Page
from gdscache.tiers.manager import TierManager
from tests.support.bare_manager import Clock, bare_manager
from tests.support.helpers import raising
from tests.support.index_machine import chain

SLOTS = 12  # of each tier

COPIES = ("absent", "at rest", "in use", "of a store", "of a load")  # in the CPU tier
PAGES = ("absent", "at rest", "in use", "of a store", "hidden")  # in the SSD tier


def put(index: PageIndex, page: Page, kind: str) -> Entry:
    slots = index.allocate(1)
    entry = index.insert(page, slots[0], PageState.PENDING if kind.startswith("of") else PageState.VERIFIED)
    if kind in ("at rest", "hidden"):
        index.lease(entry)
        index.release(entry)
    return entry


def prepare(pages: list[Page], kinds: list[tuple[str, str]]) -> tuple[TierManager, LoadPlanner]:
    """A manager with each page in these states on its tiers."""
    manager = bare_manager(SLOTS, Clock())
    planner = LoadPlanner(manager)
    for page, (copy, kind) in zip(pages, kinds, strict=True):
        if copy == "of a load":
            put(manager.ssd.index, page, "at rest")
            planner.plan([[page]], "another")
        elif kind != "absent":
            entry = put(manager.ssd.index, page, kind)
            if kind == "hidden":
                manager.quarantine._reading["ssd", entry.slot] += 1
                manager.quarantine._late["read"] += 1
        if copy not in ("absent", "of a load"):
            put(manager.landing.index, page, copy)
    return manager, planner


def decide(kinds: list[tuple[str, str]]) -> list[tuple[str, bool, bool]]:
    """Of each page that is planned: its tier, whether another load reads it, whether it is to get a CPU slot."""
    decided = []
    for copy, kind in kinds:
        if copy in ("at rest", "in use", "of a load"):
            decided.append(("cpu", copy == "of a load", False))
        elif kind in ("at rest", "in use"):
            decided.append(("ssd", False, copy == "absent"))
        else:
            break
    return decided


def leases(manager: TierManager) -> Counter[tuple[str, Page]]:
    return Counter({(name, e.page): e.leases for name, tier in manager.tiers.items() for e in tier.index})


@given(
    st.lists(st.tuples(st.sampled_from(COPIES), st.sampled_from(PAGES)), max_size=10),
    st.booleans(),
    st.none() | st.integers(1, 5),
)
def test_a_plan_is_what_page_by_page_decisions_make(kinds: list[tuple[str, str]], keep: bool, part: int | None) -> None:
    """However many pages of it are planned at a time."""
    pages = chain(1, len(kinds))
    (manager, planner), decided = prepare(pages, kinds), decide(kinds)
    had, under_way, filling = leases(manager), Counter(planner.under_way), dict(planner._filling)
    free = manager.landing.index.free_slots
    plan = planner.plan([pages], "load", keep=keep, most=part)
    while not plan.whole:
        lengths = {len(some) for some in (plan, plan.statuses, plan.slots, plan.sources, plan.targets)}
        assert lengths == {plan.at}
        assert plan.left == len(pages) - len(plan)
        planner.go_on(plan, part)
    assert plan.requests == [range(len(decided))]
    rows = range(len(plan))
    tiers = [plan.tier_of(row) for row in rows]
    shared = {row: run.filling for run in plan.runs if run.filling for row in run.rows}
    assert plan.pages == pages[: len(decided)]
    assert [(tier.name, row in shared) for row, tier in enumerate(tiers)] == [d[:2] for d in decided]
    assert [plan.targets[row] is not None for row in rows] == [keep and target for _, _, target in decided]
    assert plan.slots == [tiers[row].index.slot(plan.pages[row].key) for row in rows]
    objects = [row for row in rows if tiers[row].name != "cpu" or row in shared]
    assert [row for row in rows if plan.sources[row] is not None] == objects
    assert all(plan.sources[row] is tiers[row].index.find(plan.pages[row].key) for row in objects)
    for row in rows:
        brings = filling.get(plan.sources[row]) if tiers[row].name == "cpu" else None
        assert shared.get(row) == (None if brings is None else (brings, brings.targets.index(plan.sources[row])))
    placed = {row: target for row, target in enumerate(plan.targets) if target is not None}
    targets = set(placed.values())
    assert all(target is manager.landing.index.find(plan.pages[row].key) for row, target in placed.items())
    assert planner._filling == {**filling, **dict.fromkeys(targets, plan)}
    assert all(plan.row_of(target) == row for row, target in placed.items())
    assert len({target.slot for target in targets}) == len(targets) == free - manager.landing.index.free_slots
    assert {entry for _, entry in plan.leases[0]} == {*plan.entries(objects), *targets}
    assert len(plan.leases[0]) == len(plan) + len(targets)
    more = Counter((tier.name, page) for tier, page in zip(tiers, plan.pages, strict=True))
    assert leases(manager) == had + more + Counter(("cpu", target.page) for target in targets)
    assert planner.under_way - under_way == Counter(tier for tier, _, _ in decided)
    planner.finish(plan, np.arange(len(plan)), PageStatus.LOADED)
    planner.end(plan)
    assert leases(manager) == had
    assert planner.under_way == under_way
    assert all(tier.index.check() == [] for tier in manager.tiers.values())


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_requests_of_a_plan_in_parts(lengths: list[int], part: int, data: st.DataObject) -> None:
    """Each ends where a page is not there; parts go over the ends of requests."""
    manager, planner = prepare([], [])
    requests, there = [], []
    for seed, length in enumerate(lengths):
        pages = chain(seed + 1, length)
        there.append(data.draw(st.integers(0, min(length, SLOTS - sum(there)))))
        for page in pages[: there[-1]]:
            put(manager.ssd.index, page, "at rest")
        requests.append(pages)
    plan = planner.plan(requests, "load", most=part)
    planned = [len(plan)]
    while not plan.whole:
        planner.go_on(plan, part)
        planned.append(len(plan) - sum(planned))
    assert [len(rows) for rows in plan.requests] == there
    assert plan.pages == [page for pages, n in zip(requests, there, strict=True) for page in pages[:n]]
    assert all(n <= part for n in planned)
    assert all(n == part for n in planned[:-1]) or sum(there) < sum(lengths)
    assert len(plan.leases) == len(requests)
    assert planner.under_way["ssd"] == len(plan)
    planner.abandon(plan)
    assert not +planner.under_way
    assert not any(leases(manager).values())
    assert not planner._filling


def test_what_a_part_brings_pushes_no_later_page_out() -> None:
    """The pages behind it are used no later than others, so that without a word they would be the first to go."""
    pages, others = chain(1, 6), chain(2, SLOTS - 3)
    manager, planner = prepare(pages, [("absent", "at rest")] * 3 + [("at rest", "at rest")] * 3)
    for page in others:
        put(manager.landing.index, page, "at rest")
    assert not manager.landing.index.free_slots
    plan = planner.plan([pages], "load", most=3)
    planner.go_on(plan)
    assert [plan.tier_of(row).name for row in range(6)] == ["ssd"] * 3 + ["cpu"] * 3
    assert [target is not None for target in plan.targets] == [True] * 3 + [False] * 3
    planner.abandon(plan)


def test_a_request_of_a_batch_pushes_out_no_page_of_another() -> None:
    """Not even one that was used before all others, and that no slower tier has."""
    cold, warm, others = chain(1, 3), chain(2, 3), chain(3, SLOTS - 3)
    manager, planner = prepare(cold, [("absent", "at rest")] * 3)
    for page in (*warm, *others):
        put(manager.landing.index, page, "at rest")
    plan = planner.plan([cold, warm], "load")
    assert [len(rows) for rows in plan.requests] == [3, 3]
    assert plan.targets.count(None) == 3
    planner.abandon(plan)


class CountedPages(list[Page]):
    read = 0

    def __iter__(self) -> Iterator[Page]:
        self.read += 1
        return super().__iter__()


def test_the_pages_of_a_batch_to_keep_are_gathered_once() -> None:
    """And not for each of its requests: that takes the square of their number, under the manager's lock."""
    requests = [CountedPages(chain(seed, 1)) for seed in range(SLOTS)]
    manager, planner = prepare([page for pages in requests for page in [*pages]], [("absent", "at rest")] * SLOTS)
    for page in chain(SLOTS, SLOTS):
        put(manager.landing.index, page, "at rest")
    before = requests[-1].read
    plan = planner.plan(requests, "load")
    assert plan.targets.count(None) == 0
    assert requests[-1].read - before < SLOTS / 2
    planner.abandon(plan)


def test_a_part_that_breaks_off_leaves_what_was_planned() -> None:
    pages = chain(1, 6)
    manager, planner = prepare(pages, [("absent", "at rest")] * 6)
    plan = planner.plan([pages, pages], "load", most=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager.landing.index, "allocate_some", raising(KeyError("injected")))
        with pytest.raises(KeyError):
            planner.go_on(plan, 2)
    assert plan.whole
    assert len(plan.requests) == 2
    assert len(plan.statuses) == len(plan) == len(plan.targets)
    planner.abandon(plan)
    assert not any(leases(manager).values())
    assert not planner._filling
    assert len(manager.landing.index) == 0


def test_a_cancelled_page_that_was_not_read_is_no_read_that_succeeded() -> None:
    pages = chain(1, 2)
    manager, planner = prepare(pages, [("absent", "at rest")] * 2)
    failed_reads = manager.quarantine.failed_reads
    for keep, status in ((True, PageStatus.IO_ERROR), (False, PageStatus.CANCELLED), (True, PageStatus.CANCELLED)):
        plan = planner.plan([pages], "a load", keep=keep)
        planner.finish(plan, np.arange(2), status)
        planner.end(plan)
        read = keep and status is PageStatus.CANCELLED
        assert [failed_reads.failing("ssd", page.key) for page in pages] == [not read] * 2
