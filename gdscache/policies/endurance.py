"""A budget of bytes a day for an SSD: it comes back evenly, with room for a burst."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gdscache.errors import CapacityError
from gdscache.sizes import about

BURST = 8  # one part in 8 of a day's budget may be written at once
_NS = 1_000_000_000
_DAY = 86_400 * _NS


class EnduranceBudget:
    """A token bucket. It holds an eighth of `bytes_per_day`, which it begins with; the other seven come back evenly
    over a day.

    The bytes taken (and not given back) in any period of t days are at most (1 + 7 t) / 8 of `bytes_per_day`. So no 24
    hours have more than `bytes_per_day`; a night without a write allows a burst of an eighth, not of all that was
    saved; and constant load writes 7/8, evenly.

    The state is not kept: n opens in a day allow up to n / 8 of `bytes_per_day` more.
    """

    def __init__(self, bytes_per_day: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds and does not go back. Raises `CapacityError` for less than 8 bytes."""
        if bytes_per_day < BURST:
            raise CapacityError(f"ssd.endurance is {bytes_per_day} bytes a day", "raise it, or set it to null")
        self.bytes_per_day = bytes_per_day
        self.burst = bytes_per_day // BURST
        self._rate = bytes_per_day - self.burst  # bytes a day
        self._clock = clock
        self._now = int(clock() * _NS)
        self._level = self.burst * _DAY  # integers, in bytes / _DAY: sums of small floats would lose some

    def left(self) -> int:
        self._refill()
        return self._level // _DAY

    def take(self, nbytes: int) -> bool:
        """Use up `nbytes`; False, and nothing used, if fewer are left."""
        self._refill()
        wanted = nbytes * _DAY
        if wanted > self._level:
            return False
        self._level -= wanted
        return True

    def give_back(self, nbytes: int) -> None:
        self._refill()
        self._level = min(self.burst * _DAY, self._level + nbytes * _DAY)

    def describe(self) -> dict[str, Any]:
        return {"bytes_per_day": self.bytes_per_day, "burst_bytes": self.burst, "left_bytes": self.left()}

    def __str__(self) -> str:
        left, rate = about(self.left()), about(self._rate // 24)
        return f"{left} left of {about(self.bytes_per_day)} a day, {rate} more each hour"

    def _refill(self) -> None:
        now = int(self._clock() * _NS)
        if now > self._now:
            self._level = min(self.burst * _DAY, self._level + self._rate * (now - self._now))
            self._now = now
