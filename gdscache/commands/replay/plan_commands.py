"""The command `gdscache plan`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gdscache.commands.console import Progress, show
from gdscache.commands.replay import options
from gdscache.commands.replay.setup import Asked, page_tokens_of
from gdscache.commands.replay.trace import read_trace
from gdscache.commands.replay.workload import expand
from gdscache.errors import InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.sizes import parse_size

_LIMITS = "Limits"


def plan_tiers(
    traces: options.Traces = None,
    as_json: options.AsJson = False,
    config: options.ConfigFile = None,
    model: options.Model = options.MODEL,
    sets: options.Sets = None,
    prefill: options.Prefill = None,
    ssd_read: options.SsdRead = 6.0,
    ssd_write: options.SsdWrite = 3.0,
    link: options.Link = 50.0,
    cpu_budget: Annotated[
        str | None, typer.Option(rich_help_panel=_LIMITS, help="Most host memory for the CPU pool (512GiB).")
    ] = None,
    ssd_budget: Annotated[
        str | None, typer.Option(rich_help_panel=_LIMITS, help="Most space on the SSD (4TiB). 0: no SSD.")
    ] = None,
    writes_a_day: Annotated[
        str | None, typer.Option(rich_help_panel=_LIMITS, help="Most bytes written to the SSD a day (5TB).")
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
    if not traces:
        raise InvalidValueError("no trace is named", "name a file, or synthetic:FAMILY")
    if prefill is None:
        raise InvalidValueError(
            "nothing is known of the prefill, so nothing of TTFT",
            "give --prefill-tokens-per-second: tokens that the model computes in a second, for one request",
        )
    machine = MachineModel(ssd_read * 1e9, ssd_write * 1e9, link * 1e9, 100e-6, prefill)
    budgets = (cpu_budget, "--cpu-budget"), (ssd_budget, "--ssd-budget"), (writes_a_day, "--writes-a-day")
    cpu, ssd, written = (_size(text, option) for text, option in budgets)
    asked = Asked(config=config, model=model, sets=tuple(sets or ()))

    def planned(progress: Progress) -> dict[str, Any]:
        from gdscache.commands.replay.plan import Limits, plan

        requests = read_trace(traces)
        workload = expand(requests, page_tokens_of(asked), partial=False)
        times = [request.timestamp / 1000 for request in requests]
        return plan(workload, times, asked, machine, Limits(cpu, ssd, written, ttft_target), progress=progress)

    report = {"traces": [str(path) for path in traces], **options.watched(planned, "there is no plan")}
    if as_json:
        options.print_json(report)
    else:
        from gdscache.commands.replay.plan_report import plan_table

        show(plan_table(report))
    options.end(report["problems"])


def _size(text: str | None, option: str) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r}: {error}", f"write {option} 64GiB") from None
