"""The scheduler's side of the vLLM connector against a small scheduler: whatever comes, blocks hold what they should.

The scheduler here has vLLM's order of calls: a pool of blocks with a prefix cache, chunked prefills, preemption, loads
within a step and between steps, aborts. It has a block table a group of layers, in which a block that its layers do not
keep is `NULL`: freed while its request runs, and given to another group. A block's content is (its page, tokens of it
that are written), and a page is (group, hash of all tokens up to its end).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gdscache import PageHashes
from gdscache.engine.hybrid import HybridHit
from gdscache.groups.base import Group, alignment, complete, lengths, needed
from gdscache.groups.names import GroupNames
from gdscache.integrations.fetching import GroupFetch
from gdscache.integrations.vllm.groups import NULL, GroupTable, KeptStates
from gdscache.integrations.vllm.requests import LoadOrder, RequestTable
from gdscache.pages.hit import Hit
from tests.support.fetches import FakeCache, FakeFetch, names_of

SIZE, BLOCKS, CHUNK, WAIT = 2, 14, 5, 3.0
Tokens = tuple[int, ...]
PageOf = tuple[int, bytes]  # group, hash
GROUPS = {
    "equal pages": (Group("0", (0,), 2), Group("1", (1,), 2, "window", 5)),
    "windows of larger pages": (
        Group("0", (0,), 4, "window", 6),
        Group("1", (1,), 2),
        Group("2", (2,), 4, "window", 6),
    ),
    "windows of smaller pages": (Group("0", (0,), 2, "window", 5), Group("1", (1,), 4)),
    "chunks": (
        Group("0", (0,), 4),
        Group("1", (1,), 4, "chunk", 8),
        Group("2", (2,), 4),
        Group("3", (3,), 4, "window", 3),
    ),
    "windows alone": (Group("0", (0,), 2, "window", 5), Group("1", (1,), 2, "window", 9)),
    "pages that do not divide each other": (Group("0", (0,), 4), Group("1", (1,), 6, "window", 7)),
}


@functools.cache
def hash_of(tokens: Tokens) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest()


def hashes_of(tokens: Tokens) -> list[bytes]:
    return [hash_of(tokens[: end + SIZE]) for end in range(0, len(tokens) - SIZE + 1, SIZE)]


class FakeGroupFetch(FakeFetch, GroupFetch):
    """A fetch in all groups: all that is wanted is verified, or nothing."""

    def __init__(self, found: HybridHit, align: int, clock: Callable[[], float]) -> None:
        wanted = found.tokens // align
        super().__init__([], wanted, wanted, clock)
        self.found, self.parted = found, found.parted

    def verified(self) -> int:
        return self.wanted if super().verified() == self.wanted else 0

    def checked(self, first: int, pages: int) -> HybridHit:  # type: ignore[override]
        assert self.verified() == self.wanted, "only what was checked"
        return self.found

    def unchecked(self, first: int, pages: int) -> HybridHit:  # type: ignore[override]
        return self.found


class FakeGroupCache(FakeCache):
    """The pages that are stored of all groups."""

    adapts = False

    def __init__(self, groups: Sequence[Group], every: int) -> None:
        super().__init__()
        self.groups, self.window_every = groups, every

    def names(self) -> GroupNames:
        namespaces = [hash_of((number,)) for number in range(len(self.groups))]
        return GroupNames(self.groups, namespaces, math.gcd(*(group.page_tokens for group in self.groups)))

    def reach(self, names: GroupNames, most: int) -> tuple[int, int]:
        has, most = names.presence(self._visible), min(most, names.tokens)
        return next(lengths(self.groups, has, most), 0), complete(self.groups, has, most)

    def fetch_groups(self, names: GroupNames, most: int, tokens: int, local: int = 0) -> FakeGroupFetch:
        length, whole = self.reach(names, most)
        chains = tuple(names.chain(needed(self.groups, length)))
        hits = tuple(Hit(0, length, ("ssd",) * len(some), None, some.pages) for some in chains)
        found = HybridHit(0, length, {}, whole, parts=hits, order=chains)
        fetch = FakeGroupFetch(found, alignment(self.groups), self.clock)
        self.fetches.append(fetch)
        return fetch

    def stand(self, names: GroupNames, wanted: Sequence[Sequence[int]]) -> None:
        """States leave here when the test says so."""

    def _visible(self, keys: Sequence[bytes]) -> bytes:
        return bytes(key in self.stored for key in keys)


class Scheduler(RuleBasedStateMachine):
    """Requests are prefixes of a small tree, so that they share blocks and pages."""

    groups: Sequence[Group] = (Group("all", (0,), SIZE),)
    largest = BLOCKS // 2  # blocks that a request has at most

    @initialize(own=st.booleans(), unhashed=st.integers(0, 3))
    def begin(self, own: bool, unhashed: int) -> None:
        self.cache = FakeCache()
        self.table = RequestTable(self.cache, SIZE, wait=WAIT, clock=self.cache.clock)
        self._open_pool(range(1, BLOCKS + 1), CHUNK, lambda page: own)
        self.unhashed = unhashed

    def _open_pool(self, blocks: Sequence[int], chunk: int, own: Callable[[PageOf], bool]) -> None:
        """`own`: whether vLLM has a page in a prefix cache of its own."""
        self.own, self.chunk, self.blocks = own, chunk, blocks
        self.unhashed = 0  # tokens of an answer whose hash comes later
        self.content: dict[int, tuple[PageOf | None, int] | None] = dict.fromkeys(blocks)
        self.named: dict[int, PageOf] = {}  # vLLM's prefix cache
        self.taken: list[int] = []  # blocks that this step has given out
        self.free = list(blocks)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.remote: list[Any] = []
        self.reading: list[tuple[bytes, int]] = []  # stores that have not read their block: name, block
        self.pages: dict[bytes, PageOf] = {}  # by their names
        self.alone: set[str] = set()  # requests that were there when weights changed
        self.number = 0

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=9), more=st.integers(1, 5))
    def arrive(self, path: list[int], more: int) -> None:
        self.ask(tuple(path), more)

    def ask(self, tokens: Tokens, more: int) -> Any:
        """A request arrives: `more` tokens are to be generated."""
        request = SimpleNamespace(
            request_id=f"r{self.number}",
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            end=len(tokens) + more,
            num_computed_tokens=0,
            tables=[],
            failed=False,
        )
        self.number += 1
        self._known(request)
        self.waiting.append(request)
        self.table.add(request)
        return request

    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        if live := [fetch for fetch in self.cache.fetches if not fetch.released]:
            data.draw(st.sampled_from(live)).until = self.cache.now

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.cache.stored:
            self.cache.stored.remove(data.draw(st.sampled_from(sorted(self.cache.stored))))

    @rule()
    def read(self) -> None:
        for store in self.reading:
            self._take(*store)
        self.reading = []

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if everybody := [*self.waiting, *self.running, *self.remote]:
            request = data.draw(st.sampled_from(everybody))
            for some in (self.waiting, self.running, self.remote):
                if request in some:
                    some.remove(request)
            self._finish(request)

    @rule()
    def reset(self) -> None:
        """vLLM's prefix cache is emptied, which it allows when nobody has blocks."""
        if len(self.free) == len(self.blocks):
            self.named = {}

    @rule(number=st.integers(0, 15))
    def forget(self, number: int) -> None:
        """Now and then other weights come: what is there is of no use, nor what waits to be stored."""
        if number != 11:
            return
        self.table.leave_alone()
        self.alone.update(request.request_id for request in [*self.waiting, *self.running, *self.remote])
        self.cache.stored, self.reading = set(), []

    @rule(data=st.data(), steps=st.integers(1, 6))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            for fetch in self.cache.fetches:
                if not (fetch.ended or fetch.released):
                    self._land(fetch, data.draw(st.sampled_from(["all", "all", "no room", "some", "nothing", "ended"])))
                    fetch.too_slow = data.draw(st.integers(0, 3)) == 3
            self._step(data)

    def _land(self, fetch: FakeFetch, end: str) -> None:
        """Pages of a fetch have come; it may have ended."""
        fetch.there = {"all": fetch.wanted, "nothing": fetch.there}.get(end, max(fetch.there, fetch.wanted // 2))
        fetch.ended = fetch.there == fetch.wanted or end in ("ended", "no room")
        fetch.no_room = fetch.there < fetch.wanted and end == "no room"

    def _step(self, data: st.DataObject | None) -> None:
        self.cache.now += 1
        scheduled, fresh = self._schedule()
        fresh |= self.table.take_fresh()
        for store in [s for s in self.reading if s[1] in fresh]:
            self._take(*store)
            self.reading.remove(store)
        self.content.update(dict.fromkeys(self.taken))  # whoever still reads them has lost
        self.taken = []
        tables = {request.request_id: self._handed(request.tables) for request in self.running}
        stores = list(self.table.stores(scheduled, tables.__getitem__))
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
        assert len(self.table) == len(self.waiting) + len(self.running) + len(self.remote)
        assert all(fetch.released <= 1 for fetch in self.cache.fetches)
        assert not any(fetch.loads for fetch in self.cache.fetches), "the scheduler's side loads nothing"

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.finish_all()
        self.table.clear()
        assert all(fetch.released == 1 for fetch in self.cache.fetches)

    def finish_all(self) -> None:
        """Whatever their pages do, all requests come to their end."""
        for number in range(400 + 100 * len(self.waiting)):
            for fetch in self.cache.fetches[:: 1 + number % 2]:
                if not (fetch.ended or fetch.released):
                    self._land(fetch, ("all", "no room", "nothing")[number % 3])
            self._step(None)
            if not (self.waiting or self.running or self.remote):
                break
        assert [*self.waiting, *self.running, *self.remote] == []

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[dict[str, int], set[int]]:
        scheduled: dict[str, int] = {}
        fresh: set[int] = set()
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue
            computed = request.num_computed_tokens
            tokens = min(self.chunk, len(request.tokens) - computed)
            while (new := self._grow(request, computed, computed + tokens)) is None:
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
            self.remote.remove(request)
            if request.failed:
                request.failed = False
                self._free(request)
                self.waiting.append(request)
                return self._admit(request, scheduled)
            computed = request.num_computed_tokens
            tokens = min(self.chunk, len(request.tokens) - computed)
            if self._grow(request, computed, computed + tokens) is None:
                self.remote.append(request)
                return False
            self.table.place(request, self._handed(request.tables), 0)
        else:
            local, tables = self._local(request)
            found, between = self.table.ask(request, local)
            assert found or not between
            if found is None:
                return True
            assert found % alignment(self.groups) == 0
            assert local + found < len(request.tokens), "one token is left to compute"
            computed = local + found
            tokens = 0 if between else min(self.chunk, len(request.tokens) - computed)
            request.tables = tables
            self.free = [block for block in self.free if not any(block in table for table in tables)]
            crowded = between and (len(self.remote) + 1) * self.largest > len(self.blocks)  # they are not preempted
            if crowded or self._grow(request, computed, computed + tokens) is None:
                self._free(request)
                return False
            request.num_computed_tokens, request.local = computed, local
            self.table.place(request, self._handed(request.tables), found)
            self.waiting.remove(request)
            if between and found:
                self.remote.append(request)
                return True
        self.running.append(request)
        scheduled[request.request_id] = tokens
        return True

    def _local(self, request: Any) -> tuple[int, list[list[int]]]:
        """The longest hit in tokens of vLLM's own prefix cache, and its tables."""
        blocks = {page: block for block, page in self.named.items() if self.own(page)}
        pages = [self._pages(request, g) for g in range(len(self.groups))]

        def has(g: int, first: int, stop: int) -> bytes:
            return bytes(page in blocks for page in pages[g][first:stop])

        length = next(lengths(self.groups, has, len(request.tokens) - 1), 0)
        tables = [
            [*[NULL] * some.start, *(blocks[pages[g][number]] for number in some)]
            for g, some in enumerate(needed(self.groups, length))
        ]
        return length, tables

    def _grow(self, request: Any, computed: int, tokens: int) -> list[int] | None:
        """Blocks for so many tokens; what they held is forgotten. Those that a token behind `computed` does not attend
        to are freed first, also where there are none for the others."""
        request.tables = request.tables or [[] for _ in self.groups]
        gone: list[int] = []
        lacking: list[tuple[list[int], int]] = []  # a table for each block that it lacks, and how many come before
        for group, table in zip(self.groups, request.tables, strict=True):
            first = group.first(computed)
            gone += [block for block in table[:first] if block != NULL]
            table[:first] = [NULL] * min(first, len(table))
            lacking += [(table, n) for n in range(max(first, len(table)), -(-tokens // group.page_tokens))]
        self._give_back(request, gone)
        if len(lacking) > len(self.free):
            return None
        new: list[int] = []
        for table, number in lacking:
            new.append(self.free.pop(0))
            table += [NULL] * (number - len(table))
            table.append(new[-1])
            self.named.pop(new[-1], None)
        for group, table in zip(self.groups, request.tables, strict=True):
            table += [NULL] * (computed // group.page_tokens - len(table))
        self.taken += new
        return new

    def _free(self, request: Any) -> None:
        gone = [block for table in request.tables for block in table if block != NULL]
        request.tables, request.num_computed_tokens = [], 0
        self._give_back(request, gone)

    def _give_back(self, request: Any, blocks: Sequence[int]) -> None:
        """Blocks that a request has no more are free, unless others have them."""
        others = [*self.running, *self.remote, request]
        shared = {block for other in others for table in other.tables for block in table}
        self.free += [block for block in blocks if block not in shared and block not in self.free]

    def _finish(self, request: Any) -> None:
        for order in self.table.end(request, self._handed(request.tables or [[] for _ in self.groups])):
            self._store(order, request)
        self._free(request)

    def _handed(self, tables: list[list[int]]) -> Any:
        """What the connector's table gets of a request's tables."""
        return list(tables[0])

    # -- the worker --------------------------------------------------------------------------------------------------

    def _load(self, orders: list[LoadOrder], data: st.DataObject | None) -> None:
        for order in orders:
            request = next(r for r in [*self.running, *self.remote] if r.request_id == order.request_id)
            assert request.request_id not in self.alone
            pages, good = self._loaded(request, order), len(order.blocks)
            for block, page in zip(order.blocks, pages, strict=True):
                assert self._page_of(request, block) == page, "another page is loaded than the block is for"
            if order.between:
                good = data.draw(st.integers(0, good)) if data is not None else good
                self._arrived(request, order, good)
            for block, page in list(zip(order.blocks, pages, strict=True))[:good]:
                self._fill(block, page, self.groups[page[0]].page_tokens)
            order.fetch.release()

    def _loaded(self, request: Any, order: LoadOrder) -> list[PageOf]:
        assert isinstance(order.fetch, FakeFetch)
        stop = order.first + len(order.blocks)
        assert order.between or order.fetch.verified() >= stop, "only what was checked"
        assert request.tables[0][order.first : stop] == list(order.blocks)
        return self._pages(request, 0)[order.first : stop]

    def _arrived(self, request: Any, order: LoadOrder, good: int) -> None:
        """A load between steps has ended, and so many of its pages are good."""
        request.num_computed_tokens = (order.first + good) * SIZE

    def _compute(self, scheduled: dict[str, int]) -> None:
        for request in self.running:
            tokens = scheduled.get(request.request_id, 0)
            if not tokens:
                continue
            before, after = request.num_computed_tokens, request.num_computed_tokens + tokens
            for g, group in enumerate(self.groups):
                size, table, pages = group.page_tokens, request.tables[g], self._pages(request, g)
                for number in range(group.first(before), before // size):
                    assert self.content[table[number]] == (pages[number], size), "computed with wrong bytes"
                for number in range(before // size, -(-after // size)):
                    page = pages[number] if number < len(pages) else None
                    self._fill(table[number], page, min(size, after - number * size))
            request.num_computed_tokens = after
            if after == len(request.tokens):
                request.tokens += (after % 2,)
                self._known(request)

    def _fill(self, block: int, page: PageOf | None, tokens: int) -> None:
        assert block != NULL, "the null block"
        self.content[block] = page, tokens
        if page is not None and tokens == self.groups[page[0]].page_tokens:
            self.named[block] = page

    def _store(self, order: Any, ended: Any = None) -> None:
        request = ended or next(r for r in self.running if r.request_id == order.request_id)
        assert request.request_id not in self.alone
        names = [page.key for page in order.pages(bytes(32))]
        for name, block in zip(names, order.blocks, strict=True):
            assert self._page_of(request, block) == self.pages[name]
            self.reading.append((name, block))

    def _take(self, name: bytes, block: int) -> None:
        page = self.pages[name]
        assert self.content[block] == (page, self.groups[page[0]].page_tokens), "a store has read what is not its page"
        self.cache.stored.add(name)

    # -- pages and their names ---------------------------------------------------------------------------------------

    def _pages(self, request: Any, g: int) -> list[PageOf]:
        size = self.groups[g].page_tokens
        return [(g, hash_of(request.tokens[:end])) for end in range(size, len(request.tokens) + 1, size)]

    def _page_of(self, request: Any, block: int) -> PageOf:
        assert block != NULL, "the null block"
        ((g, number),) = [
            (g, n) for g, table in enumerate(request.tables) for n, some in enumerate(table) if some == block
        ]
        return self._pages(request, g)[number]

    def _known(self, request: Any) -> None:
        request.num_tokens = len(request.tokens)
        request.block_hashes = hashes_of(self._hashed(request))
        self.pages.update(zip(names_of(PageHashes(request.block_hashes)), self._pages(request, 0), strict=False))

    def _hashed(self, request: Any) -> Tokens:
        """Those of a request's tokens that vLLM has hashed."""
        return request.tokens[: max(request.num_prompt_tokens, len(request.tokens) - self.unhashed)]


class GroupScheduler(Scheduler):
    """Of a hybrid model. Loads that failed begin again, as a whole. Requests are prefixes of three long prompts."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        own=st.sampled_from(["nothing", "all", "some"]),
        every=st.integers(0, 9),
        blocks=st.sampled_from([90, 60, 30]),
        unhashed=st.integers(0, 3),
    )
    def begin(self, groups: str, own: str, every: int, blocks: int, unhashed: int) -> None:  # type: ignore[override]
        """`own`: what vLLM's own prefix cache has of windows; of other groups, all unless nothing."""
        some = GROUPS[groups]

        def has(page: PageOf) -> bool:
            return own == "all" or (own == "some" and (some[page[0]].keeps == "all" or page[1][0] < 128))

        self.open(some, every, blocks, has)
        self.unhashed = unhashed

    @rule(parts_at=st.sampled_from([8, 13, 24]), length=st.integers(3, 24), more=st.integers(1, 8))
    def arrive(self, parts_at: int, length: int, more: int) -> None:  # type: ignore[override]
        self.ask(tuple(n if n < parts_at else -parts_at * n for n in range(length)), more)

    def open(
        self,
        groups: Sequence[Group],
        every: int,
        blocks: int,
        own: Callable[[PageOf], bool] = lambda page: False,
        chunk: int = 7,
    ) -> None:
        self.groups, self.largest = groups, 30
        self.cache: FakeGroupCache = FakeGroupCache(groups, every)
        self.table = GroupTable(self.cache, KeptStates(), wait=WAIT, clock=self.cache.clock)  # type: ignore[arg-type]
        self._open_pool(range(1, blocks + 1), chunk, own)

    def _handed(self, tables: list[list[int]]) -> Any:
        return tuple(map(list, tables))

    def _loaded(self, request: Any, order: LoadOrder) -> list[PageOf]:
        pages = [self.pages[page.key] for page in order.hit().pages]
        local, length = request.local, request.num_computed_tokens
        wanted = [
            block
            for group, table in zip(self.groups, request.tables, strict=True)
            for block in table[local // group.page_tokens : length // group.page_tokens]
            if block != NULL
        ]
        assert sorted(order.blocks) == sorted(wanted), "all that the next token attends to, and nothing else"
        return pages

    def _arrived(self, request: Any, order: LoadOrder, good: int) -> None:
        request.failed = good < len(order.blocks)
        if request.failed:  # a bad page is dropped
            self.cache.stored.discard(order.hit().pages[good].key)

    def _known(self, request: Any) -> None:
        names = self.cache.names()
        digest = math.gcd(*(group.page_tokens for group in self.groups))
        request.num_tokens = len(request.tokens)
        tokens = self._hashed(request)
        request.block_hashes = [hash_of(tokens[:end]) for end in range(digest, len(tokens) + 1, digest)]
        names.extend(request.block_hashes)
        for g, group in enumerate(self.groups):
            keys = names.keys(g, 0, len(tokens) // group.page_tokens)
            self.pages.update(zip(keys, self._pages(request, g), strict=False))
