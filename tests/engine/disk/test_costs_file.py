"""The gate's figures outlive an engine: what is kept, what is taken, and that nothing else depends on it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.disk.kept import COSTS_NAME, CostsFile
from gdscache.gate.costs import Costs, Prices
from tests.support.helpers import drop_from, kept

ABOUT = {"model": "m", "device": "d"}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=8), inside, max_size=4),
    max_leaves=20,
)


def learnt() -> Costs:
    costs = Costs()
    for n in range(1, 9):
        costs.observe_prefill(512 * n, 1024 * (n % 3), 0.01 + n * 0.02)
        costs.observe_load("ssd", n << 24, 0.001 + n * 0.01)
    return costs


def restored(directory: Path, about: dict[str, str] | None = None) -> Costs:
    costs = Costs()
    CostsFile(directory, costs, ABOUT if about is None else about).restore()
    return costs


def test_what_is_kept_is_expected_again(tmp_path: Path) -> None:
    costs = learnt()
    CostsFile(tmp_path, costs, ABOUT).save()
    assert (tmp_path / COSTS_NAME).stat().st_mode & 0o777 == 0o600
    found = restored(tmp_path)
    assert found.measured({"ssd"})
    assert found.prefill_seconds(3000, 100) == pytest.approx(costs.prefill_seconds(3000, 100), rel=0.05)
    assert found.load_price("ssd") == pytest.approx(costs.load_price("ssd"), rel=0.05)
    assert found.observations() == costs.observations()


def test_only_of_the_same_model_device_and_disk(tmp_path: Path) -> None:
    CostsFile(tmp_path, learnt(), ABOUT).save()
    other = restored(tmp_path, {**ABOUT, "device": "faster"})
    assert not other.prefill.observations
    assert other.tiers["ssd"].enough
    content = json.loads((tmp_path / COSTS_NAME).read_text())
    (tmp_path / COSTS_NAME).write_text(json.dumps({**content, "disk": content["disk"] + 1}))
    moved = restored(tmp_path)
    assert moved.prefill.enough
    assert not moved.tiers


def test_nothing_new_is_not_written(tmp_path: Path) -> None:
    file = CostsFile(tmp_path, Costs(), ABOUT)
    file.save()
    assert not list(tmp_path.iterdir())
    CostsFile(tmp_path, learnt(), ABOUT).save()
    before = (tmp_path / COSTS_NAME).stat().st_ino
    again = CostsFile(tmp_path, Costs(), ABOUT)
    again.restore()
    again.save()
    assert (tmp_path / COSTS_NAME).stat().st_ino == before


def of_use(directory: Path, content: Any) -> None:
    """An engine that finds that in its directory expects something finite, learns, and leaves a file for the next."""
    (directory / COSTS_NAME).write_text(json.dumps(content))
    costs = restored(directory)
    for learns in (False, True):
        if learns:
            costs.observe_prefill(1000, 0, 0.1)
            costs.observe_load("ssd", 1 << 20, 0.1)
            assert (costs.prefill_seconds(1000, 0) or 0) > 0
            assert costs.load_price("ssd") is not None
        json.dumps(costs.describe(), allow_nan=False)
        priced = [tier for tier in ("cpu", "ssd") if costs.load_price(tier)]
        assert 0 <= Prices(costs, priced, lambda tier: 8192, {}, 0, 64, 16).best() <= len(priced)
    CostsFile(directory, costs, ABOUT).save()
    json.dumps(json.loads((directory / COSTS_NAME).read_text()), allow_nan=False)


@given(anything, st.sampled_from(["", "prefills", "tiers", "about", "disk", "version"]))
def test_whatever_is_in_it_does_no_harm(tmp_path_factory: pytest.TempPathFactory, value: Any, key: str) -> None:
    directory = tmp_path_factory.mktemp("any")
    CostsFile(directory, learnt(), ABOUT).save()
    content = json.loads((directory / COSTS_NAME).read_text())
    of_use(directory, {**content, key: value} if key else value)


@pytest.mark.parametrize("odd", [1 << 50, 1e15, 0, 1e29, 1e-300, 5e-324, -1, math.inf, math.nan, None])
def test_figures_that_nobody_measured_do_no_harm(tmp_path: Path, odd: float | None) -> None:
    """In each place of a row, and as one column more. There are as many rows as are believed."""
    CostsFile(tmp_path, learnt(), ABOUT).save()
    content = json.loads((tmp_path / COSTS_NAME).read_text())
    for name, row in (("prefills", [1000, 5e5, 1, 0.1]), ("tiers", [1 << 20, 1, 0.1])):
        for changed in ([*row[:at], odd, *row[at + more :]] for at in range(len(row)) for more in (0, 1)):
            rows = [[changed[:-1], changed[-1]]] * 64
            of_use(tmp_path, content | {name: rows if name == "prefills" else {"ssd": rows, "cpu": rows}})


@pytest.mark.parametrize("what", ["link", "hard link", "directory", "pipe", "large", "garbage", "deep"])
def test_a_file_that_is_not_ours_is_left_out(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    path, other = tmp_path / COSTS_NAME, tmp_path / "other"
    CostsFile(tmp_path, learnt(), ABOUT).save()
    path.rename(other)
    if what == "link":
        path.symlink_to(other)
    elif what == "hard link":
        path.hardlink_to(other)
    elif what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_text({"large": " " * (2 << 20), "garbage": "{", "deep": "[" * 100_000}[what])
    kept = other.read_bytes()
    costs = restored(tmp_path)
    assert not costs.prefill.observations
    assert "is left out" in caplog.text
    CostsFile(tmp_path, learnt(), ABOUT).save()  # which writes beside what others have
    assert other.read_bytes() == kept


def test_what_a_kill_left_goes(tmp_path: Path) -> None:
    (tmp_path / f"{COSTS_NAME}.new").write_text("{")
    restored(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    costs = learnt()
    file = CostsFile(tmp_path / "gone", costs, ABOUT)
    file.save()
    file.save()
    assert caplog.text.count("cannot be written") == 1


def test_the_gate_of_the_next_engine_decides_at_once(open_host: Any) -> None:
    host, tokens = kept(open_host, 4, cpu=8, ssd=16, load={"gate": "enforcing"})
    for _ in range(4):
        drop_from(host.engine, "cpu")
        host.load(tokens)
        host.engine.observe_prefill(1 << 20, 0, 1e-6)  # to compute is nearly free
    host.engine.close()
    again = open_host(cpu=8, ssd=16, load={"gate": "enforcing"})
    found = again.engine.lookup(tokens)
    assert (found.tokens, found.declined) == (0, 16)
    hits = again.engine.gate.stats()["hits"]
    assert hits == {"loaded": 0, "cut": 0, "declined": 1, "explored": 0, "unmeasured": 0}
