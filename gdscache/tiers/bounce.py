"""The bounce reserve: extents for pages that only pass through, with fixed shares for loads and for stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdscache.extents.base import PoolMemory
from gdscache.index.free_slots import SlotPool

if TYPE_CHECKING:
    from gdscache.tiers.quarantine import Quarantine


class Bounce:
    """Half of the slots are for stores, half for loads; neither borrows from the other. `quarantine` watches over both,
    and the memory outlives I/O that hangs."""

    def __init__(self, extents: PoolMemory, quarantine: Quarantine) -> None:
        self.extents = extents
        half = extents.slots // 2
        self.stores = SlotPool(range(half))
        self.loads = range(half, 2 * half)  # the executor gives these out
        self._quarantine = quarantine
        quarantine.add_pool("bounce_stores", self.stores.slots)

    def close(self) -> None:
        """Give the memory back, once no I/O that hangs may touch it."""
        self._quarantine.afterwards(self.extents.close)
