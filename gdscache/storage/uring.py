"""The transport `uring`: host memory by io_uring. Threads of the kernel move the bytes, one of ours gives them work.

Sixteen Python threads that read 2 MiB each spend much of their time waiting for each other's interpreter lock, and make
whoever copies to the GPU wait too. Here one thread takes the lock, for as many ended reads at a time as there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from gdscache.errors import InvalidValueError, IOFailedError, TransportUnavailableError
from gdscache.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import IORequest, Op, Submission, Switch, address_of, failed
from gdscache.storage.posix import PosixTransport, host_memory
from gdscache.storage.ring import HINT, READ, READV, WRITE, WRITEV, Ring
from gdscache.storage.workers import Result, Run

_WAKE = 0  # user data of the read that ends when somebody submits
_AGAIN = (errno.EAGAIN, errno.EINTR)


@dataclasses.dataclass(slots=True)
class _Flight:
    """A run in flight. One that was short goes on from byte `resume`; it had `moved` bytes by then.

    `vector` is what the kernel reads of where its pieces lie in memory.
    """

    run: Run
    moved: int = 0
    resume: int = 0
    vector: Any = None


class UringTransport(PosixTransport):
    """Files are opened as `posix` opens them. `threads` threads of the kernel move runs, and as many wait for them.

    Raises `TransportUnavailableError` where there is no io_uring.
    """

    name = "uring"

    def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
        if threads < 1:
            raise InvalidValueError(f"a transport with {threads} threads moves nothing", "set threads to 1 or more")
        self._most = 2 * threads  # in flight
        self._ring = Ring(self._most + 2, threads)
        self._signal = (ctypes.c_uint64 * 1)()
        self._live: dict[int, _Flight] = {}
        self._again: deque[_Flight] = deque()
        self._number = _WAKE
        self._asleep = self._listening = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._ring.close)
            try:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC)
                undo.callback(os.close, self._wake)
                self._try_it()
            except OSError as error:  # no descriptors left
                raise IOFailedError(f"io_uring cannot be set up: {error}", "raise ulimit -n", error.errno) from error
            undo.pop_all()
        super().__init__(1, direct_io)
        self._ways = threads

    def _try_it(self) -> None:
        """Read a page through the ring and look at it. Leaves nothing in flight."""
        file = os.memfd_create("gdscache-uring")
        try:
            page = os.urandom(EXTENT_ALIGNMENT)
            os.write(file, page)
            memory = ctypes.create_string_buffer(EXTENT_ALIGNMENT)
            self._ring.put(READ, file, 0, ctypes.addressof(memory), EXTENT_ALIGNMENT, 1)
            try:
                self._ring.enter(1)
            except OSError as error:
                raise TransportUnavailableError(f"io_uring_enter answers {error}", HINT) from error
            if list(self._ring.take()) != [(1, EXTENT_ALIGNMENT)] or memory.raw != page:
                raise TransportUnavailableError("io_uring reads other bytes than were written", HINT)
        finally:
            os.close(file)

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        submission = super().submit(op, requests)
        with self._work:
            asleep, self._asleep = self._asleep, False
        if asleep:
            os.eventfd_write(self._wake, 1)
        return submission

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "threads": self._ways}

    # What follows runs in the thread.

    def _serve(self) -> None:
        finished = False
        try:
            self._listen()
            while self._start():
                self._ring.enter(1)
                self._reap()
            self._end()
            finished = True
        finally:
            if not finished:
                self._abandon()

    def _start(self) -> bool:
        """Begin runs while there is room, and wait for one where nothing is in flight; False when none will come."""
        while True:
            while len(self._live) < self._most and (flight := self._next_flight()) is not None:
                self._begin(flight)
            with self._work:
                waiting = bool(self._reads or self._writes)
                if self._live:
                    if len(self._live) == self._most or not waiting:
                        self._asleep = len(self._live) < self._most  # a new batch could begin now
                        return True
                elif not waiting:
                    if self._closing:
                        return False
                    self._work.wait()

    def _next_flight(self) -> _Flight | None:
        if self._again:
            return self._again.popleft()
        with self._work:
            if not self._reads and not self._writes:
                return None
        run = self._next()  # at once: nobody else takes runs
        return None if run is None else _Flight(run)

    def _begin(self, flight: _Flight) -> None:
        run, at = flight.run, flight.resume
        reads = run.op is Op.READ
        self._number += 1
        self._live[self._number] = flight
        if len(run.pieces) == 1:
            memory = host_memory(run.pieces[0])[at:]
            address, size, opcode = address_of(memory), memory.nbytes, READ if reads else WRITE
        else:
            numbers = [n for p in run.pieces for n in (address_of(host_memory(p)), p.nbytes)]
            flight.vector = (ctypes.c_uint64 * len(numbers))(*numbers)  # of struct iovec
            address, size, opcode = ctypes.addressof(flight.vector), len(run.pieces), READV if reads else WRITEV
        self._ring.put(opcode, run.file, run.offset + at, address, size, self._number)

    def _reap(self) -> None:
        """Answer for everything that has ended, once a batch."""
        results: dict[int, tuple[Submission, list[Result]]] = {}
        for number, moved in self._ring.take():
            if number == _WAKE:
                self._listen()
                continue
            flight = self._live.pop(number)
            ended = self._ended(flight, moved)
            if ended:
                submission = flight.run.submission
                results.setdefault(id(submission), (submission, []))[1].extend(ended)
        for submission, some in results.values():
            submission.finish(some)

    def _ended(self, flight: _Flight, answer: int) -> list[Result]:
        """What a request that has ended comes to; nothing where it goes on, or its pieces are tried one by one."""
        run, pieces = flight.run, flight.run.pieces
        if -answer in _AGAIN:
            self._again.append(flight)
            return []
        moved = flight.resume + answer
        if moved == run.nbytes:
            return [(piece.index, piece.nbytes, None) for piece in pieces]
        if len(pieces) > 1:  # one bad sector must not cost its neighbours
            self._again.extend(_Flight(Run(run.op, run.file, run.submission, [p], p.nbytes)) for p in pieces)
            return []
        if answer < 0:
            error = OSError(-answer, os.strerror(-answer))
            return [(pieces[0].index, 0, failed(run.op.value, self._path(run.file), run.offset, error))]
        if moved <= flight.moved or not answer:  # a file that ends within a sector has no more to give
            return [(pieces[0].index, flight.moved, None)]
        flight.moved, flight.resume = moved, moved // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        self._again.append(flight)
        return []

    def _listen(self) -> None:
        self._ring.put(READ, self._wake, 0, ctypes.addressof(self._signal), 8, _WAKE, worker=False)
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
        while (flight := self._next_flight()) is not None:
            flight.run.submission.finish([(piece.index, 0, cause) for piece in flight.run.pieces])
