"""Pages between planes and extents in host memory by the native library: gather, scatter, checksums."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.arrays import UInt64Array
from gdscache.errors import NativeCallError
from gdscache.native.library import address, checked, integers, library
from gdscache.pages.checksum import Checksums
from gdscache.pages.layout import DTYPE_BYTES
from gdscache.pages.planes import PagedPlanes


def xxh3(memory: npt.NDArray[Any]) -> int:
    """XXH3-64 of the bytes of a contiguous array."""
    answer = ctypes.c_uint64()
    checked(library().xxh3(None, address(memory), memory.nbytes, ctypes.addressof(answer)), "xxh3")
    return answer.value


def layer_sums(extents: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Checksums:
    """`checksum.layer_checksums` of extents at these addresses in host memory: uint64 (pages, layers).

    One call, without the interpreter's lock. Raises `NativeCallError`.
    """
    addresses, table = np.array(extents, np.uint64), integers(bounds)
    found = np.empty((len(addresses), len(bounds)), np.uint64)
    answer = library().layer_sums(address(addresses), len(addresses), address(table), len(bounds), address(found))
    checked(answer, "layer_sums")
    return found


class NativePool:
    """Planes in host memory, as the native library knows them. The tensors live as long as the pool.

    `blocks` of a call: int64 (pages, blocks a page). `parts`: uint64 (pages,), the address of layer `layers.start` of
    each page's extent. `streamed`: past the processor's caches, which is better for memory that nobody looks at soon.
    Answers are checksums, uint64 (pages, len(layers)), of the bytes that were written; without `sums`, none.
    """

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        rows, counts = [], []
        for layer, tensors in zip(planes.layout.layers, planes.tensors, strict=True):
            counts.append(len(layer))
            for plane, tensor in zip(layer, tensors, strict=True):
                item = DTYPE_BYTES[plane.dtype]
                block, token = (item * stride for stride in tensor.stride()[:2])
                rows.append((tensor.data_ptr(), block, token, plane.row_bytes))
        table, firsts = integers(rows), np.array([0, *itertools.accumulate(counts)], np.int32)
        handle, why = ctypes.c_void_p(), ctypes.create_string_buffer(200)
        library_ = library()
        answer = library_.pool_open(
            *(address(table), len(rows), address(firsts), len(counts)),
            *(planes.blocks, planes.block_tokens, planes.blocks_per_page),
            *(ctypes.addressof(handle), ctypes.addressof(why), len(why)),
        )
        if answer < 0:
            raise NativeCallError(f"planes are refused: {why.value.decode()}", "pass planes in host memory", -answer)
        self.handle = handle.value
        self._library = library_

    def gather(
        self, blocks: Any, parts: UInt64Array, layers: range, *, streamed: bool = True, sums: bool = True
    ) -> Checksums:
        """Copy layers of pages out of the planes. Raises `NativeCallError` before the first byte is moved."""
        return self._move(self._library.gather, blocks, parts, layers, streamed=streamed, sums=sums)

    def scatter(
        self, blocks: Any, parts: UInt64Array, layers: range, *, streamed: bool = True, sums: bool = True
    ) -> Checksums:
        """Copy layers of pages into the planes: the inverse of `gather`."""
        return self._move(self._library.scatter, blocks, parts, layers, streamed=streamed, sums=sums)

    def close(self) -> None:
        """Forget the planes. Again is fine."""
        handle, self.handle = self.handle, None
        self._library.pool_close(handle)

    def _open(self) -> int:
        if self.handle is None:
            raise NativeCallError("the pool was closed", "use it before close")
        return self.handle

    def _move(
        self, call: Any, blocks: Any, parts: UInt64Array, layers: range, *, streamed: bool, sums: bool
    ) -> Checksums:
        table = integers(blocks)
        if table.shape != (len(parts), self.planes.blocks_per_page):
            raise NativeCallError(
                f"blocks of shape {table.shape} for {len(parts)} pages of {self.planes.blocks_per_page}",
                "pass int64 (pages, blocks a page)",
            )
        found = np.empty((len(parts) if sums else 0, len(layers)), np.uint64)
        checked(
            call(
                *(self._open(), address(table), len(parts), layers.start, layers.stop),
                *(address(parts), address(found) if sums else None, streamed),
            ),
            "pages",
        )
        return found
