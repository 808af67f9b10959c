"""The executor of an engine: the native library carries moves out, threads of Python drive steps, and wait where the
steps wait. And its moves: their begin, their end, and their late pages.

`NativeMoves` is the library's executor in the terms of moves: spaces have names, and groups are layers of a layout.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array, integers
from gdscache.cuda.streams import Event, Landed, events_of, given
from gdscache.errors import DeviceError, IOFailedError, NativeCallError, PlanesError, ShortIOError, StorageError
from gdscache.moves import PLANES, End, Lane, Listener, Move, Moving, Orders, PageStatus, Priority, Steps, Wait, Way
from gdscache.native import NEVER, SHORT, Executor, HostPlanes, error_of, put_rows, take_rows
from gdscache.pages.planes import PagedPlanes
from gdscache.runtime.threads import Flag, Workers, failure_of, log_failure, start
from gdscache.storage.base import Descriptors, memory_of
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.extents import Extents, SlotMemory
    from gdscache.index.free_slots import SlotShare
    from gdscache.kernels.copies import PageCopies
    from gdscache.native import Gpu
    from gdscache.pages.checksum import Checksums
    from gdscache.pages.layout import PageLayout
    from gdscache.storage.base import Files

_T = TypeVar("_T")
_LOOK_S = 1.0  # steps that wait for a slot check again after this time
NAMES = {
    Priority.LOAD: "gdscache-load",
    Priority.PREFETCH: "gdscache-prefetch",
    Priority.STORE: "gdscache-gather",
    Priority.DEMOTION: "gdscache-write",
}


def drive(steps: Steps[_T]) -> _T:
    """Run steps to their end in this thread, which waits where they wait: a wait is a call here, which returns when the
    event has happened. An error of a wait is raised in the steps."""
    with contextlib.closing(steps):
        try:
            wait = next(steps)
            while True:
                error = failure_of(cast(Callable[[], object], wait))
                wait = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            return cast(_T, end.value)


class ThreadLane:
    def __init__(self, name: str, rest: Callable[[], object], threads: int) -> None:
        self._rest = rest
        self._threads = Workers(threads, name)

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        ending = None if lost is None else lambda: self._drive(lost())
        self._threads.submit(functools.partial(self._drive, steps), ending)

    def _drive(self, steps: Steps[None]) -> None:
        drive(steps)
        self._rest()

    def close(self) -> None:
        self._threads.shutdown()


class ThreadDriver:
    """The part of an executor that drives steps by threads, in the system's time, and keeps checksums in the
    `memories`."""

    def __init__(self, memories: Mapping[str, Extents | SlotMemory]) -> None:
        self._memories = memories

    def expect(self, ways: Sequence[Way]) -> None:
        """Note the checksums of pages that are read into a memory to stay there."""
        for way in ways:
            if way.sums is None or way.source in self._memories:
                continue
            space, places = (way.through, way.places) if way.target == PLANES else (way.target, way.targets)
            if places is not None:
                put_rows(self._memories[space].checksums, places, way.sums)

    def checksums(self, space: str, slots: Sequence[int] | Int64Array) -> Checksums:
        return take_rows(self._memories[space].checksums, slots)

    @property
    def orders(self) -> Orders | None:
        """None: no ranks carry its moves out."""
        return None

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> Lane:
        return ThreadLane(NAMES[priority], rest, threads)

    def finish(self, steps: Steps[_T]) -> _T:
        return drive(steps)

    def room(self, pool: SlotShare) -> Wait:
        return functools.partial(pool.wait, _LOOK_S)

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        def wait() -> None:
            with condition:
                condition.wait_for(over, seconds)

        return wait

    def now(self) -> float:
        return time.monotonic()

    def happened(self, event: Event) -> Wait:
        return lambda: None if event is None else event.synchronize()

    def pause(self, changed: Flag, seconds: float) -> None:
        changed.wait(seconds)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Space:
    """A space of moves. `foreign`: planes or a memory of a GPU.

    `slots`: of a memory or of files; of planes, blocks. `memory`: the bytes, uint8; for a GPU, `device_memory` is their
    address on the GPU `device` instead. `sums`: uint64 (slots, layers), where stores leave checksums; for files see
    `Descriptors`. `files`: handles of the disk number `disk`, over which slots are striped, `stretch` at a time.
    `pinned`: the GPU's copy engines reach the memory. A copy never crosses a multiple of `fence` slots.
    """

    kind: str  # planes, memory or files
    slots: int
    foreign: bool = True
    memory: npt.NDArray[np.uint8] | None = None
    sums: Checksums | None = None
    files: Sequence[int] = ()
    stretch: int = 1
    disk: int = 0
    device_memory: int = 0
    device: int = 0
    pinned: bool = False
    fence: int = 0


class NativePlanes(HostPlanes):
    """Planes in host memory, as the library knows them. The tensors live as long as the pool.

    Raises `NativeCallError` for planes that are none in host memory, and `PlanesError` for packed parts of unlike runs.
    """

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes
        memory = [planes.memory(piece) for layer in planes.layout.pieces for piece in layer]
        # The library has as many runs a block in all planes. Those without gaps may be cut anew.
        apart = {runs for _, _, stride, run, runs in memory if stride != run and runs > 1} or {planes.block_tokens}
        runs = max(apart)
        if len(apart) > 1 or any(its != runs and run * its % runs for *_, run, its in memory):
            raise PlanesError(
                f"parts of planes have {sorted(apart)} runs a block", "set model.pack to off: their runs differ"
            )
        rows = [
            (first, block, stride, run) if its == runs else (first, block, *[run * its // runs] * 2)
            for first, block, stride, run, its in memory
        ]
        firsts = np.array([0, *itertools.accumulate(map(len, planes.layout.pieces))], np.int32)
        super().__init__(integers(rows), firsts, planes.blocks, runs, planes.blocks_per_page, planes.layout.packed)


@dataclasses.dataclass(frozen=True, slots=True)
class MoveLimits:
    """In bytes: I/O in flight on one disk over all moves, and the size of one job of each kind. See move.h."""

    flying: int = 64 << 20
    io: int = 4 << 20
    copy: int = 2 << 20
    foreign_copy: int = 64 << 20


class NativeMoves(Executor):
    """Moves over `spaces`, by name. Thread-safe, except `close`.

    `reserve`: the memory of the bounce reserve, its first slot for loads, and their number; `fence`: no run of its
    slots crosses a multiple of this. `pool`: planes on the host. `disks`: the files' means of I/O. `threads` copy, and
    check deadlines. `gpu`: of the foreign planes and memories. Tests step an executor by hand that has no threads, no
    GPU, and None for disks (tests/support/hooks.py). Raises `NativeCallError`.
    """

    def __init__(
        self,
        layout: PageLayout,
        spaces: Mapping[str, Space],
        page_blocks: int,
        *,
        limits: MoveLimits = MoveLimits(),
        reserve: tuple[str, int, int] | None = None,
        fence: int = 0,
        pool: HostPlanes | None = None,
        gpu: Gpu | None = None,
        disks: Sequence[Descriptors | None] = (),
        threads: int = 0,
    ) -> None:
        bounds = np.array([*(start for start, _ in layout.layer_bounds), layout.page_bytes], np.int64)
        super().__init__(
            *(bounds, layout.extent_bytes, page_blocks, dict(spaces), limits, reserve, fence),
            *(pool, gpu, disks, threads),
        )
        self._layout = layout
        self._groups: dict[tuple[range, ...], Int64Array] = {}
        self.layers = layout.n_layers

    def start(
        self,
        number: int,
        move: Move,
        until: int = NEVER,
        after: Sequence[int] = (),
        routes: Callable[[range], tuple[int, int]] | None = None,
    ) -> None:
        """Begin a move that ends by `until`, in nanoseconds. `number` is unique among moves that have not ended.

        `after`: CUevents that a GPU's copies wait for; they live until the move has ended. `routes(layers)`: the kinds
        of copies for these layers, without checksums and with them.
        """
        groups = self._groups.get(move.groups)
        if groups is None:
            groups = self._groups[move.groups] = self._table(move.groups or (range(self.layers),))
        events = np.array(after, np.uint64) if after else None
        self.begin(number, move.priority, until, move.ways, groups, routes, events, move.open)

    def _table(self, groups: Sequence[range]) -> Int64Array:
        """int64 (groups, 8): first and last layer, their bytes in an extent, the bytes to read after the group before,
        and the bytes to read alone."""
        layout = self._layout
        rows = [
            (some.start, some.stop, layout.layer_bounds[some.start][0], layout.layer_bounds[some.stop - 1][1])
            + (layout.read_span(some) + layout.read_span(some, alone=True))
            for some in groups
        ]
        return np.array(rows, np.int64)


LIMITS = MoveLimits()
TRACKS = {  # timeline tracks by the kinds of spans of the library's threads, in the library's order
    "read": "SSD reads",
    "write": "SSD writes",
    "scatter": "copies",
    "gather": "copies",
    "check": "copies",
    "ready": "copies",
    "load copies": "loads: copy stream",
    "load kernel": "loads: kernel stream",
    "store copies": "stores: copy stream",
    "store kernel": "stores: kernel stream",
}
_COPYING = 4  # most threads of the library that copy
_KINDS = tuple(TRACKS)
_STATUSES = tuple(PageStatus)
_UNFIT = _STATUSES.index(PageStatus.UNFIT)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """The slots of the bounce reserve that loads pass through. `name`: of their space."""

    extents: Extents
    loads: range
    name: str = "bounce"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """An executor's copies of planes, and its memories and files by the names of their spaces.

    `slots`: the number of slots of each space of files. `refusal`: the reason why no further read may begin, or None;
    it may cost a system call.
    """

    copies: PageCopies
    memories: Mapping[str, Extents]
    files: Mapping[str, Files]
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bounce: Reserve | None = None
    refusal: Callable[[], PageStatus | None] = lambda: None
    timeline: Timeline = OFF


class NativeExecutor(ThreadDriver):
    """Moves bytes between the spaces of `machine`.

    `plain`: moves the pages that do not fit where this one's are packed; it ends with this one.
    """

    def __init__(self, machine: Machine, plain: NativeExecutor | None = None) -> None:
        super().__init__(machine.memories)
        self.machine = machine
        self.plain = plain
        self.moves: NativeMoves
        planes = machine.copies.planes
        self._numbers = itertools.count(1)
        self._under_way: dict[int, tuple[NativeMoving, Listener | None, Sequence[Event]]] = {}
        self._closed = False
        self._gpu = machine.copies.gpu
        on_host = self._gpu is None
        with contextlib.ExitStack() as undo:
            self._pool = NativePlanes(planes) if on_host else None
            if self._pool is not None:
                undo.callback(self._pool.close)
            spaces, disks = self._spaces(on_host=on_host)
            reserve, fence = None, 0
            if machine.bounce is not None:
                reserve = (machine.bounce.name, machine.bounce.loads.start, len(machine.bounce.loads))
                fence = machine.bounce.extents.fence_slots
            self.moves = NativeMoves(
                planes.layout,
                spaces,
                planes.blocks_per_page,
                limits=LIMITS,
                reserve=reserve,
                fence=fence,
                pool=self._pool,
                gpu=self._gpu,
                disks=disks,
                threads=min(_COPYING, os.cpu_count() or 1),
            )
            undo.callback(self.moves.close)
            if machine.timeline is not OFF:
                self.moves.trace()
            self._late = threading.Thread(target=self._serve_late, name="gdscache-late", daemon=True)
            start([self._late], self.moves.stop)
            undo.pop_all()

    def _spaces(self, *, on_host: bool) -> tuple[dict[str, Space], list[Descriptors]]:
        machine = self.machine
        spaces = {PLANES: Space("planes", machine.copies.planes.blocks, foreign=not on_host)}
        for name, extents in machine.memories.items():
            flat = extents.flat
            memory = np.frombuffer(flat, np.uint8) if isinstance(flat, memoryview) else None
            there = None if memory is not None else memory_of(extents.rows)
            spaces[name] = Space(
                *("memory", extents.slots, memory is None, memory, extents.checksums),
                device_memory=0 if there is None else there.address,
                device=0 if there is None else there.device,
                pinned=extents.pinned,
                fence=extents.fence_slots,
            )
        disks: list[Descriptors] = []
        for name, files in machine.files.items():
            own = files.hand_over()
            disk = next((n for n, other in enumerate(disks) if other.means == own.means), len(disks))
            if disk == len(disks):
                disks.append(own)
            slots = machine.slots[name]
            spaces[name] = Space("files", slots, files=own.files, stretch=own.stretch, sums=own.sums, disk=disk)
        return spaces, disks

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        if listener is not None:
            self.look()
            self.expect(move.ways)
        moving = NativeMoving(self, next(self._numbers), move, listener, in_order=self._gpu is not None)
        self._under_way[moving.number] = moving, listener, after
        try:
            seconds = math.inf if move.priority is Priority.STORE else move.seconds
            ends = int(min(time.monotonic_ns() + seconds * 1e9, NEVER))
            if self._gpu is None:
                self.moves.start(moving.number, move, ends)
            else:
                routes = functools.partial(self.machine.copies.routes, "load" if moving.into_planes else "store")
                self.moves.start(moving.number, move, ends, events_of(after), routes)
        except BaseException:
            if self.moves.wait(moving.number, 0) is not None:  # None: an interrupt came after the move had begun
                del self._under_way[moving.number]
            raise
        return moving

    def look(self) -> None:
        """Tell the library whether reads may begin: before a load, and when the answer has changed."""
        if self.plain is not None:
            self.plain.look()
        refusal = self.machine.refusal()
        if self._closed:
            return
        self.moves.refuse(0 if refusal is None else _STATUSES.index(refusal))

    def behind(self, after: object) -> Event:
        return given(after, self.machine.copies.planes.device)

    mark = behind

    def passed(self, mark: Event) -> None: ...

    def reads_queued(self) -> Event:
        return None if self._gpu is None else self._gpu.point(self._gpu.last(loads=False))

    # -- for moves
    # ---------------------------------------------------------------------------------------------------------

    def over(self, number: int) -> Wait:
        return functools.partial(self.await_move, number)

    def await_move(self, number: int, group: int = -1, seconds: float = math.inf) -> Landed | None:
        """Wait until a move has ended, or copies of a group of its layers are queued; None after `seconds`."""
        point = self.moves.wait(number, seconds, group)
        if point is None:
            return None
        return Landed(self._gpu.point(point) if point and self._gpu is not None else None)

    def end_lost(self) -> Iterator[tuple[NativeMoving, Sequence[int]]]:
        """Cancel moves whose calls were interrupted, and wait for their ends. Yields each move and its late rows.
        Afterwards only late I/O is in progress."""
        if self.plain is not None:
            yield from self.plain.end_lost()
        for moving, _, _ in list(self._under_way.values()):
            if moving.known:
                yield moving, moving.unheld
                continue
            self.moves.cancel(moving.number)
            with contextlib.suppress(NativeCallError):  # it may have its last ways already
                self.moves.extend(moving.number, (), last=True)
            self.await_move(moving.number)
            yield moving, moving.lose()

    # -- for timelines -------------------------------------------------------------------------------------------------

    def _about(self, number: int, layers: range) -> dict[str, Any]:
        found = self._under_way.get(number)
        if found is None or found[0].move.priority >= Priority.STORE:
            return {}
        load = {"load": found[0].move.number}
        return load | {"layers": layers} if found[0].move.groups else load

    def tell_spans(self) -> None:
        timeline = self.machine.timeline
        while timeline is not OFF and (spans := self.moves.take_spans()):
            for kind_, layers, number, pages, nbytes, begin, end in spans:
                kind, about = _KINDS[kind_], self._about(number, layers)
                if kind != "ready":
                    timeline.past(kind, TRACKS[kind], begin, end, pages=pages, bytes=nbytes, **about)
                elif (found := self._under_way.get(number)) is not None and found[0].into_planes:
                    for layer in layers:
                        timeline.past(kind, TRACKS[kind], begin, None, layer=layer, load=about["load"])

    def forget(self, moving: NativeMoving) -> None:
        self._under_way.pop(moving.number, None)

    # -- late pages ----------------------------------------------------------------------------------------------------

    def _serve_late(self) -> None:
        while (error := failure_of(self._tell_late)) is not None:
            if isinstance(error, NativeCallError) and error.errno == errno.ECANCELED:
                return
            log_failure(error)

    def _tell_late(self) -> None:
        while True:  # until `stop`
            found = self.moves.take_late(math.inf)
            log_failure(failure_of(self.tell_spans))
            for number, row in found:  # each by itself: the others would keep their slots for good
                log_failure(failure_of(functools.partial(self._ended, number, row)))

    def _ended(self, number: int, row: int) -> None:
        self._under_way[number][0].ended(row)

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin no more moves, and end all waits. May be called again."""
        if self.plain is not None:
            self.plain.stop()
        if not self._closed:
            self._closed = True
            self.moves.stop()

    def close(self) -> None:
        """Free everything. Call it when all moves and their late pages have ended."""
        self.stop()
        self._late.join()
        self.moves.close()
        if self._pool is not None:
            self._pool.close()
        if self.plain is not None:
            self.plain.close()


class NativeMoving:
    """See `Moving`. Loads and prefetches have a `listener`."""

    def __init__(
        self, executor: NativeExecutor, number: int, move: Move, listener: Listener | None, *, in_order: bool = False
    ) -> None:
        """`in_order`: moves' copies run in the order of their begin, so reads of the planes by one come after all
        earlier ones."""
        self.number = number
        self._executor = executor
        self.move = move
        self._rows = len(move)
        self._listener = listener
        self._end: End | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._late: int | None = None  # late rows, once known
        self._ended: set[int] = set()
        self._callback: Callable[[int], None] | None = None
        self.into_planes = any(way.target == PLANES for way in move.ways)
        known = self.into_planes or (in_order and any(way.source == PLANES for way in move.ways))
        self.lands: Callable[[int, float], Landed | None] | None = self._wait if known else None

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        self._executor.expect(ways)
        self._executor.moves.extend(self.number, ways, last=last)
        self._rows += sum(map(len, ways))

    def cancel(self) -> None:
        if self._end is None:
            self._cancelled = True
            self._executor.moves.cancel(self.number)

    def _wait(self, layer: int, seconds: float) -> Landed | None:
        if self._end is not None:
            return Landed(None)
        group, layers = next(((n, some) for n, some in enumerate(self.move.groups) if layer in some), (0, range(0)))
        try:
            landed = self._executor.await_move(self.number, group, seconds)
        except NativeCallError:
            if not self.known:
                raise
            return Landed(None)  # `close` has ended the move and the executor meanwhile
        return None if landed is None else Landed(landed.event, layers)

    def end(self) -> Steps[End]:
        if self._end is None:
            yield self._executor.over(self.number)
            end = self._finish()
            if end.error is not None and self._listener is None:
                raise end.error
        assert self._end is not None, "a move that ended without an end"
        return self._end

    @property
    def known(self) -> bool:
        return self._end is not None

    @property
    def unheld(self) -> Sequence[int]:
        """Late rows that nobody waits for: the call was interrupted when it had just learned of them."""
        return self._end.late if self._end is not None and self._callback is None else ()

    def lose(self) -> Sequence[int]:
        """The move has ended and no caller waits for it. Returns its late rows."""
        self._listener = None
        return self._finish().late

    def _finish(self) -> End:
        statuses, failed, late, why = self._executor.moves.outcome(self.number)
        codes = sorted(set(statuses.tobytes()))
        errors = {row: write_error(self.move.ways[0].target, code) for row, code in failed}
        broken = f"a copy failed: {why}" if why else ""
        unfit = np.flatnonzero(statuses == _UNFIT).tolist() if _UNFIT in codes else ()
        end = End(errors, late, DeviceError(broken, "see the system log") if broken else None, unfit=unfit)
        with self._lock:
            self._end = end  # before the listener hears of it, which may raise: late rows stay known
            self._late = len(late)
            over = len(self._ended) == self._late
        try:
            self._executor.tell_spans()
            self._tell(statuses, codes)
        finally:
            if over:
                self._executor.forget(self)
        return end

    def _tell(self, statuses: npt.NDArray[np.uint8], codes: Sequence[int]) -> None:
        listener = self._listener
        if listener is None:
            return
        for code in codes:
            status = _STATUSES[code]
            if status is PageStatus.LOADED and self._cancelled and self.into_planes:
                status = PageStatus.CANCELLED  # the library has read them to the end, and has not copied them
            if status is not PageStatus.PENDING:
                listener.judged(np.flatnonzero(statuses == code), status)
        if self.into_planes:
            listener.ready(range(self._executor.moves.layers), None)

    def on_end(self, callback: Callable[[int], None]) -> None:
        late = set() if self._end is None else set(self._end.late)
        with self._lock:
            self._callback = callback
            over = [row for row in range(self._rows) if row not in late or row in self._ended]
        for row in over:
            callback(row)

    def ended(self, row: int) -> None:
        with self._lock:
            self._ended.add(row)
            over = len(self._ended) == self._late
            callback = self._callback
        try:
            if callback is not None:
                callback(row)
        finally:
            if over:
                self._executor.forget(self)


def write_error(files: str, code: int, why: str = "") -> StorageError:
    """The error of a page that was not written to a tier's files. `code`: an errno or the library's code; `why`
    replaces its text."""
    if code == SHORT:
        return ShortIOError(f"a write to {files} moved too few bytes", "the file system is full or limited")
    error = error_of(code)
    return IOFailedError(f"a write to {files} failed: {why or error.strerror}", "see the system log", error.errno)
