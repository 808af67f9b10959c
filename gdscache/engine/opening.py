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
from typing import Any, NamedTuple, cast

import torch

from gdscache.config import Config, EventsConfig, load_config
from gdscache.config.pools import concerns, plain_parts
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
from gdscache.limits import EngineLimits
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
from gdscache.store.earned_offers import EarnedOffers
from gdscache.store.outlets import Outlet
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
_BEHIND_S = 60.0  # a clock that is further behind is logged


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of an engine. `concerns`: warnings about its configuration."""

    concerns: tuple[str, ...]
    planes: PagedPlanes | RemotePlanes
    manager: TierManager
    copies: Sequence[PageCopies]
    bounces: Sequence[Bounce]
    loader: Loader
    prefetcher: Prefetcher
    storer: Storer
    executor: NativeExecutor | RanksExecutor
    status: StatusWriter | None
    events: KVEventHub | None
    ranks: RankSet | None
    journal: Journal
    history: HistoryFile | None

    def close(self, *, drain: bool) -> None:
        """End prefetches, stores (finished with `drain`, else dropped) and loads; then close the tiers and free the
        buffers. Each step runs even if earlier ones raise."""
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self.journal.close)
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


class _Top(NamedTuple):
    """The planes of an engine, and their owner: its GPU tier, its ranks, or the caller."""

    layout: PageLayout
    planes: PagedPlanes | RemotePlanes
    gpu: GpuTier | None = None
    ranks: RankSet | None = None
    plain: bool = False  # of pages that do not fit into packed extents


class _Below(NamedTuple):
    """The tiers below the planes."""

    config: Config
    top: _Top
    cpu: CpuTier | None
    ssd: SsdTier | None
    further: list[DurableTier]
    bounce: Bounce | None = None

    @property
    def direct(self) -> bool:
        """Whether pages go between the SSD and the planes past host memory."""
        return self.ssd is not None and self.ssd.direct

    @property
    def files(self) -> list[DurableTier]:
        return [*([] if self.ssd is None else [self.ssd]), *self.further]


def build(
    config: Config,
    attached: Sequence[Sequence[torch.Tensor]] | None,
    *,
    timeline: Timeline,
    calls: Caller,
    limits: EngineLimits,
    addresses: Sequence[RankAddress] | None,
) -> Parts:
    """Open all parts, or raise and leave none open. `addresses`: of the ranks that have the planes."""
    # A tensor made in the caller's inference mode could not be written outside of it.
    with torch.inference_mode(mode=False), contextlib.ExitStack() as placed, contextlib.ExitStack() as undo:
        lock, log, clock = threading.RLock(), LimitedLog(), _clock(config)
        quarantine = Quarantine(lock, log=log)
        top = _open_top(config, attached, addresses, undo)
        layout, device, deadline = top.layout, top.planes.device, config.deadline
        placed.enter_context(near(device))
        opened = functools.partial(
            _open_below, reserve=limits.ssd_reserve, lock=lock, quarantine=quarantine, clock=clock, log=log, undo=undo
        )
        plain = None
        if layout.packed:
            config, rest = plain_parts(config, layout.shards, 1 if top.ranks is None else top.ranks.replicas)
            below, plain = opened(config, top), opened(rest, _plain_top(top))
        else:
            below = opened(config, top)
        both = [below] if plain is None else [below, plain]
        outlets = [_outlets(one, limits.admission_offers, log) for one in both]
        memories = [None if one.cpu is None else one.cpu.index for one in both]
        earned = [
            EarnedOffers(index, some, config.store.write_policy, limits.write_hits)
            for index, some in zip(memories, outlets, strict=True)
        ]
        chain: list[Tier | None] = [top.gpu, *(one.cpu for one in both), *(one.ssd for one in both), *below.further]
        manager = TierManager(
            lock,
            [tier for tier in chain if tier is not None],
            quarantine=quarantine,
            timeline=timeline,
            calls=calls,
            wall_clock=clock,
            on_use=[offers.used for offers in earned],
            log=log,
        )
        name, said = str(config.ssd.path) if config.ssd else config.model.name, config.log
        journal = Journal(manager, name, layout, summary=said.summary, requests=said.requests)
        manager.tell = journal.tick
        copies = []
        for one in both:
            if isinstance(one.top.planes, PagedPlanes):
                copies.append(open_copies(one.top.planes, config.gpu))
                undo.callback(copies[-1].close)
        executor = _executor(both, copies, manager)
        undo.callback(executor.close)
        executors = [executor] if executor.plain is None or plain is None else [executor, executor.plain]
        planner = storer = None
        for one, some, mine, moves in reversed([*zip(both, outlets, earned, executors, strict=True)]):
            extent, of_plain = one.top.layout.extent_bytes, one.top.plain
            planner = StorePlanner(manager, config.store, extent, some, mine, plain=of_plain, unfit=planner)
            spare = None if one.bounce is None else one.bounce.stores
            storer = Storer(manager, planner, moves, spare, deadline, storer)
            undo.callback(storer.close, drain=False)
        assert storer is not None, "an engine without tiers"
        indexes = [tier.index for tier in manager.tiers.values()]
        for index in indexes if plain is not None else ():
            index.others = [other for other in indexes if other is not index]
            index.coming = storer.under_way
        held = held_pages(manager, limits)
        due, at_once = [storer.offer_earned], top.ranks is not None
        loads = LoadPlanner(manager, due=due, prefetched=held, at_once=at_once)
        threads, keep = limits.load_threads, not below.direct
        how: dict[str, Any] = {"threads": threads, "keep": keep, "plain": executors[-1]}
        loader = Loader(loads, executor, layout, config.load, deadline, **how)
        undo.callback(loader.close)
        prefetcher = Prefetcher(loader, held, layout, limits)
        undo.callback(prefetcher.close)
        status = history = None
        figures = functools.partial(_figures, config, top, manager, journal, storer, loader, prefetcher)
        if below.ssd is not None:
            history = HistoryFile(below.ssd.path, manager.fates.evicted, manager.fates.bad)
            history.restore()
            status = _open_status(config, top, below.ssd, manager, history, figures)
        elif config.status is not None:
            status = _open_page(config.status.path, figures)
        if status is not None:
            undo.callback(status.close)
        events = None
        if config.events is not None:
            events = _open_events(config.events, layout.page_tokens)
            undo.callback(events.close)
            _name_groups(events, config, below.ssd)
            with lock:
                events.watch(manager.tiers.values())
        pages = top.planes.blocks // top.planes.blocks_per_page
        parts = Parts(
            concerns=tuple(concerns(config, pages, on_gpu=device.type == "cuda")),
            planes=top.planes,
            manager=manager,
            copies=copies,
            bounces=[one.bounce for one in both if one.bounce is not None],
            loader=loader,
            prefetcher=prefetcher,
            storer=storer,
            executor=executor,
            status=status,
            events=events,
            ranks=top.ranks,
            journal=journal,
            history=history,
        )
        undo.pop_all()
    for concern in parts.concerns:
        _config_log.warning("%s", concern)
    _log.info("tiers %s, pages of %d bytes, device %s", " -> ".join(manager.tiers), layout.page_bytes, device)
    return parts


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
    """A configuration from a YAML file, from a mapping of the same shape, or as it is."""
    if isinstance(config, Config):
        return config
    return Config.from_dict(config) if isinstance(config, Mapping) else load_config(config)


def layer_groups(config: Config) -> tuple[Group, ...]:
    """The groups of the model's layers. Raises `ConfigError` for an object that is no configuration."""
    if not isinstance(config, Config):
        raise ConfigError(f"a configuration was given as {type(config).__name__}", "use from_config, or pass a Config")
    return config.model.layer_groups()


def _open_top(
    config: Config,
    attached: Sequence[Sequence[torch.Tensor]] | None,
    addresses: Sequence[RankAddress] | None,
    undo: contextlib.ExitStack,
) -> _Top:
    layout = config.model.layout()
    if addresses is not None:
        ranks = _ranks(config, addresses)
        undo.callback(ranks.close)
        layout = dataclasses.replace(layout, shards=ranks.shards)
        return _Top(layout, RemotePlanes(layout, ranks), ranks=ranks)
    if attached is not None:
        return _Top(layout, PagedPlanes(layout, attached))
    gpu = GpuTier(layout, config.gpu.capacity, resolve_device(config.gpu.device), config.eviction)
    undo.callback(gpu.close)
    return _Top(layout, gpu.paged, gpu=gpu)


def _plain_top(top: _Top) -> _Top:
    """The same planes, for pages that do not fit into packed extents."""
    layout = top.layout.packed_as(packed=False)
    if isinstance(top.planes, PagedPlanes):
        return _Top(layout, PagedPlanes(layout, top.planes.tensors), plain=True)
    assert top.ranks is not None, "planes of ranks"
    return _Top(layout, RemotePlanes(layout, top.ranks), ranks=top.ranks, plain=True)


def _open_below(
    config: Config,
    top: _Top,
    reserve: int,
    lock: threading.RLock,
    quarantine: Quarantine,
    clock: Callable[[], float],
    log: LimitedLog,
    undo: contextlib.ExitStack,
) -> _Below:
    layout, device, cpu, ssd = top.layout, top.planes.device, None, None
    if config.cpu is not None:
        memory = _memory(top, "cpu", config.cpu.capacity)
        cpu = CpuTier(memory, config.eviction, config.model.kept_groups, plain=top.plain)
        undo.callback(cpu.close)
    if config.ssd is not None:
        ssd = SsdTier(
            layout,
            config.ssd,
            str(device),
            lock,
            eviction=config.eviction,
            groups=config.model.kept_groups,
            reserve=reserve,
            wall_clock=clock,
            open_slab=None
            if top.ranks is None
            else functools.partial(
                RemoteSlab, layout, config.ssd, top.ranks, SsdTier.name + PLAIN * top.plain, config.deadline
            ),
            log=log,
            plain=top.plain,
        )
        undo.callback(ssd.close)
        if isinstance(ssd.io, SlabIO):
            ssd.route = ssd_route.choose(layout, device, config.ssd, ssd.io, ssd.index, keep=cpu is not None)
    further: list[DurableTier] = []
    for one in config.tiers:
        tier = open_tier(one, layout, lock, [tier.name for tier in further])
        undo.callback(tier.close)
        further.append(tier)
        if not tier.served and cpu is None:
            raise TierUnavailableError(
                f"pages of tier {tier.name!r} are brought into the CPU tier, but there is none", "add a cpu section"
            )
    below = _Below(config, top, cpu, ssd, further)
    if not below.files:
        return below
    reserved: DeviceExtents | HostExtents | RemoteMemory
    if below.direct:
        reserved = DeviceExtents(layout, config.host_buffer, device)
    else:
        reserved = _memory(top, "bounce", config.host_buffer)
    bounce = Bounce(reserved, quarantine, plain=top.plain, only=below.files[0].name if top.plain else "")
    undo.callback(bounce.close)
    for extents in (reserved, None if cpu is None else cpu.extents):
        for tier in below.files:
            if isinstance(extents, DeviceExtents):
                tier.register(extents.rows.view(-1))
            elif isinstance(extents, HostExtents):
                tier.register(extents.buffer.view)
    return below._replace(bounce=bounce)


def _open_status(
    config: Config,
    top: _Top,
    ssd: SsdTier,
    manager: TierManager,
    history: HistoryFile,
    figures: Callable[[], Figures],
) -> StatusWriter:
    costs = CostsFile(ssd.path, manager.costs, _about(config, top.layout, top.planes.device))
    costs.restore()

    def save() -> None:
        if not ssd.lock_lost():  # else the directory may be another engine's
            costs.save()
            history.save()

    return StatusWriter(ssd.path, figures, save)


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


def _outlets(below: _Below, offers: int, log: LimitedLog) -> list[Outlet]:
    config, extent = below.config, below.top.layout.extent_bytes
    limit = config.store.queue // extent
    found = []
    for tier in below.files:
        endurance = config.ssd.endurance if config.ssd is not None and tier is below.ssd else None
        admission = Admission(config.store.admission, tier.index.slots, extent, endurance, offers=offers, log=log)
        found.append(Outlet(tier, admission, limit))
    return found


def _open_events(config: EventsConfig, page_tokens: int) -> KVEventHub:
    publisher = None
    if config.endpoint is not None:
        from gdscache.events.socket import ZmqPublisher

        publisher = ZmqPublisher(config.endpoint, config.replay, config.topic)
    return KVEventHub(page_tokens, publisher)


def _name_groups(events: KVEventHub, config: Config, ssd: SsdTier | None) -> None:
    known = [(group.describe(), GroupFacts.of(n, group)) for n, group in enumerate(config.model.layer_groups())]
    if not known or ssd is None:
        return
    try:
        described = ssd.namespaces()
    except IOFailedError as error:  # events do without
        _log.warning("%s: events of pages that are there do not say their group: %s", ssd.path, error)
        return
    for digest, fields in described.items():
        for group, facts in known:
            if isinstance(fields, dict) and fields.get("group") == group:
                events.name(digest, facts)


def _about(config: Config, layout: PageLayout, device: torch.device) -> dict[str, str]:
    """Prefills take as long on another engine with the same model and device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()}"
    model = namespace_digest(config.model.namespace_fields(shards=layout.shards))
    return {"model": model.hex(), "device": name}


def _figures(
    config: Config,
    top: _Top,
    manager: TierManager,
    journal: Journal,
    storer: Storer,
    loader: Loader,
    prefetcher: Prefetcher,
) -> Figures:
    """For the status page. Without the manager's lock, so the figures need not agree exactly. A line of the log that is
    due is left to a thread that may wait for a slow log."""
    if journal.due:
        manager.calls.post(journal.tick)
    quarantine, ssd, stores = manager.quarantine, manager.ssd, storer.queue()
    sizes = stores["bytes"], stores["to_ssd_bytes"], stores["limit_bytes"]
    stopped = quarantine.stopped or ("" if ssd is None else ssd.lock_lost())
    lost = sum((tier.lost for tier in manager.tiers.values() if isinstance(tier, SsdTier)), Counter[str]())
    off = ssd is not None and quarantine.refuses(ssd.name)
    state: State = "stopped" if stopped else "switched_off" if off else "running"
    return Figures(
        extent_bytes=top.layout.extent_bytes,
        evictions=0 if ssd is None else ssd.index.evictions,
        late_requests=quarantine.requests,
        state=state,
        stopped=stopped,
        counts={**manager.counts, **{("lost", cause): n for cause, n in lost.items()}},
        shards=top.layout.shards,
        ranks=_ranks_told(top.ranks, state),
        latencies={what: manager.latencies.summary(*_work(what)) for what in LATENCIES},
        tiers=tuple(
            TierState(name, t.index.slots, len(t.index), t.index.evictions) for name, t in manager.tiers.items()
        ),
        slowest=tuple(manager.latencies.slowest(SLOWEST)),
        groups=", ".join(group.words for group in config.model.layer_groups()),
        queues=Queues(*sizes, loader.loads, prefetcher.under_way),
        plain_extent_bytes=top.layout.packed_as(packed=False).extent_bytes,
    )


def _work(latency: str) -> tuple[str, str]:
    """The work and the tier of a latency of the status page: `load_cpu`, or `read`, which is of the SSD."""
    what, _, tier = latency.partition("_")
    return what, tier or SsdTier.name


def _ranks_told(ranks: RankSet | None, state: State) -> tuple[RankState, ...]:
    if ranks is None:
        return (RankState(os.getpid(), state),)
    told = ranks.describe()[:RANKS]
    return tuple(RankState(one["pid"], state if one["state"] == "running" else "stopped") for one in told)


def _executor(
    both: Sequence[_Below], copies: Sequence[PageCopies], manager: TierManager
) -> NativeExecutor | RanksExecutor:
    top = both[0].top
    if top.ranks is not None:
        return _ranks_executor(top.ranks, both, manager)
    executor = None
    with contextlib.ExitStack() as undo:
        for below, own in reversed([*zip(both, copies, strict=True)]):
            executor = _native_executor(below, own, manager, executor)
            undo.callback(executor.close)
        undo.pop_all()
    assert executor is not None, "planes that are nowhere"
    manager.quarantine.switched = executor.look
    return executor


def _native_executor(
    below: _Below, copies: PageCopies, manager: TierManager, plain: NativeExecutor | None
) -> NativeExecutor:
    bounce = below.bounce
    memories: dict[str, Extents] = {}
    if below.cpu is not None:
        memories[below.cpu.name] = cast("Extents", below.cpu.extents)
    reserve = None
    if bounce is not None:
        reserve = Reserve(cast("Extents", bounce.extents), bounce.loads, bounce.name)
        memories[bounce.name] = reserve.extents

    def refusal() -> PageStatus | None:
        manager.have_watched()
        return PageStatus(manager.quarantine.cause) if manager.quarantine.off else None

    files = {tier.name: tier.io for tier in below.files}
    slots = {tier.name: tier.index.slots for tier in below.files}
    executor = NativeExecutor(Machine(copies, memories, files, slots, reserve, refusal, manager.timeline), plain)
    only = "" if bounce is None else bounce.only
    if bounce is not None:
        manager.quarantine.add_memory(f"{bounce.name}_loads", len(bounce.loads), executor.moves.held_slots, only)
    if below.cpu is not None:
        manager.quarantine.add_memory(below.cpu.name, below.cpu.index.slots, only=only)
    return executor


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
    return RankSet.connect(addresses, config.model.model_dump(mode="json"), config.gpu.model_dump(mode="json"))


def _ranks_executor(ranks: RankSet, both: Sequence[_Below], manager: TierManager) -> RanksExecutor:
    memories: dict[str, SlotMemory] = {one.cpu.name: one.cpu.extents for one in both if one.cpu is not None}
    bounces = [one.bounce for one in both if one.bounce is not None]
    memories |= {bounce.name: bounce.extents for bounce in bounces}
    ranks.call("start", {"loads": {bounce.name: _loads_by_rank(bounce, ranks) for bounce in bounces}})
    manager.quarantine.absent = lambda: ranks.absent
    return RanksExecutor(ranks, memories, both[0].top.layout.n_layers, manager.quarantine.stop)


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


def _memory(top: _Top, space: str, capacity: int) -> HostExtents | RemoteMemory:
    setting = "cpu.capacity" if space == "cpu" else "host_buffer"
    if top.ranks is None:
        pin: PageLocking = "auto" if top.planes.device.type == "cuda" else "off"
        return HostExtents(top.layout, capacity, pin, setting)
    return RemoteMemory(top.layout, capacity, top.ranks, space + PLAIN * top.plain, setting)
