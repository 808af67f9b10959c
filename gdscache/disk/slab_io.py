"""Bytes between the slab's extents and slots in memory, through a transport: what is read and written, page by page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.disk.slab import Slab
from gdscache.moves.machine import Descriptors, Places
from gdscache.moves.page_io import PageIO, stretches
from gdscache.storage.base import IORequest, Op, Transport
from gdscache.storage.batch import IOBatch
from gdscache.storage.native import NativeTransport

if TYPE_CHECKING:
    import torch

    from gdscache.native import CuFiles


class SlabIO:
    """The files of a slab, open in a transport, which is closed with it, or when they cannot be opened."""

    def __init__(self, slab: Slab, transport: Transport) -> None:
        self.transport = transport
        self._slab = slab
        with contextlib.ExitStack() as undo:
            undo.callback(transport.close)
            self._files = [transport.open(file) for file in slab.files]
            undo.pop_all()
        self._handles = np.array(self._files, dtype=np.int64)
        self._most = max(1, transport.merge_bytes // slab.extent_bytes)  # pages of one request
        self._period = slab.stretch if len(self._files) > 1 else slab.slots

    @property
    def memory_kinds(self) -> frozenset[str]:
        """Where the transport can read to and write from: `host`, `cuda`."""
        return self.transport.memory_kinds

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Tell the transport about a buffer that will be used until `close`, or until `deregister`."""
        self.transport.register(memory)

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        """Take `register` back."""
        self.transport.deregister(memory)

    def transfer(
        self,
        op: Op,
        slots: Int64Array,
        ends: Sequence[tuple[Places, Int64Array]],
        span: tuple[int, int] | None = None,
    ) -> PageIO:
        """Start I/O between the slab's `slots` and places in memory, which `ends` have for so many pages each.

        `span`: `(start, stop)` of each extent, multiples of `EXTENT_ALIGNMENT`; all of it by default.
        """
        start, stop = (0, self._slab.extent_bytes) if span is None else span
        most = self._most if (start, stop) == (0, self._slab.extent_bytes) else 1  # parts of neighbours do not touch
        runs: list[tuple[Int64Array, Int64Array]] = []
        requests: list[Sequence[IORequest]] = []
        at = 0
        for extents, places in ends:
            here = slots[at : at + len(places)]
            firsts, counts = stretches(here, places, most, self._period)
            runs.append((at + firsts, counts))
            requests.append(self._requests(here[firsts], extents, places[firsts], counts, start, stop))
            at += len(places)

        def single(page: int) -> IORequest:
            before = 0
            for extents, places in ends:
                if page < before + len(places):
                    place = places[page - before : page - before + 1]
                    return self._requests(slots[page : page + 1], extents, place, np.ones(1, np.int64), start, stop)[0]
                before += len(places)
            raise IndexError(page)

        whole = requests[0] if len(requests) == 1 else [request for some in requests for request in some]
        firsts, counts = (np.concatenate(some) for some in zip(*runs, strict=True))
        return PageIO(lambda some: self.transport.submit(op, some), whole, firsts, counts, single)

    def _requests(
        self, slots: Int64Array, extents: Places, places: Int64Array, counts: Int64Array, start: int, stop: int
    ) -> IOBatch:
        """A request from byte `start` of each of `slots` on, to byte `stop` of the last of its `counts` extents."""
        files, offsets = self._slab.locate_all(slots)
        sizes = (counts - 1) * self._slab.extent_bytes + stop - start
        return IOBatch(self._handles[files], offsets + start, extents.where(places, start), sizes, extents.flat)

    @property
    def cufile(self) -> CuFiles | None:
        """What the native library reaches memory of a GPU by."""
        transport = self.transport
        return transport.cufile if isinstance(transport, NativeTransport) and transport.is_own else None

    def hand_over(self) -> Descriptors | None:
        """What the native library needs to move these bytes itself; None where the transport has to.

        The transport moves nothing any more then, but flushes and closes the files, and keeps what it has registered.
        """
        transport = self.transport
        if not isinstance(transport, NativeTransport) or not transport.is_own:
            return None
        transport.hand_over()
        return Descriptors(tuple(self._files), self._period, transport.threads, transport.uring, transport.cufile)

    def describe(self) -> str:
        """The transport's name."""
        return self.transport.name

    def flush(self) -> None:
        """Make ended writes survive a loss of power. Raises `IOFailedError`."""
        for file in self._files:
            self.transport.flush(file)

    def close(self) -> None:
        """Wait for what was submitted, and give files and threads back; again is fine."""
        self.transport.close()
