"""The command `gdscache plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gdscache.commands.replay import tier_commands
from gdscache.commands.replay.console import end, listed, show, watched
from gdscache.commands.replay.plan import POINTS, SCHEMA, plan
from gdscache.commands.replay.plan_curve import Demand, plan_curve, read_curve
from gdscache.commands.replay.plan_machine import GB, bench_rates
from gdscache.commands.replay.plan_rule import Limits, Rule
from gdscache.commands.replay.plan_tables import tables
from gdscache.commands.replay.simulate import Progress
from gdscache.commands.replay.tier_setup import TOKEN_BYTES, Asked, page_tokens_of, setups
from gdscache.commands.replay.trace import BLOCK_TOKENS, read_trace
from gdscache.errors import InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.sizes import parse_size

_RATES = {"ssd_read": 6 * GB, "ssd_write": 3 * GB, "link": 50 * GB}  # where nothing was said
_MODEL, _MACHINE, _LIMITS, _SEARCH, _CURVE = "Model and policies", "The machine", "Limits", "The search", "With --curve"


def plan_tiers(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TRACE...]", help="Mooncake traces, parts of one; or synthetic:KIND[:SEED]."),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Instead of a trace: lines of a capacity and a hit rate (64GiB,0.31).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw hits and TTFT over capacity into this file.")] = None,
    config: Annotated[
        Path | None, typer.Option(rich_help_panel=_MODEL, help="Model and policies; its capacities are not read.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(rich_help_panel=_MODEL, help=f"Bytes of a token, without --config: {', '.join(TOKEN_BYTES)}."),
    ] = "llama-3-8b",
    token_bytes: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="Bytes of a token instead (128KiB), without --config.")
    ] = None,
    page_tokens: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Tokens a page, without --config; divides 512.")
    ] = BLOCK_TOKENS,
    policy: Annotated[str | None, typer.Option(rich_help_panel=_MODEL, help="Eviction, of every tier.")] = None,
    write: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_MODEL, help="store.write_policy; several are searched.")
    ] = None,
    admission: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_MODEL, help="ssd.admission; several are searched.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=_MODEL, help="Any key of the configuration."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="A GPU pool that the engine owns; else attached planes.")
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option("--prefill-tokens-per-second", rich_help_panel=_MACHINE, help="What a request computes. Needed."),
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(rich_help_panel=_MACHINE, help="Rates from the JSON of `bench io`, `bench copy`."),
    ] = None,
    ssd_read: Annotated[
        float | None, typer.Option("--ssd-read-gbps", rich_help_panel=_MACHINE, help="GB/s read from the SSD [6].")
    ] = None,
    ssd_write: Annotated[
        float | None, typer.Option("--ssd-write-gbps", rich_help_panel=_MACHINE, help="GB/s written to the SSD [3].")
    ] = None,
    link: Annotated[
        float | None, typer.Option("--link-gbps", rich_help_panel=_MACHINE, help="GB/s host to GPU, each way [50].")
    ] = None,
    latency: Annotated[
        float, typer.Option("--ssd-latency-us", rich_help_panel=_MACHINE, help="Microseconds of each read and write.")
    ] = 100.0,
    overlap: Annotated[
        bool, typer.Option("--overlap", rich_help_panel=_MACHINE, help="Loads run beside the prefill, not before it.")
    ] = False,
    speed: Annotated[float, typer.Option(rich_help_panel=_MACHINE, help="Requests come so many times as fast.")] = 1.0,
    cpu_budget: Annotated[str | None, typer.Option(rich_help_panel=_LIMITS, help="Host memory for the pool.")] = None,
    ssd_budget: Annotated[
        str | None, typer.Option(rich_help_panel=_LIMITS, help="Room on the SSD; 0 is no SSD.")
    ] = None,
    writes_a_day: Annotated[
        str | None, typer.Option("--writes-a-day", rich_help_panel=_LIMITS, help="Bytes that may be written (5TB).")
    ] = None,
    drive_writes: Annotated[
        float | None, typer.Option(rich_help_panel=_LIMITS, help="Times a day that the SSD tier may be written.")
    ] = None,
    endurance_tbw: Annotated[
        float | None, typer.Option(rich_help_panel=_LIMITS, help="TB that the drive is rated for, in --years.")
    ] = None,
    years: Annotated[float, typer.Option(rich_help_panel=_LIMITS, help="How long the drive has to last.")] = 5.0,
    ttft_target: Annotated[
        float | None, typer.Option(rich_help_panel=_LIMITS, help="Seconds, the mean; in place of --within.")
    ] = None,
    within: Annotated[
        float, typer.Option(rich_help_panel=_SEARCH, help="Percent that the mean TTFT may be above infinite tiers'.")
    ] = 5.0,
    host_price: Annotated[
        float, typer.Option(rich_help_panel=_SEARCH, help="What a byte of host memory costs, in bytes of the SSD.")
    ] = 20.0,
    points: Annotated[
        int,
        typer.Option(
            min=2, max=16, rich_help_panel=_SEARCH, help="Sizes of a tier that are tried, each half the next."
        ),
    ] = POINTS,
    sample: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_SEARCH, help="Search with one page of so many; 1: with all. [by length]"),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option("--first", min=1, metavar="N", rich_help_panel=_SEARCH, help="The first N requests only."),
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option(rich_help_panel=_CURVE, help="Tokens of a prompt, the mean. Needed.")
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(rich_help_panel=_CURVE, help="For bytes written a day.")
    ] = None,
) -> None:
    """How big should the CPU pool and the SSD be, for this traffic, model and machine? And what will they give?

    Replays the trace through pairs of sizes with virtual time, and recommends the pair that costs least of those whose
    mean TTFT is nearly that of infinite tiers, within the limits.
    """
    if bool(traces) == (curve is not None):
        raise InvalidValueError("a plan is made from one source", "give TRACE files, synthetic:KIND, or --curve FILE")
    if prefill is None:
        raise InvalidValueError(
            "nothing is known of the prefill, so nothing of TTFT",
            "give --prefill-tokens-per-second: tokens that the model computes in a second, for one request",
        )
    if curve is not None and prompt_tokens is None:
        raise InvalidValueError("a curve does not say how long prompts are", "give --prompt-tokens, their mean")
    if plot is not None:
        from gdscache.commands.bench.plots import require

        require(plot)
    rates = {**_RATES, **bench_rates(bench or [])}
    given = {"ssd_read": ssd_read, "ssd_write": ssd_write, "link": link}
    rates |= {name: rate * GB for name, rate in given.items() if rate is not None}
    machine = MachineModel(**rates, latency=latency * 1e-6, prefill=prefill, overlap=overlap)
    limits = Limits(
        _size(cpu_budget, "--cpu-budget"),
        _size(ssd_budget, "--ssd-budget"),
        _written(writes_a_day, endurance_tbw, years),
        drive_writes,
        ttft_target,
    )
    rule = Rule(within / 100, host_price)
    asked = Asked(
        config=config,
        model=model,
        page_bytes=None if token_bytes is None else str((_size(token_bytes, "--token-bytes") or 0) * page_tokens),
        page_tokens=page_tokens,
        gpu=gpu,
        eviction=(policy,) if policy else (),
        write=listed(write),
        admission=listed(admission),
        sets=tuple(sets or ()),
    )
    if curve is not None:
        assert prompt_tokens is not None, "checked above"
        demand = Demand(prompt_tokens, requests_per_second)
        report = {"curve_file": str(curve), **_from_curve(curve, asked, demand, machine, limits, rule)}
    else:

        def replayed(progress: Progress) -> dict[str, Any]:
            progress(0, 1, "reading the trace")
            requests = read_trace(traces or [])[:first]
            workload, times = tier_commands.prepare(requests, page_tokens_of(asked), speed)
            return plan(
                workload,
                times,
                asked,
                machine,
                limits,
                rule,
                points=points,
                every=sample,
                own_pool=gpu is not None,
                progress=progress,
            )

        with _quiet_stores():
            report = {"traces": [str(path) for path in traces or []], **watched(replayed, "there is no plan")}
    if plot is not None:
        from gdscache.commands.replay.plan_plot import plan_plot

        plan_plot(report, plot)
    show(report, tables(report), as_json=as_json, width=140)
    end(report.get("problems", ()))


def _from_curve(
    file: Path, asked: Asked, demand: Demand, machine: MachineModel, limits: Limits, rule: Rule
) -> dict[str, Any]:
    [setup] = setups(dataclasses.replace(asked, cpu=("1",), ssd=("none",), write=(), admission=()), 1)
    layout = setup.config.model.layout()
    limits.check(layout.extent_bytes)
    each = layout.extent_bytes / layout.page_tokens
    found = plan_curve(read_curve(file), each, demand, machine, limits, rule)
    return {
        "schema": SCHEMA,
        "mode": "curve",
        "workload": demand._asdict(),
        "machine": machine.describe(),
        "model": {"page_tokens": layout.page_tokens, "page_bytes": layout.extent_bytes, "token_bytes": each},
        "limits": limits.describe(),
        "rule": rule.describe(limits),
        **found,
    }


@contextlib.contextmanager
def _quiet_stores() -> Iterator[None]:
    """Each run of a search would say once what its row counts."""
    log = logging.getLogger("gdscache.store")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _size(text: str | None, option: str) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise InvalidValueError(f"{option} {text!r}: {error}", f"write {option} 64GiB") from None


def _written(a_day: str | None, terabytes: float | None, years: float) -> float | None:
    """Bytes a day of both limits, the less."""
    found: list[float] = []
    size = _size(a_day, "--writes-a-day")
    if size is not None:
        found.append(size)
    if terabytes is not None:
        if not years > 0:
            raise InvalidValueError(f"--years is {years:g}", "set it to more than 0")
        found.append(terabytes * 1e12 / (365 * years))
    return min(found, default=None)
