"""Histograms of measured values: fixed arrays of numbers, quick to add to, and plain data to read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypedDict

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
AGES = (1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 28800.0, 86400.0, 604800.0)  # seconds
ERRORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # relative errors
SIZES = {"1MiB": 1 << 20, "16MiB": 16 << 20, "256MiB": 256 << 20}  # classes of work, by most bytes
ABOVE = "above"  # the class of larger work
SIZE_CLASSES = (*SIZES, ABOVE)
_MOST, _CLASSES = (*SIZES.values(),), SIZE_CLASSES


class Buckets(TypedDict):
    """A histogram as plain data: for each range up to a bound, and for values above all bounds, the count and the
    sum."""

    counts: list[int]
    sums: list[float]


class Histogram:
    """Counts values up to each of `bounds`, which ascend. One thread notes at a time; any thread may read."""

    __slots__ = ("_bounds", "_counts", "_sums")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sums = [0.0] * (len(bounds) + 1)

    def note(self, value: float) -> None:
        at = bisect_left(self._bounds, value)
        self._counts[at] += 1
        self._sums[at] += value

    def describe(self) -> Buckets:
        return {"counts": self._counts.copy(), "sums": self._sums.copy()}


def size_class(nbytes: int) -> str:
    """The class in `SIZE_CLASSES` of work that moves `nbytes`."""
    return _CLASSES[bisect_left(_MOST, nbytes)]
