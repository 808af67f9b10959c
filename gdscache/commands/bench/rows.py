"""Report rows: figures measured in turns with references, as plain data, tables or bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gdscache.commands.bench.measure import Series, ratio, target
from gdscache.commands.console import Table, duration, figure, verdict

Row = Mapping[str, Any]
Line = tuple[str, Row]
"""A row, and its words in tables and plots."""
RATE = "GB/s"  # the unit of which more is better
COLORS = {True: "tab:blue", False: "tab:red", None: "tab:gray"}


def compared(
    what: str, ours: Series, against: str, other: Series, limit: float | None = None, **more: Any
) -> dict[str, Any]:
    """A row: `figure` (a series of rates), its reference, and the ratio of both. `limit`: the least ratio."""
    found = ratio(ours, other)
    return {
        "what": what,
        "unit": RATE,
        "figure": ours,
        "against": against,
        "against_figure": other,
        **found,
        **({} if limit is None else target(found["ratio"], limit, at_least=True)),
        **more,
    }


def spread(row: Row) -> tuple[float, float]:
    """The least and the largest of a row's ratio: of single rounds, or of an interval."""
    low, high = (row.get(f"ratio_{a}", row.get(f"ratio_{b}")) for a, b in (("low", "min"), ("high", "max")))
    return low, high


def lines_table(title: str, lines: Sequence[Line]) -> Table:
    """A table of figures, references, ratios with their spread, and targets if there are some."""
    judged = any("target" in row for _, row in lines)
    table = Table(title, "what", "figure", "against", "ratio", *(["target"] if judged else []))
    for what, row in lines:
        (low, high), seconds = spread(row), row["unit"] == "s"
        ours, other = (row[key]["median"] for key in ("figure", "against_figure"))
        shown = [duration(value) if seconds else figure(value, row["unit"]) for value in (ours, other)]
        said = verdict(row, "at most" if seconds else "at least") if "target" in row else ""
        ratio = f"{figure(row['ratio'])} ({figure(low)} to {figure(high)})"
        table.add_row(what, shown[0], f"{row['against']}: {shown[1]}", ratio, *([said] if judged else []))
    return table


def bars(axes: Any, lines: Sequence[Line]) -> None:
    """One horizontal bar a line, the first on top: its ratio with the spread, and a mark at its target."""
    for place, (_, row) in enumerate(lines):
        ratio, (low, high), limit = row["ratio"], spread(row), row.get("target")
        ends = [[max(ratio - low, 0.0)], [max(high - ratio, 0.0)]]
        axes.barh(place, ratio, 0.7, xerr=ends, color=COLORS[row.get("met")], capsize=2, ecolor="black")
        if limit is not None:
            axes.plot([limit] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(lines)), [what for what, _ in lines], fontsize=7)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    if max((spread(row)[1] for _, row in lines), default=1) > 5:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    judged = any("target" in row for _, row in lines)
    axes.set_xlabel("ratio with its spread" + ("; line: target; red: missed" if judged else ""))
    axes.grid(axis="x", alpha=0.3)


class Bar(NamedTuple):
    """Values of single rounds. `mark`: an ideal value."""

    name: str
    values: Sequence[float]
    color: str
    mark: float | None = None


def value_bars(axes: Any, bars: Sequence[Bar], label: str, shown: Callable[[float], str]) -> None:
    """One horizontal bar each, the first on top: the median with its figure, a dot for each value, and the mark."""
    for place, bar in enumerate(bars):
        median = statistics.median(bar.values)
        axes.barh(place, median, color=bar.color)
        axes.plot(bar.values, [place] * len(bar.values), ".", color="black", markersize=4)
        axes.annotate(shown(median), (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        if bar.mark is not None:
            axes.plot([bar.mark] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(label, fontsize=9)
