"""Throughput on this machine, small: `pytest -m throughput`. `gdscache bench io` measures in earnest.

Figures of a machine that does other things too say little, so the floors are low: they find what is broken, not slow.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gdscache.commands.bench import io, io_trial
from gdscache.commands.bench.io_cells import BY_NAME, OPS, Settings

pytestmark = [pytest.mark.throughput, pytest.mark.suite]

FLOOR = 0.1  # of the bare loop: the best round of requests of 1 MiB, sixteen in flight


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("throughput")
    settings = dataclasses.replace(
        Settings.quick(), total=64 << 20, repeat=1, cell_rounds=3, cell_seconds=0.05, calls=3
    )
    report = io.run(directory, settings)
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


@pytest.mark.parametrize("part", ["host reads", "cold loads", "a file a page, 256KiB pages", "one call a page"])
def test_a_comparison_has_figures(found: dict[str, Any], part: str) -> None:
    rows = [r for r in found["comparisons"] if r["part"] == part]
    assert rows
    assert all(r["figure"]["min"] > 0 and r["against_figure"]["min"] > 0 for r in rows if r["unit"] == "GB/s")


def test_requests_in_flight_are_what_was_asked_for(found: dict[str, Any]) -> None:
    """Little's law: the mean time of a request is at least its share of the run, so p50 cannot be far below it."""
    for cell in found["cells"]:
        mean = cell["depth"] / cell["iops"]
        assert cell["latency_seconds"]["max"] >= mean / 2, cell


def test_the_file_lies_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def progress(done: int, total: int, text: str) -> None:
        seen.extend(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("io.bin"))

    found = [io_trial.Trial("host", "", "posix", direct=True)]  # a trial is a child, and this way was tried above
    monkeypatch.setattr(io_trial, "try_ways", lambda *_: found)
    monkeypatch.setattr(io._Bench, "_parts", lambda self: [])
    settings = dataclasses.replace(Settings.quick(), total=16 << 20, ways=("host",), row_total=4 << 20)
    io.run(tmp_path, settings, progress)
    assert seen
    assert not list(tmp_path.iterdir())
