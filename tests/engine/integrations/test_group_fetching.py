"""Fetches of hybrid models over a real engine: all that a hit needs in all groups is checked and pinned, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gdscache.errors import LoadOrderError
from gdscache.gate.fit import ENOUGH
from gdscache.groups.base import needed
from gdscache.groups.names import GroupNames, GroupPage
from gdscache.integrations.fetching import GroupFetch
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.integrations.vllm.session import GroupSession
from gdscache.integrations.vllm.worker import Loads, Stores, begin_loads
from gdscache.storage.base import Op
from tests.support.faults import Fault, FaultPlan
from tests.support.faulty import PLAN
from tests.support.helpers import MHA, WAIT, drop_from, expected, flip_file, read_page, until, write_page
from tests.support.hybrid import MODELS, OpenHybrid
from tests.support.slow_prefetch import PAGEWISE

SIZE = 4
GROUPS = [{"name": "all", "layers": [0, 1]}, {"name": "window", "layers": [1, 2], "window": 9}]


class Hybrid:
    """Planes of a hybrid model and an engine over them, with room for so many pages."""

    def __init__(self, open_hybrid: OpenHybrid, model: dict[str, Any], **options: Any) -> None:
        faulty = "tests.support.faulty:FaultyTransport"
        self.host = open_hybrid(model, **({"cpu": 24, "ssd": 64, "transport": faulty} | options))
        self.engine = self.host.engine
        self.pools = self.engine.engines
        self.cache = GroupSession(self.engine, 60.0, SIZE)
        self.stores = Stores(self.pools, Counter())

    def names(self, seed: int, tokens: int) -> GroupNames:
        names = self.cache.names()
        names.extend([hashlib.sha256(bytes([seed, page])).digest() for page in range(tokens // SIZE)])
        return names

    def chains(self, seed: int, tokens: int) -> list[list[GroupPage]]:
        """All that a hit of so many tokens needs, pool by pool."""
        names = self.names(seed, tokens)
        return names.chain(needed(names.groups, tokens))

    def take(self, pages: Sequence[int]) -> list[list[int]]:
        """Blocks for so many pages in each pool."""
        return [[free.pop() for _ in range(count)] for free, count in zip(self.host.free, pages, strict=True)]

    def give(self, blocks: Sequence[Sequence[int]]) -> None:
        for own, free in zip(blocks, self.host.free, strict=True):
            free += own

    def planes(self, pool: int) -> list[Any]:
        return [self.host.planes[layer] for layer in self.engine.pools[pool].layers]

    def bytes(self, pool: int, one: GroupPage) -> Any:
        return expected(self.pools[pool].layout, one.page.key)

    def begin_store(self, chains: Sequence[Sequence[GroupPage]]) -> list[list[int]]:
        taken = self.take([len(chain) for chain in chains])
        orders = []
        for pool, (chain, blocks) in enumerate(zip(chains, taken, strict=True)):
            for one, block in zip(chain, blocks, strict=True):
                write_page(self.planes(pool), self.pools[pool].layout, [block], self.bytes(pool, one))
            orders.append(StoreOrder("r", tuple(one.page for one in chain), 0, tuple(blocks), pool))
        self.stores.begin(orders, last=True)
        return taken

    def store(self, seed: int, tokens: int) -> list[list[GroupPage]]:
        chains = self.chains(seed, tokens)
        self.settle(self.begin_store(chains))
        return chains

    def settle(self, blocks: Sequence[Sequence[int]]) -> None:
        self.stores.wait_until_read({block for own in blocks for block in own})
        self.engine.drain(WAIT)
        self.give(blocks)

    def slab(self, pool: int) -> Path:
        return Path(self.pools[pool].config.dump()["ssd"]["path"]) / "slab-0.bin"

    def drop(self, tier: str) -> None:
        for engine in self.pools:
            drop_from(engine, tier)

    def fetch(self, seed: int, tokens: int) -> GroupFetch:
        """Of a request that has one token more."""
        return self.cache.fetch_groups(self.names(seed, tokens), tokens, tokens + 1)

    def orders(
        self, fetch: GroupFetch, numbers: Sequence[Sequence[int]], *, between: bool = False
    ) -> tuple[list[list[int]], list[LoadOrder]]:
        """Blocks for these pages of a fetch, by pool, and the orders of a load into them."""
        taken = self.take([len(some) for some in numbers])
        return taken, [
            LoadOrder("r", fetch, 0, tuple(blocks), between, pool, rows=some)
            for pool, (some, blocks) in enumerate(zip(numbers, taken, strict=True))
            if some
        ]

    def load(self, fetch: GroupFetch, *numbers: Sequence[int], between: bool = False) -> list[bool]:
        """Load pages of a fetch, pool by pool, into blocks; which were loaded. Those have their bytes."""
        taken, orders = self.orders(fetch, numbers, between=between)
        (batch,) = begin_loads(self.pools, orders, Counter())
        bad, found = {one.pool: one.bad_blocks() for one in batch}, list[bool]()
        for pool, (some, blocks) in enumerate(zip(numbers, taken, strict=True)):
            for number, block in zip(some, blocks, strict=True):
                found.append(block not in bad[pool])
                if found[-1]:
                    got = read_page(self.planes(pool), self.pools[pool].layout, [block])
                    assert np.array_equal(got, self.bytes(pool, fetch.pages[pool][number]))
        for one in batch:
            if one.load is not None:
                one.load.release_event.synchronize(WAIT)
        self.give(taken)
        return found

    def there(self, chains: Sequence[Sequence[GroupPage]]) -> int:
        return sum(
            sum(engine.manager.visible([one.page.key for one in chain]))
            for engine, chain in zip(self.pools, chains, strict=True)
        )


@pytest.fixture
def opened(open_hybrid: OpenHybrid) -> Iterator[Callable[..., Hybrid]]:
    with contextlib.ExitStack() as ends:

        def opens(*groups: dict[str, Any], model: dict[str, Any] = MHA, **options: Any) -> Hybrid:
            own = {} if "groups" in model else {"groups": list(groups or GROUPS)}
            hybrid = Hybrid(open_hybrid, model | own, **options)
            ends.callback(hybrid.stores.close)
            return hybrid

        yield opens


def ended(fetch: GroupFetch) -> GroupFetch:
    until(fetch.done, "the fetch ends")
    return fetch


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_all_that_a_hit_needs_is_checked_and_loaded(opened: Callable[..., Hybrid], tier: str) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    if tier == "ssd":
        hybrid.drop("cpu")
    fetch = hybrid.fetch(1, 27)
    assert (fetch.cached, fetch.wanted, fetch.found.parted, len(fetch.pages[0])) == (6, 6, 24, 6 + 2)
    ended(fetch)
    assert fetch.verified() == 6
    assert not fetch.crowded()
    assert not fetch.lapsed()
    assert fetch.sources(0, 6) == {tier: 6}
    numbers = [number for number, one in enumerate(fetch.pages[0]) if one.number > 2]
    assert hybrid.load(fetch, numbers) == [True] * 5


def test_a_hit_ends_where_the_window_is(opened: Callable[..., Hybrid]) -> None:
    """Full pages that go on past it are told: requests part there."""
    hybrid = opened()
    hybrid.store(1, 16)
    late = [one for one in hybrid.chains(1, 24)[0] if one.group == 0]
    hybrid.settle(hybrid.begin_store([late]))
    fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.found.parted) == (4, 4, 24)
    fetch.release()


@pytest.mark.parametrize("bad", [0, 6, 7])
def test_a_bad_page_is_all_the_hit(opened: Callable[..., Hybrid], bad: int) -> None:
    """It is dropped, so that the next fetch finds what can be had without it."""
    hybrid = opened()
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    with PLAN.rule(Op.READ, Fault.FLIP, skip=bad, times=1):
        fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.crowded()) == (6, 0, False)
    assert hybrid.load(fetch, range(8)) == [False] * 8
    again = ended(hybrid.fetch(1, 24))
    assert again.wanted == again.verified() < 6
    again.release()


@pytest.mark.parametrize("model", ["together", "state"])
@pytest.mark.parametrize("room", ["much", "little"])
def test_all_bad_pages_of_a_hit_leave_at_once_and_are_mended(
    opened: Callable[..., Hybrid], model: str, room: str
) -> None:
    """Not only those of the first chunk: what is computed is stored where its tiers lack it. Without room for pins the
    load between steps finds them."""
    hybrid = opened(model=MODELS[model], cpu=40 if room == "much" else 4, ssd=80, limits=PAGEWISE)
    chains = hybrid.store(1, 48)
    hybrid.drop("cpu")
    for pool, (engine, chain) in enumerate(zip(hybrid.pools, chains, strict=True)):
        index = engine.manager.tiers["ssd"].index
        for one in chain:
            if hybrid.engine.groups[one.group].keeps == "all":
                slot = index.get(one.page.key).slot
                flip_file(hybrid.slab(pool), slot * engine.layout.extent_bytes + 100)
    fetch = ended(hybrid.fetch(1, 48))
    whole = [range(len(pages)) for pages in fetch.pages]
    assert (fetch.verified(), fetch.crowded()) == (0, room == "little")
    if fetch.crowded():
        assert not all(hybrid.load(fetch, *whole, between=True))
    fetch.release()
    assert hybrid.fetch(1, 48).wanted == 0
    hybrid.store(1, 48)
    hybrid.drop("cpu")
    fetch = ended(hybrid.fetch(1, 48))
    assert (fetch.wanted * hybrid.engine.alignment, fetch.crowded()) == (48, room == "little")
    assert all(hybrid.load(fetch, *whole, between=True))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("group", [0, 1])
def test_a_page_that_is_cleared_is_all_the_hit(opened: Callable[..., Hybrid], group: int, late: bool) -> None:
    """Before it has come, or behind it."""
    hybrid = opened()
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    with PLAN.rule(Op.READ, Fault.HANG, skip=0 if late else 99) as rule:
        fetch = hybrid.fetch(1, 24)
        until(lambda: PLAN.held > 0 if late else fetch.verified() == 6, "it is under way, or has come")
        hybrid.pools[0].invalidate(hybrid.engine.namespaces()[group])
        rule.release()
    ended(fetch)
    assert fetch.verified() == 0
    assert hybrid.load(fetch, range(8)) == [False] * 8
    again = hybrid.fetch(1, 24)
    assert (again.wanted, again.found.parted) == (0, 0)
    again.release()


def test_without_room_all_goes_between_steps(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened(cpu=8)
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    with PLAN.rule(Op.READ, Fault.EIO):  # pins hold half of the tier: nothing is brought
        fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.crowded()) == (6, 0, True)
    assert hybrid.pools[0].stats()["prefetch"]["pinned_pages"] == 0
    with pytest.raises(LoadOrderError):
        fetch.checked(0, 8)
    assert hybrid.load(fetch, range(8), between=True) == [True] * 8


@pytest.mark.parametrize("room", [24, 8])
def test_a_hit_that_pays_only_behind_local_pages_is_brought_without_these(
    opened: Callable[..., Hybrid], room: int
) -> None:
    """The last page of each group: with little room it has its place, too."""
    hybrid = opened(cpu=room, load={"gate": "enforcing"})
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    engine = hybrid.engine
    for _ in range(ENOUGH):
        engine.observe_load("ssd", hybrid.pools[0].layout.bytes_in("ssd"), 0.8)
        for tokens, cached in ((4, 0), (8, 0), (4, 20), (8, 20)):
            engine.observe_prefill(tokens, cached, 1e-3 * tokens + 0.02 * tokens * (cached + tokens / 2))
    declined = hybrid.fetch(1, 24)
    assert (declined.wanted, declined.cached, declined.verified()) == (0, 6, 0)
    fetch = ended(hybrid.cache.fetch_groups(hybrid.names(1, 24), 24, 25, 5))
    assert (fetch.wanted, fetch.cached, fetch.verified(), fetch.sources(5, 1)) == (6, 6, 6, {"ssd": 1})
    assert [one.number for one in fetch.pages[0]] == [5, 5]
    assert hybrid.load(fetch, range(2)) == [True] * 2
    fetch.release()


def test_behind_a_full_queue_all_goes_between_steps(
    opened: Callable[..., Hybrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    monkeypatch.setattr(hybrid.pools[0]._parts.prefetcher._queue, "_most", 0)
    fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.crowded()) == (6, 0, True)
    assert hybrid.load(fetch, range(8), between=True) == [True] * 8
    fetch.release()


def test_pins_end(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    hybrid.cache.pin_seconds = 0.2
    fetch = ended(hybrid.fetch(1, 24))
    assert fetch.lapsed(1.0)
    until(fetch.lapsed, "its time is up")
    until(lambda: not fetch.verified(), "what is not pinned is not verified")
    assert hybrid.load(fetch, range(8)) == [False] * 8


def test_it_says_what_is_to_come_in_bytes_that_files_have(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    with mock.patch.object(hybrid.engine.gate, "outpaced", return_value=True) as outpaced:
        fetch = hybrid.fetch(1, 24)
        assert fetch.outpaced()
        _, begun, left, missing, verified = outpaced.call_args.args
        whole = 8 * hybrid.pools[0].layout.page_bytes
        assert (begun + left, missing, verified) == (whole, 24, 0)
        ended(fetch)
        assert fetch.outpaced()
        assert outpaced.call_args.args[1:3] == (whole, 0)
    fetch.release()


def test_a_hit_without_pages_has_come(opened: Callable[..., Hybrid]) -> None:
    """Behind a chunk the next token attends to nothing."""
    hybrid = opened({"name": "chunk", "layers": [0, 1, 2], "chunk": 8})
    fetch = hybrid.fetch(1, 20)
    assert (fetch.wanted, list(map(tuple, fetch.pages)), fetch.done(), fetch.verified(), fetch.crowded()) == (
        4,
        [()],
        True,
        4,
        False,
    )


# -- several pools -----------------------------------------------------------------------------------------------------

STATE = MODELS["state"]  # full attention, a window and a state, each in planes of its own
WHOLE = (range(6), range(3), range(1))  # what a hit of 24 tokens needs


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_all_pools_are_one_hit(opened: Callable[..., Hybrid], tier: str) -> None:
    hybrid = opened(model=STATE)
    hybrid.store(1, 24)
    if tier == "ssd":
        hybrid.drop("cpu")
    fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), [len(pages) for pages in fetch.pages]) == (3, 3, [6, 3, 1])
    assert fetch.sources(0, 3) == {tier: 3}
    assert hybrid.load(fetch, *WHOLE, between=True) == [True] * 10


@pytest.mark.parametrize("pool", range(3))
def test_a_bad_page_of_any_pool_is_all_the_hit(opened: Callable[..., Hybrid], pool: int) -> None:
    """It is dropped, and the next fetch finds no more than there is."""
    hybrid = opened(model=STATE)
    hybrid.store(1, 24)
    hybrid.drop("cpu")
    page = hybrid.chains(1, 24)[pool][-1].page
    slot = hybrid.pools[pool].manager.tiers["ssd"].index.slot(page.key)
    flip_file(hybrid.slab(pool), slot * hybrid.pools[pool].layout.extent_bytes + 50, 3)
    fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.crowded()) == (3, 0, False)
    with pytest.raises(LoadOrderError):
        fetch.checked(0, 10)
    loaded = hybrid.load(fetch, *WHOLE, between=True)
    assert loaded.count(False) == 1
    again = ended(hybrid.fetch(1, 24))
    assert again.wanted == again.verified() < 3
    again.release()


@pytest.mark.parametrize("pool", range(3))
def test_a_request_arrives_when_all_its_pools_have(opened: Callable[..., Hybrid], pool: int) -> None:
    hybrid = opened(model=STATE, cpu=None)
    hybrid.store(1, 24)
    fetch = hybrid.fetch(1, 24)
    assert fetch.crowded()
    counts = Counter[str]()
    loads = Loads(3, counts, overlapping=True)
    taken, orders = hybrid.orders(fetch, WHOLE, between=True)
    slow = hybrid.slab(pool)
    with FaultPlan.rule(PLAN, Fault.HANG, Op.READ, where=lambda path, offset: Path(path) == slow) as rule:
        loads.begin(begin_loads(hybrid.pools, orders, counts))
        until(lambda: PLAN.held > 0, "it reads")
        until(lambda: sum(one.load.done() for one in loads._between[0]) == 2, "the others end")  # type: ignore[union-attr]
        loads.end_step()
        assert (loads.take_arrived(), loads.under_way) == (set(), True)
        rule.release()
    until(lambda: bool(loads.end_step() and loads.take_arrived()), "it arrives")
    assert (loads.take_failed(), loads.take_bad(), loads.under_way) == (set(), set(), False)
    assert (counts["loads"], counts["begun_pages"]) == (1, 10)
    hybrid.give(taken)


@pytest.mark.parametrize("pool", range(3))
def test_what_one_pool_lacks_is_no_hit(opened: Callable[..., Hybrid], pool: int) -> None:
    """A state that was evicted alone, say. What is stored again of it is a hit at once."""
    hybrid = opened(model=STATE)
    chains = hybrid.store(1, 24)
    engine = hybrid.pools[pool]
    engine.invalidate(*engine.namespaces())
    fetch = hybrid.fetch(1, 24)
    assert (fetch.wanted, hybrid.there(chains)) == (0, 10 - len(chains[pool]))
    assert fetch.found.parted == (24 if pool else 0)
    hybrid.settle(hybrid.begin_store([chain if p == pool else [] for p, chain in enumerate(chains)]))
    again = ended(hybrid.fetch(1, 24))
    assert again.verified() == 3
    again.release()


def test_other_weights_find_nothing_in_any_pool(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened(model=STATE)
    hybrid.store(1, 24)
    hybrid.cache.renew_salt()
    assert hybrid.fetch(1, 24).wanted == 0


def test_a_rest_ends_with_a_store_that_has_ended_since_the_last(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened(model=STATE)
    hybrid.cache.rest(0.0)
    hybrid.store(1, 24)
    start = time.monotonic()
    hybrid.cache.rest(WAIT)
    assert time.monotonic() - start < WAIT / 2
    hybrid.cache.rest(0.01)


# -- clearing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [True, False])
def test_what_is_under_way_of_any_group_does_not_survive_a_clear(opened: Callable[..., Hybrid], hangs: bool) -> None:
    """Whether it is on its way from the CPU tier to the SSD, or not that far."""
    hybrid = opened()
    chains: list[GroupPage] = []
    for seed in range(6):
        with PLAN.rule(Op.WRITE, Fault.HANG, times=1 if hangs else 0) as rule:
            blocks = hybrid.begin_store(hybrid.chains(seed, 16))
            until(lambda: PLAN.held == hangs, "it writes")
            hybrid.pools[0].invalidate(*hybrid.engine.namespaces())
            rule.release()
        hybrid.settle(blocks)
        chains += hybrid.chains(seed, 16)[0]
        assert hybrid.there([chains]) == 0
    (chain,) = hybrid.store(9, 16)
    assert hybrid.there([chain]) == len(chain)
    ssd = hybrid.pools[0].manager.ssd
    assert ssd is not None
    assert {entry.key for entry in ssd.index} == {one.page.key for one in chain}


def test_what_is_stored_while_groups_are_cleared_is_dropped(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    chain = hybrid.chains(2, 24)
    blocks: list[list[int]] = []

    def pause(seconds: float) -> None:
        if not blocks:
            blocks.extend(hybrid.begin_store(chain))
            with ThreadPoolExecutor(1) as other:
                other.submit(hybrid.stores.wait_until_read, set(blocks[0])).result()

    with mock.patch.multiple(hybrid.pools[0].manager.clearing, piece=1, sleep=pause):
        hybrid.pools[0].invalidate(*hybrid.engine.namespaces())
    hybrid.settle(blocks)
    assert blocks
    assert hybrid.there(hybrid.chains(1, 24)) == hybrid.there(chain) == 0


@pytest.mark.parametrize("group", [0, 1])
def test_the_groups_of_a_salt_go_together(opened: Callable[..., Hybrid], group: int) -> None:
    """Also what is under way of them; what is stored since is stored."""
    hybrid = opened()
    chain = hybrid.chains(1, 24)
    other = hybrid.engine.namespaces("another")
    blocks = hybrid.begin_store(chain)
    hybrid.pools[0].invalidate(hybrid.engine.namespaces()[group])
    hybrid.settle(blocks)
    assert hybrid.there(chain) == 0
    hybrid.store(1, 24)
    assert hybrid.there(chain) == len(chain[0])
    hybrid.pools[0].invalidate(other[group])
    assert hybrid.there(chain) == len(chain[0])
    hybrid.engine.invalidate()
    assert hybrid.there(chain) == 0
