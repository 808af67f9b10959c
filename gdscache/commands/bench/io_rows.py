"""Comparisons of `gdscache bench io` with an engine: stores, and cold loads from the SSD into the planes, through the
CPU tier. Each part returns rows of figures measured in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gdscache.commands.bench import io_cache, io_sweep, machine
from gdscache.commands.bench.bare import BareLoop, best
from gdscache.commands.bench.io_engine import ColdEngine
from gdscache.commands.bench.io_ways import OpenWay
from gdscache.commands.bench.measure import Series, interleave, rate, seconds
from gdscache.commands.bench.rows import compared
from gdscache.commands.console import Progress
from gdscache.sizes import MIB, format_size
from gdscache.storage.base import Op

TARGETS = {4 * MIB: (0.85, 0.92), 1 * MIB: (0.78, 0.88)}  # of stores and cold loads with planes on the host
GPU_TARGET = 0.93  # of cold loads into planes on a GPU
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
    nbytes: int,
    transport: str,
    **more: Any,
) -> Row:
    """A row of plain data. `figures`: ours, the reference's name, and its figure. `transport` moved our bytes."""
    return compared(
        what,
        *figures,
        limit,
        page_bytes=page_bytes,
        bytes=nbytes,
        file_system=machine.storage(place.directory)["file_system"],
        transport=transport,
        threads=place.threads,
        **more,
    )


def stores_and_loads(place: Place, page_bytes: int) -> list[Row]:
    """Stores until they are on the SSD, and cold loads, against the bare loop on the same slab."""
    pages = f"{format_size(page_bytes)} pages"
    store_target, load_target = TARGETS[page_bytes]
    with opened(place, page_bytes) as engine, BareLoop(engine.slab, engine.nbytes) as bare:
        return [
            _against_bare(place, engine, bare, f"cold load, {pages}", Op.READ, load_target),
            _against_bare(place, engine, bare, f"store, {pages}", Op.WRITE, store_target),
        ]


def _against_bare(place: Place, engine: ColdEngine, bare: BareLoop, label: str, op: Op, limit: float) -> Row:
    prepare, action = (engine.prepare, engine.load) if op is Op.READ else (engine.forget_all, engine.store)

    def ours() -> float:
        prepare()
        return action()

    chosen = bare.scout(op, place.progress)
    found = interleave({"ours": ours, **bare.runs(op, chosen)}, place.repeat, place.progress, label)
    way = best(chosen, found)
    figures = found["ours"], f"bare loop, {way.label}", found[way.label]
    on_gpu = GPU_TARGET if op is Op.READ else None
    least = None if not place.on_disk else limit if place.device.type == "cpu" else on_gpu
    return row(place, label, engine.page_bytes, figures, least, **facts(engine, direct=bare.direct))


def direct_reads(place: Place) -> list[Row]:
    """Cold loads on the direct route against the way `cufile`: the same cuFile calls, as many threads."""
    with (
        opened(place, _PAGE, _DIRECT_SSD) as engine,
        OpenWay("cufile", engine.slab, place.threads, engine.nbytes, place.device) as way,
    ):
        label = "SSD → GPU direct, cold, 1 MiB pages"

        def cufile() -> None:
            io_sweep.one_pass(way, Op.READ, engine.nbytes, _PAGE)

        loops = {"ours": engine.load, "way": lambda: rate(engine.nbytes, seconds(cufile))}
        found = interleave(loops, place.repeat, place.progress, label)
        more = facts(engine)
        _check(engine)
    figures = found["ours"], f"cuFile's reads, {place.threads} threads, 1 MiB", found["way"]
    return [row(place, label, _PAGE, figures, DIRECT_TARGET, **more)]


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
