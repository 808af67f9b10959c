"""Carries stores out: from the planes into CPU slots, then on to the SSD.

The planner (store/plan.py) decides the ways and times. The steps here move the pages of a store round by round, and
publish them in the CPU tier; a page without a slot there goes through the bounce reserve. Pages for a tier of files go
to its writer (store/writer.py). The executor moves the bytes, and has the threads and the clock.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gdscache.arguments import remaining
from gdscache.errors import EngineClosedError
from gdscache.moves import PLANES, Executor, Move, Moving, Priority, Steps, Way, failure
from gdscache.native import take_rows
from gdscache.runtime.threads import failure_of, in_turn, log_failure
from gdscache.store.parcel import Parcel, StoreJob
from gdscache.store.plan import StorePlanner
from gdscache.store.writer import TierWriter

_NOBODYS = contextlib.nullcontext()
_LOOK_S = 0.05  # a wait for stores checks every so often whether the engine has ended


# Pages of a store that have slots, and what brings their bytes; None: they are there.
_Round = tuple[list[Parcel], Moving | None]


class Storer:
    """Accepts stores and has them carried out. `drain` waits for them.

    `unfit` stores the pages that do not fit into packed extents, from the planes again; it is closed with this one.
    `writers`: by tier name; the manager's lock guards them.

    Many methods: the public ones, and the steps of a store.
    """

    def __init__(self, planner: StorePlanner, executor: Executor, deadline: float, unfit: Storer | None = None) -> None:
        self._manager = manager = planner.manager
        self._planner = planner
        self._unfit = unfit
        self._executor = executor
        self._spare = planner.spare
        self._deadline = deadline
        self._jobs: set[StoreJob] = set()  # stores whose blocks are still read; the manager's lock guards it
        self._idle = planner.idle
        self._dropping = False
        self._closed = False
        planner.now = executor.now
        self.writers: dict[str, TierWriter] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_writers, drain=False)
            for outlet in planner.outlets if planner.writes else ():
                self.writers[outlet.tier.name] = TierWriter(manager, planner, outlet, executor, deadline)
            self._lane = executor.lane(Priority.STORE, lambda: manager.tell())
            undo.pop_all()

    # -- accepting ---------------------------------------------------------------------------------------------------

    def store(self, job: StoreJob) -> bool:
        """Accept pages for the tiers below; returns at once. The receipt hears the outcomes.

        False if no page is to move: nothing reads the blocks, and `read` is not called. `job.sources` ends when the
        blocks are read.
        """
        manager, planner = self._manager, self._planner
        with manager.lock, contextlib.ExitStack() as undo:
            if job.sources is not None:
                undo.callback(manager.end, job.sources)
            if self._closed:
                raise EngineClosedError("the engine was closed meanwhile", "open a new one")
            planner.queued += len(job.pages)
            undo.callback(lambda: planner.finish_pages(job, [*job.left], "error"))
            self.offer_earned()
            planner.accept(job)
            if not job.pages:
                return False
            job.since = self._executor.now()
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
        left, planner = remaining(seconds), self._planner
        while self.drain(left()):
            with change, self._manager.lock:
                dirty = planner.dirty_pages
                if not self._demote(planner.clean(everything=True)) and planner.dirty_pages == dirty:
                    break  # refused pages become clean, and a round of them alone is not the last
        else:
            return False
        return self._unfit is None or self._unfit.flush(left(), change)

    def offer_earned(self) -> None:
        """Send on pages that uses have made worth it and that are in memory. The manager's lock is held."""
        self._demote(self._planner.earned())
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
            "limit_bytes": sum(one.limit_bytes for one in planners),
        }

    def under_way(self) -> set[bytes]:
        """Keys of the pages that are accepted and not stored yet. The manager's lock is held."""
        keys = {job.pages[i].key for job in self._jobs for i in job.left}.union(self._planner.keys)
        return keys if self._unfit is None else keys | self._unfit.under_way()

    def close(self, *, drain: bool) -> None:
        """Refuse new stores, finish the accepted ones and write dirty pages (without `drain`: drop both), then end the
        threads."""
        with self._manager.lock:
            self._closed = True
            self._dropping = not drain
        for writer in self.writers.values():
            writer.begin_close(drain=drain)
        self._lane.close()
        if drain:
            self.flush(None)
        self._close_writers(drain=drain)
        if self._unfit is not None:
            self._unfit.close(drain=drain)

    def _close_writers(self, *, drain: bool) -> None:
        with self._manager.lock:  # a load may offer pages meanwhile, which are turned away from now on
            writers, self.writers = self.writers, {}
        in_turn(*(functools.partial(writer.close, drain=drain) for writer in writers.values()))

    # -- to the tiers of files: the manager's lock is held -----------------------------------------------------------

    def _demote(self, parcels: Sequence[Parcel]) -> bool:
        """Send pages of the landing tier on without a store; False if there are none."""
        try:
            self._send(parcels)
        except BaseException:
            self._abandon(parcels)
            raise
        return bool(parcels)

    def _send(self, parcels: Sequence[Parcel]) -> None:
        """Hand pages in slots to the writers. Raises only if no writer has taken any."""
        taken, planner = False, self._planner
        for outlet in planner.outlets if parcels else ():
            some = [parcel for parcel in parcels if outlet in parcel.to]
            writer, error = self.writers.get(outlet.tier.name), None
            if writer is not None and (error := failure_of(functools.partial(writer.put, some))) is None:
                taken = taken or bool(some)
                continue
            if error is not None and not taken:
                raise error
            log_failure(error)
            for parcel in some:
                planner.written(parcel, outlet, parcel.rows, "closed" if error is None else "error")
                outlet.admission.not_written(len(parcel))
                planner.released(parcel, outlet, parcel.rows)

    # -- gathering ---------------------------------------------------------------------------------------------------

    def _gather(self, job: StoreJob) -> Steps[None]:
        with self._manager.timeline.span("store", pages=len(job.pages)):
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

    def _rounds(self, job: StoreJob, rounds: Iterator[int], copying: list[_Round]) -> Steps[None]:
        """Round after round: while one is copied, the next finds its slots. The last rounds are left in `copying`."""
        at, pages = 0, job.pages
        while at < len(pages):
            start = at
            at, parcels = yield from self._place(job, at, next(rounds), wait=not copying)
            if parcels:
                copying.append(self._copy(job, parcels, last=at == len(pages)))
            if len(copying) > 1 or (copying and at == start):  # the next round waits for slots of the last one
                yield from self._land(job, copying.pop(0))

    def _end(self, job: StoreJob) -> Steps[None]:
        """Release the blocks when the queued copies have read them. Called once more if it raises."""
        if job not in self._jobs:
            return
        if job.unfit and (yield from self._pass_on(job)):
            return
        event, receipt = None, job.receipt
        assert receipt is not None, "a store without a caller"
        try:
            event = self._executor.reads_queued()
        finally:
            receipt.read(event)
        try:
            if event is not None and job.sources is not None:
                yield self._executor.happened(event)
        finally:
            self._forget(job)  # last, since an error above has `_end` called again

    def _pass_on(self, job: StoreJob) -> Steps[bool]:
        """Have pages that do not fit stored as they are, from the same blocks. False if none of them is to move."""
        places, job.unfit = job.unfit, []
        unfit = self._unfit
        if self._dropping:
            with self._manager.lock:
                self._planner.finish_pages(job, places, "closed")
            return False
        assert unfit is not None, "packed pages without a place for those that do not fit"
        event = self._executor.reads_queued()  # of the pages that fit
        if event is not None:
            yield self._executor.happened(event)
        pages, blocks, numbers = [job.pages[i] for i in places], take_rows(job.blocks, places), job.numbers_of(places)
        rest = StoreJob(job.receipt, pages, job.epoch, job.retention, blocks, job.after, job.sources, numbers)
        with self._manager.lock:
            self._planner.pass_on(job, places)
            job.sources = None
            going = unfit.store(rest)
            if going:
                job.after = None  # its mark has one user, the other store
                self._forget(job)
            return going

    def _forget(self, job: StoreJob) -> None:
        with self._manager.lock:
            self._planner.finish_pages(job, job.left - job.given, "error")  # only an exception leaves any
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

    def _copy(self, job: StoreJob, parcels: list[Parcel], *, last: bool) -> _Round:
        try:
            moving = None
            ways = [
                Way(PLANES, parcel.space, take_rows(job.blocks, parcel.places), np.array(parcel.slots, dtype=np.int64))
                for parcel in parcels
                if not parcel.copied
            ]
            if ways:
                moving = self._executor.begin(Move(Priority.STORE, tuple(ways), self._deadline), (job.after,))
                receipt = job.receipt if last and self._unfit is None else None  # else pages may be read once more
                if receipt is not None and moving.lands is not None:
                    receipt.reading(functools.partial(moving.lands, 0))
        except BaseException:
            self._abandon(parcels)
            raise
        return parcels, moving

    def _land(self, job: StoreJob, round_: _Round) -> Steps[None]:
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
                self._send(going)
                job.given.update(*(parcel.places for parcel in going))
            except BaseException:
                self._abandon([parcel for parcel in parcels if not job.left.isdisjoint(parcel.places)])
                raise
            self._demote(self._planner.clean())

    def _leave_out(self, job: StoreJob, parcels: list[Parcel], unfit: set[int]) -> None:
        """Take the pages that do not fit into packed extents out of the parcels. `unfit`: rows of the round's move.
        After an exception, `parcels` has no page that is in `job.unfit`."""
        first = 0
        for at, parcel in enumerate(parcels):
            rows = [] if parcel.copied else [row for row in parcel.rows if first + row in unfit]
            first += 0 if parcel.copied else len(parcel)
            if rows:
                parcels[at] = self._planner.without(parcel, rows)
                job.unfit += parcel.places_of(rows)
        parcels[:] = [parcel for parcel in parcels if len(parcel)]

    def _abandon(self, parcels: Sequence[Parcel]) -> None:
        with self._manager.lock:
            for parcel in parcels:
                self._planner.abandon(parcel)
