"""HybridEngine: the door for models whose layers keep different tokens, such as sliding windows beside full attention.

    engine = HybridEngine.from_config("gdscache.yaml", planes)     # the file has model.groups
    hit = engine.lookup(tokens)
    load = engine.load(hit, {name: my_blocks[name][pages] for name, pages in hit.pages.items()})

A hit is a length at which every group has what the next token attends to: all pages where all tokens are kept, and the
last window elsewhere. Groups with planes of their own have a part of each tier, and a directory below `ssd.path`;
groups in the same planes share all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from gdscache import arguments
from gdscache.config import Config, load_config
from gdscache.cuda.streams import Event, resolve_device
from gdscache.engine import CacheEngine, CheckReport
from gdscache.errors import GeometryError, InvalidValueError, PoolFullError, SlotCountError, TokensError
from gdscache.gate.costs import Prices
from gdscache.groups.base import Group, alignment, complete, kept, lengths, needed
from gdscache.groups.names import GroupNames, GroupPage
from gdscache.groups.pools import Pool, pools_of, shares
from gdscache.limits import LIMITS, EngineLimits
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.hit import Hit
from gdscache.pages.keys import PageHashes, PageNames, as_tokens, namespace_digest
from gdscache.pages.planes import Blocks, PagedPlanes
from gdscache.prefetch.handle import Prefetch, PrefetchReport
from gdscache.store.handle import StoreHandle, StoreReport
from gdscache.tiers.pins import Pin
from gdscache.tracing import Timeline

Slots = Mapping[str, Any]
_TRIES = 2  # pages may go while one looks for others
_log = logging.getLogger("gdscache")


@dataclasses.dataclass(frozen=True)
class HybridHit:
    """What `lookup` found: a snapshot, without a lease. `tokens` tokens from `start` on are cached in all groups.

    `pages`: by group, the numbers of the pages that a load brings, counted from the request's first token. `parted`:
    tokens up to which the groups that keep all tokens have every page. Where it is more than the hit, another prompt
    parted there: pass it as `keep_at` to `store`, and the next one finds its windows. `seconds` and
    `recompute_seconds` are expected, None before they are known; `declined`: tokens that the gate left out.
    """

    start: int
    tokens: int
    pages: Mapping[str, range]
    parted: int
    seconds: float | None = None
    recompute_seconds: float | None = None
    declined: int = 0
    parts: tuple[Hit, ...] = dataclasses.field(default=(), repr=False)
    order: tuple[tuple[GroupPage, ...], ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class HybridReport:
    """The verdict on a load. `tokens`: those of the hit, or 0 where a page of any group is bad."""

    tokens: int
    pages: dict[str, tuple[PageStatus, ...]]
    bytes_by_tier: dict[str, int]
    seconds: float


class HybridLoad:
    """The handle of a load. Made by `HybridEngine.load`; thread-safe."""

    def __init__(self, engine: HybridEngine, hit: HybridHit, loads: Sequence[LayerwiseLoad | None]) -> None:
        self._engine, self._hit, self._loads = engine, hit, loads

    @property
    def tokens(self) -> int:
        """Tokens on their way: those of the hit, or 0 where a page of it has gone since."""
        whole = all(
            load is None or load.parts[0].pages == len(order)
            for load, order in zip(self._loads, self._hit.order, strict=True)
        )
        return self._hit.tokens if whole else 0

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's pages: see `LayerwiseLoad.wait`. `layer`: of the model."""
        pool, local = self._engine.place(layer)
        load = self._loads[pool]
        if load is not None:
            load.wait(local, seconds)

    def done(self) -> bool:
        """True when the verdict is there; never waits."""
        return all(load is None or load.done() for load in self._loads)

    def result(self, seconds: float | None = None) -> HybridReport:
        """The verdict. Never raises for a bad page; `DeadlineError` when it is late."""
        pages: dict[str, list[PageStatus]] = {name: [] for name in self._hit.pages}
        by_tier, took, whole = Counter[str](), 0.0, True
        for load, order in zip(self._loads, self._hit.order, strict=True):
            if load is None:
                continue
            report = load.result(seconds)
            statuses = [*report.pages, *[PageStatus.GONE] * (len(order) - len(report.pages))]
            for one, status in zip(order, statuses, strict=True):
                pages[self._engine.groups[one.group].name].append(status)
                whole = whole and status is PageStatus.LOADED
            by_tier.update(report.bytes_by_tier)
            took = max(took, report.seconds)
        return HybridReport(
            self._hit.tokens if whole else 0, {n: tuple(some) for n, some in pages.items()}, dict(by_tier), took
        )

    def cancel(self) -> None:
        """Stop early. The slots stay the engine's until `released`."""
        for load in filter(None, self._loads):
            load.cancel()

    def released(self, seconds: float | None = None) -> None:
        """Wait until nothing writes to the slots any more. Raises `DeadlineError`."""
        for load in filter(None, self._loads):
            load.release_event.synchronize(seconds)


class HybridStore:
    """The handle of a store. Made by `HybridEngine.store`; thread-safe."""

    def __init__(self, handles: Sequence[StoreHandle]) -> None:
        self._handles = handles

    def done(self) -> bool:
        """True when every page has its outcome; never waits."""
        return all(handle.done() for handle in self._handles)

    def result(self, seconds: float | None = None) -> list[StoreReport]:
        """What every tier committed, by pool. Raises `DeadlineError` when it takes longer than `seconds`."""
        return [handle.result(seconds) for handle in self._handles]

    def released(self, seconds: float | None = None) -> None:
        """Wait until the slots may be written again. Raises `DeadlineError`."""
        for handle in self._handles:
            handle.release_event.synchronize(seconds)


class HybridPrefetch:
    """The handle of a prefetch. Made by `HybridEngine.prefetch`; leaving its `with` block cancels it."""

    def __init__(self, engine: HybridEngine, hit: HybridHit, parts: Sequence[Prefetch | None]) -> None:
        self._engine, self._hit, self._parts = engine, hit, parts

    @property
    def verified(self) -> int:
        """Tokens of the hit that lie in the CPU tier now, pinned, and were found good: all of them, or 0."""
        there = zip(self._engine.engines, self._parts, self._hit.order, strict=True)
        good = all(
            part is None or part.verified == len(order) * engine.layout.page_tokens for engine, part, order in there
        )
        return self._hit.tokens if good else 0

    def hit(self) -> HybridHit:
        """The hit of pages that are verified and pinned, for a load that cannot fail but by the copy itself; one of 0
        tokens where some are not."""
        if not self.verified:
            return self._engine.nothing(self._hit.start)
        parts = tuple(
            part if prefetch is None else prefetch.hit()
            for part, prefetch in zip(self._hit.parts, self._parts, strict=True)
        )
        return dataclasses.replace(self._hit, parts=parts)

    def done(self) -> bool:
        """True when it has ended; never waits."""
        return all(part is None or part.done() for part in self._parts)

    def result(self, seconds: float | None = None) -> list[PrefetchReport]:
        """Wait until it has ended, by pool: see `Prefetch.result`."""
        return [part.result(seconds) for part in self._parts if part is not None]

    def cancel(self) -> None:
        """End it, and its pins. Twice is fine."""
        for part in filter(None, self._parts):
            part.cancel()

    release = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class HybridPin:
    """The pages of a hit, kept from eviction until `release` or until its time is up."""

    def __init__(self, hit: HybridHit, pins: Sequence[tuple[Pin, int]]) -> None:
        """`pins`: of each pool, with the tokens that it counts where it holds all its pages."""
        self._hit, self._pins = hit, pins

    @property
    def tokens(self) -> int:
        """Tokens of the hit, all of whose pages it holds now; else 0."""
        return self._hit.tokens if all(pin.tokens == whole for pin, whole in self._pins) else 0

    def release(self) -> None:
        """Let the pages go; twice is fine."""
        for pin, _ in self._pins:
            pin.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class HybridEngine:
    """A tiered KV cache for a model with `model.groups`.

    `planes[layer][plane]`: tensors of the model's layers, (blocks, block_tokens, *row); layers of one group have equal
    numbers of blocks. None: the engine allocates them, of `gpu.capacity` together, and `take` gives blocks of them.
    All methods may be called from many threads. Raises a subclass of `GdsCacheError` that names what cannot be opened.
    """

    def __init__(
        self,
        config: Config,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        timeline: Timeline | None = None,
        limits: EngineLimits = LIMITS,
    ) -> None:
        self.config = config
        self.groups: tuple[Group, ...] = config.model.layer_groups()
        if not self.groups:
            raise InvalidValueError("model.groups is empty", "list the groups of layers, or use CacheEngine")
        if config.tiers:
            raise InvalidValueError(
                f"tiers names {config.tiers[0].tier}, and groups of layers have the CPU tier and the SSD alone",
                "take tiers out",
            )
        self.pools = pools_of(self.groups)
        self.alignment = alignment(self.groups)
        self._digest_tokens = math.gcd(*(group.page_tokens for group in self.groups))
        self._names = PageNames(self._digest_tokens)
        self._places = {layer: (p, at) for p, pool in enumerate(self.pools) for at, layer in enumerate(pool.layers)}
        parts = _parts(config, self.groups, self.pools)
        if planes is None:
            planes = _allocated(config, self.pools, parts)
        if len(planes) != config.model.layers:
            raise GeometryError(f"planes of {len(planes)} layers are given, and the model has {config.model.layers}")
        self.planes = [tuple(layer) for layer in planes]
        with contextlib.ExitStack() as undo:
            self.engines: list[CacheEngine] = []
            for pool, part in zip(self.pools, parts, strict=True):
                own = [self.planes[layer] for layer in pool.layers]
                self.engines.append(undo.enter_context(CacheEngine(part, own, timeline=timeline, limits=limits)))
            undo.pop_all()
        self._free = [[*range(engine.blocks)] for engine in self.engines]
        self.gate = self.engines[0].gate

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        timeline: Timeline | None = None,
        limits: EngineLimits = LIMITS,
    ) -> Self:
        """Open an engine from a YAML file, a mapping of the same shape, or a `Config`."""
        if isinstance(config, Mapping):
            config = Config.from_dict(config)
        elif not isinstance(config, Config):
            config = load_config(config)
        return cls(config, planes, timeline=timeline, limits=limits)

    # -- requests ------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, start: int = 0, salt: str = "") -> HybridHit:
        """The longest cached prefix behind token `start`, a multiple of `alignment`, at which all groups have what a
        hit needs. `tokens`: token ids, or `PageHashes` of as many tokens each as the smallest page has.

        Takes no lease and changes nothing but recency. With `load.gate: enforcing`, a hit that takes longer to load
        than to compute is left out.
        """
        names, length = self._named(tokens, salt)
        start = self._start(start)
        masks = [engine.manager.visible for engine in self.engines]
        of = {g: (p, at) for p, pool in enumerate(self.pools) for at, g in enumerate(pool.groups)}

        def has(g: int, first: int, stop: int) -> bytes:
            pool, at = of[g]
            return masks[pool](names[pool].keys(at, first, stop))

        most = length // self.alignment * self.alignment
        for _ in range(_TRIES):
            whole = complete(self.groups, has, most, local=start)
            found = next(lengths(self.groups, has, most, local=start, whole=whole), start)
            hit = self._hit(names, start, found, whole, length)
            if hit is not None:
                for engine in self.engines:
                    engine.manager.missed((most - found) // engine.layout.page_tokens)
                return hit
        return self.nothing(start)

    def load(self, hit: HybridHit, slots: Slots, after: Event = None) -> HybridLoad:
        """Begin copying a hit into blocks; returns at once. `slots`: of each group by name, blocks for the pages
        `hit.pages[name]`, in that order. Written after the current stream's work so far, or after the event `after`.
        """
        tables = {name: self._table(name, slots, len(pages)) for name, pages in hit.pages.items()}
        loads: list[LayerwiseLoad | None] = []
        for engine, part, order in zip(self.engines, hit.parts, hit.order, strict=True):
            rows = [tables[name][one.number - hit.pages[name].start] for one, name in self._by_name(order)]
            loads.append(engine.load(part, np.concatenate(rows), after) if rows else None)
        return HybridLoad(self, hit, loads)

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
        that the group let go. Of windows those pages are stored that a hit of all `tokens` needs, or one at each
        `store.window_every` tokens, or at the lengths `keep_at`. The rest is as for `CacheEngine.store`.
        """
        names, length = self._named(tokens, salt)
        start, size = self._start(start), self.alignment
        ends = {length // size * size, *(one // size * size for one in keep_at)}
        if every := self.config.store.window_every:
            ends.update(range(max(size, every // size * size), length, max(size, every // size * size)))
        handles: list[StoreHandle] = []
        for engine, pool, own in zip(self.engines, self.pools, names, strict=True):
            wanted: list[list[int]] = []
            tables: list[Blocks] = []
            for g in pool.groups:
                group = self.groups[g]
                first, stop = start // group.page_tokens, length // group.page_tokens
                tables.append(table := self._rows(group.name, slots, engine, stop - first))
                there = {first + row for row in np.flatnonzero((table >= 0).all(axis=1)).tolist()}
                wanted.append([number for number in kept(group, ends, first, stop) if number in there])
            chain = own.chain(wanted)
            begins = [start // self.groups[g].page_tokens for g in pool.groups]
            rows = [tables[one.group][one.number - begins[one.group]] for one in chain]
            blocks = np.array(rows, np.int64).reshape(len(chain), engine.blocks_per_page)
            named = [one.page for one in chain]
            handles.append(engine.store_pages(named, blocks, salt, after, priority=priority, ttl=ttl))
        return HybridStore(handles)

    def prefetch(self, tokens: Any, start: int = 0, salt: str = "", *, pin: float | None = None) -> HybridPrefetch:
        """Begin to bring the pages of a hit from the SSD into the CPU tier; returns at once. `tokens`: token ids,
        `PageHashes`, or a `HybridHit`. `pin`: seconds for which they are kept there: see `CacheEngine.prefetch`."""
        hit = tokens if isinstance(tokens, HybridHit) else self.lookup(tokens, start, salt)
        with contextlib.ExitStack() as undo:
            parts: list[Prefetch | None] = []
            for engine, part in zip(self.engines, hit.parts, strict=True):
                parts.append(undo.enter_context(engine.prefetch(part, pin=pin)) if part.pages else None)
            undo.pop_all()
        return HybridPrefetch(self, hit, parts)

    def pin(self, tokens: Any, seconds: float, salt: str = "") -> HybridPin:
        """Keep what a hit needs from eviction on every tier that has it, for `seconds` at most."""
        hit = self.lookup(tokens, salt=salt)
        pins: list[tuple[Pin, int]] = []
        with contextlib.ExitStack() as undo:
            for engine, part in zip(self.engines, hit.parts, strict=True):
                pin = undo.enter_context(engine.pin_pages(part.pages, seconds))
                pins.append((pin, len(part.pages) * engine.layout.page_tokens))
            undo.pop_all()
        return HybridPin(hit, pins)

    # -- blocks of its own ---------------------------------------------------------------------------------------------

    def take(self, group: str, pages: int) -> list[int]:
        """Blocks for so many pages of a group, where the engine allocated the planes. Raises `PoolFullError`."""
        pool = self._pool(group)
        free, wanted = self._free[pool], pages * self.engines[pool].blocks_per_page
        if len(free) < wanted:
            raise PoolFullError(
                f"group {group!r} needs {wanted} blocks, and {len(free)} are free", "raise gpu.capacity"
            )
        taken = free[len(free) - wanted :]
        del free[len(free) - wanted :]
        return taken

    def give(self, group: str, blocks: Iterable[int]) -> None:
        """Give blocks of `take` back."""
        self._free[self._pool(group)] += blocks

    def place(self, layer: int) -> tuple[int, int]:
        """The pool of a layer of the model, and its place there. Raises `InvalidValueError`."""
        return self._places[arguments.whole(layer, "layer", 0, len(self._places) - 1)]

    # -- all pools -----------------------------------------------------------------------------------------------------

    def nothing(self, start: int = 0) -> HybridHit:
        """A hit of 0 tokens."""
        empty = {group.name: range(start // group.page_tokens, start // group.page_tokens) for group in self.groups}
        none = tuple(Hit(start, 0, (), None, ()) for _ in self.pools)
        return HybridHit(start, 0, empty, start, parts=none, order=tuple(() for _ in self.pools))

    def observe_prefill(
        self, tokens: int, cached_tokens: int, seconds: float, load_seconds: float | None = None
    ) -> None:
        """Tell the gate what a prefill took: see `CacheEngine.observe_prefill`."""
        self.engines[0].observe_prefill(tokens, cached_tokens, seconds, load_seconds)

    def clear(self) -> list[dict[str, int]]:
        """Drop every page from every tier; the pages removed by tier, of each pool."""
        return [engine.clear() for engine in self.engines]

    def invalidate(self, salt: str = "") -> list[dict[str, int]]:
        """Drop every page of a request's salt from every tier; the pages removed by tier, of each pool."""
        return [engine.invalidate(*engine.namespaces(salt)) for engine in self.engines]

    def drain(self, seconds: float | None = None) -> None:
        """Wait until every accepted store is on the tiers it is meant for. Raises `DeadlineError` after `seconds`."""
        for engine in self.engines:
            engine.drain(seconds)

    def flush(self, seconds: float | None = None) -> None:
        """See `CacheEngine.flush`."""
        for engine in self.engines:
            engine.flush(seconds)

    def stats(self) -> dict[str, Any]:
        """By pool, under the names of its groups: see `CacheEngine.stats`."""
        return {self._title(pool): engine.stats() for pool, engine in zip(self.pools, self.engines, strict=True)}

    def check(self, fix: bool = False) -> CheckReport:
        """See `CacheEngine.check`."""
        found = [engine.check(fix) for engine in self.engines]
        return CheckReport(tuple(problem for one in found for problem in one.problems), all(one.fixed for one in found))

    def close(self, drain: bool = True) -> None:
        """Finish stores (or drop them), wait for loads, give everything back. Twice is fine."""
        with contextlib.ExitStack() as all_of_them:
            for engine in self.engines:
                all_of_them.callback(engine.close, drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _named(self, tokens: Any, salt: str) -> tuple[list[GroupNames], int]:
        """The names of a request's pages, pool by pool, and its tokens."""
        size = self._digest_tokens
        if isinstance(tokens, PageHashes):
            length = tokens.length(size)
            base = namespace_digest(self.config.model.namespace_fields(salt))
            digests = [page.key for page in tokens.pages(base)]
        else:
            ids = as_tokens(tokens)
            length = len(ids)
            base = namespace_digest(self.config.model.namespace_fields(salt))
            digests = [page.key for page in self._names.of(base, ids)]
        found: list[GroupNames] = []
        for engine, pool in zip(self.engines, self.pools, strict=True):
            names = GroupNames([self.groups[g] for g in pool.groups], engine.namespaces(salt), size)
            names.extend(digests)
            found.append(names)
        return found, length

    def _hit(self, names: Sequence[GroupNames], start: int, found: int, whole: int, length: int) -> HybridHit | None:
        """The hit that ends at token `found`; None where a page of it has gone meanwhile."""
        pages = needed(self.groups, found, start) if found > start else []
        if not pages:
            return dataclasses.replace(self.nothing(start), parted=whole)
        tokens, parts, orders, seconds = found - start, list[Hit](), list[tuple[GroupPage, ...]](), 0.0
        known, last = True, 0.0
        for engine, pool, own in zip(self.engines, self.pools, names, strict=True):
            chain = own.chain([pages[g] for g in pool.groups])
            named = tuple(one.page for one in chain)
            tiers = tuple(engine.manager.lookup(named, 0))
            if len(tiers) < len(named):
                return None
            ahead = engine.loader.planner.under_way
            each = tokens / max(1, len(named))
            prices = Prices(engine.manager.costs, tiers, start, length, each, engine.layout.page_bytes, ahead)
            known, last = known and prices.known, prices.load(len(named))
            seconds += last
            parts.append(Hit(start, len(named) * engine.layout.page_tokens, tiers, last, named, pays=tokens))
            orders.append(tuple(one._replace(group=pool.groups[one.group]) for one in chain))
        saved = self._saved(start, tokens, length)
        names_of = {group.name: some for group, some in zip(self.groups, pages, strict=True)}
        hit = HybridHit(
            start, tokens, names_of, whole, seconds if known else None, saved, 0, tuple(parts), tuple(orders)
        )
        if self.gate.mode == "enforcing" and known and saved is not None and seconds > saved:
            return dataclasses.replace(self.nothing(start), parted=whole, declined=tokens)
        return hit

    def _saved(self, start: int, tokens: int, length: int) -> float | None:
        """Seconds to compute so many tokens behind `start`, of a request of `length`; None before that is known."""
        costs = self.engines[0].manager.costs
        if self.gate.mode == "off" or costs.prefill.coefficients is None:
            return None
        prices = Prices(costs, ("cpu",), start, length, tokens, 0, {})
        return max(0.0, prices.rest(0) - prices.rest(1))

    def _start(self, start: Any) -> int:
        if not isinstance(start, int) or start < 0 or start % self.alignment:
            raise TokensError(
                f"start is {arguments.shown(start)}, and all groups have pages that end at multiples of "
                f"{self.alignment} tokens",
                "pass such a number of tokens",
            )
        return start

    def _table(self, name: str, slots: Slots, pages: int) -> Blocks:
        """Blocks of a group for so many pages, (pages, blocks_per_page)."""
        if not pages:
            return np.empty((0, 1), np.int64)
        if name not in slots:
            raise InvalidValueError(f"no slots are given for group {name!r}", f"pass slots for {', '.join(slots)}")
        table = self.engines[self._pool(name)].block_table(slots[name])
        if len(table) != pages:
            raise SlotCountError(
                f"group {name!r}: slots for {len(table)} pages, and a hit of {pages}", "pass those of hit.pages"
            )
        return table

    def _rows(self, name: str, slots: Slots, engine: CacheEngine, pages: int) -> Blocks:
        """Blocks of a group for a store, (pages, blocks_per_page), -1 for none."""
        if name not in slots:
            raise InvalidValueError(f"no slots are given for group {name!r}", "pass slots for each group")
        given = np.asarray(slots[name], np.int64).reshape(-1)
        whole = len(given) // engine.blocks_per_page
        if whole > pages:
            raise SlotCountError(
                f"group {name!r}: slots for {whole} pages, there are {pages} full pages from there on",
                "a partial last page is not stored: pass slots for full pages only",
            )
        engine.block_table(given[given >= 0])
        return given[: whole * engine.blocks_per_page].reshape(whole, engine.blocks_per_page)

    def _by_name(self, order: Sequence[GroupPage]) -> Iterator[tuple[GroupPage, str]]:
        return ((one, self.groups[one.group].name) for one in order)

    def _pool(self, group: str) -> int:
        for number, pool in enumerate(self.pools):
            if any(self.groups[g].name == group for g in pool.groups):
                return number
        raise InvalidValueError(
            f"there is no group {arguments.shown(group)}", f"name one of {', '.join(g.name for g in self.groups)}"
        )

    def _title(self, pool: Pool) -> str:
        return ", ".join(self.groups[g].name for g in pool.groups)


def _parts(config: Config, groups: Sequence[Group], pools: Sequence[Pool]) -> list[Config]:
    """A configuration for each pool: its layers, and its part of each tier."""
    if len(pools) == 1:
        return [config]
    if config.events is not None and config.events.endpoint is not None:
        raise InvalidValueError(
            f"events.endpoint is {config.events.endpoint}, and groups with planes of their own publish apart",
            "leave events.endpoint out",
        )
    models = [_model(config, groups, pool) for pool in pools]
    layouts = [Config.from_dict({"model": model}).model.layout() for model in models]
    token_bytes = [layout.extent_bytes // layout.page_tokens for layout in layouts]
    each = shares(groups, pools, token_bytes, config.store.window_every)
    parts: list[Config] = []
    for pool, model, share in zip(pools, models, each, strict=True):
        data = {**config.dump(), "model": model}
        for section, key in (("gpu", "capacity"), ("gpu", "staging"), ("cpu", "capacity"), ("ssd", "capacity")):
            if data[section] is not None:
                data[section] = {**data[section], key: max(1, int(data[section][key] * share))}
        data["host_buffer"] = max(1, int(config.host_buffer * share))
        if config.ssd is not None:
            below = "-".join(str(g) for g in pool.groups)
            data["ssd"]["path"] = str(config.ssd.path / f"groups-{below}")
            data["ssd"]["stripes"] = [str(path / f"groups-{below}") for path in config.ssd.stripes]
        names = ", ".join(groups[g].name for g in pool.groups)
        _log.info("groups %s: %d layers, %.0f %% of each tier", names, len(pool.layers), 100 * share)
        parts.append(Config.from_dict(data, source=f"the part of groups {names}"))
    return parts


def _model(config: Config, groups: Sequence[Group], pool: Pool) -> dict[str, Any]:
    """The section `model` of a pool. Its layers count from 0, so its salt says which of the model's they are."""
    section: dict[str, Any] = config.model.model_dump(mode="json")
    at = {layer: place for place, layer in enumerate(pool.layers)}
    planes = []
    for plane in section["planes"]:
        own = None if plane["layers"] is None else [at[layer] for layer in plane["layers"] if layer in at]
        if own is None or own:
            planes.append({**plane, "layers": own})
    own_groups = [
        {**section["groups"][g], "layers": list(pool.local(groups[g])), "page_tokens": groups[g].page_tokens}
        for g in pool.groups
    ]
    salt = json.dumps([section["salt"], section["layers"], [group.describe() for group in groups]])
    tokens = {groups[g].page_tokens for g in pool.groups}
    page_tokens = tokens.pop() if len(tokens) == 1 else section["page_tokens"]
    if all(groups[g].keeps == "state" for g in pool.groups):
        page_tokens = 1  # a page is one row of each plane
    return {
        **section,
        "layers": len(pool.layers),
        "planes": planes,
        "groups": own_groups,
        "salt": salt,
        "page_tokens": page_tokens,
    }


def _allocated(config: Config, pools: Sequence[Pool], parts: Sequence[Config]) -> list[tuple[torch.Tensor, ...]]:
    """Planes of each layer, as many blocks of each pool as its part of `gpu.capacity` holds."""
    device = resolve_device(config.gpu.device)
    planes: list[tuple[torch.Tensor, ...]] = [()] * config.model.layers
    for pool, part in zip(pools, parts, strict=True):
        layout = part.model.layout()
        with torch.inference_mode(mode=False):
            own = PagedPlanes.allocate(layout, part.gpu.capacity // layout.page_bytes, device)
        for layer, tensors in zip(pool.layers, own.tensors, strict=True):
            planes[layer] = tensors
    return planes
