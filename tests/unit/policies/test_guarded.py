"""The order that may not lose to LRU: its shadow against a list, its bound against traces that look for a hole."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gdscache.commands.replay.trace import Prompt, Request, Workload, expand
from gdscache.native import LruShadow
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.guarded import Bets, Guarded, Lifetime
from tests.support.index_machine import name
from tests.support.one_tier import simulate
from tests.support.policy_models import SlowShadow


def in_order(shadow: LruShadow) -> list[bytes]:
    return [key for some in iter(shadow.walk(), []) for key in some]


class ShadowMachine(RuleBasedStateMachine):
    """A tier of some pages, in trees of any shape, that gives up whatever it likes."""

    keys = st.integers(0, 15).map(name)

    @initialize(order=st.one_of(st.just([]), st.permutations(range(8))))
    def restored(self, order: list[int]) -> None:
        self.shadow = LruShadow([*map(name, order)])
        self.slow = SlowShadow([name(i) for i in order])

    @rule(keys=st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True), base=st.integers(0, 7))
    def insert(self, keys: list[int], base: int) -> None:
        """Pages, each behind one of a lower number: no page follows itself."""
        for number in sorted(keys):
            key = name(number)
            if key not in self.slow.tier:
                parent = name(number * base // 8) if number * base // 8 < number else b"root"
                self.shadow.insert([(key, parent)])
                self.slow.room = self.shadow.room  # how it follows a tier that shrinks has a test of its own
                self.slow.insert(key, parent)

    @rule(key=keys)
    def touch(self, key: bytes) -> None:
        if key in self.slow.tier:
            self.shadow.touch([key])
            self.slow.touch(key)

    @precondition(lambda self: self.slow.tier)
    @rule(at=st.integers(0, 15), evicted=st.booleans())
    def gone(self, at: int, evicted: bool) -> None:
        key = self.slow.tier[at % len(self.slow.tier)]
        if evicted:
            self.shadow.evict([key])
        else:
            self.shadow.drop(key)
        (self.slow.evict if evicted else self.slow.drop)(key)

    @invariant()
    def agrees(self) -> None:
        shadow, slow = self.shadow, self.slow
        order = in_order(shadow)
        assert shadow.first() == next(iter(order), None)  # asked at every step: it goes on where it was
        assert order == slow.order()
        assert set(order) == set(slow.tier) == set(shadow.recency())
        assert len(shadow) == len(slow.recent)
        assert shadow.owed == len({*slow.recent} - {*slow.tier})
        assert [key for key in order if shadow.has_left(key)] == order[: shadow.left] == slow.left
        assert shadow.rows <= len({*slow.recent, *slow.tier, *map(slow.parents.get, [*slow.recent, *slow.tier])})
        assert (shadow.hits, shadow.used) == (slow.hits, slow.used)
        assert len(shadow) <= max(shadow.room, len(slow.tier))


TestShadow = ShadowMachine.TestCase
TestShadow.settings = settings(stateful_step_count=40)


def test_a_shadow_is_its_list_whatever_is_drawn() -> None:
    """Rooms that shrink while pages come back, and drops that leave several pages without a follower: hypothesis draws
    them rarely."""
    for seed in range(120):
        draw, machine = random.Random(seed), ShadowMachine()
        machine.restored(order=draw.sample(range(8), draw.choice((0, 8, 8))))
        for _ in range(60):
            what = draw.random()
            if what < 0.4:
                machine.insert(keys=draw.sample(range(16), draw.randint(1, 5)), base=draw.randrange(8))
            elif what < 0.6:
                machine.touch(key=name(draw.randrange(16)))
            elif machine.slow.tier:
                machine.gone(at=draw.randrange(16), evicted=draw.random() < 0.5)
            machine.agrees()


def test_a_shadow_follows_a_tier_that_shrinks() -> None:
    shadow = LruShadow([*map(name, range(100))])
    for i in range(60):
        shadow.drop(name(i))
    for i in range(1000, 1300):
        shadow.evict(in_order(shadow)[:1])
        shadow.insert([(name(i), b"")])
    assert shadow.room <= 41
    assert len(shadow) <= 41


def test_pages_that_follow_each_other_in_a_circle_do_no_harm() -> None:
    shadow = LruShadow()
    shadow.insert([(name(0), name(1)), (name(1), name(0))])
    for i in range(2, 20):
        shadow.evict(in_order(shadow)[-1:])
        shadow.insert([(name(i), name(i))])
    assert name(19) in in_order(shadow)


class MostRecent(Lifetime):
    """The worst order in most traffic: what was used last goes first."""

    __slots__ = ()

    def __iter__(self) -> Iterator[bytes]:
        return reversed(list(super().__iter__()))


class Foresight(list[Prompt]):
    """The prompts of a workload; while they are iterated it is known which pages are wanted next, and how soon."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work.prompts)
        self.at = 0
        self._needs: dict[bytes, list[int]] = {}
        for i, (pages, _) in enumerate(work.prompts):
            for page in pages:
                self._needs.setdefault(work.names[page].key, []).append(i)

    def __iter__(self) -> Iterator[Prompt]:
        for self.at, prompt in enumerate(super().__iter__()):
            yield prompt

    def soon(self, key: bytes) -> int:
        """The request after this one that wants a page; one behind all of them where none does."""
        needs = self._needs[key]
        after = bisect_right(needs, self.at)
        return needs[after] if after < len(needs) else len(self)


class Adversary(EvictionPolicy):
    """The optimum upside down: gives up what is wanted soonest. `future` belongs to the trace that is replayed."""

    future: Foresight

    def __init__(self) -> None:
        self.restore((), ())

    def empty(self) -> Adversary:
        return Adversary()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._pages = dict.fromkeys(keys[i] for i in order)

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        self._pages.update(dict.fromkeys(key for key, _ in pages))

    def touch_all(self, keys: Sequence[bytes]) -> None:
        assert self._pages.keys() >= {*keys}

    def remove(self, key: bytes) -> None:
        del self._pages[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(sorted(self._pages, key=self.future.soon))


def against(work: Workload, capacity: int, policy: Guarded) -> int:
    """Hits of an order, which an `Adversary` in it loses with all that can be known of the trace."""
    Adversary.future = Foresight(work)
    return simulate(work._replace(prompts=Adversary.future), capacity, policy).hits


class GuardedMostRecent(Guarded):
    order = MostRecent
    __slots__ = ()


class GuardedAdversary(Guarded):
    order = Adversary
    __slots__ = ()


def slow_lru_hits(workload: Workload, capacity: int) -> int:
    """LRU over the same requests, tails before heads, request by request: no code of the guard's."""
    parents = {page.key: page.parent for page in workload.names}
    order: list[bytes] = []
    hits = 0
    for pages, _ in workload.prompts:
        keys = [workload.names[page].key for page in pages][:capacity]
        hits += sum(key in order for key in keys)
        for key in reversed(keys):  # tails first, so that heads outlive them
            if key in order:
                order.remove(key)
            order.append(key)
        while len(order) > capacity:
            followed = {parents[key] for key in order}
            order.remove(next(key for key in order if key not in followed))
    return hits


def trace(prompts: Sequence[Sequence[int]]) -> Workload:
    """Prompts as paths of numbers from the root of a tree."""
    ids: dict[tuple[int, ...], int] = {}
    found = []
    for at, path in enumerate(prompts):
        blocks = tuple(ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path)))
        found.append(Request(at, 512 * len(blocks), 0, blocks))
    return expand(found)


def bound_of(policy: Guarded) -> float:
    """Most hits that LRU may be ahead, by its hits so far; the pages of one store come on top."""
    return (policy._most() + policy._shadow.room) * (1 << policy._shadow.shift)


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=20, max_size=150),
    st.integers(1, 12),
    st.integers(4, 24),
    st.sampled_from([Guarded, GuardedMostRecent, GuardedAdversary]),
    st.sampled_from([1, 7]),
)
def test_no_trace_breaks_the_bound(
    prompts: list[list[int]], rounds: int, capacity: int, kind: type[Guarded], groups: int
) -> None:
    """The search goes where LRU is ahead, as a share of what the bound allows."""
    work = trace(prompts * rounds)
    policy = kind(groups)
    lost = slow_lru_hits(work, capacity) - against(work, capacity, policy)
    bound = bound_of(policy) + max(len(pages) for pages, _ in work.prompts)
    target(lost / bound)
    assert lost <= bound


def test_one_long_prompt_of_several_groups_is_within_the_budget() -> None:
    """What a prompt of 4 % of the pages costs binds an order of one group, and none of seven, nor one made of it."""
    for policy, free in ((Guarded(), False), (Guarded(7), True), (Guarded(7).empty(), True)):
        keys = [name(i) for i in range(1000)]
        policy.restore(keys, range(1000))
        policy.evict_all([(key, None) for key in keys[-40:]])
        policy.insert_all([(key, b"root") for key in keys[-40:]])  # LRU has them all
        assert policy.debt == 40
        assert policy.following is not free
        policy.evict_all([(key, None) for key in keys[:8]])
        assert policy.judged is not free


def test_it_is_the_other_order_or_lru() -> None:
    """While it is free its victims are the order's; while it follows, those that LRU has given up or would."""
    draw = random.Random(3)
    policy, bare, slow = GuardedMostRecent(), MostRecent(), SlowShadow()
    present: set[bytes] = set()
    modes = set()
    for _ in range(3000):
        key = name(int(80 * draw.random() ** 2))
        if key in present:
            policy.touch_all([key])
            bare.touch_all([key])
            slow.touch(key)
        else:
            if len(present) == 30:
                expected = slow.order() if policy.following else list(bare)
                assert list(policy) == expected
                modes.add(policy.following)
                policy.evict_all([(expected[0], None)])
                bare.evict_all([(expected[0], None)])
                slow.evict(expected[0])
                present.remove(expected[0])
            present.add(key)
            policy.insert_all([(key, b"root")])
            bare.insert_all([(key, b"root")])
            slow.insert(key, b"root")
        assert policy.debt == slow.hits - slow.used
    assert modes == {True, False}


def test_a_good_order_is_set_free_again_by_its_bets() -> None:
    """LRU's worst case behind traffic in which the order has lost its budget."""
    policy = Guarded()
    policy.judged = True
    work = trace([[i % 300, 0] for i in range(9000)])
    found = simulate(work, 400, policy)
    assert not policy.judged
    assert found.hits > 200
    assert simulate(work, 400, LRU()).hits == 0


def test_bets_are_won_by_the_page_that_is_wanted_first() -> None:
    bets = Bets()
    for i in range(Bets.LEAST):
        assert not bets.won
        bets.add(name("kept", i), name("given", i))
        bets.wanted(name("kept", i))
        assert name("given", i) not in bets.open
    assert bets.won
    for i in range(Bets.LEAST):
        bets.add(name("kept", i), name("given", i))
        bets.wanted(name("given", i))
    assert not bets.won
    for i in range(2 * Bets.MOST):
        bets.add(name("kept", i), name("given", i))
    assert sum(name("kept", i) in bets.open for i in range(2 * Bets.MOST)) == Bets.MOST


class SmallSample(Guarded):
    """Samples from 400 pages on."""

    EXACT = 400
    SAMPLE = 100
    __slots__ = ()


@pytest.mark.parametrize("restored", [False, True])
def test_a_sample_tells_what_all_pages_would(restored: bool) -> None:
    draw = random.Random(1)
    policy, exact = SmallSample(), Guarded()
    present: list[bytes] = []
    there: set[bytes] = set()
    if restored:
        present = [name(i) for i in range(900)]
        there.update(present)
        for order in (policy, exact):
            order.restore(present, range(900))
    for _ in range(16_000):
        key = name(int(3000 * draw.random() ** 2))
        if key in there:
            policy.touch_all([key])
            exact.touch_all([key])
            continue
        if len(present) >= 1000:
            gone = present.pop(draw.randrange(1000))  # neither of them is asked: it is the count that is compared
            there.remove(gone)
            policy.evict_all([(gone, None)])
            exact.evict_all([(gone, None)])
        present.append(key)
        there.add(key)
        policy.insert_all([(key, b"")])
        exact.insert_all([(key, b"")])
    assert 100 <= policy._shadow.room <= 200
    assert policy._shadow.room << policy._shadow.shift == pytest.approx(1000, rel=0.2)
    assert abs(policy.debt - exact.debt) < 0.1 * exact._shadow.hits
    assert policy._shadow.hits << policy._shadow.shift == pytest.approx(exact._shadow.hits, rel=0.2)
    for order in (policy, exact):
        order.judged = True
        assert set(order) == set(present)
    for key in present:
        policy.remove(key)
    assert list(policy) == []
    assert not policy._shadow.left
    assert policy._shadow.rows == policy._shadow.owed


class Watchful(SmallSample):
    """Judged at each page, or at every few."""

    PATIENCE = 40
    __slots__ = ()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.suite)])
def test_many_pages_at_once_are_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    many, single = Watchful(), Watchful()
    present: dict[bytes, bytes] = {}
    judged = set()
    for step in range(1500):
        prompt = [name(seed, draw.randrange(40), i) for i in range(draw.randint(1, 30))]
        parents = dict(zip(prompt, [b"root", *prompt], strict=False))
        used = [key for key in reversed(prompt) if key in present]
        new = [(key, parents[key]) for key in prompt if key not in present]
        many.touch_all(used)
        for key in used:
            single.touch_all([key])
        short = len(present) + len(new) - (100 if step < 500 else 1200)
        victims = [key for key in list(many)[: max(0, short)] if key not in parents]
        above = [present.pop(key) for key in victims]
        gone = [(key, parent if parent in present else None) for key, parent in zip(victims, above, strict=True)]
        many.evict_all(gone)
        for pair in gone:
            single.evict_all((pair,))
        many.insert_all(new)
        for key, parent in new:
            single.insert_all([(key, parent)])
        present.update(new)
        passed = draw.sample(sorted(present), min(3, len(present)))
        many.defer_all(passed)
        for key in passed:
            single.defer_all((key,))
        judged.add(many.judged)
        assert (many.judged, many.following, many.debt) == (single.judged, single.following, single.debt)
        assert list(many) == list(single)
    assert judged == {True, False}


def test_what_is_known_of_pages_that_are_gone_is_bounded() -> None:
    policy = Guarded()
    for i in range(5000):
        if i >= 50:
            policy.evict_all([(next(iter(policy)), None)])
        policy.insert_all([(name(i), name(i - 1) if i % 7 else b"root")])
    shadow = policy._shadow
    assert len(shadow) <= 50
    assert shadow.owed <= 50
    assert shadow.left <= 50
    assert shadow.rows <= 201  # these, and pages that they follow
    assert shadow.ready <= 100
