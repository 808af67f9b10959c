"""Extents: memory in slots of one page each, on the host or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gdscache.pages.checksum import Checksums
from gdscache.pages.layout import PageLayout


class Extents(Protocol):
    """Slots of one extent each, on the host or on a device, and the checksums that belong to them.

    `rows`: uint8, a row a slot, from the extent's first byte on; `flat`: the memory as one piece of bytes.
    `pinned`: copy engines and kernels of a GPU reach the memory; `fence_slots`: its page-locked registrations hold so
    many slots each, and no copy may cross from one into the next (0: there is only one).
    """

    slots: int
    rows: torch.Tensor
    checksums: Checksums
    pinned: bool
    fence_slots: int

    @property
    def flat(self) -> memoryview | torch.Tensor: ...

    def digest(self, slot: int, layers: range) -> Checksums: ...


class PoolMemory(Protocol):
    """The memory of a pool of pages, as its tier knows it: here, or on ranks. `nbytes`: of all of it."""

    slots: int
    pinned: bool
    checksums: Checksums

    @property
    def nbytes(self) -> int: ...

    def bad_slots(self, slots: Sequence[int]) -> dict[int, int]:
        """Those of the slots whose bytes are not what was stored, and a bad layer of each."""
        ...

    def close(self) -> None: ...


class Reserved(Extents, PoolMemory, Protocol):
    """Extents that somebody owns, and gives back."""

    layout: PageLayout
