"""A measurement's surroundings: the machine, versions, the source tree's state, the file system, the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gdscache import __version__
from gdscache.commands.console import version_of
from gdscache.runtime.files import text_of
from gdscache.storage.files import IN_MEMORY, find_mount

PACKAGES = ("torch", "numpy", "xxhash", "cuda-core", "kvikio-cu12", "kvikio-cu13", "nixl")


def describe(directory: Path) -> dict[str, Any]:
    """The machine as plain data; None for unknown values. `directory`: the directory of the measurement's files."""
    import torch

    cpu = re.search(r"^model name\s*: (.*)", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return {
        "cpu": cpu and cpu[1],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "storage": storage(directory),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "versions": {"gdscache": __version__, **{name: found for name in PACKAGES if (found := version_of(name))}},
        "commit": commit(),
    }


def storage(directory: Path) -> dict[str, Any]:
    """A directory's file system: type, mount options, device, and the device's model if known."""
    device = directory.stat().st_dev
    major, minor = os.major(device), os.minor(device)
    mount = find_mount(directory)
    block = Path(f"/sys/dev/block/{major}:{minor}").resolve()
    disk = block if (block / "queue").exists() else block.parent
    return {
        "file_system": mount.file_system or None,
        "source": mount.source or None,
        "options": mount.options or None,
        "device": disk.name if (disk / "queue").exists() else None,
        "model": text_of(disk / "device" / "model") or None,
        "rotational": {"0": False, "1": True}.get(text_of(disk / "queue" / "rotational")),
    }


def commit() -> dict[str, Any] | None:
    """The commit of the running source tree, and whether the tree has changes; None without one."""
    root = Path(__file__).resolve().parents[3]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    told = subprocess.run([git, "-C", root, "status", "--porcelain=2", "--branch"], capture_output=True, text=True)
    found = re.match(r"# branch\.oid ([0-9a-f]+)\n", told.stdout)
    return found and {"hash": found[1], "changed": bool(re.search("^[^#]", told.stdout, re.MULTILINE))}


# -- the page cache ----------------------------------------------------------------------------------------------------


def in_memory(directory: Path) -> bool:
    """Whether a directory's file system is all page cache."""
    return find_mount(directory).file_system in IN_MEMORY


def drop_cached(paths: Iterable[Path]) -> None:
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
    with path.open("rb") as file, contextlib.closing(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)) as region:
        seen = np.frombuffer(region, np.uint8)
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        call = ctypes.CDLL(None, use_errno=True).mincore
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        refused = call(seen.ctypes.data, size, flags.ctypes.data)
        del seen
    return None if refused else min(int((flags & 1).sum()) * mmap.PAGESIZE, size)


def cache_state(path: Path, *, direct: bool) -> dict[str, Any]:
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
