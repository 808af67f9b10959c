"""Fetches of hybrid models over a real engine: all that a hit needs in all groups is checked and pinned, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from gdscache.errors import LoadOrderError
from gdscache.groups.base import needed
from gdscache.groups.names import GroupNames, GroupPage
from gdscache.integrations.fetching import PinningCache
from gdscache.integrations.group_fetching import GroupCache, GroupFetch, GroupPart
from gdscache.integrations.vllm.groups import GroupStoreOrder
from gdscache.integrations.vllm.requests import LoadOrder
from gdscache.integrations.vllm.worker import Stores, StreamOfSteps, begin_loads
from gdscache.moves import PageStatus
from gdscache.storage.base import Op
from gdscache.testing.faults import Fault
from tests.support.faulty import PLAN
from tests.support.helpers import MHA, WAIT, Host, OpenHost, drop_from, expected, read_page, until, write_page

SIZE = 4
GROUPS = [{"name": "all", "layers": [0, 1]}, {"name": "window", "layers": [1, 2], "window": 9}]


class Hybrid:
    """Planes of a hybrid model and an engine over them, with room for so many pages."""

    def __init__(self, open_host: OpenHost, groups: Sequence[dict[str, Any]] = GROUPS, **options: Any) -> None:
        model = MHA | {"groups": list(groups)}
        self.host: Host = open_host(
            model=model, **({"cpu": 24, "ssd": 64, "transport": "tests.support.faulty:FaultyTransport"} | options)
        )
        self.engine, self.layout = self.host.engine, self.host.layout
        self.cache = PinningCache(self.engine, 60.0)
        self.stores = Stores(self.engine, StreamOfSteps(torch.device("cpu")), Counter())

    def names(self, seed: int, tokens: int) -> GroupNames:
        names = GroupCache(self.cache, SIZE).names()
        names.extend([hashlib.sha256(bytes([seed, page])).digest() for page in range(tokens // SIZE)])
        return names

    def chain(self, seed: int, tokens: int) -> list[GroupPage]:
        """All that a hit of so many tokens needs."""
        names = self.names(seed, tokens)
        return names.chain(needed(names.groups, tokens))

    def begin_store(self, chain: Sequence[GroupPage]) -> list[int]:
        blocks = self.host.take(len(chain))
        for one, block in zip(chain, blocks, strict=True):
            write_page(self.host.planes, self.layout, [block], expected(self.layout, one.page.key))
        self.stores.begin([GroupStoreOrder("r", tuple(one.page for one in chain), tuple(blocks))], last=True)
        return blocks

    def store(self, seed: int, tokens: int) -> list[GroupPage]:
        chain = self.chain(seed, tokens)
        blocks = self.begin_store(chain)
        self.settle(blocks)
        return chain

    def settle(self, blocks: list[int]) -> None:
        self.stores.settle(set(blocks))
        self.engine.drain(WAIT)
        self.host.give(blocks)

    def fetch(self, seed: int, tokens: int) -> GroupFetch:
        """Of a request that has one token more."""
        return GroupCache(self.cache, SIZE).fetch(self.names(seed, tokens), tokens, tokens + 1)

    def load(self, fetch: GroupFetch, numbers: Sequence[int], *, between: bool = False) -> list[bool]:
        """Load pages of a fetch into blocks; which were loaded. Those have their bytes."""
        blocks = self.host.take(len(numbers))
        order = LoadOrder("r", GroupPart(fetch, numbers), 0, tuple(blocks), between)
        (batch,) = begin_loads(self.engine, [order], Counter())
        if batch.load is None:
            return [False] * len(numbers)
        (report,) = batch.load.results()
        good = [status is PageStatus.LOADED for status in report.pages]
        for number, block, loaded in zip(numbers, blocks, good, strict=False):
            if loaded:
                got = read_page(self.host.planes, self.layout, [block])
                assert np.array_equal(got, expected(self.layout, fetch.pages[number].page.key))
        batch.load.release_event.synchronize(WAIT)
        self.host.give(blocks)
        return good + [False] * (len(numbers) - len(good))

    def there(self, chain: Sequence[GroupPage]) -> int:
        return sum(self.engine.manager.visible([one.page.key for one in chain]))


@pytest.fixture
def opened(open_host: OpenHost) -> Iterator[Callable[..., Hybrid]]:
    with contextlib.ExitStack() as ends:

        def opens(*groups: dict[str, Any], **options: Any) -> Hybrid:
            hybrid = Hybrid(open_host, groups or GROUPS, **options)
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
        drop_from(hybrid.engine, "cpu")
    fetch = hybrid.fetch(1, 27)
    assert (fetch.cached, fetch.wanted, fetch.found.whole, len(fetch.pages)) == (6, 6, 24, 6 + 2)
    ended(fetch)
    assert fetch.verified() == 6
    assert not fetch.crowded()
    assert not fetch.lapsed()
    assert fetch.sources(0, 6) == {tier: 6}
    numbers = [number for number, one in enumerate(fetch.pages) if one.number > 2]
    assert hybrid.load(fetch, numbers) == [True] * 5


def test_a_hit_ends_where_the_window_is(opened: Callable[..., Hybrid]) -> None:
    """Full pages that go on past it are told: requests part there."""
    hybrid = opened()
    hybrid.store(1, 16)
    late = [one for one in hybrid.chain(1, 24) if one.group == 0]
    hybrid.settle(hybrid.begin_store(late))
    fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.found.whole) == (4, 4, 24)
    fetch.release()


@pytest.mark.parametrize("bad", [0, 6, 7])
def test_a_bad_page_is_all_the_hit(opened: Callable[..., Hybrid], bad: int) -> None:
    """It is dropped, so that the next fetch finds what can be had without it."""
    hybrid = opened()
    hybrid.store(1, 24)
    drop_from(hybrid.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.FLIP, skip=bad, times=1):
        fetch = ended(hybrid.fetch(1, 24))
    assert (fetch.wanted, fetch.verified(), fetch.crowded()) == (6, 0, False)
    assert hybrid.load(fetch, range(8)) == [False] * 8
    again = ended(hybrid.fetch(1, 24))
    assert again.wanted == again.verified() < 6
    again.release()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("group", [0, 1])
def test_a_page_that_is_cleared_is_all_the_hit(opened: Callable[..., Hybrid], group: int, late: bool) -> None:
    """Before it has come, or behind it."""
    hybrid = opened()
    hybrid.store(1, 24)
    drop_from(hybrid.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.HANG, skip=0 if late else 99) as rule:
        fetch = hybrid.fetch(1, 24)
        until(lambda: PLAN.held > 0 if late else fetch.verified() == 6, "it is under way, or has come")
        hybrid.engine.invalidate(hybrid.engine.namespaces()[group])
        rule.release()
    ended(fetch)
    assert fetch.verified() == 0
    assert hybrid.load(fetch, range(8)) == [False] * 8
    again = hybrid.fetch(1, 24)
    assert (again.wanted, again.found.whole) == (0, 0)
    again.release()


def test_without_room_all_goes_between_steps(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened(cpu=8)
    hybrid.store(1, 24)
    drop_from(hybrid.engine, "cpu")
    fetch = ended(hybrid.fetch(1, 24))  # pins hold half of the tier
    assert (fetch.wanted, fetch.verified(), fetch.crowded()) == (6, 0, True)
    with pytest.raises(LoadOrderError):
        fetch.checked(0, 8)
    assert hybrid.load(fetch, range(8), between=True) == [True] * 8


def test_pins_end(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    hybrid.cache.pin_seconds = 0.2
    fetch = ended(hybrid.fetch(1, 24))
    assert fetch.lapsed(1.0)
    until(fetch.lapsed, "its time is up")
    until(lambda: not fetch.verified(), "what is not pinned is not verified")
    assert hybrid.load(fetch, range(8)) == [False] * 8


def test_it_says_what_is_to_come_in_pages_that_files_have(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    drop_from(hybrid.engine, "cpu")
    with mock.patch.object(hybrid.engine.gate, "outpaced", return_value=True) as outpaced:
        fetch = hybrid.fetch(1, 24)
        assert fetch.outpaced()
        _, begun, left, missing, verified = outpaced.call_args.args
        assert (begun + left, missing, verified) == (8, 24, 0)
        ended(fetch)
        assert fetch.outpaced()
        assert outpaced.call_args.args[1:3] == (8, 0)
    fetch.release()


def test_a_hit_without_pages_has_come(opened: Callable[..., Hybrid]) -> None:
    """Behind a chunk the next token attends to nothing."""
    hybrid = opened({"name": "chunk", "layers": [0, 1, 2], "chunk": 8})
    fetch = hybrid.fetch(1, 20)
    assert (fetch.wanted, fetch.pages, fetch.done(), fetch.verified(), fetch.crowded()) == (4, (), True, 4, False)


# -- clearing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [True, False])
def test_what_is_under_way_of_any_group_does_not_survive_a_clear(opened: Callable[..., Hybrid], hangs: bool) -> None:
    """Whether it is on its way from the CPU tier to the SSD, or not that far."""
    hybrid = opened()
    chains: list[GroupPage] = []
    for seed in range(6):
        with PLAN.rule(Op.WRITE, Fault.HANG, times=1 if hangs else 0) as rule:
            blocks = hybrid.begin_store(hybrid.chain(seed, 16))
            until(lambda: PLAN.held == hangs, "it writes")
            hybrid.engine.invalidate(*hybrid.engine.namespaces())
            rule.release()
        hybrid.settle(blocks)
        chains += hybrid.chain(seed, 16)
        assert hybrid.there(chains) == 0
    chain = hybrid.store(9, 16)
    assert hybrid.there(chain) == len(chain)
    ssd = hybrid.engine.manager.ssd
    assert ssd is not None
    assert {entry.key for entry in ssd.index} == {one.page.key for one in chain}


def test_what_is_stored_while_groups_are_cleared_is_dropped(opened: Callable[..., Hybrid]) -> None:
    hybrid = opened()
    hybrid.store(1, 24)
    chain = hybrid.chain(2, 24)
    blocks: list[int] = []

    def pause(seconds: float) -> None:
        if not blocks:
            blocks.extend(hybrid.begin_store(chain))
            with ThreadPoolExecutor(1) as other:
                other.submit(hybrid.stores.settle, set(blocks)).result()

    with mock.patch.multiple(hybrid.engine.manager.clearing, piece=1, sleep=pause):
        hybrid.engine.invalidate(*hybrid.engine.namespaces())
    hybrid.settle(blocks)
    assert blocks
    assert hybrid.there(hybrid.chain(1, 24)) == hybrid.there(chain) == 0


@pytest.mark.parametrize("group", [0, 1])
def test_the_groups_of_a_salt_go_together(opened: Callable[..., Hybrid], group: int) -> None:
    """Also what is under way of them; what is stored since is stored."""
    hybrid = opened()
    chain = hybrid.chain(1, 24)
    other = hybrid.engine.namespaces("another")
    blocks = hybrid.begin_store(chain)
    hybrid.engine.invalidate(hybrid.engine.namespaces()[group])
    hybrid.settle(blocks)
    assert hybrid.there(chain) == 0
    hybrid.store(1, 24)
    assert hybrid.there(chain) == len(chain)
    hybrid.engine.invalidate(other[group])
    assert hybrid.there(chain) == len(chain)
    hybrid.engine.invalidate(hybrid.engine.namespace())
    assert hybrid.there(chain) == 0
