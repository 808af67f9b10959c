"""The engine: requests in, tokens out, and all that is asked of gdscache, in the order in which a real engine asks it.

A step is one forward pass over the next token of every request that decodes and up to `chunk_tokens` tokens of prompts.
A request is admitted when the pool has all blocks that it can ever need, so that none is ever thrown out again.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from gdscache import CacheEngine
from gdscache.commands.toy_engine.batching import Parked, batch_of
from gdscache.commands.toy_engine.model import Transformer
from gdscache.commands.toy_engine.pool import KVPool
from gdscache.commands.toy_engine.prefills import PrefillClock
from gdscache.commands.toy_engine.request import EngineOptions, Request, State
from gdscache.commands.toy_engine.uploads import upload
from gdscache.errors import DeadlineError, PoolFullError, TokensError
from gdscache.load.handle import Gap
from gdscache.tracing import OFF, Timeline

Observer = Callable[[str, int, float], None]


class InferenceEngine:
    """Runs `model` on `pool`, with the cache that is attached to the pool's planes, or without one.

    One thread at a time, on the current stream. `observe(name, number, seconds)` is told the host time of each
    `wait` (number: the layer) and `step` (number: its tokens). `timeline`: the cache's, by default.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        cache: CacheEngine | None,
        options: EngineOptions | None = None,
        observe: Observer | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.model, self.pool, self.cache = model, pool, cache
        self.options = options or EngineOptions()
        self.observe = observe
        self.timeline: Timeline = timeline or (OFF if cache is None else cache.timeline)
        self.device = pool.planes[0][0].device
        self.page_tokens = cache.layout.page_tokens if cache is not None else pool.block_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._parked = Parked(pool, self.options.deadline)
        self._prefills = PrefillClock(cache, self.device)

    # -- the face ----------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], new_tokens: int, salt: str = "", stop: frozenset[int] = frozenset()
    ) -> Request:
        """Queue a prompt of token ids. Raises `PoolFullError` for a request that the whole pool could not hold."""
        if not prompt or new_tokens < 1:
            raise TokensError(f"a prompt of {len(prompt)} tokens, {new_tokens} new ones", "both have to be at least 1")
        request = Request(list(prompt), len(prompt), new_tokens, salt, stop)
        if self._blocks_of(request) > self.pool.blocks:
            raise PoolFullError(
                f"{len(prompt)} + {new_tokens} tokens need {self._blocks_of(request)} blocks, the pool has "
                f"{self.pool.blocks}",
                "make the pool larger",
            )
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request wherever it is. Its blocks come back when gdscache is done with them."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self._leave(request)
        else:
            return
        request.state, request.finished = State.CANCELLED, time.perf_counter()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def run(self) -> None:
        """Step until every request is done."""
        while self.busy:
            self.step()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass; the requests that it finished."""
        started = time.perf_counter()
        self._parked.reclaim()
        self._admit()
        if self.waiting and not self.running:  # nothing can run before blocks come back
            if not self._parked:
                raise PoolFullError(f"{self.pool.available} blocks are free, others hold the rest", "is that intended?")
            self._parked.reclaim(wait=True)
            return []
        work = self._schedule()
        if not work:
            return []
        with self.timeline.span("step", tokens=sum(count for _, count in work)):
            self._forward(work)
        finished = [request for request, _ in work if request.state is State.DONE]
        if self.observe is not None:
            self.observe("step", sum(count for _, count in work), time.perf_counter() - started)
        return finished

    def close(self) -> None:
        """Cancel what runs and wait until gdscache has let go of all blocks; the cache itself is the caller's."""
        for request in [*self.waiting, *self.running]:
            self.cancel(request)
        while self._parked:
            self._parked.reclaim(wait=True)
        self._prefills.report()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Requests join in order, as long as there are blocks for all that they may need."""
        while self.waiting and len(self.running) < self.options.max_batch:
            request = self.waiting[0]
            shared = self._find_shared(request)
            blocks = self.pool.take(self._blocks_of(request) - len(shared))
            if blocks is None:
                self.pool.release(shared)
                return
            self.running.append(self.waiting.popleft())
            request.state, request.blocks = State.RUNNING, shared + blocks
            request.computed = len(shared) * self.pool.block_tokens
            if shared:
                request.sources["pool"] = request.computed
            self._begin_load(request)  # before anything that the load need not wait for
            request.published = request.computed
            request.places = self.pool.places(request.blocks)

    def _find_shared(self, request: Request) -> list[int]:
        """Blocks of pages that are still in the pool. The last token of a prompt is computed in any case."""
        if self.cache is None or not self.options.share or request.uncached:
            return []
        if not request.keys:
            request.keys = [page.key for page in self.cache.pages(request.tokens, request.salt)]
        return self.pool.find(request.keys[: (len(request.tokens) - 1) // self.page_tokens])

    def _begin_load(self, request: Request) -> None:
        """Look up what follows the shared pages, and begin to load it into the request's own blocks."""
        if self.cache is None or request.uncached:
            return
        hit = self.cache.lookup(request.tokens[:-1], start=request.computed, salt=request.salt)
        if hit.tokens:
            first = request.computed // self.pool.block_tokens
            last = first + hit.tokens // self.pool.block_tokens
            request.load_begun, request.load_seconds = time.perf_counter(), None
            request.load, request.loaded_from = self.cache.load(hit, request.blocks[first:last]), request.computed
            request.computed += request.load.tokens  # a hit is a snapshot: this is what is on its way

    def _schedule(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens: one for each that decodes, a chunk for those that have more to do.

        Chunks end at multiples of `chunk_tokens`, so that a prompt that begins behind cached pages is cut where the
        same prompt is cut without them.
        """
        work, left, held = [], self.options.chunk_tokens, []
        for request in list(self.running):
            if request.load is not None and not self.options.overlap:
                if not request.load.done():
                    held.append(request)
                    continue
                self._judge(request)
                if request.state is not State.RUNNING:
                    continue
            todo = len(request.tokens) - request.computed
            if todo > 1:
                to_boundary = self.options.chunk_tokens - request.computed % self.options.chunk_tokens
                todo = min(todo, to_boundary, left)
                left -= todo
            if todo:
                work.append((request, todo))
        if held and not work:
            self._judge(held[0])  # nothing else to do but to wait
        return work

    def _forward(self, work: Sequence[tuple[Request, int]]) -> None:
        loading = [request for request, _ in work if request.load is not None]
        batch = batch_of(work, self.device)
        rows = {  # of those that have a token after this: what it follows from
            request: span.rows.stop - 1
            for (request, count), span in zip(work, batch.spans, strict=True)
            if request.computed + count == len(request.tokens)
        }
        index = upload([*rows.values()], self.device)
        prefill = self._prefills.begin(work)
        hidden = self.model(batch, self.pool.rows, lambda layer: self._ready(loading, layer), self.timeline)
        self._prefills.end(prefill)
        logits = self.model.logits(hidden[index]) if rows else None
        good = {request: count for request, count in work if self._judge(request)}
        for request, count in good.items():
            request.computed += count
        ends = [(number, request) for number, request in enumerate(rows) if request in good]
        self._prefills.report()  # while the device works and nobody waits
        if logits is not None and ends:
            self._sample(ends, logits)
        for request in good:
            self._store(request)
        for _, request in ends:
            last = request.tokens[-1]
            if len(request.generated) == request.new_tokens or last in request.stop:
                self._leave(request)
                request.state, request.finished = State.DONE, time.perf_counter()

    def _ready(self, loading: list[Request], layer: int) -> None:
        """Order the current stream after this layer's pages of all loads of the batch."""
        started = time.perf_counter()
        for request in loading:
            try:
                if request.load is not None and not request.late:
                    request.load.wait(layer)
            except DeadlineError:
                request.late = True  # what is computed for it now is thrown away
        if loading and self.observe is not None:
            self.observe("wait", layer, time.perf_counter() - started)

    def _sample(self, ends: Sequence[tuple[int, Request]], logits: torch.Tensor) -> None:
        """The next token of each, greedily, from its row of `logits`, which were queued before the verdict on all that
        they rest on; it is there now."""
        best = logits.topk(2)
        tokens, margins = best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()
        now = time.perf_counter()
        for number, request in ends:
            request.first_token = request.first_token or now
            request.tokens.append(tokens[number])
            request.margins.append(margins[number])
            if self.options.keep_logits:
                request.logits.append(logits[number].cpu())

    # -- what gdscache is asked --------------------------------------------------------------------------------------

    def _judge(self, request: Request) -> bool:
        """The verdict on a request's load, before anything that rests on it is used. False: what was computed for it in
        this step is worth nothing; it goes on from the first bad page."""
        load = request.load
        if load is None:
            return True
        promised = request.computed
        try:
            report = None if request.late else load.settle(functools.partial(self._step_back, request))
        except DeadlineError:
            report = None
        if report is None:
            self._start_over(request)
            return False
        request.load = None
        request.published = request.computed
        request.load_seconds = report.seconds if request.computed == promised else None
        assert self.cache is not None, "a load without a cache"
        left = report.tokens
        for tier, nbytes in report.bytes_by_tier.items():
            tokens = min(left, nbytes // self.cache.layout.page_bytes * self.page_tokens)
            request.sources[tier] = request.sources.get(tier, 0) + tokens
            left -= tokens
        self._publish(request, request.loaded_from)
        return request.computed == promised

    def _step_back(self, request: Request, gap: Gap) -> None:
        """Pages of a load are missing: the steps to come compute them, and what follows, into the same blocks."""
        request.recomputed += request.computed - gap.first
        request.computed = gap.first

    def _start_over(self, request: Request) -> None:
        """A load that is too late: leave it the blocks, and compute the request without the cache, in others."""
        self._leave(request)
        request.recomputed += request.computed - request.loaded_from
        request.state, request.uncached, request.late = State.WAITING, True, False
        request.computed, request.sources = 0, {}
        self.waiting.appendleft(request)

    def _store(self, request: Request) -> None:
        """Hand over the pages that are full now. Nobody writes to them again, so only their release is to wait for."""
        full = request.computed // self.page_tokens * self.page_tokens
        first, size = request.published, self.pool.block_tokens
        if self.cache is None or not self.options.store or full <= first:
            return
        blocks = request.blocks[first // size : full // size]
        handle = self.cache.store(request.tokens[:full], blocks, start=first, salt=request.salt)
        request.reads.append(handle.release_event)
        request.published = full
        self._publish(request, first)

    def _publish(self, request: Request, first: int) -> None:
        """Let other requests share the pages from token `first` to `published`."""
        if self.cache is None or not self.options.share:
            return
        if len(request.keys) * self.page_tokens < request.published:
            request.keys = [page.key for page in self.cache.pages(request.tokens, request.salt)]
        size = self.pool.block_tokens
        for start in range(first, request.published, self.page_tokens):
            blocks = request.blocks[start // size : (start + self.page_tokens) // size]
            self.pool.publish(request.keys[start // self.page_tokens], blocks)

    def _leave(self, request: Request) -> None:
        """A request stops using its blocks. They are free when gdscache neither reads nor writes them any more."""
        self.running.remove(request)
        if request.load is not None:
            request.load.cancel()
            request.reads.append(request.load.release_event)
        self._parked.park(request.blocks, request.reads)
        request.blocks, request.reads, request.load, request.places = [], [], None, None

    def _blocks_of(self, request: Request) -> int:
        return -(-(request.prompt_tokens + request.new_tokens) // self.pool.block_tokens)
