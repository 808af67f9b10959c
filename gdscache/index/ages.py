"""Ages of pages at eviction, and gaps between uses, of a sample of a tier's pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gdscache.histograms import AGES, Buckets, Histogram

ALL_OF = 64  # a tier of up to this many slots has all its pages watched,
_OF_256 = 4  # of a larger one, this many of 256 pages, chosen by their keys


class PageAges:
    """Watches pages from their arrival, while the engine is open, until they go. The manager's lock is held."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._below = 256 if slots <= ALL_OF else _OF_256
        self._clock = clock
        self._known: dict[bytes, tuple[float, float]] = {}  # time of arrival, time of the last use
        self._ages, self._idle, self._gaps = Histogram(AGES), Histogram(AGES), Histogram(AGES)

    def came(self, keys: Iterable[bytes]) -> None:
        below = self._below
        if some := [key for key in keys if key[0] < below]:
            now = self._clock()
            self._known.update(dict.fromkeys(some, (now, now)))

    def used(self, keys: Iterable[bytes]) -> None:
        known = self._known
        if some := known.keys() & keys:
            now = self._clock()
            for key in some:
                came, last = known[key]
                self._gaps.note(now - last)
                known[key] = came, now

    def evicted(self, keys: Iterable[bytes]) -> None:
        if gone := self._known.keys() & keys:
            now = self._clock()
            for came, last in map(self._known.pop, gone):
                self._ages.note(now - came)
                self._idle.note(now - last)

    def gone(self, key: bytes) -> None:
        """A page went without being evicted."""
        self._known.pop(key, None)

    def clear(self) -> None:
        self._known.clear()

    def describe(self) -> dict[str, Buckets]:
        return {
            "evicted_age_seconds": self._ages.describe(),
            "evicted_idle_seconds": self._idle.describe(),
            "reuse_gap_seconds": self._gaps.describe(),
        }
