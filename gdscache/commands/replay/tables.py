"""Tables of `gdscache replay`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gdscache.commands.console import Table, duration, figure
from gdscache.sizes import about

Row = Mapping[str, Any]


def tables(report: Row) -> list[Table | str]:
    """The runs and their references."""
    runs = report["runs"]
    return [_runs(report), *map(_details, runs if len(runs) == 1 else ()), *_notes(report)]


def _title(report: Row) -> str:
    w = report["workload"]
    pages = f"{w['pages']:,} full pages of {w['page_tokens']} tokens"
    return f"{w['requests']:,} requests, {pages}, {w['unique_pages']:,} unique"


def _compared(report: Row) -> Iterator[tuple[str, Row]]:
    """The rows of a report, each run after its references."""
    yield "infinite", report["infinite"]
    for best, plain in zip(report["optimum"], report["plain_lru"], strict=True):
        yield "optimum", best
        yield "plain LRU", plain
        for run in report["runs"]:
            if run["capacity_pages"] == best["capacity_pages"]:
                yield "", run


def _runs(report: Row) -> Table:
    timed = report["machine"]["prefill"] is not None
    varied = ", ".join(report["runs"][0]["varied"]) or "tiers"
    names = [name for name in ("cpu", "ssd") if any(name in run["tiers"] for run in report["runs"])]
    ttft = ("mean", "p50", "p99") if timed else ()
    starred = len(report["runs"]) > 1 and any(run["frontier"] for run in report["runs"])
    table = Table(
        _title(report),
        *(varied, "pages", "hits", "tokens hit", *names, "of optimum", "of plain LRU", "SSD written", "dropped"),
        *(f"TTFT {name}" for name in ttft),
        caption="* no other order of writes finds as much and writes less" if starred else "",
    )
    for name, row in _compared(report):
        pages = f"{row['capacity_pages']:,}" if "capacity_pages" in row else ""
        cells = [pages, _rate(row["hit_rate"]), _rate(row["token_hit_rate"])]
        if name:
            table.add_row(name, *cells)
            continue
        shares = [row["tiers"].get(tier, {}).get("hit_tokens", 0) / report["workload"]["tokens"] for tier in names]
        written = about(row["ssd"]["written_bytes"]) if row["ssd"] else ""
        if starred and row["frontier"]:
            written += " *"
        table.add_row(
            ", ".join(row["varied"].values()) or "as configured",
            *cells,
            *map(_rate, shares),
            _rate(row["of_optimum"]),
            _rate(row["of_plain_lru"]),
            written,
            f"{sum(row['stores']['dropped_pages'].values()):,}",
            *(duration(row["first_token_seconds"][name]) for name in ttft),
        )
    if timed:
        without = report["runs"][0]["first_token_seconds_no_cache"]
        table.add_row("no cache", *[""] * (7 + len(names)), *(duration(without[name]) for name in ttft))
    return table


def _details(run: Row) -> Table:
    table = Table("", "tier", "pages", "hits", "read", "written", "evicted", "promoted")
    for name, tier in run["tiers"].items():
        counts = [f"{tier[key]:,}" for key in ("capacity_pages", "hit_pages")]
        sizes = [about(tier["read_bytes"]), about(tier["written_bytes"])]
        table.add_row(name, *counts, *sizes, f"{tier['evictions']:,}", f"{tier['promoted_pages']:,}")
    ssd = run["ssd"] or {"refused_pages": {}, "demoted_pages": 0}
    causes = {f"miss: {cause}": n for cause, n in run["miss_pages"].items()}
    causes |= {f"dropped: {cause}": n for cause, n in run["stores"]["dropped_pages"].items()}
    causes |= {f"refused by the SSD: {cause}": n for cause, n in ssd["refused_pages"].items()}
    causes |= {"sent on without a store": ssd["demoted_pages"]}
    for cause, n in causes.items():
        if n:
            table.add_row(cause, f"{n:,}")
    for name, key in (("write amplification", "write_amplification"), ("drive writes a day", "drive_writes_per_day")):
        if ssd.get(key) is not None:
            table.add_row(name, figure(ssd[key]))
    return table


def _notes(report: Row) -> Iterator[str]:
    for run in report["runs"]:
        if run["offloading"]:
            rules = ", ".join(f"{rule} {_rate(rate)}" for rule, rate in run["offloading"].items())
            size = about(run["tiers"]["cpu"]["capacity_bytes"])
            yield f"Tokens that vLLM's own offloading hits in {size} of memory, by the states that it keeps: {rules}"
    if report["machine"]["prefill"] is None:
        return
    slow = [r for r in report["runs"] if r["first_token_seconds"]["p50"] > r["first_token_seconds_no_cache"]["p50"]]
    if slow:
        yield (
            f"The median TTFT of {len(slow)} of {len(report['runs'])} runs is above that without a cache: loads wait "
            "for the SSD or the link. Try --overlap, or faster rates; an engine with load.gate: enforcing computes "
            "hits that would load more slowly, which is not simulated."
        )


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
