"""`gdscache top`: its rates are those of the engine, it changes nothing, and a screen of any width says all of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from gdscache.commands import top
from gdscache.disk import kept, status_page
from gdscache.disk.status_page import Queues, RankState, SlowLoad, Summary, TierState
from tests.support.helpers import WAIT, Host, make_config, prompt, until
from tests.support.hybrid import MODELS, HybridHost, hybrid_config
from tests.support.terminal import on_terminal

BYTES = 8192  # of an extent of the tests' models
Gdscache = Any


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "PERIOD_S", 0.1)


@pytest.fixture(params=["ssd", "no ssd"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    path, sections = tmp_path / "cache", {}
    if request.param == "no ssd":
        sections = {"status": {"path": str(path)}}
    opened = Host(make_config(None if sections else path, cpu=8, ssd=None if sections else 12, **sections))
    yield opened
    opened.engine.close()


def written(folder: Path, number: int, written: float, times: int = 1, pid: int = 4711, **changes: Any) -> None:
    """A page that tells of everything, with `times` the counts."""
    counts = {name: 0 for name in status_page.COUNTS if name[1]}
    counts |= {("lookups", "requests"): 10 * times, ("lookups", "pages"): 100 * times, ("hits", "cpu"): 40 * times}
    counts |= {("hits", "ssd"): 10 * times, ("loaded", "ssd"): 10 * times, ("stored", "cpu"): 20 * times}
    counts |= {("misses", "absent"): 50 * times, ("misses", "checksum"): 7, ("refused", "second_offer"): 30 * times}
    ranks = tuple(RankState(4000 + n, "stopped" if n == 2 else "running") for n in range(4))
    tiers = TierState("cpu", 8, 6, 5 * times), TierState("ssd", 12, 3, 0), TierState("archive", 50, 5, 0)
    told: dict[str, Any] = {
        "extent_bytes": BYTES, "evictions": 0, "late_requests": 0, "state": "running", "stopped": "", "counts": counts,
        "ranks": ranks,
        "latencies": {what: Summary(9, 0.0125, 0.25) for what in status_page.LATENCIES}, "tiers": tiers,
        "slowest": (SlowLoad("ssd", written - 60, 1.5, 3 << 30),), "groups": "full: all tokens, window: the last 1,024",
        "queues": Queues(3 << 20, 1 << 20, 12 << 20, 2, 5),
    } | changes  # fmt: skip
    folder.mkdir(exist_ok=True)
    figures = status_page.Figures(**told)
    page = status_page.Status(pid, "host", "vllm serve", 1.7e9, written, number, figures)
    (folder / "status").write_bytes(status_page.pack(page))


def two_looks(folders: Sequence[Path], **changes: Any) -> list[dict[str, Any]]:
    """What is said of pages that were written two seconds after one another."""
    now, engines = time.time(), top.watched([])
    for number in (1, 2):
        for folder in folders:
            written(folder, number, now - 4 + 2 * number, number, **changes)
        engines = engines or top.watched(folders)
        reports = [one.look() for one in engines]
    return reports


def test_rates_are_those_of_the_engine(host: Host, tmp_path: Path) -> None:
    [one] = top.watched([tmp_path / "cache"])
    until(lambda: "pid" in one.look(), "there is a page")
    host.keep(prompt(1, 3)).result(WAIT)
    host.engine.lookup(prompt(2, 2))
    assert host.load(prompt(1, 3)).tokens == 12

    def done() -> bool:
        found = one.look()
        return found["counts"]["loaded"]["cpu"] == 3 and found["rates"] is not None

    until(done, "the page has it")
    found = one.look()
    rates, seconds = found["rates"], found["rates"]["over_seconds"]
    assert rates["lookups"] * seconds == pytest.approx(2)
    assert rates["lookup_pages"] * seconds == pytest.approx(5)
    assert rates["stores"] * seconds == pytest.approx(1)
    assert rates["hit_rate"] == pytest.approx(3 / 5)
    assert rates["tiers"]["cpu"]["loaded_bytes"] * seconds == pytest.approx(3 * BYTES)
    assert rates["tiers"]["cpu"]["stored_bytes"] * seconds == pytest.approx(3 * BYTES)
    assert rates["causes"]["misses"]["absent"] * seconds == pytest.approx(2)
    assert found["tiers"][0] == {"name": "cpu", "slots": 8, "pages": 3, "evictions": 0, "extent_bytes": BYTES}
    assert [load["tier"] for load in found["slowest_loads"]] == ["cpu"]
    assert found["ranks"] == [{"rank": 0, "pid": os.getpid(), "state": "running"}]


@pytest.mark.parametrize(
    "names", [("gpu", "cpu", "ssd", "a_store_of_the_team", "a_store_of_the_others"), [f"tier {n}" for n in range(8)]]
)
def test_each_hit_counts_whatever_its_tier_is_called(tmp_path: Path, names: Sequence[str]) -> None:
    now, one = time.time(), top.watched([tmp_path])[0]
    for number in (1, 2):
        counts = {("lookups", "pages"): 120 * number} | {("hits", name): 120 // len(names) * number for name in names}
        tiers, slowest = tuple(TierState(name, 8, 6, 0) for name in names), (SlowLoad(names[3] * 99, now, 1.0, 1),)
        written(tmp_path, number, now - 4 + 2 * number, counts=counts, tiers=tiers, slowest=slowest)
        rates = one.look()["rates"]
    assert rates["hit_rate"] == pytest.approx(1)
    assert [of["hit_rate"] for of in rates["tiers"].values()] == [pytest.approx(1 / len(names))] * 5
    (load,) = one.look()["slowest_loads"]
    assert len(load["tier"]) <= 16


def test_a_page_of_an_engine_that_does_not_count_all_hits_has_no_rate_of_them(tmp_path: Path) -> None:
    """One of the same format, by an engine that was installed before."""
    now, one = time.time(), top.watched([tmp_path])[0]
    for number in (1, 2):
        written(tmp_path, number, now - 4 + 2 * number, number)
        page = status_page.read(tmp_path)
        assert isinstance(page, status_page.Status)
        counts = {name: n for name, n in page.figures.counts.items() if name != status_page.HITS}
        old = status_page._form().dump_json(
            dataclasses.replace(page, figures=dataclasses.replace(page.figures, counts=counts))
        )
        room = bytes(status_page.PAGE_BYTES - kept.HEAD_BYTES - len(old))
        (tmp_path / "status").write_bytes(kept.sealed(status_page.MAGIC, status_page.PAGE_FORMAT, old, room))
        rates = one.look()["rates"]
    assert rates["hit_rate"] is None
    assert rates["tiers"]["cpu"]["hit_rate"] == pytest.approx(0.4)


def test_rates_are_of_the_last_seconds_and_begin_anew_with_another_engine(tmp_path: Path) -> None:
    now = time.time()
    [one] = top.watched([tmp_path])
    for number in range(1, 20):
        written(tmp_path, number, now - 20 + number, number * number)
        found = one.look()
    assert found["rates"]["over_seconds"] == pytest.approx(5, abs=0.01)
    assert found["rates"]["lookups"] == pytest.approx(10 * (19 * 19 - 14 * 14) / 5, rel=0.01)
    written(tmp_path, 1, now, pid=4712)
    assert (one.look()["pid"], one.look()["rates"]) == (4712, None)


def test_a_page_that_is_late_gives_its_age_and_no_rates(
    tmp_path: Path, gdscache: Gdscache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "SECOND_PAGE_S", WAIT)
    now = time.time()
    [one] = top.watched([tmp_path])
    for number in (1, 2):
        written(tmp_path, number, now - 64 + 2 * number, number)
        found = one.look()
    assert (found["late"], found["rates"]) == (True, None)
    start = time.monotonic()
    status, said, _ = gdscache("top", tmp_path, "--once")
    assert time.monotonic() - start < WAIT / 2, "it waits for a page that does not come"
    assert status == 1
    assert "page 60." in said
    assert "its process was killed or hangs" in said
    assert "archive" in said


def test_an_engine_that_hangs_is_watched(tmp_path: Path) -> None:
    opened = Host(make_config(tmp_path / "cache", cpu=8, ssd=12))
    manager = opened.engine.manager
    try:
        with manager.lock, opened.engine.loader.order, manager.ssd._commit_lock:
            [one] = top.watched([tmp_path / "cache"])
            until(lambda: one.look()["rates"] is not None, "two pages come")
            assert one.look()["state"] == "running"
    finally:
        opened.engine.close()


@pytest.fixture
def no_second_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """--once does not wait for a page that no engine is going to write."""
    monkeypatch.setattr(top, "SECOND_PAGE_S", 0.1)


@pytest.mark.parametrize(
    "changes", [{"state": "switched_off", "late_requests": 3}, {"state": "stopped", "stopped": "lock is gone"}]
)
@pytest.mark.usefixtures("no_second_page")
def test_trouble_is_said_and_is_the_exit_status(tmp_path: Path, gdscache: Gdscache, changes: dict[str, Any]) -> None:
    written(tmp_path, 1, time.time() + 60, **changes)
    page = tmp_path / "status"
    before = [page], page.stat().st_mtime_ns, page.read_bytes()
    status, said, _ = gdscache("top", tmp_path, "--once")
    assert status == 1
    assert ([*tmp_path.iterdir()], page.stat().st_mtime_ns, page.read_bytes()) == before, "it changes nothing"
    assert changes["state"].replace("_", " ") in said
    assert "\x1b" not in said, "it goes into a pipe"
    assert ("3 requests are late" in said) == ("late_requests" in changes)
    assert ("lock is gone" in said) == ("stopped" in changes)
    assert "rank 2, process 4002: stopped" in said


def test_directories_without_a_page(tmp_path: Path, gdscache: Gdscache) -> None:
    (tmp_path / "free").mkdir()
    written(tmp_path / "next", 1, time.time())
    page = bytearray((tmp_path / "next" / "status").read_bytes())
    page[16:20] = (9).to_bytes(4, "little")
    page[8:16] = xxhash.xxh3_64_intdigest(bytes(page[16:])).to_bytes(8, "little")
    (tmp_path / "next" / "status").write_bytes(page)
    status, said, _ = gdscache("top", tmp_path / "free", tmp_path / "next", "--once")
    words = " ".join(said.replace("│", " ").split())
    assert status == 1
    assert "no engine has it open" in words
    assert "format 9" in words
    engines = top.watched([tmp_path / "free"])
    (tmp_path / "free").rmdir()
    assert top.watched([tmp_path / "free"], engines) == engines
    assert engines[0].look()["state"] == "no status page"
    status, _, error = gdscache("top", tmp_path / "nowhere", "--once")
    assert status == 2
    assert "nowhere is not a directory" in error


def test_groups_with_directories_of_their_own_stand_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "groups-1").mkdir()
    assert [one.path.name for one in top.watched([tmp_path])] == ["groups-1"]
    reports = two_looks([tmp_path / "groups-0", tmp_path / "groups-1"])
    engines = top.watched([tmp_path, tmp_path / "groups-0"])
    assert [one.path.name for one in engines] == ["groups-0", "groups-1"]
    assert top.watched([tmp_path], engines) == engines
    assert [report["groups"] for report in reports] == ["full: all tokens, window: the last 1,024"] * 2


@pytest.mark.parametrize("pack", ["off", "on"])
def test_groups_of_a_running_engine_without_an_ssd(tmp_path: Path, pack: str) -> None:
    config = hybrid_config(None, MODELS["mixed"] | {"pack": pack}, ssd=None, status={"path": str(tmp_path)})
    with HybridHost(config).engine:
        looks = {one.path.name: one.look() for one in top.watched([tmp_path])}
    told = {name: look.get("groups") for name, look in looks.items()}
    assert told == {"groups-0": "chunk: chunks of 16", "groups-1-2": "full: all tokens, window: the last 10"}
    assert {tier["name"] for look in looks.values() for tier in look["tiers"]} == (
        {"cpu", "cpu_plain"} if pack == "on" else {"cpu"}
    )


@pytest.mark.parametrize("width", [38, 80, 120, 200])
@pytest.mark.parametrize("directories", [1, 2, 5])
def test_a_screen_has_everything_at_any_width(tmp_path: Path, width: int, directories: int) -> None:
    reports = two_looks([tmp_path / f"d{n}" for n in range(directories)])
    lines = top.screen(reports, width).plain.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).replace("│", " ").split())
    for n in range(directories):
        assert f"d{n}" in text
    said = ["75.0 %", "64.0 KiB", "50.0 %", "5.00 lookups/s of 50.0 pages/s", "12.5 ms", "250 ms", "1.50 s", "3.00 GiB"]
    said += ["1 min", "misses checksum", "refused second_offer", "3 of 4 run", "rank 2, process 4002: stopped"]
    said += ["25.0 %", "1.00 MiB", "2 loads, 5 prefetches"]
    for what in said:
        assert text.count(what) >= directories, what


def test_a_pipe_gets_a_line_for_each_look(tmp_path: Path) -> None:
    written(tmp_path, 1, time.time() + 60)
    command = [sys.executable, "-m", "gdscache", "top", str(tmp_path), "--every", "0.1", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seen = [json.loads(line) for line in itertools.islice(child.stdout, 3)]
    assert [(one["schema"], one["engines"][0]["pid"]) for one in seen] == [("gdscache.top/1", 4711)] * 3
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=WAIT)
    assert child.returncode == 0


def test_on_a_terminal_frames_replace_each_other(tmp_path: Path) -> None:
    written(tmp_path, 1, time.time() + 60)
    code = (
        "import os, signal, sys; from gdscache.commands import main, top\n"
        "look, left = top.Watched.look, [4]\n"
        "def counted(one):\n"
        "    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGINT)\n"
        "    return look(one)\n"
        f"top.Watched.look = counted; sys.argv = ['gdscache', 'top', {str(tmp_path)!r}, '--every', '0.1']; main.main()"
    )
    status, text = on_terminal(["-c", code], 80)
    assert status == 0
    assert text.count("running, page") >= 3


def test_a_terminal_without_a_size_is_80_columns_wide(tmp_path: Path) -> None:
    written(tmp_path, 1, time.time() + 60)
    status, text = on_terminal(["-m", "gdscache", "top", str(tmp_path), "--once"], 0)
    assert (status, "running, page" in text) == (0, True)
    assert 0 < max(map(len, text.splitlines())) <= 80
