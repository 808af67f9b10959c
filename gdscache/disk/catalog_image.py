"""A catalogue as its files have it, in memory: the database with what its log has committed, read without SQLite.

SQLite tells of a read that failed as it tells of damage (a result code of the one, EIO, becomes that of the other), and
makes files to read a log. Here every byte is read once, an error of the device is an error, and nothing is written. The
log's format is that of https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIECE = 1 << 20  # bytes of a read
LOG_SUFFIX = "-wal"
_HEADER, _FRAME = 32, 24  # bytes before the first frame, and before each page
_MAGIC, _VERSION = 0x377F0682, 3007000
_FRAMES_AT_ONCE = 1024
_WORDS = 1 << 32

Words = npt.NDArray[np.uint32]


def read_image(path: Path) -> bytearray:
    """The database at `path` as its last commit left it. Raises `OSError` where a byte cannot be read."""
    image = _read(path)
    try:
        log = _read(Path(f"{path}{LOG_SUFFIX}"))
    except FileNotFoundError:
        log = bytearray()
    _apply(image, log)
    if image[18:20] == b"\2\2":
        image[18:20] = b"\1\1"  # a database in memory has no log
    return image


def open_image(image: bytearray) -> sqlite3.Connection:
    """A connection to a copy of an image; nothing that it does reaches a file. From several threads in turn."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    if image:
        connection.deserialize(image)
    return connection


def _read(path: Path) -> bytearray:
    content = bytearray()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while piece := os.pread(fd, PIECE, len(content)):
            content += piece
    finally:
        os.close(fd)
    return content


def _apply(image: bytearray, log: bytearray) -> None:
    """Put the pages of all whole transactions of a log into the image; what follows the last one does not count."""
    if len(log) < _HEADER:
        return
    magic, version, size, _, *salts = struct.unpack_from(">6I", log)
    if magic & ~1 != _MAGIC or version != _VERSION or size not in [1 << n for n in range(9, 17)]:
        return
    order = ">u4" if magic & 1 else "<u4"
    state = _checksum(np.frombuffer(log, order, 6).reshape(1, 6).astype(np.uint32), (0, 0))[0]
    if state != struct.unpack_from(">2I", log, 24):
        return
    frames = (len(log) - _HEADER) // (_FRAME + size)
    table = np.frombuffer(log, np.uint8, frames * (_FRAME + size), _HEADER).reshape(frames, _FRAME + size)
    heads = np.ascontiguousarray(table[:, :_FRAME]).view(">u4").tolist()
    whole, pages = 0, 0  # frames up to the last commit, and the pages of the database then
    for first in range(0, frames, _FRAMES_AT_ONCE):
        some = table[first : first + _FRAMES_AT_ONCE]
        summed = np.ascontiguousarray(np.hstack((some[:, :8], some[:, _FRAME:]))).view(order).astype(np.uint32)
        for at, after in enumerate(_checksum(summed, state), first):
            number, commit, salt, pepper, *sums = heads[at]
            if [salt, pepper] != salts or after != tuple(sums) or not number:
                frames = 0
                break
            state = after
            if commit:
                whole, pages = at + 1, commit
        if not frames:
            break
    if whole:
        image.extend(bytes(max(0, pages * size - len(image))))
        for at in range(whole):
            number = heads[at][0]
            if number <= pages:
                image[(number - 1) * size : number * size] = table[at, _FRAME:].tobytes()
        del image[pages * size :]


def _checksum(rows: Words, state: tuple[int, int]) -> list[tuple[int, int]]:
    """SQLite's running checksum after each row, beginning with `state`.

    A pair of words (x, y) takes it from (a, b) to (a + b + x, a + 2 b + x + y): a matrix, whose powers weigh the words
    of a row, so that only the step from row to row is left to Python.
    """
    pairs = rows.shape[1] // 2
    weights = np.empty((2 * pairs, 2), np.uint32)
    a, b, d = 1, 0, 1  # the power of the matrix [[1, 1], [1, 2]], which is symmetric: [[a, b], [b, d]]
    for pair in reversed(range(pairs)):
        weights[2 * pair] = (a + b) % _WORDS, (b + d) % _WORDS
        weights[2 * pair + 1] = b, d
        a, b, d = (a + b) % _WORDS, (b + d) % _WORDS, (b + 2 * d) % _WORDS
    told = []
    for x, y in (rows @ weights).tolist():
        state = (a * state[0] + b * state[1] + x) % _WORDS, (b * state[0] + d * state[1] + y) % _WORDS
        told.append(state)
    return told
