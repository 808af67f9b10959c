"""Threads that an engine starts when it opens, and flags that any thread may wait for.

A thread is started before there is work for it: if it cannot be started, the engine is refused and not a call. It
outlives exceptions of its work.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from gdscache.errors import EngineClosedError, NativeCallError, ThreadStartError

_Work = tuple[Callable[[], object], Callable[[], object] | None]
_log = logging.getLogger("gdscache")


class Waiter(Protocol):
    """A waiter for a flag. `release` is called in any thread, and does not wait."""

    def release(self) -> None: ...


class Flag:
    """Set once; any thread waits.

    Unlike those of `threading` it holds no lock that an interrupt of a waiting thread could leave taken: each waiter
    brings a lock of its own, and `set` releases locks left behind.
    """

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Release all waiters; repeated calls are fine."""
        self._set = True
        waiting, self._waiting = self._waiting, []
        for mine in waiting:
            mine.release()

    release = set  # a flag may wait for others

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set; False after `seconds`."""
        if self.is_set():
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        if self.is_set():  # perhaps set before `mine` was in the list
            return True
        most = threading.TIMEOUT_MAX
        if not mine.acquire(timeout=most if seconds is None else min(max(0.0, seconds), most)):
            self.forget(mine)
        return self._set

    def wait_awake(self, seconds: float) -> bool:
        """`wait`, in which a stop of this process, or of its machine, counts as a second at most."""
        while seconds > 0 and not self.wait(min(seconds, 1.0)):
            seconds -= 1.0
        return self._set

    def watch(self, waiter: Waiter) -> None:
        """Release this waiter, once or twice, when the flag is set, or now."""
        self._waiting.append(waiter)
        if self.is_set():  # perhaps set before the waiter was in the list
            waiter.release()

    def forget(self, waiter: Waiter) -> None:
        """Do not release this waiter any more. It may be released already."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiter)


class Bell:
    """Rings again and again: `next` is the flag of its next ring, which a waiter takes before it looks around. It
    replaces a condition, whose waiting thread an interrupt could leave without its lock."""

    def __init__(self) -> None:
        self.next = Flag()

    def ring(self) -> None:
        rung, self.next = self.next, Flag()
        rung.set()


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """The exception of `work()`, or None: for the ends of threads, where no caller would catch it."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - other threads wait for the code behind it
        return error
    return None


def in_turn(*ends: Callable[[], object]) -> None:
    """Call each of them, also after errors of those before. Raises the first error."""
    errors = [error for end in ends if (error := failure_of(end)) is not None]
    if errors:
        raise errors[0]


def log_failure(error: BaseException | None) -> None:
    """Log the exception of background work, unless its executor was stopped. An interrupt of the main thread is raised
    again."""
    if error is not None and not (isinstance(error, NativeCallError) and error.errno == errno.ECANCELED):
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise error
        _log.error("background work broke off", exc_info=error)


def start(threads: Sequence[threading.Thread], stop: Callable[[], object]) -> None:
    """Start all threads, or none: `stop` ends running ones. Raises `ThreadStartError`."""
    begun: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
    except RuntimeError as error:
        stop()
        for thread in begun:
            thread.join()
        raise ThreadStartError(
            f"thread {threads[len(begun)].name} cannot be started: {error}",
            "raise the limit of threads (ulimit -u, pids.max of the control group), or lower ssd.threads",
        ) from error


def once(
    over: Callable[[], bool], lock: threading.Condition, ends: Sequence[Callable[[], object]], name: str, most: float
) -> bool:
    """Call `ends` `in_turn` when `over()` is true, which the lock guards. False if that takes more than `most` seconds:
    then a thread of this name waits and calls them, and errors go to the log."""

    def waited(seconds: float | None = None) -> bool:
        with lock:
            there = lock.wait_for(over, seconds)
        if there:
            in_turn(*ends)
        return there

    there = waited(most)
    if not there:
        thread = threading.Thread(target=lambda: log_failure(failure_of(waited)), name=name, daemon=True)
        log_failure(failure_of(lambda: start([thread], lambda: None)))
    return there


class Workers:
    """`threads` threads that take work in the order of its submission. Exceptions of work go to the log."""

    def __init__(self, threads: int, name: str) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=_serve, args=(self._work,), name=f"{name}_{n}", daemon=True) for n in range(threads)
        ]
        start(self._threads, self._stop)

    def submit(self, work: Callable[[], object], lost: Callable[[], object] | None = None) -> None:
        """Run `work()` in one of the threads. If it raises, run `lost()` after it, which ends waits for the work.

        Raises `EngineClosedError` after `shutdown`.
        """
        if self._closed:
            raise EngineClosedError("the engine was closed meanwhile", "open a new one with from_config")
        self._work.put((work, lost))

    def shutdown(self) -> None:
        """Finish submitted work, then end the threads. Repeated calls are fine. A worker thread does not wait for
        itself."""
        self._stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._work.put(None)


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    while (asked := queue.get()) is not None:
        work, lost = asked
        error = failure_of(work)
        log_failure(error)
        if error is not None and lost is not None:
            log_failure(failure_of(lost))
        del asked, work, lost, error  # keeps nothing alive until the next work
