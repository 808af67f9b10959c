"""Eviction orders on traffic that nobody has seen before. Behind `gdscache replay --suite`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdscache.commands.bench.measure import target
from gdscache.commands.replay.families import FAMILIES, drawn
from gdscache.commands.replay.simulate import Progress, optimum, plain_lru, silent, simulate
from gdscache.commands.replay.workload import Workload, expand
from gdscache.config import CpuConfig
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES

SUITE_SCHEMA = "gdscache.replay.suite/1"
DEFAULT: str = CpuConfig().eviction
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
    found = {name: summary([row for row in rows if row["policy"] == name]) for name in settings.policies}
    hindsight = _hindsight(rows, settings.policies)
    return {
        "schema": SUITE_SCHEMA,
        "default": DEFAULT,
        "settings": {
            "seed": settings.seed,
            "seeds": settings.seeds,
            "references": settings.references,
            "families": list(settings.families),
            "percent": list(settings.percent),
        },
        "policies": found,
        "families": {
            name: {
                family: summary([row for row in rows if row["policy"] == name and row["family"] == family])
                for family in settings.families
            }
            for name in settings.policies
        },
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
    best: dict[tuple[Any, ...], float] = {}
    won: dict[str, int] = dict.fromkeys(policies, 0)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["optimum"] > DECIDED:
            groups.setdefault((row["family"], row["seed"], row["capacity_pages"]), []).append(row)
    for cell, group in groups.items():
        first = max(group, key=lambda row: row["ratio"])
        best[cell] = first["ratio"]
        won[first["policy"]] += 1
    return {"geometric_mean": _mean(list(best.values())), "best_in_rows": won}


def _targets(found: Mapping[str, Any] | None, hindsight: Mapping[str, Any] | None) -> dict[str, Any]:
    """The default against what is asked of it, as far as that was measured."""
    if found is None:
        return {}
    targets = {"worst": {"value": found["worst"], **target(found["worst"], WORST, at_least=True)}}
    if found["fifth_percentile"] is not None:
        fifth = found["fifth_percentile"]
        targets["fifth_percentile"] = {"value": fifth, **target(fifth, FIFTH, at_least=True)}
        if hindsight is not None and hindsight["geometric_mean"] > 1:
            share = (found["geometric_mean"] - 1) / (hindsight["geometric_mean"] - 1)
            targets["of_hindsight"] = {"value": share, **target(share, OF_HINDSIGHT, at_least=True)}
    return targets


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
