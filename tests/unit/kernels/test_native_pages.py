"""Gather and scatter of the native library against numpy's, and its checksums against `xxhash`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.arrays import address, integers
from gdscache.errors import NativeCallError
from gdscache.moves.library import NativePlanes
from gdscache.native import layer_sums
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support import reference_pages as reference
from tests.support.hooks import hooks

DTYPES = ("uint8", "float16", "float32")


@st.composite
def pools(draw: st.DrawFn) -> tuple[PagedPlanes, np.random.Generator]:
    """Planes with any widths and strides, filled at random."""
    block_tokens = draw(st.sampled_from([1, 2, 3, 16]))
    page_blocks = draw(st.integers(1, 5))
    blocks = page_blocks * draw(st.integers(1, 4)) + draw(st.integers(0, 2))
    widths = st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 512, 1200, 5000]))
    layers = draw(
        st.lists(st.lists(st.tuples(widths, st.sampled_from(DTYPES)), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    planes = tuple(tuple(Plane(f"p{n}", (w,), d) for n, (w, d) in enumerate(layer)) for layer in layers)
    layout = PageLayout(planes, block_tokens * page_blocks)
    tensors = []
    for layer in planes:
        row = []
        for plane in layer:
            width, extra = plane.shape[0], draw(st.sampled_from([0, 0, 1, 7]))
            swapped = draw(st.booleans())
            shape = (block_tokens, blocks) if swapped else (blocks, block_tokens)
            size = (*shape, width + extra)
            items = int(np.prod(size)) * plane.row_bytes // width
            whole = torch.from_numpy(rng.integers(0, 255, items, np.uint8)).view(getattr(torch, plane.dtype)).view(size)
            tensor = whole[..., extra:]
            row.append(tensor.transpose(0, 1) if swapped else tensor)
        tensors.append(row)
    return PagedPlanes(layout, tensors), rng


def raw(planes: PagedPlanes) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for layer in planes.tensors for t in layer]


@settings(max_examples=60)
@given(pools(), st.data(), st.booleans())
def test_moves_like_the_reference(
    made: tuple[PagedPlanes, np.random.Generator], data: st.DataObject, streamed: bool
) -> None:
    planes, rng = made
    layout, pages = planes.layout, planes.blocks // planes.blocks_per_page
    first = data.draw(st.integers(0, layout.n_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, layout.n_layers)))
    start, stop = layout.layer_bounds[first][0], layout.layer_bounds[layers.stop - 1][1]
    order = rng.permutation(planes.blocks) if data.draw(st.booleans()) else np.arange(planes.blocks)
    blocks = order[: pages * planes.blocks_per_page].reshape(pages, -1)
    shift = data.draw(st.sampled_from([0, 0, 1, 33]))
    memory = np.full((pages, layout.extent_bytes + 64), 0xA5, np.uint8)
    extents = memory[:, shift : shift + layout.extent_bytes]
    expected = np.full((pages, layout.extent_bytes), 0xA5, np.uint8)
    rows = torch.arange(pages)
    reference.gather(planes, torch.from_numpy(blocks), torch.from_numpy(expected), rows, layers)

    pool = NativePlanes(planes)
    parts = np.array([address(memory) + n * memory.shape[1] + shift + start for n in range(pages)], np.uint64)
    sums = hooks.gather(pool, blocks, parts, layers, streamed)
    assert np.array_equal(extents, expected)
    bounds = layout.layer_bounds[first : layers.stop]
    wanted = [layer_checksums(memoryview(row), bounds) for row in expected]
    assert np.array_equal(sums, wanted)

    fresh = rng.integers(0, 255, (pages, stop - start), np.uint8)
    extents[:, start:stop] = expected[:, start:stop] = fresh
    before = [[t.clone() for t in layer] for layer in planes.tensors]
    sums = hooks.scatter(pool, blocks, parts, layers, streamed)
    assert np.array_equal(sums, [layer_checksums(memoryview(row), bounds) for row in expected])
    ours = raw(planes)
    for mine, old in zip(planes.tensors, before, strict=True):
        for tensor, saved in zip(mine, old, strict=True):
            tensor.copy_(saved)
    reference.scatter(planes, torch.from_numpy(blocks), torch.from_numpy(expected), rows, layers)
    assert ours == raw(planes)
    assert (memory[:, :shift] == 0xA5).all()
    pool.close()


def small() -> PagedPlanes:
    layout = PageLayout.uniform([Plane("k", (8,), "float16"), Plane("v", (4,), "float16")], 3, 4)
    return PagedPlanes.allocate(layout, 5, torch.device("cpu"))


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ((0, 1, 1), "number of blocks"), ((5, 0, 1), "tokens a block"), ((5, 4, -1), "blocks a page"),
        ((1 << 60, 4, 1), "number of blocks"), ((1 << 46, 4, 1), "address space"),
    ],
)  # fmt: skip
def test_pools_that_make_no_sense_are_refused(
    numbers: tuple[int, int, int], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = small()
    monkeypatch.setattr(planes, "blocks", numbers[0])
    monkeypatch.setattr(planes, "block_tokens", numbers[1])
    monkeypatch.setattr(PagedPlanes, "blocks_per_page", property(lambda self: numbers[2]))
    monkeypatch.setattr(planes, "tensors", [[Strided(t) for t in layer] for layer in planes.tensors])
    with pytest.raises(NativeCallError, match=cause):
        NativePlanes(planes)


class Strided:
    """A tensor that says that its blocks are far apart."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def stride(self) -> tuple[int, ...]:
        return (1 << 40, *self.tensor.stride()[1:])


def test_a_sum_of_any_length_at_any_alignment_is_xxhash_s() -> None:
    """csrc/host/tests/test_xxh3.cc compares all arms, and chunks of a stream, with each other."""
    data, rng = np.frombuffer(random.Random(7).randbytes(1 << 20), np.uint8).copy(), random.Random(3)
    sizes = [*range(4097), *(rng.randrange(4097, len(data) - 64) for _ in range(60))]
    sizes += [n * 1024 + d for n in (5, 9) for d in (-1, 0, 1)]
    spans = [(size % 61, size % 61 + size) for size in sizes]
    found = layer_sums(np.array([address(data)], np.uint64), integers(spans))
    assert found.tolist() == [layer_checksums(memoryview(data), spans).tolist()]


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 1 << 30))
def test_layer_sums_are_those_of_xxhash(sizes: list[int], pages: int, seed: int) -> None:
    """Of layers of any size, with padding between them, in extents that lie anywhere."""
    ends = np.cumsum([size + 3 for size in sizes]).tolist()
    bounds = [(end - 3 - size, end - 3) for end, size in zip(ends, sizes, strict=True)]
    extents = np.random.default_rng(seed).integers(0, 256, (pages, ends[-1]), np.uint8)
    found = layer_sums(np.array([address(extents) + n * ends[-1] for n in range(pages)], np.uint64), integers(bounds))
    assert found.shape == (pages, len(sizes))
    for page, sums in zip(extents, found, strict=True):
        assert sums.tolist() == layer_checksums(memoryview(page), bounds).tolist()


@pytest.mark.parametrize(("extents", "bounds"), [([0], [(0, 4)]), ([1 << 20], [(8, 4)]), ([1 << 20], [(-4, 4)])])
def test_layer_sums_of_nowhere_are_refused(extents: list[int], bounds: list[tuple[int, int]]) -> None:
    with pytest.raises(NativeCallError):
        layer_sums(np.array(extents, np.uint64), integers(bounds))
