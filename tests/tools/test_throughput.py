"""Throughput on this machine, small: `pytest -m throughput`. `gdscache bench io` measures in earnest.

Figures of a machine that does other things too say little, so the floors are low: they find what is broken, not slow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gdscache.commands.bench.io import BENCH, Settings
from gdscache.commands.bench.io_rows import TRANSPORTS

pytestmark = [pytest.mark.throughput, pytest.mark.soak]

FLOOR = 0.1  # of the bare loop, by the best round


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("throughput")
    report = BENCH.run(dataclasses.replace(Settings.of("quick", everything=True), total=64 << 20, repeat=3), directory)
    assert not list(directory.iterdir())
    return report


def test_nothing_that_works_here_fails(found: dict[str, Any]) -> None:
    assert found["failed"] == []
    assert found["complete"]


@pytest.mark.parametrize("transport", ["", *TRANSPORTS])
def test_stores_and_loads_have_a_rate(found: dict[str, Any], transport: str) -> None:
    case = f"stores and loads, {transport}, 1MiB pages" if transport else "stores and loads, 1MiB pages"
    if causes := [row["cause"] for row in found["cannot"] if row["what"] == case]:
        pytest.skip(f"{transport}: {causes[0]}")
    rows = [row for row in found["comparisons"] if row["case"] == case]
    assert [row["what"].partition(",")[0] for row in rows] == ["cold load", "store"]
    for row in rows:
        assert row["figure"]["max"] >= FLOOR * row["against_figure"]["median"], row
