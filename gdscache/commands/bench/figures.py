"""Figures: measured in turns with a reference, as rows of plain data; and panels of them, as tables or bars."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from gdscache.commands.console import Progress, Table, duration, figure, silent, verdict

K = TypeVar("K")
T = TypeVar("T")

Series = dict[str, Any]
"""A quantity measured once a round: its median, spread and all values, as plain data."""
Row = Mapping[str, Any]
Line = tuple[str, Row]
"""A row, and its words in tables and plots."""
RATE = "GB/s"  # the unit of which more is better
COLORS = {True: "tab:blue", False: "tab:red", None: "tab:gray"}


# -- measuring ---------------------------------------------------------------------------------------------------------


def in_turns(
    ways: Mapping[K, Callable[[], T]], rounds: int, progress: Progress = silent, text: str = ""
) -> dict[K, list[T]]:
    """Run every way once a round, so that the machine's drift meets all ways alike; every other round in reverse
    order. Returns the answers by way, a round each.

    Existing objects are exempt from garbage collection meanwhile, as servers have it after their start: a process with
    torch has half a million objects. Enough allocations start a full collection, which searches all of them for a tenth
    of a second. Objects of the measured code are collected as usual.
    """
    found: dict[K, list[T]] = {name: [] for name in ways}
    gc.collect()
    gc.freeze()
    try:
        for done in range(rounds):
            progress(done, rounds, text)
            for name in found if done % 2 == 0 else reversed(found):
                found[name].append(ways[name]())
    finally:
        gc.unfreeze()
    progress(rounds, rounds, text)
    return found


def idle(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(nbytes: int, elapsed: float) -> float:
    """GB/s (10^9 bytes)."""
    return nbytes / elapsed / 1e9


def copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """GB/s of one copy to an idle device."""
    idle(target.device)
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    idle(target.device)
    return rate(source.nbytes, time.perf_counter() - start)


# -- rows --------------------------------------------------------------------------------------------------------------


def series(values: Iterable[float]) -> Series:
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "values": found}


def target(value: float, limit: float, *, at_least: bool) -> dict[str, Any]:
    """A figure's target as plain data, and whether it is met."""
    return {"target": limit, "met": value >= limit if at_least else value <= limit}


def compared(
    what: str,
    ours: Series,
    against: str,
    other: Series,
    limit: float | None = None,
    *,
    unit: str = RATE,
    pairs: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A row: `figure`, its reference, and the ratio of both: of their medians, with those of single rounds; or of
    `pairs` of rounds, the median with its interval. `limit`: the least ratio of rates, the largest of seconds."""
    by_round = [a / b for a, b in zip(ours["values"], other["values"], strict=True)]
    if pairs:
        found, low, high, coverage = median_interval(by_round)
        ratio = {"ratio": found, "ratio_low": low, "ratio_high": high, "coverage": coverage, "pairs": len(by_round)}
    else:
        found = ours["median"] / other["median"]
        ratio = {"ratio": found, "ratio_min": min(by_round), "ratio_max": max(by_round)}
    judged = {} if limit is None else target(found, limit, at_least=unit == RATE)
    figures = {"unit": unit, "figure": ours, "against": against, "against_figure": other}
    return {"what": what, **figures, **ratio, **judged, **more}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float, float]:
    """The median, the narrowest symmetric pair of order statistics that covers it with `confidence`, and the pair's
    probability.

    It assumes independent values and no distribution (the interval of the sign test). Too few values cover less: then
    the bounds are the least and the largest.
    """
    ordered, count = sorted(values), len(values)
    rank, coverage = 1, 1 - 2 / 2**count  # between the values of this rank from below and from above
    for further in range(2, (count + 1) // 2 + 1):
        reached = 1 - 2 * sum(math.comb(count, i) for i in range(further)) / 2**count
        if reached < confidence:
            break
        rank, coverage = further, reached
    return statistics.median(ordered), ordered[rank - 1], ordered[-rank], coverage


def spread(row: Row) -> tuple[float, float]:
    """The least and the largest of a row's ratio: of single rounds, or of an interval."""
    low, high = (row.get(f"ratio_{a}", row.get(f"ratio_{b}")) for a, b in (("low", "min"), ("high", "max")))
    return low, high


def in_words(what: str, row: Row, reference: str) -> str:
    """A row's rate beside its reference, as a part of a sentence."""
    ours, best = (figure(row[key]["median"]) for key in ("figure", "against_figure"))
    return f"{ours} GB/s of {what}, {figure(row['ratio'])} of the {best} GB/s {reference}"


# -- panels ------------------------------------------------------------------------------------------------------------


class Ratios(NamedTuple):
    """Rows with a ratio to a reference."""

    title: str
    lines: Sequence[Line]

    def table(self) -> Table:
        """Figures, references, ratios with their spread, and targets if there are some."""
        judged = any("target" in row for _, row in self.lines)
        table = Table(self.title, "what", "figure", "against", "ratio", *(["target"] if judged else []))
        for what, row in self.lines:
            (low, high), seconds = spread(row), row["unit"] == "s"
            ours, other = (row[key]["median"] for key in ("figure", "against_figure"))
            shown = [duration(value) if seconds else figure(value, row["unit"]) for value in (ours, other)]
            said = verdict(row, "at most" if seconds else "at least") if "target" in row else ""
            ratio = f"{figure(row['ratio'])} ({figure(low)} to {figure(high)})"
            table.add_row(what, shown[0], f"{row['against']}: {shown[1]}", ratio, *([said] if judged else []))
        return table

    def draw(self, axes: Any) -> None:
        """A bar each, with its spread and a mark at its target."""
        for place, (_, row) in enumerate(self.lines):
            ratio, (low, high), limit = row["ratio"], spread(row), row.get("target")
            ends = [[max(ratio - low, 0.0)], [max(high - ratio, 0.0)]]
            axes.barh(place, ratio, 0.7, xerr=ends, color=COLORS[row.get("met")], capsize=2, ecolor="black")
            if limit is not None:
                axes.plot([limit] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
        if max(spread(row)[1] for _, row in self.lines) > 5:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        judged = any("target" in row for _, row in self.lines)
        axes.set_xlabel("ratio with its spread" + ("; line: target; red: missed" if judged else ""))
        axes.grid(axis="x", alpha=0.3)


class Bar(NamedTuple):
    """Values of single rounds. `mark`: an ideal value. `faster`: the speed against the reference of the same turns, if
    that is not the first bar's."""

    name: str
    values: Sequence[float]
    color: str
    mark: float | None = None
    faster: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Values(NamedTuple):
    """Values of several ways. The first one is the reference. `less`: less is faster."""

    title: str
    lines: Sequence[Bar]
    label: str
    shown: Callable[[float], str]
    less: bool = True

    def table(self) -> Table:
        """Medians with their spread, and how many times as fast as the first they are."""
        table = Table(self.title, "", self.label, "times as fast")
        for bar in self.lines:
            first, median = self.lines[0].median, bar.median
            low, high = self.shown(min(bar.values)), self.shown(max(bar.values))
            faster = bar.faster or (first / median if self.less else median / first)
            times = "" if bar is self.lines[0] else figure(faster)
            table.add_row(bar.name, f"{self.shown(median)} ({low} to {high})", times)
        return table

    def draw(self, axes: Any) -> None:
        """A bar each: the median with its figure, a dot for each value, and the mark."""
        for place, bar in enumerate(self.lines):
            axes.barh(place, bar.median, color=bar.color)
            axes.plot(bar.values, [place] * len(bar.values), ".", color="black", markersize=4)
            axes.annotate(
                self.shown(bar.median), (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
            if bar.mark is not None:
                axes.plot([bar.mark] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
        axes.set_xlim(left=0)
        axes.set_xlabel(self.label, fontsize=9)


def draw(panels: Sequence[Ratios | Values], drawn: Any) -> None:
    """Panels that have bars, one below the other; in each the first bar is on top."""
    some = [panel for panel in panels if panel.lines]
    heights = [len(panel.lines) + 3 for panel in some]
    drawn.set_size_inches(11, 1 + 0.25 * sum(heights))
    places = drawn.subplots(len(some), 1, squeeze=False, height_ratios=heights)[:, 0] if some else ()
    for axes, panel in zip(places, some, strict=True):
        panel.draw(axes)
        axes.set_yticks(range(len(panel.lines)), [line[0] for line in panel.lines], fontsize=7)
        axes.set_ylim(len(panel.lines) - 0.4, -0.6)
        axes.set_title(panel.title, fontsize=9)
