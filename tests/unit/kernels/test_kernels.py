"""Gather and scatter against a loop over bytes: every layout, every word width, and not a byte beside."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdscache.pages.layout import DTYPE_BYTES, PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support import reference_pages as reference
from tests.support.helpers import (
    EXTRA,
    MHA,
    MLA,
    SENTINEL,
    expected,
    layout_of,
    new_planes,
    read_page,
    untouched,
    write_page,
)
from tests.support.kernel_launcher import ExtentArray, Indices, Launcher

ODD = PageLayout.uniform([Plane("k", (3,), "float8_e4m3fn"), Plane("v", (5, 7), "bfloat16")], 2, 3)
WIDE = PageLayout.uniform([Plane("k", (2, 8), "float16"), Plane("v", (2, 8), "float16")], 2, 4)
LAYOUTS = {"mha": layout_of(MHA), "mla": layout_of(MLA), "extra": layout_of(EXTRA), "odd": ODD, "strided": WIDE}


def extents_of(layout: PageLayout, slots: int, device: str) -> torch.Tensor:
    return torch.full((slots, layout.extent_bytes), SENTINEL, dtype=torch.uint8, device=device)


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


class Cuda:
    """The CUDA kernels with the arguments of the reference."""

    @staticmethod
    def gather(
        planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
    ) -> None:
        Cuda.move("gather", planes, blocks, extents, rows, layers)

    @staticmethod
    def scatter(
        planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
    ) -> None:
        Cuda.move("scatter", planes, blocks, extents, rows, layers)

    @staticmethod
    def move(name: str, planes: PagedPlanes, blocks: Any, extents: Any, rows: Any, layers: Any) -> None:
        kernels = Launcher(planes)
        array = ExtentArray(extents.data_ptr(), extents.stride(0), len(extents))
        indices = Indices(blocks.data_ptr(), rows.data_ptr(), len(rows), wide=True)
        which = range(min(layers), max(layers) + 1)
        getattr(kernels, name)(array, indices, which, torch.cuda.current_stream())
        assert kernels.skipped() == 0


@pytest.fixture(params=["reference", "cuda"])
def kernels(request: pytest.FixtureRequest, device: str) -> Any:
    """Each implementation that can serve the device."""
    if request.param == "cuda" and device != "cuda":
        pytest.skip("CUDA kernels move a GPU's memory only")
    return {"reference": reference, "cuda": Cuda}[request.param]


def cases() -> list[object]:
    out = []
    for name, layout in LAYOUTS.items():
        for tokens in sorted({1, layout.page_tokens}):
            orders = ["plain", "kv_first", "blocks_first"] if name == "strided" else ["plain"]
            out += [pytest.param(layout, tokens, order, id=f"{name}-{tokens}-{order}") for order in orders]
    return out


@pytest.mark.parametrize(("layout", "block_tokens", "order"), cases())
def test_gather_packs_the_named_blocks_and_writes_nothing_else(
    layout: PageLayout, block_tokens: int, order: str, device: str, kernels: ModuleType
) -> None:
    planes = new_planes(layout, 16, block_tokens, device, order)
    per_page = layout.page_tokens // block_tokens
    table = torch.tensor([9, 2, 14, 1, 0, 15, 7, 3, 4, 5, 6, 8][: 3 * per_page]).view(3, per_page)
    for i, blocks in enumerate(table.tolist()):
        write_page(planes, layout, blocks, expected(layout, page(i)))
    extents = extents_of(layout, 6, device)
    rows = [4, 0, 5]
    attached = PagedPlanes(layout, planes)
    kernels.gather(attached, table.to(device), extents, torch.tensor(rows, device=device), range(layout.n_layers))
    for i, row in enumerate(rows):
        assert np.array_equal(extents[row, : layout.page_bytes].cpu().numpy(), expected(layout, page(i)))
        assert bool((extents[row, layout.page_bytes :] == SENTINEL).all()), "the padding was written"
    assert bool((extents[[1, 2, 3]] == SENTINEL).all())


@pytest.mark.parametrize(("layout", "block_tokens", "order"), cases())
def test_scatter_unpacks_into_the_named_blocks_and_nowhere_else(
    layout: PageLayout, block_tokens: int, order: str, device: str, kernels: ModuleType
) -> None:
    planes = new_planes(layout, 16, block_tokens, device, order)
    per_page = layout.page_tokens // block_tokens
    table = torch.tensor([9, 2, 14, 1, 0, 15, 7, 3, 4, 5, 6, 8][: 3 * per_page]).view(3, per_page)
    extents = extents_of(layout, 6, device)
    rows = [4, 0, 5]
    for i, row in enumerate(rows):
        extents[row, : layout.page_bytes] = torch.from_numpy(expected(layout, page(i))).to(device)
    before = extents.clone()
    attached = PagedPlanes(layout, planes)
    kernels.scatter(attached, table.to(device), extents, torch.tensor(rows, device=device), range(layout.n_layers))
    for i, blocks in enumerate(table.tolist()):
        assert np.array_equal(read_page(planes, layout, blocks), expected(layout, page(i)))
    assert untouched(planes, set(range(16)) - set(table.view(-1).tolist()))
    assert torch.equal(extents, before)


def test_layers_that_are_not_named_stay(device: str, kernels: ModuleType) -> None:
    layout = LAYOUTS["extra"]
    planes = new_planes(layout, 4, layout.page_tokens, device)
    extents = extents_of(layout, 2, device)
    extents[1, : layout.page_bytes] = torch.from_numpy(expected(layout, page(1))).to(device)
    attached = PagedPlanes(layout, planes)
    row, block = torch.tensor([1], device=device), torch.tensor([[3]], device=device)
    kernels.scatter(attached, block, extents, row, range(1, 2))
    got = read_page(planes, layout, [3])
    start, end = layout.layer_bounds[1]
    assert np.array_equal(got[start:end], expected(layout, page(1))[start:end])
    assert (np.delete(got, np.s_[start:end]) == SENTINEL).all()
    kernels.gather(attached, block, extents, torch.tensor([0], device=device), [1])
    packed = extents[0].cpu().numpy()
    assert np.array_equal(packed[start:end], expected(layout, page(1))[start:end])
    assert (np.delete(packed, np.s_[start:end]) == SENTINEL).all()


def test_no_pages_are_no_work(device: str, kernels: ModuleType) -> None:
    planes = new_planes(ODD, 4, 3, device)
    extents = extents_of(ODD, 2, device)
    nothing = torch.empty((0, 1), dtype=torch.int64, device=device)
    for kernel in (kernels.gather, kernels.scatter):
        kernel(PagedPlanes(ODD, planes), nothing, extents, nothing.view(-1), range(2))
    assert untouched(planes, range(4))
    assert bool((extents == SENTINEL).all())


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple)


@settings(max_examples=40)
@given(data=st.data())
def test_any_layout_goes_there_and_back(data: st.DataObject) -> None:
    """Gather equals a loop over tokens and planes written here; scatter puts the same bytes back."""
    draw = data.draw
    planes_of = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=3)
    layers = draw(st.lists(planes_of, min_size=1, max_size=3))
    block_tokens = draw(st.integers(1, 4))
    layout = PageLayout(
        tuple(tuple(Plane(f"p{i}", *plane) for i, plane in enumerate(layer)) for layer in layers),
        block_tokens * draw(st.integers(1, 3)),
    )
    per_page, pages = layout.page_tokens // block_tokens, draw(st.integers(1, 3))
    blocks = pages * per_page + 2
    order = draw(st.permutations(range(blocks)))[: pages * per_page]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    raw = [
        [rng.integers(0, 256, (blocks, block_tokens, plane.row_bytes), dtype=np.uint8) for plane in layer]
        for layer in layout.layers
    ]
    tensors = [
        [
            torch.from_numpy(bytes_.copy()).view(getattr(torch, p.dtype)).view(blocks, block_tokens, *p.shape)
            for p, bytes_ in zip(layer, arrays, strict=True)
        ]
        for layer, arrays in zip(layout.layers, raw, strict=True)
    ]
    naive = []
    for i in range(pages):
        parts = []
        for arrays in raw:
            for array in arrays:
                for token in range(layout.page_tokens):
                    block = order[i * per_page + token // block_tokens]
                    parts.append(array[block, token % block_tokens].tobytes())
        naive.append(b"".join(parts))

    attached, table = PagedPlanes(layout, tensors), torch.tensor(order).view(pages, per_page)
    extents, rows = extents_of(layout, pages, "cpu"), torch.arange(pages - 1, -1, -1)
    reference.gather(attached, table, extents, rows, range(layout.n_layers))
    for i in range(pages):
        assert extents[pages - 1 - i, : layout.page_bytes].numpy().tobytes() == naive[i]

    fresh = new_planes(layout, blocks, block_tokens)
    reference.scatter(PagedPlanes(layout, fresh), table, extents, rows, range(layout.n_layers))
    for layer, arrays in enumerate(raw):
        for plane, array in enumerate(arrays):
            got = fresh[layer][plane].view(torch.uint8).reshape(array.shape).numpy()
            for block in range(blocks):
                wanted = array[block] if block in order else np.full_like(array[block], SENTINEL)
                assert np.array_equal(got[block], wanted)
