"""Outlets to tiers of files: the pages on their way to each, and the choice of pages that may set out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from gdscache.index.retention import DEFAULT, Retention

if TYPE_CHECKING:
    from gdscache.pages.keys import Page
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
