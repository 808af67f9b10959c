"""The SSD tier's directory: made, checked, and owned by one engine at a time.

Ownership is a `flock` on `<path>/lock`, and one on each slab file. The kernel drops them with their holder, so a killed
owner leaves nothing to clean up; the content of `lock` only names the holder. Needs a local file system.

A `flock` is on a file, but other processes find the file by its name: a lock whose name is gone, or names another file,
keeps no process out. Names are checked before every write, and at times while pages are read; a check costs an
`os.stat`.
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
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gdscache.disk import kept
from gdscache.disk.catalog_file import CATALOG_NAME, LOG_SUFFIX, open_own
from gdscache.disk.slab import slab_name
from gdscache.errors import (
    DirectoryInUseError,
    DirectoryNotWritableError,
    DirectoryPermissionsError,
    NoSpaceError,
    NotADirectoryPathError,
    StorageError,
)
from gdscache.storage.base import PROBE_PREFIX

QUIET_NS = 100_000_000  # a directory that changed less than this ago may change again with the same time stamp
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FileLock:
    """An exclusive lock on a file, until `close`.

    Raises `BlockingIOError` if it is locked, `OSError` if it cannot be opened or locked, `NotARegularFileError` for a
    link (a hard one too), a directory or a device.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self.descriptor = open_own(path, os.O_RDWR | (os.O_CREAT if create else 0))
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self.descriptor)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            undo.pop_all()
        found = os.fstat(self.descriptor)
        self._file = (found.st_dev, found.st_ino)
        self._pid = os.getpid()

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


LOCK_NAME = "lock"
DIRECTORY_MODE = 0o700
FOREIGN_WRITE = stat.S_IWGRP | stat.S_IWOTH
COMMAND_LIMIT = 500  # characters of the owner's command line that are kept
LOCK_LIMIT = 8192  # bytes of a lock file that are read
WANTED_NAME = "wanted"  # locked by an engine that waits for a verification to give way
VERIFICATION_S = 10.0  # seconds that it waits at most
NAME_S = 0.5  # seconds for an owner to write its name
_AGAIN_S = 0.01


class CacheDirectory:
    """A cache directory, and the further ones that its slab is striped over, owned by this object until `close()`. Use
    `CacheDirectory.open`."""

    def __init__(self, watches: Sequence[DirectoryWatch]) -> None:
        self.path = watches[0].path
        self._watches = watches

    @classmethod
    def open(cls, *paths: Path, engine: bool = True) -> CacheDirectory:
        """Take ownership of all of `paths`, or of none. A missing directory is made, with mode 0700.

        An existing directory keeps its mode. `engine`: for an engine, which removes a killed owner's probe files, and
        waits some seconds for a verification to give way.

        Raises `NotADirectoryPathError`, `DirectoryNotWritableError`, `DirectoryInUseError` (another process, or another
        engine of this one), `DirectoryPermissionsError` (others may write there), `NotARegularFileError` (the lock is a
        link, also a hard one, or a directory) or `NoSpaceError`.
        """
        with contextlib.ExitStack() as undo:
            watches = []
            for path in paths:
                watches.append(_own(Path(os.path.abspath(path)), engine=engine))
                undo.callback(watches[-1].close)
            undo.pop_all()
        return cls(watches)

    @property
    def closed(self) -> bool:
        return not self._watches[0].locks

    def hold_slabs(self, shards: Iterable[int] = (0,)) -> None:
        """Lock the existing slab files of shards. Call it before they are opened, and again after missing ones are
        made. Raises as `open`."""
        for shard in shards:
            for number, watch in enumerate(self._watches):
                lock = lock_slab(watch.path, number, shard, held=[lock.path for lock in watch.locks])
                if lock is not None:
                    watch.locks.append(lock)

    def watch_catalog(self) -> None:
        """The catalogue and its log must keep their names from now on. Raises `DirectoryNotWritableError`."""
        with _refusals(self.path):
            for name in (CATALOG_NAME, CATALOG_NAME + LOG_SUFFIX):
                self._watches[0].add(self.path / name)

    def lost(self, *, thorough: bool = False) -> str:
        """Why another process may use a directory; "" while none may, and after `close`: `DirectoryWatch.lost`."""
        return "" if self.closed else next(filter(None, (w.lost(thorough=thorough) for w in self._watches)), "")

    def close(self) -> None:
        for watch in reversed(self._watches):
            watch.close()

    def __enter__(self) -> CacheDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _own(path: Path, *, engine: bool) -> DirectoryWatch:
    with _refusals(path), contextlib.ExitStack() as undo:
        _make_directory(path)
        watch = DirectoryWatch(path)
        _refuse_foreign_writers(path)
        lock = _lock(path, LOCK_NAME, create=True, patient=engine)
        watch.locks.append(lock)
        undo.callback(watch.close)
        if engine:
            _sweep(path)
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, _describe_owner("engine" if engine else "verification"), 0)
        undo.pop_all()
    return watch


def lock_slab(directory: Path, number: int, shard: int, *, held: Collection[Path]) -> FileLock | None:
    """A lock on a shard's slab file in directory `number`; None if it is held or missing. Raises as
    `CacheDirectory.open`."""
    path = directory / slab_name(number, shard)
    if path in held or not os.path.lexists(path):
        return None
    return _lock(directory, path.name, create=False, patient=False)


def _make_directory(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(DIRECTORY_MODE)


def _sweep(path: Path) -> None:
    for name in os.listdir(path):
        if name.startswith(PROBE_PREFIX):
            (path / name).unlink(missing_ok=True)


def _refuse_foreign_writers(path: Path) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & FOREIGN_WRITE:
        who = "everybody" if mode & stat.S_IWOTH else "its group"
        raise DirectoryPermissionsError(
            f"{path} has mode {mode:04o}: {who} may write there, and so replace the cache's files and locks, and "
            "the bytes that are loaded",
            f"chmod go-w {shlex.quote(str(path))}, or set ssd.path to a directory that only this user may write",
        )


def _lock(directory: Path, name: str, *, create: bool, patient: bool) -> FileLock:
    """Take a lock in a directory. `patient`: ask a verification to give way. Raises as `CacheDirectory.open`."""
    path, began = directory / name, time.monotonic()
    no_locks = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
    with _refusals(directory, no_locks), contextlib.ExitStack() as asking:
        ask: Callable[[], None] | None = None
        while True:
            try:
                return FileLock(path, create=create)
            except BlockingIOError as error:
                what = str(_owner(directory).get("what", "")) if patient else "engine"
                most = {"verification": VERIFICATION_S, "": NAME_S}.get(what, 0.0)
                if what == "verification" and ask is None:
                    ask, began = asking.enter_context(_asked_for(directory)), time.monotonic()
                elif time.monotonic() - began >= most:
                    raise DirectoryInUseError(*_owner_message(directory, name)) from error
                elif ask is not None:
                    ask()
            time.sleep(_AGAIN_S)


@contextlib.contextmanager
def _asked_for(directory: Path) -> Iterator[Callable[[], None]]:
    """Ask a verification to give way, until the end. The function asks again if need be: in the instant between making
    the file and locking it, a verification takes it for a killed engine's, and removes it."""
    lock: FileLock | None = None

    def ask() -> None:
        nonlocal lock
        if lock is not None and lock.lost(thorough=False):
            lock.close()
            lock = None
        if lock is None:
            with contextlib.suppress(OSError, StorageError):  # another engine asks already, or asking is impossible
                lock = FileLock(directory / WANTED_NAME, create=True)

    ask()
    try:
        yield ask
    finally:
        if lock is not None:
            if not lock.lost(thorough=False):
                lock.path.unlink(missing_ok=True)
            lock.close()


def wanted(directory: Path) -> bool:
    try:
        lock = FileLock(directory / WANTED_NAME, create=False)
    except BlockingIOError:
        return True
    except (OSError, StorageError):
        return False
    lock.path.unlink(missing_ok=True)  # of a killed engine
    lock.close()
    return False


def _describe_owner(what: str) -> bytes:
    owner = {
        "what": what,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv)[:COMMAND_LIMIT],
    }
    return json.dumps(owner).encode()


def _owner_message(path: Path, name: str) -> tuple[str, str]:
    """Message and hint of a refusal. The owner may be between taking the lock and writing its name."""
    hint = "give each engine its own ssd.path ($VARS are replaced), or end the other one"
    if name != LOCK_NAME:
        return f"{path} is in use by a process that has lost {path / LOCK_NAME}: it still holds {path / name}", hint
    owner = _owner(path)
    try:
        pid, host = int(owner["pid"]), str(owner["host"])
        started, command = str(owner["started"]), textwrap.shorten(str(owner["command"]), 200, placeholder=" ...")
    except (ValueError, KeyError, TypeError, OverflowError):
        return f"{path} is in use by a process that has not said its name yet", hint
    if owner.get("what") == "verification":
        hint = "gdscache verify reads it: wait for its end, or end it"
    if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}"):
        hint = f"process {pid} has ended, but a process it forked still holds the lock; end that one"
    who = "this process" if pid == os.getpid() else f"process {pid}"
    return f"{path} is in use by {who} (pid {pid} on {host}, since {started}): {command}", hint


def _owner(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(kept.read(path / LOCK_NAME, LOCK_LIMIT))
    except (OSError, ValueError, RecursionError, StorageError):
        return {}
    return owner if isinstance(owner, dict) else {}


@contextlib.contextmanager
def _refusals(path: Path, no_locks: Collection[int] = ()) -> Iterator[None]:
    """The system's errors as ours. `no_locks`: those of a file system without locks."""
    try:
        yield
    except OSError as error:
        raise _refusal(path, error, no_locks) from error


def _refusal(path: Path, error: OSError, no_locks: Collection[int]) -> StorageError:
    if error.errno in no_locks:
        return DirectoryNotWritableError(
            f"{path} cannot be locked: {error.strerror}", "set ssd.path to a directory on a local file system"
        )
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        file = next((one for one in (path, *path.parents) if one.exists() and not one.is_dir()), path)
        return NotADirectoryPathError(f"{file} is not a directory", "set ssd.path to a directory, or to a new path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"{path}: {error.strerror}", "free space or inodes there, or set another ssd.path")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DirectoryNotWritableError(
            f"{path} cannot be opened: {error.strerror}",
            "raise the limit of open files (ulimit -n), or lower ssd.threads",
        )
    return DirectoryNotWritableError(
        f"{path} cannot be made or written: {error.strerror}", "make it writable for this user, or set another ssd.path"
    )
