"""Measures tiers by their busy periods, over loads that run at once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

_UNTOLD = 64  # periods that wait to be reported
AT_MOST = 8  # loads after which a tier that is never idle is reported


class BusyPeriods:
    """Reports each period in which a tier was busy: its bytes and its seconds.

    Loads at the same time share a tier, so the time of one of them says too little about the tier's speed. A period
    ends with its last load, or after `AT_MOST` loads; loads that still run count in the next one. Another thread
    reports than the one that ends a period, since learning from it takes longer than the end of a small load.
    Thread-safe.
    """

    def __init__(self, report: Callable[[str, int, float], None]) -> None:
        self._report = report
        self._under_way: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._ended: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._spoilt: set[str] = set()
        self._untold: deque[tuple[str, int, float]] = deque()
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # keeps reports in order

    def begin(self, tier: str, now: float) -> None:
        """A load from a tier begins, or has begun at `now`, in seconds of any clock."""
        with self._lock:
            if not self._under_way[tier] or now < self._since[tier]:
                self._since[tier] = now
            self._under_way[tier] += 1

    def end(self, tier: str, nbytes: int | None, now: float) -> None:
        """A load has ended and brought `nbytes`; None: not all its pages, so its time is not used."""
        with self._lock:
            self._under_way[tier] -= 1
            self._ended[tier] += 1
            self._bytes[tier] += nbytes or 0
            if nbytes is None:
                self._spoilt.add(tier)
            if self._under_way[tier] and self._ended[tier] < AT_MOST:
                return
            moved, seconds = self._bytes.pop(tier), now - self._since[tier]
            self._since[tier] = now
            del self._ended[tier]
            spoilt = tier in self._spoilt
            self._spoilt.discard(tier)
            if not spoilt:
                self._untold.append((tier, moved, seconds))
        while len(self._untold) > _UNTOLD:
            self._tell()

    @property
    def untold(self) -> bool:
        return bool(self._untold)

    def tell(self) -> None:
        """Report all ended periods, the oldest first: for threads that no caller waits for."""
        while self._untold:
            self._tell()
        with self._telling:  # wait for another thread's last report
            pass

    def _tell(self) -> None:
        with self._telling:
            if self._untold:
                self._report(*self._untold.popleft())
