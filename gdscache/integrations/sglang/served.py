"""Hybrid models under SGLang's linker: a device pool for each kind of layer.

A linker gets a transfer for each component of SGLang's tree: pages from the first that the device lacks (KV), the last
`ceil(window / page)` of these (SWA), and the state behind the last one (MAMBA). Pages have the hashes of the request's
tokens as names; a state has that of the page before it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gdscache.config import Config
from gdscache.cuda.streams import Event
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.engine.hybrid_handles import HybridHit, HybridLoad, all_begun
from gdscache.errors import LoadOrderError
from gdscache.groups.base import kept, needed
from gdscache.groups.names import GroupNames
from gdscache.integrations.fetching import PinningCache
from gdscache.integrations.group_fetching import GroupFetch
from gdscache.integrations.sglang.moves import BlockReader
from gdscache.integrations.sglang.planes import KV, PoolPlanes
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.report import LoadReport
from gdscache.moves import PageStatus
from gdscache.pages.hit import CACHED, Hit
from gdscache.pages.keys import PageHashes
from gdscache.ranks.address import RankAddress
from gdscache.store.handle import StoreHandle

Blocks = Mapping[str, Sequence[int]]  # of each group, by the name of SGLang's pool
NONE = 0  # SGLang's block that is never a page


class PoolReaders:
    """Reads the block numbers of all pools of this rank, by the pools' names."""

    def __init__(self, planes: PoolPlanes) -> None:
        self._readers: dict[str, BlockReader] = {}
        for pool in planes.pools():
            first = planes.tensors[pool.layers[0]][0]
            self._readers[pool.name] = BlockReader(first.device, int(first.shape[1]))

    def begin(self, transfers: Sequence[Any]) -> Callable[[], Blocks]:
        begun = {one.name.value: self._readers[one.name.value].begin(one.device_indices) for one in transfers}
        return lambda: {name: wait() for name, wait in begun.items()}


class SinglePool:
    """The engine of a model whose layers all keep all tokens, with the calls of `SeveralPools`."""

    def __init__(self, engine: CacheEngine, *, ranked: bool = False) -> None:
        self.engine = engine
        self._ranked = ranked

    def load_many(self, requests: Sequence[tuple[Hit, Blocks]], after: Event = None) -> LayerwiseLoad:
        return self.engine.load_many([(hit, blocks[KV]) for hit, blocks in requests], after)

    def plan(self, hits: Sequence[Hit]) -> list[LayerwiseLoad | None]:
        ends = itertools.accumulate(len(hit.pages) for hit in hits)
        return [
            self.engine.load_many([(h, np.arange(end - len(h.pages), end)) for h, end in zip(hits, ends, strict=True)])
        ]

    def store(self, tokens: Any, slots: Blocks, *, salt: str = "", after: Event = None) -> StoreHandle:
        own = np.arange(len(tokens)) if self._ranked else slots[KV]
        return self.engine.store(tokens, own, salt=salt, after=after)

    def tell_ranks(self, number: int, what: bytes) -> None:
        self.engine.tell_ranks(number, what)

    def seconds(self, pages: int) -> float | None:
        """The expected seconds to bring `pages` pages from the SSD."""
        return self.engine.load_seconds("ssd", pages)


class SeveralPools:
    """The engine of a hybrid model's pools."""

    def __init__(
        self, config: Config, planes: PoolPlanes, ranks: Sequence[Sequence[RankAddress]] | None = None
    ) -> None:
        """`ranks`: of each pool, the addresses of all ranks, if there are several. Blocks are positions then: see
        `Rank.load` and `Rank.place`."""
        self.engine = HybridEngine(config, planes.tensors if ranks is None else None, ranks=ranks)
        self._places = planes.layers
        self._ranked = ranks is not None

    def load_many(self, requests: Sequence[tuple[HybridHit, Blocks]], after: Event = None) -> LinkedLoad:
        return LinkedLoad(self.engine.load_many(requests, after), self._places, self.engine.alignment)

    def plan(self, hits: Sequence[HybridHit]) -> list[LayerwiseLoad | None]:
        """Plan loads into positions of each pool's blocks, request after request; a pool without pages has None."""
        at, requests = Counter[str](), list[tuple[HybridHit, Blocks]]()
        for hit in hits:
            requests.append((hit, {name: [*range(at[name], at[name] + len(its))] for name, its in hit.pages.items()}))
            at.update({name: len(its) for name, its in hit.pages.items()})
        return self.engine.load_many(requests).by_pool

    def store(self, tokens: Any, slots: Blocks, *, salt: str = "", after: Event = None) -> LinkedStore:
        """Begin to store pages of a node of SGLang's tree, which ends with them. `slots`: blocks of each group for its
        last held pages, `NONE` for dropped ones; with several ranks, the leader's.

        Of a window, the pages are stored that a hit needs which ends with the node or a multiple of
        `store.window_every` tokens before it. SGLang has a state at the node's end, or none.
        """
        engine, size = self.engine, self.engine.alignment
        names, start = _named(engine, tokens, salt)
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
            for pool, chain in zip(engine.engines, names.chain(wanted), strict=True):
                if chain:
                    table = np.array([[places[at]] for at in zip(chain.groups, chain.numbers, strict=True)], np.int64)
                    yield pool.store_pages(chain.pages, table, salt, after)

        return LinkedStore(all_begun(begin()))

    def has(self, name: str, digests: Sequence[bytes], salt: str) -> bool:
        names = self.engine.group_names(salt, self.engine.alignment)
        names.extend(digests)
        chains = names.chain([range(len(digests) * (group.name == name)) for group in self.engine.groups])
        told = [
            one for engine, chain in zip(self.engine.engines, chains, strict=True) for one in engine.told(chain.pages)
        ]
        return all(one.cause == CACHED for one in told)

    def tell_ranks(self, number: int, what: bytes) -> None:
        """See `CacheEngine.tell_ranks`: by the first pool's."""
        self.engine.engines[0].tell_ranks(number, what)

    def seconds(self, pages: int) -> float | None:
        wanted, took = needed(self.engine.groups, pages * self.engine.alignment), list[float]()
        for part, pool in zip(self.engine.engines, self.engine.pools, strict=True):
            some = part.load_seconds("ssd", sum(len(wanted[g]) for g in pool.groups))
            if some is None:
                return None
            took.append(some)
        return max(took)  # all pools at once


def _named(engine: HybridEngine, hashes: PageHashes, salt: str) -> tuple[GroupNames, int]:
    """Names of consecutive pages in all groups, and the tokens before the first. Of earlier pages only the last is
    named, if known: page 0. Their number does not matter, since windows are counted from the end."""
    names = engine.group_names(salt, engine.alignment)
    names.extend(hashes.chain())
    return names, names.tokens - len(hashes) * engine.alignment


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


class LinkedCache:
    """A hybrid engine as the `Cache` of a table of requests. A page is one of all groups."""

    def __init__(self, cache: PinningCache, engine: HybridEngine) -> None:
        self._cache, self._engine = cache, engine

    def fetch(self, hashes: PageHashes, pages: int) -> LinkedFetch:
        names, start = _named(self._engine, hashes, self._cache.salt)
        end = start + pages * self._engine.alignment
        return LinkedFetch(self._engine, names, end, names.tokens, self._cache.pin_seconds, start)

    def cached(self, hashes: PageHashes) -> int:
        names, start = _named(self._engine, hashes, self._cache.salt)
        return (self._engine.reach(names, names.tokens, start)[0] - start) // self._engine.alignment

    def keys(self, hashes: PageHashes) -> Sequence[bytes]:
        names, start = _named(self._engine, hashes, self._cache.salt)
        first = start // self._engine.alignment
        return names.keys(0, first, first + len(hashes))


@dataclasses.dataclass(frozen=True)
class AllRead:
    """The `release_event` of a store or a load in several pools."""

    parts: Sequence[Any]

    def done(self) -> bool:
        return all(part.release_event.done() for part in self.parts)

    def synchronize(self) -> None:
        for part in self.parts:
            part.release_event.synchronize()


class LinkedStore:
    """A store in several pools, as one."""

    def __init__(self, handles: Sequence[StoreHandle]) -> None:
        self.release_event = AllRead(handles)


class LinkedLoad:
    """A load in several pools. Layers are the model's, as SGLang counts them."""

    def __init__(self, load: HybridLoad, layers: Mapping[int, Sequence[int]], page_tokens: int) -> None:
        self._load, self._layers, self._size = load, layers, page_tokens
        self.release_event = AllRead(load.begun)

    def wait(self, layer: int) -> None:
        """See `LayerwiseLoad.wait`. A layer without a cache has nothing to wait for."""
        for place in self._layers.get(layer, ()):
            self._load.wait(place)

    def results(self) -> list[LoadReport]:
        """See `HybridLoad.results`. A page is one of all groups; all are loaded, or none."""
        return [
            LoadReport(r.tokens, (PageStatus.LOADED,) * (r.tokens // self._size), r.bytes_by_tier, r.seconds)
            for r in self._load.results()
        ]
