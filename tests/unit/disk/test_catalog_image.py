"""A database and its log as `catalog_image` reads them, held against SQLite's own reading of the same files."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from gdscache.disk import catalog_image
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
    with catalog_image.open_copy(path) as connection:
        return rows(connection) if connection.execute("SELECT 1 FROM sqlite_master").fetchall() else None


def signed(log: bytes, magic: int, size: int) -> bytes:
    """A log anew, with this magic number and page size in its header, and checksums that fit both."""
    order = ">" if magic & 1 else "<"

    def add(raw: bytes, sums: tuple[int, int]) -> tuple[int, int]:
        one, other = sums
        for first, second in struct.iter_unpack(f"{order}II", raw):
            one = (one + first + other) % (1 << 32)
            other = (other + second + one) % (1 << 32)
        return one, other

    salts, frame = log[16:24], 24 + int.from_bytes(log[8:12], "big")
    head = struct.pack(">I", magic) + log[4:8] + struct.pack(">I", size) + log[12:24]
    sums = add(head, (0, 0))
    parts = [head, struct.pack(">II", *sums)]
    for at in range(32, len(log), frame):
        if log[at + 8 : at + 16] != salts:
            break
        page = log[at + 24 : at + 24 + size]
        sums = add(page, add(log[at : at + 8], sums))
        parts += [log[at : at + 16], struct.pack(">II", *sums), page]
    return b"".join(parts)


@pytest.mark.parametrize(("magic", "size"), [(0x377F0682, 512), (0x377F0683, 512), (0x377F0683, 504)])
def test_a_log_of_either_byte_order_is_read_and_one_of_no_page_size_is_none(
    tmp_path: Path, magic: int, size: int
) -> None:
    copy = written(tmp_path, 512, random.Random(3))
    log = Path(f"{copy}-wal")
    with_log = by_us(copy)
    log.write_bytes(signed(log.read_bytes(), magic, size))
    assert by_us(copy) == by_sqlite(copy)
    assert (by_us(copy) == with_log) == (size == 512)


@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_every_log_is_read_as_sqlite_reads_it(
    tmp_path: Path, page_bytes: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, cut anywhere, and with a byte changed anywhere: the same rows. `piece`: frames come one by one, or many at
    a time."""
    monkeypatch.setattr(catalog_image, "PIECE", max(piece, 4096))
    rng = random.Random(f"{page_bytes} {piece}")
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
    monkeypatch.setattr(catalog_image.tempfile, "tempdir", str(temporary))
    seen: list[tuple[int, int, str]] = []
    with catalog_image.open_copy(path, lambda *told: seen.append(told)) as connection:
        assert rows(connection)
        assert not os.listdir(temporary)
    size = path.stat().st_size
    assert seen[-1] == (size, size, "bytes of the catalogue")
    monkeypatch.setattr(catalog_image.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(IOFailedError, match="TMPDIR"), catalog_image.open_copy(path):
        pass
