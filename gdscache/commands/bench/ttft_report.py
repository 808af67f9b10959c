"""The report of `gdscache bench ttft`: what its figures are held against, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from gdscache.commands.bench.measure import target
from gdscache.commands.bench.report import left_table, new_table, verdict
from gdscache.commands.bench.ttft_cells import NOWHERE, cell_of

Row = Mapping[str, Any]
TTFT_SCHEMA = "gdscache.bench.ttft/2"

LONG = 32 << 10  # tokens: from here on hits are held against the ideal
LEAST_CACHED = 50  # percent
IDEAL_TARGETS = {"cpu": 0.90, "ssd_via_cpu": 0.85}  # max(c, t) / measured
OVERLAP_TARGET = 0.90  # of (c + t) / max(c, t), what overlap could bring
COMPARABLE = (0.3, 0.7)  # t / c, between which overlap is held against that
RECOMPUTE_TARGET, BETTER_TARGET = 1.03, 1.05  # with the gate: against recomputing, and the better of that and no gate
WAIT_TARGET = 50e-6  # seconds of the host, a layer
MISS_TARGET = 0.02  # of the time without a cache


def verdicts(cells: Sequence[Row], waits: Sequence[Row], *, judged: bool, ram: bool) -> list[dict[str, Any]]:
    """What the figures come to, row by row. `judged`: with targets; `ram`: the SSD tier lies on a RAM disk.

    A row has `name`, `what`, `value`, `relation` (`at least` or `at most`), and where it is judged `target` and `met`.
    """
    found = [*_ideals(cells, judged=judged, ram=ram), *_overlaps(cells, judged=judged)]
    found += [*_gates(cells, judged=judged), *_waits(cells, waits, judged=judged)]
    for row in (row for row in cells if row["where"] == NOWHERE):
        found.append(_row("miss", _label(row), row["added"], MISS_TARGET, judged, at_least=False))
    return found


def _row(name: str, what: str, value: float, limit: float, judged: bool, *, at_least: bool) -> dict[str, Any]:
    relation = "at least" if at_least else "at most"
    goal = target(value, limit, at_least=at_least) if judged else {}
    return {"name": name, "what": what, "value": value, "relation": relation, **goal}


def _ideals(cells: Sequence[Row], *, judged: bool, ram: bool) -> Iterable[dict[str, Any]]:
    for row in cells:
        limit = IDEAL_TARGETS.get(row["where"])
        if limit is None or row["gate"] or not row["overlap"] or row["ideal_ratio"] is None:
            continue
        hard = judged and row["prompt_tokens"] >= LONG and row["cached_percent"] >= LEAST_CACHED
        counts = hard and (ram or row["where"] != "ssd_via_cpu")
        yield _row("ideal", _label(row), row["ideal_ratio"], limit, counts, at_least=True)


def _overlaps(cells: Sequence[Row], *, judged: bool) -> Iterable[dict[str, Any]]:
    """On against off, as a share of what is left to win."""
    off = {_key(row): row for row in cells if not row["overlap"] and not row["gate"]}
    for row in cells:
        other = off.get(_key(row))
        if other is None or row["gate"] or not row["overlap"] or not row["transfer_seconds"]:
            continue
        c, t = row["resident_seconds"]["median"], row["transfer_seconds"]
        if COMPARABLE[0] <= t / c <= COMPARABLE[1]:
            won = other["ttft_seconds"]["median"] / row["ttft_seconds"]["median"]
            share = won / ((c + t) / max(c, t))
            yield _row("overlap", f"{_label(row)}, on / off", share, OVERLAP_TARGET, judged, at_least=True)


def _gates(cells: Sequence[Row], *, judged: bool) -> Iterable[dict[str, Any]]:
    ungated = {(_key(row), row["overlap"]): row["ttft_seconds"]["median"] for row in cells if not row["gate"]}
    for row in (row for row in cells if row["gate"]):
        mine, plain = row["ttft_seconds"]["median"], row["recompute_seconds"]["median"]
        yield _row("gate", f"{_label(row)}, / recomputing", mine / plain, RECOMPUTE_TARGET, judged, at_least=False)
        other = ungated.get((_key(row), row["overlap"]))
        if other is not None:
            what = f"{_label(row)}, / the better of recomputing and no gate"
            yield _row("gate better", what, mine / min(plain, other), BETTER_TARGET, judged, at_least=False)


def _waits(cells: Sequence[Row], waits: Sequence[Row], *, judged: bool) -> Iterable[dict[str, Any]]:
    for row in cells:
        if row["where"] == "cpu" and row["overlap"] and not row["gate"] and row["wait_seconds"] is not None:
            yield _row("wait", _label(row), row["wait_seconds"]["median"], WAIT_TARGET, judged, at_least=False)
    for row in waits:
        what = f"{row['requests']} requests of {row['cached_tokens']:,} cached tokens, load_many"
        yield _row("wait", what, row["wait_seconds"]["median"], WAIT_TARGET, judged, at_least=False)


def _key(row: Row) -> tuple[int, int, str]:
    return row["prompt_tokens"], row["cached_percent"], row["where"]


def _label(row: Row) -> str:
    return cell_of(row).label


# -- tables ------------------------------------------------------------------------------------------------------------


def ttft_tables(report: Row) -> list[Table]:
    """What was measured: also part of it, when the measurement was ended early."""
    tables = [
        _hits(report["cells"]),
        _misses(report["cells"]),
        _python(report["python"]),
        _verdicts(report["verdicts"]),
    ]
    tables += [_causes("Not measured here", report["cannot"]), _causes("Failed", report["failed"])]
    tables += [_causes("Left out", report["not_run"]), left_table(report)]
    return [table for table in tables if table.row_count]


def _hits(cells: Sequence[Row]) -> Table:
    columns = ("TTFT ms", "p99", "recomputed", "c", "t", "of ideal", "speed-up", "wait us", "tokens")
    table = new_table("Time to first token; c: the prefix is in the pool, t: bytes over the ceiling", "cell", *columns)
    for r in cells:
        if r["where"] == NOWHERE:
            continue
        ideal = "" if r["ideal_ratio"] is None else f"{r['ideal_ratio']:.2f}"
        transfer = "" if r["transfer_seconds"] is None else _ms(r["transfer_seconds"])
        waited = "" if r["wait_seconds"] is None else f"{r['wait_seconds']['median'] * 1e6:.0f}"
        mine = r["ttft_seconds"]
        table.add_row(
            _label(r),
            _ms(mine["median"]),
            _ms(mine["p99"]),
            _ms(r["recompute_seconds"]["median"]),
            _ms(r["resident_seconds"]["median"]),
            transfer,
            ideal,
            f"{r['speed_up']:.2f}",
            waited,
            r["tokens"],
        )
    return table


def _misses(cells: Sequence[Row]) -> Table:
    table = new_table("Nothing cached: looked up and stored", "cell", "ms", "without a cache", "added")
    for r in (r for r in cells if r["where"] == NOWHERE):
        times = (_ms(r[key]["median"]) for key in ("ttft_seconds", "recompute_seconds"))
        table.add_row(_label(r), *times, f"{r['added']:+.1%}")
    return table


def _python(rows: Sequence[Row]) -> Table:
    table = new_table("Beside threads of Python", "cell", "beside", "TTFT ms", "c", "t", "of ideal")
    for r in rows:
        times = (r[key]["median"] for key in ("ttft_seconds", "resident_seconds"))
        transfer = "" if r["transfer_seconds"] is None else _ms(r["transfer_seconds"])
        ideal = "" if r["ideal_ratio"] is None else f"{r['ideal_ratio']:.2f}"
        table.add_row(_label(r), r["beside"], *map(_ms, times), transfer, ideal)
    return table


def _verdicts(rows: Sequence[Row]) -> Table:
    table = new_table("Against the targets", "row", "what", "value", "")
    for r in rows:
        value = f"{r['value'] * 1e6:.0f} us" if r["name"] == "wait" else f"{r['value']:.3f}"
        table.add_row(r["name"], r["what"], value, verdict(r, r["relation"]) if "target" in r else "")
    return table


def _causes(title: str, rows: Sequence[Row]) -> Table:
    """Cells without a figure, a line for each place and cause; the report lists every cell."""
    table = new_table(title, "cells", "cause")
    by_cause: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        by_cause.setdefault((r["where"].replace("_", " "), r["cause"]), []).append(_label(r))
    for (where, cause), labels in by_cause.items():
        table.add_row(labels[0] if len(labels) == 1 else f"{len(labels)}: {where}", cause)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
