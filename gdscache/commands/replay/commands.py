"""The command `gdscache replay`: from its options to a report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands.console import Progress, check_writable, require_matplotlib, show
from gdscache.commands.replay import options
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.families import REFERENCES
from gdscache.commands.replay.options import listed
from gdscache.commands.replay.setup import Asked, page_tokens_of, setups
from gdscache.commands.replay.trace import BLOCK_TOKENS, read_trace
from gdscache.commands.replay.workload import expand
from gdscache.config import Config
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES

SWEEP = ("0.5%", "1%", "2%", "5%", "10%", "25%", "50%")
DEFAULT: str = Config.model_fields["eviction"].default
_TIERS, _MACHINE, _SUITE = options.TIERS, options.MACHINE, "Drawn traffic"
_CAPACITY = "bytes (64GiB), pages (5000), percent of the unique pages (10%) or none. Commas separate several."
Several = list[str] | None


def replay(
    traces: options.Traces = None,
    capacity: Annotated[
        Several,
        typer.Option(
            help="Size of the one tier, in pages or percent of the unique pages. Default: 10%. Commas separate several."
        ),
    ] = None,
    policy: Annotated[
        Several,
        typer.Option(help=f"Eviction order: {', '.join(POLICIES)}. Default: {DEFAULT}. Commas separate several."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Compare several capacities and every policy, unless they are given.")
    ] = False,
    page_tokens: Annotated[
        int, typer.Option(help="Tokens of a page. Must divide 512, the tokens of a block of the trace.")
    ] = BLOCK_TOKENS,
    full_pages: Annotated[
        bool, typer.Option("--full-pages", help="Leave out partial pages at the end of prompts, as an engine does.")
    ] = False,
    as_json: options.AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg, .pdf).")] = None,
    suite: Annotated[
        bool,
        typer.Option(
            "--suite", rich_help_panel=_SUITE, help="Replay drawn traffic of many families instead of a trace."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_SUITE, help="First seed.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, rich_help_panel=_SUITE, help="Number of seeds: traces of each family.")
    ] = 2,
    family: Annotated[
        Several, typer.Option(rich_help_panel=_SUITE, help="Only these families. Commas separate several.")
    ] = None,
    references: Annotated[
        int, typer.Option(min=1, rich_help_panel=_SUITE, help="Page references of a trace.")
    ] = REFERENCES,
    config: options.ConfigFile = None,
    cpu: Annotated[Several, typer.Option(rich_help_panel=_TIERS, help=f"The CPU tier: {_CAPACITY}")] = None,
    ssd: Annotated[Several, typer.Option(rich_help_panel=_TIERS, help=f"The SSD tier: {_CAPACITY}")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TIERS, help="Size of a GPU pool that the engine owns. Without it, planes are attached."
        ),
    ] = None,
    model: options.Model = options.MODEL,
    page_bytes: Annotated[
        str | None,
        typer.Option(rich_help_panel=_TIERS, help="Bytes of a page (8MiB), in place of --model. Not with --config."),
    ] = None,
    write: Annotated[
        Several, typer.Option(rich_help_panel=_TIERS, help="store.write_policy. Commas separate several.")
    ] = None,
    admission: Annotated[
        Several, typer.Option(rich_help_panel=_TIERS, help="store.admission. Commas separate several.")
    ] = None,
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
    """Replay a trace of requests through the index and policies of an engine, and compare with LRU and the optimum.

    --capacity replays one tier without time. --cpu, --ssd, --gpu or --config replay all tiers in virtual time. --suite
    replays drawn traffic that no order was tuned to.
    """
    policies = listed(policy)
    if plot is not None:
        require_matplotlib(plot)
        check_writable(plot, "--plot")
    if suite:
        if traces or capacity:
            raise InvalidValueError("--suite draws its traces and has its capacities", "leave TRACE and --capacity out")
        _suite(seed, seeds, references, listed(family), policies, sweep=sweep, as_json=as_json, plot=plot)
        return
    if not traces:
        raise InvalidValueError("no trace is named", "name a file, synthetic:FAMILY, or give --suite")
    tiers = config is not None or bool(cpu or ssd) or gpu is not None
    if tiers and capacity:
        raise InvalidValueError("--capacity is that of one tier without time", "give --cpu and --ssd, or it alone")
    rate = math.inf if prefill is None else prefill
    machine = MachineModel(ssd_read * 1e9, ssd_write * 1e9, link * 1e9, latency * 1e-6, rate, overlap)

    def replayed(progress: Progress) -> dict[str, Any]:
        from gdscache.commands.replay import report as reports

        requests = read_trace(traces)
        if not tiers:
            sizes = listed(capacity) or (SWEEP if sweep else ("10%",))
            orders = policies or (tuple(POLICIES) if sweep else (DEFAULT,))
            return reports.one_tier(expand(requests, page_tokens, partial=not full_pages), sizes, orders, progress)
        asked = Asked(
            config=config,
            model=model,
            page_bytes=page_bytes,
            page_tokens=page_tokens,
            gpu=gpu,
            cpu=listed(cpu),
            ssd=listed(ssd),
            eviction=policies,
            write=listed(write),
            admission=listed(admission),
            sets=tuple(sets or ()),
            sweep=sweep,
        )
        if not speed > 0:
            raise InvalidValueError(f"--speed is {speed}", "set it to more than 0")
        workload = expand(requests, page_tokens_of(asked), partial=False)
        runs = setups(asked, len(workload.names))
        times = [request.timestamp / 1000 / speed for request in requests]
        own = gpu is not None
        return reports.all_tiers(workload, times, runs, machine, serial=serial, own_pool=own, progress=progress)

    report = {"traces": [str(path) for path in traces], **options.watched(replayed, "the replay is not complete")}
    if plot is not None:
        from gdscache.commands.replay.plots import replay_plot

        replay_plot(report, plot)
    if as_json:
        options.print_json(report)
    else:
        from gdscache.commands.replay.tables import tables

        show(*tables(report))
    options.end([problem for run in report["runs"] for problem in run.get("problems", ())])


def _suite(
    seed: int,
    seeds: int,
    references: int,
    families: tuple[str, ...],
    policies: tuple[str, ...],
    *,
    sweep: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    from gdscache.commands.bench.machine import describe
    from gdscache.commands.replay import suite

    settings = suite.Settings(
        seed,
        seeds,
        references,
        families or suite.Settings.families,
        policies or (tuple(POLICIES) if sweep else (DEFAULT,)),
    )
    found = options.watched(lambda progress: suite.run(settings, progress), "the suite is not complete")
    report = {"machine": describe(Path()), **found}
    if as_json:
        options.print_json(report)
    else:
        show(*suite.tables(report))
    if plot is not None:
        from gdscache.commands.replay.plots import suite_plot

        suite_plot(report, plot)
