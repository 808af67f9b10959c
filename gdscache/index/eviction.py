"""Which pages of a tier go first when it needs room, and which must stay.

Eviction takes tails before heads: a page goes only when no child of it is in the tier, unless nothing else can go. A
leased page stays, and so does a *dirty* one, whose bytes are on their way to no other tier yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gdscache.index.retention import Retention
from gdscache.index.table import PENDING, Entry, PageTable
from gdscache.pages.keys import Page
from gdscache.policies.base import EvictionPolicy


class EvictablePages(PageTable):
    """The pages of a tier, and what decides who goes next: uses, retentions, families, dirty pages. Evicts nothing."""

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        super().__init__(slots, policy)
        self._dirty: set[int] = set()  # slots of pages that no lower tier has, and some tier is to get

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest.

        It counts later, as new pages do: see `Orders`.
        """
        self._orders.use(keys)

    @property
    def unsettled(self) -> int:
        """New pages and uses that have not entered the eviction orders yet."""
        return self._orders.unsettled

    def settle(self, most: int | None = None) -> None:
        """Let the `most` oldest of them enter, or all."""
        self._orders.settle(most)

    def coldest(self) -> bytes | None:
        """The page that eviction looks at first."""
        return next(iter(self._orders), None)

    # -- retention ----------------------------------------------------------------------------------------------------

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

    # -- pages that a lower tier has not got yet ----------------------------------------------------------------------

    @property
    def dirty_pages(self) -> int:
        return len(self._dirty)

    def mark_dirty(self, entry: Entry) -> None:
        """A visible page is not to be evicted before `mark_clean`. One that is dropped is not dirty any more."""
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
        slot = self.slot(key)
        return self._page_at(key, slot) if slot is not None and slot in self._dirty else None

    # -- who goes, and who stays --------------------------------------------------------------------------------------

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
        passed: dict[bytes, None] = {}
        gone: dict[bytes, int] = {}  # children that are chosen already

        def choose(key: bytes, slot: int | None) -> None:
            while slot is not None and len(chosen) < wanted:
                chosen[key] = None
                key = parents[slot] or parent_at(slot)
                gone[key] = followed = gone.get(key, 0) + 1
                if key in keep or not (key in passed or is_deferred(key)):
                    return
                slot = at_rest(key)
                if slot is None:
                    slot = self._slot_in_use(key)
                if slot is not None and (children[slot] > followed or slot in dirty or slot in held):
                    return

        entries, children, dirty, held = self._entries, self._children, self._dirty, self._held
        parents, parent_at, is_deferred = self._parents, self._parent_at, self._orders.is_deferred
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
                elif held and slot in held:
                    continue
                elif tails_only and children[slot] and key not in gone:  # most of what is looked at
                    passed[key] = None
                    continue
                if key in chosen or key in keep or slot in dirty:
                    continue
                if tails_only and (followed := children[slot]) and followed > gone.get(key, 0):
                    passed[key] = None
                else:
                    choose(key, slot)
                    if len(chosen) >= wanted:
                        break
        for key in passed:
            if key not in chosen:
                self._orders.defer(key)
        return chosen

    def _slot_in_use(self, key: bytes) -> int | None:
        """The slot of a page that is not at rest, if it is there, and could go were none behind it."""
        entry = self._entries.get(key)
        return None if entry is None or entry.leases or entry.state is PENDING else entry.slot
