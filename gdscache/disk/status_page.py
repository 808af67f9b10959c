"""The status page of a cache directory in use: 4 KiB that its owner rewrites every second.

A thread writes it that takes no lock of the engine, so that a hanging engine can be watched; `gdscache top` reads it.
docs/format.md has it byte by byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shlex
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from gdscache.disk import kept_file
from gdscache.disk.catalog_file import CATALOG_NAME, FILE_MODE, MOST_SHARDS, own_file
from gdscache.disk.catalog_image import LOG_SUFFIX
from gdscache.errors import DirectoryNotWritableError, NotARegularFileError
from gdscache.pages.layout import is_plain
from gdscache.runtime.latencies import NOTHING, SlowLoad, Summary
from gdscache.runtime.threads import start

STATUS_NAME = "status"
PAGE_BYTES = 4096
PERIOD_S = 1.0
_SAVED_EVERY = 60  # pages
FRESH_S = 5.0  # a page written within this time has a living owner
MAGIC = b"gdscstat"
PAGE_FORMAT = 3
STATES = ("running", "switched_off", "stopped")
# An engine's counts, by group and name; `misses`, `dropped` and `refused` over all causes.
COUNTS = (
    *(("lookups", name) for name in ("requests", "pages")),
    *(("hits", name) for name in ("gpu", "cpu", "ssd")),
    ("misses", ""),
    *(("loaded", name) for name in ("gpu", "cpu", "ssd")),
    *(("stores", name) for name in ("requests", "present")),
    *(("stored", name) for name in ("cpu", "ssd")),
    ("dropped", ""),
    ("refused", ""),
)
# Groups with a count for each tier: those of other tiers stand before the causes.
BY_TIER = ("hits", "loaded", "stored")
CAUSED = ("misses", "dropped", "refused", "lost")  # groups with a count for each cause, the most frequent first
CAUSES = 48
RANKS = 16
LATENCIES = ("read", "write", "commit", "load_cpu", "load_ssd")
TIERS = 5
SLOWEST = 8  # loads
_HEAD = struct.Struct("<8sQ")
_BODY = struct.Struct(f"<II qQQQ II 8Q {len(COUNTS)}Q II")
_TEXTS = struct.Struct("<64s512s256s")
_RANK = struct.Struct("<qII")
_LATENCY = struct.Struct("<3Q")
_CAUSE = struct.Struct("<32sQ")
_TIER = struct.Struct("<16s3Q")
_LOAD = struct.Struct("<16s3Q")
_GROUPS = struct.Struct("<128s")
_QUEUES = struct.Struct("<5Q")
_PLAIN = struct.Struct("<Q")
_GROUPS_AT, _TEXTS_AT, _RANKS_AT, _LATENCIES_AT, _CAUSES_AT = 256, 384, 1216, 1472, 1600
_TIERS_AT, _LOADS_AT, _QUEUES_AT, _PLAIN_AT = 3520, 3720, 4040, 4080
_MOST_NS = (1 << 64) - 1
_TRIES, _PAUSE = 5, 0.01  # reads of a page that is being written
_CLOSE_S = 2.0  # seconds that `close` waits for a hanging write
_log = logging.getLogger("gdscache.ssd")


class RankState(NamedTuple):
    """A process that moves the bytes of a shard. Rank 0 is the owner of the directory."""

    pid: int
    state: str


class TierState(NamedTuple):
    """A tier. `evictions`: pages, since it was opened."""

    name: str
    slots: int
    pages: int
    evictions: int


class Queues(NamedTuple):
    """Accepted work that is not done. Stores, and those on their way to the SSD, in bytes; `limit`: the most bytes of
    stores, 0 on a page that does not tell of queues. By number: loads under way, but those of pages that a prefetch has
    checked, and prefetches."""

    store_bytes: int = 0
    to_ssd_bytes: int = 0
    limit_bytes: int = 0
    loads: int = 0
    prefetches: int = 0


NO_QUEUES = Queues()


class OtherFormat(NamedTuple):
    """A whole page of a format that this version does not read."""

    format: int


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """An engine's own figures. `counts`: by (group, name), as `TierManager.counts`, and in the group `lost` the pages
    dropped at open. `stopped`: why, or "". `latencies`: the known ones of `LATENCIES`. `tiers`: the fastest first.
    `slowest`: the slowest loads of the last minutes. `groups`: the tokens that the layers keep, in words, or "".
    The sizes and counts up to `evictions` are the SSD's, and 0 without one. `extent_bytes`: of a page in one shard;
    `plain_extent_bytes`: the same where it is not packed."""

    format_version: int
    directories: int
    extent_bytes: int
    slots: int
    pages: int
    free_slots: int
    evictions: int
    late_requests: int
    state: str
    stopped: str
    counts: Mapping[tuple[str, str], int]
    shards: int = 1
    ranks: Sequence[RankState] = ()
    latencies: Mapping[str, Summary] = dataclasses.field(default_factory=dict)
    tiers: Sequence[TierState] = ()
    slowest: Sequence[SlowLoad] = ()
    groups: str = ""
    queues: Queues = NO_QUEUES
    plain_extent_bytes: int = 0

    def extent_of(self, tier: str) -> int:
        """Bytes of a page in a tier, over all shards."""
        return (self.plain_extent_bytes if is_plain(tier) else self.extent_bytes) * self.shards


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """A status page. Times are seconds since 1970-01-01 UTC; `number` counts the pages that the owner wrote. A page
    that was read has sums in `figures.counts`, under the names of `COUNTS`; `causes`: by (group, cause), the most
    frequent first."""

    pid: int
    host: str
    command: str
    opened: float
    written: float
    number: int
    catalog_bytes: int
    log_bytes: int
    figures: Figures
    format: int = PAGE_FORMAT
    causes: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)

    @property
    def age(self) -> float:
        return time.time() - self.written


def pack(status: Status) -> bytes:
    f = status.figures
    sizes = (f.extent_bytes, f.slots, f.pages, f.free_slots, f.evictions, f.late_requests)
    files = (status.catalog_bytes, status.log_bytes)
    times = (int(status.opened * 1000), int(status.written * 1000), status.number)
    state = STATES.index(f.state), f.directories
    counts = [_count(f.counts, *name) for name in COUNTS]
    ranks = f.ranks[:RANKS]
    page = bytearray(PAGE_BYTES)
    body = PAGE_FORMAT, f.format_version, status.pid, *times, *state, *sizes, *files, *counts, f.shards, len(ranks)
    _BODY.pack_into(page, _HEAD.size, *body)
    _TEXTS.pack_into(page, _TEXTS_AT, _text(status.host, 64), _text(status.command, 512), _text(f.stopped, 256))
    for at, rank in enumerate(ranks):
        _RANK.pack_into(page, _RANKS_AT + at * _RANK.size, rank.pid, STATES.index(rank.state), 0)
    for at, what in enumerate(LATENCIES):
        samples, *seconds = f.latencies.get(what, NOTHING)
        nanoseconds = (min(int(s * 1e9), _MOST_NS) for s in seconds)
        _LATENCY.pack_into(page, _LATENCIES_AT + at * _LATENCY.size, samples, *nanoseconds)
    _GROUPS.pack_into(page, _GROUPS_AT, _text(f.groups, 128))
    _QUEUES.pack_into(page, _QUEUES_AT, *f.queues)
    _PLAIN.pack_into(page, _PLAIN_AT, f.plain_extent_bytes)
    for at, tier in enumerate(f.tiers[:TIERS]):
        _TIER.pack_into(page, _TIERS_AT + at * _TIER.size, _text(tier.name, 16), *tier[1:])
    for at, load in enumerate(f.slowest[:SLOWEST]):
        ended, took = int(load.ended * 1000), min(int(load.seconds * 1e9), _MOST_NS)
        _LOAD.pack_into(page, _LOADS_AT + at * _LOAD.size, _text(load.tier, 16), ended, took, load.nbytes)
    for at, (name, count) in enumerate([*_further(f), *_causes(f.counts)][:CAUSES]):
        _CAUSE.pack_into(page, _CAUSES_AT + at * _CAUSE.size, _text(name, 32), count)
    _HEAD.pack_into(page, 0, MAGIC, xxhash.xxh3_64_intdigest(memoryview(page)[_HEAD.size :]))
    return bytes(page)


def unpack(page: bytes) -> Status | OtherFormat | None:
    """The status on a page; None for other or torn bytes."""
    if len(page) != PAGE_BYTES or _HEAD.unpack_from(page) != (MAGIC, xxhash.xxh3_64_intdigest(page[_HEAD.size :])):
        return None
    format_, version, pid, opened, written, number, state, directories, *rest = _BODY.unpack_from(page, _HEAD.size)
    if format_ != PAGE_FORMAT:
        return OtherFormat(format_)
    extent, slots, pages, free, evictions, late, catalog, log, *rest = rest
    shards, count = rest[len(COUNTS) :]
    told = [_RANK.unpack_from(page, _RANKS_AT + at * _RANK.size) for at in range(min(count, RANKS))]
    if (
        shards > MOST_SHARDS
        or count > RANKS
        or any(code >= len(STATES) for code in (state, *(code for _, code, _ in told)))
    ):
        return None
    host, command, stopped = map(_read_text, _TEXTS.unpack_from(page, _TEXTS_AT))
    latencies = {}
    for at, what in enumerate(LATENCIES):
        samples, median, slow = _LATENCY.unpack_from(page, _LATENCIES_AT + at * _LATENCY.size)
        latencies[what] = Summary(samples, median / 1e9, slow / 1e9)
    counts, causes = dict(zip(COUNTS, rest, strict=False)), dict[tuple[str, str], int]()
    for name, times in _entries(_CAUSE, page, _CAUSES_AT, CAUSES):
        group, dot, cause = _read_text(name).partition(".")
        if dot:
            (counts if group in BY_TIER else causes)[group, cause] = times
    (plain,) = _PLAIN.unpack_from(page, _PLAIN_AT)
    tiers = [TierState(_read_text(name), *sizes) for name, *sizes in _entries(_TIER, page, _TIERS_AT, TIERS)]
    slowest = [
        SlowLoad(_read_text(tier), ended / 1000, took / 1e9, nbytes)
        for tier, ended, took, nbytes in _entries(_LOAD, page, _LOADS_AT, SLOWEST)
    ]
    figures = Figures(
        format_version=version,
        directories=directories,
        extent_bytes=extent,
        slots=slots,
        pages=pages,
        free_slots=free,
        evictions=evictions,
        late_requests=late,
        state=STATES[state],
        stopped=stopped,
        counts=counts,
        shards=shards,
        ranks=tuple(RankState(number, STATES[code]) for number, code, _ in told),
        latencies=latencies,
        tiers=tuple(tiers),
        slowest=tuple(slowest),
        groups=_read_text(*_GROUPS.unpack_from(page, _GROUPS_AT)),
        queues=Queues(*_QUEUES.unpack_from(page, _QUEUES_AT)),
        plain_extent_bytes=plain,
    )
    return Status(pid, host, command, opened / 1000, written / 1000, number, catalog, log, figures, format_, causes)


def read(directory: Path) -> Status | OtherFormat | None:
    for _ in range(_TRIES):
        try:
            page = kept_file.read(directory / STATUS_NAME, PAGE_BYTES)
        except (OSError, ValueError, NotARegularFileError):
            return None
        if (status := unpack(page)) is not None:
            return status
        time.sleep(_PAUSE)
    return None


class StatusWriter:
    """Rewrites the status page of an owned directory until `close`, which then calls `released`.

    `figures` must take no lock. `save` is called every minute and at the end, to write files for after a kill. Raises
    `NotARegularFileError` (the page is a link, also a hard one, or a directory), `DirectoryNotWritableError`,
    `ThreadStartError`.
    """

    def __init__(
        self,
        directory: Path,
        figures: Callable[[], Figures],
        save: Callable[[], object] = lambda: None,
        released: Callable[[], object] = lambda: None,
    ) -> None:
        self._path = path = directory / STATUS_NAME
        self._files = (directory / CATALOG_NAME, directory / f"{CATALOG_NAME}{LOG_SUFFIX}")
        self._figures = figures
        self._save = save
        self._released = released
        self._about = (os.getpid(), socket.gethostname(), shlex.join(sys.orig_argv))
        self._opened = time.time()
        self._number = 0
        self._failed = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gdscache-status", daemon=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags, FILE_MODE)
        except OSError as error:
            if path.is_symlink() or path.exists():
                raise NotARegularFileError(
                    f"{path} is not a regular file: {error.strerror}", "remove it, or set another ssd.path"
                ) from error
            raise DirectoryNotWritableError(
                f"{path} cannot be made: {error.strerror}", "make it writable for this user, or set another ssd.path"
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._descriptor)
            own_file(path, os.fstat(self._descriptor))
            undo.callback(path.unlink, missing_ok=True)
            start([self._thread], self._end.set)
            undo.pop_all()
        self._write()

    def close(self) -> None:
        """Stop, and delete the page if its name is still ours; may be called twice. Waits 2 s at most for a write."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():  # its write hangs, and keeps the descriptor
            _log.error("%s: a write of the status page hangs", self._path)
            return
        with contextlib.suppress(OSError):
            ours, named = os.fstat(self._descriptor), os.stat(self._path, follow_symlinks=False)
            if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
                self._path.unlink()
        os.close(self._descriptor)
        self._released()

    def _run(self) -> None:
        while not self._end.wait(PERIOD_S):
            self._write()
            if self._number % _SAVED_EVERY == 0:
                self._save()
        self._save()

    def _write(self) -> None:
        """Write one page. A failure is logged once: the cache does without."""
        self._number += 1
        pid, host, command = self._about
        catalog, log = map(_size, self._files)
        try:
            figures = self._figures()
            now = time.time()
            page = pack(Status(pid, host, command, self._opened, now, self._number, catalog, log, figures))
            os.pwrite(self._descriptor, page, 0)
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._failed = True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _count(counts: Mapping[tuple[str, str], int], group: str, name: str) -> int:
    return counts.get((group, name), 0) if name else sum(n for (g, _), n in counts.items() if g == group)


def _further(figures: Figures) -> list[tuple[str, int]]:
    """The counts of tiers that have no place among `COUNTS`."""
    named = [(group, tier.name) for tier in figures.tiers[:TIERS] for group in BY_TIER]
    return [(".".join(name), figures.counts.get(name, 0)) for name in named if name not in COUNTS]


def _causes(counts: Mapping[tuple[str, str], int]) -> list[tuple[str, int]]:
    found = [(f"{group}.{name}", n) for (group, name), n in counts.items() if n > 0 and group in CAUSED]
    return sorted(found, key=lambda one: (-one[1], one[0]))


def _entries(entry: struct.Struct, page: bytes, at: int, most: int) -> Iterator[tuple[Any, ...]]:
    """Those of a list of entries that have a name, which comes first."""
    for number in range(most):
        found = entry.unpack_from(page, at + number * entry.size)
        if found[0].rstrip(b"\0"):
            yield found


def _read_text(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def _text(text: str, most: int) -> bytes:
    return text.encode(errors="replace")[:most].decode(errors="ignore").encode()
