"""The report of `gdscache bench policy` for people: tables and plots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gdscache.commands.bench.plots import require
from gdscache.commands.bench.report import new_table, verdict
from gdscache.errors import InvalidValueError

POLICY_SCHEMA = "gdscache.bench.policy/1"
COLUMNS = 4  # of plots
MARKERS = "os^Dvx"


def policy_tables(report: Mapping[str, Any]) -> list[Table]:
    """A table a kind of traffic, the default order's targets, and what the index costs."""
    tables = [_traffic(part) for part in report["traffic"]]
    judged = new_table(f"The default, {report['default']}, against plain LRU", "traffic", "%", "hits", "gap closed", "")
    for row in report["eviction"]:
        closed = "" if row["gap_closed"] is None else f"{row['gap_closed']:.1%}"
        size = f"{row['capacity_percent']:.3g}"
        judged.add_row(row["traffic"], size, f"{row['ratio']:.4f}", closed, verdict(row, "at least"))
    for row in report["skipped"]:
        judged.add_row(row["traffic"], "", "", "", f"skipped: {row['why']}")
    if report["replay"] is not None:
        row = report["replay"]
        judged.add_row("recorded", "", f"{row['seconds']:.1f} s", "", verdict(row, "at most"))
    cost = new_table(
        f"Index with {report['index']['policy']}: look up, store and evict a page", "pages", "us a page", ""
    )
    for row in report["index"]["rows"]:
        cost.add_row(f"{row['pages']:,}", f"{row['us_per_page']['median']:.1f}", verdict(row, "at most"))
    flat = report["index"]["flatness"]
    cost.add_row("slowest / smallest", f"{flat['ratio']:.2f}", verdict(flat, "at most"))
    return [*tables, judged, *_admission_tables(report["admission"]), cost]


def _admission_tables(admission: Mapping[str, Any]) -> list[Table]:
    """A table a kind of traffic: pages found and written by each setting, the frontier and the default marked."""
    tables = []
    for name in dict.fromkeys(run["traffic"] for run in admission["runs"]):
        groups = _groups(run for run in admission["runs"] if run["traffic"] == name)
        title = f"{name}: pages found and pages written to the SSD (* on the frontier, + among its write policy's)"
        heads = [f"{eviction}, {percent:.3g} %" for _, eviction, percent in groups]
        table = new_table(title, "setting", *heads)
        for label in dict.fromkeys(run["label"] for runs in groups.values() for run in runs):
            cells = [next((run for run in runs if run["label"] == label), None) for runs in groups.values()]
            named = f"{label} (default)" if label == admission["default"] else label
            table.add_row(named, *("" if run is None else _written(run) for run in cells))
        tables.append(table)
    judged = new_table(
        f"The default, {admission['default']}: does another admission write less at its hits?",
        *("traffic", "SSD %", "found", "written", "any other setting that does", ""),
    )
    for row in admission["verdicts"]:
        other = "" if row["frontier"] else f"{row['least_label']}: {row['least_written_pages']:,}"
        counts = f"{row['hit_pages']:,}", f"{row['written_pages']:,}"
        met = "met: no" if row["met"] else "MISSED: yes"
        judged.add_row(row["traffic"], f"{row['ssd_percent']:.3g}", *counts, other, met)
    return [*tables, judged] if tables else []


def _written(run: Mapping[str, Any]) -> str:
    mark = "*" if run["frontier"] else "+" if run["frontier_of_admissions"] else " "
    return f"{run['hit_pages']:,} {run['written_pages']:,} {mark}"


def _groups(runs: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, float], list[Mapping[str, Any]]]:
    """Runs that can be compared: of one kind of traffic, one order of eviction, one size."""
    groups: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["traffic"], run["eviction"], run["ssd_percent"]), []).append(run)
    return groups


def _traffic(part: Mapping[str, Any]) -> Table:
    sizes = [row["capacity_percent"] for row in part["optimum"]]
    title = f"{part['traffic']}: hits of plain LRU's, and of the gap to the optimum closed"
    table = new_table(title, "policy", *(f"{size:.3g} %" for size in sizes))
    for name in dict.fromkeys(run["policy"] for run in part["runs"]):
        runs = [run for run in part["runs"] if run["policy"] == name]
        table.add_row(name, *(f"{_share(run['of_plain_lru'])} {_closed(run['gap_closed'])}" for run in runs))
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _closed(value: float | None) -> str:
    return "" if value is None else f"({value:+.0%})"


def policy_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw, for each kind of traffic, hits as a share of plain LRU's over the capacity: a line a policy.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require(path)
    parts = report["traffic"]
    rows = -(-len(parts) // COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(4 * COLUMNS, 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    for axes, part in zip(grid.flat, parts, strict=False):
        for name in dict.fromkeys(run["policy"] for run in part["runs"]):
            _line(axes, [run for run in part["runs"] if run["policy"] == name], name, name == report["default"])
        base = {row["capacity_pages"]: row["hit_pages"] for row in part["plain_lru"]}
        best = [(row["capacity_percent"], row["hit_pages"], base[row["capacity_pages"]]) for row in part["optimum"]]
        known = [(percent, hits / plain) for percent, hits, plain in best if plain]
        if known:
            axes.plot(*zip(*known, strict=True), color="black", linestyle=":", label="optimum (Belady)")
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        top = max([run["of_plain_lru"] or 0 for run in part["runs"]], default=1.0)
        axes.set_ylim(0.6, 1.05 * max(top, 1.1))
        axes.set_title(part["traffic"])
        axes.grid(alpha=0.3)
        axes.set_xlabel("capacity, % of unique pages")
    grid[0][0].set_ylabel("hits, of plain LRU's")
    grid[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _line(axes: Any, runs: list[Mapping[str, Any]], name: str, bold: bool) -> None:
    known = [(run["capacity_percent"], run["of_plain_lru"]) for run in runs if run["of_plain_lru"] is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=2.5 if bold else 1, label=name)


def admission_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw hits over bytes written, a panel for each kind of traffic, order of eviction and size of the SSD.

    A colour an admission, a marker a write policy; the line is the frontier, the ring the default. Raises as
    `policy_plot` does, and `InvalidValueError` for a report without such runs.
    """
    matplotlib = require(path)
    groups = _groups(report["admission"]["runs"])
    if not groups:
        raise InvalidValueError("the report has no runs of admissions", "measure them, or ask for no such plot")
    columns = min(COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    figure = matplotlib.figure.Figure(figsize=(4 * columns, 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(groups) :]:
        axes.set_visible(False)
    admissions = list(dict.fromkeys(_admission(run) for runs in groups.values() for run in runs))
    writes = list(dict.fromkeys(_write(run) for runs in groups.values() for run in runs))
    look = {
        (write, admission): {"marker": marker, "color": f"C{i}"}
        for i, admission in enumerate(admissions)
        for write, marker in zip(writes, itertools.cycle(MARKERS), strict=False)
    }
    for axes, ((name, eviction, percent), runs) in zip(grid.flat, groups.items(), strict=False):
        _scatter(axes, runs, look)
        axes.set_title(f"{name}, {eviction}, SSD of {percent:.3g} %", fontsize=9)
        axes.grid(alpha=0.3)
        axes.set_xscale("log")
        axes.set_xlabel(f"GB written ({report['admission']['model']})", fontsize=8)
    first = grid[0][0]
    first.set_ylabel("share of pages found")
    for admission in admissions:
        first.plot([], [], linestyle="", **{**look[writes[0], admission], "marker": "s"}, label=admission)
    for write in writes:
        first.plot([], [], linestyle="", **{**look[write, admissions[0]], "color": "0.3"}, label=write)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=2 * columns, fontsize=7)
    figure.savefig(path, dpi=120)


def _scatter(axes: Any, runs: Sequence[Mapping[str, Any]], look: Mapping[tuple[str, str], Mapping[str, str]]) -> None:
    at = {run["label"]: (max(1, run["written_bytes"]) / 1e9, run["hit_rate"]) for run in runs}
    best = sorted(at[run["label"]] for run in runs if run["frontier"])
    axes.plot(*zip(*best, strict=True), color="0.4", linewidth=0.8, drawstyle="steps-post", label="frontier")
    for run in runs:
        axes.plot(*at[run["label"]], linestyle="", markersize=5, **look[_write(run), _admission(run)])
        if run["default"]:
            plain = {"markersize": 12, "markerfacecolor": "none", "color": "black", "linestyle": ""}
            axes.plot(*at[run["label"]], marker="o", **plain, label="default")


def _admission(run: Mapping[str, Any]) -> str:
    return f"{run['admission']} ({run['admission_offers']})" if run["admission"] == "second_offer" else run["admission"]


def _write(run: Mapping[str, Any]) -> str:
    write: str = run["write_policy"]
    return f"{write} ({run['write_hits']})" if write == "write_through_selective" else write
