"""Comparisons of `gdscache bench io` with an engine: stores, and cold loads from the SSD into the planes, through the
CPU tier. Each part returns rows of figures measured in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache.commands.bench import io_cache, machine
from gdscache.commands.bench.bare import IO_BYTES, BareLoop, Onward, Way, best
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_ways import OpenWay
from gdscache.commands.bench.measure import Series, interleave
from gdscache.commands.bench.rows import compared
from gdscache.commands.console import Progress
from gdscache.sizes import GIB, KIB, MIB, format_size
from gdscache.storage.base import Op

TARGETS = {4 * MIB: (0.85, 0.92), 1 * MIB: (0.78, 0.88)}  # of stores and cold loads with planes on the host
CPU_TARGET, GPU_TARGET = 1.25, 0.93  # GPU_TARGET: of cold loads into planes on a GPU
ONWARD_TARGETS = {4 * MIB: 0.90, 1 * MIB: 0.90, 256 * KIB: 0.80}  # of the bare loop with copies
DIRECT_TARGET = 0.95
_DIRECT_SSD = {"transport": "cufile", "gds": "auto", "route": "direct"}
_PAGE = 1 * MIB


@dataclasses.dataclass(frozen=True)
class Place:
    """A part's place and size. `file`: in `directory`, written, of `nbytes`."""

    directory: Path
    file: Path
    nbytes: int
    repeat: int
    threads: int
    device: torch.device
    progress: Progress

    @property
    def on_disk(self) -> bool:
        return not io_cache.in_memory(self.directory)


Row = dict[str, Any]


def row(
    place: Place,
    what: str,
    page_bytes: int,
    figures: tuple[Series, str, Series],
    limit: float | None,
    *,
    unit: str = "GB/s",
    nbytes: int,
    transport: str,
    **more: Any,
) -> Row:
    """A row of plain data. `figures`: ours, the reference's name, and its figure. `transport` moved our bytes."""
    return compared(
        what,
        *figures,
        limit,
        unit,
        page_bytes=page_bytes,
        bytes=nbytes,
        file_system=machine.storage(place.directory)["file_system"],
        transport=transport,
        threads=place.threads,
        **more,
    )


class Metered:
    """Calls a way that returns GB/s, and records the CPU seconds per GiB of every call. `first` runs before each call
    and does not count."""

    def __init__(self, way: Callable[[], float], nbytes: int, first: Callable[[], object] = lambda: None) -> None:
        self._way = way
        self._nbytes = nbytes
        self._first = first
        self._cpu: list[float] = []

    def __call__(self) -> float:
        self._first()
        before = time.process_time()
        found = self._way()
        self._cpu.append((time.process_time() - before) / self._nbytes * GIB)
        return found

    @property
    def cpu_per_gib(self) -> Series:
        return Series(tuple(self._cpu))


def cpu_figures(ways: Mapping[str, Callable[[], float]], against: str) -> tuple[Series, str, Series]:
    """CPU seconds per GiB of two metered ways, ours first, as arguments of `row`."""
    ours, other = ways.values()
    assert isinstance(ours, Metered)
    assert isinstance(other, Metered)
    return ours.cpu_per_gib, against, other.cpu_per_gib


def stores_and_loads(place: Place, page_bytes: int) -> list[Row]:
    """Stores until they are on the SSD, and cold loads, against the bare loop on the same slab. Both, and their CPU
    seconds, also against a loop that copies and sums the same bytes."""
    pages = f"{format_size(page_bytes)} pages"
    with opened(place, page_bytes) as engine:
        planes = np.ones(engine.nbytes, np.uint8)
        rows = []
        with BareLoop(engine.slab, engine.nbytes) as bare:
            store_target, load_target = TARGETS[page_bytes]
            for what in (
                (f"cold load, {pages}", engine.load, Op.READ, load_target),
                (f"store, {pages}", engine.store, Op.WRITE, store_target),
            ):
                rows += _against_bare(place, engine, bare, planes, what)
    return rows


def _against_bare(
    place: Place,
    engine: ColdEngine,
    bare: BareLoop,
    planes: np.ndarray[Any, np.dtype[np.uint8]],
    what: tuple[str, Callable[[], float], Op, float],
) -> list[Row]:
    label, action, op, limit = what
    chosen = bare.scout(op, place.progress)
    layer = engine.layer_bytes
    whole = Way(max(2, chosen[0].threads), max(way.io_bytes for way in chosen))
    metered = {
        "ours": Metered(action, engine.nbytes, engine.prepare if op is Op.READ else engine.forget_all),
        "loop": Metered(lambda: bare.run(op, whole, planes, layer), engine.nbytes),
    }
    found = interleave({**metered, **bare.runs(op, chosen)}, place.repeat, place.progress, label)
    way = best(chosen, found)
    host = place.device.type == "cpu" and place.on_disk
    on_gpu = GPU_TARGET if op is Op.READ and place.on_disk and not host else None
    more = facts(engine, direct=bare.direct)
    figures = found["ours"], f"bare loop, {way.label}", found[way.label]
    copied = f"bare loop that copies and sums, {whole.label}"
    spent = cpu_figures(metered, "bare loop, one copy and the sums")
    return [
        row(place, label, engine.page_bytes, figures, limit if host else on_gpu, **more),
        row(place, label, engine.page_bytes, (found["ours"], copied, found["loop"]), None, **more),
        row(place, f"CPU, {label}", engine.page_bytes, spent, CPU_TARGET if host else None, unit="CPU s/GiB", **more),
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


def direct_reads(place: Place) -> list[Row]:
    """Cold loads on the direct route, without Python on the way of the bytes, against a loop in C++ of the same cuFile
    calls with the same number of threads."""
    with (
        opened(place, _PAGE, _DIRECT_SSD) as engine,
        OpenWay("cufile", engine.slab, place.threads, engine.nbytes, place.device) as way,
    ):
        label = "SSD → GPU direct, cold, 1 MiB pages"
        loops = {"ours": engine.load, "loop": lambda: way.run_bare(Op.READ, _PAGE, place.threads)}
        found = interleave(loops, place.repeat, place.progress, label)
        more = facts(engine)
        _check(engine)
    bare = found["ours"], f"bare cuFile loop, {place.threads} threads, 1 MiB", found["loop"]
    return [row(place, label, _PAGE, bare, DIRECT_TARGET, **more)]


@contextlib.contextmanager
def opened(
    place: Place, page_bytes: int, ssd: Mapping[str, Any] | None = None, *, pack: bool = False
) -> Iterator[ColdEngine]:
    """An engine in a temporary directory. `ssd`: changed keys of its section. `pack`: keep pages packed."""
    with (
        tempfile.TemporaryDirectory(dir=place.directory) as name,
        ColdEngine(Path(name), page_bytes, place.nbytes, place.threads, place.device, ssd, pack=pack) as engine,
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
