"""Retention: a page's priority under eviction, and its expiry. Pure values without a clock.

All pages of a lower priority go before the first of a higher one. An expired page is a miss on every tier.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from gdscache.arguments import shown
from gdscache.errors import InvalidValueError

LOWEST, HIGHEST = -1, 2
PRIORITIES = tuple(range(LOWEST, HIGHEST + 1))  # a store's choices; the default is 0

LONGEST_TTL = 100 * 365 * 24 * 3600  # seconds


class Retention(NamedTuple):
    """A request's wish for its pages. `expires`: seconds since the epoch, as `time.time()`; None: never.

    Use `Retention.of` for values from outside.
    """

    priority: int = 0
    expires: float | None = None

    @classmethod
    def of(cls, priority: int = 0, ttl: float | None = None, wall_clock: Callable[[], float] = time.time) -> Retention:
        """A priority of `PRIORITIES`, and a time to live in seconds from now on (more than 0; None: for ever).

        Raises `InvalidValueError`.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
            raise InvalidValueError(
                f"priority is {shown(priority)}", f"pass an integer from {LOWEST} (goes first) to {HIGHEST} (goes last)"
            )
        if ttl is None:
            return DEFAULT if priority == 0 else cls(priority)
        if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= LONGEST_TTL:
            raise InvalidValueError(
                f"ttl is {shown(ttl)}",
                f"pass seconds, more than 0 and at most {LONGEST_TTL:,} (100 years), or None: for ever",
            )
        return cls(priority, wall_clock() + ttl)

    def joined(self, other: Retention) -> Retention:
        """The greater priority and the later expiry of two (never is the latest)."""
        if self.expires is None or other.expires is None:
            return Retention(max(self.priority, other.priority))
        return Retention(max(self.priority, other.priority), max(self.expires, other.expires))


DEFAULT = Retention()


class Expiries:
    """Expiry times of keys: a heap of the distinct times, and the keys of each. The pages of one store share theirs.

    Times without keys leave the heap when they are due, or when they are most of it.
    """

    __slots__ = ("_keys", "_times", "first")

    def __init__(self) -> None:
        self.first = math.inf  # the earliest expiry
        self._times: list[float] = []
        self._keys: dict[float, dict[bytes, None]] = {}

    def add(self, key: bytes, expires: float) -> None:
        keys = self._keys.get(expires)
        if keys is None:
            keys = self._keys[expires] = {}
            heapq.heappush(self._times, expires)
            self.first = min(self.first, expires)
        keys[key] = None

    def remove(self, key: bytes, expires: float) -> None:
        keys = self._keys.get(expires)
        if keys is None or key not in keys:
            return
        del keys[key]
        if not keys:
            del self._keys[expires]
            if len(self._times) > 2 * len(self._keys) + 16:
                self._times = sorted(self._keys)
            self._advance()

    def take(self, now: float, most: int) -> list[bytes]:
        """Take out up to `most` keys that have expired by `now`, the earliest first."""
        taken: list[bytes] = []
        while len(taken) < most and self.first <= now:
            keys = self._keys[self.first]
            while keys and len(taken) < most:
                taken.append(keys.popitem()[0])
            if not keys:
                del self._keys[self.first]
                self._advance()
        return taken

    def _advance(self) -> None:
        while self._times and self._times[0] not in self._keys:
            heapq.heappop(self._times)
        self.first = self._times[0] if self._times else math.inf

    def items(self) -> dict[bytes, float]:
        return {key: expires for expires, keys in self._keys.items() for key in keys}
