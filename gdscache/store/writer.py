"""The way to a tier of files: pages that are ready in a memory, written in batches.

A batch is reserved, written and committed, in the order of the batches; the bytes of the next ones are under way while
one is committed. Of two threads one waits for batches and commits them, the other begins what becomes ready. What is
not written within its deadline is dropped, and what its I/O may still touch goes to the quarantine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gdscache.errors import LockLostError, StorageError
from gdscache.keys import Page
from gdscache.moves import Executor, Move, Moving, Priority, Steps, Way
from gdscache.moves.base import failure
from gdscache.store.plan import BATCH_BYTES
from gdscache.threads import log_failure
from gdscache.tiers.base import DurableTier, Written
from gdscache.tiers.manager import TierManager
from gdscache.tiers.pages import Entry
from gdscache.tiers.quarantine import Late
from gdscache.tiers.retention import DEFAULT, Retention

_log = logging.getLogger("gdscache.store")
_FLIGHTS = 4  # batches under way, the one that is committed with them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A page to write, which lies in a slot of the memory `space`, within `seconds` of the begin of its batch.

    Both callbacks are called once, under the manager's lock: `finish` with "" when the page is committed, else why it
    is not; `release` when nothing reads the slot any more, which is later where the write hangs.
    """

    page: Page
    epoch: int
    space: str
    slot: int
    finish: Callable[[str], None]
    release: Callable[[], None] = lambda: None
    seconds: float = 30.0
    retention: Retention = DEFAULT


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A batch whose bytes are on their way."""

    writes: Sequence[tuple[Outgoing, Written]]
    moving: Moving


class TierWriter:
    """Writes pages to a durable tier in the background.

    Each page that it is given has its end, once, whatever happens here.
    """

    def __init__(self, manager: TierManager, tier: DurableTier, executor: Executor, extent_bytes: int) -> None:
        self._open: set[Outgoing] = set()  # pages that have no end yet; the manager's lock guards it
        self._manager = manager
        self._tier = tier
        self._executor = executor
        self._most = max(1, BATCH_BYTES // extent_bytes)
        self._ready: deque[Outgoing] = deque()
        self._flying: deque[_Flight] = deque()
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
                self._open.update(pages)
                self._ready.extend(pages)

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
        with contextlib.ExitStack() as ends:
            if batch:
                ends.callback(self._started)
                with contextlib.ExitStack() as on_failure:
                    on_failure.callback(self._drop_unbegun, batch)
                    self._start(batch)
                    on_failure.pop_all()
            elif flight is not None:
                ends.callback(self._forget, flight)
                ends.callback(self._lose, flight)  # nothing, unless what follows is broken off
                yield from self._complete(flight)
        return bool(batch) or flight is not None

    def _next(self) -> tuple[Sequence[Outgoing], _Flight | None]:
        """A batch to begin, or the flight to complete, where the other thread does not, which looks further then."""
        with self._manager.lock:
            if self._ready and not self._starting and len(self._flying) < _FLIGHTS:
                self._starting = True
                return [self._ready.popleft() for _ in range(min(self._most, len(self._ready)))], None
            if self._completing or not self._flying:
                return (), None
            self._completing = True
            return (), self._flying[0]

    def _started(self) -> None:
        with self._manager.lock:
            self._starting = False

    def _start(self, batch: Sequence[Outgoing]) -> None:
        entries: dict[bytes, Entry] = {}
        with self._failing(batch, entries) as on_failure:
            self._manager.watch()
            quarantine = self._manager.quarantine
            off, cause = quarantine.off, quarantine.cause
            try:
                pages = () if self._dropping or off else [out.page for out in batch]
                entries.update((entry.key, entry) for entry in self._tier.reserve(pages, self._retentions(batch)))
            except StorageError as error:
                _log.warning("the %s tier takes no pages: %s", self._tier.name, error)
            writes = self._admit(
                batch, entries, "closed" if self._dropping else cause if off else f"{self._tier.name}_full"
            )
            if writes:
                moving = self._executor.begin(self._move(writes))
                with self._manager.lock:
                    self._flying.append(_Flight(writes, moving))
                on_failure.pop_all()  # they are the flight's now

    def _move(self, writes: Sequence[tuple[Outgoing, Written]]) -> Move:
        """Pages out of the memories that they lie in, into their slots of the tier."""
        ways = []
        for space, some in itertools.groupby(writes, lambda write: write[0].space):
            places = np.array([(out.slot, written.entry.slot) for out, written in some], dtype=np.int64)
            ways.append(Way(space, self._tier.name, places[:, 0].copy(), places[:, 1].copy()))
        return Move(Priority.DEMOTION, tuple(ways), min(out.seconds for out, _ in writes))

    def _retentions(self, batch: Sequence[Outgoing]) -> dict[bytes, Retention]:
        """How long the pages are wanted by now, where that is not the default."""
        with self._manager.lock:
            joined = {out.page.key: self._manager.expiry.joined(out.page, out.retention) for out in batch}
        return {key: retention for key, retention in joined.items() if retention != DEFAULT}

    def _admit(
        self, batch: Sequence[Outgoing], entries: dict[bytes, Entry], cause: str
    ) -> list[tuple[Outgoing, Written]]:
        """What is still wanted and has a slot; what has none is dropped for `cause`."""
        going = []
        with self._manager.lock:
            for out in batch:
                entry = entries.get(out.page.key)
                if entry is None:
                    self._finish(out, cause)
                elif self._manager.clearing.epoch(out.page.namespace) != out.epoch:
                    self._give_up(entries.pop(out.page.key))
                    self._finish(out, "cleared")
                else:
                    going.append((out, entry))
        writes: list[tuple[Outgoing, Written]] = []
        for space, group in itertools.groupby(going, lambda one: one[0].space):
            some = list(group)
            sums = self._executor.checksums(space, [out.slot for out, _ in some])
            writes += [(out, Written(entry, sums[i])) for i, (out, entry) in enumerate(some)]
        return writes

    def _ended(self, flight: _Flight) -> Steps[tuple[list[tuple[Outgoing, Written]], list[StorageError | None]]]:
        """The writes that have ended by the deadline, with their errors. The others are dropped, and not waited for."""
        writes, end = flight.writes, (yield from flight.moving.end())
        late = set(end.late)
        if late:
            _log.warning("%d of %d pages are not written in time", len(late), len(writes))
            self._dropping = self._dropping or self._closing
            with self._manager.lock:
                for i in end.late:
                    self._tier.index.drop(writes[i][1].entry)
                self._manager.quarantine.hold(flight.moving, {i: self._late(*writes[i]) for i in end.late})
                for i in end.late:
                    self._end(writes[i][0], "deadline")
        ended = [i for i in range(len(writes)) if i not in late]
        return [writes[i] for i in ended], [end.errors.get(i) for i in ended]

    def _complete(self, flight: _Flight) -> Steps[None]:
        writes, errors = yield from self._ended(flight)
        if not writes:
            return
        entries = {write.entry.key: write.entry for _, write in writes}
        with self._failing([out for out, _ in writes], entries):
            failed = {w.entry.key for (_, w), error in zip(writes, errors, strict=True) if error is not None}
            causes = dict.fromkeys(entries, "io_error")
            written = [write for _, write in writes if write.entry.key not in failed]
            for error in [e for e in errors if e is not None][:1]:
                _log.warning("%d pages were not written: %s", len(failed), error)
            try:
                with self._manager.timeline.span("commit", pages=len(written)):
                    committed = self._tier.commit(written)
                for write, visible in zip(written, committed, strict=True):
                    causes[write.entry.key] = "" if visible else "cleared"
            except StorageError as error:
                _log.warning("the %s tier commits no pages: %s", self._tier.name, error)
                if isinstance(error, LockLostError):
                    self._manager.watch()
                    causes = dict.fromkeys(entries, "lock_lost")
            with self._manager.lock:
                for out, write in writes:
                    entry = entries.pop(write.entry.key)
                    if causes[entry.key]:
                        self._tier.index.drop(entry)
                    self._tier.index.release(entry)
                    self._finish(out, causes[entry.key])

    @contextlib.contextmanager
    def _failing(self, batch: Sequence[Outgoing], entries: dict[bytes, Entry]) -> Iterator[contextlib.ExitStack]:
        """An exception costs the batch at hand, and nothing else waits for ever."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abandon, batch, entries)
            yield on_failure
            on_failure.pop_all()

    def _abandon(self, batch: Sequence[Outgoing], entries: dict[bytes, Entry]) -> None:
        with self._manager.lock:
            for entry in entries.values():
                self._give_up(entry)
            for out in batch:
                self._finish(out, "error")

    def _drop_unbegun(self, batch: Sequence[Outgoing]) -> None:
        """An exception ended the begin of a batch: what of it is in no flight goes."""
        with self._manager.lock:
            flying = {out for flight in self._flying for out, _ in flight.writes}
            self._abandon([out for out in batch if out not in flying], {})

    def _lose(self, flight: _Flight) -> None:
        """An exception ended a flight, whose I/O may still be under way: its pages end now, what it touches later."""
        with self._manager.lock:
            left = [i for i, (out, _) in enumerate(flight.writes) if out in self._open]
            for i in left:
                self._tier.index.drop(flight.writes[i][1].entry)
            self._manager.quarantine.hold(flight.moving, {i: self._late(*flight.writes[i]) for i in left})
            for i in left:
                self._end(flight.writes[i][0], "error")

    def _forget(self, flight: _Flight) -> None:
        """Its pages have their ends. Again is fine: steps that were broken off may be closed late."""
        with self._manager.lock:
            if self._flying and self._flying[0] is flight:
                self._flying.popleft()
                self._completing = False

    def _give_up(self, entry: Entry) -> None:
        self._tier.index.drop(entry)
        self._tier.index.release(entry)

    def _finish(self, out: Outgoing, cause: str) -> None:
        """The last word on a page, whose slot is free again; nothing where it has been said."""
        if self._end(out, cause):
            out.release()

    def _end(self, out: Outgoing, cause: str) -> bool:
        """Say it, once."""
        if out not in self._open:
            return False
        out.finish(cause)
        self._open.discard(out)
        return True

    def _late(self, out: Outgoing, write: Written) -> Late:
        """A write whose slots may be used again only when it has ended."""

        def ended() -> None:
            self._tier.index.release(write.entry)
            out.release()

        pool = "bounce_stores" if out.space == "bounce" else out.space
        return Late("write", pool, self._tier.name, write.entry.slot, ended)
