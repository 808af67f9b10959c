"""One timed run of a cell: lanes that keep requests in flight for a while, and what that came to."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdscache.commands.bench.io_cells import Cell
from gdscache.commands.bench.io_ways import Request
from gdscache.commands.bench.measure import Series, rate
from gdscache.errors import GdsCacheError
from gdscache.sizes import GIB
from gdscache.storage.base import Op


class Moves(Protocol):
    """What a lane of a way does."""

    def move(self, op: Op, some: Sequence[Request], nbytes: int) -> list[float]: ...


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run moved, in how many seconds, of which CPU; and the seconds that each request took."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    latencies: npt.NDArray[np.float64]

    @property
    def gb_per_second(self) -> float:
        return rate(self.nbytes, self.seconds)

    @property
    def cpu_per_gib(self) -> float:
        """CPU seconds of this process per GiB."""
        return self.cpu_seconds / self.nbytes * GIB


def run(cell: Cell, lanes: Sequence[Moves], total: int, seconds: float, *, again: bool) -> Run:
    """Move the parts of the first `total` bytes of the file, until `seconds` are over or, without `again`, each once.

    With `again` it begins anew at the end. At least a batch a lane is moved. Raises the first error of a lane, once
    all of them have ended.
    """
    offsets = cell.offsets(total)
    batches = len(offsets) // cell.batch
    numbers = itertools.count()  # `next` on it is atomic
    begin = threading.Barrier(len(lanes) + 1)
    until = [0.0]
    latencies: list[list[float]] = [[] for _ in lanes]
    errors: list[GdsCacheError | RuntimeError | OSError] = []

    def work(lane: int) -> None:
        own = range(lane * cell.batch, (lane + 1) * cell.batch)
        places = [slot * cell.io_bytes for slot in own]
        begin.wait()
        try:
            while (number := next(numbers)) < len(lanes) or (
                not errors and time.perf_counter() < until[0] and (again or number < batches)
            ):
                first = number % batches * cell.batch
                some = list(zip(offsets[first : first + cell.batch].tolist(), places, strict=True))
                latencies[lane] += lanes[lane].move(cell.op_of(number), some, cell.io_bytes)
        except (GdsCacheError, RuntimeError, OSError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), name=f"gdscache-bench-io-{n}") for n in range(len(lanes))]
    for thread in threads:
        thread.start()
    until[0] = time.perf_counter() + seconds
    cpu, start = time.process_time(), time.perf_counter()
    begin.wait()
    for thread in threads:
        thread.join()
    elapsed, spent = time.perf_counter() - start, time.process_time() - cpu
    if errors:
        raise errors[0]
    found = np.fromiter(itertools.chain(*latencies), np.float64)
    return Run(len(found) * cell.io_bytes, elapsed, spent, found)


class Metered:
    """A way that returns GB/s, called, with the CPU seconds per GiB of every call kept beside.

    `first` is called before each, and not counted.
    """

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
        """One value a call."""
        return Series(tuple(self._cpu))
