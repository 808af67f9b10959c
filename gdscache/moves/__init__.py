"""The contract of moves. A move says, as plain data, which bytes go where; an executor carries it out.

Code that decides (a store's plan, the writer to the SSD) is written as *steps*: a generator that begins moves and
yields waits. It knows no thread, clock or transport. Threads drive it in an engine, virtual time in a replay.

A move names the spaces of its bytes: `planes` (the GPU pool, or attached planes), a memory of extents (`cpu`,
`bounce`), or the files of a tier (`ssd`). The caller pins both ends of every page until the move's end, and of a late
page until `Moving.on_end` calls back.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from gdscache.arrays import Int64Array
from gdscache.pages.checksum import Checksums
from gdscache.runtime.threads import Flag, failure_of

if TYPE_CHECKING:
    import threading

    from gdscache.cuda.streams import Event, Landed
    from gdscache.errors import StorageError
    from gdscache.index.free_slots import SlotShare

PLANES = "planes"
_T = TypeVar("_T")


class PageStatus(enum.Enum):
    """How a page of a load ended."""

    PENDING = "pending"
    LOADED = "loaded"
    CHECKSUM = "checksum"  # the bytes do not match the stored checksum
    SHORT_READ = "short_read"
    IO_ERROR = "io_error"
    GONE = "gone"  # its tier does not have it where the index says
    DEADLINE = "deadline"
    SWITCHED_OFF = "switched_off"  # the SSD tier is off: too much of its I/O hangs or fails
    LOCK_LOST = "lock_lost"  # the SSD tier has stopped: another process may use its directory
    CANCELLED = "cancelled"
    ABORTED = "aborted"  # the load raised; see its exception
    UNFIT = "unfit"  # of a store: the page does not fit into a packed extent
    RANK_AWAY = "rank_away"  # a rank does not answer for now
    RANK_LOST = "rank_lost"  # a rank has ended


class PrefetchEnd(enum.Enum):
    """The first cause that ended a prefetch."""

    COMPLETE = "complete"  # all pages that the lookup found are in the CPU tier or faster
    STOPPED = "stopped"  # the time of a `wait` was up
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # `wait(None)` gave up after `deadline`, or the time of its pins was up
    QUOTA = "quota"  # unused prefetched pages hold their share of the CPU tier
    QUEUE_FULL = "queue_full"  # too many prefetches were under way or waited (`prefetch.queue.MOST`)
    NO_ROOM = "no_room"  # every slot of the CPU tier is leased, or of this prefix; or pins hold their share of the tier
    MISSING = "missing"  # the next page left the SSD meanwhile, or I/O that hangs hides it
    ERROR = "error"  # a page could not be read, or was bad
    CLOSED = "closed"


class Priority(enum.IntEnum):
    """The purpose of a move. The smaller number goes first where two moves wait for the same device."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2  # out of the planes
    DEMOTION = 3  # from memory to files


# Ways, moves and ends are not changed once made; `frozen` would take three to five times as long to make.


@dataclasses.dataclass(slots=True, eq=False)
class Way:
    """Pages that go from one space to another.

    `sources` and `targets` are int64: slots, shape (pages,), or for `planes` block indices, shape (pages,
    blocks_per_page).

    Pages from files into the planes are read into slots `places` of the memory `through`, int64 (pages,), where they
    stay; without `places` they pass through memory that the executor finds. `sums`: the expected checksums, uint64
    (pages, layers); None where the bytes are verified already.
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
    """Pages that move together: plain data. A page's row counts through all `ways`.

    `seconds`: time for the move's I/O from its begin; a page that takes longer is late; `math.inf` sets no limit.
    `groups`: the layers that move together, in order; empty: all layers at once. `number`: its name in a timeline.
    `open`: a load that `Moving.extend` gives more ways; neither it nor its layers end before the last way has come.
    """

    priority: Priority
    ways: tuple[Way, ...]
    seconds: float
    groups: tuple[range, ...] = ()
    number: int = 0
    open: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.ways))


class Spent(NamedTuple):
    """The time of a move where it was carried out. `waited`: at its begin the blocks were still in use."""

    seconds: float
    waited: bool


@dataclasses.dataclass(slots=True, eq=False)
class End:
    """How a move ended: the rows whose I/O failed, each with its error, and the rows that are late.

    `error`: the failure of a load as a whole; its late pages stay pinned all the same. A store's `end` raises it.
    `spent`: for a load that other processes carried out. `unfit`: rows of a store that do not fit into packed extents.
    """

    errors: Mapping[int, StorageError] = dataclasses.field(default_factory=dict)
    late: Sequence[int] = ()
    error: BaseException | None = None
    spent: Spent | None = None
    unfit: Sequence[int] = ()


class Wait(Protocol):
    """An event that happens once. The executor that made it can wait for it."""


Steps = Generator[Wait, None, _T]


class Listener(Protocol):
    """Hears how a load or a prefetch proceeds. `rows`: the listener's own number for each row of the move."""

    @property
    def rows(self) -> Int64Array: ...

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        """The verdict on pages, by their rows; one verdict a page. `LOADED`: the bytes match `sums`."""
        ...

    def ready(self, layers: range, event: Event) -> None:
        """The copies of these layers are queued, and done when `event` is (None: they are done). May be called
        again."""
        ...


class Moving(Protocol):
    """A move that has begun.

    `lands(layer, seconds)` waits until a load's copies of a layer, or a store's reads of the planes, are queued or
    never will be; None after `seconds`. It is None where only the listener or the move's end tells this.
    """

    lands: Callable[[int, float], Landed | None] | None

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        """Add ways to an open load. Their rows follow the rows that it has. `last`: no more ways follow."""
        ...

    def cancel(self) -> None:
        """Copy no further; reads that have begun still end. For loads."""
        ...

    def end(self) -> Steps[End]:
        """Wait until every page has ended or is late, and all queued copies are done. Run it once."""
        ...

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(row)` once for each page, when nothing touches its places any more; perhaps at once."""
        ...


class Lane(Protocol):
    """Runs steps in the order of their arrival, one at a time on each of its threads."""

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        """Queue steps. If they raise, the error is logged, and the steps of `lost()` end the waits of others.

        Raises `EngineClosedError` after `close`.
        """
        ...

    def close(self) -> None: ...


Orders = Callable[[Any, Sequence[tuple[int, int]], Mapping[str, Any]], bytes]


class Executor(Protocol):
    """Carries moves out. Only steps that yield a `Wait` wait for it.

    A move out of the planes leaves the checksums of its copies with the target's slots (`checksums`). `orders` makes
    the bytes that ranks begin a load with (`LayerwiseLoad.order`); None without ranks.
    """

    @property
    def orders(self) -> Orders | None: ...

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> Lane:
        """A new lane for steps whose moves have this priority. `rest()` is called after each of them, when no caller
        waits any more."""
        ...

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        """Begin a move, whose copies wait for the events `after`; returns at once. Loads and prefetches have a
        `listener`."""
        ...

    def room(self, pool: SlotShare) -> Wait:
        """A wait for a free slot of a pool. It may end early, so check again."""
        ...

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        """A wait until `over()` holds, `seconds` at most. `over` is called under `condition`."""
        ...

    def now(self) -> float: ...

    def reads_queued(self) -> Event: ...

    def happened(self, event: Event) -> Wait: ...

    def pause(self, changed: Flag, seconds: float) -> None: ...

    def behind(self, after: object) -> Event:
        """The event that a load's copies wait for. `after` None: the current stream's work. Raises
        `InvalidValueError`."""
        ...

    def mark(self, after: object) -> Event:
        """`behind` for a store, or a mark that stands for the event."""
        ...

    def passed(self, mark: Event) -> None: ...

    def checksums(self, space: str, slots: Sequence[int] | Int64Array) -> Checksums:
        """The checksums of a memory's slots, uint64 of shape (slots, layers), a copy."""
        ...


def failure(steps: Steps[object]) -> Steps[BaseException | None]:
    try:
        yield from steps
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - others wait for the end, after any error
        # if a wait raised, the steps are still open, and would end only when the error is forgotten
        failure_of(steps.close)
        return error
    return None
