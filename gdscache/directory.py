"""The SSD tier's directory: made, checked, and owned by one engine at a time.

Ownership is a `flock` on `<path>/lock`. The kernel drops it with its holder, so a killed owner leaves nothing to clean
up; the file's content only says who the holder is. Needs a local file system.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shlex
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gdscache.errors import (
    DirectoryInUseError,
    DirectoryNotWritableError,
    NoSpaceError,
    NotADirectoryPathError,
    NotARegularFileError,
    StorageError,
)

PROBE_PREFIX = ".gdscache-probe-"  # of files that exist while a transport tries what the directory can do
LOCK_NAME = "lock"
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
COMMAND_LIMIT = 500  # characters of the owner's command line that are kept
LOCK_LIMIT = 8192  # bytes of a lock file that are read


class CacheDirectory:
    """A cache directory that this object owns until `close()`. Use `CacheDirectory.open`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: Path, *, sweep: bool = True) -> CacheDirectory:
        """Make the directory if it is missing (mode 0700) and take ownership of it.

        An existing directory keeps its mode. `sweep` removes what the probe of a killed owner left.

        Raises `NotADirectoryPathError`, `DirectoryNotWritableError`, `DirectoryInUseError` (another process, or another
        engine of this one), `NotARegularFileError` (the lock is a link or a directory) or `NoSpaceError`.
        """
        path = Path(os.path.abspath(path))
        _make_directory(path)
        lock = _open_lock(path / LOCK_NAME)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, lock)
            _take_lock(lock, path)
            if sweep:
                _sweep(path)
            try:
                os.ftruncate(lock, 0)
                os.pwrite(lock, _describe_owner(), 0)
            except OSError as error:
                raise _refusal(path, error) from error
            undo.pop_all()
        return cls(path, lock)

    @property
    def closed(self) -> bool:
        return self._lock is None

    def close(self) -> None:
        """Give the directory back; twice is fine. A forked child only lets go of its own copy."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if os.getpid() == self._pid:
            fcntl.flock(lock, fcntl.LOCK_UN)  # explicit: a forked child may hold a copy of the descriptor
        os.close(lock)

    def __enter__(self) -> CacheDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CacheDirectories:
    """Several directories that are owned together. Use `CacheDirectories.open`."""

    def __init__(self, owned: Sequence[CacheDirectory]) -> None:
        self._owned = tuple(owned)

    @classmethod
    def open(cls, paths: Sequence[Path], *, sweep: bool = True) -> CacheDirectories:
        """Take ownership of all of `paths`, or of none. Raises what `CacheDirectory.open` does."""
        with contextlib.ExitStack() as undo:
            owned = [undo.enter_context(CacheDirectory.open(path, sweep=sweep)) for path in paths]
            undo.pop_all()
        return cls(owned)

    def close(self) -> None:
        """Give all of them back; twice is fine."""
        for directory in reversed(self._owned):
            directory.close()

    def __enter__(self) -> CacheDirectories:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_directory(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            if not path.is_dir():
                raise
        else:
            path.chmod(DIRECTORY_MODE)
    except OSError as error:
        raise _refusal(path, error) from error


def _sweep(path: Path) -> None:
    """Remove the files that a probe of a killed owner left."""
    try:
        for name in os.listdir(path):
            if name.startswith(PROBE_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    (path / name).unlink()
    except OSError as error:
        raise _refusal(path, error) from error


def _open_lock(path: Path) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise NotARegularFileError(f"{path} is not a regular file", "remove it, or set another ssd.path") from error
        raise _refusal(path.parent, error) from error
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise NotARegularFileError(f"{path} is not a regular file", "remove it, or set another ssd.path")
    return lock


def _take_lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DirectoryInUseError(*_owner_message(path, os.pread(lock, LOCK_LIMIT, 0))) from error
    except OSError as error:
        raise DirectoryNotWritableError(
            f"{path} cannot be locked: {error.strerror}", "set ssd.path to a directory on a local file system"
        ) from error


def _describe_owner() -> bytes:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv)[:COMMAND_LIMIT],
    }
    return json.dumps(owner).encode()


def _owner_message(path: Path, content: bytes) -> tuple[str, str]:
    """Message and hint of a refusal. The owner may be between taking the lock and writing its name."""
    hint = "give each engine its own ssd.path ({rank} expands), or end the other one"
    try:
        owner = json.loads(content)
        pid, host = int(owner["pid"]), str(owner["host"])
        started, command = str(owner["started"]), str(owner["command"])
    except (ValueError, KeyError, TypeError):
        return f"{path} is in use by a process that has not said its name yet", hint
    if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}"):
        hint = f"process {pid} has ended, but a process it forked still holds the lock; end that one"
    who = "this process" if pid == os.getpid() else f"process {pid}"
    return f"{path} is in use by {who} (pid {pid} on {host}, since {started}): {command}", hint


def _refusal(path: Path, error: OSError) -> StorageError:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return NotADirectoryPathError(
            f"{path} (or a parent of it) exists and is not a directory", "set ssd.path to a directory"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"{path}: {error.strerror}", "free space or inodes there, or set another ssd.path")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DirectoryNotWritableError(
            f"{path} cannot be opened: {error.strerror}",
            "raise the limit of open files (ulimit -n), or lower ssd.threads",
        )
    return DirectoryNotWritableError(
        f"{path} cannot be made or written: {error.strerror}", "set ssd.path to a directory that this user may write"
    )
