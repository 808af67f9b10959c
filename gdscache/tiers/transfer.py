"""Movers between extents and planes: pinned extents → staging → planes and back, on streams of their own.

On a GPU, loads and stores each have one non-blocking stream and one half of the staging ring, and never borrow from the
other. Work on one of these streams is ordered, which is what makes reusing a staging row safe. On a CPU the copies run
at once, straight between extents and planes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from gdscache import kernels
from gdscache.planes import PagedPlanes
from gdscache.streams import Event, record_on

_CHUNK_PAGES = 16


class Lane:
    """One direction's stream, staging rows and lock. On a CPU: only the lock's shape, no stream and no staging."""

    def __init__(self, device: torch.device, staging_bytes: int, extent_bytes: int, priority: int) -> None:
        self.lock = threading.Lock()
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.staging: torch.Tensor | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            rows = staging_bytes // extent_bytes
            self.staging = torch.empty((rows, extent_bytes), dtype=torch.uint8, device=device)

    @contextlib.contextmanager
    def entered(self, after: Sequence[Event]) -> Iterator[None]:
        """Queue work on the lane's stream, behind `after`, with nobody else's between."""
        if self.stream is None:
            yield
            return
        with self.lock, torch.cuda.stream(self.stream):
            for event in after:
                if event is not None:
                    self.stream.wait_event(event)
            yield

    def mark(self) -> Event:
        """An event behind everything that was queued on the lane so far."""
        if self.stream is None:
            return None
        return record_on(self.stream)


class Mover:
    """Copies pages between host or device extents and the planes of one pool.

    `staging_bytes` is GPU memory; half is for loads, half for stores. Nothing here synchronises the caller's streams.
    """

    def __init__(self, planes: PagedPlanes, staging_bytes: int) -> None:
        self.planes = planes
        self.layout = planes.layout
        half = staging_bytes // 2
        self._loads = Lane(planes.device, half, self.layout.extent_bytes, priority=-1)
        self._stores = Lane(planes.device, half, self.layout.extent_bytes, priority=0)

    def scatter(
        self,
        extents: torch.Tensor,
        rows: Sequence[int],
        blocks: torch.Tensor,
        layers: range | None = None,
        after: Sequence[Event] = (),
    ) -> Event:
        """Queue copies of `extents[rows]` into the planes at `blocks`; the event is behind them.

        `extents`: uint8 (slots, extent_bytes), on the host or the planes' device; `blocks`: host int64 (pages,
        blocks_per_page); `layers`: all by default; `after`: events to wait for before the planes are written.
        """
        lane, which = self._loads, range(self.layout.n_layers) if layers is None else layers
        with lane.entered(after):
            if lane.staging is None or extents.device == self.planes.device:
                for some, there in self._chunks(rows, blocks):
                    kernels.scatter(self.planes, there, extents, some, which)
                return lane.mark()
            start, end = self._span(which)
            for at in range(0, len(rows), len(lane.staging)):
                chunk = rows[at : at + len(lane.staging)]
                for i, row in enumerate(chunk):
                    lane.staging[i, start:end].copy_(extents[row, start:end], non_blocking=True)
                index = torch.arange(len(chunk), device=self.planes.device)
                there = blocks[at : at + len(chunk)].to(self.planes.device, non_blocking=True)
                kernels.scatter(self.planes, there, lane.staging, index, which)
            return lane.mark()

    def gather(
        self, extents: torch.Tensor, rows: Sequence[int], blocks: torch.Tensor, after: Sequence[Event] = ()
    ) -> Event:
        """Queue copies of whole pages from the planes at `blocks` into `extents[rows]`; the inverse of `scatter`."""
        lane, which = self._stores, range(self.layout.n_layers)
        with lane.entered(after):
            if lane.staging is None or extents.device == self.planes.device:
                for some, there in self._chunks(rows, blocks):
                    kernels.gather(self.planes, there, extents, some, which)
                return lane.mark()
            for at in range(0, len(rows), len(lane.staging)):
                chunk = rows[at : at + len(lane.staging)]
                index = torch.arange(len(chunk), device=self.planes.device)
                there = blocks[at : at + len(chunk)].to(self.planes.device, non_blocking=True)
                kernels.gather(self.planes, there, lane.staging, index, which)
                for i, row in enumerate(chunk):
                    extents[row].copy_(lane.staging[i], non_blocking=True)
            return lane.mark()

    def mark_stores(self) -> Event:
        """An event behind every gather that was queued so far."""
        return self._stores.mark()

    def mark_loads(self) -> Event:
        """An event behind every scatter that was queued so far."""
        return self._loads.mark()

    def _chunks(self, rows: Sequence[int], blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows and blocks of a few pages at a time, so that what the reference copies through stays small and warm."""
        device = self.planes.device
        for at in range(0, len(rows), _CHUNK_PAGES):
            some = torch.tensor(rows[at : at + _CHUNK_PAGES], device=device)
            yield some, blocks[at : at + _CHUNK_PAGES].to(device)

    def _span(self, layers: range) -> tuple[int, int]:
        bounds = self.layout.layer_bounds
        return bounds[layers[0]][0], bounds[layers[-1]][1]

    def synchronize(self) -> None:
        """The calling thread waits for everything queued here."""
        for lane in (self._loads, self._stores):
            if lane.stream is not None:
                lane.stream.synchronize()
