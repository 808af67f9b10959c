"""`gdscache verify`: every committed page of a directory without an owner, compared with its checksums."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.console import silent
from gdscache.commands.inspect.reading import (
    Contents,
    existing,
    open_catalog,
    os_errors,
    read_contents,
    regular_file,
    slab_directories,
)
from gdscache.disk.catalog import NAMED, WHOLE_ROW, WHOLE_SUMS
from gdscache.disk.catalog_file import CATALOG_NAME, CorruptCatalogError, Progress, sqlite_errors
from gdscache.disk.directory import CacheDirectory, wanted
from gdscache.errors import DirectoryInUseError, IOFailedError
from gdscache.pages.checksum import Checksums, first_bad_layer, unbound

SCHEMA = "gdscache.verify/2"
PIECE_BYTES = 8 << 20  # of neighbouring extents in one read; a larger extent is read alone
THREADS, AHEAD = 4, 8  # AHEAD: pieces that threads read or will
REFRESH = 0.1  # seconds at most between two looks at who wants the directory, and reports of progress
KEY_DIGITS = 16  # hexadecimal digits of a key in a report
UNCHECKED = "no_description"
_LATER = "verify it when that engine is closed"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A page that is not known to be good. `shard`: the first bad one, if the cause is in one shard's bytes. `layer`:
    the first bad one there, if the cause is `checksum`.

    `cause`: `checksum`, `no_checksums` (missing, or not one a layer in each shard), `io_error`, `short_read`;
    `no_description` for a page without a known layout, which cannot be checked; or a cause of `Recovered.dropped`.
    """

    slot: int
    key: str
    namespace: str
    cause: str
    layer: int | None = None
    shard: int | None = None


# Of a piece: its pages, a finding for each bad slot (of the first bad shard), and the bytes read.
_Checked = tuple[int, Iterable[Finding], int]


def verify(directory: Path, progress: Progress = silent) -> dict[str, Any]:
    """Read and check every committed page of `directory`; a report as plain data. Changes only the lock file.

    Owns the directory meanwhile. If an engine has or wants the directory, raises `DirectoryInUseError`. Raises also as
    `inspect` does. `progress(done, total, text)` counts the catalogue's bytes, then pages. An unreadable page is a
    finding, not an error.
    """
    directory = existing(directory)

    def copied(done: int, total: int, text: str) -> None:
        progress(done, total, text)
        if wanted(directory):
            raise DirectoryInUseError(f"an engine wants {directory}: no page was verified", _LATER)

    with _own(slab_directories(directory)) as owned, open_catalog(directory, copied) as connection:
        contents = read_contents(directory, connection)
        owned.hold_slabs(shards=range(contents.slab.shards))
        check = _Check(directory, contents, connection)
        begun = time.perf_counter()
        findings = check.run(progress)
        seconds = time.perf_counter() - begun
        findings += [Finding(slot, *_name(connection, slot), cause) for slot, cause in contents.pages.causes.items()]
    findings.sort(key=lambda finding: finding.slot)
    bad = [f for f in findings if f.cause != UNCHECKED]
    pages = len(contents.pages) + len(contents.pages.causes)
    return {
        "schema": SCHEMA,
        "path": str(directory),
        "format_version": contents.version,
        "shards": contents.slab.shards,
        "pages": pages,
        "good_pages": pages - len(findings),
        "bad_pages": len(bad),
        "unchecked_pages": len(findings) - len(bad),
        "bad": [dataclasses.asdict(f) for f in bad],
        "unchecked": [dataclasses.asdict(f) for f in findings if f.cause == UNCHECKED],
        "bytes": check.bytes_read,
        "seconds": seconds,
        "gb_per_second": check.bytes_read / seconds / 1e9,
    }


def _own(directories: Sequence[Path]) -> CacheDirectory:
    if wanted(directories[0]):
        raise DirectoryInUseError(f"an engine waits for {directories[0]}", _LATER)
    try:
        with contextlib.ExitStack() as undo:
            owned = undo.enter_context(CacheDirectory.open(*directories, engine=False))
            owned.hold_slabs()  # an engine that has lost its lock file still holds these locks
            undo.pop_all()
            return owned
    except DirectoryInUseError as error:
        raise DirectoryInUseError(
            error.message,
            f"{_LATER}; while it runs, gdscache top shows its status, and its check() holds its index against its "
            "files",
        ) from error


def _name(connection: sqlite3.Connection, slot: int) -> tuple[str, str]:
    """Key prefix and namespace prefix of a slot's row; empty if the row is incomplete."""
    joined = f"pages LEFT JOIN namespaces ON namespace = id AND {NAMED}"
    select = f"SELECT key, digest FROM {joined} WHERE place = ? AND {WHOLE_ROW}"
    key, digest = connection.execute(select, (slot,)).fetchone() or (b"", b"")
    return key.hex()[:KEY_DIGITS], (digest or b"").hex()[:KEY_DIGITS]


class _Check:
    """A verification, whose threads read pieces of the slab in its order."""

    def __init__(self, directory: Path, contents: Contents, connection: sqlite3.Connection) -> None:
        self.bytes_read = 0
        self._directory = directory
        self._contents = contents
        self._connection = connection
        self._extent = contents.slab.extent_bytes
        self._shards = contents.slab.shards
        self._slots = contents.pages.slots[contents.order]
        self._layouts = list(dict.fromkeys(n.layout for n in contents.names.values() if n.layout is not None))
        self._files: list[int] = []  # descriptors of the slab files

    def run(self, progress: Progress) -> list[Finding]:
        findings, total, done = list[Finding](), len(self._slots), 0
        pieces = _pieces(self._contents, max(1, PIECE_BYTES // self._extent))
        with contextlib.ExitStack() as undo:
            for path in self._contents.slab.files:
                regular_file(path)
                with os_errors(path):
                    slab = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                undo.callback(os.close, slab)
                os.posix_fadvise(slab, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
                self._files.append(slab)
            pool = ThreadPoolExecutor(THREADS, "gdscache-verify")
            undo.callback(pool.shutdown, cancel_futures=True)
            todo, running = iter(pieces), set[Future[_Checked]]()
            while True:
                for rows in itertools.islice(todo, AHEAD - len(running)):
                    running.add(pool.submit(self._piece, rows, self._checksums(rows)))
                if not running:
                    break
                progress(done, total, "pages")
                ended, running = wait(running, REFRESH, FIRST_COMPLETED)
                for pages, found, nbytes in (one.result() for one in ended):
                    findings += found
                    self.bytes_read += nbytes
                    done += pages
                if done < total and wanted(self._directory):
                    raise DirectoryInUseError(
                        f"an engine wants {self._directory}: {done:,} of {total:,} pages were verified, "
                        f"{len(findings):,} of them are not good",
                        _LATER,
                    )
        progress(total, total, "pages")
        return findings

    def _piece(self, rows: range, sums: list[Checksums | None]) -> _Checked:
        extent, slab, found, nbytes = self._extent, self._contents.slab, dict[int, Finding](), 0
        buffer = np.empty(len(rows) * extent, np.uint8).data
        number, offset = slab.locate(int(self._slots[rows.start]))
        for shard in range(self._shards):
            try:
                got = _read(self._files[shard * slab.directories + number], buffer, offset)
            except OSError:
                if len(rows) > 1:  # each alone: only unreadable pages are bad
                    parts = [self._piece(rows[i : i + 1], sums[i : i + 1]) for i in range(len(rows))]
                    return len(rows), [one for _, each, _ in parts for one in each], sum(n for _, _, n in parts)
                got = -1
            for i, row in enumerate(rows):
                part = buffer[i * extent : min((i + 1) * extent, got)] if got >= 0 else None
                if row not in found and (finding := self._finding(row, part, sums[i], shard)) is not None:
                    found[row] = finding
            nbytes += max(got, 0)
        return len(rows), found.values(), nbytes

    def _finding(self, row: int, part: memoryview | None, stored: Checksums | None, shard: int) -> Finding | None:
        """The fault of a page's part in a shard, if it has one. `part`: None if it cannot be read."""
        pages, at = self._contents.pages, self._contents.order[row]
        digest, key = pages.digests[pages.namespaces[at]], pages.keys[at].tobytes()
        layout, layer = self._contents.names[digest].layout, None
        where: int | None = shard
        sums = None if stored is None or len(stored) % self._shards else stored.reshape(self._shards, -1)[shard]
        if part is None or len(part) < self._extent:
            cause = "io_error" if part is None else "short_read"
        elif sums is None or (layout is not None and len(sums) != layout.n_layers):
            cause, where = "no_checksums", None
        elif layout is not None:
            layer = first_bad_layer(part, layout.layer_bounds, sums)
            cause = "" if layer is None else "checksum"
        else:  # bytes of a known layout that match 64 bits a layer have that layout
            known = any(first_bad_layer(part, other.layer_bounds, sums) is None for other in self._layouts)
            cause, where = "" if known else UNCHECKED, None
        if not cause:
            return None
        return Finding(int(pages.slots[at]), key.hex()[:KEY_DIGITS], digest.hex()[:KEY_DIGITS], cause, layer, where)

    def _checksums(self, rows: range) -> list[Checksums | None]:
        slots = self._slots[rows.start : rows.stop].tolist()
        select = f"SELECT place, sums FROM checksums WHERE place BETWEEN ? AND ? AND {WHOLE_SUMS}"
        try:
            with sqlite_errors(self._contents.slab.path.with_name(CATALOG_NAME), "read"):
                found = dict(self._connection.execute(select, (slots[0], slots[-1])))
        except CorruptCatalogError as error:
            raise IOFailedError(
                str(error), "the next engine that opens this directory finds these pages without checksums"
            ) from error
        keys = self._contents.pages.keys[self._contents.order[rows.start : rows.stop]]
        return [
            unbound(np.frombuffer(found[slot], "<u8")[None], [key.tobytes()])[0] if slot in found else None
            for slot, key in zip(slots, keys, strict=True)
        ]


def _pieces(contents: Contents, most: int) -> list[range]:
    """Runs of at most `most` slots adjacent in a file, as ranges of positions in `contents.order`."""
    slots = contents.pages.slots[contents.order]
    if not len(slots):
        return []
    apart = np.diff(slots) != 1
    if contents.slab.directories > 1:
        apart |= np.diff(slots // contents.slab.stretch) != 0
    breaks = [0, *(np.flatnonzero(apart) + 1).tolist(), len(slots)]
    return [
        range(at, min(at + most, end)) for start, end in itertools.pairwise(breaks) for at in range(start, end, most)
    ]


def _read(slab: int, memory: memoryview, offset: int) -> int:
    """Fill `memory` from the slab and drop it from the page cache. Returns fewer bytes only at the end of the file."""
    done = 0
    try:
        while done < len(memory):
            count = os.preadv(slab, [memory[done:]], offset + done)
            if count == 0:
                break
            done += count
    finally:
        os.posix_fadvise(slab, offset, len(memory), os.POSIX_FADV_DONTNEED)
    return done
