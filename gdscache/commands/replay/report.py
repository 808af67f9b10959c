"""A run of a trace through the tiers of a configuration, as plain data and as tables. Behind `gdscache replay` and
`plan`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gdscache.commands.console import Progress, Table, duration, figure, percent, silent
from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.hierarchy import Hierarchy, open_pools
from gdscache.commands.replay.trace import Workload
from gdscache.commands.replay.traffic import Outcome, Traffic
from gdscache.config import Config
from gdscache.config.model import ModelConfig
from gdscache.errors import InvalidValueError
from gdscache.groups.pools import pools_of
from gdscache.sizes import about

_DAY = 86_400.0
DRIVE_WRITES, RATED_YEARS = 1, 5  # drive writes a day over years: the rating of most server drives
Row = Mapping[str, Any]
_BINDS = {  # meanings of a plan's `binds`
    "cpu_budget": "--cpu-budget",
    "ssd_budget": "--ssd-budget",
    "wear": "--writes-a-day",
    "target": "no pair of sizes that was tried reaches the target",
    "queue": "store.queue is full at times",
    "ssd_write": "the SSD takes writes too slowly",
    "ssd_read": "the SSD reads slower than the prefill computes",
    "traffic": "the traffic: more capacity would bring few more hits",
}


def replay(
    workload: Workload,
    times: Sequence[float],
    config: Config,
    machine: MachineModel,
    *,
    serial: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Replay a workload. `times`: of the requests, in seconds, ascending. Raises `InvalidValueError` for a
    configuration without a tier."""
    if config.cpu is None and config.ssd is None:
        raise InvalidValueError("there is no tier", "give --cpu or --ssd, or a config with such a section")
    pools = open_pools(config, machine, Clock())
    outcome = Traffic(workload, pools, config, machine, times, serial=serial).run(progress)
    return {
        **describe(pools, outcome, workload, times),
        "first_token_seconds_no_cache": spread([prompt.tokens / machine.prefill for prompt in workload.prompts]),
    }


def describe(
    pools: Sequence[Hierarchy], outcome: Outcome, workload: Workload, times: Sequence[float]
) -> dict[str, Any]:
    """A run that has ended, as plain data."""
    hits = {name: outcome.hits(name) for name in pools[0].manager.tiers}
    hit, missed = sum(hits.values()), sum(outcome.misses.values())
    whole = outcome.hit_tokens / workload.page_tokens  # of groups, a hit has more pages than these
    ends = [outcome.hit_tokens * n // max(1, hit) for n in itertools.accumulate(hits.values(), initial=0)]
    tokens = {name: end - begin for name, (begin, end) in zip(hits, itertools.pairwise(ends), strict=True)}
    return {
        "lookup_pages": hit + missed,
        "hit_pages": hit,
        "hit_rate": whole / (whole + missed) if hit + missed else 0.0,
        "hit_tokens": outcome.hit_tokens,
        "token_hit_rate": outcome.hit_tokens / workload.tokens,
        "miss_pages": {cause: outcome.misses[cause] for cause in ("cold", "absent", "behind")},
        "tiers": {name: _tier(pools, workload, name, hits[name], tokens[name]) for name in hits},
        "stores": {
            "offered_pages": sum(pool.ledger.offered for pool in pools),
            "dropped_pages": _summed(pool.ledger.dropped for pool in pools),
        },
        "ssd": _ssd(pools, times[-1] - times[0] or outcome.seconds),
        "first_token_seconds": spread(outcome.first_token),
        "virtual_seconds": outcome.seconds,
    }


def _tier(pools: Sequence[Hierarchy], workload: Workload, name: str, hits: int, tokens: int) -> dict[str, Any]:
    """A tier over all pools. `hits`: pages of all groups; `tokens`: its part of the tokens that were hit."""
    rows = []
    for pool in pools:
        tier, moved = pool.manager.tiers[name], pool.executor
        promoted = moved.promoted if name == "cpu" else 0
        row = {
            "capacity_pages": tier.index.slots,
            "capacity_bytes": tier.capacity,
            "read_bytes": moved.read[name] * pool.extent_bytes,
            "written_bytes": (moved.written[name] + promoted) * pool.extent_bytes,
            "stored_pages": moved.written[name],
            "promoted_pages": promoted,
            "evictions": tier.index.evictions,
        }
        rows.append(row)
    return {"hit_pages": hits, "hit_tokens": tokens, "token_hit_rate": tokens / workload.tokens, **_summed(rows)}


def _ssd(pools: Sequence[Hierarchy], seconds: float) -> dict[str, Any] | None:
    """The writes of a trace of so many seconds. Rates are None for a trace of less than a microsecond."""
    capacity = sum(pool.ssd.capacity for pool in pools if pool.ssd is not None)
    if not capacity:
        return None
    written = sum(pool.executor.written["ssd"] * pool.extent_bytes for pool in pools)
    a_day = written * _DAY / seconds if seconds >= 1e-6 else None
    return {
        "written_bytes": written,
        "written_bytes_per_day": a_day,
        "drive_writes_per_day": None if a_day is None else a_day / capacity,
        "refused_pages": _summed(
            {name: n for (group, name), n in pool.manager.counts.items() if group == "refused"} for pool in pools
        ),
    }


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for some in counts:
        found.update(some)
    return dict(found)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {"mean": float(np.mean(seconds)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def describe_infinite(workload: Workload, model: ModelConfig) -> dict[str, Any]:
    """Tiers of infinite size: hits, and the bytes that are stored."""
    hits = workload.repeated
    return {
        "hit_rate": hits / workload.references,
        "token_hit_rate": hits * workload.page_tokens / workload.tokens,
        "bytes": len(workload.names) * page_bytes(model, workload.page_tokens),
    }


def page_bytes(model: ModelConfig, tokens: int) -> int:
    """Bytes of a workload's page of `tokens` tokens. If only some layers keep all tokens and these have their own
    planes, of these layers."""
    groups, layouts = model.layer_groups(), model.pool_layouts
    for pool, layout in zip(pools_of(groups), layouts, strict=False):
        for group in (groups[g] for g in pool.groups):
            if group.keeps == "all":
                return math.ceil(layout.extent_bytes * tokens / group.page_tokens)
    return layouts[0].extent_bytes


def lifetime(writes_a_day: float) -> str:
    """A drive's life in words, at `writes_a_day` drive writes a day."""
    days = 365.25 * RATED_YEARS * DRIVE_WRITES / writes_a_day
    if days < 1:
        return f"{24 * days:,.1f} hours"
    return f"{days / 365.25:,.1f} years" if days >= 365.25 else f"{days:,.1f} days"


# -- tables ------------------------------------------------------------------------------------------------------------


def replay_tables(report: Row) -> list[Table | str]:
    run = report["run"]
    result = _titled(report)
    _add_result(result, report, run)
    tiers = Table("", "tier", "pages", "hits", "read", "written", "evicted", "promoted")
    for name, tier in run["tiers"].items():
        counts = [f"{tier[key]:,}" for key in ("capacity_pages", "hit_pages")]
        sizes = [about(tier["read_bytes"]), about(tier["written_bytes"])]
        tiers.add_row(name, *counts, *sizes, f"{tier['evictions']:,}", f"{tier['promoted_pages']:,}")
    lost = {"miss": run["miss_pages"], "dropped": run["stores"]["dropped_pages"]}
    lost |= {"refused by the SSD": run["ssd"]["refused_pages"]} if run["ssd"] else {}
    for what, causes in lost.items():
        for cause, pages in causes.items():
            if pages:
                tiers.add_row(f"{what}: {cause}", f"{pages:,}")
    slower = (
        "The median TTFT is above that without a cache: loads wait for the SSD or the link. An engine with load.gate: "
        "enforcing computes hits that would load more slowly, which is not simulated."
    )
    p50, without = (run[name]["p50"] for name in ("first_token_seconds", "first_token_seconds_no_cache"))
    is_slower = p50 > without and report["machine"]["prefill"]  # computing takes no time without a speed
    return [result, tiers, *([slower] if is_slower else [])]


def plan_tables(report: Row) -> list[Table | str]:
    """The recommendation, its result and its risks."""
    chosen, page = report["recommended"], report["model"]["page_bytes"]
    plan = _titled(report)
    for name, size in (("CPU pool", chosen["cpu_bytes"]), ("SSD", chosen["ssd_bytes"])):
        plan.add_row(name, f"{about(size)} ({size // page:,} pages)" if size else "none")
    if chosen["ssd_bytes"]:
        plan.add_row("store", f"write_policy {chosen['write_policy']}, admission {chosen['admission']}")
    _add_result(plan, report, chosen)
    if more := report["model"]["packing"]:
        plan.add_row("packing", f"with model.pack: on the same sizes hold {more:.2f} times the tokens")
    plan.add_row("target", f"a mean of {duration(report['target_seconds'])}" + ("" if report["met"] else ", not met"))
    plan.add_row("limited by", "; ".join(_BINDS[name] for name in report["binds"]))
    return [plan, *report["warnings"]]


def _titled(report: Row) -> Table:
    w = report["workload"]
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens, {w['unique_pages']:,} unique"
    size = about(report["infinite"]["bytes"])
    return Table(f"{w['requests']:,} requests in {w['seconds']:,.0f} s, {pages} ({size})")


def _add_result(table: Table, report: Row, run: Row) -> None:
    """Rows for the hits, the times and the writes of a run."""
    forever = report["infinite"]
    parts = ", ".join(f"{name} {percent(tier['token_hit_rate'])}" for name, tier in run["tiers"].items())
    infinite = percent(forever["token_hit_rate"])
    table.add_row("tokens hit", f"{percent(run['token_hit_rate'])} ({parts}); infinite tiers {infinite}")
    for name in ("mean", "p50", "p90", "p99") if report["machine"]["prefill"] else ():
        times = f"{duration(run['first_token_seconds'][name])}; "
        times += f"no cache {duration(run['first_token_seconds_no_cache'][name])}"
        if "first_token_seconds" in forever:
            times += f", infinite tiers {duration(forever['first_token_seconds'][name])}"
        table.add_row(f"TTFT {name}", times)
    ssd = run["ssd"]
    if ssd and ssd["drive_writes_per_day"] is not None:
        a_day = ssd["drive_writes_per_day"]
        worn = f"; a drive that is built for one a day lasts {lifetime(a_day)}" if a_day else ""
        table.add_row(
            "SSD wear",
            f"{about(int(ssd['written_bytes_per_day']))} a day, {figure(a_day)} drive writes a day, "
            f"if all of it is as these {report['workload']['seconds'] or run['virtual_seconds']:,.0f} s{worn}",
        )
