"""Runs of a trace beside what they are compared with, as plain data. Behind `gdscache replay` and `plan`."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdscache.commands.console import Progress, silent
from gdscache.commands.replay.bounds import Counts, infinite, optimum, plain_lru
from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.garbage import uncollected
from gdscache.commands.replay.hierarchy import Hierarchy
from gdscache.commands.replay.setup import Setup
from gdscache.commands.replay.traffic import TIERS, Outcome, Traffic
from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.errors import InvalidValueError

SCHEMA = "gdscache.replay/4"
_STEP = 1000  # of the progress of one run
_DAY = 86_400.0


@uncollected()
def replay(
    workload: Workload,
    times: Sequence[float],
    setups: Sequence[Setup],
    machine: MachineModel,
    *,
    serial: bool = False,
    own_pool: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A run of each setup, as `tiers` has it, beside infinite tiers, the optimum and plain LRU of one tier as large as
    all of the run's.

    `progress(done, total, text)` is called now and then. Of the runs with an SSD, `frontier` says that no other one of
    as many pages, with the same order of eviction, writes less at its hits or more. Raises `InvalidValueError` for a
    workload without a page, and for a setup without a tier.
    """
    check(workload)
    pages = [slots(setup.config, own_pool=own_pool) for setup in setups]
    total = _STEP * (len(set(pages)) + len(setups))
    bounds: dict[int, tuple[Counts, Counts]] = {}
    for size in sorted(set(pages)):
        progress(_STEP * len(bounds), total, f"optimum, {size:,} pages")
        bounds[size] = optimum(workload, size), plain_lru(workload, size)

    def row(number: int, setup: Setup, size: int) -> dict[str, Any]:
        label = ", ".join(f"{name} {value}" for name, value in setup.varied.items()) or "all tiers"

        def step(done: int, of: int, _: str) -> None:
            progress(_STEP * (len(bounds) + number) + _STEP * done // max(1, of), total, label)

        found = tiers(workload, times, setup, machine, serial=serial, own_pool=own_pool, progress=step)
        del found["found"]
        gc.collect()  # its tiers refer to themselves
        best, base = (counts.hits for counts in bounds[size])
        hits = found["hit_pages"]
        compared = {
            "of_optimum": hits / best if best else None,
            "of_plain_lru": hits / base if base else None,
            "gap_closed": (hits - base) / (best - base) if best != base else None,
        }
        return {**found, **_size(workload, size), **compared}

    gc.freeze()  # the names and prompts: a collection need not look at what stays
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
        "own_pool": own_pool,
        "infinite": _counted(infinite(workload), workload),
        "optimum": [{**_size(workload, n), **_counted(best, workload)} for n, (best, _) in bounds.items()],
        "plain_lru": [{**_size(workload, n), **_counted(base, workload)} for n, (_, base) in bounds.items()],
        "runs": rows,
    }


def check(workload: Workload) -> None:
    """Raises `InvalidValueError` for a workload without a page."""
    if not workload.references:
        raise InvalidValueError(
            f"no prompt of the trace has a full page of {workload.page_tokens} tokens", "use smaller pages"
        )


def mark_frontier(rows: Sequence[dict[str, Any]]) -> None:
    """Set `frontier` of each row, None without an SSD."""

    def group(row: Mapping[str, Any]) -> tuple[Any, ...]:
        settings = row["settings"]
        return row["capacity_pages"], settings["eviction"], *(settings[name] is None for name in TIERS)

    def cost(row: Mapping[str, Any]) -> tuple[int, int]:
        return row["ssd"]["written_bytes"], -row["hit_pages"]

    for row in rows:
        as_good = [o for o in rows if o["ssd"] and o["hit_pages"] >= row["hit_pages"] and group(o) == group(row)]
        row["frontier"] = min(map(cost, as_good)) == cost(row) if row["ssd"] else None


def slots(config: Config, *, own_pool: bool) -> int:
    """Pages that all tiers hold together, each page counted in one of them."""
    layout = config.model.layout()
    lower = [tier.capacity // layout.extent_bytes for tier in (config.cpu, config.ssd) if tier is not None]
    found = sum(lower) + (config.gpu.capacity // layout.page_bytes if own_pool else 0)
    if not found:
        raise InvalidValueError("there is no tier", "give --cpu, --ssd or --gpu, or a config with such a section")
    return found


def tiers(
    workload: Workload,
    times: Sequence[float],
    setup: Setup,
    machine: MachineModel,
    *,
    serial: bool = False,
    own_pool: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """One run through all tiers. `times`: of the requests, in seconds, ascending; `found`: by request.

    `problems`: what does not add up afterwards: nothing, or there is a defect.
    """
    begun = time.process_time()
    hierarchy = Hierarchy(setup.config, machine, Clock(), own_pool=own_pool)
    outcome = Traffic(workload, hierarchy, machine, times, serial=serial).run(progress)
    took = time.process_time() - begun
    span = max(outcome.seconds, times[-1] - times[0])
    hits = {name: outcome.hits(name) for name in hierarchy.manager.tiers}
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
        "tiers": {name: _tier(hierarchy, workload, name, hits[name]) for name in hierarchy.manager.tiers},
        "stores": {
            "offered_pages": hierarchy.ledger.offered,
            "dropped_pages": dict(hierarchy.ledger.dropped),
            "most_queued_pages": hierarchy.moved.most_queued,
        },
        "ssd": _ssd(hierarchy, outcome, span),
        "first_token_seconds": spread(outcome.first_token),
        "first_token_seconds_no_cache": spread(outcome.uncached),
        "requests_refused": outcome.refused,
        "virtual_seconds": outcome.seconds,
        "found": outcome.found,
        "seconds": took,
    }
    return {**found, "problems": [*hierarchy.problems(), *totals(found)]}


def _tier(hierarchy: Hierarchy, workload: Workload, name: str, hits: int) -> dict[str, Any]:
    tier, moved = hierarchy.manager.tiers[name], hierarchy.moved
    nbytes = hierarchy.page_bytes if name == "gpu" else hierarchy.extent_bytes
    promoted = moved.promoted if name == "cpu" else 0
    return {
        "capacity_pages": tier.index.slots,
        "capacity_bytes": tier.capacity,
        "hit_pages": hits,
        "hit_tokens": hits * workload.page_tokens,
        "read_bytes": moved.read[name] * nbytes,
        "written_bytes": (moved.written[name] + promoted) * nbytes,
        "stored_pages": moved.written[name],
        "promoted_pages": promoted,
        "evictions": tier.index.evictions,
    }


def _ssd(hierarchy: Hierarchy, outcome: Outcome, span: float) -> dict[str, Any] | None:
    ssd, moved, counts = hierarchy.ssd, hierarchy.moved, hierarchy.manager.counts
    if ssd is None:
        return None
    written = moved.written["ssd"] * hierarchy.extent_bytes
    useful = outcome.loaded_from_ssd * hierarchy.extent_bytes
    refused = {name: n for (group, name), n in counts.items() if group == "refused"}
    return {
        "written_bytes": written,
        "read_bytes": moved.read["ssd"] * hierarchy.extent_bytes,
        "write_amplification": written / useful if useful else None,
        "drive_writes_per_day": written / ssd.capacity * _DAY / span if span > 0 else None,
        "offered_pages": moved.to_ssd + sum(refused.values()),
        "refused_pages": refused,
        "dropped_pages": dict(moved.not_written),
        "most_queued_pages": moved.most_to_ssd,
        "demoted_pages": moved.demoted,
    }


def totals(run: Mapping[str, Any]) -> list[str]:
    """What does not add up in a run's figures."""
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
    """What of a configuration decides what is simulated."""
    layout = config.model.layout()
    cpu, ssd = config.cpu, config.ssd
    return {
        "extent_bytes": layout.extent_bytes,
        "page_tokens": layout.page_tokens,
        "store": config.store.model_dump(),
        "host_buffer": config.host_buffer,
        "eviction": config.eviction,
        "gpu": config.gpu.model_dump(include={"capacity"}),
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
