"""Extents: memory in slots of one page each, on the host or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gdscache.pages.checksum import Checksums


class Extents(Protocol):
    """Slots of one extent each, on the host or on a device, and their checksums.

    `rows`: uint8, a row a slot, from the extent's first byte on. `flat`: the memory as one piece of bytes. `pinned`:
    copy engines and kernels of a GPU reach the memory. `fence_slots`: slots of each page-locked registration; no copy
    may cross from one into the next (0: there is only one).
    """

    slots: int
    rows: torch.Tensor
    checksums: Checksums
    pinned: bool
    fence_slots: int

    @property
    def flat(self) -> memoryview | torch.Tensor: ...


class SlotMemory(Protocol):
    """The memory of a pool of pages, in this process or on ranks."""

    slots: int
    pinned: bool
    checksums: Checksums

    def close(self) -> None: ...


class TierMemory(SlotMemory, Protocol):
    """Memory of a tier. `nbytes`: of all of it."""

    @property
    def nbytes(self) -> int: ...

    def bad_slots(self, slots: Sequence[int]) -> dict[int, int]:
        """Slots whose bytes do not match their checksums, each with a bad layer."""
        ...
