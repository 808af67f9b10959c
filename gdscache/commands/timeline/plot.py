"""A timeline as a picture: tracks as rows, layers as colours. matplotlib is imported when a plot is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdscache.commands.console import require_matplotlib
from gdscache.commands.timeline.summary import Trace, TraceSpan

_OUTER = ("step", "begin", "load", "store", "prefetch")  # spans around others: drawn as a frame
_GREY = "0.55"


def timeline_plot(trace: Trace, path: Path) -> None:
    """Draw a trace into `path`: a row a track, milliseconds from its begin; waits are hatched.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require_matplotlib(path)
    figure = matplotlib.figure.Figure(figsize=(12, 1.6 + 0.5 * len(trace.tracks)), layout="constrained")
    axes = figure.subplots()
    layers = 1 + max((span.layer or 0 for span in trace.spans), default=0)
    colours = matplotlib.colormaps["viridis"].resampled(layers)
    origin = min((span.start for span in trace.spans), default=0.0)
    for row, track in enumerate(trace.tracks):
        for span in trace.spans:
            if span.track == track:
                _draw(axes, row, span, origin, colours)
    axes.set_yticks(range(len(trace.tracks)), _labels(trace.tracks))
    axes.set_ylim(len(trace.tracks) - 0.4, -0.6)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-0.5, layers - 0.5), colours), ax=axes, pad=0.01
    )
    bar.locator = matplotlib.ticker.MaxNLocator(integer=True)
    bar.update_ticks()
    bar.set_label("layer (the first of a group)")
    patch = matplotlib.patches.Patch
    axes.legend(
        handles=[
            patch(facecolor="white", edgecolor="crimson", hatch="////", label="wait for a layer"),
            patch(facecolor=_GREY, label="without a layer"),
            patch(facecolor="none", edgecolor="0.3", label="step, load, store"),
        ],
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def _labels(tracks: Sequence[str]) -> list[str]:
    """Names of tracks, without the number of an engine where there is one only."""
    plain = [re.sub(r" #\d+$", "", track) for track in tracks]
    return [short if plain.count(short) == 1 else track for short, track in zip(plain, tracks, strict=True)]


def _draw(axes: Any, row: int, span: TraceSpan, origin: float, colours: Any) -> None:
    bar = [((span.start - origin) / 1000, (span.end - span.start) / 1000)]
    if span.kind in _OUTER:
        axes.broken_barh(bar, (row - 0.42, 0.84), facecolors="none", edgecolors="0.3", linewidth=0.8)
    elif span.kind == "wait":
        axes.broken_barh(bar, (row - 0.2, 0.4), facecolors="white", edgecolors="crimson", hatch="////", linewidth=0.6)
    else:
        colour = _GREY if span.layer is None else colours(span.layer)
        height = 0.5 if span.kind == "check" else 0.7
        axes.broken_barh(bar, (row - height / 2, height), facecolors=colour, edgecolors="white", linewidth=0.3)
