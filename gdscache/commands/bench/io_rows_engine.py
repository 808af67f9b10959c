"""Comparisons of `gdscache bench io` with an engine: cold loads from the SSD into the planes, through the CPU tier."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gdscache.commands.bench import io_cache
from gdscache.commands.bench.bare import IO_BYTES, BareLoop, Onward, Way, best
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_files import FilePerPage
from gdscache.commands.bench.io_rows import Place, Row, extents, row
from gdscache.commands.bench.io_ways import OpenWay
from gdscache.commands.bench.measure import Series, interleave, rate
from gdscache.commands.bench.neighbours import LABELS, beside
from gdscache.sizes import KIB, MIB, format_size
from gdscache.storage.base import Op

COLD_TARGET = 0.93
ONWARD_TARGETS = {4 * MIB: 0.90, 1 * MIB: 0.90, 256 * KIB: 0.80}  # of the bare loop with copies
FILE_READ_TARGET, FILE_WRITE_TARGET = 2.0, 1.5  # against one file a page
SUMS_TARGET = 0.97
SUMS_PAGE = 1 * MIB
DIRECT_TARGET, DIRECT_BESIDE_TARGET = 0.95, 0.55
_DIRECT_SSD = {"transport": "cufile", "gds": "auto", "route": "direct"}
_PAGE = 1 * MIB


def cold_loads(place: Place) -> list[Row]:
    """SSD → planes against the bare loop on the same slab, and with checksums against without."""
    gpu, page_bytes = place.device.type == "cuda", SUMS_PAGE
    what = f"SSD → {'GPU' if gpu else 'host planes'} via CPU, cold, {format_size(page_bytes)} pages"
    with opened(place, page_bytes) as engine:
        with BareLoop(engine.slab, engine.nbytes) as bare:
            chosen = bare.scout(Op.READ, place.progress)
            ways = {"ours": cold(engine, engine.load), "plain": cold(engine, engine.load_unchecked)}
            found = interleave({**ways, **bare.runs(Op.READ, chosen)}, place.repeat, place.progress, what)
            way, more = best(chosen, found), facts(engine, direct=bare.direct)
        _check(engine)
    figures = found["ours"], f"bare loop, {way.label}", found[way.label]
    limit = COLD_TARGET if gpu and place.on_disk else None
    sums = found["ours"], "without checksums", found["plain"]
    return [
        row(place, what, page_bytes, figures, limit, **more),
        row(place, f"checksums, {what}", page_bytes, sums, SUMS_TARGET if gpu else None, **more),
    ]


def loads_from_memory(place: Place, page_bytes: int) -> list[Row]:
    """RAM disk → GPU against one page-locked copy, and against the bare loop that reads with the same number of threads
    and copies on. Once with pages that stay in the CPU tier, and once with pages that pass through the bounce reserve;
    then the loop has memory of the loads' reserve."""
    what = f"RAM disk → GPU via CPU, {format_size(page_bytes)} pages"
    with opened(place, page_bytes) as engine, BareLoop(engine.slab, engine.nbytes) as bare:
        loops = _onward(place, engine, bare)
        ways: dict[str, Callable[[], float]] = {
            "ours": cold(engine, engine.load),
            "passing": cold(engine, engine.load_passing),
            "copy": engine.copy,
            **{name: run for some in loops.values() for name, run in some.items()},
        }
        if page_bytes == SUMS_PAGE:
            ways["plain"] = cold(engine, engine.load_unchecked)
        for measure in ways.values():
            measure()
        found = interleave(ways, place.repeat, place.progress, what)
        more = facts(engine)
        _check(engine)
        rows = []
        for kind, label in {"ours": what, "passing": f"{what} that pass the CPU tier by"}.items():
            loop = max(loops[kind], key=lambda name: found[name].median)
            against = found[kind], loop, found[loop]
            rows.append(row(place, label, page_bytes, against, ONWARD_TARGETS[page_bytes], **more))
            copied = found[kind], "a page-locked copy", found["copy"]
            rows.append(row(place, label, page_bytes, copied, None, **more))
        if "plain" in found:
            sums = found["ours"], "without checksums", found["plain"]
            rows.append(row(place, f"checksums, {what}", page_bytes, sums, SUMS_TARGET, **more))
    return rows


def _onward(place: Place, engine: ColdEngine, bare: BareLoop) -> dict[str, dict[str, Callable[[], float]]]:
    """The bare loops with copies: for staying pages, and through memory of the size of the loads' reserve."""
    found: dict[str, dict[str, Callable[[], float]]] = {}
    for kind, through in (("ours", None), ("passing", engine.reserve_bytes)):
        onward = Onward(engine.flat(), through)
        ways = onward.ways(Way(place.threads, size) for size in IO_BYTES)
        memory = "" if through is None else f" through {format_size(through)}"
        runs = bare.runs(Op.READ, ways, onward)
        found[kind] = {f"bare loop that copies on{memory}, {name}": run for name, run in runs.items()}
    return found


def file_per_page(place: Place, page_bytes: int) -> list[Row]:
    """An engine against one file a page: stores until on the device, and cold loads of pages in random order."""
    label = f"{format_size(page_bytes)} pages"
    with opened(place, page_bytes) as engine, tempfile.TemporaryDirectory(dir=place.directory) as theirs:
        files = FilePerPage(Path(theirs), engine.pages, page_bytes)
        returned: list[float] = []

        def store() -> float:
            seconds = engine.nbytes / engine.store() / 1e9
            start = time.perf_counter()
            io_cache.sync(place.directory)
            return rate(engine.nbytes, seconds + time.perf_counter() - start)

        def write() -> float:
            until_return, until_device = files.write()
            returned.append(until_return)
            return until_device

        for warm_up in (store, store, write):
            warm_up()
        returned.clear()
        stored = interleave({"ours": store, "files": write}, place.repeat, place.progress, f"{label}: stores, files")
        io_cache.drop(files.files)
        state = io_cache.state(files.files, direct=False)
        ways = {"ours": cold(engine, engine.load_scattered), "files": files.read}
        ways["threads"] = lambda: files.read(place.threads)
        loaded = interleave(ways, place.repeat, place.progress, f"{label}: loads, files")
        files.check()
        more = facts(engine) | {"cache": state}
    many = f"a file a page, {place.threads} threads"
    early = Series(tuple(returned))
    read = loaded["ours"], "a file a page", loaded["files"]
    written = stored["ours"], "a file a page, until on the device", stored["files"]
    return [
        row(place, f"random {label}, load", page_bytes, read, FILE_READ_TARGET, **more),
        row(place, f"{label}, store", page_bytes, written, FILE_WRITE_TARGET, **more),
        row(place, f"random {label}, load", page_bytes, (loaded["ours"], many, loaded["threads"]), None, **more),
        row(
            place,
            f"{label}, store",
            page_bytes,
            (stored["ours"], "a file a page, until it returns", early),
            None,
            **more,
        ),
    ]


def direct_reads(place: Place) -> list[Row]:
    """SSD → GPU by cuFile with calls of 1 MiB: extents submitted by Python, and an engine's cold loads, submitted
    natively; against a C++ loop of the same calls with the same number of threads, and beside a Python thread."""
    rows = []
    with OpenWay("cufile", place.file, place.threads, place.nbytes, place.device) as way:
        label = "direct GPU reads of 1 MiB extents"
        ways = {"ours": extents(place, way), "loop": lambda: way.run_bare(Op.READ, _PAGE, place.threads)}
        found = interleave(ways, place.repeat, place.progress, label)
        state = io_cache.state([place.file], direct=way.transport.direct)
        figures = found["ours"], f"bare cuFile loop, {place.threads} threads, 1 MiB", found["loop"]
        rows.append(row(place, label, _PAGE, figures, DIRECT_TARGET, transport=way.transport.name, cache=state))
    with (
        opened(place, _PAGE, _DIRECT_SSD) as engine,
        OpenWay("cufile", engine.slab, place.threads, engine.nbytes, place.device) as way,
    ):
        label = "SSD → GPU direct, cold, 1 MiB pages"
        loops = {"ours": engine.load, "loop": lambda: way.run_bare(Op.READ, _PAGE, place.threads)}
        loops["beside"] = beside("busy", engine.load)
        found = interleave(loops, place.repeat, place.progress, label)
        more = facts(engine)
        _check(engine)
        figures = found["ours"], f"bare cuFile loop, {place.threads} threads, 1 MiB", found["loop"]
        rows.append(row(place, label, _PAGE, figures, DIRECT_TARGET, **more))
        figures = found["beside"], "alone", found["ours"]
        rows.append(row(place, f"{label}, beside {LABELS['busy']}", _PAGE, figures, DIRECT_BESIDE_TARGET, **more))
    return rows


@contextlib.contextmanager
def opened(place: Place, page_bytes: int, ssd: Mapping[str, Any] | None = None) -> Iterator[ColdEngine]:
    """An engine in a temporary directory. `ssd`: changed keys of its section."""
    with (
        tempfile.TemporaryDirectory(dir=place.directory) as name,
        ColdEngine(Path(name), page_bytes, place.nbytes, place.threads, place.device, ssd) as engine,
    ):
        yield engine


def facts(engine: ColdEngine, *, direct: bool = True) -> dict[str, Any]:
    """The facts of an engine's rows about its bytes. `direct`: whether the reference bypasses the page cache."""
    cache = io_cache.state([engine.slab], direct=engine.direct and direct)
    return {"nbytes": engine.nbytes, "transport": engine.transport["name"], "cache": cache}


def cold(engine: ColdEngine, load: Callable[[], float]) -> Callable[[], float]:
    """The load. For a transport that fills the page cache, the slab is dropped from it first."""

    def once() -> float:
        if not engine.direct:
            io_cache.drop([engine.slab])
        return load()

    return once


def _check(engine: ColdEngine) -> None:
    """Load once more, into overwritten planes, and compare the bytes."""
    engine.blank()
    engine.load()
    engine.check()
