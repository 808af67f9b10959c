"""The catalogue: what was committed is there, whole, after anything; what is damaged is dropped, loudly."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gdscache.disk import catalog as catalog_module
from gdscache.disk import catalog_file
from gdscache.disk.catalog import Catalog, PageRecord, Recovered
from gdscache.errors import (
    EngineClosedError,
    InvalidValueError,
    IOFailedError,
    NotARegularFileError,
    ShardsError,
    SlotRangeError,
)
from tests.support import disk_parts
from tests.support.disk_parts import raw
from tests.support.helpers import together
from tests.support.index_machine import name

EXTENT = 1 << 20
LAYERS = 4
NAMESPACE = name("namespace")


ODD = [b"k" * 32, b"k" * 31, b"k" * 33, b"", "k" * 32, "77", None, 1, 77, 3, 1.5, 77.0, -5]


def page(slot: int, generation: int = 0, recency: int | None = None, namespace: bytes = NAMESPACE) -> PageRecord:
    """The one page that belongs into `slot` in `generation`: everything else about it follows from the two."""
    key = name(slot, generation)
    sums = np.frombuffer(name("sums", slot, generation), "<u8")[:LAYERS].astype(np.uint64)
    length = 1 + (slot * 37 + generation) % EXTENT
    return PageRecord(slot, key, name("parent", slot), namespace, length, slot if recency is None else recency, sums)


def open_catalog(
    path: Path, extent_bytes: int = EXTENT, shards: int = 1, clock: Callable[[], float] = time.time
) -> Catalog:
    return Catalog(path, extent_bytes=extent_bytes, durability="process", shards=shards, wall_clock=clock)


sums_of = functools.partial(disk_parts.sums_of, layers=LAYERS)


def slots_of(found: Recovered) -> list[int]:
    """The least recent first."""
    return found.slots[found.order].tolist()


def rows(found: Recovered) -> dict[int, tuple[bytes, bytes, bytes, int, int]]:
    columns = (found.keys, found.parents, found.namespaces, found.lengths, found.recency)
    of = zip(found.slots.tolist(), *(column.tolist() for column in columns), strict=True)
    return {slot: (key, parent, found.digests[name], *rest) for slot, key, parent, name, *rest in of}  # type: ignore[misc]


def row(record: PageRecord) -> tuple[bytes, bytes, bytes, int, int]:
    return record.key, record.parent, record.namespace, record.length, record.recency


def fill(path: Path, pages: int) -> None:
    with open_catalog(path) as catalog:
        catalog.commit([page(i) for i in range(pages)], [], {})


def test_numpy_integers_are_stored_as_integers(tmp_path: Path) -> None:
    record = page(3)
    odd = PageRecord(np.int64(3), record.key, record.parent, NAMESPACE, np.int32(77), np.uint8(9), record.checksums)  # type: ignore[arg-type]
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(1), odd], np.array([5]), {np.int64(1): np.int64(4)})  # type: ignore[arg-type, dict-item]
        found = catalog.recover(8)
        assert (slots_of(found), found.lengths[1], found.recency.tolist()) == ([1, 3], 77, [4, 9])
        assert sums_of(catalog, np.array([3], np.int32))[0] is not None  # type: ignore[arg-type]
        catalog.commit([], np.array([1, 3]), {})  # type: ignore[arg-type]
        assert len(catalog.rows()) == 0


def test_a_commit_is_all_or_nothing(tmp_path: Path) -> None:
    other = name("other namespace")
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(0), page(1)], [], {})
        with pytest.raises(SlotRangeError, match="still has a page"):
            catalog.commit([page(7, namespace=other), page(1, generation=1)], [0], {1: 50})
        assert len(catalog.rows()) == 2
        assert other not in catalog.namespaces()
        catalog.commit([page(7, namespace=other)], [], {})  # the namespace's id was not remembered either
        assert rows(catalog.recover(8)) == {0: row(page(0)), 1: row(page(1)), 7: row(page(7, namespace=other))}


def test_a_forked_child_that_closes_it_takes_nothing_away(tmp_path: Path) -> None:
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(1)], [], {})
        log = catalog.path.with_name("catalog.sqlite-wal")
        size = log.stat().st_size
        if (child := os.fork()) == 0:
            try:
                catalog.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert log.stat().st_size == size > 0
        catalog.commit([page(2)], [], {})
    with open_catalog(tmp_path) as catalog:
        assert len(catalog.recover(9)) == 2


def test_checksums_of_many_slots_in_any_order(tmp_path: Path) -> None:
    wide = PageRecord(900, name(900), NAMESPACE, NAMESPACE, 1, 1, np.arange(61, dtype=np.uint64))
    with open_catalog(tmp_path) as catalog:
        catalog.commit([*[page(i) for i in range(0, 800, 2)], wide], [], {})
        asked = [*random.Random(1).sample(range(600), 400), *range(700, 800), 900, 4, 4]  # alone, and in a row
        assert sums_of(catalog, asked, layers=61)[500].tolist() == list(range(61))
        for slot, sums in zip(asked, sums_of(catalog, asked), strict=True):
            if slot == 900 or slot % 2:
                assert sums is None
            else:
                np.testing.assert_array_equal(sums, page(slot).checksums)
        assert sums_of(catalog, []) == []


def test_checksums_of_shards_come_one_after_the_other(tmp_path: Path) -> None:
    """As rows, or as a matrix of shards and layers; a row of another number of them has none."""
    flat = page(1)._replace(checksums=np.arange(6, dtype=np.uint64))
    matrix = page(2)._replace(checksums=np.arange(10, 16, dtype=np.uint64).reshape(2, 3))
    (place := tmp_path / "a cache").mkdir()
    with open_catalog(place, shards=2) as catalog:
        catalog.commit([flat, matrix, page(3)], [], {})
    with open_catalog(place, shards=2) as catalog:
        assert len(catalog.recover(8)) == 3
        slots, sums = catalog.checksum_rows([1, 2, 3], 3)
        assert (slots.tolist(), sums.tolist()) == ([1, 2], [[*range(6)], [*range(10, 16)]])
        assert catalog.checksum_rows([3], 2)[0].tolist() == [3]
    with pytest.raises(ShardsError, match="in 2 shards, and this engine has 1") as caught:
        open_catalog(place)
    assert f"rm -r '{place}'" in caught.value.hint


def test_recovery_crosses_its_own_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "SCAN_SLOTS", 16)
    records = [page(slot, recency=-slot) for slot in [*range(0, 40), 63, 64, 95, 200]]
    with open_catalog(tmp_path) as catalog:
        catalog.commit(records, [], {})
        found = catalog.recover(200)
        assert slots_of(found) == [95, 64, 63, *range(39, -1, -1)]
        assert rows(found) == {r.slot: row(r) for r in records[:-1]}


def test_rows_of_later_slots_are_spared_until_they_are_cleaned(tmp_path: Path) -> None:
    other = name("other")
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(slot, namespace=NAMESPACE if slot < 4 else other) for slot in range(8)], [], {})
    for _ in range(2):
        with open_catalog(tmp_path) as catalog:
            found = catalog.recover(4, spare=True)
            assert (slots_of(found), found.dropped) == ([0, 1, 2, 3], {"slot": 4})
            assert len(catalog.rows()) == len(catalog.checksum_rows(range(8), LAYERS)[0]) == 8
            assert catalog.namespaces().keys() == {NAMESPACE, other}
    with open_catalog(tmp_path) as catalog:
        catalog.clean(catalog.recover(4, spare=True), 4)
        assert len(catalog.rows()) == len(catalog.checksum_rows(range(8), LAYERS)[0]) == 4
        assert catalog.namespaces().keys() == {NAMESPACE}


@pytest.mark.parametrize("chunk", [8, 64])
def test_pages_of_several_namespaces_and_lengths_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Rows of one namespace and length are read in another way than mixed ones."""
    monkeypatch.setattr(catalog_module, "SCAN_SLOTS", chunk)
    other = name("other")
    records = [page(slot, namespace=NAMESPACE if slot < 16 or slot % 3 else other) for slot in range(40)]
    records = [r._replace(length=5 if 8 <= r.slot < 24 else r.length) for r in records]
    with open_catalog(tmp_path) as catalog:
        catalog.commit(records, [], {})
        found = catalog.recover(40)
        assert rows(found) == {r.slot: row(r) for r in records}
        assert sorted(found.digests) == sorted([NAMESPACE, other])


@pytest.mark.suite
@given(rows_=st.lists(st.tuples(st.sampled_from(ODD), st.sampled_from(ODD), *[st.sampled_from(ODD)] * 3), max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_fast_reading_takes_no_row_that_is_not_whole(rows_: list[tuple[object, ...]]) -> None:
    """Against the condition that docs/format.md states, for values of every type in every column."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with open_catalog(path) as catalog:
            catalog.commit([page(i)._replace(length=77) for i in (0, 1)], [], {})
        with raw(path) as connection:
            insert = "INSERT INTO pages(place, key, parent, namespace, length, recency) VALUES (?, ?, ?, ?, ?, ?)"
            connection.executemany(insert, [(i + 2, *values) for i, values in enumerate(rows_)])
            whole = connection.execute(f"SELECT place FROM pages WHERE {catalog_module.WHOLE_ROW}").fetchall()
        with open_catalog(path) as catalog:
            found = catalog.recover(100)
            assert found.dropped["row"] == len(rows_) + 2 - len(whole)
            assert len(found) + sum(found.dropped.values()) == len(rows_) + 2
            assert set(found.slots.tolist()) <= {slot for (slot,) in whole}


def test_two_rows_of_one_slot_are_damage() -> None:
    """A table that is whole has none; of one that is not, SQLite gives what it finds."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE pages(place, key, parent, namespace, length, recency, packed)")
        insert = "INSERT INTO pages VALUES (?, randomblob(32), randomblob(32), 1, 5, 0, 0)"
        connection.executemany(insert, [(2,), (1,)])
        assert sorted(catalog_module._read(connection, 8).slots.tolist()) == [1, 2]
        connection.execute(insert, (2,))
        with pytest.raises(catalog_file.CorruptCatalogError, match="two rows"):
            catalog_module._read(connection, 8)


def test_closing(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    catalog.commit([page(0)], [], {})
    catalog.close()
    catalog.close()
    assert {p.name for p in tmp_path.iterdir()} == {"catalog.sqlite"}  # the log is folded in
    for use in (
        lambda: catalog.commit([], [0], {}),
        lambda: catalog.recover(1),
        lambda: sums_of(catalog, [0]),
        catalog.namespaces,
        catalog.rows,
    ):
        with pytest.raises(EngineClosedError):
            use()


# Rows that cannot be believed.


@pytest.mark.parametrize(
    ("sql", "cause"),
    [
        ("UPDATE pages SET key = x'0102' WHERE place = 3", "row"),
        ("UPDATE pages SET key = NULL WHERE place = 3", "row"),
        ("UPDATE pages SET key = '0123456789abcdef0123456789abcdef' WHERE place = 3", "row"),
        ("UPDATE pages SET parent = x'' WHERE place = 3", "row"),
        ("UPDATE pages SET namespace = NULL WHERE place = 3", "row"),
        ("UPDATE pages SET recency = 1.5 WHERE place = 3", "row"),
        ("UPDATE pages SET length = x'00' WHERE place = 3", "row"),
        ("UPDATE pages SET length = 0 WHERE place = 3", "length"),
        (f"UPDATE pages SET length = {EXTENT + 1} WHERE place = 3", "length"),
        ("UPDATE pages SET namespace = 77 WHERE place = 3", "namespace"),
        ("UPDATE pages SET key = (SELECT key FROM pages WHERE place = 5) WHERE place = 3", "duplicate"),
        ("UPDATE pages SET place = -1 WHERE place = 3", "slot"),
        ("UPDATE pages SET place = 8 WHERE place = 3", "slot"),
        ("UPDATE pages SET place = 1 << 40 WHERE place = 3", "slot"),
        ("INSERT INTO retention VALUES (3, NULL, NULL, 0)", "row"),
        ("INSERT INTO retention VALUES (3, 'high', 4000000000000, 0)", "row"),
        ("INSERT INTO retention VALUES (3, 1, 'soon', 0)", "row"),
        ("INSERT INTO retention VALUES (3, 1, 1000, NULL)", "row"),
        ("INSERT INTO retention VALUES (3, 1, 1000, -1)", "row"),
        (f"INSERT INTO retention VALUES (3, 1, 1000, {(1 << 53) + 1})", "row"),
        (f"INSERT INTO retention VALUES (3, 1, {(1 << 53) + 1}, 0)", "row"),
        (f"INSERT INTO retention VALUES (3, 1, {-(1 << 63)}, 0)", "row"),
        ("UPDATE pages SET packed = 2 WHERE place = 3", "packed"),
        ("UPDATE pages SET packed = NULL WHERE place = 3", "row"),
    ],
)
def test_a_row_that_is_not_whole_is_deleted_and_counted(tmp_path: Path, sql: str, cause: str) -> None:
    fill(tmp_path, 8)
    with raw(tmp_path) as connection:
        connection.execute(sql)
    with open_catalog(tmp_path) as catalog:
        found = catalog.recover(8)
        assert found.dropped == {cause: 1}
        assert rows(found) == {i: row(page(i)) for i in range(8) if i != 3}
        assert len(catalog.rows()) == 7
        catalog.commit([page(3, generation=1)], [], {})  # the slot is free again
    with open_catalog(tmp_path) as catalog:
        found = catalog.recover(8)
        assert not found.dropped
        assert rows(found)[3] == row(page(3, generation=1))


def test_a_retention_without_a_page_is_deleted(tmp_path: Path) -> None:
    fill(tmp_path, 6)
    with raw(tmp_path) as connection:
        connection.execute(
            "INSERT INTO retention VALUES (7, 1, NULL, 0), (2, 1, 5000, 0), (-1, 1, NULL, 0), (900, 1, NULL, 0)"
        )
    with open_catalog(tmp_path) as catalog:
        found = catalog.recover(8)
        assert not found.dropped
        assert catalog.retentions() == {2: (1, 5.0)}
        assert (found.slots[found.retained].tolist(), found.priorities.tolist(), found.expires.tolist()) == (
            [2],
            [1],
            [5],
        )


def test_ends_are_kept_in_milliseconds_rounded_down(tmp_path: Path) -> None:
    ends = [1.0004, 1.0009, 1700000000.123456, 0.0001]
    with open_catalog(tmp_path, clock=lambda: 0.4) as catalog:
        catalog.commit([page(i)._replace(expires=end) for i, end in enumerate(ends)], [], {})
        assert [end for _, end in catalog.retentions().values()] == [1.0, 1.0, 1700000000.123, 0.0]
    with raw(tmp_path) as connection:
        connection.execute("UPDATE pages SET length = 0")
    with open_catalog(tmp_path) as catalog:
        assert catalog.recover(4, 0.5).dropped == {"expired": 1, "length": 3}


def test_of_a_key_twice_the_most_recent_row_stays(tmp_path: Path) -> None:
    twin = page(6)
    with open_catalog(tmp_path) as catalog:
        twins = [
            PageRecord(s, twin.key, twin.parent, NAMESPACE, 1, r, twin.checksums) for s, r in [(0, 4), (1, 9), (2, 1)]
        ]
        catalog.commit([*twins, page(3, recency=5)], [], {})
        found = catalog.recover(8)
        assert (slots_of(found), found.dropped) == ([3, 1], {"duplicate": 2})
        assert sums_of(catalog, [0, 2]) == [None, None]


def test_damaged_checksums_are_none(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    with raw(tmp_path) as connection:
        connection.execute("UPDATE checksums SET sums = x'010203' WHERE place = 0")
        connection.execute("UPDATE checksums SET sums = 'text' WHERE place = 1")
        connection.execute("DELETE FROM checksums WHERE place = 2")
    with open_catalog(tmp_path) as catalog:
        assert slots_of(catalog.recover(4)) == [0, 1, 2, 3]
        assert [sums is None for sums in sums_of(catalog, [0, 1, 2, 3])] == [True, True, True, False]


# Namespaces.


def test_namespaces_do_not_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "PRUNE_NAMESPACES", 8)
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(0)], [], {})
        described = {name("tenant", turn): {"tenant": turn} for turn in range(100)}
        for turn in range(100):  # a tenant each, whose page is evicted by the next one's
            tenant = name("tenant", turn)
            catalog.commit([page(1, turn, namespace=tenant)], [1], {}, described=described)
            assert len(catalog.namespaces()) <= 10
            assert catalog.namespaces()[tenant] == {"tenant": turn}
        first = name("tenant", 0)  # its row has gone meanwhile
        assert first not in catalog.namespaces()
        catalog.commit([page(2, namespace=first)], [], {}, described=described)
        assert catalog.namespaces()[first] == {"tenant": 0}
        found = rows(catalog.recover(4))
    assert found == {
        0: row(page(0)),
        1: row(page(1, 99, namespace=name("tenant", 99))),
        2: row(page(2, namespace=first)),
    }


def test_a_namespace_without_description_gets_it_by_the_next_engine_that_knows_it(tmp_path: Path) -> None:
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(0)], [], {})
        assert catalog.namespaces() == {NAMESPACE: {}}
    for described in ({NAMESPACE: {"model": "tiny"}}, {}):
        with open_catalog(tmp_path) as catalog:
            catalog.commit([page(1 + len(described))], [], {}, described=described)
            assert catalog.namespaces() == {NAMESPACE: {"model": "tiny"}}


# A file that cannot be used.


class WithoutLog(sqlite3.Connection):
    """As on a file system where SQLite cannot have one."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("journal_mode = WAL", "journal_mode = DELETE"), *values)


def test_where_there_can_be_no_log_is_no_place_for_a_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_catalog(tmp_path).close()
    with monkeypatch.context() as patch:
        patch.setattr(catalog_file.sqlite3, "connect", functools.partial(sqlite3.connect, factory=WithoutLog))
        with pytest.raises(IOFailedError, match="cannot use a WAL here"):
            open_catalog(tmp_path)
    open_catalog(tmp_path).close()


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="'always'"):
        Catalog(tmp_path, extent_bytes=EXTENT, durability="always")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", ["link", "directory", "fifo"])
def test_only_a_regular_file_will_do(tmp_path: Path, make: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "catalog.sqlite"
    {"link": lambda: path.symlink_to(victim), "directory": path.mkdir, "fifo": lambda: os.mkfifo(path)}[make]()
    with pytest.raises(NotARegularFileError, match=r"catalog\.sqlite"):
        open_catalog(tmp_path)
    assert victim.read_text() == "precious"


def zero(data: bytearray) -> bytes:
    return bytes(len(data))


def middle(data: bytearray) -> bytes:
    """Random bytes over a third of the file: interior pages and leaves of the tables."""
    third = len(data) // 3
    data[third : 2 * third] = random.Random(0).randbytes(third)
    return bytes(data)


def header(at: int, value: int) -> Callable[[bytearray], bytes]:
    def damage(data: bytearray) -> bytes:
        data[at] = value
        return bytes(data)

    return damage


DAMAGE: dict[str, Callable[[bytearray], bytes]] = {
    "zeros": zero,
    "empty": lambda data: b"",
    "one byte": lambda data: b"S",
    "truncated to half": lambda data: bytes(data[: len(data) // 2]),
    "truncated within a page": lambda data: bytes(data[: len(data) - 1000]),
    "random bytes in the middle": middle,
    "not a database": lambda data: b"To be, or not to be\n" * 1000,
    "page size of a lie": header(16, 3),
    "write version of the future": header(18, 9),
    "read version of the future": header(19, 9),
    "schema format of the future": header(47, 9),
    "another encoding": header(59, 2),
    "a root page that is no table": header(100, 0),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("checked", [True, False], ids=["small", "large"])
def test_a_corrupt_catalogue_is_set_aside_and_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, checked: bool
) -> None:
    if not checked:  # as a catalogue that is too large to be walked at open
        if kind == "truncated within a page":
            pytest.skip("the last page holds checksums, which only a use of them reads")
        monkeypatch.setattr(catalog_file, "QUICK_CHECK_BYTES", 0)
    fill(tmp_path, 600)
    path = tmp_path / "catalog.sqlite"
    damaged = DAMAGE[kind](bytearray(path.read_bytes()))
    path.write_bytes(damaged)
    with caplog.at_level(logging.ERROR, "gdscache.disk.catalog"), open_catalog(tmp_path) as catalog:
        found = catalog.recover(600)
        assert len(found) == 0
        assert found.set_aside.name.startswith("catalog.corrupt-")
        assert found.set_aside.read_bytes() == damaged
        assert [r.levelno for r in caplog.records] == [logging.ERROR]
        assert str(found.set_aside) in caplog.text
        catalog.commit([page(0)], [], {})
    assert {p.name for p in tmp_path.iterdir()} == {"catalog.sqlite", found.set_aside.name}
    with open_catalog(tmp_path) as catalog:
        assert slots_of(catalog.recover(600)) == [0]


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE pages",
        "DROP TABLE meta",
        "DROP TABLE retention",
        "ALTER TABLE pages DROP COLUMN parent",
        "ALTER TABLE pages ADD COLUMN more",
        "CREATE TRIGGER t AFTER INSERT ON pages BEGIN DELETE FROM pages; END",
        "DELETE FROM meta WHERE name = 'striped'",
        "DROP TABLE slabs",
        "DELETE FROM slabs",
        "UPDATE slabs SET id = 1",
        "UPDATE slabs SET extent_bytes = 'large'",
        "UPDATE slabs SET extent_bytes = 0",
        "UPDATE slabs SET shards = 0",
        "UPDATE slabs SET shards = 257",
        "UPDATE meta SET value = 'one' WHERE name = 'format_version'",
    ],
)
def test_tables_of_the_wrong_shape_are_set_aside(tmp_path: Path, sql: str) -> None:
    fill(tmp_path, 4)
    with raw(tmp_path) as connection:
        connection.execute(sql)
    with open_catalog(tmp_path) as catalog:
        found = catalog.recover(4)
        assert found.set_aside is not None
        assert len(found) == 0


def test_another_applications_database_is_kept(tmp_path: Path) -> None:
    with raw(tmp_path) as connection:
        connection.execute("CREATE TABLE meta(name, value)")
        connection.execute("CREATE TABLE songs(title)")
        connection.execute("INSERT INTO songs VALUES ('Winterreise')")
    with open_catalog(tmp_path) as catalog:
        aside = catalog.recover(4).set_aside
    assert aside is not None
    with contextlib.closing(sqlite3.connect(aside)) as connection:
        assert connection.execute("SELECT title FROM songs").fetchall() == [("Winterreise",)]


def test_statistics_of_sqlites_own_are_no_damage(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    with raw(tmp_path) as connection:
        connection.execute("ANALYZE")
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as connection:
        connection.execute("VACUUM")
    with open_catalog(tmp_path) as catalog:
        assert slots_of(catalog.recover(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("content", [b"\0" * 5000, random.Random(3).randbytes(50_000), b"x"])
def test_a_log_of_garbage_costs_nothing_that_is_in_the_database(tmp_path: Path, content: bytes) -> None:
    fill(tmp_path, 50)
    (tmp_path / "catalog.sqlite-wal").write_bytes(content)
    (tmp_path / "catalog.sqlite-shm").write_bytes(content)
    with open_catalog(tmp_path) as catalog:
        assert rows(catalog.recover(50)) == {i: row(page(i)) for i in range(50)}


def test_a_log_that_is_damaged_half_way_leaves_whole_commits(tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    copy.mkdir()
    with open_catalog(live) as catalog:
        for batch in range(20):
            catalog.commit([page(batch * 10 + i) for i in range(10)], [], {})
        for suffix in ("", "-wal"):  # as a power cut finds them
            (copy / f"catalog.sqlite{suffix}").write_bytes((live / f"catalog.sqlite{suffix}").read_bytes())
    log = copy / "catalog.sqlite-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2 :] = random.Random(4).randbytes(len(data) - len(data) // 2)
    log.write_bytes(data)
    with open_catalog(copy) as catalog:
        found = rows(catalog.recover(1000))
    assert found == {i: row(page(i)) for i in range(len(found))}
    assert 0 < len(found) < 200
    assert len(found) % 10 == 0


def test_a_log_without_its_database_is_not_replayed_into_the_next(tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    copy.mkdir()
    with open_catalog(live) as catalog:
        catalog.commit([page(i) for i in range(50)], [], {})
        (copy / "catalog.sqlite-wal").write_bytes((live / "catalog.sqlite-wal").read_bytes())
    with open_catalog(copy) as catalog:
        found = catalog.recover(50)
        assert (len(found), found.set_aside) == (0, None)


def test_leftovers_of_a_kill_while_it_was_made_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "catalog.new").write_bytes(b"half a database")
    (tmp_path / "catalog.suspect").touch()
    with open_catalog(tmp_path) as catalog:
        assert rows(catalog.recover(4)) == {}
    assert {p.name for p in tmp_path.iterdir()} == {"catalog.sqlite"}


def test_damage_found_in_use_is_an_error_now_and_set_aside_at_the_next_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog_file, "QUICK_CHECK_BYTES", 0)
    fill(tmp_path, 600)
    path = tmp_path / "catalog.sqlite"
    data = bytearray(path.read_bytes())
    leaf = data.index(page(300).checksums.tobytes()) // 4096 * 4096
    data[leaf : leaf + 8] = b"\xff" * 8
    path.write_bytes(data)
    catalog = open_catalog(tmp_path)
    assert len(catalog.recover(600)) == 600  # recovery does not read checksums
    with caplog.at_level(logging.ERROR, "gdscache.disk.catalog"):
        with pytest.raises(IOFailedError, match="corrupt"):
            sums_of(catalog, [300])
        with pytest.raises(IOFailedError, match="corrupt"):
            catalog.commit([page(300, generation=1)], [300], {})
    assert "next open" in caplog.text
    catalog.close()
    with open_catalog(tmp_path) as catalog:
        found = catalog.recover(600)
        assert (len(found), found.set_aside is not None) == (0, True)
    with open_catalog(tmp_path) as catalog:
        assert catalog.recover(600).set_aside is None  # said once


def test_a_full_disk_is_an_error_with_its_number_and_costs_only_that_commit(tmp_path: Path) -> None:
    with open_catalog(tmp_path) as catalog:
        catalog.commit([page(0)], [], {})
        size = catalog._writer.execute("PRAGMA page_count").fetchone()[0]
        catalog._writer.execute(f"PRAGMA max_page_count = {size}")
        with pytest.raises(IOFailedError) as caught:
            catalog.commit([page(i) for i in range(1, 500)], [0], {})
        assert caught.value.errno == errno.ENOSPC
        catalog._writer.execute("PRAGMA max_page_count = 1000000")
        assert rows(catalog.recover(500)) == {0: row(page(0))}
        catalog.commit([page(1)], [], {})
        assert len(catalog.rows()) == 2
    assert not (tmp_path / "catalog.suspect").exists()


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_file, "WAL_PAGES", 32)
    log = tmp_path / "catalog.sqlite-wal"
    largest = 0
    with open_catalog(tmp_path) as catalog:
        for turn in range(300):
            catalog.commit([page(i, turn) for i in range(8)], range(8), {})
            sums_of(catalog, range(8))
            largest = max(largest, log.stat().st_size)
    assert 0 < largest < 64 * 4200


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
def test_durability_is_sqlites_synchronous(tmp_path: Path, durability: str, level: int) -> None:
    with Catalog(tmp_path, extent_bytes=EXTENT, durability=durability) as catalog:  # type: ignore[arg-type]
        assert catalog._writer.execute("PRAGMA synchronous").fetchone() == (level,)
        assert catalog._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# Many threads.


def test_writers_take_turns(tmp_path: Path) -> None:
    with open_catalog(tmp_path) as catalog:

        def write(worker: int) -> None:
            for i in range(30):
                catalog.commit([page(worker * 100 + i, namespace=name("of", worker, i % 3))], [], {})

        together(write, 4)
        found = rows(catalog.recover(1000))
    assert found == {
        n * 100 + i: row(page(n * 100 + i, namespace=name("of", n, i % 3))) for n in range(4) for i in range(30)
    }


# Against a dict.

SLOTS = st.integers(0, 11)
KNOWN = [name("space", i) for i in range(3)]
DESCRIBED: dict[bytes, dict[str, object]] = {space: {"name": space.hex()} for space in KNOWN}
RETENTIONS = st.tuples(st.integers(-1, 2), st.sampled_from([None, 0.0, 1.0, 2.5, 3.0]))


def keep(record: PageRecord, retention: tuple[int, float | None]) -> PageRecord:
    return record._replace(priority=retention[0], expires=retention[1])


class Against(RuleBasedStateMachine):
    """Commits of every shape, and reopening at will, against a dict of what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, PageRecord] = {}
        self.written: dict[int, float] = {}  # when the end of a page was said
        self.generation = 0
        self.now = 2.0
        self.scratch = contextlib.ExitStack()

    @initialize()
    def start(self) -> None:
        self.path = Path(self.scratch.enter_context(tempfile.TemporaryDirectory()))
        self.catalog = self.opened()

    def opened(self) -> Catalog:
        return open_catalog(self.path, clock=lambda: self.now)

    def say(self, record: PageRecord, retention: tuple[int, float | None]) -> PageRecord:
        if retention[1] is not None:
            self.written[record.slot] = min(self.now, retention[1])
        return keep(record, retention)

    def teardown(self) -> None:
        self.catalog.close()
        self.scratch.close()

    @rule(
        insert=st.sets(SLOTS, max_size=6),
        delete=st.lists(SLOTS, max_size=6),
        touch=st.dictionaries(SLOTS, st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
        space=st.sampled_from(KNOWN),
        retention=RETENTIONS,
        retain=st.dictionaries(SLOTS, RETENTIONS, max_size=4),
    )
    def commit(
        self,
        insert: set[int],
        delete: list[int],
        touch: dict[int, int],
        space: bytes,
        retention: tuple[int, float | None],
        retain: dict[int, tuple[int, float | None]],
    ) -> None:
        self.generation += 1
        records = [keep(page(slot, self.generation, namespace=space), retention) for slot in sorted(insert)]
        left = {slot: record for slot, record in self.model.items() if slot not in delete}
        if left.keys() & insert:
            with pytest.raises(SlotRangeError):
                self.catalog.commit(records, delete, touch, retain, DESCRIBED)
            return
        self.catalog.commit(records, delete, touch, retain, DESCRIBED)
        self.model = left | {record.slot: self.say(record, retention) for record in records}
        for slot, recency in touch.items():
            if slot in self.model:
                self.model[slot] = self.model[slot]._replace(recency=recency)
        for slot, kept in retain.items():
            if slot in self.model:
                self.model[slot] = self.say(self.model[slot], kept)

    @rule(slots=st.one_of(st.just(12), SLOTS), clean=st.booleans(), now=st.integers(0, 4).map(float))
    def reopen(self, slots: int, clean: bool, now: float) -> None:
        if clean:
            self.catalog.close()
            self.catalog = self.opened()
        self.now = now
        found = self.catalog.recover(slots, now)
        for slot, record in self.model.items():  # no more than its whole lifetime is left, and it counts from now on
            if record.expires is not None and self.written[slot] > now:
                self.model[slot] = record._replace(expires=record.expires - self.written[slot] + now)
                self.written[slot] = now
        beyond = [slot for slot in self.model if slot >= slots]
        for slot in beyond:
            del self.model[slot]
        over = [slot for slot, r in self.model.items() if r.expires is not None and r.expires <= now]
        for slot in over:
            del self.model[slot]
        assert found.dropped == +Counter(slot=len(beyond), expired=len(over))
        assert rows(found) == {slot: row(record) for slot, record in self.model.items()}
        ends = [math.inf if end is None else end for end in (r.expires for r in self.model.values())]
        wished = {slot: (r.priority, end) for (slot, r), end in zip(self.model.items(), ends, strict=True)}
        kept = zip(found.priorities.tolist(), found.expires.tolist(), strict=True)
        retained = dict(zip(found.slots[found.retained].tolist(), kept, strict=True))
        assert retained == {slot: kept for slot, kept in wished.items() if kept != (0, math.inf)}
        assert found.recency[found.order].tolist() == sorted(found.recency.tolist())
        used = {record.namespace for record in self.model.values()}
        assert self.catalog.namespaces() == {space: DESCRIBED[space] for space in used}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "catalog"):
            return
        assert len(self.catalog.rows()) == len(self.model)
        retentions = {slot: (r.priority, r.expires) for slot, r in self.model.items()}
        assert self.catalog.retentions() == {slot: kept for slot, kept in retentions.items() if kept != (0, None)}
        for slot, sums in enumerate(sums_of(self.catalog, range(12))):
            if slot in self.model:
                np.testing.assert_array_equal(sums, self.model[slot].checksums)
            else:
                assert sums is None


TestAgainstADict = Against.TestCase
TestAgainstADict.settings = settings(stateful_step_count=20)
