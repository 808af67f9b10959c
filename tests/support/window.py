"""Part of a reserve of extents, cut anew into slots that hold a group of layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gdscache.arrays import Int64Array
from gdscache.pages.checksum import Checksums, layer_checksums


class Window:
    """Neighbouring slots of a reserve, cut anew: each of its own slots holds a part of an extent and no more.

    `within`: the slots; `span`: `(start, stop)` of the part in bytes of an extent, multiples of `EXTENT_ALIGNMENT`. So
    the memory of one page holds a group of layers of several, side by side, and neighbours are copied at once.
    """

    fence_slots = 0

    def __init__(self, extents: Any, within: range, span: tuple[int, int]) -> None:
        start, stop = span
        self._extents = extents
        self._part = stop - start
        extent = extents.layout.extent_bytes
        self.slots = len(within) * extent // self._part
        self._first = within.start * extent - start  # where the first slot's extent would begin
        self._start = start
        assert self._first >= 0, "the reserve's first slots are those of stores"
        offset = int(extents.rows.storage_offset()) + self._first
        self.rows = extents.rows.as_strided((self.slots, stop), (self._part, 1), offset)
        self.checksums = np.zeros((self.slots, extents.layout.n_layers), dtype=np.uint64)
        self.pinned = extents.pinned

    @property
    def flat(self) -> memoryview | torch.Tensor:
        return self._extents.flat

    def where(self, slots: Int64Array, byte: int) -> Int64Array:
        return self._first + byte + slots * self._part

    def digest(self, slot: int, layers: range) -> Checksums:
        """The checksums of some layers of the slot's bytes, taken now; of GPU memory by way of a copy."""
        bounds = self._extents.layout.layer_bounds[layers.start : layers.stop]
        at = self._first + slot * self._part + self._start
        part = self.flat[at : at + self._part]
        view = part if isinstance(part, memoryview) else part.cpu().numpy().data
        return layer_checksums(view, [(first - self._start, end - self._start) for first, end in bounds])
