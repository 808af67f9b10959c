"""A plan for people: one screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdscache.commands.console import Table, duration, figure, percent
from gdscache.sizes import about

Row = Mapping[str, Any]


def plan_table(report: Row) -> Table:
    """What is recommended, and what it gives."""
    chosen, forever, w = (report[name] for name in ("recommended", "infinite", "workload"))
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens, {w['unique_pages']:,} unique"
    plan = Table(f"{w['requests']:,} requests in {w['seconds']:,.0f} s, {pages} ({about(forever['bytes'])})")
    plan.add_row("CPU pool", f"{about(chosen['cpu_bytes'])} ({chosen['cpu_pages']:,} pages)")
    disk = f"{about(chosen['ssd_bytes'])} ({chosen['ssd_pages']:,} pages); store.write_policy {chosen['write_policy']}"
    plan.add_row("SSD", f"{disk}, ssd.admission {chosen['admission']}" if chosen["ssd_bytes"] else "none")
    parts = ", ".join(f"{name} {percent(share)}" for name, share in chosen["tier_token_hit_rates"].items())
    infinite = percent(forever["token_hit_rate"])
    plan.add_row("tokens hit", f"{percent(chosen['token_hit_rate'])} ({parts}); infinite tiers {infinite}")
    for name in ("mean", "p50", "p90", "p99"):
        here, without = chosen["first_token_seconds"][name], report["no_cache_first_token_seconds"][name]
        least = duration(forever["first_token_seconds"][name])
        plan.add_row(f"TTFT {name}", f"{duration(here)}; no cache {duration(without)}, infinite tiers {least}")
    if chosen["ssd_bytes"] and chosen["ssd_written_bytes_per_day"] is not None:
        a_day = figure(chosen["drive_writes_per_day"])
        plan.add_row(
            "SSD wear",
            f"{about(int(chosen['ssd_written_bytes_per_day']))} a day, {a_day} drive writes a day, "
            f"if all of it is as these {w['seconds']:,.0f} s",
        )
    plan.add_row("target", f"a mean of {duration(report['target_seconds'])}" + ("" if report["met"] else ", not met"))
    plan.add_row("binds", ", ".join(report["binds"]))
    return plan
