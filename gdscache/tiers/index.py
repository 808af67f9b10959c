"""The index of one tier: which pages it holds, in which slot, in what state. Pure Python, no bytes, no I/O.

A page goes `insert(PENDING) → commit`, or `insert(PENDING) → drop` when it fails; `get` sees it only after `commit`.
A leased page is neither evicted nor overwritten; a page dropped while leased is invisible at once and gives its slot
back at the last release. Eviction takes tails before heads: a page goes only when no child of it is in the tier,
unless nothing else can go. Nothing here locks: the manager's lock guards every index.
"""

from __future__ import annotations

import enum
from collections import Counter
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
    """A page in use: leased, reserved, or just looked at. It is the one object for its page while it is leased."""

    __slots__ = ("dropped", "key", "leases", "namespace", "parent", "slot", "state")

    def __init__(self, page: Page, slot: int, state: PageState) -> None:
        self.key, self.parent, self.namespace = page
        self.slot = slot
        self.state = state
        self.leases = 0
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
        # Pages at rest are columns, not objects: a million of them cost little, and the garbage collector nothing.
        self._resting: dict[bytes, int] = {}  # key -> slot
        self._parents: list[bytes] = [b""] * slots
        self._namespaces: list[bytes] = [b""] * slots
        self._entries: dict[bytes, Entry] = {}  # pages in use
        self._children: dict[bytes, int] = {}  # key -> pages of this tier that follow it, where there are any
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._free = list(range(slots - 1, -1, -1))
        self._forget = forget
        self._recycle = self._free.append if recycle is None else recycle
        self._leaving: set[int] = set()  # slots of dropped pages that are still leased

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
        return entry is not None and entry.state is not PageState.PENDING

    def get(self, key: bytes) -> Entry | None:
        """The page, if it is visible."""
        entry = self.find(key)
        return None if entry is None or entry.state is PageState.PENDING else entry

    def find(self, key: bytes) -> Entry | None:
        """The page in any state, reserved ones included."""
        slot = self._resting.pop(key, None)
        if slot is None:
            return self._entries.get(key)
        entry = self._entries[key] = self._entry(key, slot)
        return entry

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
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest."""
        resting, entries, touch = self._resting, self._entries, self._policy.touch
        for key in keys:
            if key in resting or key in entries:
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
        entry = self._entries[page.key] = Entry(page, slot, state)
        self._policy.insert(page.key)
        if page.parent != page.namespace:
            self._children[page.parent] = self._children.get(page.parent, 0) + 1
        return entry

    def restore(
        self, keys: Sequence[bytes], parents: Sequence[bytes], namespaces: Sequence[bytes], slots: Sequence[int]
    ) -> None:
        """Fill an empty index with visible pages, column by column, least recently used first."""
        same = dict(zip(keys, keys, strict=True))  # one object for equal keys
        parents = [same.get(parent, parent) for parent in parents]
        for slot, parent, namespace in zip(slots, parents, namespaces, strict=True):
            self._parents[slot] = parent
            self._namespaces[slot] = namespace
        self._resting = dict(zip(keys, slots, strict=True))
        self._children = dict(Counter(parents))
        for namespace in set(namespaces):
            self._children.pop(namespace, None)
        self._policy.restore(keys)
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
        del self._entries[entry.key]
        self._policy.remove(entry.key)
        self._count_child(entry)
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
        if entry.leases:
            return
        if entry.dropped:
            self._leaving.discard(entry.slot)
            self._give_back(entry)
        elif entry.state is PageState.VERIFIED:
            del self._entries[entry.key]
            self._resting[entry.key] = entry.slot
            self._parents[entry.slot] = entry.parent
            self._namespaces[entry.slot] = entry.namespace

    def select(self, namespace: bytes | None) -> list[bytes]:
        """Keys of all pages of a namespace, or of all there are, reserved ones included."""
        return [e.key for e in self if namespace is None or e.namespace == namespace]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _give_back(self, entry: Entry) -> None:
        if entry.state is PageState.PENDING:  # never visible, so nothing durable names its slot
            self._free.append(entry.slot)
        else:
            self._recycle(entry.slot)

    def _entry(self, key: bytes, slot: int) -> Entry:
        return Entry(Page(key, self._parents[slot], self._namespaces[slot]), slot, PageState.VERIFIED)

    def _parent(self, key: bytes) -> bytes:
        entry = self._entries.get(key)
        return self._parents[self._resting[key]] if entry is None else entry.parent

    def _count_child(self, entry: Entry) -> None:
        """One page less follows the entry's parent."""
        if entry.parent != entry.namespace:
            left = self._children.pop(entry.parent) - 1
            if left:
                self._children[entry.parent] = left

    def _evict(self, entry: Entry) -> None:
        self.evictions += 1
        self.drop(entry)

    def _victims(self, n: int, keep: Collection[bytes] = ()) -> list[Entry]:
        """Up to `n` pages that may go, coldest first, tails before heads.

        A page that was passed over for its children goes as soon as the last of them is chosen, since it is colder than
        whatever comes later. Only when no tail is left, pages with children that cannot go are taken.
        """
        chosen: dict[bytes, None] = {}
        passed: set[bytes] = set()
        gone: dict[bytes, int] = {}  # children that are chosen already

        def choose(key: bytes | None) -> None:
            while key is not None and len(chosen) < n:
                chosen[key] = None
                key = self._parent(key)
                gone[key] = gone.get(key, 0) + 1
                if key not in passed or self._children.get(key, 0) > gone[key]:
                    key = None

        for tails_only in (True, False):
            for key in self._policy:
                if len(chosen) >= n:
                    break
                entry = self._entries.get(key)
                if entry is not None and (entry.leases or entry.state is PageState.PENDING):
                    continue
                if key in chosen or key in keep:
                    continue
                if tails_only and self._children.get(key, 0) > gone.get(key, 0):
                    passed.add(key)
                else:
                    choose(key)
        return [entry for entry in map(self.find, chosen) if entry is not None]

    def check(self, elsewhere: Sequence[int] = ()) -> list[str]:
        """Restate every invariant from scratch; the disagreements found. `elsewhere`: slots held outside the index."""
        problems = []
        pages = list(self)
        held = [e.slot for e in pages] + self._free + list(self._leaving) + list(elsewhere)
        if len(set(held)) != len(held):
            twice = sorted(slot for slot, n in Counter(held).items() if n > 1)[:8]
            problems.append(f"slots in two places: {twice}")
        if set(held) - set(range(self.slots)):
            problems.append(f"slots outside 0 ... {self.slots - 1}: {sorted(set(held) - set(range(self.slots)))[:8]}")
        lost = set(range(self.slots)) - set(held)
        if lost:
            problems.append(f"{len(lost)} slots are neither free nor used: {sorted(lost)[:8]}")
        if set(self._policy) != {e.key for e in pages}:
            problems.append("the eviction order and the index name different pages")
        if Counter(e.parent for e in pages if e.parent != e.namespace) != Counter(self._children):
            problems.append("pages that follow others are miscounted")
        wrong = [e for e in self._entries.values() if e.leases < 0 or e.dropped or e.key in self._resting]
        return problems + [f"page {e.key.hex()[:16]} has {e.leases} leases, dropped={e.dropped}" for e in wrong]
