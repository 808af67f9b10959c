"""Disks of the native library, which move bytes between files and memory, and requests cut and merged for them."""

from __future__ import annotations

import ctypes
import errno
from typing import Literal

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.errors import NativeCallError, RefusedDiskError
from gdscache.native.library import address, checked, integers, library

Kind = Literal["ring", "threads"]

MOST_FRAGMENTS = 1024  # of a run: kMostFragments of csrc/host/disk.h
MOST_WORKERS = 1024
CUFILE_ERRORS = 5000
_ROOM = 1024  # answers taken at once; there may be more


class Disk:
    """io_uring (`ring`), done by at most `workers` threads of the kernel, or `workers` threads of the library, which
    with `cufile` (`CuFiles.handle`) move memory of a GPU, too: what was added there.

    One thread submits, reaps and closes, and lives as long as anything is under way. Any thread may `wake`.
    Raises `RefusedDiskError`, with the errno of the system's answer.
    """

    def __init__(self, kind: Kind, workers: int, depth: int, cufile: int | None = None) -> None:
        """`depth`: pieces under way; what is more waits in the order of its submission. A disk of threads has as many
        under way as it has threads."""
        handle, why = ctypes.c_void_p(), ctypes.create_string_buffer(200)
        self.library = library()
        out = ctypes.addressof(handle), ctypes.addressof(why), len(why)
        if cufile is None:
            answer = self.library.disk_open(kind.encode(), workers, depth, *out)
        else:
            answer = self.library.cufile_disk(cufile, workers, *out)
        if answer < 0:
            raise RefusedDiskError(why.value.decode(), "allow io_uring, or raise ulimit -n and ulimit -u", -answer)
        self.handle = handle.value
        self._ended = np.empty((_ROOM, 5), np.int64)

    @property
    def pending(self) -> int:
        """Pieces that have not ended."""
        return checked(self.library.disk_pending(self.handle), "disk_pending")

    def submit(self, pieces: Int64Array, fragments: npt.NDArray[np.uint64]) -> None:
        """Begin pieces, or queue them. `fragments` and the memory that they name stay until all has ended.

        `pieces`: int64 (pieces, 7): tag, 0 for a read or 1 for a write, descriptor, offset in bytes, first of
        `fragments`, how many of them, and 1 where the kernel copies the bytes. `fragments`: uint64 (fragments, 2):
        address, bytes.
        """
        count, total = len(pieces), len(fragments)
        answer = self.library.disk_submit(self.handle, address(pieces), count, address(fragments), total)
        checked(answer, "disk_submit")

    def reap(self, seconds: float = -1) -> Int64Array:
        """What has ended, waiting at most so many seconds for the first (below 0: for ever); none after a `wake`.

        int64 (answers, 5): tag, first fragment of the piece, fragments, 0 or an error (`error_of`), bytes. It is
        overwritten by the next. Raises `NativeCallError` when the disk is broken: what the kernel has then keeps its
        memory for good.
        """
        ended = self._ended
        return ended[: checked(self.library.disk_reap(self.handle, address(ended), len(ended), seconds), "disk_reap")]

    def wake(self) -> None:
        """End the wait of a `reap`, the running or else the next."""
        checked(self.library.disk_wake(self.handle), "disk_wake")

    def close(self) -> None:
        """Wait for what is under way; again is fine."""
        handle, self.handle = self.handle, None
        self.library.disk_close(handle)


def error_of(code: int) -> OSError:
    """What the error of an answer means: an errno, or one of cuFile's own, which are above 5000."""
    return OSError(code if code < CUFILE_ERRORS else errno.EIO, library().cufile_text(code).decode())


def cut_and_merge(requests: Int64Array, limit: int, most: int = MOST_FRAGMENTS) -> tuple[Int64Array, Int64Array]:
    """Requests in the order of their files, cut into parts of at most `limit` bytes, and neighbours merged into runs of
    at most `limit` bytes and `most` parts.

    `requests`: int64 (requests, 4): descriptor, offset, address, bytes. The answers: parts, int64 (parts, 3): address,
    bytes, row of the request; and runs, int64 (runs, 5): descriptor, offset, first part, parts, bytes.
    Raises `NativeCallError` for what makes no sense.
    """
    if limit < 1:
        raise NativeCallError(f"runs of at most {limit} bytes", "pass 1 or more")
    requests = integers(requests)
    room = int((-(-requests[:, 3] // limit)).clip(1).sum())
    parts, runs, counts = np.empty((room, 3), np.int64), np.empty((room, 5), np.int64), np.empty(2, np.int64)
    answer = library().cut_and_merge(
        *(address(requests), len(requests), limit, most),
        *(address(parts), room, address(runs), room, address(counts)),
    )
    checked(answer, "cut_and_merge")
    return parts[: counts[0]], runs[: counts[1]]
