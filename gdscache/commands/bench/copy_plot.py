"""The plot of `gdscache bench copy`: ratios as bars with their intervals, and the targets as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench.copy_report import part
from gdscache.commands.bench.plots import require

_COLOURS = {"met": "tab:blue", "MISSED": "tab:red", "": "tab:grey"}


def copy_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw every ratio that has a target, and what copies and work beside each other come to."""
    matplotlib = require(path)
    alone = [r for r in report["copies"] if "target" in r]
    bars = [(f"{r['direction']}  {r['geometry']} {r['page_tokens']}, {part(r)}", r) for r in alone]
    beside = []
    for r in report["beside"]:
        way = ("with checksums" if r["sums"] else r["path"]) + f"\nagainst {r['against']}"
        beside += [(f"copy beside {r['beside']}\n{way}", r["copy"]), (f"{r['beside']}, time\n{way}", r["work"])]
    height = 1.5 + max(0.2 * len(bars), 0.4 * len(beside), 2.0)
    figure = matplotlib.figure.Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, bars)
    left.set_title("Copies: GB/s / GB/s of cudaMemcpyAsync")
    _bars(right, beside)
    right.set_title("Beside a model's work")
    figure.suptitle(", ".join(report["machine"]["gpus"]))
    figure.savefig(path, dpi=150)


def _bars(axes: Any, bars: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """One horizontal bar a ratio, the first on top, with its interval and a line where its target is."""
    for place, (_, r) in enumerate(bars):
        spread = [[r["ratio"] - r["ratio_low"]], [r["ratio_high"] - r["ratio"]]]
        verdict = ("met" if r["met"] else "MISSED") if "target" in r else ""
        axes.barh(place, r["ratio"], 0.7, xerr=spread, color=_COLOURS[verdict], capsize=2, ecolor="black")
        if "target" in r:
            axes.plot([r["target"]] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio, with the 95 % interval of the median; lines: target; red: missed")
    axes.grid(axis="x", alpha=0.3)
