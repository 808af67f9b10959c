"""This cache's speed on a disk, against the disk's own. Behind `gdscache bench io`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.bench import kit, machine
from gdscache.commands.bench.bare import BareLoop
from gdscache.commands.bench.figures import Line, Ratios, Series, compared, in_words, interleave
from gdscache.commands.bench.io_engine import ColdEngine, Place
from gdscache.config import SsdConfig
from gdscache.errors import CapacityError, InvalidValueError, IOFailedError, TransportUnavailableError
from gdscache.sizes import GIB, MIB, about, format_size
from gdscache.storage.base import GDS, Op
from gdscache.storage.probe import gds_operations

LEAST = 16 * MIB
ENGINE_THREADS = int(SsdConfig.model_fields["threads"].default)
RAM_THREADS = max(ENGINE_THREADS, 12)  # the cores that copy its bytes limit a RAM disk
TRANSPORTS = ("posix", "uring", *GDS)
TARGETS = {4 * MIB: (0.85, 0.92), 1 * MIB: (0.78, 0.88)}  # of stores and cold loads with planes on the host
GPU_TARGET = 0.93  # of cold loads into planes on a GPU
PACKED_PAGE = 8 * MIB  # of 64 tokens, as they lie in the planes
PACKED_LOADS = f"packed loads, {format_size(PACKED_PAGE)} pages"
PACKED = {"memory": "CPU tier → GPU", "staying": "SSD → GPU via CPU", "passing": "SSD → GPU past the CPU tier"}
PACKED_TARGETS = {  # of files on a RAM disk
    ("memory", "unpacked"): 1.25,
    ("memory", "a page-locked copy"): 1.18,
    ("staying", "unpacked"): 1.20,
    ("passing", "unpacked"): 1.20,
}

Row = dict[str, Any]


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
    def defaults(cls, *, quick: bool = False, everything: bool = False, **options: Any) -> dict[str, Any]:
        quickly = {"total": LEAST, "repeat": 2, "threads": 4} if quick else {}
        return {"transports": TRANSPORTS if everything else (), **quickly}

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
    some: dict[str, Callable[[Place], list[Row]]] = {}
    for transport, size in itertools.product(("", *settings.transports), TARGETS):
        given: dict[str, Any] = {"page_bytes": size, "transport": transport, "require_gds": settings.require_gds}
        some[_label("stores and loads", transport, size)] = functools.partial(stores_and_loads, **given)
    if settings.everything and device.type == "cuda":
        some[PACKED_LOADS] = packed_loads
    run.plan([*some])
    if settings.everything and device.type == "cpu":
        run.cannot(PACKED_LOADS, "torch sees no CUDA device")
    threads = settings.threads or (RAM_THREADS if machine.in_memory(directory) else ENGINE_THREADS)
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as made:
        place = Place(Path(made), settings.total, settings.repeat, threads, device, run.progress)
        for name, action in some.items():
            run.case(name, functools.partial(_comparisons, action, place, require_gds=settings.require_gds))


def _comparisons(action: Callable[[Place], list[Row]], place: Place, *, require_gds: bool) -> kit.Report:
    try:
        return {"comparisons": action(place)}
    except TransportUnavailableError as error:
        if require_gds:
            raise IOFailedError(f"--require-gds: {error.message}", error.hint) from error
        raise


# -- comparisons: figures measured in turns ----------------------------------------------------------------------------


def stores_and_loads(place: Place, page_bytes: int, transport: str = "", *, require_gds: bool = False) -> list[Row]:
    """Stores until they are on the SSD, and cold loads, against the bare loop on the same slab.

    `transport`: as `ssd.transport`, with pages straight to the GPU where it may use GPUDirect Storage; empty for `auto`
    without it. `require_gds`: raise an error unless the driver's counters prove it.
    """
    store_target, load_target = TARGETS[page_bytes] if place.device.type == "cpu" else (None, GPU_TARGET)
    ssd = {"transport": transport, "gds": "off"} if transport else {}
    if transport in GDS:
        ssd["gds"] = "on" if require_gds else "auto"
        ssd["route"] = "direct" if place.device.type == "cuda" else "auto"
    counted = gds_operations()
    with closing(ColdEngine(place, page_bytes, ssd)) as engine, closing(BareLoop(engine.slab, engine.nbytes)) as bare:
        found = []
        for what, op, ours, target in (
            ("cold load", Op.READ, engine.load, load_target),
            ("store", Op.WRITE, engine.store, store_target),
        ):
            label = _label(what, transport, page_bytes)
            ways = {way.label: functools.partial(bare.run, op, way) for way in bare.scout(op, place.progress)}
            rates = interleave({"ours": ours, **ways}, place.repeat, place.progress, label)
            best = max(ways, key=lambda name: rates[name]["median"])
            least = None if transport or not place.on_disk else target
            found.append(_row(engine, place, label, (rates["ours"], f"bare loop, {best}", rates[best]), least))
        engine.check()
    if require_gds and transport in GDS and gds_operations() == counted:
        raise IOFailedError("--require-gds: nvidia-fs counted no I/O", "see gdscache doctor and docs/gds.md")
    return found


def _label(what: str, transport: str, page_bytes: int) -> str:
    return ", ".join([what, *([transport] if transport else []), f"{format_size(page_bytes)} pages"])


def packed_loads(place: Place, page_bytes: int = PACKED_PAGE) -> list[Row]:
    """Loads of packed pages against loads of unpacked ones, and against one page-locked copy. Bytes are logical."""
    with closing(ColdEngine(place, page_bytes)) as plain, closing(ColdEngine(place, page_bytes, pack=True)) as packed:
        ways: dict[str, Callable[[], float]] = {"copy": plain.copy}
        for kind, engine in {"unpacked": plain, "packed": packed}.items():
            ways |= {
                f"staying {kind}": engine.load,
                f"memory {kind}": engine.load_from_cpu,
                f"passing {kind}": engine.load_passing,
            }
        for measure in ways.values():  # warms up
            measure()
        packed.check()
        found = interleave(ways, place.repeat, place.progress, "packed pages")
        rows = []
        for kind, what in PACKED.items():
            label, ours = f"{what}, packed {format_size(page_bytes)} pages", found[f"{kind} packed"]
            for against, other in (("unpacked", f"{kind} unpacked"), ("a page-locked copy", "copy")):
                least = None if place.on_disk else PACKED_TARGETS.get((kind, against))
                rows.append(_row(packed, place, label, (ours, against, found[other]), least))
    return rows


def _row(engine: ColdEngine, place: Place, what: str, figures: tuple[Series, str, Series], limit: float | None) -> Row:
    """A row of plain data. `figures`: ours, the reference's name, and its figure."""
    transport = engine.transport
    return compared(
        what,
        *figures,
        limit,
        page_bytes=engine.nbytes // engine.pages,
        bytes=engine.nbytes,
        file_system=machine.storage(place.directory)["file_system"],
        transport=transport["name"],
        threads=place.threads,
        cache=machine.cache_state(engine.slab, direct=bool(transport["direct"])),
    )


# -- tables and the plot -----------------------------------------------------------------------------------------------


def panels(report: kit.Report) -> list[Ratios]:
    """This cache's speed on the disk; also of a partial report."""
    return [Ratios("This cache", [*map(_line, report["comparisons"])])]


def bottom(report: kit.Report) -> list[str]:
    """A user's figures: speeds of loads and stores beside the disk's own."""
    found = []
    for what, words in (("cold load", "loads"), ("store", "stores")):
        labels = [_label(what, "", size) for size in TARGETS]
        if some := [row for row in report["comparisons"] if row["what"] in labels]:
            best = max(some, key=lambda row: row["figure"]["median"])
            found.append(in_words(words, best, "that it can"))
    found = [f"Your disk gives this cache {', and '.join(found)}."] if found else []
    missed = sum(not row.get("met", True) for row in report["comparisons"])
    if missed:
        found.append(f"{missed} figures miss their target; docs/performance.md explains the targets.")
    return [" ".join(found)] if found else []


def _line(row: kit.Report) -> Line:
    cold = "" if row["cache"]["state"] != "kept" else f", page cache KEPT {about(row['cache']['resident_bytes'])}"
    return f"{row['what']}{cold}", row


BENCH = kit.Bench("io", "gdscache.bench.io/5", {"comparisons": []}, Settings, measure, panels, bottom)
