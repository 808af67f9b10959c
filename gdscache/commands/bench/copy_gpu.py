"""CUDA for `gdscache bench copy`: streams, timing events, plain copies, and a model's work beside a copy."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional

from gdscache.arrays import Int64Array
from gdscache.commands.bench.figures import compared, in_turns, rate, series
from gdscache.config import GpuConfig
from gdscache.cuda.host_memory import PageLocking
from gdscache.cuda.streams import Event, record_on
from gdscache.errors import CapacityError, DeviceError, IOFailedError
from gdscache.extents import Extents
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

COPY_TARGET = 0.97  # of a copy beside a model's work
WORK_TARGET = 1.02
LEAD = 3  # pieces of work before the copy begins
LEAST = 8  # least pieces during a copy
HEADS, HEAD_DIM = 32, 128

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


class Timing(NamedTuple):
    """A run of a way. `seconds`: host time, from before the call to the end of the last copy. `first` and `end` mark
    the return of the first call and the end."""

    seconds: float
    first: Mark
    end: Mark


class Gpu:
    """A CUDA device and the benchmark's streams, all non-blocking and of normal priority."""

    pin: PageLocking = "on"

    def __init__(self) -> None:
        """Raises `DeviceError` without a CUDA device."""
        if not torch.cuda.is_available():
            raise DeviceError("bench copy needs a CUDA GPU", "run it where torch.cuda.is_available() is true")
        self.device = torch.device("cuda", torch.cuda.current_device())
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


# -- beside a model's work ---------------------------------------------------------------------------------------------


class Neighbour(NamedTuple):
    """A model's work. `queue` queues one piece of it on the current stream."""

    name: str
    size: int
    queue: Callable[[], object]


def matrix_product(gpu: Gpu, edge: int) -> Neighbour:
    """A bfloat16 product of two matrices of `edge` x `edge`."""
    a, b, out = (torch.randn(edge, edge, dtype=torch.bfloat16, device=gpu.device) for _ in range(3))
    return Neighbour("matrix product", edge, lambda: torch.mm(a, b, out=out))


def attention(gpu: Gpu, tokens: int) -> Neighbour:
    """Causal bfloat16 self-attention of `tokens` tokens: 32 heads of 128."""
    q, k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=gpu.device) for _ in range(3))
    return Neighbour(
        "attention", tokens, lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    )  # shape (1, 32, tokens, 128)


class Together(NamedTuple):
    """A run of a copy beside work: the copy, and the mean seconds of a piece of work beside it."""

    copy: Timing
    work_seconds: float
    pieces: int


class Beside:
    """A copy beside a model's work: the cost of each to the other, against the cost of a plain copy in its place.

    The work is queued again and again on its own stream of normal priority. The copy starts after the work's start and
    ends before its end. The copy's time is the host's, from before the call to the last byte. The work's time is that
    of the pieces that run wholly between the return of the copy's first call and the copy's end. `repeat`: the repeats
    of a copy that make it last long enough.
    """

    def __init__(self, gpu: Gpu, neighbour: Neighbour, copy: Callable[[int], Way], least_repeat: int) -> None:
        self.gpu = gpu
        self.neighbour = neighbour
        self.alone_seconds = self._alone()
        gpu.idle()
        once = min(timed(gpu, copy(1)).seconds for _ in range(3))
        self.repeat = max(least_repeat, math.ceil(LEAST * self.alone_seconds / once))
        self._count = LEAD + 2 + math.ceil(2 * self.repeat * once / self.alone_seconds)

    def _alone(self) -> float:
        """Median seconds of a piece that runs alone."""
        self.gpu.idle()
        for _ in range(2):  # the first run includes one-time setup
            marks = self.gpu.busy(self.neighbour.queue, 8)
            self.gpu.wait(marks[-1])
        return statistics.median(self.gpu.seconds(a, b) for a, b in itertools.pairwise(marks))

    def run(self, way: Way) -> Together:
        """Run a way beside the work. Raises `IOFailedError` if the work cannot be made to last."""
        for _ in range(4):
            marks = self.gpu.busy(self.neighbour.queue, self._count)
            self.gpu.wait(marks[LEAD])
            copy = timed(self.gpu, way)
            self.gpu.wait(marks[-1])
            times = [self.gpu.seconds(marks[0], mark) for mark in marks]
            first, end = (self.gpu.seconds(marks[0], mark) for mark in (copy.first, copy.end))
            pieces = [b - a for a, b in itertools.pairwise(times) if a >= first and b <= end]
            if end <= times[-1] and pieces:
                return Together(copy, statistics.mean(pieces), len(pieces))
            self._count *= 2
        raise IOFailedError(
            f"{self.neighbour.name}: {len(pieces)} of {len(marks) - 1} ran beside a copy of {copy.seconds:.4f} s",
            "let nothing else use the GPU, or choose a larger --total",
        )

    def compare(
        self, ours: Way, other: Way, against: str, nbytes: int, pairs: int, **more: Any
    ) -> list[dict[str, Any]]:
        """Two ways in turns, of `nbytes` each: a row of the copies, and one of the work."""
        for way in (ours, other):
            self.run(way)
        both = in_turns({way: functools.partial(self.run, way) for way in (ours, other)}, pairs).values()
        rates = [series(rate(nbytes, run.copy.seconds) for run in runs) for runs in both]
        worked = [series(run.work_seconds for run in runs) for runs in both]
        name, more = self.neighbour.name, {"size": self.neighbour.size, "bytes": nbytes, **more}
        beside = min(run.pieces for runs in both for run in runs)
        work = {"alone_seconds": self.alone_seconds, "pieces_beside": beside, **more}
        copy = f"copy beside {name}"
        return [
            compared(copy, rates[0], against, rates[1], COPY_TARGET, pairs=True, **more),
            compared(f"{name} beside it", worked[0], against, worked[1], WORK_TARGET, unit="s", pairs=True, **work),
        ]
