"""A database and its log as `catalog_file.open_copy` copies them, held against SQLite's own reading of them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from gdscache.disk import catalog_file
from gdscache.errors import IOFailedError


def written(path: Path, page_bytes: int, rng: random.Random) -> Path:
    """A copy of a database and its log while a writer has both open: some pages are in the log alone, many times."""
    live, copy = path / "live", path / "copy"
    with contextlib.closing(sqlite3.connect(live, isolation_level=None)) as writer:
        writer.execute(f"PRAGMA page_size = {page_bytes}")
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute("CREATE TABLE t(i INTEGER PRIMARY KEY, b BLOB)")
        for step in range(rng.randrange(20, 40)):
            writer.execute("BEGIN")
            for _ in range(rng.randrange(1, 12)):
                row = (rng.randrange(200), rng.randbytes(rng.randrange(min(3 * page_bytes, 20_000))))
                writer.execute("INSERT OR REPLACE INTO t VALUES (?, ?)", row)
            if rng.random() < 0.3:
                writer.execute("DELETE FROM t WHERE i BETWEEN ? AND ?", (first := rng.randrange(200), first + 60))
            writer.execute("COMMIT")
            if step == 9:
                writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()  # frames of an older round stay behind
        shutil.copy(live, copy)
        shutil.copy(f"{live}-wal", f"{copy}-wal")
    return copy


def rows(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
    return connection.execute("SELECT i, b FROM t ORDER BY i").fetchall()


def by_sqlite(path: Path) -> list[tuple[int, bytes]] | None:
    """The rows that SQLite finds in a copy of its own; None where it finds a database without the table."""
    again = path.with_name("again")
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{again}{suffix}")
    with contextlib.closing(sqlite3.connect(again)) as connection:
        return rows(connection) if connection.execute("SELECT 1 FROM sqlite_master").fetchall() else None


def by_us(path: Path) -> list[tuple[int, bytes]] | None:
    with catalog_file.open_copy(path) as connection:
        return rows(connection) if connection.execute("SELECT 1 FROM sqlite_master").fetchall() else None


@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_every_log_is_applied(tmp_path: Path, page_bytes: int) -> None:
    """Whole, cut anywhere, and with a byte changed anywhere: the rows are those that SQLite finds in the files."""
    rng = random.Random(page_bytes)
    path = written(tmp_path, page_bytes, rng)
    log = Path(f"{path}-wal")
    content = log.read_bytes()
    assert len(content) > 1 << 20 or page_bytes < 4096  # more than a piece
    assert by_us(path) == by_sqlite(path)
    for _ in range(8):
        log.write_bytes(content[: rng.randrange(len(content))])
        assert by_us(path) == by_sqlite(path)
    for _ in range(8):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        log.write_bytes(damaged)
        assert by_us(path) == by_sqlite(path)


def test_the_copy_has_no_name_and_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, 4096, random.Random(1))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(catalog_file.tempfile, "tempdir", str(temporary))
    seen: list[tuple[int, int, str]] = []
    with catalog_file.open_copy(path, lambda *told: seen.append(told)) as connection:
        assert rows(connection)
        assert not os.listdir(temporary)
    size = path.stat().st_size
    assert seen[-1] == (size, size, "bytes of the catalogue")
    monkeypatch.setattr(catalog_file.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(IOFailedError, match="TMPDIR"), catalog_file.open_copy(path):
        pass
