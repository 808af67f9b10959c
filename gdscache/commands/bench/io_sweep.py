"""The sweep of `gdscache bench io` over request sizes, for each way, against a bare loop on the same file.

A way is opened, checked and measured in a child process with a deadline, because cuFile can hang or crash its process.
For depths, mixes and latencies use fio and NVIDIA's gdsio.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache.commands.bench import io_cache, measure
from gdscache.commands.bench.bare import IO_BYTES, BareLoop, Way
from gdscache.commands.bench.io_ways import BY_NAME, CHECK_BYTES, Batch, OpenWay, check
from gdscache.commands.bench.measure import interleave, rate, ratio, seconds
from gdscache.commands.console import Progress
from gdscache.errors import GdsCacheError, IOFailedError
from gdscache.sizes import KIB, MIB
from gdscache.storage.base import Op
from gdscache.storage.probe import gds_operations

OPS = {"random read": Op.READ, "write": Op.WRITE}
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
THREADS = 16  # of the transport
DEPTH, BATCH = 32, 8  # requests in flight, and in a submission; cuFile hung with 256 in flight
LEAST_PASS = 64 * MIB
DEADLINE_S = 300.0
LEAST_DEADLINE_S = 30.0  # with little time left


def ceiling(bare: BareLoop, op: Op, repeat: int, progress: Progress) -> dict[str, Any]:
    """The best bare loop on a file, as plain data."""
    ways = bare.scout(op, progress)
    found = interleave(bare.runs(op, ways), repeat, progress, f"bare {op.value} loop")
    chosen = max(ways, key=lambda way: found[way.label].median)
    others = {label: series.median for label, series in found.items() if label != chosen.label}
    return {
        **chosen._asdict(),
        "direct": bare.direct,
        "gb_per_second": found[chosen.label].describe(),
        "others": others,
    }


def sweep(
    path: Path,
    way: str,
    device: str,
    total: int,
    settings: Mapping[str, Any],
    ceilings: Any,
    seconds_left: float = math.inf,
) -> dict[str, Any]:
    """A way's result on the first `total` bytes of a file, by a child: `cause` (why it cannot run here, or empty),
    `word` (`gds` if nvidia-fs counted, `compat` for GPU bytes without it, `posix`), `direct`, `cells`. `settings`:
    `sizes`, `rounds`, `seconds` (of a pass, at the ceiling's rate), `require_gds`. `seconds_left`: of the whole run.
    Raises `IOFailedError` if a working way fails during the measurement."""
    arguments = str(path), way, device, total, dict(settings), ceilings
    deadline_s = min(DEADLINE_S, max(LEAST_DEADLINE_S, seconds_left))
    try:
        return measure.child("io_sweep", "measure_way", *arguments, deadline_s=deadline_s)
    except measure.ChildDiedError as error:
        return lacking(error.message)


def lacking(cause: str) -> dict[str, Any]:
    """`sweep`'s result for a way that cannot run here."""
    return {"cause": cause, "word": "", "direct": False, "cells": []}


def measure_way(
    path: str, way: str, device: str, total: int, settings: Mapping[str, Any], ceilings: Mapping[str, Any]
) -> dict[str, Any]:
    """In the child: see `sweep`."""
    on, file, counted = torch.device(device), Path(path), gds_operations()
    if on.type == "cuda":
        torch.cuda.set_device(on)
    sizes = [size for size in settings["sizes"] if size * DEPTH <= total]
    try:
        opened = OpenWay(way, file, THREADS, max(CHECK_BYTES, *(DEPTH * size for size in sizes)), on)
        with opened:
            check(opened)
            direct = opened.transport.direct
    except (GdsCacheError, RuntimeError, OSError) as error:
        return lacking(measure.cause_of(error))
    moved = all(new > old for old, new in zip(counted, gds_operations(), strict=True))
    kind = BY_NAME[way]
    word = "posix" if kind.memory == "host" or way == "host_gpu" else "gds" if kind.cufile and moved else "compat"
    found = {"cause": "", "word": word, "direct": direct}
    with OpenWay(way, file, THREADS, DEPTH * max(sizes), on) as opened, BareLoop(file, total) as bare:
        swept = Sweep(opened, bare, settings, ceilings)
        return {**found, "cells": [swept.cell(op, size) for op in OPS for size in sizes]}


def one_pass(way: OpenWay, op: Op, nbytes: int, io_bytes: int) -> None:
    """Move each part of the file's first `nbytes` once, in random order, with `DEPTH` requests in flight."""
    order = (np.random.default_rng(0).permutation(nbytes // io_bytes) * io_bytes).tolist()
    waiting: deque[Batch] = deque()
    for first in range(0, len(order), BATCH):
        if len(waiting) == DEPTH // BATCH:
            way.finish(waiting.popleft())
        places = range(first % DEPTH * io_bytes, (first % DEPTH + BATCH) * io_bytes, io_bytes)
        some = list(zip(order[first : first + BATCH], places, strict=False))
        waiting.append(way.begin(op, some, io_bytes))
    while waiting:
        way.finish(waiting.popleft())


class Sweep:
    """The cells of an open way."""

    def __init__(
        self, way: OpenWay, bare: BareLoop, settings: Mapping[str, Any], ceilings: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.way, self.bare, self._settings, self._total = way, bare, settings, bare.total
        self._loops = {Op(name): Way(found["threads"], found["io_bytes"]) for name, found in ceilings.items()}
        unit, moved = max(IO_BYTES), {op: ceilings[op.value]["gb_per_second"]["median"] for op in Op}
        passes = {op: int(rate_ * 1e9 * settings["seconds"]) for op, rate_ in moved.items()}
        self._passes = {op: min(max(n, LEAST_PASS), self._total) // unit * unit for op, n in passes.items()}

    def cell(self, name: str, io_bytes: int) -> dict[str, Any]:
        """Passes over parts of the file, in turns with the bare loop, as plain data."""
        op, direct, counted = OPS[name], self.way.transport.direct, gds_operations()
        nbytes = self._passes[op] // io_bytes * io_bytes
        self._drop(direct)
        cache = io_cache.state([self.way.path], direct=direct)

        def ours() -> float:
            self._drop(direct)
            return rate(nbytes, seconds(lambda: one_pass(self.way, op, nbytes, io_bytes)))

        found = interleave({"ceiling": lambda: self._bare(op), "ours": ours}, self._settings["rounds"])
        reads, writes = (after - before for before, after in zip(counted, gds_operations(), strict=True))
        if self._settings["require_gds"] and self.way.way.cufile and not reads + writes:
            raise IOFailedError("--require-gds: nvidia-fs counted no I/O", "see gdscache doctor and docs/gds.md")
        return {
            "way": self.way.way.name,
            "op": name,
            "io_bytes": io_bytes,
            "depth": DEPTH,
            "threads": THREADS,
            "direct": direct,
            "cache": cache,
            "bytes": nbytes * self._settings["rounds"],
            "gb_per_second": found["ours"].describe(),
            "ceiling_gb_per_second": found["ceiling"].describe(),
            **ratio(found["ours"], found["ceiling"]),
            "nvidia_fs": {"reads": reads, "writes": writes},
        }

    def _bare(self, op: Op) -> float:
        self._drop(self.bare.direct)
        self.bare.total = self._passes[op]
        try:
            return self.bare.run(op, self._loops[op])
        finally:
            self.bare.total = self._total

    def _drop(self, direct: bool) -> None:
        """Make reads cold: drop the file from the page cache, unless the way bypasses it."""
        if not direct:
            io_cache.drop([self.way.path])
