"""The bounce reserve: extents for pages that only pass through, with fixed shares for loads and for stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from gdscache.checksum import Checksums
from gdscache.tiers.base import SlotPool

if TYPE_CHECKING:
    from gdscache.tiers.quarantine import Quarantine


class Extents(Protocol):
    """Slots of one extent each, on the host or on a device, and the checksums that belong to them.

    `pinned`: copy engines and kernels of a GPU reach the memory; `fence_slots`: its page-locked registrations hold so
    many slots each, and no copy may cross from one into the next (0: there is only one).
    """

    slots: int
    rows: torch.Tensor
    checksums: Checksums
    pinned: bool
    fence_slots: int

    def memory(self, slot: int, count: int = 1) -> memoryview | torch.Tensor: ...

    def digest(self, slot: int, layers: range) -> Checksums: ...

    def sign(self, slot: int) -> None: ...

    def bad_layer(self, slot: int) -> int | None: ...

    def close(self) -> None: ...


class Bounce:
    """Half of the slots are for loads, half for stores; neither borrows from the other."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        half = extents.slots // 2
        self.loads = SlotPool(range(half))
        self.stores = SlotPool(range(half, 2 * half))
        self.quarantine: Quarantine | None = None  # set by `TierManager.adopt`

    def close(self) -> None:
        """Give the memory back, once no I/O that hangs may touch it."""
        if self.quarantine is None:
            self.extents.close()
        else:
            self.quarantine.afterwards(self.extents.close)
