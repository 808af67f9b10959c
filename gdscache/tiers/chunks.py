"""What the CUDA mover keeps in host memory while it queues one transfer: addresses, tables, the cut into chunks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdscache.checksum import Checksums
from gdscache.kernels.copy_engine import Addresses
from gdscache.planes import PagedPlanes
from gdscache.tiers.bounce import Extents
from gdscache.tiers.lanes import Segment
from gdscache.tiers.transfer import Slots


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Pages `first` to `first + pages` of a transfer, which share a segment.

    `table`: their block indices, then their extent slots, in page-locked memory; `rows`: where the GPU has the slots.
    None and 0 where the block indices go with the launch.
    """

    first: int
    pages: int
    segment: Segment
    table: torch.Tensor | None
    rows: int

    def copy_of_table(self) -> tuple[Addresses, Addresses, Addresses]:
        """The copy that brings the table to the GPU: destination, source, bytes."""
        assert self.table is not None
        there, here, size = np.array(
            [[self.segment.table], [self.table.data_ptr()], [self.table.nbytes]], dtype=np.uint64
        )
        return there, here, size


class Transfer:
    """One call of the mover, on the host's side: which bytes, which tables, where checksums go."""

    def __init__(
        self,
        planes: PagedPlanes,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range,
        *,
        sums: bool,
    ) -> None:
        self.extents = extents
        self.layers = layers
        self.pages = len(slots)
        bounds = planes.layout.layer_bounds
        self.origin = bounds[layers.start][0]
        self.span = bounds[layers.stop - 1][1] - self.origin
        self.stride = -(-self.span // 16) * 16
        self.slots: npt.NDArray[np.int64] = np.asarray(slots, dtype=np.int64)
        self.blocks: npt.NDArray[np.int64] = blocks.numpy()
        self.wide = max(planes.blocks, extents.slots) > 0x7FFFFFFF
        self.item = 8 if self.wide else 4
        self.digests = torch.empty((self.pages, len(layers)), dtype=torch.int64, pin_memory=True) if sums else None
        self.tables: list[torch.Tensor] = []  # page-locked, and read by copies that are under way

    @functools.cached_property
    def sources(self) -> Addresses:
        """Where each page's part of the extent begins in memory."""
        first = self.extents.rows.data_ptr() + self.origin
        sources: Addresses = (first + self.slots * self.extents.rows.stride(0)).astype(np.uint64)
        return sources

    @functools.cached_property
    def sizes(self) -> Addresses:
        return np.full(self.pages, self.span, dtype=np.uint64)

    @functools.cached_property
    def steps(self) -> Addresses:
        """Where each page of a chunk begins in its segment."""
        return np.arange(self.pages, dtype=np.uint64) * np.uint64(self.stride)

    @functools.cached_property
    def has_neighbours(self) -> bool:
        """Whether pages lie side by side in the extents as they do in the ring."""
        return self.stride == self.extents.rows.stride(0) and bool((np.diff(self.slots) == 1).any())

    def table(self, first: int, pages: int) -> torch.Tensor:
        """Block indices of a chunk's pages, then their extent slots, as the kernels read them."""
        count = pages * self.blocks.shape[1]
        table = torch.empty(count + pages, dtype=torch.int64 if self.wide else torch.int32, pin_memory=True)
        array = table.numpy()
        array[:count] = self.blocks[first : first + pages].reshape(-1)
        array[count:] = self.slots[first : first + pages]
        self.tables.append(table)
        return table

    @functools.cached_property
    def _indices(self) -> npt.NDArray[np.signedinteger[Any]]:
        """The block indices as wide as the kernels read them."""
        return np.ascontiguousarray(self.blocks, dtype=np.int64 if self.wide else np.int32)

    def listed(self, first: int, pages: int) -> bytes:
        """Block indices of a chunk's pages, to go with the launch."""
        return self._indices[first : first + pages].tobytes()

    def borders(self, first: int, pages: int) -> npt.NDArray[np.bool_]:
        """Which pages lie in another registration of host memory than the page before."""
        fences = np.zeros(pages, dtype=bool)
        if self.extents.fence_slots:
            number = self.slots[first : first + pages] // self.extents.fence_slots
            fences[1:] = number[1:] != number[:-1]
        return fences

    def digests_of(self, chunk: Chunk) -> int | None:
        """The address where the checksums of a chunk's pages go; None where none are wanted."""
        if self.digests is None:
            return None
        return self.digests.data_ptr() + chunk.first * len(self.layers) * 8

    def read_digests(self) -> Checksums:
        assert self.digests is not None
        return self.digests.numpy().view(np.uint64).copy()
