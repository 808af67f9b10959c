"""The status page of a directory in use, byte by byte as docs/format.md has it, and while the engine hangs."""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from gdscache import cli
from gdscache.commands.inspect import inspect, tables
from gdscache.disk import status_page
from gdscache.disk.catalog_file import FORMAT_VERSION
from gdscache.errors import DirectoryNotWritableError, NotARegularFileError
from tests.support.helpers import WAIT, Host, make_config, prompt, quiet, until


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
    host.store(prompt(1, 3)).result(WAIT)
    quiet(host.engine)
    host.engine.lookup(prompt(1, 4))
    host.load(prompt(1, 3))
    number = number_of(path)
    until(lambda: number_of(path) >= number + 2, "it is written again")
    page = page_of(path)
    assert len(page) == 4096
    assert page[:8] == b"gdscstat"
    kind, version, pid, opened, written, _, state, directories = struct.unpack_from("<IIqQQQII", page, 16)
    meta = version == FORMAT_VERSION
    assert (kind, meta, pid, state, directories) == (1, True, os.getpid(), 0, 1)
    assert time.time() - 60 < opened / 1000 <= written / 1000 <= time.time()
    extent, slots, pages, free, evictions, late, catalog, log = struct.unpack_from("<8Q", page, 64)
    assert (extent, slots, pages, free, evictions, late) == (host.layout.extent_bytes, 12, 3, 9, 0, 0)
    assert catalog == (path / "catalog.sqlite").stat().st_size
    assert log == (path / "catalog.sqlite-wal").stat().st_size
    counts = struct.unpack_from("<15Q", page, 128)
    assert counts == (2, 7, 0, 6, 0, 1, 0, 3, 0, 1, 0, 3, 3, 0, 0)
    assert page[248:384] == bytes(136)
    assert page[384:448].rstrip(b"\0").decode() == os.uname().nodename[:64]
    assert page[448:960].rstrip(b"\0")
    assert page[960:] == bytes(4096 - 960)


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
        status_page.StatusWriter.begin(path, path / "catalog.sqlite", lambda: None)  # type: ignore[arg-type,return-value]


def test_an_engine_that_hangs_can_be_looked_at(host: Host, tmp_path: Path) -> None:
    """Every lock that a call of the engine takes is held by somebody who does not give it back."""
    path, manager, loader = tmp_path / "cache", host.engine.manager, host.engine.loader
    ssd = manager.ssd
    assert ssd is not None
    with manager.lock, loader.order, ssd._commit_lock, manager.clearing.alone:
        number = number_of(path)
        until(lambda: number_of(path) > number, "the page is rewritten")
        report = inspect(path)
        assert report["live"]["number"] > number
        assert report["live"]["state"] == "running"


def test_a_page_that_is_not_whole_or_not_ours_is_none(host: Host, tmp_path: Path) -> None:
    page = page_of(tmp_path / "cache")
    assert status_page.unpack(page) is not None
    for at in range(0, 4096, 61):
        assert status_page.unpack(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :]) is None
    for size in (0, 1, 15, 16, 4095, 4097):
        assert status_page.unpack(page.ljust(4097, b"\0")[:size]) is None
    for at, value in (
        (16, status_page.PAGE_FORMAT + 1),
        (56, len(status_page.STATES)),
    ):  # of another version, and whole
        rest = page[16:at] + value.to_bytes(4, "little") + page[at + 4 :]
        assert status_page.unpack(page[:8] + xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest) is None


@pytest.mark.parametrize("what", ["nothing", "garbage", "directory"])
def test_inspect_does_without_a_page(host: Host, tmp_path: Path, what: str) -> None:
    path = tmp_path / "cache"
    (path / "status").unlink()
    if what == "garbage":
        (path / "status").write_bytes(bytes(range(256)) * 16)
    elif what == "directory":
        (path / "status").mkdir()
    report = inspect(path)
    assert (report["owner"]["state"], report["live"], report["pages"]) == ("in use", None, None)
    assert tables.inspect_tables(report)
    host.engine.close()
    assert (path / "status").exists() == (what != "nothing"), "somebody else's file was deleted"


def test_a_lost_lock_is_told_within_a_page(host: Host, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache"
    (path / "lock").unlink()

    def stopped() -> bool:
        live = inspect(path)["live"]
        return live is not None and live["state"] == "stopped"

    until(stopped, "the page says so")
    assert "lock is gone" in inspect(path)["live"]["stopped"]
    with pytest.raises(SystemExit):
        cli.app(["inspect", str(path)])
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
