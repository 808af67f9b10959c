"""TierManager: where each page is, under one lock. Plain Python over indexes; no bytes, no torch.

The lock guards every index. It is held for dictionary work only, never over I/O, a copy or a wait.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from gdscache.disk.status_page import Latencies
from gdscache.gate.busy_periods import BusyPeriods
from gdscache.gate.costs import Costs
from gdscache.index.retention import DEFAULT, Retention
from gdscache.pages.hit import CACHED, Reason, Told, joined
from gdscache.pages.keys import Page
from gdscache.runtime.calls import Caller
from gdscache.runtime.limited_log import LimitedLog
from gdscache.tiers.base import DurableTier, Lease, Tier
from gdscache.tiers.clear import PAUSE_S, Clearing
from gdscache.tiers.expiry import Expiry
from gdscache.tiers.fates import PageFates
from gdscache.tiers.measures import Measures, nested
from gdscache.tiers.pins import Pin, Pins
from gdscache.tiers.quarantine import Quarantine
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.tiers.cpu import CpuTier
    from gdscache.tiers.gpu import GpuTier
    from gdscache.tiers.ssd import SsdTier

_LOOKED = 256  # pages looked up under the lock at a time
WATCH_S = 0.05  # seconds between two checks of the directories' locks
_ORDER_LOST = "no memory for a change of an eviction order: it begins anew, and forgets which pages were used"
_log = logging.getLogger("gdscache")


class TierManager:
    """Chains the tiers: lookup, leases, counting. `clearing` drops pages; `LoadPlanner` plans loads over it.

    Many methods: each question about pages over all tiers is one, and each is asked under one lock.
    """

    # Limits, which tests may set for one manager.
    changes_kept = 1024  # changes that `bring_in` leaves waiting in an eviction order
    changes_at_once = 1024  # changes brought in under the lock at a time: some tenths of a millisecond
    close_s = 5.0  # seconds that close() waits for late I/O

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
        on_use: Sequence[Callable[[Sequence[bytes]], None]] = (),
        measured: bool = True,
        log: LimitedLog | None = None,
    ) -> None:
        """`tiers`: the fastest first, with unique names. `landing` is the first tier in memory, where pages of slower
        tiers are read to, and `landings` are the first ones of packed and of plain pages; `files` are the tiers of
        files; lookups see the `served` tiers. Each of `on_use` gets the keys of a prefix that a lookup found, tail
        first, under the lock: it only notes them. `measured`: loads are timed for `costs`."""
        self.lock = lock
        self.calls = Caller() if calls is None else calls
        self.tiers: dict[str, Tier] = {tier.name: tier for tier in tiers}
        # for callers that know the tiers' names: nothing is decided by these three
        self.gpu = cast("GpuTier | None", self.tiers.get("gpu"))
        self.cpu = cast("CpuTier | None", self.tiers.get("cpu"))
        self.ssd = cast("SsdTier | None", self.tiers.get("ssd"))
        self.served = [(name, tier) for name, tier in self.tiers.items() if tier.served]
        memories = [tier for tier in tiers if tier.kind == "memory"]
        self._landings = {tier.plain: tier for tier in reversed(memories)}
        self.landings = [*self._landings.values()][::-1]
        self.landing = next(iter(self.landings), None)
        self.files = [cast("DurableTier", tier) for tier in tiers if tier.kind == "files"]
        self._watches = any(tier.served for tier in self.files)  # else lookups spare a post to a thread, some 2 ms
        self.counts: Counter[tuple[str, str]] = Counter()
        self._on_use = on_use
        self._leases: set[Lease] = set()
        self.clearing = Clearing(lock, self.tiers, self.files)
        self.costs = Costs([name for name, tier in self.tiers.items() if tier.kind == "memory"])
        self.busy = BusyPeriods(self._note_busy_period)
        self.latencies = Latencies()
        self.measures = Measures({name: tier.kind for name, tier in self.tiers.items()})
        self.expiry = Expiry(self, wall_clock)
        self.pins = Pins(self, clock)
        self.measured = measured
        self.log = LimitedLog(clock) if log is None else log
        # writes lines of the log that are due: for threads that no caller waits for
        self.tell: Callable[[], object] = self.log.flush
        self.sample: Callable[[], str] | None = None  # the log's next line on missing pages; None: written
        self.fates = PageFates(sum(tier.index.slots for tier in tiers))
        for tier in tiers:
            tier.index.on_evict = self.fates.evict
            tier.index.on_loss = functools.partial(self.log.say, _log, logging.WARNING, "eviction order", _ORDER_LOST)
        self.quarantine = Quarantine(lock, clock, self.log) if quarantine is None else quarantine
        self.timeline = timeline
        self._clock = clock
        # time of the last check of the locks, and whether the next is posted
        self._watched, self._watching = -math.inf, False
        if self.landing is not None:  # an engine adds its other memories
            self.quarantine.add_memory(self.landing.name, self.landing.index.slots)

    def landing_of(self, tier: Tier) -> Tier:
        """The tier in memory where pages of this tier are read to: it has the same extents. There has to be one."""
        return self._landings[tier.plain]

    # -- looking --------------------------------------------------------------------------------------------------

    def lookup(self, pages: Sequence[Page], start: int) -> list[str]:
        """The fastest tier of each page from `start` on, up to the first miss. Counts a use of each page
        found, and of the pages before `start`, which the caller has from an earlier lookup.

        Moves nothing and takes no lease: the next load or store brings pages to faster tiers.
        """
        with self.lock:
            self.expire(pages)
            keys = [p.key for p in pages]
            found, hidden = self._cut_hidden(self._find(keys[start:]), pages, start)
            del keys[start + len(found) :]
            keys.reverse()
            for name, tier in self.served:
                hits = found.count(name)
                tier.touch(keys)
                if hits:
                    self.counts["hits", name] += hits
            for use in self._on_use:
                use(keys)
            self.counts["lookups", "requests"] += 1
            self.counts["lookups", "pages"] += len(pages) - start
            missing = len(pages) - start - len(found) - hidden
            cause = "expired" if missing > 0 and self.expiry.was(pages[start + len(found)].key) else "absent"
            self.counts["misses", cause] += missing
            return found

    def told(self, keys: Sequence[bytes]) -> list[Told]:
        """The state of each page: its tier, or why no lookup finds it. Counts nothing."""
        found: list[Told] = []
        for at in range(0, len(keys), _LOOKED):
            with self.lock:
                silent = self.quarantine.absent()
                found += [self._told(key, silent) for key in keys[at : at + _LOOKED]]
        return found

    def _told(self, key: bytes, silent: str) -> Told:
        """`silent`: not empty while ranks do not answer, so that nothing is loaded."""
        quarantine, told = self.quarantine, None
        for name, tier in self.tiers.items():
            if not tier.index.has(key):
                if told is None and key in tier.index:  # incomplete
                    told = Told("storing", name)
                continue
            slot = tier.index.slot(key)
            if silent or (slot is not None and self.hidden(name, slot)):
                cause = quarantine.cause if quarantine.off or silent else "switched_off"
                told = Told("off", name, cause) if quarantine.refuses(name) else Told("late", name)
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
        """Why the pages from number `first` on were not in a lookup's hit. The gate left the first `declined` of them
        to be computed. Of the others, a cached page is `behind` if a page before it is not cached; else it was stored
        after the lookup. `start`: the token that the first of `pages` begins with."""
        told, gap = self.told([page.key for page in pages[first:]]), False
        for at, one in enumerate(told):
            if one.cause != CACHED:
                gap = gap or at >= declined
            elif at < declined or gap:
                told[at] = Told("gate" if at < declined else "behind", one.tier)
            else:
                with self.lock:
                    told[at] = Told("stored_since", one.tier, self.fates.told(pages[first + at].key).cause)
        return joined(start + first * page_tokens, page_tokens, told)

    def missed(self, pages: int) -> None:
        """Count the pages behind a hybrid model's hit as misses: only the hit's pages are passed to `lookup`."""
        with self.lock:
            self.counts["lookups", "pages"] += pages
            self.counts["misses", "absent"] += pages

    def _cut_hidden(self, found: list[str], pages: Sequence[Page], start: int) -> tuple[list[str], int]:
        """`found` up to the first page that quarantine hides, and the number of pages cut off."""
        seen = self._first_hidden(found, pages, start)
        hidden = len(found) - seen
        if hidden:
            off = self.quarantine.refuses(found[seen])
            self.counts["misses", self.quarantine.cause if off else "quarantined"] += hidden
        return found[:seen], hidden

    def _first_hidden(self, found: Sequence[str], pages: Sequence[Page], start: int) -> int:
        if self.quarantine.hiding:
            if self.quarantine.absent():  # ranks do not answer
                return 0
            for i, name in enumerate(found):
                slot = self.tiers[name].index.slot(pages[start + i].key)
                if slot is not None and self.hidden(name, slot):
                    return i
        return len(found)

    def watch(self) -> None:
        """Stop the tiers of files if another process may use one. Costs an `os.stat` or more, each of which releases
        the interpreter's lock: call it without the manager's lock, in a thread that no caller waits for."""
        self._watched, self._watching = self._clock(), False
        for tier in self.files:
            if tier.served and not self.quarantine.stopped and (why := tier.lock_lost()):
                self.quarantine.stop(why)

    def have_watched(self) -> None:
        """Post a run of `watch` to a thread of the engine, if the last one is more than 50 ms ago. Never waits."""
        if not self._watching and self._watches and self._clock() - self._watched >= WATCH_S:
            self._watching = True
            self.calls.post(self.watch)

    def visible(self, keys: Sequence[bytes]) -> bytes:
        """1 for each page that a served tier has, else 0. Counts and expires nothing."""
        with self.lock:
            if self.quarantine.hiding and self.quarantine.absent():
                return bytes(len(keys))
            masks = [self._visible_on(name, tier, keys) for name, tier in self.served]
        return masks[0] if len(masks) == 1 else bytes(map(any, zip(*masks, strict=True)))

    def _visible_on(self, name: str, tier: Tier, keys: Sequence[bytes]) -> bytes:
        mask = tier.index.visible(keys)
        if tier.kind != "files" or not self.quarantine.hiding:
            return mask
        slots = (tier.index.slot(key) if seen else None for seen, key in zip(mask, keys, strict=True))
        return bytes(slot is not None and not self.hidden(name, slot) for slot in slots)

    def peek(self, pages: Sequence[Page], *, unserved: bool = False) -> list[str]:
        """The answer of `lookup` from the first page on, without counting a use or a miss. Like it, this drops expired
        pages. `unserved`: also from tiers that lookups do not see."""
        with self.lock:
            self.expire(pages)
            found = self._find([p.key for p in pages], unserved=unserved)
            return found[: self._first_hidden(found, pages, 0)]

    def _find(self, keys: Sequence[bytes], *, unserved: bool = False) -> list[str]:
        found: list[str] = []
        for at in range(0, len(keys), _LOOKED):
            some = keys[at : at + _LOOKED]
            found += self._find_some(some, unserved)
            if len(found) < at + len(some):
                break
        return found

    def _find_some(self, keys: Sequence[bytes], unserved: bool) -> list[str]:
        masks: list[bytes] = []
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
                faster = mask.find(1, at, stop)  # a slower tier can only serve the pages before it
                stop = stop if faster < 0 else faster
            else:
                break
        return found

    def hidden(self, tier: str, slot: int) -> bool:
        return self.quarantine.hiding and self.tiers[tier].kind == "files" and self.quarantine.hides(tier, slot)

    # -- pins and retentions -----------------------------------------------------------------------------------------

    def expire(self, pages: Sequence[Page] = ()) -> None:
        """End pins whose time is up, and drop expired pages: all expired ones of `pages`, and a few others.

        Called before pages or slots are looked for. The lock must be held.
        """
        self.pins.end_due()
        self.expiry.run(pages)

    def retain(self, pages: Sequence[Page], retention: Retention = DEFAULT) -> None:
        """Pages are stored (again): drop expired ones, and give the others the greater priority and the later expiry on
        every tier that has them.

        Called first in every store. The lock must be held.
        """
        self.expire(pages)
        self.expiry.stored(pages, retention)

    def pin(self, pages: Sequence[Page], seconds: float, page_tokens: int) -> Pin:
        """Keep the leading pages that are cached from eviction; see `Pin`."""
        with self.lock:
            self.expire(pages)
            return self.pins.begin(pages, seconds, page_tokens)

    # -- leases ---------------------------------------------------------------------------------------------------

    def lease(self, owner: str) -> Lease:
        """A lease without pages. The lock must be held."""
        lease = Lease(owner)
        self._leases.add(lease)
        return lease

    def end(self, lease: Lease) -> None:
        with self.lock:
            lease.end()
            self._leases.discard(lease)

    # -- after the calls -------------------------------------------------------------------------------------------

    def measure_for(self, costs: Costs) -> None:
        """Measure loads for `costs` from now on, as for a gate that several managers share."""
        self.busy.tell()  # times so far are for the costs so far
        self.costs = costs

    def learn(self) -> None:
        """Add measured times to the costs, and write lines of the log: for threads that no caller waits for."""
        if self.busy.untold:
            time.sleep(PAUSE_S)  # as in `bring_in`
            self.busy.tell()
        self.tell()

    def bring_in(self) -> None:
        """`learn`, and bring the eviction orders and the filter of evicted pages nearly up to date: for threads that no
        caller waits for, after work on many pages.

        Each step begins with a pause, in which the caller that waited for that work gets the interpreter.
        """
        self.learn()
        while self.fates.waiting:
            time.sleep(PAUSE_S)
            with self.lock:
                self.fates.bring_in(self.changes_at_once)
        for tier in self.tiers.values():
            while tier.index.orders.waiting > self.changes_kept:
                time.sleep(PAUSE_S)
                with self.lock:
                    tier.index.orders.bring_in(self.changes_at_once)

    # -- figures --------------------------------------------------------------------------------------------------

    def _note_busy_period(self, tier: str, nbytes: int, seconds: float) -> None:
        self.latencies.note("read", tier, seconds)
        self.costs.observe_load(tier, nbytes, seconds)

    def count(self, group: str, name: str, n: int = 1) -> None:
        with self.lock:
            self.counts[group, name] += n

    def snapshot(self) -> dict[tuple[str, str], int]:
        with self.lock:
            return dict(self.counts)

    def check(self) -> list[str]:
        """Contradictions in any tier. For a quiet engine: slots that work in flight has taken look lost."""
        with self.clearing.alone:  # a clear holds slots outside the index
            return [f"{name}: {p}" for name, tier in self.tiers.items() for p in tier.check(self.lock)]

    def _describe(self, lease: Lease) -> dict[str, Any]:
        left = self.pins.seconds_left(lease)
        told = {"owner": lease.owner, "pages": len(lease)}
        return told if left is None else {**told, "seconds_left": left}

    def stats(self) -> dict[str, Any]:
        self.busy.tell()
        with self.lock:
            self.expire()
            groups = nested(dict(sorted(self.counts.items())))
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
            for tier in self.files[:1]:  # the figures cover all tiers of files
                tiers[tier.name]["quarantine"] = self.quarantine.describe()
            leases = [self._describe(lease) for lease in self._leases]
            measured = self.measures.describe()
            speeds = self.costs.bandwidths()
            groups["tokens"] = self.measures.tokens.describe()
            return {"tiers": tiers, **groups, "leases": leases, "measured": measured, "bytes_per_second": speeds}

    def close(self, close_executor: Callable[[], None] = lambda: None) -> None:
        """Close the executor of the tiers' moves, and the tiers. While I/O hangs, the executor and the memory and files
        that this I/O may touch stay open, perhaps beyond this call; the log lists them."""
        self.sample = None
        with self.clearing.alone:
            pass  # wait for a clear: the SSD tier deletes the dropped pages before it is closed
        quarantine = self.quarantine
        in_time = not self.files or quarantine.wait(self.close_s)
        quarantine.afterwards(close_executor)
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
