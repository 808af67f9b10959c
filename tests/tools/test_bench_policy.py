"""`gdscache bench policy`: small, as people run it, and the rules by which the default is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.commands.bench import policy
from gdscache.commands.bench import policy_admission as admissions
from gdscache.commands.replay.synthetic import generate, write_trace
from gdscache.config import CpuConfig, GpuConfig, SsdConfig
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES
from gdscache.policies.admission import ADMISSIONS

pytestmark = pytest.mark.suite


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdscache", "bench", "policy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("policy")
    write_trace(path / "t.gz", generate("chat", 5, 200))
    done = run(
        *("--quick", "--trace", path / "t.gz", "--kind", "drift", "--policy", "s3fifo"),
        *("--json", path / "r.json", "--plot", path / "r.svg"),
    )
    assert done.returncode == 0, done.stderr
    assert "the SSD refuses pages" not in done.stderr
    assert "Index with" in done.stdout
    assert "MISSED: yes" in done.stdout or "met: no" in done.stdout
    for name in ("r.svg", "r-admission.svg"):
        assert (path / name).read_text().startswith("<?xml")
    found: dict[str, Any] = json.loads((path / "r.json").read_text())
    return found


def test_the_report_has_every_figure(report: dict[str, Any]) -> None:
    names = [
        "schema",
        "machine",
        "settings",
        "default",
        "traffic",
        "skipped",
        "eviction",
        "admission",
        "replay",
        "index",
    ]
    assert list(report) == names
    assert report["schema"] == "gdscache.bench.policy/1"
    assert report["default"] == policy.DEFAULT
    assert [part["traffic"] for part in report["traffic"]] == ["recorded", "drift"]
    assert report["skipped"] == []
    for part in report["traffic"]:
        assert [run["policy"] for run in part["runs"]] == [policy.DEFAULT, "s3fifo"] * 2
    assert [row["traffic"] for row in report["eviction"]] == ["recorded"] * 2 + ["drift"] * 2
    for row in report["eviction"]:
        assert row["met"] == (row["ratio"] >= row["target"])
        assert 0 < row["of_best"] <= 1
    assert [row["target"] for row in report["eviction"][2:]] == [policy.AT_LEAST_MADE_UP] * 2
    assert report["replay"]["met"]
    runs = report["admission"]["runs"]
    assert [run["label"] for run in runs[:4]] == [setting.label for setting in admissions.Plan.quick().settings]
    assert {(run["traffic"], run["eviction"]) for run in runs} == {("recorded", policy.DEFAULT)}
    assert len({run["ssd_pages"] for run in runs}) == 2
    for run in runs:
        assert run["hit_pages"] == run["cpu_hit_pages"] + run["ssd_hit_pages"]
        assert run["written_bytes"] == 64 * 1024 * 1024 * run["written_pages"] > 0
        assert run["refused_pages"] if run["admission"] != "all" else not run["refused_pages"]
        # Prompts are long beside tiers so small: some find no room, and what no tier takes is dropped.
        assert set(run["dropped_pages"]) <= {"ssd_full", *run["refused_pages"]}
    assert [row["traffic"] for row in report["admission"]["verdicts"]] == ["recorded"] * 2
    rows = report["index"]["rows"]
    assert [row["pages"] for row in rows] == report["settings"]["index_pages"]
    medians = [row["us_per_page"]["median"] for row in rows]
    assert report["index"]["flatness"]["ratio"] == pytest.approx(max(medians) / medians[0])
    assert "commit" in report["machine"]


def test_the_default_is_that_of_every_tier() -> None:
    defaults = {section.model_fields["eviction"].default for section in (GpuConfig, CpuConfig, SsdConfig)}
    assert defaults == {policy.DEFAULT}
    assert policy.DEFAULT in POLICIES


def part(ratio: float, percent: float, name: str = policy.RECORDED) -> dict[str, Any]:
    common = {"capacity_percent": percent, "capacity_pages": 10, "gap_closed": 0.1, "seconds": 1.0}
    runs = [
        {"policy": policy.DEFAULT, "of_plain_lru": ratio, "hit_pages": 50, **common},
        {"policy": "other", "of_plain_lru": 2.0, "hit_pages": 100, **common},
    ]
    return {"traffic": name, "runs": runs}


@pytest.mark.parametrize(
    ("ratio", "percent", "name", "least", "met"),
    [
        (1.15, 4.9999, policy.RECORDED, 1.16, False),
        (1.16, 5.0, policy.RECORDED, 1.16, True),
        (1.04, 9.9995, policy.RECORDED, 1.03, True),
        (0.999, 25.0, policy.RECORDED, 1.0, False),
        (0.999, 7.0, policy.RECORDED, 1.0, False),
        (0.991, 5.0, "chat", 0.99, True),
    ],
)
def test_what_the_default_has_to_reach(ratio: float, percent: float, name: str, least: float, met: bool) -> None:
    [row] = policy.verdicts([part(ratio, percent, name)])
    assert (row["target"], row["met"], row["of_best"]) == (least, met, 0.5)


def test_a_trace_that_is_not_there_is_skipped_with_its_cause(tmp_path: Path) -> None:
    settings = policy.Settings(
        traces=(tmp_path / "none.jsonl",), kinds=(), index_pages=(200,), index_prompts=5, repeat=1
    )
    found = policy.run(settings)
    assert found["traffic"] == []
    assert "none.jsonl: no such file" in found["skipped"][0]["why"]
    assert found["replay"] is None
    assert "no trace was given" in policy.run(policy.Settings(kinds=(), index_pages=()))["skipped"][0]["why"]


# -- admissions ------------------------------------------------------------------------------------------------------


def ran(
    label: str, hits: int, written: int, write: str = "write_through", size: int = 10, **more: object
) -> dict[str, Any]:
    """A row as `policy_admission.run` has it, before it is marked."""
    return {
        **{"traffic": "chat", "eviction": "lru", "ssd_pages": size, "ssd_percent": float(size), "label": label},
        **{"write_policy": write, "write_hits": 2, "admission": label, "admission_offers": 2, "default": False},
        **{"hit_pages": hits, "written_pages": written, **more},
    }


def test_the_frontier_is_what_nobody_beats_at_its_hits() -> None:
    rows = [
        ran("most", 100, 90),
        ran("worse", 90, 95),
        ran("less", 60, 30),
        ran("equal", 60, 30),
        ran("same hits", 60, 31),
        ran("same writes", 59, 30),
        ran("back", 100, 80, "write_back"),
        ran("most", 50, 99, size=20),
        ran("lru", 10, 99, eviction="lifetime"),
    ]
    admissions.mark(rows)
    assert [row["frontier"] for row in rows] == [False, False, True, True, False, False, True, True, True]
    alone = [row["frontier_of_admissions"] for row in rows]
    assert alone == [True, False, True, True, False, False, True, True, True]
    assert (rows[0]["least_label"], rows[0]["least_written_pages"]) == ("back", 80)
    assert (rows[1]["least_label"], rows[4]["least_label"]) == ("back", "less")
    assert rows[2]["least_label"] == "less"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["write_through", "write_back"]))))
def test_the_frontier_against_its_definition(figures: list[tuple[int, int, str]]) -> None:
    rows = [ran(str(i), hits, written, write) for i, (hits, written, write) in enumerate(figures)]
    admissions.mark(rows)
    for row, (hits, written, write) in zip(rows, figures, strict=True):

        def beaten(others: list[tuple[int, int, str]], hits: int = hits, written: int = written) -> bool:
            return any(h >= hits and w <= written and (h, w) != (hits, written) for h, w, _ in others)

        assert row["frontier"] is not beaten(figures)
        assert row["frontier_of_admissions"] is not beaten([f for f in figures if f[2] == write])
        assert row["least_written_pages"] == min(w for h, w, _ in figures if h >= hits)


def test_the_default_is_judged_beside_admissions_and_told_of_the_rest() -> None:
    rows = [ran("all", 50, 50, default=True), ran("tinylfu", 40, 20), ran("all, later", 55, 45, "write_back")]
    admissions.mark(rows)
    [row] = admissions.verdicts(rows)
    assert (row["met"], row["frontier"], row["least_label"]) == (True, False, "all, later")
    rows[1]["hit_pages"] = 51
    admissions.mark(rows)
    [row] = admissions.verdicts(rows)
    assert (row["met"], row["least_label"], row["least_written_pages"]) == (False, "tinylfu", 20)


def test_the_default_is_among_what_is_compared() -> None:
    assert admissions.DEFAULT in admissions.SETTINGS
    assert admissions.DEFAULT in admissions.Plan.quick().settings
    assert len(set(admissions.SETTINGS)) == len({setting.label for setting in admissions.SETTINGS}) == 16
    assert {setting.admission for setting in admissions.SETTINGS} == set(ADMISSIONS)
    kinds = admissions.Plan().kinds
    assert len(kinds) >= 2
    assert set(kinds) <= set(policy.Settings().kinds)


def test_unknown_names_are_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidValueError, match="--kind 'poems'"):
        policy.run(policy.Settings(kinds=("poems",)))
    with pytest.raises(InvalidValueError, match="--policy 'clock'"):
        policy.run(policy.Settings(policies=("clock",)))
