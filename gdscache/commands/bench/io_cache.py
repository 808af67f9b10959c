"""The page cache: drop pages of files, and find the resident ones."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.storage.files import IN_MEMORY, find_mount


def in_memory(directory: Path) -> bool:
    """Whether a directory's file system is all page cache."""
    return find_mount(directory).file_system in IN_MEMORY


def drop(paths: Iterable[Path]) -> None:
    """Write dirty pages to the device, and ask the kernel to drop the pages of these files (it may refuse)."""
    for path in paths:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident_bytes(path: Path) -> int | None:
    """Bytes of a file in the page cache, by mincore; None if the system does not report them."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, contextlib.closing(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)) as region:
        seen = np.frombuffer(region, np.uint8)
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        call = ctypes.CDLL(None, use_errno=True).mincore
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        refused = call(seen.ctypes.data, size, flags.ctypes.data)
        del seen
    return None if refused else min(int((flags & 1).sum()) * mmap.PAGESIZE, size)


def state(path: Path, *, direct: bool) -> dict[str, Any]:
    """The page cache's part in reads of a file that was just dropped, as plain data.

    `bypassed`: direct I/O does not fill it. `dropped`: it held no page of the file. `kept`: it held some, so not all
    reads were cold. `memory`: the file system is all page cache. `unknown`: the system does not report it.
    """
    if in_memory(path.parent):
        return {"state": "memory", "resident_bytes": path.stat().st_size}
    if direct:
        return {"state": "bypassed", "resident_bytes": 0}
    found = resident_bytes(path)
    return {"state": "unknown" if found is None else "kept" if found else "dropped", "resident_bytes": found}
