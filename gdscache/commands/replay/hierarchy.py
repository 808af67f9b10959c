"""An engine's tiers in virtual time: its real index, policies, stores and writer, moved by a machine's model.

The engine's own code decides (`TierManager`, `StorePlanner`, `Storer`, `TierWriter`, `LoadPlanner`, `LoadRun`, ...). A
`VirtualExecutor` carries out its moves.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gdscache.commands.replay.clock import Clock, Done, MachineModel, Process
from gdscache.commands.replay.tiers import ModelSsd, ModelTier
from gdscache.commands.replay.virtual import VirtualCondition, VirtualExecutor, VirtualShare
from gdscache.config import Config
from gdscache.config.pools import plain_parts, pool_parts
from gdscache.index.retention import DEFAULT, Retention
from gdscache.limits import LIMITS, EngineLimits
from gdscache.load.plan import LoadPlan
from gdscache.load.planner import LoadPlanner
from gdscache.load.report import LoadPart
from gdscache.load.run import LoadRun
from gdscache.moves import Moving
from gdscache.pages.keys import Page
from gdscache.policies.admission import Admission
from gdscache.store.earned_offers import EarnedOffers
from gdscache.store.outlets import Outlet
from gdscache.store.parcel import Parcel, Receipt
from gdscache.store.plan import StorePlanner
from gdscache.store.storer import Storer
from gdscache.store.writer import Outgoing, TierWriter
from gdscache.tiers.manager import TierManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gdscache.cuda.streams import Event, Landed


class Ledger:
    """The outcome of every stored page: a receipt for the storer."""

    def __init__(self) -> None:
        self.offered = 0
        self.finished = 0
        self.stored: Counter[str] = Counter()  # by tier
        self.dropped: Counter[str] = Counter()  # by cause

    def committed(self, pages: Sequence[int], tier: str) -> None:
        self.stored[tier] += len(pages)

    def finish(self, pages: Sequence[int], cause: str = "") -> None:
        self.finished += len(pages)
        if cause:
            self.dropped[cause] += len(pages)

    def reading(self, lands: Callable[[float], Landed | None]) -> None:
        """A virtual gather has read its blocks when it ends."""

    def read(self, event: Event) -> None:
        """No engine waits for its blocks."""


class Moved:
    """Moved pages by tier: read (by loads, and by writes of pages in the CPU tier) and written."""

    def __init__(self, executor: VirtualExecutor) -> None:
        self._executor = executor
        self.read, self.written = executor.read, executor.written
        self.demoted = 0  # from the CPU tier to the SSD, without a store
        self.to_ssd = 0  # handed to the writer
        self.not_written: Counter[str] = Counter()  # dropped by the writer, by cause
        self.most_queued = 0  # most pages accepted and unfinished, except those on their way to the SSD
        self.most_to_ssd = 0  # most pages on their way to the SSD

    @property
    def promoted(self) -> int:
        """Pages that loads moved from the SSD into the CPU tier."""
        return self._executor.promoted


class _Handle:
    """A load without a waiting engine."""

    number = 0

    def __init__(self, parts: Sequence[LoadPart]) -> None:
        self.parts = parts

    def carried_by(self, moving: Moving, *, last: bool) -> None:
        """Not cancelled here."""

    def signal(self, layers: range, event: Event) -> None:
        """No layer is awaited."""

    def released(self) -> None:
        """No engine has the blocks."""


class _Planner(StorePlanner):
    """Counts queued pages, demotions to the SSD without a store, and the writer's drops."""

    def __init__(self, moved: Moved, *args: Any, **options: Any) -> None:
        self._moved = moved
        super().__init__(*args, **options)

    def accept(self, pages: Sequence[Page], receipt: Receipt, retention: Retention = DEFAULT) -> list[int]:
        wanted = super().accept(pages, receipt, retention)
        self._moved.most_queued = max(self._moved.most_queued, self.queued - len(self.keys))
        return wanted

    def leaving(self, pages: Iterable[Page]) -> list[Parcel]:
        parcels = super().leaving(pages)
        self._moved.demoted += sum(map(len, parcels))
        return parcels

    def written(self, parcel: Parcel, outlet: Outlet, rows: Sequence[int], cause: str) -> None:
        if cause:
            self._moved.not_written[cause] += len(rows)
        super().written(parcel, outlet, rows, cause)


class _Writer(TierWriter):
    """Counts the pages handed to it. `planner` knows those on their way."""

    def __init__(self, moved: Moved, planner: StorePlanner, *args: Any) -> None:
        self._moved, self._planner = moved, planner
        super().__init__(*args)

    def put(self, pages: Sequence[Outgoing]) -> None:
        self._moved.to_ssd += sum(len(out.pages) for out in pages)
        self._moved.most_to_ssd = max(self._moved.most_to_ssd, len(self._planner.keys))
        super().put(pages)


def open_pools(config: Config, machine: MachineModel, clock: Clock) -> list[Hierarchy]:
    """The tiers of each pool of a model's groups, as in `pool_parts`; without groups, those of the model."""
    configs = [part.config for part in pool_parts(config)] or [config]
    return [Hierarchy(one, machine, clock) for one in configs]


class Hierarchy:
    """The tiers of `config`, below attached planes. The SSD's route is through host memory, unless the config says
    `direct`. `limits`: the engine's limits."""

    def __init__(self, config: Config, machine: MachineModel, clock: Clock, *, limits: EngineLimits = LIMITS) -> None:
        self.layout = layout = config.model.layout()
        if layout.packed:
            config, _ = plain_parts(config)  # real pages are packed, all but few
        self.config = config
        self.clock = clock
        self.extent_bytes, self.page_bytes = layout.extent_bytes, layout.page_bytes
        extent = self.extent_bytes
        self.cpu = self.ssd = None
        if config.cpu is not None:
            slots = config.cpu.capacity // extent
            self.cpu = ModelTier("cpu", slots, extent, config.eviction, config.model.kept_groups)
        if config.ssd is not None:
            slots, reserve = config.ssd.capacity // extent, limits.ssd_reserve
            self.ssd = ModelSsd(slots, extent, config.eviction, reserve, config.model.kept_groups)
        self.lock = threading.RLock()
        self.admission, outlets = None, []
        if config.ssd is not None and self.ssd is not None:
            asked = config.store.admission, self.ssd.index.slots, extent, config.ssd.endurance
            self.admission = Admission(*asked, offers=limits.admission_offers, clock=clock.time)
            outlets = [Outlet(self.ssd, self.admission, config.store.queue // extent)]
        index = None if self.cpu is None else self.cpu.index
        earned = EarnedOffers(index, outlets, config.store.write_policy, limits.write_hits)
        self.manager = TierManager(
            self.lock,
            [tier for tier in (self.cpu, self.ssd) if tier is not None],
            wall_clock=clock.time,
            clock=clock.time,
            on_use=[earned.used],
            measured=False,
        )
        self.executor = VirtualExecutor(clock, machine, self.page_bytes, extent)
        self.moved = Moved(self.executor)
        self.planner = _Planner(self.moved, self.manager, config.store, extent, outlets, earned)
        writers = {}
        if self.ssd is not None:
            writers["ssd"] = _Writer(self.moved, self.planner, self.manager, self.ssd, self.executor, extent)
        self._spare = None
        if config.ssd is not None:
            self._spare = VirtualShare(clock, config.host_buffer // extent // 2)
        parts = self.manager, self.planner, self.executor, self._spare, writers, extent
        self.storer = Storer(*parts, config.store, config.deadline)
        self.loads = LoadPlanner(self.manager, VirtualCondition(clock, self.lock), due=[self.storer.offer_earned])
        self._keep = config.ssd is None or config.ssd.route != "direct"
        self.ledger = Ledger()
        self._idle = limits.load_threads  # free load threads
        self._waiting: deque[Done] = deque()  # loads that wait for a thread

    # -- loads -------------------------------------------------------------------------------------------------------

    def plan_load(self, pages: Sequence[Page]) -> LoadPlan:
        """Lease the pages of a load; `load` moves them."""
        return self.loads.plan([pages], "load", keep=self._keep)

    def load(self, plan: LoadPlan) -> Process:
        """Move the pages of a plan and end it. At most as many loads move at once as in an engine, the first planned
        first."""
        if self._idle:
            self._idle -= 1
        else:
            turn = Done(self.clock)
            self._waiting.append(turn)
            yield turn
        blocks = np.empty((len(plan), 0), dtype=np.int64)
        handle = _Handle([LoadPart(len(plan))])
        how = self.config.load, self.config.deadline
        run = LoadRun(self.loads, self.executor, self.layout, *how, handle, plan, [blocks])
        yield from cast(Process, run.steps())
        if self._waiting:
            self._waiting.popleft().fire()
        else:
            self._idle += 1

    # -- stores ------------------------------------------------------------------------------------------------------

    def store(self, pages: Sequence[Page]) -> None:
        """Accept pages for the lower tiers, as an engine does."""
        self.ledger.offered += len(pages)
        epoch = self.manager.clearing.epoch(pages[0].namespace) if pages else 0
        blocks = np.empty((len(pages), 0), dtype=np.int64)
        self.storer.store(pages, self.ledger, blocks, epoch, None, None)

    # -- checks ------------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Inconsistencies after all accepted pages are done."""
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
        if self._spare is not None and self._spare.free_slots != self._spare.slots:
            found.append(f"{self._spare.slots - self._spare.free_slots} bounce slots are not given back")
        return found
