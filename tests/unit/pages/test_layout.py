"""Where the bytes of a page lie: no overlap, no gap, everything aligned as the format says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.errors import GeometryError
from gdscache.pages.layout import (
    DTYPE_BYTES,
    EXTENT_ALIGNMENT,
    GROUP_BYTES,
    MAX_PAGE_TOKENS,
    PageLayout,
    Plane,
    copy_groups,
)
from tests.support.layouts import layouts


@given(layouts())
def test_pieces_cover_the_page_in_order_without_gap_or_overlap(layout: PageLayout) -> None:
    at = 0
    for layer, (planes, pieces) in enumerate(zip(layout.layers, layout.pieces, strict=True)):
        assert layout.layer_bounds[layer][0] == at
        for index, (plane, piece) in enumerate(zip(planes, pieces, strict=True)):
            assert (piece.layer, piece.plane, piece.offset) == (layer, index, at)
            elements = 1
            for n in plane.shape:
                elements *= n
            assert piece.nbytes == elements * DTYPE_BYTES[plane.dtype] * layout.page_tokens
            at += piece.nbytes
        assert layout.layer_bounds[layer][1] == at
    assert layout.page_bytes == at == layout.token_bytes * layout.page_tokens
    assert layout.extent_bytes % EXTENT_ALIGNMENT == 0
    assert 0 <= layout.extent_bytes - layout.page_bytes < EXTENT_ALIGNMENT


deep = st.builds(
    lambda layers, width: PageLayout.uniform([Plane("kv", (width,), "bfloat16")], layers, 64),
    st.integers(1, 90),
    st.sampled_from((1, 512, 2048, 4096)),
)


@given(layouts() | deep, st.integers(1, 3000), st.integers(1, 1 << 30))
def test_copy_groups_begin_small_and_double(layout: PageLayout, pages: int, largest: int) -> None:
    groups, bounds = copy_groups(layout, pages, largest), layout.layer_bounds
    assert [layer for group in groups for layer in group] == list(range(layout.n_layers))
    sizes = [bounds[group[-1]][1] - bounds[group[0]][0] for group in groups]
    layer = max(end - start for start, end in bounds)
    assert sizes[0] < GROUP_BYTES + layer or len(groups) == 1
    for before, size in itertools.pairwise(sizes[:-1]):
        assert GROUP_BYTES <= size < max(2 * before, GROUP_BYTES) + layer
    assert all(size < max(GROUP_BYTES, largest / pages) + layer for size in sizes[:-1])
    assert len(groups) == 1 or GROUP_BYTES <= sizes[-1] < max(GROUP_BYTES, largest / pages) + GROUP_BYTES + layer


@given(st.integers(1, MAX_PAGE_TOKENS), st.integers(0, 5000))
def test_touched_pages(page_tokens: int, tokens: int) -> None:
    layout = PageLayout.uniform([Plane("k", (1,), "int8")], 1, page_tokens)
    assert layout.pages_for(tokens) == len(range(0, tokens, page_tokens))


def test_dtype_bytes_are_those_of_torch() -> None:
    import torch

    for name, nbytes in DTYPE_BYTES.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == nbytes


@pytest.mark.parametrize("page_tokens", [0, -1, MAX_PAGE_TOKENS + 1])
def test_page_tokens_out_of_range(page_tokens: int) -> None:
    with pytest.raises(GeometryError, match=f"page_tokens is {page_tokens}") as caught:
        PageLayout.uniform([Plane("k", (1,), "int8")], 1, page_tokens)
    assert str(MAX_PAGE_TOKENS) in caught.value.hint


@pytest.mark.parametrize("shape", [(), (0,), (3, -1)])
def test_a_plane_without_elements(shape: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="no elements"):
        Plane("k", shape, "int8")


def test_a_plane_of_unknown_type() -> None:
    with pytest.raises(GeometryError, match="float7") as caught:
        Plane("k", (1,), "float7")
    assert "bfloat16" in caught.value.hint


def test_a_layout_without_layers_or_planes_or_with_a_name_twice() -> None:
    plane = Plane("k", (1,), "int8")
    for layers in ((), ((),), ((plane,), ()), ((plane, plane),)):
        with pytest.raises(GeometryError):
            PageLayout(layers, 4)
    assert PageLayout(((plane,), (plane,)), 4).n_layers == 2
