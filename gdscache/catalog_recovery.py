"""Reading the whole catalogue at open: a million rows in about a second, and rows that are not whole removed."""

from __future__ import annotations

import dataclasses
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdscache.catalog_file import CorruptCatalogError
from gdscache.keys import KEY_BYTES

SCAN_SLOTS = 1 << 15  # slots a query: a few MiB of keys at a time

WHOLE_ROW = (
    f"typeof(key) = 'blob' AND length(key) = {KEY_BYTES} AND typeof(parent) = 'blob' AND length(parent) = {KEY_BYTES} "
    "AND typeof(namespace) = 'integer' AND typeof(length) = 'integer' AND typeof(recency) = 'integer'"
)
# SQLite joins the columns: a Python object for each value of a row, and a tuple for each row, cost three times as much.
SCAN = (
    "SELECT CAST(group_concat(key, '') AS BLOB), CAST(group_concat(parent, '') AS BLOB), group_concat(slot), "
    "group_concat(namespace), group_concat(length), group_concat(recency) "
    f"FROM pages WHERE slot >= ? AND slot < ? AND {WHOLE_ROW}"
)

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What the catalogue knew at open, as columns of equal length, least recent page first.

    `dropped` counts the rows that were deleted, by cause: `slot` (outside the slab), `row` (a value of the wrong type
    or size), `length`, `namespace` (unknown), `duplicate` (a key once more; its most recent row stays). `set_aside` is
    where a corrupt catalogue was moved to.
    """

    slots: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    parents: list[bytes] = dataclasses.field(default_factory=list)
    namespaces: list[bytes] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    recency: list[int] = dataclasses.field(default_factory=list)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    set_aside: Path | None = None

    def __len__(self) -> int:
        return len(self.slots)


@dataclasses.dataclass
class _Columns:
    """Columns in one common order; `keys` and `parents` joined, `KEY_BYTES` a row."""

    keys: bytes
    parents: bytes
    slots: Integers
    namespaces: Integers
    lengths: Integers
    recency: Integers


def scan(writer: sqlite3.Connection, slots: int, extent_bytes: int, set_aside: Path | None) -> Recovered:
    """All whole rows of slots below `slots`; the others are deleted, in the transaction that the caller has begun."""
    dropped: Counter[str] = Counter()
    dropped["slot"] = _delete_outside(writer, slots)
    columns = _read(writer, slots)
    if len(columns.slots) != writer.execute("SELECT count(*) FROM pages").fetchone()[0]:
        broken = [slot for (slot,) in writer.execute(f"SELECT slot FROM pages WHERE NOT ({WHOLE_ROW})")]
        dropped["row"] = delete_pages(writer, broken)
    names = namespaces_by_id(writer)
    bad_length = (columns.lengths < 1) | (columns.lengths > extent_bytes)
    bad_name = ~bad_length & ~np.isin(columns.namespaces, list(names))
    dropped["length"] = delete_pages(writer, columns.slots[bad_length].tolist())
    dropped["namespace"] = delete_pages(writer, columns.slots[bad_name].tolist())

    order = np.argsort(columns.recency, kind="stable")
    order = order[~(bad_length | bad_name)[order]]
    keys = _split(columns.keys, order)
    if len(set(keys)) != len(keys):
        last = np.sort(np.fromiter({key: i for i, key in enumerate(keys)}.values(), np.int64))
        repeated = np.delete(order, last)
        dropped["duplicate"] = delete_pages(writer, columns.slots[repeated].tolist())
        order = order[last]
        keys = _split(columns.keys, order)
    used = columns.namespaces[order]
    unused = names.keys() - set(np.unique(used).tolist())
    writer.executemany("DELETE FROM namespaces WHERE id = ?", [(name,) for name in unused])
    return Recovered(
        slots=columns.slots[order].tolist(),
        keys=keys,
        parents=_split(columns.parents, order),
        namespaces=list(map(names.__getitem__, used.tolist())),
        lengths=columns.lengths[order].tolist(),
        recency=columns.recency[order].tolist(),
        dropped=+dropped,
        set_aside=set_aside,
    )


def delete_pages(writer: sqlite3.Connection, slots: Iterable[int]) -> int:
    """Delete the rows of `slots`, those there are; returns how many."""
    values = [(int(slot),) for slot in slots]
    writer.executemany("DELETE FROM checksums WHERE slot = ?", values)
    return writer.executemany("DELETE FROM pages WHERE slot = ?", values).rowcount if values else 0


def namespaces_by_id(connection: sqlite3.Connection) -> dict[int, bytes]:
    """Id → digest of the namespaces that have a digest of the right size."""
    rows = connection.execute("SELECT id, digest FROM namespaces")
    return {name: digest for name, digest in rows if isinstance(digest, bytes) and len(digest) == KEY_BYTES}


def _delete_outside(writer: sqlite3.Connection, slots: int) -> int:
    for table in ("checksums", "pages"):
        before = writer.execute(f"DELETE FROM {table} WHERE slot < 0").rowcount
        beyond = writer.execute(f"DELETE FROM {table} WHERE slot >= ?", (slots,)).rowcount
    return before + beyond


def _read(writer: sqlite3.Connection, slots: int) -> _Columns:
    keys, parents = [], []
    numbers: list[list[Integers]] = [[], [], [], []]
    end = min(slots, (writer.execute("SELECT max(slot) FROM pages").fetchone()[0] or 0) + 1)
    for first in range(0, end, SCAN_SLOTS):
        key, parent, *texts = writer.execute(SCAN, (first, min(first + SCAN_SLOTS, slots))).fetchone()
        if key is None:
            continue
        keys.append(key)
        parents.append(parent)
        for column, text in zip(numbers, texts, strict=True):
            column.append(np.fromstring(text, np.int64, sep=","))
    columns = _Columns(b"".join(keys), b"".join(parents), *map(_joined, numbers))
    ascending = np.sort(columns.slots)
    if (ascending[1:] == ascending[:-1]).any():
        raise CorruptCatalogError("a slot has two rows: the table is damaged")
    return columns


def _joined(parts: list[Integers]) -> Integers:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _split(joined: bytes, order: Integers) -> list[bytes]:
    """The keys at `order`. Gathering before making objects keeps the random access out of the allocator."""
    gathered = np.frombuffer(joined, f"V{KEY_BYTES}")[order].tobytes()
    return [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", gathered)]
