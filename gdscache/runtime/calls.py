"""The public calls of an engine: who may make one, and what becomes of the engine where one is broken off.

Ctrl-C raises `KeyboardInterrupt` in the main thread behind any call or jump. A call that changes the engine and is
broken off there may leave an index half changed. So such a call is a `with` block of `Calls`: what a signal's handler
raises in it ends the engine, and a thread of the engine's closes it. A call that only waits is no such block: its wait
ends, and the engine goes on.

An engine belongs to the process that opened it: a forked child has its memory, and none of its threads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar

from gdscache.errors import CallInCallError, EngineClosedError, ForkedProcessError
from gdscache.runtime.awaiting import EventDescriptor, LoopReaders
from gdscache.runtime.threads import Flag, failure_of, log_failure, start

_UNDONE_S = 5.0  # seconds that the caller of an open that is interrupted waits until the engine is closed again
_T = TypeVar("_T")


class Caller(Protocol):
    """What handles need of `Calls`. As a `with` block: around what changes the engine. `broken_by`: what broke such a
    call off."""

    broken_by: str

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self) -> None:
        """Raises `ForkedProcessError` in a forked child."""

    def ended(self) -> None:
        """A handle's work has ended."""

    def post(self, work: Callable[[], object]) -> None:
        """Have something done; nobody waits for it."""

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        """Wait in an event loop until a handle's flag is set: see `LoopReaders.until`."""
        ...


class Direct(contextlib.nullcontext[None]):
    """For managers without an engine."""

    broken_by = ""

    def check(self) -> None:
        """There is nothing to check."""

    def ended(self) -> None:
        """There is nobody to tell."""

    def post(self, work: Callable[[], object]) -> None:
        work()

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        return await LoopReaders().until(flag, seconds)


class Calls:
    """The public calls of one engine, and the process that they belong to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.broken_by = ""  # what broke a call off that changes the engine
        self.closing: Callable[[], object] | None = None  # closes the engine behind such a call, once it is open
        self._main = threading.main_thread().ident
        self._inside: FrameType | None = None  # that of the main thread's call that changes the engine
        self._asked: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._over = Flag()
        self._thread = threading.Thread(
            target=_serve, args=(self._asked, self._over), name="gdscache-calls", daemon=True
        )
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()
        self._bell: EventDescriptor | None = None  # once somebody asked for it
        self._bell_lock = threading.Lock()
        self._readers = LoopReaders()

    # -- who may call --------------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that the engine belongs to."""
        return os.getpid() != self.pid

    def check(self) -> None:
        """Raises `ForkedProcessError` in a forked child."""
        if os.getpid() != self.pid:
            raise ForkedProcessError(
                f"this engine belongs to process {self.pid}, of which process {os.getpid()} is a fork",
                "open an engine in the child, with an ssd.path of its own, or send requests to its owner",
                self.pid,
            )

    def check_whole(self) -> None:
        """`check`; raises `EngineClosedError` where a call was broken off."""
        if os.getpid() != self.pid:
            self.check()
        if self.broken_by:
            self._close_soon()  # again is fine: an interrupt may have come before it
            raise EngineClosedError(
                f"a call was interrupted by {self.broken_by} while it changed the engine, which is closed",
                "open the engine anew with CacheEngine.from_config",
            )

    # -- calls that change the engine ----------------------------------------------------------------------------------

    def __enter__(self) -> None:
        self.check_whole()
        if threading.get_ident() == self._main:
            if self._inside is not None:
                self._refuse()
            self._inside = sys._getframe(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (signal := _by_signal(error, sys._getframe(1))) is not None:
            self._break(type(signal).__name__)
        if threading.get_ident() == self._main:
            self._inside = None  # last: a second interrupt before this is found by the next call

    @property
    def inside(self) -> bool:
        """Whether this thread is in the middle of a call that changes the engine, as a signal's handler may be."""
        return threading.get_ident() == self._main and _is_above(self._inside, sys._getframe(1))

    def _refuse(self) -> None:
        """A call of this thread has begun and not ended: a handler calls in the middle of it, or it was broken off."""
        if self.inside:
            raise CallInCallError(
                "the engine was called in the middle of another call of the same thread",
                "have a signal's handler note the signal, and call the engine behind the call that it interrupts",
            )
        self._break("two signals")
        self._inside = None
        self.check_whole()

    def _break(self, by: str) -> None:
        self.broken_by = self.broken_by or by
        self._close_soon()

    def _close_soon(self) -> None:
        closing = self.closing
        if closing is not None:
            self._asked.put(closing)

    # -- what the thread does ------------------------------------------------------------------------------------------

    def open(self, work: Callable[[], _T]) -> _T:
        """What `work()` answers or raises, which opens the engine and sets `closing`, done by the thread.

        Where the caller is interrupted, the engine is closed behind it, and the thread ends.
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
            self._asked.put(self._close_opened)
            self._asked.put(None)
            if self._thread.is_alive():
                self._over.wait(_UNDONE_S)
            raise

    def _close_opened(self) -> None:
        if self.closing is not None:
            self.closing()

    def post(self, work: Callable[[], object]) -> None:
        """Have something done behind what was asked so far; nobody waits for it."""
        self._asked.put(work)

    def watch(self, handle: object, dead: Callable[[], object]) -> Callable[[], object]:
        """Have `dead()` done when nobody has `handle` any more; what takes that back."""
        number = next(self._numbers)
        died = functools.partial(_died, self._watched, number, dead)
        # It dies in any thread, in the middle of anything: `put` is no line of Python that could be interrupted.
        self._watched[number] = weakref.ref(handle, functools.partial(self._asked.put, died))
        return functools.partial(self._watched.pop, number, None)

    def end(self) -> None:
        """End the thread behind what it was asked so far. What is asked later is not done."""
        self.closing = None  # it knows the parts
        self._asked.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended, which it does not for itself; False when `seconds` pass before."""
        if self.here:
            return True
        over = self._over.wait(seconds)
        if over:
            self._thread.join()
        return over

    @property
    def here(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    # -- descriptors of what has ended ------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable when a handle's work has ended since it was read. Raises `IOFailedError` where
        the process may open no more."""
        self.check()
        with self._bell_lock:
            if self._bell is None:
                self._bell = EventDescriptor()
            return self._bell.fileno()

    def ended(self) -> None:
        """A handle's work has ended."""
        bell = self._bell
        if bell is not None:
            bell.ring()

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        """Wait in an event loop until a handle's flag is set: see `LoopReaders.until`."""
        self.check()
        return await self._readers.until(flag, seconds)

    def close_bells(self) -> None:
        """Nothing ends any more: give the descriptors back, and end all awaits."""
        with self._bell_lock:
            if self._bell is not None:
                self._bell.close()
        self._readers.close()


def _is_above(frame: FrameType | None, below: FrameType | None) -> bool:
    """Whether a frame is `below`, or one that has called it."""
    while below is not None and below is not frame:
        below = below.f_back
    return below is not None


def _by_signal(error: BaseException, frame: FrameType) -> BaseException | None:
    """What a signal has raised in a block of `frame`, if one has: `error`, or what that was raised behind. What the
    callers of `frame` were about to handle came before."""
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
    """Whether a signal's handler raised it: Python gives a handler the frame that it interrupts. One that drops that
    argument before it raises is not known."""
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
        del work  # nothing here keeps an engine alive
    over.set()
