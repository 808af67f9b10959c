"""An executor of four pages, opened and closed in milliseconds."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import torch

from gdscache.arrays import integers
from gdscache.extents import HostExtents
from gdscache.kernels.copies import PageCopies
from gdscache.moves import PLANES, Move, Priority, Way
from gdscache.moves.native import Machine, NativeExecutor
from gdscache.pages.checksum import layer_checksums
from gdscache.pages.planes import PagedPlanes
from gdscache.storage.base import Descriptors
from gdscache.tiers.cpu import Bounce
from gdscache.tiers.quarantine import Quarantine
from tests.support.helpers import MHA, WAIT, layout_of
from tests.support.hooks import hooks

LAYOUT = layout_of(MHA)

EXTENT = LAYOUT.extent_bytes

PAGES = 4


class OpenFile:
    """A file of extents that the library reads and writes itself."""

    def __init__(self, path: Path, *, uring: bool) -> None:
        self.file = os.open(path, os.O_RDWR)
        self._uring = uring

    def hand_over(self) -> Descriptors:
        return Descriptors((self.file,), PAGES, 2, self._uring)


class Small:
    """An executor over planes, a memory, a reserve and a file, opened anew: all of it goes with `close`."""

    def __init__(self, path: Path, *, uring: bool, faulty: bool = False) -> None:
        self.copies = PageCopies(PagedPlanes.allocate(LAYOUT, PAGES, torch.device("cpu")))
        self.memory = HostExtents(LAYOUT, PAGES * EXTENT, "off")
        self.reserve = HostExtents(LAYOUT, 2 * PAGES * EXTENT, "off")
        self.file = OpenFile(path, uring=uring)
        bounce = Bounce(self.reserve, Quarantine(threading.RLock()))
        memories = {"cpu": self.memory, "bounce": self.reserve}
        machine = Machine(self.copies, memories, {"ssd": self.file}, {"ssd": PAGES}, bounce)
        hooks.set_faulty_disks(faulty)
        try:
            self.executor = NativeExecutor(machine)
        finally:
            hooks.set_faulty_disks(False)

    def fail(self, *faults: tuple[int, int, int, int, int]) -> None:
        hooks.fail(self.executor.moves, integers(faults).reshape(-1, 5))

    def close(self) -> None:
        self.executor.close()
        os.close(self.file.file)
        self.memory.close()
        self.reserve.close()


def a_load(path: Path) -> Move:
    pages = np.arange(PAGES, dtype=np.int64)
    data = path.read_bytes()
    extents = [memoryview(data)[at : at + EXTENT] for at in range(0, len(data), EXTENT)]
    sums = np.stack([layer_checksums(extent, LAYOUT.layer_bounds) for extent in extents])
    return Move(Priority.LOAD, (Way("ssd", PLANES, pages, pages.reshape(-1, 1), sums=sums),), WAIT)
