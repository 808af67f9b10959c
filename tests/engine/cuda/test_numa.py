"""Where what serves a GPU lies: by a machine's files, with made-up nodes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from gdscache.cuda import numa

MINE = os.sched_getaffinity(0)
ONE = min(MINE)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes: one processor of this process on the second, those that no machine has on the first."""
    for node, cpus in (("node0", "100000-100003,100008"), ("node1", str(ONE))):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "sys/devices/system/node" / node / "cpulist").write_text(f"{cpus}\n")
    for bus, node in (("18", "1"), ("19", "-1"), ("1a", "0")):
        (tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0").mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node").write_text(f"{node}\n")
    return tmp_path


def test_the_node_of_a_gpu_and_what_lacks(machine: Path) -> None:
    assert numa.placement("0000:18:00.0", machine) == numa.Placement(1, frozenset({ONE}))
    for address in ("0000:19:00.0", "0000:1b:00.0", ""):
        assert "does not say" in numa.placement(address, machine).lacks
    assert numa.placement("0000:1a:00.0", machine).lacks == "this process may use no processor of NUMA node 0"


def test_one_node_is_no_matter(machine: Path) -> None:
    (machine / "sys/devices/system/node/node0").rename(machine / "sys/node0")
    assert numa.placement("0000:18:00.0", machine) == numa.Placement()


@pytest.mark.skipif(len(MINE) < 2, reason="one processor: all threads run there")
def test_threads_that_are_started_near_a_gpu_run_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def run() -> None:
        with numa.near(CUDA, machine):
            inner = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            inner.start()
            inner.join()
        seen.append(os.sched_getaffinity(0))

    for address in ("0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"):
        monkeypatch.setattr(numa, "gpu_address", lambda device, address=address: address)
        outer = threading.Thread(target=run)
        outer.start()
        outer.join()
    assert seen == [{ONE}, MINE, MINE, MINE, MINE, MINE]
    assert os.sched_getaffinity(0) == MINE
