"""The bounce reserve: extents for pages that only pass through, with fixed shares for loads and for stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gdscache.pages.checksum import Checksums, layer_checksums
from gdscache.pages.layout import PageLayout
from gdscache.tiers.base import SlotPool

if TYPE_CHECKING:
    from gdscache.tiers.quarantine import Quarantine

Places = npt.NDArray[np.int64]


class Extents(Protocol):
    """Slots of one extent each, on the host or on a device, and the checksums that belong to them.

    `rows`: uint8, a row a slot, from the extent's first byte on; `flat`: the memory as one piece of bytes.
    `pinned`: copy engines and kernels of a GPU reach the memory; `fence_slots`: its page-locked registrations hold so
    many slots each, and no copy may cross from one into the next (0: there is only one).
    """

    slots: int
    rows: torch.Tensor
    checksums: Checksums
    pinned: bool
    fence_slots: int

    @property
    def flat(self) -> memoryview | torch.Tensor: ...

    def where(self, slots: Places, byte: int) -> Places:
        """The places in `flat` of a byte of the slots' extents. int64 of shape (slots,)."""
        ...

    def digest(self, slot: int, layers: range) -> Checksums: ...


class Reserved(Extents, Protocol):
    """Extents that somebody owns, and gives back."""

    layout: PageLayout

    def close(self) -> None: ...


class Window:
    """Neighbouring slots of a reserve, cut anew: each of its own slots holds a part of an extent and no more.

    `within`: the slots; `span`: `(start, stop)` of the part in bytes of an extent, multiples of `EXTENT_ALIGNMENT`. So
    the memory of one page holds a group of layers of several, side by side, and neighbours are copied at once.
    """

    fence_slots = 0

    def __init__(self, extents: Reserved, within: range, span: tuple[int, int]) -> None:
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

    def where(self, slots: Places, byte: int) -> Places:
        return self._first + byte + slots * self._part

    def digest(self, slot: int, layers: range) -> Checksums:
        """The checksums of some layers of the slot's bytes, taken now; of GPU memory by way of a copy."""
        bounds = self._extents.layout.layer_bounds[layers.start : layers.stop]
        at = self._first + slot * self._part + self._start
        part = self.flat[at : at + self._part]
        view = part if isinstance(part, memoryview) else part.cpu().numpy().data
        return layer_checksums(view, [(first - self._start, end - self._start) for first, end in bounds])


class Bounce:
    """Half of the slots are for stores, half for loads; neither borrows from the other. `quarantine` watches over both,
    and the memory outlives I/O that hangs."""

    def __init__(self, extents: Reserved, quarantine: Quarantine) -> None:
        self.extents = extents
        half = extents.slots // 2
        self.stores = SlotPool(range(half))
        self.loads = range(half, 2 * half)  # the executor gives these out
        self._quarantine = quarantine
        quarantine.add_pool("bounce_stores", self.stores.slots)

    def close(self) -> None:
        """Give the memory back, once no I/O that hangs may touch it."""
        self._quarantine.afterwards(self.extents.close)
