"""The native library (csrc/host has the headers named here). Arrays are contiguous; a wrong type is a `TypeError`.

All that a call refuses is a `NativeCallError` with an errno, and has changed nothing. A call that may wait gives up the
interpreter's lock, and hears signals every 100 ms.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from gdscache.index.table import Columns, PageState
from gdscache.storage.base import Transport

_T = TypeVar("_T", bound=np.generic)
_Buffer = bytes | memoryview | npt.NDArray[Any]
_Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]

CUFILE_ERRORS: int  # cuFile's own errors are greater; what is less is an errno
NEVER: int  # nanoseconds: later than any deadline
SHORT: int  # of I/O that moved too few bytes, in place of an errno
GONE: int  # ... of a page that is not where its files keep it
WRONG: int  # ... of bytes that are not what was stored

def best_arm() -> str:
    """The way of XXH3 that this processor is fastest by: "scalar", "avx2" or "neon"."""

def layer_sums(extents: _UInt64, bounds: _Int64) -> _UInt64:
    """`checksum.layer_checksums` of extents at these addresses in host memory: uint64 (pages, layers).

    `bounds`: int64 (layers, 2), where a layer begins in an extent, and where it ends.
    """

def chained_keys(key: bytes, parent: bytes, data: bytes, step: int) -> list[bytes]:
    """Of each `step` bytes of `data` the BLAKE2b digest (32 bytes), keyed with `key`, of the one before, the first time
    `parent`, and of these bytes."""

def keys_of(key: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """The BLAKE2b digest (32 bytes), keyed with `key`, of each."""

def blocks_fault(blocks: _Int64, limit: int) -> Literal["", "outside", "twice"]:
    """What is wrong with block numbers, which are to be different and within [0, limit)."""

def narrow_tokens(tokens: bytes) -> npt.NDArray[np.uint32] | None:
    """int64 token ids, as their bytes, as uint32; None where one does not fit."""

def trim_heap() -> None:
    """Give memory that is free within the heap back to the system."""

def take_rows(table: npt.NDArray[_T], rows: Any) -> npt.NDArray[_T]:
    """`table[rows]`, for an int64 array or a list of numbers.

    It keeps the interpreter's lock, as the next three do: numpy gives it up for each of these, however small, and who
    gives it up may wait 5 ms to have it again.
    """

def put_rows(table: npt.NDArray[_T], rows: Any, values: npt.NDArray[_T]) -> None:
    """`table[rows] = values`, for arrays of one dtype, of which `values` has a row for each."""

def take_unbound(stored: _UInt64, rows: Any, keys: bytes) -> _UInt64:
    """`checksum.unbound(stored[rows], keys)`; `keys`: 32 bytes a row. Raises `InvalidValueError` for others."""

def bare_loop(
    file: int,
    write: bool,
    nbytes: int,
    piece_bytes: int,
    threads: int,
    memory: int,
    target: int = 0,
    driver: str | None = None,
    context: int = 0,
) -> float:
    """Seconds of a loop over the first `nbytes` of a file: see disk/disk.h. `driver`: the name of CUDA's, and `context`
    its primary context, if `target` is on a GPU. Raises `DeviceError` too."""

def error_text(error: int) -> str:
    """What an error of I/O means: an errno, or one of cuFile's."""

class ReuseSample:
    """When watched keys were used last, and at which ages keys of each class were used again: policies/reuse.h.

    `most`: keys that are known at a time; `round`: pages stored between two conclusions, at least.
    """

    limit: int  # keys with 16 bits below this are watched
    last: int  # time of the last conclusion
    def __init__(self, classes: int, most: int, round: int) -> None: ...
    def __len__(self) -> int:
        """Keys that are known."""

    def due(self, pages: int) -> int:
        """When to ask for a conclusion, in a tier of so many `pages`."""

    def see(self, uses: Sequence[tuple[int, int, int]], stored: bool) -> None:
        """Pages are used, or `stored`: bits, class from now on, time.

        The bits are 64 of the key's, of which `bits >> 36 & 0xFFFF` is below `limit`.
        """

    def take(self) -> tuple[_Int64, _Int64]:
        """What was counted since the last time: int64 (classes + 1), uses that made a page one of a class, and pages
        stored; int64 (classes, ages), uses of pages of a class."""

class LifetimeOrder:
    """The eviction order by lifetimes: `policies.lifetime`, and policies/lifetimes.h. Keys have 32 bytes, parents up
    to 32; others are an `InvalidValueError`. Pages are given as tuples that begin with the key and the other key."""

    STEPS: int  # of a period
    LOTS: int
    SHAPE: tuple[int, int, int, int]  # as `Classes`
    rows: int  # keys that something is known of
    levels: int
    def __init__(self) -> None: ...
    def begin(
        self,
        keys: Sequence[bytes],
        order: Sequence[int] | _Int64,
        sample: ReuseSample,
        learn: Callable[[int, int], tuple[int, list[int], list[int]] | None],
    ) -> None:
        """Start over with the pages `keys[order[0]], ...`. `learn(pages, time)` is asked where a conclusion is due: for
        the lots that have the second lifetimes, and the first and second lifetimes of each class, in steps."""

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None: ...
    def touch_all(self, keys: Sequence[bytes]) -> None: ...
    def evict_all(self, gone: Sequence[tuple[bytes, bytes | None]]) -> None: ...
    def defer_all(self, keys: Sequence[bytes]) -> None: ...
    def hasten(self, key: bytes) -> None: ...
    def is_deferred(self, key: bytes) -> bool: ...
    def walk(self) -> Callable[[], list[bytes]]:
        """Each call gives the next keys, the first to evict first; [] at the end. Not behind a change of the order."""

class LifetimeKeys:
    """What `LifetimeOrder.walk` returns."""

class Victims:
    """The search of `EvictablePages` for pages to evict: bind/index.cc.

    `held`: slots of leased pages at rest. `dirty`: slots of pages that stay. `orders`: those in which a page may be
    deferred.
    """

    chosen: list[bytes]  # the coldest first
    passed: list[bytes]  # passed over for their followers, and not chosen
    def __init__(
        self, held: Collection[int], dirty: Collection[int], pending: PageState, orders: Sequence[LifetimeOrder]
    ) -> None: ...
    def look(
        self, columns: Columns, keys: Iterable[bytes], keep: Collection[bytes], wanted: int, tails_only: bool
    ) -> int:
        """Look at `keys`, the coldest first, until `wanted` pages are chosen, none of `keep`. `tails_only`: none that
        has followers which are not chosen. Returns the number of pages chosen by now."""

def take_out(columns: Columns, keys: Sequence[bytes]) -> tuple[list[tuple[bytes, bytes | None]], list[int]]:
    """Take pages at rest out of the columns, up to the first key that is not at rest. Returns each key with the page
    that has no follower left without it, or None; and the slots. A page goes by its row's parent, whatever its name
    says."""

class LruShadow:
    """LRU in the shadow of another order: policies/shadow.h. Keys and pages as for `LifetimeOrder`.

    `keys`: pages that the tier has, the least recently used first, or `keys[order[0]], ...`. `shift`: it is shown one
    page of 2 ** shift.
    """

    shift: int
    room: int  # the most pages that the tier had in a period
    debt: int  # hits of LRU's, less those of the tier; below 0 where the tier had more
    hits: int  # that LRU had
    left: int  # pages of the tier that LRU has given up
    owed: int  # pages that only LRU still has
    lost: int  # hits that only LRU had
    seen: int  # pages that were asked for: used, or stored
    used: int  # hits of the tier
    spared: int  # pages of `owed` that LRU gave up before any use
    rows: int  # keys that something is known of
    ready: int  # pages in the heap of those that may go
    def __init__(
        self, keys: Sequence[bytes] = (), shift: int = 0, order: Sequence[int] | _Int64 | None = None
    ) -> None: ...
    def __len__(self) -> int:
        """Pages of LRU's."""

    def thinned(self, more: int) -> LruShadow:
        """That of a sample of its keys, one of `2 ** more`, with what was counted so far in that proportion."""

    def insert(self, pages: Sequence[tuple[bytes, bytes]], most: int = ...) -> tuple[int, bool]:
        """The tier stores pages that it lacked: (key, parent), b"" where none is known; up to the first one behind
        which `room` is greater than `most`. How many, and whether it is greater."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """The tier uses pages that it has."""

    def evict(self, keys: Sequence[bytes]) -> None:
        """The tier gives up pages for others."""

    def drop(self, key: bytes) -> None:
        """A page is gone for another reason: LRU would have it no more either."""

    def has_left(self, key: bytes) -> bool: ...
    def followed(self, key: bytes) -> bool:
        """Whether pages of the shadow follow one."""

    def recency(self) -> list[bytes]:
        """The pages of the tier, those that LRU has given up first; else by their last uses, about."""

    def first(self) -> bytes | None:
        """The first of `walk`. However often it is asked while the tier only gives up pages, each is looked at once."""

    def walk(self) -> Callable[[], list[bytes]]:
        """The pages of the tier, in the order in which LRU has given them up and would. As that of `LifetimeOrder`."""

class ShadowKeys:
    """What `LruShadow.walk` returns."""

class HostPlanes:
    """Planes in host memory.

    `planes`: int64 (planes, 4): address, block stride, token stride, row bytes, layer after layer; `first_plane`: int32
    (layers + 1). `packed`: extents are, as docs/format.md has it.
    """

    def __init__(
        self,
        planes: _Int64,
        first_plane: npt.NDArray[np.int32],
        blocks: int,
        block_tokens: int,
        page_blocks: int,
        packed: bool = False,
    ) -> None: ...
    def close(self) -> None:
        """Forget the planes. Again is fine."""

def move_pieces(
    kind: Literal["ring", "threads"] | None,
    workers: int,
    pieces: _Int64,
    *,
    write: bool,
    copied: bool = True,
    cufile: CuFiles | None = None,
    transport: Transport | None = None,
) -> _Int64:
    """Move bytes of files as an executor does, by a disk of its own: io_uring (`ring`), done by at most `workers`
    threads of the kernel, or `workers` threads of the library (`threads`), which with `cufile` move memory of a GPU,
    too; None: the first of them that can be had. `transport`: what they call, whose handles files are then.

    `pieces`: int64 (pieces, 4): descriptor, offset in bytes, address, bytes. `copied`: whether the kernel copies the
    bytes. Returns int64 (pieces, 2): 0 or an error (`error_text`), and the bytes that have moved. Without pieces the
    disk is opened and closed. Raises `RefusedDiskError`, with the errno of the system's answer.
    """

class CuFiles:
    """cuFile (cuda/cufile.h): which files and which memory of a GPU it knows, for disks and executors. Thread-safe.

    Opens cuFile's driver, which may never answer, no more than `add_file` and `add_memory`. `driver`: the name of
    CUDA's; `context`: of the device whose memory it is; `library`: the path of libcufile; `log_folder`: where its log
    goes, None leaves that to its configuration. What a library refuses is told in its words.
    """

    def __init__(self, driver: str, context: int, library: str, log_folder: str | None = None) -> None: ...
    def add_file(self, file: int) -> None:
        """A file by its descriptor, which stays open until `remove_file`."""

    def remove_file(self, file: int) -> None: ...
    def add_memory(self, address: int, nbytes: int) -> None: ...
    def remove_memory(self, address: int) -> None: ...
    def move(self, file: int, offset: int, address: int, nbytes: int, *, write: bool) -> int:
        """Bytes that one call has moved to or from known memory, or an error (`error_text`) below 0."""

    def close(self) -> None:
        """Nobody uses it any more but disks and executors that are open; again is fine."""

class Gpu:
    """To and from a GPU (gpu/gpu.h). `library`: the driver's name; `spec`: see `kernels.gpu.GpuSpec`. Thread-safe.

    What the driver refuses is a `DeviceError`. Points are numbers; behind `close` the GPU is past all of them.
    """

    def __init__(self, library: str, spec: Any) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def api(self) -> str:
        """How lists of copies are handed to the driver."""

    def queue(
        self,
        address: int,
        stride: int,
        extents: int,
        fence: int,
        device: bool,
        pinned: bool,
        slots: _Int64,
        blocks: _Int64,
        after: _UInt64,
        layers: range,
        route: int,
        load: bool,
        sums: bool,
    ) -> tuple[int, int, int]:
        """Queue copies of some slots of extents at `address`: points behind them and behind the last look at their
        source, and a ticket for `finish`, which has to be called where there are `sums`.

        `blocks`: int64 (pages, blocks a page); `after`: CUevents. `route`: 0 staged, 1 zero copy, 2 the copy engine
        alone; memory of the device has one of its own.
        """

    def finish(self, ticket: int) -> _UInt64:
        """Wait for copies with checksums: uint64 (pages, layers). To be asked once."""

    def last(self, *, loads: bool) -> int:
        """The last point of loads, or of stores."""

    def reached(self, point: int) -> bool: ...
    def past(self, point: int) -> bool:
        """`reached`, as far as it is known without asking the driver."""

    def wait(self, point: int) -> None: ...
    def follow(self, stream: int, point: int) -> None:
        """Have a CUstream wait for a point."""

    def close(self) -> None:
        """Wait for what is queued; no executor has it any more. Again is fine."""

class Executor:
    """Moves between spaces (moves/executor.h). See `moves.library.NativeMoves`."""

    def __init__(
        self,
        bounds: _Int64,
        extent_bytes: int,
        page_blocks: int,
        spaces: Mapping[str, Any],
        limits: Any,
        reserve: tuple[str, int, int] | None = None,
        fence: int = 0,
        pool: HostPlanes | None = None,
        gpu: Gpu | None = None,
        disks: Sequence[Any] = (),
        threads: int = 0,
    ) -> None: ...
    @property
    def disk(self) -> str:
        """The first disk: "ring", "threads", "cufile", "transport", or "" without one."""

    @property
    def closed(self) -> bool: ...
    def begin(
        self,
        number: int,
        priority: int,
        until: int,
        ways: Sequence[Any],
        groups: _Int64,
        routes: Callable[[range], tuple[int, int]] | None = None,
        after: _UInt64 | None = None,
        open: bool = False,
    ) -> None: ...
    def extend(self, move: int, ways: Sequence[Any], *, last: bool) -> None:
        """More ways of a load that was begun open."""

    def cancel(self, move: int) -> None:
        """Copy no further into the planes. Of a move that nobody knows any more nothing is left to copy."""

    def wait(self, move: int, seconds: float, group: int = -1) -> int | None:
        """Wait until all copies of a group are done, or queued on a GPU, or never will be; or with -1, until the move
        has ended. The point behind what is queued, or 0; None when it takes longer."""

    def outcome(self, move: int) -> tuple[npt.NDArray[np.uint8], list[tuple[int, int]], list[int], str]:
        """How a move has ended; nothing is kept of it but late I/O. The verdicts, places in `PageStatus`; rows whose
        I/O failed, with `SHORT` or an errno; late rows; what broke a copy, or ""."""

    def refuse(self, status: int) -> None:
        """From now on no read begins: its pages have this verdict, a place in `PageStatus`; 0: reads begin again."""

    def take_late(self, seconds: float, most: int = 256) -> list[tuple[int, int]]:
        """(move, row) of late pages whose I/O has ended at last; waits for one. ECANCELED behind `stop`."""

    def held_slots(self) -> int:
        """Slots of the reserve that late reads hold; none behind `close`."""

    def free_slots(self) -> int:
        """Slots of the reserve that nobody has."""

    def trace(self) -> None:
        """Keep from now on what our threads do, until somebody takes it."""

    def take_spans(self) -> list[tuple[int, range, int, int, int, int, int]]:
        """What has ended since the last call: a place in `SPAN_KINDS`, layers, move, pages, bytes, and when it began
        and ended, in nanoseconds of CLOCK_MONOTONIC."""

    def stop(self) -> None:
        """Nobody waits in a call any more, and nobody will."""

    def close(self) -> None:
        """Wait for what our threads have under way, and give everything back. No call may be in progress."""
