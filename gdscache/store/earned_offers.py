"""Pages that uses in the landing tier have earned an offer to tiers of files, with the next load or store."""

from __future__ import annotations

from collections.abc import Sequence

from gdscache.index.index import PageIndex
from gdscache.pages.keys import Page
from gdscache.store.outlets import Outlet

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
