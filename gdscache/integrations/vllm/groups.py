"""The scheduler's side of the vLLM connector for hybrid models, whose layers keep different tokens.

vLLM has a block table for each group; block 0 stands for a page that the group does not keep. All groups draw blocks
from one pool, and a block is a page of its group.

All pages of full attention are stored. Of a window, the pages that a hit can need are stored: at the prompt's end, in
generated tokens, every `every` tokens, and where the prompt parted from others (its full pages go on past its hit).
States are stored at the same tokens, if vLLM has one there: it offers states in the step that writes them, and makes
one where a prompt parted on request.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from gdscache.errors import InterfaceUnsupportedError
from gdscache.groups.base import alignment, kept, marks
from gdscache.groups.names import GroupNames, GroupPage
from gdscache.groups.pools import Partings
from gdscache.integrations.fetching import GroupFetch
from gdscache.integrations.vllm.requests import HASH_BYTES, Known, LoadOrder, RequestTable, StoreOrder
from gdscache.integrations.vllm.session import GroupSession

Tables = Sequence[Sequence[int]]  # the block table of each group
NULL = 0  # vLLM's block for "no block"


@dataclasses.dataclass(slots=True)
class _GroupKnown(Known):
    """`names`: of the request's pages. `ends`: lengths of hits for which its windows are kept. `next`: for each group,
    the first page not offered yet. `last`: for each pool, the last stored page since the request got its blocks."""

    names: GroupNames = dataclasses.field(default_factory=lambda: GroupNames((), (), 1))
    state: int = 0  # tokens of the last state that was stored for its place alone
    ends: set[int] = dataclasses.field(default_factory=set)
    next: list[int] = dataclasses.field(default_factory=list)
    last: list[GroupPage | None] = dataclasses.field(default_factory=list)


class KeptStates:
    """Blocks with states to store: vLLM reuses none of them before its bytes were read.

    vLLM itself promises such a block only to the end of the step that writes it. A wait for the read at the next step
    would delay its submission by the GPU's time.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._of: dict[str, list[Any]] = {}  # by request

    def bind(self, pool: Any) -> None:
        """`pool`: vLLM's `BlockPool`, which counts the owners of its blocks."""
        self._pool = pool

    @property
    def vllm_is_empty(self) -> bool:
        """Whether vLLM's own prefix cache can have nothing of before; asked behind its reset, which fails where blocks
        are in use."""
        return not self._pool.enable_caching or self._pool.get_usage() == 0

    def keep(self, request_id: str, block: int) -> None:
        self._pool.touch([self._pool.blocks[block]])
        self._of.setdefault(request_id, []).append(self._pool.blocks[block])

    def let_go(self, reads: Callable[[], Set[int]]) -> None:
        """Give back the blocks that no store needs any more. `reads()`: blocks that stores still read."""
        if not self._of:
            return
        wanted = reads()
        for request_id, blocks in list(self._of.items()):
            self._pool.free_blocks([block for block in blocks if block.block_id not in wanted])
            left = self._of[request_id] = [block for block in blocks if block.block_id in wanted]
            if not left:
                del self._of[request_id]

    def finish(self, request_id: str) -> set[int]:
        """Give back all blocks of a request. Returns their numbers: their next owners wait for the stores that read
        them."""
        blocks = self._of.pop(request_id, [])
        if blocks:
            self._pool.free_blocks(blocks)
        return {block.block_id for block in blocks}


class GroupTable(RequestTable):
    """All requests of vLLM's scheduler, for a hybrid model. A page here is the shortest length at which all groups have
    a page's end."""

    def __init__(self, cache: GroupSession, states: KeptStates, **settings: Any) -> None:
        """`settings`: of `RequestTable`."""
        self._groups = groups = cache.groups
        super().__init__(cache, alignment(groups), **settings)
        self._every = cache.window_every  # tokens between kept windows; 0: windows only where prompts end or part
        self._partings = Partings(groups, self._every, adapts=cache.adapts)
        self._least = min(group.page_tokens for group in groups)
        self._whole = any(group.keeps == "all" for group in groups)
        self.states = states
        self.between = any(one.keeps == "state" for one in groups)  # a hit's state is copied by vLLM before the step

    def ask(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """See `RequestTable.ask`. If full pages go on past the hit, ask vLLM for a state there: other prompts parted at
        that token, and the next one may."""
        answer = super().ask(request, computed)
        known = self._known.get(request.request_id)
        if self.between and self._whole and known is not None and isinstance(known.fetch, GroupFetch):
            parted = known.fetch.parted // self.page_tokens * self.page_tokens
            found = known.fetch.found
            hit = found.start + found.tokens
            if max(computed, hit, request.shared_prefix_boundary) < parted < request.num_tokens:
                request.shared_prefix_boundary = parted
        return answer

    def finish(self, request_id: str) -> None:
        """See `RequestTable.finish`. No block is kept after a request's end, so that vLLM's cache can be reset."""
        super().finish(request_id)
        self._fresh |= self.states.finish(request_id)

    def leave_alone(self, *, stale: bool = False) -> None:
        """See `RequestTable.leave_alone`. No block is kept for a store that is dropped: vLLM's cache can be reset."""
        super().leave_alone(stale=stale)
        for request_id in self._known:
            self._fresh |= self.states.finish(request_id)

    def stores(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Any],
        states: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
    ) -> Iterable[Any]:
        """See `RequestTable.stores`; `blocks_of` gives a table a group, as of this step. `states`: (group, block,
        tokens) of each state that the step writes, by request."""
        groups, find, size, states = self._groups, self._known.get, self.page_tokens, states or {}
        for request_id, tokens in scheduled.items():
            known = find(request_id)
            if not isinstance(known, _GroupKnown) or known.offered is None:
                continue
            before = known.request.num_computed_tokens
            after = before + tokens
            offers = states.get(request_id, ())
            idle = after // self._least <= known.offered <= before // self._least and not offers
            if idle or self._refused(known):
                continue  # most requests in most steps, by the numbers
            self._name(known)
            after = min(after, known.names.tokens)
            known.offered = max(known.offered, after // self._least)
            prompt = getattr(known.request, "num_prompt_tokens", known.request.num_tokens)
            wanted: list[list[int]] = []
            for g, group in enumerate(groups):
                if group.keeps == "state":
                    wanted.append([])
                    continue
                full = after // group.page_tokens
                first = min(known.next[g], before // group.page_tokens)  # less if a page is computed again
                some = kept(group, known.ends, first, full)
                if group.keeps != "all":
                    # Generated tokens may be the next prompt's: keep their windows from the last hit length in the
                    # prompt on.
                    begin = max(first, prompt // size * size // group.page_tokens)
                    some = sorted({*some, *range(begin, full)})
                wanted.append(some)
                known.next[g] = max(first, full)
            tables: Tables = blocks_of(request_id) if any(wanted) else ()
            wanted = [[n for n in some if tables[g][n] != NULL] for g, some in enumerate(wanted)]
            places = {(g, n): tables[g][n] for g, some in enumerate(wanted) for n in some}
            for g, block, end in offers:
                number, rest = divmod(end, groups[g].page_tokens)
                number -= 1
                if not rest and end <= known.names.tokens and self._keeps_state(known, end, prompt):
                    wanted[g].append(number)
                    places[g, number] = block
                    self.states.keep(request_id, block)
            self._cache.stand(known.names, wanted)
            for pool, chain in enumerate(known.names.chain(wanted, known.last)):
                if chain:
                    known.last[pool] = chain[-1]
                    blocks = tuple(places[at] for at in zip(chain.groups, chain.numbers, strict=True))
                    yield StoreOrder(request_id, chain.pages, 0, blocks, pool)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _keeps_state(self, known: _GroupKnown, end: int, prompt: int) -> bool:
        """Whether a state at token `end` is worth storing: a hit is likely to end there."""
        if end in known.ends or end >= prompt:
            return True
        if not self._every or end // self._every == known.state // self._every:
            return False
        known.state = end
        return True

    def _new(self, request: Any, refused: bool) -> Known:
        return _GroupKnown(request, refused, names=self._cache.names())

    def _fetch(self, known: Any, most: int) -> Any:
        return self._cache.fetch_groups(known.names, most * self.page_tokens, known.request.num_tokens, known.judged)

    def _reach(self, known: Any, fetch: Any, most: int) -> int:
        """See `RequestTable._reach`. Notes in the fetch where the request parts from others by now."""
        longest, whole = self._cache.reach(known.names, most * self.page_tokens)
        fetch.parted = max(fetch.parted, whole)
        return int(longest // self.page_tokens)

    def _written(self, blocks: Any, local: int) -> Set[int]:
        tables, tokens = zip(self._groups, blocks, strict=True), local * self.page_tokens
        return {*itertools.chain(*(table[tokens // group.page_tokens :] for group, table in tables))} - {NULL}

    def _name(self, known: Any) -> None:
        hashes, have = known.request.block_hashes, known.names.digests
        if len(hashes) > have:
            known.names.extend([bytes(some).ljust(HASH_BYTES, b"\0") for some in hashes[have:]])
            if self._named is not None:
                size = known.names.tokens // known.names.digests
                for g, group in enumerate(self._groups):
                    first, stop = (n * size // group.page_tokens for n in (have, len(hashes)))
                    self._named(known.request, g, first, known.names.keys(g, first, stop))

    def _offer(self, known: Any, there: int, fetch: Any) -> None:
        """Note the pages that need a store."""
        size, prompt = self.page_tokens, known.request.num_tokens
        there *= size
        hit = 0 if fetch is None else fetch.cached * size  # tokens, like `there`
        whole = 0 if fetch is None else fetch.parted  # our tiers have all pages of full attention up to this token
        ends = {(prompt - 1) // size * size, prompt // size * size, *((whole // size * size,) if whole > hit else ())}
        if there > hit:  # vLLM's own cache has windows that our tiers lack
            ends.add(there)
        every = self._partings.every(whole - max(there, hit))
        known.ends, known.last = {*ends, *marks(every, size, prompt)}, [None for _ in known.names.pools]
        known.next = [
            min(there, whole) // group.page_tokens
            if group.keeps == "all"
            else (there // group.page_tokens if there <= hit or group.keeps == "state" else group.first(there))
            for group in self._groups
        ]
        begins = (n * group.page_tokens for n, group in zip(known.next, self._groups, strict=True))
        known.offered = min(begins) // self._least

    def _orders(self, known: Any, fetch: Any, tables: Any, there: int) -> list[LoadOrder]:
        """See `RequestTable._orders`: pool by pool. None if the next token attends to none of the pages, as after a
        chunk's end. Raises `InterfaceUnsupportedError` if vLLM wants other pages: its rules differ from those of the
        hit."""
        orders: list[LoadOrder] = []
        local, length = known.local * self.page_tokens, there * self.page_tokens
        request_id, trace = known.request.request_id, getattr(known.request, "trace_headers", None)
        sizes = [group.page_tokens for group in self._groups]
        for pool, chain in enumerate(fetch.pages):
            places = enumerate(zip(chain.groups, chain.numbers, strict=True))
            rows = [row for row, (g, n) in places if n * sizes[g] >= local and tables[g][n] != NULL]
            if rows:
                blocks = tuple(tables[chain.groups[row]][chain.numbers[row]] for row in rows)
                orders.append(LoadOrder(request_id, fetch, 0, blocks, known.between, pool, trace, rows))
        parts = [table[local // size : length // size] for size, table in zip(sizes, tables, strict=True)]
        wanted = sum(len(part) - part.count(NULL) for part in parts)
        found = sum(len(order.blocks) for order in orders)
        if wanted != found:
            raise InterfaceUnsupportedError(
                f"request {request_id} has {wanted} blocks for tokens {local} to {length} that its layers attend to, "
                f"and a hit of that length {found} pages",
                "use one of the versions of vLLM that docs/vllm.md names",
            )
        return orders
