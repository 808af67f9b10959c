"""Copies of pages between host and GPU against plain ones: alone, and beside a model's work. `gdscache bench copy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench import copy_startup, kit
from gdscache.commands.bench.copy_beside import COPY_TARGET, SUMS_TARGET, WORK_TARGET, Beside, attention, matrix_product
from gdscache.commands.bench.copy_cells import GROUP_BYTES, PATHS, Cell, selected
from gdscache.commands.bench.copy_gpu import Gpu, Timing, Way, timed
from gdscache.commands.bench.copy_pool import Copies, Pool
from gdscache.commands.bench.measure import Series, frozen_heap, paired, rate, target, turns
from gdscache.commands.bench.rows import Line, bars, lines_table
from gdscache.commands.console import Table, duration, figure, verdict
from gdscache.movers.base import Mover
from gdscache.sizes import GIB, MIB, about

MEMCPY = "cudaMemcpyAsync"
NO_SUMS = "without checksums"
BESIDE_CELL = ("gqa", 64, "all", "load")  # geometry, page_tokens, part, direction of what runs beside a model's work
KERNELS, PINNING = "building the kernels", "page-locking"
_LEAST_PAIRS = 3


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """How much is measured: sizes in bytes.

    `total` is moved each way in a run, `beside_total` beside a model's work; `pairs` of runs make a figure with a
    target, up to `matrix_pairs` any other: as many as fit into `cell_seconds`. `product` and `attention` are the edge
    of the matrices and the tokens; `pin` is the pool that is page-locked, `pin_pairs` times each way; `builds` the
    rounds of building kernels. `full` is the whole matrix.
    """

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
    def of(cls, profile: str) -> Settings:
        if profile == "quick":
            return cls(profile, 32 * MIB, 128 * MIB, 2, 1, 0.0, 4096, 4096, 64 * MIB, 1, 1)
        return cls(profile, cell_seconds=2.0, builds=3) if profile == "full" else cls(profile)


def bench(gpu: Gpu, *, startup: bool = True) -> kit.Bench:
    """The bench on one GPU. `startup`: also what fresh processes pay."""
    sections: dict[str, Any] = {
        "mover": {},
        "copies": [],
        "checksums": [],
        "beside": [],
        "kernel_build": None,
        "pinning": None,
    }
    measured = functools.partial(measure, gpu=gpu, startup=startup)
    return kit.Bench("copy", "gdscache.bench.copy/2", sections, measured, tables, plot)


def measure(run: kit.Run, settings: Settings, directory: Path, *, gpu: Gpu, startup: bool) -> None:
    """Every cell of the profile, with one pool a layout and one mover a path, in the same memory.

    Raises `KernelUnavailableError` where the kernels cannot be built, and `CapacityError` and `PinnedMemoryError` where
    memory is short. A case fails where copies give other bytes.
    """
    cells = selected(settings.profile)
    run.plan([*map(label, cells), *((KERNELS, PINNING) if startup else ())])
    with frozen_heap():
        for (geometry, page_tokens), of_layout in itertools.groupby(cells, lambda c: (c.geometry, c.page_tokens)):
            wanted = [cell for cell in of_layout if run.wants(label(cell))]
            if wanted:
                with Pool(gpu, geometry.layout(page_tokens), settings.total) as pool:
                    _with_pool(run, settings, gpu, pool, wanted)
    run.case(KERNELS, lambda: {"kernel_build": copy_startup.kernel_build(settings.builds, run.progress)})
    run.case(PINNING, lambda: {"pinning": copy_startup.pinning(settings.pin, settings.pin_pairs, run.progress)})


def _with_pool(run: kit.Run, settings: Settings, gpu: Gpu, pool: Pool, cells: Sequence[Cell]) -> None:
    for path, of_path in itertools.groupby(cells, lambda cell: cell.path):
        with contextlib.closing(gpu.open_mover(pool.planes, path)) as mover:
            if path == "auto" and not run.found["mover"]:
                run.found["mover"] = gpu.describe(mover)
            for cell in of_path:
                run.case(label(cell), functools.partial(measure_cell, settings, gpu, pool, mover, cell))
        del mover  # its kernels hold the planes


def measure_cell(settings: Settings, gpu: Gpu, pool: Pool, mover: Mover, cell: Cell) -> dict[str, list[dict[str, Any]]]:
    """The rows of one cell: against a plain copy; where that has a target, with checksums against without; and for one
    layout also beside a model's work."""
    copies, limit = Copies(pool, cell), cell.target
    copies.check(mover)
    compare = functools.partial(_row, settings, gpu, mover, cell, copies)
    found = {"copies": [compare(copies.ours(mover), copies.plain(), MEMCPY, limit, sums=False)]}
    if limit is not None:
        with_sums = copies.ours(mover, sums=True)
        found["checksums"] = [compare(with_sums, copies.ours(mover), NO_SUMS, SUMS_TARGET, sums=True)]
    here = (cell.geometry.name, cell.page_tokens, cell.parts[-1], cell.direction) == BESIDE_CELL
    if here and (limit is not None or settings.profile == "full"):
        found["beside"] = _beside(settings, gpu, mover, cell, copies)
    return found


def _row(
    settings: Settings,
    gpu: Gpu,
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
    once = sum(timed(gpu, way).seconds for way in (ours, other))
    pairs = settings.pairs
    if limit is None:
        pairs = min(settings.matrix_pairs, max(_LEAST_PAIRS, int(settings.cell_seconds / once)))
    mine, others = turns(lambda: timed(gpu, ours), lambda: timed(gpu, other), pairs)
    routes, nbytes = copies.routes(mover, sums=sums), copies.moved_bytes
    entries = sum(copies.entries(route) for route in routes.values())
    submit = statistics.median(run.submit_seconds for run in mine)
    found = paired([run.seconds for run in others], [run.seconds for run in mine])
    return {
        **cell.describe(),
        "sums": sums,
        "routes": routes,
        "thread_blocks": {d: gpu.thread_blocks(mover, route) for d, route in routes.items()},
        "pages": copies.pages,
        "calls": len(copies.calls),
        "bytes": nbytes,
        "entries": entries,
        "gb_per_second": _rates(nbytes, mine),
        "event_gb_per_second": statistics.median(rate(nbytes, run.event_seconds) for run in mine),
        "submit_seconds": submit,
        "submit_seconds_per_entry": submit / entries,
        "against": against,
        "against_gb_per_second": _rates(nbytes, others),
        **found,
        **({} if limit is None else target(found["ratio"], limit, at_least=True)),
    }


def _rates(nbytes: int, runs: Iterable[Timing]) -> dict[str, Any]:
    return Series(tuple(rate(nbytes, run.seconds) for run in runs)).describe()


def _beside(settings: Settings, gpu: Gpu, mover: Mover, cell: Cell, copies: Copies) -> list[dict[str, Any]]:
    """A load beside matrix products and beside attention: against a plain copy, and with checksums or without."""
    rows, least, judged = [], max(1, settings.beside_total // copies.nbytes), cell.target is not None
    limits = (COPY_TARGET, SUMS_TARGET, WORK_TARGET) if judged else (None, None, None)
    pairs = settings.pairs if judged else settings.matrix_pairs
    for make, size in ((matrix_product, settings.product), (attention, settings.attention)):
        beside = Beside(gpu, make(gpu, size), lambda n: copies.ours(mover, repeat=n), least)
        n, nbytes = beside.repeat, beside.repeat * copies.moved_bytes
        plain, ours = copies.plain(repeat=n), copies.ours(mover, repeat=n)
        compared = [(MEMCPY, False, ours, plain, limits[0])]
        if judged:
            compared.append((NO_SUMS, True, copies.ours(mover, sums=True, repeat=n), ours, limits[1]))
        for against, sums, mine, other, limit in compared:
            found = beside.compare(mine, other, nbytes, pairs, limit, limits[2])
            routes = copies.routes(mover, sums=sums)
            rows.append({**cell.describe(), "sums": sums, "routes": routes, "against": against, **found})
    return rows


def label(cell: Cell) -> str:
    """A cell in a few words."""
    return f"{what(cell.describe())}, {cell.path}"


# -- tables and the plot -----------------------------------------------------------------------------------------------

Row = Mapping[str, Any]


def what(row: Row) -> str:
    """Direction, geometry, size of a page and layers a call, of a row."""
    tokens = f"{row['page_tokens']} token{'s' if row['page_tokens'] > 1 else ''}"
    return f"{row['direction']}, {row['geometry']}, {tokens}, {'/'.join(row['parts'])}"


def tables(report: kit.Report) -> list[Table]:
    """What was measured, also a part of it."""
    judged, names = not kit.quick(report), {"ours": "gb_per_second", "other": "against_gb_per_second"}
    found = [
        lines_table(title, [Line.of(f"{what(r)} ({_routes(r)})", r, **names) for r in rows], judged=judged)
        for title, rows in (
            ("Copies against cudaMemcpyAsync", [r for r in report["copies"] if "target" in r]),
            ("Checksums on, against off", report["checksums"]),
        )
    ]
    beside = lines_table("Beside a model's work", _beside_lines(report["beside"]), judged=judged)
    return [found[0], _matrix(report["copies"]), found[1], beside, _startup(report, judged=judged)]


def _matrix(rows: Sequence[Row]) -> Table:
    """All ratios, a column a path."""
    table = Table("Ratio to cudaMemcpyAsync, and GB/s, by path", "pages", *PATHS)
    found: dict[str, dict[str, str]] = {}
    for r in rows:
        shown = f"{figure(r['ratio'])} ({figure(r['gb_per_second']['median'])})"
        found.setdefault(what(r), {})[r["path"]] = shown
    for name, by_path in found.items():
        table.add_row(name, *(by_path.get(path, "") for path in PATHS))
    return table


def _beside_lines(rows: Sequence[Row]) -> list[Line]:
    """Two lines a row: the copy, and the work beside it."""
    lines = []
    for r in rows:
        way = "with checksums" if r["sums"] else r["path"]
        of = {"against": r["against"]}
        names = {"ours": "gb_per_second", "other": "against_gb_per_second"}
        lines.append(Line.of(f"copy beside {r['beside']}, {way}", {**of, **r["copy"]}, **names))
        names = {"ours": "seconds", "other": "against_seconds"}
        lines.append(Line.of(f"{r['beside']} beside it, {way}", {**of, **r["work"]}, unit="s", **names))
    return lines


def _startup(report: kit.Report, *, judged: bool) -> Table:
    table = Table("Once a process", "what", "takes", "", *(["target"] if judged else []))
    for kind, r in (report["kernel_build"] or {}).items():
        whole = f"{duration(r['with_import_seconds']['median'])} with the import of cupy"
        said = [verdict(r, "at most", "{:g} s".format)] if judged else []
        table.add_row(f"building the kernels, {kind} process", duration(r["seconds"]["median"]), whole, *said)
    if (r := report["pinning"]) is not None:
        against = f"{figure(r['ratio'])} of torch's {duration(r['torch_seconds']['median'])}"
        said = [verdict(r, "at most")] if judged else []
        table.add_row(f"page-locking {about(r['bytes'])}", duration(r["seconds"]["median"]), against, *said)
    return table


def _routes(row: Row) -> str:
    return "/".join(dict.fromkeys(row["routes"].values()))


def grouped(rows: Sequence[Row], *, judged: bool) -> list[Line]:
    """Rows that are held against the same target for the same reason, as one line: their median, the least and the
    largest of their intervals."""
    groups: dict[str, list[Row]] = {}
    for r in rows:
        kind = "one layer of GQA pages of 64 tokens"
        if r["span_bytes"] >= GROUP_BYTES:
            kind = "1 MiB a page or more a call"
        elif r["page_tokens"] == 1:
            kind = "pages of one token"
        groups.setdefault(f"{r['direction']}: {kind}", []).append(r)
    lines = []
    for name, some in groups.items():
        ratio, low = statistics.median(r["ratio"] for r in some), min(r["ratio_low"] for r in some)
        high, met = max(r["ratio_high"] for r in some), sum(r["met"] for r in some)
        name += f"\n{met} of {len(some)} cells meet it" if judged else f"\n{len(some)} cells"
        lines.append(Line(name, "", MEMCPY, ratio, low, high, some[0]["target"], met == len(some), True))
    return lines


def plot(report: kit.Report, drawn: Any) -> None:
    """A bar for each target of a copy, and what copies and work beside each other come to."""
    judged = not kit.quick(report)
    drawn.set_size_inches(13, 5)
    left, right = drawn.subplots(1, 2)
    bars(left, grouped([r for r in report["copies"] if "target" in r], judged=judged), judged=judged)
    left.set_title("Copies: GB/s / GB/s of cudaMemcpyAsync")
    bars(right, _beside_lines(report["beside"]), judged=judged)
    right.set_title("Beside a model's work")
