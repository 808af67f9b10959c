"""What the transport tests share: sizes, extents, and a transport with a gate in place of a device."""

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from gdscache.arrays import integers
from gdscache.errors import RefusedDiskError, TransportUnavailableError
from gdscache.native import Disk
from gdscache.storage import Op, native
from gdscache.storage.base import Switch
from gdscache.storage.native import DEPTH_SMALL, NativeTransport
from gdscache.storage.workers import IORun, QueuedTransport, Result
from gdscache.testing.suite_base import FILE_BYTES, SECTOR, odd_extents, random_bytes, soon

__all__ = [
    "FILE_BYTES",
    "SECTOR",
    "FailingTransport",
    "Gated",
    "has_libcuda",
    "odd_extents",
    "opened",
    "random_bytes",
    "refuse_ring",
    "soon",
]


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def refuse_ring(patch: pytest.MonkeyPatch) -> None:
    """The system says to io_uring what a container's rules say."""

    def refusing(kind: Literal["ring", "threads"], workers: int, depth: int) -> Disk:
        if kind == "ring":
            raise RefusedDiskError(f"io_uring_setup answers {os.strerror(errno.EPERM)}", "", errno.EPERM)
        return Disk(kind, workers, depth)

    patch.setattr(native, "Disk", refusing)


def opened(name: str, threads: int, direct_io: Switch = "off") -> NativeTransport:
    """`uring`, or a skip where there is none; or `posix`."""
    try:
        return NativeTransport(threads, direct_io, uring=name == "uring")
    except TransportUnavailableError as error:
        pytest.skip(error.message)


class FailingTransport(NativeTransport):
    """Its disk fails on order: rows of (which run, what, value), see csrc/host/faulty_disk.h."""

    disk_type = Disk

    def __init__(self, name: str, faults: Sequence[tuple[int, int, int]], threads: int = 2) -> None:
        self._faults = integers(faults)
        super().__init__(threads, "off", uring=name == "uring")

    def _open_disk(self) -> Disk:
        return self.disk_type(
            "ring" if self.uring else "threads", self.threads, DEPTH_SMALL * self.threads, None, self._faults
        )

    def let_go(self) -> None:
        """Of what hangs."""
        self._disk.release()


class Gated(QueuedTransport):
    name = "gated"
    memory_kinds = frozenset({"host"})
    direct = False

    def __init__(self, threads: int) -> None:
        self.gate = threading.Event()
        self.order: list[Op] = []
        self.runs: list[IORun] = []
        super().__init__(threads)
        self.add_file(1, Path("gated"))

    def move(self, run: IORun) -> list[Result]:
        self.gate.wait()
        self.order.append(run.op)
        self.runs.append(run)
        return [(piece.index, piece.nbytes, None) for piece in run.pieces]

    def open(self, path: Path) -> int:
        return 1

    def register(self, memory: object) -> None: ...
    def deregister(self, memory: object) -> None: ...
    def flush(self, file: int) -> None: ...
    def release(self) -> None: ...
    def describe(self) -> dict[str, object]:
        return {}
