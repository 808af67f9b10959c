"""A transport that goes wrong on order, over any other transport.

    PLAN = FaultPlan(seed=7)
    Faulty = faulty(PLAN, inner="posix")       # in a config: `transport: your_tests:Faulty`
    with PLAN.rule(Fault.FLIP, Op.READ, rate=0.1):
        ...

For a process whose code one does not want to touch, `transport: gdscache.testing.faults:FaultyTransport` takes its plan
from the JSON file that the environment variable `GDSCACHE_FAULTS` names (`FaultPlan.from_file`).
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, StorageError
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.storage import open_transport
from gdscache.storage.base import FileRange, IORequest, Op, Submission, Switch, Transport, check_memory
from gdscache.testing.fault_plan import ExtentPart, Fault, FaultPlan, FaultRule, Met

if TYPE_CHECKING:
    import torch

__all__ = ["ExtentPart", "Fault", "FaultPlan", "FaultRule", "FaultyTransport", "faulty"]

VARIABLE = "GDSCACHE_FAULTS"
CLOSE_S = 30.0

Inner = str | Callable[..., Transport]
_log = logging.getLogger("gdscache.testing")


@dataclasses.dataclass(slots=True)
class _Item:
    """A request that the inner transport gets, as it is or changed, and what is answered when that is done."""

    index: int
    offset: int
    path: str
    claimed: int  # bytes that count as moved when the inner transport moved all of its own
    met: Met | None
    request: IORequest | None  # until it is submitted
    damage: Callable[[], None] | None = None  # to memory that was read; holds it


class FaultyTransport(Transport):
    """Hands every request to `inner`, except where a rule of `plan` says otherwise.

    `inner` is the name of a transport (as in a config; nixl and kvikio without GPUDirect Storage), or a class or
    function that is called with `threads=` and `direct_io=`. Without a plan, plan and inner come from the JSON file
    that `GDSCACHE_FAULTS` names.

    A batch that no rule meets is the inner transport's own. A batch that one meets is followed by a thread until it has
    ended, and so is each of its delays and hangs. What is written wrong is written from a copy in host memory. `close`
    waits for what hangs; when nothing has ended for `CLOSE_S` seconds it returns, and the files stay open until the
    last hang is released.

    Raises `InvalidValueError` when there is no plan, or when `inner` moves no host memory.
    """

    name = "faulty"
    merge_bytes = 0  # a page is a request, so that a rule can mean one page

    def __init__(
        self, threads: int, direct_io: Switch = "auto", *, plan: FaultPlan | None = None, inner: Inner = "posix"
    ) -> None:
        if plan is None:
            plan, inner = _plan_of_the_environment()
        self.plan = plan
        if isinstance(inner, str):
            self.inner = open_transport(
                inner, directory=Path(), device="cpu", threads=threads, direct_io=direct_io, gds="auto"
            )
        else:
            self.inner = inner(threads=threads, direct_io=direct_io)
        if "host" not in self.inner.memory_kinds:
            self.inner.close()
            raise InvalidValueError(f"the transport {self.inner.name} moves no host memory", "wrap one that does")
        self.memory_kinds = self.inner.memory_kinds
        self._files: dict[int, tuple[int, str]] = {}  # by handle: the number of the file, its path
        self._lock = threading.Condition(threading.Lock())
        self._followers: set[threading.Thread] = set()
        self._progress = 0.0
        self._closing = self._abandoned = False

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def open(self, path: Path) -> int:
        self._check_open()
        file = self.inner.open(path)
        with self._lock:
            self._files[file] = len(self._files), str(path)
        return file

    def register(self, memory: memoryview | torch.Tensor) -> None:
        self.inner.register(memory)

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        self.inner.deregister(memory)

    def flush(self, file: int) -> None:
        self._check_open()
        self.inner.flush(file)

    def describe(self) -> dict[str, object]:
        return {**self.inner.describe(), "name": self.name, "inner": self.inner.name, "faults": self.plan.describe()}

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        self._check_open()
        if not self.plan.active:
            return self.inner.submit(op, requests)
        met = [self._meet(op, request) for request in requests]
        if not self.plan.trace and not any(met):
            return self.inner.submit(op, requests)
        batch = Submission(op, [self._span(request) for request in requests], [1] * len(requests))
        groups: dict[FaultRule | None, list[_Item]] = {}  # what begins together, by the rule that it waits for
        for index, (request, hit) in enumerate(zip(requests, met, strict=True)):
            path = self._files.get(request.file, (0, ""))[1]
            item = _Item(index, request.offset, path, _nbytes(request), hit, request)
            error = None if hit is None else _bend(op, item, hit)
            if item.request is None:
                self._end(op, batch, item, error)
            else:
                groups.setdefault(hit.rule if hit is not None and hit.rule.is_late else None, []).append(item)
        if at_once := groups.pop(None, None):
            self._start(op, batch, at_once, self._begin(op, at_once))
        for rule, items in groups.items():
            self._start(op, batch, items, None, rule)
        return batch

    def close(self) -> None:
        with self._lock:
            first, self._closing = not self._closing, True
            begun, followers = time.monotonic(), set(self._followers)
            while self._followers and (left := max(begun, self._progress) + CLOSE_S - time.monotonic()) > 0:
                self._lock.wait(left)
            if self._followers:
                self._abandoned = True  # the last of them closes the inner transport
                if first:
                    _log.error("%d batches hang: their memory and the files stay in use", len(self._followers))
                return
        for thread in followers:
            thread.join()
        self.inner.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosedError(f"the {self.name} transport was closed", "use it before close")

    def _meet(self, op: Op, request: IORequest) -> Met | None:
        """The rule for a request; none for a bad one, which the inner transport refuses."""
        if request.file not in self._files:
            return None
        try:
            check_memory(op, request.offset, request.memory, self.memory_kinds)
        except IOFailedError:
            return None
        return self.plan.meet(op, *self._files[request.file], request.offset, _nbytes(request))

    def _span(self, request: IORequest) -> FileRange:
        path = self._files.get(request.file, (0, f"file {request.file}"))[1]
        return FileRange(path, request.offset, _nbytes(request))

    def _begin(self, op: Op, items: Sequence[_Item]) -> Submission:
        """Submit the items to the inner transport, which holds their memory from now on."""
        requests = [item.request for item in items if item.request is not None]
        for item in items:
            item.request = None
        return self.inner.submit(op, requests)

    def _start(
        self, op: Op, batch: Submission, items: list[_Item], begun: Submission | None, rule: FaultRule | None = None
    ) -> None:
        thread = threading.Thread(
            target=self._follow, args=(op, batch, items, begun, rule), name="gdscache-faulty", daemon=True
        )
        with self._lock:
            self._followers.add(thread)
        thread.start()

    def _follow(
        self, op: Op, batch: Submission, items: list[_Item], begun: Submission | None, rule: FaultRule | None
    ) -> None:
        """Report the items as they end; begin them first where they have waited for `rule`."""
        left = set(range(len(items)))
        try:
            if rule is not None:
                rule.wait()
            if begun is None:
                begun = self._begin(op, items)
            for number, error in begun.completions():
                item = items[number]
                if error is None and item.damage is not None:
                    item.damage()
                item.damage = None
                left.discard(number)
                self._end(op, batch, item, error)
        finally:
            for number in left:  # something unforeseen: whoever waits must hear of it
                items[number].request = items[number].damage = None
                stopped = IOFailedError("a thread of the faulty transport stopped", "see the traceback above")
                self._end(op, batch, items[number], stopped)
            self._leave()

    def _end(self, op: Op, batch: Submission, item: _Item, error: StorageError | None) -> None:
        self._progress = time.monotonic()
        self.plan.end(op, item.path, item.offset, item.met)
        batch.finish([(item.index, 0 if error is not None else item.claimed, error)])

    def _leave(self) -> None:
        with self._lock:
            self._followers.discard(threading.current_thread())
            last = self._abandoned and not self._followers
            self._lock.notify_all()
        if last:
            self.inner.close()


def faulty(plan: FaultPlan, inner: Inner = "posix", merge_bytes: int = 0) -> type[FaultyTransport]:
    """A `FaultyTransport` of this plan that a config can name: give it a name in a module that can be imported.

    With `merge_bytes` (`Transport.merge_bytes`), neighbouring pages are one request, as under other transports.
    """
    merged = merge_bytes

    class Bound(FaultyTransport):
        merge_bytes = merged

        def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
            super().__init__(threads, direct_io, plan=plan, inner=inner)

    return Bound


def _plan_of_the_environment() -> tuple[FaultPlan, str]:
    path = os.environ.get(VARIABLE)
    if not path:
        raise InvalidValueError(
            "a FaultyTransport without a plan", f"name a class made by faulty(), or set {VARIABLE} to a JSON file"
        )
    _log.warning("I/O fails on purpose, by the plan in %s", path)
    return FaultPlan.from_file(Path(path))


def _nbytes(request: IORequest) -> int:
    memory = request.memory
    return memory.nbytes if isinstance(memory, memoryview) else memory.numel() * memory.element_size()


def _bend(op: Op, item: _Item, met: Met) -> StorageError | None:
    """Change the item as its rule says. Without a request left it has ended, with the error returned."""
    request, fault, nbytes = item.request, met.rule.fault, item.claimed
    assert request is not None
    if fault in (Fault.EIO, Fault.ENOSPC):
        item.request = None
        code = errno.EIO if fault is Fault.EIO else errno.ENOSPC
        message = f"{op.value} at offset {item.offset} of {item.path} failed: {os.strerror(code)}"
        return IOFailedError(message, "this error was injected: take the rule away", code)
    if fault is Fault.LOST:
        item.request = None
    elif fault in (Fault.SHORT, Fault.TORN):
        half = nbytes // 2 // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        item.request = dataclasses.replace(request, memory=request.memory[:half]) if half else None
        item.claimed = nbytes if fault is Fault.TORN else half
    elif fault in (Fault.FLIP, Fault.ZERO):
        part = met.rule.part
        where = [(0, nbytes)] if part is None else part.within(item.offset, nbytes)
        if op is Op.READ:
            memory = request.memory
            item.damage = lambda: _damage(memory, met, where)
        else:
            copy = _copy(request.memory)
            _damage(copy, met, where)
            item.request = dataclasses.replace(request, memory=copy)
    return None


def _damage(memory: memoryview | torch.Tensor, met: Met, where: Sequence[tuple[int, int]]) -> None:
    """Zero these ranges of bytes, or flip one bit of them."""
    if isinstance(memory, memoryview):
        _damage_host(memory.cast("B"), met, where)
        return
    import torch

    copy = memoryview(bytearray(memory.numel()))
    host = torch.frombuffer(copy, dtype=torch.uint8)
    host.copy_(memory)
    _damage_host(copy, met, where)
    memory.copy_(host)
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


def _copy(memory: memoryview | torch.Tensor) -> memoryview:
    """The bytes in host memory of our own, on a page."""
    if isinstance(memory, memoryview):
        copy = memoryview(mmap.mmap(-1, memory.nbytes))
        copy[:] = memory.cast("B")
        return copy
    import torch

    copy = memoryview(mmap.mmap(-1, memory.numel()))
    torch.frombuffer(copy, dtype=torch.uint8).copy_(memory)
    return copy
