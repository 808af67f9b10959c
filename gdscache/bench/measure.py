"""How the benchmarks measure: ways that are compared run in turns, and a figure is the median of several turns."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, text)` while something long goes on."""


def silent(done: int, total: int, text: str) -> None:
    """A progress callback that says nothing."""


@dataclasses.dataclass(frozen=True)
class Series:
    """The same quantity, measured once a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def describe(self) -> dict[str, Any]:
        """The median, the spread and all values, as plain data."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep what is there already out of the garbage collector's sight, as servers do once they are up.

    A process with torch holds half a million objects; a full collection looks at all of them, for a tenth of a second,
    whenever enough has been allocated. What the measured code allocates is collected as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def interleave(
    ways: Mapping[str, Callable[[], float]], rounds: int, progress: Progress = silent, text: str = ""
) -> dict[str, Series]:
    """Run every way once a round, in order, so that whatever drifts on the machine meets all of them alike."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    with frozen_heap():
        for done in range(rounds):
            progress(done, rounds, text)
            for name, way in ways.items():
                values[name].append(way())
    progress(rounds, rounds, text)
    return {name: Series(tuple(found)) for name, found in values.items()}


def ratio(ours: Series, other: Series) -> dict[str, float]:
    """Ours over the other: of the medians, and the least and largest of single rounds."""
    by_round = [a / b for a, b in zip(ours.values, other.values, strict=True)]
    return {"ratio": ours.median / other.median, "ratio_min": min(by_round), "ratio_max": max(by_round)}


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rate(nbytes: int, elapsed: float) -> float:
    """GB/s (10^9 bytes)."""
    return nbytes / elapsed / 1e9


def target(value: float, limit: float, *, at_least: bool) -> dict[str, Any]:
    """A figure's target as plain data, and whether it is met."""
    return {"target": limit, "met": value >= limit if at_least else value <= limit}


def judged(report: Any) -> Sequence[Mapping[str, Any]]:
    """Every part of a report that has a target, in the order in which they stand there."""
    if isinstance(report, Mapping):
        own = [report] if "met" in report else []
        return [*own, *(found for value in report.values() for found in judged(value))]
    if isinstance(report, (list, tuple)):
        return [found for value in report for found in judged(value)]
    return []
