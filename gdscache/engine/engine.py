"""CacheEngine: the entry point of gdscache."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from gdscache import arguments
from gdscache.config import Config
from gdscache.config.pools import PoolPart
from gdscache.cuda.streams import Event, on_stream_of_caller
from gdscache.engine.closing import EngineClosing, at_exit_of_child, settled
from gdscache.engine.opening import FromConfig, Parts, layer_groups
from gdscache.engine.packing import as_directory
from gdscache.engine.sequence import Sequence as TokenSequence
from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    InvalidValueError,
    SequenceStateError,
    SlotCountError,
    TierUnavailableError,
)
from gdscache.events.base import GroupFacts, KVEventBatch
from gdscache.events.names import NamedEvents
from gdscache.gate.costs import Prices
from gdscache.gate.gate import Gate
from gdscache.groups.base import Group
from gdscache.groups.pools import pools_of
from gdscache.index.retention import DEFAULT, LONGEST_TTL, Retention
from gdscache.limits import KEY_BYTES, LIMITS, MAX_SECONDS, EngineLimits
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.loader import Loader
from gdscache.pages.hit import Hit, Told, refuse_twins
from gdscache.pages.keys import Page, PageHashes, PageNames, as_tokens, namespace_digest
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import Blocks, BlockTables
from gdscache.prefetch.handle import Prefetch
from gdscache.ranks.address import RankAddress, StoreMark
from gdscache.ranks.lender import Lender, Named
from gdscache.runtime.calls import Calls
from gdscache.sizes import MAX_SIZE
from gdscache.store.handle import StoreHandle
from gdscache.store.parcel import StoreJob
from gdscache.tiers.base import Lease
from gdscache.tiers.gpu import GpuTier
from gdscache.tiers.manager import TierManager
from gdscache.tiers.pins import Pin
from gdscache.tracing import OtelTimeline, Timeline, timeline_from_environment

AnyHit = TypeVar("AnyHit")
_SALTS_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The findings of `check`: `problems` in words."""

    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class CacheEngine(FromConfig[RankAddress]):
    """A tiered KV cache: GPU pool → pinned CPU pool → SSD.

    `planes` attaches an engine's own paged tensors, `planes[layer][plane]` of shape `(blocks, block_tokens, *row)`.
    Then `lookup`, `load` and `store` take slots of those tensors. Without `planes` the engine owns a pool, and requests
    are `sequence`s. `tables` checks block numbers of the planes. `tokens` are token ids everywhere; `lookup`, `store`,
    `prefetch`, `pin` and `pages` take `PageHashes` too. `slots` are block numbers on the host: a list, numpy array or
    tensor of int32 or int64. All methods may be called from many threads. The class raises a subclass of
    `GdsCacheError` that names the part that cannot be opened; its methods `TokensError` for tokens or a `start`,
    `SlotRangeError` or `SlotCountError` for slots, `InvalidValueError` for other arguments, and `EngineClosedError`.

    Ctrl-C inside a call that changes an engine ends the engine, cleanly; inside a wait it ends the wait. So does any
    other exception of a signal's handler. A handler must not call the engine, except `close`.

    Many methods: they are the public calls, and a program finds them in one place.
    """

    def __init__(
        self,
        config: Config,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        ranks: Sequence[RankAddress] | None = None,
        timeline: Timeline | None = None,
        limits: EngineLimits = LIMITS,
        pool: PoolPart | None = None,
    ) -> None:
        """`ranks`: addresses of the processes that have the planes (`Rank`); this one decides, and needs no device.
        `timeline` records events; None: OpenTelemetry with the key `traces`, else NVTX ranges if a profiler is
        attached, else nothing. `limits`: constants without a setting, for trials of small tiers. `pool`: of a
        `HybridEngine`, that this engine serves; it settles all of its pools."""
        self.groups: tuple[Group, ...] = layer_groups(config)
        if timeline is not None and not isinstance(timeline, Timeline):
            raise InvalidValueError(f"timeline is {arguments.shown(timeline)}", "pass a Timeline, or None")
        if timeline is None:
            timeline = OtelTimeline() if config.traces else timeline_from_environment()
        self.timeline = timeline
        self.calls = calls = Calls()
        if self.groups and ranks is None and planes is None:
            raise InvalidValueError(
                "model.groups is given, and no planes: sequence() knows layers that keep all tokens alone",
                "open a HybridEngine, which allocates planes for each group; or take model.groups out",
            )
        if (pools := len(pools_of(self.groups))) > 1:
            raise InvalidValueError(
                f"model.groups has groups with planes of their own, {pools} pools of them", "open a HybridEngine"
            )
        self.config = config = as_directory(config)
        if ranks is not None and planes is not None:
            raise InvalidValueError("planes are given beside ranks", "make a Rank of them, and pass its address")

        def opened() -> tuple[Parts, EngineClosing]:
            parts = Parts(config, planes, timeline=timeline, calls=calls, limits=limits, addresses=ranks, pool=pool)
            closing = EngineClosing(parts, calls, config.deadline)
            calls.closing = functools.partial(closing.run, False)
            return parts, closing

        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]
        self._parts, self._closing = calls.open(on_stream_of_caller(device, opened))
        self.tables: BlockTables = self._parts.planes
        self.layout: PageLayout = self.tables.layout
        self._forgotten = weakref.finalize(self, self._closing.forgotten)
        self._exits_first = at_exit_of_child(functools.partial(self._closing.forgotten, ending=True))
        costs = self._parts.manager.costs
        self.gate: Gate = Gate(config.load.gate, costs, self.layout.page_tokens, self.layout.bytes_in)
        self._namespaces: dict[tuple[str, Group | None], bytes] = {}
        self._described: set[bytes] = set()
        self.names = PageNames(self.layout.page_tokens)
        self._closing.server = settled(self, config.metrics, [self._parts] if pool is None else ())

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def manager(self) -> TierManager:
        calls = self.calls  # `_check_open` written out: most calls ask for it
        if self._closing.begun or calls.broken_by or os.getpid() != calls.pid:
            self._check_open()
        return self._parts.manager

    @property
    def loader(self) -> Loader:
        self._check_open()
        return self._parts.loader

    @property
    def gpu(self) -> GpuTier:
        """The pool that the engine owns: `gpu.planes(layer)` are its paged tensors."""
        gpu = self.manager.gpu
        if gpu is None:
            raise SequenceStateError("this engine has attached planes and no pool of its own", "use load() and store()")
        return gpu

    @property
    def tiers(self) -> dict[str, str]:
        """Name -> `planes`, `memory` or `files` of each tier, the fastest first."""
        return {name: tier.kind for name, tier in self.manager.tiers.items()}

    def check_batch(self, requests: Sequence[tuple[Hit, Blocks]]) -> None:
        """Raises `SlotRangeError` if requests of a batch of loads name a block twice, `InvalidValueError` if their hits
        are of two kinds."""
        if len(requests) > 1:
            self.tables.check_blocks(np.concatenate([blocks for _, blocks in requests]))
            if len({hit.checked for hit, _ in requests}) > 1:
                raise InvalidValueError(
                    "a batch has hits of lookup() and of a prefetch's hit()", "load them in two calls of load_many()"
                )

    def namespace(self, salt: str = "", group: Group | None = None) -> bytes:
        """The namespace (32 bytes) of this model and a request's salt (an adapter, a tenant).

        `group`: one of `groups`, whose pages have a namespace of their own. Raises `InvalidValueError` for a salt that
        is no text.
        """
        self.calls.check()
        digest = self._namespaces.get((arguments.text(salt, "salt"), group))
        if digest is None:
            digest = namespace_digest(self._fields(salt, group))
            if len(self._namespaces) < _SALTS_KEPT * (1 + len(self.groups)):
                self._namespaces[salt, group] = digest
        return digest

    def namespaces(self, salt: str = "") -> list[bytes]:
        """The namespaces of a request's salt: one, or one a group of layers."""
        return [self.namespace(salt, group) for group in self.groups or (None,)]

    def _fields(self, salt: str, group: Group | None) -> dict[str, object]:
        return self.config.model.namespace_fields(salt, shards=self.layout.shards, group=group)

    def pages(self, tokens: Any, salt: str = "") -> list[Page]:
        """The names of all full pages of `tokens`, which are token ids or `PageHashes`."""
        self.calls.check()
        return self._named(tokens, salt)[0]

    def _named(self, tokens: Any, salt: str) -> tuple[list[Page], int]:
        if self.groups:
            names = ", ".join(group.name for group in self.groups)
            raise InvalidValueError(
                f"the model has groups of layers ({names}), and a page is of one",
                "open a HybridEngine, which looks at all of them",
            )
        known = self._namespaces.get((salt, None)) if isinstance(salt, str) else None
        namespace = self.namespace(salt) if known is None else known
        if isinstance(tokens, PageHashes):
            length = tokens.length(self.layout.page_tokens)
            return tokens.pages(namespace)[: length // self.layout.page_tokens], length
        ids = as_tokens(tokens)
        return self.names.of(namespace, ids), len(ids)

    # -- an engine without a block manager -------------------------------------------------------------------------

    def sequence(self, tokens: Any, salt: str = "") -> TokenSequence:
        """Find the longest cached prefix, allocate slots, begin loading. Raises `PoolFullError` and holds nothing."""
        with self.calls:
            return TokenSequence(self, self.gpu, tokens, salt)

    # -- an engine with planes of its own --------------------------------------------------------------------------

    def lookup(self, tokens: Any, start: int = 0, salt: str = "") -> Hit:
        """The consecutive full pages from token `start` (a multiple of `page_tokens`) that are cached.

        Takes no lease and changes nothing but recency. With `load.gate: enforcing`, pages that are slower to load than
        to compute are left out. Then pass the whole request as `tokens`, because computing its end has a price too.
        """
        with self.calls:
            pages, length = self._named(tokens, salt)
            manager, page_tokens = self.manager, self.layout.page_tokens
            first = arguments.start_page(start, page_tokens)
            start, first = first * page_tokens, min(first, len(pages))
            before = tokens.before * page_tokens if isinstance(tokens, PageHashes) else 0
            manager.have_watched()
            with self.timeline.span("lookup", pages=len(pages) - first):
                found = manager.lookup(pages, first)
            tokens = len(found) * page_tokens
            manager.measures.tokens.answered((len(pages) - first) * page_tokens, tokens, found)
            keep, worth, seconds, computing = self.gate.decide(
                found, before + start, before + length, self._parts.loader.planner.under_way
            )
            kept, declined = tuple(found[:keep]), (len(found) - keep) * page_tokens
            names, size = tuple(pages[first : first + keep]), keep * page_tokens
            why = None
            if first + keep < len(pages):  # none of these refers to the engine, which may be dropped
                why = functools.partial(manager.missing, pages, first + keep, len(found) - keep, 0, page_tokens)
            hit = Hit(start, size, kept, seconds, names, computing, worth * page_tokens, declined, why=why)
            if why is not None:
                manager.sample = hit.words
            return hit

    def lookup_pages(self, pages: Sequence[Page]) -> Hit:
        """`lookup` of pages with known names, without a gate: the leading ones that are cached.

        Raises `InvalidValueError` if a page is there twice, which a load could not bring.
        """
        with self.calls:
            manager = self.manager
            refuse_twins([page.key for page in pages])
            manager.have_watched()
            tiers = tuple(manager.lookup(pages, 0))
            return Hit(0, len(tiers) * self.layout.page_tokens, tiers, None, tuple(pages[: len(tiers)]))

    def present(self, pages: Sequence[Page]) -> bytes:
        """1 for each page that is cached, 0 for the others. Counts nothing, not even a use."""
        return self.manager.visible([page.key for page in pages])

    def lend(self, named: Named) -> Lender:
        """Lend pages of the SSD to other processes of this host, whose planes have the same bytes, until the `Lender`
        is closed; close it before this engine. `named`: see `Lender`. Raises `TierUnavailableError` without an SSD, or
        with a CPU tier, and the errors of `Lender`."""
        ssd, section = self.manager.ssd, self.config.ssd
        if ssd is None or section is None:
            raise TierUnavailableError("this engine has no SSD whose pages it could lend", "add a section ssd")
        if self.manager.landing is not None:
            raise TierUnavailableError(
                "this engine has a CPU tier, whose pages no other process reaches", "take the section cpu out"
            )
        reading = {"transport": section.transport, "threads": section.threads}
        return Lender(self.manager, self.layout, ssd.io.slab, reading, self.namespace(), named)

    def peek(self, tokens: Any, salt: str = "") -> int:
        """The cached tokens in the leading full pages of `tokens`. Unlike `lookup` it counts nothing, not even a
        use."""
        with self.calls:
            return len(self.manager.peek(self.pages(tokens, salt))) * self.layout.page_tokens

    def told(self, pages: Sequence[Page]) -> list[Told]:
        """The state of each page: its tier, or why it is in none. Counts nothing."""
        return self.manager.told([page.key for page in pages])

    def asks(self, pages: Sequence[Page]) -> bool:
        """Whether a tier beyond this machine, which lookups do not see, may have these pages: `prefetch` asks it."""
        with self.manager.lock:
            return any(tier.asks(pages) for tier in self.manager.files)

    @contextlib.contextmanager
    def telling(self, request: str) -> Iterator[None]:
        """A block in which a request is looked up: the log's line on its missing pages names it."""
        manager = self.manager
        before = manager.sample
        try:
            yield
        finally:
            sample = manager.sample
            if sample is not None and sample is not before:
                manager.sample = lambda: f"request {request}, {sample()}"

    def tell(self, words: Callable[[], str]) -> None:
        """Have the log's next line on missing pages say this instead of the last lookup's misses."""
        if not callable(words):
            raise InvalidValueError(f"words is {arguments.shown(words)}", "pass a function that returns the text")
        self.manager.sample = words

    def observe_prefill(
        self, tokens: int, cached_tokens: int, seconds: float, load_seconds: float | None = None
    ) -> None:
        """Tell the gate (`load.gate`) that a prefill of `tokens` tokens behind `cached_tokens` others took `seconds`.

        One request, or one chunk of it, measured until the device was done (by events, not by syncs). If the prefill
        ran during its load, give the load's time as `load_seconds` (`load.result().seconds`): that teaches how much the
        two overlap, and nothing about prefills. Raises `InvalidValueError` for impossible numbers.
        """
        with self.calls:
            self.manager.costs.observe_prefill(tokens, cached_tokens, seconds, load_seconds)

    def judge_by(self, gate: Gate) -> None:
        """Have another gate decide from now on. Loads and prefills are measured for its `costs`.

        For callers that run requests in several ways with figures of their own, such as with and without overlap.
        """
        with self.calls:
            self.manager.measure_for(gate.costs)
            self.gate = gate

    def load_prices(self, tiers: Sequence[str]) -> Prices:
        return Prices(self.manager.costs, tiers, self.layout.bytes_in, self._parts.loader.planner.under_way)

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Tell the gate that a tier (`cpu`, `ssd` or another's name) gave `nbytes` bytes in `seconds`.

        The engine reports its own loads itself: this is for figures known before its first load. Raises
        `InvalidValueError` for an unknown tier and for impossible numbers.
        """
        costs, tiers = self.manager.costs, self.manager.tiers
        if arguments.text(tier, "tier") not in tiers:
            raise InvalidValueError(f"there is no tier {arguments.shown(tier)}", f"name one of {', '.join(tiers)}")
        moved = arguments.whole(nbytes, "nbytes", 1, MAX_SIZE)
        took = arguments.span(seconds, "seconds", MAX_SECONDS)
        with self.calls:
            costs.observe_load(tier, moved, took)

    def observe_wait(self, seconds: float) -> None:
        """Tell the metrics how long a request waited for its pages. Raises `InvalidValueError` for impossible numbers:
        one NaN would be in the histogram's sum for good."""
        self.manager.measures.waited("pages", arguments.span(seconds, "seconds", MAX_SECONDS, zero=True))

    def load_seconds(self, tier: str, pages: int) -> float | None:
        """Expected seconds of a load of `pages` pages from a tier; None before one was measured."""
        price = self.manager.costs.load_price(tier)
        return None if price is None else price[0] * pages * self.layout.bytes_in(tier) + price[1]

    def load(self, hit: Hit, slots: Any, after: Event = None) -> LayerwiseLoad:
        """Begin copying a hit into `slots`, block indices of the attached planes, page after page; returns at once.

        Loads as many pages as `slots` has room for. The keys are resolved again, so read from `load.tokens` how many
        tokens are on their way. The slots are written after the current stream's work so far, or after the event
        `after`. A hit of `Prefetch.hit` is loaded from the CPU tier alone, without checksums and without a deadline.
        """
        return self.load_many([(hit, slots)], after)

    def load_many(self, requests: Sequence[tuple[Hit, Any]], after: Event = None) -> LayerwiseLoad:
        """Begin a batch of loads: one submit, and one wait a layer. `load.tokens_by_request` has the tokens on their
        way.

        Raises `InvalidValueError` for hits of `lookup` and of `Prefetch.hit` together: a batch has a deadline or none.
        """
        with self.calls:
            self._check_attached()
            asked: list[tuple[Hit, Blocks]] = []
            for hit, slots in hits_and_slots(requests, Hit):
                blocks = self.tables.block_table(slots)
                if len(blocks) > len(hit.pages):
                    raise SlotCountError(
                        f"slots for {len(blocks)} pages, the hit has {len(hit.pages)}",
                        f"pass blocks for pages of the hit alone; blocks of a page: {self.tables.blocks_per_page}",
                    )
                asked.append((hit, blocks))
            self.check_batch(asked)
            batch = [(hit.pages[: len(blocks)], blocks, hit.start) for hit, blocks in asked]
            checked = bool(asked) and asked[0][0].checked
            load = self._parts.loader.start(batch, "load", [self._parts.executor.behind(after)], checked=checked)
            load.begun()
            return load

    def store(
        self,
        tokens: Any,
        slots: Any,
        start: int = 0,
        salt: str = "",
        after: Event = None,
        *,
        priority: int = 0,
        ttl: float | None = None,
    ) -> StoreHandle:
        """Begin storing the full pages of `tokens` from token `start` on, found in `slots` of the attached planes.

        Returns at once. The slots are read after the current stream's work so far (or after the event `after`) and must
        not be rewritten before `handle.release_event`. A page that finds no room is dropped and counted.

        `priority` (-1 to 2): every tier evicts pages of a lower priority first. `ttl`: seconds until the pages are
        misses on every tier, also after a restart; None keeps them until they are evicted. If a page is cached already,
        the greater priority and the later end count. Raises `InvalidValueError`.
        """
        with self.calls:
            blocks, retention = self._to_store(slots, priority, ttl)
            pages = self.pages(tokens, salt)[arguments.start_page(start, self.layout.page_tokens) :]
            if len(blocks) > len(pages):
                raise SlotCountError(
                    f"slots for {len(blocks)} pages, there are {len(pages)} full pages from token {start} on",
                    "a partial last page is not stored: pass slots for full pages only",
                )
            epoch = self.manager.clearing.epoch(pages[0].namespace if pages else self.namespace(salt))
            return self.submit_store(pages[: len(blocks)], blocks, epoch, salt, after, retention=retention)

    def store_pages(
        self,
        pages: Sequence[Page],
        slots: Any,
        salt: str = "",
        after: Event = None,
        *,
        priority: int = 0,
        ttl: float | None = None,
        epoch: int | None = None,
    ) -> StoreHandle:
        """`store` of pages of this salt with known names, each of which has slots, in this order. `epoch`: of
        `epoch()`; by default the present one."""
        with self.calls:
            blocks, retention = self._to_store(slots, priority, ttl)
            if len(blocks) != len(pages):
                raise SlotCountError(
                    f"slots for {len(blocks)} pages, and {len(pages)} names of pages",
                    f"pass blocks for each page; blocks of a page: {self.tables.blocks_per_page}",
                )
            epoch = self.epoch(salt) if epoch is None else epoch
            return self.submit_store(pages, blocks, epoch, salt, after, retention=retention)

    def _to_store(self, slots: Any, priority: int, ttl: float | None) -> tuple[Blocks, Retention]:
        retention = Retention.of(priority, ttl, self._check_attached().expiry.clock)
        return self.tables.block_table(slots), retention

    def epoch(self, salt: str = "") -> int:
        """Take it when pages of this salt are computed, and pass it to `store_pages`: then no page is stored that a
        `clear` or `invalidate` in between was to drop."""
        return self.manager.clearing.epoch(self.namespaces(salt)[0])

    def mark(self, after: Event = None) -> Event:
        """A point in the order of steps, after the current stream's work so far (or after `after`); with ranks, a point
        that they reach. Pass it to `store_pages` as `after`, or to `passed`."""
        return self._parts.executor.mark(after)

    def passed(self, mark: Event) -> None:
        """No store takes this mark."""
        self._parts.executor.passed(mark)

    def submit_store(
        self,
        pages: Sequence[Page],
        blocks: Blocks,
        epoch: int,
        salt: str,
        after: Event = None,
        sources: Lease | None = None,
        retention: Retention = DEFAULT,
    ) -> StoreHandle:
        """Queue a store; `store` and `Sequence.commit` end here. `sources` pins the blocks."""
        with contextlib.ExitStack() as undo:
            if sources is not None:
                undo.callback(self.manager.end, sources)
            if pages and pages[0].namespace not in self._described and len(self._described) < _SALTS_KEPT:
                self._describe(salt)
            event = self._parts.executor.mark(after)
            undo.pop_all()  # the storer ends them
        handle = StoreHandle(len(pages), self.calls)
        if isinstance(event, StoreMark):
            handle.order = event.order
        with contextlib.ExitStack() as unused:
            unused.callback(self._parts.executor.passed, event)
            if self._parts.storer.store(StoreJob(handle, pages, epoch, retention, blocks, event, sources)):
                unused.pop_all()
                return handle
        handle.order = b""
        handle.read(None)
        return handle

    def _describe(self, salt: str) -> None:
        """Tell tiers and events what this salt's namespaces are of."""
        namespaces = self.namespaces(salt)
        for number, (namespace, group) in enumerate(zip(namespaces, self.groups or (None,), strict=True)):
            if group is not None and self._parts.events is not None:
                self._parts.events.name(namespace, GroupFacts.of(number, group))
            for tier in self.manager.files:
                tier.describe_namespace(namespace, self._fields(salt, group))
        self._described.update(namespaces)  # last: then other threads store their pages without this

    def tell_ranks(self, number: int, what: bytes) -> None:
        """Send these bytes to every rank under a new number: see `Rank.told`. Does not wait."""
        self._check_open()
        if self._parts.ranks is not None:
            self._parts.ranks.tell(number, what)

    # -- both ------------------------------------------------------------------------------------------------------

    def prefetch(
        self, tokens: Any, start: int = 0, salt: str = "", *, pin: float | None = None, whole: bool = False
    ) -> Prefetch:
        """Begin to bring cached pages from the SSD into the CPU tier, from token `start` on; returns at once.

        A shared pool, which lookups do not see, is asked first for the pages that no tier here has (`Prefetch.asking`).

        Prefetches move chunk by chunk, in turn, behind loads. A prefetch ends by itself or by its handle: cancel it
        when its request is cancelled. Pages that no load has used hold half of the CPU tier at most. Instead of tokens
        it takes a `Hit` of `lookup` and brings the pages of that hit; then leave `start` and `salt` out.

        `pin`: seconds, for attached planes. Pages that the prefetch brings, or finds in the CPU tier, are kept there
        for that long at most, or until the handle releases them. `handle.verified` is the number of verified tokens,
        and `handle.hit()` is a hit for `load`. Room is reserved now: all pins together hold half of the CPU tier, first
        come, first served. Pages without room are left out, and the prefetch ends with `no_room`. Pinned pages do not
        count as unused ones. Raises `InvalidValueError` for an impossible number of seconds or without a CPU tier.

        `whole`: the pages are of use together only, so with `pin` they come if all of them have room.
        """
        with self.calls:
            self._check_open()
            if isinstance(tokens, Hit):
                arguments.hit_alone(start, salt)
                pages, start = list(tokens.pages), tokens.start
            else:
                pages = self.pages(tokens, salt)[arguments.start_page(start, self.layout.page_tokens) :]
            return self._parts.prefetcher.start(pages, int(start), self.pin_seconds(pin), whole=whole)

    def pin_seconds(self, pin: Any) -> float | None:
        """The seconds of a prefetch's pins. Raises the errors of `prefetch` that are about them."""
        if pin is not None and self._check_attached().landing is None:
            raise InvalidValueError("pin is given, and there is no CPU tier", "add a cpu section, or leave pin out")
        return None if pin is None else arguments.span(pin, "pin", LONGEST_TTL)

    def pin(self, tokens: Any, seconds: float, salt: str = "") -> Pin:
        """Keep the cached prefix of `tokens` from eviction, on every tier that has pages of it, for `seconds` at most.

        Use it in a `with` block, or call `release`. `pin.tokens` is the number of pinned tokens: fewer if pages are not
        cached, or if pins hold half of a tier (or its only slot) already. Raises `InvalidValueError`.
        """
        return self.pin_pages(self.pages(tokens, salt), seconds)

    def pin_pages(self, pages: Sequence[Page], seconds: float) -> Pin:
        """`pin` of pages with known names, up to the first that no tier has."""
        with self.calls:
            return self.manager.pin(pages, seconds, self.layout.page_tokens)

    def on_events(self, callback: Callable[[KVEventBatch], object]) -> Callable[[], None]:
        """Call `callback(batch)` for each batch of KV events, in a thread of the engine.

        An event names pages that a tier has gained or lost; the pages it had when the engine opened may be told before
        this call. The callback must be quick, and must not call the engine. Returns a function that removes it. Raises
        `InvalidValueError` without a section `events`.
        """
        self._check_open()
        if self._parts.events is None:
            raise InvalidValueError("there are no events", "add the section events to the configuration: events: {}")
        return self._parts.events.add(callback)

    def named_events(self) -> tuple[NamedEvents, Callable[[], None]]:
        """KV events with an inference engine's own block names, and a function that ends them. Raises as `on_events`
        does."""
        events = NamedEvents(self.manager.tiers.values(), self.manager.lock)
        return events, self.on_events(events.heard)

    def clear(self) -> dict[str, int]:
        """Drop every page from every tier, and stores in progress; returns the pages removed, by tier."""
        with self.calls:
            return self.manager.clearing.clear()

    def invalidate(self, *namespaces: bytes) -> dict[str, int]:
        """Drop every page of these namespaces (see `namespaces()`) from every tier; returns the pages removed, by tier.

        The groups of a hybrid model go together: with one of them, the others of its salt, if the salt is among the
        first 4,096. `namespaces(salt)` has them all.
        """
        for namespace in namespaces:
            if not isinstance(namespace, bytes) or len(namespace) != KEY_BYTES:
                raise InvalidValueError(
                    f"{arguments.shown(namespace)} is not a namespace", "pass engine.namespace(salt)"
                )
        with self.calls:
            if not namespaces:
                return dict.fromkeys(self.manager.tiers, 0)
            # and those of the salts' other groups: a store of several groups checks the epoch of one of them
            known = list(self._namespaces.items()) if self.groups else []
            salts = {salt for (salt, _), digest in known if digest in namespaces}
            others = (digest for salt in salts for digest in self.namespaces(salt))
            return self.manager.clearing.clear(*{*namespaces, *others})

    def drain(self, seconds: float | None = None) -> None:
        """Wait until every accepted store is on its tiers. Raises `DeadlineError` after `seconds`."""
        self._end_stores(self._parts.storer.drain, seconds)

    def flush(self, seconds: float | None = None) -> None:
        """`drain`, and write pages that are only in the CPU tier to the SSD, as far as `store.write_policy` writes any.

        Needed with `write_back`, which writes pages late, for pages that must outlive this process. Pages that the SSD
        refused are not written. Raises `DeadlineError` after `seconds`.
        """
        self._end_stores(functools.partial(self._parts.storer.flush, change=self.calls), seconds)

    def _end_stores(self, wait: Callable[[float | None], bool], seconds: float | None) -> None:
        self._check_open()
        if not wait(arguments.seconds(seconds)):
            self._check_open()
            raise DeadlineError(
                f"stores are still on their way after {seconds} s",
                "wait longer; stats()['store_queue'] has the bytes on their way",
            )

    def stats(self) -> dict[str, Any]:
        """Counts and sizes as plain data: tiers, hits and misses by cause, loads, stores and drops by cause."""
        with self.calls:
            parts, layout = self._parts, self.layout
            return {
                "device": str(parts.planes.device),
                "copies": parts.copies[0].describe() if parts.copies else None,
                "ranks": None if parts.ranks is None else parts.ranks.describe(),
                "page_bytes": layout.page_bytes,
                "plain_page_bytes": layout.plane_bytes,
                "page_tokens": layout.page_tokens,
                "extent_bytes": layout.extent_bytes,
                "concerns": list(parts.concerns),
                **self.manager.stats(),
                **parts.storer.stats(),
                "prefetch": parts.prefetcher.stats(),
                "gate": self.gate.stats(),
                "events": None if parts.events is None else parts.events.describe(),
            }

    def check(self) -> CheckReport:
        """Compare every index with its slots, its catalogue and its bytes in the CPU tier. For a quiet engine. Changes
        nothing: to close and open the engine drops contradictory pages."""
        with self.calls:
            return CheckReport(tuple(self.manager.check()))

    def close(self, drain: bool = True) -> None:
        """Finish stores (or drop them), wait for loads, free everything. May be called twice.

        In a forked child of the process that opened the engine it does nothing, because threads and locks are not
        copied. If it is interrupted it goes on in the background, and the next `close` waits for its end. A call from a
        signal's handler inside another call does not wait either.

        After an interrupted call, stores that are not on the SSD yet are dropped. Raises `DeadlineError` if the engine
        is then not closed within its `deadline` and 30 s.
        """
        if not self.calls.forked:
            self._closing.close(drain=drain)
            self._forgotten.detach()
            self._exits_first()

    def _check_open(self) -> None:
        self.calls.check_whole()
        if self._closing.begun:
            raise EngineClosedError("the engine is closed", "open a new one with from_config")

    def _check_attached(self) -> TierManager:
        manager = self.manager
        if manager.gpu is not None:
            raise SequenceStateError("this engine owns its pool", "use sequence(), or attach your planes")
        return manager


def hits_and_slots(requests: Any, kind: type[AnyHit]) -> list[tuple[AnyHit, Any]]:
    """The requests of a batch of loads. Raises `InvalidValueError` if one has no hit of this kind."""
    pairs = list(requests) if isinstance(requests, Sequence) else [requests]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], kind):
            raise InvalidValueError(
                "a load is asked for without a hit", "pass the hit that lookup() of this engine returned, and its slots"
            )
    return pairs
