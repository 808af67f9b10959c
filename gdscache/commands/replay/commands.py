"""The command `gdscache replay`: from its options to a report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands.console import Progress, check_writable, require_matplotlib, show
from gdscache.commands.replay import options
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.options import listed
from gdscache.commands.replay.setup import Asked, page_tokens_of, setups
from gdscache.commands.replay.trace import BLOCK_TOKENS, read_trace
from gdscache.commands.replay.workload import expand
from gdscache.errors import InvalidValueError

_TIERS, _MACHINE = options.TIERS, options.MACHINE
_CAPACITY = "bytes (64GiB), pages (5000), percent of the unique pages (10%) or none. Commas separate several."
Several = list[str] | None


def replay(
    traces: options.Traces = None,
    as_json: options.AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg, .pdf).")] = None,
    config: options.ConfigFile = None,
    cpu: Annotated[
        Several, typer.Option(rich_help_panel=_TIERS, help=f"The CPU tier: {_CAPACITY} Without any tier: 10%.")
    ] = None,
    ssd: Annotated[Several, typer.Option(rich_help_panel=_TIERS, help=f"The SSD tier: {_CAPACITY}")] = None,
    model: options.Model = options.MODEL,
    page_bytes: Annotated[
        str | None,
        typer.Option(rich_help_panel=_TIERS, help="Bytes of a page (8MiB), in place of --model. Not with --config."),
    ] = None,
    page_tokens: Annotated[
        int, typer.Option(rich_help_panel=_TIERS, help="Tokens of a page: a divisor of 512. Not with --config.")
    ] = BLOCK_TOKENS,
    sets: options.Sets = None,
    ssd_read: options.SsdRead = 6.0,
    ssd_write: options.SsdWrite = 3.0,
    link: options.Link = 50.0,
    latency: Annotated[
        float,
        typer.Option(
            "--ssd-latency-us", rich_help_panel=_MACHINE, help="Latency of each read and write, in microseconds."
        ),
    ] = 100.0,
    prefill: options.Prefill = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", rich_help_panel=_MACHINE, help="Loads run during the prefill, not before it.")
    ] = False,
    speed: Annotated[
        float,
        typer.Option(
            rich_help_panel=_MACHINE, help="Factor of the speed of arrival: 2 replays the trace twice as fast."
        ),
    ] = 1.0,
    serial: Annotated[
        bool, typer.Option("--serial", rich_help_panel=_MACHINE, help="Each request ends before the next one begins.")
    ] = False,
) -> None:
    """Replay a trace of requests through the tiers and policies of an engine, in virtual time.

    The hits are compared with plain LRU's and with the most that any policy could have. Several capacities, and keys of
    --set that are given several times, are replayed in every combination.
    """
    if plot is not None:
        require_matplotlib(plot)
        check_writable(plot, "--plot")
    options.check_named(traces)
    if not speed > 0:
        raise InvalidValueError(f"--speed is {speed}", "set it to more than 0")
    rate = math.inf if prefill is None else prefill
    machine = MachineModel(ssd_read * 1e9, ssd_write * 1e9, link * 1e9, latency * 1e-6, rate, overlap)
    nothing = config is None and not cpu and not ssd
    asked = Asked(
        config=config,
        model=model,
        page_bytes=page_bytes,
        page_tokens=page_tokens,
        cpu=("10%",) if nothing else listed(cpu),
        ssd=listed(ssd),
        sets=tuple(sets or ()),
    )

    def replayed(progress: Progress) -> dict[str, Any]:
        from gdscache.commands.replay import report

        requests = read_trace(traces or ())
        workload = expand(requests, page_tokens_of(asked))
        runs = setups(asked, len(workload.names))
        times = [request.timestamp / 1000 / speed for request in requests]
        return report.replay(workload, times, runs, machine, serial=serial, progress=progress)

    report = {"traces": [str(path) for path in traces or ()], **options.watched(replayed, "the replay is not complete")}
    if plot is not None:
        from gdscache.commands.replay.plots import replay_plot

        replay_plot(report, plot)
    if as_json:
        options.print_json(report)
    else:
        from gdscache.commands.replay.tables import tables

        show(*tables(report))
    options.end([problem for run in report["runs"] for problem in run["problems"]])
