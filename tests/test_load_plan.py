"""What a load plans, against the same decisions taken page by page."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from test_index import chain
from test_retention import Clock, bare_manager

from gdscache.keys import Page
from gdscache.tiers.index import PageIndex
from gdscache.tiers.manager import PageStatus, TierManager
from gdscache.tiers.pages import Entry, PageState

SLOTS = 12  # of each tier

COPIES = ("absent", "at rest", "in use", "of a store", "of a load")  # in the CPU tier
PAGES = ("absent", "at rest", "in use", "of a store", "hidden")  # in the SSD tier


def put(index: PageIndex, page: Page, kind: str) -> Entry:
    slots = index.allocate(1)
    assert slots is not None
    entry = index.insert(page, slots[0], PageState.PENDING if kind.startswith("of") else PageState.VERIFIED)
    if kind in ("at rest", "hidden"):
        index.lease(entry)
        index.release(entry)
    return entry


def prepare(pages: list[Page], kinds: list[tuple[str, str]]) -> TierManager:
    """A manager with each page in these states on its tiers."""
    manager = bare_manager(SLOTS, Clock())
    assert manager.ssd is not None
    loads = []
    for page, (copy, kind) in zip(pages, kinds, strict=True):
        if copy == "of a load":
            entry = put(manager.ssd.index, page, "at rest")
            loads.append((manager.plan_load([page], "another"), entry))
        elif kind != "absent":
            entry = put(manager.ssd.index, page, kind)
            if kind == "hidden":
                manager.quarantine._reading[entry.slot] += 1
                manager.quarantine._late["read"] += 1
        if copy not in ("absent", "of a load"):
            put(manager.cpu_index, page, copy)
    return manager


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


@given(st.lists(st.tuples(st.sampled_from(COPIES), st.sampled_from(PAGES)), max_size=10), st.booleans())
def test_a_plan_is_what_page_by_page_decisions_make(kinds: list[tuple[str, str]], keep: bool) -> None:
    pages = chain(1, len(kinds))
    manager, decided = prepare(pages, kinds), decide(kinds)
    had, under_way, filling = leases(manager), Counter(manager.under_way), dict(manager._filling)
    free = manager.cpu_index.free_slots
    plan = manager.plan_load(pages, "load", keep=keep)
    planned = list(zip(pages, decided, strict=False))
    assert [(t.page, t.tier, t.filling is not None) for t in plan.tasks] == [(p, *d[:2]) for p, d in planned]
    assert [t.target is not None for t in plan.tasks] == [keep and target for _, _, target in decided]
    assert all(t.source is manager.tiers[t.tier].index.find(t.page.key) for t in plan.tasks)
    assert all(t.filling is filling.get(t.source) for t in plan.tasks)
    targets = {t.target: t for t in plan.tasks if t.target is not None}
    assert all(target is manager.cpu_index.find(t.page.key) for target, t in targets.items())
    assert manager._filling == {**filling, **targets}
    assert len({target.slot for target in targets}) == len(targets) == free - manager.cpu_index.free_slots
    assert plan.lease.entries.keys() == {t.source for t in plan.tasks} | targets.keys()
    more = Counter([(t.tier, t.page) for t in plan.tasks] + [("cpu", target.page) for target in targets])
    assert leases(manager) == had + more
    assert manager.under_way - under_way == Counter(tier for tier, _, _ in decided)
    manager.finish_pages(plan.tasks, PageStatus.LOADED)
    manager.end(plan.lease)
    assert leases(manager) == had
    assert manager.under_way == under_way
    assert all(tier.index.check() == [] for tier in manager.tiers.values())
