"""The library's executor in the terms of moves: spaces have names, and groups are layers of a layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array, integers
from gdscache.errors import PlanesError
from gdscache.moves.base import Move
from gdscache.native import NEVER, Executor, HostPlanes
from gdscache.pages.planes import PagedPlanes

if TYPE_CHECKING:
    from gdscache.native import Gpu
    from gdscache.pages.checksum import Checksums
    from gdscache.pages.layout import PageLayout
    from gdscache.storage.base import Descriptors

SCATTER, GATHER, DIGEST = range(3)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Space:
    """A space of moves. `foreign`: planes or a memory of a GPU.

    `slots`: of a memory or of files; of planes, blocks. `memory`: the bytes, uint8; for a GPU, `device_memory` is their
    address on the GPU `device` instead. `sums`: uint64 (slots, layers), where stores leave checksums; for files see
    `Descriptors`. `files`: handles of the disk number `disk`, over which slots are striped, `stretch` at a time.
    `pinned`: the GPU's copy engines reach the memory. A copy never crosses a multiple of `fence` slots.
    """

    kind: str  # planes, memory or files
    slots: int
    foreign: bool = True
    memory: npt.NDArray[np.uint8] | None = None
    sums: Checksums | None = None
    files: Sequence[int] = ()
    stretch: int = 1
    disk: int = 0
    device_memory: int = 0
    device: int = 0
    pinned: bool = False
    fence: int = 0


class NativePlanes(HostPlanes):
    """Planes in host memory, as the library knows them. The tensors live as long as the pool.

    Raises `NativeCallError` for planes that are none in host memory, and `PlanesError` for packed parts of unlike runs.
    """

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        memory = [planes.memory(piece) for layer in planes.layout.pieces for piece in layer]
        # The library has as many runs a block in all planes. Those without gaps may be cut anew.
        apart = {runs for _, _, stride, run, runs in memory if stride != run and runs > 1} or {planes.block_tokens}
        runs = max(apart)
        if len(apart) > 1 or any(its != runs and run * its % runs for *_, run, its in memory):
            raise PlanesError(
                f"parts of planes have {sorted(apart)} runs a block", "set model.pack to off: their runs differ"
            )
        rows = [
            (first, block, stride, run) if its == runs else (first, block, *[run * its // runs] * 2)
            for first, block, stride, run, its in memory
        ]
        firsts = np.array([0, *itertools.accumulate(map(len, planes.layout.pieces))], np.int32)
        super().__init__(integers(rows), firsts, planes.blocks, runs, planes.blocks_per_page, planes.layout.packed)


@dataclasses.dataclass(frozen=True, slots=True)
class MoveLimits:
    """In bytes: I/O in flight over all moves, and the size of one job of each kind. See move.h."""

    flying: int = 64 << 20
    io: int = 4 << 20
    copy: int = 2 << 20
    foreign_copy: int = 64 << 20


class NativeMoves(Executor):
    """Moves over `spaces`, by name. Thread-safe, except `close`.

    `reserve`: the memory of the bounce reserve, its first slot for loads, and their number; `fence`: no run of its
    slots crosses a multiple of this. `pool`: planes on the host. `disks`: the files' means of I/O. `threads` copy, and
    check deadlines. `gpu`: of the foreign planes and memories. Tests step an executor by hand that has no threads, no
    GPU, and None for disks (tests/support/hooks.py). Raises `NativeCallError`.
    """

    def __init__(
        self,
        layout: PageLayout,
        spaces: Mapping[str, Space],
        page_blocks: int,
        *,
        limits: MoveLimits = MoveLimits(),
        reserve: tuple[str, int, int] | None = None,
        fence: int = 0,
        pool: HostPlanes | None = None,
        gpu: Gpu | None = None,
        disks: Sequence[Descriptors | None] = (),
        threads: int = 0,
    ) -> None:
        bounds = np.array([*(start for start, _ in layout.layer_bounds), layout.page_bytes], np.int64)
        super().__init__(
            *(bounds, layout.extent_bytes, page_blocks, dict(spaces), limits, reserve, fence),
            *(pool, gpu, disks, threads),
        )
        self._layout = layout
        self._groups: dict[tuple[range, ...], Int64Array] = {}
        self.layers = layout.n_layers

    def start(
        self,
        number: int,
        move: Move,
        until: int = NEVER,
        after: Sequence[int] = (),
        routes: Callable[[range], tuple[int, int]] | None = None,
    ) -> None:
        """Begin a move that ends by `until`, in nanoseconds. `number` is unique among moves that have not ended.

        `after`: CUevents that a GPU's copies wait for; they live until the move has ended. `routes(layers)`: the kinds
        of copies for these layers, without checksums and with them.
        """
        groups = self._groups.get(move.groups)
        if groups is None:
            groups = self._groups[move.groups] = self._table(move.groups or (range(self.layers),))
        events = np.array(after, np.uint64) if after else None
        self.begin(number, move.priority, until, move.ways, groups, routes, events, move.open)

    def _table(self, groups: Sequence[range]) -> Int64Array:
        """int64 (groups, 8): first and last layer, their bytes in an extent, the bytes to read after the group before,
        and the bytes to read alone."""
        layout = self._layout
        rows = [
            (some.start, some.stop, layout.layer_bounds[some.start][0], layout.layer_bounds[some.stop - 1][1])
            + (layout.read_span(some) + layout.read_span(some, alone=True))
            for some in groups
        ]
        return np.array(rows, np.int64)
