"""An executor for tests: nothing happens until the test says so, so that every order of events can be tried.

What may happen next are the executor's `choices`: a lane goes on whose wait is over, a move lands, a page of it fails,
its deadline passes, late I/O ends at last. Instead of bytes a slot has a tag, which moves copy when they land; so what
lies where a page is said to be can be compared with what was stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdscache.checksum import Checksums
from gdscache.errors import IOFailedError
from gdscache.moves.base import PLANES, End, Move, Priority, Steps, Wait

if TYPE_CHECKING:
    import threading

    from gdscache.errors import StorageError
    from gdscache.streams import Event
    from gdscache.tiers.base import SlotPool

Place = tuple[str, int]  # a space, and a slot of it; of the planes, the first block


class Choice:
    """Something that may happen next. `fault`: it is nothing that a machine in order does."""

    __slots__ = ("do", "fault", "name")

    def __init__(self, name: str, do: Callable[[], object], *, fault: bool = False) -> None:
        self.name = name
        self.do = do
        self.fault = fault

    def __repr__(self) -> str:
        return self.name


class SteppedExecutor:
    """`tags`: what lies where. `choose` picks one of the choices while a call of the caller waits for others."""

    def __init__(self, choose: Callable[[Sequence[Choice]], Choice]) -> None:
        self.tags: dict[Place, Hashable] = {}
        self._choose = choose
        self._lanes: list[_Lane] = []
        self._moving: list[_Moving] = []
        self._numbers = 0

    def choices(self) -> list[Choice]:
        """What may happen now, in a fixed order."""
        found = [choice for lane in self._lanes for choice in lane.choices()]
        for moving in self._moving:
            found += moving.choices()
        return found

    def lane(self, priority: Priority, rest: Callable[[], object]) -> _Lane:
        lane = _Lane(self, priority.name.lower())
        self._lanes.append(lane)
        return lane

    def begin(self, move: Move, after: Sequence[Event] = ()) -> _Moving:
        self._numbers += 1
        moving = _Moving(self, move, self._numbers)
        self._moving.append(moving)
        return moving

    def copy(self, move: Move, row: int) -> None:
        """The bytes of a page of a move are where they go, as they are now."""
        source, target = places(move)[row]
        self.tags[target] = self.tags.get(source)

    def room(self, pool: SlotPool) -> Wait:
        return _When(lambda: pool.free_slots > 0)

    def reads_queued(self) -> Event:
        return None  # a gather that has ended has read

    def happened(self, event: Event) -> Wait:
        return _When(lambda: True)

    def checksums(self, space: str, slots: Sequence[int]) -> Checksums:
        return np.zeros((len(slots), 0), dtype=np.uint64)

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        """One of the choices happens while somebody waits."""
        found = self.choices()
        assert found, "somebody waits, and nothing will ever happen"
        self._choose(found).do()


class _When:
    """A wait that is over when a condition holds."""

    __slots__ = ("over",)

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over = over


class _Lane:
    def __init__(self, executor: SteppedExecutor, name: str) -> None:
        self._executor = executor
        self._name = name
        self._queue: deque[tuple[Steps[None], Callable[[], Steps[None]] | None]] = deque()
        self._wait: _When | None = None

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        self._queue.append((steps, lost))

    def choices(self) -> list[Choice]:
        if not self._queue or (self._wait is not None and not self._wait.over()):
            return []
        return [Choice(f"{self._name} goes on", self._go_on)]

    def _go_on(self) -> None:
        steps, _ = self._queue[0]
        try:
            wait = next(steps)
        except StopIteration:
            self._queue.popleft()
            self._wait = None
            return
        assert isinstance(wait, _When), "a wait of another executor"
        self._wait = wait

    def close(self) -> None:
        while self._queue:
            self._executor.pause(None, 0.0)  # type: ignore[arg-type]


class _Moving:
    """A move of which each page lands, fails or is late."""

    read = False
    read_event: Event = None

    def __init__(self, executor: SteppedExecutor, move: Move, number: int) -> None:
        self._executor = executor
        self._move = move
        self._name = f"move {number}"
        self._left = set(range(len(move)))  # rows that touch their places
        self._errors: dict[int, StorageError] = {}
        self._late: list[int] | None = None  # at the deadline
        self._callbacks: list[Callable[[int], None]] = []

    def choices(self) -> list[Choice]:
        found = []
        files = self._move.ways[0].source != PLANES
        if self._left:
            found.append(Choice(f"{self._name} lands", self._land_all))
            row = min(self._left)
            if files and len(self._left) > 1:
                found.append(Choice(f"page {row} of {self._name} lands", lambda: self._land(row)))
            if files and self._late is None:
                found.append(Choice(f"page {row} of {self._name} fails", lambda: self._fail(row), fault=True))
                found.append(Choice(f"{self._name} is late", self._pass_deadline, fault=True))
        return found

    def _land_all(self) -> None:
        for row in sorted(self._left):
            self._land(row)

    def _land(self, row: int) -> None:
        self._executor.copy(self._move, row)
        self._end_of(row)

    def _fail(self, row: int) -> None:
        self._errors[row] = IOFailedError("injected", "")
        self._end_of(row)

    def _end_of(self, row: int) -> None:
        self._left.discard(row)
        for callback in self._callbacks:
            callback(row)

    def _pass_deadline(self) -> None:
        self._late = sorted(self._left)

    def end(self) -> Steps[End]:
        yield _When(lambda: not self._left or self._late is not None)
        return End(self._errors, tuple(self._late or ()))

    def on_end(self, callback: Callable[[int], None]) -> None:
        self._callbacks.append(callback)
        for row in range(len(self._move)):
            if row not in self._left:
                callback(row)


def places(move: Move) -> list[tuple[Place, Place]]:
    """From where to where each page of a move goes, row by row."""
    found = []
    for way in move.ways:
        for source, target in zip(way.sources.reshape(len(way), -1), way.targets.reshape(len(way), -1), strict=True):
            found.append(((way.source, int(source[0])), (way.target, int(target[0]))))
    return found
