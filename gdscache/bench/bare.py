"""The ceiling of the SSD tier: threads that call `preadv` and `pwritev` on the slab with `O_DIRECT`, and no more."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from gdscache.bench.measure import Progress, Series, interleave, rate, silent
from gdscache.errors import InvalidValueError, IOFailedError, ShortIOError
from gdscache.memory import HostBuffer
from gdscache.storage.base import Op
from gdscache.storage.files import probe_direct_io

THREADS = (1, 2, 4, 8, 16)
IO_BYTES = (1 << 20, 4 << 20)
KEPT = 3  # ways that the scouting round leaves in the race


class Way(NamedTuple):
    """One way to run the loop. `io_bytes` go with one system call."""

    threads: int
    io_bytes: int

    @property
    def label(self) -> str:
        return f"{self.threads} threads, {self.io_bytes >> 10} KiB"


class BareLoop:
    """Reads or writes the first `total` bytes of a file, each part once, to or from memory of its own.

    As much memory as a tier fills, and of the same kind (huge pages, page-locked where CUDA is: on some devices both
    make direct I/O faster), touched, with random bytes. A buffer that is used again and again stays in the processor's
    cache, and made the loop twice as fast on a RAM disk: no cache of pages could be measured by that. Where the file
    system refuses `O_DIRECT`, `direct` is False and the loop uses the page cache, as the engine's transport does there.
    """

    def __init__(self, path: Path, total: int) -> None:
        self.total = total
        self.direct = not probe_direct_io(path.parent)
        with contextlib.ExitStack() as undo:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0))
            undo.callback(os.close, self._file)
            if os.fstat(self._file).st_size < total:
                raise InvalidValueError(f"{path} is shorter than {total} bytes", "measure a larger file")
            size = max(IO_BYTES)
            self._buffer = HostBuffer(-(-total // size) * size, "auto", unit=size)
            noise = np.random.default_rng(0).bytes(size)
            for at in range(0, self._buffer.nbytes, size):
                self._buffer.view[at : at + size] = noise
            undo.pop_all()

    def run(self, op: Op, way: Way) -> float:
        """GB/s of one pass."""
        parts = self.total // way.io_bytes
        numbers = itertools.count()  # `next` on it is atomic
        begin = threading.Barrier(way.threads + 1)
        errors: list[OSError | ShortIOError] = []

        def work() -> None:
            call, memory = os.preadv if op is Op.READ else os.pwritev, self._buffer.view
            begin.wait()
            try:
                while (number := next(numbers)) < parts:
                    at = number * way.io_bytes
                    if (moved := call(self._file, [memory[at : at + way.io_bytes]], at)) != way.io_bytes:
                        raise ShortIOError(f"{op.value} moved {moved} of {way.io_bytes} bytes")
            except (OSError, ShortIOError) as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(way.threads)]
        for thread in threads:
            thread.start()
        begin.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - start
        if errors:
            raise IOFailedError(f"the bare {op.value} loop failed: {errors[0]}", "see the kernel log for the device")
        return rate(parts * way.io_bytes, elapsed)

    def scout(self, op: Op, progress: Progress = silent) -> list[Way]:
        """The `KEPT` best ways by two short rounds, best first."""
        all_ways = {
            way.label: way
            for way in itertools.starmap(Way, itertools.product(THREADS, IO_BYTES))
            if way.io_bytes <= self.total
        }
        whole, self.total = self.total, max(self.total // 4, min(self.total, max(IO_BYTES)))
        try:
            found = interleave(self.runs(op, list(all_ways.values())), 2, progress, f"bare {op.value} loop, all ways")
        finally:
            self.total = whole
        best = sorted(found, key=lambda label: max(found[label].values), reverse=True)
        return [all_ways[label] for label in best[:KEPT]]

    def runs(self, op: Op, ways: list[Way]) -> dict[str, Callable[[], float]]:
        """The ways as what `interleave` takes."""
        return {way.label: (lambda way=way: self.run(op, way)) for way in ways}  # type: ignore[misc]

    def close(self) -> None:
        """Close the file and give the buffers back."""
        os.close(self._file)
        self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def best(ways: list[Way], found: dict[str, Series]) -> Way:
    """The way of the highest median."""
    return max(ways, key=lambda way: found[way.label].median)
