"""The index of one tier: its pages, their slots and states. Pure Python, no bytes, no I/O.

A page goes `insert(PENDING) → commit`, or `insert(PENDING) → drop` when it fails; `get` finds it only after `commit`. A
leased page is neither evicted nor overwritten; a page dropped while leased is invisible at once and gives its slot back
at the last release. The manager's lock guards every index.

Eviction takes tails before heads: a page goes only when no child of it is in the tier, unless no such page is left. A
leased page stays, and so does a *dirty* one, whose bytes are in no other tier yet.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gdscache.histograms import AGES, Buckets, Histogram
from gdscache.index.free_slots import FreeSlots
from gdscache.index.retention import DEFAULT, NO_RETENTIONS, Orders, Retention
from gdscache.index.table import PENDING, VERIFIED, Columns, Entry, PageState
from gdscache.limits import KEY_BYTES
from gdscache.native import Victims, take_out
from gdscache.pages.keys import KEY, Page, differ, find
from gdscache.policies.base import LRU, EvictionPolicy

ALL_OF = 64  # a tier of up to this many slots has all its pages watched,
_OF_256 = 4  # of a larger one, this many of 256 pages, chosen by their keys


class PageAges:
    """Watches pages from their arrival, while the engine is open, until they go. The manager's lock is held."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._below = 256 if slots <= ALL_OF else _OF_256
        self._clock = clock
        self._known: dict[bytes, tuple[float, float]] = {}  # time of arrival, time of the last use
        self._ages, self._idle, self._gaps = Histogram(AGES), Histogram(AGES), Histogram(AGES)

    def came(self, keys: Iterable[bytes]) -> None:
        below = self._below
        if some := [key for key in keys if key[0] < below]:
            now = self._clock()
            self._known.update(dict.fromkeys(some, (now, now)))

    def used(self, keys: Iterable[bytes]) -> None:
        known = self._known
        if some := known.keys() & keys:
            now = self._clock()
            for key in some:
                came, last = known[key]
                self._gaps.note(now - last)
                known[key] = came, now

    def evicted(self, keys: Iterable[bytes]) -> None:
        if gone := self._known.keys() & keys:
            now = self._clock()
            for came, last in map(self._known.pop, gone):
                self._ages.note(now - came)
                self._idle.note(now - last)

    def gone(self, key: bytes) -> None:
        """A page went without being evicted."""
        self._known.pop(key, None)

    def clear(self) -> None:
        self._known.clear()

    def describe(self) -> dict[str, Buckets]:
        return {
            "evicted_age_seconds": self._ages.describe(),
            "evicted_idle_seconds": self._idle.describe(),
            "reuse_gap_seconds": self._gaps.describe(),
        }


_AHEAD = 32  # most tails that are evicted in advance, so that the next calls need no victims


class Detached(NamedTuple):
    """Pages that were dropped all at once. Delete it without a lock: freeing `held` takes time."""

    visible: int
    slots: list[int]
    held: object


class PageIndex:
    """Slots `0 ... slots-1` of a tier and the pages in them. A page may be present without its parent.

    `forget(slots)` is called when visible pages are dropped, `recycle(slots)` when their slots are given back, which is
    later if a page is leased. By default the slot is free then; the SSD tier also waits for the committed deletion.

    Many methods: each question about pages and each change of their state is one, so that no caller uses the columns.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy | None = None,
        forget: Callable[[Sequence[int]], None] | None = None,
        recycle: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.slots = slots
        # Pages at rest are columns, not objects: a million of them cost little, and the garbage collector nothing.
        self._resting: dict[bytes, int] = {}  # key -> slot
        self._parents: list[bytes | None] = [b""] * slots  # None: in `_restored_parents`
        self._restored_parents = b""  # KEY_BYTES a slot
        self._namespaces: list[bytes] = [b""] * slots
        self._entries: dict[bytes, Entry] = {}  # pages in use
        self._held: Counter[int] = Counter()  # leases on pages at rest, by slot: see `hold_run`
        self._children = array("i", bytes(4 * slots))  # number of pages that follow the page in the slot
        self._orphans: dict[bytes, int] = {}  # number of pages that follow an absent page, by its key
        self.orders = Orders(LRU() if policy is None else policy, self.present, self.all_keys, lambda: self.on_loss())
        self._dirty: set[int] = set()  # slots of pages that a lower tier is to get and lacks
        self.evictions = 0
        self.ages = PageAges(slots)
        self.torn = 0  # pages that were dropped while leased
        self._ahead = min(_AHEAD, slots // 512)
        self._free = FreeSlots(slots)
        self._forget = forget
        self._recycle = self.free if recycle is None else recycle
        # All are called under the lock, and only take notes. `on_evict` gets the keys of victims; `on_change` gets the
        # pages that become visible ("stored"), and the keys of those that were and go ("removed"; "cleared": all that
        # are left, which may be read later). `on_loss` is told that the eviction orders begin anew.
        self.on_evict: Callable[[Collection[bytes]], object] = _nobody
        self.on_loss: Callable[[], object] = _nobody
        self.on_change: Callable[[str, Collection[Any]], object] | None = None
        # Where a prefix may lie in several tiers: the tables of the others, and the keys of pages on their way to any.
        self.others: Sequence[PageIndex] = ()
        self.coming: Callable[[], Collection[bytes]] = tuple
        self._leaving: dict[int, Entry] = {}  # dropped pages that are still leased, by slot

    def __len__(self) -> int:
        return len(self._resting) + len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """All pages, reserved ones included; a page at rest comes as a copy."""
        yield from self._entries.values()
        for key, slot in self._resting.items():
            yield self._entry(key, slot)

    def __contains__(self, key: bytes) -> bool:
        """True if the page is present in any state."""
        return key in self._resting or key in self._entries

    def has(self, key: bytes) -> bool:
        """True if the page is visible."""
        if key in self._resting:
            return True
        entry = self._entries.get(key)
        return entry is not None and entry.state is not PENDING

    def visible(self, keys: Sequence[bytes]) -> bytes:
        """`has` of each key, 1 or 0."""
        mask, entries = bytes(map(self._resting.__contains__, keys)), self._entries
        if not entries or 0 not in mask or entries.keys().isdisjoint(keys):
            return mask
        return bytes(map(self.has, keys))

    def present(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        resting, entries = self._resting, self._entries
        if not entries:
            return list(filter(resting.__contains__, keys))
        return [key for key in keys if key in resting or key in entries]

    def lacking(self, pages: Sequence[Page]) -> list[int]:
        resting, entries = self._resting, self._entries
        return [i for i, page in enumerate(pages) if (key := page.key) not in resting and key not in entries]

    def slots_of(self, keys: Sequence[bytes]) -> list[int]:
        resting = list(map(self._resting.get, keys))
        found = list(map(self.slot, keys)) if self._entries and None in resting else resting
        return [slot for slot in found if slot is not None] if None in found else cast(list[int], found)

    def slot(self, key: bytes) -> int | None:
        slot = self._resting.get(key)
        if slot is None and key in self._entries:
            return self._entries[key].slot
        return slot

    def retention(self, key: bytes) -> Retention | None:
        return self.orders.retained.get(key, DEFAULT) if key in self else None

    def all_keys(self) -> list[bytes]:
        """Keys of all pages, reserved ones included."""
        return [*self._resting, *self._entries]

    # -- pages to work with -------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> Entry | None:
        entry = self.find(key)
        return None if entry is None or entry.state is PENDING else entry

    def find(self, key: bytes) -> Entry | None:
        slot = self._resting.pop(key, None)
        if slot is None:
            return self._entries.get(key)
        entry = self._entries[key] = self._entry(key, slot)
        self._held.pop(slot, None)
        return entry

    def pin_run(self, pages: Sequence[Page], start: int, stop: int) -> list[Entry]:
        """Lease the pages of `pages[start:stop]` up to the first that is not visible."""
        take, entries, retained, held = self._resting.pop, self._entries, self.orders.retained, self._held
        pinned = []
        for i in range(start, stop):  # no slice: this may end at the first page, and is called for each
            page = pages[i]
            key = page.key
            slot = take(key, None)
            if slot is not None:
                retention = retained.get(key, DEFAULT) if retained else DEFAULT
                leases = 1 + held.pop(slot, 0) if held else 1
                entry = entries[key] = Entry(page, slot, VERIFIED, retention, leases)
            elif key not in entries or (entry := entries[key]).state is PENDING:
                break
            else:
                entry.leases += 1
            pinned.append(entry)
        return pinned

    def hold_run(self, pages: Sequence[Page], start: int, stop: int) -> list[int]:
        """`pin_run` without objects: returns slots. Pages at rest stay at rest, and `let_go` ends the
        leases."""
        at_rest, entries = self._resting.get, self._entries
        slots: list[int] = []
        in_use: list[Entry] = []
        for i in range(start, stop):
            key = pages[i].key
            slot = at_rest(key)
            if slot is None:
                if key not in entries or (entry := entries[key]).state is PENDING:
                    break
                slot = entry.slot
                in_use.append(entry)
            slots.append(slot)
        self._held.update(slots)
        for entry in in_use:
            entry.leases += self._held.pop(entry.slot, 0)
        return slots

    def absent_until(self, pages: Sequence[Page], start: int, stop: int | None = None) -> int:
        """The place of the first page of `pages[start:stop]` that is present in any state; `stop` if none is."""
        resting, entries = self._resting, self._entries
        stop = len(pages) if stop is None else stop
        for i in range(start, stop):
            key = pages[i].key
            if key in resting or key in entries:
                return i
        return stop

    # -- pages come, and go -------------------------------------------------------------------------------------------

    def insert(self, page: Page, slot: int, state: PageState, retention: Retention = DEFAULT) -> Entry:
        """Put a page into an allocated slot. `PENDING` keeps it invisible until `commit`."""
        return self.insert_all((page,), (slot,), state, (retention,))[0]

    def insert_all(
        self,
        pages: Sequence[Page],
        slots: Sequence[int],
        state: PageState,
        retentions: Sequence[Retention],
        leases: int = 0,
    ) -> list[Entry]:
        """`insert` each page into its slot, until the slots end, with this number of leases.

        A page that would follow itself, through pages that are present, begins a prefix instead, so that following
        parents always ends.
        """
        self.orders.sift()
        entries, children, orphans = self._entries, self._children, self._orphans
        parents, namespaces = self._parents, self._namespaces
        inserted: list[Entry] = []
        last, last_slot = None, 0
        end, rooted = cast(bytes | None, None), False  # the end of the parents of `last`, once needed
        for page, slot, retention in zip(pages, slots, retentions, strict=False):
            key, parent, namespace = page
            if parent != last:
                end = None
            if parent == key or (orphans and key in orphans and parent != namespace):
                end = key if parent == key else self.end_of_prefix(parent) if end is None else end
                if end == key:
                    end, parent, rooted = namespace, namespace, True
                    page = Page(key, parent, namespace)
            entry = entries[key] = Entry(page, slot, state, retention, leases)
            inserted.append(entry)
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
        added = [entry.page for entry in inserted] if rooted else pages[: len(inserted)]
        self.orders.add(added, retentions[: len(inserted)])
        self.ages.came([entry.key for entry in inserted])
        if self.on_change is not None and state is not PENDING:
            self.on_change("stored", pages[: len(inserted)])
        return inserted

    def end_of_prefix(self, key: bytes) -> bytes:
        """The absent page that the last of the present pages before `key`, or `key` itself, follows; b"" where the
        prefix is whole."""
        resting, parents, entries = self._resting, self._parents, self._entries
        while True:
            slot = resting.get(key)
            if slot is None:
                if key not in entries:
                    return key
                slot = entries[key].slot
            key = parents[slot] or self._parent_at(slot)
            if not self._orphans or key == self._namespaces[slot]:
                return b""

    def restore(
        self,
        keys: npt.NDArray[np.void],
        parents: npt.NDArray[np.void],
        digests: Sequence[bytes],
        namespaces: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        order: npt.NDArray[np.int64],
        retentions: Mapping[int, Retention] = NO_RETENTIONS,
        above: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Fill an empty table with visible pages, column by column. Keys differ, and so do slots.

        `keys` and `parents` are of dtype V32, `namespaces` positions in `digests`, `order` positions of pages, the
        least recently used first. `retentions`: by position, where they are not the default. `above`: the position of
        each page's parent (-1: absent), if known. No page follows itself, not even through others.
        """
        names = [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", keys.tobytes())]
        self._resting = dict(zip(names, slots.tolist(), strict=True))
        self.orders.restore(names, order, retentions)
        # Pages share the objects of their namespaces; parents become objects only when they are read.
        by_slot = np.full(self.slots, b"", dtype=object)
        by_slot[slots] = np.array([*digests, None], dtype=object)[namespaces]
        self._namespaces = by_slot.tolist()
        self._parents = [None] * self.slots
        restored = np.zeros(self.slots, KEY)
        restored[slots] = parents
        self._restored_parents = restored.tobytes()
        follows = np.flatnonzero(differ(parents, np.frombuffer(b"".join(digests), KEY)[namespaces]))
        above = find(keys, parents[follows]) if above is None else above[follows]
        counts = np.bincount(slots[above[above >= 0]], minlength=self.slots).astype(np.intc)
        self._children = array("i", counts.tobytes())
        self._orphans = dict(Counter(parents[follows[above < 0]].tolist()))
        used = np.zeros(self.slots, np.bool_)
        used[slots] = True
        self._free = FreeSlots.beside(used)

    @property
    def _columns(self) -> Columns:
        places = self._resting, self._entries, self._children, self._parents, self._restored_parents
        return Columns(*places, self._namespaces, self._orphans)

    def namespaces_at(self, slots: Sequence[int]) -> list[bytes]:
        return list(map(self._namespaces.__getitem__, slots))

    # -- a page's row -------------------------------------------------------------------------------------------------

    def _entry(self, key: bytes, slot: int) -> Entry:
        retention = self.orders.retained.get(key, DEFAULT)
        return Entry(self._page_at(key, slot), slot, VERIFIED, retention, self._held[slot])

    def _page_at(self, key: bytes, slot: int) -> Page:
        return Page(key, self._parent_at(slot), self._namespaces[slot])

    def _parent_at(self, slot: int) -> bytes:
        parent = self._parents[slot]
        return self._restored_parents[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] if parent is None else parent

    def _parent(self, key: bytes) -> bytes:
        """By the page's row, which leads to no circle; a caller may have named the page otherwise."""
        entry = self._entries.get(key)
        return self._parent_at(self._resting[key] if entry is None else entry.slot)

    # -- uses ---------------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest.

        The use enters the orders later, as new pages do: see `Orders`.
        """
        self.orders.use(keys)
        self.ages.used(keys)

    def coldest(self) -> bytes | None:
        """The page that eviction looks at first."""
        return next(iter(self.orders), None)

    # -- retention ----------------------------------------------------------------------------------------------------

    def retain(self, key: bytes, retention: Retention) -> bool:
        """A page is stored again: the greater priority and the later expiry count. False if it has both already.

        With a greater priority the page is new in that priority's order.
        """
        old = self.retention(key)
        new = old if old is None else old.joined(retention)
        if new is None or new == old:
            return False
        slot = self.slot(key)
        assert slot is not None, "a page that is there has a slot"
        self.orders.retain(self._page_at(key, slot), new)
        entry = self._entries.get(key)
        if entry is not None:
            entry.retention = new
        return True

    # -- dirty pages --------------------------------------------------------------------------------------------------

    @property
    def dirty_pages(self) -> int:
        return len(self._dirty)

    def mark_dirty(self, entry: Entry) -> None:
        """Do not evict a visible page before `mark_clean`. Dropping it makes it clean."""
        if not entry.dropped:
            self._dirty.add(entry.slot)

    def mark_clean(self, entry: Entry) -> None:
        if not entry.dropped:
            self._dirty.discard(entry.slot)

    def coldest_dirty(self, n: int, skip: Collection[bytes] = ()) -> list[Page]:
        """About `n` dirty pages, the coldest first, each behind the dirty pages that it follows.

        None of `skip`, and no incomplete page. The last page brings all dirty pages that it follows, so the result may
        be longer.
        """
        chosen: dict[bytes, Page] = {}
        for key in self.orders:
            if len(chosen) >= n:
                break
            family: list[Page] = []
            while (entry := self._dirty_page(key)) is not None and key not in chosen and key not in skip:
                family.append(entry)
                key = entry.parent
            chosen.update((page.key, page) for page in reversed(family))
        return list(chosen.values())

    def _dirty_page(self, key: bytes) -> Page | None:
        slot = self.slot(key)
        return self._page_at(key, slot) if slot is not None and slot in self._dirty else None

    # -- victims ------------------------------------------------------------------------------------------------------

    def family(self, pages: Iterable[Page]) -> set[bytes]:
        """Keys of `pages` and of the pages before them, as far back as this tier and `others` have them without a gap.

        A new page must not evict these: without its head, a tail is out of reach.
        """
        keys: set[bytes] = set()
        for page in pages:
            keys.add(page.key)
            key, gap = page.parent, b""
            while key != gap:
                gap = key
                for table in (self, *self.others):
                    while key in table and key not in keys:
                        keys.add(key)
                        key = table._parent(key)
        return keys

    def continuing(self, pages: Sequence[Page]) -> int:
        """The number of `pages` whose whole prefix is in this tier and `others`, on its way there, or among `pages`."""
        own, known = {page.key for page in pages}, {b"", *(page.namespace for page in pages)}
        ends = {parent: self._end_of_prefix(parent) for parent in {page.parent for page in pages} - own}
        if not known.issuperset(ends.values()):
            known = known.union(self.coming())
        found = {parent for parent, end in ends.items() if end in known}
        for page in pages:
            if page.parent in found:
                found.add(page.key)
        return len(found & own)

    def _end_of_prefix(self, key: bytes) -> bytes:
        """`end_of_prefix` over this table and `others`."""
        seen: set[bytes] = set()
        while key not in seen:
            seen.add(key)
            for table in (self, *self.others):
                key = table.end_of_prefix(key)
        return key

    def _victims(
        self, n: int, keep: Collection[bytes] = (), pages: Sequence[Page] = (), ahead: int = 0
    ) -> Sequence[bytes]:
        """Up to `n` pages to evict, coldest first, tails before heads; none of `keep`, nor of the family of `pages`. Up
        to `ahead` more if they are tails.

        A page that was passed over for its children goes as soon as the last of them is chosen, since it is colder than
        all pages after it. A page that stays is deferred, so that not every call looks at it. Pages whose children
        cannot go are taken only when no tail is left.
        """
        # the first round looks for tails: only the family's end is one, since all its other pages have a child in it
        if pages:
            keep = {*keep, *(page.key for page in pages), *(page.parent for page in pages)}
        victims = self._tails(n + ahead, keep)
        if pages and not all(
            table._orphans.keys().isdisjoint(victims.chosen) for table in self.others
        ):  # no tails: these have children there
            keep = {*keep, *self.family(pages)}
            victims = self._tails(n + ahead, keep)
        if len(victims.chosen) < n:
            keep = {*keep, *self.family(pages)} if pages else keep
            victims.look(self._columns, self.orders, keep, n, tails_only=False)
        self.orders.defer_all(victims.passed)
        return victims.chosen

    def _tails(self, n: int, keep: Collection[bytes]) -> Victims:
        coldest = iter(self.orders)  # the orders are up to date from here on
        victims = Victims(self._held, self._dirty, PENDING, self.orders.deferring())
        victims.look(self._columns, coldest, keep, n, tails_only=True)
        return victims

    # -- slots without a page -----------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """`n` slots, ascending, neighbours if possible; evicting as needed. None, and nothing changed, if there are
        fewer."""
        short = n - len(self._free)
        if short > 0:
            victims = self._victims(short)
            if len(victims) < short:
                return None
            self._evict(victims)
            if len(self._free) < n:  # evicted slots may come back only after a commit
                return None
        return self._free.take(n)

    def allocate_some(self, n: int, keep: Collection[bytes] = (), pages: Sequence[Page] = ()) -> list[int]:
        """Up to `n` slots without evicting a page of `keep` or of the family of `pages`; neighbours if possible. A
        large tier evicts a few more tails for later calls."""
        short = n - len(self._free)
        if short > 0:
            self._evict(self._victims(short, keep, pages, self._ahead))
        return self._free.take(n)

    def take_free(self, n: int, after: int | None = None) -> list[int]:
        """Up to `n` free slots, neighbours if possible; nothing is evicted."""
        return self._free.take(n, after)

    def evict(self, n: int) -> int:
        victims = self._victims(n)
        self._evict(victims)
        return len(victims)

    def make_room(self, pages: Sequence[Page], spare: int, coming: int = 0) -> None:
        """Evict until `pages` and `spare` more find slots, where `coming` evicted slots are free soon.

        Only `continuing` pages may evict others: no lookup would reach the rest. A large tier evicts a few more tails
        for later calls.
        """
        room = self.free_slots + coming - spare
        short = self.continuing(pages) - room if len(pages) > room else 0
        if short > 0:
            self._evict(self._victims(short, pages=pages, ahead=self._ahead))

    def free(self, slots: Iterable[int]) -> None:
        self._free.give_all(slots)

    def free_runs(self) -> list[tuple[int, int]]:
        return self._free.runs()

    # -- pages --------------------------------------------------------------------------------------------------------

    def commit(self, entry: Entry, state: PageState = VERIFIED) -> bool:
        """Make a reserved page visible; it stays leased. False if it was dropped meanwhile."""
        entry.state = state
        if self.on_change is not None and not entry.dropped:
            self.on_change("stored", (entry.page,))
        return not entry.dropped

    def commit_all(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        for entry in entries:
            entry.state = VERIFIED
        if self.on_change is not None:
            self.on_change("stored", [entry.page for entry in entries if not entry.dropped])

    def drop(self, entry: Entry, *, evicted: bool = False) -> None:
        """Make a page invisible now (a reserved one: undo the reservation); its slot goes with its last lease.
        `evicted`: to make room for others."""
        if entry.dropped:
            return
        key, slot, visible = entry.key, entry.slot, entry.state is not PENDING
        self.orders.sift()  # its uses count only while it is present
        self._resting[key] = slot
        try:
            gone, _ = take_out(self._columns, (key,))
        except BaseException:
            del self._resting[key]
            raise
        entry.dropped = True
        del self._entries[key]
        self._dirty.discard(slot)
        if visible and self._forget is not None:
            self._forget((slot,))
        if entry.leases:
            self.torn += 1
            self._leaving[slot] = entry
        else:
            self._recycle((slot,))
        if evicted:
            self._evicted((key,), gone)
            return
        self.ages.gone(key)
        self.orders.remove(key)
        if (freed := gone[0][1]) is not None:
            self.orders.hasten(freed)
        if visible and self.on_change is not None:
            self.on_change("removed", (key,))

    def lease(self, entry: Entry) -> None:
        entry.leases += 1

    def release(self, entry: Entry) -> None:
        self.release_all((entry,))

    def release_all(self, some: Iterable[Entry]) -> None:
        entries, resting = self._entries, self._resting
        for entry in some:
            entry.leases -= 1
            if entry.leases:
                continue
            if entry.dropped:
                self._leaving.pop(entry.slot, None)
                self._recycle((entry.slot,))
            elif entry.state is VERIFIED:
                del entries[entry.key]
                resting[entry.key] = entry.slot

    def let_go(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        held, leaving, in_use = self._held, self._leaving, list[Entry]()
        for page, slot in zip(pages, slots, strict=True):
            leases = held.pop(slot, 0)
            if leases > 1:
                held[slot] = leases - 1
            elif not leases:  # the page has become an object meanwhile
                in_use.append(leaving[slot] if slot in leaving else self._entries[page.key])
        self.release_all(in_use)

    def expire(self, now: float, most: int) -> list[bytes]:
        """Drop up to `most` pages that have expired by `now`; returns the keys of the visible ones."""
        keys = self.orders.expiries.take(now, most)
        try:
            return self._drop_expired(keys)
        except BaseException:
            self.orders.not_yet_expired(keys)
            raise

    def expire_among(self, pages: Iterable[Page], now: float) -> list[bytes]:
        return self._drop_expired(self.orders.expired_among((page.key for page in pages), now))

    def _drop_expired(self, keys: Iterable[bytes]) -> list[bytes]:
        visible = []
        for key in keys:
            entry = self.find(key)
            assert entry is not None, "only pages that are there expire"
            if entry.state is not PENDING:
                visible.append(key)
            self.drop(entry)
        return visible

    # -- many pages at once -------------------------------------------------------------------------------------------

    def drop_all(self, keys: Iterable[bytes], namespaces: Collection[bytes]) -> int:
        visible = 0
        for key in keys:
            slot = self.slot(key)
            entry = self.find(key) if slot is not None and self._namespaces[slot] in namespaces else None
            if entry is not None:
                visible += entry.state is not PENDING
                self.drop(entry)
        return visible

    def detach(self) -> Detached:
        """Drop every page at once. A page at rest only costs a copy of its slot, about 15 ns.

        Slots of pages at rest stay unusable until they went through `retire`.
        """
        for key in [key for key, slot in self._resting.items() if slot in self._held] if self._held else ():
            self.find(key)
        in_use = list(self._entries.values())
        visible = len(self._resting) + sum(entry.state is not PENDING for entry in in_use)
        orders, children = self.orders.empty(), array("i", bytes(4 * self.slots))
        for entry in in_use:
            self.drop(entry)
        gone = self._resting
        detached = Detached(visible, list(gone.values()), (gone, self.orders, self._orphans, self._children))
        self._resting, self.orders, self._orphans, self._children = {}, orders, {}, children
        self._dirty = set()
        self.ages.clear()
        if self.on_change is not None:
            self.on_change("cleared", gone)
        return detached

    def retire(self, slots: Iterable[int]) -> None:
        """Forget and give back slots of visible, unleased pages that are gone."""
        slots = list(slots)
        if self._forget is not None:
            self._forget(slots)
        self._recycle(slots)

    def _evict(self, keys: Sequence[bytes]) -> None:
        """Drop victims, which are neither leased nor dirty. Their slots are given back in this order."""
        while keys:
            gone, slots = take_out(self._columns, keys)
            self.retire(slots)
            self._evicted(keys[: len(gone)], gone)
            if len(gone) < len(keys):  # the next is a page in use
                self.drop(self._entries[keys[len(gone)]], evicted=True)
            keys = keys[len(gone) + 1 :]

    def _evicted(self, keys: Sequence[bytes], gone: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Visible pages have gone. `gone`: as of `take_out`."""
        self.orders.evict(gone)
        self.evictions += len(keys)
        self.ages.evicted(keys)
        self.on_evict(keys)
        if self.on_change is not None:
            self.on_change("removed", keys)

    # -- all invariants -----------------------------------------------------------------------------------------------

    def check(self, elsewhere: Sequence[int] = ()) -> list[str]:
        """Violated invariants, recomputed from scratch. `elsewhere`: slots held outside the index."""
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
        if self._dirty - {e.slot for e in pages if e.state is VERIFIED}:
            problems.append("slots are dirty that hold no page")
        return problems + self._free.check() + self._disagreements(pages)

    def _disagreements(self, pages: Collection[Entry]) -> list[str]:
        problems = self.orders.check({e.key: e.retention for e in pages})
        counted = {e.key: self._children[e.slot] for e in pages if self._children[e.slot]} | self._orphans
        rows = [(self._parent_at(e.slot), self._namespaces[e.slot]) for e in pages]
        if Counter(parent for parent, namespace in rows if parent != namespace) != counted:
            problems.append("pages that follow others are miscounted")
        if min(self._held.values(), default=1) < 1 or self._held.keys() - {*self._resting.values()}:
            problems.append("pages are held that are not at rest")
        wrong = [e for e in self._entries.values() if e.leases < 0 or e.dropped or e.key in self._resting]
        return problems + [f"page {e.key.hex()[:16]} has {e.leases} leases, dropped={e.dropped}" for e in wrong]


def _nobody(keys: Collection[bytes] = ()) -> None:
    pass
