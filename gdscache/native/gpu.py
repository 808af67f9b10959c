"""Copies between extents and the planes of a GPU by csrc/host (gpu.h), and the points in what its streams are given."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from gdscache.errors import DeviceError, NativeCallError
from gdscache.native.library import address, integers, library, struct

if TYPE_CHECKING:
    from gdscache.cuda.driver import Driver
    from gdscache.cuda.streams import Event
    from gdscache.extents.base import Extents
    from gdscache.kernels.cuda import PageKernels, PlaneRuns
    from gdscache.pages.checksum import Checksums
    from gdscache.pages.planes import PagedPlanes

CopyRoute = Literal["staged", "zero_copy", "copy_engine", "device"]
_SLICE_NS = 100_000_000
ROUTES: tuple[CopyRoute, ...] = ("staged", "zero_copy", "copy_engine", "device")

_Spec = struct(
    "_Spec",
    "context:Q bounds:Q first_plane:Q planes:Q gather:Q scatter:Q gather_sums:Q scatter_sums:Q table:Q blocks:q "
    "extent_bytes:q staging:q moved:q looked:q looked_last:q unbroken:q layers:i page_blocks:i vector:i processors:i "
    "sums:i looks:i",
)
_Copies = struct(
    "_Copies",
    "load:i route:i sums:i first:i last:i device:i pinned:i reserved:i address:Q stride:q origin:q extents:q fence:q "
    "pages:q slots:Q blocks:Q after:Q n_after:q",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSizes:
    """In bytes: what one kernel moves over the bus; what one looks at behind copies, and behind a load's last ones.

    `unbroken`: what goes before others' copies the same way may pass.
    """

    moved: int = 512 << 20
    looked: int = 256 << 20
    looked_last: int = 32 << 20
    unbroken: int = 32 << 20


class StreamPoint:
    """A point in what a direction's streams were given to do. As a `torch.cuda.Event`, for what waits for it."""

    __slots__ = ("_gpu", "_number")

    def __init__(self, gpu: NativeGpu, number: int) -> None:
        self._gpu = gpu
        self._number = number

    @property
    def device(self) -> torch.device:
        return self._gpu.device

    def query(self) -> bool:
        """Whether the GPU is past it."""
        return self._gpu.reached(self._number)

    def synchronize(self) -> None:
        """The calling thread waits until the GPU is past it."""
        self._gpu.wait(self._number)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """What `stream` (by default the current one) is given from now on comes after it."""
        stream = torch.cuda.current_stream(self.device) if stream is None else stream
        self._gpu.follow(stream.cuda_stream, self._number)


class NativeGpu:
    """Copies of one pool's pages. Thread-safe; `queue` and `finish` not beside `close`.

    `kernels`: None where the copy engine has to do. `staging` bytes of GPU memory are the ring.
    Raises `DeviceError` where the driver refuses.
    """

    def __init__(
        self,
        planes: PagedPlanes,
        driver: Driver,
        runs: Sequence[Sequence[PlaneRuns]],
        kernels: PageKernels | None,
        staging: int,
        sizes: ChunkSizes | None = None,
    ) -> None:
        self.device = planes.device
        self._planes = planes
        self._library = library()
        self._kernels = kernels  # keeps the modules and their table
        self._lock = threading.RLock()  # by itself where an interrupt may come: a condition's `with` is Python
        self._changed = threading.Condition(self._lock)
        self._asking = 0  # threads
        layout = planes.layout
        counts = [0, *np.cumsum([len(layer) for layer in runs]).tolist()]
        bounds = integers([*(start for start, _ in layout.layer_bounds), layout.page_bytes])
        first = np.array(counts, np.int32)
        rows = integers(
            [
                (r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.start, r.end)
                for layer in runs
                for r in layer
            ]
        )
        loaded = (0, 0, 0, 0, 0) if kernels is None else kernels.loaded()
        about = (0, 0, 0, 0) if kernels is None else kernels.about()
        spec = _Spec(
            *(driver.context, address(bounds), address(first), address(rows), *loaded),
            *(planes.blocks, layout.extent_bytes, staging, *dataclasses.astuple(sizes or ChunkSizes())),
            *(layout.n_layers, planes.blocks_per_page, *about),
        )
        handle = ctypes.c_void_p()
        self._checked(
            self._library.gpu_open(driver.library.encode(), ctypes.addressof(spec), ctypes.addressof(handle)),
            "copies of a GPU",
        )
        self._handle: int | None = handle.value

    @property
    def handle(self) -> int:
        """What the library knows it by. Raises `NativeCallError` behind `close`."""
        if self._handle is None:
            raise NativeCallError("the GPU's copies were closed", "use them before close")
        return self._handle

    @property
    def api(self) -> str:
        """How lists of copies are handed to the driver."""
        return str(self._library.gpu_api(self.handle).decode())

    def queue(
        self,
        extents: Extents,
        slots: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        blocks: torch.Tensor,
        layers: range,
        after: Sequence[int],
        route: CopyRoute,
        *,
        load: bool,
        sums: bool,
    ) -> tuple[StreamPoint, StreamPoint, int]:
        """Queue copies: points behind them and behind the last look at their source, and a number for `finish`.

        `blocks`: host int64 (pages, blocks a page); `after`: CUevents. With `sums`, `finish` has to be called.
        """
        rows, places, there = extents.rows, integers(slots), integers(blocks.numpy())
        events = np.array(after, np.uint64)
        copies = _Copies(
            *(load, ROUTES.index(route) % 3, sums, layers.start, layers.stop, rows.is_cuda, extents.pinned, 0),
            *(rows.data_ptr(), rows.stride(0), 0, extents.slots, extents.fence_slots, len(places)),
            *(address(places) if len(places) else 0, address(there) if len(places) else 0),
            *(address(events) if len(events) else 0, len(events)),
        )
        points, ticket = (ctypes.c_int64 * 2)(), ctypes.c_int64()
        self._checked(
            self._library.gpu_queue(
                self.handle, ctypes.addressof(copies), ctypes.addressof(points), ctypes.addressof(ticket)
            ),
            "copies",
        )
        return self.point(points[0]), self.point(points[1]), ticket.value

    def finish(self, ticket: int, pages: int, layers: int) -> Checksums:
        """Wait for copies with checksums: uint64 (pages, layers). To be asked once."""
        sums = np.empty((pages, layers), np.uint64)
        self._checked(self._library.gpu_finish(self.handle, ticket, address(sums) if sums.size else None), "copies")
        return sums

    def last(self, *, loads: bool) -> StreamPoint:
        """The point behind all loads, or stores, that were queued so far."""
        return self.point(self._library.gpu_last(self.handle, loads))

    def point(self, number: int) -> StreamPoint:
        """What a number of the library's stands for."""
        return StreamPoint(self, number)

    def reached(self, point: int) -> bool:
        with self._open() as handle:
            return handle is None or self._checked(self._library.gpu_reached(handle, point), "copies") == 1

    def wait(self, point: int) -> None:
        """Signals are heard every 100 ms."""
        over = False
        while not over:
            with self._open() as handle:
                until = time.monotonic_ns() + _SLICE_NS
                over = handle is None or self._checked(self._library.gpu_await(handle, point, until), "copies") == 1

    def follow(self, stream: int, point: int) -> None:
        with self._open() as handle:
            if handle is not None:
                self._checked(self._library.gpu_follow(handle, stream, point), "a stream")

    @contextlib.contextmanager
    def _open(self) -> Iterator[int | None]:
        """What the library knows it by, for as long; None behind `close`, when everything is over."""
        with self._lock:
            handle = self._handle
            self._asking += handle is not None
        try:
            yield handle
        finally:
            if handle is not None:
                with self._lock:
                    self._asking -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Wait for what is queued and give everything back; again is fine. Points may be asked for meanwhile, and
        later: the GPU is past them."""
        with self._changed:
            handle, self._handle = self._handle, None
            self._changed.wait_for(lambda: not self._asking)
        if handle is not None:
            self._library.gpu_close(handle)

    def _checked(self, answer: int, what: str) -> int:
        if answer >= 0:
            return answer
        why = self._library.gpu_why().decode()
        if answer in (-errno.EIO, -errno.ENOMEM):
            raise DeviceError(f"{what} on {self.device}: {why}", "see what the CUDA driver says")
        raise NativeCallError(f"{what}: {why}", "the arguments make no sense together", -answer)


def events_of(after: Sequence[Event]) -> list[int]:
    """The CUevents of some events. One that was never recorded has none, and has happened."""
    found = []
    for event in after:
        if event is not None:
            assert isinstance(event, torch.cuda.Event), "copies follow events of torch's"
            found.append(int(event.cuda_event))
    return [event for event in found if event]
