"""What the transport tests share: sizes, extents, and a transport with a gate in place of a device."""

import ctypes
import threading
from pathlib import Path

from gdscache.storage import Op
from gdscache.storage.workers import QueuedTransport, Result, Run
from gdscache.testing.suite_base import FILE_BYTES, SECTOR, odd_extents, soon

__all__ = ["FILE_BYTES", "SECTOR", "Gated", "has_libcuda", "odd_extents", "soon"]


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class Gated(QueuedTransport):
    name = "gated"
    memory_kinds = frozenset({"host"})
    direct = False

    def __init__(self, threads: int) -> None:
        self.gate = threading.Event()
        self.order: list[Op] = []
        self.runs: list[Run] = []
        super().__init__(threads)
        self.add_file(1, Path("gated"))

    def move(self, run: Run) -> list[Result]:
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
