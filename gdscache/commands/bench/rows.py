"""Report rows: figures measured in turns with references, as plain data, tables or bars."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from gdscache.commands.bench.measure import Series, ratio, target
from gdscache.commands.console import Table, duration, figure, verdict

Row = Mapping[str, Any]
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


@dataclasses.dataclass(frozen=True)
class Line:
    """A row for display. `low` and `high`: the ratio's spread; `limit`: its target, `relation` its direction."""

    what: str
    ours: str
    against: str
    ratio: float
    low: float
    high: float
    limit: float | None
    met: bool | None
    relation: str

    @classmethod
    def of(cls, what: str, row: Row, unit: str = RATE, ours: str = "figure", other: str = "against_figure") -> Self:
        """The line of a row with series at the keys `ours` and `other`."""
        low, high = (row.get(f"ratio_{a}", row.get(f"ratio_{b}")) for a, b in (("low", "min"), ("high", "max")))
        mine, others = (
            duration(row[key]["median"]) if unit == "s" else figure(row[key]["median"], unit) for key in (ours, other)
        )
        held, relation = f"{row['against']}: {others}", "at least" if unit == RATE else "at most"
        return cls(what, mine, held, row["ratio"], low, high, row.get("target"), row.get("met"), relation)


def lines_table(title: str, lines: Iterable[Line]) -> Table:
    """A table of figures, references, ratios with their spread, and targets if there are some."""
    some = list(lines)
    judged = any(line.limit is not None for line in some)
    table = Table(title, "what", "figure", "against", "ratio", *(["target"] if judged else []))
    for line in some:
        spread = f"{figure(line.ratio)} ({figure(line.low)} to {figure(line.high)})"
        said = "" if line.limit is None else verdict({"met": line.met, "target": line.limit}, line.relation)
        table.add_row(line.what, line.ours, line.against, spread, *([said] if judged else []))
    return table


def bars(axes: Any, lines: Sequence[Line]) -> None:
    """One horizontal bar a line, the first on top: its ratio with the spread, and a mark at its target."""
    for place, line in enumerate(lines):
        spread = [[max(line.ratio - line.low, 0.0)], [max(line.high - line.ratio, 0.0)]]
        axes.barh(place, line.ratio, 0.7, xerr=spread, color=COLORS[line.met], capsize=2, ecolor="black")
        if line.limit is not None:
            axes.plot([line.limit] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(lines)), [line.what for line in lines], fontsize=7)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    if max((line.high for line in lines), default=1) > 5:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    judged = any(line.limit is not None for line in lines)
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
