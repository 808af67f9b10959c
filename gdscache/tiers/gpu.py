"""The GPU tier: paged planes of the engine's own. On a machine without a GPU they are in host memory.

Published pages are in the index. Private slots belong to a sequence that is still computing, and have no key. Work on
callers' streams may still read a slot when it is given back: the events of that work stay with the slot, and the
slot's next owner is ordered after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from gdscache import arguments
from gdscache.cuda.host_memory import allocating
from gdscache.cuda.streams import Event
from gdscache.index.index import PageIndex
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes
from gdscache.policies import POLICIES
from gdscache.tiers.base import Tier


class GpuTier(Tier):
    name = "gpu"
    kind = "planes"

    def __init__(self, layout: PageLayout, capacity: int, device: torch.device, eviction: str = "lru") -> None:
        slots = capacity // layout.plane_bytes
        with allocating("gpu.capacity", slots * layout.plane_bytes, device):
            self.paged = PagedPlanes.allocate(layout, slots, device)
        self.index = PageIndex(slots, POLICIES[eviction]())
        self.private: set[int] = set()  # slots of sequences, not published
        self._last_uses: dict[int, dict[object, Event]] = {}  # by slot and stream

    @property
    def capacity(self) -> int:
        return self.index.slots * self.paged.layout.plane_bytes

    def planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The paged tensors of one layer, a tensor a plane: `(slots, page_tokens, *row)`."""
        return self.paged.tensors[arguments.whole(layer, "layer", 0, self.paged.layout.n_layers - 1)]

    def take(self, n: int) -> list[int] | None:
        """`n` private slots, evicting as needed, or None and nothing changed."""
        slots = self.index.allocate(n)
        if slots is not None:
            self.private.update(slots)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.private.remove(slot)
            self.index.free((slot,))

    def used(self, slots: Iterable[int], event: Event) -> None:
        """`event` is behind the current stream's last use of these slots."""
        if event is not None:
            stream = torch.cuda.current_stream(self.paged.device)
            for slot in slots:
                self._last_uses.setdefault(slot, {})[stream] = event

    def order_after(self, slots: Iterable[int], *, forget: bool = False) -> None:
        """Order the current stream after the work that still uses these slots; `forget` it when they change hands."""
        look = self._last_uses.pop if forget else self._last_uses.get
        for event in {event for slot in slots for event in look(slot, {}).values()}:
            if event is not None:
                event.wait(torch.cuda.current_stream(self.paged.device))

    def check(self, lock: threading.RLock) -> list[str]:
        with lock:
            return self.index.check(elsewhere=list(self.private))

    def describe(self) -> dict[str, Any]:
        return {"device": str(self.paged.device), "private_slots": len(self.private)}

    def close(self) -> None:
        self.paged.tensors = []
