"""Directories of format 5 become ones of format 6: cheaply, whatever kills it, and only where they are opened."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sqlite3
import struct
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gdscache.commands.inspect.reading import inspect
from gdscache.disk import catalog_file, slab
from gdscache.disk.catalog import Catalog, PageRecord, Recovered
from gdscache.errors import IOFailedError, NoSpaceError
from tests.support.disk_parts import raw, sums_of
from tests.support.helpers import Host, make_config, prompt
from tests.support.places import ROOT

KEPT = {path.name.split(".")[0]: path for path in sorted((ROOT / "tests" / "formats" / "5").glob("*.tar.xz"))}
EXTENT, SLOTS, PAGES = 8192, 12, 9
NOW = 1_800_000_000.25  # before the ends that the kept pages have, and after they were written


def unpacked(name: str, place: Path) -> Path:
    with tarfile.open(KEPT[name]) as tar:
        tar.extractall(place, filter="data")
    for path in place.glob("*/stripe.json"):  # it names the directories of where it was made
        stripe = json.loads(path.read_text())
        path.write_text(json.dumps(stripe | {"directories": [str(place / name) for name in "ab"]}))
    return place / "a"


def opened(path: Path, **options: Any) -> Catalog:
    return Catalog(path, extent_bytes=EXTENT, durability="process", **options)


def ends(path: Path) -> dict[bytes, tuple[int, float | None]]:
    """Key → priority and end, of a kept directory as it is."""
    with catalog_file.open_copy(path / "catalog.sqlite") as copy:
        catalog_file.present(copy, path / "catalog.sqlite", None)
        select = "SELECT key, priority, (written + lifetime) / 1000.0 FROM pages JOIN retention USING (place)"
        return {key: (priority, end) for key, priority, end in copy.execute(select)}


def state(path: Path) -> int:
    """The version of a catalogue as a kill has left it, which must have all tables of that version."""
    with catalog_file.open_copy(path / "catalog.sqlite") as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return catalog_file.check(copy, path / "catalog.sqlite", None).version


def whole(found: Recovered, catalog: Catalog, expected: dict[bytes, tuple[int, float | None]]) -> None:
    """Every page is there, with its checksums and its retention."""
    assert (len(found), found.dropped, found.set_aside) == (PAGES, {}, None)
    assert all(sums is not None and len(sums) == 3 for sums in sums_of(catalog, found.slots.tolist()))
    keys = dict(zip(found.slots.tolist(), (key.tobytes() for key in found.keys), strict=True))
    assert {keys[slot]: kept for slot, kept in catalog.retentions().items()} == expected


# -- kills -------------------------------------------------------------------------------------------------------------


def die_at(path: Path, number: int) -> bool:
    """Open and recover in a child that kills itself before statement `number`; False where there are not so many."""
    child = os.fork()
    if child == 0:
        left = number

        def count(sql: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

        status = 1
        try:
            with mock.patch.object(catalog_file, "STEP_ROWS", 1):
                catalog = opened(path)
                catalog._writer.set_trace_callback(count)
                catalog.recover(SLOTS, NOW)
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0
    return os.WIFSIGNALED(ended)


@pytest.mark.parametrize(
    ("name", "step"), [("killed", 4), *(pytest.param(k, 1, marks=pytest.mark.suite) for k in KEPT)]
)
def test_a_kill_at_any_statement_leaves_a_directory_of_5_or_of_6(name: str, step: int, tmp_path: Path) -> None:
    expected = ends(unpacked(name, tmp_path / "before"))
    assert sorted(kept[0] for kept in expected.values()) == [-1, 0, 2]
    found, number = [], 0
    while die_at(path := unpacked(name, tmp_path / str(number)), number):
        found.append(state(path))
        assert len(inspect(path)["namespaces"]) == 2
        with opened(path) as catalog:
            whole(catalog.recover(SLOTS, NOW), catalog, expected)
            assert len(catalog.recover(SLOTS, NOW).uncounted) == 0
        assert state(path) == 6
        number += step
    assert number > 2 * len(catalog_file.CONVERT)
    assert found == sorted(found)
    assert set(found) == {5, 6}


@pytest.mark.parametrize("statement", [0, len(catalog_file.CONVERT) // 2, len(catalog_file.CONVERT) + 14, 50])
def test_an_engine_serves_all_pages_after_a_kill(statement: int, tmp_path: Path) -> None:
    path = unpacked("killed", tmp_path)
    die_at(path, statement)
    host = Host(make_config(path, ssd=SLOTS, cpu=None))
    host.data = lambda key: (key * -(-host.layout.page_bytes // 32))[: host.layout.page_bytes]  # type: ignore[assignment, return-value]
    with mock.patch("tests.support.helpers.np.array_equal", lambda got, data: bytes(got) == data):
        for seed, salt, pages in ((1, "", 3), (2, "tenant", 3), (3, "", 1), (4, "", 1), (5, "", 1)):
            assert host.load(prompt(seed, pages), salt=salt).tokens == 4 * pages
    assert host.engine.check().problems == ()
    host.engine.close()


def test_each_beginning_of_the_log_is_a_directory_of_5_or_of_6(tmp_path: Path) -> None:
    """What was written of the log when the power went: cut at each of its frames, and within one."""
    path = unpacked("closed", tmp_path / "live")
    expected = ends(path)
    with mock.patch.object(catalog_file, "STEP_ROWS", 1), opened(path) as catalog:
        catalog.recover(SLOTS, NOW)
        log = (path / "catalog.sqlite-wal").read_bytes()
        image = (path / "catalog.sqlite").read_bytes()
    frame = 24 + struct.unpack_from(">I", log, 8)[0]
    cuts = [32 + n * frame for n in range((len(log) - 32) // frame + 1)]
    found = []
    for cut in [0, *cuts, *(at + frame // 2 for at in cuts[:-1])]:
        copy = tmp_path / str(cut)
        copy.mkdir()
        (copy / "catalog.sqlite").write_bytes(image)
        (copy / "catalog.sqlite-wal").write_bytes(log[:cut])
        found.append((cut, state(copy)))
        with opened(copy) as catalog:
            whole(catalog.recover(SLOTS, NOW), catalog, expected)
    versions = [version for _, version in sorted(found)]
    assert versions == sorted(versions)
    assert set(versions) == {5, 6}


# -- what it costs, and what it says -----------------------------------------------------------------------------------


def old(path: Path, pages: int, ending: int) -> None:
    """A catalogue of version 5, of pages that end at NOW + 100 s, + 101 s and so on."""
    path.mkdir()
    with raw(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN")
        for sql in catalog_file.OLD_SCHEMA.values():
            connection.execute(sql)
        meta = {"format_version": 5, "extent_bytes": EXTENT, "head_groups": 1, "striped": 0}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("INSERT INTO namespaces VALUES (1, ?, '{}')", (b"n" * 32,))
        rows = ((slot, slot.to_bytes(32, "little"), b"n" * 32, slot) for slot in range(pages))
        connection.executemany("INSERT INTO pages VALUES (?, ?, ?, 1, 5000, ?)", rows)
        connection.executemany("INSERT INTO checksums VALUES (?, ?)", ((n, bytes(24)) for n in range(pages)))
        rows_ = ((slot, int(NOW * 1000) + 100_000 + slot * 1000) for slot in range(ending))
        connection.executemany("INSERT INTO retention VALUES (?, 0, ?)", rows_)
        connection.execute("COMMIT")


def test_no_row_of_a_page_is_touched(tmp_path: Path) -> None:
    """Ten times the pages make no larger log, and take no longer than that."""
    logs = []
    for pages in (2_000, 20_000):
        path = tmp_path / str(pages)
        old(path, pages, 0)
        with opened(path) as catalog:
            assert len(catalog.recover(pages, NOW)) == pages
            logs.append((path / "catalog.sqlite-wal").stat().st_size)
    assert logs[0] == logs[1] < 64 << 10


def test_ends_are_counted_anew_in_steps_that_a_failure_may_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache"
    old(path, 40, 23)
    monkeypatch.setattr(catalog_file, "STEP_ROWS", 5)
    steps: list[int] = []
    genuine = catalog_file.count_lifetimes

    def fail(writer: sqlite3.Connection, first: int, last: int, now: int) -> None:
        if len(steps) == 3:
            raise IOFailedError("the disk is full")
        steps.append(last)
        genuine(writer, first, last, now)

    caplog.set_level(logging.INFO, "gdscache.disk.catalog")
    with opened(path) as catalog, mock.patch.object(catalog_file, "count_lifetimes", fail):
        assert (len(catalog.recover(40, NOW)), len(catalog.retentions())) == (40, 23)
        said = [record.getMessage().partition(": ")[2] for record in caplog.records]
        assert said[0] == "converted from format 5 to 6"
        assert "the disk is full" in said[1]
        caplog.clear()
        catalog.commit([], [30], {})  # other writes go on
    assert steps == [4, 9, 14]
    with raw(path) as connection:
        assert connection.execute("SELECT count(*) FROM retention WHERE written = 0").fetchone() == (8,)
    with opened(path) as catalog:
        found = catalog.recover(40, NOW + 50)
        assert found.uncounted.tolist() == list(range(15, 23))
        assert catalog.recover(40, NOW + 50).uncounted.tolist() == []
        expected = {slot: (0, (int(NOW * 1000) + 100_000 + slot * 1000) / 1000) for slot in range(23)}
        assert catalog.retentions() == expected
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == ["the ends of 8 of 8 pages are counted from now on"]


def test_what_has_expired_or_cannot_be_a_row_goes_with_the_conversion(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    old(path, 10, 4)
    with raw(path) as connection:
        connection.execute("UPDATE retention SET expires = ? WHERE slot = 1", (int(NOW * 1000),))
        connection.execute("UPDATE retention SET expires = -5 WHERE slot = 2")
        connection.execute("UPDATE retention SET expires = 'soon' WHERE slot = 3")
        connection.execute("UPDATE pages SET length = 0 WHERE slot = 7")
    slab.Slab.open(path, EXTENT, 9)
    assert inspect(path)["unusable_rows"] == {"row": 1, "length": 1, "slot": 1}
    assert inspect(path)["retention"]["expiring_pages"] == 3  # whether they have expired is up to the day
    with opened(path) as catalog:
        assert catalog.recover(9, NOW).dropped == {"expired": 2, "row": 1, "length": 1, "slot": 1}
    with opened(path) as catalog:
        assert (len(catalog.recover(9, NOW)), len(catalog.rows())) == (5, 5)


def test_a_commit_before_recovery_converts_too(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    old(path, 3, 0)
    with opened(path) as catalog:
        catalog.commit([], [1], {})
        assert sorted(catalog.rows()) == [0, 2]
    assert state(path) == 6


def test_damage_is_set_aside_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the rows tell, which are read after the conversion."""
    path = tmp_path / "cache"
    old(path, 600, 0)
    monkeypatch.setattr(catalog_file, "QUICK_CHECK_BYTES", 0)
    image = path / "catalog.sqlite"
    data = bytearray(image.read_bytes())
    at = data.index((300).to_bytes(32, "little")) // 4096 * 4096
    data[at : at + 8] = b"\xff" * 8
    image.write_bytes(data)
    with opened(path) as catalog:
        found = catalog.recover(600, NOW)
        assert found.set_aside.read_bytes() == data
    assert state(path) == 6


def test_a_note_of_damage_that_was_none_keeps_a_directory_of_5(tmp_path: Path) -> None:
    path = unpacked("closed", tmp_path)
    (path / "catalog.suspect").touch()
    with opened(path) as catalog:
        assert len(catalog.recover(SLOTS, NOW)) == PAGES
    assert not (path / "catalog.suspect").exists()


# -- what converts nothing ---------------------------------------------------------------------------------------------


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in ("lock", "catalog.sqlite-wal")}


@pytest.mark.parametrize("name", ["closed", "killed"])
def test_an_open_that_is_refused_changes_nothing(name: str, tmp_path: Path) -> None:
    path = unpacked(name, tmp_path)
    before = ends(path)
    kept = files(path) if name == "closed" else {}
    with pytest.raises(NoSpaceError):
        Host(make_config(path, ssd=1 << 30, cpu=None))
    assert state(path) == 5
    assert ends(path) == before
    assert files(path) | kept == files(path)


# -- clocks ------------------------------------------------------------------------------------------------------------

HOUR = 3600.0


def page(slot: int, expires: float | None) -> PageRecord:
    sums = np.arange(3, dtype=np.uint64)
    return PageRecord(slot, slot.to_bytes(32, "little"), b"n" * 32, b"n" * 32, 5000, slot, sums, 0, expires)


# The clock at each open after the commit at NOW, and what is left of an hour then; None: the page has expired.
JUMPS: dict[str, list[tuple[float, float | None]]] = {
    "on and on": [(NOW + 1000, 2600), (NOW + 3000, 600), (NOW + 3600, None)],
    "at once": [(NOW, 3600), (NOW, 3600)],
    "far ahead": [(NOW + 1e9, None)],
    "a day back": [(NOW - 86400, 3600), (NOW - 86400 + 3000, 600), (NOW - 86400 + 3601, None)],
    "back and ahead again": [(NOW - 86400, 3600), (NOW, None)],
    "back at each restart": [(NOW - 1000, 3600), (NOW - 2000, 3600), (NOW - 1000, 2600), (NOW + 1600, None)],
    "a little back": [(NOW + 3000, 600), (NOW + 2000, 1600), (NOW + 3600, None)],  # nothing tells
    "back to the epoch": [(0.001, 3600), (0.002, 3599.999), (3600.0, 0.001), (3600.5, None)],
}


@pytest.mark.parametrize("jumps", JUMPS)
def test_a_clock_that_jumps_over_restarts_leaves_no_more_than_a_lifetime(jumps: str, tmp_path: Path) -> None:
    with opened(tmp_path, wall_clock=lambda: NOW) as catalog:
        catalog.commit([page(0, NOW + HOUR), page(1, None)], [], {})
    for now, left in JUMPS[jumps]:
        with opened(tmp_path, wall_clock=lambda now=now: now) as catalog:
            found = catalog.recover(4, now)
            if left is None:
                assert found.dropped == {"expired": 1}
            else:
                assert found.expires.tolist() == [pytest.approx(now + left, abs=2e-3)]
                kept = {0: (0, pytest.approx(now + left, abs=2e-3))}
                assert catalog.retentions() == kept
            assert 1 in found.slots


def test_an_end_that_is_over_when_it_is_written_is_over(tmp_path: Path) -> None:
    with opened(tmp_path, wall_clock=lambda: NOW) as catalog:
        catalog.commit([page(0, NOW - 5), page(1, NOW)], [], {})
        assert catalog.retentions() == {0: (0, NOW - 5), 1: (0, NOW)}
    with raw(tmp_path) as connection:
        rows = connection.execute("SELECT lifetime, written FROM retention ORDER BY place").fetchall()
        assert rows == [(0, int(NOW * 1000) - 5000), (0, int(NOW * 1000))]
    with opened(tmp_path) as catalog:
        assert catalog.recover(4, NOW).dropped == {"expired": 2}


def test_a_kept_directory_survives_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """What was converted lives as long as it had left, from whichever open on."""
    path = unpacked("closed", tmp_path)
    left = [end - NOW for _, end in ends(path).values() if end is not None]
    with opened(path) as catalog:
        catalog.recover(SLOTS, NOW)
    copy = shutil.copytree(path, tmp_path / "copy")
    for now in (NOW - 1e8, NOW - 1e8 + 50):
        with opened(copy) as catalog:
            found = catalog.recover(SLOTS, now)
            lives = sorted(end - (NOW - 1e8) for end in found.expires.tolist() if end < 1e12)
            assert lives == pytest.approx(sorted(left), abs=1e-2)


def test_a_disk_without_room_refuses_a_conversion_by_name_and_not_what_was_converted(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    old(path, 40, 23)

    def full(catalog: Catalog, pages: int) -> None:
        size = catalog._writer.execute("PRAGMA page_count").fetchone()[0]
        catalog._writer.execute(f"PRAGMA max_page_count = {size + pages}")

    with opened(path) as catalog:
        full(catalog, 0)  # the table of slabs finds no page
        with pytest.raises(IOFailedError) as caught:
            catalog.recover(40, NOW)
        assert caught.value.errno == errno.ENOSPC
    assert state(path) == 5
    with opened(path) as catalog:
        assert len(catalog.recover(40, NOW)) == 40
    with opened(path) as catalog:
        full(catalog, 0)
        assert len(catalog.recover(40, NOW - 1e6)) == 40
