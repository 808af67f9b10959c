"""`gdscache plan`: sizes that are known beforehand, limits, wear that adds up, curves, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gdscache import cli
from gdscache.commands.replay import tier_report
from gdscache.commands.replay.plan import SCHEMA, plan
from gdscache.commands.replay.plan_curve import CurveError, Demand, Point, plan_curve, rate_at, read_curve
from gdscache.commands.replay.plan_machine import BenchReportError, bench_rates
from gdscache.commands.replay.plan_model import Modeller, grid, hit_curve, thin
from gdscache.commands.replay.plan_rule import Limits, Rule, mean_of
from gdscache.commands.replay.simulate import infinite
from gdscache.commands.replay.tier_setup import Asked
from gdscache.commands.replay.workload import Workload, expand
from gdscache.errors import CapacityError, InvalidValueError
from gdscache.moves.clock import MachineModel
from tests.support.places import ROOT
from tests.support.traces import line, request, write

pytestmark = pytest.mark.suite

PAGE = 4096  # bytes
GEOMETRY = Asked(page_bytes=str(PAGE), eviction=("lru",))
MACHINE = MachineModel(ssd_read=1e9, ssd_write=1e9, link=10e9, prefill=1000.0)
WORKING_SET = 24  # pages


def loop(pages: int = WORKING_SET, rounds: int = 8, fresh: int = 1) -> tuple[Workload, list[float]]:
    """Prompts of one page each, over and over, with pages among them that come once. A request a second."""
    new = itertools.count(1000)
    prompts: list[list[int]] = []
    for _ in range(rounds):
        for page in range(pages):
            prompts.append([page])
            if page % 8 == 0:
                prompts += [[next(new)] for _ in range(fresh)]
    return of(prompts)


def tree(seed: int = 1, requests: int = 120) -> tuple[Workload, list[float]]:
    """Prompts that share prefixes: a popular page in front, then a Zipf-like choice of branches of up to 12 pages."""
    draw = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(requests):
        branch = int(80 * draw.random() ** 3)
        path = [0, *(branch * 100 + i for i in range(draw.randint(2, 12)))]
        prompts.append([ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))])
    return of(prompts)


def of(prompts: Sequence[Sequence[int]]) -> tuple[Workload, list[float]]:
    return expand([request(blocks) for blocks in prompts], partial=False), [float(i) for i in range(len(prompts))]


NO_LIMITS, BY_DEFAULT = Limits(), Rule()


def planned(
    work: tuple[Workload, list[float]], limits: Limits = NO_LIMITS, rule: Rule = BY_DEFAULT, **options: Any
) -> dict[str, Any]:
    machine = options.pop("machine", MACHINE)
    asked = options.pop("asked", GEOMETRY)
    report = plan(*work, asked, machine, limits, rule, points=options.pop("points", 3), **options)
    assert report["problems"] == []
    return report


# -- what is recommended -------------------------------------------------------------------------------------------


def test_the_knee_of_a_loop_is_its_working_set() -> None:
    """LRU hits nothing of a loop that is larger than itself; the pages that come once need a little room beside it."""
    work, _ = loop()
    sample = thin(work, 1)
    curve = hit_curve(work, sample, "lru", PAGE, 8, 0.05)
    once = len(range(0, WORKING_SET, 8))
    assert WORKING_SET <= curve.knee["capacity_pages"] <= (WORKING_SET + once) * 1.06
    below = [row for row in curve.rows if row["capacity_pages"] < WORKING_SET]
    assert below
    assert all(row["hit_rate"] < 0.05 for row in below)


def test_the_pool_that_is_recommended_for_a_loop_is_its_working_set() -> None:
    report = planned(loop(), Limits(ssd=0))
    chosen = report["recommended"]
    assert chosen["ssd_bytes"] == 0
    assert WORKING_SET <= chosen["cpu_pages"] <= 1.3 * (WORKING_SET + 3)
    assert report["met"]
    assert [bound["what"] for bound in report["binds"]] == ["traffic"]
    assert mean_of(chosen) <= report["target_seconds"] <= 1.051 * mean_of(report["infinite"])
    assert chosen["cpu_bytes"] == chosen["cpu_pages"] * PAGE


def test_a_loop_larger_than_the_host_budget_goes_to_the_ssd() -> None:
    report = planned(loop(), Limits(cpu=8 * PAGE))
    chosen = report["recommended"]
    assert chosen["cpu_pages"] <= 8
    assert chosen["ssd_pages"] >= WORKING_SET
    assert report["met"]
    alone = planned(loop(), Limits(cpu=8 * PAGE, ssd=0))
    assert not alone["met"]
    assert alone["recommended"]["ssd_pages"] == 0
    assert mean_of(alone["recommended"]) > 2 * mean_of(chosen)
    assert "cpu_budget" in [bound["what"] for bound in alone["binds"]]


def test_host_memory_that_costs_no_more_than_the_ssd_is_taken_instead_of_it() -> None:
    dear, cheap = planned(loop(rounds=6)), planned(loop(rounds=6), rule=Rule(host_price=0.5))
    assert dear["recommended"]["ssd_pages"] > 0
    assert cheap["recommended"]["ssd_pages"] == 0


def test_no_other_candidate_passes_at_less_cost() -> None:
    rule = Rule(within=0.1, host_price=5)
    report = planned(tree(), rule=rule)
    chosen = report["recommended"]
    for row in report["candidates"]:
        if row["within_limits"] and mean_of(row) <= report["target_seconds"]:
            assert rule.cost(chosen) <= rule.cost(row)


@pytest.mark.parametrize(("cpu", "ssd"), [(30, 60), (7, 1000), (5, 0)])
def test_budgets_are_kept(cpu: int, ssd: int) -> None:
    report = planned(tree(), Limits(cpu=cpu * PAGE + 17, ssd=ssd * PAGE + (17 if ssd else 0)))
    for row in (*report["candidates"], report["recommended"]):
        assert 0 < row["cpu_bytes"] <= cpu * PAGE
        assert row["ssd_bytes"] <= ssd * PAGE
        assert not row["ssd_bytes"] or row["ssd_pages"] > row["cpu_pages"]


def test_more_capacity_hits_no_less_and_answers_no_later() -> None:
    report = planned(tree(), Limits(ssd=0), points=4)
    rates = [row["hit_rate"] for row in report["curve"]]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert all(row["hit_rate"] <= row["optimum_hit_rate"] + 1e-9 for row in report["curve"])
    assert rates[-1] == pytest.approx(report["infinite"]["hit_rate"])
    pools = [row for row in report["candidates"] if not row["ssd_pages"]]
    pools.sort(key=lambda row: row["cpu_pages"])
    for less, more in itertools.pairwise(pools):
        assert less["hit_rate"] <= more["hit_rate"] + 0.02
        assert mean_of(more) <= mean_of(less) * 1.02


def test_a_target_takes_the_place_of_within() -> None:
    usual = planned(tree(), Limits(ssd=0))
    best = mean_of(usual["infinite"])
    loose, tight = (planned(tree(), Limits(ssd=0, first_token=best * n)) for n in (2, 0.5))
    assert loose["met"]
    assert mean_of(loose["recommended"]) <= best * 2
    assert loose["recommended"]["cpu_bytes"] <= usual["recommended"]["cpu_bytes"]
    assert not tight["met"]
    assert [bound["what"] for bound in tight["binds"]] == ["target"]


def test_an_ssd_that_is_slower_than_the_prefill_is_said_and_not_taken() -> None:
    slow = dataclasses.replace(MACHINE, ssd_read=100.0)  # 8 bytes a token: 12.5 tokens a second
    report = planned(loop(), Limits(cpu=8 * PAGE), machine=slow)
    assert report["recommended"]["ssd_pages"] == 0
    assert "ssd_read" in [bound["what"] for bound in report["binds"]]


def test_an_ssd_that_is_too_slow_for_what_it_is_offered_is_said() -> None:
    slow = dataclasses.replace(MACHINE, ssd_write=PAGE / 100)
    asked = dataclasses.replace(GEOMETRY, sets=(*GEOMETRY.sets, f"store.queue={4 * PAGE}"))
    report = planned(loop(), Limits(cpu=8 * PAGE), machine=slow, asked=asked)
    assert "ssd_write" in [bound["what"] for bound in report["binds"]]
    usual = planned(loop(), Limits(cpu=8 * PAGE))
    assert "ssd_write" not in [bound["what"] for bound in usual["binds"]]


# -- wear ----------------------------------------------------------------------------------------------------------


def test_wear_is_that_of_the_simulation() -> None:
    work, times = loop()
    report = planned((work, times), Limits(cpu=8 * PAGE))
    chosen = report["recommended"]
    setup = Modeller(work, times, GEOMETRY, MACHINE, 1).setup(chosen["cpu_pages"], chosen["ssd_pages"])
    found = tier_report.simulate(work, times, setup, MACHINE)
    assert chosen["ssd_written_bytes"] == found["ssd"]["written_bytes"] > 0
    assert chosen["ssd_written_bytes"] == found["tiers"]["ssd"]["stored_pages"] * PAGE
    span = max(found["virtual_seconds"], times[-1])
    assert chosen["ssd_written_bytes_per_day"] == pytest.approx(chosen["ssd_written_bytes"] * 86_400 / span)
    assert chosen["drive_writes_per_day"] == pytest.approx(found["ssd"]["drive_writes_per_day"])
    for name in ("hit_rate", "token_hit_rate", "first_token_seconds"):
        assert chosen[name] == pytest.approx(found[name])
    assert chosen["no_cache_first_token_seconds"] == pytest.approx(found["first_token_seconds_no_cache"])


def test_a_limit_of_wear_is_kept_and_says_that_it_binds() -> None:
    free = planned(loop(), Limits(cpu=8 * PAGE), points=2)
    written = free["recommended"]["ssd_written_bytes_per_day"]
    half = planned(loop(), Limits(cpu=8 * PAGE, written=written / 1.5), points=2)
    assert half["recommended"]["ssd_written_bytes_per_day"] <= written / 1.5
    assert {row["admission"] for row in half["candidates"] if row["ssd_pages"]} == {"all", "second_offer", "tinylfu"}
    none = planned(loop(), Limits(cpu=8 * PAGE, written=PAGE), points=2)
    assert none["recommended"]["ssd_pages"] == 0
    assert "wear" in [bound["what"] for bound in none["binds"]]


def test_without_times_there_is_no_wear_and_no_limit_of_it() -> None:
    work, times = of([[0]] * 3 + [[1]] * 3)
    instant = MachineModel(prefill=math.inf)
    at_once = [0.0] * len(times)
    with pytest.raises(InvalidValueError, match="takes no time"):
        planned((work, at_once), Limits(written=1e9), machine=instant)


# -- thinning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_thinned_trace_is_a_tree_of_prefixes_and_hits_as_often(every: int) -> None:
    work, _ = tree(requests=2000)
    sample = thin(work, every)
    small = sample.workload
    above: dict[int, int | None] = {}
    for pages, _ in small.prompts:
        for page, before in zip(pages, (None, *pages), strict=False):
            assert above.setdefault(page, before) == before
            parent = small.namespace if before is None else small.names[before].key
            assert small.names[page].parent == parent
    assert sample.hot_pages >= 1  # the one in front of every prompt
    assert small.references == pytest.approx((work.references - sample.hot_uses) / every, rel=0.15)
    whole = infinite(work).hits / work.references
    assert sample.hit_rate(infinite(small).hits, small.references) == pytest.approx(whole, abs=0.02)


def test_what_a_thinned_search_finds_is_checked_with_the_whole_trace() -> None:
    work = tree(requests=400)
    small = planned(work, Limits(ssd=0), every=3, points=2)
    said, chosen = small["sample"], small["recommended"]
    assert said["every"] == 3
    assert abs(said["hit_rate_error"]) < 0.05
    assert said["hit_rate"] - said["hit_rate_error"] == pytest.approx(chosen["hit_rate"])
    modeller = Modeller(*work, GEOMETRY, MACHINE, 1)
    assert chosen["hit_rate"] == modeller.row(chosen["cpu_pages"], chosen["ssd_pages"])["hit_rate"]


def test_the_grid_ends_at_the_budget() -> None:
    assert grid(100, 4, None) == [12, 25, 50, 100]
    assert grid(100, 4, 60) == [12, 25, 50, 60]
    assert grid(100, 4, 5) == [5]
    assert grid(100, 4, 0) == []
    assert grid(1, 4, None) == [1]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_budget_without_room_for_a_page_is_refused() -> None:
    for limits, option in ((Limits(cpu=PAGE - 1), "--cpu-budget"), (Limits(ssd=PAGE - 1), "--ssd-budget")):
        with pytest.raises(CapacityError, match=f"{option} is 4095 bytes and a page 4096 bytes"):
            planned(loop(), limits)


@pytest.mark.parametrize("limits", [Limits(written=0), Limits(drive_writes=-1), Limits(first_token=0)])
def test_a_limit_that_is_none_is_refused(limits: Limits) -> None:
    with pytest.raises(InvalidValueError):
        planned(loop(), limits)


@pytest.mark.parametrize("rule", [{"within": -0.1}, {"host_price": 0}, {"within": math.nan}])
def test_a_rule_without_sense_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError):
        Rule(**rule)


# -- from a curve --------------------------------------------------------------------------------------------------


POINTS = [Point(100, 0.1), Point(400, 0.5), Point(1600, 0.52)]
DEMAND = Demand(1000.0, 2.0)
FAST = MachineModel(ssd_read=1e6, link=1e7, prefill=100.0)


def test_a_curve_is_read_between_its_points() -> None:
    assert rate_at(POINTS, 50) == pytest.approx(0.05)
    assert rate_at(POINTS, 200) == pytest.approx(0.3)  # half way, by the logarithm
    assert [rate_at(POINTS, size) for size in (100, 400, 1600, 99_999)] == [0.1, 0.5, 0.52, 0.52]


def test_a_plan_from_a_curve_is_its_formula() -> None:
    report = plan_curve(POINTS, 10.0, DEMAND, FAST, Limits(cpu=100), Rule(within=0.05))
    chosen = report["recommended"]
    assert chosen["cpu_bytes"] <= 100
    assert 300 < chosen["ssd_bytes"] <= 400
    cpu, ssd = (rate_at(POINTS, chosen[f"{name}_bytes"]) for name in ("cpu", "ssd"))
    mean = 1000 * ((1 - ssd) / 100 + cpu * 10 / 1e7 + (ssd - cpu) * 10 / 1e6)
    assert mean_of(chosen) == pytest.approx(mean)
    assert chosen["ssd_written_bytes_per_day"] == pytest.approx((1 - ssd) * 1000 * 2 * 10 * 86_400)
    assert report["no_cache_first_token_seconds"]["mean"] == 10.0
    assert 300 < report["knee"]["capacity_bytes"] <= 400
    assert report["met"]


def test_limits_of_a_plan_from_a_curve() -> None:
    with pytest.raises(InvalidValueError, match="--requests-per-second"):
        plan_curve(POINTS, 10.0, Demand(1000.0, None), FAST, Limits(written=1.0), Rule())
    report = plan_curve(POINTS, 10.0, DEMAND, FAST, Limits(cpu=100, written=1.0), Rule())
    assert report["recommended"]["ssd_bytes"] == 0
    assert {"cpu_budget", "wear"} <= {bound["what"] for bound in report["binds"]}


def test_curves_are_read_from_lines_and_from_plans(tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    file.write_text("capacity,hit rate\n# measured\n4KiB, 30%\n1KiB,0.1\n\n")
    assert read_curve(file) == [Point(1024, 0.1), Point(4096, pytest.approx(0.3))]
    file.write_text(json.dumps(planned(tree(), Limits(ssd=0), points=2)))
    points = read_curve(file)
    assert len(points) > 3
    assert points[-1].rate > 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no point"),
        ("1KiB,0.1\n1KiB,0.2", "twice"),
        ("1KiB,0.3\n2KiB,0.2", "less than"),
        ("1KiB,31", "a hit rate of 31"),
        ("1KiB,nan", "a hit rate of nan"),
        ("1KiB,0.1\nx,0.2", "curve.csv:2"),
        ("1KiB,0.1,3", "curve.csv:1"),
        ("{}", "no plan"),
    ],
)
def test_what_is_no_curve_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "curve.csv"
    file.write_text(text)
    with pytest.raises(CurveError, match=said):
        read_curve(file)


# -- rates of a machine --------------------------------------------------------------------------------------------


def test_rates_come_from_reports_of_benches() -> None:
    results = ROOT / "docs" / "results"
    rates = bench_rates([results / "io-h200.json", results / "copy-h200.json"])
    io = json.loads((results / "io-h200.json").read_text())
    assert rates["ssd_read"] == io["ceilings"]["read"]["gb_per_second"]["median"] * 1e9
    assert rates["ssd_write"] == io["ceilings"]["write"]["gb_per_second"]["median"] * 1e9
    assert 20e9 < rates["link"] < 60e9


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "gdscache.bench.index/1"}', '{"schema": "gdscache.bench.io/1"}']
)
def test_other_files_have_no_rates(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(BenchReportError, match=r"bench\.json"):
        bench_rates([file])


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gdscache", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [line([page], timestamp=1000 * (8 * n + page)) for n in range(6) for page in range(8)]
    return write(tmp_path / "trace.jsonl", *lines)


RATE = ("--prefill-tokens-per-second", "1000", "--token-bytes", "8", "--points", "3")


def test_the_command_prints_a_plan(command: Callable[..., tuple[int, str, str]], trace: Path) -> None:
    status, out, err = command(trace, *RATE)
    assert (status, err) == (0, "")
    for word in ("CPU pool", "SSD", "hits", "TTFT mean", "TTFT p99", "SSD wear", "rule", "binds", "knee", "infinite"):
        assert word in out
    assert len(out.splitlines()) < 50


def test_the_json_of_a_plan(command: Callable[..., tuple[int, str, str]], trace: Path, tmp_path: Path) -> None:
    status, out, err = command(trace, *RATE, "--json", "--cpu-budget", "16KiB", "--endurance-tbw", "1", "--years", "2")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["schema"] == SCHEMA
    assert report["mode"] == "trace"
    assert report["model"] == {"page_tokens": 512, "page_bytes": PAGE, "token_bytes": 8.0}
    assert report["limits"]["written"] == pytest.approx(1e12 / 730)
    assert report["limits"]["cpu"] == 16384
    chosen = report["recommended"]
    assert chosen["cpu_bytes"] <= 16384
    assert {"mean", "p50", "p90", "p99"} == set(chosen["first_token_seconds"])
    keys = {"cpu_bytes", "ssd_bytes", "hit_rate", "token_hit_rate", "ssd_written_bytes_per_day", "within_limits"}
    assert keys <= set(chosen)
    assert all(keys <= set(row) for row in report["candidates"])
    for key in ("traces", "machine", "rule", "infinite", "binds", "knee", "curve", "target_seconds", "met"):
        assert key in report
    file = tmp_path / "plan.csv"
    file.write_text("8KiB,0.1\n32KiB,0.8\n")
    status, out, err = command("--curve", file, *RATE, "--prompt-tokens", "512", "--json")
    assert (status, err) == (0, "")
    other = json.loads(out)
    assert (other["schema"], other["mode"]) == (SCHEMA, "curve")
    shared = set(report) - {"traces", "sample", "other_settings", "problems", "seconds"}
    assert shared <= set(other)


def test_a_plan_is_drawn(command: Callable[..., tuple[int, str, str]], trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib")
    status, _, err = command(trace, *RATE, "--plot", tmp_path / "plan.svg")
    assert (status, err) == (0, "")
    drawn = (tmp_path / "plan.svg").read_text()
    for text in ("recommended", "optimum", "CPU pool alone", "and an SSD", "no cache"):
        assert f"<!-- {text}" in drawn or text in drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one source"),
        (("TRACE",), "--prefill-tokens-per-second"),
        (("TRACE", *RATE, "--curve", "x.csv"), "one source"),
        (("TRACE", *RATE, "--cpu-budget", "1KiB"), "--cpu-budget is 1024 bytes and a page 4096 bytes"),
        (("TRACE", *RATE, "--cpu-budget", "much"), "--cpu-budget 'much'"),
        (("TRACE", *RATE, "--speed", "0"), "--speed"),
        (("TRACE", *RATE, "--years", "0", "--endurance-tbw", "1"), "--years"),
        (("EMPTY", *RATE), "no block in 0 requests"),
        (("SHORT", *RATE), "no prompt of the trace has a full page"),
        (("--curve", "x.csv", *RATE), "--prompt-tokens"),
    ],
)
def test_the_command_refuses(
    command: Callable[..., tuple[int, str, str]], trace: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    write(tmp_path / "short.jsonl", line([1], 100))
    files = {"TRACE": trace, "EMPTY": tmp_path / "empty.jsonl", "SHORT": tmp_path / "short.jsonl"}
    status, out, err = command(*(files.get(argument, argument) for argument in arguments))
    assert (status, out) == (2, "")
    assert said in err
    assert "hint: " in err
