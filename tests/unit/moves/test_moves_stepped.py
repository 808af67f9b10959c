"""Every order of what can happen to small stores: landings, failures, deadlines, clears, a close. No thread, no bytes.

An order is the numbers of the choices that were taken (stepped.py). What is visible has the right bytes after
each of them, and whatever was accepted has ended, and given everything back, after the last.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdscache.commands.replay.hierarchy import ModelSsd, ModelTier
from gdscache.config import Config
from gdscache.cuda.streams import Event, Landed
from gdscache.errors import EngineClosedError
from gdscache.index.free_slots import SlotShare
from gdscache.moves import PLANES
from gdscache.policies.admission import Admission
from gdscache.store.outlets import EarnedOffers, Outlet
from gdscache.store.parcel import StoreJob
from gdscache.store.plan import StorePlanner
from gdscache.store.storer import Storer
from gdscache.tiers.manager import TierManager
from tests.support.helpers import SEED, make_config
from tests.support.stepped import SPACE, Order, SteppedExecutor, every_order, prompt, random_orders
from tests.support.stepped_machine import Choice


@pytest.fixture(autouse=True)
def _few_dirty_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdscache.store.plan.WATERMARKS", (0.3, 0.5))


class Receipt:
    """What a store was told."""

    def __init__(self, pages: int, read: Callable[[], None]) -> None:
        self.left = set(range(pages))
        self.tiers: dict[int, list[str]] = {}
        self.causes: dict[int, str] = {}
        self.is_read = False
        self._read = read

    def committed(self, pages: Sequence[int], tier: str) -> None:
        assert self.left.issuperset(pages), "committed behind its end"
        for page in pages:
            self.tiers.setdefault(page, []).append(tier)

    def finish(self, pages: Sequence[int], cause: str = "") -> None:
        for page in pages:
            self.left.remove(page)
        if cause:
            self.causes.update(dict.fromkeys(pages, cause))

    def reading(self, lands: Callable[[float], Landed | None]) -> None:
        """Its end says so, too."""

    def read(self, event: Event) -> None:
        self.is_read = True
        self._read()


@dataclasses.dataclass(frozen=True)
class Small:
    """How large the tiers are, and what is stored; `None` is a clear. `faults`: how many there may be."""

    cpu: int | None
    ssd: int
    spare: int
    stores: tuple[tuple[int, int] | None, ...]  # seed and pages
    policy: str = "write_through"
    far: int | None = None  # pages of a second tier of files
    faults: int = 1
    drain: bool = True


@functools.cache
def config_of(path: Path, small: Small) -> Config:
    return Config.from_dict(make_config(path, cpu=small.cpu, ssd=small.ssd, store={"write_policy": small.policy}))


class Run(Order):
    """One order of what may happen to a case."""

    def __init__(self, small: Small, path: Any, order: Sequence[int], rng: random.Random | None = None) -> None:
        super().__init__(order, rng, small.faults)
        config = config_of(path, small)
        self.executor = executor = SteppedExecutor(self.choose)
        self.cpu = None if small.cpu is None else ModelTier("cpu", small.cpu, 4096, "lru")
        self.ssd = ModelSsd(small.ssd, 4096, "lru", 0)
        self.far = None if small.far is None else ModelSsd(small.far, 4096, "lru", 0)
        if self.far is not None:
            self.far.name = "far"
        self.tiers: list[ModelTier] = [tier for tier in (self.cpu, self.ssd, self.far) if tier is not None]
        files = [tier for tier in (self.ssd, self.far) if tier is not None]
        limit = config.store.queue // 4096
        outlets = [Outlet(tier, Admission("all", small.ssd, 4096), limit) for tier in files]
        earned = EarnedOffers(None if self.cpu is None else self.cpu.index, outlets, small.policy, hits=1)
        self.manager = TierManager(threading.RLock(), self.tiers, on_use=[earned.used])
        self.spare = SlotShare(small.spare)
        self.planner = StorePlanner(self.manager, config.store, 4096, outlets, earned, self.spare)
        self.storer = Storer(self.planner, executor, config.deadline)
        self.receipts: list[Receipt] = []
        self.accepted: set[bytes] = set()  # keys, since the last clear
        self._blocks = 0
        self.acts = [self._act(store) for store in small.stores]
        self._drain = small.drain

    def _act(self, store: tuple[int, int] | None) -> Choice:
        if store is None:
            return Choice("clear", self._clear)
        return Choice(f"store {store}", lambda: self._store(*store))

    def _clear(self) -> None:
        self.accepted.clear()
        self.manager.clearing.clear()

    def _store(self, seed: int, count: int) -> None:
        pages = prompt(seed, count)
        self.accepted.update(page.key for page in pages)
        first, self._blocks = self._blocks, self._blocks + count
        tags = self.executor.tags
        for i, page in enumerate(pages):
            tags[PLANES, first + i] = page.key

        def reused() -> None:
            for i in range(count):
                tags[PLANES, first + i] = "another prompt"

        receipt = Receipt(count, reused)
        self.receipts.append(receipt)
        blocks = np.arange(first, first + count, dtype=np.int64).reshape(count, 1)
        epoch = self.manager.clearing.epoch(SPACE)
        try:
            if not self.storer.store(StoreJob(receipt, pages, epoch, blocks=blocks)):
                receipt.read(None)
        except EngineClosedError:
            self.receipts.remove(receipt)

    def play(self) -> None:
        while True:
            found = self.executor.choices()
            if not found and not self.acts:
                break
            self.choose(found).do()
            self.check()
        self.busy = True
        self.storer.close(drain=self._drain)
        while found := self.executor.choices():  # late I/O ends at last
            self.choose(found).do()
            self.check()
        self.check_end()

    def check(self) -> None:
        """What is visible lies where it is said to be."""
        for tier in self.tiers:
            for entry in list(tier.index):
                if tier.index.has(entry.key):
                    assert entry.key in self.accepted, "a page that was cleared is there again"
                    assert self.executor.tags[tier.name, entry.slot] == entry.key, f"another page in the {tier.name}"

    def check_end(self) -> None:
        assert all(not receipt.left for receipt in self.receipts), "a store has no end"
        assert all(receipt.is_read for receipt in self.receipts), "the blocks of a store are never free"
        assert not self.planner.queued
        assert not self.planner.keys
        assert not self.manager.stats()["leases"]
        assert self.manager.check() == []
        assert self.spare.free_slots == self.spare.slots, "a slot of the reserve is lost"
        assert not self.manager.quarantine.requests
        for tier in self.tiers:
            assert all(tier.index.has(entry.key) for entry in tier.index), f"a page of the {tier.name} never ends"
            assert not any(entry.leases for entry in tier.index), f"a page of the {tier.name} stays in use"
            assert tier.index.free_slots + len(tier.index) == tier.index.slots, f"a slot of the {tier.name} is lost"


ONE = Small(cpu=4, ssd=8, spare=2, stores=((1, 2),), faults=2)
CASES = {
    "one store": ONE,
    "one store that is dropped": dataclasses.replace(ONE, drain=False),
    "a clear at any time": Small(cpu=4, ssd=8, spare=2, stores=((1, 2), None)),
    "a store again after a clear": Small(cpu=4, ssd=8, spare=2, stores=((1, 2), None, (1, 2))),
    "two that share a page": Small(cpu=4, ssd=8, spare=2, stores=((1, 2), (2, 2))),
    "no room in the CPU tier": Small(cpu=2, ssd=8, spare=2, stores=((1, 2), (2, 3))),
    "no CPU tier": Small(cpu=None, ssd=8, spare=2, stores=((1, 3), (2, 2))),
    "no CPU tier, cleared": Small(cpu=None, ssd=8, spare=1, stores=((1, 2), None, (1, 2))),
    "an SSD that is too small": Small(cpu=6, ssd=2, spare=2, stores=((1, 2), (2, 3))),
    "two tiers of files": Small(cpu=4, ssd=8, spare=2, stores=((1, 2), (2, 2)), far=8),
    "two tiers of files, one too small": Small(cpu=None, ssd=2, spare=2, stores=((1, 2), (2, 2)), far=8),
    "written back to two": Small(cpu=4, ssd=8, spare=2, stores=((1, 3), None), policy="write_back", far=8),
    "written back": Small(cpu=4, ssd=8, spare=2, stores=((1, 3), (2, 3)), policy="write_back"),
    "written back, cleared": Small(cpu=4, ssd=8, spare=2, stores=((1, 3), None, (2, 3)), policy="write_back"),
}


@pytest.mark.parametrize("case", CASES)
def test_some_orders(case: str, slab: Any) -> None:
    assert every_order(functools.partial(Run, CASES[case], slab), 20) > 10
    random_orders(functools.partial(Run, CASES[case], slab), 20, SEED)


@pytest.mark.suite
@pytest.mark.parametrize("case", CASES)
def test_more_orders(case: str, slab: Any) -> None:
    random_orders(functools.partial(Run, CASES[case], slab), 250, SEED + 60)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_every_order(case: str, slab: Any, record_property: Any) -> None:
    record_property("orders", every_order(functools.partial(Run, CASES[case], slab), 200_000))
    random_orders(functools.partial(Run, dataclasses.replace(CASES[case], faults=3), slab), 20_000, SEED)
