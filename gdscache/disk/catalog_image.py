"""A copy of a catalogue as of its last commit: the database with its log applied.

SQLite reports a failed read like damage (the result code of one can become the other's), and creates files to read a
log. Here every byte is read once, a device's error is an error, no file is written beside the catalogue, and only a few
MiB of it are in memory. The log's format is that of https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdscache.errors import IOFailedError

PIECE = 1 << 20  # bytes of a read
LOG_SUFFIX = "-wal"
HEADER, _FRAME = 32, 24  # bytes before the first frame, and before each page
_MAGIC, _VERSION = 0x377F0682, 3007000
_WORDS = 1 << 32
_VERSIONS = 18  # offset of the versions that may write and read a database: 1 without a log, 2 with one

Words = npt.NDArray[np.uint32]
Progress = Callable[[int, int, str], object]


@contextlib.contextmanager
def open_copy(path: Path, progress: Progress = lambda done, total, text: None) -> Iterator[sqlite3.Connection]:
    """A connection that reads a copy of the database at `path` as of its last commit; for several threads in turn.

    The copy is an unnamed file in the directory for temporary files (`TMPDIR`), and goes with the process.
    `progress(done, total, text)` counts bytes. Raises `OSError` if a byte cannot be read, `IOFailedError` if the copy
    cannot be written, `sqlite3.DatabaseError` if SQLite could only read the database's version.
    """
    with contextlib.ExitStack() as undo:
        with _room("made"):
            copy, name = tempfile.mkstemp(prefix="gdscache-", suffix=".sqlite")
        undo.callback(os.close, copy)
        try:  # SQLite opens by name, and reads nothing before the first query
            uri = f"{Path(name).absolute().as_uri()}?mode=ro"
            opened = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        finally:
            os.unlink(name)
        undo.enter_context(contextlib.closing(opened))
        _copy(path, copy, progress)
        if os.pread(copy, 2, _VERSIONS) not in (b"\1\1", b""):
            raise sqlite3.DatabaseError("it is of a version from the future, which SQLite reads and never writes")
        yield opened


def _copy(path: Path, copy: int, progress: Progress) -> None:
    with _reading(path) as database:
        total, done = os.fstat(database).st_size, 0
        while piece := os.pread(database, PIECE, done):
            _write(copy, piece, done)
            done += len(piece)
            progress(done, max(total, done), "bytes of the catalogue")
    try:
        with _reading(Path(f"{path}{LOG_SUFFIX}")) as log:
            _apply(copy, log)
    except FileNotFoundError:
        pass
    if os.pread(copy, 2, _VERSIONS) == b"\2\2":
        _write(copy, b"\1\1", _VERSIONS)


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


def _write(copy: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        with _room("written"):
            count = os.pwrite(copy, rest, offset)
        rest, offset = rest[count:], offset + count


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _apply(copy: int, log: int) -> None:
    """Write the pages of all whole transactions of a log into the copy."""
    header = os.pread(log, HEADER, 0)
    if len(header) < HEADER:
        return
    magic, version, size, _, *salts = struct.unpack_from(">6I", header)
    if magic & ~1 != _MAGIC or version != _VERSION or size not in [1 << n for n in range(9, 17)]:
        return
    order = ">u4" if magic & 1 else "<u4"
    state = _checksum(np.frombuffer(header, order, 6).reshape(1, 6).astype(np.uint32), _weights(6), (0, 0))[0]
    if state != struct.unpack_from(">2I", header, 24):
        return
    whole, pages = _committed(log, size, order, salts, state)
    if not whole:
        return
    for first, frames in _frames(log, size):
        for at, head in enumerate(_heads(frames[: whole - first])):
            if head[0] <= pages:
                _write(copy, frames[at, _FRAME:].data, (head[0] - 1) * size)
        if first + len(frames) >= whole:
            break
    with _room("written"):
        os.ftruncate(copy, pages * size)


def _committed(log: int, size: int, order: str, salts: list[int], state: tuple[int, int]) -> tuple[int, int]:
    whole = pages = 0
    weights = _weights((8 + size) // 4)
    for first, frames in _frames(log, size):
        summed = np.ascontiguousarray(np.hstack((frames[:, :8], frames[:, _FRAME:]))).view(order).astype(np.uint32)
        for at, (head, after) in enumerate(zip(_heads(frames), _checksum(summed, weights, state), strict=True), first):
            number, commit, salt, pepper, *sums = head
            if [salt, pepper] != salts or after != tuple(sums) or not number:
                return whole, pages
            state = after
            if commit:
                whole, pages = at + 1, commit
    return whole, pages


def _frames(log: int, size: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The number of a whole frame, and the bytes of some frames from it on, uint8 of shape (frames, header and
    page)."""
    step = _FRAME + size
    most = max(1, PIECE // step)
    first = 0
    while True:
        data = bytearray()
        while len(data) < most * step:
            piece = os.pread(log, most * step - len(data), HEADER + first * step + len(data))
            if not piece:
                break
            data += piece
        count = len(data) // step
        if count:
            yield first, np.frombuffer(data, np.uint8, count * step).reshape(count, step)
        if count < most:
            return
        first += count


def _heads(frames: npt.NDArray[np.uint8]) -> list[list[int]]:
    heads: list[list[int]] = np.ascontiguousarray(frames[:, :_FRAME]).view(">u4").tolist()
    return heads


def _weights(words: int) -> Words:
    """The weight of each word of a row in SQLite's running checksum: uint32 of shape (words, 2).

    A pair of words (x, y) turns the checksum (a, b) into (a + b + x, a + 2 b + x + y): a matrix, whose powers weigh the
    words of a row, so that only the step from row to row runs in Python. The last two rows weigh (a, b).
    """
    weights = np.empty((words + 2, 2), np.uint32)
    a, b, d = 1, 0, 1  # the power of the matrix [[1, 1], [1, 2]], which is symmetric: [[a, b], [b, d]]
    for pair in reversed(range(words // 2)):
        weights[2 * pair] = (a + b) % _WORDS, (b + d) % _WORDS
        weights[2 * pair + 1] = b, d
        a, b, d = (a + b) % _WORDS, (b + d) % _WORDS, (b + 2 * d) % _WORDS
    weights[words:] = (a, b), (b, d)
    return weights


def _checksum(rows: Words, weights: Words, state: tuple[int, int]) -> list[tuple[int, int]]:
    (a, b), (_, d) = weights[-2:].tolist()
    told = []
    for x, y in (rows @ weights[:-2]).tolist():
        state = (a * state[0] + b * state[1] + x) % _WORDS, (b * state[0] + d * state[1] + y) % _WORDS
        told.append(state)
    return told
