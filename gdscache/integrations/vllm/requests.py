"""The scheduler's side of the vLLM connector: each request's state, and a step's loads and stores.

Plain state over a cache, without bytes or threads. A request is any object with vLLM's names: `request_id`,
`block_hashes`, `num_tokens`, `num_computed_tokens`. A block is a page.

A request's *fetch* begins at its arrival: its pages come to the CPU tier, are checked there, and stay pinned. The
scheduler's question for the hit is answered "not yet" meanwhile, for at most `wait` seconds, and then with the checked
prefix. If the CPU tier or the queue of prefetches has no room, the pages go between two steps, right to their blocks.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from gdscache.engine.hybrid_handles import HybridHit
from gdscache.integrations.fetching import ENDING_S, Fetch
from gdscache.integrations.prefills import LEAST_TOKENS
from gdscache.pages.hit import Hit
from gdscache.pages.keys import Page, PageHashes

LOOK_AGAIN_S = 1.0  # a waiting request is looked up again after this time
_TRIES = 2  # loads between steps that may fail as a whole until the request is computed
HASH_BYTES = 32  # of a page hash; vLLM's shorter hashes (xxhash has 16 bytes) are padded with zeros


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOrder:
    """Pages of a request from `first` on go into `blocks`. Its executor releases `fetch`.

    `between`: the request waits for the pages' verdict; otherwise this step computes with them, and `fetch` has checked
    them. `pool`, `rows`: in a hybrid model their pool, and their places among its pages of the fetch. `trace`: the
    headers of the request's trace, which vLLM keeps for its own span (`--otlp-traces-endpoint`), if it has one.
    """

    request_id: str
    fetch: Fetch
    first: int
    blocks: tuple[int, ...]
    between: bool = False
    pool: int = 0
    trace: Mapping[str, str] | None = None
    rows: Sequence[int] = ()

    def hit(self) -> Hit:
        """The pages for a load; fewer than `blocks` if some have gone. Raises `LoadOrderError`."""
        found = (self.fetch.unchecked if self.between else self.fetch.checked)(self.first, len(self.blocks))
        if not isinstance(found, HybridHit):
            return found
        part = found.parts[self.pool]
        return part.part([row for row in self.rows if row < len(part.pages)])


@dataclasses.dataclass(frozen=True, slots=True)
class StoreOrder:
    """Pages of a request in one pool that are in `blocks` once the step is computed. `names`: of pages of the request,
    which begin with page `first` there."""

    request_id: str
    names: PageHashes | Sequence[Page]
    first: int
    blocks: tuple[int, ...]
    pool: int = 0

    def pages(self, namespace: bytes) -> Sequence[Page]:
        names = self.names.pages(namespace) if isinstance(self.names, PageHashes) else self.names
        return names[self.first : self.first + len(self.blocks)]


@dataclasses.dataclass(slots=True)
class Known:
    """A request.

    `local`: pages in vLLM's own cache, and `judged`: those that the gate was told of. `offered`: pages before this
    number need no store. `since`: time of the first "not yet" since pages last came. `looked`: time of the last lookup.
    `loading`: a load between steps was ordered, and vLLM has not gone on from it. `failed`: such loads that failed as a
    whole. `asked`: time of vLLM's first question since it last placed the request. `answered`: whether another answer
    than "not yet" was given since.
    """

    request: Any
    refused: bool
    hashes: PageHashes = dataclasses.field(default_factory=lambda: PageHashes([]))
    fetch: Fetch | None = None
    between: bool = False
    since: float | None = None
    late: bool = False
    looked: float = 0.0
    loading: bool = False
    failed: int = 0
    asked: float | None = None
    answered: bool = False
    local: int = 0
    judged: int = 0
    offered: int | None = None
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)


class RequestTable:
    """All requests of vLLM's scheduler. Not thread-safe: the scheduler is one thread.

    Many methods: vLLM's calls, and the steps in them that a hybrid model takes in its own way.
    """

    def __init__(
        self,
        cache: Any,
        page_tokens: int,
        *,
        wait: float,
        refuses: Callable[[Any], str] = lambda request: "",
        clock: Callable[[], float] = time.monotonic,
        named: Callable[[Any, int, int, Sequence[bytes]], object] | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """`cache`: a `PinningCache`, or the `GroupSession` of a `GroupTable`. `wait`: seconds of "not yet" for a
        request, at most. `refuses`: the reason to leave a request alone, or "". `named(request, group, first, keys)`:
        called with the keys of pages from `first` on, if KV events are on."""
        self._cache = cache
        self.page_tokens = page_tokens
        self._wait = wait
        self._refuses = refuses
        self._clock = clock
        self._named = named
        self._known: dict[str, Known] = {}
        self._loads: list[LoadOrder] = []
        self._fresh: set[int] = set()
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.deferred = False  # a request was told to ask again since this was reset
        self.between = False  # every load goes between steps
        self.stale = False  # vLLM's own cache may have pages of other weights: requests are left alone

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: Any) -> None:
        self.finish(request.request_id)
        skips = getattr(request, "skip_reading_prefix_cache", False)  # it needs results that computing alone gives
        why = "weights" if self.stale else self._refuses(request) or ("reads_nothing" if skips else "")
        self.counts.update([f"alone_{why}"] if why else [])
        known = self._known[request.request_id] = self._new(request, bool(why))
        if not known.refused and request.num_tokens > self.page_tokens:
            self._begin(known)

    def ask(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """The number of tokens behind the first `computed` ones that can be loaded, and whether between two steps.
        (None, False): ask again in the next step. At least one token of the request is left to compute."""
        known = self._known.get(request.request_id)
        if known is None:
            return 0, False
        size = self.page_tokens
        if known.loading:  # a load between steps failed as a whole: vLLM has freed the request's blocks, and asks again
            known.loading, known.failed = False, known.failed + 1
        known.local, known.between = computed // size, False
        most = (request.num_tokens - 1) // size
        if self._refused(known) or most <= known.local or known.failed >= _TRIES:
            return 0, False
        now = self._clock()
        known.asked = now if known.asked is None else known.asked
        if known.fetch is not None and (known.fetch.lapsed(ENDING_S) or self._outgrown(known, known.fetch, most, now)):
            known.fetch.release()
            known.fetch = None
        fetch: Fetch = known.fetch or self._begin(known)
        more = fetch.wanted < min(fetch.cached, most) > known.local  # pages that the gate has declined
        if known.local < known.judged or (more and known.local > known.judged):
            fetch.release()
            fetch = self._begin(known, known.local)
        if fetch.wanted <= known.local and not fetch.asking:
            return 0, False
        if not fetch.done():
            known.since = now if known.since is None else known.since
            if now - known.since < self._wait and not fetch.outpaced():
                self.counts["deferred"] += 1
                self.deferred = True
                return None, False
            self.counts["late"] += not known.late
            known.late = True
        else:
            known.since = None
        if not known.answered:
            known.answered = True
            self._cache.waited(now - known.asked)
        crowded = fetch.crowded()
        pages = max(0, min(fetch.wanted if crowded else fetch.verified(), most) - known.local)
        known.between = (crowded or self.between) and pages > 0
        return pages * size, known.between

    def place(self, request: Any, blocks: Any, tokens: int) -> None:
        """The request has got `blocks`, all so far, and `tokens` tokens are to be loaded. Of a hybrid model, `blocks`
        is a table a group."""
        known = self._known.get(request.request_id)
        self._fresh |= self._written(blocks, 0 if known is None else known.local)
        if known is None:
            return
        fetch, there = known.fetch, known.local + tokens // self.page_tokens
        known.loading = False
        if fetch is None:  # a load between steps is over, or there was nothing to load
            if known.offered is None and not known.refused:
                self._offer(known, known.local, None)
            return
        known.sources = fetch.sources(known.local, there - known.local)
        if fetch.cached > there:
            why = "late" if known.late else "no room in the CPU tier or the queue" if fetch.crowded() else "not loaded"
            self._cache.unused(request.request_id, fetch, there, why)
        self._offer(known, there, fetch)
        orders = self._orders(known, fetch, blocks, there) if tokens else []  # an error leaves the fetch to `finish`
        known.fetch, known.since, known.asked, known.answered = None, None, None, False
        known.loading = known.between and bool(orders)
        if not orders:
            fetch.release()
        self._loads += orders

    def hit_sources(self, request: Any) -> Mapping[str, int]:
        """Pages of the request's last load, by their tier when the request came."""
        known = self._known.get(request.request_id)
        return {} if known is None else known.sources

    def finish(self, request_id: str) -> None:
        """The request is over, or aborted: release its fetch. Repeated calls are fine."""
        known = self._known.pop(request_id, None)
        if known is not None and known.fetch is not None:
            known.fetch.release()

    def end(self, request: Any, blocks: Any) -> list[StoreOrder]:
        """`finish`, with all blocks of the request. Returns its pages whose tokens had no hashes in the step that
        filled them: sampled behind the submission of a step, or accepted of speculation. Tokens of steps that are under
        way are left out; without vLLM's count of them, all from the last known token on."""
        computed = request.num_computed_tokens
        under_way = min(computed, getattr(request, "num_in_flight_tokens", max(0, computed + 1 - request.num_tokens)))
        orders = [*self.stores({request.request_id: -under_way}, lambda request_id: blocks)]
        self.finish(request.request_id)
        return orders

    def leave_alone(self, *, stale: bool = False) -> None:
        """Neither load nor store for present requests: their KV is of other weights. `stale`: nor for new ones, until a
        call without it."""
        self.stale = stale
        for known in self._known.values():
            if known.fetch is not None:
                known.fetch.release()
            known.refused, known.fetch, known.offered = True, None, None

    def clear(self) -> None:
        for request_id in list(self._known):
            self.finish(request_id)
        for order in self.take_loads():
            order.fetch.release()

    def take_loads(self) -> list[LoadOrder]:
        loads, self._loads = self._loads, []
        return loads

    def take_fresh(self) -> set[int]:
        """Take the blocks that waiting requests got since the last call; this step may write them."""
        fresh, self._fresh = self._fresh, set()
        return fresh

    def stores(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> Iterable[StoreOrder]:
        """The pages that a step fills, by its tokens of each request. `blocks_of` is called for these requests only. A
        request's `num_computed_tokens` is the count before the step. Sampled or speculated tokens have no hashes yet,
        and are not stored."""
        size, find = self.page_tokens, self._known.get
        for request_id, tokens in scheduled.items():
            known = find(request_id)
            if known is None or (offered := known.offered) is None:
                continue
            before = known.request.num_computed_tokens
            if (before + tokens) // size <= offered <= before // size or self._refused(known):
                continue  # most requests in most steps, by the numbers
            full = min((before + tokens) // size, len(known.request.block_hashes))
            first = min(offered, before // size)  # less if a bad page is computed again
            known.offered = max(first, full)
            if full > first:
                self._name(known)
                yield StoreOrder(request_id, known.hashes, first, tuple(blocks_of(request_id)[first:full]))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _refused(self, known: Known) -> bool:
        """Whether a request is left alone. An input that is streamed may get media with any of its parts."""
        known.refused = known.refused or bool(self._refuses(known.request))
        return known.refused

    def _new(self, request: Any, refused: bool) -> Known:
        return Known(request, refused)

    def _begin(self, known: Known, local: int = 0) -> Any:
        self._name(known)
        known.late, known.looked, known.judged = False, self._clock(), local
        known.fetch = self._fetch(known, (known.request.num_tokens - 1) // self.page_tokens)
        return known.fetch

    def _fetch(self, known: Known, most: int) -> Any:
        """Begin to bring the first `most` pages."""
        return self._cache.fetch(known.hashes, most, known.judged)

    def _outgrown(self, known: Known, fetch: Fetch, most: int, now: float) -> bool:
        """Whether more of a request's pages are cached than when its fetch began, stored by other requests
        meanwhile."""
        if fetch.cached >= most or now < known.looked + LOOK_AGAIN_S:
            return False
        known.looked = now
        return bool(self._reach(known, fetch, most) > fetch.cached)

    def _reach(self, known: Known, fetch: Fetch, most: int) -> Any:
        """The number of the first pages that are cached now."""
        return self._cache.cached(known.hashes)

    def _written(self, blocks: Sequence[int], local: int) -> Set[int]:
        """The blocks behind the first `local` pages, which are vLLM's own hit."""
        return {*blocks[local:]}

    def _offer(self, known: Known, there: int, fetch: Fetch | None) -> None:
        """Note the first page that needs a store. `there`: pages in the request's blocks before this step."""
        cached = 0 if fetch is None else fetch.cached
        if there > cached:  # vLLM's own cache has pages that ours lacked at the request's arrival: look again
            self._name(known)
            cached = self._cache.cached(known.hashes)
        known.offered = min(there, cached)

    def _orders(self, known: Known, fetch: Any, tables: Sequence[int], there: int) -> list[LoadOrder]:
        """Loads of the pages up to page `there` behind vLLM's own hit."""
        first, request = known.local, known.request
        some = tuple(tables[first:there])
        trace = getattr(request, "trace_headers", None)
        return [LoadOrder(request.request_id, fetch, first, some, known.between, trace=trace)]

    def _name(self, known: Known) -> None:
        have, hashes = len(known.hashes), known.request.block_hashes
        if len(hashes) > have:
            known.hashes.extend([bytes(some).ljust(HASH_BYTES, b"\0") for some in hashes[have:]])
            if self._named is not None:
                self._named(known.request, 0, have, self._cache.keys(known.hashes)[have:])


def prefill_of(step: Any) -> tuple[int, int] | None:
    """(tokens, tokens before them) of a step that computes only a part of one request's prompt; else None.

    `step`: vLLM's `SchedulerOutput`.
    """
    scheduled: Mapping[str, int] = step.num_scheduled_tokens
    if len(scheduled) != 1:
        return None
    ((request, tokens),) = scheduled.items()
    if tokens < LEAST_TOKENS:
        return None
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
    return (tokens, computed[request]) if request in computed else None
