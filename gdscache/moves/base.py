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
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from gdscache.checksum import Checksums
from gdscache.tiers.page_io import Positions

if TYPE_CHECKING:
    import threading

    from gdscache.errors import StorageError
    from gdscache.streams import Event
    from gdscache.tiers.base import SlotPool

PLANES = "planes"
_T = TypeVar("_T")


class Priority(enum.IntEnum):
    """What a move is for. The smaller goes first where both wait for the same device."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2  # out of the planes
    DEMOTION = 3  # from memory to files


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Way:
    """Pages that go from one space to another. `sources` and `targets` are int64.

    Their shape is (pages,), slots of the space; for `planes` it is (pages, blocks_per_page), block indices.
    """

    source: str
    target: str
    sources: Positions
    targets: Positions

    def __len__(self) -> int:
        return len(self.sources)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Pages that move together: plain data that can be pickled. A page's row is its place in `ways`, counted through.

    `seconds`: how long its I/O may take from its begin. A page that takes longer is late.
    """

    priority: Priority
    ways: tuple[Way, ...]
    seconds: float

    def __len__(self) -> int:
        """Pages."""
        return sum(map(len, self.ways))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class End:
    """How a move ended: the rows whose I/O failed, each with its error, and those whose I/O had not ended in time."""

    errors: Mapping[int, StorageError] = dataclasses.field(default_factory=dict)
    late: Sequence[int] = ()


class Wait(Protocol):
    """Something that happens once. Its executor knows how to wait for it."""


Steps = Generator[Wait, None, _T]


class Moving(Protocol):
    """A move under way.

    `read`: its sources may be written again once `read_event` has happened (None: now), though it goes on. Where that
    is not known at its begin, `read` is False, and its end says it.
    """

    read: bool
    read_event: Event

    def end(self) -> Steps[End]:
        """Wait until every page has ended or is late. To be run once. Raises what broke the move off."""
        ...

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(row)` for each page, once, when nothing touches its places any more; perhaps at once."""
        ...


class Lane(Protocol):
    """Runs steps one after the other, in the order in which they come."""

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        """Have steps run. Where they raise, that goes to the log, and those of `lost()` end what waits for them.

        Raises `EngineClosedError` behind `close`.
        """
        ...

    def close(self) -> None:
        """Wait until what was started has ended. Again is fine."""
        ...


class Executor(Protocol):
    """Carries moves out. Only what it returns is waited for, and only by the steps that yield it.

    A move out of the planes leaves the checksums of what it copied with the target's slots (`checksums`).
    """

    def lane(self, priority: Priority, rest: Callable[[], object]) -> Lane:
        """A new lane for steps whose moves have this priority.

        `rest()` follows each of them when they have ended, where nobody waits for it.
        """
        ...

    def begin(self, move: Move, after: Sequence[Event] = ()) -> Moving:
        """Begin a move, whose copies wait for the events `after`; returns at once. Raises what the transport raises."""
        ...

    def room(self, pool: SlotPool) -> Wait:
        """That a slot of a pool is free. It may end a second later without one, so that who waits looks around."""
        ...

    def reads_queued(self) -> Event:
        """An event behind all reads of the planes that stores have queued so far."""
        ...

    def happened(self, event: Event) -> Wait:
        """An event."""
        ...

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        """Wait for `changed`, which is held, for up to `seconds`: for calls that wait until steps have ended."""
        ...

    def checksums(self, space: str, slots: Sequence[int]) -> Checksums:
        """Those of the bytes in slots of a memory. uint64 of shape (slots, layers), a copy."""
        ...


def failure(steps: Steps[object]) -> Steps[BaseException | None]:
    """What steps raise, if they do: for steps behind which others wait."""
    try:
        yield from steps
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, others wait for what comes behind it
        return error
    return None
