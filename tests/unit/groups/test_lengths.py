"""The lengths of a hit in all groups, against every length tried, and how much is asked for to find them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.groups.base import Group, alignment, complete, kept, lengths, needed

MANY = settings(max_examples=max(100, settings().max_examples))
SIZES = (1, 2, 3, 4, 6, 8)
MOST = 60


def all_of(page_tokens: int) -> Group:
    return Group("all", (0,), page_tokens)


def window_of(page_tokens: int, span: int) -> Group:
    return Group("window", (0,), page_tokens, "window", span)


def chunk_of(page_tokens: int, span: int) -> Group:
    return Group("chunk", (0,), page_tokens, "chunk", span)


def state_of(page_tokens: int) -> Group:
    return Group("state", (0,), page_tokens, "state")


any_group = st.one_of(
    st.builds(state_of, st.sampled_from(SIZES)),
    st.builds(all_of, st.sampled_from(SIZES)),
    st.builds(window_of, st.sampled_from(SIZES), st.integers(1, 20)),
    st.builds(chunk_of, st.sampled_from(SIZES), st.integers(1, 24)),
)


class Cached:
    """Which pages of each group are there. Notes what is asked for."""

    def __init__(self, groups: Sequence[Group], absent: Sequence[set[int]]) -> None:
        self.groups, self.absent = groups, absent
        self.asked: list[tuple[int, int]] = []

    def __call__(self, group: int, first: int, stop: int) -> bytes:
        assert 0 <= first < stop
        self.asked += [(group, number) for number in range(first, stop)]
        return bytes(number not in self.absent[group] for number in range(first, stop))

    def serves(self, length: int, local: int) -> bool:
        """Whether token `length` finds all that it attends to: token by token."""
        return all(
            token // group.page_tokens not in absent or token // group.page_tokens < local // group.page_tokens
            for group, absent in zip(self.groups, self.absent, strict=True)
            for token in range(length)
            if attends(group, length, token)
        )


def attends(group: Group, token: int, other: int) -> bool:
    """Whether a token attends to an earlier one; to a state, whether it is of the last page before the token."""
    if group.keeps == "window":
        return token - other < group.span
    if group.keeps == "state":
        return other // group.page_tokens == (token - 1) // group.page_tokens
    return group.keeps == "all" or token // group.span == other // group.span


@dataclasses.dataclass
class Case:
    cached: Cached
    most: int
    align: int
    local: int

    def served(self) -> list[int]:
        """The lengths, the longest first."""
        lengths = range(self.most // self.align * self.align, self.local, -self.align)
        return [length for length in lengths if self.cached.serves(length, self.local)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.lists(any_group, min_size=1, max_size=4))
    dense = draw(st.booleans())  # few pages are absent, so that there are hits
    absent = [
        draw(st.sets(st.integers(0, MOST // group.page_tokens), max_size=3 if dense else None)) for group in groups
    ]
    align = alignment(groups)
    return Case(
        Cached(groups, absent),
        draw(st.integers(0, MOST)),
        align * draw(st.sampled_from((1, 1, 2))),
        align * draw(st.integers(0, 3)),
    )


@MANY
@given(cases())
def test_the_lengths_are_those_at_which_a_token_finds_all_that_it_attends_to(case: Case) -> None:
    cached = case.cached
    found = list(lengths(cached.groups, cached, case.most, align=case.align, local=case.local))
    assert found == case.served()
    assert max(Counter(cached.asked).values(), default=1) == 1, "each page is asked for once"


@MANY
@given(cases())
def test_the_longest_is_found_without_pages_that_cannot_matter(case: Case) -> None:
    """None behind the longest length that groups which keep all allow, and none that no length in question needs."""
    cached, local = case.cached, case.local
    whole = complete(cached.groups, cached, case.most, local=local)
    asked, cached.asked = cached.asked, []
    for group, number in asked:
        size = cached.groups[group].page_tokens
        assert cached.groups[group].keeps == "all"
        assert local // size <= number < case.most // size
    longest = next(lengths(cached.groups, cached, case.most, align=case.align, local=local, whole=whole), None)
    assert longest == next(iter(case.served()), None)
    begin = min(case.most, whole) // case.align * case.align
    for group, number in cached.asked:
        assert cached.groups[group].keeps != "all", "they were asked before"
        assert number < begin // cached.groups[group].page_tokens


@pytest.mark.parametrize(
    "group", [window_of(4, 9), window_of(4, 4097), chunk_of(4, 64)], ids=["window", "wide window", "chunk"]
)
@pytest.mark.parametrize("tokens", [4096, 40960])
def test_how_many_pages_are_asked_for_at_most(group: Group, tokens: int) -> None:
    """Of a window those that the hit needs, where its first try is one; else some hundred more than it has to."""
    groups = [all_of(4), group]
    for there in (0, 4, 1024, tokens):
        cached = Cached(groups, [{there // 4}, set()])
        found = next(lengths(groups, cached, tokens), 0)
        assert found == there
        count = Counter(number for number, _ in cached.asked)
        assert count[0] <= there // 4 + 256
        assert count[1] <= max(256, found // 4 - group.first(found))
    late = Cached(groups, [set(), set(range(600, tokens // 4))])  # a window, and then none for long
    found = next(lengths(groups, late, tokens - 4), 0)
    count = Counter(number for number, _ in late.asked)
    assert count[1] <= (tokens - found) // 4 + group.span // 4 + 256


@given(cases())
def test_complete_is_where_the_first_page_lacks(case: Case) -> None:
    cached, local = case.cached, case.local
    full = [(group, some) for group, some in zip(cached.groups, cached.absent, strict=True) if group.keeps == "all"]
    ends = [
        page * group.page_tokens
        for group, absent in full
        for page in absent
        if local // group.page_tokens <= page < case.most // group.page_tokens
    ]
    found, least = complete(cached.groups, cached, case.most, local=local), min([case.most, *ends])
    assert least <= found < least + max(group.page_tokens for group in cached.groups)
    assert found // case.align == least // case.align


@given(st.lists(any_group, min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 3))
def test_what_a_hit_needs_are_the_pages_of_the_tokens_that_it_attends_to(
    groups: list[Group], times: int, behind: int
) -> None:
    length, local = times * alignment(groups), min(times, behind) * alignment(groups)
    for group, numbers in zip(groups, needed(groups, length, local), strict=True):
        size = group.page_tokens
        attended = {token // size for token in range(length) if attends(group, length, token)}
        assert set(numbers) == {number for number in attended if number >= local // size}


@given(any_group, st.sets(st.integers(1, 8), max_size=4), st.integers(0, 20), st.integers(0, 20))
def test_what_is_kept_is_what_hits_of_those_lengths_need(group: Group, ends: set[int], first: int, stop: int) -> None:
    """Of a group that keeps all: every page."""
    ends = {end * group.page_tokens for end in ends}
    wanted = set(itertools.chain.from_iterable(needed([group], end)[0] for end in ends))
    found = kept(group, ends, first, stop)
    assert found == sorted(n for n in range(first, stop) if group.keeps == "all" or n in wanted)


def test_a_window_of_one_token_needs_nothing() -> None:
    """The token itself is computed."""
    groups = [window_of(4, 1)]
    assert next(lengths(groups, Cached(groups, [set(range(9))]), 30)) == 28
    assert needed(groups, 28) == [range(7, 7)]
