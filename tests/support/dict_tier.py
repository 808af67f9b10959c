"""A fourth tier, in one file: pages in a dictionary. `tiers: [{tier: dict_tier:DictTier, capacity: ...}]`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.errors import IOFailedError, StorageError
from gdscache.extents.base import Extents
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry, PageState
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.storage.base import Op
from gdscache.tiers.base import NO_RETENTIONS, DurableTier


class DictIO:
    """I/O that is over when it was begun; see `PagesIO`."""

    def __init__(self, errors: Sequence[StorageError | None]) -> None:
        self._errors = errors

    def follow(self, told: Callable[[], None]) -> None:
        told()

    def take(self) -> Iterator[tuple[Sequence[int], StorageError | None]]:
        return (([page], error) for page, error in enumerate(self._errors))

    def on_end(self, callback: Callable[[int], None]) -> None:
        for page in range(len(self._errors)):
            callback(page)


class DictFiles:
    """Slot -> the bytes of its extent. `broken`: slots that cannot be read."""

    def __init__(self, extent_bytes: int) -> None:
        self.content: dict[int, bytearray] = {}
        self.broken: set[int] = set()
        self.reads = 0
        self._extent_bytes = extent_bytes

    def describe(self) -> str:
        return "dict"

    def transfer(
        self,
        op: Op,
        slots: Int64Array,
        ends: Sequence[tuple[Extents, Int64Array]],
        span: tuple[int, int] | None = None,
    ) -> DictIO:
        start, stop = span or (0, self._extent_bytes)
        places = [(extents.flat, at) for extents, some in ends for at in extents.where(some, start).tolist()]
        errors = [
            self._one(op, slot, cast(memoryview, flat)[at : at + stop - start], start)
            for slot, (flat, at) in zip(slots.tolist(), places, strict=True)
        ]
        return DictIO(errors)

    def _one(self, op: Op, slot: int, memory: memoryview, start: int) -> StorageError | None:
        if op is Op.WRITE:
            self.content[slot] = bytearray(memory)
            return None
        self.reads += 1
        if slot in self.broken:
            return IOFailedError("broken", "")
        memory[:] = self.content[slot][start : start + len(memory)]
        return None


class DictTier(DurableTier):
    """What a tier of files has to do, and no more."""

    def __init__(self, layout: PageLayout, capacity: int, lock: threading.RLock, *, name: str = "dict") -> None:
        self.name = name
        self.layout = layout
        self.index = PageIndex(capacity // layout.extent_bytes)
        self.io: DictFiles = DictFiles(layout.extent_bytes)
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
