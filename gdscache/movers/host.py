"""The mover for planes in host memory: copies by the native library, which are done when the call returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdscache.cuda.streams import Event
from gdscache.kernels.host import NativePool
from gdscache.movers.base import Mover, PageCopies, QueuedCopies
from gdscache.pages.planes import PagedPlanes

_STREAMED = 8 << 20  # bytes of a copy beyond which it goes past the processor's caches


class HostMover(Mover):
    """Copies at once, on the calling thread, without the interpreter's lock; takes the checksums on the way."""

    name = "native"

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        self.layout = planes.layout
        self._pool = NativePool(planes)

    def _move(self, copies: PageCopies) -> QueuedCopies:
        layers, rows = copies.layers, copies.extents.rows
        begin, end = self.layout.layer_bounds[layers.start][0], self.layout.layer_bounds[layers.stop - 1][1]
        places = np.asarray(copies.slots, dtype=np.uint64)
        parts = np.uint64(rows.data_ptr() + begin) + places * np.uint64(rows.stride(0))
        move = self._pool.scatter if copies.direction == "load" else self._pool.gather
        streamed = len(places) * (end - begin) > _STREAMED
        found = move(copies.blocks.numpy(), parts, layers, streamed=streamed, sums=copies.sums)
        return QueuedCopies(None, None, lambda: found)

    def mark_stores(self) -> Event:
        return None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": "the planes are in host memory"}

    def close(self) -> None:
        self._pool.close()
