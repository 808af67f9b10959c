"""The executor of an engine: threads that drive steps, over the mover's copies and the transports' I/O."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import numpy as np
import torch

from gdscache.checksum import Checksums
from gdscache.errors import DeadlineError, StorageError
from gdscache.moves.base import PLANES, End, Lane, Listener, Move, Moving, Priority, Steps, Wait
from gdscache.moves.load import LoadMove, Machine
from gdscache.moves.pages import Landing
from gdscache.moves.reads import Ended
from gdscache.storage.base import Op
from gdscache.streams import Event
from gdscache.threads import Workers, failure_of
from gdscache.tiers.base import SlotPool
from gdscache.tiers.page_io import PageIO
from gdscache.tiers.transfer import Moved

_T = TypeVar("_T")
NAMES = {  # of the lanes' threads
    Priority.LOAD: "gdscache-load",
    Priority.PREFETCH: "gdscache-prefetch",
    Priority.STORE: "gdscache-gather",
    Priority.DEMOTION: "gdscache-write",
}
_LOOK_S = 1.0  # seconds after which steps that wait for room look around


class ThreadsExecutor:
    """Moves bytes between the spaces of `machine`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> Lane:
        return _Lane(NAMES[priority], rest, threads)

    def finish(self, steps: Steps[_T]) -> _T:
        return _drive(steps)

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        if listener is not None:
            moving = LoadMove(self.machine, self, move, after, listener)
            moving.first()
            return moving
        if move.ways[0].source == PLANES:
            return _Gather(self.machine, move, after)
        return self._write(move)

    def _write(self, move: Move) -> Moving:
        machine = self.machine
        io = machine.files[move.ways[0].target]
        slots = np.concatenate([way.targets for way in move.ways])
        ends = [(machine.memories[way.source], way.sources) for way in move.ways]
        about = {"pages": len(move), "bytes": len(move) * machine.mover.layout.extent_bytes}
        until = time.monotonic() + move.seconds
        with machine.timeline.flight("write", "SSD writes", **about) as flight:
            pages = io.transfer(Op.WRITE, slots, ends)
            flight.follow(pages, len(move))
        return _Write(pages, len(move), until)

    def room(self, pool: SlotPool, seconds: float = math.inf) -> Wait:
        return _Blocking(functools.partial(pool.wait, max(0.0, min(seconds, _LOOK_S))))

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        def wait() -> None:
            with condition:
                condition.wait_for(over, seconds)

        return _Blocking(wait)

    def landing(self, io: PageIO, ends: Iterator[Ended]) -> Landing:
        return _Landing(ends)

    def copied(self, moved: Moved) -> Wait:
        return _Blocking(moved.synchronize)

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


class _Blocking:
    """What a thread waits for by a call that returns when it has happened."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class _Landing:
    """What an iterator says next, which a thread waits for."""

    __slots__ = ("_ends", "_error", "_word")

    def __init__(self, ends: Iterator[Ended]) -> None:
        self._ends = ends
        self._word: Ended | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        try:
            self._word = next(self._ends, None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is taken
            self._error = error

    def ended(self) -> Ended | None:
        if self._error is not None:
            raise self._error
        return self._word


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
    """Pages out of the planes, into slots of a memory a way."""

    broken = None

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


class _Write:
    """Pages of memories on their way into files."""

    read = False
    read_event: Event = None
    broken = None

    def __init__(self, io: PageIO, pages: int, until: float) -> None:
        self._io = io
        self._pages = pages
        self._until = until
        self._ended: dict[int, StorageError | None] = {}

    def end(self) -> Steps[End]:
        yield _Blocking(self._wait)
        errors = {row: error for row, error in self._ended.items() if error is not None}
        return End(errors, [row for row in range(self._pages) if row not in self._ended])

    def cancel(self) -> None:
        """A write goes on."""

    def _wait(self) -> None:
        for _ in itertools.repeat(None, 2):  # at the deadline once more, for what has ended by then
            with contextlib.suppress(DeadlineError):
                for row, error in self._io.completions(self._until):
                    self._ended.setdefault(row, error)
                return

    def on_end(self, callback: Callable[[int], None]) -> None:
        self._io.on_end(callback)
