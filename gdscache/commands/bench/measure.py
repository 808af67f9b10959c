"""Measurement: compared ways run in turns, and a figure is the median of several turns."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from gdscache.commands.console import Progress, silent
from gdscache.errors import GdsCacheError

K = TypeVar("K")
T = TypeVar("T")


Series = dict[str, Any]
"""A quantity measured once a round: its median, spread and all values, as plain data."""


def series(values: Iterable[float]) -> Series:
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "values": found}


class Interval(NamedTuple):
    """A median with bounds around the true one, of probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median and the narrowest symmetric pair of order statistics that covers it with `confidence`.

    It assumes independent values and no distribution (the interval of the sign test). Too few values cover less: then
    the bounds are the least and the largest, and `coverage` is their probability.
    """
    ordered, count = sorted(values), len(values)
    rank, coverage = 1, 1 - 2 / 2**count  # between the values of this rank from below and from above
    for further in range(2, (count + 1) // 2 + 1):
        reached = 1 - 2 * sum(math.comb(count, i) for i in range(further)) / 2**count
        if reached < confidence:
            break
        rank, coverage = further, reached
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank], coverage)


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exempt existing objects from garbage collection, as servers do after their start.

    A process with torch has half a million objects. Enough allocations start a full collection, which searches all of
    them for a tenth of a second. Objects of the measured code are collected as usual.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def interleave(
    ways: Mapping[K, Callable[[], float]], rounds: int, progress: Progress = silent, text: str = ""
) -> dict[K, Series]:
    """Run every way once a round, in order, so that the machine's drift meets all ways alike."""
    values: dict[K, list[float]] = {name: [] for name in ways}
    with frozen_heap():
        for done in range(rounds):
            progress(done, rounds, text)
            for name, way in ways.items():
                values[name].append(way())
    progress(rounds, rounds, text)
    return {name: series(found) for name, found in values.items()}


def turns(first: Callable[[], T], second: Callable[[], T], rounds: int) -> tuple[list[T], list[T]]:
    """Two ways in pairs, `rounds` times; every other pair runs in reverse order."""
    found: tuple[list[T], list[T]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append((first, second)[which]())
    return found


def paired(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Ours over the other, pair by pair: the median of the ratios and its interval."""
    found = median_interval([a / b for a, b in zip(ours, other, strict=True)])
    bounds = {"ratio": found.median, "ratio_low": found.low, "ratio_high": found.high}
    return {**bounds, "coverage": found.coverage, "pairs": len(ours)}


def ratio(ours: Series, other: Series) -> dict[str, float]:
    """Ours over the other: the ratio of the medians, and the least and largest of single rounds."""
    by_round = [a / b for a, b in zip(ours["values"], other["values"], strict=True)]
    return {"ratio": ours["median"] / other["median"], "ratio_min": min(by_round), "ratio_max": max(by_round)}


def rate(nbytes: int, elapsed: float) -> float:
    """GB/s (10^9 bytes)."""
    return nbytes / elapsed / 1e9


def idle(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """GB/s of one copy to an idle device."""
    idle(target.device)
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    idle(target.device)
    return rate(source.nbytes, time.perf_counter() - start)


def target(value: float, limit: float, *, at_least: bool) -> dict[str, Any]:
    """A figure's target as plain data, and whether it is met."""
    return {"target": limit, "met": value >= limit if at_least else value <= limit}


def cause_of(error: BaseException) -> str:
    """An error in one line."""
    message = error.message if isinstance(error, GdsCacheError) else str(error)
    return " ".join(message.split()) or type(error).__name__
