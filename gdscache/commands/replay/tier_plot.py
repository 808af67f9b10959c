"""The plot of `gdscache replay` with tiers: hits over capacity, bytes of the SSD over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.commands.bench.plots import require
from gdscache.sizes import GIB

_SIZES = ("cpu", "ssd")  # what capacities are varied by


def tier_plot(report: Mapping[str, Any], path: Path) -> None:
    """Two plots side by side: pages hit over the capacity of all tiers, a line a policy, the optimum on top; and what
    the SSD has written (solid) and read (dashed) over virtual time, for the run of each policy with the most hits.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require(path)
    figure = matplotlib.figure.Figure(figsize=(13, 7), layout="constrained")
    left, right = figure.subplots(1, 2)
    unique = report["workload"]["unique_pages"]
    left.axhline(100 * report["infinite"]["hit_rate"], color="0.6", linestyle=":", label="infinite cache")
    _line(left, report["optimum"], unique, label="optimum (Belady)", color="black")
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for run in report["runs"]:
        label = ", ".join(f"{k} {v}" for k, v in run["varied"].items() if k not in _SIZES) or "as configured"
        lines.setdefault(label, []).append(run)
    for number, (label, runs) in enumerate(lines.items()):
        color = f"C{number % 10}"
        _line(left, sorted(runs, key=lambda run: run["capacity_pages"]), unique, label=label, color=color)
        best = max(runs, key=lambda run: run["hit_pages"])
        hours = [sample["seconds"] / 3600 for sample in best["samples"]]
        for key, style in (("ssd_written_bytes", "-"), ("ssd_read_bytes", "--")):
            right.plot(hours, [sample[key] / GIB for sample in best["samples"]], style, color=color)
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter("")
    left.set_ylim(bottom=0)
    left.set_xlabel("capacity of all tiers, % of the trace's unique pages")
    left.set_ylabel("pages hit, %")
    left.grid(alpha=0.3)
    right.set_xlabel("hours")
    right.set_ylabel("SSD: GiB written (solid), read (dashed)")
    right.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    workload = report["workload"]
    figure.suptitle(f"{workload['requests']:,} requests, full pages of {workload['page_tokens']} tokens")
    figure.savefig(path, dpi=150)


def _line(axes: Any, rows: list[Mapping[str, Any]], unique: int, **style: str) -> None:
    sizes = [100 * row["capacity_pages"] / unique for row in rows]
    axes.plot(sizes, [100 * row["hit_rate"] for row in rows], marker="o", markersize=3, **style)
