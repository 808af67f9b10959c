"""TierManager: which page is where, and what may happen to it. Plain Python over indexes; no bytes, no torch.

One lock guards every index. It is held for dictionary work only, never over I/O, a copy or a wait.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gdscache.tiers.base import Lease, Tier
from gdscache.tiers.index import Entry, Page, PageIndex, PageState

if TYPE_CHECKING:
    from gdscache.tiers.cpu import CpuTier
    from gdscache.tiers.gpu import GpuTier
    from gdscache.tiers.ssd import SsdTier

_NAMESPACE_EPOCHS_KEPT = 4096


class PageStatus(enum.Enum):
    """How a page of a load ended."""

    PENDING = "pending"
    LOADED = "loaded"
    CHECKSUM = "checksum"  # the bytes are not what was stored
    SHORT_READ = "short_read"
    IO_ERROR = "io_error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ABORTED = "aborted"  # the load itself broke off; see its exception


@dataclasses.dataclass(slots=True)
class Filling:
    """A CPU slot that a load reads into, for other loads to wait on; `status` is that of the page there."""

    status: PageStatus = PageStatus.PENDING


@dataclasses.dataclass(slots=True)
class PageTask:
    """One page of a load: where its bytes come from, and the CPU slot that they pass through and stay in, if any."""

    number: int
    page: Page
    tier: str
    source: Entry
    target: Entry | None = None
    filling: Filling | None = None  # another load reads into `source`: wait for it
    status: PageStatus = PageStatus.PENDING


@dataclasses.dataclass(slots=True)
class LoadPlan:
    """The pages that a load will move, in order, and the lease on everything that it touches."""

    tasks: list[PageTask]
    lease: Lease


class TierManager:
    """Chains the tiers: lookup, the two phases of loads and stores, dropping, clearing, counting."""

    def __init__(self, lock: threading.RLock, gpu: GpuTier | None, cpu: CpuTier | None, ssd: SsdTier | None) -> None:
        self.lock = lock
        self.gpu, self.cpu, self.ssd = gpu, cpu, ssd
        self.tiers: dict[str, Tier] = {t.name: t for t in (gpu, cpu, ssd) if t is not None}
        self.counts: Counter[tuple[str, str]] = Counter()
        self._leases: set[Lease] = set()
        self._filling: dict[Entry, Filling] = {}
        self._filled = threading.Condition(lock)
        self._epoch = 0
        self._epochs: dict[bytes, int] = {}
        self._rates: dict[str, float] = {}

    # -- looking --------------------------------------------------------------------------------------------------

    def lookup(self, pages: Sequence[Page], start: int) -> list[str]:
        """The fastest tier of each page from `start` on, up to the first miss. Counts a use of what was found."""
        with self.lock:
            found = self._find(pages, start)
            keys = [p.key for p in reversed(pages[: start + len(found)])]
            self._touch(keys)
            self.counts["lookups", "requests"] += 1
            self.counts["lookups", "pages"] += len(pages) - start
            for name, n in Counter(found).items():
                self.counts["hits", name] += n
            self.counts["misses", "absent"] += len(pages) - start - len(found)
            return found

    def _find(self, pages: Sequence[Page], start: int) -> list[str]:
        levels = [(name, tier.index.has) for name, tier in self.tiers.items()]
        found = []
        for page in pages[start:]:
            for name, has in levels:
                if has(page.key):
                    found.append(name)
                    break
            else:
                break
        return found

    def _touch(self, keys: Sequence[bytes]) -> None:
        for tier in (self.gpu, self.cpu):
            if tier is not None:
                tier.index.touch(keys)
        if self.ssd is not None:
            self.ssd.touch(keys)

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

    def epoch(self, namespace: bytes) -> int:
        """Grows when the namespace is cleared: what was accepted in an older epoch must not become visible."""
        return self._epoch + self._epochs.get(namespace, 0)

    def quarantine(self, lease: Lease, entries: Iterable[Entry]) -> None:
        """Keep pages pinned for good: I/O that missed its deadline may still write to their slots."""
        with self.lock:
            kept = self.lease("quarantine")
            for entry in entries:
                kept.add(lease.entries[entry], entry)

    # -- loading --------------------------------------------------------------------------------------------------

    def plan_load(self, pages: Sequence[Page], owner: str, *, pass_through: bool = True) -> LoadPlan:
        """Lease the consecutive pages that lower tiers hold, and reserve CPU slots for those of the SSD, in one step.

        What finds no CPU slot passes through the bounce reserve, or is left out. Never waits.
        """
        with self.lock:
            lease, tasks = self.lease(owner), []
            for number, page in enumerate(pages):
                task = self._source(number, page)
                if task is None:
                    break
                lease.add(self.tiers[task.tier].index, task.source)
                tasks.append(task)
            self._reserve_targets(tasks, lease)
            if not pass_through:
                for task in tasks:
                    if task.tier == "ssd" and task.target is None:
                        lease.remove(task.source)
                tasks = [t for t in tasks if t.source in lease.entries]
            return LoadPlan(tasks, lease)

    def _source(self, number: int, page: Page) -> PageTask | None:
        cached = self.cpu.index.find(page.key) if self.cpu is not None else None
        if cached is not None and cached.state is not PageState.PENDING:
            return PageTask(number, page, "cpu", cached)
        if cached is not None and cached in self._filling:
            return PageTask(number, page, "cpu", cached, filling=self._filling[cached])
        stored = self.ssd.index.get(page.key) if self.ssd is not None else None
        return None if stored is None else PageTask(number, page, "ssd", stored)

    def _reserve_targets(self, tasks: Sequence[PageTask], lease: Lease) -> None:
        if self.cpu is None:
            return
        index = self.cpu.index
        wanted = [t for t in tasks if t.tier == "ssd" and t.page.key not in index]
        for task, slot in zip(wanted, index.allocate_some(len(wanted)), strict=False):
            task.target = index.insert(task.page, slot, PageState.PENDING)
            lease.add(index, task.target)
            self._filling[task.target] = Filling()

    def finish_page(self, task: PageTask, status: PageStatus) -> None:
        """The verdict on one page: publish its CPU copy, or drop the page from every tier that it came through."""
        with self.lock:
            task.status = status
            if task.target is not None:
                filling = self._filling.pop(task.target, None)
                if filling is not None:
                    if status in (PageStatus.LOADED, PageStatus.CANCELLED):  # its bytes were read and are good
                        self.cpu_index.commit(task.target)
                        filling.status = PageStatus.LOADED
                    else:
                        self.cpu_index.drop(task.target)
                        filling.status = status
                    self._filled.notify_all()
            if status is PageStatus.LOADED:
                self.counts["loaded", task.tier] += 1
                return
            self.counts["misses", status.value] += 1
            if status in (PageStatus.CHECKSUM, PageStatus.SHORT_READ, PageStatus.IO_ERROR):
                self.tiers[task.tier].index.drop(task.source)

    def await_filling(self, filling: Filling, seconds: float) -> PageStatus:
        """Wait up to `seconds` until another load has its verdict on a page; `DEADLINE` when it has none by then."""
        with self._filled:
            if self._filled.wait_for(lambda: filling.status is not PageStatus.PENDING, seconds):
                return filling.status
            return PageStatus.DEADLINE

    @property
    def cpu_index(self) -> PageIndex:
        """The CPU tier's index, where the caller knows that there is one."""
        assert self.cpu is not None, "no CPU tier"
        return self.cpu.index

    # -- removing -------------------------------------------------------------------------------------------------

    def clear(self, namespace: bytes | None = None) -> dict[str, int]:
        """Drop every page (of one namespace) from every tier, durably; the pages removed by tier."""
        with self.lock:
            if namespace is None:
                self._epoch += 1
            else:
                if len(self._epochs) >= _NAMESPACE_EPOCHS_KEPT:  # forget them all: a newer epoch for everybody
                    self._epoch += max(self._epochs.values())
                    self._epochs.clear()
                self._epochs[namespace] = self._epochs.get(namespace, 0) + 1
            removed = {}
            for name, tier in self.tiers.items():
                removed[name] = 0
                for key in tier.index.select(namespace):
                    entry = tier.index.find(key)
                    if entry is not None:
                        removed[name] += entry.state is not PageState.PENDING
                        tier.index.drop(entry)
        if self.ssd is not None:
            self.ssd.commit(())
        return removed

    # -- figures --------------------------------------------------------------------------------------------------

    def count(self, group: str, name: str, n: int = 1) -> None:
        with self.lock:
            self.counts[group, name] += n

    def observe(self, tier: str, nbytes: int, seconds: float) -> None:
        """Feed the load estimate: `nbytes` came from `tier` in `seconds`."""
        if nbytes and seconds > 0:
            with self.lock:
                rate = nbytes / seconds
                self._rates[tier] = 0.75 * self._rates.get(tier, rate) + 0.25 * rate

    def estimate(self, found: Iterable[str], page_bytes: int) -> float | None:
        """Seconds that loading pages of these tiers would take by what was measured; None before all of them were."""
        total = 0.0
        with self.lock:
            for name, n in Counter(found).items():
                if name != "gpu":
                    if name not in self._rates:
                        return None
                    total += n * page_bytes / self._rates[name]
        return total

    def check(self, fix: bool = False) -> list[str]:
        """What disagrees in any tier. Meant for a quiet engine: work in flight holds slots of its own."""
        return [f"{name}: {p}" for name, tier in self.tiers.items() for p in tier.check(self.lock, fix=fix)]

    def stats(self) -> dict[str, Any]:
        with self.lock:
            groups: dict[str, dict[str, int]] = {}
            for (group, name), n in sorted(self.counts.items()):
                groups.setdefault(group, {})[name] = n
            tiers = {
                name: {
                    "capacity_bytes": tier.capacity,
                    "slots": tier.index.slots,
                    "pages": len(tier.index),
                    "free_slots": tier.index.free_slots,
                    "evictions": tier.index.evictions,
                    **tier.describe(),
                }
                for name, tier in self.tiers.items()
            }
            leases = [{"owner": lease.owner, "pages": len(lease.entries)} for lease in self._leases]
            return {"tiers": tiers, **groups, "leases": leases, "bytes_per_second": dict(self._rates)}

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.close()
