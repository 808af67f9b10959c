"""The command `gdscache plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gdscache.commands.console import Progress, Table, duration, figure, percent, show
from gdscache.commands.replay import options
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.setup import Asked, page_tokens_of
from gdscache.commands.replay.trace import read_trace
from gdscache.commands.replay.workload import expand
from gdscache.errors import InvalidValueError
from gdscache.sizes import about, parse_size

_LIMITS = "Limits"
_BINDS = {  # meanings of the report's `binds`
    "cpu_budget": "--cpu-budget",
    "ssd_budget": "--ssd-budget",
    "wear": "--writes-a-day",
    "target": "no pair of sizes that was tried reaches the target",
    "queue": "store.queue is full at times",
    "ssd_write": "the SSD takes writes too slowly",
    "ssd_read": "the SSD reads slower than the prefill computes",
    "traffic": "the traffic: more capacity would bring few more hits",
}


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
    options.check_named(traces)
    if prefill is None:
        raise InvalidValueError(
            "the speed of the prefill is unknown, and so is the TTFT",
            "give --prefill-tokens-per-second: tokens that the model computes in a second, for one request",
        )
    machine = MachineModel(ssd_read * 1e9, ssd_write * 1e9, link * 1e9, 100e-6, prefill)
    budgets = (cpu_budget, "--cpu-budget"), (ssd_budget, "--ssd-budget"), (writes_a_day, "--writes-a-day")
    cpu, ssd, written = (_size(text, option) for text, option in budgets)
    asked = Asked(config=config, model=model, sets=tuple(sets or ()))

    def planned(progress: Progress) -> dict[str, Any]:
        from gdscache.commands.replay.plan import Limits, plan

        requests = read_trace(traces or ())
        workload = expand(requests, page_tokens_of(asked))
        times = [request.timestamp / 1000 for request in requests]
        return plan(workload, times, asked, machine, Limits(cpu, ssd, written, ttft_target), progress=progress)

    report = {"traces": [str(path) for path in traces or ()], **options.watched(planned, "there is no plan")}
    if as_json:
        options.print_json(report)
    else:
        show(_table(report), *report["warnings"])
    options.end(report["problems"])


def _size(text: str | None, option: str) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r}: {error}", f"write {option} 64GiB") from None


def _table(report: Mapping[str, Any]) -> Table:
    """The recommendation and its result."""
    chosen, forever, w = (report[name] for name in ("recommended", "infinite", "workload"))
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens, {w['unique_pages']:,} unique"
    plan = Table(f"{w['requests']:,} requests in {w['seconds']:,.0f} s, {pages} ({about(forever['bytes'])})")
    plan.add_row("CPU pool", f"{about(chosen['cpu_bytes'])} ({chosen['cpu_pages']:,} pages)")
    disk = f"{about(chosen['ssd_bytes'])} ({chosen['ssd_pages']:,} pages); store.write_policy {chosen['write_policy']}"
    plan.add_row("SSD", f"{disk}, store.admission {chosen['admission']}" if chosen["ssd_bytes"] else "none")
    parts = ", ".join(f"{name} {percent(share)}" for name, share in chosen["tier_token_hit_rates"].items())
    infinite = percent(forever["token_hit_rate"])
    plan.add_row("tokens hit", f"{percent(chosen['token_hit_rate'])} ({parts}); infinite tiers {infinite}")
    for name in ("mean", "p50", "p90", "p99"):
        here, without = chosen["first_token_seconds"][name], report["no_cache_first_token_seconds"][name]
        least = duration(forever["first_token_seconds"][name])
        plan.add_row(f"TTFT {name}", f"{duration(here)}; no cache {duration(without)}, infinite tiers {least}")
    if chosen["ssd_bytes"] and chosen["ssd_written_bytes_per_day"] is not None:
        from gdscache.commands.replay.plan import lifetime

        a_day = chosen["drive_writes_per_day"]
        worn = f"; a drive that is built for one a day lasts {lifetime(a_day)}" if a_day else ""
        plan.add_row(
            "SSD wear",
            f"{about(int(chosen['ssd_written_bytes_per_day']))} a day, {figure(a_day)} drive writes a day, "
            f"if all of it is as these {w['seconds']:,.0f} s{worn}",
        )
    if more := report["model"]["packing"]:
        plan.add_row("packing", f"with model.pack: on the same sizes hold {more:.2f} times the tokens")
    plan.add_row("target", f"a mean of {duration(report['target_seconds'])}" + ("" if report["met"] else ", not met"))
    plan.add_row("limited by", "; ".join(_BINDS[name] for name in report["binds"]))
    return plan
