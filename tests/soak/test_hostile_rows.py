"""Rows as no engine writes them, in every column of every table: what cannot be is dropped and counted, and the rest is
served. Nothing raises but at most a named error, nothing grows, and `close` always ends well."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gdscache.commands.inspect.reading import inspect
from gdscache.commands.inspect.verification import verify
from gdscache.errors import GdsCacheError
from tests.support.disk_parts import COLUMNS, PACK, SLOTS, opened, raw, served, store

SINGLE = range(200, 226)  # documents of one page each
NEW = range(300, 303)
LARGE = 20 << 20  # bytes, more than any value that a catalogue has

# As SQL. A column converts what it can (a text of digits is an integer), so they are also tried in blobs.
VALUES = [
    "NULL", "0", "-1", "1", "9223372036854775807", "-9223372036854775808", "9007199254740993", "1.5", "9e999",
    "-9e999", "''", "'77'", "'text'", "CAST(x'ff00fe' AS TEXT)", "x''", "x'00'", "zeroblob(24)", "zeroblob(32)",
    "zeroblob(33)", "CAST(zeroblob(32) AS TEXT)",
]  # fmt: skip
HUGE = [f"zeroblob({LARGE})", f"CAST(replace(hex(zeroblob({LARGE // 2})), '0', 'x') AS TEXT)"]


@pytest.fixture(scope="module", params=PACK)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "cache"
    with opened(path, pack=request.param) as host:
        store(host, SINGLE, 1)
    return path


@pytest.fixture
def path(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def spoil(path: Path, table: str, column: str, values: list[str]) -> int:
    """Give each value to a row of its own, the first one first; how many took it."""
    taken = 0
    with raw(path) as catalogue:
        slots = [slot for (slot,) in catalogue.execute("SELECT place FROM pages ORDER BY recency")]
        for slot, value in zip(slots, values, strict=False):
            if table == "retention":
                catalogue.execute("INSERT OR REPLACE INTO retention VALUES (?, 1, 4000000000000, 0)", (slot,))
            if table == "namespaces":
                digest = hashlib.blake2b(value.encode(), digest_size=32).digest()
                row = catalogue.execute("INSERT INTO namespaces(digest, description) VALUES (?, '{}')", (digest,))
                where, which = "id", row.lastrowid
                catalogue.execute("UPDATE pages SET namespace = ? WHERE place = ?", (which, slot))
            else:
                where, which = "place", slot
            try:
                catalogue.execute(f"UPDATE {table} SET {column} = {value} WHERE {where} = ?", (which,))
                taken += 1
            except (sqlite3.IntegrityError, sqlite3.OperationalError):  # a slot that is no integer, or there already
                continue
    return taken


def looked_at(path: Path) -> None:
    for look in (inspect, verify):
        with contextlib.suppress(GdsCacheError):
            look(path)


def live_on(path: Path, spoiled: int) -> None:
    """Whatever it holds: people look into it, an engine opens it, serves what was left alone, takes new pages, closes;
    and a second time."""
    looked_at(path)
    served_again(path, spoiled)


def served_again(path: Path, spoiled: int) -> None:
    for new in (NEW, ()):
        with opened(path) as host:
            found = served(host, SINGLE if new else (), 1)
            assert set(list(found.values())[spoiled:]) <= {1}, "what nobody touched is lost"
            store(host, new, 1)
            assert served(host, NEW, 1) == dict.fromkeys(NEW, 1)
            assert not host.engine.check().problems
            ssd = host.engine.stats()["tiers"]["ssd"]
            assert ssd["pages"] + ssd["free_slots"] == SLOTS
        assert not list(path.glob("catalog.corrupt-*")), "a row cost the whole catalogue"
    assert not list(path.glob("catalog.suspect"))


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_hostile_values_cost_their_own_pages_at_most(path: Path, table: str, column: str) -> None:
    assert spoil(path, table, column, VALUES) > 3
    live_on(path, len(VALUES))


@pytest.mark.parametrize(("table", "column"), COLUMNS)
@pytest.mark.parametrize("step", [pytest.param(7, marks=pytest.mark.suite), pytest.param(1, marks=pytest.mark.soak)])
def test_hostile_values_in_every_row(filled: Path, tmp_path: Path, table: str, column: str, step: int) -> None:
    """Each, or one in seven."""
    for number, value in enumerate(VALUES[COLUMNS.index((table, column)) % step :: step]):
        path = tmp_path / str(number)
        shutil.copytree(filled, path)
        with raw(path) as catalogue, contextlib.suppress(sqlite3.IntegrityError, sqlite3.OperationalError):
            catalogue.execute(f"UPDATE OR IGNORE {table} SET {column} = {value}")
        live_on(path, len(SINGLE))
        shutil.rmtree(path)


def peak(action: Callable[[], None]) -> int:
    """Bytes that Python's own objects took at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def never_read(path: Path) -> None:
    """No such value is taken into memory, by an engine or by whoever looks into the directory."""
    assert peak(lambda: looked_at(path)) < LARGE // 2
    assert peak(lambda: served_again(path, len(HUGE))) < LARGE // 2


def test_checksums_as_large_as_a_file_are_never_read(path: Path) -> None:
    spoil(path, "checksums", "sums", HUGE[:1])
    never_read(path)


@pytest.mark.soak
@pytest.mark.parametrize(("table", "column"), [c for c in COLUMNS if c[1] != "id"])
def test_no_value_as_large_as_a_file_is_read_anywhere(path: Path, table: str, column: str) -> None:
    spoil(path, table, column, HUGE)
    never_read(path)


UNTIL_5000 = "UNION ALL SELECT i + 1 FROM n WHERE i < 5000"


@pytest.mark.parametrize(
    "statement",
    [
        *(f"UPDATE meta SET value = {v} WHERE name = '{n}'" for n in ("striped", "created") for v in ("-5", "x'ff'")),
        f"UPDATE meta SET value = zeroblob({LARGE}) WHERE name = 'created'",
        f"INSERT INTO meta VALUES ('more', zeroblob({LARGE}))",
        f"INSERT INTO meta VALUES (CAST(zeroblob({LARGE}) AS TEXT), 1)",
        f"INSERT INTO meta WITH RECURSIVE n(i) AS (VALUES (1) {UNTIL_5000}) SELECT i, i FROM n",
    ],
)
def test_a_table_of_facts_that_is_none(path: Path, statement: str) -> None:
    """Set aside, refused or put up with: by name, and without a wrong byte."""
    with raw(path) as catalogue:
        catalogue.execute(statement)

    def open_it() -> None:
        with contextlib.suppress(GdsCacheError):
            inspect(path)
        with contextlib.suppress(GdsCacheError), opened(path) as host:
            served(host, SINGLE[:4], 1)
            store(host, NEW, 1)
            assert served(host, NEW, 1) == dict.fromkeys(NEW, 1)

    # A catalogue that is set aside was judged in a copy, which is a file; SQLite has one value in memory at a time.
    assert peak(open_it) < LARGE * 5 // 4


# Pages that follow themselves.


@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_pages_that_follow_themselves_go_and_are_counted(path: Path, length: int) -> None:
    """Whatever follows them stays, and the slab takes as many new pages as it has slots."""
    with raw(path) as catalogue:
        rows = catalogue.execute("SELECT place, key FROM pages ORDER BY recency").fetchall()
        circle, behind = rows[:length], rows[length : length + 5]
        for (slot, _), (_, parent) in zip(circle, [circle[-1], *circle[:-1]], strict=True):
            catalogue.execute("UPDATE pages SET parent = ? WHERE place = ?", (parent, slot))
        for (slot, _), (_, parent) in zip(behind, [circle[0], *behind[:-1]], strict=True):
            catalogue.execute("UPDATE pages SET parent = ? WHERE place = ?", (parent, slot))
    assert inspect(path)["unusable_rows"] == {"parent": length}
    with opened(path) as host:
        ssd = host.engine.stats()["tiers"]["ssd"]
        assert ssd["lost_at_recovery"] == {"parent": length}
        assert ssd["pages"] == len(SINGLE) - length
        assert served(host, SINGLE, 1) == {n: int(i >= length) for i, n in enumerate(SINGLE)}
        assert not host.engine.check().problems
        fresh = range(400, 400 + SLOTS // 4)
        for number in fresh:
            store(host, [number], 4)
        assert served(host, fresh, 4) == dict.fromkeys(fresh, 4), "pages that never go take up the slab"
        assert not host.engine.check().problems


def test_a_long_chain_in_any_order_is_no_circle(tmp_path: Path) -> None:
    """Every page of the slab in one chain, its slots in a random order."""
    path = tmp_path / "cache"
    with opened(path) as host:
        store(host, range(12), 4)
    with raw(path) as catalogue:
        rows = catalogue.execute("SELECT place, key FROM pages ORDER BY key").fetchall()
        catalogue.execute("UPDATE pages SET parent = zeroblob(32) WHERE place = ?", rows[0][:1])
        for (slot, _), (_, parent) in zip(rows[1:], rows[:-1], strict=True):
            catalogue.execute("UPDATE pages SET parent = ? WHERE place = ?", (parent, slot))
    with opened(path) as host:
        ssd = host.engine.stats()["tiers"]["ssd"]
        assert (ssd["lost_at_recovery"], ssd["pages"]) == ({}, SLOTS)
        store(host, range(20, 32), 4)
        assert not host.engine.check().problems


# Namespaces that nobody uses.


def crowd(path: Path, count: int) -> None:
    with raw(path) as catalogue:
        catalogue.execute("BEGIN")
        catalogue.executemany(
            "INSERT INTO namespaces(digest, description) VALUES (?, '{}')",
            ((hashlib.blake2b(b"%d" % i, digest_size=32).digest(),) for i in range(count)),
        )
        catalogue.execute("COMMIT")


def names(path: Path) -> int:
    with raw(path) as catalogue:
        return int(catalogue.execute("SELECT count(*) FROM namespaces").fetchone()[0])


def test_empty_namespaces_go_at_open(filled: Path, tmp_path: Path) -> None:
    for count in (10, 5_000):
        path = tmp_path / str(count)
        shutil.copytree(filled, path)
        crowd(path, count)
        assert names(path) == count + 2
        live_on(path, 0)
        assert names(path) == 2
        assert inspect(path)["pages"] == len(SINGLE) + len(NEW)
        described = [n["fields"] for n in inspect(path)["namespaces"]]
        assert all(described), "what the namespaces mean is forgotten"


@pytest.mark.suite
def test_300_000_empty_namespaces_cost_little(path: Path) -> None:
    crowd(path, 300_000)
    begun = time.process_time()  # others may use the processors, too
    with opened(path) as host:
        seconds = time.process_time() - begun
        assert served(host, SINGLE, 1) == dict.fromkeys(SINGLE, 1)
    print(f"opened in {seconds:.2f} s of processors")
    assert seconds < 2
    assert names(path) == 2


def test_an_end_beyond_all_time_does_not_break_close(path: Path) -> None:
    """`close` writes retentions down; the end of such a row was no number that SQLite takes."""
    with raw(path) as catalogue:
        slots = [slot for (slot,) in catalogue.execute("SELECT place FROM pages ORDER BY recency")]
        for slot, end in zip(slots, [(1 << 63) - 1, (1 << 63) - 1000, (1 << 53) + 1, 1 << 53], strict=False):
            catalogue.execute("INSERT INTO retention VALUES (?, 0, ?, 0)", (slot, end))
    with opened(path) as host:
        assert host.engine.stats()["tiers"]["ssd"]["lost_at_recovery"] == {"row": 3}
        store(host, SINGLE[:6], 1)
        assert served(host, SINGLE, 1) == dict.fromkeys(SINGLE, 1)
