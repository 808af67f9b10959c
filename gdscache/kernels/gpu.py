"""Copies between extents and the planes of a GPU by csrc/host/gpu, and points in the queues of its streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from gdscache.arrays import Int64Array, integers
from gdscache.cuda.streams import events_of
from gdscache.errors import DeviceError
from gdscache.native import Gpu

if TYPE_CHECKING:
    import numpy.typing as npt

    from gdscache.cuda.driver import Driver
    from gdscache.cuda.streams import Event
    from gdscache.extents import Extents
    from gdscache.kernels.cuda import PageKernels, PlaneRuns
    from gdscache.kernels.packed import PackedKernels
    from gdscache.pages.planes import PagedPlanes

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
        rows = [
            (r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.start, r.end)
            for layer in runs
            for r in layer
        ]
        spec = GpuSpec(
            **dataclasses.asdict(sizes or ChunkSizes()),
            context=driver.context,
            bounds=integers([*(start for start, _ in layout.layer_bounds), layout.page_bytes]),
            first_plane=np.cumsum([0, *(len(layer) for layer in runs)]).astype(np.int32),
            planes=integers(rows),
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
