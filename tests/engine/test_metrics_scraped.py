"""A Prometheus server scrapes engines that run: it has every metric, and the alerts fire for faults made real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import prometheus_client
import pytest

from gdscache import CacheEngine
from gdscache.metrics import FAMILIES, EngineCollector
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import MHA, WAIT, OpenHost, drop_from, flip_file, layout_of, prompt, until
from tests.support.pages import offset_of
from tests.support.prometheus import dashboard_queries, rules, scraping
from tests.support.ranks import RanksHost

pytestmark = pytest.mark.suite
FAULTY = "tests.support.faulty:FaultyTransport"
SOON = 0.5  # seconds that a read may take
NEVER_HERE = {
    "GdscacheHitRateCollapsed"
}  # compares with hours before: promtool's alone, see tests/tools/test_alerts.py


@contextlib.contextmanager
def served(engines: CacheEngine | Mapping[str, CacheEngine]) -> Iterator[int]:
    """A port at which their metrics are."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engines))
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_prometheus_has_every_metric_and_answers_every_query_of_the_dashboard(
    open_host: OpenHost, tmp_path: Path
) -> None:
    """One server for both: it takes five seconds to begin."""
    extent = layout_of(MHA).extent_bytes
    budget = {"endurance": 16 * extent}  # two pages at once
    host = open_host(cpu=8, ssd=24, transport=FAULTY, events={}, ssd_options=budget)
    ranks = RanksHost(tmp_path / "ranks", [0, 1])
    for number in range(1, 5):
        host.engine.observe_prefill(100 * number, 0, 0.1 * number)
    host.engine.observe_load("ssd", 1 << 20, 0.1)
    suffixes = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    try:
        with served({"host": host.engine, "ranks": ranks.engine}) as port, scraping(tmp_path, port) as server:
            assert {family.name + suffixes[family.kind] for family in FAMILIES} <= server.names()
            assert server.firing() == set()
            ranks.store(prompt(1, 3))
            with PLAN.rule(Op.WRITE, Fault.EIO, times=1):
                host.store(prompt(1, 2)).result(WAIT)  # dropped from the SSD
            host.store(prompt(2, 3)).result(WAIT)  # beyond the budget
            host.engine.lookup(prompt(1, 4))
            host.load(prompt(1, 2))
            silent = {"lost at open: {{cause}}"}  # a good directory has none

            def unanswered() -> list[str]:
                return [said for said, asked in dashboard_queries() if said not in silent and not server.query(asked)]

            until(lambda: not unanswered(), "every query has series", 30)
            by_legend = dict(dashboard_queries())
            assert server.value(by_legend["computing would take"]) > 0
            assert server.value(by_legend["budget"]) == 16 * extent
            assert server.value(by_legend["ranks"]) == 2
            assert server.value('increase(gdscache_stored_pages_total{engine="host",tier="cpu"}[1m])') > 0
            assert server.value("histogram_quantile(0.5, sum by (le) (gdscache_store_duration_seconds_bucket))") > 0
    finally:
        ranks.close()


@pytest.mark.timeout(300)
def test_every_alert_fires_for_its_fault_made_real(open_host: OpenHost, tmp_path: Path) -> None:
    """One fault after another, on a drive, a directory with a budget, and two ranks."""
    extent = layout_of(MHA).extent_bytes
    drive = open_host(tmp_path / "drive", cpu=8, ssd=24, transport=FAULTY, deadline=SOON)
    spent = open_host(tmp_path / "spent", cpu=64, ssd=64, ssd_options={"endurance": 16 * extent})
    slow = open_host(tmp_path / "slow", cpu=16, ssd=24, transport=FAULTY, queue=2)
    ranks = RanksHost(tmp_path / "ranks", [0, 1])
    engines = {"drive": drive.engine, "spent": spent.engine, "slow": slow.engine, "ranks": ranks.engine}
    try:
        with served(engines) as port, scraping(tmp_path, port) as server:
            seen: set[str] = set()

            def fires(*names: str) -> None:
                until(lambda: set(names) <= server.firing(), f"{names} fire", 60)
                seen.update(names)

            drive.keep_on_ssd(prompt(1, 3))
            ranks.store(prompt(1, 3))
            until(lambda: server.value('gdscache_tier_pages{engine="drive",tier="ssd"}') == 3, "a scrape")
            assert server.firing() == set(), "before there was a fault"

            flip_file(drive.engine.manager.ssd.path / "slab-0.bin", offset_of(drive.engine, prompt(1, 3), 1))
            assert drive.load(prompt(1, 3)).tokens == 4
            fires("GdscacheBadPages")

            drive.keep_on_ssd(prompt(2, 3))
            with PLAN.rule(Op.READ, Fault.EIO, times=1):
                drive.load(prompt(2, 3))
            fires("GdscacheReadErrors")

            with PLAN.rule(Op.WRITE, Fault.ENOSPC, times=1):
                drive.store(prompt(3, 2)).result(WAIT)
            fires("GdscacheDiskFull")

            with PLAN.rule(Op.WRITE, Fault.EIO, times=1):
                drive.store(prompt(4, 2)).result(WAIT)
            fires("GdscacheWritesFail")

            for seed in range(8):
                spent.store(prompt(seed, 3)).result(WAIT)
            fires("GdscacheEnduranceUsedUp")

            with PLAN.rule(Op.WRITE, Fault.HANG):
                handles = [slow.store(prompt(seed, 2)) for seed in range(4)]
                fires("GdscacheWritesRefused")
            for handle in handles:
                handle.result(WAIT)

            drive.keep_on_ssd(prompt(5, 3))
            with PLAN.rule(Op.READ, Fault.HANG, times=3):
                load, *_ = drive.begin(prompt(5, 3))
                load.result(WAIT)
                fires("GdscacheTierSwitchedOff", "GdscacheQuarantine")
            drop_from(slow.engine, "cpu")
            until(lambda: "GdscacheTierSwitchedOff" not in server.firing(), "what hung has ended", 60)

            ranks.ranks[1].kill()
            fires("GdscacheRankDead")
            assert server.value('gdscache_rank_running{rank="0"}') == 1
            assert seen == {rule["alert"] for rule in rules()} - NEVER_HERE
    finally:
        ranks.close()
