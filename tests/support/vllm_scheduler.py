"""The scheduler's side of the vLLM connector against a small scheduler: whatever comes, blocks hold what they should.

The scheduler here has vLLM's order of calls: a pool of blocks with a prefix cache, chunked prefills, preemption, loads
within a step and between steps, aborts. A block's content is (hash of its page, tokens of it that are written).
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gdscache.integrations.vllm.requests import LoadOrder, RequestTable, StoreOrder
from tests.support.fetches import FakeCache, FakeFetch, names_of

SIZE, BLOCKS, CHUNK, WAIT = 2, 14, 5, 3.0
Tokens = tuple[int, ...]


def hash_of(tokens: Tokens) -> bytes:
    """The hash of the page that ends these tokens."""
    return hashlib.sha256(repr(tokens).encode()).digest()


def hashes_of(tokens: Tokens) -> list[bytes]:
    return [hash_of(tokens[: end + SIZE]) for end in range(0, len(tokens) - SIZE + 1, SIZE)]


class Scheduler(RuleBasedStateMachine):
    """Requests are prefixes of a small tree, so that they share blocks and pages."""

    @initialize(own=st.booleans())
    def begin(self, own: bool) -> None:
        self.own = own  # whether vLLM has a prefix cache of its own
        self.cache, self.now = FakeCache(), 0.0
        self.table = RequestTable(self.cache, SIZE, wait=WAIT, clock=lambda: self.now)
        self.content: dict[int, tuple[bytes, int] | None] = dict.fromkeys(range(BLOCKS))
        self.named: dict[int, bytes] = {}  # vLLM's prefix cache
        self.taken: list[int] = []  # blocks that this step has given out
        self.free = list(range(BLOCKS))
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.remote: list[Any] = []
        self.reading: list[tuple[bytes, bytes, int]] = []  # stores that have not read their block: name, hash, block
        self.number = 0

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=9), more=st.integers(1, 5))
    def arrive(self, path: list[int], more: int) -> None:
        tokens = tuple(path)
        request = SimpleNamespace(
            request_id=f"r{self.number}", tokens=tokens, end=len(tokens) + more, num_computed_tokens=0, blocks=[]
        )
        self.number += 1
        self._known(request)
        self.waiting.append(request)
        self.table.add(request)

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """Some pages of a fetch have come; it may have ended."""
        if live := [fetch for fetch in self.cache.fetches if not fetch.ended and not fetch.released]:
            fetch = data.draw(st.sampled_from(live))
            fetch.there = data.draw(st.integers(fetch.there, fetch.wanted))
            fetch.ended = fetch.there == fetch.wanted or data.draw(st.booleans())
            fetch.no_room = fetch.there < fetch.wanted and data.draw(st.booleans())
            fetch.too_slow = data.draw(st.booleans())

    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        if live := [fetch for fetch in self.cache.fetches if not fetch.released]:
            data.draw(st.sampled_from(live)).until = self.cache.now

    @rule()
    def lose(self) -> None:
        """Our tiers lose a page."""
        if self.cache.stored:
            self.cache.stored.remove(min(self.cache.stored))

    @rule()
    def read(self) -> None:
        for store in self.reading:
            self._take(*store)
        self.reading = []

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if everybody := [*self.waiting, *self.running]:
            request = data.draw(st.sampled_from(everybody))
            (self.waiting if request in self.waiting else self.running).remove(request)
            self._finish(request)

    @rule()
    def reset(self) -> None:
        """vLLM's prefix cache is emptied, which it allows when nobody has blocks."""
        if len(self.free) == BLOCKS:
            self.named = {}

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self._step(data)

    def _step(self, data: st.DataObject | None) -> None:
        self.now += 1
        scheduled, fresh = self._schedule()
        fresh |= self.table.take_fresh()
        for store in [s for s in self.reading if s[2] in fresh]:
            self._take(*store)
            self.reading.remove(store)
        self.content.update(dict.fromkeys(self.taken))  # whoever still reads them has lost
        self.taken = []
        blocks = {request.request_id: request.blocks for request in self.running}
        stores = list(self.table.stores(scheduled, blocks.__getitem__))
        self._load(self.table.take_loads(), data)
        self._compute(scheduled)
        for order in stores:
            self._store(order)
        for request in [r for r in self.running if len(r.tokens) >= r.end]:
            self.running.remove(request)
            self._finish(request)

    # -- what is to hold ---------------------------------------------------------------------------------------------

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "table"):
            return
        held = [fetch for fetch in self.cache.fetches if not fetch.released]
        assert len(held) <= len(self.waiting) + len(self.running)
        assert not any(fetch.loads for fetch in self.cache.fetches), "the scheduler's side loads nothing"
        assert len(self.table) == len(self.waiting) + len(self.running) + len(self.remote)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for _ in range(400):  # whatever their pages do, all requests come to their end
            self._step(None)
            if not (self.waiting or self.running or self.remote):
                break
        assert [*self.waiting, *self.running, *self.remote] == []
        self.table.clear()
        assert all(fetch.released for fetch in self.cache.fetches)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[dict[str, int], set[int]]:
        scheduled: dict[str, int] = {}
        fresh: set[int] = set()
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue
            tokens = min(CHUNK, len(request.tokens) - request.num_computed_tokens)
            while (new := self._grow(request, request.num_computed_tokens + tokens)) is None:
                victim = self.running.pop()
                preempted = True
                scheduled.pop(victim.request_id, None)
                self._free(victim)
                self.waiting.insert(0, victim)
                if victim is request:
                    break
            if new is not None:
                scheduled[request.request_id] = tokens
                fresh |= set(new)
        for request in [*self.remote, *self.waiting] if not preempted else []:
            if not self._admit(request, scheduled):
                break
        return scheduled, fresh

    def _admit(self, request: Any, scheduled: dict[str, int]) -> bool:
        if request in self.remote:
            if not request.arrived:
                return True
            self.remote.remove(request)
            computed = request.num_computed_tokens
            tokens = min(CHUNK, len(request.tokens) - computed)
            if self._grow(request, computed + tokens) is None:
                self.remote.append(request)
                return False
            self.table.place(request, request.blocks, 0)
        else:
            local = self._local(request)
            found, between = self.table.ask(request, len(local) * SIZE)
            assert found or not between
            if found is None:
                return True
            assert found % SIZE == 0
            assert len(local) * SIZE + found < len(request.tokens), "one token is left to compute"
            computed = len(local) * SIZE + found
            tokens = 0 if between else min(CHUNK, len(request.tokens) - computed)
            request.blocks = local
            self.free = [block for block in self.free if block not in local]
            if self._grow(request, computed + tokens) is None:
                self._free(request)
                return False
            request.num_computed_tokens = computed
            self.table.place(request, list(request.blocks), found)
            self.waiting.remove(request)
            if between and found:
                request.arrived = False
                self.remote.append(request)
                return True
        self.running.append(request)
        scheduled[request.request_id] = tokens
        return True

    def _local(self, request: Any) -> list[int]:
        found: list[int] = []
        for name in hashes_of(request.tokens)[: (len(request.tokens) - 1) // SIZE] if self.own else []:
            block = next((b for b, some in self.named.items() if some == name), None)
            if block is None:
                break
            found.append(block)
        return found

    def _grow(self, request: Any, tokens: int) -> list[int] | None:
        """Blocks for so many tokens; what they held is forgotten."""
        missing = -(-tokens // SIZE) - len(request.blocks)
        if missing > len(self.free):
            return None
        new = [self.free.pop(0) for _ in range(max(0, missing))]
        request.blocks = [*request.blocks, *new]
        for block in new:
            self.named.pop(block, None)
        self.taken += new
        return new

    def _free(self, request: Any) -> None:
        shared = {block for other in [*self.running, *self.remote] if other is not request for block in other.blocks}
        self.free += [block for block in request.blocks if block not in shared and block not in self.free]
        request.blocks, request.num_computed_tokens = [], 0

    def _finish(self, request: Any) -> None:
        self.table.finish(request.request_id)
        self._free(request)

    # -- the worker --------------------------------------------------------------------------------------------------

    def _load(self, orders: list[LoadOrder], data: st.DataObject | None) -> None:
        for order in orders:
            fetch = order.fetch
            assert isinstance(fetch, FakeFetch)
            request = next(r for r in [*self.running, *self.remote] if r.request_id == order.request_id)
            names = hashes_of(request.tokens)[order.first : order.first + len(order.blocks)]
            assert tuple(request.blocks[order.first : order.first + len(order.blocks)]) == order.blocks
            good = len(names)
            if order.between:
                good = data.draw(st.integers(0, len(names))) if data is not None else len(names)
                request.arrived = True
                request.num_computed_tokens = (order.first + good) * SIZE
            else:
                assert fetch.verified() >= order.first + len(order.blocks), "only what was checked"
            for block, name in list(zip(order.blocks, names, strict=True))[:good]:
                self._fill(block, name, SIZE)
            fetch.release()

    def _compute(self, scheduled: dict[str, int]) -> None:
        for request in self.running:
            tokens = scheduled.get(request.request_id, 0)
            if not tokens:
                continue
            before, after = request.num_computed_tokens, request.num_computed_tokens + tokens
            pages = hashes_of(request.tokens)
            for page in range(before // SIZE):
                assert self.content[request.blocks[page]] == (pages[page], SIZE), "computed with wrong bytes"
            for page in range(before // SIZE, -(-after // SIZE)):
                written = min(SIZE, after - page * SIZE)
                name = pages[page] if page < len(pages) else b""
                self._fill(request.blocks[page], name, written)
            request.num_computed_tokens = after
            if after == len(request.tokens):
                request.tokens += (after % 2,)
                self._known(request)

    def _fill(self, block: int, name: bytes, tokens: int) -> None:
        self.content[block] = name, tokens
        if tokens == SIZE:
            self.named[block] = name

    def _store(self, order: StoreOrder) -> None:
        request = next(r for r in self.running if r.request_id == order.request_id)
        names, pages = names_of(order.hashes), hashes_of(request.tokens)
        for page, block in enumerate(order.blocks, order.first):
            assert request.blocks[page] == block
            self.reading.append((names[page], pages[page], block))

    def _take(self, name: bytes, page: bytes, block: int) -> None:
        assert self.content[block] == (page, SIZE), "a store has read what is not its page"
        self.cache.stored.add(name)

    @staticmethod
    def _known(request: Any) -> None:
        request.num_tokens = len(request.tokens)
        request.block_hashes = hashes_of(request.tokens)
