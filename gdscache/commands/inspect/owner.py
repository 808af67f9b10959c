"""The owner of a cache directory, without taking its lock."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from pathlib import Path
from typing import Any, Literal

from gdscache.disk.catalog_file import CATALOG_NAME
from gdscache.disk.directory import LOCK_LIMIT, LOCK_NAME
from gdscache.disk.slab import slab_name

LOCKS = Path("/proc/locks")
LOG_NAME = f"{CATALOG_NAME}-wal"  # there while the catalogue is open, or after a kill

State = Literal["in use", "free", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a directory: `state`, the holder's `pid` while the directory is in use, and the fields of its lock
    file. `unknown`: the kernel's table of locks is unreadable; or the last holder belongs to another host (or to a
    container with hidden locks) and has not closed the catalogue."""

    state: State
    pid: int | None = None
    host: str | None = None
    started: str | None = None
    command: str | None = None


def find_owner(directory: Path, locks: Path = LOCKS) -> Owner:
    """The owner, from the kernel's table of locks."""
    path, catalog_open = directory / LOCK_NAME, os.path.lexists(directory / LOG_NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return Owner("unknown" if catalog_open else "free")
    try:
        status, content = os.fstat(descriptor), os.pread(descriptor, LOCK_LIMIT, 0)
    except OSError:  # a directory
        return Owner("unknown")
    finally:
        os.close(descriptor)
    named = _named(content)
    try:
        table = locks.read_text(encoding="ascii", errors="replace")
    except OSError:
        return Owner("unknown")
    pid = _holder(table, status, named.get("pid"))
    if pid is None:  # an owner with a deleted lock file still holds the slab's lock
        with contextlib.suppress(OSError):
            pid = _holder(table, os.lstat(directory / slab_name(0)), named.get("pid"))
    if pid is not None:
        return Owner("in use", **named) if named.get("pid") == pid else Owner("in use", pid)
    if catalog_open and named.get("host") not in (None, socket.gethostname()):
        return Owner("unknown", **named | {"pid": None})
    return Owner("free")


def _holder(table: str, status: os.stat_result, named: object) -> int | None:
    """The pid of a `flock`'s holder, from lines like `1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or not fields[4].isdecimal():
            continue
        where, _, inode = fields[5].rpartition(":")
        # Some file systems (btrfs, overlays) show another device number than stat does: then the pid must agree.
        if inode == str(status.st_ino) and (where == device or int(fields[4]) == named):
            return int(fields[4])
    return None


def _named(content: bytes) -> dict[str, Any]:
    """A lock file's fields; empty if the file is incomplete."""
    try:
        owner = json.loads(content)
        return {"pid": int(owner["pid"]), **{name: str(owner[name]) for name in ("host", "started", "command")}}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}
