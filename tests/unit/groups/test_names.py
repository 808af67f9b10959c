"""The names of pages in all groups, and what each follows: who is left when eviction takes page by page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.groups.base import Group, alignment, kept, lengths
from gdscache.groups.names import Chain, GroupNames, GroupPage
from gdscache.index.index import PageIndex
from gdscache.index.table import PageState
from tests.support.index_machine import name

MANY = settings(max_examples=3 * settings.default.max_examples)


def group(page_tokens: int, window: int = 0) -> Group:
    return Group("group", (0,), page_tokens, "window" if window else "all", window)


def spaces(groups: Sequence[Group], salt: str = "") -> list[bytes]:
    return [name("namespace", number, salt) for number in range(len(groups))]


def names_of(groups: Sequence[Group], tokens: int, path: object = "a", digest_tokens: int = 1) -> GroupNames:
    names = GroupNames(groups, spaces(groups), digest_tokens)
    names.extend([name(path, end) for end in range(digest_tokens, tokens + 1, digest_tokens)])
    return names


def test_a_key_is_of_a_digest_and_a_namespace() -> None:
    """Whatever the group's number, the request, and when the name was asked for."""
    groups = [group(2), group(4, 8), group(4)]
    early, late = names_of(groups, 8), names_of(groups, 24)
    asked = [early.keys(g, 0, 8 // some.page_tokens) for g, some in enumerate(groups)]
    early.extend([name("a", end) for end in range(9, 25)])
    assert (early.tokens, early.digests) == (24, 24)
    for g, some in enumerate(groups):
        keys = late.keys(g, 0, 24 // some.page_tokens)
        assert early.keys(g, 0, len(keys)) == keys
        assert keys[: len(asked[g])] == asked[g]
    other = GroupNames([group(4)], [spaces(groups)[1]], 1)
    other.extend([name("a", end) for end in range(1, 25)])
    assert other.keys(0, 0, 6) == late.keys(1, 0, 6)


@given(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=4), st.integers(1, 2))
def test_groups_never_share_a_key(sizes: list[int], digest_tokens: int) -> None:
    groups = [group(size) for size in sizes]
    names = names_of(groups, 24, digest_tokens=digest_tokens)
    keys = [key for g, some in enumerate(groups) for key in names.keys(g, 0, 24 // some.page_tokens)]
    assert len(set(keys)) == len(keys)


@given(st.sampled_from([(2,), (2, 4), (4, 2), (4, 6), (2, 2)]), st.integers(0, 24), st.data())
def test_what_is_asked_of_tiers_are_these_keys(sizes: tuple[int, ...], tokens: int, data: st.DataObject) -> None:
    names = names_of([group(size) for size in sizes], tokens)
    keys = [key for g, size in enumerate(sizes) for key in names.keys(g, 0, tokens // size)]
    there = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
    has = names.presence(lambda some: bytes(key in there for key in some))
    for g, size in enumerate(sizes):
        assert has(g, 0, tokens // size) == bytes(key in there for key in names.keys(g, 0, tokens // size))


# -- what a page follows -----------------------------------------------------------------------------------------------

GROUPS = {
    "equal pages": [group(4), group(4, 9)],
    "windows of larger pages": [group(2), group(4, 9), group(4, 5)],
    "windows of smaller pages": [group(4, 9), group(8), group(8, 17)],
    "pages that do not divide each other": [group(4), group(6, 13)],
    "two that keep all": [group(4), group(8), group(4, 9)],
    "windows alone": [group(4, 9), group(4, 30)],
}
by_name = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


def wanted(groups: Sequence[Group], ends: Sequence[int], before: int, after: int) -> list[list[int]]:
    """What a step stores that computes tokens `before ... after-1`: all pages, and those that hits of `ends` need."""
    return [kept(some, ends, before // some.page_tokens, after // some.page_tokens) for some in groups]


def end_of(groups: Sequence[Group], one: GroupPage) -> int:
    return (one.number + 1) * groups[one.group].page_tokens


@by_name
def test_pages_come_in_the_order_of_their_ends_and_windows_first(groups: list[Group]) -> None:
    names = names_of(groups, 48)
    (chain,) = names.chain([range(48 // some.page_tokens) for some in groups])
    ends = [(end_of(groups, one), groups[one.group].keeps == "all") for one in chain]
    assert ends == sorted(ends)
    for one in chain:
        assert one.page.key == names.key(one.group, one.number)
        assert one.page.namespace == spaces(groups)[one.group]
    if any(some.keeps == "all" for some in groups):
        parents = [one.page.parent for one in chain]
        assert parents == [chain[0].page.namespace, *(one.page.key for one in [*chain][:-1])]
    else:
        assert all(one.page.parent == one.page.namespace for one in chain)


@by_name
def test_a_page_follows_pages_of_its_pool_alone(groups: list[Group]) -> None:
    """What follows a page of another pool would outlive nothing there."""
    both = [*groups, Group("state", (1,), 4, "state"), group(4)]
    pools = [tuple(range(len(groups))), (len(groups),), (len(groups) + 1,)]
    names = GroupNames(both, spaces(both), 1, pools)
    names.extend([name("a", end) for end in range(1, 49)])
    wanted = [range(48 // some.page_tokens) for some in both]
    chains = names.chain(wanted)
    alone = GroupNames(groups, spaces(both)[: len(groups)], 1)
    alone.extend([name("a", end) for end in range(1, 49)])
    assert chains[:1] == alone.chain(wanted[: len(groups)])
    assert {one.page.parent for one in chains[1]} == {spaces(both)[len(groups)]}
    last = [*chains[2]]
    assert [one.page.parent for one in last[1:]] == [one.page.key for one in last[:-1]]
    late = names.chain([[number for number in some if number >= 4] for some in wanted], [some[3] for some in chains])
    assert [*late[2]] == last[4:]


def put(index: PageIndex, chain: Chain) -> None:
    """Store what is not there."""
    new = [one.page for one in chain if one.page.key not in index]
    slots = index.allocate(len(new))
    assert slots is not None
    for page, slot in zip(new, slots, strict=True):
        index.insert(page, slot, PageState.VERIFIED)


def stored_by_steps(index: PageIndex, names: GroupNames, ends: Sequence[int], cuts: Sequence[int]) -> None:
    """A request of which each step stores what it computes, from its hit on."""
    last: GroupPage | None = None
    hit = longest(index, names)
    for before, after in itertools.pairwise([hit, *sorted({cut for cut in cuts if cut > hit})]):
        (chain,) = names.chain(wanted(names.groups, ends, before, after), [last])
        last = chain[-1] if chain else last
        put(index, chain)


def there(index: PageIndex, names: GroupNames, g: int) -> list[int]:
    return [n for n in range(names.tokens // names.groups[g].page_tokens) if names.key(g, n) in index]


def longest(index: PageIndex, names: GroupNames) -> int:
    has = names.presence(lambda keys: bytes(key in index for key in keys))
    return next(lengths(names.groups, has, names.tokens), 0)


def whole(index: PageIndex, names: GroupNames) -> int:
    """Up to which length all pages are there of the groups that keep all."""
    full = [g for g, some in enumerate(names.groups) if some.keeps == "all"]
    found = [(len(there(index, names, g)), names.groups[g].page_tokens) for g in full]
    return min((pages * size for pages, size in found), default=names.tokens)


@by_name
@MANY
@given(st.data())
def test_tails_go_before_heads_and_windows_last(groups: list[Group], data: st.DataObject) -> None:
    """However steps were cut, and whatever requests share: of the groups that keep all the last pages go first. A
    window at whose end a hit can be is whole as long as the page is there that ends with it, where all pages were new
    that the window reaches: windows at a place where requests part are tails of their own."""
    align, index = alignment(groups), PageIndex(1024)
    full = [g for g, some in enumerate(groups) if some.keeps == "all"]
    requests: list[tuple[GroupNames, list[int]]] = []
    for number in range(data.draw(st.integers(1, 3))):
        shared, own = (align * data.draw(st.integers(0, 3)) for _ in range(2))
        tokens = max(align, shared + own)
        names = GroupNames(groups, spaces(groups), 1)
        names.extend([name("shared" if end <= shared else number, end) for end in range(1, tokens + 1)])
        ends = {tokens, *(align * n for n in data.draw(st.sets(st.integers(1, tokens // align))))}
        upto = whole(index, names)
        stored_by_steps(index, names, sorted(ends), [*data.draw(st.lists(st.integers(1, tokens), max_size=4)), tokens])
        assert longest(index, names) == tokens
        new = [end for end in ends if all(some.first(end) * some.page_tokens >= upto for some in groups if some.span)]
        requests.append((names, new))
    while index.evict(1):
        for names, new in requests if full else ():
            for g in full:
                left = there(index, names, g)
                assert left == [*range(len(left))]
            upto = whole(index, names)
            assert longest(index, names) >= max((end for end in new if end <= upto), default=0)
