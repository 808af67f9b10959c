"""A transport that goes wrong on order, over any other transport.

    PLAN = FaultPlan(seed=7)
    Faulty = faulty(PLAN, inner="posix")       # in a config: `transport: tests.of.something:Faulty`
    with PLAN.rule(Fault.FLIP, Op.READ, rate=0.1):
        ...

For a process whose code should stay as it is, `transport: tests.support.faults:FaultyTransport` takes its plan from
the JSON file that the environment variable `GDSCACHE_FAULTS` names (`FaultPlan.from_file`).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdscache.errors import IOFailedError
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.storage import open_transport
from gdscache.storage.base import DeviceMemory, EitherWay, Memory, Op, Switch, Transport, part
from tests.support.fault_plan import ExtentPart, Fault, FaultPlan, FaultRule, Met

if TYPE_CHECKING:
    import torch

__all__ = ["ExtentPart", "Fault", "FaultPlan", "FaultRule", "FaultyTransport", "faulty"]

VARIABLE = "GDSCACHE_FAULTS"
THREADS = 32

Inner = str | Callable[..., Transport]
_log = logging.getLogger("tests.faults")


class FaultyTransport(EitherWay):
    """Passes every call to `inner`, except if a rule of `plan` says otherwise.

    `inner` is the name of a transport (as in a config; nixl and kvikio without GPUDirect Storage), or a class or
    function that is called with `threads=` and `direct_io=`. Without a plan, plan and inner come from the JSON file
    that `GDSCACHE_FAULTS` names.

    A late or hanging request keeps a thread of the library, of which there are `THREADS` or more. Damaged writes are
    written from a copy in host memory. If calls still hang at `close`, the last of them closes the files.
    """

    name = "faulty"
    merges = False  # a page is a call, so that a rule can mean one page

    def __init__(
        self, threads: int, direct_io: Switch = "auto", *, plan: FaultPlan | None = None, inner: Inner = "posix"
    ) -> None:
        if plan is None:
            plan, inner = FaultPlan.from_file(Path(os.environ[VARIABLE]))
        super().__init__(max(threads, THREADS), direct_io)
        self.plan = plan
        if isinstance(inner, str):
            self.inner = open_transport(
                inner, directory=Path(), device="cpu", threads=threads, direct_io=direct_io, gds="auto"
            )
        else:
            self.inner = inner(threads=threads, direct_io=direct_io)
        self.memory_kinds = self.inner.memory_kinds
        self._files: dict[int, tuple[int, str]] = {}  # by handle: the number of the file, its path
        self._lock = threading.Lock()
        self._ends: list[tuple[Op, int, int, int]] = []  # the rests of short calls: file, offset, bytes
        self._under_way = 0
        self._closing = False

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def open(self, path: Path) -> int:
        file = self.inner.open(path)
        with self._lock:
            self._files[file] = len(self._files), str(path)
        return file

    def register(self, memory: memoryview | torch.Tensor) -> None:
        self.inner.register(memory)

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        self.inner.deregister(memory)

    def flush(self, file: int) -> None:
        self.inner.flush(file)

    def describe(self) -> dict[str, object]:
        return {**self.inner.describe(), "name": self.name, "inner": self.inner.name, "faults": self.plan.describe()}

    def close(self) -> None:
        with self._lock:
            self._closing = True
            hang = self._under_way
        if hang:
            _log.error("%d calls hang: their memory and the files stay in use", hang)
        else:
            self.inner.close()

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        if self._is_rest(op, file, offset, memory.nbytes):
            return 0
        if not self.plan.active or file not in self._files:
            return self._call(op, file, offset, memory)
        number, path = self._files[file]
        met = self.plan.meet(op, number, path, offset, memory.nbytes)
        with self._lock:
            self._under_way += 1
        try:
            return (
                self._call(op, file, offset, memory) if met is None else self._bent(op, file, path, offset, memory, met)
            )
        finally:
            self.plan.end(op, path, offset, met)
            with self._lock:
                self._under_way -= 1
                last = self._closing and not self._under_way
            if last:
                self.inner.close()

    def _is_rest(self, op: Op, file: int, offset: int, nbytes: int) -> bool:
        """Whether a call asks for the rest of a short one. True once for each; any thread may ask."""
        with self._lock:
            found = (op, file, offset, nbytes) in self._ends
            if found:
                self._ends.remove((op, file, offset, nbytes))
        return found

    def _call(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        return (self.inner.read if op is Op.READ else self.inner.write)(file, offset, memory)

    def _bent(self, op: Op, file: int, path: str, offset: int, memory: Memory, met: Met) -> int:
        fault, nbytes = met.rule.fault, memory.nbytes
        if met.rule.is_late:
            met.rule.wait()
        elif fault in (Fault.EIO, Fault.ENOSPC):
            code = errno.EIO if fault is Fault.EIO else errno.ENOSPC
            message = f"{op.value} at offset {offset} of {path} failed: {os.strerror(code)}"
            raise IOFailedError(message, "this error was injected: take the rule away", code)
        elif fault is Fault.LOST:
            return nbytes
        elif fault in (Fault.SHORT, Fault.TORN):
            half = nbytes // 2 // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
            moved = self._call(op, file, offset, part(memory, 0, half)) if half else 0
            if fault is Fault.TORN:
                return nbytes
            if half and not self.merges:  # otherwise the library retries the pages behind it alone
                with self._lock:
                    self._ends.append((op, file, offset + half, nbytes - half))
            return moved
        elif op is Op.READ:
            moved = self._call(op, file, offset, memory)
            _damage(memory, met, met.where(offset, nbytes))
            return moved
        else:
            memory = _copy(memory)
            _damage(memory, met, met.where(offset, nbytes))
        return self._call(op, file, offset, memory)


def faulty(plan: FaultPlan, inner: Inner = "posix", *, merges: bool = False) -> type[FaultyTransport]:
    """A `FaultyTransport` of this plan that a config can name: give it a name in a module that can be imported.

    `merges`: neighbouring pages may come as one call, as for other transports.
    """

    class Bound(FaultyTransport):
        def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
            super().__init__(threads, direct_io, plan=plan, inner=inner)
            self.merges = merges

    return Bound


def _tensor(memory: DeviceMemory) -> torch.Tensor:
    import torch

    return torch.as_tensor(memory, device=torch.device("cuda", memory.device))


def _damage(memory: Memory, met: Met, where: Sequence[tuple[int, int]]) -> None:
    if isinstance(memory, memoryview):
        _damage_host(memory, met, where)
        return
    import torch

    copy = _copy(memory)
    _damage_host(copy, met, where)
    _tensor(memory).copy_(torch.frombuffer(copy, dtype=torch.uint8))
    torch.cuda.current_stream(memory.device).synchronize()


def _damage_host(view: memoryview, met: Met, where: Sequence[tuple[int, int]]) -> None:
    if met.rule.fault is Fault.ZERO:
        for start, stop in where:
            view[start:stop] = bytes(stop - start)
        return
    bits = 8 * sum(stop - start for start, stop in where)
    at = met.draw.randrange(bits) if met.rule.bit is None else met.rule.bit % bits
    for start, stop in where:
        if at < 8 * (stop - start):
            view[start + at // 8] ^= 1 << at % 8
            return
        at -= 8 * (stop - start)


def _copy(memory: Memory) -> memoryview:
    """The bytes in page-aligned host memory of our own."""
    copy = memoryview(mmap.mmap(-1, memory.nbytes))
    if isinstance(memory, memoryview):
        copy[:] = memory
        return copy
    import torch

    torch.frombuffer(copy, dtype=torch.uint8).copy_(_tensor(memory))
    return copy
