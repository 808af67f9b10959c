"""Disks of the native library, as its tests drive them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.arrays import address, integers
from gdscache.errors import NativeCallError
from gdscache.native import Disk
from tests.support.hooks import hooks

READ, WRITE = 0, 1
LATE, HANG = 5, 6  # of csrc/host/tests/faulty_disk.h


class Answer(NamedTuple):
    tag: int
    first: int
    count: int
    error: int
    moved: int


class Piece(NamedTuple):
    tag: int
    op: int
    fd: int
    offset: int
    fragments: Sequence[tuple[int, int]]
    """Address and bytes of each."""
    copied: int = 1


class NativeDisk:
    """A disk. The caller keeps the memory of fragments until they have ended."""

    def __init__(
        self,
        kind: Literal["ring", "threads"] | None,
        workers: int = 4,
        depth: int = 16,
        faults: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        try:
            self.disk = Disk(kind, workers, depth)
        except NativeCallError as error:
            raise OSError(error.errno, error.message) from None
        if faults:
            hooks.fail_disk(self.disk, integers(faults))
        self._kept: list[Any] = []
        self._left: list[Answer] = []  # that did not fit

    @property
    def name(self) -> str:
        return str(hooks.disk_name(self.disk))

    @property
    def pending(self) -> int:
        return int(hooks.disk_pending(self.disk))

    def submit(self, *pieces: Piece) -> None:
        fragments = np.array([f for p in pieces for f in p.fragments], np.uint64).reshape(-1, 2)
        first, rows = 0, []
        for piece in pieces:
            count = len(piece.fragments)
            rows.append((piece.tag, piece.op, piece.fd, piece.offset, first, count, piece.copied))
            first += count
        self._kept.append(fragments)
        self.disk.submit(integers(rows).reshape(-1, 7), fragments)

    def reap(self, seconds: float = 20, room: int = 64) -> list[Answer]:
        self._left = self._left or [Answer(*row) for row in self.disk.reap(seconds).tolist()]
        some, self._left = self._left[:room], self._left[room:]
        return some

    def reap_all(self) -> list[Answer]:
        """All answers, by tag and fragment."""
        answers: list[Answer] = []
        until = time.monotonic() + 30
        while True:
            some = self.reap(1 if self.pending else 0)  # nothing, where a wake ended it
            if not some and not self.pending:
                return sorted(answers)
            answers += some
            assert time.monotonic() < until

    def wake(self) -> None:
        hooks.wake_disk(self.disk)

    def release(self) -> None:
        hooks.release_disk(self.disk)

    def close(self) -> None:
        self.disk.close()

    def __enter__(self) -> NativeDisk:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def has_ring() -> bool:
    try:
        NativeDisk("ring").close()
    except OSError:
        return False
    return True


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("at", ctypes.c_void_p))


def forbid_ring(error: int) -> str:
    """Have this process, for good, get that errno from the three calls of io_uring (425 to 427): what Docker's default
    profile does. Why that is not possible, or an empty string."""
    load, equal, answer = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0)] + [(equal, 3 - n, 0, 425 + n) for n in range(3)]
    program += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | error)]
    code = b"".join(o.to_bytes(2, "little") + bytes([t, f]) + k.to_bytes(4, "little") for o, t, f, k in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    rules = _Program(len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(rules)):
        return os.strerror(ctypes.get_errno())
    return ""


def fragment(memory: npt.NDArray[np.uint8], start: int = 0, size: int | None = None) -> tuple[int, int]:
    """Part of an array, as a piece names it."""
    return address(memory) + start, len(memory) - start if size is None else size


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that begins with a page."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -address(memory) % 4096
    return memory[start : start + nbytes]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
