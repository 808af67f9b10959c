"""A plan for people: one screen, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdscache.commands.console import Table, duration, figure, percent, require_matplotlib
from gdscache.commands.replay.plots import apart
from gdscache.sizes import GIB, about

Row = Mapping[str, Any]
_LINES = 8  # of CPU pools with an SSD


def tables(report: Row) -> list[Table]:
    """The plan, and the hits of one tier over its capacity."""
    chosen, forever, knee, w = (report[name] for name in ("recommended", "infinite", "knee", "workload"))
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens, {w['unique_pages']:,} unique"
    plan = Table(f"{w['requests']:,} requests in {w['seconds']:,.0f} s, {pages} ({about(forever['bytes'])})")
    plan.add_row("CPU pool", f"{about(chosen['cpu_bytes'])} ({chosen['cpu_pages']:,} pages)")
    disk = f"{about(chosen['ssd_bytes'])} ({chosen['ssd_pages']:,} pages); store.write_policy {chosen['write_policy']}"
    plan.add_row("SSD", f"{disk}, ssd.admission {chosen['admission']}" if chosen["ssd_bytes"] else "none")
    parts = ", ".join(f"{name} {percent(share)}" for name, share in chosen["tier_token_hit_rates"].items())
    infinite = percent(forever["token_hit_rate"])
    plan.add_row("tokens hit", f"{percent(chosen['token_hit_rate'])} ({parts}); infinite tiers {infinite}")
    for name in ("mean", "p50", "p90", "p99"):
        here, without = chosen["first_token_seconds"][name], report["no_cache_first_token_seconds"][name]
        least = duration(forever["first_token_seconds"][name])
        plan.add_row(f"TTFT {name}", f"{duration(here)}; no cache {duration(without)}, infinite tiers {least}")
    if chosen["ssd_bytes"] and chosen["ssd_written_bytes_per_day"] is not None:
        a_day = figure(chosen["drive_writes_per_day"])
        plan.add_row(
            "SSD wear",
            f"{about(int(chosen['ssd_written_bytes_per_day']))} a day, {a_day} drive writes a day, "
            f"if all of it is as these {w['seconds']:,.0f} s",
        )
    plan.add_row("target", f"a mean of {duration(report['target_seconds'])}" + ("" if report["met"] else ", not met"))
    plan.add_row("binds", ", ".join(report["binds"]))
    plan.add_row("knee", f"{about(knee['capacity_bytes'])}: {percent(knee['hit_rate'])} of the pages")
    curve = Table("Hits of one tier, without time", "capacity", "hits", "optimum")
    for row in report["curve"]:
        curve.add_row(about(row["capacity_bytes"]), f"{row['hit_rate']:.4f}", f"{row['optimum_hit_rate']:.4f}")
    curve.add_row("infinite", f"{forever['hit_rate']:.4f}")
    return [plan, curve]


def plan_plot(report: Row, path: Path) -> None:
    """Two plots side by side, over capacity: hits, and the mean time to the first token, a line for each CPU pool of
    the grid. A point is a pair of sizes that was replayed, the star the one that is recommended.

    Raises `MissingPackageError` without matplotlib and `InvalidValueError` for a file name of unknown kind.
    """
    matplotlib = require_matplotlib(path)
    figure = matplotlib.figure.Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _hits(left, report)
    _seconds(right, report)
    chosen = report["recommended"]
    tried = sorted({_size(row) for row in report["candidates"]})
    tiers = sorted({*tried, *(row["capacity_bytes"] / GIB for row in report["curve"])})
    seconds = chosen["first_token_seconds"]["mean"]
    for axes, share, every in ((left, 100 * chosen["hit_rate"], tiers), (right, seconds, tried)):
        axes.plot([_size(chosen)], [share], "*", ms=14, color="C3", label="recommended", zorder=3)
        axes.set_xscale("log")
        sizes = apart(every, 0.13)
        axes.set_xticks(sizes, [about(round(size * GIB)) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    ssd = f"an SSD of {about(chosen['ssd_bytes'])}" if chosen["ssd_bytes"] else "no SSD"
    figure.suptitle(f"Recommended: a CPU pool of {about(chosen['cpu_bytes'])}, {ssd}")
    figure.savefig(path, dpi=150)


def _size(row: Row) -> float:
    return float(max(row["cpu_bytes"], row["ssd_bytes"])) / GIB


def _hits(axes: Any, report: Row) -> None:
    rows, candidates = report["curve"], report["candidates"]
    sizes = [row["capacity_bytes"] / GIB for row in rows]
    axes.axhline(100 * report["infinite"]["hit_rate"], color="0.6", linestyle=":", label="infinite cache")
    axes.plot(sizes, [100 * row["optimum_hit_rate"] for row in rows], "o-", ms=3, color="black", label="optimum")
    axes.plot(sizes, [100 * row["hit_rate"] for row in rows], "o-", ms=3, label="one tier, without time")
    points = [_size(row) for row in candidates], [100 * row["hit_rate"] for row in candidates]
    axes.plot(*points, "o", ms=3, color="C3", alpha=0.4, label="CPU pool, and an SSD or none")
    axes.axvline(report["knee"]["capacity_bytes"] / GIB, color="C0", linestyle="--", label="knee")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity of the larger tier")
    axes.set_ylabel("pages hit, %")


def _seconds(axes: Any, report: Row) -> None:
    candidates = report["candidates"]
    axes.axhline(report["no_cache_first_token_seconds"]["mean"], color="0.3", linestyle=":", label="no cache")
    axes.axhline(report["infinite"]["first_token_seconds"]["mean"], color="0.6", linestyle=":", label="infinite tiers")
    _line(axes, [row for row in candidates if not row["ssd_bytes"]], label="CPU pool alone", color="0.4")
    lines: dict[tuple[int, str], list[Row]] = {}
    for row in candidates:
        if row["ssd_bytes"]:
            lines.setdefault((row["cpu_bytes"], row["admission"]), []).append(row)
    alike = report["recommended"]["admission"] or min((key[1] for key in lines), default="")
    for (size, admission), rows in sorted(lines.items())[: _LINES * 4]:
        several = admission == alike and len(rows) > 1
        style = {"label": f"CPU {about(size)} and an SSD"} if several else {"color": "0.7", "linestyle": ""}
        _line(axes, rows, **style)
    axes.set_xlabel("capacity of the SSD, or of the CPU pool alone")
    axes.set_ylabel("mean TTFT, s")


def _line(axes: Any, rows: list[Row], **style: str) -> None:
    points = sorted((_size(row), row["first_token_seconds"]["mean"]) for row in rows)
    axes.plot(*zip(*points, strict=True), marker="o", ms=3, **style)
