"""HybridEngine: the entry point for models whose layers keep different tokens, such as sliding windows beside full
attention.

    engine = HybridEngine.from_config("gdscache.yaml", planes)     # the file has model.groups
    hit = engine.lookup(tokens)
    load = engine.load(hit, {name: my_blocks[name][pages] for name, pages in hit.pages.items()})

A hit is a length at which every group has the pages that the next token attends to: all pages where all tokens are
kept, and the last window, or the state, elsewhere. Groups with planes of their own have a part of each tier, and a
directory below `ssd.path`; groups in the same planes share all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gdscache import arguments
from gdscache.arguments import remaining
from gdscache.config import Config
from gdscache.config.pools import PoolPart, pool_parts, window_every
from gdscache.cuda.streams import Event, resolve_device
from gdscache.engine.closing import settled
from gdscache.engine.engine import CacheEngine, CheckReport, hits_and_slots
from gdscache.engine.hybrid_handles import (
    HybridHit,
    HybridLoad,
    HybridPin,
    HybridPrefetch,
    HybridStore,
    all_begun,
    group_reasons,
    group_words,
)
from gdscache.engine.hybrid_states import StandingStates
from gdscache.engine.opening import FromConfig, layer_groups
from gdscache.engine.packing import as_directory
from gdscache.errors import (
    GdsCacheError,
    InvalidValueError,
    PlanesError,
    PoolFullError,
    SlotCountError,
    SlotRangeError,
    TokensError,
)
from gdscache.events.base import KVEventBatch
from gdscache.gate.gate import Gate
from gdscache.groups.base import Group, alignment, complete, kept, lengths, marks, needed
from gdscache.groups.names import Chain, GroupNames
from gdscache.groups.pools import Pool
from gdscache.index.retention import LONGEST_TTL
from gdscache.limits import LIMITS, MAX_COUNT, EngineLimits
from gdscache.load.handle import LayerwiseLoad
from gdscache.pages.hit import Hit
from gdscache.pages.keys import PageHashes, PageNames, as_tokens, namespace_digest
from gdscache.pages.planes import PLANES, Blocks, PagedPlanes, by_layer, host_indices
from gdscache.prefetch.handle import Prefetch
from gdscache.ranks.address import RankAddress
from gdscache.runtime.threads import in_turn
from gdscache.sizes import about
from gdscache.tiers.measures import TokenCounts
from gdscache.tiers.pins import Pin
from gdscache.tracing import Timeline

Slots = Mapping[str, Any]
_SALTS_KEPT = 4096
_log = logging.getLogger("gdscache")
_TRIES = 4  # pages may go while others are looked up


class HybridEngine(FromConfig[Sequence[RankAddress]]):
    """A tiered KV cache for a model with `model.groups`.

    `planes[layer][plane]`: tensors of the model's layers, (blocks, block_tokens, *row); layers of one group have equal
    numbers of blocks. None: the engine allocates them, of `gpu.capacity` together, and `take` gives blocks of them.
    `engines`: a `CacheEngine` for each pool of groups in the same planes, and `names` of its groups. All methods may be
    called from many threads; Ctrl-C works as for `CacheEngine`. Raises a subclass of `GdsCacheError` that names the
    part that cannot be opened.

    Many methods: they are the calls of a `CacheEngine`, each over all pools.
    """

    def __init__(
        self,
        config: Config,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        ranks: Sequence[Sequence[RankAddress]] | None = None,
        timeline: Timeline | None = None,
        limits: EngineLimits = LIMITS,
    ) -> None:
        """`ranks`: of each pool, in the order of `pools_of`, the addresses of the processes that have its planes; then
        call `engines` for loads and stores, whose handles have the orders for ranks.

        `timeline` and `limits` are as for `CacheEngine`.
        """
        self.groups: tuple[Group, ...] = layer_groups(config)
        if not self.groups:
            raise InvalidValueError("model.groups is empty", "list the groups of layers, or use CacheEngine")
        self.config = config = as_directory(config)
        parts = pool_parts(config)
        self.pools: list[Pool] = [part.pool for part in parts]
        if config.tiers and len(parts) > 1:
            raise InvalidValueError(
                f"tiers names {config.tiers[0].tier}, and groups with planes of their own have the CPU tier and the "
                "SSD alone",
                "take tiers out",
            )
        told = len(ranks) if isinstance(ranks, Sequence) else 0
        if ranks is not None and (planes is not None or told != len(parts)):
            raise InvalidValueError(
                f"ranks of {told} pools are given, for {len(parts)} pools and {len(planes or ())} layers of planes",
                "make a Rank of each pool's planes in each process, and pass their addresses alone",
            )
        self.window_every = window_every(config)
        self.alignment = alignment(self.groups)
        self.hash_tokens = math.gcd(*(group.page_tokens for group in self.groups))
        self._pages = PageNames(self.hash_tokens)
        self._base = functools.lru_cache(_SALTS_KEPT)(lambda salt: namespace_digest(config.model.base_fields(salt)))
        self.names = [[self.groups[g].name for g in pool.groups] for pool in self.pools]
        self._pool_of = {g: p for p, pool in enumerate(self.pools) for g in pool.groups}
        self._by_name = {group.name: g for g, group in enumerate(self.groups)}
        self._places = {layer: (p, at) for p, pool in enumerate(self.pools) for at, layer in enumerate(pool.layers)}
        self.owns_planes = planes is None and ranks is None
        self.planes: list[tuple[torch.Tensor, ...]] = []
        if ranks is None:
            self.planes = _allocated(config, parts) if planes is None else by_layer(planes)
            if len(self.planes) != (layers := config.model.layers):
                raise PlanesError(f"{len(self.planes)} layers of planes for a model of {layers}", PLANES)
        with contextlib.ExitStack() as undo:
            self.engines: list[CacheEngine] = []
            for number, part in enumerate(parts):
                own = [self.planes[layer] for layer in part.pool.layers] if ranks is None else None
                of = None if ranks is None else ranks[number]
                self.engines.append(undo.enter_context(_opened(part, own, of, timeline, limits)))
            if unserved := [tier.name for tier in self.engines[0].manager.files if not tier.served]:
                raise InvalidValueError(
                    f"tiers has {', '.join(unserved)}, which a prefetch asks for pages; those of groups do not",
                    "take tiers out",
                )
            undo.pop_all()
        self._free = [[*range(engine.tables.blocks)] if self.owns_planes else [] for engine in self.engines]
        self._taken: list[set[int]] = [set() for _ in self.engines]
        self._lock = threading.Lock()
        self.states = StandingStates(
            self.groups, [pool.groups for pool in self.pools], [engine.manager for engine in self.engines]
        )
        first = self.engines[0]
        self._tokens = TokenCounts(tier for engine in self.engines for tier in engine.manager.tiers)
        self.gate = Gate(config.load.gate, first.gate.costs, first.layout.page_tokens, first.layout.bytes_in)
        for engine in self.engines:
            engine.calls.others = [other.calls for other in self.engines if other is not engine]
        self.engines[-1]._closing.server = settled(  # of the pool that `close` begins with
            self, config.metrics, [engine._parts for engine in self.engines]
        )

    @property
    def by_groups(self) -> dict[str, CacheEngine]:
        return {", ".join(names): engine for names, engine in zip(self.names, self.engines, strict=True)}

    # -- requests ------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, start: int = 0, salt: str = "") -> HybridHit:
        """The longest cached prefix behind token `start`, a multiple of `alignment`, at which all groups have the pages
        of a hit. `tokens`: token ids, or `PageHashes` of `hash_tokens` tokens each, from the first of the request on.

        Takes no lease and changes nothing but recency. With `load.gate: enforcing`, a hit that takes longer to load
        than to compute is left out as a whole.
        """
        (names, length), start = self._request(tokens, salt), self._start(start)
        return self.lookup_named(names, length, length, start)

    def lookup_named(self, names: GroupNames, most: int, tokens: int, start: int = 0, before: int = 0) -> HybridHit:
        """`lookup` for a request of `tokens` tokens whose pages have names already: the longest hit that ends at token
        `most` or before it. `names`: of `group_names`. `before`: tokens before the first that these name."""
        hit = self._find(names, most, start)
        loads = [engine.load_prices(part.tiers) for engine, part in zip(self.engines, hit.parts, strict=True)]
        decided = self.gate.decide_whole(loads, before + start, before + tokens, hit.tokens)
        most = min(most, names.tokens) // self.alignment * self.alignment
        managers = [engine.manager for engine in self.engines]  # not the engines, which may be dropped
        told = {g: managers[p].told for g, p in self._pool_of.items()}
        declined = hit.tokens if decided.pages < sum(len(part.pages) for part in hit.parts) else 0
        why = functools.partial(group_reasons, told, names, start, most, declined)
        if declined:
            return dataclasses.replace(self.nothing(start), parted=hit.parted, declined=declined, why=why)
        if start + hit.tokens < most:
            managers[0].sample = lambda: group_words(why())
        return dataclasses.replace(hit, seconds=decided.seconds, recompute_seconds=decided.recompute_seconds, why=why)

    def reach(self, names: GroupNames, most: int, start: int = 0) -> tuple[int, int]:
        """The end of the longest hit behind token `start`, and the tokens up to which all groups that keep all have
        full pages: both in tokens, up to `most`. Counts as no use of the pages."""
        has, most = names.presence(*(engine.manager.visible for engine in self.engines)), min(most, names.tokens)
        whole = complete(self.groups, has, most, local=start)
        return next(lengths(self.groups, has, most, local=start, whole=whole), start), whole

    def _find(self, names: GroupNames, most: int, start: int) -> HybridHit:
        engines = self.engines
        for engine in engines:
            engine.manager.have_watched()
        most = min(most, names.tokens) // self.alignment * self.alignment
        with engines[0].timeline.span("lookup", pages=most // self.alignment):
            whole, used = start, None
            for _ in range(_TRIES):
                longest, whole = self.reach(names, most, start)
                if (used := self._used(names, start, longest)) is not None:
                    break
            hit = used or self.nothing(start)
            missing = max(0, most - start - hit.tokens)
            for engine, pool in zip(engines, self.pools, strict=True):
                with engine.calls:
                    engine.manager.missed(missing // min(self.groups[g].page_tokens for g in pool.groups))
            tiers = [tier for part in hit.parts for tier in part.tiers]
            self._tokens.answered(max(0, most - start), hit.tokens, tiers)
        return dataclasses.replace(hit, parted=max(start, whole))

    def _used(self, names: GroupNames, start: int, found: int) -> HybridHit | None:
        """The hit that ends at token `found`, and a use of its pages; None if one has gone since."""
        pages = needed(self.groups, found, start)
        parts, chains = list[Hit](), names.chain(pages)
        for engine, chain in zip(self.engines, chains, strict=True):
            with engine.calls:
                tiers = tuple(engine.manager.lookup(chain.pages, 0))
            if len(tiers) < len(chain):
                return None
            parts.append(Hit(start, len(chain) * engine.layout.page_tokens, tiers, None, chain.pages))
        self.states.stand(names, pages)
        by_name = {group.name: some for group, some in zip(self.groups, pages, strict=True)}
        return HybridHit(start, found - start, by_name, start, parts=tuple(parts), order=tuple(chains))

    def behind(self, hit: HybridHit, start: int) -> HybridHit:
        """The same hit from token `start` on, with the pages that end behind it."""
        sizes = {group.name: group.page_tokens for group in self.groups}
        pages = {n: range(max(its.start, start // sizes[n]), its.stop) for n, its in hit.pages.items()}
        parts, chains = list[Hit](), list[Chain]()
        for part, chain in zip(hit.parts, hit.order, strict=True):
            some = [at for at, one in enumerate(chain) if one.number in pages[self.groups[one.group].name]]
            parts.append(part.part(some))
            chains.append(chain.part(some))
        tokens = hit.start + hit.tokens - start
        return dataclasses.replace(
            hit, start=start, tokens=tokens, pages=pages, parts=tuple(parts), order=tuple(chains)
        )

    def load(self, hit: HybridHit, slots: Slots, after: Event = None) -> HybridLoad:
        """Begin copying a hit into blocks; returns at once. `slots`: of each group by name, blocks for the pages
        `hit.pages[name]`, in that order. Written after the current stream's work so far, or after the event `after`.

        Raises `InvalidValueError`, `SlotCountError` or `SlotRangeError`, and begins nothing then.
        """
        return self.load_many([(hit, slots)], after)

    def load_many(self, requests: Sequence[tuple[HybridHit, Slots]], after: Event = None) -> HybridLoad:
        """Begin a batch of loads, each a hit and its slots: one submit a pool, and one wait a layer. See
        `CacheEngine.load_many`."""
        pairs = hits_and_slots(requests, HybridHit)
        self._check_own(hit for hit, _ in pairs)
        batches: list[list[tuple[Hit, Blocks]]] = [[] for _ in self.engines]
        for hit, slots in pairs:
            for batch, part, table in zip(batches, hit.parts, self._tables(hit, slots), strict=True):
                if len(table):
                    batch.append((part, table))
        for engine, batch in zip(self.engines, batches, strict=True):
            engine.check_batch(batch)
        loads: list[LayerwiseLoad | None] = []
        try:
            for engine, batch in zip(self.engines, batches, strict=True):
                loads.append(engine.load_many(batch, after) if batch else None)
        except BaseException as error:  # no caller gets a handle
            begun = [load for load in loads if load is not None]
            for load in begun:
                load.cancel()
            # The caller uses the blocks again. No rank has an order yet, and an interrupt is not held up.
            if isinstance(error, GdsCacheError) and self.planes:
                for load in begun:
                    load.release_event.synchronize()
            raise
        return HybridLoad(self, [hit for hit, _ in pairs], loads)

    def _tables(self, hit: HybridHit, slots: Slots) -> list[Blocks]:
        """Blocks for the pages of a hit, pool by pool, in the order of the engines' pages."""
        self._check_names(slots)
        tables: list[Blocks] = []
        for engine, order in zip(self.engines, hit.order, strict=True):
            names = {g: self.groups[g].name for g in {*order.groups}}
            rows = {g: self._table(name, slots, hit, engine) for g, name in names.items()}
            first = {g: hit.pages[name].start for g, name in names.items()}
            blocks = [rows[g][number - first[g]] for g, number in zip(order.groups, order.numbers, strict=True)]
            tables.append(engine.tables.block_table(np.array(blocks, np.int64)))
        for name, pages in hit.pages.items():
            if not pages and name in slots and len(host_indices(slots[name])):
                raise SlotCountError(f"group {name!r}: slots are given, and the hit has no page", "leave the group out")
        return tables

    def store(
        self,
        tokens: Any,
        slots: Slots,
        start: int = 0,
        salt: str = "",
        after: Event = None,
        *,
        keep_at: Iterable[int] = (),
        priority: int = 0,
        ttl: float | None = None,
    ) -> HybridStore:
        """Begin storing the full pages of `tokens` from token `start` on. Returns at once.

        `slots`: of each group by name, blocks of its pages from `start` on, page after page; -1 for the blocks of pages
        that the group let go. Of windows and states only the pages are stored that a hit needs at the end of `tokens`,
        at each `store.window_every` tokens, or at the lengths `keep_at`. These lengths may be behind `tokens`, if a
        prompt is stored chunk by chunk. The rest is as for `CacheEngine.store`. Raises the errors of that, and
        `InvalidValueError` for `keep_at`; nothing is stored then.
        """
        (names, length), start = self._request(tokens, salt), self._start(start)
        self._check_names(slots)
        ends = self.window_ends(length, keep_at)
        some: dict[int, Blocks] = {}
        for engine, pool in zip(self.engines, self.pools, strict=True):
            some |= {g: self._rows(self.groups[g], slots, engine, start, length) for g in pool.groups}
            given = np.concatenate([some[g].reshape(-1) for g in pool.groups])
            engine.tables.check_blocks(given[given != -1])
        firsts = [start // group.page_tokens for group in self.groups]
        wanted: list[list[int]] = []
        for g, group in enumerate(self.groups):
            first, there = firsts[g], np.all(some[g] >= 0, axis=1).tolist()
            stop = first + len(some[g])
            wanted.append([number for number in kept(group, ends, first, stop) if there[number - first]])
        self.states.stand(names, wanted)
        chains, tables = names.chain(wanted), list[Blocks]()
        for engine, chain in zip(self.engines, chains, strict=True):
            rows = [some[g][number - firsts[g]] for g, number in zip(chain.groups, chain.numbers, strict=True)]
            tables.append(np.array(rows, np.int64).reshape(len(chain), engine.tables.blocks_per_page))
        stores = (
            engine.store_pages(chain.pages, table, salt, after, priority=priority, ttl=ttl)
            for engine, chain, table in zip(self.engines, chains, tables, strict=True)
        )
        handles = all_begun(stores, wait=bool(self.planes))
        return HybridStore([group.name for group in self.groups], handles, chains)

    def window_ends(self, length: int, keep_at: Iterable[int]) -> set[int]:
        """The lengths at which windows and states are kept, including lengths behind `length` that need a page before
        it. Raises `InvalidValueError`."""
        size, length = self.alignment, arguments.whole(length, "length", 0, MAX_COUNT)
        try:
            given = [arguments.whole(one, "keep_at", 0, MAX_COUNT) for one in keep_at]
        except TypeError:  # also of a tensor without dimensions, which is an `Iterable`
            message = f"keep_at is {arguments.shown(keep_at)}"
            raise InvalidValueError(message, "pass a list of lengths: [hit.parted]") from None
        ends = {one // size * size for one in (length, *given)}
        behind = length + max(group.span for group in self.groups) + size
        return (ends | {*marks(self.window_every, size, behind)}) - {0}

    def prefetch(self, tokens: Any, start: int = 0, salt: str = "", *, pin: float | None = None) -> HybridPrefetch:
        """Begin to bring the pages of a hit from the SSD into the CPU tier; returns at once. `tokens`: token ids or
        `PageHashes`, for their longest hit without a gate; or a `HybridHit`, which has its own `start` and `salt`.
        `pin`: seconds for which they are kept there: see `CacheEngine.prefetch`. Where pins have no room for all of the
        pages, none is brought or pinned."""
        pin = self.engines[0].pin_seconds(pin)  # here: a call that raises is no lookup
        if isinstance(tokens, HybridHit):
            arguments.hit_alone(start, salt)
            self._check_own([hit := tokens])
        else:
            names, length = self._request(tokens, salt)
            hit = self._find(names, length, self._start(start))
        with contextlib.ExitStack() as undo:
            parts: list[Prefetch | None] = []
            for engine, part in zip(self.engines, hit.parts, strict=True):
                parts.append(undo.enter_context(engine.prefetch(part, pin=pin, whole=True)) if part.pages else None)
            if not any(part.short for part in filter(None, parts)):
                undo.pop_all()
        return HybridPrefetch(self, hit, parts)

    def pin(self, tokens: Any, seconds: float, salt: str = "") -> HybridPin:
        """Keep the pages of the longest hit from eviction on every tier that has them, for `seconds` at most."""
        seconds = arguments.span(seconds, "seconds", LONGEST_TTL)  # here: a call that raises is no lookup
        names, length = self._request(tokens, salt)
        hit = self._find(names, length, 0)
        pins: list[tuple[Pin, int]] = []
        with contextlib.ExitStack() as undo:
            for engine, part in zip(self.engines, hit.parts, strict=True):
                pin = undo.enter_context(engine.pin_pages(part.pages, seconds))
                pins.append((pin, part.tokens))
            undo.pop_all()
        return HybridPin(hit, pins)

    # -- blocks of its own ---------------------------------------------------------------------------------------------

    def take(self, group: str, pages: int) -> list[int]:
        """Blocks for `pages` pages of a group, if the engine allocated the planes.

        Raises `PoolFullError` if fewer are free, and takes none then.
        """
        pool = self._own_pool(group)
        wanted = arguments.whole(pages, "pages", 0, MAX_COUNT) * self.engines[pool].tables.blocks_per_page
        with self._lock:
            free = self._free[pool]
            if len(free) < wanted:
                raise PoolFullError(
                    f"group {group!r} needs {wanted} blocks, and {len(free)} are free", "raise gpu.capacity"
                )
            taken = free[len(free) - wanted :]
            del free[len(free) - wanted :]
            self._taken[pool].update(taken)
        return taken

    def give(self, group: str, blocks: Iterable[int]) -> None:
        """Give blocks of `take` back: integers, also in an array or a tensor. Raises `SlotRangeError` for one that is
        not taken, and takes none back then."""
        pool = self._own_pool(group)
        try:
            given = host_indices([*blocks]).tolist()
        except TypeError:  # also of a tensor without dimensions, which is an `Iterable`
            raise SlotRangeError(f"blocks are {arguments.shown(blocks)}", "pass a list of blocks") from None
        with self._lock:
            if len(set(given)) < len(given) or not self._taken[pool].issuperset(given):
                raise SlotRangeError(
                    f"group {group!r}: blocks are given back that are not taken", "give each block back once"
                )
            self._taken[pool].difference_update(given)
            self._free[pool] += given

    def _own_pool(self, group: str) -> int:
        if not self.owns_planes:
            raise InvalidValueError("the planes are attached", "take blocks of your own allocator")
        return self._pool_of[self._number(group)]

    def place(self, layer: int) -> tuple[int, int]:
        return self._places[arguments.whole(layer, "layer", 0, len(self._places) - 1)]

    # -- all pools -----------------------------------------------------------------------------------------------------

    def nothing(self, start: int = 0) -> HybridHit:
        empty = {group.name: range(start // group.page_tokens, start // group.page_tokens) for group in self.groups}
        none = tuple(Hit(start, 0, (), None, ()) for _ in self.pools)
        return HybridHit(start, 0, empty, start, parts=none, order=tuple(Chain() for _ in self.pools))

    def observe_prefill(
        self, tokens: int, cached_tokens: int, seconds: float, load_seconds: float | None = None
    ) -> None:
        for engine in self.engines:
            engine.observe_prefill(tokens, cached_tokens, seconds, load_seconds)

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        name = arguments.text(tier, "tier")
        having = [engine for engine in self.engines if name in engine.manager.tiers]
        for engine in having or self.engines:  # of which the first says that there is no such tier
            engine.observe_load(tier, nbytes, seconds)

    def on_events(self, callback: Callable[[str, KVEventBatch], object]) -> Callable[[], None]:
        """Call `callback(names, batch)` for each batch of KV events: see `CacheEngine.on_events`.

        `names`: of the pool's groups, as in `by_groups`. Batches are numbered pool by pool. Of several pools none tells
        `AllBlocksCleared`: a clear is told as `BlockRemoved` of its pages. Returns a function that removes it.
        """
        with contextlib.ExitStack() as undo:
            for names, engine in self.by_groups.items():
                undo.callback(engine.on_events(functools.partial(callback, names)))
            return undo.pop_all().close

    def clear(self) -> dict[str, int]:
        return _sum(engine.clear for engine in self.engines)

    def invalidate(self, salt: str = "") -> dict[str, int]:
        """Drop every page of a request's salt from every tier; returns the pages removed, by tier."""
        return _sum(functools.partial(engine.invalidate, *engine.namespaces(salt)) for engine in self.engines)

    def drain(self, seconds: float | None = None) -> None:
        left = remaining(seconds)
        for engine in self.engines:
            engine.drain(left())

    def flush(self, seconds: float | None = None) -> None:
        left = remaining(seconds)
        for engine in self.engines:
            engine.flush(left())

    def stats(self) -> dict[str, Any]:
        """`pools`: `CacheEngine.stats` of each pool, by the names of its groups; `gate` and `tokens`: of whole hits."""
        return {
            "pools": {names: engine.stats() for names, engine in self.by_groups.items()},
            "gate": self.gate.stats(),
            "tokens": self._tokens.describe(),
        }

    def check(self) -> CheckReport:
        """See `CacheEngine.check`. Problems begin with the names of their pool's groups."""
        found = {names: engine.check().problems for names, engine in self.by_groups.items()}
        return CheckReport(tuple(f"{names}: {problem}" for names, some in found.items() for problem in some))

    def close(self, drain: bool = True) -> None:
        """See `CacheEngine.close`."""
        with contextlib.ExitStack() as all_of_them:
            for engine in self.engines:
                all_of_them.callback(engine.close, drain)

    def namespaces(self, salt: str = "") -> list[bytes]:
        """The namespace of each group, for a request's salt."""
        of = dict[int, bytes]()
        for engine, pool in zip(self.engines, self.pools, strict=True):
            of |= zip(pool.groups, engine.namespaces(salt), strict=True)
        return [of[g] for g in range(len(self.groups))]

    def group_names(self, salt: str, digest_tokens: int) -> GroupNames:
        return GroupNames(self.groups, self.namespaces(salt), digest_tokens, [pool.groups for pool in self.pools])

    def _request(self, tokens: Any, salt: str) -> tuple[GroupNames, int]:
        """The names of a request's pages, and its tokens. Raises `TokensError`, and `InvalidValueError` for a salt that
        is no text."""
        # the first link of a request's digests: the namespace of the whole model, with all its groups
        base, size = self._base(arguments.text(salt, "salt")), self.hash_tokens
        if isinstance(tokens, PageHashes):
            if not tokens.whole:
                raise TokensError(
                    "page hashes with a parent begin in the middle of a request",
                    "pass those of the whole request: windows are counted from its first token",
                )
            length, pages = tokens.length(size), tokens.pages(base)
        else:
            ids = as_tokens(tokens)
            length, pages = len(ids), self._pages.of(base, ids)
        names = self.group_names(salt, size)
        names.extend([page.key for page in pages])
        return names, length

    def _start(self, start: Any) -> int:
        return arguments.start_page(start, self.alignment) * self.alignment

    def _check_own(self, hits: Iterable[HybridHit]) -> None:
        if any(len(hit.parts) != len(self.engines) or hit.pages.keys() != self._by_name.keys() for hit in hits):
            raise InvalidValueError("a hit is of another engine", "pass the hits that lookup() of this engine returned")

    def _check_names(self, slots: Any) -> None:
        if not isinstance(slots, Mapping):
            raise InvalidValueError(
                f"slots are {arguments.shown(slots)}", "pass a mapping: the blocks of each group by its name"
            )
        for name in slots:
            self._number(name)

    def _number(self, group: Any) -> int:
        number = self._by_name.get(group) if isinstance(group, str) else None
        if number is None:
            names = ", ".join(self._by_name)
            raise InvalidValueError(f"there is no group {arguments.shown(group)}", f"the model's groups are {names}")
        return number

    def _given(self, name: str, slots: Slots) -> Any:
        if name not in slots:
            raise InvalidValueError(f"no slots are given for group {name!r}", "pass slots for each group")
        return slots[name]

    def _table(self, name: str, slots: Slots, hit: HybridHit, engine: CacheEngine) -> Blocks:
        table, pages = engine.tables.block_table(self._given(name, slots)), len(hit.pages[name])
        if len(table) != pages:
            raise SlotCountError(
                f"group {name!r}: slots for {len(table)} pages, and the hit has {pages}",
                f"pass blocks for each page of hit.pages[{name!r}]; blocks of a page: {engine.tables.blocks_per_page}",
            )
        return table

    def _rows(self, group: Group, slots: Slots, engine: CacheEngine, start: int, length: int) -> Blocks:
        given, each = host_indices(self._given(group.name, slots)), engine.tables.blocks_per_page
        pages = max(0, length // group.page_tokens - start // group.page_tokens)
        if len(given) % each or len(given) // each > pages:
            raise SlotCountError(
                f"group {group.name!r}: {len(given)} blocks, of which {each} make a page, and there are {pages} full "
                f"pages of {group.page_tokens} tokens from token {start} on",
                "pass the blocks of full pages only, -1 for pages that were let go",
            )
        return given.reshape(-1, each)


def _sum(drops: Iterable[Callable[[], Mapping[str, int]]]) -> dict[str, int]:
    """The pages that all pools drop, by tier. An error of one keeps none of the others from it."""
    total = Counter[str]()
    in_turn(*(functools.partial(lambda drop: total.update(drop()), drop) for drop in drops))
    return dict(total)


def _opened(
    part: PoolPart,
    planes: Sequence[tuple[torch.Tensor, ...]] | None,
    ranks: Sequence[RankAddress] | None,
    timeline: Timeline | None,
    limits: EngineLimits,
) -> CacheEngine:
    try:
        with part.shares():
            engine = CacheEngine(part.config, planes, ranks=ranks, timeline=timeline, limits=limits, pool=part)
    except PlanesError as error:
        where = f"groups {part.names}, whose layers are {list(part.pool.layers)} of the model"
        raise PlanesError(f"{where}: {error.message}", error.hint) from None
    sections = ("cpu", part.config.cpu), ("ssd", part.config.ssd)
    sizes = ", ".join(f"{name} {about(one.capacity)}" for name, one in sections if one is not None)
    layers = len(part.pool.layers)
    _log.info("groups %s: %d layers, %.1f %% of each size: %s", part.names, layers, 100 * part.share, sizes)
    return engine


def _allocated(config: Config, parts: Sequence[PoolPart]) -> list[tuple[torch.Tensor, ...]]:
    device = resolve_device(config.gpu.device)
    planes: list[tuple[torch.Tensor, ...]] = [()] * config.model.layers
    for part in parts:
        layout = part.config.model.layout()
        with torch.inference_mode(mode=False):
            own = PagedPlanes.allocate(layout, part.config.gpu.capacity // layout.plane_bytes, device)
        for layer, tensors in zip(part.pool.layers, own.tensors, strict=True):
            planes[layer] = tensors
    return planes
