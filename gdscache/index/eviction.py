"""The choice of pages that a tier evicts.

Eviction takes tails before heads: a page goes only when no child of it is in the tier, unless no such page is left. A
leased page stays, and so does a *dirty* one, whose bytes are in no other tier yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gdscache.index.retention import Retention
from gdscache.index.table import PENDING, Entry, PageTable
from gdscache.pages.keys import Page
from gdscache.policies.base import EvictionPolicy


class EvictablePages(PageTable):
    """The pages of a tier, with uses, retentions, families and dirty pages, which choose the next victims. Evicts
    nothing."""

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        super().__init__(slots, policy)
        self._dirty: set[int] = set()  # slots of pages that a lower tier is to get and lacks

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page. Give a prefix tail first, so that its head stays longest.

        The use enters the orders later, as new pages do: see `Orders`.
        """
        self._orders.use(keys)

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

    # -- dirty pages
    # ------------------------------------------------------------------------------------------------------

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

    # -- victims
    # ----------------------------------------------------------------------------------------------------------

    def family(self, pages: Iterable[Page]) -> set[bytes]:
        """Keys of `pages` and of the pages before them, as far back as the tier has them without a gap.

        A new page must not evict these: without its head, a tail is out of reach.
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
        """The number of `pages` whose prefix is in the tier, or among `pages`."""
        keys: set[bytes] = set()
        for page in pages:
            if page.parent == page.namespace or page.parent in self or page.parent in keys:
                keys.add(page.key)
        return len(keys)

    def _victims(
        self, n: int, keep: Collection[bytes] = (), pages: Sequence[Page] = (), ahead: int = 0
    ) -> Collection[bytes]:
        """Up to `n` pages to evict, coldest first, tails before heads; none of `keep`, nor of the family of `pages`. Up
        to `ahead` more if they are tails.

        A page that was passed over for its children goes as soon as the last of them is chosen, since it is colder than
        all pages after it. A page that stays is deferred, so that not every call looks at it. Pages whose children
        cannot go are taken only when no tail is left.
        """
        chosen: dict[bytes, None] = {}
        passed: dict[bytes, None] = {}
        gone: dict[bytes, int] = {}  # chosen children

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
        # the first round looks for tails: only the family's end is one, since all its other pages have a child in it
        if pages:
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
                elif tails_only and children[slot] and key not in gone:  # the most frequent case
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
        entry = self._entries.get(key)
        return None if entry is None or entry.leases or entry.state is PENDING else entry.slot
