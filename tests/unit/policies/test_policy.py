"""Each eviction order against a slow and obvious model of itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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

from gdscache.config import EvictionOrder
from gdscache.policies import POLICIES
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.guarded import Guarded, Lifetime, ReuseMonitor
from tests.support.index_machine import name
from tests.support.policy_models import MODELS, Model, SlowLifetime


class PolicyMachine(RuleBasedStateMachine):
    """A policy after a restore, maybe of nothing. Pages come, are used, go in order or out of order."""

    new: Callable[[], EvictionPolicy] = LRU
    slow: Callable[..., Model] = MODELS[LRU]
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
        if hasten:
            self.policy.hasten(key)
            self.model.hasten(key)
        else:
            self.policy.defer_all([key])
            self.model.defer(key)
        assert any(order.is_deferred(key) for order in self.policy.deferring()) == self.model.is_deferred(key)

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
    ("new", "slow"), [*MODELS.items(), (HastyLifetime, SlowHastyLifetime)], ids=lambda part: part.__name__
)
def test_a_policy_is_its_model(new: Callable[[], EvictionPolicy], slow: Callable[..., Model]) -> None:
    machine = type("Machine", (PolicyMachine,), {"new": staticmethod(new), "slow": staticmethod(slow)})
    examples = max(12, settings.default.max_examples)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50))


def test_the_table_and_the_configuration_know_the_same_policies() -> None:
    assert get_args(EvictionOrder) == tuple(POLICIES)


@pytest.mark.parametrize("policy", [LRU, Lifetime, Guarded])
def test_nothing_grows_with_the_pages_that_are_gone(policy: type[EvictionPolicy]) -> None:
    order = policy()
    for i in range(2000):
        if i >= 20:
            order.remove(next(iter(order)))
        order.insert_all([(name(i), b"")])
        for key in list(itertools.islice(order, 0, 20, 3)):
            order.touch_all([key])
    if isinstance(order, Lifetime):
        assert order.rows == 20
        assert order.levels <= 20
    for key in list(order):
        order.remove(key)
    assert list(order) == []
    if isinstance(order, Lifetime):
        assert order.rows == order.levels == 0
