"""Histograms of what the engine measures: fixed arrays of numbers, cheap to note into, and plain data to read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypedDict

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of work and waits
AGES = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 28800.0, 86400.0, 604800.0)  # seconds that a page is kept
ERRORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # relative ones
SIZES = {"1MiB": 1 << 20, "16MiB": 16 << 20, "256MiB": 256 << 20}  # classes of work, by the most bytes that it has
ABOVE = "above"  # the class of what has more
SIZE_CLASSES = (*SIZES, ABOVE)
_MOST, _CLASSES = (*SIZES.values(),), SIZE_CLASSES


class Buckets(TypedDict):
    """A histogram as plain data: of each range of values up to one of its bounds, and of those above, how many there
    were, and their sum."""

    counts: list[int]
    sums: list[float]


class Histogram:
    """How often values came up to each of `bounds`, which ascend. One thread notes at a time; anybody reads."""

    __slots__ = ("_bounds", "_counts", "_sums")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sums = [0.0] * (len(bounds) + 1)

    def note(self, value: float) -> None:
        """There was such a value."""
        at = bisect_left(self._bounds, value)
        self._counts[at] += 1
        self._sums[at] += value

    def describe(self) -> Buckets:
        """Plain data for `stats()`."""
        return {"counts": self._counts.copy(), "sums": self._sums.copy()}


def size_class(nbytes: int) -> str:
    """The class in `SIZE_CLASSES` of work that moves so many bytes."""
    return _CLASSES[bisect_left(_MOST, nbytes)]
