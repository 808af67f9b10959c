"""Copies of pages between host and GPU against plain copies: alone, and beside a model's work. `gdscache bench
copy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench import kit
from gdscache.commands.bench.copy_gpu import (
    STAGING,
    BenchPlanes,
    Beside,
    Cell,
    Copies,
    Gpu,
    Way,
    attention,
    cells,
    matrix_product,
    timed,
)
from gdscache.commands.bench.figures import Line, Ratios, compared, in_turns, in_words, rate, series
from gdscache.commands.console import Table, figure
from gdscache.sizes import GIB, MIB

MEMCPY = "cudaMemcpyAsync"
NO_SUMS = "without checksums"
SUMS_TARGET = 0.98
USUAL_TOKENS = 64  # of a page
BESIDE_CELL = ("gqa", USUAL_TOKENS, "all", "load")  # geometry, page_tokens, part, direction beside a model's work


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """The bench's sizes, in bytes.

    `total`: bytes of a run each way; `beside_total`: the same beside a model's work. `pairs`: pairs of runs for a
    figure. `product`, `attention`: the edge of the matrices and the tokens. Without `everything` unpacked pages of 64
    tokens are measured.
    """

    total: int = 1 * GIB
    beside_total: int = 1 * GIB
    pairs: int = 30
    product: int = 8192
    attention: int = 8192

    @classmethod
    def defaults(cls, *, quick: bool = False, **options: Any) -> dict[str, Any]:
        small = {"total": 32 * MIB, "beside_total": 128 * MIB, "pairs": 2, "product": 4096, "attention": 4096}
        return small if quick else {}


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Measure the chosen cells, with one pool and one `GpuCopies` a layout.

    Raises `DeviceError` without a GPU, `KernelUnavailableError` if the kernels cannot be built, and `CapacityError` or
    `PinnedMemoryError` if memory is short. A case fails if its copies give other bytes.
    """
    gpu = Gpu()
    usual = [cell for cell in cells() if cell.page_tokens == USUAL_TOKENS and not cell.geometry.packed]
    every = cells() if settings.everything else usual
    run.plan([*map(label, every)])
    for (geometry, page_tokens), of_layout in itertools.groupby(every, lambda c: (c.geometry, c.page_tokens)):
        with (
            contextlib.closing(BenchPlanes(gpu, geometry.layout(page_tokens), settings.total)) as pool,
            contextlib.closing(gpu.open_copies(pool.planes)) as by,  # its kernels hold the planes until this returns
        ):
            if pool.layout.packed:
                pool.pack(by)
            else:  # packed pages are moved without a calibration
                run.found["mover"] = {"driver": by.driver.version, "staging_bytes": STAGING, **by.describe()}
            for cell in of_layout:
                run.case(label(cell), functools.partial(_measure_cell, settings, Copies(pool, by, cell)))


def _measure_cell(settings: Settings, copies: Copies) -> dict[str, list[dict[str, Any]]]:
    """A cell's rows: against a plain copy; with checksums against without; for one layout also beside a model's
    work."""
    cell, limit = copies.cell, copies.cell.target
    assert limit is not None, "a cell has a target"
    copies.check()
    here = (cell.geometry.name, cell.page_tokens, cell.parts[-1], cell.direction) == BESIDE_CELL
    return {
        "copies": [_row(settings, copies, copies.plain(), MEMCPY, limit, sums=False)],
        "checksums": [_row(settings, copies, copies.ours(), NO_SUMS, SUMS_TARGET, sums=True)],
        "beside": _beside(settings, copies) if here else [],
    }


def _row(settings: Settings, copies: Copies, other: Way, against: str, limit: float, *, sums: bool) -> dict[str, Any]:
    """Our copies, with `sums` or without, in turns with another way."""
    gpu, ours = copies.bench.gpu, copies.ours(sums=sums)
    for way in (ours, other):  # the first run warms up
        timed(gpu, way)
    runs = in_turns({way: functools.partial(timed, gpu, way) for way in (ours, other)}, settings.pairs)
    mine, others = (series(rate(copies.moved_bytes, run.seconds) for run in some) for some in runs.values())
    more = {"pages": copies.pages, "calls": len(copies.calls), "bytes": copies.moved_bytes, "sums": sums}
    about = {**copies.cell.describe(), "routes": copies.routes(sums=sums), **more}
    return compared(label(copies.cell), mine, against, others, limit, pairs=True, **about)


def _beside(settings: Settings, copies: Copies) -> list[dict[str, Any]]:
    """A load beside matrix products and beside attention, against a plain copy there."""
    gpu, rows, least = copies.bench.gpu, [], max(1, settings.beside_total // copies.nbytes)
    more = {**copies.cell.describe(), "routes": copies.routes()}
    for make, size in ((matrix_product, settings.product), (attention, settings.attention)):
        beside = Beside(gpu, make(gpu, size), lambda n: copies.ours(repeat=n), least)
        n, nbytes = beside.repeat, beside.repeat * copies.moved_bytes
        ways = copies.ours(repeat=n), copies.plain(repeat=n)
        rows += beside.compare(*ways, MEMCPY, nbytes, settings.pairs, **more)
    return rows


# -- tables and the plot -----------------------------------------------------------------------------------------------

Row = Mapping[str, Any]


def label(cell: Cell) -> str:
    """A cell's direction, geometry, page size and layers a call."""
    tokens = f"{cell.page_tokens} token{'s' if cell.page_tokens > 1 else ''}"
    return f"{cell.direction}, {cell.geometry.name}, {tokens}, {'/'.join(cell.parts)}"


def panels(report: kit.Report) -> list[Ratios]:
    """Copies of all layers of pages, alone and beside a model's work; also of a partial report."""
    whole = [row for row in report["copies"] if _is_whole(row)]
    beside = [(row["what"], row) for row in report["beside"]]
    return [Ratios(f"Copies against {MEMCPY}", _lines(whole)), Ratios("Beside a model's work", beside)]


def details(report: kit.Report) -> list[Table]:
    """Every page and layer, and checksums."""
    titles = {"copies": f"All copies against {MEMCPY}", "checksums": "Checksums on, against off"}
    return [Ratios(title, _lines(report[key])).table() for key, title in titles.items()]


def bottom(report: kit.Report) -> list[str]:
    """A user's figures: speeds of loads and stores beside a plain copy's, and their cost to a model."""
    names = {"load": "loads to the GPU", "store": "stores from it"}
    usual = [row for row in report["copies"] if row["geometry"] == "gqa" and _is_whole(row)]
    found = [in_words(names[row["direction"]], row, "of a plain copy") for row in usual if row["direction"] in names]
    text = [f"The GPU's link gives {', and '.join(found)}."] if found else []
    if work := [row["ratio"] for row in report["beside"] if row["unit"] == "s"]:
        text.append(f"A model's work takes {figure(max(work))} times as long beside a load as beside a plain copy.")
    return [" ".join(text)] if text else []


def _is_whole(row: Row) -> bool:
    """Whether all layers of usual pages move at once."""
    return "all" in row["parts"] and row["page_tokens"] == USUAL_TOKENS


def _lines(rows: Sequence[Row]) -> list[Line]:
    return [(f"{row['what']} ({'/'.join(dict.fromkeys(row['routes'].values()))})", row) for row in rows]


SECTIONS: dict[str, Any] = {"mover": {}, "copies": [], "checksums": [], "beside": []}
BENCH = kit.Bench("copy", "gdscache.bench.copy/6", SECTIONS, Settings, measure, panels, bottom, details)
