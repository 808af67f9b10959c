"""CUDA for `gdscache bench copy`: streams, timing events, plain copies, a neighbour's work."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from gdscache.arrays import Int64Array
from gdscache.config import GpuConfig
from gdscache.cuda.host_memory import PageLocking
from gdscache.cuda.streams import Event, record_on
from gdscache.errors import CapacityError, DeviceError
from gdscache.extents.base import Extents
from gdscache.kernels.choice import Direction
from gdscache.kernels.copies import GpuCopies
from gdscache.kernels.cuda import PageKernels
from gdscache.kernels.packed import PackedKernels
from gdscache.pages.planes import PagedPlanes
from gdscache.sizes import about

Mark = Any
"""A timing event of the GPU."""

T = TypeVar("T")

STAGING = int(GpuConfig.model_fields["staging"].default)


def require_gpu() -> torch.device:
    """The current CUDA device. Raises `DeviceError` without one."""
    if not torch.cuda.is_available():
        raise DeviceError("bench copy needs a CUDA GPU", "run it where torch.cuda.is_available() is true")
    return torch.device("cuda", torch.cuda.current_device())


Moved = tuple[Event, Callable[[], object]]
"""Our queued copies: the event after them, and a function that then returns their checksums."""


@dataclasses.dataclass(frozen=True)
class Queued:
    """A running copy: the events after it, a mark after its first call, and the work left at its end."""

    events: Sequence[Event]
    first: Mark
    finish: Callable[[], object] = lambda: None


Way = Callable[[Sequence[Event]], Queued]
"""Queues copies that wait for the given events."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """A run of a way. `seconds`: host time, from before the call to the end of the last copy. `first` and `end` mark
    the return of the first call and the end."""

    seconds: float
    first: Mark
    end: Mark


class Gpu:
    """A CUDA device and the benchmark's streams, all non-blocking and of normal priority."""

    pin: PageLocking = "on"

    def __init__(self) -> None:
        self.device = require_gpu()
        self._marks, self._work, up, down = (torch.cuda.Stream(self.device) for _ in range(4))  # type: ignore[no-untyped-call]
        self._copies = {"load": up, "store": down}
        self._threads = ThreadPoolExecutor(2, "gdscache-bench-copy")

    # -- an engine's copies --------------------------------------------------------------------------------------------

    def open_copies(self, planes: PagedPlanes) -> GpuCopies:
        """An engine's page copier."""
        if planes.layout.packed:
            return GpuCopies(planes, STAGING, "staged", "staged", PackedKernels(planes))
        return GpuCopies(planes, STAGING, "auto", "auto", PageKernels(planes))

    def move(
        self,
        copies: GpuCopies,
        direction: Direction,
        extents: Extents,
        slots: Int64Array,
        blocks: Int64Array,
        layers: range,
        after: Sequence[Event],
        *,
        sums: bool,
    ) -> Moved:
        """Queue copies of some layers of pages, in slots int64 (pages,) and blocks int64 (pages, 1)."""
        route, load = copies.route(direction, layers, sums=sums), direction == "load"
        point, ticket = copies.gpu.copy(extents, slots, blocks, layers, after, route, load=load, sums=sums)
        return point, functools.partial(copies.gpu.finish, ticket)

    def describe(self, copies: GpuCopies) -> dict[str, Any]:
        """The driver, the copy engine's interface, the calibration."""
        return {"driver": copies.driver.version, "staging_bytes": STAGING, **copies.describe()}

    def together(self, ways: Sequence[Callable[[], T]]) -> list[T]:
        """Call all functions, several of them in parallel. Returns their results."""
        if len(ways) == 1:
            return [ways[0]()]
        return list(self._threads.map(self._called, ways))

    def _called(self, way: Callable[[], T]) -> T:
        with torch.cuda.device(self.device):
            return way()

    # -- time ----------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.perf_counter()

    def mark(self, after: Sequence[Event] = ()) -> Mark:
        """A mark after the events `after`, or of now."""
        for event in after:
            if event is not None:
                event.wait(self._marks)
        return _timed(self._marks)

    def wait(self, mark: Mark) -> None:
        """Block the thread until the GPU has passed a mark."""
        mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        """GPU time between two passed marks."""
        return float(start.elapsed_time(end)) / 1e3

    def idle(self) -> None:
        torch.cuda.synchronize(self.device)

    # -- references ----------------------------------------------------------------------------------------------------

    def copy(self, direction: str, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Event]) -> Event:
        """One cudaMemcpyAsync between page-locked and GPU memory, uint8 of shape (n,), on the direction's stream."""
        stream = self._copies[direction]
        for event in after:
            if event is not None:
                event.wait(stream)
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
        return record_on(stream)

    def busy(self, queue: Callable[[], object], count: int) -> list[Mark]:
        """Queue work `count` times on its own stream. Returns a mark before the first and one after each."""
        with torch.cuda.stream(self._work):
            marks = [_timed(self._work)]
            for _ in range(count):
                queue()
                marks.append(_timed(self._work))
        return marks

    # -- memory --------------------------------------------------------------------------------------------------------

    def require(self, nbytes: int) -> None:
        """Raises `CapacityError` if the GPU has fewer free bytes."""
        free = int(torch.cuda.mem_get_info(self.device)[0])
        if free < nbytes:
            raise CapacityError(f"bench copy needs {about(nbytes)} of GPU memory, {about(free)} are free", "free some")

    def release(self) -> None:
        """Free torch's unused GPU memory."""
        torch.cuda.empty_cache()


def timed(gpu: Gpu, way: Way) -> Timing:
    """Run a way once, on an idle device or beside a neighbour's work."""
    begin = gpu.mark()
    start = gpu.now()
    queued = way((begin,))
    end = gpu.mark(queued.events)
    gpu.wait(end)
    queued.finish()
    return Timing(gpu.now() - start, queued.first, end)


def _timed(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
