"""The public calls of an engine: permitted callers, and the engine's end after an interrupted call.

Ctrl-C raises `KeyboardInterrupt` in the main thread behind any call or jump, also where an index is half changed. So a
call that changes the engine is a `with` block of `Calls`: an exception of a signal's handler in it ends the engine, and
a thread of the engine's closes it (docs/design/threads.md). A call that only waits is no such block.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self, TypeVar

from gdscache.errors import CallInCallError, EngineClosedError, ForkedProcessError
from gdscache.runtime.threads import Bell, Flag, failure_of, log_failure, start


async def until(flag: Flag, closed: Flag, seconds: float | None) -> bool:
    """Wait in an event loop until the flag is set; False after `seconds`. Raises `EngineClosedError` if `closed` is set
    and the flag is not."""
    if flag.is_set():
        return True
    waiter = _Waiter(closed)
    try:
        flag.watch(waiter)
        closed.watch(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await waiter.event.wait()
    finally:
        flag.forget(waiter)
        closed.forget(waiter)
    if closed.is_set() and not flag.is_set():
        raise EngineClosedError("the engine was closed meanwhile", "await handles before the engine is closed")
    return flag.is_set()


class _Waiter:
    """One await, in place of a lock among the waiters of its flags."""

    def __init__(self, closed: Flag) -> None:
        self.loop, self.event, self._closed = asyncio.get_running_loop(), asyncio.Event(), closed

    def release(self) -> None:
        """A flag is set. In any thread; repeated calls are fine."""
        try:
            self.loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:  # the loop was closed during the await, which never continues
            self._closed.forget(self)


_UNDONE_S = 5.0  # seconds that an interrupted open waits until the engine is closed again
_T = TypeVar("_T")


class Caller(contextlib.nullcontext[None]):
    """The part of `Calls` that handles use; by itself, for managers without an engine. As a `with` block: around
    changes of the engine. `broken_by`: the exception that interrupted such a call."""

    broken_by = ""

    def check(self) -> None:
        """Raises `ForkedProcessError` in a forked child."""

    def ended(self) -> None:
        """A handle's work has ended."""

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` after the requests so far, without waiting for it."""
        work()

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        """Wait in an event loop until a handle's flag is set: see `until`."""
        return await until(flag, Flag(), seconds)


class Released:
    """A handle whose `with` block ends with `release`; nothing of it is left in a forked child."""

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ForkedProcessError):
            self.release()


class Calls(Caller):
    """The public calls of one engine, and the process that they belong to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.broken_by = ""  # the exception that interrupted a call which changes the engine
        self.closing: Callable[[], object] | None = None  # closes the engine after such a call, once it is open
        self.others: Sequence[Calls] = ()  # of pools that end with this one
        self._main = threading.main_thread().ident
        self._inside: FrameType | None = None  # the frame of the main thread's call that changes the engine
        self._asked: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._over = Flag()
        self._thread = threading.Thread(
            target=_serve, args=(self._asked, self._over), name="gdscache-calls", daemon=True
        )
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()
        self._no_end = Flag()  # set when no handle ends any more, by `end_awaits`
        self.end_awaits = self._no_end.set
        self.bell = Bell()  # rings when a load, a store or a prefetch has ended

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the engine's process."""
        return os.getpid() != self.pid

    def check(self) -> None:
        if os.getpid() != self.pid:
            raise ForkedProcessError(
                f"this engine belongs to process {self.pid}, of which process {os.getpid()} is a fork",
                "open an engine in the child, with an ssd.path of its own, or send requests to its owner",
                self.pid,
            )

    def check_whole(self) -> None:
        """`check`; raises `EngineClosedError` after an interrupted call."""
        if os.getpid() != self.pid:
            self.check()
        if self.broken_by:
            self._close_soon()  # repeated calls are fine; an interrupt may have preceded it
            raise EngineClosedError(
                f"a call was interrupted by {self.broken_by} while it changed the engine, which is closed",
                "open a new one with from_config",
            )

    def __enter__(self) -> None:
        if self.broken_by or os.getpid() != self.pid:
            self.check_whole()
        if threading.get_ident() == self._main:
            if self._inside is not None:
                self._refuse()
            self._inside = sys._getframe(1)

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        if isinstance(error, BaseException) and (signal := _by_signal(error, sys._getframe(1))) is not None:
            self._break(type(signal).__name__)
        if threading.get_ident() == self._main:
            self._inside = None  # last: the next call finds a second interrupt before this

    @property
    def inside(self) -> bool:
        """Whether this thread is inside a call that changes the engine, for example in a signal's handler."""
        return threading.get_ident() == self._main and _is_above(self._inside, sys._getframe(1))

    def _refuse(self) -> None:
        """A call of this thread has begun and not ended: a handler calls inside it, or it was interrupted."""
        if self.inside:
            raise CallInCallError(
                "the engine was called in the middle of another call of the same thread",
                "have a signal's handler note the signal, and call the engine behind the call that it interrupts",
            )
        self._break("two signals")
        self._inside = None
        self.check_whole()

    def _break(self, by: str) -> None:
        for calls in (*self.others, self):  # itself last: a second signal before that is found by the next call
            calls.broken_by = calls.broken_by or by
            calls._close_soon()

    def _close_soon(self) -> None:
        closing = self.closing
        if closing is not None:
            self._asked.put(closing)

    def open(self, work: Callable[[], _T]) -> _T:
        """The result of `work()`, which opens the engine and sets `closing`, run by the thread.

        If the caller is interrupted, the engine is closed after it, and the thread ends.
        """
        answers: list[_T] = []
        errors: list[BaseException] = []
        over = Flag()

        def opened() -> None:
            error = failure_of(lambda: answers.append(work()))
            errors.extend([] if error is None else [error])
            over.set()

        try:
            start([self._thread], self.end)
            self._asked.put(opened)
            over.wait()
            if errors:
                raise errors.pop()
            return answers[0]
        except BaseException:
            self._asked.put(lambda: self.closing and self.closing())
            self._asked.put(None)
            if self._thread.is_alive():
                self._over.wait(_UNDONE_S)
            raise

    def post(self, work: Callable[[], object]) -> None:
        self._asked.put(work)

    def watch(self, handle: object, dead: Callable[[], object]) -> Callable[[], object]:
        """Run `dead()` when `handle` has no owner any more. Returns a function that cancels this."""
        number = next(self._numbers)
        died = functools.partial(_died, self._watched, number, dead)
        # It dies in any thread, at any point: `put` is no Python code that could be interrupted.
        self._watched[number] = weakref.ref(handle, functools.partial(self._asked.put, died))
        return functools.partial(self._watched.pop, number, None)

    def end(self) -> None:
        """End the thread after the requests so far. Later requests are not run."""
        self.closing = None  # it refers to the engine's parts
        self._asked.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended, unless this is the thread; False after `seconds`."""
        if self.here:
            return True
        over = self._over.wait(seconds)
        if over:
            self._thread.join()
        return over

    @property
    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def ended(self) -> None:
        self.bell.ring()

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        self.check()
        return await until(flag, self._no_end, seconds)


def _is_above(frame: FrameType | None, below: FrameType | None) -> bool:
    """Whether a frame is `below`, or a caller of it."""
    while below is not None and below is not frame:
        below = below.f_back
    return below is not None


def _by_signal(error: BaseException, frame: FrameType) -> BaseException | None:
    """The exception of a signal in a block of `frame`: `error`, or one in its context; else None. Exceptions that the
    callers of `frame` were handling came before."""
    found: BaseException | None = error
    while found is not None:
        if not isinstance(found, Exception) or _by_handler(found):
            return found
        found = found.__context__
        caught = None if found is None or found.__traceback__ is None else found.__traceback__.tb_frame
        if caught is not None and _is_above(caught, frame.f_back):
            return None
    return None


def _by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it: Python gives a handler the frame that it interrupts. A handler that drops
    that argument before it raises is not recognised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        given = trace.tb_frame.f_locals.values()
        if any(value is frame or (isinstance(value, tuple) and any(v is frame for v in value)) for value in given):
            return True
    return False


def _died(watched: dict[int, weakref.ref[Any]], number: int, dead: Callable[[], object]) -> None:
    watched.pop(number, None)
    dead()


def _serve(asked: SimpleQueue[Callable[[], object] | None], over: Flag) -> None:
    while (work := asked.get()) is not None:
        log_failure(failure_of(work))
        del work  # keeps no engine alive
    over.set()
