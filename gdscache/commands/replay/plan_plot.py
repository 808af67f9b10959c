"""The plot of `gdscache plan`: hits, and the mean time to the first token, over capacity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.commands.bench.plots import require
from gdscache.sizes import GIB, about

_LINES = 8  # of CPU pools with an SSD


def plan_plot(report: Mapping[str, Any], path: Path) -> None:
    """Two plots side by side: the hit curve with its knee, the optimum and the infinite cache; and the mean time to the
    first token over the size of the SSD, a line for each CPU pool of the grid. A star is what is recommended.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require(path)
    figure = matplotlib.figure.Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _hits(left, report)
    _seconds(right, report)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    chosen = report["recommended"]
    ssd = f"an SSD of {about(chosen['ssd_bytes'])}" if chosen["ssd_bytes"] else "no SSD"
    figure.suptitle(f"Recommended: a CPU pool of {about(chosen['cpu_bytes'])}, {ssd}")
    figure.savefig(path, dpi=150)


def _hits(axes: Any, report: Mapping[str, Any]) -> None:
    share = "token_hit_rate" if report["mode"] == "curve" else "hit_rate"
    rows, chosen, knee = report["curve"], report["recommended"], report["knee"]
    sizes = [row["capacity_bytes"] / GIB for row in rows]
    axes.axhline(100 * report["infinite"][share], color="0.6", linestyle=":", label="infinite cache")
    if "optimum_hit_rate" in rows[0]:
        axes.plot(sizes, [100 * row["optimum_hit_rate"] for row in rows], "o-", ms=3, color="black", label="optimum")
    axes.plot(sizes, [100 * row["hit_rate"] for row in rows], "o-", ms=3, label="one tier, the engine's policy")
    axes.axvline(knee["capacity_bytes"] / GIB, color="C0", linestyle="--", label="knee")
    whole = max(chosen["cpu_bytes"], chosen["ssd_bytes"]) / GIB
    axes.plot([whole], [100 * chosen[share]], "*", ms=14, color="C3", label="recommended")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, GiB")
    axes.set_ylabel("hits, % of " + ("tokens" if report["mode"] == "curve" else "pages"))


def _seconds(axes: Any, report: Mapping[str, Any]) -> None:
    chosen, sample = report["recommended"], report.get("sample")
    axes.axhline(report["no_cache_first_token_seconds"]["mean"], color="0.3", linestyle=":", label="no cache")
    axes.axhline(report["infinite"]["first_token_seconds"]["mean"], color="0.6", linestyle=":", label="infinite tiers")
    disks = [row for row in report["candidates"] if row["ssd_bytes"]]
    alike = _writing(chosen if chosen["ssd_bytes"] or not disks else disks[0])
    pools = {row["cpu_bytes"]: row for row in report["candidates"] if not row["ssd_bytes"]}
    _line(axes, list(pools.values()), "cpu_bytes", label="CPU pool alone", color="0.4")
    for size in sorted(pools)[:_LINES]:
        rows = [row for row in disks if row["cpu_bytes"] == size and _writing(row) == alike]
        if len(rows) > 1:
            _line(axes, rows, "ssd_bytes", label=f"CPU {about(size)} and an SSD")
    whole = max(chosen["cpu_bytes"], chosen["ssd_bytes"]) / GIB
    axes.plot([whole], [chosen["first_token_seconds"]["mean"]], "*", ms=14, color="C3", label="recommended")
    axes.set_xlabel("capacity of the SSD, or of the CPU pool alone, GiB")
    thinned = f", one page of {sample['every']} kept" if sample else ""
    axes.set_ylabel(f"mean TTFT, s{thinned}")


def _line(axes: Any, rows: list[Mapping[str, Any]], key: str, **style: str) -> None:
    rows = sorted(rows, key=lambda row: row[key])
    means = [row["first_token_seconds"]["mean"] for row in rows]
    axes.plot([row[key] / GIB for row in rows], means, "o-", ms=3, **style)


def _writing(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    return row.get("admission"), row.get("write_policy")
