"""The cells of `gdscache bench copy`: page sizes, geometries, directions, parts of a page; pools of one layout, and the
timed copies between them: an engine's, and plain ones of equal size."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gdscache.arrays import Int64Array
from gdscache.commands.bench.copy_gpu import Gpu, Mark, Moved, Queued, Way
from gdscache.cuda.host_memory import MAX_REGISTRATION
from gdscache.cuda.streams import Event
from gdscache.errors import CapacityError, IOFailedError
from gdscache.extents import HostExtents
from gdscache.kernels.choice import Direction
from gdscache.kernels.copies import GpuCopies
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from gdscache.sizes import GIB, MIB, about

SAMPLE = 4  # pages for the comparison of bytes
ASIDE = 1 * GIB  # of GPU memory, for the staging ring and a neighbour's work


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

    def host(self, direction: str, nbytes: int) -> torch.Tensor:
        """`nbytes` of page-locked memory in one piece, uint8."""
        at = 0 if direction == "load" else self.extents.slots // 2 * self.layout.extent_bytes
        return self.extents.rows.view(-1)[at : at + nbytes]

    def device(self, direction: str, nbytes: int) -> torch.Tensor:
        """`nbytes` of GPU memory in one piece, uint8."""
        at = 0 if direction == "load" else self.total
        return self.buffer[at : at + nbytes]

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
        bench = self.bench

        def queue(after: Sequence[Event]) -> Queued:
            events: list[Event] = []
            first: Mark = None
            for _ in range(repeat):
                for direction in self.directions:
                    ends = bench.device(direction, self.nbytes), bench.host(direction, self.nbytes)
                    dst, src = ends if direction == "load" else ends[::-1]
                    events.append(bench.gpu.copy(direction, dst, src, after))
                first = first or bench.gpu.mark()
            return Queued(events, first)

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
