"""The plots of `gdscache replay`. matplotlib is imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.commands.console import require_matplotlib

Row = Mapping[str, Any]
_SIZES = ("cpu", "ssd")  # the varied capacities
_GB = 1e9


def replay_plot(report: Row, path: Path) -> None:
    """Plot the hit pages over the capacity: a line for each policy, the optimum, and an infinite cache as the limit; as
    bars for a single capacity. For several runs with an SSD, a second plot has the hit pages over the bytes written, a
    point for each run; the line is the frontier. For a model with states: the hit tokens over the CPU tier, beside
    vLLM's own offloading.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for an unknown file name suffix.
    """
    matplotlib = require_matplotlib(path)
    written = [run for run in report["runs"] if run.get("ssd") and len(report["runs"]) > 1]
    one = len(report["optimum"]) == 1
    figure = matplotlib.figure.Figure(figsize=(13 if written else 8, 3 if one else 6), layout="constrained")
    panels = figure.subplots(1, 2 if written else 1, squeeze=False)[0]
    lines: dict[str, list[Row]] = {}
    for run in report["runs"]:
        lines.setdefault(_label(run), []).append(run)
    colors = {label: f"C{number % 10}" for number, label in enumerate(lines)}
    if all(run["offloading"] for run in report["runs"]):
        _over_memory(panels[0], lines, colors)
    elif one:
        _bars(panels[0], report, colors)
    else:
        _over_capacity(panels[0], report, lines, colors)
    if written:
        _over_writes(panels[1], written, colors)
    if not one or written:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    workload = report["workload"]
    figure.suptitle(f"{workload['requests']:,} requests, pages of {workload['page_tokens']} tokens")
    figure.savefig(path, dpi=150)


def _label(run: Row) -> str:
    return ", ".join(f"{k} {v}" for k, v in run["varied"].items() if k not in _SIZES) or "as configured"


def _bars(axes: Any, report: Row, colors: Mapping[str, str]) -> None:
    runs = [(_label(run), run["hit_rate"], colors[_label(run)]) for run in report["runs"]]
    (best,), (plain,) = report["optimum"], report["plain_lru"]
    ends = ("infinite cache", report["infinite"]["hit_rate"], "0.8"), ("optimum (Belady)", best["hit_rate"], "black")
    for place, (name, rate, color) in enumerate([*ends, *runs, ("plain LRU", plain["hit_rate"], "0.6")]):
        axes.barh(place, 100 * rate, color=color, label=name)
        axes.annotate(f"{100 * rate:.1f}", (100 * rate, place), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(runs) + 3), ["infinite cache", "optimum", *(name for name, _, _ in runs), "plain LRU"])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"pages hit, %; all tiers hold {best['capacity_percent']:.3g} % of the trace's unique pages")


def _over_capacity(axes: Any, report: Row, lines: Mapping[str, list[Row]], colors: Mapping[str, str]) -> None:
    axes.axhline(100 * report["infinite"]["hit_rate"], color="0.6", linestyle=":", label="infinite cache")
    _line(axes, report["optimum"], label="optimum (Belady)", color="black")
    for label, runs in lines.items():
        _line(axes, runs, label=label, color=colors[label])
    _line(axes, report["plain_lru"], label="plain LRU, blind to prefixes", color="0.6", linestyle="--")
    axes.set_xscale("log")
    percent = sorted({row["capacity_percent"] for row in report["optimum"]})
    axes.set_xticks(_apart(percent), [f"{value:.3g}" for value in _apart(percent)])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity of all tiers, % of the trace's unique pages")
    axes.set_ylabel("pages hit, %")
    axes.grid(alpha=0.3)


def _over_memory(axes: Any, lines: Mapping[str, list[Row]], colors: Mapping[str, str]) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for label, runs in lines.items():
        for run in runs:
            size = run["tiers"]["cpu"]["capacity_bytes"] / (1 << 30)
            found.setdefault(label, []).append((size, 100 * run["token_hit_rate"]))
            for rule, rate in run["offloading"].items():
                found.setdefault(f"vLLM's own offloading: {rule}", []).append((size, 100 * rate))
    for number, (label, points) in enumerate(found.items()):
        style = {"color": colors[label]} if label in colors else {"linestyle": "--", "color": f"C{number % 10}"}
        axes.plot(*zip(*sorted({*points}), strict=True), marker="o", markersize=3, label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("CPU tier, GiB")
    axes.set_ylabel("tokens hit, %")
    axes.grid(alpha=0.3)


def _line(axes: Any, rows: list[Row], **style: str) -> None:
    points = sorted((row["capacity_percent"], 100 * row["hit_rate"]) for row in rows)
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, **style)


def _over_writes(axes: Any, runs: list[Row], colors: Mapping[str, str]) -> None:
    for size in sorted({run["capacity_pages"] for run in runs}):
        same = [run for run in runs if run["capacity_pages"] == size]
        best = sorted(_written(run) for run in same if run["frontier"])
        axes.plot(*zip(*best, strict=True), color="0.6", linewidth=0.8, drawstyle="steps-post")
        top = max(same, key=lambda run: run["hit_pages"])
        where = {"textcoords": "offset points", "xytext": (0, 6), "fontsize": 8, "ha": "right"}
        axes.annotate(f"{top['capacity_percent']:.3g} %", _written(top), **where)
    for run in runs:
        axes.plot(*_written(run), marker="o", markersize=5, color=colors[_label(run)])
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.set_xlabel("GB written to the SSD (grey: the frontier of each capacity)")
    axes.set_ylabel("pages hit, %")
    axes.grid(alpha=0.3)


def _written(run: Row) -> tuple[float, float]:
    return run["ssd"]["written_bytes"] / _GB, 100 * run["hit_rate"]


def _apart(values: list[float]) -> list[float]:
    """A selection of ascending values with room for their labels on a logarithmic axis that ends at the last one."""
    found: list[float] = []
    for value in values:
        if not found or value >= found[-1] * (values[-1] / values[0]) ** 0.06:
            found.append(value)
    return found
