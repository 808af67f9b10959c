"""What `gdscache bench copy` runs on a GPU: streams and timing events, pools of one layout, the timed copies of a cell
between them (an engine's, and plain ones of equal size), and a model's work beside a copy."""

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

import numpy as np
import torch
from torch.nn import functional

from gdscache.arrays import Int64Array
from gdscache.commands.bench.figures import compared, in_turns, rate, series
from gdscache.config import GpuConfig
from gdscache.cuda.host_memory import MAX_REGISTRATION, PageLocking
from gdscache.cuda.streams import Event, record_on
from gdscache.errors import CapacityError, DeviceError, IOFailedError
from gdscache.extents import HostExtents
from gdscache.kernels.choice import Direction
from gdscache.kernels.copies import GpuCopies
from gdscache.kernels.cuda import PageKernels
from gdscache.kernels.packed import PackedKernels
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from gdscache.sizes import GIB, MIB, about

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
        entered = torch.cuda.set_device, (self.device,)
        self._threads = ThreadPoolExecutor(2, "gdscache-bench-copy", *entered)

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
        extents: HostExtents,
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

    def together(self, ways: Sequence[Callable[[], T]]) -> list[T]:
        """Call all functions, several of them in parallel. Returns their results."""
        return [way() for way in ways] if len(ways) == 1 else [*self._threads.map(lambda way: way(), ways)]

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


# -- cells: arithmetic only --------------------------------------------------------------------------------------------

PAGE_TOKENS = (64, 1, 256, 16)  # in the order of measuring
BOTH: tuple[Direction, ...] = ("load", "store")
DIRECTIONS = (*BOTH, "both")
PARTS = ("one", "group", "all")  # layers a call
GROUP_BYTES = 1 * MIB  # of a page's layer group, or all of a smaller page

BULK_TARGET = 0.97  # calls that move 1 MiB a page or more
LAYER_TARGET = 0.92  # one layer of GQA pages of 64 tokens
TOKEN_TARGET = 0.92  # pages of one token
BOTH_TARGET = 0.93  # load and store together, 1 MiB a page or more
PACKED_TARGETS = {"load": 1.28, "store": 1.20}  # of packed pages; bytes as in the planes


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A model's planes, with layers for at least 1 MiB in a page of 64 tokens."""

    name: str
    planes: tuple[Plane, ...]
    n_layers: int
    packed: bool = False

    def layout(self, page_tokens: int) -> PageLayout:
        return PageLayout.uniform(self.planes, self.n_layers, page_tokens, packed=self.packed)

    def layers(self, page_tokens: int, part: str) -> int:
        """Layers of a call: one layer, a group of at least 1 MiB a page (or all, if these are smaller), or all."""
        if part != "group":
            return 1 if part == "one" else self.n_layers
        ends = (end for _, end in self.layout(page_tokens).layer_bounds)
        return next((number for number, end in enumerate(ends, start=1) if end >= GROUP_BYTES), self.n_layers)


GQA = Geometry("gqa", (Plane("k", (8, 128), "bfloat16"), Plane("v", (8, 128), "bfloat16")), 8)
MLA = Geometry("mla", (Plane("latent", (576,), "bfloat16"),), 16)
MLA_FP8 = Geometry("mla_fp8", (Plane("latent", (656,), "uint8"),), 32)
GEOMETRIES = (GQA, MLA, MLA_FP8)
PACKED = Geometry("gqa packed", GQA.planes, GQA.n_layers, packed=True)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measurement. `parts` has several names if they mean the same layers."""

    geometry: Geometry
    page_tokens: int
    parts: tuple[str, ...]
    direction: str

    @property
    def layers(self) -> int:
        """Layers of one call."""
        return self.geometry.layers(self.page_tokens, self.parts[0])

    @property
    def span_bytes(self) -> int:
        """Bytes of a page in one call, as in the planes; contiguous in the extent, but for packed pages."""
        return self.page_tokens * self.layers * sum(plane.row_bytes for plane in self.geometry.planes)

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(d for d in BOTH if self.direction in (d, "both"))

    @property
    def target(self) -> float | None:
        """The least ratio to cudaMemcpyAsync, if the cell has a target."""
        if self.geometry.packed:
            return PACKED_TARGETS.get(self.direction)
        if self.span_bytes >= GROUP_BYTES:
            return BOTH_TARGET if self.direction == "both" else BULK_TARGET
        if self.direction == "both":
            return None
        if self.page_tokens == 1 and "all" in self.parts and self.geometry in (GQA, MLA):
            return TOKEN_TARGET
        if self.page_tokens == 64 and "one" in self.parts and self.geometry == GQA:
            return LAYER_TARGET
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "geometry": self.geometry.name,
            "row_bytes": [plane.row_bytes for plane in self.geometry.planes],
            "page_tokens": self.page_tokens,
            "direction": self.direction,
            "parts": list(self.parts),
            "layers": self.layers,
            "span_bytes": self.span_bytes,
        }


def cells() -> list[Cell]:
    """Every page size, geometry, part and direction with a target, page size by page size; packed pages last."""
    found = []
    for page_tokens, geometry in itertools.product(PAGE_TOKENS, GEOMETRIES):
        same: dict[int, list[str]] = {}
        for part in PARTS:
            same.setdefault(geometry.layers(page_tokens, part), []).append(part)
        for parts, direction in itertools.product(same.values(), DIRECTIONS):
            found.append(Cell(geometry, page_tokens, tuple(parts), direction))
    found += [Cell(PACKED, PAGE_TOKENS[0], ("all",), direction) for direction in BOTH]
    return [cell for cell in found if cell.target is not None]


# -- copies ------------------------------------------------------------------------------------------------------------

SAMPLE = 4  # pages for the comparison of bytes
ASIDE = 1 * GIB  # of GPU memory, for the staging ring and a neighbour's work


class BenchPlanes:
    """Page-locked extents and planes for the same pages, four times `total` bytes each, filled with noise. Packed pages
    have four times `total` bytes in the planes, of normal values, and extents once `pack` has been called.

    Loads use one half of the slots and of the blocks, stores the other, both in random order. Plain copies run between
    the same page-locked memory (stores: its second half) and `2 * total` bytes of GPU memory. Raises `CapacityError` if
    `total` is below one page, or four times `total` exceeds one registration.
    """

    def __init__(self, gpu: Gpu, layout: PageLayout, total: int) -> None:
        if not layout.extent_bytes <= total <= MAX_REGISTRATION // 4:
            raise CapacityError(
                f"a run of {about(total)} with pages of {about(layout.extent_bytes)}",
                f"choose a total of 8MiB ... {MAX_REGISTRATION // 4 >> 20}MiB",
            )
        self.gpu = gpu
        self.layout = layout
        self.total = total
        each = max(layout.extent_bytes, layout.plane_bytes)
        pages = 4 * total // each
        gpu.require(pages * each + 2 * total + ASIDE)
        self.extents = HostExtents(layout, pages * layout.extent_bytes, gpu.pin)
        try:
            self.planes = PagedPlanes.allocate(layout, self.extents.slots, gpu.device)
            self.buffer = torch.empty(2 * total, dtype=torch.uint8, device=gpu.device)
            self._fill()
        except BaseException:
            self.close()
            raise
        rng = np.random.default_rng(0)
        half = self.extents.slots // 2
        slots, blocks = (rng.permutation(self.extents.slots) for _ in range(2))
        self.slots = {"load": slots[:half], "store": slots[half:]}
        self.blocks = {"load": blocks[:half].reshape(-1, 1), "store": blocks[half:].reshape(-1, 1)}

    def _fill(self) -> None:
        """Fill with noise. The host's is drawn on the GPU, which is faster."""
        flat = self.extents.rows.view(-1)
        for at in range(0, len(flat), len(self.buffer)):
            self.buffer.random_(0, 256)
            part = flat[at : at + len(self.buffer)]
            part.copy_(self.buffer[: len(part)])
        self.buffer.random_(0, 256)
        for tensor in itertools.chain(*self.planes.tensors):
            if self.layout.packed:
                tensor.normal_()
            else:
                tensor.view(torch.uint8).random_(0, 256)
        self.gpu.idle()

    def pack(self, by: GpuCopies) -> None:
        """Store every page into its slot."""
        for direction, slots in self.slots.items():
            blocks, every = self.blocks[direction], range(self.layout.n_layers)
            self.gpu.move(by, "store", self.extents, slots, blocks, every, (), sums=False)
        self.gpu.idle()

    def ends(self, direction: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a plain copy of `nbytes` goes to, and where it comes from: uint8, GPU memory and page-locked memory."""
        second = direction == "store"  # half of both
        at = second * (self.extents.slots // 2) * self.layout.extent_bytes
        device = self.buffer[second * self.total :][:nbytes]
        host = self.extents.rows.view(-1)[at : at + nbytes]
        return (host, device) if second else (device, host)

    def close(self) -> None:
        """Free all memory after the GPU is idle."""
        self.gpu.idle()
        for name in ("planes", "buffer"):
            self.__dict__.pop(name, None)
        self.extents.close()
        self.gpu.release()


class Copies:
    """The copies of a cell's run: `pages` pages, call after call, other layers in each call, about `total` bytes
    each way. `nbytes`: of one direction."""

    def __init__(self, bench: BenchPlanes, by: GpuCopies, cell: Cell) -> None:
        self.bench, self.by, self.cell = bench, by, cell
        self.directions = cell.directions
        self.pages = max(1, min(len(bench.slots["load"]), bench.total // cell.span_bytes))
        layers = cell.layers
        whole = bench.layout.n_layers // layers
        count = max(1, bench.total // (self.pages * cell.span_bytes))
        self.calls = [range(i % whole * layers, (i % whole + 1) * layers) for i in range(count)]
        self.nbytes = count * self.pages * cell.span_bytes
        self._slots = {d: bench.slots[d][: self.pages] for d in self.directions}
        self._blocks = {d: bench.blocks[d][: self.pages] for d in self.directions}

    @property
    def moved_bytes(self) -> int:
        """Bytes of all directions together."""
        return self.nbytes * len(self.directions)

    def routes(self, *, sums: bool = False) -> dict[str, str]:
        """The routes by direction."""
        return {d: self.by.route(d, self.calls[0], sums=sums) for d in self.directions}

    def ours(self, *, sums: bool = False, repeat: int = 1) -> Way:
        """All calls, `repeat` times; with `sums` including the checksums of all pages. A thread queues loads and
        another one stores, as in an engine."""

        def queue(after: Sequence[Event]) -> Queued:
            marks: list[Mark] = []

            def one_way(direction: Direction) -> list[Moved]:
                gpu, pages = self.bench.gpu, (self.bench.extents, self._slots[direction], self._blocks[direction])
                moved = []
                for layers in self.calls * repeat:
                    moved.append(gpu.move(self.by, direction, *pages, layers, after, sums=sums))
                    if not marks:
                        marks.append(gpu.mark())
                return moved

            ways = [functools.partial(one_way, direction) for direction in self.directions]
            moved = list(itertools.chain(*self.bench.gpu.together(ways)))
            finish = (lambda: [take() for _, take in moved]) if sums else (lambda: None)
            return Queued([event for event, _ in moved], marks[0], finish)

        return queue

    def plain(self, *, repeat: int = 1) -> Way:
        """The same number of bytes by one cudaMemcpyAsync a direction, `repeat` times."""
        copies = [
            functools.partial(self.bench.gpu.copy, direction, *self.bench.ends(direction, self.nbytes))
            for direction in self.directions
        ]

        def queue(after: Sequence[Event]) -> Queued:
            events = [copy(after) for copy in copies]
            first = self.bench.gpu.mark()
            return Queued(events + [copy(after) for _ in range(repeat - 1) for copy in copies], first)

        return queue

    def check(self) -> None:
        """Run once and compare the bytes of a few pages. Raises `IOFailedError` if they differ."""
        if self.bench.layout.packed:
            self._check_packed()
            return
        ends = {d: (self._slots[d][-SAMPLE:], torch.from_numpy(self._blocks[d][-SAMPLE:, 0])) for d in self.directions}
        bench, moved = self.bench, {layer for layers in self.calls for layer in layers}
        tensors = [(layer, i, t) for layer in moved for i, t in enumerate(bench.planes.tensors[layer])]
        for direction, (slots, blocks) in ends.items():
            if direction == "store":
                bench.extents.rows[torch.tensor(slots)] = 0
            for _, _, tensor in tensors if direction == "load" else ():
                tensor.view(torch.uint8)[blocks.to(tensor.device)] = 0
        bench.gpu.idle()
        self.ours()(())
        bench.gpu.idle()
        for direction, (slots, blocks) in ends.items():
            for layer, i, tensor in tensors:
                piece = bench.layout.pieces[layer][i]
                in_planes = tensor.view(torch.uint8)[blocks.to(tensor.device)].flatten(1).cpu().numpy()
                in_extents = bench.extents.rows[torch.tensor(slots), piece.offset : piece.offset + piece.nbytes].numpy()
                if not np.array_equal(in_planes, in_extents) or not in_planes.any():
                    raise IOFailedError(f"a {direction} of layer {layer} gave other bytes", "please report it")

    def _check_packed(self) -> None:
        """Pack a few pages, and unpack them into other blocks."""
        bench, every = self.bench, range(self.bench.layout.n_layers)
        slots, stored, loaded = bench.slots["store"][:SAMPLE], bench.blocks["store"], bench.blocks["load"]
        ends: dict[Direction, Int64Array] = {"store": stored[:SAMPLE], "load": loaded[:SAMPLE]}
        for tensor in itertools.chain(*bench.planes.tensors):
            tensor[torch.from_numpy(ends["load"][:, 0]).to(tensor.device)] = 0
        bench.gpu.idle()
        for direction, blocks in ends.items():
            bench.gpu.move(self.by, direction, bench.extents, slots, blocks, every, (), sums=False)
            bench.gpu.idle()
        for layer, tensors in enumerate(bench.planes.tensors):
            for tensor in tensors:
                raw = tensor.view(torch.uint8)
                one, other = (raw[torch.from_numpy(blocks[:, 0]).to(raw.device)] for blocks in ends.values())
                if not torch.equal(one, other):
                    raise IOFailedError(f"packed pages came back with other bytes in layer {layer}", "please report it")


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
