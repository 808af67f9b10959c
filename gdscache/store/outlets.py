"""The outlets to tiers of files: what is on its way to each, and which pages may set out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdscache.keys import Page
    from gdscache.tiers.admission import Admission
    from gdscache.tiers.base import DurableTier


class Outlet:
    """The way out to one tier. `keys`: the pages on it, `limit` at most. The manager's lock guards it."""

    __slots__ = ("admission", "keys", "limit", "tier")

    def __init__(self, tier: DurableTier, admission: Admission, limit: int) -> None:
        self.tier = tier
        self.admission = admission
        self.limit = limit
        self.keys: set[bytes] = set()

    @property
    def room(self) -> bool:
        """Whether one more page may set out."""
        return len(self.keys) < self.limit

    def lacks(self, key: bytes) -> bool:
        """Whether the tier neither has nor gets a page."""
        return key not in self.keys and key not in self.tier.index

    def offer(self, page: Page, *, room: bool) -> str:
        """Offer a page that the tier lacks: why it does not get it; "" when it does."""
        full = self.admission.asks_victim and self.tier.spare_slots <= len(self.keys)  # those have no slot yet
        return self.admission.admit(page, self.tier.index.coldest() if full else None, room=room)
