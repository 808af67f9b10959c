"""Directories of older format versions: converted in steps, whatever falls between two of them, and nothing is lost."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gdscache.commands.inspect import inspect, verify
from gdscache.disk import conversion as catalog_conversion
from gdscache.disk.catalog import Catalog, PageRecord
from tests.support.disk_parts import binding, make_older, opened, raw, served, ssd_config, store
from tests.support.helpers import Host
from tests.support.places import SUPPORT

EXTENT = 8192
DOCUMENTS = range(12)  # of 4 pages: all slots
ALL_PAGES = dict.fromkeys(DOCUMENTS, 4)
CHILD = SUPPORT / "convert_child.py"


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("current") / "cache"
    with opened(path) as host:
        store(host, DOCUMENTS)
    return path


@pytest.fixture(scope="module")
def older(current: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of version 3."""
    path = tmp_path_factory.mktemp("older") / "cache"
    shutil.copytree(current, path)
    make_older(path)
    return path


def contents(path: Path) -> list[object]:
    with raw(path) as catalogue:
        tables = [
            catalogue.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            for table in ("namespaces", "pages", "checksums", "retention")
        ]
        meta = dict(catalogue.execute("SELECT name, value FROM meta WHERE name <> 'created'"))
    return [*tables, meta]


@pytest.mark.parametrize("version", [1, 3])
def test_what_is_converted_is_what_this_version_writes(current: Path, tmp_path: Path, version: int) -> None:
    """Byte for byte; and all of it is served."""
    path = tmp_path / "cache"
    shutil.copytree(current, path)
    make_older(path, version)
    assert contents(path)[2:] != contents(current)[2:] if version == 3 else True
    Catalog.open(path, extent_bytes=EXTENT, durability="process").close()
    assert contents(path) == contents(current)
    with opened(path) as host:
        assert served(host, DOCUMENTS) == ALL_PAGES
        assert not host.engine.check().problems


def test_no_page_is_read(older: Path, tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes((older / "catalog.sqlite").read_bytes())
    Catalog.open(tmp_path, extent_bytes=EXTENT, durability="process").close()
    assert {path.name for path in tmp_path.iterdir()} == {"catalog.sqlite"}


@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.suite), 4])
def test_a_directory_of_several_is_converted_too(tmp_path: Path, version: int) -> None:
    config = ssd_config(tmp_path / "first", 24)
    config["ssd"]["stripes"] = [str(tmp_path / "second")]
    config["ssd"]["capacity"] = (4 << 20) + 24 * EXTENT
    host = Host(config, blocks=16)
    store(host, DOCUMENTS)
    host.engine.close()
    make_older(tmp_path / "first", version)
    assert inspect(tmp_path / "first")["format_version"] == version
    host = Host(config, blocks=16)
    assert served(host, DOCUMENTS) == ALL_PAGES
    host.engine.close()
    found = inspect(tmp_path / "first")
    assert (found["format_version"], found["unbound_from_slot"], len(found["stripes"])) == (5, None, 2)


def die_at(places: Sequence[tuple[Path, int]]) -> list[int]:
    """How each fork ended that opened a directory until some statement."""
    arguments = [str(part) for place in places for part in place]
    done = subprocess.run(
        [sys.executable, str(CHILD), str(EXTENT), *arguments], capture_output=True, text=True, timeout=300, check=True
    )
    assert not done.stderr, done.stderr
    return [int(line) for line in done.stdout.split()]


def killed(older: Path, current: Path, scratch: Path, points: Sequence[int]) -> None:
    """Open copies that each die at one statement; then look at what is left, die once more, and open to the end."""
    places = [(scratch / str(point), point) for point in points]
    for path, _ in places:
        shutil.copytree(older, path)
    ends = die_at(places)
    assert ends.count(signal.SIGKILL) > 0.5 * len(points), "most points are behind the end"
    steps = set()
    for path, _ in places[::LOOKS]:
        report = inspect(path)
        steps.add(report["unbound_from_slot"])
        assert report["pages"] == 48
    assert len(steps) > 3 or len(points) < 100, f"kills fall between few steps: {steps}"
    again = die_at([(path, 3 + point // 2) for path, point in places])
    assert again.count(signal.SIGKILL) > 0
    for path, _ in places[::LOOKS]:
        found = verify(path)
        assert (found["good_pages"], found["bad_pages"]) == (48, 0)
    expected = contents(current)
    for path, _ in places:
        Catalog.open(path, extent_bytes=EXTENT, durability="process").close()
        assert contents(path) == expected
        shutil.rmtree(path)


LOOKS = 7  # every so many points, what is left is looked at before it is opened again
POINTS = 150  # more statements than a conversion of 48 pages has


def test_a_kill_at_some_statements(older: Path, current: Path, tmp_path: Path) -> None:
    killed(older, current, tmp_path, range(1, POINTS, 19))


@pytest.mark.suite
def test_a_kill_at_many_statements(older: Path, current: Path, tmp_path: Path) -> None:
    killed(older, current, tmp_path, range(0, POINTS, 6))


@pytest.mark.soak
def test_a_kill_at_every_statement(older: Path, current: Path, tmp_path: Path) -> None:
    killed(older, current, tmp_path, range(POINTS))


def many(path: Path, pages: int, layers: int) -> dict[int, tuple[bytes, bytes]]:
    """A catalogue of version 3 without a slab: slot → key and the checksums of the bytes."""
    chance = np.random.default_rng(pages)
    rows = {slot: (chance.bytes(32), chance.bytes(8 * layers)) for slot in range(pages)}
    with Catalog.open(path, extent_bytes=EXTENT, durability="process") as catalog:
        records = [PageRecord(s, k, SPACE, SPACE, 1, s, np.frombuffer(v, np.uint64)) for s, (k, v) in rows.items()]
        catalog.commit(records, [], {})
    with raw(path) as catalogue:
        catalogue.execute("UPDATE meta SET value = 3 WHERE name = 'format_version'")
        catalogue.execute("DELETE FROM meta WHERE name IN ('head_groups', 'striped')")
    return rows


SPACE = bytes(range(32))


@pytest.mark.soak
def test_kills_at_any_time(tmp_path: Path) -> None:
    """Of a larger catalogue, again and again, until it is converted."""
    seed = time.time_ns()
    print(f"seed {seed}")
    chance = random.Random(seed)
    rows = many(tmp_path, 20_000, 32)
    kills = 0
    while inspect_converted(tmp_path) is not None:
        arguments = [sys.executable, str(CHILD), str(EXTENT), str(tmp_path), str(1 << 40)]
        child = subprocess.Popen(arguments, start_new_session=True)
        try:
            child.wait(timeout=0.3 + chance.uniform(0, 0.2))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            kills += 1
        child.wait()
    assert kills > 3
    for slot, (key, sums) in converted(tmp_path).items():
        expected = [
            (value + more) % (1 << 64)
            for value, more in zip(struct.unpack("<32Q", rows[slot][1]), binding(key, 32), strict=True)
        ]
        assert sums == struct.pack("<32Q", *expected)


def inspect_converted(path: Path) -> int | None:
    """The slot up to which it is converted; None: all of it."""
    with raw(path) as catalogue:
        meta = dict(catalogue.execute("SELECT name, value FROM meta"))
    return meta.get("converted") if meta["format_version"] == 5 else 0


def converted(path: Path) -> dict[int, tuple[bytes, bytes]]:
    with raw(path) as catalogue:
        found = catalogue.execute("SELECT slot, key, sums FROM pages JOIN checksums USING (slot)").fetchall()
    return {slot: (key, sums) for slot, key, sums in found}


def test_a_step_is_bounded_in_rows_and_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says how far it came."""
    for rows, nbytes, pages in ((7, 1 << 20, 7), (1000, 10 * 24, 11)):
        path = tmp_path / str(rows)
        path.mkdir()
        many(path, 50, 3)
        monkeypatch.setattr(catalog_conversion, "STEP_ROWS", rows)
        monkeypatch.setattr(catalog_conversion, "STEP_BYTES", nbytes)
        monkeypatch.setattr(catalog_conversion, "SAY_SECONDS", 0.0)
        statements: list[str] = []
        with raw(path) as catalogue, caplog.at_level(logging.WARNING, "gdscache.disk.catalog"):
            catalogue.set_trace_callback(statements.append)
            catalog_conversion.convert(catalogue, path / "catalog.sqlite")
        transactions = "\n".join(statements).split("COMMIT")
        assert max(text.count("UPDATE checksums") for text in transactions) == pages
        assert sum(text.count("UPDATE checksums") for text in transactions) == 50
    assert "7 of 50 slots" in caplog.text
    assert "11 of 50 slots" in caplog.text


def test_rows_that_cannot_be_bound_cost_only_themselves(older: Path, tmp_path: Path) -> None:
    """Checksums of a wrong type or size, of 40 MiB, without a page, of a page without a key, in impossible slots."""
    path = tmp_path / "cache"
    shutil.copytree(older, path)
    with raw(path) as catalogue:
        first = "SELECT pages.slot FROM pages JOIN namespaces ON namespaces.id = namespace ORDER BY recency DESC"
        slots = [slot for (slot,) in catalogue.execute(first)][:6]  # the last pages of the last two documents
        for slot, value in zip(slots, ["'text'", "NULL", "x'010203'", "zeroblob(41943040)", "17", "x''"], strict=True):
            catalogue.execute(f"UPDATE checksums SET sums = {value} WHERE slot = ?", (slot,))
        catalogue.executemany(
            "INSERT INTO checksums VALUES (?, ?)", [(s, bytes(24)) for s in (-(1 << 63), -1, 1000, (1 << 63) - 1)]
        )
    with opened(path) as host:
        found = served(host, DOCUMENTS)
        assert sum(found.values()) >= 48 - 8
        assert {number: pages for number, pages in found.items() if number < 10} == dict.fromkeys(range(10), 4)
        assert not host.engine.check().problems
    assert inspect(path)["format_version"] == 5


def test_a_conversion_seals_a_mix_up_that_is_already_there(older: Path, tmp_path: Path) -> None:
    """As docs/format.md says. Nothing in an older version tells whose checksums lie by a page."""
    path = tmp_path / "cache"
    shutil.copytree(older, path)
    with raw(path) as catalogue:
        first = "SELECT slot, key FROM pages WHERE parent IN (SELECT digest FROM namespaces) ORDER BY slot LIMIT 2"
        (one, other) = catalogue.execute(first).fetchall()
        catalogue.execute("UPDATE pages SET key = x'' WHERE slot = ?", (one[0],))
        catalogue.execute("UPDATE pages SET key = ? WHERE slot = ?", (one[1], other[0]))
        catalogue.execute("UPDATE pages SET key = ? WHERE slot = ?", (other[1], one[0]))
    assert verify(path)["bad_pages"] == 0
    Catalog.open(path, extent_bytes=EXTENT, durability="process").close()
    assert verify(path)["bad_pages"] == 0


def test_a_step_that_fails_costs_nothing(older: Path, current: Path, tmp_path: Path) -> None:
    """Again and again a transaction of the conversion is rolled back; the next open goes on."""
    path = tmp_path / "cache"
    shutil.copytree(older, path)
    for allowed in range(40):
        with raw(path) as catalogue:
            seen = 0

            def refuse(action: int, table: str | None, *_: object, allowed: int = allowed) -> int:
                nonlocal seen
                seen += (action, table) == (sqlite3.SQLITE_UPDATE, "meta")
                return sqlite3.SQLITE_DENY if seen > allowed % 3 else sqlite3.SQLITE_OK

            catalogue.set_authorizer(refuse)
            try:
                catalog_conversion.convert(catalogue, path / "catalog.sqlite")
                break
            except sqlite3.DatabaseError:
                continue
    Catalog.open(path, extent_bytes=EXTENT, durability="process").close()
    assert contents(path) == contents(current)


@pytest.mark.soak
def test_a_million_pages_in_20_seconds(tmp_path: Path) -> None:
    many(tmp_path, 1_000_000, 32)
    begun = time.monotonic()
    Catalog.open(tmp_path, extent_bytes=EXTENT, durability="process").close()
    seconds = time.monotonic() - begun
    print(f"a million pages of 32 layers converted in {seconds:.1f} s")
    assert seconds < 20
