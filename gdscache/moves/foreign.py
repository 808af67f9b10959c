"""What the native library does not reach itself: planes and memory of a GPU, files behind a transport of Python's.

It asks for these copies and this I/O as jobs, which threads here take, and is told in lists what came of them.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gdscache.errors import NativeCallError, ShortIOError
from gdscache.moves.base import End, Listener, Move, Steps
from gdscache.moves.lanes import Blocking
from gdscache.moves.machine import Machine, PagesIO
from gdscache.native.moves import DIGEST, NEVER, READY, SHORT, CopyJob, IoJob, NativeMoves
from gdscache.storage.base import Op
from gdscache.threads import failure_of, log_failure
from gdscache.tiers.bounce import Extents, Window
from gdscache.tiers.page_io import Positions
from gdscache.tiers.transfer import Moved

if TYPE_CHECKING:
    from gdscache.streams import Event

UnderWay = Callable[[int], tuple[Listener, Sequence["Event"]]]
About = Callable[[int, range], dict[str, Any]]


class ForeignCopies:
    """Copies that a mover queues. `under_way(number)`: who is told of a load, and the events that its copies wait for.

    `causes`: what broke a copy, by the number of its move.
    """

    def __init__(self, machine: Machine, moves: NativeMoves, under_way: UnderWay, about: About) -> None:
        """`about(number, layers)`: what a timeline is told of a part of a move."""
        self._about = about
        self.causes: dict[int, BaseException] = {}
        self._machine = machine
        self._moves = moves
        self._layout = machine.mover.layout
        self._under_way = under_way
        self._queued: SimpleQueue[tuple[CopyJob, Moved] | None] = SimpleQueue()

    def loops(self) -> dict[str, Callable[[], None]]:
        """What threads do, by their names."""
        return {"gdscache-copies": self._queue_copies, "gdscache-copied": self._end_copies}

    def stop(self) -> None:
        self._queued.put(None)

    def queues(self, move: Move) -> bool:
        """Whether copies of the pages that are in memory return before the bytes are moved."""
        memories = [self._machine.memories[way.source] for way in move.ways if way.source in self._machine.memories]
        return bool(memories) and all(map(self._machine.mover.queues, memories))

    def queue_now(self) -> None:
        """Queue the copies that may begin, in the caller's thread.

        Ours begins when the caller's lets go of the interpreter's lock, and who launches a model does that seldom: some
        2 ms in which the bus would have nothing to do.
        """
        while (job := self._moves.take_copy(0)) is not None:
            self._queue_copy(job)

    def _queue_copies(self) -> None:
        while (job := self._moves.take_copy(NEVER)) is not None:
            self._queue_copy(job)

    def _queue_copy(self, job: CopyJob) -> None:
        listener, after = self._under_way(job.move)
        if job.kind == READY:
            listener.ready(job.layers, self._machine.mover.mark_loads())
            return
        try:
            extents, places = self._lying(job)
            if job.kind == DIGEST:
                moved = Moved(None, None, lambda: np.stack([extents.digest(int(at), job.layers) for at in places]))
            else:
                about = self._about(job.move, job.layers)
                with self._machine.timeline.span("scatter", pages=len(places), bytes=self._bytes(job), **about):
                    blocks = torch.from_numpy(job.blocks.copy())
                    moved = self._machine.mover.scatter(extents, places, blocks, job.layers, after, sums=job.sums)
        except BaseException as error:  # noqa: BLE001 - its load raises it
            self._break(job, error)
            return
        self._moves.copy_queued(job.number)
        self._queued.put((job, moved))

    def _bytes(self, job: CopyJob) -> int:
        bounds = self._layout.layer_bounds
        return len(job.pages) * (bounds[job.layers.stop - 1][1] - bounds[job.layers.start][0])

    def _lying(self, job: CopyJob) -> tuple[Extents, Positions]:
        """Where the pages of a copy lie."""
        places = job.pages["slot"].astype(np.int64)
        if job.window:
            assert self._machine.bounce is not None, "a window of no reserve"
            span = self._layout.read_span(job.layers, alone=True)
            return Window(self._machine.bounce.extents, job.window, span), places
        return self._machine.memories[job.memory], places

    def _break(self, job: CopyJob, error: BaseException) -> None:
        self.causes.setdefault(job.move, error)
        self._moves.copy_ended(job.number, None, broken=True)

    def _end_copies(self) -> None:
        while (queued := self._queued.get()) is not None:
            job, moved = queued
            try:
                about = self._about(job.move, job.layers)
                with self._machine.timeline.span("check", pages=len(job.pages), **about):
                    moved.synchronize()
                    sums = moved.checksums() if job.sums else None
            except BaseException as error:  # noqa: BLE001 - its load raises it
                self._break(job, error)
            else:
                self._moves.copy_ended(job.number, sums)
            del queued, job, moved


class ForeignFiles:
    """I/O of files that a transport of Python's does."""

    def __init__(self, machine: Machine, moves: NativeMoves, about: About) -> None:
        self._about = about
        self._machine = machine
        self._moves = moves
        self._layout = machine.mover.layout
        self._progress: SimpleQueue[tuple[IoJob, PagesIO] | None] = SimpleQueue()

    def loops(self) -> dict[str, Callable[[], None]]:
        """What threads do, by their names."""
        return {"gdscache-io": self._begin_io, "gdscache-io-ends": self._end_io}

    def stop(self) -> None:
        self._progress.put(None)

    def _begin_io(self) -> None:
        while (job := self._moves.take_io(NEVER)) is not None:
            files, op = self._machine.files[job.files], Op.WRITE if job.write else Op.READ
            size = job.stop - job.start
            about = self._about(job.move, job.layers) | {"pages": len(job.pages), "bytes": len(job.pages) * size}
            kind, track = ("write", "SSD writes") if job.write else ("read", "SSD reads")
            try:
                lying = _Lying(self._machine.memories[job.memory], job, self._layout.extent_bytes)
                places = lying.places
                slots = job.pages["slot"].astype(np.int64)
                with self._machine.timeline.flight(kind, track, transport=files.describe(), **about) as flight:
                    io = files.transfer(op, slots, [(lying, places)], (job.start, job.stop))
                    flight.follow(io, len(job.pages))
                io.follow(functools.partial(self._progress.put, (job, io)))
            except BaseException as error:  # noqa: BLE001 - its pages have ended for it
                log_failure(error)
                self._moves.io_ended(job.number, range(len(job.pages)), _code(error))

    def _end_io(self) -> None:
        while (told := self._progress.get()) is not None:
            job, io = told
            for pages, error in io.take():
                self._moves.io_ended(job.number, pages, 0 if error is None else _code(error))
            del told, job, io


class _Lying:
    """Memory in which the pages of a job lie, at `places`, as `Files.transfer` asks for it.

    Whole extents lie in slots, so that neighbours are neighbours; parts of them are counted through.
    """

    def __init__(self, extents: Extents, job: IoJob, extent_bytes: int) -> None:
        self.flat = extents.flat
        at = job.pages["at"].astype(np.int64)
        whole = (job.start, job.stop) == (0, extent_bytes)
        self.places = at // extent_bytes if whole else np.arange(len(at), dtype=np.int64)
        self._extent_bytes = extent_bytes if whole else 0
        self._at = at - job.start

    def where(self, slots: Positions, byte: int) -> Positions:
        return slots * self._extent_bytes + byte if self._extent_bytes else self._at[slots] + byte


def _code(error: BaseException) -> int:
    """What the library is told of an error of I/O."""
    if isinstance(error, ShortIOError):
        return SHORT
    return getattr(error, "errno", None) or errno.EIO


def serve(loop: Callable[[], None]) -> None:
    """A thread's work, until the executor is stopped."""
    while True:
        error = failure_of(loop)
        if error is None or (isinstance(error, NativeCallError) and error.errno == errno.ECANCELED):
            return
        log_failure(error)


class Gather:
    """Pages out of planes on a GPU, into slots of a memory a way."""

    broken = None
    lands: Callable[[int, float], bool] | None = None

    def __init__(self, machine: Machine, move: Move, after: Sequence[Event]) -> None:
        self._mover = machine.mover
        self._memories = machine.memories
        self._move = move
        self._after = after
        self._timeline = machine.timeline
        self._first = self._gather(0)
        self.read = len(move.ways) == 1
        self.read_event: Event = self._first.read_event if self.read else None

    def _gather(self, number: int) -> Moved:
        way = self._move.ways[number]
        nbytes = len(way) * self._mover.layout.page_bytes
        with self._timeline.span("gather", pages=len(way), bytes=nbytes):
            blocks = torch.from_numpy(way.sources)
            return self._mover.gather(self._memories[way.target], way.targets, blocks, None, self._after, sums=True)

    def end(self) -> Steps[End]:
        for number, way in enumerate(self._move.ways):
            moved = self._gather(number) if number else self._first
            with self._timeline.span("check", pages=len(way)):
                yield Blocking(moved.synchronize)
                self._memories[way.target].checksums[way.targets] = moved.checksums()
        return End()

    def cancel(self) -> None:
        """A store goes on."""

    def on_end(self, callback: Callable[[int], None]) -> None:
        for row in range(len(self._move)):
            callback(row)
