"""Threads that drive steps: they wait where the steps wait."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar, cast

from gdscache.moves.base import Priority, Steps
from gdscache.runtime.threads import Workers, failure_of

_T = TypeVar("_T")
NAMES = {  # of the lanes' threads
    Priority.LOAD: "gdscache-load",
    Priority.PREFETCH: "gdscache-prefetch",
    Priority.STORE: "gdscache-gather",
    Priority.DEMOTION: "gdscache-write",
}


class Blocking:
    """What a thread waits for by a call that returns when it has happened."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def drive(steps: Steps[_T]) -> _T:
    """Run steps to their end in this thread, which waits where they wait. What breaks a wait is raised there."""
    with contextlib.closing(steps):
        try:
            wait = next(steps)
            while True:
                error = failure_of(cast(Blocking, wait).wait)
                wait = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            return cast(_T, end.value)


class ThreadLane:
    """Some threads. What steps raise goes to the log."""

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
