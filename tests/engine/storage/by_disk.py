"""What the library's own transports have an executor do, in one call: a piece by a disk of their kind."""

from __future__ import annotations

import numpy as np

from gdscache.arrays import integers
from gdscache.native import Disk, error_of
from gdscache.storage.base import Memory, Op, address_of
from gdscache.storage.cufile import CufileTransport
from gdscache.storage.native import NativeTransport


def _move(transport: NativeTransport, op: Op, file: int, offset: int, memory: Memory) -> int:
    transport.path(file)
    address = address_of(memory) if isinstance(memory, memoryview) else memory.address
    fragments = np.array([(address, memory.nbytes)], np.uint64)
    disk = Disk("ring" if transport.uring else "threads", 1, 1, transport.cufile)
    disk.submit(integers([(0, op is Op.WRITE, file, offset, 0, 1, not transport.direct)]), fragments)
    [(*_, error, moved)] = disk.reap(20).tolist()
    disk.close()
    if error:
        raise error_of(error)
    return int(moved)


class NativeByDisk(NativeTransport):
    _move = _move


class CufileByDisk(CufileTransport):
    _move = _move
