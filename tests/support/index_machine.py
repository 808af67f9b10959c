"""The index of a tier beside a slow and obvious model, step by step; chains of pages."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, PRIORITIES, Retention
from gdscache.index.table import Entry, PageState
from gdscache.pages.keys import KEY, Page
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.guarded import Lifetime
from tests.support.policy_models import MODELS, Model, Undeferred

NAMESPACE = b"n" * 32

retentions = st.builds(Retention, st.sampled_from(PRIORITIES), st.one_of(st.none(), st.integers(0, 12).map(float)))


def name(*path: object) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


def chain(number: int, pages: int, namespace: bytes = NAMESPACE) -> list[Page]:
    keys = [namespace, *(name(number, i) for i in range(pages))]
    return [Page(key, parent, namespace) for parent, key in itertools.pairwise(keys)]


def put(index: PageIndex, pages: Sequence[Page]) -> list[Entry]:
    slots = index.allocate(len(pages))
    return [index.insert(page, slot, PageState.VERIFIED) for page, slot in zip(pages, slots, strict=True)]


def restore(
    index: PageIndex,
    pages: Sequence[Page],
    slots: Sequence[int] | None = None,
    retentions: Sequence[Retention] | None = None,
) -> None:
    """Fill an index with pages, the first to evict first, in columns whose order is another one."""
    slots = range(len(pages)) if slots is None else slots
    rows = sorted(range(len(pages)), key=lambda i: pages[i].key)
    digests = sorted({page.namespace for page in pages})
    index.restore(
        np.array([np.void(pages[i].key) for i in rows], KEY),
        np.array([np.void(pages[i].parent) for i in rows], KEY),
        digests,
        np.array([digests.index(pages[i].namespace) for i in rows], np.int64),
        np.array([slots[i] for i in rows], np.int64),
        np.argsort(rows),
        {row: retentions[i] for row, i in enumerate(rows) if retentions[i] != DEFAULT} if retentions else {},
    )


@dataclasses.dataclass
class Known:
    page: Page
    leases: int = 0
    pending: bool = False


class Snapshot(EvictionPolicy):
    """The order of a policy as it is now: a native one cannot be copied. What was deferred stays so."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.keys = list(policy)
        self.deferred = Lifetime()
        for key in self.keys:
            if any(order.is_deferred(key) for order in policy.deferring()):
                self.deferred.insert_all([(key, b"")])
                self.deferred.defer_all([key])

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        self.keys += [key for key, _ in pages]

    def touch_all(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.remove(key)
            self.keys.append(key)

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)

    def deferring(self) -> Sequence[Lifetime]:
        return (self.deferred,)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys)


class IndexMachine(RuleBasedStateMachine):
    """A tree of pages in an index of few slots. `order` is the coldest first, by the policy's slow model."""

    SLOTS = 6
    policy: type[EvictionPolicy] = LRU
    names = Bundle("names")
    leases = Bundle("leases")
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex(self.SLOTS, self.policy())
        self.model = self.new_model()
        self.known: dict[bytes, Known] = {}
        self.gone: list[Entry] = []  # dropped, still leased
        self.taken: list[int] = []

    def new_model(self) -> Model:
        return MODELS[self.policy]()

    def put(self, page: Page, slot: int, state: PageState) -> None:
        self.index.insert(page, slot, state)
        self.model.insert(page.key)

    @property
    def order(self) -> list[Known]:
        return [self.known[key] for key in self.model.order()]

    def leave(self, known: Known) -> None:
        del self.known[known.page.key]
        self.model.remove(known.page.key)
        if known.page.parent in self.known and all(k.page.parent != known.page.parent for k in self.known.values()):
            self.model.hasten(known.page.parent)

    def victims(self, n: int) -> list[Known]:
        """As `_one_by_one`; with an order that defers pages, as `_in_turn`, by which pages that stay are deferred."""
        found, passed = self._in_turn(n)
        if issubclass(MODELS[self.policy], Undeferred):
            assert found == self._one_by_one(n)
        for known in passed:
            self.model.defer(known.page.key)
        return found

    def _in_turn(self, n: int) -> tuple[list[Known], list[Known]]:
        """In order: a page with children is passed over, and goes with its last child. Those that stay come second."""
        out: list[Known] = []
        passed: list[Known] = []

        def free(known: Known) -> bool:
            movable = not known.leases and not known.pending and known not in out
            return movable and all(k in out for k in self.order if k.page.parent == known.page.key)

        for tails_only in (True, False):
            for known in self.order:
                if len(out) >= n:
                    break
                if known.leases or known.pending or known in out:
                    continue
                if tails_only and not free(known):
                    passed.append(known)
                    continue
                climbed: Known | None = known
                while climbed is not None and len(out) < n:
                    out.append(climbed)
                    above = self.known.get(climbed.page.parent)
                    met = above is not None and (above in passed or self.model.is_deferred(above.page.key))
                    climbed = above if above is not None and met and free(above) else None
        return out, [known for known in passed if known not in out]

    def _one_by_one(self, n: int) -> list[Known]:
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
            self.leave(victim)
        self.put(page, slots[0], PageState.PENDING if pending else PageState.VERIFIED)
        self.known[page.key] = Known(page, pending=pending)

    @rule(page=names)
    def commit(self, page: Page) -> None:
        known = next((k for k in self.order if k.page == page and k.pending), None)
        assume(known is not None)
        assert self.index.commit(self.index.find(page.key))
        known.pending = False

    @rule(pages=st.lists(names, max_size=4))
    def touch(self, pages: list[Page]) -> None:
        self.index.touch([p.key for p in pages])
        for page in pages:
            known = next((k for k in self.order if k.page == page), None)
            if known is not None:
                self.model.touch(page.key)

    @rule(target=leases, page=names)
    def lease(self, page: Page) -> object:
        known = next((k for k in self.order if k.page == page), None)
        if known is None:
            return multiple()
        entry = self.index.find(page.key)
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

    @rule(target=held, pages=st.lists(names, max_size=3))
    def hold(self, pages: list[Page]) -> object:
        """A page may be named twice."""
        known = {k.page.key: k for k in self.order if not k.pending}
        there = list(itertools.takewhile(lambda page: page.key in known, pages))
        slots = self.index.hold_run(pages, 0, len(pages))
        assert slots == [self.index.slot(page.key) for page in there]
        for page in there:
            known[page.key].leases += 1
        return there, slots

    @rule(some=consumes(held))
    def let_go(self, some: tuple[list[Page], list[int]]) -> None:
        gone = {e.slot: e for e in self.gone}
        for page, slot in zip(*some, strict=True):
            if slot not in gone:
                next(k for k in self.order if k.page.key == page.key).leases -= 1
        self.index.let_go(*some)
        self.gone = [entry for entry in self.gone if entry.leases]

    @rule(page=names)
    def drop(self, page: Page) -> None:
        known = next((k for k in self.order if k.page == page), None)
        assume(known is not None)
        entry = self.index.find(page.key)
        self.index.drop(entry)
        self.leave(known)
        if entry.leases:
            self.gone.append(entry)

    @rule(piece=st.integers(1, 4))
    def clear(self, piece: int) -> None:
        leased = [self.index.find(k.page.key) for k in self.order if k.leases]
        detached = self.index.detach()
        assert detached.visible == sum(not k.pending for k in self.order)
        assert len(self.index) == 0
        assert not any(k.page.key in self.index for k in self.order)
        for at in range(0, len(detached.slots), piece):
            self.index.retire(detached.slots[at : at + piece])
        self.gone += [entry for entry in leased if entry is not None]
        self.known, self.model = {}, self.new_model()

    @rule(page=names)
    def clear_one(self, page: Page) -> None:
        there = {e.key: e for e in self.index}
        assert self.index.drop_all([page.key, name("absent")], {b"m" * 32}) == 0
        known = next((k for k in self.order if k.page == page), None)
        assert self.index.drop_all([page.key], {NAMESPACE}) == (known is not None and not known.pending)
        if known is not None:
            self.leave(known)
            self.gone += [there[page.key]] if known.leases else []

    @rule(page=names)
    def look(self, page: Page) -> None:
        """Only what is looked at, or leased as an object, is no page at rest from then on."""
        entry, known = self.index.get(page.key), next((k for k in self.order if k.page == page), None)
        assert (entry is None) == (known is None or known.pending)
        assert entry is None or known is None or entry.leases == known.leases

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        victims = self.victims(n)
        assert self.index.evict(n) == len(victims)
        for victim in victims:
            self.leave(victim)

    def copied(self) -> PageIndex:
        return copy.deepcopy(self.index, {id(one): Snapshot(one) for one in self.index.orders._of_priority})

    @rule(n=st.integers(1, 6), page=names)
    def evict_beside(self, n: int, page: Page) -> None:
        """That the family of a page stays is looked for lazily; here it is said page by page."""
        lazy, told = self.copied(), self.copied()
        wanted = n + self.free
        slots = lazy.allocate_some(wanted, pages=[page])
        assert slots == told.allocate_some(wanted, keep=told.family([page]))
        assert {e.page for e in lazy} == {e.page for e in told}
        assert lazy.check(elsewhere=[*self.taken, *slots]) == []

    @rule(n=st.integers(0, 4))
    def allocate_some(self, n: int) -> None:
        victims = self.victims(max(0, n - self.free))
        slots = self.index.allocate_some(n)
        for victim in victims:
            self.leave(victim)
        assert len(slots) == min(n, self.free)
        self.taken += slots

    @rule()
    def give_back(self) -> None:
        self.index.free(self.taken)
        self.taken = []

    @invariant()
    def agrees(self) -> None:
        assert {e.key: e.leases for e in self.index} == {k.page.key: k.leases for k in self.order}
        assert self.index.free_slots == self.free
        for known in self.order:
            assert self.index.has(known.page.key) != known.pending
        keys = [*(k.page.key for k in self.order), b"nobody's"]
        assert list(self.index.visible(keys)) == [self.index.has(key) for key in keys]
        assert list(self.index.present(keys)) == keys[:-1]
        assert self.index.slots_of(keys) == [self.index.slot(key) for key in keys[:-1]]
        assert self.index.check(elsewhere=self.taken) == []


def state(index: PageIndex) -> tuple[object, ...]:
    pages = {e.page: (e.slot, e.state, e.leases, e.retention) for e in index}
    return pages, list(index.orders), index.orders.expiries.first, index.check()
