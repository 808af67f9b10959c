"""The mover for a GPU without kernels: torch's index operations, over a staging buffer a direction. Right, and slow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gdscache.kernels import reference
from gdscache.planes import PagedPlanes
from gdscache.streams import Event, record_on
from gdscache.tiers.bounce import Extents
from gdscache.tiers.paths import Direction
from gdscache.tiers.transfer import Moved, Mover, Slots, host_digests

_CHUNK_PAGES = 16


class _Lane:
    """One direction's stream, staging rows and lock."""

    def __init__(self, device: torch.device, rows: int, extent_bytes: int, priority: int) -> None:
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.staging = torch.empty((rows, extent_bytes), dtype=torch.uint8, device=device)

    @contextlib.contextmanager
    def entered(self, after: Sequence[Event]) -> Iterator[None]:
        """Queue work on the lane's stream, behind `after`, with nobody else's between."""
        with self.lock, torch.cuda.stream(self.stream):
            for event in after:
                if event is not None:
                    self.stream.wait_event(event)
            yield


class TorchMover(Mover):
    """`staging_bytes` is GPU memory; half is for loads, half for stores. `cause` says why there are no kernels."""

    name = "torch"

    def __init__(self, planes: PagedPlanes, staging_bytes: int, cause: str) -> None:
        self.planes = planes
        self.layout = planes.layout
        self._cause = cause
        rows, extent = staging_bytes // 2 // self.layout.extent_bytes, self.layout.extent_bytes
        self._loads = _Lane(planes.device, rows, extent, priority=-1)
        self._stores = _Lane(planes.device, rows, extent, priority=0)

    def _move(
        self,
        direction: Direction,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range,
        after: Sequence[Event],
        *,
        sums: bool,
    ) -> Moved:
        loads = direction == "load"
        lane = self._loads if loads else self._stores
        kernel = reference.scatter if loads else reference.gather
        track = "loads: copy stream" if loads else "stores: copy stream"
        about = {"layers": layers, "pages": len(slots)}
        with lane.entered(after), self.timeline.on_stream("copies", track, lane.stream, **about):
            if extents.rows.device == self.planes.device:
                for rows, there in self._chunks(slots, blocks):
                    kernel(self.planes, there, extents.rows, rows, layers)
            else:
                bounds = self.layout.layer_bounds
                span = slice(bounds[layers.start][0], bounds[layers.stop - 1][1])
                for at in range(0, len(slots), len(lane.staging)):
                    chunk = slots[at : at + len(lane.staging)]
                    if loads:
                        for i, slot in enumerate(chunk):
                            lane.staging[i, span].copy_(extents.rows[slot, span], non_blocking=True)
                    index, there = self._staged(chunk, blocks[at : at + len(chunk)])
                    kernel(self.planes, there, lane.staging, index, layers)
                    if not loads:
                        for i, slot in enumerate(chunk):
                            extents.rows[slot, span].copy_(lane.staging[i, span], non_blocking=True)
            event = record_on(lane.stream)
        return Moved(event, event, host_digests(extents, slots, layers))

    def _staged(self, chunk: Slots, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(len(chunk), device=self.planes.device)
        return index, blocks.to(self.planes.device, non_blocking=True)

    def _chunks(self, slots: Slots, blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A few pages at a time, so that what the reference copies through stays small."""
        for at in range(0, len(slots), _CHUNK_PAGES):
            rows = torch.tensor(slots[at : at + _CHUNK_PAGES], device=self.planes.device)
            yield rows, blocks[at : at + _CHUNK_PAGES].to(self.planes.device)

    def queues(self, extents: Extents) -> bool:
        return extents.pinned

    def mark_loads(self) -> Event:
        return record_on(self._loads.stream)

    def mark_stores(self) -> Event:
        return record_on(self._stores.stream)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": self._cause}

    def close(self) -> None:
        for lane in (self._loads, self._stores):
            lane.stream.synchronize()
