"""The durable index of the SSD tier: the page in each slot. SQLite in WAL mode; docs/format.md has the format.

A row is committed after its bytes are written and before its key becomes visible, and a slot is reused only after the
deletion of its row is committed. So a kill at any time leaves whole rows with complete bytes.

An open reads the whole catalogue, a million rows in about a second, and removes invalid rows. So does it with the
namespaces without pages, a bounded number a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Float64Array, Int64Array
from gdscache.disk import catalog_file
from gdscache.disk.catalog_file import FORMAT_VERSION, SCHEMA, CorruptCatalogError, SlabShape
from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, SlotRangeError
from gdscache.limits import KEY_BYTES
from gdscache.pages.checksum import MOST_SUMS
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
class PageRows:
    """Pages of the catalogue as columns of equal length: `keys` and `parents` of dtype V32, the others int64."""

    keys: Keys = dataclasses.field(default_factory=NO_KEYS.copy)
    parents: Keys = dataclasses.field(default_factory=NO_KEYS.copy)
    slots: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    recency: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    namespaces: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)
    lengths: Int64Array = dataclasses.field(default_factory=NO_INTEGERS.copy)

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, rows: npt.NDArray[np.bool_] | Int64Array) -> PageRows:
        return PageRows(*(column[rows] for column in vars(self).values()))

    def without(self, rows: Int64Array, cause: str, causes: dict[int, str]) -> PageRows:
        """The other rows. `causes` gets the slots of these."""
        causes.update(dict.fromkeys(self.slots[rows].tolist(), cause))
        return self.take(np.delete(np.arange(len(self)), rows)) if len(rows) else self


@dataclasses.dataclass(frozen=True, eq=False)
class Recovered(PageRows):
    """The pages of the catalogue at open, and `order`, the rows from the least recent one on.

    `namespaces` are positions in `digests`, whose ids in the catalogue are `ids`. `causes` has the slots of all other
    rows: `slot` (outside the slab), `row` (a value of the wrong type or size), `packed` (in a way that this version
    cannot read), `length`, `namespace` (unknown), `expired`, `duplicate` (of a key; its most recent row stays),
    `parent` (the page would follow itself, at once or through others). `set_aside` is the new path of a corrupt
    catalogue.

    `above`: the position of each page's parent; -1 if absent. `retained`: the positions of pages with a retention of
    their own, with columns `priorities` (int64) and `expires` (float64, seconds since the epoch; infinite: never).
    `uncounted`: ascending slots of pages whose lifetime does not begin at a time of the recovery's clock.
    """

    digests: list[bytes] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
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


def scan(connection: sqlite3.Connection, slots: int, extent_bytes: int, now: float = -math.inf) -> Recovered:
    """All whole rows of slots below `slots` that have not expired by `now`, and the causes against the others. Only
    reads."""
    causes: dict[int, str] = {}
    outside = [slot for (slot,) in connection.execute(f"SELECT place FROM pages WHERE {OUTSIDE}", (slots,))]
    causes.update(dict.fromkeys(outside, "slot"))
    pages = _read(connection, slots)
    if len(pages) + len(outside) != connection.execute("SELECT count(*) FROM pages").fetchone()[0]:
        inside = f"SELECT place FROM pages WHERE NOT ({OUTSIDE})"
        for cause, which in (("row", f"NOT ({WHOLE_ROW})"), ("packed", f"{WHOLE_ROW} AND NOT ({KNOWN})")):
            causes.update((slot, cause) for (slot,) in connection.execute(f"{inside} AND {which}", (slots,)))
    names = namespaces_by_id(connection, np.unique(pages.namespaces).tolist())
    kept, priorities, expires, uncounted, broken = _retentions(connection, slots, now)
    for cause, some in (("row", broken), ("expired", kept[expires <= now].tolist())):
        if some:
            causes.update((slot, cause) for slot in pages.slots[np.isin(pages.slots, some)].tolist())
    bad_length = (pages.lengths < 1) | (pages.lengths > extent_bytes)
    bad_name = ~np.isin(pages.namespaces, list(names))
    for cause, bad in (("length", bad_length), ("namespace", bad_name)):
        if bad.any():
            causes |= {slot: cause for slot in pages.slots[bad].tolist() if slot not in causes}
    if causes:
        pages = pages.take(~np.isin(pages.slots, list(causes)))
    pages = pages.without(_repeated(pages), "duplicate", causes)
    above = find(pages.keys, pages.parents)
    if len(circle := circular(above)):
        pages = pages.without(circle, "parent", causes)
        above = find(pages.keys, pages.parents)
    retained = there = NO_INTEGERS
    if len(kept):
        _, retained, there = np.intersect1d(pages.slots, kept, return_indices=True)
    used, namespaces = np.unique(pages.namespaces, return_inverse=True)
    return Recovered(
        **vars(pages) | {"namespaces": namespaces},
        digests=[names[name] for name in used.tolist()],
        ids=used.tolist(),
        above=above,
        order=_ascending(pages.recency),
        retained=retained,
        priorities=priorities[there],
        expires=expires[there],
        uncounted=kept[there[uncounted[there]]],
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


def _retentions(
    connection: sqlite3.Connection, slots: int, now: float
) -> tuple[Int64Array, Int64Array, Float64Array, npt.NDArray[np.bool_], list[int]]:
    """Slots (ascending), priorities, ends, and what is `uncounted`, of the whole rows of `retention`; and the slots of
    the others. From `now` on a page lives for its whole lifetime at most; `now` infinite: no clock."""
    inside = f"NOT ({OUTSIDE})"
    broken = f"SELECT place FROM retention WHERE {inside} AND NOT ({WHOLE_RETENTION})"
    columns = "place, priority, written, lifetime"
    select = f"SELECT {columns} FROM retention WHERE {inside} AND {WHOLE_RETENTION} ORDER BY place"
    found, priorities, times, lifetimes = list(zip(*connection.execute(select, (slots,)), strict=True)) or [()] * 4
    written = np.array(times, np.int64)
    lives = np.array([math.inf if life is None else life for life in lifetimes], np.float64)
    clock = milliseconds(now) if math.isfinite(now) else LAST_MILLISECOND
    return (
        np.array(found, np.int64),
        np.array(priorities, np.int64),
        (np.minimum(written, clock) + lives) / 1000,
        np.isfinite(lives) & ((written == 0) | (written > clock)) & math.isfinite(now),
        [slot for (slot,) in connection.execute(broken, (slots,))],
    )


def _read(connection: sqlite3.Connection, slots: int) -> PageRows:
    end = min(slots, (connection.execute("SELECT max(place) FROM pages").fetchone()[0] or 0) + 1)
    found = [_read_some(connection, first, min(first + SCAN_SLOTS, end)) for first in range(0, end, SCAN_SLOTS)]
    keys, parents, *numbers = list(zip(*filter(None, found), strict=True)) or [()] * 6
    joined = (np.frombuffer(b"".join(column), f"V{KEY_BYTES}") for column in (keys, parents))
    columns = PageRows(*joined, *(np.concatenate((NO_INTEGERS, *column)) for column in numbers))
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


def _repeated(columns: PageRows) -> Int64Array:
    if not len(columns.keys):
        return NO_INTEGERS
    # Keys are digests: if their first eight bytes all differ, no two keys are equal.
    part = np.sort(columns.keys.view("<u8").reshape(len(columns.keys), -1)[:, 0])
    if (part[1:] != part[:-1]).all():
        return NO_INTEGERS
    order = _ascending(columns.recency)
    last = dict(zip(columns.keys[order].tolist(), order.tolist(), strict=True))
    return np.setdiff1d(order, [*last.values()])


__all__ = ["Catalog", "Durability", "PageRecord", "Recovered"]

log = logging.getLogger("gdscache.disk.catalog")

Durability = Literal["process", "power"]

LOOKUP_SLOTS = 256  # slots a query while reading checksums
SHORTEST_STRETCH = 8  # slots in a row that get a query of their own
PRUNE_NAMESPACES = 1024  # new namespaces that are written before unused ones are looked for
NOTHING: Mapping[int, tuple[int, float | None]] = {}
UNDESCRIBED: Mapping[bytes, Mapping[str, object]] = {}
REGISTER = (
    "INSERT INTO namespaces(digest, description) VALUES (?, ?) "
    "ON CONFLICT(digest) DO UPDATE SET description = excluded.description WHERE excluded.description != '{}'"
)
_ROWS = 128  # rows of one statement, which may have 999 values
# Other values are not read: they can be as large as the file.
WHOLE_SUMS = f"typeof(sums) = 'blob' AND length(sums) % 8 = 0 AND length(sums) <= {MOST_SUMS * 8}"
STRETCH = f"SELECT place, sums FROM checksums WHERE place BETWEEN ? AND ? AND {WHOLE_SUMS}"
LOOKUP = f"SELECT place, sums FROM checksums WHERE place IN ({', '.join('?' * LOOKUP_SLOTS)}) AND {WHOLE_SUMS}"
PROGRESS_S = 1.0  # seconds between two lines about a conversion


class PageRecord(NamedTuple):
    """One page in one slot of slab 0. `key`, `parent` and `namespace` are 32 bytes each; the parent of a first page is
    the namespace. `length`: bytes of a shard of the page without padding. `checksums`: uint64 of shape (shards x
    layers,), shard after shard, bound to the key (`checksum.bound`). `expires`: seconds since the epoch, kept in whole
    milliseconds (rounded down); None: never."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    length: int
    recency: int
    checksums: npt.NDArray[np.uint64]
    priority: int = 0
    expires: float | None = None
    packed: bool = False


class Catalog:
    """The catalogue of one cache directory: the pages in its slab 0, whose places are their slots. The
    directory must be owned (`CacheDirectory`).

    Thread-safe: one connection writes and one reads, each under its own lock. After `close` every method raises
    `EngineClosedError`; an error of the disk is raised as `IOFailedError`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        extent_bytes: int,
        durability: Durability,
        shards: int = 1,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or make `directory/catalog.sqlite` for extents of `extent_bytes` in each of `shards`.

        `durability`: `process` survives any kill of the process, `power` a loss of power too (each commit is flushed).
        `wall_clock`: seconds since the epoch, from which lifetimes are counted. A corrupt catalogue is moved aside and
        an empty one takes its place; `recover` returns its new path. One of the previous format is converted by
        `recover`. Raises `CatalogVersionError`, `ExtentSizeError`, `ShardsError`, `NotARegularFileError`,
        `InvalidValueError`, `IOFailedError`.
        """
        if durability not in ("process", "power"):
            raise InvalidValueError(f"durability is {durability!r}", "set ssd.durability to process or power")
        self.path = directory / catalog_file.CATALOG_NAME
        self._slab = slab = SlabShape(extent_bytes, shards)
        self._wall_clock = wall_clock
        self._version = FORMAT_VERSION  # of the tables; the first transaction converts older ones
        self._synchronous = "FULL" if durability == "power" else "NORMAL"
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._namespace_ids: dict[bytes, int] = {}
        self._unsure = False  # the log may have a commit that raised
        self._set_aside: Path | None = None
        try:
            self._connect()
        except CorruptCatalogError as error:
            self._rebuild(error, lambda connection: catalog_file.check(connection, self.path, slab))

    def recover(self, slots: int, now: float = -math.inf, *, spare: bool = False) -> Recovered:
        """All pages in slots below `slots`. Other rows, broken rows, and pages expired by `now` (seconds since the
        epoch) are deleted. `spare`: where there are later slots, nothing is deleted before `clean`.

        Call it once, at first. `slots`: leading slots that have their bytes (`Slab.valid_slots`).
        Namespaces without pages are deleted, some thousands a call. Checksums stay on disk. A catalogue of the previous
        format is converted in the same transaction; then lifetimes that do not begin at a time of `now`'s clock are
        counted from `now`, in steps.
        """
        with self._write_lock:
            try:
                with catalog_file.sqlite_errors(self.path, "read"):
                    with self._transaction() as writer:
                        recovered = scan(writer, slots, self._slab.extent_bytes, now)
                        if not (spare and recovered.dropped["slot"]):
                            clean(writer, recovered, slots)
                    self._namespace_ids = {}
                    self._count_lifetimes(recovered.uncounted, now)
                    return dataclasses.replace(recovered, set_aside=self._set_aside)
            except CorruptCatalogError as error:
                self._close_connections()
                self._rebuild(error, lambda copy: self._scan_copy(copy, slots, now))
                return Recovered(set_aside=self._set_aside)

    def clean(self, found: Recovered, slots: int) -> None:
        """Delete the rows that `recover` spared. Call it before the first commit."""
        with self._write_lock, self._in_use("written"), self._transaction() as writer:
            clean(writer, found, slots)

    def _scan_copy(self, copy: sqlite3.Connection, slots: int, now: float) -> None:
        catalog_file.present(copy, self.path, self._slab)
        scan(copy, slots, self._slab.extent_bytes, now)

    def _count_lifetimes(self, slots: Int64Array, now: float) -> None:
        """Count lifetimes from `now` on, in transactions of bounded size. A kill leaves the rest to the next open. So
        does a disk that takes no write: the pages are usable all the same."""
        said = time.monotonic()
        for first in range(0, len(slots), catalog_file.STEP_ROWS):
            some = slots[first : first + catalog_file.STEP_ROWS]
            try:
                with catalog_file.sqlite_errors(self.path, "written"), self._transaction() as writer:
                    catalog_file.count_lifetimes(writer, int(some[0]), int(some[-1]), milliseconds(now))
            except IOFailedError as error:
                log.warning("%s: ends wait for the next open to be counted from then on: %s", self.path, error.message)
                return
            done = first + len(some)
            if done == len(slots) or time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                log.info("%s: the ends of %d of %d pages are counted from now on", self.path, done, len(slots))

    def commit(
        self,
        insert: Sequence[PageRecord | tuple[Any, ...]],
        delete: Sequence[int],
        touch: Mapping[int, int],
        retain: Mapping[int, tuple[int, float | None]] = NOTHING,
        described: Mapping[bytes, Mapping[str, object]] = UNDESCRIBED,
    ) -> None:
        """One transaction: delete the rows of slots `delete`, add `insert`, set slot → recency of `touch`, and slot →
        (priority, expires) of `retain`. Expiries are written as lifetimes from the clock's time on. A namespace that
        becomes known gets its fields from `described`.

        All of it is durable on return, and none of it counts after an exception. An open before the next commit may
        find it all the same, so the bytes in the slots of `insert` must not change until then. Inserting a slot that
        still has a row raises `SlotRangeError`; deleting, touching or retaining a slot without a row does nothing.
        """
        if not (len(insert) or len(delete) or len(touch) or len(retain) or self._unsure):
            return
        with self._write_lock, self._in_use("written"):
            try:
                with self._transaction() as writer:
                    delete_pages(writer, delete)
                    slots, keys, parents, namespaces, *rest = zip(*insert, strict=True) if insert else ((),) * 10
                    lengths, recencies, sums, priorities, expiries, packed = rest
                    ids, places = self._register(writer, set(namespaces), described), list(map(int, slots))
                    numbers = (map(int, some) for some in (lengths, recencies, packed))
                    pages = zip(places, keys, parents, map(ids.__getitem__, namespaces), *numbers, strict=True)
                    _insert(writer, "INSERT INTO pages(place, key, parent, namespace, length, recency, packed)", pages)
                    stored = (some.astype("<u8", copy=False).tobytes() for some in sums)
                    _insert(writer, "INSERT OR REPLACE INTO checksums(place, sums)", zip(places, stored, strict=True))
                    writer.executemany(
                        "UPDATE pages SET recency = ? WHERE place = ?", [(int(r), int(s)) for s, r in touch.items()]
                    )
                    kept = {
                        place: (priority, expires)
                        for place, priority, expires in zip(places, priorities, expiries, strict=True)
                        if priority or expires is not None
                    }
                    for some in filter(None, (kept, retain)):
                        _retain(writer, some, milliseconds(self._wall_clock()))
                self._namespace_ids = ids
                with self._read_lock:
                    catalog_file.bound_log(self._connection(self._writer), self.path)
            except sqlite3.IntegrityError as error:
                raise SlotRangeError(f"a slot that still has a page was written: {error}", "delete it first") from error

    def checksum_rows(self, slots: Sequence[int], layers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The slots among `slots` with checksums of `layers` layers in each shard, and these as stored, bound to any
        keys: uint64 of shape (found, shards x layers)."""
        rows: list[tuple[int, bytes]] = []
        ordered = np.asarray(slots, dtype=np.int64)
        if (np.diff(ordered) <= 0).any():
            ordered = np.array(sorted(set(slots)), dtype=np.int64)
        runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
        single = [slot for run in runs if len(run) < SHORTEST_STRETCH for slot in run.tolist()]
        with self._read_lock, self._in_use("read"):
            reader = self._connection(self._reader)
            for run in runs:
                if len(run) >= SHORTEST_STRETCH:
                    rows += reader.execute(STRETCH, (int(run[0]), int(run[-1]))).fetchall()
            for at in range(0, len(single), LOOKUP_SLOTS):
                some = single[at : at + LOOKUP_SLOTS]
                rows += reader.execute(LOOKUP, some + [None] * (LOOKUP_SLOTS - len(some))).fetchall()
        count = layers * self._slab.shards
        whole = [(slot, sums) for slot, sums in rows if len(sums) == 8 * count]
        found = np.array([slot for slot, _ in whole], dtype=np.int64)
        values = np.frombuffer(b"".join(sums for _, sums in whole), "<u8").astype(np.uint64, copy=False)
        return found, values.reshape(len(whole), count)

    def namespaces(self) -> dict[bytes, dict[str, object]]:
        """Digest → description (empty without one) of all namespaces of the catalogue."""
        with self._read_lock, self._in_use("read"):
            rows = list(descriptions(self._connection(self._reader)))
        try:
            return {digest: json.loads(text or b"{}") for digest, text in rows}
        except (TypeError, ValueError, RecursionError) as error:
            raise IOFailedError(f"{self.path}: a namespace's description is damaged: {error}") from error

    def rows(self) -> dict[int, bytes]:
        with self._read_lock, self._in_use("read"):
            return dict(self._connection(self._reader).execute("SELECT place, key FROM pages"))

    def retentions(self) -> dict[int, tuple[int, float | None]]:
        with self._read_lock, self._in_use("read"):
            rows = self._connection(self._reader).execute("SELECT place, priority, written + lifetime FROM retention")
            return {slot: (priority, None if at is None else at / 1000) for slot, priority, at in rows}

    def close(self) -> None:
        """Close the catalogue and fold its WAL in; may be called twice."""
        with self._write_lock:
            self._close_connections()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self) -> None:
        with contextlib.ExitStack() as undo:
            opened, self._version = catalog_file.open_writer(self.path, self._slab, self._synchronous)
            undo.callback(catalog_file.close, opened)
            writer, reader = opened, catalog_file.open_reader(self.path)
            undo.callback(catalog_file.close, reader)
            self._namespace_ids = {}
            undo.pop_all()
        self._writer, self._reader = writer, reader

    def _rebuild(self, cause: CorruptCatalogError, judge: Callable[[sqlite3.Connection], object]) -> None:
        """Set the catalogue aside and begin an empty one, if a second read of its bytes confirms the damage."""
        if not catalog_file.is_corrupt(self.path, judge):
            raise IOFailedError(
                f"{cause}; but read again, byte by byte, it is sound: reads fail here from time to time",
                "see the kernel log for the device, and open the engine again: nothing was changed",
                errno.EIO,
            ) from cause
        self._set_aside = catalog_file.set_aside(self.path)
        log.error("%s: set aside as %s; the SSD tier starts empty", cause, self._set_aside)
        try:
            self._connect()
        except CorruptCatalogError as error:
            raise IOFailedError(
                f"{error}, which was made just now: reads fail here", "see the kernel log for the device", errno.EIO
            ) from error

    def _close_connections(self) -> None:
        with self._read_lock:
            writer, reader = self._writer, self._reader
            self._writer = self._reader = None
            for connection in (reader, writer):
                if connection is not None and os.getpid() == self._pid:  # a forked child must not close them
                    catalog_file.close(connection)

    def _connection(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise EngineClosedError(f"the catalogue {self.path} is closed", "open the engine again")
        return connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        writer = self._connection(self._writer)
        if self._unsure:
            with self._read_lock:
                catalog_file.empty_log(writer, self.path)
        with writer:  # commits, or rolls back when the block or the commit raises
            writer.execute("BEGIN IMMEDIATE")
            if self._version != FORMAT_VERSION:
                catalog_file.convert(writer)
            yield writer
            self._unsure = True
        self._unsure = False
        if self._version != FORMAT_VERSION:
            log.info("%s: converted from format %d to %d", self.path, self._version, FORMAT_VERSION)
            self._version = FORMAT_VERSION

    @contextlib.contextmanager
    def _in_use(self, what: str) -> Iterator[None]:
        """A catalogue found corrupt in use is only marked: the next open sets it aside."""
        try:
            with catalog_file.sqlite_errors(self.path, what):
                yield
        except CorruptCatalogError as error:
            log.error("%s; it is set aside at the next open", error)
            catalog_file.mark_suspect(self.path)
            raise IOFailedError(str(error), "close and open the engine: its SSD tier then starts empty") from error

    def _register(
        self, writer: sqlite3.Connection, digests: set[bytes], described: Mapping[bytes, Mapping[str, object]]
    ) -> dict[bytes, int]:
        """Ids of the known namespaces and of `digests`, in a transaction; the caller keeps them after its commit."""
        known = self._namespace_ids
        if digests <= known.keys():
            return known
        if len(known) + len(digests) > PRUNE_NAMESPACES:
            prune(writer, {namespace for (namespace,) in writer.execute("SELECT DISTINCT namespace FROM pages")})
            known = {}
        new = digests - known.keys()
        rows = [(digest, json.dumps(described.get(digest, {}), sort_keys=True)) for digest in new]
        writer.executemany(REGISTER, rows)
        find = "SELECT id FROM namespaces WHERE digest = ?"
        return known | {digest: writer.execute(find, (digest,)).fetchone()[0] for digest in new}


def _insert(writer: sqlite3.Connection, into: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Add many rows with one statement: SQLite releases the interpreter's lock at each step of one, and getting it back
    may take time."""
    rows = list(rows)
    for first in range(0, len(rows), _ROWS):
        some = rows[first : first + _ROWS]
        values = f"({', '.join('?' * len(some[0]))})"
        writer.execute(f"{into} VALUES {', '.join([values] * len(some))}", list(itertools.chain.from_iterable(some)))


def _retain(writer: sqlite3.Connection, retain: Mapping[int, tuple[int, float | None]], now: int) -> None:
    """Write retentions. `now`: milliseconds since the epoch; an end before it is counted from the end."""
    default = [(int(slot),) for slot, (priority, expires) in retain.items() if not priority and expires is None]
    writer.executemany("DELETE FROM retention WHERE place = ?", default)
    rows: list[tuple[int, int | None, int, int]] = []
    for slot, (priority, expires) in retain.items():
        if expires is not None:
            end = milliseconds(expires)
            written = min(now, end)
            rows.append((int(priority), end - written, written, int(slot)))
        elif priority:
            rows.append((int(priority), None, now, int(slot)))
    writer.executemany(
        "INSERT OR REPLACE INTO retention(place, priority, lifetime, written) "
        "SELECT place, ?, ?, ? FROM pages WHERE place = ?",
        rows,
    )
