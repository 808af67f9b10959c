"""Each eviction order against a slow and obvious model of itself, and what each is for."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gdscache.config import Config, EvictionOrder
from gdscache.errors import InvalidValueError
from gdscache.policies import POLICIES, S3FIFO, SLRU, new_policy
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.levels import Levels
from gdscache.policies.lifetime import Lifetime
from gdscache.policies.reuse import ReuseMonitor
from tests.support.helpers import make_config
from tests.support.policy_models import MODELS, Model, SlowLifetime


def name(*path: object) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


class PolicyMachine(RuleBasedStateMachine):
    """A policy after a restore, maybe of nothing. Pages come, are used, go in order or out of order."""

    new: Callable[[], EvictionPolicy] = LRU
    slow: Callable[..., Model] = MODELS["lru"]
    keys = st.integers(0, 25).map(name)

    @initialize(order=st.one_of(st.just([]), st.permutations(range(20))))
    def restored(self, order: list[int]) -> None:
        self.policy = self.new()
        if order:
            self.policy.restore([name(i) for i in range(20)], order)
        self.model = self.slow([name(i) for i in order])

    @rule(keys=st.lists(keys, max_size=6), parent=keys)
    def insert(self, keys: list[bytes], parent: bytes) -> None:
        """Pages behind each other, behind one that may be there or not."""
        present = set(self.model.order())  # looked at once: pages that come behind each other are one run
        new = []
        for key in keys:
            if key not in present:
                present.add(key)
                new.append((key, parent))
                self.model.insert(key, parent)
                parent = key
        self.policy.insert_all(new)

    @rule(keys=st.lists(keys, max_size=6))
    def touch(self, keys: list[bytes]) -> None:
        some = [key for key in keys if key in self.model.order()]
        self.policy.touch_all(some)
        for key in some:
            self.model.touch(key)

    @precondition(lambda self: self.model.order())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.model.order()))
        self.policy.remove(key)
        self.model.remove(key)

    @precondition(lambda self: self.model.order())
    @rule(data=st.data(), hasten=st.booleans())
    def defer_or_hasten(self, data: st.DataObject, hasten: bool) -> None:
        key = data.draw(st.sampled_from(self.model.order()))
        for order in (self.policy, self.model):
            (order.hasten if hasten else order.defer)(key)
        assert self.policy.is_deferred(key) == self.model.is_deferred(key)

    @rule(n=st.integers(1, 8), passed_over=st.integers(0, 2))
    def evict(self, n: int, passed_over: int) -> None:
        """As the index does: the victims first, then they go; some pages at the front are leased."""
        victims = list(itertools.islice(self.policy, passed_over, passed_over + n))
        order = self.model.order()
        assert victims == order[passed_over : passed_over + n]
        followed = order[passed_over:]  # each page but the last follows the next one, which may stay or go
        self.policy.evict_all(list(zip(victims, [*followed[1:], None], strict=False)))
        for i, key in enumerate(victims):
            self.model.remove(key)
            for freed in followed[i + 1 : i + 2]:
                self.model.hasten(freed)

    @rule()
    def clear(self) -> None:
        self.policy = self.policy.empty()
        self.model = self.slow()

    @invariant()
    def agrees(self) -> None:
        assert list(self.policy) == self.model.order()


class HastyMonitor(ReuseMonitor):
    """Concludes after a few pages."""

    ROUND = 3
    __slots__ = ()


class HastyLifetime(Lifetime):
    """Lifetimes that change all the time, and a small table of pages that are gone."""

    monitor = HastyMonitor
    __slots__ = ()


class SlowHastyLifetime(SlowLifetime):
    policy = HastyLifetime


@pytest.mark.parametrize(
    ("new", "slow"),
    [*((POLICIES[policy], MODELS[policy]) for policy in MODELS), (HastyLifetime, SlowHastyLifetime)],
    ids=[*MODELS, "hasty lifetime"],
)
def test_a_policy_is_its_model(new: Callable[[], EvictionPolicy], slow: Callable[..., Model]) -> None:
    machine = type("Machine", (PolicyMachine,), {"new": staticmethod(new), "slow": staticmethod(slow)})
    examples = max(30, settings.default.max_examples)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50))


@pytest.mark.suite
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", MODELS)
def test_a_policy_is_its_model_in_a_long_run(policy: str, seed: int) -> None:
    """A tier of 120 pages, 400 names, some wanted far more often than others, now and then many times in a row."""
    draw = random.Random(seed)
    order, model = new_policy(policy), MODELS[policy]()
    present: set[bytes] = set()
    for _ in range(4000):
        key = name(int(400 * draw.random() ** 3))
        if key not in present:
            if len(present) == 120:
                at = draw.choice([0, 0, 0, 0, 1, 5])
                victim = next(itertools.islice(order, at, None))
                assert victim == model.order()[at]
                order.remove(victim)
                model.remove(victim)
                present.remove(victim)
            parent = draw.choice([b"", *sorted(present)[:3]])
            order.insert(key, parent)
            model.insert(key, parent)
            present.add(key)
        for _ in range(draw.choice([0, 1, 1, 2, 18 if draw.random() < 0.1 else 0])):
            order.touch(key)
            model.touch(key)
    assert list(order) == model.order()


def test_the_table_the_models_and_the_configuration_know_the_same_policies() -> None:
    assert list(POLICIES) == [*MODELS, "lifetime"]
    assert set(get_args(EvictionOrder)) < set(POLICIES)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="fifo"):
        new_policy("fifo")


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_at_the_order_changes_nothing(policy: str) -> None:
    order = new_policy(policy)
    for i in range(50):
        order.insert(name(i))
        for j in range(0, i, 7):
            order.touch(name(j))
    first = list(order)
    assert len(set(first)) == 50
    assert list(order) == first


def _after_a_scan(policy: str) -> set[int]:
    """Which of 10 pages that were used five times each are left when 300 others came, once each, in a tier of 50."""
    order = new_policy(policy)
    for i in range(10):
        order.insert(name(i))
        for _ in range(5):
            order.touch(name(i))
    present = 10
    for i in range(300):
        if present == 50:
            order.remove(next(iter(order)))
            present -= 1
        order.insert(name("scan", i))
        present += 1
    left = set(order)
    assert len(left) == 50
    return {i for i in range(10) if name(i) in left}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("lru", 0), ("slru", 8), ("s3fifo", 10), ("lfu", 0), ("credit_lru", 0), ("unguarded", 0), ("lifetime", 0)],
)
def test_a_long_scan_pushes_out_what_is_not_protected_for_good(policy: str, kept: int) -> None:
    assert len(_after_a_scan(policy)) == kept


@pytest.mark.parametrize("policy", ["lfu", "credit_lru"])
def test_a_used_page_outlives_pages_that_came_after_it_but_not_for_ever(policy: str) -> None:
    order = new_policy(policy)
    order.insert(name("used"))
    for i in range(9):
        order.insert(name(i))
    order.touch(name("used"))
    order.touch(name("used"))
    lived = 0
    while name("used") in set(order):
        order.remove(next(iter(order)))
        order.insert(name("new", lived))
        lived += 1
    assert 10 < lived < 100


def test_protected_pages_are_a_share_of_all() -> None:
    order = SLRU()
    for i in range(10):
        order.insert(name(i))
    for i in range(10):
        order.touch(name(i))
    assert list(order) == [name(i) for i in range(10)]  # two are back on probation
    order.insert(name("new"))
    assert list(order)[:3] == [name(0), name(1), name("new")]


def test_a_page_that_comes_back_soon_enters_the_main_queue() -> None:
    order = S3FIFO()
    for i in range(10):
        order.insert(name(i))
    order.remove(name(0))
    order.insert(name(0))
    order.insert(name(10))
    assert list(order)[-1] != name(10)
    assert name(0) in order._main


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_grows_with_the_pages_that_are_gone(policy: str) -> None:
    order = new_policy(policy)
    for i in range(2000):
        if i >= 20:
            order.remove(next(iter(order)))
        order.insert(name(i))
        for key in list(itertools.islice(order, 0, 20, 3)):
            order.touch(key)
    if isinstance(order, S3FIFO):
        assert len(order._ghosts) == len(order._ghosts_in_order) <= 20
    if isinstance(order, Levels):
        assert len(order._at) == 20
        assert len(order._levels) == len(order._numbers) <= 20
    for key in list(order):
        order.remove(key)
    assert list(order) == []
    if isinstance(order, Levels):
        assert order._numbers == []
        assert order._levels == {}
    if isinstance(order, S3FIFO):
        assert not order._ghosts


@pytest.mark.parametrize("order", ["slru", "s3fifo", "lfu", "credit_lru"])
def test_an_order_that_engines_had_is_refused_with_what_to_set_instead(order: str, slab: Path) -> None:
    data = make_config(slab)
    data["eviction"] = order
    with pytest.raises(InvalidValueError, match=f"eviction.*{order}.*set lifetime or lru"):
        Config.from_dict(data)
    assert order in POLICIES  # a row of `gdscache replay` still


def test_a_policy_that_does_not_exist_is_refused(slab: Path) -> None:
    with pytest.raises(InvalidValueError, match="eviction"):
        Config.from_dict(make_config(slab, eviction="fifo"))
