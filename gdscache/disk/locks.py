"""Locks on files of a cache directory, and the detection of lost ones.

A `flock` is on a file, but other processes find the file by its name: a lock whose name is gone, or names another file,
keeps no process out. Names are checked before every write, and at times while pages are read; a check costs an
`os.stat`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from gdscache.disk.catalog_file import open_own
from gdscache.errors import DirectoryNotWritableError

QUIET_NS = 100_000_000  # a directory that changed less than this ago may change again with the same time stamp
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FileLock:
    """An exclusive lock on a file, until `close`. Use `FileLock.open`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        found = os.fstat(descriptor)
        self._file = (found.st_dev, found.st_ino)
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: Path, *, create: bool) -> FileLock:
        """Lock a file. Raises `BlockingIOError` if it is locked, `OSError` if it cannot be opened or locked,
        `NotARegularFileError` for a link (a hard one too), a directory or a device."""
        descriptor = open_own(path, os.O_RDWR | (os.O_CREAT if create else 0))
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            undo.pop_all()
        return cls(path, descriptor)

    def lost(self, *, thorough: bool) -> str:
        """Why the lock keeps no process out any more; "" while it does. `thorough`: check the descriptor too."""
        why = renamed(self.path, self._file)
        if why or not thorough:
            return why
        try:
            found = os.fstat(self.descriptor)
            if (found.st_dev, found.st_ino) != self._file:
                return f"the descriptor of {self.path} was closed by other code"
            # takes the lock again if another owner of the descriptor dropped it
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"another process has locked {self.path}"
        except OSError as error:
            return f"the lock on {self.path} cannot be kept: {error.strerror}"
        return ""

    def close(self) -> None:
        try:
            found = os.fstat(self.descriptor)
            if (found.st_dev, found.st_ino) != self._file:
                return  # the descriptor's number is another file by now
            if os.getpid() == self._pid:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # explicit: a forked child may hold a copy
            os.close(self.descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:  # closed by other code
                raise DirectoryNotWritableError(f"{self.path} cannot be closed: {error.strerror}") from error


def renamed(path: Path, file: tuple[int, int]) -> str:
    """Why `path` does not name `file` (device and inode) any more; "" if it does, or if this cannot be found out."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        return f"{path} is gone" if error.errno in _GONE else ""
    return "" if (found.st_dev, found.st_ino) == file else f"{path} is another file than the one that was opened"


class DirectoryWatch:
    """An owned directory: its locks, and its files that must keep their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.locks: list[FileLock] = []
        found = os.stat(path)
        self._directory = (found.st_dev, found.st_ino)
        self._files: list[tuple[Path, tuple[int, int]]] = []
        # time of the directory's last change when all names were right; -1 if a later change could have the same
        self._quiet = -1

    def add(self, path: Path) -> None:
        found = os.stat(path, follow_symlinks=False)
        self._files.append((path, (found.st_dev, found.st_ino)))

    def lost(self, *, thorough: bool) -> str:
        """Why another process may use the directory; "" while none may.

        One `os.stat` while no name in the directory changed; `thorough` checks everything.
        """
        try:
            found = os.stat(self.path)
        except OSError as error:
            return f"{self.path} is gone" if error.errno in _GONE else ""
        if (found.st_dev, found.st_ino) != self._directory:
            return f"{self.path} is another directory than the one that was opened"
        if not thorough and found.st_mtime_ns == self._quiet:
            return ""
        for lock in self.locks:
            if why := lock.lost(thorough=thorough):
                return why
        for path, file in self._files:
            if why := renamed(path, file):
                return why
        self._quiet = found.st_mtime_ns if time.time_ns() - found.st_mtime_ns > QUIET_NS else -1
        return ""

    def close(self) -> None:
        locks, self.locks = self.locks, []
        self._files = []
        with contextlib.ExitStack() as last_to_first:
            for lock in locks:
                last_to_first.callback(lock.close)
