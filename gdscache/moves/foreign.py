"""What the native library does not reach itself: files of tiers that move their own bytes.

It asks for this I/O as jobs, which a thread here takes, and is told in lists what came of them.
"""

from __future__ import annotations

import errno
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.errors import NativeCallError, PageBytesError, PageGoneError, ShortIOError, TierAnswerError
from gdscache.extents.base import Extents
from gdscache.moves.library import NativeMoves
from gdscache.moves.machine import CheckedIO, Files, Machine, PagesIO
from gdscache.native import GONE, SHORT, WRONG, Job, put_rows, take_rows
from gdscache.runtime.threads import failure_of, log_failure
from gdscache.storage.base import Op

_CODES = {ShortIOError: SHORT, PageGoneError: GONE, PageBytesError: WRONG}
About = Callable[[int, range], dict[str, Any]]


class ForeignFiles:
    """I/O of files that their tiers do."""

    def __init__(self, machine: Machine, files: Mapping[str, Files], moves: NativeMoves, about: About) -> None:
        self._about = about
        self._machine = machine
        self._files = files
        self._moves = moves
        self._layout = machine.mover.layout
        self._progress: SimpleQueue[tuple[Job, PagesIO] | None] = SimpleQueue()

    def loops(self) -> dict[str, Callable[[], None]]:
        """What threads do, by their names."""
        return {"gdscache-io": self._begin_io, "gdscache-io-ends": self._end_io}

    def stop(self) -> None:
        self._progress.put(None)

    def _begin_io(self) -> None:
        while (job := self._moves.take_io(math.inf)) is not None:
            files, op = self._files[job.files], Op.WRITE if job.kind else Op.READ
            size = job.stop - job.start
            about = self._about(job.move, job.layers) | {"pages": len(job.rows), "bytes": len(job.rows) * size}
            kind, track = ("write", "SSD writes") if job.kind else ("read", "SSD reads")
            try:
                lying = _Lying(self._machine.memories[job.memory], job, self._layout.extent_bytes)
                places = lying.places
                slots = job.slots
                with self._machine.timeline.flight(kind, track, transport=files.describe(), **about) as flight:
                    io = files.transfer(op, slots, [(lying, places)], (job.start, job.stop))
                    flight.follow(io, len(job.rows))
                io.follow(functools.partial(self._progress.put, (job, io)))
            except BaseException as error:  # noqa: BLE001 - its pages have ended for it
                log_failure(error)
                self._moves.io_ended(job.number, range(len(job.rows)), _code(error))

    def _end_io(self) -> None:
        while (told := self._progress.get()) is not None:
            job, io = told
            for told_pages, error in io.take():
                pages = _asked_for(job, told_pages)
                failure: BaseException | None = error
                if error is None and not job.kind and isinstance(io, CheckedIO):
                    failure = failure_of(functools.partial(self._keep_sums, job, pages, io))
                    if failure is not None:  # its pages have ended all the same
                        log_failure(failure)
                self._moves.io_ended(job.number, pages, 0 if failure is None else _code(failure))
            del told, job, io

    def _keep_sums(self, job: Job, pages: Sequence[int], io: CheckedIO) -> None:
        """Pages that stay in a memory have the checksums that came with them."""
        slots = job.at // self._layout.extent_bytes
        put_rows(self._machine.memories[job.memory].checksums, take_rows(slots, pages), io.sums_of(pages))


class _Lying:
    """Memory in which the pages of a job lie, at `places`, as `Files.transfer` asks for it.

    Whole extents lie in slots, so that neighbours are neighbours; parts of them are counted through.
    """

    def __init__(self, extents: Extents, job: Job, extent_bytes: int) -> None:
        self.flat = extents.flat
        at = job.at
        whole = (job.start, job.stop) == (0, extent_bytes)
        self.places = at // extent_bytes if whole else np.arange(len(at), dtype=np.int64)
        self._extent_bytes = extent_bytes if whole else 0
        self._at = at - job.start

    def where(self, slots: Int64Array, byte: int) -> Int64Array:
        return slots * self._extent_bytes + byte if self._extent_bytes else self._at[slots] + byte


def _asked_for(job: Job, pages: Sequence[int]) -> Sequence[int]:
    """Those of the pages that the job has. The others are an error of the tier's, which the log has."""
    known = [page for page in pages if isinstance(page, (int, np.integer)) and 0 <= page < len(job.rows)]
    if len(known) < len(pages):
        error = TierAnswerError(
            f"the {job.files} tier says that pages {[p for p in pages if p not in known][:8]} have ended, of a job of "
            f"{len(job.rows)}",
            "end each page of a transfer once, by its place in it",
        )
        log_failure(error)
    return pages if len(known) == len(pages) else known


def _code(error: BaseException) -> int:
    """What the library is told of an error of I/O."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    return getattr(error, "errno", None) or errno.EIO


def serve(loop: Callable[[], None]) -> None:
    """A thread's work, until the executor is stopped."""
    while True:
        error = failure_of(loop)
        if error is None or (isinstance(error, NativeCallError) and error.errno == errno.ECANCELED):
            return
        log_failure(error)
