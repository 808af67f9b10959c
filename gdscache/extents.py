"""Memory that holds extents, a page a slot: the contracts, on the host, and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from gdscache.cuda.host_memory import HostBuffer, PageLocking, allocating
from gdscache.pages.checksum import Checksums, first_bad_layer
from gdscache.pages.layout import EXTENT_ALIGNMENT, PageLayout


class Extents(Protocol):
    """Slots of one extent each, on the host or on a device, and their checksums.

    `rows`: uint8, a row a slot, from the extent's first byte on. `flat`: the memory as one piece of bytes. `pinned`:
    copy engines and kernels of a GPU reach the memory. `fence_slots`: slots of each page-locked registration; no copy
    may cross from one into the next (0: there is only one).
    """

    slots: int
    rows: torch.Tensor
    checksums: Checksums
    pinned: bool
    fence_slots: int

    @property
    def flat(self) -> memoryview | torch.Tensor:
        """The bytes of all extents, padding included."""
        ...


class SlotMemory(Protocol):
    """The memory of a pool of pages, in this process or on ranks."""

    slots: int
    pinned: bool
    checksums: Checksums

    def close(self) -> None: ...


class TierMemory(SlotMemory, Protocol):
    """Memory of a tier. `nbytes`: of all of it."""

    @property
    def nbytes(self) -> int: ...

    def bad_slots(self, slots: Sequence[int]) -> dict[int, int]:
        """Slots whose bytes do not match their checksums, each with a bad layer."""
        ...


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


class DeviceExtents:
    """The counterpart of `HostExtents` in GPU memory, for I/O straight to and from the device."""

    pinned = True
    fence_slots = 0

    def __init__(self, layout: PageLayout, capacity: int, device: torch.device) -> None:
        self.layout = layout
        self.slots = capacity // layout.extent_bytes
        nbytes = self.slots * layout.extent_bytes
        with allocating("host_buffer", nbytes, device):
            memory = torch.empty(nbytes + EXTENT_ALIGNMENT, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % EXTENT_ALIGNMENT  # torch aligns to less than direct I/O wants
        self.rows = memory[start : start + nbytes].view(self.slots, layout.extent_bytes)
        self.checksums = np.zeros((self.slots, layout.n_layers), dtype=np.uint64)

    @property
    def flat(self) -> torch.Tensor:
        return self.rows.view(-1)

    def close(self) -> None:
        self.rows = self.rows[:0].clone()
