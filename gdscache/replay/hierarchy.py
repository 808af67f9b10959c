"""All tiers of an engine with virtual time: its real index, policies and store plan, and processes in place of threads.

What is decided here is decided by the engine's own code (`TierManager`, `StorePlanner`, `Admission`, ...). What the
threads of the loader, the storer and the writer do around it is said once more, as processes that wait for a model of
the machine instead of for bytes: the same steps, in the same order, as many pages at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

from gdscache.config import Config
from gdscache.keys import Page
from gdscache.replay.clock import Clock, Disk, Done, Machine, Pipe, Process
from gdscache.replay.tiers import ModelGpu, ModelSsd, ModelTier
from gdscache.tiers.admission import open_admission
from gdscache.tiers.base import Lease, SlotPool
from gdscache.tiers.manager import LoadPlan, PageStatus, TierManager
from gdscache.tiers.pages import Entry
from gdscache.tiers.promotion import new_promotion
from gdscache.tiers.store_plan import BATCH_BYTES, Placed, StoreJob, StorePlanner, round_pages

CHUNK_BYTES = 32 << 20  # of the SSD, that go on to the GPU while the next are read


class Ledger:
    """What became of the pages of all stores: a receipt, as the planner wants one."""

    def __init__(self) -> None:
        self.offered = 0
        self.finished = 0
        self.stored: Counter[str] = Counter()  # by tier
        self.dropped: Counter[str] = Counter()  # by cause

    def committed(self, page: int, tier: str) -> None:
        self.stored[tier] += 1

    def finish(self, page: int, cause: str = "") -> None:
        self.finished += 1
        if cause:
            self.dropped[cause] += 1


class Moved:
    """Pages that moved, by tier: read (by loads, and by writes of a page that lies in the CPU tier) and written."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.promoted = 0  # from the SSD, into the CPU tier
        self.demoted = 0  # from the CPU tier on to the SSD, without a store
        self.to_ssd = 0  # handed to the writer
        self.not_written: Counter[str] = Counter()  # ... and dropped there, by cause
        self.most_queued = 0  # pages accepted and not finished, those on their way to the SSD left out
        self.most_to_ssd = 0  # pages on their way to the SSD


def _nothing() -> None:
    pass


class Hierarchy:
    """The tiers of `config`. `own_pool`: the engine has a GPU pool (`sequence`); else its planes are attached.

    The SSD's route is through host memory, unless the config says `direct`.
    """

    def __init__(self, config: Config, machine: Machine, clock: Clock, *, own_pool: bool = False) -> None:
        layout = config.model.layout()
        self.config = config
        self.clock = clock
        self.extent_bytes, self.page_bytes = layout.extent_bytes, layout.page_bytes
        extent = self.extent_bytes
        gpu = ModelGpu("gpu", config.gpu.capacity // layout.page_bytes, layout.page_bytes, config.gpu.eviction)
        self.gpu = gpu if own_pool else None
        self.cpu = self.ssd = None
        if config.cpu is not None:
            self.cpu = ModelTier("cpu", config.cpu.capacity // extent, extent, config.cpu.eviction)
        if config.ssd is not None:
            self.ssd = ModelSsd(config.ssd.capacity // extent, extent, config.ssd.eviction, config.ssd.reserve)
        self.lock = threading.RLock()
        promotion = None
        if config.ssd is not None and self.cpu is not None:
            promotion = new_promotion(config.ssd.promotion, self.cpu.index.slots)
        self.manager = TierManager(
            self.lock,
            cast(Any, self.gpu),
            cast(Any, self.cpu),
            cast(Any, self.ssd),
            wall_clock=clock.time,
            clock=clock.time,
            promotion=promotion,
        )
        self.admission = None
        if config.ssd is not None and self.ssd is not None:
            self.admission = open_admission(config.ssd, self.ssd.index.slots, extent, clock.time)
        marks = (0.0, 0.0) if config.cpu is None else (config.cpu.low_watermark, config.cpu.high_watermark)
        self.planner = StorePlanner(self.manager, config.store, extent, self.admission, marks)
        self.planner.send = self._send
        self.ledger = Ledger()
        self.moved = Moved()
        self._keep = config.ssd is None or config.ssd.route != "direct"
        self._bounce = None
        if config.ssd is not None:
            half = config.host_buffer // extent // 2
            self._bounce = SlotPool(range(half, 2 * half))
        self._freed = Done(clock)  # a slot of the bounce reserve came back
        self._round, self._batch = round_pages(extent), max(1, BATCH_BYTES // extent)
        self._chunk = max(1, CHUNK_BYTES // extent)
        self._disk = Disk(clock, machine.ssd_read, machine.ssd_write, machine.latency)
        self._up, self._down = Pipe(clock, machine.link), Pipe(clock, machine.link)
        self._jobs: deque[tuple[StoreJob, Lease | None]] = deque()
        self._gathering = False
        self._ready: deque[Placed] = deque()
        self._writing = False
        self._loads = 0
        self._loads_waiting: deque[Done] = deque()
        self.gathered: Callable[[], None] = _nothing  # the GPU pages of a store are not read any more
        self._landing: dict[int, Done] = {}  # id of a task that fills a CPU slot -> the end of its load

    # -- loads -------------------------------------------------------------------------------------------------------

    def plan_load(self, pages: Sequence[Page]) -> LoadPlan:
        """Lease what a load will move; `load` moves it."""
        plan = self.manager.plan_load(pages, "load", keep=self._keep)
        targets = [task for task in plan.tasks if task.target is not None]
        if targets:
            done = Done(self.clock)
            self._landing.update((id(task), done) for task in targets)
        return plan

    def load(self, plan: LoadPlan) -> Process:
        """Move the pages of a plan and end it. At most `load.threads` loads move at once, the first planned first."""
        if self._loads >= self.config.load.threads:
            turn = Done(self.clock)
            self._loads_waiting.append(turn)
            yield turn
        else:
            self._loads += 1
        tasks = plan.tasks
        resident = sum(1 for t in tasks if t.tier == "cpu" and t.filling is None)
        from_ssd = sum(1 for t in tasks if t.tier == "ssd")
        reads = [
            (n, self._disk.read(n * self.extent_bytes))
            for n in (min(self._chunk, from_ssd - at) for at in range(0, from_ssd, self._chunk))
        ]
        up = self._up.move(resident * self.page_bytes) if resident else self.clock.past
        for n, read in reads:
            yield read
            up = self._up.move(n * self.page_bytes)
        yield up
        shared = 0
        for task in tasks:
            if task.filling is not None:
                shared += 1
                landing = self._landing.get(id(task.filling))
                if landing is not None:
                    yield landing
        if shared:
            yield self._up.move(shared * self.page_bytes)
        self._landed(plan)
        if self._loads_waiting:
            self._loads_waiting.popleft().fire()
        else:
            self._loads -= 1

    def _landed(self, plan: LoadPlan) -> None:
        moved, landing = self.moved, None
        for task in plan.tasks:
            moved.read[task.tier] += 1
            if task.target is not None:
                moved.promoted += 1
                landing = self._landing.pop(id(task))
        self.manager.finish_pages(plan.tasks, PageStatus.LOADED)
        self.manager.end(plan.lease)
        if landing is not None:
            landing.fire()

    # -- stores ------------------------------------------------------------------------------------------------------

    def store(self, pages: Sequence[Page], sources: Lease | None = None) -> None:
        """Accept pages for the tiers below, as `Storer.store`."""
        ledger, planner = self.ledger, self.planner
        ledger.offered += len(pages)
        wanted = planner.accept(pages, ledger)
        self.moved.most_queued = max(self.moved.most_queued, planner.queued - len(planner.keys))
        if not wanted:
            if sources is not None:
                self.manager.end(sources)
            return
        epoch = self.manager.clearing.epoch(pages[0].namespace)
        job = StoreJob(ledger, wanted, [pages[n] for n in wanted], [epoch] * len(wanted))
        self._jobs.append((job, sources))
        if not self._gathering:
            self._gathering = True
            self.clock.start(self._gather())

    def _gather(self) -> Process:
        """The gatherer's thread."""
        while self._jobs:
            job, sources = self._jobs.popleft()
            self.planner.begin()
            at = 0
            while at < len(job.pages):
                round_: list[Placed] = []
                at = yield from self._place(job, at, round_)
                fresh = sum(1 for placed in round_ if not placed.copied)
                if fresh:
                    yield self._down.move(fresh * self.page_bytes)
                self._fill(round_)
            if sources is not None:
                self.manager.end(sources)
                self.gathered()
        self._gathering = False

    def _place(self, job: StoreJob, start: int, placed: list[Placed]) -> Generator[Done, None, int]:
        """Find slots for the next pages, `placed`; where it stopped."""
        planner, bounced = self.planner, list[int]()
        i, end = start, min(start + self._round, len(job.pages))
        slots = planner.cpu_slots(job.pages[start:end])
        while i < end:
            settled, page = planner.place(job, i, slots, bounced)
            if page is not None:
                placed.append(page)
            elif not settled:
                if placed or self._bounce is None:
                    break
                bounced = self._bounce.try_take(self._round)
                while not bounced and not planner.behind:
                    yield self._freed
                    bounced = self._bounce.try_take(self._round)
                if bounced:
                    continue
                planner.turn_away(job, i)
            i += 1
        if bounced:
            self._give_bounce(bounced)
        planner.free(slots)
        return i

    def _fill(self, round_: Sequence[Placed]) -> None:
        moved = self.moved
        for placed in round_:
            if not placed.copied and placed.entry is not None:
                moved.written["cpu"] += 1
        self._send_on([placed for placed in round_ if self.planner.publish(placed)])
        self.planner.clean()

    # -- on to the SSD -----------------------------------------------------------------------------------------------

    def _send(self, pages: Sequence[Placed]) -> None:
        """The planner sends pages of the CPU tier, without a store."""
        self.moved.demoted += len(pages)
        self._send_on(pages)

    def _send_on(self, pages: Sequence[Placed]) -> None:
        if not pages:
            return
        self.moved.to_ssd += len(pages)
        self.moved.most_to_ssd = max(self.moved.most_to_ssd, len(self.planner.keys))
        self._ready.extend(pages)
        if not self._writing:
            self._writing = True
            self.clock.call(self.clock.now, lambda: self.clock.start(self._write()))

    def _write(self) -> Process:
        """The writer's thread: a batch is under way while another one begins."""
        flying: deque[tuple[list[tuple[Placed, Entry]], float, Done]] = deque()
        while True:
            batch = [self._ready.popleft() for _ in range(min(self._batch, len(self._ready)))]
            if batch:
                writes = self._reserve(batch)
                if writes:
                    flying.append((writes, self.clock.now, self._disk.write(len(writes) * self.extent_bytes)))
            if flying and (len(flying) > 1 or not batch):
                writes, begun, done = flying.popleft()
                yield done
                self._commit(writes, late=self.clock.now - begun > self.config.store.deadline)
            elif not batch:
                break
        self._writing = False

    def _reserve(self, batch: Sequence[Placed]) -> list[tuple[Placed, Entry]]:
        assert self.ssd is not None, "a page for the SSD tier without one"
        entries = {entry.key: entry for entry in self.ssd.reserve([placed.page for placed in batch])}
        writes = []
        for placed in batch:
            entry = entries.get(placed.page.key)
            if entry is None:
                self._finish(placed, "ssd_full")
            else:
                writes.append((placed, entry))
        return writes

    def _commit(self, writes: Sequence[tuple[Placed, Entry]], *, late: bool) -> None:
        assert self.ssd is not None, "a page for the SSD tier without one"
        index, moved = self.ssd.index, self.moved
        for placed, entry in writes:
            moved.written["ssd"] += 1
            moved.read["cpu"] += placed.entry is not None
            if late:
                index.drop(entry)
            else:
                index.commit(entry)
        for placed, entry in writes:
            index.release(entry)
            self._finish(placed, "deadline" if late else "")

    def _finish(self, placed: Placed, cause: str) -> None:
        if cause:
            self.moved.not_written[cause] += 1
        self.planner.written(placed, cause)
        self.planner.give_back(placed)
        if placed.entry is None:
            self._give_bounce([placed.slot])

    def _give_bounce(self, slots: list[int]) -> None:
        assert self._bounce is not None, "a bounce slot without a reserve"
        self._bounce.give(slots)
        freed, self._freed = self._freed, Done(self.clock)
        freed.fire()

    # -- checks ------------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What does not add up, once everything that was accepted is done."""
        manager, moved, ledger = self.manager, self.moved, self.ledger
        found = manager.check()
        found += [f"a lease of {lease['pages']} pages is left: {lease['owner']}" for lease in manager.stats()["leases"]]
        if self.planner.queued or self.planner.keys:
            found.append(f"{self.planner.queued} pages are queued and {len(self.planner.keys)} on their way")
        if ledger.offered != ledger.finished:
            found.append(f"{ledger.offered} pages were offered, {ledger.finished} have an outcome")
        stored = manager.counts["stored", "ssd"]
        if moved.to_ssd != stored + sum(moved.not_written.values()):
            found.append(f"{moved.to_ssd} pages went to the writer, {stored} are stored, {moved.not_written} dropped")
        if self._bounce is not None and self._bounce.free_slots != self._bounce.slots:
            found.append(f"{self._bounce.slots - self._bounce.free_slots} bounce slots are not given back")
        if self.gpu is not None and self.gpu.private:
            found.append(f"{len(self.gpu.private)} private slots of the GPU pool are left")
        return found
