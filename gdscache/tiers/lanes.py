"""One direction of a CUDA mover: its streams, its share of the staging ring, and what is in flight on them."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gdscache.driver import DeviceMemory, Driver
from gdscache.streams import Event, record_on

ALIGNMENT = 4096
SEGMENTS = 3  # beside large products, 4 smaller ones left checksums at 0.85 of the speed without, 3 at 0.97


class Segment:
    """A part of the ring that one chunk of a transfer uses at a time, and the events behind its last use.

    `data` and `table` are GPU addresses. `copied` is behind the last copies, `done` behind the last kernel.
    """

    __slots__ = ("copied", "data", "done", "table")

    def __init__(self, data: int, table: int, copied: int, done: int) -> None:
        self.data = data
        self.table = table
        self.copied = copied
        self.done = done


class Lane:
    """`copies` runs the copy engine, `kernels` the kernels; events keep them in step, segment by segment.

    One stream of each: every further stream that waits for an event was measured to cost more than it brings.

    `share` bytes of GPU memory are the segments' data, of which each has at least `least`: the ring is cut into as many
    as fit, `SEGMENTS` at most. Tables of `table` bytes a segment come on top. A transfer takes segments in turn: what
    is queued first goes first. The kernels of loads go before the model's. Everything that queues is called by who has
    `entered`.
    """

    def __init__(self, driver: Driver, share: int, least: int, table: int, *, loads: bool) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        self.copies = driver.create_stream()
        self.kernels = driver.create_stream(urgent=loads)
        self._last, self._other = (self.kernels, self.copies) if loads else (self.copies, self.kernels)
        self._events: list[int] = []
        self._joint = self._event()
        count = max(1, min(SEGMENTS, share // least))
        self.segment_bytes = share // count // ALIGNMENT * ALIGNMENT
        self.table_bytes = -(-table // ALIGNMENT) * ALIGNMENT
        self._memory: DeviceMemory = driver.allocate(count * (self.segment_bytes + self.table_bytes))
        first_table = self._memory.address + count * self.segment_bytes
        self._segments = [
            Segment(
                self._memory.address + i * self.segment_bytes,
                first_table + i * self.table_bytes,
                self._event(),
                self._event(),
            )
            for i in range(count)
        ]
        self._next = 0
        self._kept: collections.deque[tuple[torch.cuda.Event, Any]] = collections.deque()

    def _event(self) -> int:
        self._events.append(self.driver.create_event())
        return self._events[-1]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Queue a transfer with nobody else's between; the lane's device and context are the current ones."""
        with self._lock, torch.cuda.device(self.driver.device), self.driver.entered():
            while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call]
                self._kept.popleft()
            yield

    def take(self) -> Segment:
        """The next segment. Work in it waits for the segment's events, and sets them."""
        segment = self._segments[self._next]
        self._next = (self._next + 1) % len(self._segments)
        return segment

    def follow(self, events: Sequence[Event], *, kernels: bool) -> None:
        """What is queued for kernels (or else for the copy engine) from now on comes after these events."""
        for event in events:
            if event is not None:
                (self.kernels if kernels else self.copies).wait_event(event)

    def keep(self, *things: Any) -> torch.cuda.Event:
        """Hold host memory that queued work still reads or writes; an event behind everything queued so far."""
        event = self._join()
        self._kept.append((event, things))
        return event

    def mark(self) -> torch.cuda.Event:
        """An event behind everything that was queued so far. Enters by itself."""
        with self.entered():
            return self._join()

    def mark_kernels(self) -> torch.cuda.Event:
        """An event behind the kernels that were queued so far."""
        return record_on(self.kernels)

    def _join(self) -> torch.cuda.Event:
        self.driver.record(self._joint, self._other.cuda_stream)
        self.driver.wait(self._last.cuda_stream, self._joint)
        return record_on(self._last)

    def close(self) -> None:
        """Wait for what is queued, and give ring, events and streams back; again is fine."""
        with self._lock:
            if not self._memory.address:
                return
            for stream in (self.copies, self.kernels):
                stream.synchronize()
            self._kept.clear()
            self._memory.close()
            for event in self._events:
                self.driver.destroy_event(event)
            for stream in (self.copies, self.kernels):
                self.driver.destroy_stream(stream)
