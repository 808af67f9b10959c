"""The status page of a cache directory in use: 8 KiB that its owner rewrites every second.

A thread writes it that takes no lock of the engine, so that a hanging engine can be watched; `gdscache top` reads it.
docs/format.md has it field by field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter

from gdscache.disk import kept
from gdscache.disk.catalog_file import MOST_SHARDS, open_own, system_errors
from gdscache.errors import DirectoryNotWritableError, NotARegularFileError
from gdscache.pages.layout import is_plain
from gdscache.runtime.threads import failure_of, log_failure, start
from gdscache.sizes import Count

KEPT = 512  # durations of a kind
SLOW_S = 600.0  # seconds for which a slow load is told of


class Summary(NamedTuple):
    """The median and 99th percentile of `samples` durations, in seconds."""

    samples: Count
    median: float
    slow: float


class SlowLoad(NamedTuple):
    """A load, by the slowest tier that it read. `ended`: seconds since 1970-01-01 UTC, at its verdict."""

    tier: str
    ended: float
    seconds: float
    nbytes: Count


NOTHING = Summary(0, 0.0, 0.0)


class Latencies:
    """The last durations of each kind of work of each tier. Takes no lock: a note is one append, a summary one copy."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], deque[float]] = {}
        self._loads: deque[SlowLoad] = deque(maxlen=KEPT)

    def note(self, what: str, tier: str, seconds: float) -> None:
        self._noted.setdefault((what, tier), deque(maxlen=KEPT)).append(seconds)

    def loaded(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` whose slowest tier is `tier` took `seconds` from its begin to its verdict."""
        self.note("load", tier, seconds)
        self._loads.append(SlowLoad(tier, time.time(), seconds, nbytes))

    def slowest(self, most: int) -> list[SlowLoad]:
        """The slowest loads of the last minutes, the slowest first."""
        since = time.time() - SLOW_S
        return heapq.nlargest(most, (load for load in list(self._loads) if load.ended > since), key=lambda one: one[2])

    def summary(self, what: str, tier: str) -> Summary:
        found = sorted(self._noted.get((what, tier), ()))
        if not found:
            return NOTHING
        last = len(found) - 1
        return Summary(len(found), found[last // 2], found[last * 99 // 100])


STATUS_NAME = "status"
PAGE_BYTES = 8192
PERIOD_S = 1.0
_SAVED_EVERY = 60  # pages
FRESH_S = 5.0  # a page written within this time has a living owner
MAGIC = b"gdscstat"
PAGE_FORMAT = 4
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
HITS = ("lookups", "hits")  # on a page: the hits of all tiers
# Groups with a count for each tier.
BY_TIER = ("hits", "loaded", "stored")
CAUSED = ("misses", "dropped", "refused", "lost")  # groups with a count for each cause, the most frequent first
RANKS = 16
LATENCIES = ("read", "write", "commit", "load_cpu", "load_ssd")
TIERS = 5
SLOWEST = 8  # loads
CAUSES = 48
_ROOM = PAGE_BYTES - kept.HEAD_BYTES  # bytes of the JSON
_TRIES, _PAUSE = 5, 0.01  # reads of a page that is being written
_CLOSE_S = 2.0  # seconds that `close` waits for a hanging write of the page
_SAVE_S = 60.0  # and for one of the files for after a kill, which may be large
_log = logging.getLogger("gdscache.ssd")

State = Literal["running", "switched_off", "stopped"]
Seconds = Annotated[float, Field(ge=0, le=1e12)]  # since 1970-01-01 UTC
# Numbers by group and name: rows of three in JSON.
Counts = Annotated[
    Mapping[tuple[str, str], Count],
    BeforeValidator(lambda found: {tuple(row[:-1]): row[-1] for row in found} if isinstance(found, list) else found),
    PlainSerializer(lambda counts: [[*name, n] for name, n in counts.items()]),
]


class RankState(NamedTuple):
    """A process that moves the bytes of a shard. Rank 0 is the owner of the directory."""

    pid: Count
    state: State


class TierState(NamedTuple):
    """A tier. `evictions`: pages, since it was opened."""

    name: str
    slots: Count
    pages: Count
    evictions: Count


class Queues(NamedTuple):
    """Accepted work that is not done. Stores, and those on their way to the SSD, in bytes; `limit`: the most bytes of
    stores. By number: loads under way, but those of pages that a prefetch has checked, and prefetches."""

    store_bytes: Count = 0
    to_ssd_bytes: Count = 0
    limit_bytes: Count = 0
    loads: Count = 0
    prefetches: Count = 0


NO_QUEUES = Queues()


class OtherFormat(NamedTuple):
    """A whole page of a format that this version does not read."""

    format: int


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """An engine's own figures. `counts`: by (group, name), as `TierManager.counts`, and in the group `lost` the pages
    dropped at open. `stopped`: why, or "". `latencies`: the known ones of `LATENCIES`. `tiers`: the fastest first.
    `slowest`: the slowest loads of the last minutes. `groups`: the tokens that the layers keep, in words, or "".
    `evictions`: of the SSD, 0 without one. `extent_bytes`: of a page in one shard; `plain_extent_bytes`: the same where
    it is not packed."""

    extent_bytes: Count
    evictions: Count
    late_requests: Count
    state: State
    stopped: str
    counts: Counts
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)] = 1
    ranks: Annotated[tuple[RankState, ...], Field(max_length=RANKS)] = ()
    latencies: Mapping[str, Summary] = dataclasses.field(default_factory=dict)
    tiers: Annotated[tuple[TierState, ...], Field(max_length=TIERS)] = ()
    slowest: Annotated[tuple[SlowLoad, ...], Field(max_length=SLOWEST)] = ()
    groups: str = ""
    queues: Queues = NO_QUEUES
    plain_extent_bytes: Count = 0

    def extent_of(self, tier: str) -> int:
        """Bytes of a page in a tier, over all shards."""
        return (self.plain_extent_bytes if is_plain(tier) else self.extent_bytes) * self.shards


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """A status page. Times are seconds since 1970-01-01 UTC; `number` counts the pages that the owner wrote. A page
    that was read has sums in `figures.counts`, under the names of `COUNTS`; `causes`: by (group, cause), the most
    frequent first."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)

    pid: Count
    host: str
    command: str
    opened: Seconds
    written: Seconds
    number: Count
    figures: Figures
    causes: Counts = dataclasses.field(default_factory=dict)

    @property
    def age(self) -> float:
        return time.time() - self.written


@functools.cache
def _form() -> TypeAdapter[Status]:
    return TypeAdapter(Status)


def pack(status: Status) -> bytes:
    """The page. Texts and lists are cut to the lengths that are read, and the rarest causes left out if it is full."""
    f = status.figures
    short = {tier.name: _short(tier.name, number) for number, tier in enumerate(f.tiers[:TIERS], 1)}
    counts = {name: _count(f.counts, *name) for name in COUNTS} | {HITS: _count(f.counts, "hits", "")}
    counts |= {(group, short[name]): _count(f.counts, group, name) for name in short for group in BY_TIER}
    causes = [((group, _cut(cause, 32)), n) for (group, cause), n in f.counts.items() if n > 0 and group in CAUSED]
    causes = sorted(causes, key=lambda one: (-one[1], one[0]))[:CAUSES]
    figures = dataclasses.replace(
        f,
        stopped=_cut(f.stopped, 256),
        counts=counts,
        ranks=tuple(f.ranks[:RANKS]),
        tiers=tuple(tier._replace(name=short[tier.name]) for tier in f.tiers[:TIERS]),
        slowest=tuple(load._replace(tier=short.get(load.tier, _short(load.tier, 0))) for load in f.slowest[:SLOWEST]),
        groups=_cut(f.groups, 128),
    )
    host, command, text = _cut(status.host, 64), _cut(status.command, 512), bytes(PAGE_BYTES)
    while len(text) > _ROOM:
        page = dataclasses.replace(status, host=host, command=command, figures=figures, causes=dict(causes))
        text, causes = _form().dump_json(page), causes[:-4]
    return kept.sealed(MAGIC, PAGE_FORMAT, text, bytes(_ROOM - len(text)))


def unpack(page: bytes) -> Status | OtherFormat | None:
    """The status on a page; None for other or torn bytes. Pages of other formats have other sizes."""
    try:
        format_, text, _ = kept.unsealed(MAGIC, page, (1 << 32) - 1)
        return _form().validate_json(text) if format_ == PAGE_FORMAT else OtherFormat(format_)
    except ValueError:
        return None


def read(directory: Path) -> Status | OtherFormat | None:
    for _ in range(_TRIES):
        try:
            page = kept.read(directory / STATUS_NAME, 8 * PAGE_BYTES)  # a later format may be longer
        except (OSError, ValueError, NotARegularFileError):
            return None
        if (status := unpack(page)) is not None:
            return status
        time.sleep(_PAUSE)
    return None


class StatusWriter:
    """Rewrites the status page of an owned directory until `close`, which then calls `released`.

    `figures` must take no lock. `save` is called every minute and at the end, to write files for after a kill; `owned`
    tells whether the directory still is its owner's. Raises `NotARegularFileError` (the page is a link, also a hard
    one, or a directory), `DirectoryNotWritableError`, `ThreadStartError`.
    """

    def __init__(
        self,
        directory: Path,
        figures: Callable[[], Figures],
        save: Callable[[], object] = lambda: None,
        released: Callable[[], object] = lambda: None,
        owned: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path = path = directory / STATUS_NAME
        self._figures = figures
        self._save = save
        self._released = released
        self._owned = owned
        self._writing = threading.Lock()
        self._about = (os.getpid(), socket.gethostname(), shlex.join(sys.orig_argv))
        self._opened = time.time()
        self._number = 0
        self._failed = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gdscache-status", daemon=True)
        hint = "make it writable for this user, or set another ssd.path"
        with system_errors(path, "made", hint, DirectoryNotWritableError):
            self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._descriptor)
            undo.callback(path.unlink, missing_ok=True)
            self._write()
            start([self._thread], self._end.set)
            undo.pop_all()

    def close(self) -> None:
        """Stop, and delete the page if its name is still ours; may be called twice. Waits 2 s at most for a write of
        the page, and a minute for the last `save`; one that is late keeps the descriptor until it has ended."""
        self._end.set()
        if not self._writing.acquire(timeout=_CLOSE_S):
            _log.error("%s: a write of the status page hangs", self._path)
            return
        self._writing.release()
        self._thread.join(_SAVE_S)
        if self._thread.is_alive():
            _log.error("%s: files for after a restart are not written after %g s", self._path.parent, _SAVE_S)

    def _run(self) -> None:
        said: object = None  # the kind of the last page's failure, which is logged once while it lasts
        try:
            while not self._end.wait(PERIOD_S):
                with self._writing:
                    error = failure_of(self._write)
                if type(error) is not said:
                    log_failure(error)
                said = type(error)
                if self._number % _SAVED_EVERY == 0:
                    log_failure(failure_of(self._save))
            log_failure(failure_of(self._save))
        finally:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            ours, named = os.fstat(self._descriptor), os.stat(self._path, follow_symlinks=False)
            if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino) and self._owned():
                self._path.unlink()
        os.close(self._descriptor)
        self._released()

    def _write(self) -> None:
        """Write one page. A failure is logged once: the cache does without."""
        self._number += 1
        pid, host, command = self._about
        try:
            figures = self._figures()
            page = pack(Status(pid, host, command, self._opened, time.time(), self._number, figures))
            os.pwrite(self._descriptor, page, 0)
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._failed = True


def _count(counts: Mapping[tuple[str, str], int], group: str, name: str) -> int:
    return counts.get((group, name), 0) if name else sum(n for (g, _), n in counts.items() if g == group)


def _short(tier: str, number: int) -> str:
    """A tier's name in 16 bytes, another one for each number."""
    return tier if tier == _cut(tier, 16) else f"{_cut(tier, 14)}~{number}"


def _cut(text: str, most: int) -> str:
    """The begin of a text that has at most `most` bytes in JSON."""
    text = text.encode(errors="replace")[:most].decode(errors="ignore")
    while len(json.dumps(text, ensure_ascii=False).encode()) > most + 2:
        text = text[:-1]
    return text
