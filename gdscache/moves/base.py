"""A move says, as plain data, which bytes go where. An executor carries it out. Steps wait, whoever drives them.

What decides (a store's plan, the writer to the SSD) is written as *steps*: a generator that begins moves and yields
what it waits for. It knows no thread, no clock and no transport. Threads drive it in an engine, virtual time in a
replay.

A move names the spaces that its bytes lie in: `planes` (the GPU pool, or attached planes), a memory of extents (`cpu`,
`bounce`), or the files of a tier (`ssd`). Both ends of every page are pinned by whoever made the move, until its end;
those of a page that is late, until `Moving.on_end` says that nothing touches them any more.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from gdscache.arrays import Int64Array
from gdscache.pages.checksum import Checksums
from gdscache.runtime.threads import Flag, failure_of

if TYPE_CHECKING:
    import threading

    from gdscache.cuda.streams import Event, Landed
    from gdscache.errors import StorageError
    from gdscache.index.free_slots import SlotPool

PLANES = "planes"
_T = TypeVar("_T")


class PageStatus(enum.Enum):
    """How a page of a load ended."""

    PENDING = "pending"
    LOADED = "loaded"
    CHECKSUM = "checksum"  # the bytes are not what was stored
    SHORT_READ = "short_read"
    IO_ERROR = "io_error"
    GONE = "gone"  # it is not where its tier keeps it
    DEADLINE = "deadline"
    SWITCHED_OFF = "switched_off"  # the SSD tier is: too much of its I/O hangs, or fails
    LOCK_LOST = "lock_lost"  # the SSD tier has stopped: its directory is not ours alone any more
    CANCELLED = "cancelled"
    ABORTED = "aborted"  # the load itself broke off; see its exception
    RANK_AWAY = "rank_away"  # one of several ranks does not answer for now
    RANK_LOST = "rank_lost"  # ... or has ended


class Priority(enum.IntEnum):
    """What a move is for. The smaller goes first where both wait for the same device."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2  # out of the planes
    DEMOTION = 3  # from memory to files


# Ways, moves and ends are not changed once made; `frozen` would take three to five times as long to make.


@dataclasses.dataclass(slots=True, eq=False)
class Way:
    """Pages that go from one space to another. `sources` and `targets` are int64.

    Their shape is (pages,), slots of the space; for `planes` it is (pages, blocks_per_page), block indices.

    On their way from files into the planes pages are read into `places` of the memory `through`, int64 (pages,), where
    they stay; without `places` they pass through memory that the executor finds. `sums`: what the bytes have to give,
    uint64 (pages, layers); None where they are known to be right, and need no look.
    """

    source: str
    target: str
    sources: Int64Array
    targets: Int64Array
    through: str = ""
    places: Int64Array | None = None
    sums: Checksums | None = None

    def __len__(self) -> int:
        return len(self.sources)


@dataclasses.dataclass(slots=True, eq=False)
class Move:
    """Pages that move together: plain data that can be pickled. A page's row is its place in `ways`, counted through.

    `seconds`: how long its I/O may take from its begin; `math.inf` is for ever. A page that takes longer is late.
    `groups`: the layers that move together, in their order; all at once where there are none. `number`: what a timeline
    knows it by. `open`: a load to which more ways come (`Moving.extend`): it ends, and its layers are there, when the
    last of them has come, and not before.
    """

    priority: Priority
    ways: tuple[Way, ...]
    seconds: float
    groups: tuple[range, ...] = ()
    number: int = 0
    open: bool = False

    def __len__(self) -> int:
        """Pages."""
        return sum(map(len, self.ways))


class Spent(NamedTuple):
    """What a move took where it was carried out. `waited`: when it came there, its blocks were still used."""

    seconds: float
    waited: bool


@dataclasses.dataclass(slots=True, eq=False)
class End:
    """How a move ended: the rows whose I/O failed, each with its error, and those whose I/O had not ended in time.

    `error`: what broke a load off, whose late pages have to be kept all the same. A store's end raises it.
    `spent`: of a load that other processes carry out, when they come to it.
    """

    errors: Mapping[int, StorageError] = dataclasses.field(default_factory=dict)
    late: Sequence[int] = ()
    error: BaseException | None = None
    spent: Spent | None = None


class Wait(Protocol):
    """Something that happens once. Its executor knows how to wait for it."""


Steps = Generator[Wait, None, _T]


class Listener(Protocol):
    """Who is told how a load or a prefetch gets on, by whoever drives it. `rows`: its own names of the move's rows."""

    @property
    def rows(self) -> Int64Array: ...

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        """The verdict on pages, by their rows; one a page. `LOADED`: the bytes are what `sums` says."""
        ...

    def ready(self, layers: range, event: Event) -> None:
        """The copies of these layers are queued, and done when `event` is (None: they are done). May be said again."""
        ...


class Moving(Protocol):
    """A move under way.

    `lands(layer, seconds)` waits until a load's copies of a layer are queued, or never will be, and is None when that
    takes longer; of a store, until what reads its sources is. None where only the listener, or its end, says so.
    """

    lands: Callable[[int, float], Landed | None] | None

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        """More ways of a load that was begun open: their rows come behind those that it has. `last`: these are all."""
        ...

    def cancel(self) -> None:
        """Copy no further; what is being read is still brought to its end. For loads."""
        ...

    def end(self) -> Steps[End]:
        """Wait until every page has ended or is late, and everything that was queued is copied. To be run once."""
        ...

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(row)` for each page, once, when nothing touches its places any more; perhaps at once."""
        ...


class Lane(Protocol):
    """Runs steps in the order in which they come, as many at a time as it has threads."""

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        """Have steps run. Where they raise, that goes to the log, and those of `lost()` end what waits for them.

        Raises `EngineClosedError` behind `close`.
        """
        ...

    def close(self) -> None:
        """Wait until what was started has ended. Again is fine."""
        ...


Orders = Callable[[Sequence[Any], Sequence[tuple[int, int]], Mapping[str, Any]], bytes]


class Executor(Protocol):
    """Carries moves out. Only what it returns is waited for, and only by the steps that yield it.

    A move out of the planes leaves the checksums of what it copied with the target's slots (`checksums`). `orders`:
    what makes of a load's moves what ranks are told (`LayerwiseLoad.order`), where ranks carry them out.
    """

    @property
    def orders(self) -> Orders | None: ...

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> Lane:
        """A new lane for steps whose moves have this priority.

        `rest()` follows each of them when they have ended, where nobody waits for it.
        """
        ...

    def finish(self, steps: Steps[_T]) -> _T:
        """Drive steps to their end while the caller waits."""
        ...

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        """Begin a move, whose copies wait for the events `after`; returns at once.

        `listener`: for loads and prefetches, which have one.
        """
        ...

    def room(self, pool: SlotPool, seconds: float = math.inf) -> Wait:
        """That a slot of a pool is free, for so long. It may end before, so that who waits looks around."""
        ...

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        """That `over()` holds, which is asked for under `condition`; for so many seconds at most."""
        ...

    def now(self) -> float:
        """Seconds, of the clock that deadlines are told by."""
        ...

    def reads_queued(self) -> Event:
        """An event behind all reads of the planes that stores have queued so far."""
        ...

    def happened(self, event: Event) -> Wait:
        """An event."""
        ...

    def pause(self, changed: Flag, seconds: float) -> None:
        """Wait for `changed`, for up to `seconds`: for calls that wait until steps have ended."""
        ...

    def behind(self, after: object) -> Event:
        """What a load comes behind, for who gave `after`; None is the current stream's work. Raises
        `InvalidValueError`."""
        ...

    def mark(self, after: object) -> Event:
        """What a store comes behind: `behind`, or what stands for it."""
        ...

    def passed(self, mark: Event) -> None:
        """No move comes behind it any more."""
        ...

    def checksums(self, space: str, slots: Sequence[int] | Int64Array) -> Checksums:
        """Those of the bytes in slots of a memory. uint64 of shape (slots, layers), a copy."""
        ...


def failure(steps: Steps[object]) -> Steps[BaseException | None]:
    """What steps raise, if they do: for steps behind which others wait."""
    try:
        yield from steps
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, others wait for what comes behind it
        failure_of(steps.close)  # where it was not they who raised it: else they would end when the error is forgotten
        return error
    return None
