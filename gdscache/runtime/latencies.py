"""Durations of the tiers' latest work, for the status page."""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import NamedTuple

from gdscache.sizes import Count

KEPT = 512  # durations of a kind
SLOW_S = 600.0  # seconds for which a slow load is told of


class Summary(NamedTuple):
    """The median and 99th percentile of `samples` durations, in seconds."""

    samples: Count
    median: float
    slow: float


class SlowLoad(NamedTuple):
    """A load, by the slowest tier that it read. `ended`: seconds since 1970-01-01 UTC, at its verdict."""

    tier: str
    ended: float
    seconds: float
    nbytes: Count


NOTHING = Summary(0, 0.0, 0.0)


class Latencies:
    """The last durations of each kind of work of each tier. Takes no lock: a note is one append, a summary one copy."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], deque[float]] = {}
        self._loads: deque[SlowLoad] = deque(maxlen=KEPT)

    def note(self, what: str, tier: str, seconds: float) -> None:
        self._noted.setdefault((what, tier), deque(maxlen=KEPT)).append(seconds)

    def loaded(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` whose slowest tier is `tier` took `seconds` from its begin to its verdict."""
        self.note("load", tier, seconds)
        self._loads.append(SlowLoad(tier, time.time(), seconds, nbytes))

    def slowest(self, most: int) -> list[SlowLoad]:
        """The slowest loads of the last minutes, the slowest first."""
        since = time.time() - SLOW_S
        return heapq.nlargest(most, (load for load in list(self._loads) if load.ended > since), key=lambda one: one[2])

    def summary(self, what: str, tier: str) -> Summary:
        found = sorted(self._noted.get((what, tier), ()))
        if not found:
            return NOTHING
        last = len(found) - 1
        return Summary(len(found), found[last // 2], found[last * 99 // 100])
