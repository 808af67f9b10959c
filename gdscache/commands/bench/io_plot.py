"""The plot of `gdscache bench io`: throughput by I/O size, one panel an operation, and the comparisons as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench.io_cells import BASE_DEPTH, BASE_THREADS, BY_NAME, OPS, mixed_rate
from gdscache.commands.bench.io_rows import RATES
from gdscache.commands.bench.plots import require
from gdscache.sizes import format_size

_COLOURS = {"met": "tab:blue", "MISSED": "tab:red"}


def io_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw what was measured, as much as there is of it."""
    matplotlib = require(path)
    judged = [r for r in report["comparisons"] if "target" in r]
    figure = matplotlib.figure.Figure(figsize=(14, 9), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1))
    for axes, op in zip(top.subplots(1, len(OPS)), OPS, strict=True):
        _sizes(axes, op, _swept(report["cells"], op), report["ceilings"])
    _comparisons(bottom.subplots(1, 1), judged)
    figure.suptitle(", ".join(report["machine"]["gpus"]) or report["machine"]["cpu"] or "")
    figure.savefig(path, dpi=150)


def _swept(cells: Sequence[Mapping[str, Any]], op: str) -> list[Mapping[str, Any]]:
    """The cells of an operation at one depth and thread count: the default profile's, or else the most frequent."""
    some = [c for c in cells if c["op"] == op]
    places = [(c["depth"], c["threads"]) for c in some]
    base = (BASE_DEPTH, BASE_THREADS)
    chosen = base if base in places else max(set(places), key=places.count, default=base)
    return [c for c in some if (c["depth"], c["threads"]) == chosen]


def _sizes(axes: Any, op: str, cells: Sequence[Mapping[str, Any]], ceilings: Mapping[str, Any]) -> None:
    for name, way in BY_NAME.items():
        own = sorted((c for c in cells if c["way"] == name), key=lambda c: int(c["io_bytes"]))
        if own:
            axes.plot([c["io_bytes"] for c in own], [c["gb_per_second"]["median"] for c in own], "o-", label=way.label)
    medians = {kind: found["gb_per_second"]["median"] for kind, found in ceilings.items()}
    if op == "mixed" and len(medians) == 2:
        medians["mixed"] = mixed_rate(medians["read"], medians["write"])
    if (kind := op.split()[-1]) in medians:
        axes.axhline(medians[kind], color="black", linestyle="--", label="bare loop")
    axes.set_xscale("log", base=2)
    sizes = sorted({c["io_bytes"] for c in cells})
    axes.set_xticks(sizes, [format_size(size) for size in sizes], fontsize=7, rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(op if not cells else f"{op}, depth {cells[0]['depth']}, {cells[0]['threads']} threads", fontsize=9)
    axes.set_ylabel("GB/s")
    if axes.lines:
        axes.legend(fontsize=7)


def _comparisons(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One horizontal bar a ratio over its target, with the spread of the rounds: 1 is the target."""
    for place, r in enumerate(rows):
        met, share = ("met" if r["met"] else "MISSED"), r["ratio"] / r["target"]
        spread = [[share - r["ratio_min"] / r["target"]], [r["ratio_max"] / r["target"] - share]]
        spread = [[max(value, 0.0) for value in side] for side in spread]
        axes.barh(place, share, 0.7, xerr=spread, color=_COLOURS[met], capsize=2, ecolor="black")
    axes.set_xscale("log")  # a median of a call may be many times its target
    axes.axvline(1, color="black", linewidth=2)
    labels = [
        f"{r['what']} / {r['against']} ({'at least' if r['unit'] in RATES else 'at most'} {r['target']:g})"
        for r in rows
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("ratio over its target, with the spread of the rounds; red: missed")
