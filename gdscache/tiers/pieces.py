"""Copies straight between extents and planes, piece by piece: what the copy engine is told where no kernel helps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gdscache.kernels.copy_engine import Addresses, merge
from gdscache.kernels.cuda import PlaneRuns
from gdscache.tiers.chunks import Transfer

_ENTRIES = 512  # copies that are made out at a time: the first are on the bus while the next are
_FIRST = 128

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a page's layers in the order of the extent; every array has one value a piece.

    Piece `i` begins at `offset[i]` of the extent, and in the planes at `base[i] + stride[i] * b`, `b` being the page's
    `block[i]`-th block. `opens[i]`: it is its plane's first.
    """

    base: Integers
    stride: Integers
    block: Integers
    offset: Integers
    nbytes: Addresses
    opens: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, runs: Sequence[Sequence[PlaneRuns]], bounds: Sequence[tuple[int, int]], layers: range) -> Pieces:
        """The pieces of `layers`; `runs` and `bounds` are those of all layers."""
        columns: list[tuple[Integers, ...]] = []
        for layer in layers:
            for plane in runs[layer]:
                number = np.arange((plane.end - plane.start) // plane.run_bytes)
                columns.append(
                    (
                        plane.base + number % plane.runs_per_block * plane.run_stride,
                        np.full(len(number), plane.block_stride),
                        number // plane.runs_per_block,
                        bounds[layer][0] + plane.start + number * plane.run_bytes,
                        np.full(len(number), plane.run_bytes),
                        number,
                    )
                )
        base, stride, block, offset, nbytes, number = (np.concatenate(column) for column in zip(*columns, strict=True))
        return cls(base, stride, block, offset, nbytes.astype(np.uint64), number == 0)

    def lists(self, transfer: Transfer, first: int, end: int) -> Iterator[tuple[Addresses, Addresses, Addresses]]:
        """Where pages `first ... end - 1` of a transfer lie in the planes and in their extents, and how many bytes.

        Some pages at a time, neighbours merged, never across two planes, which may be two allocations side by side, nor
        across two pages, which may lie in two registrations of host memory.
        """
        memory = transfer.extents.rows
        pages = max(1, _FIRST // len(self.base))
        while first < end:
            stop = min(first + pages, end)
            extents = memory.data_ptr() + transfer.slots[first:stop] * memory.stride(0)
            planes = (self.base + transfer.blocks[first:stop, self.block] * self.stride).ravel().astype(np.uint64)
            host = (extents[:, None] + self.offset).ravel().astype(np.uint64)
            yield merge(planes, host, np.tile(self.nbytes, stop - first), np.tile(self.opens, stop - first))
            first, pages = stop, max(1, _ENTRIES // len(self.base))
