"""A disk's speed by each way of bytes, and this cache's speed on it. Behind `gdscache bench io`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.bench import io_cache, io_packed, io_rows, io_sweep, kit
from gdscache.commands.bench.bare import IO_BYTES, BareLoop, Way
from gdscache.commands.bench.io_rows import Place, Row
from gdscache.commands.bench.io_sweep import OPS, SIZES
from gdscache.commands.bench.io_ways import BY_NAME, WAYS
from gdscache.commands.bench.measure import judged
from gdscache.commands.bench.rows import Line, bars, lines_table
from gdscache.commands.console import Table, figure
from gdscache.config import SsdConfig
from gdscache.errors import CapacityError, InvalidValueError, TransportUnavailableError
from gdscache.sizes import GIB, KIB, MIB, about, format_size
from gdscache.storage import probe
from gdscache.storage.base import Op

LEAST = 16 * MIB
RAM_DISK = "/dev/shm"
ENGINE_THREADS = int(SsdConfig.model_fields["threads"].default)
RAM_THREADS = max(ENGINE_THREADS, 12)  # the cores that copy its bytes limit a RAM disk


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """The bench's sizes, in bytes.

    `total`: the file of the sweep. `row_total`: bytes of a round of a comparison; `ram_total`: the same on the RAM
    disk. A figure for a size of one of `ways` has `sweep_rounds` of `sweep_seconds`, a comparison `repeat` rounds.
    `threads`: of the transport in comparisons; None is the engine's default, more on a RAM disk.
    """

    total: int = 1 * GIB
    row_total: int = 512 * MIB
    ram_total: int = 1 * GIB
    repeat: int = 5
    sweep_sizes: tuple[int, ...] = SIZES
    sweep_rounds: int = 3
    sweep_seconds: float = 0.25
    threads: int | None = None
    ways: tuple[str, ...] = ()
    require_gds: bool = False
    ram_disk: str = RAM_DISK

    @classmethod
    def of(cls, profile: str, *, everything: bool = False) -> Settings:
        """A profile's settings. Without `everything` no way is swept."""
        ways = tuple(BY_NAME) if everything else ()
        if profile != "quick":
            return cls(profile, everything, ways=ways)
        sizes, small = (64 * KIB, 1 * MIB), (32 * MIB, 16 * MIB, 16 * MIB, 2)
        return cls(profile, everything, *small, sizes, 1, 0.02, 4, ways=ways)

    def threads_on(self, *, ram: bool) -> int:
        """Threads of a comparison."""
        return self.threads or (RAM_THREADS if ram else ENGINE_THREADS)

    def check(self) -> None:
        """Raises `InvalidValueError` for settings without a measurement."""
        unknown = [name for name in self.ways if name not in BY_NAME]
        if unknown:
            raise InvalidValueError(f"unknown way {unknown[0]!r}", f"choose of {', '.join(BY_NAME)}")
        if self.total < LEAST:
            raise InvalidValueError(f"a total of {about(self.total)}", f"use at least {format_size(LEAST)}")
        if self.require_gds and not any(BY_NAME[name].cufile for name in self.ways):
            raise InvalidValueError("GDS is required of ways that do not use it", "add --way cufile")


@dataclasses.dataclass(frozen=True)
class Part:
    """A comparison. `cause`: the reason why it cannot run here; `ram`: it runs on the RAM disk; `way`: the way
    that is swept before it, and without which it cannot run."""

    name: str
    action: Callable[[Place], list[Row]]
    ram: bool = False
    cause: str = ""
    way: str = ""


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Measure comparisons, and the sweep of ways. Files go into temporary directories, which are
    deleted.

    Raises `TransportUnavailableError` if GPUDirect Storage is required and not proven, and `CapacityError` if the disk
    has too little room.
    """
    settings.check()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if settings.require_gds:
        run.found["gds_proof"] = require_gds(directory, device)
    needed, free = 2 * settings.total + 2 * settings.row_total, shutil.disk_usage(directory).free
    if free < needed:
        raise CapacityError(f"{directory} has {about(free)} free, {about(needed)} are needed", "lower --total")
    some = parts(settings, device)
    run.plan(["ceilings", *(part.name for part in some), *(BY_NAME[way].label for way in settings.ways)])
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        file = Path(name, "io.bin")
        with file.open("wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, settings.total)
        with BareLoop(file, settings.total) as bare:
            bare.run(Op.WRITE, Way(4, max(IO_BYTES)))
            best = {op.value: functools.partial(io_sweep.ceiling, bare, op, settings.repeat, run.progress) for op in Op}
            run.case("ceilings", lambda: {"ceilings": {name: action() for name, action in best.items()}})
        if run.found["ceilings"] is None:
            return
        for part in some:
            if part.way:
                sweep(run, settings, device, part.way, file)
                swept = next(
                    (way for way in run.found["ways"] if way["way"] == part.way),
                    {"cause": f"{part.way} was not measured"},
                )
                part = dataclasses.replace(part, cause=swept["cause"])
            compare(run, settings, device, part, file)
        for way in settings.ways:
            sweep(run, settings, device, way, file)


def parts(settings: Settings, device: torch.device) -> list[Part]:
    """The comparisons, the most important first; those for developers only with `everything`."""
    ram, needed, cause = Path(settings.ram_disk), 2 * settings.ram_total, ""
    if device.type != "cuda":
        cause = "torch sees no CUDA device"
    elif not (ram.is_dir() and os.access(ram, os.W_OK) and io_cache.in_memory(ram)):
        cause = f"{ram} is no RAM disk that may be written"
    elif shutil.disk_usage(ram).free < needed:
        cause = f"{ram} has less than {about(needed)} free"
    found: list[Part] = []

    def sized(name: str, of: Callable[..., list[Row]], sizes: Sequence[int], **more: Any) -> None:
        for size in sizes:
            action, label = functools.partial(of, page_bytes=size), f"{name}, {format_size(size)} pages"
            found.append(Part(label, action, cause=cause if "ram" in more else "", **more))

    sized("stores and loads", io_rows.stores_and_loads, tuple(io_rows.TARGETS))
    if settings.everything:
        sized("packed loads from a RAM disk", io_packed.packed_loads, (io_packed.PAGE,), ram=True)
    if "cufile" in settings.ways:
        found.append(Part("direct reads", io_rows.direct_reads, way="cufile"))
    return found


def compare(run: kit.Run, settings: Settings, device: torch.device, part: Part, file: Path) -> None:
    """A comparison as a case, on the RAM disk in its own directory."""
    if not run.wants(part.name):
        return
    if part.cause:
        run.cannot(part.name, part.cause)
        return

    def action() -> kit.Report:
        with contextlib.ExitStack() as stack:
            directory = file.parent
            if part.ram:
                made = tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=settings.ram_disk)
                directory = Path(stack.enter_context(made))
            nbytes = settings.ram_total if part.ram else min(settings.row_total, settings.total)
            threads = settings.threads_on(ram=io_cache.in_memory(directory))
            place = Place(directory, file, nbytes, settings.repeat, threads, device, run.progress)
            return {"comparisons": part.action(place)}

    run.case(part.name, action)


def sweep(run: kit.Run, settings: Settings, device: torch.device, way: str, file: Path) -> None:
    """A way over all sizes, as a case."""
    kind = BY_NAME[way]
    if not run.wants(kind.label):
        return
    run.say(kind.label)
    given: dict[str, Any] = {
        "rounds": settings.sweep_rounds,
        "seconds": settings.sweep_seconds,
        "sizes": settings.sweep_sizes,
    }
    with run.guarded(kind.label):
        if device.type == "cpu" and kind.memory == "cuda":
            found = io_sweep.lacking("torch sees no CUDA device")
        else:
            given |= {"require_gds": settings.require_gds}
            ceilings = run.found["ceilings"]
            found = io_sweep.sweep(file, way, str(device), settings.total, given, ceilings, run.seconds_left)
        said = {"way": way, "label": kind.label, **{key: found[key] for key in ("cause", "word", "direct")}}
        run.add(kind.label, {"ways": [said], "cells": found["cells"]}, lacks=found["cause"])


def require_gds(directory: Path, device: torch.device) -> str:
    """The proof that GPUDirect Storage works in the directory. Raises `TransportUnavailableError` with the cause unless
    the nvidia-fs driver counted reads and writes of a probe."""
    cause = "torch sees no CUDA device" if device.type == "cpu" else probe.no_gds_driver()
    if not cause:
        found = probe.probe("cufile", directory, device.index)
        if found.mode == "gds":
            return found.reason
        cause = found.reason
    raise TransportUnavailableError(
        f"--require-gds: GPUDirect Storage is not proven to work in {directory}: {cause}",
        "see gdscache doctor --dir and docs/gds.md",
    )


# -- tables and the plot -----------------------------------------------------------------------------------------------


def tables(report: kit.Report) -> list[Table]:
    """This cache's speed on the disk, and the requested ways; also of a partial report."""
    return [
        lines_table("This cache", [_line(row) for row in _usual(report)], judged=not kit.quick(report)),
        _swept(report),
    ]


def details(report: kit.Report) -> list[Table]:
    """The other references of comparisons, and the bare loop."""
    usual = _usual(report)
    others = [_line(row) for row in report["comparisons"] if row not in usual]
    loops = Table("Ceilings: the bare loop", "what", "GB/s", "best way", "")
    for name, r in (report["ceilings"] or {}).items():
        rates, way = r["gb_per_second"], f"{r['threads']} threads x {about(r['io_bytes'])}"
        spread = f"{figure(rates['median'])} ({figure(rates['min'])} to {figure(rates['max'])})"
        loops.add_row(name, spread, way, "O_DIRECT" if r["direct"] else "through the page cache")
    return [lines_table("Details", others, judged=not kit.quick(report)), loops]


def bottom(report: kit.Report) -> list[str]:
    """A user's figures: speeds of loads and stores beside the disk's own."""
    found = []
    for what, words in (("cold load", "loads"), ("store", "stores")):
        some = [r for r in _usual(report) if r["case"].startswith("stores and loads") and r["what"].startswith(what)]
        if some:
            r = max(some, key=lambda row: row["figure"]["median"])
            rate, least = figure(r["figure"]["median"]), figure(r["against_figure"]["median"])
            found.append(f"{rate} GB/s of {words}, {figure(r['ratio'])} of the {least} GB/s that it can")
    found = [f"Your disk gives this cache {', and '.join(found)}."] if found else []
    missed = sum(not part["met"] for part in judged(report))
    if missed and not kit.quick(report):
        found.append(f"{missed} figures miss their target; docs/performance.md explains the targets.")
    return [" ".join(found)] if found else []


def _usual(report: kit.Report) -> list[kit.Report]:
    """Comparisons, each with its first reference."""
    found: dict[str, kit.Report] = {}
    for row in report["comparisons"]:
        found.setdefault(row["what"], row)
    return list(found.values())


def _line(row: kit.Report) -> Line:
    cold = "" if row["cache"]["state"] != "kept" else f", page cache KEPT {about(row['cache']['resident_bytes'])}"
    return Line.of(f"{row['what']}{cold}", row)


def _swept(report: kit.Report) -> Table:
    """GB/s: a row for each way and operation, a column for each size."""
    sizes = sorted({cell["io_bytes"] for cell in report["cells"]})
    names = {way["way"]: f"{way['label']} ({way['word']})" for way in report["ways"]}
    table = Table("Ways, byte-checked: GB/s by size of a request", "way", "", *(format_size(size) for size in sizes))
    by_way: dict[tuple[str, str], dict[int, str]] = {}
    for cell in report["cells"]:
        kept = " KEPT" if cell["cache"]["state"] == "kept" else ""
        shown = f"{figure(cell['gb_per_second']['median'])}{kept}"
        by_way.setdefault((cell["way"], cell["op"]), {})[cell["io_bytes"]] = shown
    for (way, op), found in by_way.items():
        table.add_row(names[way], op, *(found.get(size, "") for size in sizes))
    return table


def plot(report: kit.Report, drawn: Any) -> None:
    """Throughput by size, a panel for each operation, where ways were swept; and the comparisons with a target, as
    bars."""
    lines = [_line(r) for r in report["comparisons"] if "target" in r]
    height = 0.5 + 0.22 * len(lines)
    if not report["cells"]:
        drawn.set_size_inches(13, height + 0.5)
        bars(drawn.subplots(1, 1), lines, judged=not kit.quick(report))
        return
    drawn.set_size_inches(13, 4.5 + height)
    top, below = drawn.subfigures(2, 1, height_ratios=(4.5, height))
    for axes, op in zip(top.subplots(1, len(OPS)), OPS, strict=True):
        cells = [cell for cell in report["cells"] if cell["op"] == op]
        for way in WAYS:
            own = [(c["io_bytes"], c["gb_per_second"]["median"]) for c in cells if c["way"] == way.name]
            if own:
                axes.plot(*zip(*sorted(own), strict=True), "o-", label=way.label)
        if report["ceilings"] is not None:
            loop = report["ceilings"][OPS[op].value]["gb_per_second"]["median"]
            axes.axhline(loop, color="black", linestyle="--", label="bare loop")
        axes.set_xscale("log", base=2)
        sizes = sorted({cell["io_bytes"] for cell in cells})
        axes.set_xticks(sizes, [format_size(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(f"{op}, {io_sweep.DEPTH} requests in flight")
        axes.set_ylabel("GB/s")
        if axes.lines:
            axes.legend(fontsize=7)
    bars(below.subplots(1, 1), lines, judged=not kit.quick(report))


SECTIONS: dict[str, Any] = {
    "gds_proof": "",
    "ways": [],
    "ceilings": None,
    "comparisons": [],
    "cells": [],
}
BENCH = kit.Bench("io", "gdscache.bench.io/4", SECTIONS, measure, tables, plot, details, bottom)
