"""This cache's speed on a disk, against the disk's own. Behind `gdscache bench io`."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.bench import io_cache, io_rows, kit
from gdscache.commands.bench.io_engine import Place
from gdscache.commands.bench.io_rows import PACKED_PAGE, TARGETS, TRANSPORTS
from gdscache.commands.bench.rows import Line, bars, lines_table
from gdscache.commands.console import Table, figure
from gdscache.config import SsdConfig
from gdscache.errors import CapacityError, InvalidValueError, IOFailedError, TransportUnavailableError
from gdscache.sizes import GIB, MIB, about, format_size
from gdscache.storage.base import GDS

LEAST = 16 * MIB
ENGINE_THREADS = int(SsdConfig.model_fields["threads"].default)
RAM_THREADS = max(ENGINE_THREADS, 12)  # the cores that copy its bytes limit a RAM disk


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """`total`: bytes of a round; a figure has `repeat` rounds. `threads`: of the transport; None is the engine's
    default, more on a RAM disk. `transports`: also measured, beside the one that an engine chooses without GPUDirect
    Storage."""

    total: int = 512 * MIB
    repeat: int = 5
    threads: int | None = None
    transports: tuple[str, ...] = ()
    require_gds: bool = False

    @classmethod
    def of(cls, profile: str, *, everything: bool = False) -> Settings:
        settings = cls(profile, everything, transports=TRANSPORTS if everything else ())
        return dataclasses.replace(settings, total=LEAST, repeat=2, threads=4) if profile == "quick" else settings

    def check(self) -> None:
        """Raises `InvalidValueError` for settings without a measurement."""
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown:
            raise InvalidValueError(f"unknown transport {unknown[0]!r}", f"choose of {', '.join(TRANSPORTS)}")
        if self.total < LEAST:
            raise InvalidValueError(f"a total of {about(self.total)}", f"use at least {format_size(LEAST)}")
        if self.require_gds and not set(self.transports) & set(GDS):
            raise InvalidValueError("GDS is required of transports without it", "add --transport cufile")


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Measure all cases, the most important first. Files go into a temporary directory, which is deleted. Raises
    `CapacityError` if the disk has too little room."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    needed, free = 3 * settings.total + GIB, shutil.disk_usage(directory).free
    if free < needed:
        raise CapacityError(f"{directory} has {about(free)} free, {about(needed)} are needed", "lower --total")
    packed = f"packed loads, {format_size(PACKED_PAGE)} pages"
    some: dict[str, Callable[[Place], list[io_rows.Row]]] = {}
    for transport in ("", *settings.transports):
        for size in TARGETS:
            name = f"stores and loads, {transport}{', ' if transport else ''}{format_size(size)} pages"
            given: dict[str, Any] = {"page_bytes": size, "transport": transport, "require_gds": settings.require_gds}
            some[name] = functools.partial(io_rows.stores_and_loads, **given)
    if settings.everything:
        some[packed] = io_rows.packed_loads
    run.plan([*some])
    if device.type == "cpu" and settings.everything:
        run.cannot(packed, "torch sees no CUDA device")
    threads = settings.threads or (RAM_THREADS if io_cache.in_memory(directory) else ENGINE_THREADS)
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as made:
        place = Place(Path(made), settings.total, settings.repeat, threads, device, run.progress)
        for name, action in some.items():
            run.case(name, functools.partial(_rows, action, place, require_gds=settings.require_gds))


def _rows(action: Callable[[Place], list[io_rows.Row]], place: Place, *, require_gds: bool) -> kit.Report:
    try:
        return {"comparisons": action(place)}
    except TransportUnavailableError as error:
        if require_gds:
            raise IOFailedError(f"--require-gds: {error.message}", error.hint) from error
        raise


# -- tables and the plot -----------------------------------------------------------------------------------------------


def tables(report: kit.Report) -> list[Table]:
    """This cache's speed on the disk; also of a partial report."""
    return [lines_table("This cache", [*map(_line, report["comparisons"])])]


def bottom(report: kit.Report) -> list[str]:
    """A user's figures: speeds of loads and stores beside the disk's own."""
    found = []
    for what, words in (("cold load, ", "loads"), ("store, ", "stores")):
        labels = [f"{what}{format_size(size)} pages" for size in TARGETS]
        some = [row for row in report["comparisons"] if row["what"] in labels]
        if some:
            r = max(some, key=lambda row: row["figure"]["median"])
            rate, least = figure(r["figure"]["median"]), figure(r["against_figure"]["median"])
            found.append(f"{rate} GB/s of {words}, {figure(r['ratio'])} of the {least} GB/s that it can")
    found = [f"Your disk gives this cache {', and '.join(found)}."] if found else []
    missed = sum(not row.get("met", True) for row in report["comparisons"])
    if missed:
        found.append(f"{missed} figures miss their target; docs/performance.md explains the targets.")
    return [" ".join(found)] if found else []


def _line(row: kit.Report) -> Line:
    cold = "" if row["cache"]["state"] != "kept" else f", page cache KEPT {about(row['cache']['resident_bytes'])}"
    return f"{row['what']}{cold}", row


def plot(report: kit.Report, drawn: Any) -> None:
    """A bar for each comparison."""
    lines = [_line(row) for row in report["comparisons"]]
    drawn.set_size_inches(13, 1 + 0.22 * len(lines))
    bars(drawn.subplots(), lines)


BENCH = kit.Bench("io", "gdscache.bench.io/5", {"comparisons": []}, measure, tables, plot, bottom=bottom)
