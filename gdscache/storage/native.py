"""The transports `uring` and `posix`: host memory by a disk of the native library.

Threads of the kernel, or of the library, move the bytes and never take the interpreter's lock. One thread of ours owns
the disk: it hands over what callers queued, and takes the ends of as many requests at a time as there are.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.errors import (
    EngineClosedError,
    InvalidValueError,
    IOFailedError,
    NativeCallError,
    RefusedDiskError,
    ThreadStartError,
    TransportUnavailableError,
)
from gdscache.native import CuFiles, Disk
from gdscache.runtime.threads import failure_of, log_failure
from gdscache.storage.base import FileRange, IORequest, Op, Submission, Switch, address_of, host_memory
from gdscache.storage.batch import IOBatch, Spans
from gdscache.storage.files import DirectFiles
from gdscache.storage.run_batch import TAG_BITS, RunBatch
from gdscache.storage.workers import READS_PER_WRITE, Result

if TYPE_CHECKING:
    import torch

# Runs that the disk has for each of its threads, which must not run dry while a round of answers and new requests waits
# for the interpreter's lock. Fewer of them are writes, which no read overtakes any more.
MOST_WORKERS = 1024
DEPTH, WRITES = 8, 3
DEPTH_SMALL = 16  # of small reads the disk has more, so that a round answers for more of them


class NativeTransport(DirectFiles):
    """Moves host memory. `uring`: `threads` threads of the kernel at most; else as many of the library. Several runs
    wait in the disk for each of them. Files as `DirectFiles` opens them: a handle is a file descriptor.

    Raises `TransportUnavailableError` where io_uring is refused, `IOFailedError` when the process may open no more
    files, and `ThreadStartError` when it may start no more threads.
    """

    memory_kinds = frozenset({"host"})
    cufile: CuFiles | None = None  # what GPU memory is moved by

    def __init__(self, threads: int, direct_io: Switch = "auto", *, uring: bool = True, name: str = "") -> None:
        """`name`: of a transport that is made of this one."""
        if not 1 <= threads <= MOST_WORKERS:
            raise InvalidValueError(f"a transport with {threads} threads", f"set threads from 1 to {MOST_WORKERS}")
        self.name = name or ("uring" if uring else "posix")
        self.threads = threads
        self.uring = uring
        self._queues: dict[Op, deque[RunBatch]] = {op: deque() for op in Op}
        self._reads_in_row = 0
        self._numbers = itertools.count()
        self._live: dict[int, RunBatch] = {}  # by number
        self._under_way = self._writing = 0  # runs that the disk has; and how many of them are writes
        self._asleep = False
        with contextlib.ExitStack() as undo:
            self._disk = self._open_disk()
            undo.callback(self._disk.close)
            super().__init__(1, direct_io)
            undo.pop_all()

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        spans: Sequence[FileRange]
        errors: list[Result] = []
        if isinstance(requests, IOBatch) and requests.is_sound(op) and self._knows(requests.files):
            whole = host_memory(requests.memory)
            memory: list[object] = [whole]
            spans, sizes = Spans(requests, self._paths), requests.sizes.tolist()
            places = address_of(whole) + requests.starts
            columns = (np.arange(len(requests)), requests.files, requests.offsets, places, requests.sizes)
            rows = np.stack(columns, axis=1)
        else:
            spans, good, errors = self.checked(op, requests)
            sizes, memory = [span.nbytes for span in spans], [entry[3] for entry in good]
            found = [(n, file, at, _address(m), m.nbytes) for file, at, n, m in good]
            rows = np.array(found, dtype=np.int64).reshape(-1, 5)
        batch = RunBatch(op, spans, sizes, memory, rows, self.threads)
        with self._work:
            if self._closing:
                raise EngineClosedError(f"the {self.name} transport was closed", "submit before close")
            if len(batch):
                batch.number = next(self._numbers)
                self._queues[op].append(batch)
                self._rouse()
        if errors:
            batch.submission.finish(errors)
        return batch.submission

    @property
    def is_own(self) -> bool:
        """Whether it does no more than this class says, so that the library can do it alone."""
        return type(self) is NativeTransport

    def hand_over(self) -> None:
        """Somebody else moves the bytes of the open files from now on: our thread and the disk end. Again is fine."""
        self.end_threads()

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "threads": self.threads}

    def _knows(self, files: Int64Array) -> bool:
        return self._paths.keys() >= set(files.tolist())

    def _rouse(self) -> None:
        """End the thread's wait. The lock is held, or the disk might be gone."""
        if self._asleep:
            self._asleep = False
            self._disk.wake()

    def _tell_end(self) -> None:
        super()._tell_end()
        with self._work:
            self._rouse()

    def _open_disk(self) -> Disk:
        """The disk, with room for all that it may be given."""
        try:
            return Disk("ring" if self.uring else "threads", self.threads, DEPTH_SMALL * self.threads)
        except RefusedDiskError as error:
            what = f"the transport {self.name} cannot be set up: {error.message}"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise IOFailedError(what, "raise ulimit -n, or free memory", error.errno) from error
            if self.uring:
                raise TransportUnavailableError(error.message, "set transport to posix, which uses threads") from error
            raise ThreadStartError(
                f"{what}: {os.strerror(error.errno or 0)}", "raise ulimit -u, or lower ssd.threads"
            ) from error

    # What follows runs in the thread.

    def _serve(self) -> None:
        while (error := failure_of(self._serve_disk)) is not None:
            log_failure(error)
            if self._recover(error):
                return

    def _serve_disk(self) -> None:
        while (begun := self._choose()) is not None:
            for batch, runs in begun:
                self._disk.submit(batch.table(runs), batch.fragments)
            del begun
            self._reaped(self._disk.reap())
        self._disk.close()

    def _recover(self, error: BaseException) -> bool:
        """Something unexpected was raised, and all that waits has failed. True where the disk is broken: it moves
        nothing any more, and what it has keeps its memory for good."""
        cause = IOFailedError(f"the thread of the {self.name} transport met an unexpected error", "see the log")
        broken = isinstance(error, NativeCallError) or failure_of(self._drain) is not None
        with self._work:
            self._closing = self._closing or broken
            queued = [batch for queue in self._queues.values() for batch in queue]
            batches = {**self._live, **{batch.number: batch for batch in queued}}
            for queue in self._queues.values():
                queue.clear()
            self._under_way = self._writing = self._reads_in_row = 0
            self._asleep = False
        for batch in batches.values():
            batch.fail(cause, begun=not broken)
        if not broken:
            self._live.clear()
        return broken

    def _drain(self) -> None:
        """Wait for what the disk has."""
        while self._disk.pending:
            self._disk.reap()

    def _choose(self) -> list[tuple[RunBatch, slice]] | None:
        """The runs that are next; None when nothing is left, and nothing will come."""
        with self._work:
            chosen = list(iter(self._next_runs, None))
            if self._closing and not self._under_way:
                self._asleep = False
                return None
            self._asleep = self._under_way < DEPTH_SMALL * self.threads  # what comes now could begin
            return chosen

    def _next_runs(self) -> tuple[RunBatch, slice] | None:
        """Runs of one batch that have room: reads first, but after `READS_PER_WRITE` of them in a row one write."""
        reads, writes = self._queues[Op.READ], self._queues[Op.WRITE]
        room = DEPTH * self.threads - self._under_way
        most = min(room, WRITES * self.threads - self._writing)  # writes that may begin
        if reads and reads[0].small:
            room = DEPTH_SMALL * self.threads - self._under_way
        if writes and most > 0:
            room = min(room, READS_PER_WRITE - self._reads_in_row)
        if reads and room > 0:
            batch = reads[0]
        elif writes and most > 0:
            batch, room = writes[0], 1 if reads else most
        else:
            return None
        runs = slice(batch.next, min(batch.next + room, len(batch)))
        count = runs.stop - runs.start
        self._under_way += count
        if batch.op is Op.WRITE:
            self._writing += count
        self._reads_in_row = self._reads_in_row + count if batch.op is Op.READ and writes else 0
        self._live[batch.number] = batch
        batch.next = runs.stop
        if batch.next == len(batch):
            self._queues[batch.op].popleft()
        return batch, runs

    def _reaped(self, ended: Int64Array) -> None:
        """Answer for what has ended, once a batch."""
        numbers = ended[:, 0] >> TAG_BITS
        for number in (some := dict.fromkeys(numbers.tolist())):
            self._answer(self._live[number], ended if len(some) == 1 else ended[numbers == number])

    def _answer(self, batch: RunBatch, ended: Int64Array) -> None:
        over = batch.count(ended)
        self._under_way -= over
        if batch.op is Op.WRITE:
            self._writing -= over
        batch.answer(ended, self._path)
        if not batch.pending:
            del self._live[batch.number]


def _address(memory: memoryview | torch.Tensor) -> int:
    return address_of(memory) if isinstance(memory, memoryview) else memory.data_ptr()
