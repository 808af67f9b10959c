"""Tiers without bytes: the real index, the real order of decisions, no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry, PageState
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.policies import new_policy
from gdscache.tiers.base import NO_RETENTIONS, DurableTier, Tier


class ModelTier(Tier):
    """A CPU tier's decisions: `slots` pages of `extent_bytes`."""

    kind: Literal["planes", "memory", "files"] = "memory"

    def __init__(self, name: str, slots: int, extent_bytes: int, eviction: str, groups: int = 1) -> None:
        self.name = name
        self.extent_bytes = extent_bytes
        self.index = PageIndex(slots, new_policy(eviction, groups))

    @property
    def capacity(self) -> int:
        return self.index.slots * self.extent_bytes

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class ModelSsd(ModelTier, DurableTier):
    """The decisions of `gdscache.tiers.ssd.SsdTier`. Its deleted pages free their slots at a later commit; here they do
    at once. It counts such slots as free already, so the same pages are evicted."""

    kind = "files"

    def __init__(self, slots: int, extent_bytes: int, eviction: str, reserve: int, groups: int = 1) -> None:
        super().__init__("ssd", slots, extent_bytes, eviction, groups)
        self._reserve = min(reserve, slots // 8)

    @property
    def spare_slots(self) -> int:
        """Slots for pages without evictions."""
        return self.index.free_slots - self._reserve

    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """Reserve and lease slots for the leading `pages` that find room."""
        index = self.index
        index.make_room(pages, self._reserve)
        fresh = [pages[i] for i in index.lacking(pages)]
        kept = [retentions.get(page.key, DEFAULT) for page in fresh] if retentions else [DEFAULT] * len(fresh)
        return index.insert_all(fresh, index.take_free(len(fresh)), PageState.PENDING, kept, leases=1)

    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        self.index.commit_all(entries)
        return [not entry.dropped for entry in entries]

    def checksums(self, entries: Sequence[Entry]) -> None:
        """None: the tier has no bytes."""
