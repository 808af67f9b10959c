"""Outlets to tiers of files: the pages on their way to each, and the choice of pages that may set out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdscache.pages.keys import Page
    from gdscache.policies.admission import Admission
    from gdscache.tiers.base import DurableTier


@dataclasses.dataclass(slots=True, eq=False)
class Outlet:
    """The way to one tier. `keys`: the pages on it, at most `limit`. The manager's lock guards it."""

    tier: DurableTier
    admission: Admission
    limit: int
    keys: set[bytes] = dataclasses.field(default_factory=set)

    @property
    def room(self) -> int:
        return max(0, self.limit - len(self.keys))

    def lacks(self, key: bytes) -> bool:
        return key not in self.keys and key not in self.tier.index

    def lacking(self, pages: Sequence[Page]) -> list[int]:
        lacking, keys = self.tier.index.lacking(pages), self.keys
        return [i for i in lacking if pages[i].key not in keys] if keys else lacking

    def offer(self, pages: Sequence[Page], *, open: bool = True) -> list[str]:
        """Offer pages that the tier lacks: for each the cause why it is refused, or "". `open`: False refuses all.

        The caller adds accepted pages to `keys` before the next offer.
        """
        room, admission = self.room if open else 0, self.admission
        if admission.admits_all and room >= len(pages):
            admission.admit_all(len(pages))
            return [""] * len(pages)
        causes: list[str] = []
        going, asks = 0, admission.asks_victim
        for page in pages:
            full = asks and self.tier.spare_slots <= len(self.keys) + going  # pages on their way have no slot yet
            cause = admission.admit(page, self.tier.index.coldest() if full else None, room=going < room)
            causes.append(cause)
            if not cause:
                going += 1
        return causes
