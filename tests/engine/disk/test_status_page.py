"""The status page of a directory in use, byte by byte as docs/format.md has it, and while the engine hangs."""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from gdscache.commands import cli
from gdscache.commands.inspect import inspect
from gdscache.commands.top import Watched
from gdscache.disk import status_page
from gdscache.disk.catalog_file import FORMAT_VERSION
from gdscache.errors import DirectoryInUseError, DirectoryNotWritableError, NotARegularFileError
from gdscache.gate.costs import Costs
from gdscache.gate.gate import Gate
from gdscache.runtime.latencies import SlowLoad, Summary
from gdscache.storage.base import Op
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, make_config, prompt, until


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


def number_of(path: Path) -> int:
    return int.from_bytes(page_of(path)[48:56], "little")


def test_the_page_is_as_the_format_says(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    host.keep(prompt(1, 3)).result(WAIT)
    host.engine.lookup(prompt(1, 4))
    host.load(prompt(1, 3))
    number = number_of(path)
    until(lambda: number_of(path) >= number + 2, "it is written again")
    page = page_of(path)
    assert len(page) == 4096
    assert page[:8] == b"gdscstat"
    kind, version, pid, opened, written, _, state, directories = struct.unpack_from("<IIqQQQII", page, 16)
    meta = version == FORMAT_VERSION
    assert (kind, meta, pid, state, directories) == (3, True, os.getpid(), 0, 1)
    assert time.time() - 60 < opened / 1000 <= written / 1000 <= time.time()
    extent, slots, pages, free, evictions, late, catalog, log = struct.unpack_from("<8Q", page, 64)
    assert (extent, slots, pages, free, evictions, late) == (host.layout.extent_bytes, 12, 3, 9, 0, 0)
    assert catalog == (path / "catalog.sqlite").stat().st_size
    assert log == (path / "catalog.sqlite-wal").stat().st_size
    counts = struct.unpack_from("<15Q", page, 128)
    assert counts == (2, 7, 0, 6, 0, 1, 0, 3, 0, 1, 0, 3, 3, 0, 0)
    assert struct.unpack_from("<II", page, 248) == (1, 1)  # shards and ranks
    assert page[256:384] == bytes(128)
    assert page[384:448].rstrip(b"\0").decode() == os.uname().nodename[:64]
    assert page[448:960].rstrip(b"\0")
    assert page[960:1216] == bytes(256)
    assert struct.unpack_from("<qII", page, 1216) == (os.getpid(), 0, 0)
    assert page[1232:1472] == bytes(240)
    for at in (1472, 1496, 1520):  # reads, writes, commits
        samples, median, slow = struct.unpack_from("<3Q", page, at)
        assert samples == (0 if at == 1472 else 1), "the load came from the CPU tier"
        assert samples <= median <= slow < 60e9
    for at, loads in ((1544, 1), (1568, 0)):  # from the CPU tier, and from the SSD
        samples, median, slow = struct.unpack_from("<3Q", page, at)
        assert samples == loads <= median + 1 <= slow + 1 < 60e9
    assert page[1592:1600] == bytes(8)
    assert page[1600:1640] == b"misses.absent".ljust(32, b"\0") + (1).to_bytes(8, "little")
    assert page[1640:3520] == bytes(3520 - 1640)
    tiers = [struct.unpack_from("<16s3Q", page, at) for at in (3520, 3560)]
    assert tiers == [(b"cpu".ljust(16, b"\0"), 8, 3, 0), (b"ssd".ljust(16, b"\0"), 12, 3, 0)]
    assert page[3600:3720] == bytes(120)
    name, ended, took, nbytes = struct.unpack_from("<16s3Q", page, 3720)
    assert (name, nbytes) == (b"cpu".ljust(16, b"\0"), 3 * host.layout.page_bytes)
    assert opened <= ended <= written
    assert took == struct.unpack_from("<3Q", page, 1544)[1]
    assert page[3760:4040] == bytes(4040 - 3760)
    assert struct.unpack_from("<5Q", page, 4040) == (0, 0, host.engine.config.store.queue, 0, 0)
    assert page[4080:] == page[64:72] + bytes(8), "an extent that is not packed has these bytes, too"


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
            assert found[:3] == (stats["bytes"], stats["to_ssd_bytes"], stats["limit_bytes"])
        until(lambda: queues_of(tmp_path / "cache")[:2] == (0, 0), "the page tells that they have ended")
    finally:
        opened.engine.close()


def queues_of(path: Path) -> tuple[int, ...]:
    return struct.unpack_from("<5Q", page_of(path), 4040)


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
    for at in range(0, 4096, 61):
        assert status_page.unpack(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None
    for size in (0, 1, 15, 16, 4095, 4097):
        assert status_page.unpack(page.ljust(4097, b"\0")[:size]) is None
    states = len(status_page.STATES)
    for at, value in ((56, states), (1224, states), (248, 257), (252, 17)):  # of another version, and whole
        assert status_page.unpack(sealed(page, at, value)) is None
    for other in (2, 4):
        assert status_page.unpack(sealed(page, 16, other)) == status_page.OtherFormat(other)


def sealed(page: bytes, at: int, value: int) -> bytes:
    """A page with another number, whose checksum is right."""
    rest = page[16:at] + value.to_bytes(4, "little") + page[at + 4 :]
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
    ranks = [status_page.RankState(1000 + n, status_page.STATES[n % 3]) for n in range(20)]
    counts = {("misses", f"cause_{n:02}"): 1000 - n for n in range(60)} | {("lost", "slot"): 5, ("hits", "ssd"): 3}
    counts |= {("hits", "tier 1"): 4, ("stored", "tier 4"): 6}
    times = {what: Summary(n, n / 1000, n / 100) for n, what in enumerate(status_page.LATENCIES, 1)}
    tiers = [status_page.TierState(f"tier {n}", n + 2, n + 1, n) for n in range(7)]
    slow = [SlowLoad("ssd", 1e9 + n, 9 - n, n << 20) for n in range(9)]
    figures = status_page.Figures(
        *(6, 2, 8192, 9, 8, 1, 0, 0, "stopped", "gone", counts, 16, ranks, times, tiers, slow, "full: all tokens" * 20)
    )
    figures = dataclasses.replace(figures, plain_extent_bytes=12288)
    page = status_page.pack(status_page.Status(1, "host", "command", 5.0, 6.0, 7, 8, 9, figures))
    found = status_page.unpack(page)
    assert isinstance(found, status_page.Status)
    assert (found.figures.ranks, found.figures.shards) == (tuple(ranks[:16]), 16)
    assert found.figures.latencies == times
    by_tier = [(group, f"tier {n}") for n in range(5) for group in ("hits", "loaded", "stored")]
    assert [found.figures.counts[name] for name in by_tier] == [counts.get(name, 0) for name in by_tier]
    assert list(found.causes.items()) == [(("misses", f"cause_{n:02}"), 1000 - n) for n in range(48 - len(by_tier))]
    assert found.figures.counts["misses", ""] == sum(range(941, 1001))
    assert found.figures.tiers == tuple(tiers[:5])
    assert found.figures.slowest == tuple(slow[:8])
    assert found.figures.groups == "full: all tokens" * 8
    assert page[4040:] == bytes(40) + (12288).to_bytes(8, "little") + bytes(8)
    assert [found.figures.extent_of(tier) for tier in ("gpu", "ssd", "ssd_plain")] == [
        16 * n for n in (12288, 8192, 12288)
    ]


def test_a_page_of_another_format_is_named(host: Host, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As beside an engine of the next version."""
    path, page = tmp_path / "cache", page_of(tmp_path / "cache")
    (path / "status").unlink()
    (path / "status").write_bytes(sealed(page, 16, 4))
    assert Watched(path).look()["state"] == "a status page of format 4"
    with pytest.raises(SystemExit):
        cli.app(["top", str(path), "--once"])
    assert "a status page of format 4: look with the gdscache that has it open" in " ".join(
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


def test_an_engine_without_an_ssd_has_a_page_where_the_configuration_names_one(tmp_path: Path) -> None:
    path = tmp_path / "page"
    host = Host(make_config(cpu=8, status={"path": str(path)}))
    try:
        host.keep(prompt(1, 3)).result(WAIT)
        assert host.load(prompt(1, 3)).tokens == 12
        number = number_of(path)
        until(lambda: number_of(path) >= number + 2, "it is written again")
        told = status_page.read(path)
        assert isinstance(told, status_page.Status)
        assert (told.figures.format_version, told.figures.slots, told.catalog_bytes) == (0, 0, 0)
        assert told.figures.tiers == (("cpu", 8, 3, 0),)
        assert told.figures.counts["loaded", "cpu"] == 3
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
