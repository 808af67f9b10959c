"""Calls to a shared pool, each with a deadline, from callers' threads or in the background.

A call cannot be interrupted, so its memory is kept until it returns. But if one does not return within its deadline, or
reports that the master does not answer, the *breaker* opens: waiting calls are refused at once, and no new call begins.
A thread probes the pool; when it answers, the breaker closes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from gdscache.errors import GdsCacheError, IOFailedError
from gdscache.mooncake.client import CODES, NO_MASTER, MooncakeClient, MooncakeLink
from gdscache.runtime.threads import Flag, failure_of, log_failure, start

PROBE_S, PROBES_S = 0.2, 5.0  # seconds between the first two probes; they double up to the second
State = Literal["connecting", "ready", "open", "ended"]
_T = TypeVar("_T")
_log = logging.getLogger("gdscache.mooncake")


class Lines:
    """Calls of several kinds, `most` of each at a time, in the callers' threads or in one for background calls. They
    may begin while the breaker is closed (`ready`). A watching thread connects, and opens and closes it.

    `deadline`: seconds of a call. `opened`: how often the breaker opened.
    """

    def __init__(self, pool: MooncakeLink, *, deadline: float, most: int) -> None:
        self.changed = threading.Condition()
        self.state: State = "connecting"
        self.opened = 0
        self.client: MooncakeClient | None = None
        self.counts: Counter[str] = Counter()
        self.longest = 0.0  # seconds of the longest call
        self._pool = pool
        self._deadline = deadline
        self._most = most
        self._waiting: deque[Callable[[], object]] = deque()
        self._running: list[tuple[str, float]] = []  # kind and begin of each call
        self._probing: threading.Thread | None = None
        self._next_probe, self._pause = 0.0, PROBE_S
        self._answered = False
        self._threads = [
            threading.Thread(target=loop, name=f"gdscache-pool-{name}", daemon=True)
            for name, loop in {"asks": self._serve, "watch": self._watch}.items()
        ]
        start(self._threads, self._end)

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def open(self, why: str) -> None:
        """No call may begin. May be called again."""
        with self.changed:
            if not self.ready:
                return
            self.state = "open"
            self.opened += 1
            self.changed.notify_all()
        _log.warning("the shared pool %s is left alone until it answers again: %s", self._pool.master, why)

    def _end(self) -> None:
        with self.changed:
            self.state = "ended"
            self.changed.notify_all()

    def call(self, kind: str, work: Callable[[MooncakeClient], _T]) -> _T:
        """`work(client)` in this thread, after others of the kind. Raises `IOFailedError` while the breaker is open."""
        changed = self.changed
        with changed:
            changed.wait_for(lambda: not self.ready or sum(kind == it for it, _ in self._running) < self._most)
            client = self.client if self.ready else None
            if client is None:
                self.counts["refused"] += 1
                raise IOFailedError(f"the shared pool: {CODES[NO_MASTER]}", "see the master's log", errno.EHOSTUNREACH)
            running = kind, time.monotonic()
            self._running.append(running)
            changed.notify_all()  # the watching thread has a new deadline to wait for
        try:
            return work(client)
        finally:
            with changed:
                self._running.remove(running)
                self.counts[kind] += 1
                self.longest = max(self.longest, time.monotonic() - running[1])
                changed.notify_all()

    def begin(self, work: Callable[[MooncakeClient], object], over: Callable[[], object] = lambda: None) -> None:
        def ask() -> None:
            with contextlib.suppress(IOFailedError):
                self.call("asks", work)

        def asked() -> None:
            log_failure(failure_of(ask))
            over()

        with self.changed:
            self._waiting.append(asked)
            self.changed.notify_all()

    def finish(self, work: Callable[[MooncakeClient], _T]) -> _T | None:
        """`begin`, and wait for the call, `deadline` seconds at most; None if it was refused or has not ended."""
        answer: list[_T] = []
        over = Flag()
        if not self.ready:
            self.counts["refused"] += 1
            return None
        self.begin(lambda client: answer.append(work(client)), over.set)
        over.wait(self._deadline)
        return answer[0] if over.is_set() and answer else None

    def answered(self, codes: object) -> None:
        if codes == NO_MASTER or (isinstance(codes, list) and NO_MASTER in codes):
            self.open("the master does not answer")

    def _serve(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self._waiting) or self.state == "ended")
                if not self._waiting:
                    return
                ask = self._waiting.popleft()
            ask()
            del ask

    def _refuse_waiting(self) -> None:
        """Run the queued calls while the breaker is open, so that each is refused and none waits behind a hanging
        call."""
        with self.changed:
            asks = list(self._waiting)
            self._waiting.clear()
        for ask in asks:
            ask()

    def _watch(self) -> None:
        while True:
            with self.changed:
                state = self.state
                if state == "ended":
                    return
                if state == "ready":
                    overdue, left = self._overdue()
                    if not overdue:
                        self._pause = PROBE_S
                        self.changed.wait(left)
                        continue
            if state == "ready":
                self.counts["overdue"] += 1
                self.open(f"a call has not ended within {self._deadline:g} s")
            self._refuse_waiting()
            self._probe()

    def _overdue(self) -> tuple[bool, float | None]:
        if not self._running:
            return False, None
        left = min(since for _, since in self._running) + self._deadline - time.monotonic()
        return left <= 0, left

    def _probe(self) -> None:
        """Find out whether the pool answers (again); wait a while if it does not.

        A thread of its own asks, since that may take long: `close` does not wait for it.
        """
        with self.changed:
            busy = self._probing is not None and self._probing.is_alive()
            if not busy and self._answered:
                self._answered = False
                if not self._overdue()[0]:
                    if self.state != "ended":
                        words = "is connected" if self.state == "connecting" else "answers again"
                        _log.info("the shared pool %s %s", self._pool.master, words)
                        self.state = "ready"
                        self.changed.notify_all()
                    return
            pause, self._pause = self._pause, min(2 * self._pause, PROBES_S)
        if not busy and time.monotonic() >= self._next_probe:
            self._next_probe = time.monotonic() + pause
            self._probing = threading.Thread(
                target=lambda: log_failure(failure_of(self._look)), name="gdscache-pool-probe", daemon=True
            )
            self._probing.start()
        with self.changed:
            self.changed.wait_for(lambda: self._answered or self.state == "ended", PROBE_S)

    def _look(self) -> None:
        try:
            if not self._pool.reachable():
                return
            if self.client is None:
                client = self._pool.connect()
                with self.changed:
                    ended, self.client = self.state == "ended", client
                if ended:
                    self._pool.leave(client)
                    return
            elif not self._pool.alive():
                return
            if not self._pool.come_back(self.client):
                return
        except GdsCacheError as error:
            _log.error("the shared pool %s cannot be used: %s", self._pool.master, error)
            return
        with self.changed:
            self._answered = True
            self.changed.notify_all()

    def close(self) -> bool:
        """Refuse queued calls, and end the threads; False if a call does not return. May be called again."""
        self._end()
        until = time.monotonic() + self._deadline
        for thread in self._threads:  # the watching one may begin a probe
            thread.join(max(0.0, until - time.monotonic()))
        threads = [*self._threads, *filter(None, [self._probing])]
        threads[-1].join(max(0.0, until - time.monotonic()))
        with self.changed:
            ended = self.changed.wait_for(lambda: not self._running, max(0.0, until - time.monotonic()))
        return ended and not any(thread.is_alive() for thread in threads)

    def describe(self) -> dict[str, Any]:
        return {
            "master": self._pool.master,
            "state": self.state,
            "opened": self.opened,
            "calls": dict(self.counts),
            "longest_call_s": round(self.longest, 3),
        }
