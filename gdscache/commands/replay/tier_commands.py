"""`gdscache replay` with tiers: simulated, or real; tables of what came out."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gdscache.commands.replay import tier_report as reports
from gdscache.commands.replay.simulate import Progress, infinite
from gdscache.commands.replay.tier_setup import Asked, Setup, setups
from gdscache.commands.replay.trace import Request
from gdscache.commands.replay.workload import Workload, expand
from gdscache.errors import InvalidValueError
from gdscache.moves.clock import MachineModel
from gdscache.sizes import about

REAL_SCHEMA = "gdscache.replay.real/1"
REAL_PAGE = "4KiB"  # without a config


def prepare(requests: Sequence[Request], page_tokens: int, speed: float) -> tuple[Workload, list[float]]:
    """Full pages only, as an engine has them, and the times of the requests in seconds."""
    if not speed > 0:
        raise InvalidValueError(f"--speed is {speed}", "set it to more than 0")
    workload = expand(requests, page_tokens, partial=False)
    reports.check(workload)
    return workload, [request.timestamp / 1000 / speed for request in requests]


def simulated(
    workload: Workload,
    times: Sequence[float],
    asked: Asked,
    machine: MachineModel,
    *,
    serial: bool,
    own_pool: bool,
    progress: Progress,
) -> dict[str, Any]:
    """The report of all runs that are asked for."""
    runs = setups(asked, len(workload.names))
    with _quiet():
        return reports.run(workload, times, runs, machine, serial=serial, own_pool=own_pool, progress=progress)


def real(workload: Workload, asked: Asked, directory: Path | None, device: str, progress: Progress) -> dict[str, Any]:
    """The report of one engine that moves bytes, and of the simulation of the same. `directory`: for its SSD tier."""
    from gdscache.commands.replay import real as engines

    runs = setups(asked, len(workload.names))
    if len(runs) > 1:
        raise InvalidValueError(f"--real is one engine, and {len(runs)} are asked for", "give every option once")
    config = runs[0].config
    config = config.model_copy(update={"gpu": config.gpu.model_copy(update={"device": device})})
    workload = engines.with_keys(workload, engines.namespace_of(config))
    times = [0.0] * len(workload.prompts)
    with _quiet(), tempfile.TemporaryDirectory(prefix="gdscache-replay-", dir=directory) as name:
        begun = time.perf_counter()
        outcome = engines.replay_real(workload, config, Path(name), device, progress)
        took = time.perf_counter() - begun
        modelled = reports.simulate(workload, times, Setup(config, {}), MachineModel(), serial=True)
    return _real_report(workload, outcome, modelled, took)


def _real_report(workload: Workload, outcome: Any, modelled: Mapping[str, Any], took: float) -> dict[str, Any]:
    stats, forever = outcome.stats, infinite(workload)
    hits = {name: sum(getattr(found, name) for found in outcome.found) for name in ("cpu", "ssd")}
    tiers = {}
    for name, tier in stats["tiers"].items():
        tiers[name] = {
            "capacity_pages": tier["slots"],
            "hit_pages": hits[name],
            "hit_tokens": hits[name] * workload.page_tokens,
            "read_bytes": stats.get("bytes_loaded", {}).get(name, 0),
            "stored_pages": stats.get("stored", {}).get(name, 0),
            "evictions": tier["evictions"],
        }
    hit = sum(hits.values())
    same = {name: hits[name] == modelled["tiers"][name]["hit_pages"] for name in tiers}
    return {
        "schema": REAL_SCHEMA,
        "mode": "real",
        "workload": reports.describe_workload(workload, ()),
        "settings": modelled["settings"],
        "device": stats["device"],
        "lookup_pages": hit + outcome.misses,
        "hit_pages": hit,
        "hit_rate": hit / (hit + outcome.misses),
        "hit_tokens": hit * workload.page_tokens,
        "token_hit_rate": hit * workload.page_tokens / workload.tokens,
        "miss_pages": outcome.misses,
        "infinite_hit_rate": forever.hits / workload.references,
        "tiers": tiers,
        "stores": {"offered_pages": outcome.offered, "dropped_pages": dict(outcome.dropped)},
        "refused_pages": stats.get("refused", {}),
        "failed_pages": dict(outcome.failed),
        "verified_bytes": outcome.verified_bytes,
        "load_seconds": outcome.load_seconds,
        "store_seconds": outcome.store_seconds,
        "seconds": took,
        "simulated_hit_pages": {name: tier["hit_pages"] for name, tier in modelled["tiers"].items()},
        "agrees": all(same.values()) and outcome.requests_that_differ(modelled["found"]) == 0,
        "problems": [*outcome.problems, *modelled["problems"]],
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A run would say once for each tier what its report counts."""
    log = logging.getLogger("gdscache.store")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def defects(report: Mapping[str, Any]) -> list[str]:
    """What does not add up in a report; nothing, or gdscache has a defect."""
    if report["mode"] == "simulate":
        return [problem for run in report["runs"] for problem in reports.totals(run)]
    found = list(report["problems"])
    if not report["agrees"]:
        found.append("the engine and its simulation found different pages")
    found += [f"{n} pages of loads were not good: {cause}" for cause, n in report["failed_pages"].items()]
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> list[Table]:
    """A report for people."""
    if report["mode"] == "real":
        return [_real_table(report)]
    found = [_overview(report)]
    if len(report["runs"]) == 1:
        found.append(_details(report["runs"][0]))
    return found


def _title(report: Mapping[str, Any]) -> str:
    w = report["workload"]
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens, {w['unique_pages']:,} unique"
    return f"{w['requests']:,} requests, {pages}"


def _new(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _overview(report: Mapping[str, Any]) -> Table:
    timed = report["machine"]["prefill"] is not None
    varied = ", ".join(report["runs"][0]["varied"]) if report["runs"] else ""
    wanted = [
        varied or "tiers",
        "hits",
        "tokens",
        "gpu",
        "cpu",
        "ssd",
        "of best",
        "SSD written",
        "amp.",
        "DW/D",
        "dropped",
    ]
    table = _new(_title(report), *wanted, *(["TTFT p50", "p90", "p99"] if timed else []))
    forever = report["infinite"]
    table.add_row("infinite", f"{forever['hit_rate']:.4f}", f"{forever['token_hit_rate']:.4f}")
    for best in report["optimum"]:
        name = f"optimum, {best['capacity_pages']:,} pages"
        table.add_row(name, f"{best['hit_rate']:.4f}", f"{best['token_hit_rate']:.4f}")
    for run in report["runs"]:
        ssd, tokens = run["ssd"] or {}, report["workload"]["tokens"]
        shares = [_share(run["tiers"].get(name, {}).get("hit_tokens"), tokens) for name in ("gpu", "cpu", "ssd")]
        ttft = [_seconds(run["first_token_seconds"][p]) for p in ("p50", "p90", "p99")] if timed else []
        table.add_row(
            ", ".join(run["varied"].values()) or f"{run['capacity_pages']:,} pages",
            f"{run['hit_rate']:.4f}",
            f"{run['token_hit_rate']:.4f}",
            *shares,
            _number(run["of_optimum"]),
            about(ssd["written_bytes"]) if ssd else "",
            _number(ssd.get("write_amplification")),
            _number(ssd.get("drive_writes_per_day")),
            f"{sum(run['stores']['dropped_pages'].values()):,}",
            *ttft,
        )
    if timed and report["runs"]:
        none = report["runs"][0]["first_token_seconds_no_cache"]
        table.add_row("no cache", *[""] * 10, *(_seconds(none[p]) for p in ("p50", "p90", "p99")))
    return table


def _details(run: Mapping[str, Any]) -> Table:
    table = _new("", "tier", "pages", "hits", "read", "written", "evicted", "promoted")
    for name, tier in run["tiers"].items():
        counts = [f"{tier[key]:,}" for key in ("capacity_pages", "hit_pages")]
        sizes = [about(tier["read_bytes"]), about(tier["written_bytes"])]
        table.add_row(name, *counts, *sizes, f"{tier['evictions']:,}", f"{tier['promoted_pages']:,}")
    causes = {f"miss: {cause}": n for cause, n in run["miss_pages"].items()}
    causes |= {f"dropped: {cause}": n for cause, n in run["stores"]["dropped_pages"].items()}
    if run["ssd"] is not None:
        causes |= {f"refused by the SSD: {cause}": n for cause, n in run["ssd"]["refused_pages"].items()}
        causes |= {"sent on without a store": run["ssd"]["demoted_pages"]}
    for cause, n in causes.items():
        if n:
            table.add_row(cause, f"{n:,}")
    return table


def _real_table(report: Mapping[str, Any]) -> Table:
    table = _new(_title(report), "tier", "pages", "hits", "hits simulated", "read", "stored", "evicted")
    for name, tier in report["tiers"].items():
        table.add_row(
            name,
            f"{tier['capacity_pages']:,}",
            f"{tier['hit_pages']:,}",
            f"{report['simulated_hit_pages'][name]:,}",
            about(tier["read_bytes"]),
            f"{tier['stored_pages']:,}",
            f"{tier['evictions']:,}",
        )
    table.add_row("")
    table.add_row("hit rate", f"{report['hit_rate']:.4f}", f"infinite: {report['infinite_hit_rate']:.4f}")
    table.add_row("verified", about(report["verified_bytes"]), f"bad pages: {sum(report['failed_pages'].values()):,}")
    table.add_row(
        "seconds",
        f"{report['seconds']:.1f}",
        f"loading {report['load_seconds']:.1f}",
        f"storing {report['store_seconds']:.1f}",
    )
    return table


def _share(part: int | None, whole: int) -> str:
    return "" if part is None else f"{100 * part / whole:.1f}%"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
