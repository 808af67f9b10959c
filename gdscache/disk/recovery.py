"""Reads the whole catalogue at open, a million rows in about a second, and removes invalid rows. So does it with the
namespaces without pages, a bounded number a call."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Float64Array, Int64Array
from gdscache.disk.catalog_file import SCHEMA, CorruptCatalogError
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import find

PRUNED = 4096  # namespaces without pages that one call deletes: some 0.1 s
DESCRIPTION_BYTES = 4 << 20  # a longer description is left unread
ASKED = 256  # ids a query
NAMED = f"typeof(digest) = 'blob' AND length(digest) = {KEY_BYTES}"


def namespaces_by_id(connection: sqlite3.Connection, ids: Iterable[int]) -> dict[int, bytes]:
    """Id → digest of the namespaces among `ids` that have a digest of the right size."""
    found: dict[int, bytes] = {}
    asked = iter(ids)
    while some := list(itertools.islice(asked, ASKED)):
        places = ", ".join("?" * len(some))
        found.update(connection.execute(f"SELECT id, digest FROM namespaces WHERE id IN ({places}) AND {NAMED}", some))
    return found


def descriptions(connection: sqlite3.Connection) -> Iterator[tuple[bytes, bytes | None]]:
    """Digest and description of each namespace that has a digest of the right size; None: unreadable."""
    for name, digest in connection.execute(f"SELECT id, digest FROM namespaces WHERE {NAMED}").fetchall():
        yield digest, _description(connection, name)


def tidy(writer: sqlite3.Connection, used: Collection[int]) -> None:
    """Delete invalid rows, and namespaces that are not `used`: all of them, or `PRUNED` if that takes long."""
    broken = writer.execute(f"SELECT 1 FROM namespaces WHERE NOT ({NAMED}) LIMIT 1").fetchall()
    unused = writer.execute("SELECT count(*) FROM namespaces").fetchone()[0] - len(used)
    if broken or unused > max(PRUNED, len(used)):
        _rebuild(writer, used)
    elif unused:
        prune(writer, used)


def prune(writer: sqlite3.Connection, used: Collection[int]) -> None:
    ids = (name for (name,) in writer.execute("SELECT id FROM namespaces"))
    unused = list(itertools.islice((name for name in ids if name not in used), PRUNED))
    writer.executemany("DELETE FROM namespaces WHERE id = ?", [(name,) for name in unused])


def _rebuild(writer: sqlite3.Connection, used: Iterable[int]) -> None:
    """Make the table anew: dropping it costs little, and does not read digests as large as the file."""
    kept = [
        (name, digest, _description(writer, name) or b"{}") for name, digest in namespaces_by_id(writer, used).items()
    ]
    writer.execute("DROP TABLE namespaces")
    writer.execute(SCHEMA["namespaces"])
    writer.executemany("INSERT INTO namespaces(id, digest, description) VALUES (?, ?, CAST(? AS TEXT))", kept)


def _description(connection: sqlite3.Connection, name: int) -> bytes | None:
    text = "SELECT typeof(description) = 'text' FROM namespaces WHERE id = ?"
    if not connection.execute(text, (name,)).fetchone()[0]:
        return None
    with connection.blobopen("namespaces", "description", name, readonly=True) as blob:
        return blob.read() if len(blob) <= DESCRIPTION_BYTES else None


SCAN_SLOTS = 1 << 15  # slots a query: a few MiB of keys at a time
LAST_MILLISECOND = 1 << 53  # milliseconds since the epoch; no valid row is written later, or lives longer

OUTSIDE = "place < 0 OR place >= ?"  # outside slab 0, whose slots come first
WHOLE_ROW = (
    f"typeof(key) = 'blob' AND length(key) = {KEY_BYTES} AND typeof(parent) = 'blob' AND length(parent) = {KEY_BYTES} "
    "AND typeof(namespace) = 'integer' AND typeof(length) = 'integer' AND typeof(recency) = 'integer' "
    "AND typeof(packed) = 'integer'"
)
KNOWN = "packed BETWEEN 0 AND 1"  # plain and packed extents; this version cannot read other pages
# SQLite joins the columns: a Python object for each value and a tuple for each row cost three times as much.
JOINED = (
    "CAST(group_concat(key, '') AS BLOB), CAST(group_concat(parent, '') AS BLOB), group_concat(place), "
    "group_concat(recency)"
)
SCAN = (
    f"SELECT {JOINED}, count(*), group_concat(namespace), group_concat(length) "
    f"FROM pages WHERE place >= ? AND place < ? AND {WHOLE_ROW} AND {KNOWN}"
)
# The same for the rows of one namespace and length, which are most often all rows. No text or number is greater than a
# blob, so comparing with x'' tests the type at a fifth of the cost of typeof(). It reads the value: where that is
# larger than SQLite may read, `SCAN` finds the rows, which only reads values of the right type and size.
UNIFORM = (
    f"SELECT {JOINED}, count(*) FROM pages WHERE place >= ? AND place < ? AND namespace = ? AND length = ? "
    f"AND key >= x'' AND parent >= x'' AND length(key) = {KEY_BYTES} AND length(parent) = {KEY_BYTES} "
    f"AND typeof(recency) = 'integer' AND {KNOWN}"
)
WHOLE_RETENTION = (
    "typeof(priority) = 'integer' AND typeof(lifetime) IN ('integer', 'null') AND typeof(written) = 'integer' "
    f"AND ifnull(lifetime, 0) BETWEEN -{LAST_MILLISECOND} AND {LAST_MILLISECOND} "
    f"AND written BETWEEN 0 AND {LAST_MILLISECOND}"
)
COUNT = "SELECT count(*) FROM pages WHERE place >= ? AND place < ?"
FIRST = f"SELECT namespace, length FROM pages WHERE place >= ? AND place < ? AND {WHOLE_ROW} AND {KNOWN} LIMIT 1"

Keys = npt.NDArray[np.void]
NO_INTEGERS: Int64Array = np.empty(0, np.int64)
NO_FLOATS: Float64Array = np.empty(0, np.float64)
NO_KEYS: Keys = np.empty(0, f"V{KEY_BYTES}")


@dataclasses.dataclass(frozen=True, eq=False)
class Recovered:
    """The pages of the catalogue at open: columns of equal length, and `order`, the rows from the least recent one on.

    `keys` and `parents` are of dtype V32, the others int64; `namespaces` are positions in `digests`, whose ids in the
    catalogue are `ids`. `causes` has the slots of all other rows: `slot` (outside the slab), `row` (a value of the
    wrong type or size), `packed` (in a way that this version cannot read), `length`, `namespace` (unknown), `expired`,
    `duplicate` (of a key; its most recent row stays), `parent` (the page would follow itself, at once or through
    others). `set_aside` is the new path of a corrupt catalogue.

    `above`: the position of each page's parent; -1 if absent. `retained`: the positions of pages with a retention of
    their own, with columns `priorities` (int64) and `expires` (float64, seconds since the epoch; infinite: never).
    `uncounted`: ascending slots of pages whose lifetime does not begin at a time of the recovery's clock.
    """

    slots: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    keys: Keys = dataclasses.field(default_factory=NO_KEYS.copy)
    parents: Keys = dataclasses.field(default_factory=NO_KEYS.copy)
    digests: list[bytes] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    namespaces: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    lengths: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    recency: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    above: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    order: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    retained: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    priorities: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    expires: Float64Array = dataclasses.field(default_factory=NO_FLOATS.copy)
    uncounted: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    causes: dict[int, str] = dataclasses.field(default_factory=dict)
    set_aside: Path | None = None

    @property
    def dropped(self) -> Counter[str]:
        return Counter(self.causes.values())

    def __len__(self) -> int:
        return len(self.slots)


@dataclasses.dataclass
class _Columns:
    keys: Keys
    parents: Keys
    slots: Int64Array
    recency: Int64Array
    namespaces: Int64Array
    lengths: Int64Array

    def take(self, rows: npt.NDArray[np.bool_] | Int64Array) -> _Columns:
        return _Columns(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def without(self, rows: Int64Array, cause: str, causes: dict[int, str]) -> _Columns:
        """The other rows. `causes` gets the slots of these."""
        causes.update(dict.fromkeys(self.slots[rows].tolist(), cause))
        return self.take(np.delete(np.arange(len(self.slots)), rows)) if len(rows) else self


@dataclasses.dataclass(frozen=True)
class _Retentions:
    """Whole rows of `retention`, in the order of slots; `broken`: slots of the others."""

    slots: Int64Array
    priorities: Int64Array
    expires: Float64Array
    uncounted: npt.NDArray[np.bool_]
    broken: list[int]


def scan(connection: sqlite3.Connection, slots: int, extent_bytes: int, now: float = -math.inf) -> Recovered:
    """All whole rows of slots below `slots` that have not expired by `now`, and the causes against the others. Only
    reads."""
    causes: dict[int, str] = {}
    outside = [slot for (slot,) in connection.execute(f"SELECT place FROM pages WHERE {OUTSIDE}", (slots,))]
    causes.update(dict.fromkeys(outside, "slot"))
    columns = _read(connection, slots)
    if len(columns.slots) + len(outside) != connection.execute("SELECT count(*) FROM pages").fetchone()[0]:
        inside = f"SELECT place FROM pages WHERE NOT ({OUTSIDE})"
        for cause, which in (("row", f"NOT ({WHOLE_ROW})"), ("packed", f"{WHOLE_ROW} AND NOT ({KNOWN})")):
            causes.update((slot, cause) for (slot,) in connection.execute(f"{inside} AND {which}", (slots,)))
    names = namespaces_by_id(connection, np.unique(columns.namespaces).tolist())
    retentions = _retentions(connection, slots, now)
    for cause, some in (("row", retentions.broken), ("expired", retentions.slots[retentions.expires <= now].tolist())):
        if some:
            causes.update((slot, cause) for slot in columns.slots[np.isin(columns.slots, some)].tolist())
    bad_length = (columns.lengths < 1) | (columns.lengths > extent_bytes)
    bad_name = ~np.isin(columns.namespaces, list(names))
    for cause, bad in (("length", bad_length), ("namespace", bad_name)):
        if bad.any():
            causes |= {slot: cause for slot in columns.slots[bad].tolist() if slot not in causes}
    if causes:
        columns = columns.take(~np.isin(columns.slots, list(causes)))
    columns = columns.without(_repeated(columns), "duplicate", causes)
    above = find(columns.keys, columns.parents)
    if len(circle := circular(above)):
        columns = columns.without(circle, "parent", causes)
        above = find(columns.keys, columns.parents)
    retained = there = NO_INTEGERS
    if len(retentions.slots):
        _, retained, there = np.intersect1d(columns.slots, retentions.slots, return_indices=True)
    used, namespaces = np.unique(columns.namespaces, return_inverse=True)
    return Recovered(
        slots=columns.slots,
        keys=columns.keys,
        parents=columns.parents,
        digests=[names[name] for name in used.tolist()],
        ids=used.tolist(),
        namespaces=namespaces,
        lengths=columns.lengths,
        recency=columns.recency,
        above=above,
        order=_ascending(columns.recency),
        retained=retained,
        priorities=retentions.priorities[there],
        expires=retentions.expires[there],
        uncounted=retentions.slots[there[retentions.uncounted[there]]],
        causes=causes,
    )


def clean(writer: sqlite3.Connection, found: Recovered, slots: int) -> None:
    """Delete the rows that `scan` rejected, in the caller's transaction."""
    for table in ("retention", "checksums"):
        writer.execute(f"DELETE FROM {table} WHERE {OUTSIDE}", (slots,))
    delete_pages(writer, found.causes)
    if writer.execute("SELECT count(*) FROM retention").fetchone()[0] != len(found.retained):  # some have no page
        writer.execute("DELETE FROM retention WHERE place NOT IN (SELECT place FROM pages)")
    tidy(writer, set(found.ids))


def delete_pages(writer: sqlite3.Connection, slots: Iterable[int]) -> None:
    runs: list[list[int]] = []  # first and last slot: deleting neighbours together is many times as fast
    for slot in sorted({int(slot) for slot in slots}):
        if runs and runs[-1][1] == slot - 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    for table in ("retention", "checksums", "pages") if runs else ():
        writer.executemany(f"DELETE FROM {table} WHERE place BETWEEN ? AND ?", runs)


def milliseconds(seconds: float) -> int:
    """Whole milliseconds since the epoch, rounded down, in the catalogue's range."""
    return math.floor(min(max(seconds * 1000, 0), LAST_MILLISECOND))


def _retentions(connection: sqlite3.Connection, slots: int, now: float) -> _Retentions:
    """From `now` on a page lives for its whole lifetime at most; `now` infinite: no clock."""
    inside = f"NOT ({OUTSIDE})"
    broken = f"SELECT place FROM retention WHERE {inside} AND NOT ({WHOLE_RETENTION})"
    columns = "place, priority, written, lifetime"
    select = f"SELECT {columns} FROM retention WHERE {inside} AND {WHOLE_RETENTION} ORDER BY place"
    found, priorities, times, lifetimes = list(zip(*connection.execute(select, (slots,)), strict=True)) or [()] * 4
    written = np.array(times, np.int64)
    lives = np.array([math.inf if life is None else life for life in lifetimes], np.float64)
    clock = milliseconds(now) if math.isfinite(now) else LAST_MILLISECOND
    return _Retentions(
        np.array(found, np.int64),
        np.array(priorities, np.int64),
        (np.minimum(written, clock) + lives) / 1000,
        np.isfinite(lives) & ((written == 0) | (written > clock)) & math.isfinite(now),
        [slot for (slot,) in connection.execute(broken, (slots,))],
    )


def _read(connection: sqlite3.Connection, slots: int) -> _Columns:
    end = min(slots, (connection.execute("SELECT max(place) FROM pages").fetchone()[0] or 0) + 1)
    found = [_read_some(connection, first, min(first + SCAN_SLOTS, end)) for first in range(0, end, SCAN_SLOTS)]
    keys, parents, *numbers = list(zip(*filter(None, found), strict=True)) or [()] * 6
    joined = (np.frombuffer(b"".join(column), f"V{KEY_BYTES}") for column in (keys, parents))
    columns = _Columns(*joined, *(np.concatenate((NO_INTEGERS, *column)) for column in numbers))
    if (columns.slots[1:] <= columns.slots[:-1]).any():
        ascending = np.sort(columns.slots)
        if (ascending[1:] == ascending[:-1]).any():
            raise CorruptCatalogError("a slot has two rows: the table is damaged")
    return columns


def _read_some(connection: sqlite3.Connection, first: int, end: int) -> tuple[Any, ...]:
    guess = connection.execute(FIRST, (first, end)).fetchone()
    if guess is None:
        return ()
    try:
        key, parent, slots, recency, count = connection.execute(UNIFORM, (first, end, *guess)).fetchone()
    except sqlite3.DataError:  # a value is larger than SQLite may read
        count = -1
    if count == connection.execute(COUNT, (first, end)).fetchone()[0]:
        namespaces, lengths = (np.full(count, value, np.int64) for value in guess)
        return key, parent, _integers(slots, count), _integers(recency, count), namespaces, lengths
    key, parent, slots, recency, count, namespaces, lengths = connection.execute(SCAN, (first, end)).fetchone()
    return key, parent, *(_integers(text, count) for text in (slots, recency, namespaces, lengths))


def _integers(text: str, count: int) -> Int64Array:
    values = np.fromstring(text, np.int64, sep=",")
    if len(values) != count:
        raise CorruptCatalogError("a column of numbers has something else in it: the table is damaged")
    return values


def _ascending(values: Int64Array) -> Int64Array:
    """Positions in the order of values, equal ones as they come. A stable sort costs four times as much."""
    order = np.argsort(values)
    ordered = values[order]
    return np.argsort(values, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


def circular(above: Int64Array) -> Int64Array:
    """Positions of pages that follow themselves. `above`: the position of each page's parent, -1 for none."""
    count = len(above)
    if (above < np.arange(count)).all():  # most often pages come after their parents
        return NO_INTEGERS
    # As many steps up from every page as there are pages, twice as many each round: only circles have no end.
    ahead = np.append(np.where(above < 0, count, above), count)
    for _ in range(count.bit_length()):
        ahead = ahead[ahead]
        if (ahead == count).all():
            return NO_INTEGERS
    return np.unique(ahead[ahead < count])


def _repeated(columns: _Columns) -> Int64Array:
    if not len(columns.keys):
        return NO_INTEGERS
    # Keys are digests: if their first eight bytes all differ, no two keys are equal.
    part = np.sort(columns.keys.view("<u8").reshape(len(columns.keys), -1)[:, 0])
    if (part[1:] != part[:-1]).all():
        return NO_INTEGERS
    order = _ascending(columns.recency)
    last = dict(zip(columns.keys[order].tolist(), order.tolist(), strict=True))
    return np.setdiff1d(order, [*last.values()])
