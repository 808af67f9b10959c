"""Batches of requests for `gdscache bench io`: by a disk of the native library, or by threads that call a transport."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from gdscache.arrays import Int64Array, UInt64Array, integers
from gdscache.errors import IOFailedError, ShortIOError, StorageError
from gdscache.native import Disk, error_of
from gdscache.sizes import MIB
from gdscache.storage.base import Memory, Op, Transport, failed
from gdscache.storage.base import part as memory_part

CALL_BYTES = 4 * MIB  # that go with one call, as in an engine

Request = tuple[int, int]
"""Where in the file, where in the memory."""
Ended = tuple[int, int, OSError | StorageError | None, int]
"""A part that has ended: number of its batch and in it, what went wrong, bytes that were moved."""


class Batch:
    """Requests of `nbytes` each, as parts of at most `CALL_BYTES`, and how they end."""

    def __init__(self, number: int, op: Op, file: int, some: Sequence[Request], nbytes: int) -> None:
        self.number, self.op, self.file = number, op, file
        starts = np.arange(0, nbytes, CALL_BYTES)
        places = integers(some).reshape(-1, 1, 2) + starts.reshape(1, -1, 1)
        self.places: Int64Array = places.reshape(-1, 2)  # of the parts: in the file, in the memory
        self.sizes: Int64Array = np.tile(np.minimum(nbytes - starts, CALL_BYTES), len(some))
        self.left = len(self.sizes)
        self.ended: list[slice] = []  # of the memory: good parts that nobody has looked at since
        self.failure: StorageError | None = None
        self.kept: UInt64Array = np.empty(0, np.uint64)  # what a disk looks at until all has ended

    def end(self, part: int, error: OSError | StorageError | None, moved: int, path: str) -> None:
        self.left -= 1
        (offset, at), nbytes = self.places[part].tolist(), int(self.sizes[part])
        if error is None and moved == nbytes:
            self.ended.append(slice(at, at + nbytes))
        elif error is None:
            said = f"{self.op.value} moved {moved} of {nbytes} bytes at offset {offset} of {path}"
            self.failure = self.failure or ShortIOError(said, "see the file and the room on its disk")
        else:
            here = error if isinstance(error, StorageError) else failed(self.op.value, path, offset, error)
            self.failure = self.failure or here


class Mover(Protocol):
    """Moves the parts of batches. One thread calls it; nothing is under way when it is closed."""

    def begin(self, batch: Batch) -> None: ...
    def reap(self) -> list[Ended]:
        """What has ended, waiting for the first."""

    def close(self) -> None: ...


class ByDisk:
    """By a disk of the library, to and from memory at `address`. `copied`: the kernel copies the file's bytes."""

    def __init__(self, disk: Disk, address: int, *, copied: bool) -> None:
        self._disk, self._address, self._copied = disk, address, copied

    def begin(self, batch: Batch) -> None:
        parts = np.arange(batch.left)
        columns = (
            batch.number << 32 | parts,
            batch.op is Op.WRITE,
            batch.file,
            batch.places[:, 0],
            parts,
            1,
            self._copied,
        )
        pieces = np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int64)
        batch.kept = np.stack([batch.places[:, 1] + self._address, batch.sizes], axis=1).astype(np.uint64)
        self._disk.submit(pieces, batch.kept)

    def reap(self) -> list[Ended]:
        return [
            (tag >> 32, tag & 0xFFFFFFFF, error_of(error) if error else None, moved)
            for tag, _, _, error, moved in self._disk.reap().tolist()
        ]

    def close(self) -> None:
        self._disk.close()


class ByThreads:
    """By `threads` threads that call a transport, to and from `memory`."""

    def __init__(self, transport: Transport, threads: int, memory: Memory) -> None:
        self._transport, self._memory = transport, memory
        self._pool = ThreadPoolExecutor(threads)
        self._ended: SimpleQueue[Ended] = SimpleQueue()

    def begin(self, batch: Batch) -> None:
        for part in range(batch.left):
            self._pool.submit(self._move, batch, part)

    def _move(self, batch: Batch, part: int) -> None:
        (offset, at), end = batch.places[part].tolist(), int(batch.places[part, 1] + batch.sizes[part])
        piece = memory_part(self._memory, at, end)
        call = self._transport.read if batch.op is Op.READ else self._transport.write
        error: OSError | StorageError | None = IOFailedError(f"a call of {self._transport.name} raised no error of I/O")
        moved = 0
        try:
            moved, error = call(batch.file, offset, piece), None
        except (OSError, StorageError) as caught:
            error = caught
        finally:
            self._ended.put((batch.number, part, error, moved))

    def reap(self) -> list[Ended]:
        return [self._ended.get()]

    def close(self) -> None:
        self._pool.shutdown()
