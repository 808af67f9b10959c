"""The plot of `gdscache replay`: hit rate over capacity. matplotlib is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.commands.bench.plots import require


def hit_rate_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw the hit rate in pages over the capacity: a line a policy, the optimum on top, what cannot be passed above.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require(path)
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(100 * report["infinite"]["hit_rate"], color="0.6", linestyle=":", label="infinite cache")
    _line(axes, report["optimum"], label="optimum (Belady)", color="black")
    for name in dict.fromkeys(run["policy"] for run in report["runs"]):
        _line(axes, [run for run in report["runs"] if run["policy"] == name], label=name)
    _line(axes, report["plain_lru"], label="plain LRU, blind to prefixes", color="0.6", linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, % of the trace's unique pages")
    axes.set_ylabel("pages hit, %")
    workload = report["workload"]
    axes.set_title(f"{workload['requests']:,} requests, pages of {workload['page_tokens']} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _line(axes: Any, rows: list[Mapping[str, Any]], **style: str) -> None:
    rates = [100 * row["hit_rate"] for row in rows]
    axes.plot([row["capacity_percent"] for row in rows], rates, marker="o", markersize=3, **style)
