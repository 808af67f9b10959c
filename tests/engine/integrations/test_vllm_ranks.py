"""vLLM's workers as ranks of an engine beside the scheduler: what a step's metadata has them do, and what they say.

The ranks are in this process here, each with tensors of its own; what they are told is pickled all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdscache import CacheEngine, PageHashes, Rank, RankAddress
from gdscache.config import Config
from gdscache.errors import DeadlineError, RankMismatchError, VerifiedLoadError
from gdscache.integrations.settings import one_model
from gdscache.integrations.vllm.planes import planes_of
from gdscache.integrations.vllm.ranks import Lead, RankWorker, addresses_of
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.integrations.vllm.session import VllmSession
from gdscache.integrations.vllm.worker import LoadBatch
from tests.support.helpers import drop_from, flip_file, until

LAYERS, BLOCKS, TOKENS, PAGES = 3, 16, 4, 5
EXTENT = 4096  # bytes: a page of a rank


def hashes(seed: int) -> PageHashes:
    return PageHashes([hashlib.sha256(bytes([seed, page])).digest() for page in range(PAGES)])


def stored(seed: int, blocks: list[int], first: int = 0) -> StoreOrder:
    return StoreOrder("r", hashes(seed), first, tuple(blocks))


class Ranks:
    """The scheduler's side, and the workers with their tensors."""

    def __init__(self, path: Path, *, cpu: int | None, overlapping: bool, deadline: float) -> None:
        memories = [torch.zeros((LAYERS, BLOCKS, 1, TOKENS, 64), dtype=torch.bfloat16) for _ in range(2)]
        self.caches = [{f"layer.{i}": memory[i] for i in range(LAYERS)} for memory in memories]
        planes = [planes_of(caches, BLOCKS, TOKENS, "LBNHC") for caches in self.caches]
        self.workers = [RankWorker(some.tensors, n, n, overlapping=overlapping) for n, some in enumerate(planes)]
        config = {
            "model": {"name": "tiny", **planes[0].model()},
            "ssd": {"path": str(path), "capacity": 128 * EXTENT, "transport": "posix", "threads": 2},
            "host_buffer": 32 * EXTENT,
            "deadline": deadline,
        }
        config |= {} if cpu is None else {"cpu": {"capacity": 2 * cpu * EXTENT}}
        (self.addresses,) = addresses_of({n: [one.address for one in of.ranks] for n, of in enumerate(self.workers)}, 2)
        self.engine = CacheEngine(Config.from_dict(config), ranks=self.addresses)
        self.session = VllmSession(self.engine, 60)
        self.counts: Counter[str] = Counter()
        self.lead = Lead([self.engine], self.counts, overlapping=overlapping)
        self.session.stores, self.session.loads = self.lead, self.lead.loads

    def order(self, seed: int, blocks: list[int], *, between: bool = False, name: str = "r") -> LoadOrder:
        fetch = self.session.fetch(hashes(seed), PAGES)
        until(fetch.done, "the fetch ends")
        assert between or fetch.verified() >= len(blocks)
        return LoadOrder(name, fetch, 0, tuple(blocks), between)

    def told(
        self,
        loads: list[LoadOrder] | None = None,
        stores: list[StoreOrder] | None = None,
        fresh: set[int] | None = None,
        *,
        idle: bool = False,
    ) -> tuple[list[LoadBatch], list[bytes]]:
        """What the metadata of a step says."""
        told: Any = self.lead.step(loads or [], stores or [], fresh or set(), idle=idle, last=idle)
        return pickle.loads(pickle.dumps(told))  # type: ignore[no-any-return]

    def carry_out(self, told: tuple[list[LoadBatch], list[bytes]], *, idle: bool = False) -> None:
        """The step on each rank."""
        for worker in self.workers:
            worker.begin(told[0])
            worker.loads.wait_all()
            worker.end(told[1], idle=idle)

    def step(self, *given: Any, idle: bool = False) -> None:
        self.carry_out(self.told(*given, idle=idle), idle=idle)

    def fill(self, blocks: list[int], mark: int) -> None:
        """Each block of each rank and layer with a number of its own."""
        for rank, caches in enumerate(self.caches):
            for cache in caches.values():
                for place, block in enumerate(blocks):
                    cache[block] = mark + place + 64 * rank

    def marks(self, blocks: list[int]) -> list[list[float]]:
        """What is in the blocks, rank by rank; all layers have the same."""
        found = []
        for caches in self.caches:
            for cache in caches.values():
                assert all(bool((cache[block] == caches["layer.0"][block].view(-1)[0]).all()) for block in blocks)
            found.append([float(caches["layer.0"][block].view(-1)[0]) for block in blocks])
        return found

    def store(self, seed: int, blocks: list[int], mark: int) -> None:
        self.fill(blocks, mark)
        self.step(None, [stored(seed, blocks)])
        self.step(idle=True)
        self.lead.wait_until_read(set(blocks))
        self.engine.drain(30)

    def answers(self) -> tuple[list[set[str]], list[set[int]]]:
        """What each rank says has arrived, and is bad."""
        loads = [worker.loads for worker in self.workers]
        return [some.take_arrived() for some in loads], [some.take_bad() for some in loads]

    def until_arrived(self, *names: str) -> list[set[int]]:
        """Idle steps, until the loads between steps of these have come on all ranks: bad blocks of each."""
        waiting, bad = [set[str](), set[str]()], [set[int](), set[int]()]

        def all_there() -> bool:
            self.step(idle=True)
            for rank, (some, wrong) in enumerate(zip(*self.answers(), strict=True)):
                waiting[rank] |= some
                bad[rank] |= wrong
            return waiting == [{*names}] * 2 and not self.lead.loads.under_way

        until(all_there, "the load ends")
        return bad


@contextlib.contextmanager
def opened(path: Path, *, cpu: int | None = 24, overlapping: bool = False, deadline: float = 20) -> Iterator[Ranks]:
    found = Ranks(path, cpu=cpu, overlapping=overlapping, deadline=deadline)
    try:
        yield found
        found.lead.close()
    finally:
        found.engine.close()
        for worker in found.workers:
            worker.close()


def slab_place(ranks: Ranks, seed: int, page: int) -> int:
    slot = ranks.engine.manager.tiers["ssd"].index.slot(ranks.engine.pages(hashes(seed))[page].key)
    return slot * EXTENT + 7


@pytest.mark.parametrize("overlapping", [False, True])
def test_pages_go_and_come_back_on_every_rank(tmp_path: Path, overlapping: bool) -> None:
    with opened(tmp_path, overlapping=overlapping) as ranks:
        ranks.store(1, [3, 1, 4, 15, 9], 10)
        ranks.fill(list(range(BLOCKS)), 100)
        ranks.step([ranks.order(1, [0, 2, 5])])
        assert ranks.marks([0, 2, 5]) == [[10, 11, 12], [74, 75, 76]]
        ranks.step(idle=True)
        assert ranks.answers() == ([set(), set()], [set(), set()])
        assert (ranks.counts["begun_pages"], ranks.counts["offered_pages"]) == (3, 5)
        drop_from(ranks.engine, "cpu")
        ranks.step([ranks.order(1, [6, 7, 8, 10, 11])])
        assert ranks.marks([6, 7, 8, 10, 11])[1] == [74, 75, 76, 77, 78]
        ranks.step(idle=True)
        until(lambda: ranks.engine.stats()["leases"] == [], "leases end")
        assert ranks.engine.check().ok


def test_what_a_step_has_computed_is_stored_behind_it_on_each_rank(tmp_path: Path) -> None:
    """A mark stands for a step. Until a rank has come to it, nothing of the step is read."""
    with opened(tmp_path) as ranks:
        told = ranks.told(None, [stored(1, [0, 1, 2, 3, 4])])
        after = ranks.told(idle=True)  # which has the engine begin the store
        ranks.fill([0, 1, 2, 3, 4], 20)
        ranks.workers[0].end(told[1], idle=False)
        until(lambda: ranks.engine.stats()["store_queue"]["bytes"] > 0, "a thread hands the pages over")
        with pytest.raises(DeadlineError):
            ranks.engine.drain(0.2)
        ranks.workers[1].end(told[1], idle=False)
        ranks.engine.drain(30)
        ranks.carry_out(after, idle=True)
        ranks.fill([0, 1, 2, 3, 4], 90)
        ranks.step([ranks.order(1, [5, 6, 7, 8, 9])])
        assert ranks.marks([5, 6, 7, 8, 9]) == [[20, 21, 22, 23, 24], [84, 85, 86, 87, 88]]


def test_the_last_page_of_a_request_is_stored_by_an_earlier_mark(tmp_path: Path) -> None:
    """No step fills it as far as the scheduler knows, its block is the next step's, and there may be none. Before any
    mark it is left out."""
    with opened(tmp_path) as ranks:
        ranks.lead.end([stored(3, [2])])
        ranks.fill([0, 1], 30)
        ranks.step(None, [stored(1, [0])])
        ranks.lead.end([stored(2, [1])])
        until(lambda: all(ranks.session.cached(hashes(seed)) for seed in (1, 2)), "both are stored, without a step")
        ranks.step(None, [stored(4, [3])])
        ranks.step()
        assert ranks.session.cached(hashes(4)) == 0  # it waits for others
        ranks.lead.end([])
        until(lambda: ranks.session.cached(hashes(4)), "nothing waits when a request has ended")
        ranks.step(None, None, {1})
        ranks.fill([1], 90)
        ranks.step([ranks.order(2, [6])])
        assert ranks.marks([6]) == [[31], [95]]
        assert ranks.counts["offered_pages"] == 3


def test_a_block_is_written_to_when_all_ranks_have_read_it(tmp_path: Path) -> None:
    """Pages that wait for others, and a mark that is as old as they are."""
    with opened(tmp_path) as ranks:
        ranks.fill([0, 1], 30)
        ranks.step(None, [stored(1, [0])])
        for _ in range(200):  # steps that store nothing, and marks of others that are forgotten
            ranks.step()
        ranks.step(None, [stored(2, [1])])
        assert ranks.counts["offered_pages"] <= 1
        told = ranks.told(None, None, {0, 1})  # waits until they have been read
        ranks.fill([0, 1], 90)
        ranks.carry_out(told)
        ranks.engine.drain(30)
        ranks.step([ranks.order(1, [5]), ranks.order(2, [6])])
        assert ranks.marks([5, 6]) == [[30, 31], [94, 95]]


def test_marks_are_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        for n in range(200):
            ranks.step(None, [stored(n % 250, [0, 1])])
        ranks.step(idle=True)
        ranks.engine.drain(30)
        services: list[Any] = [worker.ranks[0]._service for worker in ranks.workers]
        until(lambda: all(len(service._marks) < 100 for service in services), "old marks go")
        executor: Any = ranks.engine._parts.executor
        until(lambda: len(executor._users) == 1, "the last step's is left")


@pytest.mark.parametrize("cpu", [None, 2])
def test_a_load_between_steps_names_the_bad_blocks_of_each_rank(tmp_path: Path, cpu: int | None) -> None:
    with opened(tmp_path, cpu=cpu) as ranks:
        ranks.store(1, [0, 1, 2, 3, 4], 10)
        flip_file(tmp_path / "slab-0.0.1.bin", slab_place(ranks, 1, 2), 3)
        if cpu:
            drop_from(ranks.engine, "cpu")
        ranks.step([ranks.order(1, [5, 6, 7, 8, 9], between=True)])
        assert ranks.until_arrived("r") == [set(), {7}]
        assert ranks.marks([5, 6]) == [[10, 11], [74, 75]]
        assert ranks.counts["bad_pages"] == 1


def test_two_loads_between_steps_share_their_pages(tmp_path: Path) -> None:
    """The second is told to the ranks when the first has brought them: no step waits for that."""
    with opened(tmp_path, cpu=6) as ranks:
        ranks.store(1, [0, 1, 2, 3, 4], 10)
        drop_from(ranks.engine, "cpu")
        both = {"r": [5, 6, 7, 8, 9], "s": [10, 11, 12, 13, 14]}
        orders = [ranks.order(1, blocks, between=True, name=name) for name, blocks in both.items()]
        for order in orders:
            order.fetch.release()
        drop_from(ranks.engine, "cpu")
        began = time.monotonic()
        ranks.step(orders)
        assert time.monotonic() - began < 5
        assert ranks.until_arrived("r", "s") == [set(), set()]
        until(lambda: not ranks.lead.loads.under_way, "both end")
        assert ranks.marks([10, 14]) == ranks.marks([5, 9]) == [[10, 14], [74, 78]]


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_load_within_a_step_that_is_bad_after_all(tmp_path: Path, overlapping: bool) -> None:
    """Nothing of its step is stored. vLLM takes the step back, or, where it cannot, ends."""
    with opened(tmp_path, overlapping=overlapping) as ranks:
        ranks.store(1, [0, 1, 2, 3, 4], 10)
        told = ranks.told([ranks.order(1, [5, 6])], [stored(2, [7, 8])])
        ((batch,), mark) = told
        lost = [dataclasses.replace(batch[0], order=b"nothing that anybody would understand")]
        first, second = ranks.workers
        first.begin([batch])
        first.loads.wait_all()
        first.end(mark, idle=False)
        second.begin([lost])
        second.loads.wait_all()
        if overlapping:
            with pytest.raises(VerifiedLoadError):
                second.end(mark, idle=False)
        else:
            second.end(mark, idle=False)
            assert ranks.answers()[1] == [set(), {5, 6}]
        second.begin([batch])  # so that the leader need not wait for it
        second.ranks[0].store(mark[0])


def test_a_rank_that_has_gone_costs_pages_and_no_more(tmp_path: Path) -> None:
    with opened(tmp_path, deadline=1.0) as ranks:
        ranks.store(1, [0, 1, 2, 3, 4], 10)
        order = ranks.order(1, [5, 6])
        ranks.workers[1].close()
        until(lambda: ranks.engine.stats()["ranks"][1]["state"] == "lost", "it is missed")
        began = time.monotonic()
        told = ranks.told([order], [stored(2, [7, 8])])
        ranks.workers[0].begin(told[0])
        ranks.workers[0].loads.wait_all()
        ranks.workers[0].end(told[1], idle=False)
        assert ranks.workers[0].loads.take_bad() == {5, 6}
        ranks.told(None, None, {7, 8}, idle=True)
        assert time.monotonic() - began < 10
        assert ranks.session.cached(hashes(1)) == 0


def test_a_leader_that_has_gone_is_an_answer(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        ranks.store(1, [0, 1, 2, 3, 4], 10)
        told = ranks.told([ranks.order(1, [5, 6])])
        links: Any = ranks.engine._parts.ranks
        for link in links.links:  # as the kernel ends a process that was killed
            link.channel._socket.shutdown(2)
        for worker in ranks.workers:
            until(lambda worker=worker: worker.ranks[0]._service is None, "it has left")
        ranks.carry_out(told)
        assert ranks.answers()[1] == [{5, 6}, {5, 6}]


def test_pages_of_changed_weights(tmp_path: Path) -> None:
    """What the last step has computed is of the old ones, and is not stored."""
    with opened(tmp_path) as ranks:
        ranks.store(1, [0, 1, 2, 3, 4], 10)
        ranks.step(None, [stored(2, [5, 6, 7, 8, 9])])
        ranks.session.weights_changed()
        ranks.step(idle=True)
        ranks.engine.drain(30)
        assert [ranks.session.cached(hashes(seed)) for seed in (1, 2)] == [0, 0]
        ranks.store(1, [0, 1, 2, 3, 4], 50)
        assert ranks.session.cached(hashes(1)) == PAGES


def test_what_was_computed_last_is_stored_at_the_end(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        ranks.fill([0, 1], 10)
        ranks.step(None, [stored(1, [0])])
        ranks.step(None, [stored(1, [1], 1)])
    with opened(tmp_path) as ranks:
        ranks.step([ranks.order(1, [5, 6])])
        assert ranks.marks([5, 6]) == [[10, 11], [74, 75]]


def test_prefills_are_told(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks:
        worker = ranks.workers[0]
        worker.prefills.begin((500, 96))
        worker.end([], idle=False)
        ((tokens, before, seconds),) = worker.take_observed()
        assert (tokens, before, worker.take_observed()) == (500, 96, [])
        assert seconds > 0


def test_ranks_that_do_not_fit() -> None:
    address = RankAddress("/nowhere", 0, 0)
    assert addresses_of({0: [address, address]}, 1) == [[address], [address]]
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] of 2"):
        addresses_of({0: [address]}, 2)
    assert one_model({0: {"salt": "a"}, 1: {"salt": "a"}}) == {"salt": "a"}
    with pytest.raises(RankMismatchError, match="another salt"):
        one_model({0: {"salt": "a"}, 1: {"salt": "b"}})


def test_a_rank_needs_no_leader_to_end() -> None:
    Rank([(torch.zeros((2, TOKENS, 8), dtype=torch.uint8),)]).close()
