"""Hybrid models under SGLang's linker: a device pool for each kind of layer.

A linker gets a transfer for each component of SGLang's tree: pages from the first that the device lacks (KV), the last
`ceil(window / page)` of these (SWA), and the state behind the last one (MAMBA). Pages have the hashes of the request's
tokens as names; a state has that of the page before it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gdscache.cuda.streams import Event, record_on
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.engine.hybrid_handles import HybridHit, all_begun
from gdscache.errors import LoadOrderError
from gdscache.groups.base import kept, needed
from gdscache.groups.names import GroupNames
from gdscache.integrations.fetching import GroupFetch, PinningCache
from gdscache.integrations.sglang.pages import digest
from gdscache.integrations.sglang.planes import KV, PoolPlanes
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.hit import CACHED, Hit
from gdscache.pages.keys import PageHashes
from gdscache.store.handle import StoreHandle

Blocks = Mapping[str, Sequence[int]]  # of each group, by the name of SGLang's pool
NONE = 0  # SGLang's block that is never a page


class BlockReader:
    """Copies the block numbers of all pools of this rank from SGLang's stream to the host, on a stream of its own."""

    def __init__(self, planes: PoolPlanes) -> None:
        first = {name: planes.tensors[places[0]][0] for name, places in planes.pools().items()}
        self._page_tokens = {name: int(plane.shape[1]) for name, plane in first.items()}
        self._device = planes.tensors[0][0].device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def begin(self, transfers: Sequence[Any]) -> Callable[[], Blocks]:
        """Begin to read the blocks of whole pages, behind the current stream. Returns a function that waits for them.

        `transfers`: SGLang's, with `device_indices`: slots of the pool, int64, (tokens,).
        """
        firsts = {one.name.value: one.device_indices[:: self._page_tokens[one.name.value]] for one in transfers}
        if self._stream is None:
            there = self._blocks(firsts)
            return lambda: there
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = {
                name: torch.empty(some.shape, dtype=some.dtype, device="cpu", pin_memory=True)
                for name, some in firsts.items()
            }
            for name, some in firsts.items():
                host[name].copy_(some, non_blocking=True)
            landed = record_on(self._stream, sleep=True)

        def wait(_read: Mapping[str, torch.Tensor] = firsts) -> Blocks:  # the default keeps memory until it was read
            landed.synchronize()
            return self._blocks(host)

        return wait

    def _blocks(self, firsts: Mapping[str, torch.Tensor]) -> Blocks:
        sizes = self._page_tokens
        return {name: [slot // sizes[name] for slot in some.tolist()] for name, some in firsts.items()}


class SinglePool(PinningCache):
    """The cache of a model whose layers all keep all tokens, with the calls of `SeveralPools`."""

    def __init__(self, engine: CacheEngine, pin_seconds: float, *, ranked: bool = False) -> None:
        super().__init__(engine, pin_seconds)
        self._ranked = ranked
        self._places = {layer: [(0, layer)] for layer in range(engine.layout.n_layers)}

    def load_many(self, requests: Sequence[tuple[Hit, Blocks]], after: Event = None) -> PoolLoads:
        load = self.engine.load_many([(hit, blocks[KV]) for hit, blocks in requests], after)
        return PoolLoads([load], self._places, [sum(len(blocks[KV]) for _, blocks in requests)])

    def plan(self, hits: Sequence[Hit]) -> list[LayerwiseLoad | None]:
        ends = itertools.accumulate(len(hit.pages) for hit in hits)
        requests = [(hit, np.arange(end - len(hit.pages), end)) for hit, end in zip(hits, ends, strict=True)]
        return [self.engine.load_many(requests)]

    def store(self, tokens: Any, slots: Blocks, *, salt: str = "", after: Event = None) -> list[StoreHandle]:
        own = np.arange(len(tokens)) if self._ranked else slots[KV]
        return [self.engine.store(tokens, own, salt=salt, after=after)]

    def seconds(self, pages: int) -> float | None:
        """The expected seconds to bring `pages` pages from the SSD."""
        return self.engine.load_seconds("ssd", pages)


class LinkedFetch(GroupFetch):
    """The pages of a request from the first that the device lacks, which is page 0 of the fetch."""

    @property
    def whole(self) -> int:
        """The number of the first pages that are cached in all groups that keep all tokens."""
        return (self.parted - self.found.start) // self._engine.alignment

    def checked(self, first: int, pages: int) -> HybridHit:
        """The hit without its first `first` pages. Raises `LoadOrderError` if it ends elsewhere."""
        if first + pages != self.wanted:
            raise LoadOrderError(
                f"pages {first} to {first + pages} are to be loaded, of a hit that ends behind page {self.wanted}",
                "report it: SGLang asks for a length that was not promised",
            )
        hit = super().checked(first, pages)
        return self._engine.behind(hit, hit.start + first * self._engine.alignment)


class SeveralPools(PinningCache):
    """The cache of a hybrid model's pools. A page is one of all groups."""

    def __init__(self, engine: HybridEngine, pin_seconds: float, planes: PoolPlanes, *, ranked: bool) -> None:
        """`ranked`: there are several ranks. Blocks are positions then: see `Rank.load` and `Rank.place`."""
        super().__init__(engine, pin_seconds)
        self._hybrid, self._size, self._ranked = engine, engine.alignment, ranked
        self._pools, self._places = [*planes.pools()], planes.places()

    def fetch(self, hashes: PageHashes, pages: int, local: int = 0) -> LinkedFetch:
        names, start = self._named(hashes, self.salt)
        most, before = start + pages * self._size, max(0, hashes.before * self._size - start)
        return LinkedFetch(self._hybrid, names, most, names.tokens, self.pin_seconds, start, local, before)

    def cached(self, hashes: PageHashes) -> int:
        names, start = self._named(hashes, self.salt)
        return (self._hybrid.reach(names, names.tokens, start)[0] - start) // self._size

    def keys(self, hashes: PageHashes) -> Sequence[bytes]:
        names, start = self._named(hashes, self.salt)
        first = start // self._size
        return names.keys(0, first, first + len(hashes))

    def load_many(self, requests: Sequence[tuple[HybridHit, Blocks]], after: Event = None) -> PoolLoads:
        loads = self._hybrid.load_many(requests, after).by_pool
        filled = [sum(len(blocks.get(name, ())) for _, blocks in requests) for name in self._pools]
        return PoolLoads(loads, self._places, filled)

    def plan(self, hits: Sequence[HybridHit]) -> list[LayerwiseLoad | None]:
        """Plan loads into positions of each pool's blocks, request after request; a pool without pages has None."""
        at, requests = Counter[str](), list[tuple[HybridHit, Blocks]]()
        for hit in hits:
            requests.append((hit, {name: [*range(at[name], at[name] + len(its))] for name, its in hit.pages.items()}))
            at.update({name: len(its) for name, its in hit.pages.items()})
        return self._hybrid.load_many(requests).by_pool

    def store(self, tokens: Any, slots: Blocks, *, salt: str = "", after: Event = None) -> list[StoreHandle]:
        """Begin to store pages of a node of SGLang's tree, which ends with them. `slots`: blocks of each group for its
        last held pages, `NONE` for dropped ones; with several ranks, the leader's.

        Of a window, the pages are stored that a hit needs which ends with the node or a multiple of
        `store.window_every` tokens before it. SGLang has a state at the node's end, or none.
        """
        engine, size = self._hybrid, self._size
        names, start = self._named(tokens, salt)
        stop, every = names.tokens, engine.window_every // size * size
        ends = [*range(stop, start, -every)] if every else [stop]
        last, wanted, places = stop // size, list[Sequence[int]](), dict[tuple[int, int], int]()
        for g, group in enumerate(engine.groups):
            given = slots.get(group.name, ())
            some = [n for n in kept(group, ends, last - len(given), last) if given[n - last] != NONE]
            wanted.append(some)
            own = range(len(given)) if self._ranked else given
            places |= {(g, number): own[number - last] for number in some}

        def begin() -> Iterator[StoreHandle]:
            for pool, chain in zip(self.engines, names.chain(wanted), strict=True):
                if chain:
                    table = np.array([[places[at]] for at in zip(chain.groups, chain.numbers, strict=True)], np.int64)
                    yield pool.store_pages(chain.pages, table, salt, after)

        return all_begun(begin())

    def has(self, name: str, keys: Sequence[str]) -> bool:
        """Whether the tiers have these pages of a group."""
        names = self._hybrid.group_names(self.salt, self._size)
        names.extend([digest(key) for key in keys])
        chains = names.chain([range(len(keys) * (group.name == name)) for group in self._hybrid.groups])
        pages = zip(self.engines, chains, strict=True)
        return all(one.cause == CACHED for engine, chain in pages for one in engine.told(chain.pages))

    def seconds(self, pages: int) -> float | None:
        wanted = needed(self._hybrid.groups, pages * self._size)
        pools = zip(self.engines, self._hybrid.pools, strict=True)
        took = [part.load_seconds("ssd", sum(len(wanted[g]) for g in pool.groups)) for part, pool in pools]
        known = [one for one in took if one is not None]
        return max(known) if len(known) == len(took) else None  # all pools at once

    def _named(self, hashes: PageHashes, salt: str) -> tuple[GroupNames, int]:
        """Names of consecutive pages in all groups, and the tokens before the first. Of earlier pages only the last is
        named, if known: page 0. Their number does not matter, since windows are counted from the end."""
        names = self._hybrid.group_names(salt, self._size)
        names.extend(hashes.chain())
        return names, names.tokens - len(hashes) * self._size


class PoolLoads:
    """The loads of a batch in all pools. Layers are the model's, as SGLang counts them; one without a cache has nothing
    to wait for."""

    def __init__(
        self,
        loads: Sequence[LayerwiseLoad | None],
        layers: Mapping[int, Sequence[tuple[int, int]]],
        filled: Sequence[int],
    ) -> None:
        """`layers`: see `PoolPlanes.places`. `filled`: blocks that each pool's load has to fill."""
        self.loads, self._layers, self._filled = loads, layers, filled

    def wait(self, layer: int) -> None:
        for pool, local in self._layers.get(layer, ()):
            load = self.loads[pool]
            if load is not None:
                load.wait(local)

    def landed(self) -> bool:
        """Wait for the verdicts: whether all pages are loaded, since SGLang aborts a batch as a whole. An order may
        have fewer pages than were promised: some were dropped meanwhile, and those behind them lie in other blocks."""
        reports = [load.results() if load is not None else [] for load in self.loads]
        loaded = [[status is PageStatus.LOADED for one in some for status in one.pages] for some in reports]
        return all(all(good) and len(good) == n for good, n in zip(loaded, self._filled, strict=True))

    def wait_until_written(self) -> None:
        """Wait until nothing writes to the blocks."""
        for load in self.loads:
            if load is not None:
                load.release_event.synchronize()
