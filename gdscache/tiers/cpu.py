"""Page-locked host memory: the CPU tier, and the reserve that pages pass through."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gdscache.extents import SlotMemory, TierMemory
from gdscache.index.free_slots import SlotShare
from gdscache.index.index import PageIndex
from gdscache.index.table import PageState
from gdscache.pages.layout import PLAIN
from gdscache.policies import POLICIES
from gdscache.tiers.base import Tier

if TYPE_CHECKING:
    from gdscache.tiers.quarantine import Quarantine


class CpuTier(Tier):
    """Owns `extents`."""

    name = "cpu"
    kind = "memory"

    def __init__(self, extents: TierMemory, eviction: str = "lru", groups: int = 1, *, plain: bool = False) -> None:
        self.extents = extents
        self.plain = plain
        self.name = CpuTier.name + PLAIN * plain
        self.index = PageIndex(self.extents.slots, POLICIES[eviction](groups))

    @property
    def capacity(self) -> int:
        return self.extents.nbytes

    def check(self, lock: threading.RLock) -> list[str]:
        problems = super().check(lock)
        with lock:
            found = [self.index.find(page.key) for page in list(self.index) if page.state is PageState.VERIFIED]
            pages = {page.slot: page for page in found if page is not None}
            for page in pages.values():
                self.index.lease(page)
        try:
            for slot, layer in self.extents.bad_slots([*pages]).items():
                key = pages[slot].key.hex()[:16]
                problems.append(f"page {key}: the bytes of layer {layer} differ from the stored ones")
        finally:
            with lock:
                self.index.release_all(pages.values())
        return problems

    def describe(self) -> dict[str, Any]:
        return {"pinned": self.extents.pinned}

    def close(self) -> None:
        self.extents.close()


class Bounce:
    """The bounce reserve: extents for pages that only pass through. Half of the slots are for stores, half for loads;
    neither borrows from the other. `quarantine` watches both. `name`: of the space. `only`: the one tier of files whose
    pages these are; "": of all."""

    def __init__(self, extents: SlotMemory, quarantine: Quarantine, *, plain: bool = False, only: str = "") -> None:
        self.name, self.only = "bounce" + PLAIN * plain, only
        self.extents = extents
        half = extents.slots // 2
        self.stores = SlotShare(half)
        self.loads = range(half, 2 * half)  # the executor gives these out
        self._quarantine = quarantine
        quarantine.add_memory(f"{self.name}_stores", self.stores.slots, only=only)

    def close(self) -> None:
        self._quarantine.afterwards(self.extents.close)
