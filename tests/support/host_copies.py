"""Copies between extents and planes in host memory, at once, by the native library and outside of any move."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdscache.moves.native import NativePlanes
from gdscache.pages.planes import PagedPlanes
from tests.support.hooks import hooks


class HostCopies:
    def __init__(self, planes: PagedPlanes) -> None:
        self._layout = planes.layout
        self._pool = NativePlanes(planes)

    def copy(
        self, extents: Any, slots: Any, blocks: Any, layers: range, *, load: bool = True, sums: bool = False
    ) -> Any:
        """Copy `layers` of pages, and return their checksums, if they are wanted: uint64 (pages, layers). `blocks`:
        int64 (pages, blocks a page)."""
        places, rows = np.asarray(slots, dtype=np.uint64), extents.rows
        begin = self._layout.layer_bounds[layers.start][0]
        parts = np.uint64(rows.data_ptr() + begin) + places * np.uint64(rows.stride(0))
        found = (hooks.scatter if load else hooks.gather)(self._pool, blocks, parts, layers, streamed=False)
        return found if sums else None
