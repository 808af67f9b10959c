"""Metrics: what a scrape shows is what the engine counted, from registries that know nothing of each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from gdscache import CacheEngine, HybridEngine
from gdscache.errors import InvalidValueError, MetricsAddressError
from gdscache.metrics import FAMILIES, EngineCollector
from gdscache.metrics.mirror import Differences, merged, unborn
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import (
    MHA,
    WAIT,
    OpenEngine,
    OpenHost,
    drop_from,
    layout_of,
    make_config,
    prompt,
    quiet,
    until,
)
from tests.support.hybrid import MODELS, hybrid_config
from tests.support.prometheus import fetched, free_port

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
    assert value("gdscache_leased_pages", {"owner": "sequence"}) == 0


def test_what_hangs_is_shown_while_it_does(open_host: OpenHost) -> None:
    host = open_host(transport="tests.support.faulty:FaultyTransport", cpu=8, deadline=0.3)
    value = registry_of(host.engine).get_sample_value

    def shown() -> tuple[float | None, dict[str, float | None]]:
        pools = ("cpu", "bounce_loads", "bounce_stores")
        return value("gdscache_tier_switched_off", {"tier": "ssd"}), {
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
    assert value("gdscache_endurance_bytes") == 24 * extent
    assert value("gdscache_endurance_left_bytes") == 3 * extent
    host.keep(prompt(1, 5))
    assert value("gdscache_refused_pages_total", {"cause": "second_offer"}) == 5
    assert value("gdscache_refused_pages_total", {"cause": "endurance"}) == 0
    assert value("gdscache_admitted_pages_total") == 0
    drop_from(host.engine, "cpu")
    host.keep(prompt(1, 5))
    assert value("gdscache_refused_pages_total", {"cause": "endurance"}) == 1
    assert value("gdscache_refused_pages_total", {"cause": "no_prefix"}) == 1
    assert value("gdscache_admitted_pages_total") == value("gdscache_stored_pages_total", {"tier": "ssd"}) == 3
    assert 0 <= value("gdscache_endurance_left_bytes") < extent


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
    assert value("gdscache_prefill_error_ratio_count") == 0
    assert value("gdscache_load_error_ratio_count", {"tier": "cpu"}) == 0
    host.keep(prompt(1, 3))
    for _ in range(5):
        host.engine.manager.costs.observe_load("cpu", 1000, 10.0)
        host.engine.observe_prefill(1000, 0, 0.5)
    assert host.engine.lookup(prompt(1, 3)).declined == 12
    assert value("gdscache_gate_hits_total", {"decision": "declined"}) == 1
    assert value("gdscache_gate_tokens_total", {"decision": "declined"}) == 12
    assert value("gdscache_prefill_tokens_per_second") == pytest.approx(2000)
    assert value("gdscache_load_latency_seconds", {"tier": "cpu"}) == 0
    for name, labels in (("load", {"tier": "cpu"}), ("prefill", {})):  # the first is compared with nothing
        assert value(f"gdscache_{name}_error_ratio_count", labels) == 4
        assert value(f"gdscache_{name}_error_ratio_bucket", {**labels, "le": "0.01"}) == 4


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
        "tokens": "gdscache_lookup_tokens", "measured": "gdscache_moved_bytes", "ranks": "gdscache_rank_running",
        "events": "gdscache_event_batches",
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


def test_engines_that_cannot_be_read_are_refused_before_a_scrape(open_engine: OpenEngine) -> None:
    engine = open_engine()
    for wrong in ([engine], None, {0: engine}, {"a": engine, "b": None}):
        with pytest.raises(InvalidValueError, match="engines "):
            EngineCollector(wrong)  # type: ignore[arg-type]


def test_one_registry_refuses_two_nameless_engines(open_engine: OpenEngine, tmp_path: Any) -> None:
    registry = registry_of(open_engine(tmp_path / "a"))
    with pytest.raises(ValueError, match="gdscache"):
        registry.register(EngineCollector(open_engine(tmp_path / "b")))
    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("gdscache")], "nor everybody's"


def test_missing_tiers_are_absent(open_engine: OpenEngine) -> None:
    value = registry_of(open_engine(cpu=None)).get_sample_value
    assert value("gdscache_tier_slots", {"tier": "cpu"}) is None
    assert value("gdscache_tier_slots", {"tier": "ssd"}) == 12
    assert value("gdscache_quarantined_slots", {"pool": "cpu"}) is None
    assert value("gdscache_quarantined_slots", {"pool": "bounce_loads"}) == 0
    assert value("gdscache_endurance_left_bytes") is None, "there is no budget"
    value = registry_of(open_engine(ssd=None)).get_sample_value
    assert value("gdscache_admitted_pages_total") is None
    assert value("gdscache_tier_switched_off", {"tier": "ssd"}) is None


def test_names_and_help_follow_the_conventions() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("gdscache_")
        assert not family.name.endswith("_total")  # the client adds it to counters
        assert family.help.endswith(".")
        assert set(family.labels) <= BOUNDED.keys(), "a label whose values nobody has counted"
        ends = {"histogram": ("_seconds", "_ratio"), "counter": ("_pages", "_bytes", "_tokens", ""), "gauge": ("",)}
        assert family.name.endswith(ends[family.kind])


# Labels, and what bounds how many values each has.
BOUNDED = {
    "tier": "the configuration", "source": "the configuration", "target": "the configuration",
    "rank": "the configuration", "cause": "an enumeration", "owner": "an enumeration", "mover": "an enumeration",
    "pool": "an enumeration", "decision": "an enumeration", "size": "SIZE_CLASSES", "wait": "WAITS", "op": "two",
}  # fmt: skip


def listening(port: int) -> bool:
    with socket.socket() as some:
        return some.connect_ex(("127.0.0.1", port)) == 0


def series(engines: Any) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series of a registry; but those of gauges that are there when they are known."""
    found = {
        (sample.name, tuple(sorted(sample.labels.items())))
        for metric in registry_of(engines).collect()
        for sample in metric.samples
    }
    learned = ("bytes_per_second", "latency_seconds", "tokens_per_second")
    return {one for one in found if not one[0].endswith(learned)}


def test_every_series_is_there_before_anything_happens(open_host: OpenHost) -> None:
    """One that is born with a first event hides it from `increase()`."""
    host = open_host(cpu=6, ssd=12, transport="tests.support.faulty:FaultyTransport")
    before = series(host.engine)
    host.keep_on_ssd(prompt(1, 3))
    with PLAN.rule(Op.READ, Fault.FLIP, times=1):
        host.load(prompt(1, 3))
    host.keep_on_ssd(prompt(2, 2))
    with PLAN.rule(Op.READ, Fault.EIO, times=1):
        host.load(prompt(2, 2))
    with PLAN.rule(Op.WRITE, Fault.EIO, times=1):
        host.store(prompt(3, 2)).result(WAIT)
    for seed in range(10, 20):
        host.keep(prompt(seed, 3))
    host.engine.prefetch(prompt(10, 3)).result(WAIT)
    host.engine.lookup(prompt(99, 3))
    value = registry_of(host.engine).get_sample_value
    assert value("gdscache_miss_pages_total", {"cause": "checksum"}) == 1
    assert value("gdscache_miss_pages_total", {"cause": "io_error"}) == 1
    assert value("gdscache_dropped_pages_total", {"cause": "io_error"}) >= 1
    assert series(host.engine) == before


def test_an_engine_that_has_counted_nothing_has_the_series_of_one_that_has_not_begun(open_engine: OpenEngine) -> None:
    for tiers in ({}, {"cpu": None}, {"ssd": None}):
        engine = open_engine(**tiers)
        stats = engine.stats()
        kinds = {name: about["kind"] for name, about in stats["tiers"].items()}
        for family in FAMILIES:
            if family.kind != "gauge":
                assert family.read(unborn(kinds)).keys() == family.read(stats).keys(), family.name
        engine.close()


def test_the_news_of_two_times_are_the_news_of_both(open_host: OpenHost) -> None:
    """vLLM merges those of several steps, in another process."""
    host = open_host(cpu=6, ssd=12)
    twice, once = Differences(0.0, time.monotonic), Differences(0.0, time.monotonic)

    def counted(news: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value["counts"] if isinstance(value, dict) else value for name, value in news.items()}

    host.keep_on_ssd(prompt(1, 3))
    first = twice.take(host.engine.stats())
    host.load(prompt(1, 3))
    host.engine.lookup(prompt(2, 3))
    stats = host.engine.stats()
    both = counted(merged(first, twice.take(stats)))
    assert both == counted(once.take(stats))
    assert (both["gdscache_loaded_pages\tssd"], both["gdscache_lookups"]) == (3, 2)
    assert twice.take(stats) == {}


class Strict(dict[str, Any]):
    """Figures that a metric must not ask for by another name."""

    def get(self, key: str, default: Any = None) -> Any:
        assert key in self or default in ((), None), f"{key!r} is not among {', '.join(self)}"
        found = super().get(key, default)
        return Strict(found) if isinstance(found, dict) else found

    def items(self) -> Any:
        return {key: self.get(key) for key in self}.items()


def test_no_metric_asks_for_a_figure_that_stats_do_not_have(open_host: OpenHost) -> None:
    host = open_host(cpu=6, ssd=12)
    host.keep(prompt(1, 3))
    stats = Strict(host.engine.stats())
    for family in FAMILIES:
        if family.kind != "counter":  # a counter may be missing until it counts
            family.read(stats)


def test_a_thousand_tenants_are_no_more_series(open_host: OpenHost) -> None:
    host = open_host(cpu=64, ssd=64)
    host.keep(prompt(1, 2))
    before = series(host.engine)
    for tenant in range(1000):
        host.engine.lookup(prompt(1, 2), salt=f"tenant {tenant}")
        if tenant % 100 == 0:
            host.engine.store(prompt(1, 2), host.compute(prompt(1, 2)), salt=f"tenant {tenant}").result(WAIT)
            with host.engine.pin(prompt(1, 2), 60.0, salt=f"tenant {tenant}"):
                assert series(host.engine) == before
    assert series(host.engine) == before
    assert len(before) < 700


def test_bytes_by_path_and_times_by_tier(open_host: OpenHost) -> None:
    host = open_host(cpu=6, ssd=12)
    value, page = registry_of(host.engine).get_sample_value, host.layout.page_bytes

    def moved(source: str, target: str) -> float | None:
        return value("gdscache_moved_bytes_total", {"source": source, "target": target})

    def times(name: str, tier: str) -> float | None:
        return value(f"gdscache_{name}_duration_seconds_count", {"tier": tier, "size": "1MiB"})

    host.keep_on_ssd(prompt(1, 3))
    assert (moved("planes", "cpu"), moved("cpu", "ssd")) == (3 * page, 3 * page)
    assert (times("store", "cpu"), times("store", "ssd")) == (1, 1)
    assert host.load(prompt(1, 3)).tokens == 12
    assert (moved("ssd", "cpu"), moved("cpu", "planes"), moved("ssd", "planes")) == (3 * page, 3 * page, 0)
    assert (times("load", "ssd"), times("load", "cpu")) == (1, 0)
    assert host.load(prompt(1, 3)).tokens == 12
    assert moved("cpu", "planes") == 6 * page
    assert times("load", "cpu") == 1
    assert value("gdscache_request_wait_seconds_count", {"wait": "verdict"}) == 2
    layers = value("gdscache_layer_wait_seconds_count")
    load = host.begin(prompt(1, 3))[0]
    load.wait(0)
    load.result(WAIT)
    assert value("gdscache_layer_wait_seconds_count") == layers + 1


def test_ages_of_pages_that_are_evicted(open_host: OpenHost) -> None:
    host = open_host(cpu=4, ssd=None)
    now = [1000.0]
    host.engine.manager.cpu.index.ages._clock = lambda: now[0]
    value = registry_of(host.engine).get_sample_value
    host.keep(prompt(1, 4))
    now[0] += 50.0
    host.engine.lookup(prompt(1, 4))
    now[0] += 5.0
    host.keep(prompt(2, 4))
    tier = {"tier": "cpu"}
    assert value("gdscache_page_reuse_gap_seconds_sum", tier) == pytest.approx(4 * 50)
    assert value("gdscache_evicted_page_age_seconds_count", tier) == 4
    assert value("gdscache_evicted_page_age_seconds_sum", tier) == pytest.approx(4 * 55)
    assert value("gdscache_evicted_page_idle_seconds_sum", tier) == pytest.approx(4 * 5)
    assert value("gdscache_evicted_page_idle_seconds_bucket", {**tier, "le": "10.0"}) == 4


def test_metrics_port_serves_them_until_the_engine_is_closed(open_engine: OpenEngine, tmp_path: Any) -> None:
    port = free_port()
    engine = open_engine(metrics={"port": port})
    store(engine)
    assert "gdscache_stores_total 1.0" in fetched(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(MetricsAddressError, match=f"127.0.0.1:{port}"):
        open_engine(tmp_path / "other", metrics={"port": port})
    open_engine(tmp_path / "other").close()  # what could not serve has given its directory back
    engine.close()
    with pytest.raises(OSError, match="refused"):
        fetched(f"http://127.0.0.1:{port}/metrics")


def test_a_host_that_can_be_no_name_is_refused_in_words(open_engine: OpenEngine) -> None:
    with pytest.raises(MetricsAddressError, match=r"set metrics\.port and metrics\.host"):
        open_engine(metrics={"port": free_port(), "host": "a" * 64})


@pytest.mark.parametrize("pools", [1, 2])
def test_an_engine_that_is_dropped_is_closed_whoever_scrapes_it(pools: int) -> None:
    port = free_port()
    at = {"metrics": {"port": port}}
    engine: CacheEngine | HybridEngine = (
        CacheEngine.from_config(make_config(**at))
        if pools == 1
        else HybridEngine.from_config(hybrid_config(None, MODELS["apart"], **at))
    )
    assert "gdscache_open 1.0" in fetched(f"http://127.0.0.1:{port}/metrics")
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del engine
    until(lambda: not listening(port), "the port is free again")
