"""The command `gdscache replay`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from gdscache.commands.replay import report as reports
from gdscache.commands.replay import tier_commands
from gdscache.commands.replay.console import end, listed, show, watched
from gdscache.commands.replay.simulate import Progress
from gdscache.commands.replay.tier_setup import TOKEN_BYTES, Asked, page_tokens_of
from gdscache.commands.replay.trace import BLOCK_TOKENS, read_trace
from gdscache.commands.replay.workload import expand
from gdscache.errors import InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.policies import POLICIES

SWEEP = ("0.5%", "1%", "2%", "5%", "10%", "25%", "50%")
_INCOMPLETE = "the replay is not complete"
_TIERS, _MACHINE, _REAL = "Tiers", "The machine of the simulation", "An engine with bytes"
_SUITE = "Drawn traffic"
_CAPACITY = "64GiB, pages (5000), percent of the unique pages (10%)"


def replay(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE...", help="Mooncake traces: JSON lines, also gzip; parts of one trace."),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="Pages of the tier, or percent of the trace's unique pages (10%). Several by commas."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Eviction policies. Several by commas.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help=f"Capacities of {', '.join(SWEEP)} and all policies, where not given.")
    ] = False,
    page_tokens: Annotated[int, typer.Option(help="Tokens a page; divides the trace's blocks of 512.")] = BLOCK_TOKENS,
    full_pages: Annotated[
        bool, typer.Option("--full-pages", help="Leave partial pages at the end of prompts out, as an engine does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate over capacity into this file.")] = None,
    suite: Annotated[
        bool,
        typer.Option("--suite", rich_help_panel=_SUITE, help="No trace: traffic of many families, drawn from a seed."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_SUITE, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, rich_help_panel=_SUITE, help="Traces of each family.")] = 2,
    family: Annotated[list[str] | None, typer.Option(rich_help_panel=_SUITE, help="Some. Several by commas.")] = None,
    references: Annotated[
        int, typer.Option(min=1, rich_help_panel=_SUITE, help="Pages of a trace, each use counted.")
    ] = 40_000,
    config: Annotated[
        Path | None, typer.Option(rich_help_panel=_TIERS, help="Tiers, model and policies of this configuration.")
    ] = None,
    cpu: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_TIERS, help=f"The CPU tier: {_CAPACITY}, none. Several by commas."),
    ] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_TIERS, help=f"The SSD tier: {_CAPACITY}, none. Several by commas."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TIERS, help=f"A GPU pool that the engine owns: {_CAPACITY}; else attached planes."
        ),
    ] = None,
    own_pool: Annotated[
        bool, typer.Option("--own-pool", rich_help_panel=_TIERS, help="The engine owns a pool, of gpu.capacity.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(rich_help_panel=_TIERS, help=f"Bytes of a token, without --config: {', '.join(TOKEN_BYTES)}."),
    ] = "llama-3-8b",
    page_bytes: Annotated[
        str | None, typer.Option(rich_help_panel=_TIERS, help="Bytes of a page instead (8MiB), without --config.")
    ] = None,
    write: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_TIERS, help="store.write_policy. Several by commas.")
    ] = None,
    admission: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_TIERS, help="ssd.admission. Several by commas.")
    ] = None,
    promotion: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_TIERS, help="ssd.promotion. Several by commas.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=_TIERS, help="Any key of the configuration."),
    ] = None,
    ssd_read: Annotated[
        float, typer.Option("--ssd-read-gbps", rich_help_panel=_MACHINE, help="GB/s read from the SSD; or inf.")
    ] = 6.0,
    ssd_write: Annotated[
        float, typer.Option("--ssd-write-gbps", rich_help_panel=_MACHINE, help="GB/s written to the SSD; or inf.")
    ] = 3.0,
    link: Annotated[
        float, typer.Option("--link-gbps", rich_help_panel=_MACHINE, help="GB/s host to GPU, each way; or inf.")
    ] = 50.0,
    latency: Annotated[
        float, typer.Option("--ssd-latency-us", rich_help_panel=_MACHINE, help="Microseconds of each read and write.")
    ] = 100.0,
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-second", rich_help_panel=_MACHINE, help="What a request computes; models TTFT."
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", rich_help_panel=_MACHINE, help="Loads run beside the prefill, not before it.")
    ] = False,
    speed: Annotated[
        float, typer.Option(rich_help_panel=_MACHINE, help="Requests come so many times as fast as in the trace.")
    ] = 1.0,
    serial: Annotated[
        bool, typer.Option("--serial", rich_help_panel=_MACHINE, help="A request ends before the next one begins.")
    ] = False,
    real: Annotated[
        bool, typer.Option("--real", rich_help_panel=_REAL, help="An engine that moves and verifies every byte.")
    ] = False,
    device: Annotated[
        str, typer.Option(rich_help_panel=_REAL, help="Where its planes are: cpu, cuda, cuda:N.")
    ] = "cpu",
    directory: Annotated[
        Path | None, typer.Option("--dir", rich_help_panel=_REAL, help="Where its SSD tier is made, and deleted again.")
    ] = None,
    first: Annotated[
        int | None, typer.Option("--first", min=1, metavar="N", help="The first N requests of the trace only.")
    ] = None,
) -> None:
    """Replay a trace of requests against the optimum: the real index and policies.

    On one tier without time (--capacity), through all tiers of a machine with virtual time (--cpu, --ssd, --gpu or
    --config), or through an engine that moves bytes (--real). Or on drawn traffic that no order was tuned to (--suite).
    """
    if suite:
        from gdscache.commands.replay.suite_commands import Drawn, replay_suite

        if traces or capacity:
            raise InvalidValueError("--suite draws its traces and has its capacities", "leave TRACE and --capacity out")
        drawn = Drawn(seed, seeds, references, listed(family), tuple(POLICIES) if sweep else listed(policy))
        replay_suite(drawn, as_json=as_json, plot=plot)
        return
    if not traces:
        raise InvalidValueError("no trace is named", "name a file, synthetic:KIND, or give --suite")
    if real or config is not None or cpu or ssd or gpu is not None:
        gb = 1e9
        asked = Asked(
            config,
            model,
            page_bytes or (tier_commands.REAL_PAGE if real else None),
            page_tokens,
            gpu,
            listed(cpu),
            listed(ssd),
            listed(policy),
            listed(write),
            listed(admission),
            listed(promotion),
            tuple(sets or ()),
            sweep,
        )
        if capacity:
            raise InvalidValueError("--capacity is that of one tier without time", "give --cpu and --ssd, or it alone")
        rate = math.inf if prefill is None else prefill
        machine = MachineModel(ssd_read * gb, ssd_write * gb, link * gb, latency * 1e-6, rate, overlap)
        tiers = Tiers(asked, machine, speed, serial, own_pool or gpu is not None, first, device, directory)
        _replay_tiers(traces, tiers, real=real, as_json=as_json, plot=plot)
        return
    if plot is not None:
        from gdscache.commands.bench.plots import require

        require(plot)
    capacities = listed(capacity) or (SWEEP if sweep else ("10%",))
    policies = listed(policy) or (tuple(POLICIES) if sweep else ("lru",))

    def replayed(progress: Progress) -> dict[str, Any]:
        progress(0, 1, "reading the trace")
        workload = expand(read_trace(traces), page_tokens, partial=not full_pages)
        return reports.run(workload, capacities, policies, progress)

    report = {"traces": [str(path) for path in traces], **watched(replayed, _INCOMPLETE)}
    if plot is not None:
        from gdscache.commands.replay.plot import hit_rate_plot

        hit_rate_plot(report, plot)
    show(report, [_table(report)], as_json=as_json, width=120)


class Tiers(NamedTuple):
    """What is asked for besides the trace, where there are tiers."""

    asked: Asked
    machine: MachineModel
    speed: float
    serial: bool
    own_pool: bool
    first: int | None
    device: str
    directory: Path | None


def _replay_tiers(traces: Sequence[Path], wanted: Tiers, *, real: bool, as_json: bool, plot: Path | None) -> None:
    if plot is not None:
        from gdscache.commands.bench.plots import require

        if real:
            raise InvalidValueError("--plot is of a simulation", "leave --real out")
        require(plot)

    def replayed(progress: Progress) -> dict[str, Any]:
        progress(0, 1, "reading the trace")
        requests = read_trace(traces)[: wanted.first]
        workload, times = tier_commands.prepare(requests, page_tokens_of(wanted.asked), wanted.speed)
        if real:
            return tier_commands.real(workload, wanted.asked, wanted.directory, wanted.device, progress)
        return tier_commands.simulated(
            workload,
            times,
            wanted.asked,
            wanted.machine,
            serial=wanted.serial,
            own_pool=wanted.own_pool,
            progress=progress,
        )

    report = {"traces": [str(path) for path in traces], **watched(replayed, _INCOMPLETE)}
    if plot is not None:
        from gdscache.commands.replay.tier_plot import tier_plot

        tier_plot(report, plot)
    show(report, tier_commands.tables(report), as_json=as_json, width=160)
    end(tier_commands.defects(report))


def _table(report: Mapping[str, Any]) -> Table:
    workload, forever = report["workload"], report["infinite"]
    table = Table(
        title=f"{workload['requests']:,} requests, {workload['pages']:,} pages of {workload['page_tokens']} tokens, "
        f"{workload['unique_pages']:,} unique",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for name in ("pages", "%", "hits", "tokens hit", "of optimum", "gap closed", "written", "evicted", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("infinite", "", "", *_figures(forever))
    for best, plain in zip(report["optimum"], report["plain_lru"], strict=True):
        size = f"{best['capacity_pages']:,}", f"{best['capacity_percent']:.3g}"
        table.add_row("optimum", *size, *_figures(best))
        table.add_row("plain LRU", *size, *_figures(plain))
        for run in report["runs"]:
            if run["capacity_pages"] == best["capacity_pages"]:
                table.add_row(run["policy"], *size, *_figures(run))
    return table


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    share = [row.get(name) for name in ("token_hit_rate", "of_optimum", "gap_closed")]
    return (
        f"{row['hit_rate']:.4f}",
        *("" if value is None else f"{value:.4f}" for value in share),
        f"{row['written_pages']:,}",
        f"{row['evictions']:,}",
        f"{row['seconds']:.2f}" if "seconds" in row else "",
    )
