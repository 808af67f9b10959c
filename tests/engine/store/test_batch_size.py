"""Batches of writes are as large as the tier writes in a moment, between bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.store.outlets import BatchSize, batch_pages
from gdscache.store.plan import round_pages

MIB = 1 << 20


@pytest.mark.parametrize(
    ("extent", "first", "most"),
    [
        (4096, 32_768, 32_768), (MIB // 4, 512, 512), (MIB, 128, 512), (8 * MIB, 16, 64), (32 * MIB, 8, 16),
        (64 * MIB, 8, 8),
    ],
)  # fmt: skip
def test_it_begins_with_128_mib_and_has_bounds(extent: int, first: int, most: int) -> None:
    size = BatchSize.of(extent)
    assert size.pages == first
    for _ in range(10):
        size.learn(size.pages, 0.1)
    assert size.pages == most == batch_pages(extent)
    for _ in range(20):
        size.learn(size.pages, 5.0)
    assert size.pages == 8


def test_a_batch_that_was_not_full_says_nothing_of_larger_ones() -> None:
    size = BatchSize(8, 16, 64)
    size.learn(15, 0.01)
    size.learn(16, 1.0)
    assert size.pages == 16
    size.learn(16, 0.01)
    size.learn(16, 0.01)  # as large as batches were before
    assert size.pages == 32
    size.learn(6, 30.0)
    assert size.pages == 8


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(0, 60))))
def test_it_stays_within_its_bounds(batches: list[tuple[int, float]]) -> None:
    size = BatchSize(2, 16, 100)
    for pages, seconds in batches:
        before = size.pages
        size.learn(pages, seconds)
        assert 2 <= size.pages <= 100
        assert size.pages <= 2 * before
        assert seconds <= 2.0 or size.pages <= max(2, before, pages // 2)


def test_rounds_of_a_store_grow_to_a_batch_where_a_writer_waits() -> None:
    rounds = round_pages(8 * MIB, waiting=True)
    assert [next(rounds) for _ in range(6)] == [4, 8, 16, 32, 64, 64]
    rounds = round_pages(8 * MIB, waiting=False)
    assert [next(rounds) for _ in range(2)] == [64, 64]
