"""The commands `gdscache replay` and `gdscache plan`: from their options to a report."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands import EXIT_INTERRUPTED
from gdscache.commands.console import Progress, progress_bar, say, size_option
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.setup import MODELS, base_of, config_of, page_tokens_of
from gdscache.commands.replay.trace import Workload, expand, read_trace
from gdscache.config import Config
from gdscache.errors import InvalidValueError
from gdscache.sizes import GIB

SCHEMA = "gdscache.replay/6"
_LEAST_RATE = 1e-9  # slower, times would be infinite, which JSON lacks
_LATENCY_S = 100e-6  # of each read and write of the SSD
_TIERS, _LIMITS = "Tiers", "Limits"  # panels of the help

Traces = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="TRACE...",
        help="Files of one trace of requests in Mooncake's format, plain or gzip: see docs/replay.md.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_tiers = functools.partial(typer.Option, rich_help_panel=_TIERS)
_machine = functools.partial(typer.Option, rich_help_panel="The machine of the simulation")
ConfigFile = Annotated[Path | None, _tiers("--config", help="Configuration file of the model and the policies.")]
Model = Annotated[str, _tiers(help=f"The model, where --config does not describe one: {', '.join(MODELS)}.")]
Sets = Annotated[
    list[str] | None, _tiers("--set", metavar="KEY=VALUE", help="Set a key of the configuration. May be repeated.")
]
SsdRead = Annotated[float, _machine("--ssd-read-gbps", help="Read speed of the SSD in GB/s, or inf.")]
SsdWrite = Annotated[float, _machine("--ssd-write-gbps", help="Write speed of the SSD in GB/s, or inf.")]
Link = Annotated[float, _machine("--link-gbps", help="Speed between host and GPU in GB/s, each way, or inf.")]
Prefill = Annotated[
    float | None,
    _machine("--prefill-tokens-per-second", help="Speed of the prefill of one request. Gives the time to first token."),
]


def replay(
    traces: Traces = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    cpu: Annotated[
        int | None,
        size_option("--cpu", "cpu.capacity (512GiB). 64GiB without --ssd and --config.", rich_help_panel=_TIERS),
    ] = None,
    ssd: Annotated[int | None, size_option("--ssd", "ssd.capacity (4TiB).", rich_help_panel=_TIERS)] = None,
    model: Model = "llama-3-8b",
    sets: Sets = None,
    ssd_read: SsdRead = 6.0,
    ssd_write: SsdWrite = 3.0,
    link: Link = 50.0,
    prefill: Prefill = None,
    serial: Annotated[bool, _machine("--serial", help="Each request ends before the next one begins.")] = False,
) -> None:
    """Replay a trace of requests through the tiers and policies of an engine, in virtual time: what would it find?

    The hits are compared with those of infinite tiers.
    """
    machine = _model(ssd_read, ssd_write, link, prefill)
    if config is None and ssd is None and cpu is None:
        cpu = 64 * GIB
    keys = [f"{tier}.capacity={size}" for tier, size in (("cpu", cpu), ("ssd", ssd)) if size is not None]
    asked = config_of(base_of(config, model), [*keys, *(sets or ())])

    from gdscache.commands.replay import report

    with _undisturbed("the replay is not complete") as progress:
        workload, times, found = _read(traces, asked, machine, progress)
        found |= {"schema": SCHEMA, "serial": serial, "infinite": report.describe_infinite(workload, asked.model)}
        found["run"] = report.replay(workload, times, asked, machine, serial=serial, progress=progress)
    say(found, report.replay_tables(found), as_json=as_json)


def plan_tiers(
    traces: Traces = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    model: Model = "llama-3-8b",
    sets: Sets = None,
    prefill: Prefill = None,
    ssd_read: SsdRead = 6.0,
    ssd_write: SsdWrite = 3.0,
    link: Link = 50.0,
    cpu_budget: Annotated[
        int | None,
        size_option("--cpu-budget", "Most host memory for the CPU pool (512GiB).", rich_help_panel=_LIMITS),
    ] = None,
    ssd_budget: Annotated[
        int | None,
        size_option("--ssd-budget", "Most space on the SSD (4TiB). 0: no SSD.", rich_help_panel=_LIMITS),
    ] = None,
    writes_a_day: Annotated[
        int | None,
        size_option("--writes-a-day", "Most bytes written to the SSD a day (5TB).", rich_help_panel=_LIMITS),
    ] = None,
    ttft_target: Annotated[
        float | None,
        typer.Option(rich_help_panel=_LIMITS, help="Largest mean TTFT, in seconds. Default: 5 % above the best."),
    ] = None,
) -> None:
    """Recommend sizes of the CPU pool and the SSD for a trace, a model and a machine.

    The trace is replayed in virtual time through pairs of sizes. Among the pairs within the limits whose mean time to
    first token (TTFT) is nearly that of infinite tiers, the cheapest is recommended. This takes some minutes.
    """
    if prefill is None and traces:
        raise InvalidValueError(
            "the speed of the prefill is unknown, and so is the TTFT",
            "give --prefill-tokens-per-second: tokens that the model computes in a second, for one request",
        )
    machine = _model(ssd_read, ssd_write, link, prefill)
    base = base_of(config, model)
    if base.get("cpu") is None:  # every pair of sizes has a CPU pool; this size is only to be large enough
        base["cpu"] = {"capacity": 1 << 50}

    from gdscache.commands.replay.plan import Limits, plan
    from gdscache.commands.replay.report import plan_tables

    limits = Limits(cpu_budget, ssd_budget, writes_a_day, ttft_target)
    with _undisturbed("there is no plan") as progress:
        workload, times, found = _read(traces, config_of(base, sets or ()), machine, progress)
        found |= plan(workload, times, base, sets or (), machine, limits, progress=progress)
    say(found, plan_tables(found), as_json=as_json)


def _model(ssd_read: float, ssd_write: float, link: float, prefill: float | None) -> MachineModel:
    for option, rate in (
        ("--ssd-read-gbps", ssd_read),
        ("--ssd-write-gbps", ssd_write),
        ("--link-gbps", link),
        ("--prefill-tokens-per-second", prefill),
    ):
        if rate is not None and not rate >= _LEAST_RATE:
            raise InvalidValueError(f"{option} is {rate:g}", f"give at least {_LEAST_RATE:g}")
    speeds = ssd_read * 1e9, ssd_write * 1e9, link * 1e9
    return MachineModel(*speeds, _LATENCY_S, math.inf if prefill is None else prefill)


def _read(
    traces: list[Path] | None, asked: Config, machine: MachineModel, progress: Progress
) -> tuple[Workload, list[float], dict[str, Any]]:
    """A trace's prompts, their times in seconds, and the first keys of a report."""
    if not traces:
        raise InvalidValueError("no trace is named", "name a file of requests; docs/replay.md has its format")
    progress(0, 1, "reading the trace")
    requests = read_trace(traces)
    workload = expand(requests, page_tokens_of(asked.model))
    if not workload.references:
        cause = f"no prompt of the trace has a full page of {workload.page_tokens} tokens"
        raise InvalidValueError(cause, "use smaller pages")
    times = [request.timestamp / 1000 for request in requests]
    about = {
        "requests": len(workload.prompts),
        "page_tokens": workload.page_tokens,
        "pages": workload.references,
        "unique_pages": len(workload.names),
        "tokens": workload.tokens,
        "seconds": times[-1] - times[0],
    }
    return workload, times, {"traces": list(map(str, traces)), "workload": about, "machine": machine.describe()}


@contextlib.contextmanager
def _undisturbed(lost: str) -> Iterator[Progress]:
    """A progress bar, without collections of garbage, which would search many lasting objects and free none, and
    without the warnings of stores, whose counts the report has. Ctrl-C says the part that is `lost`."""
    log, collects = logging.getLogger("gdscache.store"), gc.isenabled()
    level = log.level
    log.setLevel(logging.ERROR)
    gc.disable()
    try:
        with progress_bar() as progress:
            yield progress
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {lost}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        log.setLevel(level)
        if collects:
            gc.enable()
