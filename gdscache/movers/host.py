"""The mover for planes in host memory: copies by the native library, which are done when the call returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gdscache.cuda.streams import Event
from gdscache.extents.base import Extents
from gdscache.kernels.host import NativePool
from gdscache.movers.base import Mover, QueuedCopies, Slots
from gdscache.movers.choice import Direction
from gdscache.pages.planes import PagedPlanes

_STREAMED = 8 << 20  # bytes of a copy beyond which it goes past the processor's caches


class HostMover(Mover):
    """Copies at once, on the calling thread, without the interpreter's lock; takes the checksums on the way."""

    name = "native"

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        self.layout = planes.layout
        self._pool = NativePool(planes)

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
    ) -> QueuedCopies:
        begin, end = self.layout.layer_bounds[layers.start][0], self.layout.layer_bounds[layers.stop - 1][1]
        rows = extents.rows
        places = np.asarray(slots, dtype=np.uint64)
        parts = np.uint64(rows.data_ptr() + begin) + places * np.uint64(rows.stride(0))
        move = self._pool.scatter if direction == "load" else self._pool.gather
        found = move(blocks.numpy(), parts, layers, streamed=len(places) * (end - begin) > _STREAMED, sums=sums)
        return QueuedCopies(None, None, lambda: found)

    def mark_stores(self) -> Event:
        return None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": "the planes are in host memory"}

    def close(self) -> None:
        self._pool.close()
