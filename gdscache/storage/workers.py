"""The queue and the threads that the transports share: batches become runs, threads take runs, reads first.

A *run* is a stretch of one file of at most `MAX_RUN` bytes, made of pieces of requests that are neighbours in the file
though not in memory. It is what one thread moves at once, so that small requests cost one system call together, and
large ones are shared by several threads.
"""

from __future__ import annotations

import abc
import dataclasses
import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, StorageError
from gdscache.pages.layout import EXTENT_ALIGNMENT
from gdscache.runtime.threads import failure_of, log_failure, start
from gdscache.storage.base import FileRange, IORequest, Op, Submission, Transport, check_memory, failed, refused

if TYPE_CHECKING:
    import torch

MIN_RUN = 1 << 20
MAX_RUN = 4 << 20
READS_PER_WRITE = 8
MAX_PIECES = min(1024, os.sysconf("SC_IOV_MAX"))

Result = tuple[int, int, StorageError | None]


@dataclasses.dataclass(frozen=True, slots=True)
class IOPiece:
    """Part of a request: the request's index in its batch, where in the file, and the memory."""

    index: int
    offset: int
    nbytes: int
    memory: memoryview | torch.Tensor


@dataclasses.dataclass(slots=True)
class IORun:
    """Neighbouring pieces of one file, in file order, and the batch that they answer to."""

    op: Op
    file: int
    submission: Submission
    pieces: list[IOPiece]
    nbytes: int

    @property
    def offset(self) -> int:
        return self.pieces[0].offset


class WorkerTransport(Transport):
    """A transport with threads of its own, which `serve` until it is closed and nothing is left to do."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise InvalidValueError(f"a transport with {threads} threads moves nothing", "set threads to 1 or more")
        self._closing = self._released = False
        self._work = threading.Condition(threading.Lock())
        self._paths: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"gdscache-{self.name}-{n}", daemon=True) for n in range(threads)
        ]
        start(self._threads, self._tell_end)

    @abc.abstractmethod
    def _serve(self) -> None:
        """What each thread runs. `_work` is notified when something is submitted, and when the transport closes."""

    @abc.abstractmethod
    def release(self) -> None:
        """Close all files; runs after the last run has ended."""

    def checked(
        self, op: Op, requests: Sequence[IORequest]
    ) -> tuple[list[FileRange], list[tuple[int, int, int, memoryview | torch.Tensor]], list[Result]]:
        """Where requests lie; those that can be done, as (file, offset, index, memory); the errors of the others."""
        spans: list[FileRange] = []
        errors: list[Result] = []
        good: list[tuple[int, int, int, memoryview | torch.Tensor]] = []
        for index, request in enumerate(requests):
            nbytes = 0
            try:
                path = self._path(request.file)
                memory = check_memory(op, request.offset, request.memory, self.memory_kinds)
                nbytes = memory.nbytes
                good.append((request.file, request.offset, index, memory))
            except IOFailedError as error:
                path = f"file {request.file}"
                errors.append((index, 0, error))
            spans.append(FileRange(path, request.offset, nbytes))
        return spans, good, errors

    def close(self) -> None:
        self.end_threads()
        with self._work:
            first, self._released = not self._released, True
        if first:
            self.release()

    def end_threads(self) -> None:
        """Take nothing any more, and wait until what was submitted has ended. Again is fine."""
        self._tell_end()
        for thread in self._threads:
            thread.join()

    def _tell_end(self) -> None:
        """Have the threads end when nothing is left to do."""
        with self._work:
            self._closing = True
            self._work.notify_all()

    def check_open(self) -> None:
        """Raises `EngineClosedError` after `close`."""
        if self._closing:
            raise EngineClosedError(f"the {self.name} transport was closed", "open files before close")

    def add_file(self, file: int, path: Path) -> None:
        """For subclasses: `file` is a handle from now on."""
        self._paths[file] = str(path)

    def sync_file(self, file: int) -> None:
        """For subclasses whose handles are file descriptors: what `flush` does, also when the threads have ended."""
        if self._released or file not in self._paths:
            self.check_open()
        path = self._path(file)
        try:
            os.fdatasync(file)
        except OSError as error:
            raise failed("flush", path, 0, error) from error

    def _path(self, file: int) -> str:
        path = self._paths.get(file)
        if path is None:
            raise refused(f"{file} is no open file of this transport", "pass a handle from open()", errno.EBADF)
        return path


class RunTransport(WorkerTransport):
    """Cuts batches into runs, which its threads take in order: reads first, but after `READS_PER_WRITE` reads in a row
    one write."""

    def __init__(self, threads: int) -> None:
        self._reads: deque[IORun] = deque()
        self._writes: deque[IORun] = deque()
        self._reads_in_row = 0
        super().__init__(threads)

    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        spans, good, errors = self.checked(op, requests)
        good.sort(key=lambda entry: entry[:3])
        limit = run_bytes(sum(entry[3].nbytes for entry in good), len(self._threads))
        pieces = [1] * len(spans)
        for _, _, index, memory in good:
            pieces[index] = -(-memory.nbytes // limit)
        submission = Submission(op, spans, pieces)
        runs = _runs(op, submission, good, limit)
        with self._work:
            if self._closing:
                raise EngineClosedError(f"the {self.name} transport was closed", "submit before close")
            (self._reads if op is Op.READ else self._writes).extend(runs)
            self._work.notify(len(runs))
        if errors:
            submission.finish(errors)
        return submission

    def _next(self) -> IORun | None:
        """The next run; waits for one, and is None when there will be none."""
        with self._work:
            while not self._reads and not self._writes:
                if self._closing:
                    return None
                self._work.wait()
            if self._reads and (self._reads_in_row < READS_PER_WRITE or not self._writes):
                self._reads_in_row = self._reads_in_row + 1 if self._writes else 0
                return self._reads.popleft()
            self._reads_in_row = 0
            return self._writes.popleft()


class QueuedTransport(RunTransport):
    """A transport whose threads each move one run at a time; the depth of I/O is the number of threads."""

    @abc.abstractmethod
    def move(self, run: IORun) -> list[Result]:
        """Move one run in the calling thread; one result a piece: (request index, bytes moved, error or None)."""

    def _serve(self) -> None:
        while (error := failure_of(self._serve_runs)) is not None:
            log_failure(error)

    def _serve_runs(self) -> None:
        while (run := self._next()) is not None:
            results: list[Result] = []
            try:
                results = self.move(run)
            finally:
                # Whatever happened above, somebody waits for these pieces; and who is told that they have ended may
                # count on nothing here holding their memory.
                results = results or [(piece.index, 0, _broken(self.name)) for piece in run.pieces]
                submission, run = run.submission, None
                submission.finish(results)


def run_bytes(total: int, threads: int) -> int:
    """Bytes of a run: an equal share a thread, within `MIN_RUN` and `MAX_RUN`, whole sectors."""
    share = -(-total // threads)
    return min(max(-(-share // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT, MIN_RUN), MAX_RUN)


def _runs(
    op: Op, submission: Submission, sorted_requests: list[tuple[int, int, int, memoryview | torch.Tensor]], limit: int
) -> list[IORun]:
    runs: list[IORun] = []
    last: IORun | None = None
    for file, offset, index, memory in sorted_requests:
        nbytes = memory.nbytes
        step = nbytes if nbytes <= limit else _equal_parts(nbytes, limit)
        for at in range(0, nbytes, step):
            size = min(step, nbytes - at)
            part = memory if size == nbytes else memory[at : at + size]
            piece = IOPiece(index, offset + at, size, part)
            if (
                last is not None
                and last.file == file
                and last.offset + last.nbytes == piece.offset
                and last.nbytes + size <= limit
                and len(last.pieces) < MAX_PIECES
            ):
                last.pieces.append(piece)
                last.nbytes += size
            else:
                last = IORun(op, file, submission, [piece], size)
                runs.append(last)
    return runs


def _equal_parts(nbytes: int, limit: int) -> int:
    part = -(-nbytes // -(-nbytes // limit))
    return -(-part // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT


def _broken(name: str) -> IOFailedError:
    return IOFailedError(f"a thread of the {name} transport stopped on an unexpected error", "see the traceback above")
