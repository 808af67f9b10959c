"""The executor of an engine: threads that drive steps, over the mover's copies and the transports' I/O."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from gdscache.checksum import Checksums
from gdscache.errors import DeadlineError, StorageError
from gdscache.moves.base import PLANES, End, Lane, Move, Moving, Priority, Steps, Wait
from gdscache.storage.base import Op
from gdscache.streams import Event
from gdscache.threads import Workers
from gdscache.tiers.base import SlotPool
from gdscache.tiers.bounce import Extents
from gdscache.tiers.page_io import PageIO
from gdscache.tiers.slab_io import SlabIO
from gdscache.tiers.transfer import Moved, Mover
from gdscache.timeline import Timeline

NAMES = {Priority.STORE: "gdscache-gather", Priority.DEMOTION: "gdscache-write"}  # of the lanes' threads
_LOOK_S = 1.0  # seconds after which steps that wait for room look around


class ThreadsExecutor:
    """`memories` and `files` are the spaces besides the planes, by name."""

    def __init__(
        self, mover: Mover, memories: Mapping[str, Extents], files: Mapping[str, SlabIO], timeline: Timeline
    ) -> None:
        self._mover = mover
        self._memories = memories
        self._files = files
        self._timeline = timeline

    def lane(self, priority: Priority, rest: Callable[[], object]) -> Lane:
        return _Lane(NAMES[priority], rest)

    def begin(self, move: Move, after: Sequence[Event] = ()) -> Moving:
        if move.ways[0].source == PLANES:
            return _Gather(self._mover, self._memories, move, after, self._timeline)
        return self._write(move)

    def _write(self, move: Move) -> Moving:
        io = self._files[move.ways[0].target]
        slots = np.concatenate([way.targets for way in move.ways])
        ends = [(self._memories[way.source], way.sources) for way in move.ways]
        about = {"pages": len(move), "bytes": len(move) * self._mover.layout.extent_bytes}
        until = time.monotonic() + move.seconds
        with self._timeline.flight("write", "SSD writes", **about) as flight:
            pages = io.transfer(Op.WRITE, slots, ends)
            flight.follow(pages, len(move))
        return _Write(pages, len(move), until)

    def room(self, pool: SlotPool) -> Wait:
        return _Blocking(functools.partial(pool.wait, _LOOK_S))

    def reads_queued(self) -> Event:
        return self._mover.mark_stores()

    def happened(self, event: Event) -> Wait:
        return _Blocking(lambda: None if event is None else event.synchronize())

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        changed.wait(seconds)

    def checksums(self, space: str, slots: Sequence[int]) -> Checksums:
        found: Checksums = self._memories[space].checksums[list(slots)]
        return found


class _Blocking:
    """What a thread waits for by a call that returns when it has happened."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class _Lane:
    """One thread. What steps raise goes to the log."""

    def __init__(self, name: str, rest: Callable[[], object]) -> None:
        self._rest = rest
        self._thread = Workers(1, name)

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        ending = None if lost is None else lambda: self._drive(lost())
        self._thread.submit(functools.partial(self._drive, steps), ending)

    def _drive(self, steps: Steps[None]) -> None:
        """Run steps to their end in this thread, which waits where they wait."""
        for wait in steps:
            cast(_Blocking, wait).wait()
        self._rest()

    def close(self) -> None:
        self._thread.shutdown()


class _Gather:
    """Pages out of the planes, into slots of a memory a way."""

    def __init__(
        self,
        mover: Mover,
        memories: Mapping[str, Extents],
        move: Move,
        after: Sequence[Event],
        timeline: Timeline,
    ) -> None:
        self._mover = mover
        self._memories = memories
        self._move = move
        self._after = after
        self._timeline = timeline
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

    def on_end(self, callback: Callable[[int], None]) -> None:
        for row in range(len(self._move)):
            callback(row)


class _Write:
    """Pages of memories on their way into files."""

    read = False
    read_event: Event = None

    def __init__(self, io: PageIO, pages: int, until: float) -> None:
        self._io = io
        self._pages = pages
        self._until = until
        self._ended: dict[int, StorageError | None] = {}

    def end(self) -> Steps[End]:
        yield _Blocking(self._wait)
        errors = {row: error for row, error in self._ended.items() if error is not None}
        return End(errors, [row for row in range(self._pages) if row not in self._ended])

    def _wait(self) -> None:
        for _ in itertools.repeat(None, 2):  # at the deadline once more, for what has ended by then
            with contextlib.suppress(DeadlineError):
                for row, error in self._io.completions(self._until):
                    self._ended.setdefault(row, error)
                return

    def on_end(self, callback: Callable[[int], None]) -> None:
        self._io.on_end(callback)
