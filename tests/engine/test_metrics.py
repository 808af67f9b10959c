"""Metrics: what a scrape shows is what the engine counted, from registries that know nothing of each other."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from gdscache import CacheEngine
from gdscache.metrics import FAMILIES, EngineCollector
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import MHA, WAIT, OpenEngine, OpenHost, drop_from, layout_of, prompt, quiet, until

TOKENS = list(range(17))  # 4 full pages of 4 tokens, and one token


def store(engine: CacheEngine, tokens: list[int] = TOKENS) -> None:
    with engine.sequence(tokens) as sequence:
        sequence.commit()
    engine.drain(20)


def registry_of(engines: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engines))
    return registry


def test_counts_are_the_engine_s(open_engine: OpenEngine) -> None:
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
    assert value("gdscache_concerns") == len(engine.stats()["concerns"])
    assert value("gdscache_store_queue_bytes") == 0
    assert value("gdscache_store_queue_to_ssd_bytes") == 0
    assert value("gdscache_store_queue_limit_bytes") == 64 * engine.layout.extent_bytes


def test_loads_and_misses_by_cause(open_engine: OpenEngine) -> None:
    store(engine := open_engine())
    engine.close()
    again = open_engine()
    registry = registry_of(again)
    with again.sequence(TOKENS) as sequence:
        assert sequence.load.result(20).tokens == 16
        assert registry.get_sample_value("gdscache_leased_pages", {"owner": "sequence"}) is not None
    value = registry.get_sample_value
    assert value("gdscache_loaded_pages_total", {"tier": "ssd"}) == 4
    assert value("gdscache_loaded_bytes_total", {"tier": "ssd"}) == 4 * again.layout.page_bytes
    assert value("gdscache_load_bytes_per_second", {"tier": "ssd"}) > 0
    assert value("gdscache_leased_pages", {"owner": "sequence"}) is None


def test_what_hangs_is_shown_while_it_does(open_host: OpenHost) -> None:
    host = open_host(transport="tests.support.faulty:FaultyTransport", cpu=8, deadline=0.3)
    value = registry_of(host.engine).get_sample_value

    def shown() -> tuple[float | None, dict[str, float | None]]:
        pools = ("cpu", "bounce_loads", "bounce_stores")
        return value("gdscache_ssd_switched_off"), {
            pool: value("gdscache_quarantined_slots", {"pool": pool}) for pool in pools
        }

    rest = (0, {"cpu": 0, "bounce_loads": 0, "bounce_stores": 0})
    assert shown() == rest
    host.keep_on_ssd(prompt(1, 3))
    with PLAN.rule(Op.READ, Fault.HANG, times=3):
        load, blocks, keys = host.begin(prompt(1, 3))
        load.result(WAIT)
        assert shown() == (1, {"cpu": 3, "bounce_loads": 0, "bounce_stores": 0})
    host.finish(load, blocks, keys)
    until(lambda: shown() == rest, "what hung has ended")


def test_evictions_and_dropped_stores(open_engine: OpenEngine) -> None:
    engine = open_engine(gpu=16, queue=2)
    registry = registry_of(engine)
    store(engine)
    assert registry.get_sample_value("gdscache_dropped_pages_total", {"cause": "queue_full"}) == 2
    for first in range(100, 500, 100):
        store(engine, list(range(first, first + 17)))
    assert registry.get_sample_value("gdscache_evicted_pages_total", {"tier": "gpu"}) == engine.gpu.index.evictions > 0


def test_refusals_by_cause_and_what_endurance_leaves(open_host: OpenHost) -> None:
    extent = layout_of(MHA).extent_bytes
    host = open_host(store={"admission": "second_offer"}, ssd_options={"endurance": 24 * extent})  # 3 pages at once
    value = registry_of(host.engine).get_sample_value
    assert value("gdscache_endurance_left_bytes") == 3 * extent
    host.keep(prompt(1, 5))
    assert value("gdscache_refused_pages_total", {"cause": "second_offer"}) == 5
    assert value("gdscache_refused_pages_total", {"cause": "endurance"}) is None
    assert value("gdscache_admitted_pages_total") == 0
    drop_from(host.engine, "cpu")
    host.keep(prompt(1, 5))
    assert value("gdscache_refused_pages_total", {"cause": "endurance"}) == 1
    assert value("gdscache_refused_pages_total", {"cause": "no_prefix"}) == 1
    assert value("gdscache_admitted_pages_total") == value("gdscache_stored_pages_total", {"tier": "ssd"}) == 3
    assert 0 <= value("gdscache_endurance_left_bytes") < extent


def test_without_admission_or_a_budget_there_is_nothing_to_show(open_engine: OpenEngine) -> None:
    assert registry_of(open_engine()).get_sample_value("gdscache_endurance_left_bytes") is None
    value = registry_of(open_engine(ssd=None)).get_sample_value
    assert value("gdscache_admitted_pages_total") is None


def test_dirty_and_expired_pages(open_host: OpenHost) -> None:
    now = [1000.0]
    host = open_host(store={"write_policy": "write_back"})
    host.engine.manager.expiry.clock = lambda: now[0]
    value = registry_of(host.engine).get_sample_value
    assert value("gdscache_tier_dirty_pages", {"tier": "cpu"}) == 0
    blocks = host.compute(prompt(1, 2))
    host.engine.store(prompt(1, 2), blocks, ttl=60.0)
    quiet(host.engine)
    assert value("gdscache_tier_dirty_pages", {"tier": "cpu"}) == 2
    assert value("gdscache_tier_dirty_pages", {"tier": "ssd"}) == 0
    assert value("gdscache_expired_pages_total", {"tier": "cpu"}) == 0
    now[0] += 61.0
    host.engine.lookup(prompt(1, 2))
    assert value("gdscache_expired_pages_total", {"tier": "cpu"}) == 2
    assert value("gdscache_tier_dirty_pages", {"tier": "cpu"}) == 0


def test_the_gate_s_figures_and_decisions(open_host: OpenHost) -> None:
    host = open_host(load={"gate": "enforcing"}, ssd=None)
    value = registry_of(host.engine).get_sample_value
    assert value("gdscache_gate_hits_total", {"decision": "declined"}) == 0
    assert value("gdscache_prefill_tokens_per_second") is None
    assert value("gdscache_prefill_relative_error") is None
    host.keep(prompt(1, 3))
    for _ in range(5):
        host.engine.manager.costs.observe_load("cpu", 1000, 10.0)
        host.engine.observe_prefill(1000, 0, 0.5)
    assert host.engine.lookup(prompt(1, 3)).declined == 12
    assert value("gdscache_gate_hits_total", {"decision": "declined"}) == 1
    assert value("gdscache_gate_tokens_total", {"decision": "declined"}) == 12
    assert value("gdscache_prefill_tokens_per_second") == pytest.approx(2000)
    assert value("gdscache_load_latency_seconds", {"tier": "cpu"}) == 0
    assert value("gdscache_load_relative_error", {"tier": "cpu"}) == pytest.approx(0, abs=1e-6)
    assert value("gdscache_prefill_relative_error") == pytest.approx(0, abs=1e-6)


def test_every_count_of_the_engine_is_shown(open_engine: OpenEngine) -> None:
    """A group that stats() gains and no metric reads would be a gap that nobody sees."""
    engine = open_engine(queue=2)
    store(engine)
    engine.lookup(TOKENS)
    shown = {
        "lookups": "gdscache_lookups", "hits": "gdscache_hit_pages", "misses": "gdscache_miss_pages",
        "loaded": "gdscache_loaded_pages", "bytes_loaded": "gdscache_loaded_bytes", "stores": "gdscache_stores",
        "stored": "gdscache_stored_pages", "dropped": "gdscache_dropped_pages", "tiers": "gdscache_tier_pages",
        "concerns": "gdscache_concerns", "copies": "gdscache_copies", "leases": "gdscache_leased_pages",
        "bytes_per_second": "gdscache_load_bytes_per_second", "store_queue": "gdscache_store_queue_bytes",
        "store_policy": "gdscache_admitted_pages", "refused": "gdscache_refused_pages",
        "expired": "gdscache_expired_pages", "prefetch": "gdscache_prefetches", "gate": "gdscache_gate_hits",
    }  # fmt: skip
    assert set(shown.values()) <= {family.name for family in FAMILIES}
    groups = {name for name, value in engine.stats().items() if isinstance(value, (dict, list))}
    assert groups <= shown.keys()


def test_a_closed_engine_says_so_and_harms_no_scrape(open_engine: OpenEngine) -> None:
    engine = open_engine()
    store(engine)
    registry = registry_of(engine)
    engine.close()
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert [(s.name, s.value) for s in samples] == [("gdscache_open", 0)]
    assert b"gdscache_open 0.0" in generate_latest(registry)


def test_engines_by_name(open_engine: OpenEngine, tmp_path: Any) -> None:
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


def test_one_registry_refuses_two_nameless_engines(open_engine: OpenEngine, tmp_path: Any) -> None:
    registry = registry_of(open_engine(tmp_path / "a"))
    with pytest.raises(ValueError, match="gdscache"):
        registry.register(EngineCollector(open_engine(tmp_path / "b")))


def test_nothing_is_registered_for_everybody(open_engine: OpenEngine) -> None:
    EngineCollector(open_engine())
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("gdscache")]


def test_missing_tiers_are_absent(open_engine: OpenEngine) -> None:
    registry = registry_of(open_engine(cpu=None))
    assert registry.get_sample_value("gdscache_tier_slots", {"tier": "cpu"}) is None
    assert registry.get_sample_value("gdscache_tier_slots", {"tier": "ssd"}) == 12
    assert registry.get_sample_value("gdscache_quarantined_slots", {"pool": "cpu"}) is None
    assert registry.get_sample_value("gdscache_quarantined_slots", {"pool": "bounce_loads"}) == 0


def test_without_an_ssd_tier_nothing_is_switched_off_or_on(open_engine: OpenEngine) -> None:
    assert registry_of(open_engine(ssd=None)).get_sample_value("gdscache_ssd_switched_off") is None


def test_names_and_help_follow_the_conventions() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("gdscache_")
        assert not family.name.endswith("_total")  # the client adds it to counters
        assert family.help.endswith(".")
        assert family.label in ("", "tier", "cause", "owner", "mover", "pool", "decision")
