"""Carries stores out: from the planes into CPU slots, then on to the SSD.

The planner (store/plan.py) decides the ways and times. The steps here move the pages of a store round by round, and
publish them in the CPU tier; a page without a slot there goes through the bounce reserve. Pages for the SSD go to the
forwarder (store/forwarder.py). The executor moves the bytes, and has the threads and the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gdscache.arguments import remaining
from gdscache.arrays import Int64Array
from gdscache.errors import EngineClosedError
from gdscache.index.free_slots import SlotShare
from gdscache.index.retention import DEFAULT, Retention
from gdscache.moves import PLANES, Executor, Move, Moving, Priority, Steps, Way, failure
from gdscache.native import take_rows
from gdscache.pages.keys import Page
from gdscache.runtime.threads import Bell
from gdscache.store.forwarder import Forwarder
from gdscache.store.parcel import Parcel, Receipt, StoreJob
from gdscache.store.plan import StorePlanner
from gdscache.tiers.base import Lease
from gdscache.tiers.manager import TierManager

if TYPE_CHECKING:
    from gdscache.cuda.streams import Event, Landed

_NOBODYS = contextlib.nullcontext()
_LOOK_S = 0.05  # a wait for stores checks every so often whether the engine has ended


class Reader(Receipt, Protocol):
    """A receipt that also hears when the blocks of a store may be written again."""

    def reading(self, lands: Callable[[float], Landed | None]) -> None:
        """After the event that `lands(seconds)` waits for; it returns None if the event is not queued in that time."""
        ...

    def read(self, event: Event) -> None:
        """After `event`; None: now. May be called again."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """An accepted store: its plan, blocks and the event before them. `sources` pins blocks of our own. `given`: pages
    that the forwarder has. `unfit`: places of pages that do not fit into packed extents."""

    plan: StoreJob
    receipt: Reader
    blocks: Int64Array
    after: Event
    sources: Lease | None
    given: set[int] = dataclasses.field(default_factory=set)
    unfit: list[int] = dataclasses.field(default_factory=list)


class _Renumbered:
    """The receipt of some pages of a store, by their numbers there. `give_up` finishes those without an outcome."""

    def __init__(self, receipt: Reader, numbers: Sequence[int]) -> None:
        self._receipt = receipt
        self._numbers = numbers
        self._left = set(range(len(numbers)))
        self.reading = receipt.reading
        self.read = receipt.read

    def committed(self, pages: Sequence[int], tier: str) -> None:
        self._receipt.committed([self._numbers[page] for page in pages], tier)

    def finish(self, pages: Sequence[int], cause: str = "") -> None:
        self._receipt.finish([self._numbers[page] for page in pages], cause)
        self._left.difference_update(pages)

    def give_up(self) -> None:
        self.finish(sorted(self._left), "error")


# Pages of a store that have slots, and what brings their bytes; None: they are there.
_Round = tuple[list[Parcel], Moving | None]


class Storer:
    """Accepts stores and has them carried out. `drain` waits for them.

    `spare`: slots of the bounce reserve for stores. `unfit` stores the pages that do not fit into packed extents, from
    the planes again; it is closed with this one.
    """

    def __init__(
        self,
        manager: TierManager,
        planner: StorePlanner,
        executor: Executor,
        spare: SlotShare | None,
        deadline: float,
        unfit: Storer | None = None,
    ) -> None:
        self._manager = manager
        self._planner = planner
        self._unfit = unfit
        self._executor = executor
        self._spare = spare
        self._deadline = deadline
        self._jobs: set[_Job] = set()  # stores whose blocks are still read; the manager's lock guards it
        self._idle = Bell()
        self._dropping = False
        self._closed = False
        planner.now = executor.now
        self._forwarder = Forwarder(manager, planner, executor, spare, deadline, self._idle)
        with contextlib.ExitStack() as undo:
            undo.callback(self._forwarder.close, drain=False)
            self._lane = executor.lane(Priority.STORE, lambda: manager.tell())
            undo.pop_all()

    # -- accepting ---------------------------------------------------------------------------------------------------

    def store(
        self,
        pages: Sequence[Page],
        receipt: Reader,
        blocks: Int64Array,
        epoch: int,
        after: Event,
        sources: Lease | None,
        retention: Retention = DEFAULT,
    ) -> bool:
        """Accept pages for the tiers below; returns at once. The receipt hears the outcomes.

        False if no page is to move: nothing reads the blocks, and `read` is not called. The pages are of one salt.
        `blocks`: int64 (pages, blocks_per_page), read after the event `after`. `epoch`: the namespace's when the bytes
        were known good. `sources` ends when the blocks are read.
        """
        manager = self._manager
        with manager.lock, contextlib.ExitStack() as undo:
            if sources is not None:
                undo.callback(manager.end, sources)
            if self._closed:
                raise EngineClosedError("the engine was closed meanwhile", "open a new one")
            self.offer_earned()
            wanted = self._planner.accept(pages, receipt, retention)
            if not wanted:
                return False
            since = self._executor.now()
            plan = StoreJob(receipt, wanted, [pages[n] for n in wanted], epoch, retention, since)
            undo.callback(self._planner.finish_pages, plan, list(plan.left), "error")
            job = _Job(plan, receipt, take_rows(blocks, wanted), after, sources)
            self._jobs.add(job)
            undo.callback(self._jobs.discard, job)
            self._lane.start(self._gather(job), functools.partial(self._end, job))
            undo.pop_all()
            return True

    def drain(self, seconds: float | None) -> bool:
        """Wait until every accepted store is done. False after `seconds`, or if the engine ends."""
        left, manager = remaining(seconds), self._manager
        while True:
            idle = self._idle.next
            with manager.lock:
                if not (self._planner.queued or self._jobs):
                    break
            most = left()
            if most == 0 or manager.calls.broken_by:
                return False
            self._executor.pause(idle, _LOOK_S if most is None else min(most, _LOOK_S))
        return self._unfit is None or self._unfit.drain(left())

    def flush(self, seconds: float | None, change: AbstractContextManager[object] = _NOBODYS) -> bool:
        """`drain`, and write every page that is only in the CPU tier to the SSD, if the policy writes any.

        `change` surrounds the steps that change the engine.
        """
        left = remaining(seconds)
        while self.drain(left()):
            with change, self._manager.lock:
                if not self._forwarder.demote(self._planner.clean(everything=True)):
                    break
        else:
            return False
        return self._unfit is None or self._unfit.flush(left(), change)

    def offer_earned(self) -> None:
        """Send on pages that uses have made worth it and that are in memory. The manager's lock is held."""
        self._forwarder.demote(self._planner.earned())
        if self._unfit is not None:
            self._unfit.offer_earned()

    def stats(self) -> dict[str, Any]:
        with self._manager.lock:
            return {"store_queue": self.queue(), "store_policy": self._planner.describe()}

    def queue(self) -> dict[str, int]:
        """Accepted bytes that are not stored yet. Without a lock the figures need not agree exactly."""
        planners = [one._planner for one in (self, self._unfit) if one is not None]
        return {
            "bytes": sum(one.queued * one.extent_bytes for one in planners),
            "to_ssd_bytes": sum(len(one.keys) * one.extent_bytes for one in planners),
            "limit_bytes": self._planner.limit_bytes,
        }

    def under_way(self) -> set[bytes]:
        """Keys of the pages that are accepted and not stored yet. The manager's lock is held."""
        keys = {job.plan.pages[i].key for job in self._jobs for i in job.plan.left}.union(self._planner.keys)
        return keys if self._unfit is None else keys | self._unfit.under_way()

    def close(self, *, drain: bool) -> None:
        """Refuse new stores, finish the accepted ones and write dirty pages (without `drain`: drop both), then end the
        threads."""
        with self._manager.lock:
            self._closed = True
            self._dropping = not drain
        self._forwarder.begin_close(drain=drain)
        self._lane.close()
        if drain:
            self.flush(None)
        self._forwarder.close(drain=drain)
        if self._unfit is not None:
            self._unfit.close(drain=drain)

    # -- gathering ---------------------------------------------------------------------------------------------------

    def _gather(self, job: _Job) -> Steps[None]:
        with self._manager.timeline.span("store", pages=len(job.plan.pages)):
            with self._manager.lock:
                rounds = self._planner.begin()
            copying: list[_Round] = []
            error = yield from failure(self._rounds(job, rounds, copying))
            while copying:  # rounds that have begun also land after an error
                landing = yield from failure(self._land(job, copying.pop(0)))
                error = error or landing
            if error is not None:
                raise error
            yield from self._end(job)

    def _rounds(self, job: _Job, rounds: Iterator[int], copying: list[_Round]) -> Steps[None]:
        """Round after round: while one is copied, the next finds its slots. The last rounds are left in `copying`."""
        at, pages = 0, job.plan.pages
        while at < len(pages):
            start = at
            at, parcels = yield from self._place(job.plan, at, next(rounds), wait=not copying)
            if parcels:
                copying.append(self._copy(job, parcels, last=at == len(pages)))
            if len(copying) > 1 or (copying and at == start):  # the next round waits for slots of the last one
                yield from self._land(job, copying.pop(0))

    def _end(self, job: _Job) -> Steps[None]:
        """Release the blocks when the queued copies have read them. Called once more if it raises."""
        if job not in self._jobs:
            return
        if job.unfit and (yield from self._pass_on(job)):
            return
        event = None
        try:
            event = self._executor.reads_queued()
        finally:
            job.receipt.read(event)
        try:
            if event is not None and job.sources is not None:
                yield self._executor.happened(event)
        finally:
            self._forget(job)  # last, since an error above has `_end` called again

    def _pass_on(self, job: _Job) -> Steps[bool]:
        """Have pages that do not fit stored as they are, from the same blocks. False if none of them is to move."""
        places, job.unfit = job.unfit, []
        plan, unfit = job.plan, self._unfit
        if self._dropping:
            with self._manager.lock:
                self._planner.finish_pages(plan, places, "closed")
            return False
        assert unfit is not None, "packed pages without a place for those that do not fit"
        event = self._executor.reads_queued()  # of the pages that fit
        if event is not None:
            yield self._executor.happened(event)
        with self._manager.lock:
            self._planner.pass_on(plan, places)
            sources, job.sources = job.sources, None
            receipt = _Renumbered(job.receipt, plan.numbers_of(places))
            pages, blocks = [plan.pages[i] for i in places], take_rows(job.blocks, places)
            with contextlib.ExitStack() as undo:
                undo.callback(receipt.give_up)
                going = unfit.store(pages, receipt, blocks, plan.epoch, job.after, sources, plan.retention)
                undo.pop_all()
            if going:
                job.after = None  # its mark has one user, the other store
                self._forget(job)
            return going

    def _forget(self, job: _Job) -> None:
        with self._manager.lock:
            self._planner.finish_pages(job.plan, job.plan.left - job.given, "error")  # only an exception leaves any
            if job.sources is not None:
                self._manager.end(job.sources)
            self._jobs.discard(job)
            self._idle.ring()
        self._executor.passed(job.after)

    def _place(self, job: StoreJob, at: int, most: int, *, wait: bool) -> Steps[tuple[int, list[Parcel]]]:
        """Find slots for the next pages. Returns the first page without one, and parcels of the others. `wait`: wait
        for a bounce slot if needed."""
        parcels: list[Parcel] = []
        slots: list[int] = []
        bounced: list[int] = []
        lock, planner, spare = self._manager.lock, self._planner, self._spare
        end = min(at + most, len(job.pages))
        try:
            try:
                with lock:
                    slots += planner.cpu_slots(job.pages[at:end])
                while at < end:
                    with lock:
                        if self._dropping or self._manager.calls.broken_by:
                            planner.finish_pages(job, range(at, end), "closed")
                            at = end
                        else:
                            at = planner.place(job, at, end, slots, bounced, parcels)
                    # Page `at` needs a bounce slot: wait for one, unless other work comes first.
                    if at == end or parcels or spare is None or not wait:
                        break
                    bounced += spare.try_take(end - at)
                    if not bounced and not planner.behind:
                        yield self._executor.room(spare)
                    elif not bounced:
                        with lock:
                            planner.turn_away(job, at)
                        at += 1
            finally:
                self._give_back(slots, bounced)
        except BaseException:
            self._abandon(parcels)
            raise
        return at, parcels

    def _give_back(self, slots: Sequence[int], bounced: Sequence[int]) -> None:
        if bounced and self._spare is not None:
            self._spare.give(bounced)
        if slots:
            with self._manager.lock:
                self._planner.free(slots)

    def _copy(self, job: _Job, parcels: list[Parcel], *, last: bool) -> _Round:
        try:
            moving = None
            ways = [
                Way(PLANES, parcel.space, take_rows(job.blocks, parcel.places), np.array(parcel.slots, dtype=np.int64))
                for parcel in parcels
                if not parcel.copied
            ]
            if ways:
                moving = self._executor.begin(Move(Priority.STORE, tuple(ways), self._deadline), (job.after,))
                if last and moving.lands is not None and self._unfit is None:  # else pages may be read once more
                    job.receipt.reading(functools.partial(moving.lands, 0))
        except BaseException:
            self._abandon(parcels)
            raise
        return parcels, moving

    def _land(self, job: _Job, round_: _Round) -> Steps[None]:
        """When a round's pages are copied and hashed, publish them, and forward the pages for the SSD."""
        (parcels, moving), unfit = round_, set[int]()
        try:
            if moving is not None:
                unfit.update((yield from moving.end()).unfit)
        except BaseException:
            self._abandon(parcels)
            raise
        with self._manager.lock:
            try:
                if unfit:
                    self._leave_out(job, parcels, unfit)
                going = [parcel for parcel in parcels if self._planner.publish(parcel)]
                self._forwarder.send(going)
                job.given.update(*(parcel.places for parcel in going))
            except BaseException:
                self._abandon([parcel for parcel in parcels if not job.plan.left.isdisjoint(parcel.places)])
                raise
            self._forwarder.tell_idle()
            self._forwarder.demote(self._planner.clean())

    def _leave_out(self, job: _Job, parcels: list[Parcel], unfit: set[int]) -> None:
        """Take the pages that do not fit into packed extents out of the parcels. `unfit`: rows of the round's move.
        After an exception, `parcels` has no page that is in `job.unfit`."""
        first = 0
        for at, parcel in enumerate(parcels):
            rows = [] if parcel.copied else [row for row in parcel.rows if first + row in unfit]
            first += 0 if parcel.copied else len(parcel)
            if rows:
                parcels[at] = self._forwarder.without(parcel, rows)
                job.unfit += parcel.places_of(rows)
        parcels[:] = [parcel for parcel in parcels if len(parcel)]

    def _abandon(self, parcels: Sequence[Parcel]) -> None:
        with self._manager.lock:
            self._forwarder.abandon(parcels)
