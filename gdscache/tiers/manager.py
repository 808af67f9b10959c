"""TierManager: which page is where, and what may happen to it. Plain Python over indexes; no bytes, no torch.

One lock guards every index. It is held for dictionary work only, never over I/O, a copy or a wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gdscache.calls import Caller, Direct
from gdscache.keys import Page
from gdscache.tiers.base import Lease, Tier
from gdscache.tiers.busy import BusyPeriods
from gdscache.tiers.clearing import PAUSE_S, Clearing
from gdscache.tiers.costs import Costs
from gdscache.tiers.index import PageIndex
from gdscache.tiers.keeping import Expiry, Pin, Pins
from gdscache.tiers.pages import PENDING, Entry
from gdscache.tiers.promotion import Always, Promotion
from gdscache.tiers.quarantine import Late, Quarantine
from gdscache.tiers.retention import DEFAULT, Retention
from gdscache.timeline import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.tiers.bounce import Bounce
    from gdscache.tiers.cpu import CpuTier
    from gdscache.tiers.gpu import GpuTier
    from gdscache.tiers.prefetching import PrefetchedPages
    from gdscache.tiers.ssd import SsdTier

_LOOKED = 256  # pages that are looked for at a time
_UNSETTLED = 1024  # changes of an eviction order that may wait for whoever looks at it: some milliseconds
_SETTLED = 128  # changes that are brought in while the lock is held once
_CLOSE_S = 5.0  # seconds that close() waits for I/O which has missed its deadline already
_log = logging.getLogger("gdscache")
Behind = Literal["more", "busy", "missing", "no_room"]


class PageStatus(enum.Enum):
    """How a page of a load ended."""

    PENDING = "pending"
    LOADED = "loaded"
    CHECKSUM = "checksum"  # the bytes are not what was stored
    SHORT_READ = "short_read"
    IO_ERROR = "io_error"
    DEADLINE = "deadline"
    SWITCHED_OFF = "switched_off"  # the SSD tier is: too much of its I/O hangs
    LOCK_LOST = "lock_lost"  # the SSD tier has stopped: its directory is not ours alone any more
    CANCELLED = "cancelled"
    ABORTED = "aborted"  # the load itself broke off; see its exception


@dataclasses.dataclass(slots=True)
class PageTask:
    """One page of a load: where its bytes come from, and the CPU slot that they pass through and stay in, if any.

    `row`: its place in the load's block table.
    """

    page: Page
    tier: str
    source: Entry
    target: Entry | None = None
    filling: PageTask | None = None  # the task of another load, which reads into `source`: wait for it
    status: PageStatus = PageStatus.PENDING
    landed: PageStatus = PageStatus.PENDING  # whether `target` has its bytes, for other loads to wait on
    row: int = 0


@dataclasses.dataclass(slots=True)
class LoadPlan:
    """The pages that a load will move, in order, and the lease on everything that it touches."""

    tasks: list[PageTask]
    lease: Lease


@dataclasses.dataclass(slots=True)
class PrefetchPlan:
    """The next pages of a prefetch: None for one that is at hand, else its task. `chunk` is all tasks, and the lease.

    `then` says what comes behind them: `more`, or a page that is somebody else's to bring (`busy`), that is not there
    any more (`missing`), or that finds no CPU slot (`no_room`).
    """

    found: list[PageTask | None]
    then: Behind
    chunk: LoadPlan


class TierManager:
    """Chains the tiers: lookup, the two phases of loads and stores, leases, counting. `clearing` drops pages."""

    def __init__(
        self,
        lock: threading.RLock,
        gpu: GpuTier | None,
        cpu: CpuTier | None,
        ssd: SsdTier | None,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        promotion: Promotion | None = None,
        calls: Caller | None = None,
    ) -> None:
        """`promotion`: what loads leave in the CPU tier of what they read from the SSD; None: every page."""
        self.lock = lock
        self.calls: Caller = Direct() if calls is None else calls
        self.promotion: Promotion = Always() if promotion is None else promotion
        self.gpu, self.cpu, self.ssd = gpu, cpu, ssd
        self.tiers: dict[str, Tier] = {t.name: t for t in (gpu, cpu, ssd) if t is not None}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.on_use: list[Callable[[Sequence[bytes]], None]] = []  # told the keys that a lookup found; only notes them
        self.on_load: list[Callable[[], object]] = []  # called before a load is planned: what uses have earned is due
        self.prefetched: PrefetchedPages | None = None  # told which pages a load reads
        self._leases: set[Lease] = set()
        self._filling: dict[Entry, PageTask] = {}
        self._filled = threading.Condition(lock)
        self.clearing = Clearing(lock, self.tiers, ssd)
        self.costs = Costs()
        self.busy = BusyPeriods(self.costs.observe_load)
        self.under_way: Counter[str] = Counter()  # pages of loads and prefetches that have not ended, by source
        self._planned: dict[Lease, Counter[str]] = {}  # what of it each plan has
        self.expiry = Expiry(self, wall_clock)
        self.pins = Pins(self, clock)
        self.quarantine = Quarantine(lock)
        self.timeline: Timeline = OFF
        if cpu is not None:
            self.quarantine.add_pool("cpu", cpu.index.slots)

    def adopt(self, bounce: Bounce) -> None:
        """Watch over the bounce reserve too, whose memory then outlives I/O that hangs."""
        bounce.quarantine = self.quarantine
        self.quarantine.add_pool("bounce_loads", bounce.loads.slots)
        self.quarantine.add_pool("bounce_stores", bounce.stores.slots)

    # -- looking --------------------------------------------------------------------------------------------------

    def lookup(self, pages: Sequence[Page], start: int) -> list[str]:
        """The fastest tier of each page from `start` on, up to the first miss. Counts a use of what was found.

        Starts nothing and takes no lease: what a use earns a page is done by the next load or store.
        """
        with self.lock:
            self.expire(pages)
            keys = [p.key for p in pages]
            found, hidden = self._visible(self._find(keys[start:]), pages, start)
            del keys[start + len(found) :]
            keys.reverse()
            for name, tier in self.tiers.items():
                hits = found.count(name)
                tier.touch(keys, found=hits == len(keys))
                if hits:
                    self.counts["hits", name] += hits
            for tell in self.on_use:
                tell(keys)
            self.counts["lookups", "requests"] += 1
            self.counts["lookups", "pages"] += len(pages) - start
            missing = len(pages) - start - len(found) - hidden
            cause = "expired" if missing > 0 and self.expiry.was(pages[start + len(found)]) else "absent"
            self.counts["misses", cause] += missing
            return found

    def _visible(self, found: list[str], pages: Sequence[Page], start: int) -> tuple[list[str], int]:
        """`found` up to the first page that quarantine hides, and how many pages that leaves out."""
        seen = self._first_hidden(found, pages, start)
        hidden = len(found) - seen
        if hidden:
            self.counts["misses", self.quarantine.cause if self.quarantine.off else "quarantined"] += hidden
        return found[:seen], hidden

    def _first_hidden(self, found: Sequence[str], pages: Sequence[Page], start: int) -> int:
        """How many of the pages found come before one that quarantine hides."""
        quarantine = self.quarantine
        if (quarantine.requests or quarantine.off) and self.ssd is not None:
            for i, name in enumerate(found):
                slot = self.ssd.index.slot(pages[start + i].key) if name == "ssd" else None
                if slot is not None and quarantine.hides(slot):
                    return i
        return len(found)

    def watch(self) -> None:
        """Stop the SSD tier if its directory is not ours alone any more. Costs an `os.stat`: without the lock, where
        that is not needed for something else."""
        if self.ssd is not None and not self.quarantine.stopped and (why := self.ssd.lock_lost()):
            self.quarantine.stop(why)

    def peek(self, pages: Sequence[Page]) -> list[str]:
        """What `lookup` would answer; counts nothing, not even a use."""
        with self.lock:
            self.expire(pages)
            found = self._find([p.key for p in pages])
            return found[: self._first_hidden(found, pages, 0)]

    def _find(self, keys: Sequence[bytes]) -> list[str]:
        """The fastest tier of each page, up to the first that is in none."""
        found: list[str] = []
        for at in range(0, len(keys), _LOOKED):
            some = keys[at : at + _LOOKED]
            found += self._find_some(some)
            if len(found) < at + len(some):
                break
        return found

    def _find_some(self, keys: Sequence[bytes]) -> list[str]:
        """`_find`, run by run of pages that one tier has."""
        masks: list[bytes] = []  # of the tiers, the fastest first
        tiers, found = list(self.tiers.items()), list[str]()
        while (at := len(found)) < len(keys):
            stop = len(keys)
            for level, (name, tier) in enumerate(tiers):
                if level == len(masks):
                    masks.append(tier.index.visible(keys))
                mask = masks[level]
                if mask[at]:
                    end = mask.find(0, at, stop)
                    found += [name] * ((stop if end < 0 else end) - at)
                    break
                faster = mask.find(1, at, stop)  # a slower tier has the pages before it, at most
                stop = stop if faster < 0 else faster
            else:
                break
        return found

    def hidden(self, tier: str, slot: int) -> bool:
        """Whether quarantine hides the page in a slot of a tier."""
        watched = self.quarantine.requests or self.quarantine.off
        return tier == "ssd" and bool(watched) and self.quarantine.hides(slot)

    # -- what is kept how long ------------------------------------------------------------------------------------

    def expire(self, pages: Sequence[Page] = ()) -> None:
        """End pins whose time is up, and drop pages that have expired: all of `pages`, and a bounded number of others.

        For the start of whatever looks for pages or room. The lock must be held.
        """
        self.pins.end_due()
        self.expiry.run(pages)

    def retain(self, pages: Sequence[Page], retention: Retention = DEFAULT) -> None:
        """Pages are stored (again): expired ones go; on the tiers that have them the longer wish counts from now on.

        That is the greater priority and the later expiry. For the start of every store. The lock must be held.
        """
        self.expire(pages)
        self.expiry.stored(pages, retention)

    def pin(self, pages: Sequence[Page], seconds: float, page_tokens: int) -> Pin:
        """Keep the consecutive pages from the first on that are cached from eviction; see `Pin`."""
        with self.lock:
            self.expire(pages)
            return self.pins.begin(pages, seconds, page_tokens)

    # -- leases and epochs ----------------------------------------------------------------------------------------

    def lease(self, owner: str) -> Lease:
        """A new, empty lease. The lock must be held while pages are added to it."""
        lease = Lease(owner)
        self._leases.add(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Release every page of a lease; twice is fine."""
        with self.lock:
            lease.end()
            self._leases.discard(lease)
            planned = self._planned.pop(lease, None)
            if planned is not None:
                self.under_way.subtract(planned)

    def hold_read(self, task: PageTask, bounced: tuple[int, Callable[[], int]] | None = None) -> Late:
        """Pin what a late read of a page may still touch: its SSD slot, and its CPU slot.

        The caller hands the answer to `quarantine.hold`. `bounced`: where the page has none, the slots of the bounce
        reserve that nothing late held before, and what gives them back; see `Late`.
        """
        with self.lock:
            lease = self.lease("quarantine")
            lease.add(self.tiers[task.tier].index, task.source)
            if task.target is not None:
                lease.add(self.cpu_index, task.target)

        def ended() -> int:
            self.end(lease)
            return 1 if bounced is None else bounced[1]()

        if bounced is None:
            return Late("read", "cpu", task.source.slot, ended)
        return Late("read", "bounce_loads", task.source.slot, ended, bounced[0])

    # -- loading --------------------------------------------------------------------------------------------------

    def plan_load(self, pages: Sequence[Page], owner: str, *, keep: bool = True) -> LoadPlan:
        """Lease the consecutive pages that lower tiers hold, and reserve CPU slots for those of the SSD, in one step.

        What finds no CPU slot, or is not promoted (without `keep`, all of them), passes through the bounce reserve.
        Never waits.
        """
        with self.lock:
            self.expire(pages)
            for due in self.on_load:
                due()
            lease = self.lease(owner)
            tasks, absent = self._sources(pages, lease)
            if self.prefetched:
                for task in tasks:
                    self.prefetched.use(task.page.key, task.source.slot if task.tier == "cpu" else None)
            if keep and self.cpu is not None:
                self._reserve_targets(self.cpu.index, self._promoted(absent), lease)
            self._set_out(tasks, lease)
            return LoadPlan(tasks, lease)

    def _set_out(self, tasks: Sequence[PageTask], lease: Lease) -> None:
        """Count pages as under way until the lease ends."""
        self._planned[lease] = planned = Counter([task.tier for task in tasks])
        self.under_way.update(planned)

    def _sources(self, pages: Sequence[Page], lease: Lease) -> tuple[list[PageTask], list[PageTask]]:
        """Lease pages, up to the first that no lower tier has; and those of them that are not in the CPU tier."""
        cpu, ssd = self.cpu, self.ssd
        tasks: list[PageTask] = []
        absent: list[PageTask] = []
        at, end = 0, len(pages)
        while at < end:
            stop, copy = end, None
            if cpu is not None:
                tasks += self._take(cpu, pages, at, end, lease)
                at = len(tasks)
                if at == end:
                    break
                copy = cpu.index.find(pages[at].key)  # not complete, if it is there
                filling = None if copy is None else self._filling.get(copy)
                if copy is not None and filling is not None:
                    lease.add(cpu.index, copy)
                    tasks.append(PageTask(pages[at], "cpu", copy, None, filling))
                    at += 1
                    continue
                # Any other copy is a store's, on its way: the SSD may have the page.
                stop = cpu.index.absent_until(pages, at) if copy is None else at + 1
            read = [] if ssd is None else self._take(ssd, pages, at, stop, lease)
            tasks += read
            if copy is None:
                absent += read
            at += len(read)
            if at < stop:
                break
        return tasks, absent

    def _take(self, tier: Tier, pages: Sequence[Page], start: int, stop: int, lease: Lease) -> list[PageTask]:
        """Lease those of `pages[start:stop]`, from the first on, that a tier has and that quarantine does not hide."""
        index = tier.index
        entries = index.pin_run(pages, start, stop)
        if self.quarantine.requests or self.quarantine.off:
            seen = next((i for i, entry in enumerate(entries) if self.hidden(tier.name, entry.slot)), len(entries))
            for entry in entries[seen:]:
                index.release(entry)
            del entries[seen:]
        lease.entries.update(dict.fromkeys(entries, index))
        return list(map(PageTask, pages[start : start + len(entries)], itertools.repeat(tier.name), entries))

    def plan_prefetch(self, pages: Sequence[Page], start: int, most: int, keep: Collection[bytes]) -> PrefetchPlan:
        """Lease up to `most` of the SSD's pages from `pages[start]` on, and reserve CPU slots, evicting none of `keep`.

        Needs both tiers. Never waits, and no task of it waits for another load.
        """
        with self.lock:
            self.expire(pages[start : start + most])
            lease = self.lease("prefetch")
            found, then = self._prefetchable(pages, start, most, lease)
            tasks = [task for task in found if task is not None]
            self._reserve_targets(self.cpu_index, tasks, lease, keep)
            if tasks and tasks[-1].target is None:
                then = "no_room"
                for task in [task for task in tasks if task.target is None]:
                    lease.remove(task.source)
                del found[next(i for i, task in enumerate(found) if task is not None and task.target is None) :]
                tasks = [task for task in tasks if task.target is not None]
            if tasks:
                self._set_out(tasks, lease)
            else:
                self.end(lease)
            return PrefetchPlan(found, then, LoadPlan(tasks, lease))

    def _prefetchable(
        self, pages: Sequence[Page], start: int, most: int, lease: Lease
    ) -> tuple[list[PageTask | None], Behind]:
        assert self.ssd is not None, "no SSD tier"
        ssd, cpu, gpu = self.ssd.index, self.cpu_index, None if self.gpu is None else self.gpu.index
        found: list[PageTask | None] = []
        for i in range(start, len(pages)):
            page = pages[i]
            if cpu.has(page.key) or (gpu is not None and gpu.has(page.key)):
                found.append(None)
                continue
            if page.key in cpu:
                return found, "busy"
            if not most:
                break
            entry = ssd.pin(page)
            if entry is None:
                return found, "missing"
            if entry.state is PENDING or self.quarantine.hides(entry.slot):
                ssd.release(entry)
                return found, "missing"
            lease.entries[entry] = ssd
            found.append(PageTask(page, "ssd", entry))
            most -= 1
        return found, "more"

    def _promoted(self, read: Sequence[PageTask]) -> list[PageTask]:
        """Those of the SSD's pages that a load may leave in the CPU tier, which has none of them."""
        wanted = list(itertools.compress(read, self.promotion.wanted([t.page.key for t in read])))
        if len(wanted) < len(read):
            self.counts["promotion", "declined"] += len(read) - len(wanted)
        return wanted

    def _reserve_targets(
        self, index: PageIndex, tasks: Sequence[PageTask], lease: Lease, keep: Collection[bytes] = ()
    ) -> None:
        """Give pages that the CPU tier has not a slot of it each, as far as there is room."""
        if not tasks:
            return
        slots = index.allocate_some(len(tasks), keep)
        retentions = [task.source.retention for task in tasks]
        targets = index.insert_all([task.page for task in tasks], slots, PENDING, retentions)
        for task, target in zip(tasks, targets, strict=False):
            task.target = target
            target.leases = 1
        lease.entries.update(dict.fromkeys(targets, index))
        self._filling.update(zip(targets, tasks, strict=False))

    def finish_pages(self, tasks: Sequence[PageTask], status: PageStatus) -> None:
        """A verdict on pages: publish their CPU copies, or drop them from every tier that they came through."""
        loaded = status is PageStatus.LOADED
        good = loaded or status is PageStatus.CANCELLED  # the bytes were read, and are what was stored
        bad = status in (PageStatus.CHECKSUM, PageStatus.SHORT_READ, PageStatus.IO_ERROR)
        with self.lock:
            filling = self._filling
            for task in tasks:
                task.status = status
                target = task.target
                if target is not None and filling.pop(target, None) is not None:
                    task.landed = PageStatus.LOADED if good else status
                    if good:
                        self.cpu_index.commit(target)
                    else:
                        self.cpu_index.drop(target)
                if bad:
                    self.tiers[task.tier].index.drop(task.source)
            if loaded:
                for tier, pages in Counter([task.tier for task in tasks]).items():
                    self.counts["loaded", tier] += pages
            elif tasks:
                self.counts["misses", status.value] += len(tasks)
            self._filled.notify_all()

    def await_filling(self, filling: PageTask, seconds: float) -> PageStatus:
        """Wait up to `seconds` until another load has its verdict on a page; `DEADLINE` when it has none by then."""
        with self._filled:
            if self._filled.wait_for(lambda: filling.landed is not PageStatus.PENDING, seconds):
                return filling.landed
            return PageStatus.DEADLINE

    @property
    def cpu_index(self) -> PageIndex:
        """The CPU tier's index, where the caller knows that there is one."""
        assert self.cpu is not None, "no CPU tier"
        return self.cpu.index

    # -- behind the work ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the eviction orders nearly up to date: for threads that nobody waits for, after work on many pages.

        A pause comes first: whoever waited for that work has the interpreter then.
        """
        for tier in self.tiers.values():
            while tier.index.unsettled > _UNSETTLED:
                time.sleep(PAUSE_S)
                with self.lock:
                    tier.index.settle(_SETTLED)

    # -- figures --------------------------------------------------------------------------------------------------

    def count(self, group: str, name: str, n: int = 1) -> None:
        with self.lock:
            self.counts[group, name] += n

    def check(self, fix: bool = False) -> list[str]:
        """What disagrees in any tier. Meant for a quiet engine: work in flight holds slots of its own."""
        with self.clearing.alone:  # a clear has slots in hand
            return [f"{name}: {p}" for name, tier in self.tiers.items() for p in tier.check(self.lock, fix=fix)]

    def _describe(self, lease: Lease) -> dict[str, Any]:
        left = self.pins.seconds_left(lease)
        told = {"owner": lease.owner, "pages": len(lease.entries)}
        return told if left is None else {**told, "seconds_left": left}

    def stats(self) -> dict[str, Any]:
        with self.lock:
            self.expire()
            groups: dict[str, dict[str, int]] = {}
            for (group, name), n in sorted(self.counts.items()):
                groups.setdefault(group, {})[name] = n
            tiers = {
                name: {
                    "capacity_bytes": tier.capacity,
                    "slots": tier.index.slots,
                    "pages": len(tier.index),
                    "free_slots": tier.index.free_slots,
                    "dirty_pages": tier.index.dirty_pages,
                    "evictions": tier.index.evictions,
                    **tier.describe(),
                }
                for name, tier in self.tiers.items()
            }
            if "ssd" in tiers:
                tiers["ssd"]["quarantine"] = self.quarantine.describe()
            leases = [self._describe(lease) for lease in self._leases]
            return {"tiers": tiers, **groups, "leases": leases, "bytes_per_second": self.costs.bandwidths()}

    def close(self) -> None:
        """Close the tiers. What I/O that hangs may still touch is kept until that ends; the log says what."""
        with self.clearing.alone:
            pass  # what it drops is known to the SSD tier then, which deletes it before it is closed
        quarantine = self.quarantine
        with contextlib.ExitStack() as last_to_first:
            if self.gpu is not None:
                last_to_first.callback(self.gpu.close)
            if self.cpu is not None:
                last_to_first.callback(quarantine.afterwards, self.cpu.close)
            if self.ssd is None:
                return
            if quarantine.wait(_CLOSE_S):
                last_to_first.callback(self.ssd.close)
                return
            held = quarantine.describe()
            _log.error(
                "closed with %d reads and %d writes unfinished: the memory that they may touch is kept (slots: %s), "
                "and so are the slab and the transport's threads, until they end. See the system log for the device",
                held["late_reads"],
                held["late_writes"],
                held["held_slots"],
            )
            quarantine.afterwards(self.ssd.close_unfinished(writing=quarantine.writes > 0))
