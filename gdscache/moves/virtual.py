"""The executor of a replay: moves take the time that a model of the machine says, and no byte is moved."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from gdscache.checksum import Checksums
from gdscache.moves.base import PLANES, End, Move, Moving, Priority, Steps
from gdscache.moves.clock import Clock, Disk, Done, Machine, Pipe, Process
from gdscache.tiers.base import SlotPool

if TYPE_CHECKING:
    import threading

    from gdscache.streams import Event

PASSED = (PLANES, "bounce")  # spaces that are no tiers


class VirtualExecutor:
    """Moves in virtual time. `read` and `written` count the pages that were, by space."""

    def __init__(self, clock: Clock, machine: Machine, page_bytes: int, extent_bytes: int) -> None:
        self.clock = clock
        self.disk = Disk(clock, machine.ssd_read, machine.ssd_write, machine.latency)
        self.up, self.down = Pipe(clock, machine.link), Pipe(clock, machine.link)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._page_bytes = page_bytes
        self._extent_bytes = extent_bytes

    def lane(self, priority: Priority, rest: Callable[[], object]) -> VirtualLane:
        return VirtualLane(self.clock, at_once=priority is Priority.STORE)

    def begin(self, move: Move, after: Sequence[Event] = ()) -> Moving:
        if move.ways[0].source == PLANES:
            return _Moving(self, move, self.down.move(len(move) * self._page_bytes))
        return _Moving(self, move, self.disk.write(len(move) * self._extent_bytes))

    def count(self, move: Move) -> None:
        """A move has ended: count what it read and wrote in tiers."""
        for way in move.ways:
            for space, pages in ((way.source, self.read), (way.target, self.written)):
                if space not in PASSED:
                    pages[space] += len(way)

    def room(self, pool: SlotPool) -> Done:
        assert isinstance(pool, VirtualPool), "a pool that nobody in virtual time can wait for"
        return pool.freed

    def reads_queued(self) -> None:
        """Nothing is queued: a gather that has ended has read."""

    def happened(self, event: Event) -> Done:
        return self.clock.past

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        """Whatever was begun ends."""
        self.clock.run()

    def checksums(self, space: str, slots: Sequence[int]) -> Checksums:
        return np.zeros((len(slots), 0), dtype=np.uint64)


class VirtualPool(SlotPool):
    """A pool that steps in virtual time may wait for. `freed` happens when slots come back."""

    def __init__(self, clock: Clock, slots: range) -> None:
        super().__init__(slots)
        self._clock = clock
        self.freed = Done(clock)

    def give(self, slots: Sequence[int]) -> None:
        super().give(slots)
        freed, self.freed = self.freed, Done(self._clock)
        freed.fire()


class VirtualLane:
    """Steps one after the other. They begin at the time of the call.

    `at_once`: in the call; else behind whoever calls, who may be in the middle of a decision.
    """

    def __init__(self, clock: Clock, *, at_once: bool) -> None:
        self._clock = clock
        self._at_once = at_once
        self._waiting: deque[Steps[None]] = deque()
        self._running = False

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        """As `Lane.start`, but what steps raise comes out of `Clock.run`."""
        self._waiting.append(steps)
        if not self._running:
            self._running = True
            if self._at_once:
                self._begin()
            else:
                self._clock.call(self._clock.now, self._begin)

    def _begin(self) -> None:
        self._clock.start(self._serve())

    def _serve(self) -> Process:
        while self._waiting:
            yield from cast(Process, self._waiting.popleft())
        self._running = False

    def close(self) -> None:
        """Time is over when nothing is left to happen."""


class _Moving:
    """A move that ends all at once. Its pages are late when that is too late: nothing hangs for ever here."""

    read = False
    read_event: Event = None

    def __init__(self, executor: VirtualExecutor, move: Move, done: Done) -> None:
        self._executor = executor
        self._move = move
        self._done = done
        self._begun = executor.clock.now

    def end(self) -> Steps[End]:
        yield self._done
        executor, move = self._executor, self._move
        executor.count(move)
        late = executor.clock.now - self._begun > move.seconds
        return End(late=range(len(move)) if late else ())

    def on_end(self, callback: Callable[[int], None]) -> None:
        _call(callback, range(len(self._move)))


def _call(callback: Callable[[int], None], rows: Iterable[int]) -> None:
    for row in rows:
        callback(row)
