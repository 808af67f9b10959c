"""Planes in host memory, as the native library knows them."""

from __future__ import annotations

import itertools

import numpy as np

from gdscache.arrays import integers
from gdscache.native import Pool
from gdscache.pages.layout import DTYPE_BYTES
from gdscache.pages.planes import PagedPlanes


class NativePool(Pool):
    """The tensors live as long as the pool. Raises `NativeCallError` for planes that are none in host memory."""

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        rows, counts = [], []
        for layer, tensors in zip(planes.layout.layers, planes.tensors, strict=True):
            counts.append(len(layer))
            for plane, tensor in zip(layer, tensors, strict=True):
                item = DTYPE_BYTES[plane.dtype]
                block, token = (item * stride for stride in tensor.stride()[:2])
                rows.append((tensor.data_ptr(), block, token, plane.row_bytes))
        firsts = np.array([0, *itertools.accumulate(counts)], np.int32)
        super().__init__(integers(rows), firsts, planes.blocks, planes.block_tokens, planes.blocks_per_page)
