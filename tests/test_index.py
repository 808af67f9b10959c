"""The index of a tier against a slow and obvious model: order of eviction, slots, leases, invisibility."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gdscache.tiers.index import Entry, Page, PageIndex, PageState

NAMESPACE = b"n" * 32


def name(*path: object) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


def chain(number: int, pages: int, namespace: bytes = NAMESPACE) -> list[Page]:
    keys = [namespace, *(name(number, i) for i in range(pages))]
    return [Page(key, parent, namespace) for parent, key in itertools.pairwise(keys)]


def put(index: PageIndex, pages: Sequence[Page]) -> list[Entry]:
    slots = index.allocate(len(pages))
    assert slots is not None
    return [index.insert(page, slot, PageState.VERIFIED) for page, slot in zip(pages, slots, strict=True)]


def restore(index: PageIndex, pages: Sequence[Page]) -> None:
    keys, parents, namespaces = zip(*pages, strict=True)
    index.restore(keys, parents, namespaces, range(len(pages)))


def kept(index: PageIndex, pages: Sequence[Page]) -> list[int]:
    return [i for i, page in enumerate(pages) if index.get(page.key) is not None]


@pytest.mark.parametrize("evicted", range(1, 7))
def test_a_chain_that_was_only_stored_goes_from_its_tail(evicted: int) -> None:
    index = PageIndex(6)
    pages = chain(1, 6)
    put(index, pages)
    assert index.evict(evicted) == evicted
    assert kept(index, pages) == list(range(6 - evicted))
    assert index.check() == []


@pytest.mark.parametrize("order", ["head first", "tail first"])
@pytest.mark.parametrize("evicted", range(1, 6))
def test_the_colder_chain_goes_before_the_warmer_one_is_touched(order: str, evicted: int) -> None:
    index = PageIndex(10)
    cold, warm = chain(1, 5), chain(2, 5)
    put(index, cold)
    put(index, warm)
    for pages in (cold, warm):
        index.touch(p.key for p in (pages if order == "head first" else reversed(pages)))
    assert index.evict(evicted) == evicted
    assert kept(index, warm) == list(range(5))
    assert kept(index, cold) == list(range(5 - evicted))


def test_a_shared_head_stays_while_a_branch_can_go() -> None:
    index = PageIndex(5)
    trunk = chain(1, 2)
    branches = [Page(name("branch", i), trunk[1].key, NAMESPACE) for i in range(3)]
    put(index, [*trunk, *branches])
    assert index.evict(3) == 3
    assert kept(index, trunk) == [0, 1]
    assert kept(index, branches) == []


def test_a_leased_tail_does_not_keep_what_is_before_it_for_ever() -> None:
    index = PageIndex(3)
    pages = chain(1, 3)
    entries = put(index, pages)
    index.lease(entries[2])
    assert index.evict(3) == 2  # nothing but the head and the middle can go, so they go
    assert kept(index, pages) == [2]
    index.release(entries[2])
    assert index.evict(1) == 1
    assert index.free_slots == 3
    assert index.check() == []


def test_allocate_is_all_or_nothing() -> None:
    index = PageIndex(4)
    pages = chain(1, 4)
    entries = put(index, pages)
    index.lease(entries[0])
    assert index.allocate(4) is None
    assert kept(index, pages) == [0, 1, 2, 3]
    assert index.evictions == 0
    got = index.allocate(3)
    assert got is not None
    assert len(set(got)) == 3
    assert kept(index, pages) == [0]
    assert index.allocate(1) is None


def test_a_page_dropped_while_leased_is_gone_at_once_and_its_slot_later() -> None:
    index = PageIndex(2)
    entry = put(index, chain(1, 1))[0]
    index.lease(entry)
    index.lease(entry)
    index.drop(entry)
    assert index.get(entry.key) is None
    assert index.find(entry.key) is None
    assert index.free_slots == 1
    index.release(entry)
    assert index.free_slots == 1
    index.release(entry)
    assert index.free_slots == 2
    index.drop(entry)  # again changes nothing
    assert index.free_slots == 2
    assert index.check() == []


def test_the_same_page_may_come_back_while_its_old_slot_is_still_leased() -> None:
    index = PageIndex(2)
    page = chain(1, 1)[0]
    old = put(index, [page])[0]
    index.lease(old)
    index.drop(old)
    new = put(index, [page])[0]
    assert new.slot != old.slot
    index.release(old)
    assert index.get(page.key) is new
    assert index.free_slots == 1
    assert index.check() == []


def test_a_reservation_is_invisible_and_never_evicted() -> None:
    index = PageIndex(2)
    slots = index.allocate(1)
    assert slots is not None
    entry = index.insert(chain(1, 1)[0], slots[0], PageState.PENDING)
    assert index.get(entry.key) is None
    assert index.evict(2) == 0
    assert index.allocate(2) is None
    assert index.commit(entry)
    assert index.get(entry.key) is entry


def test_a_reservation_dropped_before_its_commit_stays_invisible() -> None:
    index = PageIndex(1)
    slots = index.allocate(1)
    assert slots is not None
    entry = index.insert(chain(1, 1)[0], slots[0], PageState.PENDING)
    index.lease(entry)
    index.drop(entry)
    assert not index.commit(entry)
    assert index.get(entry.key) is None
    index.release(entry)
    assert index.free_slots == 1
    assert index.check() == []


def test_a_visible_page_is_recycled_and_a_reservation_is_not() -> None:
    retired: list[int] = []
    index = PageIndex(3, recycle=retired.append)
    visible = put(index, chain(1, 1))[0]
    slots = index.allocate(1)
    assert slots is not None
    reserved = index.insert(chain(2, 1)[0], slots[0], PageState.PENDING)
    index.drop(visible)
    index.drop(reserved)
    assert retired == [visible.slot]
    assert index.free_slots == 2
    assert index.check(elsewhere=retired) == []


def test_check_sees_what_is_wrong() -> None:
    def fresh() -> tuple[PageIndex, list[Entry]]:
        index = PageIndex(4)
        return index, put(index, chain(1, 3))

    index, entries = fresh()
    index.free((entries[0].slot,))
    assert index.check()
    index, _ = fresh()
    index._free.pop()
    assert index.check()
    index, entries = fresh()
    index._children[entries[0].key] += 1
    assert index.check()
    index, entries = fresh()
    entries[0].leases = -1
    assert index.check()
    index, entries = fresh()
    index._policy.remove(entries[0].key)
    assert index.check()
    index, _ = fresh()
    index._children[b"x" * 32] = 1
    assert index.check()
    index, _ = fresh()
    index._free[0] = 99
    assert index.check()
    index, _ = fresh()
    assert index.check() == []


@given(st.permutations(range(8)), st.integers(0, 8))
def test_a_restored_index_evicts_in_its_recorded_order(order: list[int], n: int) -> None:
    pages = [chain(i, 1)[0] for i in range(8)]
    index = PageIndex(10)
    restore(index, [pages[i] for i in order])
    assert index.free_slots == 2
    assert index.evict(n) == n
    assert kept(index, pages) == sorted(order[n:])
    assert index.check() == []


@given(st.permutations(range(6)), st.integers(0, 6))
def test_a_restored_chain_goes_from_its_tail_whatever_the_order_of_its_rows(order: list[int], n: int) -> None:
    pages = chain(1, 6)
    index = PageIndex(6)
    restore(index, [pages[i] for i in order])
    index.evict(n)
    assert kept(index, pages) == list(range(6 - n))


# -- the model: evict one page at a time, the coldest that nobody needs ----------------------------------------------


@dataclasses.dataclass
class Known:
    page: Page
    leases: int = 0
    pending: bool = False


class IndexMachine(RuleBasedStateMachine):
    """A tree of pages in an index of few slots. `order` is the coldest first."""

    SLOTS = 6
    names = Bundle("names")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex(self.SLOTS)
        self.order: list[Known] = []
        self.gone: list[Entry] = []  # dropped, still leased
        self.taken: list[int] = []

    def victims(self, n: int) -> list[Known]:
        """One by one: the coldest page without a child in the index; only if there is none, the coldest that may go."""
        rest, out = list(self.order), []
        for _ in range(n):
            parents = {k.page.parent for k in rest}
            movable = [k for k in rest if not k.leases and not k.pending]
            tails = [k for k in movable if k.page.key not in parents]
            if not movable:
                break
            victim = (tails or movable)[0]
            rest.remove(victim)
            out.append(victim)
        return out

    @property
    def free(self) -> int:
        return self.SLOTS - len(self.order) - len(self.gone) - len(self.taken)

    @rule(target=names, parent=st.one_of(st.none(), names), salt=st.integers(0, 3))
    def new_name(self, parent: Page | None, salt: int) -> Page:
        above = NAMESPACE if parent is None else parent.key
        return Page(name(above, salt), above, NAMESPACE)

    @rule(page=names, pending=st.booleans())
    def insert_one(self, page: Page, pending: bool) -> None:
        assume(all(k.page != page for k in self.order))
        self.insert(page, pending)

    @rule(target=names, number=st.integers(0, 3), pages=st.integers(2, 4))
    def insert_chain(self, number: int, pages: int) -> object:
        """A chain of pages as a store inserts them: the head first."""
        added = chain(number, pages)
        for page in added:
            if all(k.page != page for k in self.order):
                self.insert(page, pending=False)
        return multiple(*added)

    def insert(self, page: Page, pending: bool) -> None:
        victims = self.victims(max(0, 1 - self.free))
        possible = self.free + len(victims) >= 1
        slots = self.index.allocate(1)
        assert (slots is not None) == possible
        if slots is None:
            return
        for victim in victims:
            self.order.remove(victim)
        self.index.insert(page, slots[0], PageState.PENDING if pending else PageState.VERIFIED)
        self.order.append(Known(page, pending=pending))

    @rule(page=names)
    def commit(self, page: Page) -> None:
        known = next((k for k in self.order if k.page == page and k.pending), None)
        assume(known is not None)
        entry = self.index.find(page.key)
        assert entry is not None
        assert self.index.commit(entry)
        known.pending = False

    @rule(pages=st.lists(names, max_size=4))
    def touch(self, pages: list[Page]) -> None:
        self.index.touch(p.key for p in pages)
        for page in pages:
            known = next((k for k in self.order if k.page == page), None)
            if known is not None:
                self.order.remove(known)
                self.order.append(known)

    @rule(target=leases, page=names)
    def lease(self, page: Page) -> object:
        known = next((k for k in self.order if k.page == page), None)
        if known is None:
            return multiple()
        entry = self.index.find(page.key)
        assert entry is not None
        self.index.lease(entry)
        known.leases += 1
        return entry

    @rule(entry=consumes(leases))
    def release(self, entry: Entry) -> None:
        self.index.release(entry)
        known = next((k for k in self.order if k.page == entry.page and not entry.dropped), None)
        if known is not None:
            known.leases -= 1
        elif not entry.leases:
            self.gone.remove(entry)

    @rule(page=names)
    def drop(self, page: Page) -> None:
        known = next((k for k in self.order if k.page == page), None)
        assume(known is not None)
        entry = self.index.find(page.key)
        assert entry is not None
        self.index.drop(entry)
        self.order.remove(known)
        if entry.leases:
            self.gone.append(entry)

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        victims = self.victims(n)
        assert self.index.evict(n) == len(victims)
        for victim in victims:
            self.order.remove(victim)

    @rule(n=st.integers(0, 4))
    def allocate_some(self, n: int) -> None:
        victims = self.victims(max(0, n - self.free))
        slots = self.index.allocate_some(n)
        for victim in victims:
            self.order.remove(victim)
        assert len(slots) == min(n, self.free)
        self.taken += slots

    @rule()
    def give_back(self) -> None:
        self.index.free(self.taken)
        self.taken = []

    @invariant()
    def agrees(self) -> None:
        assert {e.key for e in self.index} == {k.page.key for k in self.order}
        assert self.index.free_slots == self.free
        for known in self.order:
            assert (self.index.get(known.page.key) is None) == known.pending
        assert self.index.check(elsewhere=self.taken) == []


TestIndexMachine = IndexMachine.TestCase
