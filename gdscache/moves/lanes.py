"""Threads that drive steps: they wait where the steps wait."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from gdscache.arrays import Int64Array
from gdscache.moves import PLANES, Lane, Orders, Priority, Steps, Wait, Way
from gdscache.native import put_rows, take_rows
from gdscache.runtime.threads import Flag, Workers, failure_of

if TYPE_CHECKING:
    from gdscache.cuda.streams import Event
    from gdscache.extents import Extents, SlotMemory
    from gdscache.index.free_slots import SlotShare
    from gdscache.pages.checksum import Checksums

_T = TypeVar("_T")
_LOOK_S = 1.0  # steps that wait for a slot check again after this time
NAMES = {
    Priority.LOAD: "gdscache-load",
    Priority.PREFETCH: "gdscache-prefetch",
    Priority.STORE: "gdscache-gather",
    Priority.DEMOTION: "gdscache-write",
}


class Blocking:
    """A wait as a call that returns when the event has happened."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def drive(steps: Steps[_T]) -> _T:
    """Run steps to their end in this thread, which waits where they wait. An error of a wait is raised in the steps."""
    with contextlib.closing(steps):
        try:
            wait = next(steps)
            while True:
                error = failure_of(cast(Blocking, wait).wait)
                wait = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            return cast(_T, end.value)


class ThreadLane:
    def __init__(self, name: str, rest: Callable[[], object], threads: int) -> None:
        self._rest = rest
        self._threads = Workers(threads, name)

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        ending = None if lost is None else lambda: self._drive(lost())
        self._threads.submit(functools.partial(self._drive, steps), ending)

    def _drive(self, steps: Steps[None]) -> None:
        drive(steps)
        self._rest()

    def close(self) -> None:
        self._threads.shutdown()


class ThreadDriver:
    """The part of an executor that drives steps by threads, in the system's time, and keeps checksums in the
    `memories`."""

    def __init__(self, memories: Mapping[str, Extents | SlotMemory]) -> None:
        self._memories = memories

    def expect(self, ways: Sequence[Way]) -> None:
        """Note the checksums of pages that are read into a memory to stay there."""
        for way in ways:
            if way.sums is None or way.source in self._memories:
                continue
            space, places = (way.through, way.places) if way.target == PLANES else (way.target, way.targets)
            if places is not None:
                put_rows(self._memories[space].checksums, places, way.sums)

    def checksums(self, space: str, slots: Sequence[int] | Int64Array) -> Checksums:
        return take_rows(self._memories[space].checksums, slots)

    @property
    def orders(self) -> Orders | None:
        """None: no ranks carry its moves out."""
        return None

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> Lane:
        return ThreadLane(NAMES[priority], rest, threads)

    def finish(self, steps: Steps[_T]) -> _T:
        return drive(steps)

    def room(self, pool: SlotShare) -> Wait:
        return Blocking(functools.partial(pool.wait, _LOOK_S))

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        def wait() -> None:
            with condition:
                condition.wait_for(over, seconds)

        return Blocking(wait)

    def now(self) -> float:
        return time.monotonic()

    def happened(self, event: Event) -> Wait:
        return Blocking(lambda: None if event is None else event.synchronize())

    def pause(self, changed: Flag, seconds: float) -> None:
        changed.wait(seconds)
