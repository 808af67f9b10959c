"""A slab's files, opened by a transport, for an executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.disk.slab import Slab
from gdscache.storage.base import Descriptors, Files, Transport
from gdscache.storage.native import NativeTransport

if TYPE_CHECKING:
    import torch


class SlabFiles(Files, Protocol):
    """The open files of a slab: of this process (`SlabIO`), or of ranks (`RemoteSlab`)."""

    slab: Slab  # with ranks, the first shard's

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Announce a buffer that will be used until `close`."""

    def check(self) -> list[str]: ...

    def flush(self) -> None: ...

    def describe(self) -> dict[str, object]: ...

    def close(self) -> None:
        """Close the files, after all I/O on them; may be called twice."""


class SlabIO:
    """The files of one shard of a slab, opened by a transport, which is closed with them. `shard`: its number among the
    opened ones."""

    def __init__(self, slab: Slab, transport: Transport, shard: int = 0) -> None:
        self.transport = transport
        self.slab = slab = slab.of(shard)
        with contextlib.ExitStack() as undo:
            undo.callback(transport.close)
            self._files = [transport.open(file) for file in slab.files]
            undo.pop_all()
        self._period = slab.stretch if len(self._files) > 1 else slab.slots

    def register(self, memory: memoryview | torch.Tensor) -> None:
        self.transport.register(memory)

    def stretches(self, slots: Int64Array, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(file, offset in it, first, count) of runs of `slots`, int64 (slots,), that lie side by side, each of up to
        `nbytes` or one slot."""
        files, offsets = self.slab.locate_all(slots)
        most = max(1, nbytes // self.slab.extent_bytes)
        breaks = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % self._period == 0)) + 1
        for run in np.split(np.arange(len(slots)), breaks):
            for first in range(run[0], run[-1] + 1, most):
                yield self._files[files[first]], int(offsets[first]), first, min(most, int(run[-1]) + 1 - first)

    def hand_over(self) -> Descriptors:
        """The files for an executor. Registering, flushing and closing stay here."""
        transport = self.transport
        own = transport if isinstance(transport, NativeTransport) and transport.is_own else None
        return Descriptors(
            tuple(self._files),
            self._period,
            transport.threads,
            uring=own is not None and own.uring,
            cufile=None if own is None else own.cufile,
            transport=None if own is not None else transport,
        )

    def describe(self) -> dict[str, object]:
        return self.transport.describe()

    def check(self) -> list[str]:
        return self.slab.check()

    def flush(self) -> None:
        for file in self._files:
            self.transport.flush(file)

    def close(self) -> None:
        self.transport.close()
