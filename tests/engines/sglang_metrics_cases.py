"""The engine's metrics in SGLang's own registry, one case by its name:  sglang_metrics_cases.py CASE FOLDER

SGLang sets PROMETHEUS_MULTIPROC_DIR before its processes begin, and so does each case, before anything of Prometheus'
client is imported.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from gdscache.storage.base import Op
from tests.engines import sglang_host_rig as host
from tests.engines import sglang_rig as rig
from tests.engines.sglang_case import FAULTY, case, run_case
from tests.support.faults import Fault
from tests.support.faulty import PLAN

ON = {"enable_metrics": True, "served_model_name": "small"}


def shared(folder: Path) -> None:
    """What several processes share, and Prometheus' client where SGLang's environment has none."""
    (folder / "prometheus").mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "prometheus")
    (folder / "lib").mkdir()
    (folder / "lib" / "prometheus_client").symlink_to(os.environ["GDSCACHE_PROMETHEUS_CLIENT"])
    sys.path.append(str(folder / "lib"))


def scraped() -> dict[str, float]:
    """Our samples, as the process that answers scrapes sees them: from the files alone."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name.startswith("sglang:gdscache_"):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("group")) == ("small", "")
                found[" ".join([sample.name, *(labels[name] for name in sorted(labels))])] = sample.value
    return found


def whole(found: dict[str, float]) -> None:
    """Every metric of the table is there that is not learned first, nor of a section that is not there."""
    from gdscache.metrics import FAMILIES

    names = {re.sub(r"(_total|_bucket|_count|_sum)?( .*)?$", "", name) for name in found}
    missing = {family.name for family in FAMILIES if f"sglang:{family.name}" not in names}
    assert {name for name in missing if not re.search("_per_second|_latency_|event|endurance|rank_", name)} == set()


@case
def the_linker_s_metrics(folder: Path) -> None:
    shared(folder)
    found = rig.Rig(folder, server=ON)
    before = scraped()
    whole(before)
    assert before["sglang:gdscache_miss_pages_total checksum"] == 0
    tokens = rig.prompt(1, 61)
    found.serve(tokens)
    found.settle()
    found.close()
    assert scraped()["sglang:gdscache_stored_pages_total ssd"] == 15, "the last of it is told at the end"
    again = rig.Rig(folder, server=ON, ssd=FAULTY["ssd"])
    with PLAN.rule(Op.READ, Fault.FLIP, rate=1.0, bit=7):
        assert again.serve(tokens)[1] < 60

    def told() -> bool:
        now = scraped()
        return now["sglang:gdscache_miss_pages_total checksum"] > 0 and now["sglang:gdscache_tier_pages cpu"] > 0

    rig.until(told, "a second has passed")
    whole(scraped())
    again.close()


@case
def the_storage_s_metrics(folder: Path) -> None:
    shared(folder)
    found = host.HostRig(folder, server=ON)
    keys = found.keys(rig.prompt(1, 40))
    found.fill([7, 3, 9], 1)
    assert found.backup(keys[:3], [7, 3, 9])
    rig.until(lambda: scraped()["sglang:gdscache_stored_pages_total ssd"] == 3, "a second has passed")
    found.storage.register_mem_pool_host(found.pool)  # which closes the engine, and opens another
    assert found.prefetch(keys[:3], [20, 21, 22]) == 3
    found.close()
    now = scraped()
    assert now["sglang:gdscache_loaded_pages_total ssd"] == 3
    assert now["sglang:gdscache_load_duration_seconds_count 1MiB ssd"] == 1


@case
def off_there_is_no_thread_and_no_metric(folder: Path) -> None:
    import threading

    shared(folder)
    found = rig.Rig(folder)
    assert "gdscache-metrics" not in {thread.name for thread in threading.enumerate()}
    assert "prometheus_client" not in sys.modules or not scraped()
    found.close()


if __name__ == "__main__":
    run_case()
