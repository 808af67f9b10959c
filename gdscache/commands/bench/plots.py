"""The plot of `gdscache bench engine`. matplotlib is imported when a plot is asked for, never before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gdscache.errors import InvalidValueError, MissingPackageError
from gdscache.sizes import about

FORMATS = (".png", ".svg", ".pdf")


def require(path: Path) -> ModuleType:
    """matplotlib, ready to draw into `path`.

    Raises `MissingPackageError` where it is not installed and `InvalidValueError` for a file name of unknown kind.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidValueError(f"no plot can be written as {path.name!r}", f"use a name in {', '.join(FORMATS)}")
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingPackageError(
            f"a plot needs matplotlib, which cannot be imported: {error}", "install gdscache[plot]"
        ) from error
    return matplotlib


def engine_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw GB/s of the tiers beside what they are compared with, as bars with the spread of the rounds."""
    matplotlib = require(path)
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    tier = report["ssd_tier"]
    labels = [f"{r['name']}\n{about(r['page_bytes'])}" for r in tier]
    _bars(left, labels, tier, "bare_gb_per_second", ("SSD tier", "bare O_DIRECT loop"))
    left.set_title("SSD tier, host memory")
    moved = [r for r in report["end_to_end"] if r["against"]]
    labels = [f"{r['name']} {r['tier']}\n{r['face']}" for r in moved]
    _bars(right, labels, moved, "against_gb_per_second", ("engine", "ceiling: bare loop (ssd), copy (cpu)"))
    right.set_title("Engine, from call to verdict")
    figure.suptitle(report["machine"]["cpu"] or "")
    figure.savefig(path, dpi=150)


def _bars(axes: Any, labels: Sequence[str], parts: Sequence[Any], other: str, names: tuple[str, str]) -> None:
    for shift, key, name in ((-0.2, "gb_per_second", names[0]), (0.2, other, names[1])):
        series = [part[key] for part in parts]
        middle = [s["median"] for s in series]
        spread = [
            [s["median"] - s["min"] for s in series],
            [s["max"] - s["median"] for s in series],
        ]
        axes.bar([i + shift for i in range(len(parts))], middle, 0.38, yerr=spread, capsize=2, label=name)
    axes.set_xticks(range(len(parts)), labels, fontsize=8)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
