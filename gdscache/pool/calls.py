"""Calls to a shared pool that nobody has to wait for: each in the thread of its kind, each with a deadline.

A call cannot be ended, so what it may touch is kept until it returns. But where one has not returned within its
deadline, or says that the master does not answer, the *breaker* opens: what waits is refused at once, and nothing new
is begun. Whether the pool is back is for a thread of its own to find out; then the breaker closes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from gdscache.errors import GdsCacheError
from gdscache.pool.breaker import Breaker
from gdscache.pool.client import NO_MASTER, Client
from gdscache.runtime.threads import Flag, log_failure, start

PROBE_S, PROBES_S = 0.2, 5.0  # seconds between the first two probes; they double up to the second
_T = TypeVar("_T")
_log = logging.getLogger("gdscache.pool")


class Call:
    """One call under way or waiting. `refused` is called in its place where it is not begun. `over`: it has ended."""

    __slots__ = ("over", "refused", "since", "work")

    def __init__(self, work: Callable[[Client], object], refused: Callable[[], object]) -> None:
        self.work = work
        self.refused = refused
        self.since: float | None = None
        self.over = Flag()


class Pool(Protocol):
    """What is called, and how to come to it. Threads of `Lines` call these, one at a time."""

    master: str

    def reachable(self) -> bool:
        """Whether it is worth trying; soon."""
        ...

    def connect(self) -> Client:
        """The client of all calls. It may take minutes. Raises `GdsCacheError`."""
        ...

    def alive(self) -> bool:
        """Whether the pool answers."""
        ...

    def come_back(self, client: Client) -> bool:
        """The pool is there, or there again: called before the breaker closes. Whether it may."""
        ...

    def leave(self, client: Client) -> None:
        """Close the client."""
        ...


class Lines:
    """A thread for each kind of call, and one that watches over them: it connects, opens and closes the breaker.

    `deadline`: seconds of a call.
    """

    def __init__(
        self,
        kinds: tuple[str, ...],
        pool: Pool,
        *,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker = Breaker(pool.master)
        self.client: Client | None = None
        self.counts: Counter[str] = Counter()
        self.longest = 0.0  # seconds that a call took
        self._pool = pool
        self._deadline = deadline
        self._clock = clock
        self._waiting: dict[str, deque[Call]] = {kind: deque() for kind in kinds}
        self._running: dict[str, Call | None] = dict.fromkeys(kinds)
        self._probing: threading.Thread | None = None
        self._next_probe, self._pause = 0.0, PROBE_S
        self._answered = False
        loops: dict[str, Callable[[], None]] = {kind: lambda kind=kind: self._serve(kind) for kind in kinds}  # type: ignore[misc]
        loops["watch"] = self._watch
        self._threads = [
            threading.Thread(target=loop, name=f"gdscache-pool-{name}", daemon=True) for name, loop in loops.items()
        ]
        start(self._threads, self.breaker.end)

    # -- calls -------------------------------------------------------------------------------------------------------

    def begin(
        self, kind: str, work: Callable[[Client], object], refused: Callable[[], object] = lambda: None
    ) -> Call | None:
        """Have `work(client)` done behind what waits; `refused()` instead where it may not begin, perhaps now.

        None where it was refused now.
        """
        call = Call(work, refused)
        with self.breaker.changed:
            if self.breaker.closed:
                self._waiting[kind].append(call)
                self.breaker.changed.notify_all()
                return call
        self.counts["refused"] += 1
        refused()
        return None

    def finish(self, kind: str, work: Callable[[Client], _T]) -> _T | None:
        """`begin`, and wait for it, for the deadline at most; None where it was refused or has not ended by then."""
        answer: list[_T] = []
        refused = Flag()
        call = self.begin(kind, lambda client: answer.append(work(client)), refused.set)
        if call is None:
            return None
        call.over.wait(self._deadline)
        return answer[0] if call.over.is_set() and answer else None

    def answered(self, codes: object) -> None:
        """Look at what a call said: where the master does not answer, the breaker opens."""
        if codes == NO_MASTER or (isinstance(codes, list) and NO_MASTER in codes):
            self.breaker.open("the master does not answer")

    # -- the threads -------------------------------------------------------------------------------------------------

    def _serve(self, kind: str) -> None:
        waiting, changed = self._waiting[kind], self.breaker.changed
        while True:
            with changed:
                changed.wait_for(lambda: bool(waiting) or self.breaker.state == "ended")
                if not waiting:
                    return
                call = waiting.popleft()
                client = self.client if self.breaker.closed else None
                if client is not None:
                    call.since = self._clock()
                    self._running[kind] = call
                    changed.notify_all()  # whose deadline is next
            if client is None:
                self._refuse(call)
                continue
            with self._logged():
                call.work(client)
            with changed:
                assert call.since is not None, "a call that has run"
                self._running[kind] = None
                self.counts[kind] += 1
                self.longest = max(self.longest, self._clock() - call.since)
                changed.notify_all()
            call.over.set()
            del call

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the thread goes on, and the call's end is its own to say
            log_failure(error)

    def _watch(self) -> None:
        while True:
            with self.breaker.changed:
                state = self.breaker.state
                if state == "ended":
                    return
                if state == "closed":
                    overdue, left = self._overdue()
                    if not overdue:
                        self._pause = PROBE_S
                        self.breaker.changed.wait(left)
                        continue
            if state == "closed":
                self.counts["overdue"] += 1
                self.breaker.open(f"a call has not ended within {self._deadline:g} s")
            self._refuse_waiting()
            self._probe()

    def _refuse_waiting(self) -> None:
        """A call that hangs keeps nobody who waits behind it."""
        with self.breaker.changed:
            calls = [call for waiting in self._waiting.values() for call in waiting]
            for waiting in self._waiting.values():
                waiting.clear()
        for call in calls:
            self._refuse(call)

    def _refuse(self, call: Call) -> None:
        self.counts["refused"] += 1
        with self._logged():
            call.refused()
        call.over.set()

    def _overdue(self) -> tuple[bool, float | None]:
        """Whether a call is, and else in how many seconds the first one will be."""
        begun = [call.since for call in self._running.values() if call is not None and call.since is not None]
        if not begun:
            return False, None
        left = min(begun) + self._deadline - self._clock()
        return left <= 0, left

    def _probe(self) -> None:
        """Find out whether the pool is there (again), and wait a while where it is not.

        The question is asked in a thread of its own, since it may take its time: a close does not wait for it.
        """
        with self.breaker.changed:
            busy = self._probing is not None and self._probing.is_alive()
            if not busy and self._answered:
                self._answered = False
                if not self._overdue()[0]:
                    self.breaker.close()
                    return
            pause, self._pause = self._pause, min(2 * self._pause, PROBES_S)
        if not busy and self._clock() >= self._next_probe:
            self._next_probe = self._clock() + pause
            self._probing = threading.Thread(target=self._look, name="gdscache-pool-probe", daemon=True)
            self._probing.start()
        with self.breaker.changed:
            self.breaker.changed.wait_for(lambda: self._answered or self.breaker.state == "ended", PROBE_S)

    def _look(self) -> None:
        """Connect, or ask: `_answered` where the pool is there."""
        with self._logged():
            try:
                if not self._pool.reachable():
                    return
                if self.client is None:
                    client = self._pool.connect()
                    with self.breaker.changed:
                        ended, self.client = self.breaker.state == "ended", client
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
            with self.breaker.changed:
                self._answered = True
                self.breaker.changed.notify_all()

    def close(self) -> bool:
        """Refuse what waits, and end the threads; False where a call does not return. Again is fine."""
        self.breaker.end()
        until = time.monotonic() + self._deadline
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        probing = self._probing
        if probing is not None:
            probing.join(max(0.0, until - time.monotonic()))
        return not any(t.is_alive() for t in [*self._threads, *([] if probing is None else [probing])])

    def describe(self) -> dict[str, Any]:
        return {
            "master": self._pool.master,
            "state": "ready" if self.breaker.closed else self.breaker.state,
            "opened": self.breaker.opened,
            "calls": dict(self.counts),
            "longest_call_s": round(self.longest, 3),
        }
