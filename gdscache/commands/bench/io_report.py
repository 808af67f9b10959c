"""The report of `gdscache bench io` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gdscache.commands.bench.io_cells import BY_NAME
from gdscache.commands.bench.io_rows import RATES
from gdscache.commands.bench.report import left_table, new_table, verdict
from gdscache.sizes import about

Row = Mapping[str, Any]
IO_SCHEMA = "gdscache.bench.io/1"


def io_tables(report: Row) -> list[Table]:
    """What was measured: also part of it, when the measurement was ended early."""
    tables = [_ways(report["ways"]), _comparisons(report["comparisons"]), _ceilings(report["ceilings"])]
    tables += [_cells(report["cells"]), _causes("Not measured here", report["cannot"])]
    tables += [_causes("Failed", report["failed"]), left_table(report)]
    return [table for table in tables if table.row_count]


def _cache_word(cache: Row) -> str:
    """Whether the page cache had a part in reads."""
    return f"KEPT {about(cache['resident_bytes'])}" if cache["state"] == "kept" else str(cache["state"])


def _ways(ways: Sequence[Row]) -> Table:
    table = new_table("Ways that work here, byte-checked", "way", "is", "")
    for r in ways:
        if not r["cause"]:
            table.add_row(r["label"], r["word"], "O_DIRECT" if r["direct"] else "through the page cache")
    return table


def _comparisons(rows: Sequence[Row]) -> Table:
    """Two lines a row: what was measured, and what it is compared with, with the transport of ours."""
    table = new_table("Comparisons", "what", "on", "figure", "ratio", "", "cache")
    for r in rows:
        digits = {"GB/s": 2, "CPU s/GiB": 3}.get(r["unit"], 0)
        own, other = (f"{r[key]['median']:.{digits}f} {r['unit']}" for key in ("figure", "against_figure"))
        ratio = f"{_short(r['ratio'])} ({_short(r['ratio_min'])} to {_short(r['ratio_max'])})"
        judged = verdict(r, "at least" if r["unit"] in RATES else "at most") if "target" in r else ""
        table.add_row(r["what"], r["file_system"] or "?", own, ratio, judged, _cache_word(r["cache"]))
        moved_by = f"by {r['transport']}, {r['threads']} threads" if "transport" in r else ""
        table.add_row(f"  against {r['against']}", "", other, moved_by)
    return table


def _short(ratio: float) -> str:
    """A ratio with three digits: a p99 beside a thread of Python can be some hundred times the one alone."""
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def _ceilings(ceilings: Row) -> Table:
    table = new_table("Ceilings: the bare loop", "what", "GB/s", "best way", "")
    for name, r in ceilings.items():
        rates = r["gb_per_second"]
        figure = f"{rates['median']:.2f} ({rates['min']:.2f} to {rates['max']:.2f})"
        way = f"{r['threads']} threads x {about(r['io_bytes'])}"
        table.add_row(name, figure, way, "O_DIRECT" if r["direct"] else "through the page cache")
    return table


def _cells(rows: Sequence[Row]) -> Table:
    columns = (
        "op",
        "size",
        "depth",
        "threads",
        "GB/s",
        "of ceiling",
        "IOPS",
        "p50 us",
        "p99 us",
        "max us",
        "CPU s/GiB",
        "",
    )
    table = new_table("Ways", "way", *columns)
    for r in rows:
        latency = (f"{r['latency_seconds'][key] * 1e6:.0f}" for key in ("p50", "p99", "max"))
        counted = sum(r["nvidia_fs"].values())
        notes = [f"nvidia-fs: {counted}"] if counted and BY_NAME[r["way"]].cufile else []
        if r["cache"]["state"] not in ("bypassed", "memory"):
            notes.append(f"page cache: {_cache_word(r['cache'])}")
        table.add_row(
            BY_NAME[r["way"]].label,
            r["op"],
            about(r["io_bytes"]),
            str(r["depth"]),
            str(r["threads"]),
            f"{r['gb_per_second']['median']:.2f}",
            f"{r['ratio']:.2f}",
            f"{r['iops']:,.0f}",
            *latency,
            f"{r['cpu_seconds_per_gib']['median']:.3f}",
            ", ".join(notes),
        )
    return table


def _causes(title: str, rows: Sequence[Row]) -> Table:
    table = new_table(title, "what", "cause")
    for r in rows:
        table.add_row(r["what"], r["cause"])
    return table
