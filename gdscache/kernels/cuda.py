"""Gather, scatter and checksums of fragmented pages as CUDA kernels (csrc/pages.cu).

They move bytes between paged planes and extents; the extents lie in GPU memory or in page-locked host memory, which the
kernels then read and write over the bus. Everything is queued on the stream given and nothing synchronises.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from gdscache.errors import SlotRangeError, UnsupportedRequestError
from gdscache.kernels import jit
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes

SOURCE = "pages.cu"
LISTED_BYTES = 3520  # of block indices that fit among a kernel's arguments
_COPY_FORM = f"PPPPPqqqq7IP{LISTED_BYTES}s"
FORMS = {
    "gather": _COPY_FORM,
    "scatter": _COPY_FORM,
    "gather_sums": f"{_COPY_FORM}IP",
    "scatter_sums": f"{_COPY_FORM}IP",
}
VARIANTS = tuple({"VECTOR": width} for width in (16, 8, 4, 2, 1))

TILE = 1024
SHORTEST = 241  # bytes: XXH3 has other forms for less, and those are left to the host
STAGED_THREADS = 256
ZERO_COPY_THREADS = 1024
ZERO_COPY_BLOCKS = 6
SUMS_THREADS = (256, 512, 1024)
SUMS_LEAST = 128 * 512  # threads of a launch: fewer do not keep memory busy, larger blocks find no place beside a model
_SM_THREADS = 512
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
class PlaneRuns:
    """Where a plane's pages lie, in bytes: a block's tokens are one run, or one run a token where these are apart.

    `start`, `end`: of the plane in its layer of an extent.
    """

    base: int
    block_stride: int
    run_stride: int
    run_bytes: int
    runs_per_block: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Indices:
    """Block indices (pages, blocks_per_page) and extent slots (pages,) in GPU memory, of one integer type.

    `listed`: the block indices themselves, which then go with the launch; `LISTED_BYTES` at most. `blocks` is 0 then.
    `rows` 0: page `i` is extent slot `i`. What is out of range is skipped, and counted in `PageKernels.skipped()`,
    unless the indices were `checked` on the host.
    """

    blocks: int
    rows: int
    pages: int
    wide: bool  # int64, else int32
    checked: bool = False
    listed: bytes = b""


def can_look(layout: PageLayout) -> bool:
    """Whether a kernel can take the checksums of pages from the planes alone."""
    return all(end - start >= SHORTEST and (end - start) % 16 == 0 for start, end in layout.layer_bounds)


def plane_runs(planes: PagedPlanes) -> list[list[PlaneRuns]]:
    """Where the planes of each layer lie."""
    result = []
    for number, pieces in enumerate(planes.layout.pieces):
        start, records = planes.layout.layer_bounds[number][0], []
        for piece, tensor in zip(pieces, planes.tensors[number], strict=True):
            row, tokens = planes.layout.layers[number][piece.plane].row_bytes, planes.block_tokens
            block_stride, token_stride = (step * tensor.element_size() for step in tensor.stride()[:2])
            run, count = (row * tokens, 1) if tokens == 1 or token_stride == row else (row, tokens)
            begin = piece.offset - start
            where = (begin, begin + piece.nbytes)
            records.append(PlaneRuns(tensor.data_ptr(), block_stride, token_stride, run, count, *where))
        result.append(records)
    return result


class PageKernels:
    """The kernels for one set of planes. Raises `KernelUnavailableError` when they cannot be built.

    `like` are kernels for other planes of the same GPU, whose compiled code is used again.

    Calls that hold host indices go through `PagedPlanes.block_table` first; indices in GPU memory are checked by the
    kernels themselves.
    """

    def __init__(self, planes: PagedPlanes, like: PageKernels | None = None) -> None:
        self.planes = planes
        self.device = planes.device
        self.layout = planes.layout
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.has_sums = all(end - start >= SHORTEST for start, end in self.layout.layer_bounds)
        self.can_look = can_look(self.layout)
        self.runs = plane_runs(planes)
        self._table = self._upload()
        self._vector = self._widest()
        self._skipped = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._built: dict[int, dict[str, jit.Kernel]] = {} if like is None else like._built
        self._fixed: dict[range, tuple[int, ...]] = {}  # what the arguments say about layers
        self.build(self._vector)

    def loaded(self) -> tuple[int, int, int, int, int]:
        """CUfunctions: gather, scatter, and both with checksums; and the address of their table."""
        kernels = self.build(self._vector)
        gather, scatter, gather_sums, scatter_sums = (kernels[name].pointer for name in FORMS)
        return gather, scatter, gather_sums, scatter_sums, self._table.data_ptr()

    def about(self) -> tuple[int, int, bool, bool]:
        """Bytes of the widest access, processors of the GPU, whether there are checksums, and from the planes alone."""
        return self._vector, self.processors, self.has_sums, self.can_look

    def zero_copy_blocks(self, layers: range) -> int:
        """Blocks of `ZERO_COPY_THREADS` threads that keep the bus busy: more for layers that leave warps half empty."""
        bounds = self.layout.layer_bounds[layers.start : layers.stop]
        filled = sum(min(end - start, 2 * TILE) for start, end in bounds) / (2 * TILE * max(1, len(bounds)))
        return min(4 * ZERO_COPY_BLOCKS, math.ceil(ZERO_COPY_BLOCKS / max(filled, 0.25)))

    @property
    def most_blocks(self) -> int:
        """Thread blocks that a launch without checksums has at most, where no number is given."""
        return self.processors * (_SM_THREADS // STAGED_THREADS)

    def build(self, vector: int) -> dict[str, jit.Kernel]:
        """The kernels for accesses of `vector` bytes; compiled, loaded and run once on nothing."""
        if vector not in self._built:
            kernels = jit.build(SOURCE, FORMS, self.device, VECTOR=vector)
            stream = torch.cuda.current_stream(self.device)
            with torch.cuda.device(self.device):
                for name, kernel in kernels.items():  # the driver loads a kernel at its first launch, and may block
                    arguments = self._arguments(range(0), ExtentArray(0, 0, 0), Indices(0, 0, 0, False), 1)
                    kernel.launch(1, 32, [*arguments, *((1, 0) if name.endswith("sums") else ())], stream)
            self._built[vector] = kernels
        return self._built[vector]

    def scatter(
        self,
        extents: ExtentArray,
        indices: Indices,
        layers: range,
        stream: torch.cuda.Stream,
        digests: int | None = None,
        blocks: int | None = None,
        threads: int = STAGED_THREADS,
    ) -> None:
        """Copy `layers` of pages from extents into the planes.

        `digests`: where the checksums of these layers go, an address of uint64 (pages, layers) in GPU or page-locked
        memory; None takes none. `blocks`: the most thread blocks to use, each of `threads` threads; by default what
        all SMs hold at once. Where checksums are taken, blocks are counted as of 1,024 threads, and twice as many.
        """
        self._move("scatter", extents, indices, layers, stream, digests, blocks, threads)

    def gather(
        self,
        extents: ExtentArray,
        indices: Indices,
        layers: range,
        stream: torch.cuda.Stream,
        digests: int | None = None,
        blocks: int | None = None,
        threads: int = STAGED_THREADS,
    ) -> None:
        """Copy `layers` of pages from the planes into extents: the inverse of `scatter`, with the same arguments."""
        self._move("gather", extents, indices, layers, stream, digests, blocks, threads)

    def look(self, indices: Indices, layers: range, stream: torch.cuda.Stream, digests: int) -> None:
        """Take the checksums of `layers` of pages as they are in the planes; only where `can_look`."""
        if not self.can_look:
            raise UnsupportedRequestError("a layer whose bytes are no multiple of 16 is summed when it is gathered")
        nowhere = ExtentArray(0, 0, indices.pages)
        self._move("gather", nowhere, indices, layers, stream, digests, None, STAGED_THREADS)

    def tiles(self, layers: range) -> int:
        """Tiles of the largest of these layers."""
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
        digests: int | None,
        blocks: int | None,
        threads: int,
    ) -> None:
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

    def _upload(self) -> torch.Tensor:
        """The layers, then the planes, as the kernels read them."""
        layers: list[int] = []
        planes: list[int] = []
        for records, (start, end) in zip(self.runs, self.layout.layer_bounds, strict=True):
            layers += [len(planes) // 6, len(records), start, end - start]
            for r in records:
                planes += [r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.end]
        return torch.tensor(layers + planes, dtype=torch.int64, device=self.device)

    def _widest(self) -> int:
        """The widest access that the planes allow, up to 16 bytes."""
        steps = [start for start, _ in self.layout.layer_bounds]
        for layer, records in zip(self.layout.layers, self.runs, strict=True):
            steps += [plane.row_bytes for plane in layer]
            for r in records:
                steps += [r.base, r.block_stride, *([r.run_stride] if r.runs_per_block > 1 else [])]
        return math.gcd(16, *steps)
