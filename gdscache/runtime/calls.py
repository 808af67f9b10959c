"""Who carries a public call out, since Python interrupts one of the callers.

Ctrl-C raises `KeyboardInterrupt` in the main thread, at any line. A call that is broken off in the middle of an index
leaves it torn, and what it took has no owner. So the main thread holds signals back while it carries out what waits for
nothing (`brief`): they are heard behind it, and what it took is given back where one raises. Of what may wait it only
asks a thread of the engine (`run`), which carries the call out from its begin to its end, and when the caller is gone
by then, takes back what the call took. Other threads are never interrupted and carry their calls out themselves.

An engine belongs to the process that opened it: a forked child has its memory, and none of its threads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from gdscache.errors import ForkedProcessError, IOFailedError
from gdscache.runtime.threads import Flag, failure_of, log_failure, start

_TAKEN_BACK_S = 5.0  # seconds that an interrupted caller waits until what its call took is given back
_T = TypeVar("_T")


class _Held:
    held = False

    def hold(self) -> None: ...
    def release(self) -> None: ...


def signals() -> _Held:
    return _Held()


class Caller(Protocol):
    """What handles need of `Calls`."""

    def check(self) -> None:
        """Raises `ForkedProcessError` in a forked child."""

    def ended(self) -> None:
        """A handle's work has ended."""

    def run(
        self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None, stop: Flag | None = None
    ) -> _T: ...

    def brief(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """`run`, for work that waits for nothing."""
        ...

    def post(self, work: Callable[[], object]) -> None:
        """Have something done; nobody waits for it."""


class Direct:
    """Carries calls out at once in the caller's thread, whichever it is: for managers without an engine."""

    def check(self) -> None:
        """There is nothing to check."""

    def ended(self) -> None:
        """There is nobody to tell."""

    def run(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None, stop: Flag | None = None) -> _T:
        return work()

    def brief(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        return work()

    def post(self, work: Callable[[], object]) -> None:
        work()


class Calls:
    """The public calls of one engine, and the process that they belong to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._asked: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._over = Flag()
        self._thread = threading.Thread(
            target=_serve, args=(self._asked, self._over), name="gdscache-calls", daemon=True
        )
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()
        self._bell = -1  # an eventfd, once somebody asked for it
        self._bell_lock = threading.Lock()
        # As `os.eventfd_write`, with the interpreter's lock: it never waits, and who rings may hold the manager's lock.
        self._ring: Any = ctypes.PyDLL(None).eventfd_write
        self._ring.argtypes = ctypes.c_int, ctypes.c_uint64
        start([self._thread], self.end)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that the engine belongs to."""
        return os.getpid() != self.pid

    @property
    def in_caller(self) -> bool:
        """Whether a call of this thread is carried out in it: nothing interrupts it, or the engine is closed."""
        return threading.current_thread() is not threading.main_thread() or signals().held or self._over.is_set()

    def check(self) -> None:
        """Raises `ForkedProcessError` in a forked child."""
        if self.forked:
            raise ForkedProcessError(
                f"this engine belongs to process {self.pid}, of which process {os.getpid()} is a fork",
                "open an engine in the child, with an ssd.path of its own, or send requests to its owner",
                self.pid,
            )

    def run(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None, stop: Flag | None = None) -> _T:
        """What `work()` returns or raises.

        Where the caller is interrupted, `work` is not begun, or carried out to its end and its answer given to `undo`,
        before the next call. `stop` is set then, for work that waits.
        """
        self.check()
        if self.in_caller:
            return work()
        call = _Call(work)
        try:
            self._asked.put(call)
            if self._over.is_set():
                _refuse(self._asked)
            call.over.wait()
            if call.refused:
                return work()
            return call.answer()
        except BaseException:
            if not call.failed:
                self._break_off(call, undo, stop)
            raise

    def brief(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """`run`, for work that waits for nothing. It is carried out in the caller's thread, whichever it is.

        In the main thread signals are held meanwhile, and heard behind it.
        """
        self.check()
        if threading.current_thread() is not threading.main_thread() or (held := signals()).held:
            return work()
        call = _Call(work)
        try:
            held.hold()
            try:  # nothing interrupts before this, and nothing within it
                call.carry_out()
            finally:
                held.release()
            return call.answer()
        except BaseException:
            if not call.failed:
                self._break_off(call, undo, None)
            raise

    def _break_off(self, call: _Call[_T], undo: Callable[[_T], object] | None, stop: Flag | None) -> None:
        """Nobody waits for a call any more."""
        call.left = True
        if stop is not None:
            stop.set()
        if undo is not None:
            taken_back = _Call(functools.partial(call.take_back, undo))
            self._asked.put(taken_back)
            if self._over.is_set():
                _refuse(self._asked)
            taken_back.over.wait(_TAKEN_BACK_S)

    def fileno(self) -> int:
        """A descriptor that is readable when a handle's work has ended since it was read. Raises `IOFailedError` where
        the process may open no more."""
        self.check()
        with self._bell_lock:
            if self._bell < 0:
                try:
                    self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                except OSError as error:
                    raise IOFailedError(
                        f"no descriptor for fileno(): {error.strerror}", "raise ulimit -n", error.errno
                    ) from error
            return self._bell

    def ended(self) -> None:
        """A handle's work has ended."""
        with self._bell_lock:
            if self._bell >= 0:
                self._ring(self._bell, 1)

    def close_bell(self) -> None:
        """Nothing ends any more: give the descriptor back."""
        with self._bell_lock:
            bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def watch(self, handle: object, dead: Callable[[], object]) -> int:
        """Have `dead()` done when nobody has `handle` any more; a number for `unwatch`."""
        number = next(self._numbers)
        call = _Call(functools.partial(_died, self._watched, number, dead))
        call.unasked = True
        # It dies in any thread, in the middle of anything: `put` is no line of Python that could be interrupted.
        self._watched[number] = weakref.ref(handle, functools.partial(self._asked.put, call))
        return number

    def unwatch(self, number: int) -> None:
        """Nothing is to be done any more when the handle goes."""
        self._watched.pop(number, None)

    def post(self, work: Callable[[], object]) -> None:
        """Have something done behind the calls so far; nobody waits for it."""
        call = _Call(work)
        call.unasked = True
        self._asked.put(call)

    def end(self) -> None:
        """End the thread behind what it was asked so far. What is asked later is done by who asks."""
        self._asked.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended, which it does not for itself; False when `seconds` pass before."""
        if threading.current_thread() is self._thread:
            return True
        over = self._over.wait(seconds)
        if over:
            self._thread.join()
        return over

    @property
    def here(self) -> bool:
        """Whether this is the thread that carries calls out."""
        return threading.current_thread() is self._thread


class _Call(Generic[_T]):
    """A call on its way: what to do, and what came of it. `left`: its caller is gone; `unasked`: it has none."""

    __slots__ = ("_answers", "_error", "_work", "failed", "left", "over", "refused", "unasked")

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work: Callable[[], _T] | None = work
        self._answers: list[_T] = []
        self._error: BaseException | None = None
        self.over = Flag()
        self.failed = self.left = self.refused = self.unasked = False

    def carry_out(self) -> None:
        work, self._work = self._work, None
        if work is not None and not self.left:
            self._error = failure_of(functools.partial(self._do, work))
            self.failed = self._error is not None
        del work  # it may be the last that knows an engine
        if self.left or self.unasked:
            log_failure(self._error)
        self.over.set()

    def _do(self, work: Callable[[], _T]) -> None:
        self._answers.append(work())

    def answer(self) -> _T:
        """What the work returned, or raise what it raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._answers[0]
        finally:
            del error

    def take_back(self, undo: Callable[[_T], object]) -> None:
        """Give back what the call answered to nobody. Runs behind it."""
        while self._answers:
            undo(self._answers.pop())


def _died(watched: dict[int, weakref.ref[Any]], number: int, dead: Callable[[], object]) -> None:
    watched.pop(number, None)
    dead()


def _serve(asked: SimpleQueue[_Call[Any] | None], over: Flag) -> None:
    while (call := asked.get()) is not None:
        call.carry_out()
        del call  # nothing here keeps an engine alive
    over.set()
    _refuse(asked)


def _refuse(asked: SimpleQueue[_Call[Any] | None]) -> None:
    """Tell who asks too late to do it alone."""
    while True:
        try:
            call = asked.get_nowait()
        except Empty:
            return
        if call is not None:
            call.refused = True
            call.over.set()
