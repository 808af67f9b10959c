"""Prometheus metrics of an engine: a collector that reads `engine.stats()` at each scrape and keeps nothing itself.

    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine))

Several engines of one process go into one collector, by name: `EngineCollector({"draft": a, "target": b})`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gdscache.engine import CacheEngine
from gdscache.errors import EngineClosedError

Stats = Mapping[str, Any]
Values = Mapping[str, float]  # by the value of the metric's label, or {"": value} where it has none


class _Family(NamedTuple):
    """One metric: its kind, name, help, label (or ""), and how to read it off `stats()`."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    label: str
    read: Callable[[Stats], Values]

    def empty(self, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
        return self.kind(self.name, self.help, labels=[*labels, *([self.label] if self.label else [])])


class EngineCollector(Collector):
    """Register it in a registry of your own. `engines`: one engine, or engines by the value of the label `engine`.

    A closed engine shows `gdscache_open` 0 and nothing else.
    """

    def __init__(self, engines: CacheEngine | Mapping[str, CacheEngine]) -> None:
        named = isinstance(engines, Mapping)
        self._labels = ["engine"] if named else []
        self._engines: dict[tuple[str, ...], CacheEngine] = (
            {(name,): engine for name, engine in engines.items()} if isinstance(engines, Mapping) else {(): engines}
        )

    def describe(self) -> Iterable[Metric]:
        """The metrics without values, so that a registry sees names that repeat without asking the engine."""
        return [self._open(), *(family.empty(self._labels) for family in FAMILIES)]

    def collect(self) -> Iterator[Metric]:
        """One snapshot of every engine."""
        is_open = self._open()
        found = [(family, family.empty(self._labels)) for family in FAMILIES]
        for name, engine in self._engines.items():
            try:
                stats = engine.stats()
            except EngineClosedError:
                is_open.add_metric(name, 0)
                continue
            is_open.add_metric(name, 1)
            for family, metric in found:
                for label, value in family.read(stats).items():
                    metric.add_metric([*name, *([label] if family.label else [])], value)
        yield is_open
        for _, metric in found:
            yield metric

    def _open(self) -> GaugeMetricFamily:
        return GaugeMetricFamily("gdscache_open", "1 while the engine is open.", labels=self._labels)


def _by_tier(group: str) -> Callable[[Stats], Values]:
    """A count of every tier that there is: one that has not counted yet is 0, so that rates begin at the start."""
    return lambda stats: {**dict.fromkeys(stats["tiers"], 0), **stats.get(group, {})}


def _by_cause(group: str) -> Callable[[Stats], Values]:
    return lambda stats: stats.get(group, {})


def _one(group: str, name: str) -> Callable[[Stats], Values]:
    return lambda stats: {"": stats.get(group, {}).get(name, 0)}


def _prefetch(name: str) -> Callable[[Stats], Values]:
    return lambda stats: stats["prefetch"][name]


def _of_tiers(name: str) -> Callable[[Stats], Values]:
    return lambda stats: {tier: about[name] for tier, about in stats["tiers"].items()}


def _lost(stats: Stats) -> Values:
    return dict(stats["tiers"].get("ssd", {}).get("lost_at_recovery", {}))


def _switched_off(stats: Stats) -> Values:
    quarantine = stats["tiers"].get("ssd", {}).get("quarantine")
    return {} if quarantine is None else {"": int(quarantine["switched_off"])}


def _known(values: Mapping[str, float | None]) -> Values:
    return {label: value for label, value in values.items() if value is not None}


def _of_loads(name: str) -> Callable[[Stats], Values]:
    return lambda stats: _known({tier: figures[name] for tier, figures in stats["gate"]["tiers"].items()})


def _of_prefills(name: str) -> Callable[[Stats], Values]:
    return lambda stats: _known({"": stats["gate"]["prefill"][name]})


def _quarantined(stats: Stats) -> Values:
    return dict(stats["tiers"].get("ssd", {}).get("quarantine", {}).get("held_slots", {}))


def _leased(stats: Stats) -> Values:
    pages: Counter[str] = Counter()
    for lease in stats["leases"]:
        pages[lease["owner"]] += lease["pages"]
    return pages


def _admitted(stats: Stats) -> Values:
    admission = stats["store_policy"]["admission"]
    return {} if admission is None else {"": admission["admitted"]}


def _endurance_left(stats: Stats) -> Values:
    admission = stats["store_policy"]["admission"]
    budget = None if admission is None else admission["endurance"]
    return {} if budget is None else {"": budget["left_bytes"]}


def _concerns(stats: Stats) -> Values:
    return {"": len(stats["concerns"])}


def _mover(stats: Stats) -> Values:
    return {stats["copies"]["name"]: 1}


_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily

FAMILIES = (
    _Family(_COUNTER, "gdscache_lookups", "Lookups.", "", _one("lookups", "requests")),
    _Family(_COUNTER, "gdscache_lookup_pages", "Pages looked up.", "", _one("lookups", "pages")),
    _Family(_COUNTER, "gdscache_hit_pages", "Pages found, by their fastest tier.", "tier", _by_tier("hits")),
    _Family(
        _COUNTER,
        "gdscache_miss_pages",
        "Pages not found or not loaded, by cause.",
        "cause",
        _by_cause("misses"),
    ),
    _Family(_COUNTER, "gdscache_loaded_pages", "Pages loaded, by source.", "tier", _by_tier("loaded")),
    _Family(_COUNTER, "gdscache_loaded_bytes", "Bytes of pages loaded, by source.", "tier", _by_tier("bytes_loaded")),
    _Family(_COUNTER, "gdscache_stores", "Stores.", "", _one("stores", "requests")),
    _Family(
        _COUNTER, "gdscache_present_pages", "Pages of stores that were there already.", "", _one("stores", "present")
    ),
    _Family(_COUNTER, "gdscache_stored_pages", "Pages committed, by tier.", "tier", _by_tier("stored")),
    _Family(
        _COUNTER,
        "gdscache_dropped_pages",
        "Pages of stores dropped, by cause.",
        "cause",
        _by_cause("dropped"),
    ),
    _Family(
        _COUNTER,
        "gdscache_refused_pages",
        "Pages that the SSD's admission refused, by cause.",
        "cause",
        _by_cause("refused"),
    ),
    _Family(_COUNTER, "gdscache_admitted_pages", "Pages that the SSD's admission let in.", "", _admitted),
    _Family(
        _GAUGE, "gdscache_endurance_left_bytes", "Bytes that ssd.endurance lets be written now.", "", _endurance_left
    ),
    _Family(_COUNTER, "gdscache_expired_pages", "Pages dropped as their ttl was over.", "tier", _by_tier("expired")),
    _Family(_COUNTER, "gdscache_evicted_pages", "Pages evicted, by tier.", "tier", _of_tiers("evictions")),
    _Family(
        _COUNTER, "gdscache_lost_pages", "Pages that the SSD tier gave up when it was opened, by cause.", "cause", _lost
    ),
    _Family(_GAUGE, "gdscache_tier_capacity_bytes", "Bytes reserved.", "tier", _of_tiers("capacity_bytes")),
    _Family(_GAUGE, "gdscache_tier_slots", "Pages that fit.", "tier", _of_tiers("slots")),
    _Family(_GAUGE, "gdscache_tier_pages", "Pages there, those on their way included.", "tier", _of_tiers("pages")),
    _Family(
        _GAUGE,
        "gdscache_tier_dirty_pages",
        "Pages that no lower tier has and that may not go before one does (write_back).",
        "tier",
        _of_tiers("dirty_pages"),
    ),
    _Family(_GAUGE, "gdscache_tier_free_slots", "Slots free without evicting.", "tier", _of_tiers("free_slots")),
    _Family(
        _GAUGE,
        "gdscache_ssd_switched_off",
        "1 while I/O that hangs keeps the SSD tier switched off.",
        "",
        _switched_off,
    ),
    _Family(
        _GAUGE,
        "gdscache_quarantined_slots",
        "Slots that I/O past its deadline may still touch, by the pool that they are of.",
        "pool",
        _quarantined,
    ),
    _Family(_GAUGE, "gdscache_concerns", "Warnings about the configuration when it was opened.", "", _concerns),
    _Family(_GAUGE, "gdscache_copies", "1 for what copies pages: cuda, copy_engine or native.", "mover", _mover),
    _Family(_GAUGE, "gdscache_leased_pages", "Pages pinned, by who pins them.", "owner", _leased),
    _Family(_COUNTER, "gdscache_prefetches", "Prefetches.", "", _one("prefetch", "requests")),
    _Family(_COUNTER, "gdscache_prefetches_ended", "Prefetches ended, by why.", "cause", _prefetch("ended")),
    _Family(_COUNTER, "gdscache_prefetch_pages", "Pages prefetches read, by verdict.", "cause", _prefetch("pages")),
    _Family(_COUNTER, "gdscache_prefetch_bytes", "Bytes prefetched, of good pages.", "", _one("prefetch", "bytes")),
    _Family(
        _COUNTER,
        "gdscache_prefetch_used_pages",
        "Prefetched pages that a load then used.",
        "",
        _one("prefetch", "used_pages"),
    ),
    _Family(
        _COUNTER,
        "gdscache_prefetch_lost_pages",
        "Prefetched pages that left the CPU tier before any load used them.",
        "",
        _one("prefetch", "lost_pages"),
    ),
    _Family(
        _GAUGE, "gdscache_prefetches_under_way", "Prefetches that have not ended.", "", _one("prefetch", "under_way")
    ),
    _Family(
        _GAUGE,
        "gdscache_prefetch_unused_pages",
        "Prefetched pages in the CPU tier that no load has used yet.",
        "",
        _one("prefetch", "unused_pages"),
    ),
    _Family(
        _GAUGE,
        "gdscache_prefetch_held_pages",
        "Pages that count against the quota of prefetches: unused ones, and those under way.",
        "",
        _one("prefetch", "held_pages"),
    ),
    _Family(_GAUGE, "gdscache_prefetch_quota_pages", "The most of them.", "", _one("prefetch", "quota_pages")),
    _Family(
        _GAUGE,
        "gdscache_load_bytes_per_second",
        "Bandwidth that estimates use, by source.",
        "tier",
        _by_cause("bytes_per_second"),
    ),
    _Family(
        _GAUGE,
        "gdscache_load_latency_seconds",
        "What a load costs before its bytes, as estimates have it, by source.",
        "tier",
        _of_loads("latency_seconds"),
    ),
    _Family(
        _GAUGE,
        "gdscache_prefill_tokens_per_second",
        "Prefill of a first token, as estimates have it.",
        "",
        _of_prefills("tokens_per_second"),
    ),
    _Family(
        _GAUGE,
        "gdscache_load_relative_error",
        "Median error of the last estimates of loads, by source.",
        "tier",
        _of_loads("relative_error"),
    ),
    _Family(
        _GAUGE,
        "gdscache_prefill_relative_error",
        "Median error of the last estimates of prefills.",
        "",
        _of_prefills("relative_error"),
    ),
    _Family(
        _COUNTER,
        "gdscache_gate_hits",
        "Hits below the GPU, by what load.gate makes of them.",
        "decision",
        lambda stats: stats["gate"]["hits"],
    ),
    _Family(
        _COUNTER,
        "gdscache_gate_tokens",
        "Tokens of them, by what load.gate makes of them.",
        "decision",
        lambda stats: stats["gate"]["tokens"],
    ),
    _Family(_GAUGE, "gdscache_store_queue_bytes", "Bytes accepted and not done.", "", _one("store_queue", "bytes")),
    _Family(
        _GAUGE,
        "gdscache_store_queue_to_ssd_bytes",
        "Bytes of them on their way to the SSD.",
        "",
        _one("store_queue", "to_ssd_bytes"),
    ),
    _Family(
        _GAUGE,
        "gdscache_store_queue_limit_bytes",
        "The most of them on their way to the SSD, and of the others; of both without a CPU tier.",
        "",
        _one("store_queue", "limit_bytes"),
    ),
)
