"""Extents in GPU memory: the bounce reserve of I/O straight to the device."""

from __future__ import annotations

import numpy as np
import torch

from gdscache.pages.layout import EXTENT_ALIGNMENT, PageLayout
from gdscache.runtime.allocation import allocating


class DeviceExtents:
    """The counterpart of `HostExtents` in GPU memory, for I/O straight to and from the device."""

    pinned = True
    fence_slots = 0

    def __init__(self, layout: PageLayout, capacity: int, device: torch.device) -> None:
        self.layout = layout
        self.slots = capacity // layout.extent_bytes
        nbytes = self.slots * layout.extent_bytes
        with allocating("host_buffer", nbytes, device):
            memory = torch.empty(nbytes + EXTENT_ALIGNMENT, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % EXTENT_ALIGNMENT  # torch aligns to less than direct I/O wants
        self.rows = memory[start : start + nbytes].view(self.slots, layout.extent_bytes)
        self.checksums = np.zeros((self.slots, layout.n_layers), dtype=np.uint64)

    @property
    def flat(self) -> torch.Tensor:
        """The bytes of all extents, padding included."""
        return self.rows.view(-1)

    def close(self) -> None:
        self.rows = self.rows[:0].clone()
