"""A run of a trace through the tiers of a configuration, as plain data. Behind `gdscache replay` and `plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gdscache.commands.console import Progress, silent
from gdscache.commands.replay.clock import Clock, MachineModel
from gdscache.commands.replay.hierarchy import Hierarchy, open_pools
from gdscache.commands.replay.traffic import Outcome, Traffic
from gdscache.commands.replay.workload import Workload
from gdscache.config import Config
from gdscache.config.model import ModelConfig
from gdscache.errors import InvalidValueError
from gdscache.groups.pools import pools_of

_DAY = 86_400.0


def replay(
    workload: Workload,
    times: Sequence[float],
    config: Config,
    machine: MachineModel,
    *,
    serial: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Replay a workload. `times`: of the requests, in seconds, ascending. Raises `InvalidValueError` for a
    configuration without a tier."""
    if config.cpu is None and config.ssd is None:
        raise InvalidValueError("there is no tier", "give --cpu or --ssd, or a config with such a section")
    pools = open_pools(config, machine, Clock())
    outcome = Traffic(workload, pools, config, machine, times, serial=serial).run(progress)
    return {
        **describe(pools, outcome, workload, times),
        "first_token_seconds_no_cache": spread([prompt.tokens / machine.prefill for prompt in workload.prompts]),
    }


def describe(
    pools: Sequence[Hierarchy], outcome: Outcome, workload: Workload, times: Sequence[float]
) -> dict[str, Any]:
    """A run that has ended, as plain data."""
    hits = {name: outcome.hits(name) for name in pools[0].manager.tiers}
    hit = sum(hits.values())
    looked = hit + sum(outcome.misses.values())
    return {
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
        },
        "ssd": _ssd(pools, max(outcome.seconds, times[-1] - times[0])),
        "first_token_seconds": spread(outcome.first_token),
        "virtual_seconds": outcome.seconds,
    }


def _tier(pools: Sequence[Hierarchy], workload: Workload, name: str, hits: int) -> dict[str, Any]:
    """A tier over all pools. `hit_tokens`: of one group."""
    rows = []
    for pool in pools:
        tier, moved = pool.manager.tiers[name], pool.executor
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
    tokens = hits * workload.page_tokens
    return {"hit_pages": hits, "hit_tokens": tokens, "token_hit_rate": tokens / workload.tokens, **_summed(rows)}


def _ssd(pools: Sequence[Hierarchy], seconds: float) -> dict[str, Any] | None:
    """The writes of a run of so many seconds. Rates are None for a trace that takes no time."""
    capacity = sum(pool.ssd.capacity for pool in pools if pool.ssd is not None)
    if not capacity:
        return None
    written = sum(pool.executor.written["ssd"] * pool.extent_bytes for pool in pools)
    a_day = written * _DAY / seconds if seconds > 0 else None
    return {
        "written_bytes": written,
        "written_bytes_per_day": a_day,
        "drive_writes_per_day": None if a_day is None else a_day / capacity,
        "refused_pages": _summed(
            {name: n for (group, name), n in pool.manager.counts.items() if group == "refused"} for pool in pools
        ),
    }


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for some in counts:
        found.update(some)
    return dict(found)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {"mean": float(np.mean(seconds)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def describe_infinite(workload: Workload, model: ModelConfig) -> dict[str, Any]:
    """Tiers of infinite size: hits, and the bytes that are stored."""
    hits = workload.repeated
    return {
        "hit_rate": hits / workload.references,
        "token_hit_rate": hits * workload.page_tokens / workload.tokens,
        "bytes": len(workload.names) * page_bytes(model),
    }


def page_bytes(model: ModelConfig) -> int:
    """Bytes of a page. If only some layers keep all tokens and these have their own planes, a page of these layers."""
    groups, layouts = model.layer_groups(), model.pool_layouts
    for pool, layout in zip(pools_of(groups), layouts, strict=False):
        if any(groups[g].keeps == "all" for g in pool.groups):
            return layout.extent_bytes
    return layouts[0].extent_bytes
