"""The production executor over the spaces of a case: its own disk, or a transport of Python, fails as the case says."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from gdscache.arrays import integers
from gdscache.disk.slab import Slab, SlabIO
from gdscache.errors import NativeCallError
from gdscache.extents import HostExtents
from gdscache.kernels.copies import PageCopies
from gdscache.moves import PageStatus
from gdscache.moves import native as native_module
from gdscache.moves.native import Machine, MoveLimits, NativeExecutor
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes
from gdscache.storage.base import Op, Transport
from gdscache.storage.files import NativeTransport
from gdscache.tiers.cpu import Bounce
from gdscache.tiers.quarantine import Quarantine
from tests.support import fake_cufile
from tests.support.executor_cases import STRETCH, Case, Spaces
from tests.support.fake_cufile import FakeDeviceExtents
from tests.support.fake_gpu import FakeGpuCopies
from tests.support.faults import ExtentPart, FaultRule
from tests.support.faulty import PLAN, FaultyTransport
from tests.support.faulty import Fault as Injected
from tests.support.hooks import hooks
from tests.support.reference_executor import Bytes, Fault

Mode = Literal["threads", "uring", "GPU", "direct", "python", "GPU and python"]
LATE_MS = 10
_NATIVE = {"error": 1, "short": 2, "torn": 3, "flip": 4, "late": 5, "hang": 6}
_PYTHON = {"short": Injected.SHORT, "torn": Injected.TORN, "flip": Injected.FLIP, "hang": Injected.HANG}


class Heard:
    def __init__(self) -> None:
        self.verdicts: dict[int, PageStatus] = {}
        self.layers: set[int] = set()

    def judged(self, rows: Any, status: PageStatus) -> None:
        for row in rows.tolist():
            assert row not in self.verdicts, "two verdicts on a page"
            self.verdicts[row] = status

    def ready(self, layers: range, event: Any) -> None:
        self.layers.update(layers)


@dataclasses.dataclass(eq=False)
class Real:
    """An executor, and what its spaces have: `spaces.files` only after `read_back`."""

    executor: NativeExecutor
    spaces: Spaces
    slabs: dict[str, Slab]

    def read_back(self) -> None:
        """What the files have now. They are as long as they were."""
        for name, slab in self.slabs.items():
            self.spaces.files[name] = np.stack([_extent(slab, slot) for slot in range(slab.slots)])

    def release(self) -> None:
        PLAN.reset()
        with contextlib.suppress(NativeCallError):  # it was closed, or has no disk
            hooks.release(self.executor.moves)


@contextlib.contextmanager
def opened(case: Case, mode: Mode, directory: Path) -> Iterator[Real]:
    """An executor over a copy of the spaces of `case`."""
    layout, python = case.layout, "python" in mode
    with contextlib.ExitStack() as undo:
        undo.callback(PLAN.reset)
        planes = [[torch.from_numpy(plane.copy()) for plane in some] for some in case.spaces.planes]
        tensors = [
            [tensor.view(getattr(torch, p.dtype)).view(len(tensor), case.block_tokens, *p.shape) for tensor, p in pairs]
            for pairs in (zip(some, shapes, strict=True) for some, shapes in zip(planes, layout.layers, strict=True))
        ]
        pool = PagedPlanes(layout, tensors)
        copies = FakeGpuCopies(pool) if "GPU" in mode or mode == "direct" else PageCopies(pool)
        undo.callback(copies.close)
        on_gpu = {"bounce"} if mode == "direct" else set()
        extents = {name: _memory(layout, some, undo, name in on_gpu) for name, some in case.spaces.memories.items()}
        memories = {name: _bytes(some).reshape(some.slots, -1) for name, some in extents.items()}
        for name, some in extents.items():
            some.checksums[:] = case.spaces.sums[name]
        bounce = Bounce(extents["bounce"], Quarantine(threading.RLock()))
        slots = extents["bounce"].slots
        bounce.loads = range(slots - case.reserve, slots)
        slabs, files = {}, {}
        shared: Transport | None = None
        for name, found in case.spaces.files.items():
            slabs[name] = _slab(directory, name, found, 2 if name == "ssd" else 1)
            direct: Any = "auto" if case.direct else "off"
            if python or mode == "direct":  # of which an executor has one
                transport = shared = shared or (FaultyTransport(2, direct) if python else fake_cufile.opened(3, direct))
            else:
                transport = NativeTransport(3, direct, uring=mode == "uring")
            files[name] = io = SlabIO(slabs[name], transport)
            undo.callback(io.close)
        if shared is not None and not python:
            shared.register(extents["bounce"].rows)
        counts = {name: slab.slots for name, slab in slabs.items()}
        machine = Machine(copies, extents, files, counts, bounce, lambda: case.refusal)
        executor = undo.enter_context(_executor(machine, case))
        if python:
            for fault in case.faults:
                _add_rule(fault, slabs[fault.files])
        else:
            rows = [_row(fault, slabs[fault.files], files[fault.files]) for fault in case.faults]
            hooks.fail(executor.moves, integers(rows).reshape(-1, 5))
        sums = {name: some.checksums for name, some in extents.items()}
        real = Real(executor, Spaces([[t.numpy() for t in some] for some in planes], memories, {}, sums), slabs)
        undo.callback(real.release)
        yield real
        del memories, sums


@contextlib.contextmanager
def _executor(machine: Machine, case: Case) -> Iterator[NativeExecutor]:
    limits = MoveLimits()
    if case.tight:
        extent = case.layout.extent_bytes
        limits = MoveLimits(4 * extent, 2 * extent, extent, 2 * extent)
    with mock.patch.object(native_module, "LIMITS", limits):
        hooks.set_faulty_disks(True)
        try:
            executor = NativeExecutor(machine)
        finally:
            hooks.set_faulty_disks(False)
    try:
        yield executor
    finally:
        executor.close()


def _memory(layout: PageLayout, found: Bytes, undo: contextlib.ExitStack, on_gpu: bool) -> Any:
    extents: Any = FakeDeviceExtents(layout, found.size) if on_gpu else HostExtents(layout, found.size, "off")
    undo.callback(extents.close)
    _bytes(extents)[:] = found.reshape(-1)
    return extents


def _bytes(extents: Any) -> Bytes:
    return np.frombuffer(extents.rows.host if isinstance(extents, FakeDeviceExtents) else extents.flat, np.uint8)


def _slab(directory: Path, name: str, found: Bytes, count: int) -> Slab:
    slots, extent = found.shape
    paths = tuple(directory / f"{name}-{n}" for n in range(count))
    slab = Slab(paths, extent, slots, slots, STRETCH if count > 1 else slots)
    for path in paths:
        path.write_bytes(b"")
    for slot in range(slots):
        number, offset = slab.locate(slot)
        with open(paths[number], "r+b") as file:
            file.seek(offset)
            file.write(found[slot].tobytes())
    return slab


def _extent(slab: Slab, slot: int) -> Bytes:
    number, offset = slab.locate(slot)
    with open(slab.files[number], "rb") as file:
        file.seek(offset)
        return np.frombuffer(file.read(slab.extent_bytes), np.uint8)


def _row(fault: Fault, slab: Slab, io: SlabIO) -> tuple[int, ...]:
    number, offset = slab.locate(fault.slot)
    value = LATE_MS if fault.what == "late" else fault.value
    return io._files[number], offset + fault.start, offset + fault.stop, _NATIVE[fault.what], value


def _add_rule(fault: Fault, slab: Slab) -> None:
    number, offset = slab.locate(fault.slot)
    path, extent = str(slab.files[number]), slab.extent_bytes
    conditions: dict[str, Any] = {
        "where": lambda of, at: of == path and offset <= at < offset + extent,
        "part": ExtentPart(fault.start, fault.stop, extent),
    }
    if fault.what == "late":
        conditions["seconds"] = LATE_MS / 1000
        kind = Injected.DELAY
    elif fault.what == "error":
        kind = Injected.EIO if fault.value == errno.EIO else Injected.ENOSPC
    else:
        kind = _PYTHON[fault.what]
    if fault.what == "flip":
        conditions["bit"] = 0
    op = Op.WRITE if kind in (Injected.TORN, Injected.ENOSPC) else None
    PLAN.add(FaultRule(kind, op, **conditions))
