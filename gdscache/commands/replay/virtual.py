"""The replay's executor: moves take the time of a machine's model, and no byte is moved."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.commands.replay.clock import Clock, DiskModel, Done, MachineModel, Pipe, Process
from gdscache.index.free_slots import SlotShare
from gdscache.moves import PLANES, End, Listener, Move, Moving, PageStatus, Priority, Steps, Way
from gdscache.pages.checksum import Checksums
from gdscache.runtime.threads import Flag

if TYPE_CHECKING:
    from gdscache.cuda.streams import Event, Landed

_T = TypeVar("_T")
PASSED = (PLANES, "bounce")  # spaces that are no tiers
FILES = ("ssd",)  # spaces on the disk
CHUNK_BYTES = 32 << 20  # of the disk, in one read; it moves on to the planes while the next chunk is read


class VirtualExecutor:
    """Moves in virtual time. `read` and `written` count moved pages by space; `promoted` counts pages that loads left
    in memory."""

    def __init__(self, clock: Clock, machine: MachineModel, page_bytes: int, extent_bytes: int) -> None:
        self.clock = clock
        self.disk = DiskModel(clock, machine.ssd_read, machine.ssd_write, machine.latency)
        self.up, self.down = Pipe(clock, machine.link), Pipe(clock, machine.link)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.promoted = 0
        self.page_bytes = page_bytes
        self.extent_bytes = extent_bytes

    @property
    def orders(self) -> None:
        """None: it carries out its own moves."""
        return None

    def behind(self, after: object) -> Event:
        """None: it has no streams."""
        return None

    mark = behind

    def passed(self, mark: Event) -> None:
        """Keeps nothing."""

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> VirtualLane:
        return VirtualLane(self.clock, threads, at_once=priority is not Priority.DEMOTION)

    def finish(self, steps: Steps[_T]) -> _T:
        raise AssertionError("only ranks finish steps in their own thread")

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        return _Moving(self, move, listener)

    def count(self, ways: Iterable[Way]) -> None:
        """Count an ended move's reads and writes by tier."""
        for way in ways:
            pages = len(way)
            if way.through:
                self.promoted += pages
            if way.source not in PASSED:
                self.read[way.source] += pages
            if way.target not in PASSED:
                self.written[way.target] += pages

    def room(self, pool: SlotShare, seconds: float = math.inf) -> Done:
        assert isinstance(pool, VirtualShare), "a pool without virtual time"
        return pool.freed

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Done:
        """No timeout: virtual moves do not hang."""
        assert isinstance(condition, VirtualCondition), "a condition without virtual time"
        return condition.once(over)

    def now(self) -> float:
        return self.clock.now

    def reads_queued(self) -> None:
        """Nothing to do: a gather that has ended has read."""

    def happened(self, event: Event) -> Done:
        return self.clock.past

    def pause(self, changed: Flag, seconds: float) -> None:
        """Run until all moves end."""
        self.clock.run()

    def checksums(self, space: str, slots: Sequence[int] | Int64Array) -> Checksums:
        return np.zeros((len(slots), 0), dtype=np.uint64)


class VirtualShare(SlotShare):
    """A pool that virtual steps can wait for. `freed` fires when slots come back."""

    def __init__(self, clock: Clock, slots: int) -> None:
        super().__init__(slots)
        self._clock = clock
        self.freed = Done(clock)

    def give(self, slots: Sequence[int]) -> None:
        super().give(slots)
        freed, self.freed = self.freed, Done(self._clock)
        freed.fire()


class VirtualCondition(threading.Condition):
    """A condition that virtual steps can wait for."""

    def __init__(self, clock: Clock, lock: threading.RLock) -> None:
        super().__init__(lock)
        self._clock = clock
        self._watched: list[tuple[Callable[[], bool], Done]] = []

    def once(self, over: Callable[[], bool]) -> Done:
        """An event that fires when `over()` holds, tested at each notify."""
        if over():
            return self._clock.past
        done = Done(self._clock)
        self._watched.append((over, done))
        return done

    def notify_all(self) -> None:
        happened = [done for over, done in self._watched if over()]
        self._watched = [watched for watched in self._watched if watched[1] not in happened]
        for done in happened:
            done.fire()


class VirtualLane:
    """Steps in virtual time, at most `threads` at once. `at_once`: they begin within the call; else after the caller,
    which may be in the middle of a decision."""

    def __init__(self, clock: Clock, threads: int, *, at_once: bool) -> None:
        self._clock = clock
        self._at_once = at_once
        self._waiting: deque[Steps[None]] = deque()
        self._idle = threads

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        """As `Lane.start`, but `Clock.run` raises the steps' errors."""
        self._waiting.append(steps)
        if self._idle:
            self._idle -= 1
            if self._at_once:
                self._begin()
            else:
                self._clock.call(self._clock.now, self._begin)

    def _begin(self) -> None:
        self._clock.start(self._serve())

    def _serve(self) -> Process:
        while self._waiting:
            yield from cast(Process, self._waiting.popleft())
        self._idle += 1

    def close(self) -> None:
        """Nothing to close."""


class _Moving:
    """A move whose pages end together: a gather, a write, or a load, which has a `listener` and moves by chunks."""

    lands: Callable[[int, float], Landed | None] | None = None

    def __init__(self, executor: VirtualExecutor, move: Move, listener: Listener | None) -> None:
        self._executor = executor
        self._listener = listener
        self._until = executor.clock.now + move.seconds
        self._ways: list[Way] = []
        self._reads: list[tuple[int, Done]] = []  # of a load: pages, and the end of their read
        self._moved = executor.clock.past
        self.extend(move.ways, last=not move.open)

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        executor, self._last = self._executor, last
        self._ways += ways
        pages = sum(map(len, ways))
        if self._listener is None:
            if ways[0].source == PLANES:
                self._moved = executor.down.move(pages * executor.page_bytes)
            else:
                self._moved = executor.disk.write(pages * executor.extent_bytes)
            return
        on_disk = sum(len(way) for way in ways if way.source in FILES)
        chunk = max(1, CHUNK_BYTES // executor.extent_bytes)
        some = [min(chunk, on_disk - at) for at in range(0, on_disk, chunk)]
        self._reads += [(n, executor.disk.read(n * executor.extent_bytes)) for n in some]
        if there := pages - on_disk:
            self._moved = executor.up.move(there * executor.page_bytes)

    def end(self) -> Steps[End]:
        assert self._last, "the end of a load of which not all is known"
        executor, moved = self._executor, self._moved
        for pages, read in self._reads:
            yield read
            moved = executor.up.move(pages * executor.page_bytes)
        yield moved
        executor.count(self._ways)
        if self._listener is not None:  # the verdicts come with the last byte, and none is late: no move hangs here
            self._listener.judged(np.arange(self._pages), PageStatus.LOADED)
            return End()
        return End(late=range(self._pages) if executor.clock.now > self._until else ())

    def cancel(self) -> None:
        """The move continues."""

    def on_end(self, callback: Callable[[int], None]) -> None:
        for row in range(self._pages):
            callback(row)

    @property
    def _pages(self) -> int:
        return sum(map(len, self._ways))
