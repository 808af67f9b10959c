"""TierManager: which page is where, and what may happen to it. Plain Python over indexes; no bytes, no torch.

One lock guards every index. It is held for dictionary work only, never over I/O, a copy or a wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from gdscache.gate.busy_periods import BusyPeriods
from gdscache.gate.costs import Costs
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.pages.keys import Page
from gdscache.pages.reasons import CACHED, Reason, Told, joined
from gdscache.runtime.calls import Caller, Direct
from gdscache.runtime.latencies import Latencies
from gdscache.runtime.limited_log import LimitedLog
from gdscache.tiers.base import DurableTier, Lease, Tier
from gdscache.tiers.clear import PAUSE_S, Clearing
from gdscache.tiers.expiry import Expiry
from gdscache.tiers.fates import PageFates
from gdscache.tiers.measures import Measures
from gdscache.tiers.pins import Pin, Pins
from gdscache.tiers.quarantine import Quarantine
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.tiers.cpu import CpuTier
    from gdscache.tiers.gpu import GpuTier
    from gdscache.tiers.ssd import SsdTier

_LOOKED = 256  # pages that are looked for at a time
WATCH_S = 0.05  # seconds after which calls ask again whose the directories are
_log = logging.getLogger("gdscache")


class TierManager:
    """Chains the tiers: lookup, leases, counting. `clearing` drops pages; `LoadPlanner` plans loads over it."""

    # Limits, which may be set to others for one manager.
    unsettled = 1024  # changes of an eviction order that may wait for whoever looks at it
    settled = 1024  # changes that are brought in while the lock is held once: some tenths of a millisecond
    close_s = 5.0  # seconds that close() waits for I/O which has missed its deadline already

    def __init__(
        self,
        lock: threading.RLock,
        tiers: Sequence[Tier],
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        calls: Caller | None = None,
        quarantine: Quarantine | None = None,
        timeline: Timeline = OFF,
        on_use: Callable[[Sequence[bytes]], None] = lambda keys: None,
        measured: bool = True,
        log: LimitedLog | None = None,
    ) -> None:
        """`tiers`: the fastest first, each by a name of its own. `landing` is the first of them in memory, where pages
        of slower ones come up to; `files` are those that only I/O reaches; `served` those that lookups see. `on_use`
        is told the keys that a lookup found, tail first, under the lock: it notes them, and starts nothing. Without
        `measured` nothing is learned of what loads take, since nobody asks. `log`: the engine's."""
        self.lock = lock
        self.calls: Caller = Direct() if calls is None else calls
        self.tiers: dict[str, Tier] = {tier.name: tier for tier in tiers}
        self.served = [(name, tier) for name, tier in self.tiers.items() if tier.served]
        self.landing = next((tier for tier in tiers if tier.kind == "memory"), None)
        self.files = [cast("DurableTier", tier) for tier in tiers if tier.kind == "files"]
        self._watches = any(tier.served for tier in self.files)  # a post costs lookups some 2 ms beside busy threads
        self.counts: Counter[tuple[str, str]] = Counter()
        self._on_use = on_use
        self._leases: set[Lease] = set()
        self.clearing = Clearing(lock, self.tiers, self.files)
        self.costs = Costs([name for name, tier in self.tiers.items() if tier.kind == "memory"])
        self.busy = BusyPeriods(self._was_busy)
        self.latencies = Latencies()
        self.measures = Measures({name: tier.kind for name, tier in self.tiers.items()})
        self.expiry = Expiry(self, wall_clock)
        self.pins = Pins(self, clock)
        self.measured = measured
        self.log = LimitedLog(clock) if log is None else log
        self.tell: Callable[[], object] = self.log.flush  # writes lines that wait: for threads that nobody waits for
        self.sample: Callable[[], str] | None = None  # says why the last lookup that missed pages did
        self.fates = PageFates(sum(tier.index.slots for tier in tiers))
        for tier in tiers:
            tier.index.on_evict = self.fates.evict
        self.quarantine = Quarantine(lock, clock, self.log) if quarantine is None else quarantine
        self.timeline = timeline
        self._clock = clock
        self._watched, self._watching = -math.inf, False  # the last look at whose the directories are, and the next
        if self.landing is not None:
            self.quarantine.add_pool(self.landing.name, self.landing.index.slots)

    # For whoever knows which tiers there are: nothing is decided by these names.

    @property
    def gpu(self) -> GpuTier | None:
        return cast("GpuTier | None", self.tiers.get("gpu"))

    @property
    def cpu(self) -> CpuTier | None:
        return cast("CpuTier | None", self.tiers.get("cpu"))

    @property
    def ssd(self) -> SsdTier | None:
        return cast("SsdTier | None", self.tiers.get("ssd"))

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
            for name, tier in self.served:
                hits = found.count(name)
                tier.touch(keys)
                if hits:
                    self.counts["hits", name] += hits
            self._on_use(keys)
            self.counts["lookups", "requests"] += 1
            self.counts["lookups", "pages"] += len(pages) - start
            missing = len(pages) - start - len(found) - hidden
            cause = "expired" if missing > 0 and self.expiry.was(pages[start + len(found)].key) else "absent"
            self.counts["misses", cause] += missing
            return found

    def told(self, keys: Sequence[bytes]) -> list[Told]:
        """What is known of pages: where each is, or what became of it. Counts nothing."""
        found: list[Told] = []
        for at in range(0, len(keys), _LOOKED):
            with self.lock:
                away = self.quarantine.absent()
                found += [self._told(key, away) for key in keys[at : at + _LOOKED]]
        return found

    def _told(self, key: bytes, away: str) -> Told:
        quarantine, told = self.quarantine, None
        for name, tier in self.tiers.items():
            if not tier.index.has(key):
                if told is None and key in tier.index:
                    told = Told("storing", name)
                continue
            slot = tier.index.slot(key)
            if away or (slot is not None and self.hidden(name, slot)):
                off = quarantine.refuses(name)
                told = Told("off", name, quarantine.cause if quarantine.off or away else "switched_off")
                told = told if off else Told("late", name)
            elif tier.kind == "files" and quarantine.failed_reads.failing(name, key):
                told = Told("failing", name)
            else:
                return Told(CACHED if tier.served else "elsewhere", name)
        if told is not None:
            return told
        return Told("expired") if self.expiry.was(key) else self.fates.told(key)

    def missing(
        self, pages: Sequence[Page], first: int, declined: int, start: int, page_tokens: int
    ) -> tuple[Reason, ...]:
        """Why the pages from number `first` on were not in a hit: the next `declined` for what a gate said of them.
        `start`: the token that the first of `pages` begins with."""
        told, gap = self.told([page.key for page in pages[first:]]), False
        for at, one in enumerate(told):
            if one.cause != CACHED:
                gap = gap or at >= declined
            elif at < declined or gap:
                told[at] = Told("gate" if at < declined else "behind", one.tier)
            else:
                told[at] = Told("stored_since", one.tier, self._before(pages[first + at].key))
        return joined(start + first * page_tokens, page_tokens, told)

    def _before(self, key: bytes) -> str:
        """What is known of a page from before it was stored (again)."""
        with self.lock:
            return self.fates.told(key).cause

    def missed(self, pages: int) -> None:
        """Pages that a lookup asked for beside those of `lookup`, and that no tier has."""
        with self.lock:
            self.counts["lookups", "pages"] += pages
            self.counts["misses", "absent"] += pages

    def _visible(self, found: list[str], pages: Sequence[Page], start: int) -> tuple[list[str], int]:
        """`found` up to the first page that quarantine hides, and how many pages that leaves out."""
        seen = self._first_hidden(found, pages, start)
        hidden = len(found) - seen
        if hidden:
            off = self.quarantine.refuses(found[seen])  # or ranks are absent
            self.counts["misses", self.quarantine.cause if off else "quarantined"] += hidden
        return found[:seen], hidden

    def _first_hidden(self, found: Sequence[str], pages: Sequence[Page], start: int) -> int:
        """How many of the pages found come before one that quarantine hides."""
        if self.quarantine.hiding:
            if self.quarantine.absent():
                return 0
            for i, name in enumerate(found):
                slot = self.tiers[name].index.slot(pages[start + i].key)
                if slot is not None and self.hidden(name, slot):
                    return i
        return len(found)

    def watch(self) -> None:
        """Stop the tiers of files if one of them is not ours alone any more. Costs an `os.stat` or more, each of which
        gives the interpreter's lock up: without our lock, and not for who is waited for."""
        self._watched, self._watching = self._clock(), False
        for tier in self.files:
            if tier.served and not self.quarantine.stopped and (why := tier.lock_lost()):
                self.quarantine.stop(why)

    def have_watched(self) -> None:
        """Have `watch` done soon, where the last time was more than 50 ms ago: for calls, which go by what is known."""
        if not self._watching and self._watches and self._clock() - self._watched >= WATCH_S:
            self._watching = True
            self.calls.post(self.watch)

    def visible(self, keys: Sequence[bytes]) -> bytes:
        """Whether a tier that lookups see has each page, 1 or 0; counts nothing, and expires nothing."""
        with self.lock:
            if self.quarantine.hiding and self.quarantine.absent():
                return bytes(len(keys))
            masks = [self._visible_on(name, tier, keys) for name, tier in self.served]
        return masks[0] if len(masks) == 1 else bytes(map(any, zip(*masks, strict=True)))

    def _visible_on(self, name: str, tier: Tier, keys: Sequence[bytes]) -> bytes:
        mask = tier.index.visible(keys)
        if tier.kind != "files" or not self.quarantine.hiding:
            return mask
        slots = map(tier.index.slot, keys)
        return bytes(
            seen and slot is not None and not self.hidden(name, slot) for seen, slot in zip(mask, slots, strict=True)
        )

    def peek(self, pages: Sequence[Page], *, unserved: bool = False) -> list[str]:
        """What `lookup` would answer; counts nothing, not even a use. `unserved`: with tiers that it does not see."""
        with self.lock:
            self.expire(pages)
            found = self._find([p.key for p in pages], unserved=unserved)
            return found[: self._first_hidden(found, pages, 0)]

    def _find(self, keys: Sequence[bytes], *, unserved: bool = False) -> list[str]:
        """The fastest tier of each page, up to the first that is in none."""
        found: list[str] = []
        for at in range(0, len(keys), _LOOKED):
            some = keys[at : at + _LOOKED]
            found += self._find_some(some, unserved)
            if len(found) < at + len(some):
                break
        return found

    def _find_some(self, keys: Sequence[bytes], unserved: bool) -> list[str]:
        """`_find`, run by run of pages that one tier has."""
        masks: list[bytes] = []  # of the tiers, the fastest first
        tiers, found = list(self.tiers.items()) if unserved else self.served, list[str]()
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
        return self.quarantine.hiding and self.tiers[tier].kind == "files" and self.quarantine.hides(tier, slot)

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

    @property
    def cpu_index(self) -> PageIndex:
        """The landing tier's index, where the caller knows that there is one."""
        assert self.landing is not None, "no tier in memory"
        return self.landing.index

    # -- behind the work ------------------------------------------------------------------------------------------

    def measure_for(self, costs: Costs) -> None:
        """Have these figures learn what the tiers take, from now on."""
        self.busy.tell()  # else what it has not told yet is lost with it
        self.costs, self.busy = costs, BusyPeriods(costs.observe_load)

    def learn(self) -> None:
        """Learn what the tiers take from what was measured, and write lines that wait: for threads that nobody waits
        for, as `settle`."""
        if self.busy.untold:
            time.sleep(PAUSE_S)
            self.busy.tell()
        self.tell()

    def settle(self) -> None:
        """`learn`, and bring the eviction orders nearly up to date, and the filter of evicted pages: for threads that
        nobody waits for, after work on many pages.

        A pause comes first: whoever waited for that work has the interpreter then.
        """
        self.learn()
        while self.fates.waiting:
            time.sleep(PAUSE_S)
            with self.lock:
                self.fates.bring_in(self.settled)
        for tier in self.tiers.values():
            while tier.index.unsettled > self.unsettled:
                time.sleep(PAUSE_S)
                with self.lock:
                    tier.index.settle(self.settled)

    # -- figures --------------------------------------------------------------------------------------------------

    def _was_busy(self, tier: str, nbytes: int, seconds: float) -> None:
        self.latencies.note("read", tier, seconds)
        self.costs.observe_load(tier, nbytes, seconds)

    def count(self, group: str, name: str, n: int = 1) -> None:
        with self.lock:
            self.counts[group, name] += n

    def snapshot(self) -> dict[tuple[str, str], int]:
        """The counts as they are now."""
        with self.lock:
            return dict(self.counts)

    def check(self, fix: bool = False) -> list[str]:
        """What disagrees in any tier. Meant for a quiet engine: work in flight holds slots of its own."""
        with self.clearing.alone:  # a clear has slots in hand
            return [f"{name}: {p}" for name, tier in self.tiers.items() for p in tier.check(self.lock, fix=fix)]

    def _describe(self, lease: Lease) -> dict[str, Any]:
        left = self.pins.seconds_left(lease)
        told = {"owner": lease.owner, "pages": len(lease)}
        return told if left is None else {**told, "seconds_left": left}

    def stats(self) -> dict[str, Any]:
        self.busy.tell()
        with self.lock:
            self.expire()
            groups: dict[str, dict[str, Any]] = {}
            for (group, name), n in sorted(self.counts.items()):
                groups.setdefault(group, {})[name] = n
            tiers = {
                name: {
                    "kind": tier.kind,
                    "capacity_bytes": tier.capacity,
                    "slots": tier.index.slots,
                    "pages": len(tier.index),
                    "free_slots": tier.index.free_slots,
                    "dirty_pages": tier.index.dirty_pages,
                    "evictions": tier.index.evictions,
                    **tier.index.ages.describe(),
                    **tier.describe(),
                }
                for name, tier in self.tiers.items()
            }
            for tier in self.files[:1]:  # the figures are of all of them
                tiers[tier.name]["quarantine"] = self.quarantine.describe()
            leases = [self._describe(lease) for lease in self._leases]
            measured = self.measures.describe()
            speeds = self.costs.bandwidths()
            groups["tokens"] = self.measures.tokens.describe()
            return {"tiers": tiers, **groups, "leases": leases, "measured": measured, "bytes_per_second": speeds}

    def close(self, executor: Callable[[], None] = lambda: None) -> None:
        """Close the tiers, behind `executor()`, which closes what moves their bytes.

        What I/O that hangs may still touch is kept until that ends; the log says what.
        """
        self.sample = None
        with self.clearing.alone:
            pass  # what it drops is known to the SSD tier then, which deletes it before it is closed
        quarantine = self.quarantine
        in_time = not self.files or quarantine.wait(self.close_s)
        quarantine.afterwards(executor)
        with contextlib.ExitStack() as last_to_first:
            for tier in self.tiers.values():
                if tier.kind == "planes":
                    last_to_first.callback(tier.close)
                elif tier.kind == "memory":
                    last_to_first.callback(quarantine.afterwards, tier.close)
            if not self.files:
                return
            if in_time:
                for tier in self.files:
                    last_to_first.callback(tier.close)
                return
            held = quarantine.describe()
            _log.error(
                "closed with %d reads and %d writes unfinished: the memory that they may touch is kept (slots: %s), "
                "and so are the slab and the transport's threads, until they end. See the system log for the device",
                held["late_reads"],
                held["late_writes"],
                held["held_slots"],
            )
            for tier in self.files:
                quarantine.afterwards(tier.close_unfinished(writing=quarantine.writes > 0))
