"""The way to a tier of files: pages that are ready in a memory, written in batches.

A batch is reserved, written and committed, in the order of the batches; the bytes of the next ones are under way while
one is committed. Of two threads one waits for batches and commits them, the other begins what becomes ready. What is
not written within its deadline is dropped, and what its I/O may still touch goes to the quarantine.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gdscache.errors import IOFailedError, LockLostError, StorageError, TierAnswerError
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry
from gdscache.moves import Executor, Move, Moving, Priority, Steps, Way
from gdscache.moves.base import failure
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.runtime.threads import log_failure
from gdscache.store.batch_size import BatchSize
from gdscache.tiers.base import DurableTier
from gdscache.tiers.manager import TierManager
from gdscache.tiers.quarantine import Late

_log = logging.getLogger("gdscache.store")
_FLIGHTS = 3  # batches under way, the one that is committed with them


@dataclasses.dataclass(slots=True, eq=False)
class Outgoing:
    """Pages of one namespace to write, which lie in `slots` of the memory `space`, within `seconds` of the begin of
    their batch. A *row* is a page's place in it.

    Both callbacks are called under the manager's lock with rows, once for each: `finish` with "" when the pages are
    committed, else why they are not; `release` when nothing reads their slots any more, which is later where the write
    hangs. `open`: the rows that have no end yet.
    """

    pages: Sequence[Page]
    epoch: int
    space: str
    slots: Sequence[int]
    finish: Callable[[Sequence[int], str], None]
    release: Callable[[Sequence[int]], None] = lambda rows: None
    seconds: float = 30.0
    retention: Retention = DEFAULT
    open: set[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.open = set(range(len(self.pages)))


_Part = tuple[Outgoing, Sequence[int]]  # pages of a batch that came together: their rows


@dataclasses.dataclass(slots=True, eq=False)
class _WriteBatch:
    """A batch whose bytes are on their way: the pages of its parts, in their order, have `entries` and `sums`, uint64
    (pages, layers), and are the rows of the move. `begun`: when, by the executor's clock."""

    parts: Sequence[_Part]
    entries: Sequence[Entry]
    sums: Checksums
    moving: Moving
    begun: float

    def pages(self) -> list[tuple[Outgoing, int]]:
        """Which page of what was handed in each row of the move is."""
        return [(out, row) for out, rows in self.parts for row in rows]


class TierWriter:
    """Writes pages to a durable tier in the background.

    Each page that it is given has its end, once, whatever happens here. `size`: of a batch.
    """

    def __init__(self, manager: TierManager, tier: DurableTier, executor: Executor, extent_bytes: int) -> None:
        self._manager = manager
        self._tier = tier
        self._executor = executor
        self.size = BatchSize.of(extent_bytes)
        self._ready: deque[_Part] = deque()
        self._flying: deque[_WriteBatch] = deque()
        self._starting = False  # a batch, by one of the threads: what one reserves the other must not count on
        self._completing = False
        self._closing = False
        self._dropping = False
        self._lane = executor.lane(Priority.DEMOTION, manager.settle, 2)

    def put(self, pages: Sequence[Outgoing]) -> None:
        """Take pages over, or none of them."""
        if pages:
            with self._manager.lock:
                self._lane.start(self._run(), self._run)  # which waits for the lock
                self._ready.extend((out, range(len(out.pages))) for out in pages)

    def begin_close(self, *, drain: bool) -> None:
        """From now on a batch that misses its deadline is the last that is waited for; without `drain`, any is."""
        self._closing = True
        self._dropping = self._dropping or not drain

    def close(self, *, drain: bool) -> None:
        """Write what was taken over (or drop it), then end the thread."""
        self.begin_close(drain=drain)
        self._lane.close()

    def _run(self) -> Steps[None]:
        while (error := (yield from failure(self._batches()))) is not None:
            log_failure(error)  # its pages have ended for it; those behind them go on

    def _batches(self) -> Steps[None]:
        while (yield from self._step()):
            pass

    def _step(self) -> Steps[bool]:
        """Begin a batch, or else complete one; False when there is nothing to do for this thread any more."""
        batch, flight = self._next()
        if batch:
            try:
                self._start(batch)
            except BaseException:
                self._drop_unbegun(batch)
                raise
            finally:
                with self._manager.lock:
                    self._starting = False
        elif flight is not None:
            try:
                yield from self._complete(flight)
            finally:
                try:
                    self._lose(flight)  # nothing, unless that was broken off
                finally:
                    try:
                        self._forget(flight)
                    finally:
                        self._forget(flight)  # once more, where the first is broken off itself
            self._manager.tell()
        return bool(batch) or flight is not None

    def _next(self) -> tuple[Sequence[_Part], _WriteBatch | None]:
        """A batch to begin, or the flight to complete, where the other thread does not, which looks further then."""
        with self._manager.lock:
            if self._ready and not self._starting and len(self._flying) < _FLIGHTS:
                batch = self._batch()
                self._starting = True
                return batch, None
            if self._completing or not self._flying:
                return (), None
            self._completing = True
            return (), self._flying[0]

    def _batch(self) -> list[_Part]:
        """The next pages, as many as a batch takes."""
        batch: list[_Part] = []
        room = self.size.pages
        while room and self._ready:
            out, rows = self._ready.popleft()
            batch.append((out, rows[:room]))
            if len(rows) > room:
                self._ready.appendleft((out, rows[room:]))
            room -= len(batch[-1][1])
        return batch

    def _start(self, batch: Sequence[_Part]) -> None:
        entries: dict[bytes, Entry] = {}
        try:
            self._manager.watch()
            quarantine = self._manager.quarantine
            off = quarantine.refuses(self._tier.name)
            cause = "closed" if self._dropping else quarantine.cause if off else f"{self._tier.name}_full"
            try:
                pages = [] if self._dropping or off else [out.pages[row] for out, rows in batch for row in rows]
                entries.update((entry.key, entry) for entry in self._tier.reserve(pages, self._retentions(batch)))
            except StorageError as error:
                self._say("takes no pages", error, len(pages))
                cause = self._refused(error)
            parts = self._admit(batch, entries, cause)
            if parts:
                flight = self._fly(parts, entries)
                with self._manager.lock:
                    self._flying.append(flight)
        except BaseException:
            self._abandon(batch, entries)
            raise

    def _retentions(self, batch: Sequence[_Part]) -> dict[bytes, Retention]:
        """How long the pages are wanted by now, where that is not the default."""
        found = {}
        with self._manager.lock:
            if not self._manager.expiry.retains and all(out.retention is DEFAULT for out, _ in batch):
                return {}
            for out, rows in batch:
                pages = [out.pages[row] for row in rows]
                for page, kept in zip(pages, self._manager.expiry.joined_all(pages, out.retention), strict=True):
                    if kept is not DEFAULT and kept != DEFAULT:
                        found[page.key] = kept
        return found

    def _admit(self, batch: Sequence[_Part], entries: dict[bytes, Entry], cause: str) -> list[_Part]:
        """What is still wanted and has a slot; what has none is dropped for `cause`."""
        going: list[_Part] = []
        with self._manager.lock:
            for out, rows in batch:
                wanted, pages = self._manager.clearing.epoch(out.pages[0].namespace) == out.epoch, out.pages
                placed = [row for row in rows if pages[row].key in entries]
                if len(placed) < len(rows):
                    self._finish(out, [row for row in rows if pages[row].key not in entries], cause)
                if placed and not wanted:
                    self._give_up([entries.pop(out.pages[row].key) for row in placed])
                    self._finish(out, placed, "cleared")
                elif placed:
                    going.append((out, placed))
        return going

    def _fly(self, parts: Sequence[_Part], entries: Mapping[bytes, Entry]) -> _WriteBatch:
        """Begin to move pages out of the memories that they lie in, into their slots of the tier."""
        ways, sums, moved = [], [], list[Entry]()
        for space, some in itertools.groupby(parts, lambda part: part[0].space):
            begun, slots = len(moved), list[int]()
            for out, rows in some:
                pages, at = out.pages, out.slots
                slots += [at[row] for row in rows]
                moved += [entries[pages[row].key] for row in rows]
            targets = np.array([entry.slot for entry in moved[begun:]], dtype=np.int64)
            ways.append(Way(space, self._tier.name, np.array(slots, dtype=np.int64), targets))
            sums.append(self._executor.checksums(space, slots))
            self._tier.expect(moved[begun:], sums[-1])
        move = Move(Priority.DEMOTION, tuple(ways), min(out.seconds for out, _ in parts))
        whole, now = sums[0] if len(sums) == 1 else np.concatenate(sums), self._executor.now()
        return _WriteBatch(parts, moved, whole, self._executor.begin(move), now)

    def _ended(self, flight: _WriteBatch) -> Steps[tuple[list[str], StorageError | None]]:
        """Why each page of a flight is not written, "" where it is; those that are late are dropped, and not waited
        for. An error, where I/O failed."""
        end = yield from flight.moving.end()
        seconds = self._executor.now() - flight.begun
        self.size.learn(len(flight.entries), seconds)
        self._manager.latencies.note("write", self._tier.name, seconds)
        causes = [""] * len(flight.entries)
        for row, error in end.errors.items():
            causes[row] = _cause(error)
        if end.late:
            self._manager.log.say(
                *(_log, logging.WARNING, f"written late, {self._tier.name}"),
                "the %s tier has not written %d of %d pages in time, page %s first, to slot %d of %s",
                *(self._tier.name, len(end.late), len(causes), *self._where(flight, end.late[0])),
                times=len(end.late),
            )
            self._dropping = self._dropping or self._closing
            for row in end.late:
                causes[row] = "deadline"
            self._hold(flight, end.late, "deadline")
        return causes, next(iter(end.errors.values()), None)

    def _hold(self, flight: _WriteBatch, late: Sequence[int], cause: str) -> None:
        """Pages of a flight end now, what its I/O touches of them later."""
        with self._manager.lock:
            for row in late:
                self._tier.index.drop(flight.entries[row])
            pages = flight.pages()
            where = [pages[row] for row in late]
            held = {row: self._late(out, at, flight.entries[row]) for row, (out, at) in zip(late, where, strict=True)}
            self._manager.quarantine.hold(flight.moving, held)
            for out, at in where:
                self._end(out, (at,), cause)

    def _complete(self, flight: _WriteBatch) -> Steps[None]:
        causes, failed = yield from self._ended(flight)
        ended = [row for row, cause in enumerate(causes) if cause != "deadline"]
        entries = {flight.entries[row].key: flight.entries[row] for row in ended}
        if not entries:
            return
        try:
            written = [row for row in ended if not causes[row]]
            failures = [row for row in ended if causes[row]]
            if failed is not None and failures:
                where = self._where(flight, failures[0])
                self._say(f"has not written page {where[0]} to slot {where[1]} of {where[2]}", failed, len(failures))
            for row, cause in zip(written, self._commit(flight, written), strict=True):
                causes[row] = cause
            with self._manager.lock:
                for row in ended:
                    if causes[row]:
                        self._tier.index.drop(flight.entries[row])
                some = list(entries.values())
                entries.clear()
                self._tier.index.release_all(some)
                self._finish_all(flight, causes)
        except BaseException:  # costs the batch at hand, and nothing else waits for ever
            self._abandon(flight.parts, entries)
            raise

    def _commit(self, flight: _WriteBatch, rows: Sequence[int]) -> list[str]:
        """Have written pages committed; why each of them is not, "" where it is."""
        try:
            with self._manager.timeline.span("commit", pages=len(rows)):
                entries, sums = flight.entries, flight.sums
                if len(rows) < len(entries):
                    entries, sums = [entries[row] for row in rows], sums[list(rows)]
                begun = self._executor.now()
                visible = [*self._tier.commit(entries, sums)]
                self._manager.latencies.note("commit", self._tier.name, self._executor.now() - begun)
            if len(visible) != len(rows):
                raise TierAnswerError(
                    f"the {self._tier.name} tier commits {len(visible)} of {len(rows)} pages",
                    "say True or False of each",
                )
            return ["" if there else "cleared" for there in visible]
        except StorageError as error:
            self._say("commits no pages", error, len(rows))
            return [self._refused(error)] * len(rows)

    def _say(self, what: str, error: StorageError, pages: int) -> None:
        """A full disk comes here with each batch."""
        cause = f"{self._tier.name}, {type(error).__name__}, {getattr(error, 'errno', None)}"
        text, about = "the %s tier %s: %s. %s", (self._tier.name, what, error.message, error.hint)
        self._manager.log.say(_log, logging.WARNING, cause, text, *about, times=pages)

    def _where(self, flight: _WriteBatch, row: int) -> tuple[str, int, str]:
        """A page of a flight for a line: its key, slot and directory."""
        entry = flight.entries[row]
        return entry.key.hex(), entry.slot, self._tier.place(entry.slot)

    def _refused(self, error: StorageError) -> str:
        """What pages are dropped for, where the tier raised this."""
        if isinstance(error, LockLostError):
            self._manager.watch()
            return "lock_lost"
        return _cause(error)

    def _finish_all(self, flight: _WriteBatch, causes: Sequence[str]) -> None:
        """The last word on the pages of a flight, but for those that are late."""
        left = iter(causes)
        if not any(causes):
            for out, rows in flight.parts:
                self._finish(out, rows, "")
            return
        for out, rows in flight.parts:
            by_cause: dict[str, list[int]] = {}
            for row, cause in zip(rows, left, strict=False):
                by_cause.setdefault(cause, []).append(row)
            for cause, some in by_cause.items():
                if cause != "deadline":
                    self._finish(out, some, cause)

    def _abandon(self, batch: Sequence[_Part], entries: dict[bytes, Entry]) -> None:
        with self._manager.lock:
            self._give_up(list(entries.values()))
            for out, rows in batch:
                self._finish(out, rows, "error")

    def _drop_unbegun(self, batch: Sequence[_Part]) -> None:
        """An exception ended the begin of a batch: what of it is in no flight goes."""
        with self._manager.lock:
            flying = {page for flight in self._flying for page in flight.pages()}
            self._abandon([(out, [row for row in rows if (out, row) not in flying]) for out, rows in batch], {})

    def _lose(self, flight: _WriteBatch) -> None:
        """An exception ended a flight, whose I/O may still be under way: its pages end now, what it touches later."""
        with self._manager.lock:
            if all(out.open.isdisjoint(rows) for out, rows in flight.parts):
                return  # nothing did
            left = [row for row, (out, at) in enumerate(flight.pages()) if at in out.open]
            self._hold(flight, left, "error")

    def _forget(self, flight: _WriteBatch) -> None:
        """Its pages have their ends. Again is fine: steps that were broken off may be closed late."""
        with self._manager.lock:
            if self._flying and self._flying[0] is flight:
                self._flying.popleft()
                self._completing = False

    def _give_up(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._tier.index.drop(entry)
        self._tier.index.release_all(entries)

    def _finish(self, out: Outgoing, rows: Sequence[int], cause: str) -> None:
        """The last word on pages, whose slots are free again; nothing where it has been said."""
        if ended := self._end(out, rows, cause):
            out.release(ended)

    def _end(self, out: Outgoing, rows: Sequence[int], cause: str) -> list[int]:
        """Say it, once for each; of which rows it was."""
        ended = [row for row in rows if row in out.open]
        if ended:
            out.finish(ended, cause)
            out.open.difference_update(ended)
        return ended

    def _late(self, out: Outgoing, row: int, entry: Entry) -> Late:
        """A write whose slots may be used again only when it has ended."""

        def ended() -> None:
            self._tier.index.release(entry)
            out.release((row,))

        pool = "bounce_stores" if out.space == "bounce" else out.space
        return Late("write", pool, self._tier.name, entry.slot, ended)


def _cause(error: StorageError) -> str:
    """What pages are dropped for that could not be written."""
    full = isinstance(error, IOFailedError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "disk_full" if full else "io_error"
