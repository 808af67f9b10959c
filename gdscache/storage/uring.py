"""The transport `uring`: host memory by io_uring. Threads of the kernel move the bytes, one of ours gives them work.

Sixteen Python threads that read 2 MiB each spend much of their time waiting for each other's interpreter lock, and make
whoever launches a model's kernels wait too. Here one thread takes the lock, for as many ended reads at a time as it
can, and what it does for them it does with arrays (batch.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import itertools
import os
from collections import deque
from collections.abc import Sequence

import numpy as np

from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, TransportUnavailableError
from gdscache.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import IORequest, Op, Span, Submission, Switch, address_of, failed, host_memory
from gdscache.storage.batch import IOBatch, Numbers, Pieces, Spans
from gdscache.storage.files import DirectFiles
from gdscache.storage.ring import HINT, READ, READV, WRITE, WRITEV, Ring
from gdscache.storage.workers import MAX_PIECES, READS_PER_WRITE, Result, run_bytes

_WAKE = 0  # user data of the read that ends when somebody submits
_AGAIN = (errno.EAGAIN, errno.EINTR)
_PATIENCE_S = 0.002  # that ended requests wait for others to be taken with
# Runs in flight for each thread of the kernel, which must not run dry while a round of answers and new requests waits
# for the interpreter's lock. Fewer of them are writes, which the kernel would not let a read overtake.
_DEPTH, _WRITES = 8, 3
_SMALL = 512 << 10  # reads of so many bytes or fewer: more are in flight, so that a round answers for more of them
_DEPTH_SMALL = 16
_ANSWERED = 4  # where others wait to be begun, answers wait for one in so many of those in flight


class _Batch:
    """What one `submit` asked for, cut into runs of neighbouring pieces; run `n` has the number `base + n`.

    `whole`: each request is one piece. `memory` is kept until the last run has ended. `next`: the first run that is not
    begun; `left`: pieces that have not ended. `vector` is what the kernel reads of where pieces lie: a struct iovec
    each.
    """

    def __init__(
        self,
        op: Op,
        submission: Submission,
        memory: list[memoryview],
        pieces: Pieces,
        limit: int,
        *,
        whole: bool,
    ) -> None:
        self.op = op
        self.submission = submission
        self.memory = memory
        self.pieces = pieces
        self.whole = whole
        self.firsts = pieces.joined(limit, MAX_PIECES)
        self.counts = np.diff(self.firsts, append=len(pieces))
        self.sizes = np.add.reduceat(pieces.sizes, self.firsts)
        self.vector = np.stack([pieces.addresses, pieces.sizes], axis=1).astype(np.uint64)
        self.base, self.next, self.left = 0, 0, len(pieces)
        self.small = op is Op.READ and int(self.sizes.mean()) <= _SMALL

    def __len__(self) -> int:
        return len(self.firsts)

    def put(self, ring: Ring, runs: slice) -> None:
        """Queue runs that are not begun yet."""
        firsts, counts = self.firsts[runs], self.counts[runs]
        alone, read = counts == 1, self.op is Op.READ
        vectors = self.vector.ctypes.data + firsts * self.vector.strides[0]
        ring.put(
            np.where(alone, READ if read else WRITE, READV if read else WRITEV),
            self.pieces.files[firsts],
            self.pieces.offsets[firsts],
            np.where(alone, self.pieces.addresses[firsts], vectors),
            np.where(alone, self.sizes[runs], counts),
            self.base + np.arange(runs.start, runs.stop),
        )

    def pieces_of(self, runs: Numbers) -> Numbers:
        """The numbers of the pieces that runs have."""
        if len(self.firsts) == len(self.pieces):
            return runs
        counts = self.counts[runs]
        within: Numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return within + np.repeat(self.firsts[runs], counts)


@dataclasses.dataclass(slots=True)
class _Odd:
    """`count` pieces of a batch that have not ended as they should: they go on from byte `resume`, or are tried again.
    One that was short had `moved` bytes by then."""

    batch: _Batch
    first: int
    count: int
    moved: int = 0
    resume: int = 0


class UringTransport(DirectFiles):
    """Moves host memory: `threads` threads of the kernel move runs, and seven times as many wait, or fifteen times as
    many small reads. Files as `DirectFiles` opens them.

    Raises `TransportUnavailableError` where there is no io_uring.
    """

    name = "uring"
    memory_kinds = frozenset({"host"})

    def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
        if threads < 1:
            raise InvalidValueError(f"a transport with {threads} threads moves nothing", "set threads to 1 or more")
        self._most = _DEPTH * threads  # runs in flight
        self._most_small = _DEPTH_SMALL * threads
        self._most_writes = _WRITES * threads
        self._ring = Ring(self._most_small + 2, threads)
        self._signal = (ctypes.c_uint64 * 1)()
        self._queues: dict[Op, deque[_Batch]] = {op: deque() for op in Op}
        self._reads_in_row = 0
        self._live: list[_Batch] = []
        self._flying = self._writing = 0  # runs, and what is odd; and how many of them are writes
        self._odd: dict[int, _Odd] = {}
        self._again: deque[_Odd] = deque()
        self._numbers = itertools.count(_WAKE + 1)
        self._asleep = self._listening = self._crowded = False
        self._patient = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._ring.close)
            try:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC)
                undo.callback(os.close, self._wake)
                self._try_it()
            except OSError as error:  # no descriptors left
                raise IOFailedError(f"io_uring cannot be set up: {error}", "raise ulimit -n", error.errno) from error
            super().__init__(1, direct_io, ways=threads)
            undo.pop_all()

    def _try_it(self) -> None:
        """Read a page through the ring and look at it. Leaves nothing in flight."""
        file = os.memfd_create("gdscache-uring")
        try:
            page = os.urandom(EXTENT_ALIGNMENT)
            os.write(file, page)
            memory = ctypes.create_string_buffer(EXTENT_ALIGNMENT)
            self._ring.put(READ, file, 0, ctypes.addressof(memory), EXTENT_ALIGNMENT, np.array([1]))
            try:
                self._ring.enter(1)
            except OSError as error:
                raise TransportUnavailableError(f"io_uring_enter answers {error}", HINT) from error
            numbers, answers = self._ring.take()
            if (numbers.tolist(), answers.tolist()) != ([1], [EXTENT_ALIGNMENT]) or memory.raw != page:
                raise TransportUnavailableError("io_uring reads other bytes than were written", HINT)
        finally:
            os.close(file)

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        spans: Sequence[Span]
        errors: list[Result] = []
        if isinstance(requests, IOBatch) and requests.is_sound(op) and self._knows(requests.files):
            memory = [host_memory(requests.memory)]
            spans, sizes = Spans(requests, self._paths), requests.sizes.tolist()
            places = address_of(memory[0]) + requests.starts
            pieces = Pieces(np.arange(len(requests)), requests.files, requests.offsets, places, requests.sizes)
        else:
            spans, good, errors = self.checked(op, requests)
            sizes, memory = [span.nbytes for span in spans], [host_memory(entry[3]) for entry in good]
            rows = [(n, file, at, address_of(m), m.nbytes) for (file, at, n, _), m in zip(good, memory, strict=True)]
            pieces = Pieces(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)
        limit = run_bytes(int(pieces.sizes.sum()), self._ways)
        pieces = pieces.in_file_order().divided(limit)
        counts = np.bincount(pieces.index, minlength=len(spans))
        submission = Submission(op, spans, np.maximum(counts, 1).tolist(), sizes)
        with self._work:
            if self._closing:
                raise EngineClosedError(f"the {self.name} transport was closed", "submit before close")
            if len(pieces):
                batch = _Batch(op, submission, memory, pieces, limit, whole=bool((counts == 1).all()))
                batch.base = next(self._numbers)
                self._numbers = itertools.count(batch.base + len(batch))
                self._queues[op].append(batch)
                self._work.notify()
            asleep, self._asleep = self._asleep, False
        if asleep:
            os.eventfd_write(self._wake, 1)
        if errors:
            submission.finish(errors)
        return submission

    def _knows(self, files: Numbers) -> bool:
        return self._paths.keys() >= set(files.tolist())

    # What follows runs in the thread.

    def _serve(self) -> None:
        finished = False
        try:
            self._listen()
            while self._start():
                self._wait()
                self._reap()
            self._end()
            finished = True
        finally:
            if not finished:
                self._abandon()

    def _start(self) -> bool:
        """Begin runs while there is room, and wait for one where nothing is in flight; False when none will come."""
        while True:
            with self._work:
                while self._again and self._flying < self._most:
                    self._try_again(self._again.popleft())
                while some := self._next_runs():
                    self._begin(*some)
                if self._flying:
                    self._crowded = any(self._queues.values())
                    self._asleep = self._flying < self._most_small  # a new batch could begin now
                    return True
                if self._closing:
                    return False
                self._work.wait()

    def _next_runs(self) -> tuple[_Batch, slice] | None:
        """The runs that are next, of one batch, and have room: reads first, but after `READS_PER_WRITE` of them in a
        row one write."""
        reads, writes = self._queues[Op.READ], self._queues[Op.WRITE]
        most = min(self._most - self._flying, self._most_writes - self._writing)  # writes that may begin
        room = 0
        if reads:
            room = max(0, (self._most_small if reads[0].small else self._most) - self._flying)
        if reads and writes and most > 0:
            room = min(room, max(0, READS_PER_WRITE - self._reads_in_row))
        if reads and room:
            queue = reads
        elif writes and most > 0:
            queue, room = writes, 1 if reads else most
        else:
            return None
        batch = queue[0]
        runs = slice(batch.next, min(batch.next + room, len(batch)))
        self._reads_in_row = self._reads_in_row + runs.stop - runs.start if queue is reads and writes else 0
        batch.next = runs.stop
        if batch.next == len(batch):
            queue.popleft()
        return batch, runs

    def _begin(self, batch: _Batch, runs: slice) -> None:
        if runs.start == 0:
            self._live.append(batch)
        self._count(batch, runs.stop - runs.start)
        batch.put(self._ring, runs)

    def _count(self, batch: _Batch, runs: int) -> None:
        """So many more of a batch's runs are in flight, or fewer."""
        self._flying += runs
        if batch.op is Op.WRITE:
            self._writing += runs

    def _try_again(self, odd: _Odd) -> None:
        number, pieces, at, reads = next(self._numbers), odd.batch.pieces, odd.first, odd.batch.op is Op.READ
        self._odd[number] = odd
        self._count(odd.batch, 1)
        if odd.count == 1:
            address, size = int(pieces.addresses[at]) + odd.resume, int(pieces.sizes[at]) - odd.resume
            opcode = READ if reads else WRITE
        else:
            address = odd.batch.vector.ctypes.data + at * odd.batch.vector.strides[0]
            size, opcode = odd.count, READV if reads else WRITEV
        self._ring.put(opcode, pieces.files[at], pieces.offsets[at] + odd.resume, address, size, np.array([number]))

    def _wait(self) -> None:
        """Wait for what ends; where others wait to be begun, for many at a time, since each wait takes the
        interpreter's lock anew. What hangs must not hide what has ended for long."""
        if self._crowded and self._patient:
            self._ring.enter(max(1, self._flying // _ANSWERED), _PATIENCE_S)
        else:
            self._ring.enter(1)

    def _reap(self) -> None:
        """Answer for everything that has ended, once a batch."""
        numbers, answers = self._ring.take()
        self._patient = bool(len(numbers))
        left = np.ones(len(numbers), dtype=bool)
        for batch in list(self._live):
            mine = (numbers >= batch.base) & (numbers < batch.base + len(batch))
            if mine.any():
                left &= ~mine
                self._count(batch, -int(mine.sum()))
                self._answer(batch, numbers[mine] - batch.base, answers[mine])
        for number, answer in zip(numbers[left].tolist(), answers[left].tolist(), strict=True):
            if number == _WAKE:
                self._listen()
            else:
                odd = self._odd.pop(number)
                self._count(odd.batch, -1)
                self._finish(odd.batch, self._ended(odd, answer))

    def _answer(self, batch: _Batch, runs: Numbers, answers: Numbers) -> None:
        """Runs of a batch have ended."""
        whole = answers == batch.sizes[runs]
        if batch.whole and whole.all():
            requests = batch.pieces.index[batch.pieces_of(runs)].tolist()
            self._over(batch, len(requests))
            batch.submission.finish_whole(requests)
            return
        pieces = batch.pieces_of(runs[whole])
        results = _whole(batch.pieces.index[pieces], batch.pieces.sizes[pieces])
        for run in np.flatnonzero(~whole).tolist():
            number = runs[run]
            odd = _Odd(batch, int(batch.firsts[number]), int(batch.counts[number]))
            results += self._ended(odd, int(answers[run]))
        self._finish(batch, results)

    def _finish(self, batch: _Batch, results: list[Result]) -> None:
        self._over(batch, len(results))
        if results:
            batch.submission.finish(results)

    def _over(self, batch: _Batch, pieces: int) -> None:
        """So many more pieces of a batch have ended: for before anybody is told."""
        batch.left -= pieces
        if not batch.left:
            self._live.remove(batch)
            batch.memory = []  # who is told that requests have ended may count on nothing here holding their memory

    def _ended(self, odd: _Odd, answer: int) -> list[Result]:
        """What pieces that have ended come to; nothing where they go on, or are tried one by one."""
        batch, first, pieces = odd.batch, odd.first, odd.batch.pieces
        if -answer in _AGAIN:
            self._again.append(odd)
            return []
        some = slice(first, first + odd.count)
        moved = odd.resume + answer
        if moved == int(pieces.sizes[some].sum()):
            return _whole(pieces.index[some], pieces.sizes[some])
        if odd.count > 1:  # one bad sector must not cost its neighbours
            self._again.extend(_Odd(batch, number, 1) for number in range(some.start, some.stop))
            return []
        index = int(pieces.index[first])
        if answer < 0:
            error = OSError(-answer, os.strerror(-answer))
            path = self._path(int(pieces.files[first]))
            return [(index, 0, failed(batch.op.value, path, int(pieces.offsets[first]), error))]
        if moved <= odd.moved or not answer:  # a file that ends within a sector has no more to give
            return [(index, odd.moved, None)]
        odd.moved, odd.resume = moved, moved // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        self._again.append(odd)
        return []

    def _listen(self) -> None:
        self._ring.put(READ, self._wake, 0, ctypes.addressof(self._signal), 8, np.array([_WAKE]), worker=False)
        self._listening = True

    def _end(self) -> None:
        """Give the ring back. Nothing is in flight but what listens."""
        if self._listening:
            os.eventfd_write(self._wake, 1)
            self._ring.enter(1)
            self._listening = False
        self._ring.close()
        os.close(self._wake)

    def _abandon(self) -> None:
        """An unexpected error ends the thread: what waits has failed; what the kernel has keeps its memory for good."""
        cause = IOFailedError("the thread of the uring transport stopped on an unexpected error", "see the traceback")
        with self._work:
            self._closing = True
            queued = [batch for queue in self._queues.values() for batch in queue]
        for batch in queued:
            begun = batch.firsts[batch.next] if batch.next < len(batch) else len(batch.pieces)
            batch.submission.finish([(index, 0, cause) for index in batch.pieces.index[begun:].tolist()])
        for odd in self._again:
            some = odd.batch.pieces.index[odd.first : odd.first + odd.count]
            odd.batch.submission.finish([(index, 0, cause) for index in some.tolist()])


def _whole(index: Numbers, sizes: Numbers) -> list[Result]:
    """The results of pieces that moved all their bytes."""
    return [(number, nbytes, None) for number, nbytes in zip(index.tolist(), sizes.tolist(), strict=True)]
