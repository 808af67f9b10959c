"""The bounce reserve: extents for pages that only pass through, with fixed shares for loads and for stores."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gdscache.checksum import Checksums, layer_checksums
from gdscache.layout import PageLayout
from gdscache.tiers.base import SlotPool

if TYPE_CHECKING:
    from gdscache.tiers.quarantine import Quarantine

Places = npt.NDArray[np.int64]


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

    def where(self, slots: Places, byte: int) -> Places:
        """The places in `flat` of a byte of the slots' extents. int64 of shape (slots,)."""
        ...

    def digest(self, slot: int, layers: range) -> Checksums: ...


class Reserved(Extents, Protocol):
    """Extents that somebody owns, and gives back."""

    layout: PageLayout

    def close(self) -> None: ...


class Window:
    """Neighbouring slots of a reserve, cut anew: each of its own slots holds a part of an extent and no more.

    `within`: the slots; `span`: `(start, stop)` of the part in bytes of an extent, multiples of `EXTENT_ALIGNMENT`. So
    the memory of one page holds a group of layers of several, side by side, and neighbours are copied at once.
    """

    fence_slots = 0

    def __init__(self, extents: Reserved, within: range, span: tuple[int, int]) -> None:
        start, stop = span
        self._extents = extents
        self._within = within
        self._part = stop - start
        extent = extents.layout.extent_bytes
        self.slots = len(within) * extent // self._part
        self._first = within.start * extent - start  # where the first slot's extent would begin
        self._start = start
        assert self._first >= 0, "the reserve's first slots are those of stores"
        offset = int(extents.rows.storage_offset()) + self._first
        self.rows = extents.rows.as_strided((self.slots, stop), (self._part, 1), offset)
        self.checksums = np.zeros((self.slots, extents.layout.n_layers), dtype=np.uint64)
        self.pinned = extents.pinned

    @property
    def flat(self) -> memoryview | torch.Tensor:
        return self._extents.flat

    def where(self, slots: Places, byte: int) -> Places:
        return self._first + byte + slots * self._part

    def digest(self, slot: int, layers: range) -> Checksums:
        """The checksums of some layers of the slot's bytes, taken now; of GPU memory by way of a copy."""
        bounds = self._extents.layout.layer_bounds[layers.start : layers.stop]
        at = self._first + slot * self._part + self._start
        part = self.flat[at : at + self._part]
        view = part if isinstance(part, memoryview) else part.cpu().numpy().data
        return layer_checksums(view, [(first - self._start, end - self._start) for first, end in bounds])

    def reserve_slots(self, slot: int) -> range:
        """The slots of the reserve that have bytes of a slot."""
        extent = self._extents.layout.extent_bytes
        first, last = slot * self._part // extent, ((slot + 1) * self._part - 1) // extent
        return self._within[first : last + 1]


class Bounce:
    """Half of the slots are for stores, half for loads; neither borrows from the other. `quarantine` watches over both,
    and the memory outlives I/O that hangs."""

    def __init__(self, extents: Reserved, quarantine: Quarantine) -> None:
        self.extents = extents
        half = extents.slots // 2
        self.stores = SlotPool(range(half))
        self.loads = SlotPool(range(half, 2 * half))
        self.late = LateSlots(self.loads)
        self._quarantine = quarantine
        quarantine.add_pool("bounce_loads", self.loads.slots, lambda: self.late.held)
        quarantine.add_pool("bounce_stores", self.stores.slots)

    def window(self, slots: Sequence[int], span: tuple[int, int]) -> tuple[Window, list[int]]:
        """The longest run of neighbours among ascending slots of loads, cut for parts of extents; and the others."""
        run = max(self._runs(slots), key=len)
        return Window(self.extents, run, span), [slot for slot in slots if slot not in run]

    def _runs(self, slots: Sequence[int]) -> list[range]:
        """No run crosses from one registration of the memory into the next."""
        fence, runs = self.extents.fence_slots, list[range]()
        for slot in slots:
            if runs and runs[-1].stop == slot and not (fence and slot % fence == 0):
                runs[-1] = range(runs[-1].start, slot + 1)
            else:
                runs.append(range(slot, slot + 1))
        return runs

    def close(self) -> None:
        """Give the memory back, once no I/O that hangs may touch it."""
        self._quarantine.afterwards(self.extents.close)


class LateSlots:
    """Slots that parts of pages are in whose reads are late: free again when the last of these reads has ended.

    `held` counts them. Thread-safe.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.held = 0
        self._pool = pool
        self._reads: Counter[int] = Counter()
        self._lock = threading.Lock()

    def hold(self, slots: Iterable[int]) -> None:
        """A read is late that writes to these slots of the pool, which somebody has."""
        with self._lock:
            self.held += sum(not self._reads[slot] for slot in slots)
            self._reads.update(slots)

    def end(self, slots: Iterable[int]) -> None:
        """It has ended."""
        with self._lock:
            self._reads.subtract(slots)
            free = [slot for slot in slots if not self._reads[slot]]
            self.held -= len(free)
        self._pool.give(free)
