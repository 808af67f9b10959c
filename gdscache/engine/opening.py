"""Opens the parts of an engine from a configuration: tiers, buffers and threads, in the order of their needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import torch

from gdscache.config import Config, EventsConfig, load_config
from gdscache.config.pools import PoolPart, concerns, plain_parts
from gdscache.cuda.host_memory import PageLocking
from gdscache.cuda.numa import near
from gdscache.cuda.streams import resolve_device
from gdscache.disk.catalog_file import last_written
from gdscache.disk.directory import CacheDirectory
from gdscache.disk.kept import CostsFile, HistoryFile
from gdscache.disk.slab import SlabIO
from gdscache.disk.status_page import (
    LATENCIES,
    RANKS,
    SLOWEST,
    Figures,
    Queues,
    RankState,
    State,
    StatusWriter,
    TierState,
)
from gdscache.errors import (
    CapacityError,
    ConfigError,
    InvalidValueError,
    IOFailedError,
    StorageError,
    TierUnavailableError,
)
from gdscache.events.base import GroupFacts, KVEventHub
from gdscache.extents import DeviceExtents, Extents, HostExtents, SlotMemory
from gdscache.groups.base import Group
from gdscache.kernels.copies import PageCopies, open_copies
from gdscache.limits import LIMITS, EngineLimits
from gdscache.load.loader import Loader
from gdscache.load.planner import LoadPlanner
from gdscache.moves import PageStatus
from gdscache.moves.native import Machine, NativeExecutor, Reserve
from gdscache.pages.keys import namespace_digest
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.pages.planes import PagedPlanes
from gdscache.policies.admission import Admission
from gdscache.prefetch.prefetcher import Prefetcher, held_pages
from gdscache.ranks.address import RankAddress
from gdscache.ranks.executor import RanksExecutor
from gdscache.ranks.leader import RankSet
from gdscache.ranks.place import RemoteMemory, RemotePlanes, RemoteSlab
from gdscache.runtime.calls import Caller
from gdscache.runtime.limited_log import LimitedLog
from gdscache.store.outlets import EarnedOffers, Outlet
from gdscache.store.plan import StorePlanner
from gdscache.store.storer import Storer
from gdscache.tiers import ssd_route
from gdscache.tiers.base import DurableTier, Tier, open_tier
from gdscache.tiers.cpu import Bounce, CpuTier
from gdscache.tiers.expiry import steady_clock
from gdscache.tiers.gpu import GpuTier
from gdscache.tiers.journal import Journal
from gdscache.tiers.manager import TierManager
from gdscache.tiers.quarantine import Late, Quarantine
from gdscache.tiers.ssd import SsdTier
from gdscache.tracing import Timeline

_log = logging.getLogger("gdscache")
_config_log = logging.getLogger("gdscache.config")
AnyRank = TypeVar("AnyRank")
_BEHIND_S = 60.0  # a clock that is further behind is logged


@dataclasses.dataclass(eq=False)
class _Tiers:
    """Planes, and the tiers below them for pages of one layout. `plain`: of pages that do not fit into packed extents;
    the planes are those of the packed ones."""

    config: Config
    planes: PagedPlanes | RemotePlanes
    plain: bool = False
    cpu: CpuTier | None = None
    ssd: SsdTier | None = None
    further: list[DurableTier] = dataclasses.field(default_factory=list)
    bounce: Bounce | None = None

    @property
    def direct(self) -> bool:
        """Whether pages go between the SSD and the planes past host memory."""
        return self.ssd is not None and self.ssd.direct

    @property
    def files(self) -> list[DurableTier]:
        return [*([] if self.ssd is None else [self.ssd]), *self.further]


class Parts:
    """The open parts of an engine. `concerns`: warnings about its configuration."""

    def __init__(
        self,
        config: Config,
        attached: Sequence[Sequence[torch.Tensor]] | None,
        *,
        timeline: Timeline,
        calls: Caller,
        limits: EngineLimits,
        addresses: Sequence[RankAddress] | None,
        pool: PoolPart | None = None,
    ) -> None:
        """Open all parts, or raise and leave none open. `addresses`: of the ranks that have the planes. `pool`: of a
        `HybridEngine`, that `config` is of."""
        self._config, self._limits, self._pool = config, limits, pool
        self.ranks: RankSet | None = None
        self.status: StatusWriter | None = None
        self.history: HistoryFile | None = None
        self.events: KVEventHub | None = None
        # A tensor made in the caller's inference mode could not be written outside of it.
        with (
            torch.inference_mode(mode=False),
            contextlib.ExitStack() as placed,
            contextlib.ExitStack() as self._undo,
        ):
            self._lock, self._log, self._clock = threading.RLock(), LimitedLog(), _clock(config)
            self._quarantine = Quarantine(self._lock, log=self._log)
            self.planes, gpu = self._open_planes(attached, addresses)
            placed.enter_context(near(self.planes.device))
            self._open(timeline, calls, gpu)
            self._undo.pop_all()
        for concern in self.concerns:
            _config_log.warning("%s", concern)
        tiers, planes = " -> ".join(self.manager.tiers), self.planes
        _log.info("tiers %s, pages of %d bytes, device %s", tiers, planes.layout.page_bytes, planes.device)

    def _open(self, timeline: Timeline, calls: Caller, gpu: GpuTier | None) -> None:
        whole = config = self._config
        limits, undo, layout, rest = self._limits, self._undo, self.planes.layout, None
        if layout.packed:
            config, rest = plain_parts(config, layout.shards, 1 if self.ranks is None else self.ranks.replicas)
            self._config = config
        below = self._open_below(config, self.planes)
        both = [below] if rest is None else [below, self._open_below(rest, self._plain_planes(), plain=True)]
        outlets = [_outlets(one, limits.admission_offers, self._log) for one in both]
        policy, hits = config.store.write_policy, limits.write_hits
        earned = [
            EarnedOffers(None if one.cpu is None else one.cpu.index, some, policy, hits)
            for one, some in zip(both, outlets, strict=True)
        ]
        chain: list[Tier | None] = [gpu, *(one.cpu for one in both), *(one.ssd for one in both), *below.further]
        self.manager = manager = TierManager(
            self._lock,
            [tier for tier in chain if tier is not None],
            quarantine=self._quarantine,
            timeline=timeline,
            calls=calls,
            wall_clock=self._clock,
            on_use=[offers.used for offers in earned],
            log=self._log,
        )
        name, said = str(config.ssd.path) if config.ssd else config.model.name, config.log
        self.journal = Journal(manager, name, layout, summary=said.summary, requests=said.requests)
        manager.tell = self.journal.tick
        self.copies: list[PageCopies] = []
        for one in both:
            if isinstance(one.planes, PagedPlanes):
                self.copies.append(open_copies(one.planes, config.gpu))
                undo.callback(self.copies[-1].close)
        executors = self._open_executors(both)
        self.executor = executors[0]
        undo.callback(self.executor.close)
        planner = storer = None
        for one, some, mine, moves in reversed([*zip(both, outlets, earned, executors, strict=True)]):
            spare, extent = None if one.bounce is None else one.bounce.stores, one.planes.layout.extent_bytes
            planner = StorePlanner(manager, config.store, extent, some, mine, spare, plain=one.plain, unfit=planner)
            storer = Storer(planner, moves, config.deadline, storer)
            undo.callback(storer.close, drain=False)
        assert storer is not None, "an engine without tiers"
        self.storer = storer
        indexes = [tier.index for tier in manager.tiers.values()]
        for index in indexes if rest is not None else ():
            index.others = [other for other in indexes if other is not index]
            index.coming = storer.under_way
        held, at_once = held_pages(manager, limits), self.ranks is not None
        loads = LoadPlanner(manager, due=[storer.offer_earned], prefetched=held, at_once=at_once)
        self.loader = Loader(
            *(loads, self.executor, layout, config.load, config.deadline),
            threads=limits.load_threads,
            keep=not below.direct,
            plain=executors[-1],
        )
        undo.callback(self.loader.close)
        self.prefetcher = Prefetcher(self.loader, held, layout, limits)
        undo.callback(self.prefetcher.close)
        if below.ssd is not None:
            self.history = HistoryFile(below.ssd.path, manager.fates.evicted, manager.fates.bad, below.ssd.owned)
            self.history.restore()
            self.status = self._open_status(below.ssd, self.history)
        elif config.status is not None:
            self.status = _open_page(config.status.path, self._figures)
        if self.status is not None:
            undo.callback(self.status.close)
        if config.events is not None:
            self.events = _open_events(config.events, layout.page_tokens, self._pool)
            undo.callback(self.events.close)
            _name_groups(self.events, config, below.ssd)
            with self._lock:
                self.events.watch(manager.tiers.values())
        if outside := [tier for tier in below.further if not tier.served]:
            _tell_namespaces(outside, config, layout, [one.ssd for one in both if one.ssd is not None])
        self.bounces = [one.bounce for one in both if one.bounce is not None]
        pages = self.planes.blocks // self.planes.blocks_per_page
        on_gpu = self.planes.device.type == "cuda"
        self.concerns = tuple(concerns(config, pages, on_gpu=on_gpu, whole=whole, pool=self._pool))

    def settle(self) -> None:
        """See `SsdTier.settle`: nothing refuses the open any more."""
        for tier in self.manager.files:
            if isinstance(tier, SsdTier):
                tier.settle()

    def close(self, *, drain: bool) -> None:
        """End prefetches, stores (finished with `drain`, else dropped) and loads; then close the tiers and free the
        buffers. Each step runs even if earlier ones raise."""
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._log.flush, last=True)
            for bounce in self.bounces:
                last_to_first.callback(bounce.close)
            last_to_first.callback(self.manager.close, self.executor.close)
            if self.events is not None:
                last_to_first.callback(self.events.close)
            if self.status is not None:
                last_to_first.callback(self.status.close)
            if self.history is not None:
                last_to_first.callback(self.history.hurry)
            for copies in self.copies:
                last_to_first.callback(copies.close)
            last_to_first.callback(self._end_lost)
            last_to_first.callback(self.loader.close)
            last_to_first.callback(self.storer.close, drain=drain)
            self.prefetcher.close()

    def _end_lost(self) -> None:
        for moving, rows in self.executor.end_lost():
            self.manager.quarantine.hold(moving, {row: Late("read", "", "", row, lambda: None) for row in rows})

    # -- planes and tiers ----------------------------------------------------------------------------------------------

    def _open_planes(
        self, attached: Sequence[Sequence[torch.Tensor]] | None, addresses: Sequence[RankAddress] | None
    ) -> tuple[PagedPlanes | RemotePlanes, GpuTier | None]:
        config, layout = self._config, self._config.model.layout()
        if addresses is not None:
            self.ranks = _ranks(config, addresses)
            self._undo.callback(self.ranks.close)
            return RemotePlanes(dataclasses.replace(layout, shards=self.ranks.shards), self.ranks), None
        if attached is not None:
            return PagedPlanes(layout, attached), None
        gpu = GpuTier(layout, config.gpu.capacity, resolve_device(config.gpu.device), config.eviction)
        self._undo.callback(gpu.close)
        return gpu.paged, gpu

    def _plain_planes(self) -> PagedPlanes | RemotePlanes:
        """The same planes, for pages that do not fit into packed extents."""
        layout = self.planes.layout.packed_as(packed=False)
        if isinstance(self.planes, PagedPlanes):
            return PagedPlanes(layout, self.planes.tensors)
        assert self.ranks is not None, "planes of ranks"
        return RemotePlanes(layout, self.ranks)

    def _open_below(self, config: Config, planes: PagedPlanes | RemotePlanes, *, plain: bool = False) -> _Tiers:
        layout, device, undo = planes.layout, planes.device, self._undo
        opened = _Tiers(config, planes, plain)
        if config.cpu is not None:
            memory = self._memory(opened, "cpu", config.cpu.capacity)
            opened.cpu = CpuTier(memory, config.eviction, config.model.kept_groups, plain=plain)
            undo.callback(opened.cpu.close)
        if config.ssd is not None:
            open_slab = None
            if self.ranks is not None:
                where = layout, config.ssd, self.ranks, SsdTier.name + PLAIN * plain, config.deadline
                open_slab = functools.partial(RemoteSlab, *where)
            opened.ssd = ssd = SsdTier(
                *(layout, config.ssd, str(device), self._lock),
                eviction=config.eviction,
                groups=config.model.kept_groups,
                reserve=self._limits.ssd_reserve,
                wall_clock=self._clock,
                open_slab=open_slab,
                log=self._log,
                plain=plain,
            )
            undo.callback(ssd.close)
            if isinstance(ssd.io, SlabIO):
                keep = opened.cpu is not None
                ssd.route = ssd_route.choose(layout, device, config.ssd, ssd.io, ssd.index, keep=keep)
        for one in config.tiers:
            tier = open_tier(one, layout, self._lock, [tier.name for tier in opened.further])
            undo.callback(tier.close)
            opened.further.append(tier)
            if not tier.served and opened.cpu is None:
                raise TierUnavailableError(
                    f"pages of tier {tier.name!r} are brought into the CPU tier, but there is none", "add a cpu section"
                )
        if opened.files:
            self._open_bounce(opened)
        return opened

    def _open_bounce(self, tiers: _Tiers) -> None:
        """The bounce reserve; and tell the tiers of files of the memory that pages move through."""
        reserved: DeviceExtents | HostExtents | RemoteMemory
        if tiers.direct:
            reserved = DeviceExtents(tiers.planes.layout, tiers.config.host_buffer, tiers.planes.device)
        else:
            reserved = self._memory(tiers, "bounce", tiers.config.host_buffer)
        only = tiers.files[0].name if tiers.plain else ""
        tiers.bounce = Bounce(reserved, self._quarantine, plain=tiers.plain, only=only)
        self._undo.callback(tiers.bounce.close)
        for extents in (reserved, None if tiers.cpu is None else tiers.cpu.extents):
            for tier in tiers.files:
                if isinstance(extents, DeviceExtents):
                    tier.register(extents.rows.view(-1))
                elif isinstance(extents, HostExtents):
                    tier.register(extents.buffer.view)

    def _memory(self, tiers: _Tiers, space: str, capacity: int) -> HostExtents | RemoteMemory:
        setting, layout = "cpu.capacity" if space == "cpu" else "host_buffer", tiers.planes.layout
        if self.ranks is None:
            pin: PageLocking = "auto" if tiers.planes.device.type == "cuda" else "off"
            return HostExtents(layout, capacity, pin, setting)
        return RemoteMemory(layout, capacity, self.ranks, space + PLAIN * tiers.plain, setting)

    # -- executors -----------------------------------------------------------------------------------------------------

    def _open_executors(self, both: Sequence[_Tiers]) -> Sequence[NativeExecutor | RanksExecutor]:
        """Of each, the first of which closes the other."""
        if self.ranks is not None:
            return [self._ranks_executor(self.ranks, both)] * len(both)
        executors: list[NativeExecutor] = []
        with contextlib.ExitStack() as undo:
            for tiers, copies in reversed([*zip(both, self.copies, strict=True)]):
                executors.insert(0, self._native_executor(tiers, copies, executors[0] if executors else None))
                undo.callback(executors[0].close)
            undo.pop_all()
        self._quarantine.switched = executors[0].look
        return executors

    def _native_executor(self, tiers: _Tiers, copies: PageCopies, plain: NativeExecutor | None) -> NativeExecutor:
        manager, quarantine, bounce = self.manager, self._quarantine, tiers.bounce
        memories: dict[str, Extents] = {}
        if tiers.cpu is not None:
            memories[tiers.cpu.name] = cast("Extents", tiers.cpu.extents)
        reserve = None
        if bounce is not None:
            reserve = Reserve(cast("Extents", bounce.extents), bounce.loads, bounce.name)
            memories[bounce.name] = reserve.extents

        def refusal() -> PageStatus | None:
            manager.have_watched()
            return PageStatus(quarantine.cause) if quarantine.off else None

        files = {tier.name: tier.io for tier in tiers.files}
        slots = {tier.name: tier.index.slots for tier in tiers.files}
        executor = NativeExecutor(Machine(copies, memories, files, slots, reserve, refusal, manager.timeline), plain)
        only = "" if bounce is None else bounce.only
        if bounce is not None:
            quarantine.add_memory(f"{bounce.name}_loads", len(bounce.loads), executor.moves.held_slots, only)
        if tiers.cpu is not None:
            quarantine.add_memory(tiers.cpu.name, tiers.cpu.index.slots, only=only)
        return executor

    def _ranks_executor(self, ranks: RankSet, both: Sequence[_Tiers]) -> RanksExecutor:
        memories: dict[str, SlotMemory] = {one.cpu.name: one.cpu.extents for one in both if one.cpu is not None}
        bounces = [one.bounce for one in both if one.bounce is not None]
        memories |= {bounce.name: bounce.extents for bounce in bounces}
        ranks.call("start", {"loads": {bounce.name: _loads_by_rank(bounce, ranks) for bounce in bounces}})
        self._quarantine.absent = lambda: ranks.absent
        return RanksExecutor(ranks, memories, self.planes.layout.n_layers, self._quarantine.stop)

    # -- the status page -----------------------------------------------------------------------------------------------

    def _open_status(self, ssd: SsdTier, history: HistoryFile) -> StatusWriter:
        about = _about(self._config, self.planes.layout, self.planes.device)
        costs = CostsFile(ssd.path, self.manager.costs, about, ssd.owned)
        costs.restore()

        def save() -> None:
            costs.save()
            history.save()

        return StatusWriter(ssd.path, self._figures, save, owned=ssd.owned)

    def _figures(self) -> Figures:
        """For the status page. Without the manager's lock, so the figures need not agree exactly. A line of the log
        that is due is left to a thread that may wait for a slow log."""
        manager, layout = self.manager, self.planes.layout
        if self.journal.due:
            manager.calls.post(self.journal.tick)
        quarantine, ssd, stores = manager.quarantine, manager.ssd, self.storer.queue()
        sizes = stores["bytes"], stores["to_ssd_bytes"], stores["limit_bytes"]
        stopped = quarantine.stopped or ("" if ssd is None else ssd.lock_lost())
        lost = sum((tier.lost for tier in manager.tiers.values() if isinstance(tier, SsdTier)), Counter[str]())
        off = ssd is not None and quarantine.refuses(ssd.name)
        state: State = "stopped" if stopped else "switched_off" if off else "running"
        tiers = manager.tiers.items()
        return Figures(
            extent_bytes=layout.extent_bytes,
            evictions=0 if ssd is None else ssd.index.evictions,
            late_requests=quarantine.requests,
            state=state,
            stopped=stopped,
            counts={**manager.counts, **{("lost", cause): n for cause, n in lost.items()}},
            shards=layout.shards,
            ranks=_ranks_told(self.ranks, state),
            latencies={what: manager.latencies.summary(*_work(what)) for what in LATENCIES},
            tiers=tuple(TierState(name, t.index.slots, len(t.index), t.index.evictions) for name, t in tiers),
            slowest=tuple(manager.latencies.slowest(SLOWEST)),
            groups=", ".join(group.words for group in self._config.model.layer_groups()),
            queues=Queues(*sizes, self.loader.loads, self.prefetcher.under_way),
            plain_extent_bytes=layout.packed_as(packed=False).extent_bytes,
        )


class FromConfig(Generic[AnyRank]):
    """An engine that is opened from a configuration, and that the end of its `with` block closes. `AnyRank`: the
    address of a rank, or those of a pool's."""

    def __init__(
        self, config: Config, planes: Any, *, ranks: Any, timeline: Timeline | None, limits: EngineLimits
    ) -> None: ...

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        ranks: Sequence[AnyRank] | None = None,
        timeline: Timeline | None = None,
        limits: EngineLimits = LIMITS,
    ) -> Self:
        """Open an engine from a YAML file, a mapping of the same shape, or a `Config`. The rest is as for the class."""
        if not isinstance(config, Config):
            config = Config.from_dict(config) if isinstance(config, Mapping) else load_config(config)
        return cls(config, planes, ranks=ranks, timeline=timeline, limits=limits)

    def close(self, drain: bool = True) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def layer_groups(config: Config) -> tuple[Group, ...]:
    """The groups of the model's layers. Raises `ConfigError` for an object that is no configuration."""
    if not isinstance(config, Config):
        raise ConfigError(f"a configuration was given as {type(config).__name__}", "use from_config, or pass a Config")
    return config.model.layer_groups()


def _open_page(path: Path, figures: Callable[[], Figures]) -> StatusWriter:
    """The writer of the status page of an engine without an SSD, in a directory of its own."""
    try:
        directory = CacheDirectory.open(path)
    except StorageError as error:
        raise type(error)(error.message, error.hint.replace("ssd.path", "status.path")) from error
    with contextlib.ExitStack() as undo:
        undo.callback(directory.close)
        writer = StatusWriter(path, figures, released=directory.close)
        undo.pop_all()
    return writer


def _clock(config: Config) -> Callable[[], float]:
    """The clock of times to live: it never begins before the directory's last write, even if the system's clock
    does."""
    now = time.time()
    written = now if config.ssd is None else last_written(config.ssd.path)
    if written > now + _BEHIND_S:
        _log.warning(
            "%s was last written %.0f s after the time that the system's clock says: times to live go on from there",
            config.ssd.path if config.ssd else "",
            written - now,
        )
    return steady_clock(max(now, written))


def _outlets(below: _Tiers, offers: int, log: LimitedLog) -> list[Outlet]:
    config, extent = below.config, below.planes.layout.extent_bytes
    limit = config.store.queue // extent
    found = []
    for tier in below.files:
        endurance = config.ssd.endurance if config.ssd is not None and tier is below.ssd else None
        admission = Admission(config.store.admission, tier.index.slots, extent, endurance, offers=offers, log=log)
        found.append(Outlet(tier, admission, limit))
    return found


def _open_events(config: EventsConfig, page_tokens: int, pool: PoolPart | None) -> KVEventHub:
    publisher = None
    if config.endpoint is not None:
        from gdscache.events.socket import ZmqPublisher

        publisher = ZmqPublisher(config.endpoint, config.replay, config.topic)
    return KVEventHub(page_tokens, publisher, alone=pool is None or pool.share == 1)


def _name_groups(events: KVEventHub, config: Config, ssd: SsdTier | None) -> None:
    known = [(group.describe(), GroupFacts.of(n, group)) for n, group in enumerate(config.model.layer_groups())]
    if not known or ssd is None:
        return
    for digest, fields in _described(ssd, "events of pages that are there do not say their group").items():
        for group, facts in known:
            if isinstance(fields, dict) and fields.get("group") == group:
                events.name(digest, facts)


def _tell_namespaces(tiers: Sequence[DurableTier], config: Config, layout: PageLayout, ssds: Sequence[SsdTier]) -> None:
    """Tell tiers whose pages outlive this engine which namespaces it may find pages of there, for its clears."""
    own = [config.model.namespace_fields(shards=layout.shards, group=g) for g in config.model.layer_groups() or (None,)]
    known = {namespace_digest(fields): fields for fields in own}
    for ssd in ssds:
        known |= _described(ssd, "a clear leaves pages of earlier processes' salts in a shared pool")
    for tier in tiers:
        for digest, fields in known.items():
            tier.describe_namespace(digest, fields)


def _described(ssd: SsdTier, lack: str) -> dict[bytes, dict[str, object]]:
    """The namespaces of the SSD's pages. `lack`: what is missing without them."""
    try:
        return ssd.namespaces()
    except IOFailedError as error:
        _log.warning("%s: %s: %s", ssd.path, lack, error)
        return {}


def _about(config: Config, layout: PageLayout, device: torch.device) -> dict[str, str]:
    """Prefills take as long on another engine with the same model and device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()}"
    model = namespace_digest(config.model.namespace_fields(shards=layout.shards))
    return {"model": model.hex(), "device": name}


def _work(latency: str) -> tuple[str, str]:
    """The work and the tier of a latency of the status page: `load_cpu`, or `read`, which is of the SSD."""
    what, _, tier = latency.partition("_")
    return what, tier or SsdTier.name


def _ranks_told(ranks: RankSet | None, state: State) -> tuple[RankState, ...]:
    if ranks is None:
        return (RankState(os.getpid(), state),)
    told = ranks.describe()[:RANKS]
    return tuple(RankState(one["pid"], state if one["state"] == "running" else "stopped") for one in told)


def _ranks(config: Config, addresses: Sequence[RankAddress]) -> RankSet:
    """The ranks, whose planes must be the model's. Raises `RankError`, and `InvalidValueError` for settings that ranks
    cannot serve."""
    if config.tiers:
        raise InvalidValueError(
            f"tiers names {config.tiers[0].tier}, and an engine of several ranks has the CPU tier and the SSD alone",
            "take tiers out",
        )
    if config.ssd is not None and config.ssd.gds == "on":
        raise InvalidValueError("ssd.gds is on, and ranks read files into host memory", "set ssd.gds to auto or off")
    return RankSet(addresses, config.model.model_dump(mode="json"), config.gpu.model_dump(mode="json"))


def _loads_by_rank(bounce: Bounce, ranks: RankSet) -> list[list[int]]:
    """The slots that each rank gives out to its loads: ranks with equal bytes have one memory, and do not meet in it.
    Raises `CapacityError` where there are fewer slots than such ranks."""
    slots, same = bounce.loads, ranks.replicas
    each = len(slots) // same
    if not each:
        raise CapacityError(
            f"{len(slots)} pages of host_buffer are for loads ({bounce.name}), and {same} ranks have equal bytes",
            "raise host_buffer",
        )
    starts = [slots.start + each * ranks.of_shard(link.shard).index(link) for link in ranks.links]
    return [[start, start + each] for start in starts]
