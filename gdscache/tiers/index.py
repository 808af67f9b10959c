"""The index of one tier: which pages it holds, in which slot, in what state. Pure Python, no bytes, no I/O.

A page goes `insert(PENDING) → commit`, or `insert(PENDING) → drop` when it fails; `get` sees it only after `commit`.
A leased page is neither evicted nor overwritten; a page dropped while leased is invisible at once and gives its slot
back at the last release. Eviction takes tails before heads: a page goes only when no child of it is in the tier,
unless nothing else can go. A *dirty* page, whose bytes are on their way to no other tier yet, is not evicted either.
Nothing here locks: the manager's lock guards every index.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.keys import KEY_BYTES, Page
from gdscache.policy import LRU, EvictionPolicy
from gdscache.tiers.orders import NO_RETENTIONS, Orders
from gdscache.tiers.retention import DEFAULT, Retention
from gdscache.tiers.slots import FreeSlots

KEY = np.dtype(f"V{KEY_BYTES}")
_AHEAD = 32  # pages at most that go with those that have to, so that the next few need not look for victims


class PageState(enum.Enum):
    """What may be done with a page's bytes."""

    PENDING = "pending"  # reserved, the bytes are on their way
    UNVERIFIED = "unverified"  # bytes are there, their checksums were not compared yet
    VERIFIED = "verified"


# For loops over pages: looking up a member of an enum takes as long as looking up a page.
PENDING, VERIFIED = PageState.PENDING, PageState.VERIFIED


class Entry:
    """A page in use: leased, reserved, or just looked at. It is the one object for its page while it is leased."""

    __slots__ = ("dropped", "key", "leases", "namespace", "parent", "retention", "slot", "state")

    def __init__(self, page: Page, slot: int, state: PageState, retention: Retention = DEFAULT) -> None:
        self.key = page.key
        self.parent = page.parent
        self.namespace = page.namespace
        self.slot = slot
        self.state = state
        self.retention = retention
        self.leases = 0
        self.dropped = False

    @property
    def page(self) -> Page:
        return Page(self.key, self.parent, self.namespace)


class Detached(NamedTuple):
    """Pages that were dropped all at once. Let it go without a lock: freeing what it holds takes its time."""

    visible: int
    slots: list[int]
    held: object


class PageIndex:
    """Slots `0 ... slots-1` of a tier and the pages in them.

    `forget(slot)` is called when a visible page is dropped, `recycle(slot)` when its slot is given back, which is later
    if the page is leased. By default the slot is free then; the SSD tier also waits for the committed deletion.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy | None = None,
        forget: Callable[[int], None] | None = None,
        recycle: Callable[[int], None] | None = None,
    ) -> None:
        self.slots = slots
        self.evictions = 0
        self._ahead = min(_AHEAD, slots // 512)
        # Pages at rest are columns, not objects: a million of them cost little, and the garbage collector nothing.
        self._resting: dict[bytes, int] = {}  # key -> slot
        self._parents: list[bytes | None] = [b""] * slots  # None: as restored
        self._restored_parents = b""  # KEY_BYTES a slot
        self._namespaces: list[bytes] = [b""] * slots
        self._entries: dict[bytes, Entry] = {}  # pages in use
        self._children = array("i", bytes(4 * slots))  # pages of this tier that follow the page in the slot
        self._orphans: dict[bytes, int] = {}  # ... that follow a page which is not in the tier, by its key
        self._orders = Orders(LRU() if policy is None else policy)
        self._free = FreeSlots(slots)
        self._forget = forget
        self._recycle = recycle
        self._leaving: set[int] = set()  # slots of dropped pages that are still leased
        self._dirty: set[int] = set()  # slots of pages that no lower tier has, and some tier is to get

    def __len__(self) -> int:
        return len(self._resting) + len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """All pages, reserved ones included; what is at rest comes as a copy to look at."""
        yield from self._entries.values()
        for key, slot in self._resting.items():
            yield self._entry(key, slot)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def has(self, key: bytes) -> bool:
        """True when the page is visible."""
        if key in self._resting:
            return True
        entry = self._entries.get(key)
        return entry is not None and entry.state is not PENDING

    def retention(self, key: bytes) -> Retention | None:
        """The retention of a page in any state; None when it is not there."""
        return self._orders.retained.get(key, DEFAULT) if key in self else None

    def get(self, key: bytes) -> Entry | None:
        """The page, if it is visible."""
        entry = self.find(key)
        return None if entry is None or entry.state is PENDING else entry

    def find(self, key: bytes) -> Entry | None:
        """The page in any state, reserved ones included."""
        slot = self._resting.pop(key, None)
        if slot is None:
            return self._entries.get(key)
        entry = self._entries[key] = self._entry(key, slot)
        return entry

    def pin(self, page: Page) -> Entry | None:
        """`find` and `lease` in one, for a page whose name is at hand."""
        key = page.key
        slot = self._resting.pop(key, None)
        if slot is None:
            entry = self._entries.get(key)
            if entry is None:
                return None
        else:
            entry = self._entries[key] = Entry(page, slot, VERIFIED, self._orders.retained.get(key, DEFAULT))
        entry.leases += 1
        return entry

    def pin_run(self, pages: Sequence[Page], start: int, stop: int) -> list[Entry]:
        """`pin` the consecutive pages of `pages[start:stop]`, from the first on, that are visible."""
        take, entries, retained = self._resting.pop, self._entries, self._orders.retained
        pinned = []
        for i in range(start, stop):
            page = pages[i]
            key = page.key
            slot = take(key, None)
            if slot is not None:
                retention = retained.get(key, DEFAULT) if retained else DEFAULT
                entry = entries[key] = Entry(page, slot, VERIFIED, retention)
            elif key not in entries or (entry := entries[key]).state is PENDING:
                break
            entry.leases += 1
            pinned.append(entry)
        return pinned

    def absent_until(self, pages: Sequence[Page], start: int) -> int:
        """Where the first of `pages[start:]` is that is there in any state; their number when none is."""
        resting, entries = self._resting, self._entries
        for i in range(start, len(pages)):
            key = pages[i].key
            if key in resting or key in entries:
                return i
        return len(pages)

    def slot(self, key: bytes) -> int | None:
        """The slot of a page in any state."""
        slot = self._resting.get(key)
        if slot is None and key in self._entries:
            return self._entries[key].slot
        return slot

    def __contains__(self, key: bytes) -> bool:
        """True when the page is there in any state."""
        return key in self._resting or key in self._entries

    def family(self, pages: Iterable[Page]) -> set[bytes]:
        """Keys of `pages` and of the pages before them, as far back as the tier has them without a gap.

        What a new page must not push out: without its head, a tail is out of reach.
        """
        keys: set[bytes] = set()
        for page in pages:
            keys.add(page.key)
            key = page.parent
            while key in self and key not in keys:
                keys.add(key)
                key = self._parent(key)
        return keys

    def continuing(self, pages: Iterable[Page]) -> int:
        """How many of `pages` have all pages before them in the tier, or among `pages`."""
        keys: set[bytes] = set()
        for page in pages:
            if page.parent == page.namespace or page.parent in self or page.parent in keys:
                keys.add(page.key)
        return len(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest.

        It counts later, as new pages do: see `Orders`.
        """
        resting, entries = self._resting, self._entries
        self._orders.use([key for key in keys if key in resting or key in entries])

    @property
    def unsettled(self) -> int:
        """New pages and uses that have not entered the eviction orders yet."""
        return self._orders.unsettled

    def settle(self, most: int | None = None) -> None:
        """Let the `most` oldest of them enter, or all."""
        self._orders.settle(most)

    # -- slots without a page -------------------------------------------------------------------------------------

    def allocate(self, n: int, after: int | None = None) -> list[int] | None:
        """`n` slots, ascending, neighbours (of slot `after` too) where they can be; evicting as needed.

        None and nothing changed when there are not so many.
        """
        short = n - len(self._free)
        if short > 0:
            victims = self._victims(short)
            if len(victims) < short:
                return None
            self._evict(victims)
            if len(self._free) < n:  # evicted slots that come back later, after a commit
                return None
        return self._free.take(n, after)

    def allocate_some(
        self, n: int, keep: Collection[bytes] = (), after: int | None = None, pages: Sequence[Page] = ()
    ) -> list[int]:
        """As many of `n` slots as can be had now without evicting a page of `keep`, or of the family of `pages`;
        neighbours where they can be. A large tier evicts a few tails more, for the calls to come."""
        short = n - len(self._free)
        if short > 0:
            self._evict(self._victims(short, keep, pages, self._ahead))
        return self._free.take(n, after)

    def take_free(self, n: int, after: int | None = None) -> list[int]:
        """As many of `n` slots as are free, neighbours where they can be; nothing is evicted."""
        return self._free.take(n, after)

    def evict(self, n: int, keep: Collection[bytes] = (), pages: Sequence[Page] = ()) -> int:
        """Evict up to `n` pages, none of `keep`, nor of the family of `pages`; how many went."""
        victims = self._victims(n, keep, pages)
        self._evict(victims)
        return len(victims)

    def make_room(self, pages: Sequence[Page], spare: int, coming: int = 0) -> None:
        """Evict until `pages` and `spare` more find slots, where `coming` evicted slots are free soon.

        Only pages that continue a prefix of this tier may push others out: nobody would reach the rest. A large tier
        evicts a few tails more, for the calls to come.
        """
        short = self.continuing(pages) + spare - self.free_slots - coming
        if short > 0:
            self._evict(self._victims(short, pages=pages, ahead=self._ahead))

    def coldest(self) -> bytes | None:
        """The page that eviction looks at first."""
        return next(iter(self._orders), None)

    def free(self, slots: Iterable[int]) -> None:
        """Give back slots that hold no page."""
        self._free.give_all(slots)

    def free_runs(self) -> list[tuple[int, int]]:
        """(first slot, slots) of each run of free slots, in order."""
        return self._free.runs()

    # -- pages ----------------------------------------------------------------------------------------------------

    def insert(self, page: Page, slot: int, state: PageState, retention: Retention = DEFAULT) -> Entry:
        """Put a page into an allocated slot. `PENDING` keeps it invisible until `commit`."""
        return self.insert_all((page,), (slot,), state, (retention,))[0]

    def insert_all(
        self, pages: Iterable[Page], slots: Iterable[int], state: PageState, retentions: Iterable[Retention]
    ) -> list[Entry]:
        """`insert` each page into its slot, as far as there are slots."""
        entries, children, orphans = self._entries, self._children, self._orphans
        parents, namespaces = self._parents, self._namespaces
        inserted: list[Entry] = []
        placed: list[Page] = []
        wanted: list[Retention] = []
        last, last_slot = None, 0
        for page, slot, retention in zip(pages, slots, retentions, strict=False):
            key, parent, namespace = page.key, page.parent, page.namespace
            entry = entries[key] = Entry(page, slot, state, retention)
            inserted.append(entry)
            placed.append(page)
            wanted.append(retention)
            parents[slot] = parent
            namespaces[slot] = namespace
            children[slot] = orphans.pop(key, 0) if orphans else 0
            if parent != namespace:
                above = last_slot if parent == last else self.slot(parent)
                if above is None:
                    orphans[parent] = orphans.get(parent, 0) + 1
                else:
                    children[above] += 1
            last, last_slot = key, slot
        self._orders.add(placed, wanted)
        return inserted

    def restore(
        self,
        keys: npt.NDArray[np.void],
        parents: npt.NDArray[np.void],
        digests: Sequence[bytes],
        namespaces: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        order: npt.NDArray[np.int64],
        retentions: Mapping[int, Retention] = NO_RETENTIONS,
    ) -> None:
        """Fill an empty index with visible pages, column by column. Keys differ, and so do slots.

        `keys` and `parents` are of dtype V32, `namespaces` positions in `digests`, `order` positions of pages, the
        least recently used first; `retentions`: by position, where they are not the default.
        """
        names = [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", keys.tobytes())]
        self._resting = dict(zip(names, slots.tolist(), strict=True))
        self._orders.restore(names, order, retentions)
        used = np.zeros(self.slots, np.bool_)
        used[slots] = True
        self._free = FreeSlots.beside(used)
        # Pages share the objects of their namespaces; parents become objects only when somebody asks.
        by_slot = np.full(self.slots, b"", dtype=object)
        by_slot[slots] = np.array([*digests, None], dtype=object)[namespaces]
        self._namespaces = by_slot.tolist()
        self._parents = [None] * self.slots
        restored = np.zeros(self.slots, f"V{KEY_BYTES}")
        restored[slots] = parents
        self._restored_parents = restored.tobytes()
        follows = np.flatnonzero(_differ(parents, np.frombuffer(b"".join(digests), KEY)[namespaces]))
        above = _find(keys, parents[follows])
        counts = np.bincount(slots[above[above >= 0]], minlength=self.slots).astype(np.intc)
        self._children = array("i", counts.tobytes())
        self._orphans = dict(Counter(parents[follows[above < 0]].tolist()))

    def commit(self, entry: Entry, state: PageState = VERIFIED) -> bool:
        """Make a reserved page visible. Whoever reserved it still leases it. False when it was dropped meanwhile."""
        entry.state = state
        return not entry.dropped

    def drop(self, entry: Entry) -> None:
        """Make a page invisible now (a reserved one: undo the reservation); its slot goes with its last lease."""
        if entry.dropped:
            return
        entry.dropped = True
        del self._entries[entry.key]
        self._unlink(entry.key, entry.parent, entry.namespace, entry.slot)
        if self._forget is not None and entry.state is not PENDING:
            self._forget(entry.slot)
        if entry.leases:
            self._leaving.add(entry.slot)
        else:
            self._give_back(entry)

    def lease(self, entry: Entry) -> None:
        entry.leases += 1

    def release(self, entry: Entry) -> None:
        self.release_all((entry,))

    def release_all(self, some: Iterable[Entry]) -> None:
        """End one lease of each."""
        entries, resting = self._entries, self._resting
        for entry in some:
            entry.leases -= 1
            if entry.leases:
                continue
            if entry.dropped:
                self._leaving.discard(entry.slot)
                self._give_back(entry)
            elif entry.state is VERIFIED:
                del entries[entry.key]
                resting[entry.key] = entry.slot

    # -- retention ------------------------------------------------------------------------------------------------

    def retain(self, key: bytes, retention: Retention) -> bool:
        """A page is stored again: the greater priority and the later expiry count. False when it has both already.

        With a greater priority the page is new in that priority's order.
        """
        old = self.retention(key)
        new = old if old is None else old.joined(retention)
        if new is None or new == old:
            return False
        slot = self.slot(key)
        assert slot is not None, "a page that is there has a slot"
        self._orders.retain(self._page_at(key, slot), new)
        entry = self._entries.get(key)
        if entry is not None:
            entry.retention = new
        return True

    @property
    def retained_pages(self) -> int:
        """Pages whose retention is not the default."""
        return len(self._orders.retained)

    @property
    def next_expiry(self) -> float:
        """When the next page expires, in seconds since the epoch; infinite when none does."""
        return self._orders.next_expiry

    def expire(self, now: float, most: int) -> list[bytes]:
        """Drop up to `most` pages that have expired by `now`; the keys of those that were visible."""
        return self._drop_expired(self._orders.expired(now, most))

    def expire_among(self, pages: Iterable[Page], now: float) -> list[bytes]:
        """Drop those of `pages` that have expired by `now`; the keys of those that were visible."""
        return self._drop_expired(self._orders.expired_among((page.key for page in pages), now))

    def _drop_expired(self, keys: Iterable[bytes]) -> list[bytes]:
        visible = []
        for key in keys:
            entry = self.find(key)
            assert entry is not None, "only pages that are there expire"
            if entry.state is not PENDING:
                visible.append(key)
            self.drop(entry)
        return visible

    # -- pages that a lower tier has not got yet ------------------------------------------------------------------

    @property
    def dirty_pages(self) -> int:
        return len(self._dirty)

    def mark_dirty(self, entry: Entry) -> None:
        """Not to be evicted before `mark_clean`. A page that is dropped is not dirty any more."""
        if not entry.dropped:
            self._dirty.add(entry.slot)

    def mark_clean(self, entry: Entry) -> None:
        if not entry.dropped:
            self._dirty.discard(entry.slot)

    def coldest_dirty(self, n: int, skip: Collection[bytes] = ()) -> list[Page]:
        """Up to about `n` dirty pages, the coldest first, each behind the dirty pages that it follows.

        None of `skip`, and no page that is not complete. The last one brings all that it follows.
        """
        chosen: dict[bytes, Page] = {}
        for key in self._orders:
            if len(chosen) >= n:
                break
            family: list[Page] = []
            while (entry := self._dirty_page(key)) is not None and key not in chosen and key not in skip:
                family.append(entry)
                key = entry.parent
            chosen.update((page.key, page) for page in reversed(family))
        return list(chosen.values())

    def _dirty_page(self, key: bytes) -> Page | None:
        slot = self._resting.get(key)
        if slot is not None:
            return self._page_at(key, slot) if slot in self._dirty else None
        entry = self._entries.get(key)
        if entry is None or entry.state is not VERIFIED or entry.slot not in self._dirty:
            return None
        return entry.page

    def select(self, namespace: bytes | None) -> list[bytes]:
        """Keys of all pages of a namespace, or of all there are, reserved ones included."""
        if namespace is None:
            return [*self._entries, *self._resting]
        of = self._namespaces
        resting = [key for key, slot in self._resting.items() if of[slot] == namespace]
        return [key for key, entry in self._entries.items() if entry.namespace == namespace] + resting

    def drop_all(self, keys: Iterable[bytes], namespace: bytes) -> int:
        """Drop those of `keys` that are of `namespace`; how many of them were visible."""
        visible = 0
        for key in keys:
            slot = self.slot(key)
            entry = self.find(key) if slot is not None and self._namespaces[slot] == namespace else None
            if entry is not None:
                visible += entry.state is not PENDING
                self.drop(entry)
        return visible

    def detach(self) -> Detached:
        """Drop every page at once. No work is done for a page at rest: its slot is copied, about 15 ns.

        The slots of pages at rest are nobody's until `retire` has had all of them.
        """
        in_use = list(self._entries.values())
        visible = len(self._resting) + sum(entry.state is not PENDING for entry in in_use)
        for entry in in_use:
            self.drop(entry)
        held = (self._resting, self._orders, self._orphans)
        detached = Detached(visible, list(self._resting.values()), held)
        self._resting, self._orders, self._orphans = {}, self._orders.empty(), {}
        self._dirty = set()
        self._children = array("i", bytes(4 * self.slots))
        return detached

    def retire(self, slots: Iterable[int]) -> None:
        """Forget and give back slots of visible pages that are gone, and that nobody leases."""
        if self._forget is None and self._recycle is None:
            self._free.give_all(slots)
            return
        forget, recycle = self._forget, self._recycle or self._free.give
        for slot in slots:
            if forget is not None:
                forget(slot)
            recycle(slot)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _give_back(self, entry: Entry) -> None:
        if self._recycle is None or entry.state is PENDING:  # never visible: nothing durable names its slot
            self._free.give(entry.slot)
        else:
            self._recycle(entry.slot)

    def _entry(self, key: bytes, slot: int) -> Entry:
        return Entry(self._page_at(key, slot), slot, VERIFIED, self._orders.retained.get(key, DEFAULT))

    def _page_at(self, key: bytes, slot: int) -> Page:
        return Page(key, self._parent_at(slot), self._namespaces[slot])

    def _parent_at(self, slot: int) -> bytes:
        parent = self._parents[slot]
        return self._restored_parents[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] if parent is None else parent

    def _parent(self, key: bytes) -> bytes:
        entry = self._entries.get(key)
        return self._parent_at(self._resting[key]) if entry is None else entry.parent

    def _count_out(self, parent: bytes) -> None:
        """One page less follows `parent`."""
        above = self.slot(parent)
        if above is not None:
            self._children[above] -= 1
            if not self._children[above]:
                self._orders.hasten(parent)
        elif self._orphans[parent] == 1:
            del self._orphans[parent]
        else:
            self._orphans[parent] -= 1

    def _slot_to_go(self, key: bytes, gone: int) -> int | None:
        """The slot of a page of the tier, if it could go, were so many of the pages behind it gone."""
        slot = self._resting.get(key)
        if slot is None:
            entry = self._entries.get(key)
            if entry is None or entry.leases or entry.state is PENDING:
                return None
            slot = entry.slot
        return slot if self._children[slot] <= gone and slot not in self._dirty else None

    def _unlink(self, key: bytes, parent: bytes, namespace: bytes, slot: int) -> None:
        """A page is in no order any more, and follows none."""
        self._dirty.discard(slot)
        self._orders.remove(key)
        followed = self._children[slot]
        if followed:
            self._orphans[key] = followed
        if parent != namespace:
            self._count_out(parent)

    def _evict(self, keys: Collection[bytes]) -> None:
        """Drop pages that nobody leases. Their slots are given back in this order."""
        self.evictions += len(keys)
        take, parent_at, namespaces, unlink = self._resting.pop, self._parent_at, self._namespaces, self._unlink
        slots: list[int] = []
        for key in keys:
            slot = take(key, None)
            if slot is None:
                self.retire(slots)
                slots = []
                self.drop(self._entries[key])
            else:
                unlink(key, parent_at(slot), namespaces[slot], slot)
                slots.append(slot)
        self.retire(slots)

    def _victims(
        self, n: int, keep: Collection[bytes] = (), pages: Sequence[Page] = (), ahead: int = 0
    ) -> Collection[bytes]:
        """Up to `n` pages that may go, coldest first, tails before heads; none of `keep`, nor of the family of `pages`.
        Up to `ahead` more where they are tails.

        A page that was passed over for its children goes as soon as the last of them is chosen, since it is colder than
        whatever comes later. One that stays is deferred, so that not every call looks at it. Only when no tail is left,
        pages with children that cannot go are taken.
        """
        chosen: dict[bytes, None] = {}
        passed: set[bytes] = set()
        gone: dict[bytes, int] = {}  # children that are chosen already

        def choose(key: bytes, slot: int | None) -> None:
            while slot is not None and len(chosen) < wanted:
                chosen[key] = None
                key = parent_at(slot)
                gone[key] = followed = gone.get(key, 0) + 1
                met = key in passed or is_deferred(key)
                slot = self._slot_to_go(key, followed) if met and key not in keep else None

        entries, children, dirty = self._entries, self._children, self._dirty
        parent_at, is_deferred = self._parent_at, self._orders.is_deferred
        at_rest = self._resting.get
        if pages:  # the first round looks for tails: of the family that is its end, and all others have a child in it
            keep = {*keep, *(page.key for page in pages), *(page.parent for page in pages)}
        for tails_only, wanted in ((True, n + ahead), (False, n)):
            if len(chosen) >= n:
                break
            if pages and not tails_only:
                keep = {*keep, *self.family(pages)}
            for key in self._orders:
                slot = at_rest(key)
                if slot is None:
                    entry = entries[key]
                    if entry.leases or entry.state is PENDING:
                        continue
                    slot = entry.slot
                elif tails_only and children[slot] and key not in gone:  # most of what is looked at
                    passed.add(key)
                    continue
                if key in chosen or key in keep or slot in dirty:
                    continue
                if tails_only and (followed := children[slot]) and followed > gone.get(key, 0):
                    passed.add(key)
                else:
                    choose(key, slot)
                    if len(chosen) >= wanted:
                        break
        for key in passed.difference(chosen):
            self._orders.defer(key)
        return chosen

    def mend(self, elsewhere: Iterable[int] = ()) -> None:
        """Make free what no page holds, and count followers anew. `elsewhere`: slots held outside the index."""
        self.settle()
        pages = list(self)
        used = np.zeros(self.slots, np.bool_)
        used[[*(e.slot for e in pages), *self._leaving, *elsewhere]] = True
        self._free = FreeSlots.beside(used)
        slots = {e.key: e.slot for e in pages}
        counts = Counter(e.parent for e in pages if e.parent != e.namespace)
        self._children = array("i", bytes(4 * self.slots))
        for key in slots.keys() & counts.keys():
            self._children[slots[key]] = counts.pop(key)
        self._orphans = dict(counts)
        for key, slot in slots.items():
            if not self._children[slot]:
                self._orders.hasten(key)

    def check(self, elsewhere: Sequence[int] = ()) -> list[str]:
        """Restate every invariant from scratch; the disagreements found. `elsewhere`: slots held outside the index."""
        problems = []
        pages = list(self)
        held = [e.slot for e in pages] + list(self._free) + list(self._leaving) + list(elsewhere)
        if len(set(held)) != len(held):
            twice = sorted(slot for slot, n in Counter(held).items() if n > 1)[:8]
            problems.append(f"slots in two places: {twice}")
        if set(held) - set(range(self.slots)):
            problems.append(f"slots outside 0 ... {self.slots - 1}: {sorted(set(held) - set(range(self.slots)))[:8]}")
        lost = set(range(self.slots)) - set(held)
        if lost:
            problems.append(f"{len(lost)} slots are neither free nor used: {sorted(lost)[:8]}")
        problems += self._orders.check({e.key: e.retention for e in pages})
        counted = {e.key: self._children[e.slot] for e in pages if self._children[e.slot]} | self._orphans
        if Counter(e.parent for e in pages if e.parent != e.namespace) != counted:
            problems.append("pages that follow others are miscounted")
        if self._dirty - {e.slot for e in pages if e.state is VERIFIED}:
            problems.append("slots are dirty that hold no page")
        problems += self._free.check()
        wrong = [e for e in self._entries.values() if e.leases < 0 or e.dropped or e.key in self._resting]
        return problems + [f"page {e.key.hex()[:16]} has {e.leases} leases, dropped={e.dropped}" for e in wrong]


def _words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(len(keys), KEY_BYTES // 8)


def _differ(some: npt.NDArray[np.void], others: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Where two columns of keys differ."""
    differ: npt.NDArray[np.bool_] = (_words(some) != _words(others)).any(axis=1)
    return differ


def _find(keys: npt.NDArray[np.void], wanted: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Where each wanted key is in `keys`, which all differ; -1 where it is not.

    Keys are digests, so eight bytes of them tell nearly all apart; sorted against sorted, memory is read in order.
    """
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    part, wanted_part = _words(keys)[:, 0], _words(wanted)[:, 0]
    order, wanted_order = np.argsort(part), np.argsort(wanted_part)
    part = part[order]
    at = np.minimum(np.searchsorted(part, wanted_part[wanted_order]), len(part) - 1)
    found = np.empty(len(wanted), np.int64)
    found[wanted_order] = np.where(part[at] == wanted_part[wanted_order], order[at], -1)
    there = np.flatnonzero(found >= 0)
    if (part[1:] == part[:-1]).any() or _differ(keys[found[there]], wanted[there]).any():
        exact = {key: i for i, key in enumerate(keys.tolist())}
        return np.array([exact.get(key, -1) for key in wanted.tolist()], np.int64)
    return found
