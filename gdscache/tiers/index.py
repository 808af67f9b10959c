"""The index of one tier: which pages it holds, in which slot, in what state. Pure Python, no bytes, no I/O.

A page goes `insert(PENDING) → commit`, or `insert(PENDING) → drop` when it fails; `get` sees it only after `commit`.
A leased page is neither evicted nor overwritten; a page dropped while leased is invisible at once and gives its slot
back at the last release. Eviction takes tails before heads: a page goes only when no child of it is in the tier,
unless nothing else can go. Nothing here locks: the manager's lock guards every index.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from gdscache.policy import LRU, EvictionPolicy


class Page(NamedTuple):
    """The name of a page: its key, the key of the page before it (the namespace for a first page), its namespace."""

    key: bytes
    parent: bytes
    namespace: bytes


class PageState(enum.Enum):
    """What may be done with a page's bytes."""

    PENDING = "pending"  # reserved, the bytes are on their way
    UNVERIFIED = "unverified"  # bytes are there, their checksums were not compared yet
    VERIFIED = "verified"


class Entry:
    """One page in one tier. `children` counts the pages of this tier whose parent this page is."""

    __slots__ = ("children", "dropped", "key", "leases", "namespace", "parent", "slot", "state")

    def __init__(self, page: Page, slot: int, state: PageState) -> None:
        self.key, self.parent, self.namespace = page
        self.slot = slot
        self.state = state
        self.leases = 0
        self.children = 0
        self.dropped = False

    @property
    def page(self) -> Page:
        return Page(self.key, self.parent, self.namespace)


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
        self._entries: dict[bytes, Entry] = {}
        self._orphans: dict[bytes, int] = {}  # children of absent parents
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._free = list(range(slots - 1, -1, -1))
        self._forget = forget
        self._recycle = self._free.append if recycle is None else recycle
        self._leaving: set[int] = set()  # slots of dropped pages that are still leased

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def get(self, key: bytes) -> Entry | None:
        """The page, if it is visible."""
        entry = self._entries.get(key)
        return None if entry is None or entry.state is PageState.PENDING else entry

    def find(self, key: bytes) -> Entry | None:
        """The page in any state, reserved ones included."""
        return self._entries.get(key)

    def family(self, pages: Iterable[Page]) -> set[bytes]:
        """Keys of `pages` and of the pages before them, as far back as the tier has them without a gap.

        What a new page must not push out: without its head, a tail is out of reach.
        """
        keys: set[bytes] = set()
        for page in pages:
            keys.add(page.key)
            entry = self._entries.get(page.parent)
            while entry is not None and entry.key not in keys:
                keys.add(entry.key)
                entry = self._entries.get(entry.parent)
        return keys

    def continuing(self, pages: Iterable[Page]) -> int:
        """How many of `pages` have all pages before them in the tier, or among `pages`."""
        keys: set[bytes] = set()
        for page in pages:
            if page.parent == page.namespace or page.parent in self._entries or page.parent in keys:
                keys.add(page.key)
        return len(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest."""
        entries, touch = self._entries, self._policy.touch
        for key in keys:
            if key in entries:
                touch(key)

    # -- slots without a page -------------------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int] | None:
        """`n` slots, evicting as needed, or None and nothing changed."""
        short = n - len(self._free)
        if short > 0:
            victims = self._victims(short)
            if len(victims) < short:
                return None
            for entry in victims:
                self._evict(entry)
            if len(self._free) < n:  # evicted slots that come back later, after a commit
                return None
        return [self._free.pop() for _ in range(n)]

    def allocate_some(self, n: int, keep: Collection[bytes] = ()) -> list[int]:
        """As many of `n` slots as can be had now without evicting a page of `keep`."""
        short = n - len(self._free)
        if short > 0:
            for entry in self._victims(short, keep):
                self._evict(entry)
        return [self._free.pop() for _ in range(min(n, len(self._free)))]

    def take_free(self, n: int) -> list[int]:
        """As many of `n` slots as are free; nothing is evicted."""
        return [self._free.pop() for _ in range(min(n, len(self._free)))]

    def evict(self, n: int, keep: Collection[bytes] = ()) -> int:
        """Evict up to `n` pages, none of `keep`; how many went."""
        victims = self._victims(n, keep)
        for entry in victims:
            self._evict(entry)
        return len(victims)

    def free(self, slots: Iterable[int]) -> None:
        """Give back slots that hold no page."""
        self._free.extend(slots)

    # -- pages ----------------------------------------------------------------------------------------------------

    def insert(self, page: Page, slot: int, state: PageState) -> Entry:
        """Put a page into an allocated slot. `PENDING` keeps it invisible until `commit`."""
        entry = Entry(page, slot, state)
        entry.children = self._orphans.pop(page.key, 0)
        self._entries[page.key] = entry
        self._policy.insert(page.key)
        if page.parent != page.namespace:
            parent = self._entries.get(page.parent)
            if parent is None:
                self._orphans[page.parent] = self._orphans.get(page.parent, 0) + 1
            else:
                parent.children += 1
                entry.parent = parent.key  # one object for equal keys: a million pages share it
        return entry

    def restore(self, pages: Iterable[Page], slots: Sequence[int]) -> None:
        """Fill an empty index with visible pages, least recently used first."""
        for page, slot in zip(pages, slots, strict=True):
            self.insert(page, slot, PageState.VERIFIED)
        used = bytearray(self.slots)
        for slot in slots:
            used[slot] = 1
        self._free[:] = [slot for slot in range(self.slots - 1, -1, -1) if not used[slot]]

    def commit(self, entry: Entry, state: PageState = PageState.VERIFIED) -> bool:
        """Make a reserved page visible. Whoever reserved it still leases it. False when it was dropped meanwhile."""
        entry.state = state
        return not entry.dropped

    def drop(self, entry: Entry) -> None:
        """Make a page invisible now (a reserved one: undo the reservation); its slot goes with its last lease."""
        if entry.dropped:
            return
        entry.dropped = True
        self._unlink(entry)
        if self._forget is not None and entry.state is not PageState.PENDING:
            self._forget(entry.slot)
        if entry.leases:
            self._leaving.add(entry.slot)
        else:
            self._give_back(entry)

    def lease(self, entry: Entry) -> None:
        entry.leases += 1

    def release(self, entry: Entry) -> None:
        entry.leases -= 1
        if entry.dropped and not entry.leases:
            self._leaving.discard(entry.slot)
            self._give_back(entry)

    def select(self, namespace: bytes | None) -> list[Entry]:
        """All entries of a namespace, or all there are."""
        return [e for e in self._entries.values() if namespace is None or e.namespace == namespace]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _give_back(self, entry: Entry) -> None:
        if entry.state is PageState.PENDING:  # never visible, so nothing durable names its slot
            self._free.append(entry.slot)
        else:
            self._recycle(entry.slot)

    def _unlink(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._policy.remove(entry.key)
        if entry.children:
            self._orphans[entry.key] = entry.children
        if entry.parent != entry.namespace:
            parent = self._entries.get(entry.parent)
            if parent is not None:
                parent.children -= 1
            elif self._orphans[entry.parent] == 1:
                del self._orphans[entry.parent]
            else:
                self._orphans[entry.parent] -= 1

    def _evict(self, entry: Entry) -> None:
        self.evictions += 1
        self.drop(entry)

    def _victims(self, n: int, keep: Collection[bytes] = ()) -> list[Entry]:
        """Up to `n` pages that may go, coldest first, tails before heads.

        A page that was passed over for its children goes as soon as the last of them is chosen, since it is colder than
        whatever comes later. Only when no tail is left, pages with children that cannot go are taken.
        """
        chosen: dict[bytes, Entry] = {}
        passed: set[bytes] = set()
        gone: dict[bytes, int] = {}  # children that are chosen already

        def choose(entry: Entry | None) -> None:
            while entry is not None and len(chosen) < n:
                chosen[entry.key] = entry
                gone[entry.parent] = gone.get(entry.parent, 0) + 1
                entry = self._entries[entry.parent] if entry.parent in passed else None
                if entry is not None and entry.children > gone[entry.key]:
                    entry = None

        for tails_only in (True, False):
            for key in self._policy:
                if len(chosen) >= n:
                    return list(chosen.values())
                entry = self._entries[key]
                if entry.leases or entry.state is PageState.PENDING or key in chosen or key in keep:
                    continue
                if tails_only and entry.children > gone.get(key, 0):
                    passed.add(key)
                else:
                    choose(entry)
        return list(chosen.values())

    def check(self, elsewhere: Sequence[int] = ()) -> list[str]:
        """Restate every invariant from scratch; the disagreements found. `elsewhere`: slots held outside the index."""
        problems = []
        used = [e.slot for e in self._entries.values()]
        held = used + self._free + list(self._leaving) + list(elsewhere)
        if len(set(held)) != len(held):
            twice = sorted({slot for slot in held if held.count(slot) > 1})[:8]
            problems.append(f"slots in two places: {twice}")
        if set(held) - set(range(self.slots)):
            problems.append(f"slots outside 0 ... {self.slots - 1}: {sorted(set(held) - set(range(self.slots)))[:8]}")
        lost = set(range(self.slots)) - set(held)
        if lost:
            problems.append(f"{len(lost)} slots are neither free nor used: {sorted(lost)[:8]}")
        if set(self._policy) != set(self._entries):
            problems.append("the eviction order and the index name different pages")
        children: dict[bytes, int] = {}
        for entry in self._entries.values():
            if entry.parent != entry.namespace:
                children[entry.parent] = children.get(entry.parent, 0) + 1
        for entry in self._entries.values():
            if entry.children != children.pop(entry.key, 0):
                problems.append(f"page {entry.key.hex()[:16]} counts {entry.children} children")
            if entry.leases < 0 or entry.dropped:
                problems.append(f"page {entry.key.hex()[:16]} has {entry.leases} leases, dropped={entry.dropped}")
        if children != self._orphans:
            problems.append("children of absent parents are miscounted")
        return problems
