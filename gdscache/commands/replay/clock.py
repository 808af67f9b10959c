"""Virtual time: ordered events, processes that wait for events, and the machine's model. No threads.

A process is a generator that yields a `Done` to wait for. It continues at the time when the `Done` fires.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import math
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

# Bytes read for each byte written while both wait: the native library gives writes at least this share.
READS_PER_WRITE = 8

Process = Generator["Done", None, None]


class Done:
    """An event that fires once."""

    __slots__ = ("_clock", "happened", "waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.happened = False
        self.waiting: list[Process] = []

    def fire(self) -> None:
        """Fire now. Waiting processes continue at this time."""
        self.happened = True
        if self.waiting:
            self._clock.ready.extend(self.waiting)
            self.waiting = []


class Clock:
    """Seconds since the simulation's start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[Process] = deque()  # to continue now
        self.past = Done(self)  # fired already
        self.past.happened = True
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    def time(self) -> float:
        """The time, as a clock function."""
        return self.now

    def call(self, at: float, action: Callable[[], None]) -> None:
        """Call `action` at time `at` (the past counts as now). Actions of one time run in call order."""
        self._numbers += 1
        heapq.heappush(self._events, (at if at > self.now else self.now, self._numbers, action))

    def wait(self, seconds: float) -> Done:
        """An event that fires after `seconds`."""
        if seconds <= 0:
            return self.past
        done = Done(self)
        self.call(self.now + seconds, done.fire)
        return done

    def start(self, process: Process) -> None:
        """Run a process up to its next wait."""
        for done in process:
            if not done.happened:
                done.waiting.append(process)
                return

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C is raised by `run` as the next event. The engine's decisions, which its threads take, expect none. A
        second Ctrl-C is raised at once."""

        def interrupt(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            heapq.heappush(self._events, (self.now, 0, lambda: signal.raise_signal(signal.SIGINT)))

        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:  # not with `nohup`
            signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        self.run(self.now)  # raises a Ctrl-C that came last

    def run(self, until: float = math.inf) -> None:
        """Run all events up to and including time `until`, or until no event is left."""
        ready, events = self.ready, self._events
        while True:
            while ready:
                self.start(ready.popleft())
            if not events or events[0][0] > until:
                break
            self.now, _, action = heapq.heappop(events)
            action()
        if until < math.inf:
            self.now = max(self.now, until)


@dataclasses.dataclass(frozen=True)
class MachineModel:
    """Speeds of the simulated machine: bytes and tokens a second (infinite: takes no time), seconds.

    `link`: host memory to GPU memory, and the same rate in reverse at the same time. `latency`: of each SSD read or
    write. `prefill`: tokens computed in a second by each request, as if it were alone.
    """

    ssd_read: float = math.inf
    ssd_write: float = math.inf
    link: float = math.inf
    latency: float = 0.0
    prefill: float = math.inf

    def describe(self) -> dict[str, Any]:
        """Plain data. None for infinity, which JSON lacks."""
        return {k: None if v == math.inf else v for k, v in dataclasses.asdict(self).items()}


class Pipe:
    """Moves bytes in order of arrival, at one rate."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._free = 0.0  # time when the last bytes are through

    def move(self, nbytes: int) -> Done:
        now = self._clock.now
        self._free = (self._free if self._free > now else now) + nbytes / self._rate
        return self._clock.wait(self._free - now)


@dataclasses.dataclass(slots=True)
class _Transfer:
    left: float
    done: Done


class DiskModel:
    """An SSD that reads and writes in turn, each kind in order of arrival.

    A kind that waits alone has the whole device. While both wait, `READS_PER_WRITE` bytes are read for each byte
    written: reads go first and writes never starve.
    """

    def __init__(self, clock: Clock, read: float, write: float, latency: float = 0.0) -> None:
        self._clock = clock
        self._latency = latency
        cycle = READS_PER_WRITE / read + 1 / write  # seconds to read READS_PER_WRITE bytes and write one
        self._alone = (read, write)
        self._shared = (READS_PER_WRITE / cycle, 1 / cycle) if cycle else (math.inf, math.inf)
        self._queues: tuple[deque[_Transfer], deque[_Transfer]] = (deque(), deque())
        self._since = 0.0
        self._plan = 0  # events of older plans are void

    def read(self, nbytes: int) -> Done:
        return self._add(0, nbytes)

    def write(self, nbytes: int) -> Done:
        return self._add(1, nbytes)

    def _rates(self) -> tuple[float, float]:
        return self._shared if self._queues[0] and self._queues[1] else self._alone

    def _add(self, kind: int, nbytes: int) -> Done:
        if self._alone[kind] == math.inf and not self._queues[kind]:
            return self._clock.wait(self._latency)
        done, first = Done(self._clock), not self._queues[kind]
        if first:  # else the next end stays as planned
            self._progress()
        self._queues[kind].append(_Transfer(nbytes, done))
        if first:
            self._schedule()
        return done

    def _progress(self) -> None:
        """Bring the remaining bytes of each queue's first move up to now."""
        seconds, self._since = self._clock.now - self._since, self._clock.now
        for queue, rate in zip(self._queues, self._rates(), strict=True):
            if queue and seconds:
                queue[0].left = max(0.0, queue[0].left - seconds * rate)

    def _schedule(self) -> None:
        """Plan the next end from the queued moves."""
        self._plan += 1
        rates = enumerate(zip(self._queues, self._rates(), strict=True))
        if ends := [(queue[0].left / rate, kind) for kind, (queue, rate) in rates if queue]:
            seconds, kind = min(ends)
            self._clock.call(self._clock.now + seconds, functools.partial(self._end, self._plan, kind))

    def _end(self, plan: int, kind: int) -> None:
        if plan != self._plan:
            return
        self._progress()
        done = self._queues[kind].popleft().done
        if self._latency:
            self._clock.call(self._clock.now + self._latency, done.fire)
        else:
            done.fire()
        self._schedule()
