"""The CPU tier: pages in page-locked host memory."""

from __future__ import annotations

import threading
from typing import Any

from gdscache.cuda.host_memory import Pin
from gdscache.extents.host import HostExtents
from gdscache.index.index import PageIndex
from gdscache.index.table import PageState
from gdscache.pages.layout import PageLayout
from gdscache.policies import new_policy
from gdscache.tiers.base import Tier


class CpuTier(Tier):
    """The CPU pool: exactly the configured bytes, page aligned. `pin`: see `HostBuffer`."""

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
