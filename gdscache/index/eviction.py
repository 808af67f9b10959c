"""The choice of pages that a tier evicts.

Eviction takes tails before heads: a page goes only when no child of it is in the tier, unless no such page is left. A
leased page stays, and so does a *dirty* one, whose bytes are in no other tier yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gdscache.index.retention import Retention
from gdscache.index.table import PENDING, Entry, PageTable
from gdscache.native import Victims
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
            if page.parent in keys or page.parent == page.namespace or page.parent in self:
                keys.add(page.key)
        return len(keys)

    def _victims(
        self, n: int, keep: Collection[bytes] = (), pages: Sequence[Page] = (), ahead: int = 0
    ) -> Sequence[bytes]:
        """Up to `n` pages to evict, coldest first, tails before heads; none of `keep`, nor of the family of `pages`. Up
        to `ahead` more if they are tails.

        A page that was passed over for its children goes as soon as the last of them is chosen, since it is colder than
        all pages after it. A page that stays is deferred, so that not every call looks at it. Pages whose children
        cannot go are taken only when no tail is left.
        """
        coldest = iter(self._orders)  # the orders are up to date from here on
        victims = Victims(self._held, self._dirty, PENDING, self._orders.deferring())
        # the first round looks for tails: only the family's end is one, since all its other pages have a child in it
        if pages:
            keep = {*keep, *(page.key for page in pages), *(page.parent for page in pages)}
        if victims.look(self._columns, coldest, keep, n + ahead, tails_only=True) < n:
            keep = {*keep, *self.family(pages)} if pages else keep
            victims.look(self._columns, self._orders, keep, n, tails_only=False)
        self._orders.defer_all(victims.passed)
        return victims.chosen
