"""Outlets to tiers of files: the pages on their way to each, pages that may set out, and how many go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.limits import BATCH_BYTES, BATCH_PAGES, LEAST_BATCH, SMALL_BATCH_BYTES
from gdscache.pages.keys import Page

if TYPE_CHECKING:
    from gdscache.policies.admission import Admission
    from gdscache.tiers.base import DurableTier


@dataclasses.dataclass(slots=True, eq=False)
class Outlet:
    """The way to one tier. `keys`: the pages on it, at most `limit`, and the epoch of each (see `Clearing.epoch`).
    `retained`: the retentions of those pages, if any has one. The manager's lock guards it."""

    tier: DurableTier
    admission: Admission
    limit: int
    keys: dict[bytes, int] = dataclasses.field(default_factory=dict)
    retained: dict[bytes, Retention] = dataclasses.field(default_factory=dict)

    @property
    def room(self) -> int:
        return max(0, self.limit - len(self.keys))

    def takes(self, retention: Retention) -> bool:
        """Not pages with an end where others find them, who know no end."""
        return retention.expires is None or self.tier.served

    def lacking(self, pages: Sequence[Page], epoch: Callable[[bytes], int]) -> list[int]:
        """The numbers of pages that are neither there nor on the way. `epoch(namespace)`: pages of an older one do not
        arrive."""
        lacking, keys = self.tier.index.lacking(pages), self.keys
        if not keys:
            return lacking
        return [i for i in lacking if pages[i].key not in keys or keys[pages[i].key] != epoch(pages[i].namespace)]

    def set_out(self, keys: Collection[bytes], epoch: int, retention: Retention) -> None:
        self.keys |= dict.fromkeys(keys, epoch)
        if retention != DEFAULT or self.retained:
            self.retained |= dict.fromkeys(keys, retention)

    def retain(self, pages: Sequence[Page], retention: Retention) -> None:
        """Pages are stored again: those on the way get the greater priority and the later expiry."""
        if retention != DEFAULT or self.retained:
            for key in [page.key for page in pages if page.key in self.keys]:
                self.retained[key] = self.retained.get(key, DEFAULT).joined(retention)

    def end(self, keys: Iterable[bytes], epoch: int) -> None:
        """Pages that set out in this epoch have arrived, or do not arrive."""
        for key in keys:
            if self.keys.get(key) == epoch:
                del self.keys[key]
                self.retained.pop(key, None)

    def offer(self, pages: Sequence[Page], *, open: bool = True) -> list[str]:
        """Offer pages that the tier lacks: for each the cause why it is refused, or "". `open`: False refuses all.

        The caller adds accepted pages to `keys` before the next offer.
        """
        room, admission = self.room if open else 0, self.admission
        if admission.admits_all and room >= len(pages):
            admission.admit_all(len(pages))
            return [""] * len(pages)
        causes: list[str] = []
        going, asks = 0, admission.policy.asks_victim
        for page in pages:
            full = asks and self.tier.spare_slots <= len(self.keys) + going  # pages on their way have no slot yet
            cause = admission.admit(page, self.tier.index.coldest() if full else None, room=going < room)
            causes.append(cause)
            if not cause:
                going += 1
        return causes


_QUICK_S, _SLOW_S = 0.25, 2.0  # seconds of a batch: below, the next has twice as many pages; above, half as many


def batch_pages(extent_bytes: int) -> int:
    most = max(BATCH_PAGES, SMALL_BATCH_BYTES // extent_bytes)
    return max(LEAST_BATCH, min(BATCH_BYTES // extent_bytes, most))


@dataclasses.dataclass(slots=True)
class BatchSize:
    """Begins with `pages`, and stays between `least` and `most`.

    A batch costs a millisecond of Python for any number of pages. Its deadline covers the batches in flight before it
    too, so on a slow tier it must be small.
    """

    least: int
    pages: int
    most: int

    @classmethod
    def of(cls, extent_bytes: int) -> BatchSize:
        most = batch_pages(extent_bytes)
        return cls(LEAST_BATCH, min(most, max(LEAST_BATCH, SMALL_BATCH_BYTES // extent_bytes)), most)

    def learn(self, pages: int, seconds: float) -> None:
        if seconds > _SLOW_S:
            self.pages = max(self.least, min(self.pages, pages // 2))
        elif seconds < _QUICK_S and pages >= self.pages:
            self.pages = min(self.most, 2 * self.pages)


_MOST_HITS = 255


class EarnedOffers:
    """Notes uses, and starts nothing. The manager's lock guards it.

    With `write_through_selective` a page has to be hit `hits` times since it came. With `write_through` a hit offers a
    page again if the admission refuses first offers; otherwise only pages that were refused for lack of room are
    offered again.
    """

    def __init__(self, index: PageIndex | None, outlets: Sequence[Outlet], policy: str, hits: int) -> None:
        """`index`: the landing tier's; None: no such tier, and nothing is earned."""
        refuses = any(outlet.admission.refuses for outlet in outlets)
        self._refused, self._selective = policy == "write_through", policy == "write_through_selective"
        self.by_hits = bool(outlets) and (self._selective or (self._refused and refuses))
        self._index = index
        self._outlets = outlets
        self._wanted = hits
        slots = 0 if index is None or not self._selective else index.slots
        self._hits = bytearray(slots)  # hits of the page in each slot, since it came,
        self._whose = [b""] * slots  # and its key: a load may have brought another one
        self._earned: dict[bytes, None] = {}

    def came(self, slots: Sequence[int]) -> None:
        if self._selective:
            for slot in slots:
                self._whose[slot] = b""

    def used(self, keys: Sequence[bytes]) -> None:
        """Pages were hit, tail first. Pages that have earned an offer are noted heads first."""
        index, refused = self._index, list[bytes]()
        for outlet in self._outlets:
            refused += outlet.admission.use(keys)
        if index is None:
            return
        for key in reversed(keys if self.by_hits else [*dict.fromkeys(refused)] if self._refused else []):
            slot = index.slot(key)
            if slot is None:
                continue
            if self._selective:
                if self._whose[slot] != key:
                    self._whose[slot], self._hits[slot] = key, 0
                hits = self._hits[slot] = min(_MOST_HITS, self._hits[slot] + 1)
                if hits < self._wanted:
                    continue
            self._earned.pop(key, None)
            self._earned[key] = None
        while len(self._earned) > index.slots:
            del self._earned[next(iter(self._earned))]

    def take(self) -> list[Page]:
        """The pages noted since the last call that are still present."""
        if self._index is None or not self._earned:
            return []
        earned, self._earned = self._earned, {}
        return [entry.page for entry in map(self._index.find, earned) if entry is not None]
