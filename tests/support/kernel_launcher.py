"""The page kernels launched one by one, with indices in GPU memory or among the arguments."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from gdscache.errors import SlotRangeError, UnsupportedRequestError
from gdscache.kernels.cuda import SHORTEST, PageKernels
from gdscache.pages.planes import PagedPlanes

TILE, STAGED_THREADS, _SM_THREADS = 1024, 256, 512
SUMS_THREADS = (256, 512, 1024)
SUMS_LEAST = 128 * 512  # threads of a launch: fewer do not keep memory busy, larger blocks find no place beside a model
_LAUNCH_TILES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class ExtentArray:
    """Extents in memory: slot `i` begins at `address + i * stride`, with byte `origin` of the extent.

    `origin` may be negative: then that many bytes of something else come first (a read that was rounded outwards).
    """

    address: int
    stride: int
    slots: int
    origin: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Indices:
    """Block indices (pages, blocks_per_page) and extent slots (pages,) in GPU memory, of one integer type.

    `listed`: the block indices themselves, which then go with the launch; `LISTED_BYTES` at most. `blocks` is 0 then.
    `rows` 0: page `i` is extent slot `i`. What is out of range is skipped, and counted in `Launcher.skipped()`,
    unless the indices were `checked` on the host.
    """

    blocks: int
    rows: int
    pages: int
    wide: bool  # int64, else int32
    checked: bool = False
    listed: bytes = b""


class Launcher(PageKernels):
    """The kernels for one set of planes, and what launches them."""

    def __init__(self, planes: PagedPlanes) -> None:
        super().__init__(planes)
        self._skipped = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._fixed: dict[range, tuple[int, ...]] = {}  # what the arguments say about layers

    def look(self, indices: Indices, layers: range, stream: torch.cuda.Stream, digests: int) -> None:
        """Take the checksums of `layers` of pages as they are in the planes; only where `can_look`."""
        if not self.can_look:
            raise UnsupportedRequestError("a layer whose bytes are no multiple of 16 is summed when it is gathered")
        nowhere = ExtentArray(0, 0, indices.pages)
        self._move("gather", nowhere, indices, layers, stream, digests)

    def tiles(self, layers: range) -> int:
        bounds = self.layout.layer_bounds[layers.start : layers.stop]
        return max((-(-(end - start) // TILE) for start, end in bounds), default=1)

    def skipped(self) -> int:
        """Indices out of range that kernels have skipped so far. Waits for the GPU."""
        return int(self._skipped.item())

    def _move(
        self,
        name: str,
        extents: ExtentArray,
        indices: Indices,
        layers: range,
        stream: torch.cuda.Stream,
        digests: int | None = None,
        blocks: int | None = None,
        threads: int = STAGED_THREADS,
    ) -> None:
        """Copy `layers` of pages from extents into the planes (`scatter`), or back (`gather`).

        `digests`: where the checksums of these layers go, an address of uint64 (pages, layers) in GPU or page-locked
        memory; None takes none. `blocks`: the most thread blocks to use, each of `threads` threads; by default what
        all SMs hold at once. Where checksums are taken, blocks are counted as of 1,024 threads, and twice as many.
        """
        if not indices.pages or not layers:
            return
        if layers.step != 1 or layers.start < 0 or layers.stop > self.layout.n_layers:
            raise SlotRangeError(f"layers {layers} of {self.layout.n_layers}", "name consecutive layers")
        if digests is not None and not self.has_sums:
            raise UnsupportedRequestError(f"a layer of fewer than {SHORTEST} bytes has its checksum taken on the host")
        tiles = self.tiles(layers)
        work = indices.pages * len(layers) * tiles
        if work >= _LAUNCH_TILES:
            raise SlotRangeError(f"{indices.pages} pages are too many for one launch", "split the call")
        kernels = self.build(self._fitting(extents, layers))
        arguments = self._arguments(layers, extents, indices, tiles)
        if digests is None:
            grid = min(blocks or self.processors * (_SM_THREADS // threads), -(-work * 16 // threads))
            kernels[name].launch(grid, threads, arguments, stream)
            return
        # As many warps share a layer of a page as have four spans of it each, or all of a block. A team of two would be
        # half idle: one of them only folds.
        pieces = indices.pages * len(layers)
        threads = next(n for n in SUMS_THREADS if pieces * n >= SUMS_LEAST or n == SUMS_THREADS[-1])
        team = min(threads // 32, 1 << max(0, (-(-tiles // 8) - 1).bit_length()))
        team = 1 if team < 4 else team
        # Twice the blocks that were asked for, of 1,024 threads.
        most = (self.processors if blocks is None else 2 * blocks) * (1024 // threads)
        grid = min(most, -(-pieces * team * 32 // threads))
        kernels[f"{name}_sums"].launch(grid, threads, [*arguments, team, digests], stream)

    scatter = functools.partialmethod(_move, "scatter")
    gather = functools.partialmethod(_move, "gather")

    def _arguments(self, layers: range, extents: ExtentArray, indices: Indices, tiles: int) -> list[int | bytes]:
        fixed = self._fixed.get(layers)
        if fixed is None:
            first = sum(len(runs) for runs in self.runs[: layers.start])
            count = sum(len(runs) for runs in self.runs[layers.start : layers.stop])
            fixed = self._fixed[layers] = (len(layers), first, count, tiles, self.planes.blocks_per_page)
        return [
            self._table.data_ptr() + layers.start * 32,
            self._table.data_ptr() + self.layout.n_layers * 32,
            indices.blocks,
            indices.rows,
            extents.address,
            extents.stride,
            extents.origin,
            extents.slots,
            self.planes.blocks,
            indices.pages,
            *fixed,
            indices.wide,
            0 if indices.checked else self._skipped.data_ptr(),
            indices.listed,
        ]

    def _fitting(self, extents: ExtentArray, layers: range) -> int:
        """The widest access that the planes and these extents allow."""
        start = self.layout.layer_bounds[layers.start][0]
        return math.gcd(self._vector, extents.address, extents.stride, start - extents.origin)
