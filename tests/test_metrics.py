"""Metrics: what a scrape shows is what the engine counted, from registries that know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from gdscache import CacheEngine
from gdscache.metrics import FAMILIES, EngineCollector

Opens = Callable[..., CacheEngine]
TOKENS = list(range(17))  # 4 full pages of 4 tokens, and one token


def store(engine: CacheEngine, tokens: list[int] = TOKENS) -> None:
    with engine.sequence(tokens) as sequence:
        sequence.commit()
    engine.drain(20)


def registry_of(engines: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engines))
    return registry


def test_counts_are_the_engine_s(open_engine: Opens) -> None:
    engine = open_engine()
    registry = registry_of(engine)
    value = registry.get_sample_value
    assert value("gdscache_open") == 1
    assert value("gdscache_stored_pages_total", {"tier": "ssd"}) == 0  # there before the first store: rates need it
    store(engine)
    engine.lookup(TOKENS)
    assert value("gdscache_stored_pages_total", {"tier": "cpu"}) == 4
    assert value("gdscache_stored_pages_total", {"tier": "ssd"}) == 4
    assert value("gdscache_stores_total") == 1
    assert value("gdscache_lookups_total") == 2
    assert value("gdscache_lookup_pages_total") == 8
    assert value("gdscache_hit_pages_total", {"tier": "gpu"}) == 4
    assert value("gdscache_hit_pages_total", {"tier": "ssd"}) == 0
    assert value("gdscache_miss_pages_total", {"cause": "absent"}) == 4
    assert value("gdscache_tier_pages", {"tier": "gpu"}) == 4
    assert value("gdscache_tier_slots", {"tier": "cpu"}) == 6
    assert value("gdscache_tier_free_slots", {"tier": "cpu"}) == 2
    assert value("gdscache_tier_capacity_bytes", {"tier": "ssd"}) == 12 * engine.layout.extent_bytes
    assert value("gdscache_store_queue_bytes") == 0
    assert value("gdscache_store_queue_limit_bytes") == 64 * engine.layout.extent_bytes


def test_loads_and_misses_by_cause(open_engine: Opens) -> None:
    store(engine := open_engine())
    engine.close()
    again = open_engine()
    registry = registry_of(again)
    with again.sequence(TOKENS) as sequence:
        assert sequence.load is not None
        assert sequence.load.result(20).tokens == 16
        assert registry.get_sample_value("gdscache_leased_pages", {"owner": "sequence"}) is not None
    value = registry.get_sample_value
    assert value("gdscache_loaded_pages_total", {"tier": "ssd"}) == 4
    assert value("gdscache_loaded_bytes_total", {"tier": "ssd"}) == 4 * again.layout.page_bytes
    assert value("gdscache_load_bytes_per_second", {"tier": "ssd"}) > 0
    assert value("gdscache_leased_pages", {"owner": "sequence"}) is None


def test_evictions_and_dropped_stores(open_engine: Opens) -> None:
    engine = open_engine(gpu=16, queue=2)
    registry = registry_of(engine)
    store(engine)
    assert registry.get_sample_value("gdscache_dropped_pages_total", {"cause": "queue_full"}) == 2
    for first in range(100, 500, 100):
        store(engine, list(range(first, first + 17)))
    assert registry.get_sample_value("gdscache_evicted_pages_total", {"tier": "gpu"}) == engine.gpu.index.evictions > 0


def test_every_count_of_the_engine_is_shown(open_engine: Opens) -> None:
    """A group that stats() gains and no metric reads would be a gap that nobody sees."""
    engine = open_engine(queue=2)
    store(engine)
    engine.lookup(TOKENS)
    shown = {
        "lookups": "gdscache_lookups",
        "hits": "gdscache_hit_pages",
        "misses": "gdscache_miss_pages",
        "loaded": "gdscache_loaded_pages",
        "bytes_loaded": "gdscache_loaded_bytes",
        "stores": "gdscache_stores",
        "stored": "gdscache_stored_pages",
        "dropped": "gdscache_dropped_pages",
        "tiers": "gdscache_tier_pages",
        "copies": "gdscache_copies",
        "leases": "gdscache_leased_pages",
        "bytes_per_second": "gdscache_load_bytes_per_second",
        "store_queue": "gdscache_store_queue_bytes",
    }
    assert set(shown.values()) <= {family.name for family in FAMILIES}
    groups = {name for name, value in engine.stats().items() if isinstance(value, (dict, list))}
    assert groups <= shown.keys()


def test_a_closed_engine_says_so_and_harms_no_scrape(open_engine: Opens) -> None:
    engine = open_engine()
    store(engine)
    registry = registry_of(engine)
    engine.close()
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert [(s.name, s.value) for s in samples] == [("gdscache_open", 0)]
    assert b"gdscache_open 0.0" in generate_latest(registry)


def test_engines_by_name(open_engine: Opens, tmp_path: Any) -> None:
    first, second = open_engine(tmp_path / "a"), open_engine(tmp_path / "b")
    registry = registry_of({"draft": first, "target": second})
    store(second)
    value = registry.get_sample_value
    assert value("gdscache_stores_total", {"engine": "draft"}) == 0
    assert value("gdscache_stores_total", {"engine": "target"}) == 1
    assert value("gdscache_stored_pages_total", {"engine": "target", "tier": "ssd"}) == 4
    first.close()
    assert value("gdscache_open", {"engine": "draft"}) == 0
    assert value("gdscache_open", {"engine": "target"}) == 1
    text = generate_latest(registry).decode()
    assert text.count("# TYPE gdscache_stores_total counter") == 1


def test_one_registry_refuses_two_nameless_engines(open_engine: Opens, tmp_path: Any) -> None:
    registry = registry_of(open_engine(tmp_path / "a"))
    with pytest.raises(ValueError, match="gdscache"):
        registry.register(EngineCollector(open_engine(tmp_path / "b")))


def test_nothing_is_registered_for_everybody(open_engine: Opens) -> None:
    EngineCollector(open_engine())
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("gdscache")]


def test_missing_tiers_are_absent(open_engine: Opens) -> None:
    registry = registry_of(open_engine(cpu=None))
    assert registry.get_sample_value("gdscache_tier_slots", {"tier": "cpu"}) is None
    assert registry.get_sample_value("gdscache_tier_slots", {"tier": "ssd"}) == 12


def test_names_and_help_follow_the_conventions() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("gdscache_")
        assert not family.name.endswith("_total")  # the client adds it to counters
        assert family.help.endswith(".")
        assert family.label in ("", "tier", "cause", "owner", "mover")
