"""The index of a tier against a slow and obvious model: order of eviction, slots, leases, invisibility."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import PENDING, Entry, PageState
from gdscache.pages.keys import Page
from gdscache.policies import POLICIES
from gdscache.policies.base import EvictionPolicy
from gdscache.policies.guarded import Lifetime
from tests.support.index_machine import NAMESPACE, IndexMachine, chain, name, put, restore, retentions, state
from tests.support.policy_models import MODELS


def kept(index: PageIndex, pages: Sequence[Page]) -> list[int]:
    return [i for i, page in enumerate(pages) if index.get(page.key) is not None]


uses = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), uses),
        st.tuples(st.just("put"), st.integers(0, 3)),
        st.tuples(st.just("evict"), st.integers(1, 3)),
        st.tuples(st.just("retain"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 3)),
        st.tuples(st.just("bring_in"), st.integers(1, 5)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=steps, kept=st.integers(0, 20))
@example(steps=[("put", 3), ("touch", [(3, 5)]), ("drop", 3), ("put", 3), ("evict", 1)], kept=1)
def test_what_counts_later_counts_as_if_it_had_at_once(policy: str, steps: list[tuple[str, Any]], kept: int) -> None:
    chains = [chain(number, 6) for number in range(4)]
    later, at_once = (PageIndex(12, POLICIES[policy]()) for _ in range(2))
    for index in (later, at_once):
        index.orders.changes_kept = kept
    for what, given_ in steps:
        for index in (later, at_once):
            if what == "touch":
                index.touch([chains[number][i].key for number, i in given_])
            elif what == "put":
                pages = [page for page in chains[given_] if page.key not in index]
                slots = index.allocate_some(len(pages), pages=pages)
                retentions = [Retention(page.key[-1] % 2 if given_ == 3 else 0, None) for page in pages]
                index.insert_all(pages, slots, PageState.VERIFIED, retentions)
                for page in pages[: len(slots)]:
                    index.lease(entry := index.find(page.key) or pytest.fail("a page is gone"))
                    index.release(entry)
            elif what == "evict":
                index.evict(given_)
            elif what == "bring_in":
                index.orders.bring_in(given_)
            elif what == "retain":
                index.retain(chains[given_][0].key, Retention(1, None))
            elif (entry := index.get(chains[given_][-1].key)) is not None:
                index.drop(entry)
        at_once.orders.bring_in()
        assert later.orders.waiting <= kept
        assert {e.key for e in later} == {e.key for e in at_once}
    assert list(later.orders) == list(at_once.orders)
    assert later.check() == at_once.check() == []


def test_a_large_tier_evicts_some_tails_ahead_but_no_head_for_it() -> None:
    index = PageIndex(1024)  # two ahead
    long, short = chain(1, 1000), chain(2, 24)
    put(index, [*long, *short])
    new = chain(3, 9)
    assert index.allocate_some(1, pages=new[:1]) == [997]
    assert index.evictions == 3
    assert index.allocate_some(2, pages=new[:2]) == [998, 999]
    assert index.evictions == 3  # they were there
    index.lease(found := index.get(long[996].key) or pytest.fail("the tail is gone"))
    entry = index.get(short[23].key) or pytest.fail("the warm tail is gone")
    index.lease(entry)
    assert len(index.allocate_some(1, pages=new[:3])) == 1  # only heads can go: one, none ahead
    assert index.evictions == 4
    index.release(found)
    index.release(entry)


def test_a_page_that_was_passed_over_goes_next_when_its_last_follower_is_dropped() -> None:
    index = PageIndex(5, Lifetime())
    head, follower = chain(1, 2)
    others = [chain(number, 1)[0] for number in (2, 3, 4)]
    put(index, [head, others[0], follower, *others[1:]])
    assert index.evict(1) == 1
    assert kept(index, others) == [1, 2], "the coldest page has one behind it, and is passed over"
    index.drop(index.get(follower.key))
    index.evict(1)
    assert kept(index, [head, follower, *others]) == [3, 4]


def test_slots_come_back_whether_their_pages_were_at_rest_or_in_use() -> None:
    given_back: list[int] = []
    index = PageIndex(6, recycle=given_back.extend)
    pages = chain(1, 6)
    for entry in put(index, pages):
        index.lease(entry)
        index.release(entry)
    for i in (1, 4):
        index.find(pages[i].key)
    assert index.evict(6) == index.evictions == 6
    assert given_back == [5, 4, 3, 2, 1, 0]
    index.free(given_back)
    assert index.check() == []


def test_slots_of_pages_and_of_reservations_are_recycled() -> None:
    retired: list[int] = []
    index = PageIndex(3, recycle=retired.extend)
    visible = put(index, chain(1, 1))[0]
    slots = index.allocate(1)
    reserved = index.insert(chain(2, 1)[0], slots[0], PageState.PENDING)
    index.drop(visible)
    index.drop(reserved)
    assert retired == [visible.slot, reserved.slot]
    assert index.free_slots == 1
    assert index.check(elsewhere=retired) == []


def leave_the_order(index: PageIndex, entry: Entry) -> None:
    index.orders.bring_in()
    index.orders.policy.remove(entry.key)


DAMAGE: dict[str, Callable[[PageIndex, Entry], object]] = {
    "nothing": lambda index, entry: None,
    "a page's slot is free": lambda index, entry: index.free((entry.slot,)),
    "a slot is nobody's": lambda index, entry: index._free.take(1),
    "a follower too many": lambda index, entry: index._children.__setitem__(
        entry.slot, index._children[entry.slot] + 1
    ),
    "leases below none": lambda index, entry: setattr(entry, "leases", -1),
    "a page in no order": leave_the_order,
    "a follower of nobody": lambda index, entry: index._orphans.__setitem__(b"x" * 32, 1),
    "a slot beyond the last": lambda index, entry: index._free.give_all([99]),
    "a dropped page": lambda index, entry: setattr(entry, "dropped", True),
    "slots are dirty that hold no page": lambda index, entry: index.mark_dirty(
        index.insert(chain(2, 1)[0], index.take_free(1)[0], PageState.PENDING)
    ),
    "a wrong count": lambda index, entry: setattr(index._free, "_count", index._free._count + 1),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_check_sees_what_is_wrong(what: str) -> None:
    index = PageIndex(4)
    DAMAGE[what](index, put(index, chain(1, 3))[0])
    assert bool(problems := index.check()) == (what != "nothing")
    assert "dirty" not in what or problems == [what]


@given(st.data())
def test_a_restored_index_is_the_one_that_was_filled_page_by_page(data: st.DataObject) -> None:
    """Branches, chains without their head, several namespaces, slots in any order."""
    salts = [b"n" * 32, b"m" * 32]
    pages: list[Page] = []
    for i in range(data.draw(st.integers(0, 12))):
        namespace = data.draw(st.sampled_from(salts))
        above = [page.key for page in pages if page.namespace == namespace]
        parent = data.draw(st.sampled_from([namespace, name("lost", namespace), *above]))
        pages.append(Page(name(i, parent), parent, namespace))
    order = data.draw(st.permutations(range(len(pages))))
    slots = data.draw(st.permutations(range(16)))[: len(pages)]
    restored, filled = PageIndex(16), PageIndex(16)
    restore(restored, [pages[i] for i in order], [slots[i] for i in order])
    filled.take_free(16)
    for i in order:
        filled.insert(pages[i], slots[i], PageState.VERIFIED)
    filled.free(set(range(16)) - set(slots))
    assert restored.check() == filled.check() == []
    assert {(e.page, e.slot) for e in restored} == {(e.page, e.slot) for e in filled}
    assert sorted(restored.take_free(16)) == sorted(filled.take_free(16))
    while len(filled):
        n = data.draw(st.integers(1, 5))
        assert restored.evict(n) == filled.evict(n)
        assert {e.key for e in restored} == {e.key for e in filled}
        assert restored.check(elsewhere=sorted(set(range(16)) - set(slots))) == []


def test_keys_that_begin_alike_are_told_apart() -> None:
    """The columns are matched by eight bytes of their keys first."""
    alike = [b"8 bytes." + bytes([i]) * 24 for i in range(4)]
    pages = [
        Page(alike[0], NAMESPACE, NAMESPACE),
        Page(alike[1], alike[0], NAMESPACE),
        Page(alike[2], alike[3], NAMESPACE),
    ]
    index = PageIndex(3)
    restore(index, pages)
    assert index.check() == []
    lone = PageIndex(2)
    restore(lone, [pages[0], Page(name("x"), alike[3], NAMESPACE)])
    assert lone.check() == []


# -- the model: evict one page at a time, the coldest that nobody needs ----------------------------------------------


@given(st.permutations([*chain(1, 4), *chain(2, 3)]), st.integers(0, 7), st.lists(retentions, min_size=7, max_size=7))
def test_pages_put_in_together_are_there_as_if_one_after_another(
    pages: list[Page], slots: int, wanted: list[Retention]
) -> None:
    together, one_by_one = PageIndex(8), PageIndex(8)
    for index in (together, one_by_one):
        index.insert(pages[0], 7, PageState.VERIFIED)
    rest = pages[1:]
    entries = together.insert_all(rest, range(slots), PageState.PENDING, wanted)
    expected = [one_by_one.insert(p, i, PageState.PENDING, wanted[i]) for i, p in enumerate(rest) if i < slots]
    for index, taken in ((together, entries), (one_by_one, expected)):
        assert index.take_free(8) == list(range(8))
        index.free(set(range(8)) - {7, *(entry.slot for entry in taken)})
    assert [entry.page for entry in entries] == [entry.page for entry in expected]
    assert state(together) == state(one_by_one)
    assert state(together)[-1] == []


@given(st.lists(st.sampled_from(["absent", "at rest", "in use", "retained", "pending"]), max_size=6), st.integers(0, 6))
def test_a_run_of_pages_is_pinned_up_to_the_first_that_is_not_visible(kinds: list[str], start: int) -> None:
    pages, index = chain(1, len(kinds)), PageIndex(8)
    for i, (page, kind) in enumerate(zip(pages, kinds, strict=True)):
        if kind != "absent":
            retention = Retention(1) if kind == "retained" else DEFAULT
            entry = index.insert(page, i, PageState.PENDING if kind == "pending" else PageState.VERIFIED, retention)
            if kind != "pending":
                index.lease(entry)
                index.release(entry)
            if kind == "in use":
                index.find(page.key)
    start = min(start, len(kinds))
    for stop in range(start, len(kinds) + 1):
        visible = [kind not in ("absent", "pending") for kind in kinds[start:stop]]
        pinned = index.pin_run(pages, start, stop)
        assert [e.page for e in pinned] == pages[start : start + [*visible, False].index(False)]
        assert all(e.leases == 1 and e is index.get(e.key) for e in pinned)
        assert all(e.retention == index.retention(e.key) for e in pinned)
        for entry in pinned:
            index.release(entry)
        assert not any(entry.leases for entry in index)
    absent = [kind == "absent" for kind in kinds[start:]]
    assert index.absent_until(pages, start) == start + [*absent, False].index(False)


@pytest.mark.parametrize("policy", MODELS)
def test_an_index_is_its_model(policy: type[EvictionPolicy]) -> None:
    machine = type("Machine", (IndexMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(deadline=None))


# -- pages that follow themselves --------------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("put"), st.lists(st.tuples(st.integers(0, 7), st.integers(-1, 7)), min_size=1, max_size=5)
            ),
            st.tuples(st.just("drop"), st.integers(0, 7)),
            st.tuples(st.just("evict"), st.integers(1, 4)),
            st.tuples(st.just("touch"), st.lists(st.integers(0, 7), max_size=4)),
        ),
        max_size=30,
    )
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.timeout(60)
def test_pages_in_a_circle_are_pages_like_others(policy: str, steps: list[tuple[str, Any]]) -> None:
    """Digests of a caller's may follow each other in any way: every call ends, and eviction finds them all."""
    index = PageIndex(8, POLICIES[policy]())
    keys = [bytes([n]) * 32 for n in range(8)]
    for what, arguments in steps:
        if what == "put":
            pages = {n: Page(keys[n], NAMESPACE if p < 0 else keys[p], NAMESPACE) for n, p in arguments}
            fresh = [page for page in pages.values() if page.key not in index]
            slots = index.allocate_some(len(fresh), pages=fresh)
            entries = index.insert_all(fresh, slots, PageState.PENDING, [DEFAULT] * len(slots), leases=1)
            index.commit_all(entries)
            for entry in entries:
                index.mark_dirty(entry)
            held = [entry for page in pages.values() for entry in index.pin_run([page], 0, 1)]  # as the caller says
            assert len(index.coldest_dirty(8)) <= 8
            assert index.family(pages.values()) <= {*keys, NAMESPACE}
            index.release_all(held)
            index.release_all(entries)
        elif what == "drop":
            if (found := index.find(keys[arguments])) is not None:
                index.drop(found)
        elif what == "evict":
            for found in list(index):
                index.mark_clean(found)
            index.evict(arguments)
        else:
            index.touch([keys[n] for n in arguments])
        assert index.check() == []
        for page in index:
            assert walk(index, page.key) <= 8
    for found in list(index):
        index.mark_clean(found)
    assert index.evict(8) == 8 - index.free_slots or len(index) == 0
    assert len(index) == 0


def walk(index: PageIndex, key: bytes) -> int:
    """Pages from one up to the first that is not there."""
    steps = 0
    while key in index and steps < 100:
        key = index._parent(key)
        steps += 1
    return steps


def test_what_becomes_visible_is_told_and_not_before() -> None:
    index, told, (first, second) = PageIndex(4), list[tuple[str, list[Any]]](), chain(1, 2)
    index.on_change = lambda what, some: told.append((what, list(some)))
    slots = index.allocate(2)
    assert slots is not None
    written, dropped = (index.insert(page, at, PENDING) for page, at in zip((first, second), slots, strict=True))
    assert told == []
    assert index.commit(written)
    assert told == [("stored", [first])]
    index.drop(dropped)
    assert not index.commit(dropped)
    assert told == [("stored", [first])], "a page that never came was stored or removed"
    index.drop(written)
    assert told[1:] == [("removed", [first.key])]
    put(index, [second])
    assert told[2:] == [("stored", [second])], "it came as a whole"


def test_slots_of_forgotten_pages_are_free_where_nobody_else_wants_them() -> None:
    forgotten: list[int] = []
    index = PageIndex(4, forget=forgotten.extend)
    restore(index, chain(1, 3))
    index.retire(index.detach().slots)
    assert (sorted(forgotten), index.free_slots) == ([0, 1, 2], 4)


def test_what_is_passed_over_and_leased_then_stays_when_its_last_tail_goes() -> None:
    index = PageIndex(6, Lifetime())
    cold, warm = chain(1, 2), chain(2, 3)
    put(index, cold)
    put(index, warm)
    index.touch([page.key for page in (cold[0], *warm[::-1], cold[1])])
    index.evict(1)
    assert any(order.is_deferred(cold[0].key) for order in index.orders.deferring())
    entry = index.get(cold[0].key)
    assert entry is not None
    index.lease(entry)
    assert index.evict(4) == 3
    assert (kept(index, cold), kept(index, warm)) == ([0], [])
    index.release(entry)
    assert index.evict(4) == 1


def pair(slots: int, coming: Sequence[bytes] = ()) -> tuple[PageIndex, PageIndex]:
    """The indexes of two tiers in which a prefix may lie."""
    both = PageIndex(slots), PageIndex(slots)
    for one, other in (both, both[::-1]):
        one.others, one.coming = [other], lambda: coming
    return both


@pytest.mark.parametrize("after", [2, 4])
def test_a_page_evicts_no_ancestor_behind_pages_of_another_tier(after: int) -> None:
    """Which is the coldest of its tier, and has no child there."""
    pages, (packed, plain) = chain(1, 5), pair(4)
    put(plain, [pages[0], *chain(2, 3)])
    put(packed, pages[1:after])
    for _ in range(3):
        assert plain.allocate_some(1, pages=pages[after : after + 1])
        assert pages[0].key in plain
    assert plain.allocate_some(1, pages=pages[after : after + 1]) == [], "nothing but the ancestor is left"
    assert plain.evict(1) == 1


def test_pages_behind_an_orphan_evict_none() -> None:
    """Neither in one tier nor in two, however many of them have found free slots; when its parent comes, they do."""
    for index, other in ((PageIndex(6), None), pair(6)):
        pages, reached = chain(1, 6), chain(2, 3)
        put(index, reached)
        put(index, pages[1:3])  # their head never came
        if other is not None:
            put(other, pages[3:4])
        index.take_free(index.free_slots)
        rest = pages[4:] if other is not None else pages[3:5]
        index.make_room(rest, 0)
        assert (index.free_slots, index.evictions) == (0, 0)
        assert index.evict(1) == 1
        put(index, pages[:1])
        index.make_room(rest, 0)
        assert index.free_slots == len(rest)


def test_a_prefix_that_is_on_its_way_is_whole() -> None:
    pages = chain(1, 3)
    for coming, room in (([pages[0].key], 1), ([], 0)):
        index, other = pair(4, coming)
        put(index, chain(2, 4))
        put(other, pages[1:2])
        index.make_room(pages[2:], 0)
        assert index.free_slots == room


def test_pages_that_follow_each_other_over_two_tiers_are_no_prefix() -> None:
    a, b, c = name("a"), name("b"), name("c")
    index, other = pair(2)
    put(index, [Page(a, b, NAMESPACE), *chain(1, 1)])
    put(other, [Page(b, a, NAMESPACE)])
    index.make_room([Page(c, a, NAMESPACE)], 0)
    assert index.free_slots == 0
    assert index.family([Page(c, a, NAMESPACE)]) == {a, b, c}


def test_a_prefix_may_begin_in_another_namespace() -> None:
    """As where groups of layers share a pool, and a window's page comes before the first full one."""
    window, pages, index = b"w" * 32, chain(1, 2), PageIndex(6)
    head = Page(name("head"), window, window)
    put(index, [head, Page(pages[0].key, head.key, NAMESPACE)])
    put(index, [*chain(2, 3), *chain(3, 2)[1:]])  # the last one's parent never came
    assert index.free_slots == 0
    index.make_room(pages[1:], 0)
    assert index.free_slots == 1
