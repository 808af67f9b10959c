"""The reports of `gdscache replay` and `gdscache plan` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdscache.commands.console import Table, duration, figure, percent
from gdscache.commands.replay.plan import lifetime
from gdscache.sizes import about

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


def replay_tables(report: Row) -> list[Table | str]:
    run = report["run"]
    result = _titled(report)
    _add_result(result, report, run)
    tiers = Table("", "tier", "pages", "hits", "read", "written", "evicted", "promoted")
    for name, tier in run["tiers"].items():
        counts = [f"{tier[key]:,}" for key in ("capacity_pages", "hit_pages")]
        sizes = [about(tier["read_bytes"]), about(tier["written_bytes"])]
        tiers.add_row(name, *counts, *sizes, f"{tier['evictions']:,}", f"{tier['promoted_pages']:,}")
    refused = run["ssd"]["refused_pages"] if run["ssd"] else {}
    for what, causes in (
        ("miss", run["miss_pages"]),
        ("dropped", run["stores"]["dropped_pages"]),
        ("refused by the SSD", refused),
    ):
        for cause, pages in causes.items():
            if pages:
                tiers.add_row(f"{what}: {cause}", f"{pages:,}")
    p50, without = (run[name]["p50"] for name in ("first_token_seconds", "first_token_seconds_no_cache"))
    if p50 <= without or not report["machine"]["prefill"]:  # computing takes no time then
        return [result, tiers]
    return [
        result,
        tiers,
        "The median TTFT is above that without a cache: loads wait for the SSD or the link. An engine with load.gate: "
        "enforcing computes hits that would load more slowly, which is not simulated.",
    ]


def plan_table(report: Row) -> Table:
    """The recommendation and its result."""
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
    return plan


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
            f"if all of it is as these {report['workload']['seconds']:,.0f} s{worn}",
        )
