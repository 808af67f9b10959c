"""Runs of a trace and their references, as plain data. Behind `gdscache replay` and `plan`."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gdscache.commands.console import Progress, silent
from gdscache.commands.replay.bounds import Counts, infinite, optimum, plain_lru
from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.garbage import uncollected
from gdscache.commands.replay.hierarchy import Hierarchy, open_pools
from gdscache.commands.replay.offloading import offloading
from gdscache.commands.replay.setup import Setup, unit_bytes
from gdscache.commands.replay.traffic import TIERS, Outcome, Traffic
from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.errors import InvalidValueError

SCHEMA = "gdscache.replay/5"
_STEP = 1000  # progress steps of a run
_DAY = 86_400.0


@uncollected()
def replay(
    workload: Workload,
    times: Sequence[float],
    setups: Sequence[Setup],
    machine: MachineModel,
    *,
    serial: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A run of each setup, as by `tiers`, and its references: infinite tiers, and the optimum and plain LRU of one tier
    with the size of all the run's tiers.

    `progress(done, total, text)` is called at intervals. `frontier` of a run with an SSD: no other run with the same
    number of pages and eviction order has as many hits with fewer writes. Raises `InvalidValueError` for a workload
    without pages, and for a setup without a tier.
    """
    check(workload)
    pages = [slots(setup.config) for setup in setups]
    total = _STEP * (len(set(pages)) + len(setups))
    bounds: dict[int, tuple[Counts, Counts]] = {}
    for size in sorted(set(pages)):
        progress(_STEP * len(bounds), total, f"optimum, {size:,} pages")
        bounds[size] = optimum(workload, size), plain_lru(workload, size)

    def row(number: int, setup: Setup, size: int) -> dict[str, Any]:
        label = ", ".join(f"{name} {value}" for name, value in setup.varied.items()) or "all tiers"

        def step(done: int, of: int, _: str) -> None:
            progress(_STEP * (len(bounds) + number) + _STEP * done // max(1, of), total, label)

        found = tiers(workload, times, setup, machine, serial=serial, progress=step)
        del found["found"]
        gc.collect()  # the tiers have reference cycles
        best, base = (counts.hits for counts in bounds[size])
        hits = found["hit_pages"]
        compared = {
            "of_optimum": hits / best if best else None,
            "of_plain_lru": hits / base if base else None,
            "gap_closed": (hits - base) / (best - base) if best != base else None,
            "offloading": offloading(workload, setup.config),
        }
        return {**found, **_size(workload, size), **compared}

    gc.freeze()  # names and prompts: collections skip lasting objects
    try:
        rows = [row(number, setup, size) for number, (setup, size) in enumerate(zip(setups, pages, strict=True))]
    finally:
        gc.unfreeze()
    progress(total, total, "done")
    mark_frontier(rows)
    return {
        "schema": SCHEMA,
        "workload": describe_workload(workload, times),
        "machine": machine.describe(),
        "serial": serial,
        "infinite": _counted(infinite(workload), workload),
        "optimum": [{**_size(workload, n), **_counted(best, workload)} for n, (best, _) in bounds.items()],
        "plain_lru": [{**_size(workload, n), **_counted(base, workload)} for n, (_, base) in bounds.items()],
        "runs": rows,
    }


def check(workload: Workload) -> None:
    """Raises `InvalidValueError` for a workload without pages."""
    if not workload.references:
        raise InvalidValueError(
            f"no prompt of the trace has a full page of {workload.page_tokens} tokens", "use smaller pages"
        )


def mark_frontier(rows: Sequence[dict[str, Any]]) -> None:
    """Set `frontier` of each row; None without an SSD."""

    def group(row: Mapping[str, Any]) -> tuple[Any, ...]:
        settings = row["settings"]
        return row["capacity_pages"], settings["eviction"], *(settings[name] is None for name in TIERS)

    def cost(row: Mapping[str, Any]) -> tuple[int, int]:
        return row["ssd"]["written_bytes"], -row["hit_pages"]

    for row in rows:
        as_good = [o for o in rows if o["ssd"] and o["hit_pages"] >= row["hit_pages"] and group(o) == group(row)]
        row["frontier"] = min(map(cost, as_good)) == cost(row) if row["ssd"] else None


def slots(config: Config) -> int:
    """The capacity of all tiers together, in pages."""
    found = sum(tier.capacity // unit_bytes(config.model) for tier in (config.cpu, config.ssd) if tier is not None)
    if not found:
        raise InvalidValueError("there is no tier", "give --cpu or --ssd, or a config with such a section")
    return found


def tiers(
    workload: Workload,
    times: Sequence[float],
    setup: Setup,
    machine: MachineModel,
    *,
    serial: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A run through all tiers. `times`: of the requests, in seconds, ascending; `found`: by request. `problems`:
    inconsistencies after the run; any is a defect."""
    begun = time.process_time()
    pools = open_pools(setup.config, machine, Clock())
    traffic = Traffic(workload, pools[0], machine, times, serial=serial, whole=setup.config, others=pools[1:])
    outcome = traffic.run(progress)
    took = time.process_time() - begun
    span = max(outcome.seconds, times[-1] - times[0])
    hits = {name: outcome.hits(name) for name in pools[0].manager.tiers}
    hit = sum(hits.values())
    looked = hit + sum(outcome.misses.values())
    found = {
        "varied": dict(setup.varied),
        "settings": describe_config(setup.config),
        "lookup_pages": looked,
        "hit_pages": hit,
        "hit_rate": hit / looked if looked else 0.0,
        "hit_tokens": outcome.hit_tokens,
        "token_hit_rate": outcome.hit_tokens / workload.tokens,
        "miss_pages": {cause: outcome.misses[cause] for cause in ("cold", "absent", "behind")},
        "tiers": {name: _tier(pools, workload, name, hits[name]) for name in hits},
        "stores": {
            "offered_pages": sum(pool.ledger.offered for pool in pools),
            "dropped_pages": _summed(pool.ledger.dropped for pool in pools),
            "most_queued_pages": sum(pool.moved.most_queued for pool in pools),
        },
        "ssd": _ssd(pools, outcome, span),
        "first_token_seconds": spread(outcome.first_token),
        "first_token_seconds_no_cache": spread(outcome.uncached),
        "virtual_seconds": outcome.seconds,
        "found": outcome.found,
        "seconds": took,
    }
    return {**found, "problems": [*itertools.chain.from_iterable(pool.problems() for pool in pools), *totals(found)]}


def _tier(pools: Sequence[Hierarchy], workload: Workload, name: str, hits: int) -> dict[str, Any]:
    """A tier over all pools. `hit_tokens`: of one group."""
    rows = []
    for pool in pools:
        tier, moved = pool.manager.tiers[name], pool.moved
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
    return {"hit_pages": hits, "hit_tokens": hits * workload.page_tokens, **_summed(rows)}


def _ssd(pools: Sequence[Hierarchy], outcome: Outcome, span: float) -> dict[str, Any] | None:
    ssds = [pool.ssd for pool in pools if pool.ssd is not None]
    if not ssds:
        return None
    written = sum(pool.moved.written["ssd"] * pool.extent_bytes for pool in pools)
    useful = outcome.loaded_from_ssd * pools[0].extent_bytes
    refused = _summed(
        {name: n for (group, name), n in pool.manager.counts.items() if group == "refused"} for pool in pools
    )
    capacity = sum(ssd.capacity for ssd in ssds)
    return {
        "written_bytes": written,
        "read_bytes": sum(pool.moved.read["ssd"] * pool.extent_bytes for pool in pools),
        "write_amplification": written / useful if useful else None,
        "drive_writes_per_day": written / capacity * _DAY / span if span > 0 else None,
        "offered_pages": sum(pool.moved.to_ssd for pool in pools) + sum(refused.values()),
        "refused_pages": refused,
        "dropped_pages": _summed(pool.moved.not_written for pool in pools),
        "most_queued_pages": sum(pool.moved.most_to_ssd for pool in pools),
        "demoted_pages": sum(pool.moved.demoted for pool in pools),
    }


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for some in counts:
        found.update(some)
    return dict(found)


def totals(run: Mapping[str, Any]) -> list[str]:
    """Inconsistencies in a run's figures."""
    found = []
    if run["lookup_pages"] != run["hit_pages"] + sum(run["miss_pages"].values()):
        found.append("lookups are not hits and misses")
    if run["hit_pages"] != sum(tier["hit_pages"] for tier in run["tiers"].values()):
        found.append("hits are not those of the tiers")
    ssd = run["ssd"]
    if ssd is not None:
        given = run["tiers"]["ssd"]["stored_pages"] + sum(ssd["refused_pages"].values())
        given += sum(n for cause, n in ssd["dropped_pages"].items() if cause != "deadline")
        if ssd["offered_pages"] != given:
            found.append(f"{ssd['offered_pages']} pages were offered to the SSD, {given} written, refused or dropped")
    return found


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {"mean": float(np.mean(seconds)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def describe_workload(workload: Workload, times: Sequence[float]) -> dict[str, Any]:
    return {
        "requests": len(workload.prompts),
        "page_tokens": workload.page_tokens,
        "pages": workload.references,
        "unique_pages": len(workload.names),
        "tokens": workload.tokens,
        "seconds": times[-1] - times[0],
    }


def describe_config(config: Config) -> dict[str, Any]:
    """The settings that the simulation depends on."""
    cpu, ssd = config.cpu, config.ssd
    return {
        "extent_bytes": unit_bytes(config.model),
        "page_tokens": config.model.page_tokens,
        "store": config.store.model_dump(),
        "host_buffer": config.host_buffer,
        "eviction": config.eviction,
        "cpu": cpu and cpu.model_dump(include={"capacity"}),
        "ssd": ssd and ssd.model_dump(include={"capacity", "endurance"}),
    }


def _size(workload: Workload, pages: int) -> dict[str, Any]:
    return {"capacity_pages": pages, "capacity_percent": 100 * pages / len(workload.names)}


def _counted(counts: Counts, workload: Workload) -> dict[str, Any]:
    return {
        "hit_rate": counts.hits / workload.references,
        "hit_pages": counts.hits,
        "token_hit_rate": counts.hits * workload.page_tokens / workload.tokens,
        "miss_pages": {"cold": counts.cold, "absent": counts.absent},
        "written_pages": counts.written,
        "evictions": counts.evictions,
    }
