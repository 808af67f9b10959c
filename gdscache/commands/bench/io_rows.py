"""Comparisons of `gdscache bench io`: an engine's stores and cold loads, by any transport, and loads of packed pages.
Each function returns rows of figures measured in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from typing import Any

from gdscache.commands.bench import io_cache, machine
from gdscache.commands.bench.bare import BareLoop
from gdscache.commands.bench.io_engine import ColdEngine, Place
from gdscache.commands.bench.measure import Series, interleave
from gdscache.commands.bench.rows import compared
from gdscache.errors import IOFailedError
from gdscache.sizes import MIB, format_size
from gdscache.storage.base import GDS, Op
from gdscache.storage.probe import gds_operations

TRANSPORTS = ("posix", "uring", *GDS)
TARGETS = {4 * MIB: (0.85, 0.92), 1 * MIB: (0.78, 0.88)}  # of stores and cold loads with planes on the host
GPU_TARGET = 0.93  # of cold loads into planes on a GPU
PACKED_PAGE = 8 * MIB  # of 64 tokens, as they lie in the planes
PACKED = {"memory": "CPU tier → GPU", "staying": "SSD → GPU via CPU", "passing": "SSD → GPU past the CPU tier"}
PACKED_TARGETS = {  # of files on a RAM disk
    ("memory", "unpacked"): 1.25,
    ("memory", "a page-locked copy"): 1.18,
    ("staying", "unpacked"): 1.20,
    ("passing", "unpacked"): 1.20,
}

Row = dict[str, Any]


def stores_and_loads(place: Place, page_bytes: int, transport: str = "", *, require_gds: bool = False) -> list[Row]:
    """Stores until they are on the SSD, and cold loads, against the bare loop on the same slab.

    `transport`: as `ssd.transport`, with pages straight to the GPU where it may use GPUDirect Storage; empty for `auto`
    without it. `require_gds`: raise an error unless the driver's counters prove it.
    """
    pages = f"{format_size(page_bytes)} pages"
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
            label = f"{what}, {transport}, {pages}" if transport else f"{what}, {pages}"
            ways = {way.label: functools.partial(bare.run, op, way) for way in bare.scout(op, place.progress)}
            rates = interleave({"ours": ours, **ways}, place.repeat, place.progress, label)
            best = max(ways, key=lambda name: rates[name]["median"])
            least = None if transport or not place.on_disk else target
            found.append(_row(engine, place, label, (rates["ours"], f"bare loop, {best}", rates[best]), least))
        engine.check()
    if require_gds and transport in GDS and gds_operations() == counted:
        raise IOFailedError("--require-gds: nvidia-fs counted no I/O", "see gdscache doctor and docs/gds.md")
    return found


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
        cache=io_cache.state(engine.slab, direct=bool(transport["direct"])),
    )
