"""The executor of an engine: the native library carries moves out, Python's threads drive steps.

What the library does not reach itself is *foreign*, and has a thread here: files behind a transport of Python's, and
planes or a reserve in GPU memory, whose copies the mover queues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch

from gdscache.checksum import Checksums
from gdscache.errors import NativeCallError, ShortIOError, StorageError
from gdscache.moves.base import PLANES, End, Lane, Listener, Move, Moving, PageStatus, Priority, Steps, Wait
from gdscache.moves.moving import NativeMoving
from gdscache.native.moves import (
    DIGEST,
    NEVER,
    READY,
    SHORT,
    CopyJob,
    IoJob,
    Limits,
    NativeMoves,
    Space,
)
from gdscache.native.pages import NativePool
from gdscache.storage.base import Op
from gdscache.streams import Event
from gdscache.threads import Workers, failure_of, log_failure, start
from gdscache.tiers.base import SlotPool
from gdscache.tiers.bounce import Bounce, Extents, Window
from gdscache.tiers.page_io import Positions
from gdscache.tiers.transfer import Moved, Mover
from gdscache.timeline import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.layout import PageLayout

_T = TypeVar("_T")
NAMES = {  # of the lanes' threads
    Priority.LOAD: "gdscache-load",
    Priority.PREFETCH: "gdscache-prefetch",
    Priority.STORE: "gdscache-gather",
    Priority.DEMOTION: "gdscache-write",
}
_LONGEST_S = 1e8  # as a deadline: three years
_LOOK_S = 1.0  # seconds after which steps that wait for room look around
_SLICE_NS = 100_000_000  # of a native wait: then signals are heard
LIMITS = Limits()
_COPYING = 4  # threads of the library that copy, at most
_CODES = {status: code for code, status in enumerate(PageStatus)}


class PagesIO(Protocol):
    """I/O of pages under way."""

    def follow(self, told: Callable[[], None]) -> None:
        """Call `told()` whenever there may be something to `take`, in any thread, perhaps now."""
        ...

    def take(self) -> Iterable[tuple[Sequence[int], StorageError | None]]:
        """Pages that have ended since it was last asked for, with their error; never waits. One thread asks."""
        ...

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(page)` once for each page, when nothing touches its memory any more; perhaps now."""
        ...


class Places(Protocol):
    """Memory that pages lie in."""

    @property
    def flat(self) -> memoryview | torch.Tensor:
        """All of it, as bytes."""
        ...

    def where(self, slots: Positions, byte: int) -> Positions:
        """The places in `flat` of a byte of the extents in some slots."""
        ...


class Files(Protocol):
    """Where the bytes of a tier are that no copy reaches."""

    def transfer(
        self,
        op: Op,
        slots: Positions,
        ends: Sequence[tuple[Places, Positions]],
        span: tuple[int, int] | None = None,
    ) -> PagesIO:
        """Start I/O of slots, or of the bytes `span` of their extents; see `SlabIO.transfer`."""
        ...

    def describe(self) -> str:
        """What moves these bytes, in a word."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptors:
    """Files that the library reads and writes itself. Slots go over `files` in stretches of `stretch` of them.

    `threads`: of the kernel with `uring`, else of the library.
    """

    files: Sequence[int]
    stretch: int
    threads: int
    uring: bool


@runtime_checkable
class NativeFiles(Protocol):
    """Files that may be the library's own to read and write."""

    def descriptors(self) -> Descriptors | None:
        """What it needs for that; None where a transport of Python's has to move the bytes."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What moves bytes: the planes' mover, memories and files by the names of their spaces, the bounce reserve.

    `slots`: of each of the files. `refusal`: why no further read may begin, or None. It may cost a system call.
    """

    mover: Mover
    memories: Mapping[str, Extents]
    files: Mapping[str, Files]
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bounce: Bounce | None = None
    refusal: Callable[[], PageStatus | None] = lambda: None
    timeline: Timeline = OFF


class NativeExecutor:
    """Moves bytes between the spaces of `machine`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.moves: NativeMoves
        mover, layout = machine.mover, machine.mover.layout
        self._layout: PageLayout = layout
        self._numbers = itertools.count(1)
        self._under_way: dict[int, tuple[NativeMoving, Listener | None, Sequence[Event]]] = {}
        self._causes: dict[int, BaseException] = {}
        self._queued: SimpleQueue[tuple[CopyJob, Moved] | None] = SimpleQueue()
        self._progress: SimpleQueue[tuple[IoJob, PagesIO] | None] = SimpleQueue()
        self._closed = False
        on_host = mover.native
        with contextlib.ExitStack() as undo:
            self._pool = NativePool(mover.planes) if on_host else None
            if self._pool is not None:
                undo.callback(self._pool.close)
            spaces, disk = self._spaces(on_host=on_host)
            reserve, fence = None, 0
            if machine.bounce is not None:
                reserve = ("bounce", machine.bounce.loads.start, len(machine.bounce.loads))
                fence = machine.bounce.extents.fence_slots
            threads = 0 if disk is None else disk.threads
            self.moves = NativeMoves(
                layout,
                spaces,
                mover.planes.blocks_per_page,
                limits=LIMITS,
                reserve=reserve,
                fence=fence,
                pool=None if self._pool is None else self._pool.handle,
                workers=threads,
                depth=8 * threads if disk is not None and disk.uring else 0,
                threads=min(_COPYING, os.cpu_count() or 1),
            )
            undo.callback(self.moves.close)
            self._foreign_copies = not on_host
            loops = {"gdscache-late": self._tell_late}
            if any(space.foreign for space in spaces.values() if space.kind == "files"):
                loops |= {"gdscache-io": self._begin_io, "gdscache-io-ends": self._end_io}
            if any(space.foreign for space in spaces.values() if space.kind != "files"):
                loops |= {"gdscache-copies": self._queue_copies, "gdscache-copied": self._end_copies}
            self._threads = [
                threading.Thread(target=_serve, args=(loop,), name=name, daemon=True) for name, loop in loops.items()
            ]
            start(self._threads, self._stop)
            undo.pop_all()

    def _spaces(self, *, on_host: bool) -> tuple[dict[str, Space], Descriptors | None]:
        machine = self.machine
        spaces = {PLANES: Space("planes", machine.mover.planes.blocks, foreign=not on_host)}
        for name, extents in machine.memories.items():
            flat = extents.flat
            memory = np.frombuffer(flat, np.uint8) if isinstance(flat, memoryview) else None
            spaces[name] = Space("memory", extents.slots, memory is None, memory, extents.checksums)
        found = None
        for name, files in machine.files.items():
            own = files.descriptors() if isinstance(files, NativeFiles) else None
            on_device = any(space.foreign for space in spaces.values() if space.kind == "memory")
            if own is None or on_device:
                spaces[name] = Space("files", machine.slots[name])
            else:
                spaces[name] = Space("files", machine.slots[name], False, files=own.files, stretch=own.stretch)
                found = own
        return spaces, found

    # -- the contract --------------------------------------------------------------------------------------------------

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> Lane:
        return _Lane(NAMES[priority], rest, threads)

    def finish(self, steps: Steps[_T]) -> _T:
        return _drive(steps)

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        if move.ways[0].source == PLANES and self._foreign_copies:
            return _Gather(self.machine, move, after)
        if listener is not None:
            self.look()
            self._expect(move)
        moving = NativeMoving(self, next(self._numbers), move, listener, tells=self._foreign_copies)
        self._under_way[moving.number] = moving, listener, after
        try:
            store = move.priority is Priority.STORE or move.seconds > _LONGEST_S
            until = NEVER if store else time.monotonic_ns() + int(move.seconds * 1e9)
            self.moves.begin(moving.number, move, until)
        except BaseException:
            del self._under_way[moving.number]
            raise
        if listener is not None and self._foreign_copies and self._queues(move):
            self._queue_now()
            moving.broken = self._causes.get(moving.number)
        return moving

    def look(self) -> None:
        """Ask whether reads may begin: before a load, and when that has changed."""
        refusal = self.machine.refusal()
        if self._closed:
            return
        self.moves.refuse(0 if refusal is None else _CODES[refusal])

    def _expect(self, move: Move) -> None:
        """Pages that are read into a memory to stay there have their checksums from now on."""
        for way in move.ways:
            if way.sums is None or way.source in self.machine.memories:
                continue
            space, places = (way.through, way.places) if way.target == PLANES else (way.target, way.targets)
            if places is not None:
                self.machine.memories[space].checksums[places] = way.sums

    def room(self, pool: SlotPool, seconds: float = math.inf) -> Wait:
        return _Blocking(functools.partial(pool.wait, max(0.0, min(seconds, _LOOK_S))))

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        def wait() -> None:
            with condition:
                condition.wait_for(over, seconds)

        return _Blocking(wait)

    def now(self) -> float:
        return time.monotonic()

    def reads_queued(self) -> Event:
        return self.machine.mover.mark_stores()

    def happened(self, event: Event) -> Wait:
        return _Blocking(lambda: None if event is None else event.synchronize())

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        changed.wait(seconds)

    def checksums(self, space: str, slots: Sequence[int]) -> Checksums:
        found: Checksums = self.machine.memories[space].checksums[list(slots)]
        return found

    # -- for moves under way -------------------------------------------------------------------------------------------

    def over(self, number: int) -> Wait:
        return _Blocking(functools.partial(self.await_move, number))

    def await_move(self, number: int, group: int = -1, seconds: float = math.inf) -> bool:
        """Wait until a move has ended, or a group of its layers is in the planes; False when that takes longer."""
        until = NEVER if seconds > _LONGEST_S else time.monotonic_ns() + int(max(0.0, seconds) * 1e9)
        while True:
            slice_ = min(until, time.monotonic_ns() + _SLICE_NS)
            if self.moves.wait(number, slice_, group):
                return True
            if slice_ == until:
                return False

    def cause(self, number: int) -> BaseException | None:
        return self._causes.pop(number, None)

    def forget(self, moving: NativeMoving) -> None:
        self._under_way.pop(moving.number, None)

    # -- what is late --------------------------------------------------------------------------------------------------

    def _tell_late(self) -> None:
        while (found := self.moves.take_late(NEVER)) is not None:
            for number, row in found:
                self._under_way[number][0].ended(row)

    # -- foreign copies ------------------------------------------------------------------------------------------------

    def _queues(self, move: Move) -> bool:
        """Whether copies of the pages that are in memory return before the bytes are moved."""
        memories = [self.machine.memories[way.source] for way in move.ways if way.source in self.machine.memories]
        return bool(memories) and all(map(self.machine.mover.queues, memories))

    def _queue_now(self) -> None:
        """Queue the copies that may begin, in the caller's thread.

        Ours begins when the caller's lets go of the interpreter's lock, and who launches a model does that seldom: some
        2 ms in which the bus would have nothing to do.
        """
        while (job := self.moves.take_copy(0)) is not None:
            self._queue_copy(job)

    def _queue_copies(self) -> None:
        while (job := self.moves.take_copy(NEVER)) is not None:
            self._queue_copy(job)

    def _queue_copy(self, job: CopyJob) -> None:
        _, listener, after = self._under_way[job.move]
        if job.kind == READY:
            assert listener is not None, "a store is ready when it ends"
            listener.ready(job.layers, self.machine.mover.mark_loads())
            return
        try:
            extents, places = self._lying(job)
            if job.kind == DIGEST:
                moved = Moved(None, None, lambda: np.stack([extents.digest(int(at), job.layers) for at in places]))
            else:
                about = {"layers": job.layers, "pages": len(places), "bytes": self._bytes(job)}
                with self.machine.timeline.span("scatter", **about):
                    blocks = torch.from_numpy(job.blocks.copy())
                    moved = self.machine.mover.scatter(extents, places, blocks, job.layers, after, sums=job.sums)
        except BaseException as error:  # noqa: BLE001 - its load raises it
            self._break(job, error)
            return
        self.moves.copy_queued(job.number)
        self._queued.put((job, moved))

    def _bytes(self, job: CopyJob) -> int:
        bounds = self._layout.layer_bounds
        return len(job.pages) * (bounds[job.layers.stop - 1][1] - bounds[job.layers.start][0])

    def _lying(self, job: CopyJob) -> tuple[Extents, Positions]:
        """Where the pages of a copy lie."""
        places = job.pages["slot"].astype(np.int64)
        if job.window:
            assert self.machine.bounce is not None, "a window of no reserve"
            span = self._layout.read_span(job.layers, alone=True)
            return Window(self.machine.bounce.extents, job.window, span), places
        return self.machine.memories[job.memory], places

    def _break(self, job: CopyJob, error: BaseException) -> None:
        self._causes.setdefault(job.move, error)
        self.moves.copy_ended(job.number, None, broken=True)

    def _end_copies(self) -> None:
        while (queued := self._queued.get()) is not None:
            job, moved = queued
            try:
                with self.machine.timeline.span("check", layers=job.layers, pages=len(job.pages)):
                    moved.synchronize()
                    sums = moved.checksums() if job.sums else None
            except BaseException as error:  # noqa: BLE001 - its load raises it
                self._break(job, error)
            else:
                self.moves.copy_ended(job.number, sums)
            del queued, job, moved

    # -- foreign files -------------------------------------------------------------------------------------------------

    def _begin_io(self) -> None:
        while (job := self.moves.take_io(NEVER)) is not None:
            files, op = self.machine.files[job.files], Op.WRITE if job.write else Op.READ
            size = job.stop - job.start
            about = {"pages": len(job.pages), "bytes": len(job.pages) * size}
            kind, track = ("write", "SSD writes") if job.write else ("read", "SSD reads")
            try:
                lying = _Lying(self.machine.memories[job.memory], job, self._layout.extent_bytes)
                places = lying.places
                slots = job.pages["slot"].astype(np.int64)
                with self.machine.timeline.flight(kind, track, transport=files.describe(), **about) as flight:
                    io = files.transfer(op, slots, [(lying, places)], (job.start, job.stop))
                    flight.follow(io, len(job.pages))
                io.follow(functools.partial(self._progress.put, (job, io)))
            except BaseException as error:  # noqa: BLE001 - its pages have ended for it
                log_failure(error)
                self.moves.io_ended(job.number, range(len(job.pages)), _code(error))

    def _end_io(self) -> None:
        while (told := self._progress.get()) is not None:
            job, io = told
            for pages, error in io.take():
                self.moves.io_ended(job.number, pages, 0 if error is None else _code(error))
            del told, job, io

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self.moves.stop()
        self._queued.put(None)
        self._progress.put(None)

    def stop(self) -> None:
        """No move is begun any more, and none is waited for. Again is fine."""
        if not self._closed:
            self._closed = True
            self._stop()

    def close(self) -> None:
        """Give everything back; nothing is under way, and what was late has ended."""
        self.stop()
        for thread in self._threads:
            thread.join()
        self.moves.close()
        if self._pool is not None:
            self._pool.close()


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


def _serve(loop: Callable[[], None]) -> None:
    """A thread's work, until the executor is stopped."""
    while True:
        error = failure_of(loop)
        if error is None or (isinstance(error, NativeCallError) and error.errno == errno.ECANCELED):
            return
        log_failure(error)


class _Blocking:
    """What a thread waits for by a call that returns when it has happened."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def _drive(steps: Steps[_T]) -> _T:
    """Run steps to their end in this thread, which waits where they wait. What breaks a wait is raised there."""
    with contextlib.closing(steps):
        try:
            wait = next(steps)
            while True:
                error = failure_of(cast(_Blocking, wait).wait)
                wait = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            return cast(_T, end.value)


class _Lane:
    """Some threads. What steps raise goes to the log."""

    def __init__(self, name: str, rest: Callable[[], object], threads: int) -> None:
        self._rest = rest
        self._threads = Workers(threads, name)

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        ending = None if lost is None else lambda: self._drive(lost())
        self._threads.submit(functools.partial(self._drive, steps), ending)

    def _drive(self, steps: Steps[None]) -> None:
        _drive(steps)
        self._rest()

    def close(self) -> None:
        self._threads.shutdown()


class _Gather:
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
                yield _Blocking(moved.synchronize)
                self._memories[way.target].checksums[way.targets] = moved.checksums()
        return End()

    def cancel(self) -> None:
        """A store goes on."""

    def on_end(self, callback: Callable[[int], None]) -> None:
        for row in range(len(self._move)):
            callback(row)
