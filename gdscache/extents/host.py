"""Extents in host memory: of the CPU tier, and of the bounce reserve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gdscache.cuda.host_memory import HostBuffer, PageLocking
from gdscache.pages.checksum import Checksums, first_bad_layer
from gdscache.pages.layout import PageLayout


class HostExtents:
    """`capacity` bytes of page-aligned host memory, cut into extents, and their checksums.

    `rows` is a uint8 tensor of shape (slots, extent_bytes); `checksums` uint64 of shape (slots, layers).
    """

    def __init__(
        self,
        layout: PageLayout,
        capacity: int,
        pin: PageLocking,
        setting: str = "a host buffer",
        *,
        descriptor: int | None = None,
        shared: bool = False,
    ) -> None:
        """`setting`: the memory's key, for messages. `descriptor`, `shared`: see `HostBuffer`, whose errors this
        raises."""
        self.layout = layout
        self.slots = capacity // layout.extent_bytes
        self.buffer = HostBuffer(
            capacity, pin, unit=layout.extent_bytes, setting=setting, descriptor=descriptor, shared=shared
        )
        used = self.slots * layout.extent_bytes
        self.rows: torch.Tensor = self.buffer.tensor[:used].view(self.slots, layout.extent_bytes)
        self.checksums = np.zeros((self.slots, layout.n_layers), dtype=np.uint64)
        self._view = self.buffer.view
        self.pinned = self.buffer.pinned
        self.fence_slots = self.buffer.registration_bytes // layout.extent_bytes

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    @property
    def flat(self) -> memoryview:
        """The bytes of all extents, padding included."""
        return self._view[: self.slots * self.layout.extent_bytes]

    def memory(self, slot: int) -> memoryview:
        """The bytes of a slot's extent, padding included."""
        start = slot * self.layout.extent_bytes
        return self._view[start : start + self.layout.extent_bytes]

    def bad_slots(self, slots: Sequence[int], sums: Checksums | None = None) -> dict[int, int]:
        """See `TierMemory`. `sums`: the checksums of these slots, where they are not kept here."""
        sums, bounds = self.checksums[[*slots]] if sums is None else sums, self.layout.layer_bounds
        bad = {slot: first_bad_layer(self.memory(slot), bounds, of) for slot, of in zip(slots, sums, strict=True)}
        return {slot: layer for slot, layer in bad.items() if layer is not None}

    def close(self) -> None:
        """Release the memory; views of other owners keep it alive until they go."""
        self.rows = torch.empty((0, self.layout.extent_bytes), dtype=torch.uint8, device="cpu")
        self._view = memoryview(b"")
        self.buffer.close()
