"""The command `gdscache timeline`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gdscache.sizes import about


def show_timeline(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --trace, or TraceTimeline.write, wrote.")],
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")] = None,
    load: Annotated[int | None, typer.Option(help="Only while the load with this number ran.")] = None,
    caption: Annotated[str, typer.Option(help="A line below the plot.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a timeline shows: what each track was busy with, and how much of that ran under the model's layers."""
    from gdscache.commands.bench.plots import require
    from gdscache.commands.timeline.plot import timeline_plot
    from gdscache.commands.timeline.summary import read_trace_file, summary

    if plot is not None:
        require(plot)
    trace = read_trace_file(file)
    if load is not None:
        trace = trace.of_load(load)
    report = summary(trace)
    if plot is not None:
        timeline_plot(trace, plot, caption)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    console.print(_table(report))
    console.print(
        f"{report['milliseconds']:,.1f} ms, of which the model computed {report['computing_ms']:,.1f} ms"
        + (f"; {report['events_left_out']:,} events are not in the file" if report["events_left_out"] else "")
    )


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("track", "what"):
        table.add_column(name)
    for name in ("spans", "bytes", "busy, ms", "under layers"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        share = row["under_layers"]
        table.add_row(
            row["track"],
            row["kind"],
            f"{row['spans']:,}",
            about(row["bytes"]) if row["bytes"] else "",
            f"{row['busy_ms']:,.2f}",
            "" if share is None else f"{share:.0%}",
        )
    return table
