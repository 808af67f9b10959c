"""Shared parts of the comparisons of `gdscache bench io`, and reads without an engine. Each part returns rows of
figures measured in turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache.commands.bench import io_cache, machine
from gdscache.commands.bench.bare import BareLoop, best
from gdscache.commands.bench.io_ways import OpenWay, engine_way
from gdscache.commands.bench.measure import Series, interleave, rate
from gdscache.commands.bench.rows import compared
from gdscache.commands.console import Progress
from gdscache.sizes import GIB, MIB
from gdscache.storage.base import Op

HOST_TARGET = 0.95
HOST_THREADS = (4, 8, 16)  # tried thread counts
SUBMIT_PAGES = 128  # of one submit, as in a load


@dataclasses.dataclass(frozen=True)
class Place:
    """A part's place and size. `file`: in `directory`, written, of `nbytes`. `calls`: number of timed calls."""

    directory: Path
    file: Path
    nbytes: int
    repeat: int
    threads: int
    device: torch.device
    progress: Progress
    calls: int

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
    nbytes: int | None = None,
    transport: str,
    threads: int | None = None,
    **more: Any,
) -> Row:
    """A row of plain data. `figures`: ours, the reference's name, and its figure. `transport` moved our bytes."""
    return compared(
        what,
        *figures,
        limit,
        unit,
        page_bytes=page_bytes,
        bytes=place.nbytes if nbytes is None else nbytes,
        file_system=machine.storage(place.directory)["file_system"],
        transport=transport,
        threads=threads or place.threads,
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


def host_reads(place: Place) -> list[Row]:
    """Reads of 1 MiB extents in random order into host memory, submitted as in a load, against the bare loop."""
    label, scouted, name = "host reads of 1 MiB extents", {}, engine_way(place.directory)
    with BareLoop(place.file, place.nbytes) as bare:
        bare_ways = bare.scout(Op.READ, place.progress)
        for number, threads in enumerate(HOST_THREADS):
            place.progress(number, len(HOST_THREADS), f"{label}: {threads} threads")
            with OpenWay(name, place.file, threads, place.nbytes, place.device) as way:
                read = extents(place, way)
                scouted[threads] = max(read() for _ in range(3))
        threads = max(scouted, key=lambda threads: scouted[threads])
        with OpenWay(name, place.file, threads, place.nbytes, place.device) as way:
            ways = {"ours": extents(place, way), **bare.runs(Op.READ, bare_ways)}
            found = interleave(ways, place.repeat, place.progress, label)
            direct, transport = way.transport.direct, way.transport.name
        chosen = best(bare_ways, found)
        state = io_cache.state([place.file], direct=direct and bare.direct)
    limit = HOST_TARGET if place.on_disk else None
    figures = found["ours"], f"bare loop, {chosen.label}", found[chosen.label]
    return [row(place, label, MIB, figures, limit, transport=transport, threads=threads, cache=state)]


def extents(place: Place, way: OpenWay) -> Callable[[], float]:
    """Every extent of the file once, in random order; all submits come before the first wait."""
    order = np.random.default_rng(3).permutation(place.nbytes // MIB).tolist()
    submits = [order[at : at + SUBMIT_PAGES] for at in range(0, len(order), SUBMIT_PAGES)]

    def once() -> float:
        if not way.transport.direct:
            io_cache.drop([place.file])
        start = time.perf_counter()
        begun = [way.begin(Op.READ, [(n * MIB, n * MIB) for n in some], MIB) for some in submits]
        for batch in begun:
            way.finish(batch)
        return rate(len(order) * MIB, time.perf_counter() - start)

    return once


def cpu_figures(ways: Mapping[str, Callable[[], float]], against: str) -> tuple[Series, str, Series]:
    """CPU seconds per GiB of two metered ways, ours first, as arguments of `row`."""
    ours, other = ways.values()
    assert isinstance(ours, Metered)
    assert isinstance(other, Metered)
    return ours.cpu_per_gib, against, other.cpu_per_gib
