"""The SSD tier's ceiling: C++ threads that read or write the slab with `O_DIRECT`, and may copy reads to a GPU."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdscache.commands.bench import machine
from gdscache.commands.bench.figures import interleave, rate
from gdscache.commands.console import Progress, silent
from gdscache.cuda.driver import Driver
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import DeviceError, InvalidValueError, IOFailedError, NativeCallError
from gdscache.native import bare_loop
from gdscache.storage.base import Op
from gdscache.storage.files import probe_direct_io

if TYPE_CHECKING:
    import torch

THREADS = (1, 2, 4, 8, 16)
IO_BYTES = (1 << 20, 4 << 20)
KEPT = 3  # ways kept after the scouting round


class Way(NamedTuple):
    """A loop's threads and bytes for each system call."""

    threads: int
    io_bytes: int

    @property
    def label(self) -> str:
        return f"{self.threads} threads, {self.io_bytes >> 10} KiB"


class BareLoop:
    """Reads or writes the first `total` bytes of a file, each part once, from or to memory of its own.

    Its memory has the size and kind of a tier's: huge pages, page-locked with CUDA (on some devices both make direct
    I/O faster), touched, random bytes. A small reused buffer stays in the processor's cache; it made the loop twice as
    fast on a RAM disk, which no page cache can reach. If the file system refuses `O_DIRECT`, `direct` is False and the
    loop uses the page cache, as the engine's transport does. Reads may go onward to `target`, uint8 (n,), on the host
    or a GPU; the copy engine copies to a GPU, from the loop's page-locked memory.
    """

    def __init__(self, path: Path, total: int, target: torch.Tensor | None = None) -> None:
        self.total, self._path, self._target = total, path, target
        self._driver = Driver(target.device) if target is not None and target.is_cuda else None
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
            self._memory = np.frombuffer(self._buffer.view, np.uint8)
            undo.pop_all()

    def run(self, op: Op, way: Way, *, onward: bool = False) -> float:
        """GB/s of one pass. `onward`: each part is also copied to the target. Reads through the page cache are cold."""
        if op is Op.READ and not self.direct:
            machine.drop_cached([self._path])
        nbytes = self.total // way.io_bytes * way.io_bytes
        calls = self._file, op is Op.WRITE, nbytes, way.io_bytes, way.threads
        target = self._target.data_ptr() if onward and self._target is not None else 0
        driver = (None, 0) if not target or self._driver is None else (self._driver.library, self._driver.context)
        try:
            elapsed = bare_loop(*calls, self._memory.ctypes.data, target, *driver)
        except (NativeCallError, DeviceError) as error:
            few = getattr(error, "errno", None) == errno.ENODATA
            cause = f"a call moved less than {way.io_bytes} bytes" if few else error.message
            raise IOFailedError(
                f"the bare {op.value} loop failed: {cause}", "see the kernel log for the device"
            ) from None
        return rate(nbytes, elapsed)

    def scout(self, op: Op, progress: Progress = silent, *, onward: bool = False) -> list[Way]:
        """The `KEPT` best ways of two short rounds, best first."""
        some = [
            way for way in itertools.starmap(Way, itertools.product(THREADS, IO_BYTES)) if way.io_bytes <= self.total
        ]
        ways = {way: functools.partial(self.run, op, way, onward=onward) for way in some}
        whole, self.total = self.total, max(self.total // 4, min(self.total, max(IO_BYTES)))
        try:
            found = interleave(ways, 2, progress, f"bare {op.value} loop, all ways")
        finally:
            self.total = whole
        return sorted(ways, key=lambda way: found[way]["max"], reverse=True)[:KEPT]

    def close(self) -> None:
        os.close(self._file)
        del self._memory
        self._buffer.close()
