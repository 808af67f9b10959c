"""The report of `gdscache bench copy` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gdscache.commands.bench.report import new_table, verdict
from gdscache.sizes import about

Row = Mapping[str, Any]
PATHS = ("auto", "staged", "zero_copy", "copy_engine")


def copy_tables(report: Mapping[str, Any]) -> list[Table]:
    """What was measured: also part of it, when the measurement was ended early."""
    tables = [_targets(report["copies"]), _matrix(report["copies"]), _checksums(report["checksums"])]
    tables += [_beside(report["beside"]), _python(report["python"]), _startup(report)]
    return [table for table in tables if table.row_count]


def what(row: Row) -> str:
    """A row's pages, part and direction in a few words."""
    return f"{row['geometry']} {row['page_tokens']:>3} {part(row):<9} {row['direction']}"


def part(row: Row) -> str:
    """Which layers a call moves."""
    return "/".join(row["parts"])


def interval(row: Row) -> str:
    """A ratio and its interval."""
    return f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"


def _targets(rows: Sequence[Row]) -> Table:
    columns = ("route", "GB/s", "memcpy", "ratio", "submit ms", "ns an entry", "blocks", "")
    table = new_table("Copies against cudaMemcpyAsync", "pages", *columns)
    for r in rows:
        if "target" in r:
            rates = (f"{r[key]['median']:.1f}" for key in ("gb_per_second", "against_gb_per_second"))
            submit = f"{r['submit_seconds'] * 1e3:.2f}", f"{r['submit_seconds_per_entry'] * 1e9:.0f}"
            blocks = "/".join(str(count) for count in r["thread_blocks"].values())
            table.add_row(what(r), _routes(r), *rates, interval(r), *submit, blocks, verdict(r, "at least"))
    return table


def _matrix(rows: Sequence[Row]) -> Table:
    """All ratios, a column a path."""
    table = new_table("Ratio to cudaMemcpyAsync by path; GB/s", "pages", *PATHS)
    found: dict[str, dict[str, Row]] = {}
    for r in rows:
        found.setdefault(what(r), {})[r["path"]] = r
    for label, by_path in found.items():
        cells = (by_path.get(path) for path in PATHS)
        figures = ("" if r is None else f"{r['ratio']:.3f}; {r['gb_per_second']['median']:.1f}" for r in cells)
        table.add_row(label, *figures)
    return table


def _checksums(rows: Sequence[Row]) -> Table:
    table = new_table("Checksums on against off", "pages", "route", "GB/s", "without", "ratio", "")
    for r in rows:
        rates = (f"{r[key]['median']:.1f}" for key in ("gb_per_second", "against_gb_per_second"))
        table.add_row(what(r), _routes(r), *rates, interval(r), verdict(r, "at least"))
    return table


def _beside(rows: Sequence[Row]) -> Table:
    """Two lines a row: the copy, and the work beside it."""
    table = new_table("Beside a model's work", "beside", "copy", "against", "figure", "", "", "ratio", "")
    for r in rows:
        copy, work = r["copy"], r["work"]
        sums = " with checksums" if r["sums"] else ""
        rates = (f"{copy[key]['median']:.1f}" for key in ("gb_per_second", "against_gb_per_second"))
        own = (f"{r['beside']} {r['size']}", f"{r['path']} ({_routes(r)}){sums}", r["against"])
        table.add_row(*own, "copy, GB/s", *rates, interval(copy), _judged(copy, "at least"))
        times = (f"{work[key]['median'] * 1e3:.3f}" for key in ("seconds", "against_seconds"))
        table.add_row("", "", "", "work, ms", *times, interval(work), _judged(work, "at most"))
    return table


def _python(rows: Sequence[Row]) -> Table:
    table = new_table("Beside threads of Python, against alone", "pages", "path", "beside", "GB/s", "alone", "ratio")
    for r in rows:
        rates = (f"{r[key]['median']:.1f}" for key in ("gb_per_second", "against_gb_per_second"))
        table.add_row(what(r), r["path"], r["beside"], *rates, interval(r))
    return table


def _startup(report: Mapping[str, Any]) -> Table:
    table = new_table("Once a process", "what", "seconds", "", "")
    for kind, r in (report["kernel_build"] or {}).items():
        whole = f"{r['with_import_seconds']['median']:.2f} with the import of the compiler"
        seconds = f"{r['seconds']['median']:.3f}"
        table.add_row(f"kernels built, {kind} process", seconds, whole, verdict(r, "at most", "{:g} s".format))
    if report["pinning"] is not None:
        r = report["pinning"]
        against = f"{interval(r)} of torch's {r['torch_seconds']['median']:.2f}"
        name = f"{about(r['bytes'])} page-locked"
        table.add_row(name, f"{r['seconds']['median']:.2f}", against, verdict(r, "at most"))
    return table


def _routes(row: Row) -> str:
    return "/".join(dict.fromkeys(row["routes"].values()))


def _judged(row: Row, relation: str) -> str:
    return verdict(row, relation) if "target" in row else ""
