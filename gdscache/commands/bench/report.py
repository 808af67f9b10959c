"""Reports of the benchmarks for people and programs: tables, a JSON file, a plot."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gdscache.commands.bench import measure
from gdscache.errors import InvalidValueError
from gdscache.sizes import about

ENGINE_SCHEMA = "gdscache.bench.engine/1"
INDEX_SCHEMA = "gdscache.bench.index/1"
COPY_SCHEMA = "gdscache.bench.copy/1"


def check_writable(path: Path | None, option: str) -> None:
    """Raise `InvalidValueError` now, and not after minutes of measuring, when `path` cannot be a file."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InvalidValueError(f"{option} {path} cannot be written", "name a file in a directory that exists")


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report to a file, with a line break at its end."""
    path.write_text(json.dumps(report, indent=2) + "\n")


@contextlib.contextmanager
def progress_bar() -> Iterator[measure.Progress]:
    """A bar on standard error that follows `progress(done, total, text)`; not drawn where that is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def left_table(report: Mapping[str, Any]) -> Table:
    """What a report that can be resumed has not measured yet; empty where that is nothing."""
    table = new_table("", "")
    if report["left"]:
        table.add_row(f"{report['left']} cells are left: --resume FILE goes on where a report in FILE ends")
    return table


def engine_tables(report: Mapping[str, Any]) -> list[Table]:
    """The report of `bench engine` as tables."""
    tier = new_table(
        "SSD tier against a bare O_DIRECT loop", "page", "what", "by", "GB/s", "bare GB/s", "best way", "ratio", ""
    )
    for r in report["ssd_tier"]:
        way = f"{r['bare']['threads']} threads x {about(r['bare']['io_bytes'])}"
        figures = _spread(r["gb_per_second"]), _spread(r["bare_gb_per_second"])
        moved_by = f"{r['transport']}, {r['threads']} threads"
        tier.add_row(about(r["page_bytes"]), r["name"], moved_by, *figures, way, _ratio(r), verdict(r, "at least"))
    whole = new_table("Engine, from call to verdict", "face", "what", "tier", "GB/s", "against", "GB/s", "ratio")
    for r in report["end_to_end"]:
        against = (r["against"], _spread(r["against_gb_per_second"]), _ratio(r)) if r["against"] else ("", "", "")
        if r["name"] == "hit":
            against = ("nothing moves", f"{r['us_per_page']:.1f} us a page", "")
        whole.add_row(r["face"], r["name"], r["tier"], _spread(r["gb_per_second"]), *against)
    held = new_table("Memory", "what", "resident", "")
    m = report["memory"]
    held.add_row("pools", about(m["pool_bytes"]), "")
    held.add_row("an interpreter with torch", about(m["torch_bytes"]), "")
    held.add_row(f"beyond both, {m['pages']:,} pages", about(m["beyond_bytes"]), verdict(m, "at most", about))
    held.add_row("beyond both, at its peak", about(m["beyond_bytes_peak"]), "")
    return [tier, whole, held]


def index_tables(report: Mapping[str, Any]) -> list[Table]:
    """The report of `bench index` as a table."""
    table = new_table("Index", "what", "figure", "")
    found, reopened, held = report["lookup"], report["reopen"], report["memory"]
    labels = {
        "hash": "bare hash loop",
        "numpy": "lookup, numpy tokens",
        "list": "lookup, list tokens",
        "again": "lookup of a prompt that is remembered",
        "in_a_row": "lookups in a row, numpy tokens",
    }
    for name, label in labels.items():
        table.add_row(f"{label}, {found['pages']:,} pages", f"{found[f'{name}_seconds']['median'] * 1e3:.2f} ms", "")
    table.add_row("lookup / hash loop, numpy", _ratio(found), verdict(found, "at most"))
    table.add_row("lookup / hash loop, list", f"{found['list_ratio']:.2f}", "")
    recovered = report["catalog_recovery"]
    table.add_row(f"catalogue of {recovered['pages']:,} pages", about(recovered["catalog_bytes"]), "")
    table.add_row("catalogue, opened and recovered", f"{recovered['open_and_recover_seconds']:.2f} s", "")
    table.add_row("SSD tier, reopened", f"{reopened['seconds']['median']:.2f} s", verdict(reopened, "at most"))
    table.add_row("memory a page, opened", f"{held['bytes_per_page_opened']:.0f} bytes", "")
    table.add_row("memory a page, checksums read", f"{held['bytes_per_page']:.0f} bytes", verdict(held, "at most"))
    return [table]


def machine_line(machine: Mapping[str, Any]) -> str:
    """What was measured on, in a line."""
    storage = machine["storage"]
    where = f"{storage['file_system']} on {storage['source']}"
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cpu']}, {machine['cores']} cores, {about(machine['memory_bytes'])}, {gpus}; {where}"


def new_table(title: str, *columns: str) -> Table:
    """An empty table with a title and columns that are as wide as what is in them."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _spread(series: Mapping[str, Any]) -> str:
    return f"{series['median']:.2f} ({series['min']:.2f} to {series['max']:.2f})"


def _ratio(part: Mapping[str, Any]) -> str:
    return f"{part['ratio']:.2f} ({part['ratio_min']:.2f} to {part['ratio_max']:.2f})"


def verdict(part: Mapping[str, Any], relation: str, show: Any = "{:g}".format) -> str:
    """Whether a figure's target is met, and what it is."""
    return f"{'met' if part['met'] else 'MISSED'}: {relation} {show(part['target'])}"
