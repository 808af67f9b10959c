"""The matrix of `gdscache bench io`: cells that take turns with a bare loop on the same file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache.commands.bench import io_cache
from gdscache.commands.bench.bare import IO_BYTES, BareLoop, Way, best
from gdscache.commands.bench.io_cells import BY_NAME, Cell, Settings, by_threads, mixed_rate, percentiles
from gdscache.commands.bench.io_loop import Run, run
from gdscache.commands.bench.io_trial import cause_of
from gdscache.commands.bench.io_ways import CHECK_BYTES, OpenWay, check
from gdscache.commands.bench.measure import Progress, Series, interleave, ratio
from gdscache.errors import GdsCacheError, IOFailedError
from gdscache.sizes import MIB
from gdscache.storage.base import Op
from gdscache.storage.probe import gds_operations

LEAST_PASS = 64 * MIB  # of the bare loop, beside a cell


class Matrix:
    """Measures cells on one file; what it finds goes into `found`, and `keep` is called with it after each."""

    def __init__(
        self,
        bare: BareLoop,
        path: Path,
        device: torch.device,
        settings: Settings,
        found: dict[str, Any],
        progress: Progress,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._bare, self._path, self._device = bare, path, device
        self._settings, self._found = settings, found
        self._progress, self._keep = progress, keep
        self._ways: dict[Op, tuple[Way, int]] = {}
        self._done = self._count = 0

    def ceilings(self) -> None:
        """Write the file, and find the best bare loop for each direction (or take those that `found` has)."""
        self._bare.run(Op.WRITE, Way(4, max(IO_BYTES)))
        for op in Op:
            if op.value not in self._found["ceilings"]:
                self._found["ceilings"][op.value] = self._ceiling(op)
            known = self._found["ceilings"][op.value]
            way = Way(known["threads"], known["io_bytes"])
            nbytes = int(known["gb_per_second"]["median"] * 1e9 * self._settings.cell_seconds)
            unit = max(IO_BYTES)
            nbytes = min(max(nbytes, LEAST_PASS), self._bare.total) // unit * unit
            self._ways[op] = way, nbytes

    def _ceiling(self, op: Op) -> dict[str, Any]:
        ways = self._bare.scout(op, self._progress)
        label = f"bare {op.value} loop, best ways"
        found = interleave(self._bare.runs(op, ways), self._settings.repeat, self._progress, label)
        chosen = best(ways, found)
        others = {label: series.median for label, series in found.items() if label != chosen.label}
        rates = found[chosen.label].describe()
        return {**chosen._asdict(), "direct": self._bare.direct, "gb_per_second": rates, "others": others}

    def cells(self, wanted: Sequence[Cell], until: float | None) -> None:
        """Measure cells, way by way, until `until` (`time.monotonic()`): each way has its share of what is left."""
        self._done, self._count = 0, len(wanted)
        by_way = [list(some) for _, some in itertools.groupby(wanted, lambda cell: cell.way)]
        for number, some in enumerate(by_way):
            now = time.monotonic()
            share = None if until is None else now + max(until - now, 0.0) / (len(by_way) - number)
            before = self._done
            try:
                self._way(some, share)
            except (GdsCacheError, RuntimeError, OSError, MemoryError) as error:
                what = some[min(self._done - before, len(some) - 1)].label
                self._found["failed"].append({"what": what, "cause": cause_of(error)})
            self._found["left"] += len(some) - (self._done - before)
            self._count -= len(some) - (self._done - before)
            self._keep(self._found)

    def _way(self, some: Sequence[Cell], until: float | None) -> None:
        checked = False
        for threads, group in by_threads(some):
            nbytes = max(CHECK_BYTES, *(cell.io_bytes * cell.depth for cell in group))
            with OpenWay(group[0].way, self._path, threads, nbytes, self._device) as way:
                if not checked:
                    check(way)
                    checked = True
                for cell in group:
                    if until is not None and time.monotonic() >= until:
                        return
                    self._progress(self._done, self._count, cell.label)
                    self._found["cells"].append(self._cell(way, cell))
                    self._done += 1
                    self._keep(self._found)

    def _cell(self, way: OpenWay, cell: Cell) -> dict[str, Any]:
        lanes = [way.lane() for _ in range(cell.lanes)]
        direct, seconds = way.transport.direct, self._settings.cell_seconds
        runs: list[Run] = []
        ceilings: list[float] = []
        cache: dict[str, Any] = {}
        counted = gds_operations()
        for _ in range(self._settings.cell_rounds):
            ceilings.append(self._bare_rate(cell))
            if not direct:
                io_cache.drop([self._path])
            cache = cache or io_cache.state([self._path], direct=direct)
            runs.append(run(cell, lanes, self._bare.total, seconds, again=direct))
        reads, writes = (after - before for before, after in zip(counted, gds_operations(), strict=True))
        if self._settings.require_gds and BY_NAME[cell.way].cufile and not reads + writes:
            raise IOFailedError("--require-gds: nvidia-fs counted no I/O", "see gdscache doctor and docs/gds.md")
        rates, ceiling = Series(tuple(r.gb_per_second for r in runs)), Series(tuple(ceilings))
        latencies = np.concatenate([r.latencies for r in runs])
        return {
            **cell.describe(),
            "direct": direct,
            "cache": cache,
            "bytes": sum(r.nbytes for r in runs),
            "requests": len(latencies),
            "gb_per_second": rates.describe(),
            "iops": rates.median * 1e9 / cell.io_bytes,
            "latency_seconds": percentiles(latencies),
            "cpu_seconds_per_gib": Series(tuple(r.cpu_per_gib for r in runs)).describe(),
            "ceiling_gb_per_second": ceiling.describe(),
            **ratio(rates, ceiling),
            "nvidia_fs": {"reads": reads, "writes": writes},
        }

    def _bare_rate(self, cell: Cell) -> float:
        """GB/s of the ceiling of a cell, now."""
        if cell.op == "mixed":
            return mixed_rate(self._bare_pass(Op.READ), self._bare_pass(Op.WRITE))
        return self._bare_pass(cell.op_of(0))

    def _bare_pass(self, op: Op) -> float:
        way, nbytes = self._ways[op]
        if not self._bare.direct:
            io_cache.drop([self._path])
        whole, self._bare.total = self._bare.total, nbytes
        try:
            return self._bare.run(op, way)
        finally:
            self._bare.total = whole
