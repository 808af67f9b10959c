"""The command `gdscache timeline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands.console import Table, duration, percent, require_matplotlib, show
from gdscache.sizes import about


def show_timeline(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of --trace or of TraceTimeline.write.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline into this file (.png, .svg, .pdf).")] = None,
    load: Annotated[int | None, typer.Option(help="Look at the load with this number. Default: the longest.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Look at the whole file, not at one load.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how long each track was busy during a load, and how much of that time ran under the model's layers."""
    from gdscache.commands.timeline.plot import timeline_plot
    from gdscache.commands.timeline.summary import read_trace_file, summary

    if plot is not None:
        require_matplotlib(plot)
    trace = read_trace_file(file)
    if load is None and not whole:
        load = trace.longest_load
    if load is not None:
        trace = trace.of_load(load)
    report = {"load": load, **summary(trace)}
    if plot is not None:
        timeline_plot(trace, plot)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    what = "The whole file" if load is None else f"Load {load}"
    took, computed = (duration(report[key] / 1000) for key in ("milliseconds", "computing_ms"))
    end = f"{what}: {took}, of which the model computed {computed}"
    if report["events_left_out"]:
        end += f"; {report['events_left_out']:,} events are not in the file"
    show(_table(report), end)


def _table(report: dict[str, Any]) -> Table:
    table = Table("", "track", "what", "spans", "bytes", "busy", "under layers")
    for row in report["rows"]:
        size = about(row["bytes"]) if row["bytes"] else ""
        under = "" if row["under_layers"] is None else percent(row["under_layers"])
        table.add_row(row["track"], row["kind"], f"{row['spans']:,}", size, duration(row["busy_ms"] / 1000), under)
    return table
