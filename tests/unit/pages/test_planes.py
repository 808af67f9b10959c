"""Attached planes: what fits the layout is taken as it lies in memory, everything else is refused with its figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gdscache.errors import GdsCacheError, PlanesError, SlotCountError, SlotRangeError
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support.helpers import EXTRA, layout_of, new_planes

LAYOUT = PageLayout.uniform([Plane("k", (2, 8), "bfloat16"), Plane("v", (2, 4), "bfloat16")], 2, 4)
Planes = list[list[torch.Tensor]]


def planes() -> Planes:
    return new_planes(LAYOUT, 6, 2)


def test_what_fits_is_taken_without_a_copy() -> None:
    tensors = planes()
    attached = PagedPlanes(LAYOUT, tensors)
    assert (attached.blocks, attached.block_tokens, attached.blocks_per_page) == (6, 2, 2)
    assert [list(map(id, layer)) for layer in attached.tensors] == [list(map(id, layer)) for layer in tensors]


@pytest.mark.parametrize("order", ["kv_first", "blocks_first"])
def test_strided_planes_are_taken_as_they_are(order: str) -> None:
    layout = PageLayout.uniform([Plane("k", (2, 8), "bfloat16"), Plane("v", (2, 8), "bfloat16")], 2, 4)
    tensors = new_planes(layout, 6, 4, order=order)
    attached = PagedPlanes(layout, tensors)
    tensors[1][1].view(torch.uint8)[3] = 7
    assert bool((attached.tensors[1][1].view(torch.uint8)[3] == 7).all())
    assert not bool((attached.tensors[1][0].view(torch.uint8)[3] == 7).any())


@pytest.mark.parametrize("strides", [(64, 32, 8, 1), (32, 192, 8, 1), (48, 24, 8, 1), (40, 24, 8, 1)])
def test_rows_may_lie_in_any_order_and_with_any_gaps(strides: tuple[int, ...]) -> None:
    """The last one has no gap behind the last row of a block."""
    tensors = replaced(0, 0, lambda t: torch.zeros(400, dtype=t.dtype).as_strided(t.shape, strides))
    assert PagedPlanes(LAYOUT, tensors).tensors[0][0].stride() == strides


@pytest.mark.parametrize("stride", [0, 1])
def test_a_dimension_of_one_may_have_any_stride(stride: int) -> None:
    room = torch.zeros(400, dtype=torch.bfloat16)
    one = [[room.as_strided((6, 1, *t.shape[2:]), (64, stride, *t.stride()[2:])) for t in of] for of in planes()]
    assert PagedPlanes(LAYOUT, one).block_tokens == 1


def test_a_layer_may_lack_a_plane() -> None:
    layout = layout_of(EXTRA)
    assert [len(layer) for layer in PagedPlanes(layout, new_planes(layout, 2, 4)).tensors] == [4, 3, 4]


def replaced(layer: int, plane: int, make: Callable[[torch.Tensor], Any]) -> Planes:
    tensors = planes()
    tensors[layer][plane] = make(tensors[layer][plane])
    return tensors


BAD: dict[str, Callable[[], Any]] = {
    "no layers": list,
    "a layer short": lambda: planes()[:1],
    "a layer too many": lambda: planes() + planes()[:1],
    "a plane short": lambda: [planes()[0], planes()[1][:1]],
    "a plane too many": lambda: [planes()[0], planes()[1] + planes()[1][:1]],
    "an empty layer": lambda: [[], planes()[1]],
    "no tensor": lambda: [[np.zeros((6, 2, 2, 8)), planes()[0][1]], planes()[1]],
    "no tensor further on": lambda: replaced(1, 1, lambda t: t.float().numpy()),
    "None further on": lambda: replaced(0, 1, lambda t: None),
    "two dimensions": lambda: [[torch.zeros(6, 2), planes()[0][1]], planes()[1]],
    "other dtype": lambda: replaced(1, 0, lambda t: t.half()),
    "same bytes, other dtype": lambda: replaced(1, 0, lambda t: t.view(torch.int16)),
    "more blocks": lambda: replaced(1, 0, lambda t: torch.cat([t, t])),
    "other row": lambda: replaced(1, 1, lambda t: t[..., :2].contiguous()),
    "same bytes, other shape": lambda: replaced(0, 1, lambda t: t.view(6, 2, 4, 2)),
    "flat rows": lambda: replaced(0, 1, lambda t: t.view(6, 2, 8)),
    "k and v swapped": lambda: [layer[::-1] for layer in planes()],
    "heads before tokens": lambda: replaced(0, 0, lambda t: t.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)),
    "transposed rows": lambda: replaced(0, 0, lambda t: torch.zeros(6, 2, 8, 2, dtype=t.dtype).transpose(2, 3)),
    "rows with gaps": lambda: replaced(0, 0, lambda t: torch.zeros(6, 2, 2, 16, dtype=t.dtype)[..., ::2]),
    "one block's bytes for all": lambda: replaced(0, 0, lambda t: t[:1].expand(6, 2, 2, 8)),
    "one token's bytes for all": lambda: replaced(0, 1, lambda t: t[:, :1].expand(6, 2, 2, 4)),
    "blocks a row apart": lambda: replaced(1, 0, lambda t: t.as_strided(t.shape, (16, 16, 8, 1))),
    "rows that overlap": lambda: replaced(1, 0, lambda t: t.as_strided(t.shape, (32, 8, 8, 1))),
    "other device": lambda: replaced(1, 1, lambda t: t.to("meta")),
    "blocks that do not divide a page": lambda: new_planes(LAYOUT, 6, 3),
    "blocks larger than a page": lambda: new_planes(LAYOUT, 6, 8),
    "no tokens in a block": lambda: new_planes(LAYOUT, 6, 0),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(PlanesError) as caught:
        PagedPlanes(LAYOUT, BAD[name]())
    assert len(caught.value.message) > 20


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "make",
    [
        *(lambda t: t, lambda t: t.numpy(), lambda t: t.view(2, 2), lambda t: t.tolist()),
        *(lambda t: t.repeat_interleave(2)[::2], lambda t: t.numpy().repeat(2)[::2], lambda t: t.numpy().reshape(2, 2)),
    ],
)
def test_a_block_table_is_pages_of_blocks(dtype: torch.dtype, make: Callable[[torch.Tensor], Any]) -> None:
    table = PagedPlanes(LAYOUT, planes()).block_table(make(torch.tensor([5, 0, 2, 1], dtype=dtype)))
    assert table.dtype == np.int64
    assert table.tolist() == [[5, 0], [2, 1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_block_table_is_the_callers_no_more(dtype: torch.dtype, of_numpy: bool) -> None:
    slots = torch.tensor([5, 0, 2, 1], dtype=dtype)
    table = PagedPlanes(LAYOUT, planes()).block_table(slots.numpy() if of_numpy else slots)
    slots[:] = 7
    assert table.tolist() == [[5, 0], [2, 1]]


@pytest.mark.parametrize("empty", [[], (), np.empty(0), torch.empty(0), torch.empty((0, 2), dtype=torch.int64)])
def test_no_slots_are_no_pages(empty: Any) -> None:
    assert PagedPlanes(LAYOUT, planes()).block_table(empty).shape == (0, 2)


def test_a_read_only_array_is_as_good_as_any() -> None:
    slots = np.arange(4)
    slots.setflags(write=False)
    assert PagedPlanes(LAYOUT, planes()).block_table(slots).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        ([0, 6], SlotRangeError),
        ([-1, 0], SlotRangeError),
        ([2**70, 0], SlotRangeError),
        ([0, 1, 2, 0], SlotRangeError),
        ([0.0, 1.0], SlotRangeError),
        ([True, False], SlotRangeError),
        (np.array([0, 1], np.uint32), SlotRangeError),
        (torch.tensor([0.5, 1.0]), SlotRangeError),
        (["a", "b"], SlotRangeError),
        (None, SlotRangeError),
        (np.array([0, None]), SlotRangeError),
        ([[0, 1], [2]], SlotRangeError),
        (torch.tensor([0, 1], device="meta"), SlotRangeError),
        ([0], SlotCountError),
        ([0, 1, 2], SlotCountError),
    ],
    ids=repr,
)
def test_bad_slots(slots: Any, error: type[GdsCacheError]) -> None:
    with pytest.raises(error) as caught:
        PagedPlanes(LAYOUT, planes()).block_table(slots)
    assert len(caught.value.message) > 10
