"""What a machine allows the native library, and memory for its tests."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.errors import NativeCallError
from gdscache.native import move_pieces

LATE, HANG = 5, 6  # of csrc/host/tests/faulty_disk.h


def address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def has_ring() -> bool:
    try:
        move_pieces("ring", 1, np.empty((0, 4), np.int64), write=False)
    except NativeCallError:
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


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that begins with a page."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -address(memory) % 4096
    return memory[start : start + nbytes]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
