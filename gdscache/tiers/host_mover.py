"""The mover for planes in host memory: numpy copies between extents and planes, done when the call returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gdscache.kernels import host
from gdscache.planes import PagedPlanes
from gdscache.streams import Event
from gdscache.tiers.bounce import Extents
from gdscache.tiers.paths import Direction
from gdscache.tiers.transfer import Moved, Mover, Slots, host_digests

_CHUNK_PAGES = 16  # what numpy copies through stays small and warm


class HostMover(Mover):
    """Copies at once, on the calling thread."""

    name = "native"
    native = True

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        self.layout = planes.layout

    def _move(
        self,
        direction: Direction,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range,
        after: Sequence[Event],
        *,
        sums: bool,
    ) -> Moved:
        kernel = host.scatter if direction == "load" else host.gather
        for at in range(0, len(slots), _CHUNK_PAGES):
            rows = torch.tensor(slots[at : at + _CHUNK_PAGES])
            kernel(self.planes, blocks[at : at + _CHUNK_PAGES], extents.rows, rows, layers)
        return Moved(None, None, host_digests(extents, slots, layers))

    def queues(self, extents: Extents) -> bool:
        return False

    def mark_loads(self) -> Event:
        return None

    def mark_stores(self) -> Event:
        return None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": "the planes are in host memory"}

    def close(self) -> None:
        pass
