"""A cache directory's catalogue and slab, read without changing a byte, and the report of `gdscache inspect`.

The catalogue and its log are copied to a temporary file, and the engine's own recovery selects the rows. The reader
starts again when either changes meanwhile. Of a directory in use it has the last commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.commands.console import silent
from gdscache.commands.inspect.owner import LOG_NAME, find_owner
from gdscache.commands.inspect.tables import made_of
from gdscache.config.pools import PLAIN_DIRECTORY, POOL_PREFIX
from gdscache.disk import catalog_file, slab
from gdscache.disk.catalog import Recovered, descriptions, scan
from gdscache.disk.catalog_file import CATALOG_NAME, SIDECARS, SUSPECT_NAME, CorruptCatalogError, Progress, kept_aside
from gdscache.disk.slab import Slab, first_missing, slab_files, stretch_slots
from gdscache.errors import GdsCacheError, IOFailedError, NotADirectoryPathError, NotARegularFileError, StripeError
from gdscache.pages.keys import namespace_digest
from gdscache.pages.layout import EXTENT_ALIGNMENT, PageLayout, Plane
from gdscache.runtime.files import located

SCHEMA = "gdscache.inspect/6"
ATTEMPTS = 20  # of reading a catalogue that an engine opens or closes
PAUSE = 0.05  # seconds between two attempts


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace's facts. `fields` and `layout` are None without a description with this digest (`layout`: without one
    for this directory's page size)."""

    fields: dict[str, Any] | None = None
    layout: PageLayout | None = None


@dataclasses.dataclass(frozen=True)
class Contents:
    """The catalogue's content and the slab's state on disk.

    `pages`: the pages that the next engine would find, and the causes for which it would delete others. `order`: their
    positions in slot order. `slab.slots`: the leading slots that the files of all shards have in full. `slab_bytes`:
    the bytes of each file. `names`: the namespaces by digest.
    """

    version: int
    created: str | None
    suspect: bool
    slab: Slab
    slab_bytes: tuple[int, ...]
    pages: Recovered
    order: Int64Array
    names: dict[bytes, Namespace]


def caches_below(directory: Path) -> list[Path]:
    """`directory`, those of a hybrid model's pools, and of each that of pages that do not fit into packed extents. They
    need not exist."""
    own = [directory, *sorted(directory.glob(f"{POOL_PREFIX}*"))]
    return [path for one in own for path in (one, one / PLAIN_DIRECTORY)]


def directories_of(directory: Path) -> list[Path]:
    """The cache directories: `directory` itself, and those below it of a hybrid model's pools, and of pages that do not
    fit into packed extents, if they have a catalogue. A directory without any is returned as it is, and `existing`
    raises for it."""
    try:
        found = [path for path in caches_below(directory) if (path / CATALOG_NAME).exists()]
    except OSError:
        found = []
    return found or [directory]


def existing(directory: Path) -> Path:
    """The absolute path of a directory with a catalogue. Raises `NotADirectoryPathError`, `IOFailedError`."""
    directory = located(directory)
    with os_errors(directory):
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotADirectoryPathError(f"{directory} is not a directory", "name the ssd.path of a config")
    slab_directories(directory)
    regular_file(directory / CATALOG_NAME)
    return directory


def regular_file(path: Path) -> os.stat_result:
    """The status of a cache file. Raises `NotARegularFileError`, `IOFailedError`."""
    with os_errors(path):
        status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise NotARegularFileError(f"{path} is not a regular file", "is this the ssd.path of a config?")
    return status


def slab_directories(directory: Path) -> tuple[Path, ...]:
    """`directory` and the slab's other directories. Raises `StripeError`, `IOFailedError`."""
    first = slab.read_stripe(directory)
    if first is None:
        return (directory,)
    paths = (directory, *map(Path, first.directories[1:]))
    if first.number != 0:
        raise StripeError(
            f"{directory} is directory {first.number} of a striped cache, not its first, {first.directories[0]}",
            f"look into {first.directories[0]}",
        )
    for number, path in enumerate(paths):
        with os_errors(path):
            os.stat(path)
        found = slab.read_stripe(path)
        if found is None or (found.set, found.number) != (first.set, number):
            raise StripeError(
                f"{path} is not directory {number} of the cache in {directory}",
                "open the cache once with the directories where they are now: that is written down",
            )
    return paths


@contextlib.contextmanager
def os_errors(path: Path) -> Iterator[None]:
    with catalog_file.system_errors(path, "read", "read it as its owner; see the kernel log"):
        try:
            yield
        except FileNotFoundError as error:
            tier = path.name == CATALOG_NAME and path.parent.is_dir()
            lacks = f"{path.parent} has no SSD tier: no {CATALOG_NAME} is in it" if tier else f"{path} does not exist"
            raise IOFailedError(lacks, "name the ssd.path of a config", errno.ENOENT) from error


def read(directory: Path, progress: Progress) -> Contents:
    """The contents as of the last commits, also while an engine commits more. Damage raises once the directory does not
    change; `IOFailedError`: it changes all the time. `progress`: see `open_catalog`.

    An engine changes the database itself only when it checkpoints the log. The checkpointed rows stay in the log until
    the log restarts with another header. So a copy of both is whole if the log's header is the same before and after.
    """
    for attempt in range(ATTEMPTS):
        before = header, *_ = _version(directory)
        try:
            with open_catalog(directory, progress) as connection:
                if _version(directory) == before:  # else the copy may be torn
                    contents = read_contents(directory, connection)
                    if header or _version(directory) == before:
                        return contents
        except GdsCacheError:
            if attempt == ATTEMPTS - 1 or _version(directory) == before:
                raise
        time.sleep(PAUSE)
    raise IOFailedError(
        f"{directory} changes all the time", "look again when the engines there open, close or store less"
    )


def _version(directory: Path) -> tuple[bytes, int, int, int]:
    """The log's header, empty without one, and the catalogue's inode; without a log also its size and modification
    time."""
    path = directory / CATALOG_NAME
    status, header = regular_file(path), b""
    with contextlib.suppress(OSError):
        fd = os.open(directory / LOG_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            header = os.pread(fd, catalog_file.HEADER, 0)
        finally:
            os.close(fd)
    if len(header) == catalog_file.HEADER:
        return header, status.st_ino, 0, 0
    return b"", status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def open_catalog(directory: Path, progress: Progress) -> Iterator[sqlite3.Connection]:
    """A connection to a copy of the checked catalogue, for several threads in turn. The previous version's tables are
    shown as views of this version's.

    `progress(done, total, text)` counts the catalogue's bytes. Raises `CatalogVersionError`, `NotARegularFileError`,
    `IOFailedError` (also for a corrupt catalogue).
    """
    path = directory / CATALOG_NAME
    size = regular_file(path).st_size
    with _readable(path), os_errors(path), catalog_file.open_copy(path, progress) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, catalog_file.VALUE_BYTES)
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {pragma}")
        if size <= catalog_file.QUICK_CHECK_BYTES:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise CorruptCatalogError(f"{path} is corrupt: {verdict}")
        catalog_file.present(connection, path, None)
        yield connection


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        with catalog_file.sqlite_errors(path, "read"):
            yield
    except CorruptCatalogError as error:
        raise IOFailedError(
            str(error), "the next engine that opens this directory sets the catalogue aside and starts empty"
        ) from error


def read_contents(directory: Path, connection: sqlite3.Connection) -> Contents:
    """All contents except the checksums. Raises `IOFailedError`, `NotARegularFileError`."""
    path = directory / CATALOG_NAME
    with _readable(path):
        version, (extent, shards) = catalog_file.check(connection, path, None)
        plain = directory.name == PLAIN_DIRECTORY
        if extent < 1 or extent % EXTENT_ALIGNMENT:
            raise CorruptCatalogError(f"{path} is corrupt: its extent_bytes is {extent}")
        created = connection.execute("SELECT value FROM meta WHERE name = 'created'").fetchone()
        names = {digest: _namespace(digest, text, extent, plain=plain) for digest, text in descriptions(connection)}
        directories = slab_directories(directory)
        files = slab_files(directories, range(shards))
        sizes = tuple(regular_file(file).st_size for file in files)
        count = len(directories)
        whole = min(first_missing(i % count, count, extent, size // extent) for i, size in enumerate(sizes))
        pages = scan(connection, whole, extent)
    return Contents(
        version=version,
        created=str(created[0]) if created else None,
        suspect=os.path.lexists(directory / SUSPECT_NAME),
        slab=Slab(files, extent, whole, whole, stretch_slots(extent), shards=shards),
        slab_bytes=sizes,
        pages=pages,
        order=np.argsort(pages.slots, kind="stable"),
        names=names,
    )


def _namespace(digest: bytes, text: object, extent: int, *, plain: bool) -> Namespace:
    """`plain`: of the directory of pages that do not fit into packed extents."""
    try:
        fields = json.loads(text) if isinstance(text, bytes) else None
        if not isinstance(fields, dict) or namespace_digest(fields) != digest:
            return Namespace()
    except (ValueError, RecursionError):
        return Namespace()
    try:
        layers = tuple(
            tuple(
                Plane(name, tuple(shape), dtype, *packing[:1], *map(tuple, packing[1:]))
                for name, shape, dtype, *packing in planes
            )
            for planes in fields["planes"]
        )
        layout = PageLayout(layers, fields["page_tokens"], packed=fields.get("packed") == 1 and not plain)
        return Namespace(fields, layout if layout.extent_bytes == extent else None)
    except (KeyError, TypeError, ValueError, GdsCacheError):
        return Namespace(fields)


# -- the report --------------------------------------------------------------------------------------------------------


def inspect(directory: Path, progress: Progress = silent) -> dict[str, Any]:
    """The contents of `directory`'s catalogue and slab, as plain data; sizes in bytes. `made_of` has a line for each
    fact of a namespace.

    Takes no lock and writes nothing. Of a directory in use these are the contents as of the last commits.
    `progress(done, total, text)` counts the catalogue's bytes. Raises `NotADirectoryPathError`, `NotARegularFileError`,
    `CatalogVersionError`, `IOFailedError` (missing, unreadable, corrupt or steadily changing files).
    """
    directory = existing(directory)
    owner = find_owner(directory)
    contents = read(directory, progress)
    slab, pages, sizes = contents.slab, contents.pages, contents.slab_bytes
    present = [name for name in (CATALOG_NAME, LOG_NAME) if (directory / name).exists()]
    files = [(slab.files[0].name, sizes[0]), *((name, _size(directory / name)) for name in present)]
    return {
        "schema": SCHEMA,
        "path": str(directory),
        "owner": dataclasses.asdict(owner),
        "format_version": contents.version,
        "created": contents.created,
        "suspect": contents.suspect,
        "extent_bytes": slab.extent_bytes,
        "shards": slab.shards,
        "slots": slab.slots,
        "capacity_bytes": slab.nbytes,
        "pages": len(pages),
        "bytes": int(pages.lengths.sum()),
        "free_slots": slab.slots - len(pages),
        "unusable_rows": dict(pages.dropped),
        "retention": _retention(pages),
        "namespaces": _namespaces(contents),
        "files": [{"name": name, "bytes": size} for name, size in files],
        "stripes": [
            {"path": str(file.parent), "name": file.name, "bytes": size}
            for file, size in zip(slab.files, sizes, strict=True)
        ],
        "set_aside": _set_aside(directory),
    }


def _set_aside(directory: Path) -> list[dict[str, Any]]:
    """The corrupt catalogues that were set aside, the oldest first, with their logs' bytes."""
    with os_errors(directory):
        return [
            {"name": path.name, "bytes": sum(_size(Path(f"{path}{suffix}")) for suffix in ("", *SIDECARS))}
            for path in kept_aside(directory)
        ]


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _retention(pages: Recovered) -> dict[str, Any]:
    """Pages by priority, the pages with an expiry, and the expired ones, which the next engine drops."""
    priorities = Counter(pages.priorities.tolist())
    priorities[0] += len(pages) - len(pages.retained)
    return {
        "priorities": {str(priority): n for priority, n in sorted(priorities.items()) if n},
        "expiring_pages": int(np.isfinite(pages.expires).sum()),
        "expired_pages": int((pages.expires <= time.time()).sum()),
    }


def _namespaces(contents: Contents) -> list[dict[str, Any]]:
    """Each namespace, the most recently used first; those without pages last."""
    pages = contents.pages
    found: list[tuple[float, dict[str, Any]]] = []
    for digest, namespace in contents.names.items():
        number = pages.digests.index(digest) if digest in pages.digests else -1
        mine = pages.namespaces == number
        used = int(pages.recency[mine].max()) if mine.any() else -math.inf
        fields = namespace.fields
        told = {
            "digest": digest.hex(),
            "fields": fields,
            "made_of": None if fields is None else made_of(fields),
            "pages": int(mine.sum()),
            "bytes": int(pages.lengths[mine].sum()),
        }
        found.append((used, told))
    return [told for _, told in sorted(found, key=lambda one: -one[0])]
