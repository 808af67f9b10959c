"""The catalogue's file: its schema and the previous one, creation, checks at open, and moving it aside if corrupt."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import logging
import os
import shlex
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gdscache.errors import (
    CatalogVersionError,
    DirectoryInUseError,
    ExtentSizeError,
    IOFailedError,
    NotARegularFileError,
    ShardsError,
    StorageError,
    StripeError,
)
from gdscache.runtime.files import flush_directory, free_space, start_empty

PIECE = 1 << 20  # bytes of a read
LOG_SUFFIX = "-wal"
HEADER = 32  # bytes of a log before its first frame
_VERSIONS = 18  # offset of the versions that may write and read a database: 1 without a log, 2 with one

Progress = Callable[[int, int, str], object]


def _no_progress(done: int, total: int, text: str) -> None:
    pass


@contextlib.contextmanager
def open_copy(path: Path, progress: Progress = _no_progress) -> Iterator[sqlite3.Connection]:
    """A connection that reads a copy of the database at `path` as of its last commit; for several threads in turn.

    SQLite reports a failed read like damage (the result code of one can become the other's), and creates files to read
    a log. Here every byte is read once, a device's error is an error, and no file is written beside the catalogue.
    SQLite applies the log, to the copy.

    The copy is in the directory for temporary files (`TMPDIR`). It has lost its name when this returns, and goes with
    the process. `progress(done, total, text)` counts bytes. Raises `OSError` if a byte cannot be read, `IOFailedError`
    if the copy cannot be written, `sqlite3.DatabaseError` if it is no database, or of a version that SQLite only reads.
    """
    with contextlib.ExitStack() as undo:
        with _room("made"):
            directory = tempfile.mkdtemp(prefix="gdscache-")
        copy = Path(directory, "copy")
        log = Path(f"{copy}{LOG_SUFFIX}")
        try:
            _copy(path, copy, progress)
            with contextlib.suppress(FileNotFoundError):
                _copy(Path(f"{path}{LOG_SUFFIX}"), log, _no_progress)
            uri = f"{copy.absolute().as_uri()}?vfs=unix-excl"
            opened = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            undo.enter_context(contextlib.closing(opened))
            opened.execute("PRAGMA synchronous = OFF")
            with _room("written"):
                _apply_log(opened)
            with copy.open("rb") as file:
                if os.pread(file.fileno(), 2, _VERSIONS) not in (b"\1\1", b""):
                    raise sqlite3.DatabaseError("it is of a version from the future, which SQLite reads, never writes")
        finally:
            for file_name in (copy, log):
                file_name.unlink(missing_ok=True)
            os.rmdir(directory)
        yield opened


def _apply_log(copy: sqlite3.Connection) -> None:
    try:
        copy.execute("PRAGMA journal_mode = DELETE").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise OSError(errno.ENOSPC, str(error)) from error
        raise


def _copy(path: Path, copy: Path, progress: Progress) -> None:
    with contextlib.ExitStack() as ends:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        ends.callback(os.close, fd)
        with _room("written"):
            file = ends.enter_context(copy.open("wb"))
        total, done = os.fstat(fd).st_size, 0
        while piece := os.pread(fd, PIECE, done):
            with _room("written"):
                file.write(piece)
                file.flush()
            done += len(piece)
            progress(done, max(total, done), "bytes of the catalogue")


def _room(what: str) -> contextlib.AbstractContextManager[None]:
    hint = "set TMPDIR to a directory with as much room as the catalogue and its log take"
    return system_errors("a copy of the catalogue", f"{what} in the directory for temporary files", hint)


log = logging.getLogger("gdscache.disk.catalog")

FORMAT_VERSION = 6
OLD_VERSION = 5  # converted at open
STRIPE_NAME = "stripe.json"  # present if a slab lies over several directories
CATALOG_NAME = "catalog.sqlite"
NEW_NAME = "catalog.new"
SUSPECT_NAME = "catalog.suspect"
CORRUPT_PREFIX = "catalog.corrupt-"
SIDECARS = ("-wal", "-shm")
FILE_MODE = 0o600

QUICK_CHECK_BYTES = 16 << 20  # larger catalogues are not walked at open: recovering reads every row anyway
WAL_PAGES = 4096  # checkpoint after 16 MiB of log
WAL_BYTES = 32 << 20  # a commit that makes the log larger than this checkpoints and cuts it
META_ROWS, META_LENGTH = 64, 200  # a valid `meta` has no more rows and no longer values
SLAB_ROWS, MOST_SHARDS = 1024, 256  # a valid `slabs` has no more
VALUE_BYTES = 16 << 20  # SQLite refuses to read or write a larger value or row
KEPT_ASIDE = 4  # catalogues kept aside; a further one replaces the oldest
BUSY_S = 1.0  # seconds to wait for another program that reads the catalogue at open
VFS = "unix-excl"  # no other process gets a lock on the file, so the log's index is in our own memory

SCHEMA = {
    # Every version of the format keeps `meta` as it is: the version is read from it.
    "meta": "CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "slabs": "CREATE TABLE slabs(id INTEGER PRIMARY KEY, extent_bytes INTEGER, shards INTEGER)",
    "namespaces": "CREATE TABLE namespaces(id INTEGER PRIMARY KEY, digest BLOB UNIQUE, description TEXT)",
    "pages": (
        "CREATE TABLE pages(place INTEGER PRIMARY KEY, key BLOB, parent BLOB, namespace INTEGER, length INTEGER, "
        "recency INTEGER, packed INTEGER DEFAULT 0)"
    ),
    "checksums": "CREATE TABLE checksums(place INTEGER PRIMARY KEY, sums BLOB)",
    "retention": (
        "CREATE TABLE retention(place INTEGER PRIMARY KEY, priority INTEGER, lifetime INTEGER, "
        "written INTEGER DEFAULT 0)"
    ),
}
OLD_SCHEMA = {
    "meta": SCHEMA["meta"],
    "namespaces": SCHEMA["namespaces"],
    "pages": (
        "CREATE TABLE pages(slot INTEGER PRIMARY KEY, key BLOB, parent BLOB, namespace INTEGER, length INTEGER, "
        "recency INTEGER)"
    ),
    "checksums": "CREATE TABLE checksums(slot INTEGER PRIMARY KEY, sums BLOB)",
    "retention": "CREATE TABLE retention(slot INTEGER PRIMARY KEY, priority INTEGER, expires INTEGER)",
}

# Catalogues of the previous format: one transaction does everything but the expiries, and touches no row: tables get
# columns and new names. After it, expiries are lifetimes from the epoch on. Steps of bounded size then count them from
# the time of an open instead, so that a clock that is set back cannot extend them (docs/format.md). After a kill the
# next open does the remaining steps.
STEP_ROWS = 1 << 14  # retentions of one step's transaction: some 20 ms

# The tables get exactly the text of `SCHEMA`: SQLite defines ALTER TABLE so.
CONVERT = (
    "ALTER TABLE pages RENAME COLUMN slot TO place",
    "ALTER TABLE pages ADD COLUMN packed INTEGER DEFAULT 0",
    "ALTER TABLE checksums RENAME COLUMN slot TO place",
    "ALTER TABLE retention RENAME COLUMN slot TO place",
    "ALTER TABLE retention RENAME COLUMN expires TO lifetime",
    "ALTER TABLE retention ADD COLUMN written INTEGER DEFAULT 0",
    SCHEMA["slabs"],
    "INSERT INTO slabs SELECT 0, extent.value, heads.value FROM meta AS extent, meta AS heads "
    "WHERE extent.name = 'extent_bytes' AND heads.name = 'head_groups'",
    "DELETE FROM meta WHERE name IN ('extent_bytes', 'head_groups')",
    f"UPDATE meta SET value = {FORMAT_VERSION} WHERE name = 'format_version'",
)

# An old catalogue as one of this version: temporary views hide the tables of the same names.
VIEWS = (
    "CREATE TEMP VIEW pages AS SELECT slot AS place, key, parent, namespace, length, recency, 0 AS packed "
    "FROM main.pages",
    "CREATE TEMP VIEW checksums AS SELECT slot AS place, sums FROM main.checksums",
    "CREATE TEMP VIEW retention AS SELECT slot AS place, priority, expires AS lifetime, 0 AS written "
    "FROM main.retention",
)

# Of lifetimes that do not begin at a time of this clock: they begin at the epoch, or later than now.
COUNT_LIFETIMES = (
    "UPDATE retention SET lifetime = CASE WHEN written > :now THEN lifetime ELSE max(lifetime - :now, 0) END, "
    "written = :now "
    "WHERE place BETWEEN :first AND :last AND lifetime IS NOT NULL AND (written = 0 OR written > :now)"
)


class SlabShape(NamedTuple):
    """The bytes of a slab's extents, in each of its shards."""

    extent_bytes: int
    shards: int = 1


class Checked(NamedTuple):
    """The format version of a checked catalogue, and its slab 0."""

    version: int
    slab: SlabShape


class CorruptCatalogError(Exception):
    """Internal: the catalogue cannot be used as it is. The caller sets it aside, or marks it for that."""


@contextlib.contextmanager
def system_errors(
    path: Path | str,
    what: str,
    hint: str = "check ssd.path: its space and its owner",
    cause: type[StorageError] = IOFailedError,
) -> Iterator[None]:
    """The system's errors as `cause`: `path` cannot be `what`."""
    try:
        yield
    except OSError as error:
        number = {"errno": error.errno} if cause is IOFailedError else {}
        raise cause(f"{path} cannot be {what}: {error.strerror}", hint, **number) from error


@contextlib.contextmanager
def sqlite_errors(path: Path, what: str) -> Iterator[None]:
    """SQLite's errors as `CorruptCatalogError` (the file's content), `DirectoryInUseError` (another program has a file
    that is `opened`) or `IOFailedError` (all others).

    SQLite also reports corruption when a read failed: see `is_corrupt`.
    """
    try:
        yield
    except MemoryError as error:  # SQLITE_NOMEM in Python
        raise IOFailedError(f"{path} cannot be {what}: out of memory", "free memory", errno.ENOMEM) from error
    except UnicodeDecodeError as error:  # of a column's name, or of SQLite's message that quotes one
        raise CorruptCatalogError(f"{path} is corrupt: {error}") from error
    except sqlite3.Error as error:
        # Without a code the error is Python's own: a text that does not decode.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK):
            code = sqlite3.SQLITE_CORRUPT  # a header that claims a write version from the future
        primary = code & 0xFF
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and what == "opened":
            raise DirectoryInUseError(
                f"{path} is open in another program",
                f"end that program (fuser {shlex.quote(str(path))} names it), or give each engine its own ssd.path",
            ) from error
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG):
            raise CorruptCatalogError(f"{path} is corrupt: {error}") from error
        number = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO}.get(primary)
        hint = (
            "free space there" if number == errno.ENOSPC else "check the device, and other processes that use this file"
        )
        raise IOFailedError(f"{path} cannot be {what}: {error}", hint, number) from error


def open_writer(path: Path, slab: SlabShape, synchronous: str) -> tuple[sqlite3.Connection, int]:
    """The writing connection to a checked catalogue, made if it is missing, and its format version. One of the previous
    version is not converted.

    Raises `CatalogVersionError`, `ExtentSizeError`, `ShardsError`, `NotARegularFileError`, `IOFailedError`,
    `CorruptCatalogError`.
    """
    for suffix in SIDECARS:
        _exists(Path(f"{path}{suffix}"))
    if not _exists(path):
        _create(path, slab)
    elif path.with_name(SUSPECT_NAME).exists():
        if is_corrupt(path, lambda connection: check(connection, path, slab)):
            raise CorruptCatalogError(f"{path} was found corrupt while it was in use")
        log.warning("%s: reads failed while it was in use; read again, it is sound, and is kept", path)
        with system_errors(path, "opened"):
            path.with_name(SUSPECT_NAME).unlink()
    with system_errors(path, "opened"), sqlite_errors(path, "opened"), contextlib.ExitStack() as undo:
        writer = undo.enter_context(contextlib.closing(_connect(path)))
        if path.stat().st_size <= QUICK_CHECK_BYTES:
            verdict = writer.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise CorruptCatalogError(f"{path} is corrupt: {verdict}")
        version = check(writer, path, slab).version
        mode = writer.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise IOFailedError(
                f"{path}: SQLite cannot use a WAL here (journal mode {mode})",
                "set ssd.path to a directory on a local file system",
            )
        writer.execute(f"PRAGMA synchronous = {synchronous}")
        writer.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        writer.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        Path(f"{path}-shm").unlink(missing_ok=True)  # left by a killed engine of the previous format
        undo.pop_all()
        return _kept(writer), version


def open_reader(path: Path) -> sqlite3.Connection:
    with sqlite_errors(path, "opened"), contextlib.ExitStack() as undo:
        reader = undo.enter_context(contextlib.closing(_connect(path)))
        reader.execute("PRAGMA query_only = ON")
        reader.execute("SELECT name FROM meta").fetchone()  # opens all its files now, not at the first load
        undo.pop_all()
        return _kept(reader)


def close(connection: sqlite3.Connection) -> None:
    """Close a connection of `open_writer` or `open_reader`, in the process that opened it."""
    connection.close()
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(connection))


def lacking_room(directory: Path, slots: int, sums: int) -> int:
    """Bytes that the file system lacks for a catalogue of `slots` pages and its log, or 0. A row takes some 100 bytes
    and 8 a checksum; half as much again is lost between rows that come and go."""
    wanted = slots * (128 + 8 * sums) * 3 // 2 + WAL_BYTES
    with contextlib.suppress(OSError):
        wanted -= (directory / CATALOG_NAME).stat().st_size
    try:
        free = free_space(directory)
    except OSError:
        return 0
    return 0 if free is None else max(0, wanted - free)


def last_written(directory: Path) -> float:
    times = [0.0]
    for name in (CATALOG_NAME, f"{CATALOG_NAME}-wal"):
        with contextlib.suppress(OSError):
            times.append((directory / name).stat().st_mtime)
    return max(times)


def slab_extent(directory: Path) -> int | None:
    """`extent_bytes` of slab 0 there, as it was when the catalogue was made; None without one. Takes no lock."""
    try:
        with _glance(directory / CATALOG_NAME) as connection:
            found = connection.execute("SELECT extent_bytes FROM slabs WHERE id = 0").fetchone()
            return found[0] if found and isinstance(found[0], int) else None
    except sqlite3.Error:
        return None


def format_version(directory: Path) -> int | None:
    """The version of the catalogue there, which must not be open. None if it is missing, has a log, or cannot be read.
    Writes nothing, and takes no lock."""
    path = directory / CATALOG_NAME
    if not path.is_file() or os.path.lexists(f"{path}{LOG_SUFFIX}"):
        return None
    try:
        with _glance(path) as connection:
            return integers(connection).get("format_version")
    except (sqlite3.Error, CorruptCatalogError):
        return None


def _glance(path: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True))


def bound_log(writer: sqlite3.Connection, path: Path) -> None:
    """Fold the log in and cut it, if it is too large. No other connection may read meanwhile."""
    try:
        if os.stat(f"{path}{LOG_SUFFIX}").st_size > WAL_BYTES:
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except (OSError, sqlite3.Error) as error:  # nothing is lost; the next commit tries again
        log.warning("%s: the log could not be cut: %s", path, error)


def empty_log(writer: sqlite3.Connection, path: Path) -> None:
    """Fold the log in and cut it, so that no open finds a commit in it whose last sync failed. No other connection may
    read meanwhile. Raises SQLite's errors, and `IOFailedError`."""
    busy = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if busy:
        raise IOFailedError(
            f"{path}: the log cannot be emptied: it is in use", "end other processes that use this file"
        )


def is_corrupt(path: Path, judge: Callable[[sqlite3.Connection], object]) -> bool:
    """Whether a catalogue that SQLite calls corrupt is corrupt: its bytes, each read without an error, are judged in a
    copy.

    `judge` gets a connection to that copy, and raises SQLite's errors or `CorruptCatalogError`. Raises `IOFailedError`
    if a byte cannot be read, the copy cannot be written or memory is short.
    """
    try:
        with system_errors(path, "read"), sqlite_errors(path, "read"), open_copy(path) as connection:
            verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if verdict == "ok":
                judge(connection)
    except CorruptCatalogError:
        return True
    return bool(verdict != "ok")


def kept_aside(directory: Path) -> list[Path]:
    names = sorted(name for name in os.listdir(directory) if name.startswith(CORRUPT_PREFIX))
    return [directory / name for name in names if not name.endswith(SIDECARS)]


def set_aside(path: Path) -> Path:
    """Move a corrupt catalogue and its log to `catalog.corrupt-<UTC time>`. The last `KEPT_ASIDE` of these are kept."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    target = path.with_name(CORRUPT_PREFIX + now)
    with system_errors(path, "moved aside"):
        for older in kept_aside(path.parent)[: 1 - KEPT_ASIDE]:
            log.warning("%s: the oldest catalogue of %d that were set aside is deleted", older, KEPT_ASIDE)
            for suffix in ("", *SIDECARS):
                Path(f"{older}{suffix}").unlink(missing_ok=True)
        path.replace(target)
        for suffix in SIDECARS:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{target}{suffix}")
    return target


def mark_suspect(path: Path) -> None:
    try:
        os.close(os.open(path.with_name(SUSPECT_NAME), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    except OSError as error:
        log.error("%s: the note %s cannot be written: %s", path, SUSPECT_NAME, error.strerror)


def _exists(path: Path) -> bool:
    with system_errors(path, "opened"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
    own_file(path, found)
    return True


def irregular(path: Path) -> NotARegularFileError:
    return NotARegularFileError(f"{path} is not a regular file", "remove it, or set another ssd.path")


def own_file(path: Path, found: os.stat_result) -> None:
    """Refuse anything but a regular file with one name. Raises `NotARegularFileError`."""
    if not stat.S_ISREG(found.st_mode):
        raise irregular(path)
    if found.st_nlink > 1:
        raise NotARegularFileError(
            f"{path} is a hard link: {found.st_nlink} names lead to its bytes, and they would all be overwritten",
            f"remove the other names (find their file system -inum {found.st_ino}), put a copy in its place "
            f"(cp -p {path.name} copy && mv copy {path.name}), or set another ssd.path",
        )


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a regular file with one name. Raises `NotARegularFileError` for anything else, and `OSError`."""
    try:  # non-blocking: a FIFO here must not hang us
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise irregular(path) from error
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        own_file(path, os.fstat(descriptor))
        undo.pop_all()
    return descriptor


def _kept(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Keep a connection from being closed except by `close`.

    A forked child has a copy of it, which believes that it has the locks. Closed at the child's end, it would delete
    the log under the engine.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    return connection


def _create(path: Path, slab: SlabShape) -> None:
    """Make an empty catalogue under another name first: `path` has all its tables, or does not exist."""
    new = path.with_name(NEW_NAME)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    meta = [("format_version", FORMAT_VERSION), ("striped", int(_striped(path))), ("created", created)]
    with system_errors(path, "made"):
        new.unlink(missing_ok=True)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        with sqlite_errors(path, "made"), contextlib.closing(_connect(new)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            with connection:
                connection.execute("BEGIN")
                for sql in SCHEMA.values():
                    connection.execute(sql)
                connection.executemany("INSERT INTO meta(name, value) VALUES (?, ?)", meta)
                connection.execute("INSERT INTO slabs(id, extent_bytes, shards) VALUES (0, ?, ?)", slab)
        for leftover in (*(Path(f"{path}{suffix}") for suffix in SIDECARS), path.with_name(SUSPECT_NAME)):
            leftover.unlink(missing_ok=True)  # of a catalogue that is gone: SQLite would replay its log into this one
        new.replace(path)
        flush_directory(path.parent)


def _connect(path: Path) -> sqlite3.Connection:
    name = f"{path.absolute().as_uri()}?vfs={VFS}"
    connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
    return connection


def check(connection: sqlite3.Connection, path: Path, wanted: SlabShape | None) -> Checked:
    """Refuse a file that is no catalogue of this format version or the previous one, that does not match its
    directories, or whose slab is not `wanted` (None: any)."""
    tables = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE substr(name, 1, 7) <> 'sqlite_'"))
    if tables.get("meta") != SCHEMA["meta"]:
        raise CorruptCatalogError(f"{path} is not a catalogue: its tables are {sorted(tables)}")
    meta = integers(connection)
    version = meta.get("format_version")
    if version is None:
        raise CorruptCatalogError(f"{path} is not a catalogue: it has no format_version")
    old, empty = version == OLD_VERSION, start_empty(path.parent)
    ours = f"use the gdscache that wrote it, set another ssd.path, or {empty}"
    if version not in (OLD_VERSION, FORMAT_VERSION):
        raise CatalogVersionError(
            f"{path} has format version {version}; this gdscache reads versions {OLD_VERSION} and {FORMAT_VERSION}",
            ours,
        )
    if old and meta.get("head_groups", 1) != 1:
        raise CatalogVersionError(
            f"{path} has checksums of {meta['head_groups']} head groups a layer; this gdscache reads 1", ours
        )
    needed = {"extent_bytes", "head_groups", "striped"} if old else {"striped"}
    if tables != (OLD_SCHEMA if old else SCHEMA) or needed - meta.keys():
        raise CorruptCatalogError(f"{path} does not have the tables of format version {version}")
    slab = SlabShape(meta["extent_bytes"]) if old else _only_slab(connection, path)
    striped = meta["striped"] != 0
    if striped != _striped(path):
        which = "missing" if striped else "beside it, and it is the catalogue of a single directory"
        raise StripeError(
            f"{path} does not belong to {path.parent} as it is: {STRIPE_NAME} is {which}",
            f"{'put it back' if striped else 'move it away'}, or {empty} and the others",
        )
    if wanted is not None:
        _refuse_others(path, slab, wanted)
    return Checked(version, slab)


def convert(writer: sqlite3.Connection) -> None:
    """Convert a catalogue of the previous version, in the caller's transaction. Takes some milliseconds and a few KiB
    of log, for any number of pages."""
    for statement in CONVERT:
        writer.execute(statement)


def present(connection: sqlite3.Connection, path: Path, wanted: SlabShape | None) -> None:
    """`check` a catalogue, and let this version's statements read it, without changing it."""
    if check(connection, path, wanted).version == OLD_VERSION:
        for statement in VIEWS:
            connection.execute(statement)


def count_lifetimes(writer: sqlite3.Connection, first: int, last: int, now: int) -> None:
    """Count the lifetimes of the places `first` to `last` from `now` on (milliseconds since the epoch), if they do not
    begin at a time of this clock: those of the previous format keep their end, those from the future their length."""
    writer.execute(COUNT_LIFETIMES, {"now": now, "first": first, "last": last})


def _only_slab(connection: sqlite3.Connection, path: Path) -> SlabShape:
    """Slab 0, which must be the only one: further slabs belong to an engine that knows of several, and are kept."""
    whole = "typeof(extent_bytes) = 'integer' AND typeof(shards) = 'integer'"
    select = f"SELECT id, extent_bytes, shards FROM slabs WHERE {whole} ORDER BY id LIMIT ?"
    slabs = {number: SlabShape(*shape) for number, *shape in connection.execute(select, (SLAB_ROWS,))}
    if len(slabs) != connection.execute("SELECT count(*) FROM slabs").fetchone()[0] or 0 not in slabs:
        raise CorruptCatalogError(f"{path} is not a catalogue: its table slabs has something else in it, or no slab 0")
    for number, shape in slabs.items():
        if shape.extent_bytes < 1 or not 1 <= shape.shards <= MOST_SHARDS:
            said = f"extent_bytes {shape.extent_bytes} and shards {shape.shards}"
            raise CorruptCatalogError(f"{path} is not a catalogue: slab {number} has {said}")
    if len(slabs) > 1:
        raise CatalogVersionError(
            f"{path} has {len(slabs)} slabs (of {', '.join(f'{s.extent_bytes:,}' for s in slabs.values())} bytes an "
            "extent); this gdscache reads directories of one",
            f"use the gdscache that wrote it, set another ssd.path, or {start_empty(path.parent)}",
        )
    return slabs[0]


def _refuse_others(path: Path, found: SlabShape, wanted: SlabShape) -> None:
    if found.extent_bytes != wanted.extent_bytes:
        raise ExtentSizeError(
            f"{path.parent} holds extents of {found.extent_bytes:,} bytes, and the model's pages need "
            f"{wanted.extent_bytes:,}",
            f"set another ssd.path for this model, page_tokens or pack, or {start_empty(path.parent)}",
        )
    if found.shards != wanted.shards:
        raise ShardsError(
            f"{path.parent} holds pages in {found.shards:,} shards, and this engine has {wanted.shards:,}",
            "use as many GPUs as wrote it, set another ssd.path for this number of them, or "
            f"{start_empty(path.parent)}",
        )


def integers(connection: sqlite3.Connection) -> dict[str, int]:
    """The integers of `meta`, by name. Raises `CorruptCatalogError` if it has too many or too long values."""
    rows = connection.execute(
        "SELECT name, value FROM meta WHERE length(name) <= ? AND ifnull(length(value), 0) <= ? LIMIT ?",
        (META_LENGTH, META_LENGTH, META_ROWS),
    ).fetchall()
    if len(rows) != connection.execute("SELECT count(*) FROM meta").fetchone()[0]:
        raise CorruptCatalogError("it is not a catalogue: its table meta has more in it than a catalogue's")
    return {name: value for name, value in rows if isinstance(value, int)}


def _striped(path: Path) -> bool:
    return os.path.lexists(path.with_name(STRIPE_NAME))
