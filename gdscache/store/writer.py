"""Writes pages from memory to a tier of files, in batches.

A batch is reserved, written and committed, in order; the bytes of the next batches are written while one is committed.
One thread completes and commits batches, the other begins them. Pages that miss their deadline are dropped, and the
memory and slots of their I/O go to the quarantine.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import logging
from collections import deque
from collections.abc import Sequence

import numpy as np

from gdscache.errors import IOFailedError, LockLostError, StorageError, TierAnswerError
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry
from gdscache.moves import Executor, Move, Moving, Priority, Steps, Way, failure
from gdscache.pages.checksum import Checksums
from gdscache.runtime.threads import in_turn, log_failure
from gdscache.store.outlets import BatchSize, Outlet
from gdscache.store.parcel import Parcel
from gdscache.store.plan import StorePlanner
from gdscache.tiers.manager import TierManager
from gdscache.tiers.quarantine import Late

_log = logging.getLogger("gdscache.store")
_FLIGHTS = 3  # batches in flight, including the one that is committed


_Part = tuple[Parcel, Sequence[int]]  # rows of a parcel in a batch
_NO_SUMS: Checksums = np.empty((0, 0), np.uint64)


@dataclasses.dataclass(slots=True, eq=False)
class _WriteBatch:
    """Pages that are written together, in parts. `held`: the entries that it drops and releases itself if it fails.

    In flight, by `moving`, `begun` by the executor's clock: its pages, in order, are the rows of the move, and have
    `entries` and `sums`, uint64 (pages, layers). `over`: the end of the move is known."""

    parts: list[_Part]
    held: dict[bytes, Entry] = dataclasses.field(default_factory=dict)
    entries: Sequence[Entry] = ()
    sums: Checksums = dataclasses.field(default_factory=lambda: _NO_SUMS)
    moving: Moving | None = None
    begun: float = 0.0
    over: bool = False

    def pages(self) -> list[tuple[Parcel, int]]:
        return [(parcel, row) for parcel, rows in self.parts for row in rows]


class TierWriter:
    """Writes pages to a durable tier in the background.

    Every page gets one outcome, after any error. `size`: of a batch.

    Many methods: three public ones, and the steps of a batch.
    """

    def __init__(
        self, manager: TierManager, planner: StorePlanner, outlet: Outlet, executor: Executor, deadline: float
    ) -> None:
        """`planner` hears of each page's outcome, and that nothing reads its slot any more: later, if the write
        hangs."""
        self._manager = manager
        self._planner = planner
        self._outlet = outlet
        self._tier = outlet.tier
        self._executor = executor
        self._deadline = deadline
        self.size = BatchSize.of(planner.extent_bytes)
        self._ready: deque[_Part] = deque()
        self._flying: deque[_WriteBatch] = deque()
        self._starting = False  # a thread begins a batch; only one may, since both would count on the same slots
        self._completing = False
        self._closing = False
        self._dropping = False
        self._lane = executor.lane(Priority.DEMOTION, manager.bring_in, 2)

    def put(self, parcels: Sequence[Parcel]) -> None:
        """Take all pages, or raise and take none."""
        if parcels:
            with self._manager.lock:
                self._lane.start(self._run(), self._run)  # it waits for the lock
                self._ready.extend((parcel, parcel.rows) for parcel in parcels)

    def begin_close(self, *, drain: bool) -> None:
        """Begin no batch after the first that misses its deadline; without `drain`, begin none at all."""
        self._closing = True
        self._dropping = self._dropping or not drain

    def close(self, *, drain: bool) -> None:
        self.begin_close(drain=drain)
        self._lane.close()

    def _run(self) -> Steps[None]:
        while (error := (yield from failure(self._batches()))) is not None:
            log_failure(error)  # its pages have their outcome; the next batches go on

    def _batches(self) -> Steps[None]:
        while (yield from self._step()):
            pass

    def _step(self) -> Steps[bool]:
        """Begin a batch, or else complete one; False if this thread has nothing to do."""
        batch = self._next()
        if batch is None:
            return False
        begins = batch.moving is None
        try:
            if begins:
                self._start(batch)
            else:
                yield from self._complete(batch)
        except BaseException:
            self._lose(batch)
            raise
        finally:
            with self._manager.lock:
                if begins:
                    self._starting = False
                else:
                    self._flying.popleft()
                    self._completing = False
        if not begins:
            self._manager.tell()
        return True

    def _next(self) -> _WriteBatch | None:
        with self._manager.lock:
            if not self._starting and len(self._flying) < _FLIGHTS:
                batch = _WriteBatch([])
                try:
                    self._fill(batch.parts)
                except BaseException:
                    self._lose(batch)
                    raise
                if batch.parts:
                    self._starting = True
                    return batch
            if self._completing or not self._flying:
                return None
            self._completing = True
            return self._flying[0]

    def _fill(self, batch: list[_Part]) -> None:
        room = self.size.pages
        while room and self._ready:
            parcel, rows = self._ready[0]
            if self._manager.clearing.epoch(parcel.job.namespace) != parcel.job.epoch:
                self._drop(parcel, rows, "cleared")  # the batch may have the same pages again, stored since
                self._ready.popleft()
                continue
            part, rest = (parcel, rows[:room]), (parcel, rows[room:])
            batch.append(part)  # first: pages that are in neither would have no outcome
            if len(rows) > room:
                self._ready[0] = rest
            else:
                self._ready.popleft()
            room -= len(part[1])

    def _start(self, batch: _WriteBatch) -> None:
        self._manager.watch()
        quarantine = self._manager.quarantine
        off = quarantine.refuses(self._tier.name)
        cause = "closed" if self._dropping else quarantine.cause if off else f"{self._tier.name}_full"
        pages = [] if self._dropping or off else [parcel.pages[row] for parcel, rows in batch.parts for row in rows]
        try:
            reserved = self._tier.reserve(pages, self._retentions(batch.parts))
            batch.held = {entry.key: entry for entry in reserved}
            if pages and not (reserved or self._tier.served or self._tier.asks(pages)):
                cause = "switched_off"
            if quarantine.failed_reads.watching:
                with self._manager.lock:
                    quarantine.failed_reads.forget(self._tier.name, batch.held)
        except StorageError as error:
            self._say("takes no pages", error, sum(len(rows) for _, rows in batch.parts))
            cause = self._refused(error)
        self._admit(batch, cause)
        if batch.parts:
            self._fly(batch)
            with self._manager.lock:
                self._flying.append(batch)

    def _retentions(self, batch: Sequence[_Part]) -> dict[bytes, Retention]:
        found = {}
        with self._manager.lock:
            expiry, retained = self._manager.expiry, self._outlet.retained
            if not expiry.retains and not retained:
                return {}
            for page in (parcel.pages[row] for parcel, rows in batch for row in rows):
                kept = expiry.joined(page, retained.get(page.key, DEFAULT))
                if kept != DEFAULT:
                    found[page.key] = kept
        return found

    def _admit(self, batch: _WriteBatch, cause: str) -> None:
        """Go on with the pages that are still wanted and have a slot; the others are dropped, for `cause` if they have
        no slot."""
        entries, going = batch.held, list[_Part]()
        with self._manager.lock:
            for parcel, rows in batch.parts:
                pages = parcel.pages
                placed = [row for row in rows if pages[row].key in entries]
                if len(placed) < len(rows):
                    self._drop(parcel, [row for row in rows if pages[row].key not in entries], cause)
                if placed and self._manager.clearing.epoch(parcel.job.namespace) != parcel.job.epoch:
                    self._give_up([entries.pop(pages[row].key) for row in placed])
                    self._drop(parcel, placed, "cleared")
                elif placed:
                    going.append((parcel, placed))
            for key, kept in self._retentions(going).items():  # a store may have asked for more before the reservation
                self._tier.retain(key, kept)
        batch.parts = going

    def _fly(self, batch: _WriteBatch) -> None:
        ways, sums, moved, entries = [], [], list[Entry](), batch.held
        for space, some in itertools.groupby(batch.parts, lambda part: part[0].space):
            begun, slots = len(moved), list[int]()
            for parcel, rows in some:
                pages, at = parcel.pages, parcel.slots
                slots += [at[row] for row in rows]
                moved += [entries[pages[row].key] for row in rows]
            targets = np.array([entry.slot for entry in moved[begun:]], dtype=np.int64)
            ways.append(Way(space, self._tier.name, np.array(slots, dtype=np.int64), targets))
            sums.append(self._executor.checksums(space, slots))
            self._tier.expect(moved[begun:], sums[-1])
        batch.entries, batch.sums = moved, sums[0] if len(sums) == 1 else np.concatenate(sums)
        batch.begun = self._executor.now()
        batch.moving = self._executor.begin(Move(Priority.DEMOTION, tuple(ways), self._deadline))

    def _ended(self, flight: _WriteBatch) -> Steps[tuple[list[str], StorageError | None]]:
        """Wait for a flight. Returns the cause of each page that is not written, else "", and an I/O error if there was
        one. Late pages are dropped."""
        assert flight.moving is not None, "a batch that is not in flight"
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
        """Late pages of a flight get their outcome now; the quarantine keeps their slots until the I/O ends."""
        assert flight.moving is not None, "a batch that is not in flight"
        with self._manager.lock:
            for row in late:
                self._tier.index.drop(flight.entries[row])
            pages = flight.pages()
            where = [pages[row] for row in late]
            held = {row: self._late(*one, flight.entries[row]) for row, one in zip(late, where, strict=True)}
            self._manager.quarantine.hold(flight.moving, held)
            for parcel, at in where:
                self._planner.written(parcel, self._outlet, (at,), cause)

    def _complete(self, flight: _WriteBatch) -> Steps[None]:
        causes, failed = yield from self._ended(flight)
        ended = [row for row, cause in enumerate(causes) if cause != "deadline"]
        flight.held, flight.over = {flight.entries[row].key: flight.entries[row] for row in ended}, True
        if not ended:
            return
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
            some, flight.held = list(flight.held.values()), {}
            self._tier.index.release_all(some)
            self._finish_all(flight, causes)

    def _commit(self, flight: _WriteBatch, rows: Sequence[int]) -> list[str]:
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
            self._say("commits no pages", error, max(1, len(rows)))
            return [self._refused(error)] * len(rows)

    def _say(self, what: str, error: StorageError, pages: int) -> None:
        """A full disk gets here with each batch, so the log limits the lines."""
        cause = f"{self._tier.name}, {type(error).__name__}, {getattr(error, 'errno', None)}"
        text, about = "the %s tier %s: %s. %s", (self._tier.name, what, error.message, error.hint)
        self._manager.log.say(_log, logging.WARNING, cause, text, *about, times=pages)

    def _where(self, flight: _WriteBatch, row: int) -> tuple[str, int, str]:
        entry = flight.entries[row]
        return entry.key.hex(), entry.slot, self._tier.place(entry.slot)

    def _refused(self, error: StorageError) -> str:
        if isinstance(error, LockLostError):
            self._manager.watch()
            return "lock_lost"
        return _cause(error)

    def _finish_all(self, flight: _WriteBatch, causes: Sequence[str]) -> None:
        failed, left = any(causes), iter(causes)
        for parcel, rows in flight.parts:
            by_cause: dict[str, list[int]] = {} if failed else {"": [*rows]}
            for row, cause in zip(rows, left, strict=False) if failed else ():
                by_cause.setdefault(cause, []).append(row)
            for cause, some in by_cause.items():
                if cause != "deadline":
                    self._finish(parcel, some, cause)

    def _lose(self, batch: _WriteBatch) -> None:
        """An exception ended the steps of a batch: its pages end now. Where its I/O may still run, the quarantine keeps
        their slots."""
        with self._manager.lock:
            if batch.moving is not None and not batch.over:
                pages = enumerate(batch.pages())
                self._hold(batch, [row for row, (parcel, at) in pages if at in parcel.left[self._outlet]], "error")
            else:
                held, batch.held = list(batch.held.values()), {}
                self._give_up(held)
                finish = self._drop if batch.moving is None else self._finish
                in_turn(*(functools.partial(finish, parcel, rows, "error") for parcel, rows in batch.parts))

    def _give_up(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._tier.index.drop(entry)
        self._tier.index.release_all(entries)

    def _finish(self, parcel: Parcel, rows: Sequence[int], cause: str) -> list[int]:
        if ended := self._planner.written(parcel, self._outlet, rows, cause):
            self._planner.released(parcel, self._outlet, ended)
        return ended

    def _drop(self, parcel: Parcel, rows: Sequence[int], cause: str) -> None:
        """`_finish` pages before any byte of them is written."""
        self._outlet.admission.not_written(len(self._finish(parcel, rows, cause)))

    def _late(self, parcel: Parcel, row: int, entry: Entry) -> Late:
        """A write whose slots may be used again only when it has ended."""

        def ended() -> None:
            self._tier.index.release(entry)
            self._planner.released(parcel, self._outlet, (row,))

        memory = f"{parcel.space}_stores" if parcel.space.startswith("bounce") else parcel.space
        return Late("write", memory, self._tier.name, entry.slot, ended)


def _cause(error: StorageError) -> str:
    full = isinstance(error, IOFailedError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "disk_full" if full else "io_error"
