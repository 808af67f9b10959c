"""Extents in host memory: the CPU tier, and the bounce buffers for pages that only pass through."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from gdscache.cuda.host_memory import HostBuffer, Pin
from gdscache.index.index import PageIndex
from gdscache.index.table import PageState
from gdscache.pages.checksum import Checksums, first_bad_layer, layer_checksums
from gdscache.pages.layout import PageLayout
from gdscache.policies import new_policy
from gdscache.tiers.base import Tier
from gdscache.tiers.bounce import Places


class HostExtents:
    """`capacity` bytes of page-aligned host memory, cut into extents, with the checksums that belong to each.

    `rows` is a uint8 tensor of shape (slots, extent_bytes); `checksums` uint64 of shape (slots, layers).
    """

    def __init__(self, layout: PageLayout, capacity: int, pin: Pin, setting: str = "a host buffer") -> None:
        """`setting`: the key that asks for the memory, for messages. Raises what `HostBuffer` raises."""
        self.layout = layout
        self.slots = capacity // layout.extent_bytes
        self.buffer = HostBuffer(capacity, pin, unit=layout.extent_bytes, setting=setting)
        used = self.slots * layout.extent_bytes
        self.rows: torch.Tensor = self.buffer.tensor[:used].view(self.slots, layout.extent_bytes)
        self.checksums = np.zeros((self.slots, layout.n_layers), dtype=np.uint64)
        self._view = self.buffer.view
        self.pinned = self.buffer.pinned
        self.fence_slots = self.buffer.registration_bytes // layout.extent_bytes

    @property
    def flat(self) -> memoryview:
        """The bytes of all extents, padding included."""
        return self._view[: self.slots * self.layout.extent_bytes]

    def where(self, slots: Places, byte: int) -> Places:
        """The places in `flat` of a byte of the slots' extents. int64 of shape (slots,)."""
        return slots * self.layout.extent_bytes + byte

    def memory(self, slot: int) -> memoryview:
        """The bytes of a slot's extent, padding included."""
        start = slot * self.layout.extent_bytes
        return self._view[start : start + self.layout.extent_bytes]

    def digest(self, slot: int, layers: range) -> Checksums:
        """The checksums of some layers of the slot's bytes, taken now."""
        return layer_checksums(self.memory(slot), self.layout.layer_bounds[layers.start : layers.stop])

    def sign(self, slot: int) -> None:
        """Take the checksums of the slot's bytes as the truth about them."""
        self.checksums[slot] = self.digest(slot, range(self.layout.n_layers))

    def bad_layer(self, slot: int) -> int | None:
        """The first layer whose bytes are not what `checksums` says, or None."""
        return first_bad_layer(self.memory(slot), self.layout.layer_bounds, self.checksums[slot])

    def close(self) -> None:
        """Give the memory back; views that others still hold keep it alive until they go."""
        self.rows = torch.empty((0, self.layout.extent_bytes), dtype=torch.uint8)
        self._view = memoryview(b"")
        self.buffer.close()


class CpuTier(Tier):
    """The pinned CPU pool: exactly the configured bytes, page aligned, pinned where CUDA is."""

    name = "cpu"
    kind = "memory"

    def __init__(self, layout: PageLayout, capacity: int, pin: Pin, eviction: str = "lru") -> None:
        self.extents = HostExtents(layout, capacity, pin, "cpu.capacity")
        self.index = PageIndex(self.extents.slots, new_policy(eviction))

    @property
    def capacity(self) -> int:
        return self.extents.buffer.nbytes

    def check(self, lock: threading.RLock, *, fix: bool) -> list[str]:
        problems = super().check(lock, fix=fix)
        with lock:
            for page in list(self.index):
                layer = self.extents.bad_layer(page.slot) if page.state is PageState.VERIFIED else None
                if layer is not None:
                    problems.append(f"page {page.key.hex()[:16]}: layer {layer} is not what was stored")
                    entry = self.index.find(page.key) if fix else None
                    if entry is not None:
                        self.index.drop(entry)
        return problems

    def describe(self) -> dict[str, Any]:
        return {"pinned": self.extents.buffer.pinned}

    def close(self) -> None:
        self.extents.close()
