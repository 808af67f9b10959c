"""Gather and scatter for planes in host memory: numpy moves whole rows, where torch moves element by element."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gdscache.planes import PagedPlanes


def gather(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from planes into extents; arguments as those of `reference.gather`, all in host memory."""
    where, to, flat = blocks.numpy().ravel(), rows.numpy(), extents.numpy()
    for layer in layers if len(to) else ():
        for view, piece in zip(planes.views[layer], planes.layout.pieces[layer], strict=True):
            words = view.words.numpy()
            target = flat[:, piece.offset : piece.offset + piece.nbytes].view(words.dtype)
            target[to] = words[where].reshape(len(to), -1)


def scatter(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from extents into planes: the inverse of `gather`, with the same arguments."""
    where, source, flat = blocks.numpy().ravel(), rows.numpy(), extents.numpy()
    for layer in layers if len(source) else ():
        for view, piece in zip(planes.views[layer], planes.layout.pieces[layer], strict=True):
            words = view.words.numpy()
            pages = flat[:, piece.offset : piece.offset + piece.nbytes].view(words.dtype)[source]
            words[where] = pages.reshape(len(where), *words.shape[1:])
