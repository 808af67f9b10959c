"""Gather and scatter of fragmented pages: by numpy in host memory, by torch on a GPU until there is a kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gdscache.kernels import host, reference
from gdscache.planes import PagedPlanes

__all__ = ["gather", "scatter"]


def gather(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from planes into extents; see `reference.gather`."""
    (host if planes.device.type == "cpu" else reference).gather(planes, blocks, extents, rows, layers)


def scatter(
    planes: PagedPlanes, blocks: torch.Tensor, extents: torch.Tensor, rows: torch.Tensor, layers: Iterable[int]
) -> None:
    """Copy pages from extents into planes; see `reference.scatter`."""
    (host if planes.device.type == "cpu" else reference).scatter(planes, blocks, extents, rows, layers)
