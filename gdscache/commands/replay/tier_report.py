"""Runs of a trace through all tiers, as plain data. Behind `gdscache replay` with tiers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdscache.commands.replay.hierarchy import Hierarchy
from gdscache.commands.replay.simulate import Counts, Progress, infinite, optimum, silent
from gdscache.commands.replay.tier_setup import Setup
from gdscache.commands.replay.traffic import TIERS, Outcome, Traffic
from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.errors import InvalidValueError
from gdscache.moves.clock import Clock, MachineModel

SCHEMA = "gdscache.replay.tiers/1"
_STEP = 1000  # of the progress of one run
_DAY = 86_400.0


def run(
    workload: Workload,
    times: Sequence[float],
    setups: Sequence[Setup],
    machine: MachineModel,
    *,
    serial: bool = False,
    own_pool: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Replay a workload of full pages with each setup, and find what the hits are compared with.

    `times`: of the requests, in seconds, ascending. Raises `InvalidValueError` for a workload without a page.
    """
    check(workload)
    sizes = {slots(setup.config, own_pool=own_pool) for setup in setups}
    total = _STEP * (1 + len(sizes) + len(setups))
    progress(0, total, "infinite")
    forever = _bound(infinite(workload), workload)
    bounds: dict[int, Counts] = {}
    for size in sorted(sizes):
        progress(_STEP * (1 + len(bounds)), total, f"optimum, {size:,} pages")
        bounds[size] = optimum(workload, size)
    runs = []
    for number, setup in enumerate(setups):
        done = _STEP * (1 + len(sizes) + number)
        label = ", ".join(f"{k} {v}" for k, v in setup.varied.items()) or "all tiers"

        def step(at: int, of: int, _: str, done: int = done, label: str = label) -> None:
            progress(done + _STEP * at // max(1, of), total, label)

        found = simulate(workload, times, setup, machine, serial=serial, own_pool=own_pool, progress=step)
        del found["found"]
        best = bounds[found["capacity_pages"]]
        runs.append({**found, "of_optimum": found["hit_pages"] / best.hits if best.hits else None})
    progress(total, total, "done")
    return {
        "schema": SCHEMA,
        "mode": "simulate",
        "workload": describe_workload(workload, times),
        "machine": machine.describe(),
        "serial": serial,
        "own_pool": own_pool,
        "infinite": forever,
        "optimum": [{"capacity_pages": size, **_bound(counts, workload)} for size, counts in bounds.items()],
        "runs": runs,
    }


def check(workload: Workload) -> None:
    """Raises `InvalidValueError` for a workload that tiers cannot be compared on."""
    if workload.partial:
        raise InvalidValueError("an engine stores full pages only", "expand the trace with partial=False")
    if not workload.references:
        raise InvalidValueError(
            f"no prompt of the trace has a full page of {workload.page_tokens} tokens", "use smaller pages"
        )


def slots(config: Config, *, own_pool: bool) -> int:
    """Pages that all tiers hold together, each page counted in one of them."""
    layout = config.model.layout()
    lower = [tier.capacity // layout.extent_bytes for tier in (config.cpu, config.ssd) if tier is not None]
    found = sum(lower) + (config.gpu.capacity // layout.page_bytes if own_pool else 0)
    if not found:
        raise InvalidValueError("there is no tier", "give --cpu, --ssd or --gpu, or a config with such a section")
    return found


def simulate(
    workload: Workload,
    times: Sequence[float],
    setup: Setup,
    machine: MachineModel,
    *,
    serial: bool = False,
    own_pool: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """One run. `problems`: what does not add up afterwards, empty, or there is a defect. `found`: by request."""
    begun = time.process_time()
    hierarchy = Hierarchy(setup.config, machine, Clock(), own_pool=own_pool)
    outcome = Traffic(workload, hierarchy, machine, times, serial=serial).run(progress)
    took = time.process_time() - begun
    span = max(outcome.seconds, times[-1] - times[0])
    counts = hierarchy.manager.counts
    hits = {name: outcome.hits(name) for name in hierarchy.manager.tiers}
    hit = sum(hits.values())
    looked = hit + sum(outcome.misses.values())
    return {
        "varied": dict(setup.varied),
        "settings": describe_config(setup.config),
        "capacity_pages": slots(setup.config, own_pool=own_pool),
        "lookup_pages": looked,
        "hit_pages": hit,
        "hit_rate": hit / looked if looked else 0.0,
        "hit_tokens": hit * workload.page_tokens,
        "token_hit_rate": hit * workload.page_tokens / workload.tokens,
        "miss_pages": {cause: outcome.misses[cause] for cause in ("cold", "absent", "behind")},
        "tiers": {name: _tier(hierarchy, workload, name, hits[name]) for name in hierarchy.manager.tiers},
        "stores": {
            "offered_pages": hierarchy.ledger.offered,
            "present_pages": counts["stores", "present"],
            "dropped_pages": dict(hierarchy.ledger.dropped),
            "most_queued_pages": hierarchy.moved.most_queued,
            "most_queued_bytes": hierarchy.moved.most_queued * hierarchy.extent_bytes,
        },
        "ssd": _ssd(hierarchy, outcome, span),
        "first_token_seconds": spread(outcome.first_token),
        "first_token_seconds_no_cache": spread(outcome.uncached),
        "requests_refused": outcome.refused,
        "requests_waited": outcome.waited,
        "virtual_seconds": outcome.seconds,
        "found": outcome.found,
        "samples": [_sample(sample._asdict(), hierarchy.extent_bytes) for sample in outcome.samples],
        "problems": hierarchy.problems(),
        "seconds": took,
    }


def _tier(hierarchy: Hierarchy, workload: Workload, name: str, hits: int) -> dict[str, Any]:
    tier, moved = hierarchy.manager.tiers[name], hierarchy.moved
    nbytes = hierarchy.page_bytes if name == "gpu" else hierarchy.extent_bytes
    read, written = moved.read[name], moved.written[name]
    return {
        "capacity_pages": tier.index.slots,
        "capacity_bytes": tier.capacity,
        "hit_pages": hits,
        "hit_tokens": hits * workload.page_tokens,
        "read_bytes": read * nbytes,
        "written_bytes": (written + (moved.promoted if name == "cpu" else 0)) * nbytes,
        "stored_pages": written,
        "promoted_pages": moved.promoted if name == "cpu" else 0,
        "evictions": tier.index.evictions,
    }


def _ssd(hierarchy: Hierarchy, outcome: Outcome, span: float) -> dict[str, Any] | None:
    ssd, moved, counts = hierarchy.ssd, hierarchy.moved, hierarchy.manager.counts
    if ssd is None:
        return None
    written = moved.written["ssd"] * hierarchy.extent_bytes
    useful = outcome.loaded_from_ssd * hierarchy.extent_bytes
    return {
        "written_bytes": written,
        "read_bytes": moved.read["ssd"] * hierarchy.extent_bytes,
        "used_bytes": useful,
        "write_amplification": written / useful if useful else None,
        "drive_writes_per_day": written / ssd.capacity * _DAY / span if span > 0 else None,
        "offered_pages": moved.to_ssd + sum(n for (group, _), n in counts.items() if group == "refused"),
        "refused_pages": {name: n for (group, name), n in counts.items() if group == "refused"},
        "dropped_pages": dict(moved.not_written),
        "most_queued_pages": moved.most_to_ssd,
        "demoted_pages": moved.demoted,
        "promotions_declined": counts["promotion", "declined"],
    }


def _sample(sample: dict[str, Any], nbytes: int) -> dict[str, Any]:
    for name in ("ssd_read", "ssd_written", "queued"):
        sample[f"{name}_bytes"] = sample.pop(name) * nbytes
    return sample


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {"mean": float(np.mean(seconds)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _bound(counts: Counts, workload: Workload) -> dict[str, Any]:
    return {
        "hit_pages": counts.hits,
        "hit_rate": counts.hits / workload.references,
        "hit_tokens": counts.hit_tokens,
        "token_hit_rate": counts.hit_tokens / workload.tokens,
        "miss_pages": {"cold": counts.cold, "absent": counts.absent},
    }


def describe_workload(workload: Workload, times: Sequence[float]) -> dict[str, Any]:
    return {
        "requests": len(workload.prompts),
        "page_tokens": workload.page_tokens,
        "pages": workload.references,
        "unique_pages": len(workload.names),
        "tokens": workload.tokens,
        "seconds": times[-1] - times[0] if times else 0.0,
    }


def describe_config(config: Config) -> dict[str, Any]:
    """What of a configuration decides what is simulated."""
    layout = config.model.layout()
    found: dict[str, Any] = {
        "extent_bytes": layout.extent_bytes,
        "page_tokens": layout.page_tokens,
        "store": config.store.model_dump(include={"queue", "write_policy", "write_hits"}),
        "host_buffer": config.host_buffer,
        "gpu": config.gpu.model_dump(include={"capacity", "eviction"}),
        "cpu": None,
        "ssd": None,
    }
    if config.cpu is not None:
        found["cpu"] = config.cpu.model_dump(include={"capacity", "eviction"})
    if config.ssd is not None:
        wanted = {"capacity", "eviction", "reserve", "admission", "admission_offers", "endurance", "promotion"}
        found["ssd"] = config.ssd.model_dump(include=wanted)
    return found


def totals(run: Mapping[str, Any]) -> list[str]:
    """What does not add up in a run's figures; nothing, or there is a defect. For tests and for the command."""
    found = list(run["problems"])
    if run["lookup_pages"] != run["hit_pages"] + sum(run["miss_pages"].values()):
        found.append("lookups are not hits and misses")
    if run["hit_pages"] != sum(run["tiers"][name]["hit_pages"] for name in TIERS if name in run["tiers"]):
        found.append("hits are not those of the tiers")
    ssd = run["ssd"]
    if ssd is not None:
        given = run["tiers"]["ssd"]["stored_pages"] + sum(ssd["refused_pages"].values())
        given += sum(n for cause, n in ssd["dropped_pages"].items() if cause != "deadline")
        if ssd["offered_pages"] != given:
            found.append(
                f"{ssd['offered_pages']} pages were offered to the SSD, {given} are written, refused or dropped"
            )
    return found
