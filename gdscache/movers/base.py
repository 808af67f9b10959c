"""Movers: what copies pages between extents and planes, on streams of its own. The contract.

`HostMover` serves planes in host memory, `CudaMover` planes on a GPU. Both copy by the native library, which an
engine's executor asks itself. Nothing here synchronises the caller's streams.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gdscache.cuda.streams import Event
from gdscache.extents.base import Extents
from gdscache.movers.choice import Direction
from gdscache.pages.checksum import Checksums
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes

if TYPE_CHECKING:
    from gdscache.kernels.gpu import NativeGpu

_log = logging.getLogger("gdscache")

Slots = Sequence[int] | npt.NDArray[np.int64]


class PageCopies(NamedTuple):
    """What `scatter` (a load) or `gather` (a store) is asked for."""

    direction: Direction
    extents: Extents
    slots: Slots
    blocks: torch.Tensor
    layers: range
    after: Sequence[Event]
    sums: bool


class QueuedCopies:
    """Copies that are queued. `event` is behind them; `read_event` is behind the last look at their source."""

    __slots__ = ("_digests", "event", "read_event")

    def __init__(self, event: Event, read_event: Event, digests: Callable[[], Checksums]) -> None:
        self.event = event
        self.read_event = read_event
        self._digests = digests

    def synchronize(self) -> None:
        """The calling thread waits for the copies."""
        if self.event is not None:
            self.event.synchronize()

    def checksums(self) -> Checksums:
        """What the bytes that were copied sum up to, uint64 of shape (pages, layers). Waits for the copies."""
        self.synchronize()
        return self._digests()


class Mover(abc.ABC):
    """Copies pages between extents and the planes of one pool.

    `slots`: the extents' slots; `blocks`: host int64 (pages, blocks_per_page), the planes' blocks of the same pages;
    `layers`: consecutive layers, all by default; `after`: events that the copies wait for; `sums`: whether
    `checksums()` of the result will be asked for.
    """

    name: str
    planes: PagedPlanes
    layout: PageLayout

    def scatter(
        self,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range | None = None,
        after: Sequence[Event] = (),
        *,
        sums: bool = False,
    ) -> QueuedCopies:
        """Queue copies from extents into the planes."""
        return self._move(PageCopies("load", extents, slots, blocks, self._layers(layers), after, sums))

    def gather(
        self,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range | None = None,
        after: Sequence[Event] = (),
        *,
        sums: bool = False,
    ) -> QueuedCopies:
        """Queue copies from the planes into extents."""
        return self._move(PageCopies("store", extents, slots, blocks, self._layers(layers), after, sums))

    @abc.abstractmethod
    def _move(self, copies: PageCopies) -> QueuedCopies:
        """`scatter` or `gather`."""

    @property
    def on_gpu(self) -> NativeGpu | None:
        """What copies on a GPU, where the planes are there."""
        return None

    def routes(self, direction: Direction, layers: range) -> tuple[int, int]:
        """The numbers that the native library has for the way of these layers of a page, without checksums and with."""
        return 0, 0

    @abc.abstractmethod
    def mark_stores(self) -> Event:
        """An event behind every gather that was queued so far."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What moves the bytes and why, as plain data for `stats()`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for everything queued here and give streams and buffers back; again is fine."""

    def _layers(self, layers: range | None) -> range:
        return range(self.layout.n_layers) if layers is None else layers
