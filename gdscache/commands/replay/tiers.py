"""Tiers without bytes: the real index, the real order of decisions, nothing that moves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry, PageState
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.policies import new_policy
from gdscache.tiers.base import NO_RETENTIONS, DurableTier, Tier


class ModelTier(Tier):
    """A tier of `slots` pages of `extent_bytes`: what a CPU tier decides. `private`: others' slots, without a page."""

    kind: Literal["planes", "memory", "files"] = "memory"

    def __init__(self, name: str, slots: int, extent_bytes: int, eviction: str) -> None:
        self.name = name
        self.extent_bytes = extent_bytes
        self.index = PageIndex(slots, new_policy(eviction))
        self.private: set[int] = set()

    @property
    def capacity(self) -> int:
        return self.index.slots * self.extent_bytes

    def describe(self) -> dict[str, Any]:
        return {}

    def check(self, lock: threading.RLock, *, fix: bool) -> list[str]:
        with lock:
            return self.index.check(elsewhere=list(self.private))

    def close(self) -> None:
        """There is nothing to give back."""


class ModelGpu(ModelTier):
    """The pool that an engine owns: see `gdscache.tiers.gpu.GpuTier`."""

    kind = "planes"

    def take(self, n: int) -> list[int] | None:
        """`n` private slots, evicting as needed, or None and nothing changed."""
        slots = self.index.allocate(n) if n > 0 else []
        if slots is not None:
            self.private.update(slots)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Give private slots back."""
        slots = list(slots)
        self.private.difference_update(slots)
        self.index.free(slots)


class ModelSsd(ModelTier, DurableTier):
    """What `gdscache.tiers.ssd.SsdTier` decides, whose deleted pages give their slots back at a later commit.

    Here they do at once: it counts such slots as if they were free already, so the same pages go.
    """

    kind = "files"

    def __init__(self, slots: int, extent_bytes: int, eviction: str, reserve: int) -> None:
        super().__init__("ssd", slots, extent_bytes, eviction)
        self._reserve = min(reserve, slots // 8)

    @property
    def spare_slots(self) -> int:
        """Slots for pages that need not push others out."""
        return self.index.free_slots - self._reserve

    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """Reserve and lease slots for the first of `pages`, as many as find room."""
        index = self.index
        index.make_room(pages, self._reserve)
        fresh = [pages[i] for i in index.lacking(pages)]
        kept = [retentions.get(page.key, DEFAULT) for page in fresh] if retentions else [DEFAULT] * len(fresh)
        return index.insert_all(fresh, index.take_free(len(fresh)), PageState.PENDING, kept, leases=1)

    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        """Make written pages visible."""
        self.index.commit_all(entries)
        return [not entry.dropped for entry in entries]

    def checksums(self, entries: Sequence[Entry]) -> None:
        """There are no bytes."""
