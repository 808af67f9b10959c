"""Changes between two bench reports beyond their noise. Behind `gdscache bench compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gdscache.commands.bench.figures import RATE, spread
from gdscache.commands.bench.report import JSON_NAME
from gdscache.commands.console import Table, figure, reason_of
from gdscache.errors import InvalidValueError

QUIET = ("same", "unsure")  # words for no known change
_ROUNDS = 4  # in each report: with fewer rounds, spreads miss each other by chance in more than one of twenty cases
_LESS = ("s", "us", "bytes")  # units of which less is better; of `RATE` more is better


class Figure(NamedTuple):
    """A measured figure with its spread. `more`: whether more of it is better; None: unknown."""

    middle: float
    low: float
    high: float
    more: bool | None
    rounds: int


class Change(NamedTuple):
    """A figure of both reports. `ratio`: the second median divided by the first."""

    name: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float:
        return self.after.middle / self.before.middle

    @property
    def word(self) -> str:
        """`same` if the spreads of all rounds meet, `unsure` if a report has fewer than four rounds; else `better` or
        `worse`, or `other` if the better direction is unknown."""
        if self.after.low <= self.before.high and self.before.low <= self.after.high:
            return "same"
        if min(self.before.rounds, self.after.rounds) < _ROUNDS:
            return "unsure"
        if self.before.more is None:
            return "other"
        return "better" if (self.ratio > 1) == self.before.more else "worse"


def compare(first: Path, second: Path) -> tuple[list[Change], list[str], list[str]]:
    """Figures of both reports, the largest changes first, and the names of figures in only one of them. Raises
    `InvalidValueError` unless the files are reports of the same benches."""
    a, b = _figures(first), _figures(second)
    both = [Change(name, a[name], b[name]) for name in a if name in b and a[name].middle and b[name].middle]
    if not both:
        raise InvalidValueError(f"{first} and {second} have no figure in common", "name two reports of one bench")
    both.sort(key=lambda change: (change.word in QUIET, -abs(change.ratio - 1)))
    return both, [name for name in a if name not in b], [name for name in b if name not in a]


def shown(both: Sequence[Change], gone: Sequence[str], new: Sequence[str], *, everything: bool) -> tuple[Table, str]:
    """A table of the changes, with `everything` of all figures, and their numbers in a sentence."""
    table = Table("", "figure", "A", "B", "B / A", "")
    for one in both:
        if everything or one.word not in QUIET:
            spread = [f"{figure(f.middle)} ({figure(f.low)} to {figure(f.high)})" for f in (one.before, one.after)]
            table.add_row(one.name, *spread, figure(one.ratio), one.word)
    words = [one.word for one in both]
    counts = [f"{words.count(word)} {word}" for word in ("better", "worse", "other", *QUIET) if word in words]
    alone = f"{len(gone)} are in A alone, {len(new)} in B alone"
    return table, f"{len(both)} figures are in both reports: {', '.join(counts)}. {alone}."


def _figures(path: Path) -> dict[str, Figure]:
    file = path / JSON_NAME if path.is_dir() else path
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"{file} cannot be read: {reason_of(error)}", "name a report, or the folder of one"
        ) from None
    if not isinstance(report, dict) or not str(report.get("schema", "")).startswith("gdscache.bench."):
        raise InvalidValueError(f"{file} is no report of gdscache bench", "see gdscache bench --help")
    benches = report.get("benches", {report["schema"].split(".")[2].partition("/")[0]: report})
    return {
        f"{name}: {key}": figure
        for name, bench in benches.items()
        for section, rows in bench.items()
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict)
        for key, figure in _of_row(section, row)
    }


def _of_row(section: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """A row's ratio to its reference, if it has one: the ratio is steadier than the figure itself. Else its series."""
    words = [str(row[key]) for key in ("case", "what", "op", "against", "direction") if key in row]
    words += [f"{row[key]:,} B" for key in ("io_bytes", "page_bytes") if key in row]
    name = ", ".join(dict.fromkeys(words)) or section
    unit = row.get("unit", RATE if "gb_per_second" in row else "")  # such a row is of `bench copy`, format 5
    more = True if unit == RATE else False if unit in _LESS else None
    if "ratio" in row:
        rounds = row.get("figure", row.get("gb_per_second", {})).get("values", ())
        yield f"{name} (ratio)", Figure(row["ratio"], *spread(row), more, len(rounds))
        return
    for key, series in row.items():
        if isinstance(series, Mapping) and {"median", "min", "max"} <= series.keys():
            better = False if key.endswith("_seconds") else more
            rounds = series.get("values", ())
            yield f"{name}, {key}", Figure(series["median"], series["min"], series["max"], better, len(rounds))
