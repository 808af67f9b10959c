"""Files of transports that move host memory, opened past the page cache if the system can; and the transports `uring`
and `posix`, whose files the library itself reads and writes, without the interpreter."""

from __future__ import annotations

import dataclasses
import errno
import logging
import mmap
import os
import re
import tempfile
import threading
from pathlib import Path

import numpy as np

from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    IOFailedError,
    RefusedDiskError,
    ThreadStartError,
    TransportUnavailableError,
)
from gdscache.native import CuFiles, move_pieces
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.runtime.files import text_of
from gdscache.storage.base import PROBE_PREFIX, EitherWay, Memory, Op, Switch, failed

_log = logging.getLogger("gdscache.storage")
IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are nothing but page cache
_TOO_MANY = (errno.EMFILE, errno.ENFILE)  # open files, of the process or of the system


class DirectFiles(EitherWay):
    """A transport whose handles are file descriptors. Its subclass moves the bytes.

    `direct_io="auto"` uses O_DIRECT in every directory where a write and a read through it give the same bytes, and the
    page cache elsewhere (a warning for the directory names the cause); `"on"` raises `TransportUnavailableError`
    instead; `"off"` always uses the page cache.
    """

    def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
        super().__init__(threads, direct_io)
        self._closed = False
        self._paths: dict[int, str] = {}
        self._refusals: dict[Path, str] = {}
        self._buffered: set[int] = set()
        self._open_lock = threading.Lock()

    @property
    def direct(self) -> bool:
        return bool(self._paths) and not self._buffered

    def open(self, path: Path) -> int:
        with self._open_lock:
            self.check_open()
            flags = os.O_RDWR | os.O_CLOEXEC
            direct = self.direct_io != "off" and not self._refusal(path.parent)
            try:
                file = os.open(path, flags | os.O_DIRECT if direct else flags)
            except OSError as error:
                raise failed("open", str(path), 0, error) from error
            try:
                self._adopt(file, path)
            except DeadlineError:
                raise  # a hanging call may still use it
            except BaseException:
                os.close(file)
                raise
            if not direct:
                self._buffered.add(file)
            self._paths[file] = str(path)
            return file

    def _adopt(self, file: int, path: Path) -> None:
        """For subclasses: further steps of `open`. If it raises, the file is closed, except after `DeadlineError`."""

    def check_open(self) -> None:
        """Raises `EngineClosedError` after `close`."""
        if self._closed:
            raise EngineClosedError(f"the {self.name} transport was closed", "use it before close")

    def path(self, file: int) -> str:
        """An open file's path. Raises `IOFailedError`, and `EngineClosedError` after `close`."""
        path = self._paths.get(file)
        if path is None:
            self.check_open()
            raise IOFailedError(f"{file} is no open file of this transport", "pass a handle from open()", errno.EBADF)
        return path

    def flush(self, file: int) -> None:
        path = self.path(file)
        try:
            os.fdatasync(file)
        except OSError as error:
            raise failed("flush", path, 0, error) from error

    def describe(self) -> dict[str, object]:
        refusals = {str(directory): cause for directory, cause in self._refusals.items() if cause}
        return {**super().describe(), "direct_refused": refusals}

    def close(self) -> None:
        with self._open_lock:
            self._closed = True
            self._buffered.clear()
            while self._paths:  # taken out first: a close that raises has closed it, and its number may be another's
                os.close(self._paths.popitem()[0])

    def _refusal(self, directory: Path) -> str:
        """Why O_DIRECT does not work in the directory, probed once; an empty string if it does."""
        cause = self._refusals.get(directory)
        if cause is None:
            cause = self._refusals[directory] = probe_direct_io(directory)
            if cause and self.direct_io == "on":
                del self._refusals[directory]
                raise TransportUnavailableError(
                    f"direct_io is on, but O_DIRECT does not work in {directory}: {cause}",
                    "set direct_io to auto or off, or move the directory to a file system with O_DIRECT",
                )
            if cause:
                _log.warning("no O_DIRECT in %s, I/O goes through the page cache: %s", directory, cause)
        return cause


@dataclasses.dataclass(frozen=True, slots=True)
class Mount:
    """`source`: the mounted device; `device`: its `major:minor`. All are empty if the system does not tell."""

    file_system: str = ""
    source: str = ""
    device: str = ""
    options: str = ""


def find_mount(directory: Path, root: Path = Path("/")) -> Mount:
    """The mount that holds a directory."""
    best, place = (0, Mount()), directory.resolve()
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 6 or len(kinds) < 2:
            continue
        point = Path(_unescaped(fields[4]))
        # A later mount covers an earlier one at the same point.
        if place.is_relative_to(point) and len(point.parts) >= best[0]:
            options = ",".join(dict.fromkeys([*fields[5].split(","), *"".join(kinds[2:3]).split(",")])).strip(",")
            best = len(point.parts), Mount(kinds[0], _unescaped(kinds[1]), fields[2], options)
    return best[1]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def probe_direct_io(directory: Path) -> str:
    """Write and read one sector in a temporary file of `directory` with O_DIRECT, and compare.

    Returns why it does not work, or an empty string if it does, or only the disk is full. Raises `IOFailedError` if the
    directory takes no file, or no more files can be open, which says nothing about O_DIRECT.
    """
    try:
        file, name = tempfile.mkstemp(prefix=PROBE_PREFIX, dir=directory)
    except OSError as error:
        raise _probe_failed(directory, error) from error
    try:
        with mmap.mmap(-1, 2 * EXTENT_ALIGNMENT) as memory, memoryview(memory) as view:
            view[:EXTENT_ALIGNMENT] = bytes(range(256)) * (EXTENT_ALIGNMENT // 256)
            return _probe_sector(name, view[:EXTENT_ALIGNMENT], view[EXTENT_ALIGNMENT:])
    finally:
        os.close(file)
        os.unlink(name)


def _probe_sector(name: str, source: memoryview, target: memoryview) -> str:
    with source, target:
        try:
            file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in _TOO_MANY:
                raise _probe_failed(Path(name).parent, error) from error
            return f"open answers {error.strerror}"
        try:
            written, read = os.pwritev(file, [source], 0), os.preadv(file, [target], 0)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # only room was missing, and a slab has its own
                return ""
            return f"I/O answers {error.strerror}"
        finally:
            os.close(file)
        return "" if written == read == len(source) and source == target else "the bytes read are not the bytes written"


def _probe_failed(directory: Path, error: OSError) -> IOFailedError:
    if error.errno in _TOO_MANY:
        message = f"O_DIRECT cannot be probed in {directory}: {error.strerror}"
        return IOFailedError(message, "raise the limit of open files (ulimit -n), or close some", error.errno)
    return failed("probe", str(directory), 0, error)


class NativeTransport(DirectFiles):
    """Files of `DirectFiles`. An engine's executor moves their bytes: with `uring` by at most `threads` threads of the
    kernel, else by as many of the library. `carry` does the same without an engine. Its own `read` and `write`, for
    subclasses, are system calls.

    Raises `TransportUnavailableError` if io_uring is refused, `IOFailedError` if the process may open no more files,
    and `ThreadStartError` if it may start no more threads.
    """

    cufile: CuFiles | None = None  # moves GPU memory

    def __init__(self, threads: int, direct_io: Switch = "auto", *, uring: bool = True, name: str = "") -> None:
        """`name`: of a subclass."""
        super().__init__(threads, direct_io)
        self.name = name or ("uring" if uring else "posix")
        self.uring = uring
        self._try_disk()

    @property
    def is_own(self) -> bool:
        """Whether it is this class itself, so that the library can move the bytes alone."""
        return type(self) is NativeTransport

    def _try_disk(self) -> None:
        """Open an executor's disk and close it, so that a refusal is reported before there are files."""
        try:
            move_pieces("ring" if self.uring else "threads", self.threads, np.empty((0, 4), np.int64), write=False)
        except RefusedDiskError as error:
            what = f"the transport {self.name} cannot be set up: {error.message}"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise IOFailedError(what, "raise ulimit -n, or free memory", error.errno) from error
            if self.uring:
                raise TransportUnavailableError(
                    error.message, "set ssd.transport to posix, which uses threads"
                ) from error
            raise ThreadStartError(
                f"{what}: {os.strerror(error.errno or 0)}", "raise ulimit -u, or lower ssd.threads"
            ) from error

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        path = self.path(file)
        if not isinstance(memory, memoryview):
            raise IOFailedError(f"{self.name} cannot move GPU memory", "use a transport that does", errno.EINVAL)
        try:
            return (os.preadv if op is Op.READ else os.pwritev)(file, [memory], offset)
        except OSError as error:
            raise failed(op.value, path, offset, error) from error
