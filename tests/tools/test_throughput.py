"""Throughput on this machine, small: `pytest -m throughput`. `gdscache bench io` measures in earnest.

Figures of a machine that does other things too say little, so the floors are low: they find what is broken, not slow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gdscache.commands.bench.io import BENCH, Settings
from gdscache.commands.bench.io_sweep import OPS
from gdscache.commands.bench.io_ways import BY_NAME

pytestmark = [pytest.mark.throughput, pytest.mark.soak]

FLOOR = 0.1  # of the bare loop: the best round of requests of 1 MiB, 32 in flight


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("throughput")
    settings = dataclasses.replace(
        Settings.of("quick", everything=True), total=64 << 20, repeat=1, sweep_rounds=3, sweep_seconds=0.05
    )
    report = BENCH.run(settings, directory)
    assert not list(directory.iterdir())
    return report


def test_nothing_that_works_here_fails(found: dict[str, Any]) -> None:
    assert found["failed"] == []
    assert found["complete"]


@pytest.mark.parametrize("way", BY_NAME)
def test_a_way_moves_bytes_at_a_rate(found: dict[str, Any], way: str) -> None:
    trial = next(trial for trial in found["ways"] if trial["way"] == way)
    if trial["cause"]:
        pytest.skip(f"{trial['label']}: {trial['cause']}")
    cells = [cell for cell in found["cells"] if cell["way"] == way]
    assert {cell["op"] for cell in cells} == set(OPS)
    large = [cell for cell in cells if cell["io_bytes"] == 1 << 20]
    for cell in large:
        assert cell["gb_per_second"]["max"] >= FLOOR * cell["ceiling_gb_per_second"]["median"], cell


def test_stores_and_loads_have_figures(found: dict[str, Any]) -> None:
    rows = [r for r in found["comparisons"] if r["case"] == "stores and loads, 1MiB pages"]
    assert rows
    assert all(r["figure"]["min"] > 0 and r["against_figure"]["min"] > 0 for r in rows if r["unit"] == "GB/s")
