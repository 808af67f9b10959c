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

import numpy as np
import numpy.typing as npt

from gdscache.errors import (
    EngineClosedError,
    InvalidValueError,
    IOFailedError,
    RefusedDiskError,
    ThreadStartError,
    TransportUnavailableError,
)
from gdscache.native.disk import MOST_WORKERS, Disk, Table, cut_and_merge
from gdscache.storage.base import IORequest, Op, Span, Submission, Switch, address_of, failed, host_memory
from gdscache.storage.batch import IOBatch, Numbers, Spans
from gdscache.storage.files import DirectFiles
from gdscache.storage.workers import READS_PER_WRITE, Result, run_bytes
from gdscache.threads import failure_of, log_failure

# Runs that the disk has for each of its threads, which must not run dry while a round of answers and new requests waits
# for the interpreter's lock. Fewer of them are writes, which no read overtakes any more.
DEPTH, WRITES = 8, 3
SMALL = 512 << 10  # reads of so many bytes or fewer: the disk has more of them, so that a round answers for more
DEPTH_SMALL = 16
_RUNS = 32  # bits of a tag that are the run's number within its batch; those above are the batch's


class _Batch:
    """What one `submit` asked for, as runs of neighbouring pieces, each piece (part of) a request.

    `memory` is kept until the last piece has ended. `next`: the first run that is not begun; `left`: pieces of each run
    that have not ended, `pending`: of all. `index`: the request of each piece; `whole`: each request is one piece.
    """

    def __init__(
        self, op: Op, spans: Sequence[Span], sizes: Sequence[int], memory: list[memoryview], rows: Table, ways: int
    ) -> None:
        """`rows`: (requests that can be done, 5): index, descriptor, offset, address, bytes."""
        limit = run_bytes(int(rows[:, 4].sum()), ways)
        parts, runs = cut_and_merge(rows[:, 1:], limit)
        self.op = op
        self.memory = memory
        self.index: Numbers = rows[parts[:, 2], 0]
        self.whole = len(parts) == len(rows)
        self.sizes = parts[:, 1]
        self.ends = np.concatenate([[0], np.cumsum(self.sizes)])
        self.fragments: npt.NDArray[np.uint64] = parts[:, :2].astype(np.uint64)
        self.files, self.offsets, self.firsts, self.left = (runs[:, column].copy() for column in range(4))
        self.number, self.next, self.pending = 0, 0, len(parts)
        self.small = op is Op.READ and int(self.sizes.sum()) <= SMALL * len(runs)
        counts = np.bincount(self.index, minlength=len(spans))
        self.submission = Submission(op, spans, np.maximum(counts, 1).tolist(), sizes)

    def __len__(self) -> int:
        return len(self.firsts)

    def table(self, runs: slice) -> Table:
        """Runs as a disk takes them. Threads of its own copy their bytes, so that the submit never does."""
        pieces = np.empty((runs.stop - runs.start, 7), np.int64)
        pieces[:, 0] = (self.number << _RUNS) + np.arange(runs.start, runs.stop)
        pieces[:, 1] = self.op is Op.WRITE
        for column, values in enumerate((self.files, self.offsets, self.firsts, self.left), 2):
            pieces[:, column] = values[runs]
        pieces[:, 6] = 1
        return pieces

    def offset(self, run: int, piece: int) -> int:
        """Where in its file a piece of a run begins."""
        return int(self.offsets[run] + self.ends[piece] - self.ends[self.firsts[run]])


class NativeTransport(DirectFiles):
    """Moves host memory. `uring`: `threads` threads of the kernel at most; else as many of the library. Several runs
    wait in the disk for each of them. Files as `DirectFiles` opens them: a handle is a file descriptor.

    Raises `TransportUnavailableError` where io_uring is refused, `IOFailedError` when the process may open no more
    files, and `ThreadStartError` when it may start no more threads.
    """

    memory_kinds = frozenset({"host"})

    def __init__(self, threads: int, direct_io: Switch = "auto", *, uring: bool = True) -> None:
        if not 1 <= threads <= MOST_WORKERS:
            raise InvalidValueError(f"a transport with {threads} threads", f"set threads from 1 to {MOST_WORKERS}")
        self.name = "uring" if uring else "posix"
        self.threads = threads
        self.uring = uring
        self._queues: dict[Op, deque[_Batch]] = {op: deque() for op in Op}
        self._reads_in_row = 0
        self._numbers = itertools.count()
        self._live: dict[int, _Batch] = {}  # by number
        self._under_way = self._writing = 0  # runs that the disk has; and how many of them are writes
        self._asleep = False
        with contextlib.ExitStack() as undo:
            self._disk: Disk | None = self._open_disk()
            undo.callback(self._disk.close)
            super().__init__(1, direct_io, ways=threads)
            undo.pop_all()

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        spans: Sequence[Span]
        errors: list[Result] = []
        if isinstance(requests, IOBatch) and requests.is_sound(op) and self._knows(requests.files):
            memory = [host_memory(requests.memory)]
            spans, sizes = Spans(requests, self._paths), requests.sizes.tolist()
            places = address_of(memory[0]) + requests.starts
            columns = (np.arange(len(requests)), requests.files, requests.offsets, places, requests.sizes)
            rows = np.stack(columns, axis=1)
        else:
            spans, good, errors = self.checked(op, requests)
            sizes, memory = [span.nbytes for span in spans], [host_memory(entry[3]) for entry in good]
            found = [(n, file, at, address_of(m), m.nbytes) for (file, at, n, _), m in zip(good, memory, strict=True)]
            rows = np.array(found, dtype=np.int64).reshape(-1, 5)
        batch = _Batch(op, spans, sizes, memory, rows, self.threads)
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

    def _knows(self, files: Numbers) -> bool:
        return self._paths.keys() >= set(files.tolist())

    def _rouse(self) -> None:
        """End the thread's wait. The lock is held, under which the thread takes the disk away."""
        if self._asleep and self._disk is not None:
            self._asleep = False
            self._disk.wake()

    def _end_threads(self) -> bool:
        first = super()._end_threads()
        with self._work:
            self._rouse()
        return first

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
        error = failure_of(self._serve_disk)
        log_failure(error)
        if error is not None:
            self._abandon()

    def _serve_disk(self) -> None:
        disk = self._disk
        assert disk is not None  # only this thread takes it away
        while (begun := self._choose()) is not None:
            for batch, runs in begun:
                disk.submit(batch.table(runs), batch.fragments)
            del begun
            self._reaped(disk.reap())
        with self._work:
            self._disk = None
        disk.close()

    def _choose(self) -> list[tuple[_Batch, slice]] | None:
        """The runs that are next; None when nothing is left, and nothing will come."""
        with self._work:
            chosen = list(iter(self._next_runs, None))
            if self._closing and not self._under_way:
                return None
            self._asleep = self._under_way < DEPTH_SMALL * self.threads  # what comes now could begin
            return chosen

    def _next_runs(self) -> tuple[_Batch, slice] | None:
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

    def _reaped(self, ended: Table) -> None:
        """Answer for what has ended, once a batch."""
        numbers = ended[:, 0] >> _RUNS
        for number in dict.fromkeys(numbers.tolist()):
            self._answer(self._live[number], ended[numbers == number])

    def _answer(self, batch: _Batch, ended: Table) -> None:
        runs, counts, errors, moved = ended[:, 0] & ((1 << _RUNS) - 1), ended[:, 2], ended[:, 3], ended[:, 4]
        firsts = batch.firsts[runs] + ended[:, 1]
        np.subtract.at(batch.left, runs, counts)
        over = int(np.count_nonzero(batch.left[np.unique(runs)] == 0))
        self._under_way -= over
        if batch.op is Op.WRITE:
            self._writing -= over
        batch.pending -= int(counts.sum())
        if not batch.pending:
            del self._live[batch.number]
            batch.memory = []  # who is told that requests have ended may count on nothing here holding their memory
        good = (errors == 0) & (moved == batch.ends[firsts + counts] - batch.ends[firsts])
        pieces = _spread(firsts[good], counts[good])
        index = batch.index[pieces].tolist()
        if batch.whole and good.all():
            batch.submission.finish_whole(index)
            return
        results: list[Result] = [
            (number, nbytes, None) for number, nbytes in zip(index, batch.sizes[pieces].tolist(), strict=True)
        ]
        for row in np.flatnonzero(~good).tolist():
            first = int(firsts[row])
            pieces_of_it = range(first, first + int(counts[row]))
            results += self._odd(batch, int(runs[row]), pieces_of_it, int(errors[row]), int(moved[row]))
        batch.submission.finish(results)

    def _odd(self, batch: _Batch, run: int, pieces: range, error: int, moved: int) -> list[Result]:
        """Neighbouring pieces that failed, or that lack bytes: the last ones do."""
        results: list[Result] = []
        for piece in pieces:
            cause = None
            nbytes = min(moved, int(batch.sizes[piece]))
            moved -= nbytes
            if error:
                path = self._path(int(batch.files[run]))
                cause = failed(batch.op.value, path, batch.offset(run, piece), OSError(error, os.strerror(error)))
            results.append((int(batch.index[piece]), nbytes, cause))
        return results

    def _abandon(self) -> None:
        """An unexpected error ended the thread: what waits has failed; what the disk has keeps its memory for good."""
        cause = IOFailedError(f"the thread of the {self.name} transport stopped on an unexpected error", "see the log")
        with self._work:
            self._closing = True
            self._disk = None
            queued = [batch for queue in self._queues.values() for batch in queue]
        for batch in queued:
            batch.submission.finish([(index, 0, cause) for index in batch.index[batch.firsts[batch.next] :].tolist()])


def _spread(firsts: Numbers, counts: Numbers) -> Numbers:
    """`counts` numbers from each of `firsts` on."""
    if not len(counts) or counts.max() == 1:
        return firsts
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
