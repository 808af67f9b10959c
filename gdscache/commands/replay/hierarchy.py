"""An engine's tiers in virtual time: its real index, policies, stores and writer, moved by a machine's model.

The engine's own code decides (`TierManager`, `StorePlanner`, `Storer`, `TierWriter`, `LoadPlanner`, `LoadRun`, ...). A
`VirtualExecutor` carries out its moves.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from gdscache.commands.replay.clock import Clock, Done, MachineModel, Process
from gdscache.commands.replay.virtual import VirtualCondition, VirtualExecutor, VirtualShare
from gdscache.config import Config
from gdscache.config.pools import plain_parts, pool_parts
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import Entry, PageState
from gdscache.limits import LIMITS, EngineLimits
from gdscache.load.plan import LoadPart, LoadPlan
from gdscache.load.planner import LoadPlanner
from gdscache.load.run import LoadRun
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES
from gdscache.policies.admission import Admission
from gdscache.store.outlets import EarnedOffers, Outlet
from gdscache.store.parcel import StoreJob
from gdscache.store.plan import StorePlanner
from gdscache.store.storer import Storer
from gdscache.tiers.base import NO_RETENTIONS, DurableTier, Tier
from gdscache.tiers.manager import TierManager

if TYPE_CHECKING:
    from gdscache.cuda.streams import Event, Landed


class ModelTier(Tier):
    """A CPU tier's decisions: `slots` pages of `extent_bytes`."""

    kind: Literal["planes", "memory", "files"] = "memory"

    def __init__(self, name: str, slots: int, extent_bytes: int, eviction: str, groups: int = 1) -> None:
        self.name = name
        self.extent_bytes = extent_bytes
        self.index = PageIndex(slots, POLICIES[eviction](groups))

    @property
    def capacity(self) -> int:
        return self.index.slots * self.extent_bytes

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class ModelSsd(ModelTier, DurableTier):
    """The decisions of `gdscache.tiers.ssd.SsdTier`. Its deleted pages free their slots at a later commit; here they do
    at once. It counts such slots as free already, so the same pages are evicted."""

    kind = "files"

    def __init__(self, slots: int, extent_bytes: int, eviction: str, reserve: int, groups: int = 1) -> None:
        super().__init__("ssd", slots, extent_bytes, eviction, groups)
        self._reserve = min(reserve, slots // 8)

    @property
    def spare_slots(self) -> int:
        """Slots for pages without evictions."""
        return self.index.free_slots - self._reserve

    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """Reserve and lease slots for the leading `pages` that find room."""
        index = self.index
        index.make_room(pages, self._reserve)
        fresh = [pages[i] for i in index.lacking(pages)]
        kept = [retentions.get(page.key, DEFAULT) for page in fresh] if retentions else [DEFAULT] * len(fresh)
        return index.insert_all(fresh, index.take_free(len(fresh)), PageState.PENDING, kept, leases=1)

    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        self.index.commit_all(entries)
        return [not entry.dropped for entry in entries]

    def checksums(self, entries: Sequence[Entry]) -> None:
        """None: the tier has no bytes."""


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


def open_pools(config: Config, machine: MachineModel, clock: Clock) -> list[Hierarchy]:
    """The tiers of each pool of a model's groups, as in `pool_parts`; without groups, those of the model."""
    found: list[Hierarchy] = []
    for part in pool_parts(config):
        with part.shares():
            found.append(Hierarchy(part.config, machine, clock))
    return found or [Hierarchy(config, machine, clock)]


class Hierarchy:
    """The tiers of `config`, below attached planes. The SSD's route is through host memory, unless the config says
    `direct`. `limits`: the engine's limits."""

    def __init__(self, config: Config, machine: MachineModel, clock: Clock, *, limits: EngineLimits = LIMITS) -> None:
        self.layout = layout = config.model.layout()
        if layout.packed:
            config, _ = plain_parts(config)  # real pages are packed, all but few
        self.config = config
        self.clock = clock
        self.extent_bytes = extent = layout.extent_bytes
        self.executor = VirtualExecutor(clock, machine, layout.page_bytes, extent)
        self.cpu = self.ssd = self.spare = None
        outlets = []
        if config.cpu is not None:
            slots = config.cpu.capacity // extent
            self.cpu = ModelTier("cpu", slots, extent, config.eviction, config.model.kept_groups)
        if config.ssd is not None:
            slots, reserve = config.ssd.capacity // extent, limits.ssd_reserve
            self.ssd = ModelSsd(slots, extent, config.eviction, reserve, config.model.kept_groups)
            asked = config.store.admission, slots, extent, config.ssd.endurance
            admission = Admission(*asked, offers=limits.admission_offers, clock=clock.time)
            outlets = [Outlet(self.ssd, admission, config.store.queue // extent)]
            self.spare = VirtualShare(clock, config.host_buffer // extent // 2)
        index = None if self.cpu is None else self.cpu.index
        earned = EarnedOffers(index, outlets, config.store.write_policy, limits.write_hits)
        lock = threading.RLock()
        self.manager = TierManager(
            lock,
            [tier for tier in (self.cpu, self.ssd) if tier is not None],
            wall_clock=clock.time,
            clock=clock.time,
            on_use=[earned.used],
            measured=False,
        )
        self.planner = StorePlanner(self.manager, config.store, extent, outlets, earned, self.spare)
        self.storer = Storer(self.planner, self.executor, config.deadline)
        self.loads = LoadPlanner(self.manager, VirtualCondition(clock, lock), due=[self.storer.offer_earned])
        self._keep = config.ssd is None or config.ssd.route != "direct"
        self.ledger = Ledger()
        self._idle = limits.load_threads  # free load threads
        self._waiting: deque[Done] = deque()  # loads that wait for a thread

    # -- loads ---------------------------------------------------------------------------------------------------------

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
        about = self.config.load, self.layout, self.config.deadline
        run = LoadRun(self.loads, self.executor, *about, plan, [LoadPart(len(plan))], [blocks])
        yield from cast(Process, run.steps())
        if self._waiting:
            self._waiting.popleft().fire()
        else:
            self._idle += 1

    # -- stores --------------------------------------------------------------------------------------------------------

    def store(self, pages: Sequence[Page]) -> None:
        """Accept pages for the lower tiers, as an engine does."""
        self.ledger.offered += len(pages)
        epoch = self.manager.clearing.epoch(pages[0].namespace) if pages else 0
        blocks = np.empty((len(pages), 0), dtype=np.int64)
        self.storer.store(StoreJob(self.ledger, pages, epoch, blocks=blocks))
