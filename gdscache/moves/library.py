"""The executor of csrc/host by its C interface: moves are handed over whole, and their ends come back in lists.

What is *foreign* (files of a transport of Python, planes and memory of a GPU) is asked for as jobs, and answered for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdscache.errors import NativeCallError
from gdscache.moves.base import Move, Way
from gdscache.native.library import address, checked, library, struct

if TYPE_CHECKING:
    from gdscache.pages.checksum import Checksums
    from gdscache.pages.layout import PageLayout

NEVER = (1 << 63) - 1  # nanoseconds: later than any deadline
PAGE = np.dtype([("row", "<i4"), ("_", "<i4"), ("slot", "<i8"), ("at", "<i8")])  # of a job
SCATTER, GATHER, DIGEST = range(3)  # kinds of copies
SHORT, GONE, WRONG = -1, -2, -3  # in place of an errno
SPAN = np.dtype(  # what a thread of the library did, and when: nanoseconds of CLOCK_MONOTONIC
    [(name, "<i4") for name in ("kind", "first", "last", "_")]
    + [(name, "<i8") for name in ("move", "pages", "bytes", "begin", "end")]
)
SPAN_KINDS = (
    *("read", "write", "scatter", "gather", "check", "ready"),
    *("load copies", "load kernel", "store copies", "store kernel"),  # of a GPU's streams
)
Pages = npt.NDArray[np.void]
Spans = npt.NDArray[np.void]


_Space = struct("_Space", "kind:i foreign:i slots:q memory:Q sums:Q files:Q n_files:i pinned:i stretch:q fence:q")
_Limits = struct(
    "_Limits",
    "bounds:Q extent_bytes:q layers:i page_blocks:i flying:q io:q copy:q foreign_io:q foreign_copy:q",
)
_Way = struct("_Way", "source:i target:i through:i reserved:i pages:q sources:Q targets:Q places:Q sums:Q")
_Group = struct(
    "_Group", "first:i last:i begin:q end:q start:q stop:q alone_start:q alone_stop:q route:i summed_route:i"
)
_Io = struct("_Io", "id:q move:q write:i files:i memory:i first:i last:i reserved:i start:q stop:q count:q pages:Q")
_Copy = struct(
    "_Copy",
    "id:q kind:i memory:i first:i last:i sums:i reserved:i move:q window:q window_slots:q count:q pages:Q blocks:Q",
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Space:
    """A space of moves. `foreign`: of a GPU, or files of a transport of Python's.

    `slots`: of a memory or of files, blocks of planes. `memory`: the bytes, uint8, or in `device_memory` their address
    on a GPU. `sums`: uint64 (slots, layers), where stores leave checksums. `files`: descriptors, over which slots go in
    stretches of `stretch`. `pinned`: a GPU's copy engines reach the memory, of which no copy leaves `fence` slots.
    """

    kind: str  # planes, memory or files
    slots: int
    foreign: bool = True
    memory: npt.NDArray[np.uint8] | None = None
    sums: Checksums | None = None
    files: Sequence[int] = ()
    stretch: int = 1
    device_memory: int = 0
    pinned: bool = False
    fence: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class MoveLimits:
    """In bytes: what is in flight over all moves, and what a job has. See move.h."""

    flying: int = 64 << 20
    io: int = 4 << 20
    copy: int = 2 << 20
    foreign_io: int = 32 << 20
    foreign_copy: int = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IoJob:
    """Foreign reads or writes of the bytes `start` to `stop` of some extents, for some layers. `pages`: `PAGE`s."""

    number: int
    move: int
    write: bool
    files: str
    memory: str
    layers: range
    start: int
    stop: int
    pages: Pages


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """A foreign copy of some layers. `sums`: whether checksums are asked for.

    `pages`: `PAGE`s; `at` is where layer `layers.start` begins. `slot`: of the memory; or where there is a `window`,
    the slots of the reserve that pages lie in side by side, a part of an extent each, the place in that. `blocks`:
    int64 (pages, blocks a page), none to look only.
    """

    number: int
    move: int
    kind: int
    memory: str
    layers: range
    sums: bool
    window: range
    pages: Pages
    blocks: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MoveOutcome:
    """How a move has ended. `statuses`: places in `PageStatus`, uint8 (rows,); `errors`: rows whose I/O failed, int32
    (n, 2), with `SHORT` or an errno; `late`: int32 rows. `broken`: what broke a copy, or ""."""

    statuses: npt.NDArray[np.uint8]
    errors: npt.NDArray[np.int32]
    late: npt.NDArray[np.int32]
    broken: str


class NativeMoves:
    """Moves over `spaces`, by name. Thread-safe, but for `close`.

    `reserve`: the memory of the bounce reserve, its first slot for loads, and how many; `fence`: no run of them crosses
    a multiple of so many. `pool`: `NativePool.handle` of planes that are not foreign. `workers`, `depth`: of the disk,
    where files are not foreign; with a depth of 0 there is no io_uring. `threads` copy; with none of them everything is
    foreign, and time passes by `expire`. `gpu`: `NativeGpu.handle`, whose the foreign planes and memories are; without,
    the caller takes their copies, which tests do. `cufile`: `CuFiles.handle` of what moves the bytes of files that are
    not foreign, to and from foreign memory that it knows, too.
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
        pool: int | None = None,
        gpu: int | None = None,
        cufile: int | None = None,
        workers: int = 0,
        depth: int = 0,
        threads: int = 0,
    ) -> None:
        self._layout = layout
        self.layers = layout.n_layers
        self._library = library()
        self._names = list(spaces)
        self._numbers = {name: number for number, name in enumerate(spaces)}
        self._kept = list(spaces.values())  # the memory behind the addresses
        self.page_blocks = page_blocks
        self._lock = threading.Lock()
        table, files = self._table(spaces)
        self._kept_files = files
        bounds = np.array([*(start for start, _ in layout.layer_bounds), layout.page_bytes], np.int64)
        sizes = _Limits(
            *(
                address(bounds),
                layout.extent_bytes,
                layout.n_layers,
                page_blocks,
                limits.flying,
                limits.io,
                limits.copy,
            ),
            *(limits.foreign_io, limits.foreign_copy),
        )
        space, first, slots = (-1, 0, 0) if reserve is None else (self._numbers[reserve[0]], *reserve[1:])
        handle, why = ctypes.c_void_p(), ctypes.create_string_buffer(200)
        answer = self._library.executor_open(
            *(ctypes.addressof(sizes), ctypes.addressof(table), len(spaces), space, first, slots, fence, pool),
            *(gpu, cufile, workers, depth, threads, ctypes.addressof(handle), ctypes.addressof(why), len(why)),
        )
        if answer < 0:
            raise NativeCallError(f"no executor: {why.value.decode()}", "see what it says", -answer)
        self._handle: int | None = handle.value
        self._pages_dtype = PAGE

    def _table(self, spaces: Mapping[str, Space]) -> tuple[Any, list[Any]]:
        kinds = ("planes", "memory", "files")
        files = [np.array(space.files, np.int32) for space in spaces.values()]
        rows = [
            _Space(
                *(kinds.index(space.kind), space.foreign, space.slots),
                space.device_memory if space.memory is None else address(space.memory),
                0 if space.sums is None else address(space.sums),
                *(address(some) if len(some) else 0, len(some), space.pinned, space.stretch, space.fence),
            )
            for space, some in zip(spaces.values(), files, strict=True)
        ]
        return (_Space * len(rows))(*rows), files

    # -- for who wants bytes moved -------------------------------------------------------------------------------------

    def begin(
        self,
        number: int,
        move: Move,
        until: int,
        after: Sequence[int] = (),
        routes: Callable[[range], tuple[int, int]] = lambda layers: (0, 0),
    ) -> None:
        """Begin a move that ends by `until`, in nanoseconds. `number`: what it is known by; no other has it.

        `after`: CUevents that copies of a GPU come behind, and which live until the move has ended; `routes(layers)`:
        their ways, without checksums and with.
        """
        layout = self._layout
        ways, kept = self._ways(move.ways)
        layers = move.groups or (range(layout.n_layers),)
        groups = (_Group * len(layers))()
        for n, some in enumerate(layers):
            begin, end = layout.layer_bounds[some.start][0], layout.layer_bounds[some.stop - 1][1]
            spans = (*layout.read_span(some), *layout.read_span(some, alone=True))
            groups[n] = _Group(some.start, some.stop, begin, end, *spans, *routes(some))
        events = np.array(after, np.uint64)
        checked(
            self._library.move_begin(
                *(self._open(), number, int(move.priority), until, ctypes.addressof(ways), len(ways)),
                *(ctypes.addressof(groups), len(groups), address(events) if len(events) else None, len(events)),
                move.open,
            ),
            "begin",
        )
        del kept

    def extend(self, move: int, ways: Sequence[Way], *, last: bool) -> None:
        """More ways of a load that was begun open."""
        table, kept = self._ways(ways)
        answer = self._library.move_extend(self._open(), move, ctypes.addressof(table), len(ways), last)
        del kept
        checked(answer, "extend")

    def _ways(self, ways: Sequence[Way]) -> tuple[Any, list[Any]]:
        """Ways for the library, and the arrays that they point into."""
        table, kept = (_Way * len(ways))(), []
        for n, way in enumerate(ways):
            arrays = [way.sources, way.targets, way.places, way.sums]
            flat = [None if a is None else np.ascontiguousarray(a) for a in arrays]
            kept.append(flat)
            through = self._numbers[way.through] if way.through and way.places is not None else -1
            table[n] = _Way(
                *(self._numbers[way.source], self._numbers[way.target], through, 0, len(way)),
                *(0 if a is None or not a.size else address(a) for a in flat),
            )
        return table, kept

    def cancel(self, move: int) -> None:
        """Copy no further into the planes. Of a move that nobody knows any more nothing is left to copy."""
        answer = self._library.move_cancel(self._open(), move)
        if answer != -errno.ENOENT:
            checked(answer, "cancel")

    def wait(self, move: int, until: int, group: int = -1, *, kept: bool = False) -> int | None:
        """Wait until all copies of a group are done, or queued on a GPU, or never will be; or with -1, until the move
        has ended. The point behind what is queued, or 0; None at `until`, or at once where that is 0.

        Whoever waits long asks again every 100 ms, so that signals are heard. `kept`: the interpreter's lock is.
        """
        point = ctypes.c_int64()
        wait = self._library.move_wait_kept if kept or not until else self._library.move_wait
        answer = wait(self._open(), move, group, until, ctypes.addressof(point))
        if answer == -errno.ENOENT:
            return 0  # nobody knows it any more: it was over
        return point.value if checked(answer, "wait") else None

    def outcome(self, move: int, rows: int) -> MoveOutcome:
        """How a move of so many rows has ended; nothing is kept of it but late I/O."""
        statuses, late = np.empty(rows, np.uint8), np.empty(rows, np.int32)
        errors = np.empty((rows, 2), np.int32)
        counts, why = (ctypes.c_int64 * 2)(), ctypes.create_string_buffer(200)
        broken = checked(
            self._library.move_outcome(
                *(self._open(), move, address(statuses), rows, address(errors), ctypes.addressof(counts)),
                *(address(late), ctypes.addressof(counts) + 8, rows, ctypes.addressof(why), len(why)),
            ),
            "outcome",
        )
        checked(self._library.move_forget(self._open(), move), "forget")
        return MoveOutcome(
            statuses, errors[: counts[0]], late[: counts[1]], why.value.decode(errors="replace") if broken else ""
        )

    def refuse(self, status: int) -> None:
        """From now on no read begins: its pages have this verdict, a place in `PageStatus`; 0: reads begin again."""
        checked(self._library.refuse(self._open(), status), "refuse")

    def take_late(self, until: int, most: int = 256) -> list[tuple[int, int]] | None:
        """(move, row) of late pages whose I/O has ended at last; waits for one. None behind `stop`."""
        found = np.empty((most, 2), np.int64)
        answer = self._library.take_late(self._open(), until, address(found), most)
        if answer == -errno.ECANCELED:
            return None
        return [(move, row) for move, row in found[: checked(answer, "late")].tolist()]

    def held_slots(self) -> int:
        """Slots of the reserve that late reads hold."""
        return 0 if self._handle is None else int(self._library.held_slots(self._handle))

    def free_slots(self) -> int:
        """Slots of the reserve that nobody has."""
        return int(self._library.free_slots(self._open()))

    def trace(self) -> None:
        """Keep from now on what our threads do, until somebody takes it."""
        checked(self._library.trace(self._open()), "trace")

    def take_spans(self, most: int = 4096) -> Spans:
        """`SPAN`s that have ended since the last call."""
        spans = np.empty(most, SPAN)
        return spans[: checked(self._library.take_spans(self._open(), address(spans), most), "spans")]

    # -- for who moves what is foreign ---------------------------------------------------------------------------------

    def take_io(self, until: int) -> IoJob | None:
        """The next foreign I/O, which waits until then; None when there is none. Raises `NativeCallError` (ECANCELED)
        behind `stop`."""
        job = _Io()
        if not checked(self._library.take_io(self._open(), until, ctypes.addressof(job)), "take"):
            return None
        return IoJob(
            *(job.id, job.move, bool(job.write), self._names[job.files], self._names[job.memory]),
            *(range(job.first, job.last), job.start, job.stop),
            self._pages(job.pages, job.count),
        )

    def take_copy(self, until: int) -> CopyJob | None:
        """The next foreign copy; as `take_io`."""
        job = _Copy()
        if not checked(self._library.take_copy(self._open(), until, ctypes.addressof(job)), "take"):
            return None
        blocks = np.empty((0, self.page_blocks), np.int64)
        if job.kind in (SCATTER, GATHER):
            raw = ctypes.string_at(job.blocks, 8 * job.count * self.page_blocks)
            blocks = np.frombuffer(raw, np.int64).reshape(job.count, self.page_blocks)
        return CopyJob(
            *(job.id, job.move, job.kind, self._names[job.memory], range(job.first, job.last), bool(job.sums)),
            range(job.window, job.window + job.window_slots),
            *(self._pages(job.pages, job.count), blocks),
        )

    def _pages(self, at: int, count: int) -> Pages:
        return np.frombuffer(ctypes.string_at(at, PAGE.itemsize * count), PAGE)

    def io_ended(self, job: int, pages: Sequence[int] | npt.NDArray[np.int64], error: int = 0) -> None:
        """Pages of a job have ended, by their places in it: well, or with `SHORT` or an errno."""
        ends = np.empty((len(pages), 2), np.int32)
        ends[:, 0], ends[:, 1] = pages, error
        checked(self._library.io_ended(self._open(), job, address(ends) if len(ends) else None, len(ends)), "ended")

    def copy_queued(self, job: int, point: int) -> None:
        """A copy is queued, up to a point."""
        checked(self._library.copy_queued(self._open(), job, point), "queued")

    def copy_ended(self, job: int, sums: Checksums | None, *, broken: str = "") -> None:
        """A copy is done, or broken by something. `sums`: uint64 (pages, layers), where they were asked for."""
        kept = None if sums is None else np.ascontiguousarray(sums, np.uint64)
        at = None if kept is None or not kept.size else address(kept)
        checked(self._library.copy_ended(self._open(), job, at, broken.encode() or None), "ended")

    def expire(self, now: int) -> None:
        """It is `now`, in nanoseconds: what has not ended by its deadline is late."""
        checked(self._library.expire(self._open(), now), "expire")

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Nobody waits in a call any more, and nobody will."""
        self._library.executor_stop(self._open())

    def close(self) -> None:
        """Wait for what our threads have under way, and give everything back. No call may be in progress."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.executor_close(handle)
            self._kept.clear()  # who still knows us keeps no tier's memory
            self._kept_files.clear()

    def _open(self) -> int:
        if self._handle is None:
            raise NativeCallError("the executor was closed", "use it before close")
        return self._handle
