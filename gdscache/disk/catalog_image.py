"""A copy of a catalogue as of its last commit: the database with its log applied.

SQLite reports a failed read like damage (the result code of one can become the other's), and creates files to read a
log. Here every byte is read once, a device's error is an error, and no file is written beside the catalogue. SQLite
applies the log, to the copy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gdscache.errors import IOFailedError

PIECE = 1 << 20  # bytes of a read
LOG_SUFFIX = "-wal"
HEADER = 32  # bytes of a log before its first frame
_VERSIONS = 18  # offset of the versions that may write and read a database: 1 without a log, 2 with one

Progress = Callable[[int, int, str], object]


def _no_progress(done: int, total: int, text: str) -> None:
    pass


@contextlib.contextmanager
def open_copy(path: Path, progress: Progress = _no_progress) -> Iterator[sqlite3.Connection]:
    """A connection that reads a copy of the database at `path` as of its last commit; for several threads in turn.

    The copy is in the directory for temporary files (`TMPDIR`). It has lost its name when this returns, and goes with
    the process. `progress(done, total, text)` counts bytes. Raises `OSError` if a byte cannot be read, `IOFailedError`
    if the copy cannot be written, `sqlite3.DatabaseError` if it is no database, or of a version that SQLite only reads.
    """
    with contextlib.ExitStack() as undo:
        with _room("made"):
            directory = tempfile.mkdtemp(prefix="gdscache-")
        copy = Path(directory, "copy")
        log = Path(f"{copy}{LOG_SUFFIX}")
        try:
            _copy(path, copy, progress)
            with contextlib.suppress(FileNotFoundError):
                _copy(Path(f"{path}{LOG_SUFFIX}"), log, _no_progress)
            uri = f"{copy.absolute().as_uri()}?vfs=unix-excl"
            opened = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            undo.enter_context(contextlib.closing(opened))
            opened.execute("PRAGMA synchronous = OFF")
            with _room("written"):
                _apply_log(opened)
            with copy.open("rb") as file:
                if os.pread(file.fileno(), 2, _VERSIONS) not in (b"\1\1", b""):
                    raise sqlite3.DatabaseError("it is of a version from the future, which SQLite reads, never writes")
        finally:
            for file_name in (copy, log):
                file_name.unlink(missing_ok=True)
            os.rmdir(directory)
        yield opened


def _apply_log(copy: sqlite3.Connection) -> None:
    try:
        copy.execute("PRAGMA journal_mode = DELETE").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise OSError(errno.ENOSPC, str(error)) from error
        raise


def _copy(path: Path, copy: Path, progress: Progress) -> None:
    with contextlib.ExitStack() as ends:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        ends.callback(os.close, fd)
        with _room("written"):
            file = ends.enter_context(copy.open("wb"))
        total, done = os.fstat(fd).st_size, 0
        while piece := os.pread(fd, PIECE, done):
            with _room("written"):
                file.write(piece)
                file.flush()
            done += len(piece)
            progress(done, max(total, done), "bytes of the catalogue")


@contextlib.contextmanager
def _room(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise IOFailedError(
            f"a copy of the catalogue cannot be {what} in the directory for temporary files: {error.strerror}",
            "set TMPDIR to a directory with as much room as the catalogue and its log take",
            error.errno,
        ) from error
