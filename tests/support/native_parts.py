"""Disks of the native library, as its tests drive them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.native.library import address, checked, integers, library

READ, WRITE = 0, 1
ERROR, SHORT, TORN, FLIP, LATE, HANG = range(1, 7)


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
    """A disk by the C interface. The caller keeps the memory of fragments until they have ended."""

    def __init__(
        self, kind: str | None, workers: int = 4, depth: int = 16, faults: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        self.library = library()
        handle, why = ctypes.c_void_p(), ctypes.create_string_buffer(200)
        answer = self.library.disk_open(
            kind and kind.encode(), workers, depth, ctypes.addressof(handle), ctypes.addressof(why), len(why)
        )
        if answer < 0:
            raise OSError(-answer, why.value.decode())
        self.handle = handle.value
        self._kept: list[Any] = []
        if faults:
            table = integers(faults)
            checked(self.library.disk_fail(self.handle, address(table), len(table)), "disk_fail")

    @property
    def name(self) -> str:
        return str(self.library.disk_name(self.handle).decode())

    @property
    def pending(self) -> int:
        return int(self.library.disk_pending(self.handle))

    def submit(self, *pieces: Piece) -> None:
        fragments = np.array([f for p in pieces for f in p.fragments], np.uint64).reshape(-1, 2)
        first, rows = 0, []
        for piece in pieces:
            count = len(piece.fragments)
            rows.append((piece.tag, piece.op, piece.fd, piece.offset, first, count, piece.copied))
            first += count
        table = integers(rows)
        self._kept.append(fragments)
        answer = self.library.disk_submit(self.handle, address(table), len(rows), address(fragments), len(fragments))
        checked(answer, "disk_submit")

    def reap(self, seconds: float = 20, room: int = 64) -> list[Answer]:
        ended = np.empty((room, 5), np.int64)
        count = checked(self.library.disk_reap(self.handle, address(ended), room, seconds), "disk_reap")
        return [Answer(*row) for row in ended[:count].tolist()]

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
        checked(self.library.disk_wake(self.handle), "disk_wake")

    def release(self) -> None:
        checked(self.library.disk_release(self.handle), "disk_release")

    def close(self) -> None:
        handle, self.handle = self.handle, None
        self.library.disk_close(handle)

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
