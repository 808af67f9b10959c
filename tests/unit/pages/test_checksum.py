"""Checksums of an extent: whatever is wrong with a page's bytes is seen; what is not the page's does not matter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.errors import InvalidValueError, NativeCallError
from gdscache.limits import KEY_BYTES
from gdscache.native import take_unbound
from gdscache.pages.checksum import bound, first_bad_layer, layer_checksums, unbound
from gdscache.pages.layout import PageLayout, Plane

Bytes = npt.NDArray[np.uint8]
# 2 layers x (16 + 8) bytes x 16 tokens: 768 bytes, 384 a layer: the long form of XXH3 and two planes.
LAYOUT = PageLayout.uniform([Plane("k", (2, 4), "bfloat16"), Plane("v", (4,), "bfloat16")], 2, 16)
# Inputs of 240 bytes and less take other paths of XXH3.
SMALL = PageLayout.uniform([Plane("k", (5,), "int8")], 3, 3)
BIG = PageLayout.uniform([Plane("k", (64,), "bfloat16")], 2, 16)  # 2 KiB a layer: more than one block of 1 KiB


def extent(layout: PageLayout, seed: int = 0) -> Bytes:
    data = np.zeros(layout.extent_bytes, np.uint8)
    data[: layout.page_bytes] = np.random.default_rng(seed).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    return data


def bad(layout: PageLayout, data: Bytes, sums: npt.NDArray[np.uint64]) -> int | None:
    return first_bad_layer(data.data, layout.layer_bounds, sums)


def signed(layout: PageLayout, seed: int = 0) -> tuple[Bytes, npt.NDArray[np.uint64]]:
    data = extent(layout, seed)
    sums = layer_checksums(data.data, layout.layer_bounds)
    assert bad(layout, data, sums) is None
    return data, sums


@pytest.mark.parametrize("layout", [LAYOUT, SMALL])
def test_a_flip_of_any_bit_is_seen_in_its_layer(layout: PageLayout) -> None:
    data, sums = signed(layout)
    for layer, (start, end) in enumerate(layout.layer_bounds):
        for bit in range(start * 8, end * 8):
            data[bit // 8] ^= 1 << bit % 8
            assert bad(layout, data, sums) == layer
            data[bit // 8] ^= 1 << bit % 8
    assert bad(layout, data, sums) is None


def test_a_zero_page_is_not_mistaken_for_no_checksums() -> None:
    zeros = np.zeros(LAYOUT.extent_bytes, np.uint8)
    assert bad(LAYOUT, zeros, np.zeros(LAYOUT.n_layers, np.uint64)) == 0


def test_a_wrong_length() -> None:
    data, sums = signed(LAYOUT)
    for nbytes in (0, 1, LAYOUT.page_bytes - 1):
        assert first_bad_layer(data[:nbytes].data, LAYOUT.layer_bounds, sums) is not None
    for wrong in (sums[:1], sums[:0], np.append(sums, sums[:1])):
        assert bad(LAYOUT, data, wrong) == 0


KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@given(
    st.lists(st.tuples(st.integers(0, 6), KEYS), max_size=40),
    st.integers(0, 9).flatmap(
        lambda sums: st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=sums, max_size=sums), min_size=7, max_size=7)
    ),
)
def test_rows_of_a_table_without_what_follows_from_their_keys(
    asked: list[tuple[int, bytes]], stored: list[list[int]]
) -> None:
    """The library's way, against the formula of docs/format.md in Python's integers, and against numpy's."""
    table = np.array(stored, np.uint64)
    rows, keys = [row for row, _ in asked], [key for _, key in asked]
    factors = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63
    by_hand = []
    for row, key in asked:
        words = (int.from_bytes(key[at : at + 8], "little") for at in range(0, KEY_BYTES, 8))
        of_key = sum(word * factor for word, factor in zip(words, factors, strict=True))
        by_hand.append([(value - of_key - i * 0x9E3779B97F4A7C15) % 2**64 for i, value in enumerate(stored[row])])
    found = take_unbound(table, rows, b"".join(keys))
    assert found.shape == (len(asked), table.shape[1])
    assert found.tolist() == by_hand
    assert np.array_equal(unbound(table[rows], keys), found)
    assert np.array_equal(bound(found, keys), table[rows])


def test_rows_that_a_table_has_not_and_keys_that_are_none() -> None:
    table, key = np.zeros((2, 3), np.uint64), bytes(KEY_BYTES)
    for row in (-1, 2):
        with pytest.raises(NativeCallError, match="has not"):
            take_unbound(table, [0, row], key + key)
    for keys in ([key], [key, key[:-1]], [key, key, key]):
        with pytest.raises(InvalidValueError, match="bytes of keys"):
            take_unbound(table, [0, 1], b"".join(keys))
