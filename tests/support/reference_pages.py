"""Gather and scatter in torch, byte by byte: the oracle of the kernels and of the native library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from gdscache.pages.planes import PagedPlanes


def _parts(planes: PagedPlanes, layer: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """The bytes of each plane of a layer, uint8 (blocks, block_tokens, row_bytes), and where they lie in an extent."""
    for tensor, piece in zip(planes.tensors[layer], planes.layout.pieces[layer], strict=True):
        shape = (*tensor.shape[:2], math.prod(tensor.shape[2:]))
        rows = tensor.as_strided(shape, (*tensor.stride()[:2], 1)).view(torch.uint8)
        yield rows, slice(piece.offset, piece.offset + piece.nbytes)


def gather(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from planes into extents: page `i` is `blocks[i]`, and goes to `extents[rows[i]]`.

    `blocks`: int64 (pages, blocks_per_page); `extents`: uint8 (slots, extent_bytes); `rows`: int64 (pages,); all on
    the planes' device. `layers`: which layers to copy. Runs on the current stream and does not synchronise.
    """
    for layer in layers if len(rows) else ():
        for part, where in _parts(planes, layer):
            extents[:, where].index_copy_(0, rows, part.index_select(0, blocks.reshape(-1)).view(len(rows), -1))


def scatter(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from extents into planes: the inverse of `gather`, with the same arguments."""
    for layer in layers if len(rows) else ():
        for part, where in _parts(planes, layer):
            pages = extents[:, where].index_select(0, rows).view(-1, *part.shape[1:])
            part.index_copy_(0, blocks.reshape(-1), pages)
