"""Gather and scatter in torch: the oracle of the others, and what serves a GPU without a kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gdscache.pages.planes import PagedPlanes


def gather(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from planes into extents: page `i` is `blocks[i]`, and goes to `extents[rows[i]]`.

    `blocks`: int64 (pages, blocks_per_page); `extents`: uint8 (slots, extent_bytes); `rows`: int64 (pages,); all on
    the planes' device. `layers`: which layers to copy. Runs on the current stream and does not synchronise.
    """
    for layer in layers if len(rows) else ():
        for view, piece in zip(planes.views[layer], planes.layout.pieces[layer], strict=True):
            words = view.words.index_select(0, blocks.reshape(-1))
            target = extents[:, piece.offset : piece.offset + piece.nbytes].view(words.dtype)
            target.index_copy_(0, rows, words.view(len(rows), -1))


def scatter(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from extents into planes: the inverse of `gather`, with the same arguments."""
    for layer in layers if len(rows) else ():
        for view, piece in zip(planes.views[layer], planes.layout.pieces[layer], strict=True):
            source = extents[:, piece.offset : piece.offset + piece.nbytes].view(view.words.dtype)
            pages = source.index_select(0, rows).view(-1, *view.words.shape[1:])
            view.words.index_copy_(0, blocks.reshape(-1), pages)
