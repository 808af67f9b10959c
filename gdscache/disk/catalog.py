"""The durable index of the SSD tier: the page in each slot. SQLite in WAL mode; docs/format.md has the format.

A row is committed after its bytes are written and before its key becomes visible, and a slot is reused only after the
deletion of its row is committed. So a kill at any time leaves whole rows with complete bytes.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.disk import catalog_file
from gdscache.disk.catalog_file import FORMAT_VERSION, CorruptCatalogError, SlabShape
from gdscache.disk.recovery import Recovered, clean, delete_pages, descriptions, milliseconds, prune, scan
from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, SlotRangeError
from gdscache.pages.checksum import MOST_SUMS

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

    def recover(self, slots: int, now: float = -math.inf) -> Recovered:
        """All pages in slots below `slots`. Other rows, broken rows, and pages expired by `now` (seconds since the
        epoch) are deleted.

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
                        clean(writer, recovered, slots)
                    self._namespace_ids = {}
                    self._count_lifetimes(recovered.uncounted, now)
                    return dataclasses.replace(recovered, set_aside=self._set_aside)
            except CorruptCatalogError as error:
                self._close_connections()
                self._rebuild(error, lambda copy: self._scan_copy(copy, slots, now))
                return Recovered(set_aside=self._set_aside)

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
