"""Measurement: compared ways run in turns, and a figure is the median of several turns."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from gdscache.commands.console import Progress, silent
from gdscache.errors import GdsCacheError, InvalidValueError, IOFailedError
from gdscache.storage.trial import run_child

T = TypeVar("T")

_ANSWER = "answer: "


@dataclasses.dataclass(frozen=True)
class Series:
    """A quantity measured once a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def describe(self) -> dict[str, Any]:
        """Median, spread and all values, as plain data."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median with bounds around the true one, of probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median and the narrowest symmetric pair of order statistics that covers it with `confidence`.

    It assumes independent values and no distribution (the interval of the sign test). Too few values cover less: then
    the bounds are the least and the largest, and `coverage` is their probability. Raises `InvalidValueError` without
    values.
    """
    if not values:
        raise InvalidValueError("no values have no median", "measure at least once")
    ordered, count = sorted(values), len(values)
    rank, coverage = 1, 1 - 2 / 2**count  # between the values of this rank from below and from above
    for further in range(2, (count + 1) // 2 + 1):
        reached = 1 - 2 * sum(math.comb(count, i) for i in range(further)) / 2**count
        if reached < confidence:
            break
        rank, coverage = further, reached
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank], coverage)


class Closeable(abc.ABC):
    """Closed by the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    ways: Mapping[str, Callable[[], float]], rounds: int, progress: Progress = silent, text: str = ""
) -> dict[str, Series]:
    """Run every way once a round, in order, so that the machine's drift meets all ways alike."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    with frozen_heap():
        for done in range(rounds):
            progress(done, rounds, text)
            for name, way in ways.items():
                values[name].append(way())
    progress(rounds, rounds, text)
    return {name: Series(tuple(found)) for name, found in values.items()}


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
    return {
        "ratio": found.median,
        "ratio_low": found.low,
        "ratio_high": found.high,
        "coverage": found.coverage,
        "pairs": len(ours),
    }


def ratio(ours: Series, other: Series) -> dict[str, float]:
    """Ours over the other: the ratio of the medians, and the least and largest of single rounds."""
    by_round = [a / b for a, b in zip(ours.values, other.values, strict=True)]
    return {"ratio": ours.median / other.median, "ratio_min": min(by_round), "ratio_max": max(by_round)}


def seconds(action: Callable[[], object]) -> float:
    """Seconds of one call."""
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
    """Every part of a report with a target, in order."""
    if isinstance(report, Mapping):
        own = [report] if "met" in report else []
        return [*own, *(found for value in report.values() for found in judged(value))]
    if isinstance(report, (list, tuple)):
        return [found for value in report for found in judged(value)]
    return []


def cause_of(error: BaseException) -> str:
    """An error in one line."""
    message = error.message if isinstance(error, GdsCacheError) else str(error)
    return " ".join(message.split()) or type(error).__name__


class ChildDiedError(IOFailedError):
    """A child process crashed, or exceeded its time and was killed."""


def child(
    module: str,
    function: str,
    *arguments: object,
    deadline_s: float = 600.0,
    package: str = "bench",
) -> dict[str, Any]:
    """Call a function of a module of this package, or of another package of `gdscache.commands`, with plain arguments,
    in a fresh interpreter. Returns its plain data.

    Raises `IOFailedError` with the cause of an error in the child, and `ChildDiedError` without an answer.
    """
    code = (
        f"import json; "
        f"from gdscache.commands.bench import measure; from gdscache.commands.{package} import {module} as module; "
        f"measure.answer(lambda: module.{function}(*json.loads({json.dumps(arguments)!r})))"
    )
    ended = run_child(code, [], deadline_s)
    answers = [line.removeprefix(_ANSWER) for line in ended.lines if line.startswith(_ANSWER)]
    if ended.cause or len(answers) != 1:
        raise ChildDiedError(ended.cause or "a child process gave no answer", "see gdscache doctor")
    found: dict[str, Any] = json.loads(answers[0])
    if "cause" in found:
        raise IOFailedError(found["cause"], found["hint"])
    answer: dict[str, Any] = found["answer"]
    return answer


def answer(action: Callable[[], object]) -> None:
    """In the child: print an action's result or error, in one line."""
    try:
        said = {"answer": action()}
    except (GdsCacheError, RuntimeError, OSError, MemoryError) as error:
        hint = error.hint if isinstance(error, GdsCacheError) else "run it alone to see"
        said = {"cause": cause_of(error), "hint": hint}
    print(f"\n{_ANSWER}{json.dumps(said)}", flush=True)  # libraries print too
