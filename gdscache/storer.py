"""The worker side of stores: pages leave the GPU pool in the background, first into CPU slots, then on to the SSD.

The gatherer's thread copies pages out of the planes, takes their checksums and publishes them in the CPU tier; a page
that finds no slot there goes through the bounce reserve. What is meant for the SSD is handed to the writer. What was
accepted and is not done is bounded in bytes; more is dropped and counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from gdscache.config import StoreConfig
from gdscache.errors import EngineClosedError
from gdscache.layout import PageLayout
from gdscache.storing import StoreHandle
from gdscache.streams import Event
from gdscache.tiers.base import Lease
from gdscache.tiers.bounce import Bounce, Extents
from gdscache.tiers.index import Entry, Page, PageState
from gdscache.tiers.manager import TierManager
from gdscache.tiers.transfer import Mover
from gdscache.writer import BATCH_BYTES, Outgoing, SsdWriter, log_failure


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A store as accepted. `numbers[i]` is page `i`'s place in the handle; `sources` pins blocks that are ours."""

    handle: StoreHandle
    numbers: list[int]
    pages: list[Page]
    blocks: torch.Tensor
    epochs: list[int]
    after: Event
    sources: Lease | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Placed:
    """A page of a job and the slot that its bytes go to. `entry`: its reservation in the CPU tier, None in the bounce
    reserve; `copied`: the bytes are there already."""

    job: _Job
    i: int
    extents: Extents
    slot: int
    entry: Entry | None
    lease: Lease | None
    copied: bool
    to_ssd: bool


class Storer:
    """Accepts stores and carries them out. `drain` waits for what was accepted."""

    def __init__(
        self,
        manager: TierManager,
        mover: Mover,
        bounce: Bounce | None,
        writer: SsdWriter | None,
        layout: PageLayout,
        config: StoreConfig,
    ) -> None:
        self._manager = manager
        self._mover = mover
        self._bounce = bounce
        self._writer = writer
        self._extent_bytes = layout.extent_bytes
        self._queue = config.queue
        self._queued = 0  # pages accepted and not finished; the manager's lock guards it and the next
        self._jobs = 0  # stores whose blocks are still being read
        self._idle = threading.Condition(manager.lock)
        self._most = max(1, BATCH_BYTES // layout.extent_bytes)
        self._dropping = False
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "gdscache-gather")

    # -- accepting ---------------------------------------------------------------------------------------------------

    def store(
        self, pages: Sequence[Page], blocks: torch.Tensor, epochs: Sequence[int], after: Event, sources: Lease | None
    ) -> StoreHandle:
        """Accept pages for the tiers below; returns at once.

        `blocks`: int64 (pages, blocks_per_page), read after the event `after`; `epochs`: the manager's epoch of each
        page when its bytes were known good; `sources` ends when the blocks were read.
        """
        handle = StoreHandle(len(pages))
        manager = self._manager
        with manager.lock:
            if self._closed:
                if sources is not None:
                    manager.end(sources)
                raise EngineClosedError("the engine was closed meanwhile", "open a new one")
            manager.counts["stores", "requests"] += 1
            room = self._queue // self._extent_bytes - self._queued
            wanted: list[int] = []
            for number, page in enumerate(pages):
                if not self._missing(page):
                    manager.counts["stores", "present"] += 1
                    handle.finish(number)
                elif len(wanted) >= room:
                    manager.counts["dropped", "queue_full"] += 1
                    handle.finish(number, "queue_full")
                else:
                    wanted.append(number)
            if wanted:
                self._queued += len(wanted)
                self._jobs += 1
                chosen = [pages[n] for n in wanted]
                job = _Job(handle, wanted, chosen, blocks[wanted], [epochs[n] for n in wanted], after, sources)
                self._thread.submit(self._gather, job).add_done_callback(log_failure)
                return handle
        if sources is not None:
            manager.end(sources)
        handle.release_event.signal()
        return handle

    def drain(self, seconds: float | None) -> bool:
        """Wait until nothing that was accepted is unfinished; False when `seconds` pass before."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._queued and not self._jobs, seconds)

    def stats(self) -> dict[str, int]:
        with self._manager.lock:
            return {"bytes": self._queued * self._extent_bytes, "limit_bytes": self._queue}

    def close(self, *, drain: bool) -> None:
        """Refuse new stores, finish what was accepted (or drop it), then end the threads."""
        with self._manager.lock:
            self._closed = True
            self._dropping = not drain
        self._thread.shutdown(wait=True)
        if self._writer is not None:
            self._writer.close(drain=drain)

    # -- outcomes; the manager's lock is held --------------------------------------------------------------------------

    def _missing(self, page: Page) -> bool:
        """True when a tier lacks the page and nothing is bringing it."""
        cpu = self._manager.cpu
        return (cpu is not None and page.key not in cpu.index) or self._ssd_lacks(page)

    def _ssd_lacks(self, page: Page) -> bool:
        if self._writer is None or self._manager.ssd is None or page.key in self._writer.keys:
            return False
        return page.key not in self._manager.ssd.index

    def _settle(self, job: _Job, i: int, cause: str = "") -> None:
        """The last word on a page."""
        if cause:
            self._manager.counts["dropped", cause] += 1
        job.handle.finish(job.numbers[i], cause)
        self._queued -= 1
        self._idle.notify_all()

    def _release(self, placed: _Placed, cause: str = "") -> None:
        """The last word on a page that has a slot: its lease or bounce slot goes back."""
        if placed.lease is not None:
            self._manager.end(placed.lease)
        elif self._bounce is not None:
            self._bounce.stores.give([placed.slot])
        self._settle(placed.job, placed.i, cause)

    def _written(self, placed: _Placed, cause: str) -> None:
        if not cause:
            placed.job.handle.committed(placed.job.numbers[placed.i], "ssd")
            self._manager.counts["stored", "ssd"] += 1
        self._release(placed, cause)

    # -- gathering ---------------------------------------------------------------------------------------------------

    def _gather(self, job: _Job) -> None:
        at = 0
        try:
            while at < len(job.pages):
                at, round_ = self._place(job, at)
                self._fill(job, round_, last=at == len(job.pages))
        finally:
            event = self._mover.mark_stores()
            job.handle.release_event.signal(event)
            with self._manager.lock:
                for i in range(at, len(job.pages)):  # nothing but an exception leaves any
                    self._settle(job, i, "error")
            if job.sources is not None:
                if event is not None:
                    event.synchronize()
                self._manager.end(job.sources)
            with self._manager.lock:
                self._jobs -= 1
                self._idle.notify_all()

    def _place(self, job: _Job, start: int) -> tuple[int, list[_Placed]]:
        """Find slots for the next pages: where it stopped, and the pages that have one."""
        placed: list[_Placed] = []
        bounced: list[int] = []
        i, end = start, min(start + self._most, len(job.pages))
        slots = self._cpu_slots(job.pages[start:end])
        while i < end:
            with self._manager.lock:
                settled, page = self._place_one(job, i, slots, bounced)
            if page is not None:
                placed.append(page)
            elif not settled:  # it needs a bounce slot: wait for one, unless there is other work to do first
                if placed or self._bounce is None:
                    break
                bounced = self._bounce.stores.take(self._most, seconds=1.0)
                continue
            i += 1
        if bounced and self._bounce is not None:
            self._bounce.stores.give(bounced)
        if slots and self._manager.cpu is not None:
            with self._manager.lock:
                self._manager.cpu.index.free(slots)
        return i, placed

    def _cpu_slots(self, pages: Sequence[Page]) -> list[int]:
        """CPU slots for those of `pages` that the tier lacks, without evicting what comes before them."""
        cpu = self._manager.cpu
        if cpu is None:
            return []
        with self._manager.lock:
            lacking = sum(1 for page in pages if page.key not in cpu.index)
            return cpu.index.allocate_some(lacking, keep=cpu.index.family(pages))

    def _place_one(self, job: _Job, i: int, slots: list[int], bounced: list[int]) -> tuple[bool, _Placed | None]:
        """`(True, None)`: nothing to do, settled; `(False, None)`: a bounce slot is needed and `bounced` has none."""
        manager, page, cpu = self._manager, job.pages[i], self._manager.cpu
        if self._dropping or manager.epoch(page.namespace) != job.epochs[i]:
            self._settle(job, i, "closed" if self._dropping else "cleared")
            return True, None
        to_ssd = self._ssd_lacks(page)
        if cpu is not None:
            entry, copied = cpu.index.find(page.key), True
            if entry is None:
                if slots:
                    entry, copied = cpu.index.insert(page, slots.pop(), PageState.PENDING), False
            elif not to_ssd or entry.state is not PageState.VERIFIED:  # there, or on its way by somebody else
                self._settle(job, i)
                return True, None
            if entry is not None:
                lease = manager.lease("store")
                lease.add(cpu.index, entry)
                self._claim(page, to_ssd)
                return True, _Placed(job, i, cpu.extents, entry.slot, entry, lease, copied, to_ssd)
        if not to_ssd:
            self._settle(job, i, "cpu_full" if cpu is not None else "")
            return True, None
        if not bounced or self._bounce is None:
            return False, None
        self._claim(page, to_ssd)
        return True, _Placed(job, i, self._bounce.extents, bounced.pop(), None, None, False, True)

    def _claim(self, page: Page, to_ssd: bool) -> None:
        if to_ssd and self._writer is not None:
            self._writer.keys.add(page.key)

    def _fill(self, job: _Job, round_: Sequence[_Placed], *, last: bool) -> None:
        """Copy, sign and publish the pages of one round, and pass on what the SSD wants. `last`: the job's last round,
        whose blocks are free again as soon as they were read."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abandon, round_)
            fresh = [p for p in round_ if not p.copied]
            for extents in {id(p.extents): p.extents for p in fresh}.values():
                batch = [p for p in fresh if p.extents is extents]
                blocks, slots = job.blocks[[p.i for p in batch]], [p.slot for p in batch]
                moved = self._mover.gather(extents, slots, blocks, None, (job.after,), sums=True)
                if last and len(batch) == len(fresh):
                    job.handle.release_event.signal(moved.read_event)
                extents.checksums[slots] = moved.checksums()
            on_failure.pop_all()
        with self._manager.lock:
            outgoing = [out for out in map(self._publish, round_) if out is not None]
        if self._writer is not None:
            self._writer.put(outgoing)

    def _publish(self, placed: _Placed) -> Outgoing | None:
        job, page, cpu = placed.job, placed.job.pages[placed.i], self._manager.cpu
        fresh = placed.entry is not None and not placed.copied
        if fresh and cpu is not None and placed.entry is not None and cpu.index.commit(placed.entry):
            job.handle.committed(job.numbers[placed.i], "cpu")
            self._manager.counts["stored", "cpu"] += 1
        if placed.to_ssd:
            return Outgoing(page, job.epochs[placed.i], placed.extents, placed.slot, lambda c: self._written(placed, c))
        dropped = placed.entry is not None and placed.entry.dropped
        self._release(placed, "cleared" if dropped else "")
        return None

    def _abandon(self, round_: Iterable[_Placed]) -> None:
        """An exception ended a round: undo its reservations."""
        with self._manager.lock:
            for p in round_:
                if p.entry is not None and not p.copied and self._manager.cpu is not None:
                    self._manager.cpu.index.drop(p.entry)
                if p.to_ssd and self._writer is not None:
                    self._writer.keys.discard(p.job.pages[p.i].key)
                self._release(p, "error")
