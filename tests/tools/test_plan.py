"""`gdscache plan`: sizes that are known beforehand, limits, wear that adds up, and the command."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gdscache.commands.replay import report as reports
from gdscache.commands.replay.clock import MachineModel
from gdscache.commands.replay.plan import (
    HOST_PRICE,
    SCHEMA,
    Limits,
    cost,
    grid,
    mean_of,
    packing,
    plan,
)
from gdscache.commands.replay.report import DRIVE_WRITES, lifetime
from gdscache.commands.replay.setup import base_of, config_of
from gdscache.commands.replay.trace import Workload, expand
from gdscache.config.pools import PLAIN_PARTS
from gdscache.errors import CapacityError, InvalidValueError
from tests.support.replays import adds_up, make
from tests.support.traces import line, request, write

pytestmark = pytest.mark.suite

PAGE = 4096  # bytes
TINY = make().dump()
SETS = ("eviction=lru",)
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
    return expand([request(blocks) for blocks in prompts]), [float(i) for i in range(len(prompts))]


NO_LIMITS, SMALL_POOL = Limits(), Limits(cpu=8 * PAGE)


def planned(work: tuple[Workload, list[float]], limits: Limits = NO_LIMITS, **options: Any) -> dict[str, Any]:
    machine = options.pop("machine", MACHINE)
    sets = options.pop("sets", SETS)
    report = plan(*work, TINY, sets, machine, limits, points=options.pop("points", 3), **options)
    assert all(map(adds_up, report["candidates"]))
    return report


@functools.cache
def looped(limits: Limits = SMALL_POOL, points: int = 3) -> dict[str, Any]:
    """A plan for the plain loop, which several tests look at."""
    return planned(loop(), limits, points=points)


def test_the_pool_that_is_recommended_for_a_loop_is_its_working_set() -> None:
    report = looped(Limits(ssd=0))
    chosen = report["recommended"]
    assert chosen["ssd_bytes"] == 0
    assert WORKING_SET <= chosen["cpu_bytes"] // PAGE <= 1.3 * (WORKING_SET + 3)
    assert report["met"]
    assert report["binds"] == ["traffic"]
    assert mean_of(chosen) <= report["target_seconds"] <= 1.051 * mean_of(report["infinite"])
    assert chosen["cpu_bytes"] == chosen["tiers"]["cpu"]["capacity_bytes"]


def test_a_loop_larger_than_the_host_budget_goes_to_the_ssd() -> None:
    report = looped()
    chosen = report["recommended"]
    assert chosen["cpu_bytes"] <= 8 * PAGE
    assert chosen["ssd_bytes"] >= WORKING_SET * PAGE
    assert report["met"]
    alone = looped(Limits(cpu=8 * PAGE, ssd=0))
    assert not alone["met"]
    assert alone["recommended"]["ssd_bytes"] == 0
    assert mean_of(alone["recommended"]) > 2 * mean_of(chosen)
    assert alone["binds"] == ["cpu_budget"]


def test_no_other_candidate_passes_at_less_cost() -> None:
    report = planned(tree())
    chosen = report["recommended"]
    assert chosen["ssd_bytes"] > 0  # host memory is dear
    assert cost(chosen) == HOST_PRICE * chosen["cpu_bytes"] + chosen["ssd_bytes"]
    for row in report["candidates"]:
        if row["within_limits"] and mean_of(row) <= report["target_seconds"]:
            assert cost(chosen) <= cost(row)


@pytest.mark.parametrize(("cpu", "ssd"), [(30, 60), (7, 1000), (5, 0)])
def test_budgets_are_kept(cpu: int, ssd: int) -> None:
    report = planned(tree(), Limits(cpu=cpu * PAGE + 17, ssd=ssd * PAGE + (17 if ssd else 0)))
    for row in (*report["candidates"], report["recommended"]):
        assert 0 < row["cpu_bytes"] <= cpu * PAGE
        assert row["ssd_bytes"] <= ssd * PAGE
        assert not row["ssd_bytes"] or row["ssd_bytes"] > row["cpu_bytes"]


def test_more_capacity_hits_no_less_and_answers_no_later() -> None:
    report = planned(tree(), Limits(ssd=0), points=4)
    pools = [row for row in report["candidates"] if not row["ssd_bytes"]]
    pools.sort(key=lambda row: row["cpu_bytes"])
    assert pools[0]["hit_rate"] < pools[-1]["hit_rate"]
    forever = report["infinite"]["hit_rate"]  # without time: a page that is being moved is no hit
    assert forever - 0.02 < pools[-1]["hit_rate"] <= forever
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
    assert tight["binds"] == ["target"]


def test_an_ssd_that_is_slower_than_the_prefill_is_said_and_not_taken() -> None:
    slow = dataclasses.replace(MACHINE, ssd_read=100.0)  # 8 bytes a token: 12.5 tokens a second
    report = planned(loop(), SMALL_POOL, machine=slow)
    assert report["recommended"]["ssd_bytes"] == 0
    assert "ssd_read" in report["binds"]
    assert "ssd_read" not in planned(loop(), Limits(ssd=0), points=1, machine=slow)["binds"]


def test_a_full_queue_is_said() -> None:
    slow = dataclasses.replace(MACHINE, ssd_write=PAGE / 4)
    sets = ("eviction=lru", f"store.queue={4 * PAGE}", "store.admission=all")
    report = planned(loop(), SMALL_POOL, machine=slow, sets=sets)
    assert report["recommended"]["ssd"]["refused_pages"]["queue_full"] > 0
    assert "ssd_write" in report["binds"]
    assert not {"queue", "ssd_write"} & set(looped()["binds"])


def test_wear_is_that_of_the_simulation() -> None:
    work, times = loop()
    chosen = looped()["recommended"]
    sizes = [f"{tier}.capacity={chosen[f'{tier}_bytes']}" for tier in ("cpu", "ssd")]
    found = reports.replay(work, times, config_of(TINY, [*SETS, *sizes]), MACHINE)
    assert {name: chosen[name] for name in found} == found
    ssd = found["ssd"]
    assert ssd["written_bytes"] == found["tiers"]["ssd"]["stored_pages"] * PAGE > 0
    assert ssd["written_bytes_per_day"] == pytest.approx(ssd["written_bytes"] * 86_400 / times[-1])
    assert ssd["drive_writes_per_day"] == pytest.approx(ssd["written_bytes_per_day"] / chosen["ssd_bytes"])


def test_a_plan_that_wears_a_drive_out_says_so() -> None:
    work, times = loop()
    hot = looped(points=2)
    assert hot["recommended"]["ssd"]["drive_writes_per_day"] > DRIVE_WRITES
    [warning] = hot["warnings"]
    assert f"wear the SSD out in {lifetime(hot['recommended']['ssd']['drive_writes_per_day'])}" in warning
    assert (lifetime(0.5), lifetime(5.0), lifetime(1826.25)) == ("10.0 years", "1.0 years", "1.0 days")
    assert lifetime(43830) == "1.0 hours"
    assert "--writes-a-day" in warning
    cool = planned((work, [1e6 * at for at in times]), SMALL_POOL, points=2)
    assert cool["recommended"]["ssd"]["drive_writes_per_day"] <= DRIVE_WRITES
    assert cool["warnings"] == looped(Limits(ssd=0))["warnings"] == []


def test_a_limit_of_wear_is_kept_and_says_that_it_binds() -> None:
    free = looped(points=2)
    written = free["recommended"]["ssd"]["written_bytes_per_day"]
    half = planned(loop(), Limits(cpu=8 * PAGE, written=int(written / 1.5)), points=2)
    assert half["recommended"]["ssd"]["written_bytes_per_day"] <= written / 1.5
    assert {row["admission"] for row in half["candidates"] if row["ssd_bytes"]} == {"all", "second_offer", "tinylfu"}
    none = planned(loop(), Limits(cpu=8 * PAGE, written=PAGE), points=2)
    assert none["recommended"]["ssd_bytes"] == 0
    assert "wear" in none["binds"]
    for fixed in ("store.admission=tinylfu", "store.admission = tinylfu", "store={admission: tinylfu}"):
        some = planned(loop(), Limits(cpu=8 * PAGE, written=int(written)), points=2, sets=("eviction=lru", fixed))
        assert {row["admission"] for row in some["candidates"] if row["ssd_bytes"]} == {"tinylfu"}


@pytest.mark.parametrize("model", ["gemma-3-4b", "gpt-oss-20b", "qwen3-next-80b", "lfm2-1.2b"])
@pytest.mark.parametrize("pack", ["off", "on"])
def test_infinite_tiers_hold_the_pages_of_all_groups(model: str, pack: str) -> None:
    """The same hits as in more memory than all pages take. The grid's sizes without room for a page are left out."""
    base, sets = base_of(None, model), [f"model.pack={pack}"]
    work, times = of([[n, *range(100 + 10 * n, 106 + 10 * n)] for n in (*range(8), *range(8))])
    found = plan(work, times, base, sets, MACHINE, NO_LIMITS, points=5)
    rich = reports.replay(work, times, config_of(base, [*sets, "cpu.capacity=512GiB"]), MACHINE)
    assert found["infinite"]["first_token_seconds"] == rich["first_token_seconds"]
    assert rich["hit_tokens"] > 0
    roomy = [row for row in found["candidates"] if row["token_hit_rate"] == rich["token_hit_rate"]]
    assert {bool(row["ssd_bytes"]) for row in roomy} == {False, True}, "an SSD that holds all pages is tried, too"


def test_sizes_without_room_for_a_page_of_each_kind_are_left_out() -> None:
    work = of([[0], [0], [1]])
    for sets in (["model.pack=on"], []):
        base = base_of(None, "llama-3-8b" if sets else "qwen3-next-80b")
        found = plan(*work, base, sets, MACHINE, NO_LIMITS)
        assert found["met"]
        assert len({row["cpu_bytes"] for row in found["candidates"]}) > 1
        page = found["model"]["page_bytes"]
        with pytest.raises(CapacityError, match=r"cpu\.capacity"):
            plan(*work, base, sets, MACHINE, Limits(cpu=page))


def test_without_times_there_is_no_wear_and_no_limit_of_it() -> None:
    work, times = of([[0]] * 3 + [[1]] * 3)
    instant = MachineModel(prefill=math.inf)
    at_once = [0.0] * len(times)
    with pytest.raises(InvalidValueError, match="takes no time"):
        planned((work, at_once), Limits(written=10**9), machine=instant)


def test_the_grid_ends_at_the_budget() -> None:
    assert grid(100, 4, None) == [12, 25, 50, 100]
    assert grid(100, 4, 60) == [12, 25, 50, 60]
    assert grid(100, 4, 5) == [5]
    assert grid(100, 4, 0) == []
    assert grid(1, 4, None) == [1]


def test_a_budget_without_room_for_a_page_is_refused() -> None:
    for limits, option in ((Limits(cpu=PAGE - 1), "--cpu-budget"), (Limits(ssd=PAGE - 1), "--ssd-budget")):
        with pytest.raises(CapacityError, match=f"{option} is 4095 bytes and a page 4096 bytes"):
            planned(loop(), limits)


@pytest.mark.parametrize("limits", [Limits(written=0), Limits(first_token=0), Limits(first_token=math.nan)])
def test_a_limit_that_is_none_is_refused(limits: Limits) -> None:
    with pytest.raises(InvalidValueError):
        planned(loop(), limits)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [line([page], timestamp=1000 * (4 * n + page)) for n in range(6) for page in range(4)]
    return write(tmp_path / "trace.jsonl", *lines)


@pytest.fixture
def options(tmp_path: Path) -> tuple[str | Path, ...]:
    """Pages of 512 tokens, 8 bytes each."""
    plane = "{name: rows, shape: [8], dtype: uint8}"
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{name: m, layers: 1, page_tokens: 512, planes: [{plane}]}}\n")
    return "--prefill-tokens-per-second", "1000", "--config", config


def test_the_command_prints_a_plan(gdscache, trace: Path, options: tuple[str, ...]) -> None:
    status, out, err = gdscache("plan", trace, *options)
    assert (status, err) == (0, "")
    for word in ("CPU pool", "SSD", "tokens hit", "TTFT mean", "TTFT p99", "target", "limited by", "infinite"):
        assert word in out
    assert len(out.splitlines()) < 50


def test_a_policy_that_needs_a_cpu_tier_has_one(gdscache, trace: Path, options: tuple[str, ...]) -> None:
    wanted = ("--set", "store.write_policy=write_back", "--writes-a-day", "5TB", "--json")
    status, out, err = gdscache("plan", trace, *options, *wanted)
    assert (status, err) == (0, "")
    assert all(row["write_policy"] == "write_back" for row in json.loads(out)["candidates"] if row["ssd_bytes"])


def test_the_json_of_a_plan(gdscache, trace: Path, options: tuple[str, ...]) -> None:
    limits = ("--cpu-budget", "16KiB", "--ssd-budget", "1MiB", "--writes-a-day", "1GB")
    status, out, err = gdscache("plan", trace, *options, *limits, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["schema"] == SCHEMA
    assert report["model"] == {"page_tokens": 512, "page_bytes": PAGE, "token_bytes": 8.0, "packing": None}
    assert report["limits"] == {"cpu": 16384, "ssd": 1 << 20, "written": 10**9, "first_token": None}
    chosen = report["recommended"]
    assert chosen["cpu_bytes"] <= 16384
    assert {"mean", "p50", "p90", "p99"} == set(chosen["first_token_seconds"])
    keys = {"cpu_bytes", "ssd_bytes", "hit_rate", "token_hit_rate", "ssd", "within_limits"}
    assert keys <= set(chosen)
    assert all(keys <= set(row) for row in report["candidates"])
    for key in ("traces", "machine", "infinite", "binds", "warnings", "target_seconds", "met"):
        assert key in report


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no trace is named"),
        (("TRACE",), "--prefill-tokens-per-second"),
        (("TRACE", "OPTIONS", "--cpu-budget", "1KiB"), "--cpu-budget is 1024 bytes and a page 4096 bytes"),
        (("TRACE", "OPTIONS", "--set", "store.queue"), "has no value"),
        (("EMPTY", "OPTIONS"), "no block in 0 requests"),
        (("SHORT", "OPTIONS"), "no prompt of the trace has a full page"),
    ],
)
def test_the_command_refuses(
    gdscache, trace: Path, options: tuple[str, ...], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    write(tmp_path / "short.jsonl", line([1], 100))
    files = {"TRACE": [trace], "EMPTY": [tmp_path / "empty.jsonl"], "SHORT": [tmp_path / "short.jsonl"]}
    given = {**files, "OPTIONS": list(options)}
    status, out, err = gdscache("plan", *(part for argument in arguments for part in given.get(argument, [argument])))
    assert (status, out) == (2, "")
    assert said in err
    assert "hint: " in err


@pytest.mark.parametrize(("pack", "more"), [("off", 1.3), ("on", None)])
def test_packed_pages_fit_into_less(pack: str, more: float | None) -> None:
    base = base_of(None, "llama-3-8b")
    plain, packed = (config_of(base, ["cpu.capacity=1GiB", f"model.pack={one}"]) for one in ("off", pack))
    found = packing(packed)
    assert found == (None if more is None else pytest.approx(more * (1 - 1 / PLAIN_PARTS), abs=0.03))
    if more is None:
        pages = [1 / reports.page_bytes(config.model, 512) for config in (plain, packed)]
        assert pages[1] / pages[0] == pytest.approx(1.31, abs=0.02)
