"""A plan for people: one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from gdscache.sizes import about

Row = Mapping[str, Any]


def tables(report: Row) -> list[Table]:
    """The plan, the curve, and other settings of the SSD at the recommended sizes."""
    found = [_plan(report), _curve(report)]
    if report.get("other_settings"):
        found.append(_others(report))
    return found


def _new(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _plan(report: Row) -> Table:
    chosen, forever, knee = report["recommended"], report["infinite"], report["knee"]
    table = _new(_title(report))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("CPU pool", f"{about(chosen['cpu_bytes'])}{_pages(chosen, 'cpu')}")
    disk = "none" if not chosen["ssd_bytes"] else f"{about(chosen['ssd_bytes'])}{_pages(chosen, 'ssd')}"
    if chosen["ssd_bytes"] and chosen.get("admission"):
        disk += f"; store.write_policy {chosen['write_policy']}, ssd.admission {chosen['admission']}"
    table.add_row("SSD", disk)
    rate = f"{100 * chosen['token_hit_rate']:.1f} % of the tokens"
    parts = ", ".join(f"{name} {100 * share:.1f}" for name, share in chosen["tier_token_hit_rates"].items())
    table.add_row("hits", f"{rate} ({parts}); infinite tiers {100 * forever['token_hit_rate']:.1f}")
    for name in ("mean", "p50", "p90", "p99"):
        if name in chosen["first_token_seconds"]:
            table.add_row(f"TTFT {name}", _seconds(report, name))
    table.add_row("SSD wear", _wear(chosen))
    table.add_row("rule", f"least cost with {report['rule']['aim']}: {report['target_seconds']:.4g} s")
    table.add_row("reached", "yes" if report["met"] else "no")
    for i, bound in enumerate(report["binds"]):
        table.add_row("" if i else "binds", bound["text"])
    unit = "tokens" if report["mode"] == "curve" else "pages"
    within = 100 * report["rule"]["within"]
    text = f"{about(knee['capacity_bytes'])}: {100 * knee['hit_rate']:.1f} % of the {unit}"
    table.add_row("knee", f"{text}; more capacity, however much, adds less than {within:g} % of all hits")
    for text in _notes(report):
        table.add_row("note", text)
    return table


def _title(report: Row) -> str:
    if report["mode"] == "curve":
        return f"From a hit curve of {len(report['curve'])} points; means by formula, without queues"
    w = report["workload"]
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens, {w['unique_pages']:,} unique"
    return f"{w['requests']:,} requests in {w['seconds']:,.0f} s, {pages} ({about(report['infinite']['bytes'])})"


def _pages(row: Row, tier: str) -> str:
    return f" ({row[f'{tier}_pages']:,} pages)" if f"{tier}_pages" in row else ""


def _seconds(report: Row, name: str) -> str:
    here, without = report["recommended"]["first_token_seconds"][name], report["no_cache_first_token_seconds"][name]
    forever = report["infinite"]["first_token_seconds"][name]
    text = f"{here:.3g} s; no cache {without:.3g} s, infinite tiers {forever:.3g} s"
    return text + (f" ({100 * (here / without - 1):+.0f} % against no cache)" if without else "")


def _wear(row: Row) -> str:
    if not row["ssd_bytes"]:
        return "none"
    if row["ssd_written_bytes_per_day"] is None:
        return "unknown: requests have no times"
    return f"{about(int(row['ssd_written_bytes_per_day']))} a day, {row['drive_writes_per_day']:.3g} drive writes a day"


def _notes(report: Row) -> Iterator[str]:
    sample = report.get("sample")
    if sample:
        hits, mean = 100 * sample["hit_rate_error"], 100 * sample["mean_first_token_error"]
        yield (
            f"the search kept one page of {sample['every']}; the figures above are of the whole trace. "
            f"The search's were {hits:+.2f} points of hits, {mean:+.1f} % of mean TTFT off"
        )
    if report["mode"] == "curve":
        yield "percentiles, drops and queues need a trace"
    elif report["workload"]["seconds"] < 86_400 and report["recommended"]["ssd_bytes"]:
        yield f"a day's writes are those of {report['workload']['seconds']:,.0f} s, scaled"


def _curve(report: Row) -> Table:
    timed = "optimum_hit_rate" in report["curve"][0]
    table = _new("Hits of one tier", "capacity", "hits", *(["optimum"] if timed else []))
    for row in report["curve"]:
        best = [f"{row['optimum_hit_rate']:.4f}"] if timed else []
        table.add_row(about(row["capacity_bytes"]), f"{row['hit_rate']:.4f}", *best)
    table.add_row("infinite", f"{report['infinite']['hit_rate' if timed else 'token_hit_rate']:.4f}")
    return table


def _others(report: Row) -> Table:
    sample = report["sample"]
    title = "Other settings at these sizes" + (f" (one page of {sample['every']} kept)" if sample else "")
    table = _new(title, "write_policy, admission", "tokens hit", "mean TTFT", "written a day", "dropped")
    for row in report["other_settings"]:
        written = row["ssd_written_bytes_per_day"]
        table.add_row(
            f"{row['write_policy']}, {row['admission']}",
            f"{100 * row['token_hit_rate']:.1f}%",
            f"{row['first_token_seconds']['mean']:.3g} s",
            "" if written is None else about(int(written)),
            f"{sum(row['dropped_pages'].values()):,}",
        )
    return table
