"""Plans loads and prefetches, and decides how their pages end. Moves no bytes and has no threads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.index.table import PENDING, Entry
from gdscache.load.plan import CODES, Behind, LoadPlan, TierRun, told_of
from gdscache.moves import PageStatus
from gdscache.pages.keys import Page
from gdscache.tiers.base import Lease, Tier

if TYPE_CHECKING:
    from gdscache.index.index import PageIndex
    from gdscache.prefetch.queue import PrefetchedPages
    from gdscache.tiers.manager import TierManager

_BAD = (PageStatus.CHECKSUM, PageStatus.GONE)  # the page itself is bad, and its tier forgets it
_FAILED = (PageStatus.IO_ERROR, PageStatus.SHORT_READ)  # the way to the page failed: `FailedReads` judges
_log = logging.getLogger("gdscache.load")
# The log's words for a page that did not come.
_SAID = {
    PageStatus.CHECKSUM: "its bytes differ from the stored ones, so it is dropped",
    PageStatus.GONE: "it is not where its tier keeps it, so it is forgotten",
    PageStatus.IO_ERROR: "it cannot be read; it stays",
    PageStatus.SHORT_READ: "its file ends before it; it stays",
    PageStatus.DEADLINE: "its read has not ended within the deadline; it stays",
}


class LoadPlanner:
    """Plans loads and prefetches over the chain of tiers, and decides how their pages end.

    The *landing* tier is the first one in memory. Plain pages, which do not fit into packed extents, have a landing
    tier of their own. Pages of slower tiers get slots there as they are read, or pass through a bounce reserve, memory
    that a read has until its bytes are copied on. Each of `due` is called once for each request of a load, before its
    first pages are leased: it sends pages on to the SSD. `prefetched` is told which pages loads read. Any thread may
    call: each public method takes the manager's lock, which guards everything here.

    Many methods: they are the steps of one plan, and share its lock and its leases.
    """

    def __init__(
        self,
        manager: TierManager,
        filled: threading.Condition | None = None,
        *,
        due: Sequence[Callable[[], object]] = (),
        prefetched: PrefetchedPages | None = None,
        at_once: bool = False,
    ) -> None:
        """`at_once`: all pages of a load begin together, as with ranks: a page of two requests is read twice."""
        self.manager = manager
        self.under_way: Counter[str] = Counter()  # pages by tier, of plans that have not ended; the gate reads it
        # Notified when pages get their verdict: loads wait for pages that another plan reads.
        self.filled = threading.Condition(manager.lock) if filled is None else filled
        self.landing = manager.landing
        self._due = due
        self._prefetched = prefetched
        self._at_once = at_once
        self._chain = [tier for tier in manager.tiers.values() if tier.kind != "planes" and tier.served]  # loads read
        self._filling: dict[Entry, LoadPlan] = {}  # page of a landing tier -> the plan that reads it into there

    # -- loads ---------------------------------------------------------------------------------------------------------

    def plan(
        self,
        requests: Sequence[Sequence[Page]],
        owner: str,
        *,
        keep: bool = True,
        checked: bool = False,
        most: int | None = None,
    ) -> LoadPlan:
        """Lease the consecutive pages of each request that the tiers hold, and reserve slots of the landing tier for
        pages of slower tiers, without releasing the lock in between.

        `keep`: pages of slower tiers stay in the landing tier; without it, or where no slot can be freed, they pass
        through the bounce reserve. Never waits. `checked`: the caller has had the pages verified in the landing tier,
        so only those are planned that are complete there, up to the first that is not. `most`: plan this many pages
        now; `go_on` plans the next.
        """
        with self.manager.lock:
            plan = LoadPlan(requests, owner, keep=keep, checked=checked)
            try:
                self.go_on(plan, most)
            except BaseException:
                self.abandon(plan)
                raise
            return plan

    def go_on(self, plan: LoadPlan, most: int | None = None) -> None:
        """Plan `most` more pages, or all that are left. A request ends at the first page that no tier has. An error
        makes the plan `whole`: it keeps the pages planned so far, which its caller ends."""
        first, runs = len(plan.pages), len(plan.runs)
        with self.manager.lock:
            try:
                while not plan.whole and (most is None or len(plan.pages) - first < most):
                    pages, begun = plan.asked[plan.request], len(plan.pages)
                    stop = len(pages) if most is None else min(len(pages), plan.at + most - (begun - first))
                    if not plan.at:
                        plan.leases.append(self.manager.lease(plan.owner))  # one a request: requests may share pages
                        plan.requests.append(range(begun, begun))
                    with self.manager.timeline.span("plan", pages=stop - plan.at):
                        self._plan_until(plan, pages, stop)
                    found = len(plan.pages) - begun
                    if plan.at + found < stop or stop == len(pages):
                        plan.request, plan.at = plan.request + 1, 0
                    else:
                        plan.at = stop
                self._begin_runs(plan, runs)
            except BaseException:
                self._grow_statuses(plan)
                plan.requests += [range(len(plan), len(plan))] * (len(plan.asked) - len(plan.requests))
                plan.request, plan.at = len(plan.asked), 0
                raise

    def _plan_until(self, plan: LoadPlan, pages: Sequence[Page], stop: int) -> None:
        first = len(plan.pages)
        self.manager.expire(pages if stop - plan.at == len(pages) else pages[plan.at : stop])
        if not plan.at:
            for due in self._due:
                due()
        absent = self._lease(plan, pages, stop)
        plan.requests[-1] = range(plan.requests[-1].start, len(plan.pages))
        plan.targets += [None] * (len(plan.pages) - first)
        if self._prefetched:
            for run in plan.runs:
                for row in run.rows[max(0, first - run.rows.start) :]:
                    self._prefetched.use(plan.pages[row].key, plan.slots[row] if run.tier.kind == "memory" else None)
        if plan.keep and self.landing is not None:
            for landing, rows in self._by_landing(plan, absent) if absent else ():
                if landing.index.free_slots < len(rows) and not plan.own:
                    later = (pages[stop:], *plan.asked[plan.request + 1 :])
                    plan.own = {page.key for some in later for page in some}
                self._reserve(landing.index, plan, rows, plan.own)

    def _lease(self, plan: LoadPlan, pages: Sequence[Page], stop: int) -> list[int]:
        """Lease pages up to `stop`, or to the first that no tier has. Returns the rows of slower tiers' pages of which
        their landing tier has no copy, not even an incomplete one."""
        absent: list[int] = []
        first = at = plan.at
        while at < stop:
            row = len(plan.pages) + at - first
            if plan.checked:
                runs = (self._take_run_of(plan, landing, pages, at, stop, row) for landing in self.manager.landings)
                taken = next(filter(None, runs), 0)
            else:
                taken = self._take_run(plan, pages, at, stop, row, absent)
            if not taken:
                break
            at += taken
        plan.pages += pages[first:at]
        return absent

    def _take_run(self, plan: LoadPlan, pages: Sequence[Page], at: int, stop: int, row: int, absent: list[int]) -> int:
        """Lease `pages[at]` from its fastest tier, and the pages behind it, before `stop`, with the same fastest tier;
        or, by itself, a page that a plan is reading. `row`: of `pages[at]`. Returns the number of pages leased."""
        lacking = dict[bool, bool]()  # by `Tier.plain`: whether that landing tier has no copy at all
        for tier in self._chain:
            taken = self._take_run_of(plan, tier, pages, at, stop, row)
            if taken:
                if lacking.get(tier.plain):
                    absent.extend(range(row, row + taken))
                return taken
            if tier in self.manager.landings:
                copy = tier.index.find(pages[at].key)  # a copy found here is incomplete
                filler = None if copy is None or copy.state is not PENDING else self._filling.get(copy)
                if copy is not None and filler is not None and not (self._at_once and filler is plan):
                    plan.leases[-1].add(tier.index, copy)
                    plan.slots.append(copy.slot)
                    plan.sources.append(copy)
                    plan.runs.append(TierRun(tier, range(row, row + 1), (filler, filler.row_of(copy))))
                    return 1
                # a store's incomplete copy is not waited for, nor one of this plan `at_once`: a slower tier may do
                lacking[tier.plain] = copy is None
            if tier is not self._chain[-1]:
                stop = min(stop, max(at + 1, tier.index.absent_until(pages, at, stop)))
        return 0

    def _take_run_of(self, plan: LoadPlan, tier: Tier, pages: Sequence[Page], at: int, stop: int, row: int) -> int:
        """Lease the pages of `pages[at:stop]` that `tier` has, up to the first that it lacks. Returns their number."""
        if tier.kind == "memory":  # the quarantine hides no page in memory
            slots = tier.index.hold_run(pages, at, stop)
            plan.leases[-1].hold(tier.index, pages[at : at + len(slots)], slots)
            plan.sources += [None] * len(slots)
        else:
            entries = self._pin_run(tier, pages, at, stop, plan.leases[-1])
            slots = [entry.slot for entry in entries]
            plan.sources += entries
        if slots:
            plan.slots += slots
            plan.runs.append(TierRun(tier, range(row, row + len(slots))))
        return len(slots)

    def _pin_run(self, tier: Tier, pages: Sequence[Page], start: int, stop: int, lease: Lease) -> list[Entry]:
        """Lease pages up to the first that the tier lacks or the quarantine hides."""
        index, quarantine = tier.index, self.manager.quarantine
        entries = index.pin_run(pages, start, stop)
        if quarantine.hiding:
            hidden = self.manager.hidden
            seen = next((i for i, entry in enumerate(entries) if hidden(tier.name, entry.slot)), len(entries))
            index.release_all(entries[seen:])
            del entries[seen:]
        lease.take(index, entries)
        return entries

    def _reserve(self, index: PageIndex, plan: LoadPlan, rows: Sequence[int], spared: Collection[bytes] = ()) -> None:
        """Give each row's page a slot of the landing tier, in order, until no slot is left. `spared`: keys of pages
        that are not evicted for them."""
        if not rows:
            return
        slots = index.allocate_some(len(rows), spared)
        pages, places = plan.pages, plan.targets
        retentions = [entry.retention for entry in plan.entries(rows)]
        targets = index.insert_all([pages[row] for row in rows], slots, PENDING, retentions, leases=1)
        for row, target in zip(rows, targets, strict=False):
            places[row] = target
        self._filling.update(dict.fromkeys(targets, plan))
        plan.leases[-1].take(index, targets)

    def _by_landing(self, plan: LoadPlan, rows: Sequence[int]) -> Sequence[tuple[Tier, Sequence[int]]]:
        """Rows of pages on files, by the tiers in memory that they are read to."""
        landings = self.manager.landings
        if len(landings) == 1:
            return ((landings[0], rows),)
        plain = [plan.tier_of(row).plain for row in rows]
        return [(tier, [row for row, one in zip(rows, plain, strict=True) if one == tier.plain]) for tier in landings]

    def _begin_runs(self, plan: LoadPlan, first: int = 0) -> None:
        """Count the pages of runs from number `first` on as under way."""
        self._grow_statuses(plan)
        for run in plan.runs[first:]:
            plan.under_way[run.tier.name] += len(run.rows)
            self.under_way[run.tier.name] += len(run.rows)

    def waits(self, plan: LoadPlan) -> None:
        """Take the plan's pages in memory out of `under_way`: they wait for their blocks, and no load for them."""
        with self.manager.lock:
            for name in [name for name in plan.under_way if self.manager.tiers[name].kind != "files"]:
                self.under_way[name] -= plan.under_way.pop(name)

    def _grow_statuses(self, plan: LoadPlan) -> None:
        """Fill `plan.statuses` up to the plan's length with 0, the code of `PageStatus.PENDING`. By a bytearray: numpy
        releases the interpreter's lock to grow large arrays."""
        plan.statuses = np.frombuffer(bytearray(plan.statuses.tobytes().ljust(len(plan.pages), b"\0")), np.uint8)

    # -- prefetches ----------------------------------------------------------------------------------------------------

    def plan_prefetch(
        self, pages: Sequence[Page], start: int, most: int, spared: Collection[bytes]
    ) -> tuple[LoadPlan, list[bool], Behind]:
        """Lease up to `most` pages from `pages[start]` on that only tiers behind the landing tiers have, and reserve
        slots of these for them, without evicting any of `spared`. Never waits; no page of the plan waits for
        another plan. Returns the plan, and whether each next page is in it: others are in a fast tier already."""
        manager = self.manager
        assert manager.landings, "no tier to bring pages to"
        with manager.lock, contextlib.ExitStack() as undo:
            manager.expire(pages[start : start + most])
            plan = LoadPlan()
            plan.leases.append(manager.lease("prefetch"))
            undo.callback(self.abandon, plan)
            undo.callback(self._grow_statuses, plan)  # runs before `abandon`
            found, then = self._prefetchable(plan, pages, start, most)
            plan.targets += [None] * len(plan)
            placed = 0
            for run in plan.runs:
                self._reserve(manager.landing_of(run.tier).index, plan, run.rows, spared)
                placed += len(run.rows) - plan.targets[run.rows.start : run.rows.stop].count(None)
                if placed < run.rows.stop:
                    break
            if placed < len(plan):
                then = "no_room"
                del found[[i for i, moves in enumerate(found) if moves][placed] :]
                self._cut(plan, placed)
            plan.requests.append(range(len(plan)))
            self._begin_runs(plan)
            if not plan.pages:
                self.end(plan)
            undo.pop_all()
            return plan, found, then

    def _prefetchable(self, plan: LoadPlan, pages: Sequence[Page], start: int, most: int) -> tuple[list[bool], Behind]:
        """Whether each page from `start` on moves (else a fast tier has it), and the reason to end behind them: `more`
        after `most` moving pages, and after the last page."""
        tiers = list(self.manager.tiers.values())
        fast = [tier for tier in tiers if tier.kind != "files"]
        slow = [tier for tier in tiers if tier not in fast]
        found: list[bool] = []
        for i in range(start, len(pages)):
            key = pages[i].key
            if any(tier.index.has(key) for tier in fast):
                found.append(False)
                continue
            if any(key in landing.index for landing in self.manager.landings):
                return found, "busy"
            if not most:
                break
            row = len(plan)
            tier = next((one for one in slow if self._take_run_of(plan, one, pages, i, i + 1, row)), None)
            if tier is None:
                return found, "missing"
            plan.pages.append(pages[i])
            if row and plan.runs[-2].tier is tier:
                plan.runs[-2:] = [TierRun(tier, range(plan.runs[-2].rows.start, row + 1))]
            found.append(True)
            most -= 1
        return found, "more"

    def _cut(self, plan: LoadPlan, pages: int) -> None:
        plan.leases[-1].release(plan.entries(range(pages, len(plan))))
        del plan.pages[pages:], plan.slots[pages:], plan.sources[pages:], plan.targets[pages:]
        plan.runs = [TierRun(r.tier, r.rows[: pages - r.rows.start]) for r in plan.runs if r.rows.start < pages]

    # -- the end of pages ----------------------------------------------------------------------------------------------

    def finish(self, plan: LoadPlan, rows: Int64Array, status: PageStatus) -> None:
        """A verdict on pages. A good page is published in the landing tier, and no other is kept there. A bad page is
        dropped from the tier that it was read from; one that could not be read stays there, unless `FailedReads` gives
        it up. A cancelled page is a miss of its load. If it has a slot of the landing tier, it was read and is good."""
        if not len(rows):
            return
        manager, some = self.manager, rows.tolist()
        good = status in (PageStatus.LOADED, PageStatus.CANCELLED)
        with manager.lock:
            plan.statuses[rows] = CODES[status]
            if plan.targets.count(None) < len(plan.targets):
                self._end_filling(plan, [row for row in some if plan.targets[row] is not None], good=good)
            if status in _SAID:
                self._say(plan, some, status)
            if status in _BAD:
                for row in some:
                    index = plan.tier_of(row).index
                    entry = plan.sources[row] or index.find(plan.pages[row].key)
                    # else the page has another slot by now, or is gone
                    if entry is not None and entry.slot == plan.slots[row]:
                        index.drop(entry)
            if status in _FAILED:
                for tier, of_tier in self._of_files(plan, some):
                    manager.quarantine.failed_reads.failed(tier, plan.entries(of_tier))
            elif manager.quarantine.failed_reads.watching and (good or status is PageStatus.CHECKSUM):
                # a cancelled page without a slot of the landing tier was not read
                all_read = status is not PageStatus.CANCELLED
                read = [row for row in some if all_read or plan.targets[row] is not None]
                for tier, of_tier in self._of_files(plan, read):
                    manager.quarantine.failed_reads.read(tier, [plan.pages[row].key for row in of_tier])
            if status is not PageStatus.LOADED:
                manager.counts["misses", status.value] += len(rows)
            else:
                whole = len(some) == len(plan.pages)
                which = bytearray(b"\1" * len(some) if whole else len(plan.pages))
                for row in some if not whole else ():
                    which[row] = 1
                for name, pages in plan.by_tier(which).items():
                    manager.counts["loaded", name] += pages
            self.filled.notify_all()

    def _end_filling(self, plan: LoadPlan, rows: Sequence[int], *, good: bool) -> None:
        """Publish pages in their landing tiers, or drop them there. A dropped target keeps its slot while a lease is on
        it: its plan's, or the quarantine's for a late read."""
        for landing, some in self._by_landing(plan, rows):
            targets = [target for row in some if (target := plan.targets[row]) is not None]
            ended = [target for target in targets if self._filling.pop(target, None) is not None]
            if good:
                landing.index.commit_all(ended)
            else:
                for target in ended:
                    landing.index.drop(target)

    def _say(self, plan: LoadPlan, rows: Sequence[int], status: PageStatus) -> None:
        """Log pages that did not come, and note the bad ones for `explain`. A page that another plan was to bring is
        that plan's to report."""
        manager, asked = self.manager, set(rows)
        for run in plan.runs:
            mine = [row for row in run.rows if row in asked] if run.filling is None else []
            if not mine:
                continue
            first, slot, now = plan.pages[mine[0]], plan.slots[mine[0]], manager.expiry.clock()
            for row in mine if status in _BAD else ():
                at, told = plan.slots[row], told_of(status, run.tier.name)
                manager.fates.found_bad(plan.pages[row].key, told, at, run.tier.place(at), now)
            manager.log.say(
                *(_log, logging.WARNING, f"{status.value}, {run.tier.name}"),
                "page %s in slot %d of the %s tier (%s) did not come (%s): %s",
                *(first.key.hex(), slot, run.tier.name, run.tier.place(slot), status.value, _SAID[status]),
                times=len(mine),
            )

    def _of_files(self, plan: LoadPlan, rows: Sequence[int]) -> Iterator[tuple[Tier, list[int]]]:
        for tier in self.manager.files:
            of_tier = [row for row in rows if plan.tier_of(row) is tier]
            if of_tier:
                yield tier, of_tier

    def abandon(self, plan: LoadPlan) -> None:
        """Abort the pages without a verdict, if any, and `end` the plan; may be called after `end`."""
        with self.manager.lock:
            self.finish(plan, plan.pending(), PageStatus.ABORTED)
            self.end(plan)

    def end(self, plan: LoadPlan) -> None:
        """Release every page; each has its verdict. May be called twice."""
        with self.manager.lock:
            for lease in plan.leases:
                self.manager.end(lease)
            for name, pages in plan.under_way.items():
                self.under_way[name] -= pages
            plan.under_way.clear()
