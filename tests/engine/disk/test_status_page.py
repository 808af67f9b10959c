"""The status page of a directory in use, field by field as docs/format.md has it, and while the engine hangs."""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import xxhash

from gdscache.commands import cli
from gdscache.commands.inspect.reading import inspect
from gdscache.commands.top import Watched
from gdscache.disk import kept, status_page
from gdscache.disk.directory import CacheDirectory
from gdscache.disk.kept import HistoryFile
from gdscache.disk.status_page import SlowLoad, Summary
from gdscache.errors import DirectoryInUseError, DirectoryNotWritableError, NotARegularFileError
from gdscache.gate.costs import Costs
from gdscache.gate.gate import Gate
from gdscache.pages.hit import Told
from gdscache.storage.base import Op
from gdscache.tiers.fates import PageFates
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, make_config, prompt, until

STATES = get_args(status_page.State)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "PERIOD_S", 0.1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    opened = Host(make_config(tmp_path / "cache", cpu=8, ssd=12))
    yield opened
    opened.engine.close()


def page_of(path: Path) -> bytes:
    """A page that is whole."""
    found = [b""]

    def whole() -> bool:
        found[0] = (path / "status").read_bytes()
        return xxhash.xxh3_64_intdigest(found[0][16:]) == int.from_bytes(found[0][8:16], "little")

    until(whole, "a page is written whole")
    return found[0]


def told(page: bytes) -> dict[str, Any]:
    """The JSON of a page."""
    (length,) = struct.unpack_from("<I", page, 20)
    assert page[24 + length :] == bytes(8192 - 24 - length)
    found: dict[str, Any] = json.loads(page[24 : 24 + length])
    return found


def number_of(path: Path) -> int:
    number: int = told(page_of(path))["number"]
    return number


def test_the_page_is_as_the_format_says(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    host.keep(prompt(1, 3)).result(WAIT)
    host.engine.lookup(prompt(1, 4))
    host.load(prompt(1, 3))
    number = number_of(path)
    until(lambda: number_of(path) >= number + 2, "it is written again")
    page = page_of(path)
    assert len(page) == 8192
    assert page[:8] == b"gdscstat"
    assert struct.unpack_from("<I", page, 16) == (4,)
    found = told(page)
    figures = found.pop("figures")
    assert time.time() - 60 < found["opened"] <= found["written"] <= time.time()
    assert (found["pid"], found["host"]) == (os.getpid(), os.uname().nodename[:64])
    assert found["command"]
    assert found["causes"] == [["misses", "absent", 1]]
    assert found.keys() == {"pid", "host", "command", "opened", "written", "number", "causes"}
    extent = host.layout.extent_bytes
    assert [n for *_, n in figures.pop("counts")] == [2, 7, 0, 6, 0, 1, 0, 3, 0, 1, 0, 3, 3, 0, 0, 6]
    for what, (samples, median, slow) in figures.pop("latencies").items():
        assert samples == (what in ("write", "commit", "load_cpu")), "the load came from the CPU tier"
        assert samples * 1e-9 <= median <= slow < 60
    ((tier, ended, seconds, nbytes),) = figures.pop("slowest")
    assert (tier, nbytes) == ("cpu", 3 * host.layout.page_bytes)
    assert found["opened"] <= ended <= found["written"]
    assert 0 < seconds < 60
    assert figures == {
        **{"extent_bytes": extent, "plain_extent_bytes": extent, "evictions": 0, "late_requests": 0, "shards": 1},
        **{"state": "running", "stopped": "", "groups": "", "ranks": [[os.getpid(), "running"]]},
        "tiers": [["cpu", 8, 3, 0], ["ssd", 12, 3, 0]],
        "queues": [0, 0, host.engine.config.store.queue, 0, 0],
    }


def test_queues_are_those_of_stats(tmp_path: Path) -> None:
    """While writes to the SSD hang."""
    options = {"transport": "tests.support.faulty:FaultyTransport"}
    opened = Host(make_config(tmp_path / "cache", cpu=8, ssd=12, **options))
    page = 3 * opened.layout.extent_bytes
    try:
        with PLAN.rule(Op.WRITE, Fault.HANG):
            opened.store(prompt(1, 3))
            until(lambda: queues_of(tmp_path / "cache")[1] == page, "the page tells of stores on their way")
            found, stats = queues_of(tmp_path / "cache"), opened.engine.stats()["store_queue"]
            assert found[:3] == [stats["bytes"], stats["to_ssd_bytes"], stats["limit_bytes"]]
        until(lambda: queues_of(tmp_path / "cache")[:2] == [0, 0], "the page tells that they have ended")
    finally:
        opened.engine.close()


def queues_of(path: Path) -> list[int]:
    queues: list[int] = told(page_of(path))["figures"]["queues"]
    return queues


def test_it_is_private_and_goes_with_its_owner(host: Host, tmp_path: Path) -> None:
    status = tmp_path / "cache" / "status"
    assert status.stat().st_mode & 0o777 == 0o600
    host.engine.close()
    assert not status.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "gdscache-status"]


@pytest.mark.parametrize("what", ["link", "directory", "nowhere"])
def test_only_a_regular_file_will_do(tmp_path: Path, what: str) -> None:
    path = tmp_path / "cache"
    if what != "nowhere":
        path.mkdir()
    if what == "link":
        (path / "status").symlink_to(tmp_path / "away")
    if what == "directory":
        (path / "status").mkdir()
    with pytest.raises(DirectoryNotWritableError if what == "nowhere" else NotARegularFileError):
        status_page.StatusWriter(path, lambda: None)  # type: ignore[arg-type,return-value]


def test_an_engine_that_hangs_can_be_looked_at(host: Host, tmp_path: Path) -> None:
    """Every lock that a call of the engine takes is held by somebody who does not give it back."""
    path, manager, loader = tmp_path / "cache", host.engine.manager, host.engine.loader
    ssd = manager.ssd
    with manager.lock, loader.order, ssd._commit_lock, manager.clearing.alone:
        number = number_of(path)
        until(lambda: number_of(path) > number, "the page is rewritten")
        report = Watched(path).look()
        assert report["number"] > number
        assert report["state"] == "running"
        assert inspect(path)["owner"]["state"] == "in use"


def test_a_page_that_is_not_whole_or_not_ours_is_none(host: Host, tmp_path: Path) -> None:
    page = page_of(tmp_path / "cache")
    assert status_page.unpack(page) is not None
    for at in range(0, 8192, 61):
        assert status_page.unpack(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None
    for size in (0, 1, 15, 16, 8191, 8193):
        assert status_page.unpack(page.ljust(8193, b"\0")[:size]) is None
    for other, size in ((3, 4096), (5, 8192), (5, 16384)):
        assert status_page.unpack(sealed(page, b"", other, size)) == status_page.OtherFormat(other)


WRONG = {
    "state": "gone", "stopped": None, "shards": 257, "evictions": -1, "late_requests": 1 << 63, "extent_bytes": True,
    "queues": [1, 2, 3, 4, 5, 6], "ranks": [[1, "running"]] * 17, "tiers": [["cpu", 1, 1]], "counts": [["lookups", 1]],
    "slowest": [["ssd", 1, 1, 0.5]],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_page_of_wrong_values_is_none(host: Host, tmp_path: Path, name: str) -> None:
    """It is whole, and of another version, say."""
    page = page_of(tmp_path / "cache")
    figures = told(page)["figures"]
    assert name in figures
    assert status_page.unpack(sealed(page, figures=figures)) == status_page.unpack(page)
    assert status_page.unpack(sealed(page, figures=figures | {name: WRONG[name]})) is None


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"{", b"NaN", b"\xff", b"[" * 4000])
def test_a_page_of_other_text_is_none(host: Host, tmp_path: Path, text: bytes) -> None:
    page = page_of(tmp_path / "cache")
    assert status_page.unpack(sealed(page, text)) is None
    for number in (b"NaN", b"Infinity", b"1e400", b"9" * 400):
        opened = json.dumps(told(page)["opened"]).encode()
        assert status_page.unpack(sealed(page, page[24:].rstrip(b"\0").replace(opened, number, 1))) is None


def sealed(page: bytes, text: bytes | None = None, format: int = 4, size: int = 8192, **changes: Any) -> bytes:
    """A page with another text, or other values, whose checksum is right."""
    text = json.dumps(told(page) | changes).encode() if text is None else text
    rest = (struct.pack("<II", format, len(text)) + text).ljust(size - 16, b"\0")
    return page[:8] + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def test_latencies_causes_and_ranks_are_told(host: Host, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, manager = tmp_path / "cache", host.engine.manager
    for milliseconds in range(1, 101):
        manager.latencies.note("read", "ssd", milliseconds / 1000)
    manager.count("dropped", "queue_full", 7)
    manager.count("dropped", "io_error", 9)
    number = number_of(path)
    until(lambda: number_of(path) >= number + 2, "it is written again")
    live = Watched(path).look()
    assert live["latencies"]["read"] == {"samples": 100, "median_seconds": 0.05, "p99_seconds": 0.099}
    assert live["latencies"]["commit"] == {"samples": 0, "median_seconds": 0.0, "p99_seconds": 0.0}
    assert list(live["causes"]["dropped"].items()) == [("io_error", 9), ("queue_full", 7)]
    assert live["ranks"] == [{"rank": 0, "pid": os.getpid(), "state": "running"}]
    with pytest.raises(SystemExit):
        cli.app(["top", str(path), "--once"])
    said = " ".join(capfd.readouterr().out.split())
    assert "dropped io_error" in said
    assert "read 50.0 ms 99.0 ms 100" in said


def test_all_that_a_page_can_say_comes_back() -> None:
    ranks = [status_page.RankState(1000 + n, STATES[n % 3]) for n in range(20)]
    counts = {("misses", f"cause_{n:02}"): 1000 - n for n in range(60)} | {("lost", "slot"): 5, ("hits", "ssd"): 3}
    counts |= {("hits", "tier 1"): 4, ("stored", "tier 4"): 6}
    times = {what: Summary(n, n / 1000, n / 100) for n, what in enumerate(status_page.LATENCIES, 1)}
    tiers = [status_page.TierState(f"tier {n}", n + 2, n + 1, n) for n in range(7)]
    slow = [SlowLoad("ssd", 1e9 + n, 9 - n, n << 20) for n in range(9)]
    figures = status_page.Figures(
        *(8192, 0, 0, "stopped", "gone", counts, 16, tuple(ranks), times, tuple(tiers), tuple(slow)),
        *("full: all tokens" * 20, status_page.Queues(1, 2, 3, 4, 5), 12288),
    )
    page = status_page.pack(status_page.Status(1, "host", "command", 5.0, 6.0, 7, figures))
    found = status_page.unpack(page)
    assert isinstance(found, status_page.Status)
    assert (found.figures.ranks, found.figures.shards) == (tuple(ranks[:16]), 16)
    assert found.figures.latencies == times
    by_tier = [(group, f"tier {n}") for n in range(5) for group in ("hits", "loaded", "stored")]
    assert [found.figures.counts[name] for name in by_tier] == [counts.get(name, 0) for name in by_tier]
    assert list(found.causes.items()) == [(("misses", f"cause_{n:02}"), 1000 - n) for n in range(48)]
    assert found.figures.counts["misses", ""] == sum(range(941, 1001))
    assert found.figures.tiers == tuple(tiers[:5])
    assert found.figures.slowest == tuple(slow[:8])
    assert found.figures.groups == "full: all tokens" * 8
    assert found.figures.queues == (1, 2, 3, 4, 5)
    assert [found.figures.extent_of(tier) for tier in ("gpu", "ssd", "ssd_plain")] == [
        16 * n for n in (12288, 8192, 12288)
    ]


def test_a_page_of_another_format_is_named(host: Host, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As beside an engine of the next version."""
    path, page = tmp_path / "cache", page_of(tmp_path / "cache")
    (path / "status").unlink()
    (path / "status").write_bytes(sealed(page, format=5))
    assert Watched(path).look()["state"] == "a status page of format 5"
    with pytest.raises(SystemExit):
        cli.app(["top", str(path), "--once"])
    assert "a status page of format 5: look with the gdscache that has it open" in " ".join(
        capfd.readouterr().out.split()
    )


@pytest.mark.parametrize("what", ["nothing", "garbage", "directory"])
def test_a_page_of_somebody_else_stays(host: Host, tmp_path: Path, what: str) -> None:
    path = tmp_path / "cache"
    (path / "status").unlink()
    if what == "garbage":
        (path / "status").write_bytes(bytes(range(256)) * 16)
    elif what == "directory":
        (path / "status").mkdir()
    assert Watched(path).look()["state"] == "no status page"
    assert (inspect(path)["owner"]["state"], inspect(path)["pages"]) == ("in use", 0)
    host.engine.close()
    assert (path / "status").exists() == (what != "nothing"), "somebody else's file was deleted"


def test_a_lost_lock_is_told_within_a_page(host: Host, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache"
    (path / "lock").unlink()

    until(lambda: Watched(path).look()["state"] == "stopped", "the page says so")
    assert "lock is gone" in Watched(path).look()["stopped"]
    with pytest.raises(SystemExit):
        cli.app(["top", str(path), "--once"])
    assert "stopped" in capfd.readouterr().out


def test_an_index_in_shared_memory_of_an_older_engine_is_swept(host: Host, tmp_path: Path) -> None:
    host.engine.close()
    path = tmp_path / "cache"
    (path / "catalog.sqlite-shm").write_bytes(os.urandom(32 << 10))
    again = Host(make_config(path, cpu=8, ssd=12))
    assert not (path / "catalog.sqlite-shm").exists()
    assert again.engine.check().ok
    again.engine.close()


def test_a_write_that_hangs_keeps_its_descriptor_and_holds_up_no_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file stays the write's: another one with its number would get the write's bytes."""
    host = Host(make_config(tmp_path / "cache", cpu=8, ssd=12))
    monkeypatch.setattr(status_page, "_CLOSE_S", 0.1)
    begun, over, written_to = threading.Event(), threading.Event(), list[int]()
    genuine = os.pwrite

    def hang(descriptor: int, data: bytes, offset: int) -> int:
        if threading.current_thread() is threading.main_thread() or not os.readlink(
            f"/proc/self/fd/{descriptor}"
        ).endswith("status"):
            return genuine(descriptor, data, offset)
        written_to.append(descriptor)
        begun.set()
        over.wait(WAIT)
        return genuine(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", hang)
    assert begun.wait(WAIT)
    with caplog.at_level(logging.ERROR, "gdscache"):
        host.engine.close()
    assert "a write of the status page hangs" in caplog.text
    assert os.readlink(f"/proc/self/fd/{written_to[0]}").endswith("status"), "another file may have its number"
    over.set()


@pytest.mark.parametrize("closed", [False, True])
def test_a_last_save_is_waited_for_and_one_that_is_late_leaves_the_next_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    """`closed`: the directory has been given back before the save ends, as of an engine with an SSD."""
    own = CacheDirectory.open(tmp_path)
    fates, goes_on, begun = PageFates(4096), threading.Event(), threading.Event()
    history = HistoryFile(tmp_path, fates.evicted, fates.bad, lambda: not own.closed)
    genuine, released = kept.pack, list[int]()

    def slow(found: kept.History) -> bytes:
        begun.set()
        goes_on.wait(WAIT)
        return genuine(found)

    monkeypatch.setattr(kept, "pack", slow)
    monkeypatch.setattr(status_page, "_SAVE_S", 0.1)
    figures = status_page.Figures(1, 0, 0, "running", "", {})
    writer = status_page.StatusWriter(
        tmp_path, lambda: figures, history.save, lambda: released.append(1), lambda: not own.closed
    )
    fates.found_bad(bytes(32), Told("bad", "ssd", "checksum"), 1, "/x", 1.0)
    history.hurry()
    writer.close()
    assert begun.is_set()
    assert "files for after a restart are not written after 0.1 s" in caplog.text
    assert (tmp_path / "status").exists()
    assert not released
    if closed:
        own.close()
        (tmp_path / "history").write_bytes(b"of the next owner")
    monkeypatch.setattr(status_page, "_SAVE_S", WAIT)
    goes_on.set()
    writer.close()
    assert released == [1]
    assert (tmp_path / "status").exists() == closed, "the next owner has the file by now"
    assert ((tmp_path / "history").read_bytes() == b"of the next owner") == closed
    own.close()


def test_pages_that_were_bad_are_in_the_history_whatever_became_of_others(tmp_path: Path) -> None:
    fates = PageFates(4096)
    history = HistoryFile(tmp_path, fates.evicted, fates.bad)
    history.hurry()

    def saved() -> list[int]:
        history.save()
        return [int.from_bytes(key) for key in kept.read_history(tmp_path).bad]  # type: ignore[union-attr]

    def bad(number: int) -> None:
        fates.found_bad(number.to_bytes(32), Told("bad", "ssd", "checksum"), 1, "/x", 1.0)

    bad(1)
    assert saved() == [1]
    fates.forget([(1).to_bytes(32)])  # it is stored again
    bad(2)
    assert saved() == [2]
    for number in range(3, kept.BAD_KEPT + 3):
        bad(number)
    assert len(saved()) == kept.BAD_KEPT
    bad(1)
    assert saved()[-1] == 1


def test_an_engine_without_an_ssd_has_a_page_where_the_configuration_names_one(tmp_path: Path) -> None:
    path = tmp_path / "page"
    host = Host(make_config(cpu=8, status={"path": str(path)}))
    try:
        host.keep(prompt(1, 3)).result(WAIT)
        assert host.load(prompt(1, 3)).tokens == 12
        number = number_of(path)
        until(lambda: number_of(path) >= number + 2, "it is written again")
        found = status_page.read(path)
        assert isinstance(found, status_page.Status)
        assert found.figures.tiers == (("cpu", 8, 3, 0),)
        assert found.figures.counts["loaded", "cpu"] == 3
        assert sorted(file.name for file in path.iterdir()) == ["lock", "status"]
        with pytest.raises(DirectoryInUseError, match=r"give each engine its own status\.path"):
            Host(make_config(cpu=8, status={"path": str(path)}))
    finally:
        host.engine.close()
    assert [file.name for file in path.iterdir()] == ["lock"]
    Host(make_config(cpu=8, status={"path": str(path)})).engine.close()


def test_a_page_that_cannot_be_made_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.mkdir()
    (path / "status").mkdir()
    for _ in range(2):
        with pytest.raises(NotARegularFileError):
            Host(make_config(cpu=8, status={"path": str(path)}))
    (path / "status").rmdir()
    Host(make_config(cpu=8, status={"path": str(path)})).engine.close()


def test_times_of_reads_are_told_whoever_measures_them(host: Host) -> None:
    manager, costs = host.engine.manager, Costs(["cpu"])
    for judged in (False, True):
        if judged:
            host.engine.judge_by(Gate("off", costs, host.engine.layout.page_tokens, host.engine.layout.bytes_in))
        before = manager.latencies.summary("read", "ssd").samples
        manager.busy.begin("ssd", 1.0)
        manager.busy.end("ssd", 1 << 20, 1.5)
        manager.busy.tell()
        assert manager.latencies.summary("read", "ssd").samples == before + 1
    assert manager.costs is costs


def test_a_page_is_full_before_its_rarest_causes() -> None:
    """Every text is as long as can be, of characters that JSON writes as six; every number has 17 digits."""
    most, long = 1 << 56, "\1" * 999
    ranks = [status_page.RankState(most, "switched_off")] * 16
    times = dict.fromkeys(status_page.LATENCIES, Summary(most, 1 / 3, 2 / 3))
    tiers = tuple(status_page.TierState(f"{n}{long}", most, most, most) for n in range(5))
    counts = {("misses", f"{n:02}{long}"): most - n for n in range(60)} | dict.fromkeys(status_page.COUNTS, most)
    figures = status_page.Figures(
        *(most, most, most, "switched_off", long, counts, 256, tuple(ranks), times, tiers),
        *((SlowLoad("ssd" + "d" * 13, 1e9 + 1 / 3, 1 / 3, most),) * 8, long, status_page.Queues(*[most] * 5), most),
    )
    page = status_page.pack(status_page.Status(most, long, long, 1 / 3, 1 / 3, most, figures))
    assert len(page) == 8192
    found = status_page.unpack(page)
    assert isinstance(found, status_page.Status)
    assert 20 < len(found.causes) <= 48
    assert min(found.causes.values()) > most - 60


def test_a_writer_outlives_exceptions_of_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory stays the engine's, and the page comes again. What goes wrong for long is logged once."""
    monkeypatch.setattr(status_page, "_SAVED_EVERY", 3)
    own, calls, saved = CacheDirectory.open(tmp_path), list[int](), list[int]()

    def figures() -> status_page.Figures:
        calls.append(1)
        if len(calls) in (2, 3, 4):
            raise MemoryError("short of memory for a moment")
        return status_page.Figures(1, 0, 0, "running", "", {})

    def save() -> None:
        saved.append(1)
        raise MemoryError("short of memory for long")

    writer = status_page.StatusWriter(tmp_path, figures, save, own.close)
    until(lambda: number_of(tmp_path) >= 6, "the page is written on")
    assert not own.closed
    writer.close()
    assert own.closed
    assert len(saved) >= 3, "the last time at the end"
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert told.count("short of memory for a moment") == 1
    assert told.count("short of memory for long") == len(saved)


def test_a_writer_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    def figures() -> status_page.Figures:
        raise MemoryError("short of memory")

    released, before = list[int](), threading.active_count()
    with pytest.raises(MemoryError):
        status_page.StatusWriter(tmp_path, figures, released=lambda: released.append(1))
    assert threading.active_count() == before
    assert not (tmp_path / "status").exists()
    assert not released, "the directory is the caller's still"
