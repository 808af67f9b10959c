"""The index of one tier: its pages, their slots and states. Pure Python, no bytes, no I/O.

A page goes `insert(PENDING) → commit`, or `insert(PENDING) → drop` when it fails; `get` finds it only after `commit`. A
leased page is neither evicted nor overwritten; a page dropped while leased is invisible at once and gives its slot back
at the last release. The manager's lock guards every index.

Eviction takes tails before heads: a page goes only when no child of it is in the tier, unless no such page is left. A
leased page stays, and so does a *dirty* one, whose bytes are in no other tier yet.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.index.ages import PageAges
from gdscache.index.free_slots import FreeSlots
from gdscache.index.retention import Retention
from gdscache.index.table import PENDING, VERIFIED, Entry, PageState, PageTable
from gdscache.native import Victims, take_out
from gdscache.pages.keys import Page
from gdscache.policies.base import LRU, EvictionPolicy

_AHEAD = 32  # most tails that are evicted in advance, so that the next calls need no victims


class Detached(NamedTuple):
    """Pages that were dropped all at once. Delete it without a lock: freeing `held` takes time."""

    visible: int
    slots: list[int]
    held: object


class PageIndex(PageTable):
    """Slots `0 ... slots-1` of a tier and the pages in them.

    `forget(slots)` is called when visible pages are dropped, `recycle(slots)` when their slots are given back, which is
    later if a page is leased. By default the slot is free then; the SSD tier also waits for the committed deletion.

    Many methods: each change of a page's state is one, so that no caller changes the columns.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy | None = None,
        forget: Callable[[Sequence[int]], None] | None = None,
        recycle: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        super().__init__(slots, LRU() if policy is None else policy)
        self._dirty: set[int] = set()  # slots of pages that a lower tier is to get and lacks
        self.evictions = 0
        self.ages = PageAges(slots)
        self.torn = 0  # pages that were dropped while leased
        self._ahead = min(_AHEAD, slots // 512)
        self._free = FreeSlots(slots)
        self._forget = forget
        self._recycle = self.free if recycle is None else recycle
        # Both are called under the lock, and only take notes. `on_evict` gets the keys of victims; `on_change` gets the
        # pages that become visible ("stored"), and the keys of those that were and go ("removed"; "cleared": all).
        self.on_evict: Callable[[Collection[bytes]], object] = _nobody
        self.on_change: Callable[[str, Sequence[Any]], object] | None = None
        # Where a prefix may lie in several tiers: the tables of the others, and the keys of pages on their way to any.
        self.others: Sequence[PageTable] = ()
        self.coming: Callable[[], Collection[bytes]] = tuple
        self._leaving: dict[int, Entry] = {}  # dropped pages that are still leased, by slot

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest.

        The use enters the orders later, as new pages do: see `Orders`.
        """
        self._orders.use(keys)
        self.ages.used(keys)

    @property
    def waiting(self) -> int:
        return self._orders.waiting

    def bring_in(self, most: int | None = None) -> None:
        self._orders.bring_in(most)

    def coldest(self) -> bytes | None:
        """The page that eviction looks at first."""
        return next(iter(self._orders), None)

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
        self._orders.retain(self._page_at(key, slot), new)
        entry = self._entries.get(key)
        if entry is not None:
            entry.retention = new
        return True

    @property
    def retained_pages(self) -> int:
        return len(self._orders.retained)

    @property
    def next_expiry(self) -> float:
        return self._orders.next_expiry

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
        if pages and any(table.follows(victims.chosen) for table in self.others):  # no tails: these have children there
            keep = {*keep, *self.family(pages)}
            victims = self._tails(n + ahead, keep)
        if len(victims.chosen) < n:
            keep = {*keep, *self.family(pages)} if pages else keep
            victims.look(self._columns, self._orders, keep, n, tails_only=False)
        self._orders.defer_all(victims.passed)
        return victims.chosen

    def _tails(self, n: int, keep: Collection[bytes]) -> Victims:
        coldest = iter(self._orders)  # the orders are up to date from here on
        victims = Victims(self._held, self._dirty, PENDING, self._orders.deferring())
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

    def _restored(self, slots: npt.NDArray[np.int64]) -> None:
        used = np.zeros(self.slots, np.bool_)
        used[slots] = True
        self._free = FreeSlots.beside(used)

    def _inserted(self, pages: Sequence[Page], state: PageState) -> None:
        self.ages.came([page.key for page in pages])
        if self.on_change is not None and state is not PENDING:
            self.on_change("stored", pages)

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
        self._orders.sift()  # its uses count only while it is present
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
        self._orders.remove(key)
        if (freed := gone[0][1]) is not None:
            self._orders.hasten(freed)
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
        keys = self._orders.expired(now, most)
        try:
            return self._drop_expired(keys)
        except BaseException:
            self._orders.not_yet_expired(keys)
            raise

    def expire_among(self, pages: Iterable[Page], now: float) -> list[bytes]:
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
        orders, children = self._orders.empty(), array("i", bytes(4 * self.slots))
        for entry in in_use:
            self.drop(entry)
        detached = Detached(
            visible, list(self._resting.values()), (self._resting, self._orders, self._orphans, self._children)
        )
        self._resting, self._orders, self._orphans, self._children = {}, orders, {}, children
        self._dirty = set()
        self.ages.clear()
        if self.on_change is not None:
            self.on_change("cleared", ())
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
        self._orders.evict(gone)
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


def _nobody(keys: Collection[bytes]) -> None:
    pass
