"""What a tier moves while it is busy, whichever loads it moves for at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

AT_MOST = 8  # loads that end before a tier that is never idle is reported


class BusyPeriods:
    """Reports each period in which a tier was busy: its bytes, and its seconds.

    Loads beside each other share a tier, so the time of one of them says too little of the tier's speed. A period ends
    with its last load, or after `AT_MOST` of them; then what is still under way counts in the next one. Thread-safe.
    """

    def __init__(self, report: Callable[[str, int, float], None]) -> None:
        self._report = report
        self._under_way: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._ended: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._spoilt: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, tier: str, now: float) -> None:
        """A load from a tier begins; `now`, in seconds, of any clock."""
        with self._lock:
            if not self._under_way[tier]:
                self._since[tier] = now
            self._under_way[tier] += 1

    def end(self, tier: str, nbytes: int | None, now: float) -> None:
        """A load that began is over, and brought so much; None: not all that it should, so its time says nothing."""
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
            self._report(tier, moved, seconds)
