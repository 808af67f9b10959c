"""What the native library has beside the sources, for tests, and in no wheel: csrc/host/tests/bind/hooks.cc.

Executors are the caller's to step: the I/O of disks that are None (`take_io`, `io_ended`), foreign copies without a GPU
(`take_copy`, `copy_queued`, `copy_ended`; with `sums`, uint64 (pages, layers), where they were asked for) and time
(`expire`, in nanoseconds). What cannot be is a `NativeCallError`. Executors fail on order (faulty_disk.h):

set_faulty_disks(faulty): whether the first disk of executors that are opened from now on can
fail(executor, faults): int64 (faults, 5): descriptor (-1: any), first byte, last byte + 1, what, value
release(executor): let go of everything that hangs, now and later
"""

from __future__ import annotations

from typing import Any, Protocol

from gdscache import _native
from gdscache.arrays import Int64Array

hooks: Any = vars(_native)["hooks"]


class Job(Protocol):
    """Copies of some pages, or I/O. Three arrays tell them, int64 (pages,): `rows`, `slots`, and `at`, where
    the first byte lies in the memory.

    Of I/O, `kind` is 0 for reads and 1 for writes of the bytes `start` to `stop` of extents of `files`. Of copies it is
    0 to scatter, 1 to gather, 2 to look only; `blocks`: int64 (pages, blocks a page); where there is a `window`, the
    slots of the reserve that the pages lie in side by side, a part of an extent each, `slots` are places in that.
    """

    number: int
    move: int
    kind: int
    sums: bool
    files: str
    memory: str
    layers: range
    window: range
    rows: Int64Array
    slots: Int64Array
    at: Int64Array
    blocks: Int64Array
    start: int
    stop: int
