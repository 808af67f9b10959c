"""A catalogue of an older format version is brought to this one, in steps. See docs/format.md, "Versions".

Checksums of older versions are those of the bytes; each step binds some of them to the keys of their pages, and says in
`meta` how far it came, in one transaction. A kill leaves whole steps, and the next open goes on. No page is read.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gdscache.disk.catalog_file import FORMAT_VERSION, LACKING, SCHEMA, STRIPED_BEFORE, integers
from gdscache.limits import KEY_BYTES
from gdscache.pages.checksum import HEAD_GROUPS, MOST_SUMS, bound

log = logging.getLogger("gdscache.disk.catalog")

STEP_ROWS = 4096  # of a transaction
STEP_BYTES = 4 << 20  # ... and of checksums in it, at most one row more
SAY_SECONDS = 2.0  # between two lines of progress
_LAST_SLOT = (1 << 63) - 1  # that SQLite can have

# A row that cannot be bound comes without its values, however large they are.
_KEYED = f"typeof(key) = 'blob' AND length(key) = {KEY_BYTES}"
_SUMMED = f"typeof(sums) = 'blob' AND length(sums) % 8 = 0 AND length(sums) BETWEEN 8 AND {8 * MOST_SUMS}"
_ROWS = (
    f"SELECT checksums.slot, CASE WHEN {_KEYED} THEN key END, CASE WHEN {_SUMMED} THEN sums END "
    "FROM checksums LEFT JOIN pages ON pages.slot = checksums.slot WHERE checksums.slot >= ? ORDER BY checksums.slot"
)

Row = tuple[int, bytes | None, bytes | None]


def convert(writer: sqlite3.Connection, path: Path) -> None:
    """Bring the catalogue at `path`, which was checked, to this version: all of it, or the rest after a kill."""
    meta = integers(writer)
    version = meta["format_version"]
    if version != FORMAT_VERSION:
        _begin(writer, version)
        log.info("%s: of format version %d; brought to %d, which cannot be undone", path, version, FORMAT_VERSION)
    elif "converted" not in meta:
        return
    first, end, begun = meta.get("converted", 0), _end(writer), time.monotonic()
    said = begun
    unusable = 0
    while first < end:
        first, some = _step(writer, first, end)
        unusable += some
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            log.warning("%s: brought to format version %d: %d of %d slots", path, FORMAT_VERSION, first, end)
    writer.execute("DELETE FROM meta WHERE name = 'converted'")
    seconds = time.monotonic() - begun
    log.info("%s: brought to format version %d in %.1f s: %d slots", path, FORMAT_VERSION, seconds, end)
    if unusable:
        log.warning("%s: %d rows of checksums were not whole, or without a page; they are gone", path, unusable)


def _begin(writer: sqlite3.Connection, version: int) -> None:
    """From here on the catalogue is of this version, and no checksum is bound yet."""
    meta = [("head_groups", HEAD_GROUPS), ("striped", int(version in STRIPED_BEFORE)), ("converted", 0)]
    with writer:
        writer.execute("BEGIN IMMEDIATE")
        for name in LACKING.get(version, ()):
            writer.execute(SCHEMA[name])
        writer.execute("UPDATE meta SET value = ? WHERE name = 'format_version'", (FORMAT_VERSION,))
        writer.executemany("INSERT OR REPLACE INTO meta(name, value) VALUES (?, ?)", meta)


def _end(writer: sqlite3.Connection) -> int:
    last = writer.execute("SELECT max(slot) FROM checksums").fetchone()[0]
    return 0 if last is None else min(int(last), _LAST_SLOT - 1) + 1


def _step(writer: sqlite3.Connection, first: int, end: int) -> tuple[int, int]:
    """Bind the checksums of some rows from slot `first` on; the slot to go on from, and the rows that had to go."""
    with writer:
        writer.execute("BEGIN IMMEDIATE")
        rows = _some(writer, first)
        after = min(rows[-1][0] + 1, end) if len(rows) == STEP_ROWS or _size(rows) > STEP_BYTES else end
        whole = [(slot, key, sums) for slot, key, sums in rows if key is not None and sums is not None]
        writer.executemany("UPDATE checksums SET sums = ? WHERE slot = ?", _bound(whole))
        broken = [(slot,) for slot, key, sums in rows if key is None or sums is None]
        writer.executemany("DELETE FROM checksums WHERE slot = ?", broken)
        writer.execute("UPDATE meta SET value = ? WHERE name = 'converted'", (after,))
    return after, len(broken)


def _some(writer: sqlite3.Connection, first: int) -> list[Row]:
    rows: list[Row] = []
    nbytes = 0
    cursor = writer.execute(_ROWS, (first,))
    while len(rows) < STEP_ROWS and nbytes <= STEP_BYTES and (row := cursor.fetchone()) is not None:
        rows.append(row)
        nbytes += len(row[2] or b"")
    cursor.close()  # the table is written next
    return rows


def _size(rows: list[Row]) -> int:
    return sum(len(sums or b"") for _, _, sums in rows)


def _bound(rows: list[tuple[int, bytes, bytes]]) -> Iterator[tuple[bytes, int]]:
    """(checksums as they are stored, slot) of rows with the checksums of the bytes."""
    for size in {len(sums) for _, _, sums in rows}:
        same = [row for row in rows if len(row[2]) == size]
        values = np.frombuffer(b"".join(sums for _, _, sums in same), "<u8").reshape(len(same), size // 8)
        stored = bound(values, [key for _, key, _ in same]).astype("<u8", copy=False).tobytes()
        for at, (slot, _, _) in enumerate(same):
            yield stored[at * size : (at + 1) * size], slot
