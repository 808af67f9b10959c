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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from gdscache.disk import kept_file
from gdscache.disk.catalog_file import CATALOG_NAME, MOST_SHARDS, open_own
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
RANKS = 16
LATENCIES = ("read", "write", "commit", "load_cpu", "load_ssd")
TIERS = 5
SLOWEST = 8  # loads


class _Part:
    """`most` entries of one form, from byte `at` of the page on."""

    def __init__(self, at: int, form: str, most: int = 1) -> None:
        self._entry = struct.Struct(form)
        self._places = range(at, at + most * self._entry.size, self._entry.size)

    def write(self, page: bytearray, entries: Iterable[Sequence[Any]]) -> None:
        for at, values in zip(self._places, entries, strict=False):
            self._entry.pack_into(page, at, *values)

    def read(self, page: bytes) -> list[tuple[Any, ...]]:
        return [self._entry.unpack_from(page, at) for at in self._places]

    def named(self, page: bytes) -> Iterator[tuple[Any, ...]]:
        """Entries that begin with a name, without the empty ones."""
        return ((_read_text(name), *values) for name, *values in self.read(page) if name.rstrip(b"\0"))


_HEAD = struct.Struct("<8sQ")
_BODY = _Part(_HEAD.size, f"<II qQQQ II 8Q {len(COUNTS)}Q II")
_GROUPS = _Part(256, "<128s")
_TEXTS = _Part(384, "<64s512s256s")
_RANKS = _Part(1216, "<qII", RANKS)
_LATENCIES = _Part(1472, "<3Q", len(LATENCIES))
_CAUSES = _Part(1600, "<32sQ", 48)
_TIERS = _Part(3520, "<16s3Q", TIERS)
_LOADS = _Part(3720, "<16s3Q", SLOWEST)
_QUEUES = _Part(4040, "<5Q")
_PLAIN = _Part(4080, "<Q")
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
    times = (int(status.opened * 1000), int(status.written * 1000), status.number)
    sizes = (f.extent_bytes, f.slots, f.pages, f.free_slots, f.evictions, f.late_requests)
    files = (status.catalog_bytes, status.log_bytes)
    counts = [_count(f.counts, *name) for name in COUNTS]
    ranks = [(rank.pid, STATES.index(rank.state), 0) for rank in f.ranks[:RANKS]]
    head = PAGE_FORMAT, f.format_version, status.pid, *times, STATES.index(f.state), f.directories
    latencies = (f.latencies.get(what, NOTHING) for what in LATENCIES)
    loads = ((_text(load.tier, 16), int(load.ended * 1000), _ns(load.seconds), load.nbytes) for load in f.slowest)
    page = bytearray(PAGE_BYTES)
    _BODY.write(page, [(*head, *sizes, *files, *counts, f.shards, len(ranks))])
    _GROUPS.write(page, [(_text(f.groups, 128),)])
    _TEXTS.write(page, [(_text(status.host, 64), _text(status.command, 512), _text(f.stopped, 256))])
    _RANKS.write(page, ranks)
    _LATENCIES.write(page, ((samples, *map(_ns, seconds)) for samples, *seconds in latencies))
    _CAUSES.write(page, ((_text(name, 32), count) for name, count in (*_further(f), *_causes(f.counts))))
    _TIERS.write(page, ((_text(tier.name, 16), *tier[1:]) for tier in f.tiers))
    _LOADS.write(page, loads)
    _QUEUES.write(page, [f.queues])
    _PLAIN.write(page, [(f.plain_extent_bytes,)])
    _HEAD.pack_into(page, 0, MAGIC, xxhash.xxh3_64_intdigest(memoryview(page)[_HEAD.size :]))
    return bytes(page)


def unpack(page: bytes) -> Status | OtherFormat | None:
    """The status on a page; None for other or torn bytes."""
    if len(page) != PAGE_BYTES or _HEAD.unpack_from(page) != (MAGIC, xxhash.xxh3_64_intdigest(page[_HEAD.size :])):
        return None
    ((format_, version, pid, opened, written, number, state, directories, *rest),) = _BODY.read(page)
    if format_ != PAGE_FORMAT:
        return OtherFormat(format_)
    extent, slots, pages, free, evictions, late, catalog, log, *numbers, shards, count = rest
    ranks = _RANKS.read(page)[:count]
    states = [state, *(code for _, code, _ in ranks)]
    if shards > MOST_SHARDS or count > RANKS or max(states) >= len(STATES):
        return None
    host, command, stopped = map(_read_text, *_TEXTS.read(page))
    counts, causes = dict(zip(COUNTS, numbers, strict=True)), dict[tuple[str, str], int]()
    for name, times in _CAUSES.named(page):
        group, dot, cause = name.partition(".")
        if dot:
            (counts if group in BY_TIER else causes)[group, cause] = times
    latencies = [Summary(samples, median / 1e9, slow / 1e9) for samples, median, slow in _LATENCIES.read(page)]
    figures = Figures(
        *(version, directories, extent, slots, pages, free, evictions, late, STATES[state], stopped, counts, shards),
        tuple(RankState(rank, STATES[code]) for rank, code, _ in ranks),
        dict(zip(LATENCIES, latencies, strict=True)),
        tuple(TierState(*tier) for tier in _TIERS.named(page)),
        tuple(SlowLoad(tier, ended / 1000, took / 1e9, nbytes) for tier, ended, took, nbytes in _LOADS.named(page)),
        _read_text(*_GROUPS.read(page)[0]),
        Queues(*_QUEUES.read(page)[0]),
        *_PLAIN.read(page)[0],
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
        try:
            self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise DirectoryNotWritableError(
                f"{path} cannot be made: {error.strerror}", "make it writable for this user, or set another ssd.path"
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._descriptor)
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


def _ns(seconds: float) -> int:
    return min(int(seconds * 1e9), _MOST_NS)


def _read_text(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def _text(text: str, most: int) -> bytes:
    return text.encode(errors="replace")[:most].decode(errors="ignore").encode()
