"""The plot of `gdscache bench ttft`: the time to first token of each cell beside recomputing and the ideal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.bench.plots import require
from gdscache.commands.bench.ttft_cells import NOWHERE, PLACES, SWITCHED

_LOOKS = {
    (True, False): ("tab:blue", "overlap"),
    (False, False): ("tab:orange", "no overlap"),
    (True, True): ("tab:green", "overlap, gate"),
    (False, True): ("tab:olive", "no overlap, gate"),
}


def ttft_plot(report: Mapping[str, Any], path: Path) -> None:
    """A panel a length of prompt: bars in groups by place and share that is cached, as much as was measured."""
    matplotlib = require(path)
    cells = [r for r in report["cells"] if r["where"] != NOWHERE]
    lengths = sorted({r["prompt_tokens"] for r in cells}) or [0]
    figure = matplotlib.figure.Figure(figsize=(14, 1.5 + 3.5 * len(lengths)), layout="constrained")
    for axes, length in zip(figure.subplots(len(lengths), 1, squeeze=False)[:, 0], lengths, strict=True):
        _panel(axes, [r for r in cells if r["prompt_tokens"] == length])
        axes.set_title(f"prompt of {length:,} tokens", fontsize=9)
    model = (report["model"] or {}).get("name", "")
    figure.suptitle(", ".join(filter(None, [model, *report["machine"]["gpus"]])) or report["machine"]["cpu"] or "")
    figure.savefig(path, dpi=150)


def _panel(axes: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    groups = sorted({(r["cached_percent"], PLACES.index(r["where"])) for r in cells})
    drawn: set[str] = set()

    def label(text: str) -> str | None:
        if text in drawn:
            return None
        drawn.add(text)
        return text

    for place, (cached, where) in enumerate(groups):
        some = [r for r in cells if (r["cached_percent"], PLACES.index(r["where"])) == (cached, where)]
        for r in some:
            switches = (r["overlap"], r["gate"])
            colour, name = _LOOKS[switches] if r["where"] in SWITCHED else ("tab:grey", "in the pool")
            at = place + (0.2 * (list(_LOOKS).index(switches) - 1.5) if r["where"] in SWITCHED else 0.0)
            ttft = r["ttft_seconds"]
            spread = [[max(ttft["median"] - ttft["min"], 0)], [max(ttft["p99"] - ttft["median"], 0)]]
            axes.bar(at, ttft["median"], 0.18, yerr=spread, color=colour, ecolor="black", capsize=2, label=label(name))
        recomputed, ideal = some[0]["recompute_seconds"]["median"], some[0]["ideal_seconds"]
        for value, style, name in ((recomputed, "--", "recomputing"), (ideal, "-", "ideal, max(c, t)")):
            if value is not None:
                axes.plot([place - 0.42, place + 0.42], [value] * 2, style, color="black", label=label(name))
    names = [f"{cached} %\n{PLACES[where].replace('_', ' ')}" for cached, where in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7)
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    if drawn:
        axes.legend(fontsize=7)
