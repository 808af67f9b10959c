"""Packed extents of the library against the oracle that goes value by value (tests/support/packed_pages.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.arrays import integers
from gdscache.errors import GeometryError, NativeCallError
from gdscache.moves.native import NativePlanes
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support import packed_pages as oracle
from tests.support.hooks import hooks
from tests.support.native_parts import address
from tests.support.packed_pages import KINDS, bits, drawn


def planes_of(widths: tuple[int, ...], block_tokens: int, page_blocks: int, blocks: int) -> PagedPlanes:
    planes = [Plane(f"p{n}", (width,), "bfloat16") for n, width in enumerate(widths)]
    layout = PageLayout((tuple(planes), tuple(planes)), block_tokens * page_blocks, packed=True)
    return PagedPlanes(
        layout,
        [[torch.zeros((blocks, block_tokens, width), dtype=torch.bfloat16) for width in widths] for _ in range(2)],
    )


@settings(max_examples=3 * settings.default.max_examples)
@given(
    st.lists(st.sampled_from([1, 8, 30, 128, 576]), min_size=1, max_size=2),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 4),
    st.sampled_from(KINDS),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_a_page_comes_back_bit_for_bit_and_lies_as_the_oracle_has_it(
    widths: list[int], block_tokens: int, page_blocks: int, kind: str, seed: int, streamed: bool
) -> None:
    rng = np.random.default_rng(seed)
    planes = planes_of(tuple(widths), block_tokens, page_blocks, page_blocks + 2)
    layout = planes.layout
    blocks = rng.permutation(planes.blocks)[:page_blocks].reshape(1, -1)
    for tensor in (tensor for layer in planes.tensors for tensor in layer):
        bits(tensor)[:] = drawn(kind, tensor.numel(), rng).reshape(tensor.shape)
    values = [[bits(tensor)[blocks[0]].reshape(-1) for tensor in layer] for layer in planes.tensors]
    fits = all(oracle.pack(part, oracle.best_base(part)) is not None for layer in values for part in layer)

    pool, extent = NativePlanes(planes), np.full((1, layout.extent_bytes), 0xA5, np.uint8)
    parts = np.array([address(extent)], np.uint64)
    if not fits:
        with pytest.raises(NativeCallError, match="does not fit"):
            hooks.gather(pool, blocks, parts, range(2), streamed)
        return
    sums = hooks.gather(pool, blocks, parts, range(2), streamed)
    assert np.array_equal(sums, [layer_checksums(memoryview(extent[0]), layout.layer_bounds)])
    assert (extent[0, layout.page_bytes :] == 0xA5).all()
    for pieces, layer in zip(layout.pieces, values, strict=True):
        for piece, part in zip(pieces, layer, strict=True):
            lies = extent[0, piece.offset : piece.offset + piece.nbytes]
            base = int(lies[-4 * oracle.list_words(len(part))])
            assert np.array_equal(lies, oracle.pack(part, base))
            assert np.array_equal(oracle.unpack(lies, len(part)), part)
    before = [[tensor.clone() for tensor in layer] for layer in planes.tensors]
    for tensor in (tensor for layer in planes.tensors for tensor in layer):
        bits(tensor)[blocks[0]] = 0x5A5A
    assert np.array_equal(hooks.scatter(pool, blocks, parts, range(2), streamed), sums)
    assert all(
        np.array_equal(bits(ours), bits(wanted))
        for mine, saved in zip(planes.tensors, before, strict=True)
        for ours, wanted in zip(mine, saved, strict=True)
    )


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(1, 3000), st.integers(0, 1 << 30), st.sampled_from(["any", "list", "places"]))
def test_any_bytes_give_what_the_oracle_makes_of_them(width: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    planes = planes_of((width,), 1, 1, 3)
    layout = planes.layout
    extent = rng.integers(0, 256, (1, layout.extent_bytes), np.uint8)
    words = extent[0, : layout.pieces[0][0].nbytes][-128:].view(np.uint32)
    if kind == "list":
        words[:] = 0xFFFFFFFF
    elif kind == "places":
        words[0] = 200 | len(words) << 8  # one more than the list has
        words[1:] = rng.integers(max(0, width - 5), width + 5, len(words) - 1) << 8 | 7
    pool = NativePlanes(planes)
    sums = hooks.scatter(pool, integers([[1]]), np.array([address(extent)], np.uint64), range(2))
    assert np.array_equal(sums, [layer_checksums(memoryview(extent[0]), layout.layer_bounds)])
    for piece, layer in zip(layout.pieces, planes.tensors, strict=True):
        found = bits(layer[0]).reshape(3, width)
        lies = extent[0, piece[0].offset : piece[0].offset + piece[0].nbytes]
        assert np.array_equal(found[1], oracle.unpack(lies, width))
        assert not found[[0, 2]].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_other_types_are_refused_with_the_reason(dtype: str) -> None:
    with pytest.raises(GeometryError, match=f"plane 'k' \\({dtype}\\) cannot be packed") as refused:
        PageLayout.uniform([Plane("k", (8, 128), dtype)], 2, 64).packed_as(packed=True)
    assert "bfloat16" in refused.value.hint


def test_planes_with_more_values_than_a_list_can_number_are_refused() -> None:
    PageLayout.uniform([Plane("k", (2048,), "bfloat16")], 1, 8192).packed_as(packed=True)
    with pytest.raises(GeometryError, match="cannot be packed"):
        PageLayout.uniform([Plane("k", (2049,), "bfloat16")], 1, 8192).packed_as(packed=True)


def test_a_page_of_llama_takes_three_quarters() -> None:
    planes = [Plane(name, (8, 128), "bfloat16") for name in ("k", "v")]
    plain = PageLayout.uniform(planes, 32, 64)
    packed = plain.packed_as(packed=True)
    assert packed.pieces[0][1].nbytes == 65536 + 32768 + 1024
    assert plain.extent_bytes / packed.extent_bytes >= 1.31
    assert all(start % 128 == 0 for start, _ in packed.layer_bounds)
