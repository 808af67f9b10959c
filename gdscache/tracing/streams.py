"""Times on CUDA streams, on the host's clock: pairs of timing events, and anchors that tie them to it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ANCHOR_NS = 5_000_000_000  # the oldest anchor: after 5 s events' float32 milliseconds are 0.5 us apart
_TRIES = 3
_AT_ONCE = 4  # of the unresolved pairs, checked when one is added
PATIENCE_S = 5.0  # for work that still runs when the times are asked for

Resolved = Callable[[int, int], None]


class StreamTimes:
    """Collects pairs of events, and reports their times, in nanoseconds of `clock`, when the stream has passed them.

    `patience_s`: seconds that `resolve` waits for running work.
    """

    def __init__(self, clock: Callable[[], int], patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._anchors: dict[int, tuple[Any, int]] = {}  # by device: an event, and its time
        self._streams: dict[int, Any] = {}  # by device: for anchors
        self._pending: deque[tuple[Any, Any, tuple[Any, int], Resolved]] = deque()

    def mark(self, stream: torch.cuda.Stream) -> Any:
        """A timing event behind the stream's queue."""
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def add(self, start: Any, end: Any, device: torch.device, resolved: Resolved) -> None:
        """Call `resolved(start, end)` when both events have happened; at the latest from `resolve`."""
        with self._lock:
            self._pending.append((start, end, self._anchor(device), resolved))
            for _ in range(_AT_ONCE):
                if not self._pending or not self._pending[0][1].query():
                    return
                self._tell(*self._pending.popleft())

    def resolve(self) -> int:
        """Report all pairs, waiting a few seconds for running work. Returns the number that have not ended, and are
        dropped."""
        until = time.monotonic() + self._patience_s
        late = 0
        while True:
            with self._lock:
                if not self._pending:
                    return late
                start, end, anchor, resolved = self._pending.popleft()
            while not end.query() and time.monotonic() < until:
                time.sleep(0.001)
            if end.query():
                self._tell(start, end, anchor, resolved)
            else:
                late += 1

    def _tell(self, start: Any, end: Any, anchor: tuple[Any, int], resolved: Resolved) -> None:
        event, at = anchor
        first, last = (at + round(event.elapsed_time(one) * 1e6) for one in (start, end))
        resolved(first, max(first, last))

    def _anchor(self, device: torch.device) -> tuple[Any, int]:
        """An event of the last few seconds, and its time: the middle of two close readings of the clock."""
        import torch

        number = device.index or 0
        known = self._anchors.get(number)
        if known is not None and self._clock() - known[1] < _ANCHOR_NS:
            return known
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream = self._streams[number]
        best: tuple[int, Any, int] | None = None
        for _ in range(_TRIES):
            before = self._clock()
            event = self.mark(stream)
            event.synchronize()
            after = self._clock()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        assert best is not None, "an anchor was tried for"
        self._anchors[number] = known = best[1], best[2]
        return known
