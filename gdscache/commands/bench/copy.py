"""Copies of pages between host and GPU against plain ones: alone, and beside a model's work. `gdscache bench copy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from gdscache.commands.bench import copy_startup
from gdscache.commands.bench.copy_beside import COPY_TARGET, SUMS_TARGET, WORK_TARGET, Beside, attention, matrix_product
from gdscache.commands.bench.copy_cells import Cell, Geometry, selected
from gdscache.commands.bench.copy_gpu import Gpu, Timing, Way, timed
from gdscache.commands.bench.copy_pool import Copies, Pool
from gdscache.commands.bench.measure import Progress, Series, frozen_heap, paired, rate, silent, target, turns
from gdscache.commands.bench.neighbours import LABELS, beside
from gdscache.movers.base import Mover
from gdscache.sizes import GIB, MIB

Keep = Callable[[dict[str, Any]], None]
"""Called with what was measured so far, every now and then."""

MEMCPY = "cudaMemcpyAsync"
NO_SUMS = "without checksums"
BESIDE_CELL = ("gqa", 64, "all", "load")  # geometry, page_tokens, part, direction of what runs beside a model's work
_LEAST_PAIRS = 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is measured: sizes in bytes.

    `total` is moved each way in a run, `beside_total` beside a model's work; `pairs` of runs make a figure with a
    target, up to `matrix_pairs` any other: as many as fit into `cell_seconds`. `product` and `attention` are the edge
    of the matrices and the tokens; `pin` is the pool that is page-locked, `pin_pairs` times each way; `builds` the
    rounds of building kernels.
    """

    profile: str = "default"
    total: int = 1 * GIB
    beside_total: int = 1 * GIB
    pairs: int = 30
    matrix_pairs: int = 8
    cell_seconds: float = 0.25
    product: int = 8192
    attention: int = 8192
    pin: int = 16 * GIB
    pin_pairs: int = 3
    builds: int = 2

    @classmethod
    def full(cls) -> Settings:
        """The whole matrix."""
        return cls(profile="full", cell_seconds=2.0, builds=3)

    @classmethod
    def quick(cls) -> Settings:
        """Seconds instead of minutes; its figures say that things work, not how fast."""
        return cls("quick", 32 * MIB, 128 * MIB, 2, 1, 0.0, 4096, 4096, 64 * MIB, 1, 1)

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run(
    settings: Settings, gpu: Gpu, progress: Progress = silent, keep: Keep = lambda found: None, *, startup: bool = True
) -> dict[str, Any]:
    """All measurements, as plain data. After Ctrl-C what was measured until then, with `complete` false.

    `startup`: also what fresh processes pay. Raises `KernelUnavailableError` where the kernels cannot be built,
    `CapacityError` and `PinnedMemoryError` where memory is short, `IOFailedError` when copies give other bytes.
    """
    bench = _Bench(settings, gpu, progress)
    found = bench.found
    with contextlib.suppress(KeyboardInterrupt), frozen_heap():
        try:
            for (geometry, page_tokens), cells in itertools.groupby(bench.cells, lambda c: (c.geometry, c.page_tokens)):
                bench.pool(geometry, page_tokens, cells)
                keep(found)
            if startup:
                found["kernel_build"] = copy_startup.kernel_build(settings.builds, progress)
                keep(found)
                found["pinning"] = copy_startup.pinning(settings.pin, settings.pin_pairs, progress)
            found["complete"] = True
        finally:
            keep(found)
    return found


class _Bench:
    """The measurements on one GPU; `found` grows with each."""

    def __init__(self, settings: Settings, gpu: Gpu, progress: Progress) -> None:
        self.settings = settings
        self.gpu = gpu
        self.cells = selected(settings.profile)
        self.found: dict[str, Any] = {
            "complete": False,
            "mover": {},
            "copies": [],
            "checksums": [],
            "beside": [],
            "python": [],
            "kernel_build": None,
            "pinning": None,
        }
        self._progress = progress
        self._done = 0

    def pool(self, geometry: Geometry, page_tokens: int, cells: Iterable[Cell]) -> None:
        """Everything that is measured with one layout: with one mover after the other, in the same memory."""
        with Pool(self.gpu, geometry.layout(page_tokens), self.settings.total) as pool:
            for path, some in itertools.groupby(cells, lambda cell: cell.path):
                with contextlib.closing(self.gpu.open_mover(pool.planes, path)) as mover:
                    if path == "auto" and not self.found["mover"]:
                        self.found["mover"] = self.gpu.describe(mover)
                    for cell in some:
                        self._cell(pool, mover, cell)
                del mover  # its kernels hold the planes

    def _cell(self, pool: Pool, mover: Mover, cell: Cell) -> None:
        self._progress(self._done, len(self.cells), label(cell))
        self._done += 1
        copies = Copies(pool, cell)
        copies.check(mover)
        ours, other, limit = copies.ours(mover), copies.plain(), cell.target
        self.found["copies"].append(self._row(mover, cell, copies, ours, other, MEMCPY, limit, sums=False))
        if limit is not None:
            ours, other = copies.ours(mover, sums=True), copies.ours(mover)
            row = self._row(mover, cell, copies, ours, other, NO_SUMS, SUMS_TARGET, sums=True)
            self.found["checksums"].append(row)
        if (cell.geometry.name, cell.page_tokens, cell.parts[-1], cell.direction) == BESIDE_CELL and (
            limit is not None or self.settings.profile == "full"
        ):
            self._beside(mover, cell, copies)
            if limit is not None:
                self._beside_python(mover, cell, copies)

    def _row(
        self,
        mover: Mover,
        cell: Cell,
        copies: Copies,
        ours: Way,
        other: Way,
        against: str,
        limit: float | None,
        *,
        sums: bool,
    ) -> dict[str, Any]:
        """Two ways in turns, as plain data."""
        once = sum(timed(self.gpu, way).seconds for way in (ours, other))
        pairs = self.settings.pairs
        if limit is None:
            affordable = int(self.settings.cell_seconds / once)
            pairs = min(self.settings.matrix_pairs, max(_LEAST_PAIRS, affordable))
        mine, others = turns(lambda: timed(self.gpu, ours), lambda: timed(self.gpu, other), pairs)
        routes, nbytes = copies.routes(mover, sums=sums), copies.moved_bytes
        entries = sum(copies.entries(route) for route in routes.values())
        submit = Series(tuple(run.submit_seconds for run in mine)).median
        against_figures = paired([run.seconds for run in others], [run.seconds for run in mine])
        return {
            **cell.describe(),
            "sums": sums,
            "routes": routes,
            "thread_blocks": {d: self.gpu.thread_blocks(mover, route) for d, route in routes.items()},
            "pages": copies.pages,
            "calls": len(copies.calls),
            "bytes": nbytes,
            "entries": entries,
            "gb_per_second": _rates(nbytes, mine).describe(),
            "event_gb_per_second": Series(tuple(rate(nbytes, run.event_seconds) for run in mine)).median,
            "submit_seconds": submit,
            "submit_seconds_per_entry": submit / entries,
            "against": against,
            "against_gb_per_second": _rates(nbytes, others).describe(),
            **against_figures,
            **({} if limit is None else target(against_figures["ratio"], limit, at_least=True)),
        }

    def _beside(self, mover: Mover, cell: Cell, copies: Copies) -> None:
        """A load beside matrix products and beside attention: against a plain copy, and with checksums or without."""
        settings, least = self.settings, max(1, self.settings.beside_total // copies.nbytes)
        limits = (COPY_TARGET, SUMS_TARGET, WORK_TARGET) if cell.target is not None else (None, None, None)
        pairs = settings.pairs if cell.target is not None else settings.matrix_pairs
        for make, size in ((matrix_product, settings.product), (attention, settings.attention)):
            work = make(self.gpu, size)
            self._progress(self._done, len(self.cells), f"{label(cell)}, beside {work.name}")
            beside = Beside(self.gpu, work, lambda n: copies.ours(mover, repeat=n), least)
            n, nbytes = beside.repeat, beside.repeat * copies.moved_bytes
            plain, ours = copies.plain(repeat=n), copies.ours(mover, repeat=n)
            compared = [(MEMCPY, False, ours, plain, limits[0])]
            if cell.target is not None:
                compared.append((NO_SUMS, True, copies.ours(mover, sums=True, repeat=n), ours, limits[1]))
            for against, sums, mine, other, limit in compared:
                found = beside.compare(mine, other, nbytes, pairs, limit, limits[2])
                self.found["beside"].append(
                    {
                        **cell.describe(),
                        "sums": sums,
                        "routes": copies.routes(mover, sums=sums),
                        "against": against,
                        **found,
                    }
                )

    def _beside_python(self, mover: Mover, cell: Cell, copies: Copies) -> None:
        """A load, and a plain copy, beside threads of Python, against the same alone. Both are asked for by a thread of
        Python, which waits for the interpreter's lock too."""
        for kind, (name, way) in itertools.product(
            LABELS, {"auto": copies.ours(mover), MEMCPY: copies.plain()}.items()
        ):
            self._progress(self._done, len(self.cells), f"{name}, beside {LABELS[kind]}")
            once = functools.partial(timed, self.gpu, way)
            mine, alone = turns(beside(kind, once), once, self.settings.matrix_pairs)
            nbytes = copies.moved_bytes
            self.found["python"].append(
                {
                    **cell.describe(),
                    "path": name,
                    "beside": LABELS[kind],
                    "bytes": nbytes,
                    "gb_per_second": _rates(nbytes, mine).describe(),
                    "against": "alone",
                    "against_gb_per_second": _rates(nbytes, alone).describe(),
                    **paired([run.seconds for run in alone], [run.seconds for run in mine]),
                }
            )


def label(cell: Cell) -> str:
    """A cell in a few words."""
    tokens = f"{cell.page_tokens} token{'s' if cell.page_tokens > 1 else ''}"
    return f"{cell.geometry.name}, {tokens}, {'/'.join(cell.parts)}, {cell.direction}, {cell.path}"


def _rates(nbytes: int, runs: Iterable[Timing]) -> Series:
    return Series(tuple(rate(nbytes, run.seconds) for run in runs))
