"""Gather, scatter and checksums of fragmented pages as CUDA kernels (csrc/pages.cu).

They move bytes between paged planes and extents; the extents lie in GPU memory or in page-locked host memory, which the
kernels then read and write over the bus. All work is queued on the given stream, without synchronisation. `NativeGpu`
queues copies by csrc/host/gpu, and knows points in the queues of its streams.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from gdscache.arrays import Int64Array, integers
from gdscache.cuda.streams import Event, events_of
from gdscache.errors import DeviceError
from gdscache.kernels import jit
from gdscache.native import Gpu
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes

if TYPE_CHECKING:
    import numpy.typing as npt

    from gdscache.cuda.driver import Driver
    from gdscache.extents import Extents
    from gdscache.kernels.packed import PackedKernels

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

SHORTEST = 241  # bytes: XXH3 has other forms for shorter inputs, which the host takes


class PlaneRuns(NamedTuple):
    """The place of a plane's pages, in bytes. A block's tokens are one run, or one run a token if they are apart.
    `start`, `end`: of the plane in its layer of an extent."""

    base: int
    block_stride: int
    run_stride: int
    run_bytes: int
    runs_per_block: int
    start: int
    end: int


def can_look(layout: PageLayout) -> bool:
    """Whether a kernel can take the checksums of pages from the planes alone."""
    return all(end - start >= SHORTEST and (end - start) % 16 == 0 for start, end in layout.layer_bounds)


def plane_runs(planes: PagedPlanes) -> list[list[PlaneRuns]]:
    result = []
    for number, pieces in enumerate(planes.layout.pieces):
        start, records = planes.layout.layer_bounds[number][0], []
        for piece in pieces:
            base, block_stride, stride, run, count = planes.memory(piece)
            run, count = (run * count, 1) if count == 1 or stride == run else (run, count)
            begin = piece.offset - start
            records.append(PlaneRuns(base, block_stride, stride, run, count, begin, begin + piece.nbytes))
        result.append(records)
    return result


def uploaded(planes: PagedPlanes, runs: list[list[PlaneRuns]]) -> torch.Tensor:
    """The layers, then their planes, as the kernels read them: int64, in GPU memory."""
    layers: list[int] = []
    rows: list[int] = []
    for records, (start, end) in zip(runs, planes.layout.layer_bounds, strict=True):
        layers += [len(rows) // 6, len(records), start, end - start]
        for r in records:
            rows += [r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.end]
    return torch.tensor(layers + rows, dtype=torch.int64, device=planes.device)


class PageKernels:
    """The kernels for one set of planes, launched by the native library. Raises `KernelUnavailableError` if they cannot
    be built.

    `like`: kernels for other planes of the same GPU, whose compiled code is reused.
    """

    def __init__(self, planes: PagedPlanes, like: PageKernels | None = None) -> None:
        self.planes = planes
        self.device = planes.device
        self.layout = planes.layout
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.has_sums = all(end - start >= SHORTEST for start, end in self.layout.layer_bounds)
        self.can_look = can_look(self.layout)
        self.runs = plane_runs(planes)
        self._table = uploaded(planes, self.runs)
        self._vector = self._widest()
        self._built: dict[int, dict[str, jit.Kernel]] = {} if like is None else like._built
        self.build(self._vector)

    def spec(self) -> dict[str, Any]:
        """Their part of a `GpuSpec`."""
        functions = {name: kernel.pointer for name, kernel in self.build(self._vector).items()}
        about = {"vector": self._vector, "processors": self.processors, "sums": self.has_sums, "looks": self.can_look}
        return functions | about | {"table": self._table.data_ptr()}

    def build(self, vector: int) -> dict[str, jit.Kernel]:
        """The kernels for accesses of `vector` bytes; compiled, loaded and run once without pages."""
        if vector not in self._built:
            kernels = jit.build(SOURCE, FORMS, self.device, VECTOR=vector)
            stream = torch.cuda.current_stream(self.device)
            with torch.cuda.device(self.device):
                for name, kernel in kernels.items():  # the driver loads a kernel at its first launch, and may block
                    kernel.launch(1, 32, [*self._nothing(), *((1, 0) if name.endswith("sums") else ())], stream)
            self._built[vector] = kernels
        return self._built[vector]

    def _nothing(self) -> list[int | bytes]:
        """The arguments of a launch without pages. csrc/host/gpu/gpu_transfer.h has those of the others."""
        table = self._table.data_ptr()
        memory = [table, table + self.layout.n_layers * 32, 0, 0, 0, 0, 0, 0, self.planes.blocks]
        return [*memory, 0, 0, 0, 0, 1, self.planes.blocks_per_page, 0, 0, b""]

    def _widest(self) -> int:
        steps = [start for start, _ in self.layout.layer_bounds]
        for layer, records in zip(self.layout.layers, self.runs, strict=True):
            steps += [plane.row_bytes for plane in layer]
            for r in records:
                steps += [r.base, r.block_stride, *([r.run_stride] if r.runs_per_block > 1 else [])]
        return math.gcd(16, *steps)


CopyRoute = Literal["staged", "zero_copy", "copy_engine", "device"]
ROUTES: tuple[CopyRoute, ...] = ("staged", "zero_copy", "copy_engine", "device")


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSizes:
    """In bytes. `moved`: of one kernel over the bus. `looked`: of a kernel that takes checksums behind copies;
    `looked_last`: of the last one of a load. `unbroken`: of copies before others' copies the same way may pass."""

    moved: int = 512 << 20
    looked: int = 256 << 20
    looked_last: int = 32 << 20
    unbroken: int = 32 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuSpec(ChunkSizes):
    """The copies on one GPU. `bounds`: int64 (layers + 1), in an extent; `first_plane`: int32 (layers + 1); `planes`:
    int64 (planes, 7): base, block stride, run stride, bytes of a run, runs of a block, start and end in the layer.
    `context`: the device's CUcontext. The kernels are CUfunctions, or 0; `table` is theirs, in GPU memory. `vector`:
    bytes of their widest access. `sums`, `looks`: whether they take checksums, and from the planes alone."""

    context: int
    bounds: Int64Array
    first_plane: npt.NDArray[np.int32]
    planes: Int64Array
    blocks: int
    page_blocks: int
    extent_bytes: int
    staging: int
    gather: int = 0
    scatter: int = 0
    gather_sums: int = 0
    scatter_sums: int = 0
    table: int = 0
    vector: int = 0
    processors: int = 0
    sums: bool = False
    looks: bool = False
    packed: bool = False


class StreamPoint:
    """A point in the queue of a direction's streams, with the methods of a `torch.cuda.Event`."""

    __slots__ = ("_gpu", "_number")

    def __init__(self, gpu: NativeGpu, number: int) -> None:
        self._gpu = gpu
        self._number = number

    @property
    def device(self) -> torch.device:
        return self._gpu.device

    def query(self) -> bool:
        """Whether the GPU has passed it."""
        return self._gpu.reached(self._number)

    def synchronize(self) -> None:
        """Wait in the calling thread until the GPU has passed it."""
        self._gpu.wait(self._number)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Order later work of `stream` (by default the current one) after it."""
        if self._gpu.past(self._number):
            return
        stream = torch.cuda.current_stream(self.device) if stream is None else stream
        self._gpu.follow(stream.cuda_stream, self._number)


class NativeGpu(Gpu):
    """Copies of one pool's pages. Thread-safe. After `close` every point counts as passed.

    `kernels`: None to use the copy engine alone. `staging` bytes of GPU memory are the ring. Raises `DeviceError` if
    the driver refuses.
    """

    def __init__(
        self,
        planes: PagedPlanes,
        driver: Driver,
        runs: Sequence[Sequence[PlaneRuns]],
        kernels: PageKernels | PackedKernels | None,
        staging: int,
        sizes: ChunkSizes | None = None,
    ) -> None:
        self.device = planes.device
        self._kernels = kernels  # keeps the modules and their table
        layout = planes.layout
        spec = GpuSpec(
            **dataclasses.asdict(sizes or ChunkSizes()),
            context=driver.context,
            bounds=integers([*(start for start, _ in layout.layer_bounds), layout.page_bytes]),
            first_plane=np.cumsum([0, *(len(layer) for layer in runs)]).astype(np.int32),
            planes=integers([row for layer in runs for row in layer]),
            blocks=planes.blocks,
            page_blocks=planes.blocks_per_page,
            extent_bytes=layout.extent_bytes,
            staging=staging,
            packed=layout.packed,
            **({} if kernels is None else kernels.spec()),
        )
        try:
            super().__init__(driver.library, spec)
        except DeviceError as error:
            raise DeviceError(f"copies of {self.device}: {error.message}", error.hint) from None

    def copy(
        self,
        extents: Extents,
        slots: Int64Array,
        blocks: Int64Array,
        layers: range,
        after: Sequence[Event],
        route: CopyRoute,
        *,
        load: bool,
        sums: bool = False,
    ) -> tuple[StreamPoint, int]:
        """Queue copies outside of any move. Returns the point behind them, and a number for `finish`.

        `slots`: int64 (pages,); `blocks`: int64 (pages, blocks a page). With `sums`, `finish` has to be called.
        """
        rows = extents.rows
        point, _, ticket = self.queue(
            *(rows.data_ptr(), rows.stride(0), extents.slots, extents.fence_slots, rows.is_cuda, extents.pinned),
            *(integers(slots), integers(blocks), np.array(events_of(after), np.uint64), layers),
            *(ROUTES.index(route) % 3, load, sums),
        )
        return self.point(point), ticket

    def point(self, number: int) -> StreamPoint:
        return StreamPoint(self, number)
