"""Eviction orders on traffic that nobody has seen before. Behind `gdscache replay --suite`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gdscache.commands.console import Progress, Table, silent, verdict
from gdscache.commands.replay.families import FAMILIES, drawn
from gdscache.commands.replay.simulate import optimum, plain_lru, simulate
from gdscache.commands.replay.workload import Workload, expand
from gdscache.config import Config
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES

SUITE_SCHEMA = "gdscache.replay.suite/1"
DEFAULT: str = Config.model_fields["eviction"].default
PERCENT = (1, 2, 5, 10, 25, 50)  # of the unique pages
LEAST_PAGES = 200
SLACK = 0.01  # of the page references: added to hits before they are compared, so that few hits of few do not count
DECIDED = 1.01  # where the optimum is not above this, LRU is as good as it: only the worst counts
WORST, FIFTH = 0.98, 0.995
OF_HINDSIGHT = 0.3


@dataclass(frozen=True)
class Settings:
    """Which traces are drawn, and which orders are replayed. `references`: pages of a trace, each use counted."""

    seed: int = 0
    seeds: int = 2  # traces of each family, from `seed` on
    references: int = 40_000
    families: tuple[str, ...] = tuple(FAMILIES)
    policies: tuple[str, ...] = (DEFAULT,)
    percent: tuple[int, ...] = PERCENT


def run(settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """All traces with all orders at all capacities, and what the default is worth.

    A row's `ratio` is (hits + `SLACK` of the references) / (plain LRU's hits + the same), its `optimum` that of the
    optimum. Raises `InvalidValueError` for a family or an order that does not exist, before anything runs.
    """
    for known, names, option in ((FAMILIES, settings.families, "--family"), (POLICIES, settings.policies, "--policy")):
        for name in names:
            if name not in known:
                raise InvalidValueError(f"{option} {name!r} does not exist", f"it is one of {', '.join(known)}")
    traces = [(family, settings.seed + i) for i in range(settings.seeds) for family in settings.families]
    rows: list[dict[str, Any]] = []
    for done, (family, seed) in enumerate(traces):
        progress(done, len(traces), f"{family} {seed}")
        workload = expand(drawn(family, seed, settings.references))
        rows += _trace(family, seed, workload, settings)
    progress(len(traces), len(traces), "done")

    def of(policy: str, *families: str) -> dict[str, Any] | None:
        return summary([row for row in rows if row["policy"] == policy and row["family"] in families])

    found = {name: of(name, *settings.families) for name in settings.policies}
    hindsight = _hindsight(rows, settings.policies)
    return {
        "schema": SUITE_SCHEMA,
        "default": DEFAULT,
        "settings": {name: value for name, value in asdict(settings).items() if name != "policies"},
        "policies": found,
        "families": {name: {family: of(name, family) for family in settings.families} for name in settings.policies},
        "hindsight": hindsight,
        "targets": _targets(found.get(DEFAULT), hindsight),
        "rows": rows,
    }


def capacities(unique: int, percent: Iterable[int] = PERCENT) -> list[int]:
    """Pages of the tiers for a trace of so many unique pages, each once; fewer than there are."""
    sizes = {max(LEAST_PAGES, unique * part // 100) for part in percent}
    return sorted(size for size in sizes if size < unique)


def _trace(family: str, seed: int, workload: Workload, settings: Settings) -> list[dict[str, Any]]:
    references, unique = workload.references, len(workload.names)
    slack = SLACK * references
    rows = []
    for pages in capacities(unique, settings.percent):
        base, best = plain_lru(workload, pages), optimum(workload, pages)
        for name in settings.policies:
            start = time.process_time()
            counts = simulate(workload, pages, POLICIES[name]())
            seconds = time.process_time() - start
            rows.append(
                {
                    "family": family,
                    "seed": seed,
                    "policy": name,
                    "references": references,
                    "unique_pages": unique,
                    "capacity_pages": pages,
                    "hit_pages": counts.hits,
                    "plain_lru_hit_pages": base.hits,
                    "optimum_hit_pages": best.hits,
                    "written_pages": counts.written,
                    "plain_lru_written_pages": base.written,
                    "ratio": (counts.hits + slack) / (base.hits + slack),
                    "optimum": (best.hits + slack) / (base.hits + slack),
                    "seconds": seconds,
                }
            )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Worst, 5th percentile and geometric mean of the ratios of one order; None where there are none.

    The worst is that of all rows, the others are of those in which there is something to gain (`DECIDED`).
    """
    if not rows:
        return None
    worst = min(rows, key=lambda row: row["ratio"])
    open_ = sorted(row["ratio"] for row in rows if row["optimum"] > DECIDED)
    return {
        "rows": len(rows),
        "rows_with_something_to_gain": len(open_),
        "worst": worst["ratio"],
        "worst_row": {name: worst[name] for name in ("family", "seed", "capacity_pages", "unique_pages")},
        "fifth_percentile": open_[int(0.05 * (len(open_) - 1))] if open_ else None,
        "geometric_mean": _mean(open_),
        "optimum_geometric_mean": _mean([row["optimum"] for row in rows if row["optimum"] > DECIDED]),
        "written_pages": sum(row["written_pages"] for row in rows),
        "plain_lru_written_pages": sum(row["plain_lru_written_pages"] for row in rows),
    }


def _hindsight(rows: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> dict[str, Any] | None:
    """What the best of all orders gives, chosen anew for each trace and capacity; None with fewer than two."""
    if len(policies) < 2:
        return None
    won: dict[str, int] = dict.fromkeys(policies, 0)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["optimum"] > DECIDED:
            groups.setdefault((row["family"], row["seed"], row["capacity_pages"]), []).append(row)
    best = [max(group, key=lambda row: row["ratio"]) for group in groups.values()]
    for row in best:
        won[row["policy"]] += 1
    return {"geometric_mean": _mean([row["ratio"] for row in best]), "best_in_rows": won}


def _targets(found: Mapping[str, Any] | None, hindsight: Mapping[str, Any] | None) -> dict[str, Any]:
    """The default against what is asked of it, as far as that was measured."""
    if found is None:
        return {}
    measured = {"worst": (found["worst"], WORST), "fifth_percentile": (found["fifth_percentile"], FIFTH)}
    if found["geometric_mean"] and hindsight is not None and hindsight["geometric_mean"] > 1:
        share = (found["geometric_mean"] - 1) / (hindsight["geometric_mean"] - 1)
        measured["of_hindsight"] = share, OF_HINDSIGHT
    return {
        name: {"value": value, "target": least, "met": value >= least}
        for name, (value, least) in measured.items()
        if value is not None
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def tables(report: Mapping[str, Any]) -> list[Table]:
    """A table of the orders, one of each order by family, and the default's targets."""
    names = ("traces x sizes", "worst", "where", "5th percentile", "geometric mean", "the optimum", "written")
    title = "Hits against plain LRU's, 1 % of the references added to both"
    parts = {(title, "policy"): report["policies"]}
    parts |= {(f"{name}, by family", "family"): families for name, families in report["families"].items()}
    found = []
    for (heading, first), rows in parts.items():
        table = Table(heading, first, *names)
        for name, row in rows.items():
            if row is not None:
                table.add_row(f"{name} (default)" if name == report["default"] else name, *_cells(row))
        found.append(table)
    hindsight = report["hindsight"]
    if hindsight is not None:
        best = _ratio(hindsight["geometric_mean"])
        found[0].add_row("the best of them, in hindsight", "", "", "", "", best)
    judged = Table(f"The default, {report['default']}", "figure", "", "target")
    for name, row in report["targets"].items():
        judged.add_row(name.replace("_", " "), f"{row['value']:.4f}", verdict(row, "at least"))
    return [*found, judged]


def _cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    where = found["worst_row"]
    return (
        f"{found['rows']:,} ({found['rows_with_something_to_gain']:,})",
        f"{found['worst']:.4f}",
        f"{where['family']} {where['seed']}, {where['capacity_pages']:,} of {where['unique_pages']:,}",
        _ratio(found["fifth_percentile"]),
        _ratio(found["geometric_mean"]),
        _ratio(found["optimum_geometric_mean"]),
        f"{found['written_pages'] / found['plain_lru_written_pages']:.3f}",
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
