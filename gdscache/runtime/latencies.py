"""Durations of the tiers' latest work, for the status page."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT = 512  # durations of a kind


class Summary(NamedTuple):
    """The median and 99th percentile of `samples` durations, in seconds."""

    samples: int
    median: float
    slow: float


NOTHING = Summary(0, 0.0, 0.0)


class Latencies:
    """The last durations of each kind of work of each tier. Takes no lock: a note is one append, a summary one copy."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], deque[float]] = {}

    def note(self, what: str, tier: str, seconds: float) -> None:
        kept = self._noted.get((what, tier))
        if kept is None:
            kept = self._noted.setdefault((what, tier), deque(maxlen=KEPT))
        kept.append(seconds)

    def summary(self, what: str, tier: str) -> Summary:
        found = sorted(self._noted.get((what, tier), ()))
        if not found:
            return NOTHING
        last = len(found) - 1
        return Summary(len(found), found[last // 2], found[last * 99 // 100])
