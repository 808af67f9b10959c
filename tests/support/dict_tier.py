"""A fourth tier, in one file: pages in a dictionary. `tiers: [{tier: dict_tier:DictTier, capacity: ...}]`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry, PageState
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.storage.base import Descriptors, Memory, Transport
from gdscache.tiers.base import NO_RETENTIONS, DurableTier


class DictFiles(Transport):
    """Slot -> the bytes of its extent. `broken`: slots that cannot be read, and why."""

    merges = False  # a call is for one slot

    def __init__(self, extent_bytes: int, slots: int) -> None:
        super().__init__(threads=2)
        self.content: dict[int, bytearray] = {}
        self.broken: dict[int, Exception] = {}
        self.reads = 0
        self._extent_bytes = extent_bytes
        self._slots = slots

    def hand_over(self) -> Descriptors:
        return Descriptors((0,), self._slots, self.threads, transport=self)

    @property
    def direct(self) -> bool:
        return True

    def open(self, path: Path) -> int:
        return 0

    def read(self, file: int, offset: int, memory: Memory) -> int:
        slot, start = divmod(offset, self._extent_bytes)
        self.reads += 1
        if slot in self.broken:
            raise self.broken[slot]
        memory[:] = self.content[slot][start : start + len(memory)]
        return len(memory)

    def write(self, file: int, offset: int, memory: Memory) -> int:
        slot, start = divmod(offset, self._extent_bytes)
        self.content.setdefault(slot, bytearray(self._extent_bytes))[start : start + len(memory)] = memory
        return len(memory)

    def flush(self, file: int) -> None:
        pass

    def close(self) -> None:
        pass


class DictTier(DurableTier):
    """What a tier of files has to do, and no more."""

    def __init__(self, layout: PageLayout, capacity: int, lock: threading.RLock, *, name: str = "dict") -> None:
        self.name = name
        self.layout = layout
        self.index = PageIndex(capacity // layout.extent_bytes)
        self.io: DictFiles = DictFiles(layout.extent_bytes, self.index.slots)
        self.sums: dict[bytes, Checksums] = {}
        self.closed = False
        self._lock = lock

    @property
    def capacity(self) -> int:
        return self.index.slots * self.layout.extent_bytes

    def describe(self) -> dict[str, Any]:
        return {"held": len(self.io.content)}

    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        with self._lock:
            self.index.make_room(pages, 0)
            fresh = [page for page in pages if page.key not in self.index]
            kept = [retentions.get(page.key, DEFAULT) for page in fresh]
            return self.index.insert_all(fresh, self.index.take_free(len(fresh)), PageState.PENDING, kept, leases=1)

    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        with self._lock:
            self.sums.update(zip((entry.key for entry in entries), sums.copy(), strict=True))
            return [self.index.commit(entry) for entry in entries]

    def checksums(self, entries: Sequence[Entry]) -> Checksums:
        return np.stack([self.sums[entry.key] for entry in entries])

    def close(self) -> None:
        self.closed = True
