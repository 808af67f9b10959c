"""Comparisons of `gdscache bench io` with an engine: cold loads from the SSD into the planes, through the CPU tier."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gdscache.bench import io_cache
from gdscache.bench.bare import BareLoop, Way, best
from gdscache.bench.io_engine import ColdEngine
from gdscache.bench.io_files import KvikioPerPage
from gdscache.bench.io_loop import Metered
from gdscache.bench.io_rows import CPU_TARGET, Place, Row, cpu_figures, row
from gdscache.bench.measure import interleave
from gdscache.sizes import KIB, MIB, format_size
from gdscache.storage.base import Op

COLD_TARGET = 0.93
COPY_TARGETS = {4 * MIB: 0.80, 1 * MIB: 0.75, 256 * KIB: 0.55}
KVIKIO_PAGE, KVIKIO_TARGET = 256 * KIB, 2.0
SUMS_TARGET = 0.97
SUMS_PAGE = 1 * MIB


def cold_loads(place: Place) -> list[Row]:
    """SSD → planes against the bare loop on the same slab, and with checksums against without."""
    gpu, page_bytes = place.device.type == "cuda", SUMS_PAGE
    what = f"SSD → {'GPU' if gpu else 'host planes'} via CPU, cold, {format_size(page_bytes)} pages"
    with tempfile.TemporaryDirectory(dir=place.directory) as name, _engine(place, name, page_bytes) as engine:
        with BareLoop(engine.slab, engine.nbytes) as bare:
            chosen = bare.scout(Op.READ, place.progress)
            ways = {"ours": _cold(engine, engine.load), "plain": _cold(engine, engine.load_unchecked)}
            found = interleave({**ways, **bare.runs(Op.READ, chosen)}, place.repeat, place.progress, what)
            way = best(chosen, found)
            state = io_cache.state([engine.slab], direct=engine.direct and bare.direct)
        _check(engine)
        more = _more(engine, state)
    figures = found["ours"], f"bare loop, {way.label}", found[way.label]
    limit = COLD_TARGET if gpu and place.on_disk else None
    sums = found["ours"], "without checksums", found["plain"]
    return [
        row(place, what, page_bytes, figures, limit, **more),
        row(place, f"checksums, {what}", page_bytes, sums, SUMS_TARGET if gpu else None, **more),
    ]


def loads_from_memory(place: Place, page_bytes: int) -> list[Row]:
    """RAM disk → GPU against one page-locked copy; pages of 256 KiB also against kvikio called once a page.

    And against the bare loop beside such copies, which share the memory's bandwidth with it: what is left for a load.
    Once with pages that stay in the CPU tier, and once with pages that pass it by, through the bounce reserve.
    """
    what = f"RAM disk → GPU via CPU, {format_size(page_bytes)} pages"
    with (
        tempfile.TemporaryDirectory(dir=place.directory) as name,
        _engine(place, name, page_bytes) as engine,
        BareLoop(engine.slab, engine.nbytes) as bare,
    ):
        way = bare.scout(Op.READ, place.progress)[0]
        ways: dict[str, Callable[[], float]] = {
            "ours": _cold(engine, engine.load),
            "passing": _cold(engine, engine.load_passing),
            "copy": engine.copy,
            "bare": lambda: _beside_copies(engine, bare, way),
        }
        if page_bytes == SUMS_PAGE:
            ways["plain"] = _cold(engine, engine.load_unchecked)
        for measure in ways.values():
            measure()
        found = interleave(ways, place.repeat, place.progress, what)
        state = io_cache.state([engine.slab], direct=engine.direct)
        _check(engine)
        more = _more(engine, state)
        rows = []
        copied = found["ours"], "a page-locked copy", found["copy"]
        rows.append(row(place, what, page_bytes, copied, COPY_TARGETS[page_bytes], **more))
        passing = found["passing"], "a page-locked copy", found["copy"]
        rows.append(row(place, f"{what} that pass the CPU tier by", page_bytes, passing, None, **more))
        beside = found["ours"], f"bare loop, {way.label}, beside page-locked copies", found["bare"]
        rows.append(row(place, what, page_bytes, beside, None, **more))
        if "plain" in found:
            sums = found["ours"], "without checksums", found["plain"]
            rows.append(row(place, f"checksums, {what}", page_bytes, sums, SUMS_TARGET, **more))
        if page_bytes == KVIKIO_PAGE:
            rows += _against_kvikio(place, engine, what)
    return rows


def _beside_copies(engine: ColdEngine, bare: BareLoop, way: Way) -> float:
    """The bare loop's GB/s while page-locked copies go to the device, one after the other."""
    over = threading.Event()

    def copy() -> None:
        while not over.is_set():
            engine.copy()

    with ThreadPoolExecutor(1) as pool:
        copies = pool.submit(copy)
        try:
            found = bare.run(Op.READ, way)
        finally:
            over.set()
        copies.result()
    return found


def _against_kvikio(place: Place, engine: ColdEngine, what: str) -> list[Row]:
    against, nbytes = "kvikio, one call a page", engine.nbytes
    with KvikioPerPage(engine.slab, engine.flat(), KVIKIO_PAGE, place.threads) as kvikio:
        kvikio.read()
        kvikio.check()
        ways: dict[str, Callable[[], float]] = {
            "ours": Metered(engine.load, nbytes, engine.prepare),
            "kvikio": Metered(kvikio.read, nbytes),
        }
        found = interleave(ways, place.repeat, place.progress, f"{what}, against kvikio")
    more = _more(engine, io_cache.state([engine.slab], direct=engine.direct))
    rates = found["ours"], against, found["kvikio"]
    return [
        row(place, what, KVIKIO_PAGE, rates, KVIKIO_TARGET, **more),
        row(place, f"CPU, {what}", KVIKIO_PAGE, cpu_figures(ways, against), CPU_TARGET, cpu=True, **more),
    ]


def _more(engine: ColdEngine, cache: dict[str, Any]) -> dict[str, Any]:
    return {"nbytes": engine.nbytes, "transport": engine.transport["name"], "cache": cache}


def _engine(place: Place, name: str, page_bytes: int) -> ColdEngine:
    return ColdEngine(Path(name), page_bytes, place.nbytes, place.threads, place.device)


def _cold(engine: ColdEngine, load: Callable[[], float]) -> Callable[[], float]:
    """The load, with the slab dropped from the page cache before where the transport fills it."""

    def once() -> float:
        if not engine.direct:
            io_cache.drop([engine.slab])
        return load()

    return once


def _check(engine: ColdEngine) -> None:
    """One more load, into planes that were overwritten, and a look at what it brought."""
    engine.blank()
    engine.load()
    engine.check()
