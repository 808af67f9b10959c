"""The pages of one tier as a table: each page's slot, state and parent.

The caller chooses the slots and the pages to drop: the table knows neither free slots nor an order of eviction.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gdscache.index.eviction_orders import NO_RETENTIONS, Orders
from gdscache.index.retention import DEFAULT, Retention
from gdscache.limits import KEY_BYTES
from gdscache.pages.columns import KEY, differ, find
from gdscache.pages.keys import Page
from gdscache.policies.base import EvictionPolicy


class PageState(enum.Enum):
    PENDING = "pending"  # reserved, the bytes are on their way
    VERIFIED = "verified"


# For loops over pages: an enum's member takes as long to look up as a page.
PENDING, VERIFIED = PageState.PENDING, PageState.VERIFIED


class Entry:
    """A page in use: leased, reserved, or just looked at. While a page is leased it has one such object.

    `leases`: all leases of the page, including those without an object (`PageTable.hold_run`).
    """

    __slots__ = ("dropped", "key", "leases", "page", "retention", "slot", "state")

    def __init__(
        self, page: Page, slot: int, state: PageState, retention: Retention = DEFAULT, leases: int = 0
    ) -> None:
        self.page = page
        self.key = page.key
        self.slot = slot
        self.state = state
        self.retention = retention
        self.leases = leases
        self.dropped = False

    @property
    def parent(self) -> bytes:
        return self.page.parent

    @property
    def namespace(self) -> bytes:
        return self.page.namespace


class Columns(NamedTuple):
    """What native calls read and change: pages at rest by key, pages in use, and a row a slot, as in `PageTable`."""

    resting: dict[bytes, int]
    in_use: Mapping[bytes, Entry]
    children: array[int]
    parents: Sequence[bytes | None]
    restored_parents: bytes
    namespaces: Sequence[bytes]
    orphans: dict[bytes, int]


class PageTable:
    """The pages in slots `0 ... slots-1` of a tier. A page may be present without its parent.

    Many methods: each question about pages is one, so that no caller reads the columns.
    """

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
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
        self._orders = Orders(policy, self.present, self.all_keys)

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
        return self._orders.retained.get(key, DEFAULT) if key in self else None

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
        take, entries, retained, held = self._resting.pop, self._entries, self._orders.retained, self._held
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
        """`pin_run` without objects: returns slots. Pages at rest stay at rest, and `PageIndex.let_go` ends the
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
        self._orders.sift()
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
        self._orders.add(added, retentions[: len(inserted)])
        self._inserted(pages[: len(inserted)], state)
        return inserted

    def _inserted(self, pages: Sequence[Page], state: PageState) -> None:
        """For subclasses: these pages have come."""

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

    def follows(self, keys: Iterable[bytes]) -> bool:
        """Whether a page follows one of these that is absent."""
        return not self._orphans.keys().isdisjoint(keys)

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
        self._orders.restore(names, order, retentions)
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
        self._restored(slots)

    def _restored(self, slots: npt.NDArray[np.int64]) -> None:
        """For subclasses: exactly these slots have pages."""

    @property
    def _columns(self) -> Columns:
        places = self._resting, self._entries, self._children, self._parents, self._restored_parents
        return Columns(*places, self._namespaces, self._orphans)

    def namespaces_at(self, slots: Sequence[int]) -> list[bytes]:
        return list(map(self._namespaces.__getitem__, slots))

    # -- a page's row -------------------------------------------------------------------------------------------------

    def _entry(self, key: bytes, slot: int) -> Entry:
        retention = self._orders.retained.get(key, DEFAULT)
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

    # -- all invariants -----------------------------------------------------------------------------------------------

    def _disagreements(self, pages: Collection[Entry]) -> list[str]:
        problems = self._orders.check({e.key: e.retention for e in pages})
        counted = {e.key: self._children[e.slot] for e in pages if self._children[e.slot]} | self._orphans
        rows = [(self._parent_at(e.slot), self._namespaces[e.slot]) for e in pages]
        if Counter(parent for parent, namespace in rows if parent != namespace) != counted:
            problems.append("pages that follow others are miscounted")
        if min(self._held.values(), default=1) < 1 or self._held.keys() - {*self._resting.values()}:
            problems.append("pages are held that are not at rest")
        wrong = [e for e in self._entries.values() if e.leases < 0 or e.dropped or e.key in self._resting]
        return problems + [f"page {e.key.hex()[:16]} has {e.leases} leases, dropped={e.dropped}" for e in wrong]
