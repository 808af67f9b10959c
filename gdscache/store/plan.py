"""Plans stores: which pages go to which tier, and when. Decisions only; no bytes, no threads, no torch.

The planner accepts a page (or drops and counts it), finds its slot in the landing tier (the first in memory: the CPU
tier), and chooses the tiers of files that get it now, by the write policy and each tier's admission
(store/outlets.py). The ways into memory and into the files are bounded apart, so that a slow SSD keeps no page out of
the CPU tier. docs/design/store.md has the policies and the bounds. The storer runs the plan: it moves the bytes and
reports back. Pages go through it as *parcels* (store/parcel.py). The manager's lock is held in every call.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry, PageState
from gdscache.limits import BATCH_PAGES, LEAST_BATCH
from gdscache.moves import PLANES
from gdscache.pages.hit import Told
from gdscache.pages.keys import Page
from gdscache.pages.layout import PLAIN
from gdscache.runtime.threads import Bell
from gdscache.store.outlets import EarnedOffers, Outlet, batch_pages
from gdscache.store.parcel import Parcel, StoreJob, last_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdscache.config import StoreConfig
    from gdscache.index.free_slots import SlotShare
    from gdscache.index.index import PageIndex
    from gdscache.tiers.base import Tier
    from gdscache.tiers.manager import TierManager

_FIRST_ROUND_BYTES = 32 << 20
# Of `write_back`, as shares of the landing tier's slots: above the second the coldest dirty pages are written, down to
# the first.
WATERMARKS = (0.25, 0.5)


def round_pages(extent_bytes: int, *, waiting: bool) -> Iterator[int]:
    """Pages of each round of a store, which finds slots and is gathered together.

    A round costs 0.3 ms of Python. `waiting`: a writer is idle, so the first round is small, and each doubles.
    """
    most = min(BATCH_PAGES, batch_pages(extent_bytes))
    pages = min(most, max(LEAST_BATCH // 2, _FIRST_ROUND_BYTES // extent_bytes)) if waiting else most
    while True:
        yield pages
        pages = min(most, 2 * pages)


class StorePlanner:
    """The state of all accepted stores that are not done.

    Each outlet has at most `store.queue` bytes, and so have the other `queued` pages; without a landing tier both have
    it together.

    Many methods: each step and each outcome of a page is one; all change one account of the queue.
    """

    def __init__(
        self,
        manager: TierManager,
        config: StoreConfig,
        extent_bytes: int,
        outlets: Sequence[Outlet],
        earned: EarnedOffers,
        spare: SlotShare | None = None,
        *,
        plain: bool = False,
        unfit: StorePlanner | None = None,
    ) -> None:
        """`outlets`: one to each tier of files. `earned`: notes of the manager's lookups. `spare`: slots of the bounce
        reserve. `plain`: the planner is of plain tiers, and takes the pages that do not fit into packed extents.
        `unfit`: that planner, where this one's pages are packed."""
        self.outlets, self.spare = outlets, spare
        self.queued = 0  # pages accepted and not finished
        self.idle = Bell()  # rings when no page is queued
        self._cleaning = 0  # of these, pages that go from the CPU tier to the SSD without a store
        self.manager = manager
        self._epoch = manager.clearing.epoch
        self._landing = next((tier for tier in manager.landings if tier.plain == plain), None)
        self._bounced = "bounce" + PLAIN * plain
        self._plain, self._unfit = plain, unfit
        self._policy = config.write_policy if self.outlets else "never"
        self.extent_bytes = extent_bytes
        self.limit_bytes, self._limit = config.queue, config.queue // extent_bytes
        slots = 0 if self._landing is None else self._landing.index.slots
        self._low, self._high = (int(share * slots) for share in WATERMARKS)
        # Most CPU slots of pages that the SSD lacks: pages on their way, or dirty ones.
        self._most_held = (self._high + slots) // 2 if self._policy == "write_back" else max(1, slots // 2)
        self.behind = False  # the SSD was behind when the current store began: do not wait for it
        self._earned = earned
        self.now: Callable[[], float] = time.monotonic  # the executor's clock

    @property
    def _index(self) -> PageIndex:
        assert self._landing is not None, "no tier in memory"
        return self._landing.index

    @property
    def writes(self) -> bool:
        """Whether tiers of files are written to."""
        return self._policy != "never"

    @property
    def keys(self) -> Collection[bytes]:
        if len(self.outlets) == 1:
            return self.outlets[0].keys
        return set[bytes]().union(*(outlet.keys for outlet in self.outlets))

    @property
    def dirty_pages(self) -> int:
        return 0 if self._landing is None else self._landing.index.dirty_pages

    # -- accepting ---------------------------------------------------------------------------------------------------

    def accept(self, job: StoreJob) -> None:
        """Narrow a job, whose pages are `queued` already, to the pages that some tier lacks and the queue has room for.
        The others get their outcome."""
        manager, pages = self.manager, job.pages
        manager.counts["stores", "requests"] += not self._plain  # whose pages another planner has accepted before
        manager.retain(pages, job.retention)
        self._retain_coming(pages, job.retention)
        before = self.queued - len(pages)
        absent = manager.quarantine.absent()  # ranks do not answer
        room = 0 if absent else max(0, self._limit - before + (0 if self._landing is None else len(self.keys)))
        missing = self._missing(pages, job.retention)
        if len(missing) < len(pages):
            present = sorted(job.left.difference(missing))
            if self._landing is None and self._policy == "never":  # no tier takes a page
                tiers = manager.tiers.values()
                there = [place for place in present if any(pages[place].key in tier.index for tier in tiers)]
                self.finish_pages(job, sorted({*present}.difference(there)), "no_tier")
                present = there
            manager.counts["stores", "present"] += len(present)
            self.finish_pages(job, present)
        self.finish_pages(job, missing[room:], absent or "queue_full")
        job.narrow(missing[:room])
        keys = [page.key for page in job.pages]
        manager.fates.forget(keys)
        for outlet in self.outlets:
            outlet.admission.use(keys)

    def _retain_coming(self, pages: Sequence[Page], retention: Retention) -> None:
        for outlet in self.outlets:
            outlet.retain(pages, retention)

    def _missing(self, pages: Sequence[Page], retention: Retention) -> list[int]:
        """The numbers of pages that a tier should have, lacks and is not getting; each page once."""
        landing = self._landing
        again = landing is None or (self._policy == "write_through" and not self._earned.by_hits)
        found = absent = [] if landing is None else landing.index.lacking(pages)
        if again and len(absent) < len(pages):
            there = sorted(set(range(len(pages))).difference(absent))
            found = sorted(
                [*absent, *(there[i] for i in self._lacking([pages[number] for number in there], retention))]
            )
        if len({pages[number].key for number in found}) < len(found):
            found = sorted({pages[number].key: number for number in reversed(found)}.values())
        return found if self._unfit is None else self._unfit.lacking(pages, found, retention)

    def lacking(self, pages: Sequence[Page], numbers: Sequence[int], retention: Retention) -> list[int]:
        """The `numbers` without the pages that this planner's tiers have as far as they should."""
        here = [number for number in numbers if self._has(pages[number])]
        missing = self._missing([pages[number] for number in here], retention) if here else []
        there = set(here).difference(here[i] for i in missing)
        return [number for number in numbers if number not in there]

    def _has(self, page: Page) -> bool:
        """Whether a page is on a tier, or on its way to one."""
        there = self._landing is not None and page.key in self._landing.index
        return there or any(not outlet.lacking((page,), self._epoch) for outlet in self.outlets)

    def _lacking(self, pages: Sequence[Page], retention: Retention = DEFAULT) -> list[int]:
        """The numbers of pages that a tier of files should have, lacks and is not getting."""
        outlets = [] if self._policy == "never" else [one for one in self.outlets if one.takes(retention)]
        return sorted({number for outlet in outlets for number in outlet.lacking(pages, self._epoch)})

    def _falls_behind(self) -> bool:
        if self._landing is None:
            return False
        return (self.dirty_pages if self._policy == "write_back" else len(self.keys)) > self._most_held

    def _offer(
        self, pages: Sequence[Page], retention: Retention, *, behind: bool
    ) -> tuple[dict[tuple[Outlet, ...], list[int]], dict[int, str]]:
        """Offer pages to the tiers that lack them. Returns the accepted pages' places by their outlets, and by place
        the first refusal's cause."""
        takes: list[tuple[Outlet, ...]] = [()] * len(pages)
        causes: dict[int, str] = {}
        for outlet in self.outlets if self._policy != "never" else ():
            if not outlet.takes(retention):
                continue
            lacking = outlet.lacking(pages, self._epoch)
            offered = pages if len(lacking) == len(pages) else [pages[i] for i in lacking]
            for i, cause in zip(lacking, outlet.offer(offered, open=not behind), strict=True):
                if cause:
                    self.manager.counts["refused", cause] += 1
                    self.manager.fates.note((pages[i].key,), Told("refused", outlet.tier.name, cause))
                    causes.setdefault(i, cause)
                else:
                    takes[i] += (outlet,)
        if takes and takes.count(takes[0]) == len(takes):
            return {takes[0]: [*range(len(takes))]}, causes
        found: dict[tuple[Outlet, ...], list[int]] = {}
        for i, to in enumerate(takes):
            found.setdefault(to, []).append(i)
        return found, causes

    # -- placing -----------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[int]:
        """A store begins: the numbers of pages of its rounds.

        Decides once a store whether the SSD is behind. Decided later, a prompt would be cut by its own pages in an idle
        CPU tier.
        """
        self.behind = self._falls_behind()
        if self.behind:
            self._give_up()
        waiting = self._policy == "write_through" and any(not outlet.keys for outlet in self.outlets)
        return round_pages(self.extent_bytes, waiting=waiting)

    def cpu_slots(self, pages: Sequence[Page]) -> list[int]:
        """CPU slots for the pages that the tier lacks, without evicting the pages before them."""
        landing = self._landing
        if landing is None:
            return []
        return landing.index.allocate_some(len(landing.index.lacking(pages)), pages=pages)

    def free(self, slots: Sequence[int]) -> None:
        self._index.free(slots)

    def place(
        self, job: StoreJob, at: int, end: int, slots: list[int], bounced: list[int], parcels: list[Parcel]
    ) -> int:
        """Find slots for the pages `at ... end-1`: from `slots` (CPU), or from `bounced`. Both shrink; `parcels` grows.

        Returns the first page without a slot: one that needs a bounce slot when none is left, else `end`.
        """
        if self._epoch(job.namespace) != job.epoch:
            self.finish_pages(job, range(at, end), "cleared")
            return end
        pages, landing = job.pages, self._landing
        self.manager.expiry.stored(pages[at:end], job.retention)  # an earlier store may have brought some since
        self._retain_coming(pages[at:end], job.retention)
        while at < end:
            stop = end if landing is None else landing.index.absent_until(pages, at, end)
            if landing is not None and stop == at:
                stop = next((i for i in range(at, end) if pages[i].key not in landing.index), end)
                self._offer_again(job, range(at, stop), landing, parcels)
                at = stop
                continue
            if landing is not None and slots:
                stop = min(stop, at + len(slots))
                self._insert(job, range(at, stop), slots, landing, parcels)
                at = stop
                continue
            at = self._bounce(job, at, stop, bounced, parcels)
            if at < stop:
                break
        return at

    def _insert(self, job: StoreJob, places: range, slots: list[int], landing: Tier, parcels: list[Parcel]) -> None:
        pages = job.pages[places.start : places.stop]
        ways: dict[tuple[Outlet, ...], list[int]] = {}
        if self._policy == "write_through":
            ways, _ = self._offer(pages, job.retention, behind=self.behind)
        else:
            ways[()] = [*range(len(pages))]
        for to, some in ways.items():
            taken = slots[: len(some)]
            whole = len(some) == len(pages)
            of, at = (pages, places) if whole else ([pages[i] for i in some], [places[i] for i in some])
            kept = self.manager.expiry.joined_all(of, job.retention)
            parcel = Parcel(job, at, taken, landing.name, [], [], to, copied=False)
            self._set_out(parcel, parcels)
            parcel.leases.append(lease := self.manager.lease("store"))
            parcel.entries = entries = landing.index.insert_all(of, taken, PageState.PENDING, kept, leases=1)
            del slots[: len(some)]
            try:
                lease.take(landing.index, entries)
            except BaseException:
                landing.index.release_all(entries)
                raise
            self._earned.came(taken)

    def _offer_again(self, job: StoreJob, places: range, landing: Tier, parcels: list[Parcel]) -> None:
        entries: dict[int, Entry] = {}
        pages = job.pages[places.start : places.stop] if self._policy == "write_through" else ()
        for i in (places[number] for number in self._lacking(pages)):
            entry = landing.index.find(job.pages[i].key)
            if entry is not None and entry.state is PageState.VERIFIED:
                entries[i] = entry
        some = list(entries)
        ways, _ = self._offer([job.pages[i] for i in some], job.retention, behind=self.behind)
        for to, chosen in ways.items():
            if to:
                going = [some[n] for n in chosen]
                self._send_on(job, going, [entries[i] for i in going], landing, to, parcels)
        taken = {some[n] for to, chosen in ways.items() if to for n in chosen}
        self.finish_pages(job, [i for i in places if i not in taken])

    def _bounce(self, job: StoreJob, at: int, stop: int, bounced: list[int], parcels: list[Parcel]) -> int:
        """Pages without a slot in the landing tier: to tiers of files through the bounce reserve.

        Returns the first page without a slot: one that needs a bounce slot when none is left, else `stop`.
        """
        quarantine = self.manager.quarantine  # its writes hold the bounce slots
        full = "" if self._landing is None else f"{self._landing.name}_full"
        if self._off and self._policy != "write_through_selective":
            self.finish_pages(job, [at + number for number in self._lacking(job.pages[at:stop])], quarantine.cause)
        if self._off or self._policy in ("never", "write_through_selective"):
            self.finish_pages(job, range(at, stop), full)
            return stop
        while at < stop:
            room = max((outlet.room for outlet in self.outlets), default=0)
            most = min(room, len(bounced)) if room else stop - at
            if not most:
                if self._lacking(job.pages[at : at + 1]):
                    return at
                most = 1
            places = range(at, min(stop, at + most))
            ways, causes = self._offer([job.pages[i] for i in places], job.retention, behind=False)
            for to, some in ways.items():
                if to:
                    going, taken = [places[n] for n in some], bounced[len(bounced) - len(some) :]
                    parcel = Parcel(job, going, taken, self._bounced, None, [], to, copied=False)
                    del bounced[len(bounced) - len(some) :]
                    self._set_out(parcel, parcels)
                else:
                    for n in some:
                        self.finish_pages(job, (places[n],), causes.get(n, full))
            at = places.stop
        return at

    @property
    def _off(self) -> bool:
        """Whether the tiers of files are switched off since their I/O hangs."""
        return any(self.manager.quarantine.hangs(outlet.tier.name) for outlet in self.outlets)

    def turn_away(self, job: StoreJob, i: int) -> None:
        """No bounce slot is free for page `i`, and the SSD is behind: drop it."""
        _, causes = self._offer((job.pages[i],), job.retention, behind=True)
        self.finish_pages(job, (i,), causes.get(0, ""))

    def _send_on(
        self,
        job: StoreJob,
        places: Sequence[int],
        entries: Sequence[Entry],
        landing: Tier,
        to: tuple[Outlet, ...],
        parcels: list[Parcel],
    ) -> None:
        """Pages whose bytes are in the landing tier set out."""
        parcel = Parcel(job, places, [e.slot for e in entries], landing.name, entries, [], to, copied=True)
        self._set_out(parcel, parcels)
        parcel.leases.append(lease := self.manager.lease("store"))
        for entry in entries:
            lease.add(landing.index, entry)

    def _set_out(self, parcel: Parcel, parcels: list[Parcel]) -> None:
        """`parcels` has it before anything else changes: behind an error it is abandoned."""
        parcels.append(parcel)
        if parcel.job.receipt is None:
            self.queued += len(parcel)
            self._cleaning += len(parcel)
        for outlet in parcel.to:
            outlet.set_out(parcel.keys(parcel.rows), parcel.job.epoch, parcel.job.retention)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def publish(self, parcel: Parcel) -> bool:
        """The bytes are in the slots: show the pages in the landing tier. True if they go on to tiers of files now."""
        job, landing, entries = parcel.job, self._landing, parcel.entries
        shown: Sequence[int] = parcel.rows
        if landing is not None and entries is not None and not parcel.copied:
            landing.index.commit_all(entries)
            shown = [row for row, entry in enumerate(entries) if not entry.dropped]
            job.committed(parcel.places_of(shown), landing.name)
            self.manager.counts["stored", landing.name] += len(shown)
            self._measure(parcel, PLANES, landing.name, len(shown))
            for number in self._lacking([entries[row].page for row in shown]) if self._policy == "write_back" else ():
                landing.index.mark_dirty(entries[shown[number]])
        if parcel.to:
            return True
        for lease in parcel.leases:
            self.manager.end(lease)
        self.finish_pages(job, parcel.places_of(shown))
        for i in parcel.places:  # pages that left the CPU tier meanwhile
            if i in job.left:
                self.finish_pages(job, (i,), "expired" if self.manager.expiry.was(job.pages[i].key) else "cleared")
        return False

    def _measure(self, parcel: Parcel, source: str, target: str, pages: int) -> None:
        measures, job = self.manager.measures, parcel.job
        measures.moved(source, target, pages)
        if pages and job.since is not None:
            measures.stored(target, len(job.pages) * self.extent_bytes, self.now() - job.since)

    def written(self, parcel: Parcel, outlet: Outlet, rows: Sequence[int], cause: str) -> list[int]:
        """A writer's outcome for pages: "" or the cause why its tier lacks them. `released` frees their slots.

        Returns the rows that had no outcome before. May be called again after an exception.
        """
        left = parcel.left[outlet]
        rows = sorted(left.intersection(rows))
        if not rows:
            return rows
        job, entries = parcel.job, parcel.entries
        outlet.end(parcel.keys(rows), parcel.job.epoch)
        if not cause:
            job.committed(parcel.places_of(rows), outlet.tier.name)
            self.manager.counts["stored", outlet.tier.name] += len(rows)
            source = PLANES if entries is None else parcel.space
            self._measure(parcel, source, outlet.tier.name, len(rows))
        elif cause == "deadline" and entries is not None:
            parcel.set_apart(rows, self.manager.lease("quarantine"))
            self._end_empty(parcel)
        if cause:
            parcel.note(rows, cause)
        over = last_of(rows, outlet, parcel.left)
        if entries is not None and self._index.dirty_pages:
            for row in over:
                # a page refused for good is clean too, else it could never be evicted
                self._index.mark_clean(entries[row])
        for why, some in parcel.by_cause(over).items():
            self.finish_pages(job, parcel.places_of(some), why)
        left.difference_update(rows)
        return rows

    def released(self, parcel: Parcel, outlet: Outlet, rows: Sequence[int]) -> None:
        """An outlet no longer reads these pages' slots, which are free if no other does."""
        over = last_of(rows, outlet, parcel.reading)
        if over and parcel.entries is not None:
            some = [parcel.entries[row] for row in over]
            for lease in parcel.leases:
                lease.release(some)
            self._end_empty(parcel)
        parcel.reading[outlet].difference_update(rows)
        self._free_bounce(parcel, over)

    def _free_bounce(self, parcel: Parcel, rows: Sequence[int]) -> None:
        if parcel.entries is None and self.spare is not None and rows:
            self.spare.give([parcel.slots[row] for row in rows])

    def _end_empty(self, parcel: Parcel) -> None:
        for lease in parcel.leases:
            if not len(lease):
                self.manager.end(lease)

    def abandon(self, parcel: Parcel) -> None:
        if parcel.entries is not None and not parcel.copied:
            for entry in parcel.entries:
                self._index.drop(entry)
        for outlet, rows in parcel.give_up():
            outlet.end(parcel.keys(rows), parcel.job.epoch)
            outlet.admission.not_written(len(rows))
        for lease in parcel.leases:
            self.manager.end(lease)
        self.finish_pages(parcel.job, parcel.places, "error")
        self._free_bounce(parcel, parcel.rows)

    def without(self, parcel: Parcel, rows: Sequence[int]) -> Parcel:
        """A parcel that is not sent yet, without `rows`: pages that do not fit into packed extents. They stay in
        `job.left`, and get their outcome by `pass_on`, or by `finish_pages`."""
        gone = [] if parcel.entries is None else [parcel.entries[row] for row in rows]
        for entry in gone:
            self._index.drop(entry)
        for lease in parcel.leases:
            lease.release(gone)
        for outlet in parcel.to:
            outlet.end(parcel.keys(rows), parcel.job.epoch)
            outlet.admission.not_written(len(rows))
            for other in self._unfit.outlets if self._unfit is not None else ():
                if other.tier.name == outlet.tier.name + PLAIN:
                    other.admission.policy.vouched(parcel.keys(rows))
        left = sorted(set(parcel.rows).difference(rows))
        if not left:
            self._end_empty(parcel)
        kept = parcel.only(left)
        self._free_bounce(parcel, rows)
        return kept

    def pass_on(self, job: StoreJob, places: Sequence[int]) -> None:
        """Another planner gives these pages their outcome."""
        job.left.difference_update(places)
        self.queued -= len(places)
        self.manager.counts["stores", "unfit"] += len(places)

    def finish_pages(self, job: StoreJob, places: Iterable[int], cause: str = "") -> None:
        """The outcome of pages is final. May be called again."""
        left = job.left
        some = [i for i in places if i in left]
        if not some:
            return
        if job.receipt is not None:
            job.receipt.finish(job.numbers_of(some), cause)  # first: if it raises, `finish_pages` is called again
        left.difference_update(some)
        if cause:
            self.manager.counts["dropped", cause] += len(some)
            self.manager.fates.note([job.pages[i].key for i in some], Told("no_room", detail=cause))
        self.queued -= len(some)
        if job.receipt is None:
            self._cleaning -= len(some)
        if not self.queued:
            self.idle.ring()

    def describe(self) -> dict[str, Any]:
        found = [outlet.admission.describe() for outlet in self.outlets[:1]]
        return {"write_policy": self._policy, "admission": found[0] if found else None}

    # -- from the CPU tier to the SSD, without a store ---------------------------------------------------------------

    def earned(self) -> list[Parcel]:
        """Pages noted by lookups since the last load or store, if they are in memory: to be sent on now."""
        pages = self._earned.take()
        return self.leaving(pages) if pages else []

    def clean(self, *, everything: bool = False) -> list[Parcel]:
        """Dirty pages to be sent on now: down to the low watermark if the high one is passed, or all of them.

        The coldest go first, so that eviction finds clean pages. At most as many go as the SSD has room for; if it does
        not keep up, others become clean unwritten.
        """
        going = self.earned() if everything else []
        if not self.dirty_pages:
            return going
        waiting = self.dirty_pages - self._cleaning
        wanted = waiting if everything else waiting - self._low if waiting > self._high else 0
        wanted = min(wanted, self._limit - len(self.keys))
        if wanted > 0:
            going += self.leaving(self._index.coldest_dirty(wanted, self.keys))
        full = not any(outlet.room for outlet in self.outlets)
        if not everything and (self._off or self.behind or full):
            self._give_up()
        return going

    def _give_up(self) -> None:
        """The SSD takes no more. If dirty pages fill more than half of the space between the high watermark and the
        whole tier, let the coldest be evicted unwritten, tails before heads, down to the high watermark."""
        index = self._index
        surplus = min(index.dirty_pages - self._high, index.dirty_pages - self._cleaning)
        if index.dirty_pages <= self._most_held or surplus <= 0:
            return
        pages = list(reversed(index.coldest_dirty(surplus, self.keys)))[:surplus]
        self._offer(pages, DEFAULT, behind=True)
        for entry in filter(None, (index.find(page.key) for page in pages)):
            index.mark_clean(entry)

    def leaving(self, pages: Sequence[Page]) -> list[Parcel]:
        """Parcels of the landing tier's pages that go on to tiers of files without a store."""
        parcels: list[Parcel] = []
        try:
            self._leave(pages, parcels)
        except BaseException:
            for parcel in parcels:
                self.abandon(parcel)
            raise
        return parcels

    def _leave(self, pages: Sequence[Page], parcels: list[Parcel]) -> None:
        landing = self._landing
        if landing is None or self._off:
            return
        index, groups = landing.index, dict[tuple[bytes, Retention], list[Entry]]()
        behind = self._policy != "write_back" and self._falls_behind()  # dirty pages hold their slots anyway
        for number in self._lacking(pages):
            entry = index.find(pages[number].key)
            if entry is not None and entry.state is PageState.VERIFIED:
                groups.setdefault((entry.namespace, entry.retention), []).append(entry)
        for (namespace, retention), entries in groups.items():
            epoch = self._epoch(namespace)
            while entries:
                some = entries
                if self._policy == "write_back":  # dirty pages wait
                    some = entries[: max(outlet.room for outlet in self.outlets)]
                    if not some:
                        return
                entries = entries[len(some) :]
                ways, _ = self._offer([entry.page for entry in some], retention, behind=behind)
                for to, places in ways.items():
                    leaving = [some[n] for n in places]
                    if not to:
                        for entry in leaving:
                            index.mark_clean(entry)
                        continue
                    job = StoreJob(None, [e.page for e in leaving], epoch, retention)
                    self._send_on(job, job.numbers, leaving, landing, to, parcels)
