"""The route of pages between SSD and planes: straight through GPU memory, or through host memory.

`direct`: the transport reads into the bounce reserve on the GPU, and a kernel scatters from there. `via_cpu`: it reads
into slots of the CPU tier, where the page stays (or into the bounce reserve in host memory), and the page is copied
from there. Where a transport can do both, the faster is taken, as measured with the engine's own files when it opens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection
from typing import Literal

import numpy as np
import torch

from gdscache.arrays import Int64Array
from gdscache.config import SsdConfig
from gdscache.disk.slab import SlabIO
from gdscache.errors import NoMemoryError, StorageError, TransportUnavailableError
from gdscache.extents import DeviceExtents, HostExtents
from gdscache.index.index import PageIndex
from gdscache.pages.layout import PageLayout
from gdscache.storage.base import Memory, Op, memory_of, part
from gdscache.storage.calls import carry

SsdRoute = Literal["direct", "via_cpu"]
AskedRoute = Literal["auto", "direct", "via_cpu"]

_log = logging.getLogger("gdscache")
_BYTES = 32 << 20  # bytes that a measurement moves
_PIECE_BYTES = 4 << 20
_TIMES = 3
_DEADLINE_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class RouteChoice:
    """A route, the reason, and the measured GB/s by route."""

    route: SsdRoute
    reason: str
    gb_per_second: dict[str, float] = dataclasses.field(default_factory=dict)


def choose(
    layout: PageLayout, device: torch.device, config: SsdConfig, io: SlabIO, index: PageIndex, *, keep: bool
) -> RouteChoice:
    """The route for pages of the SSD; logs it in one line. `keep`: a CPU tier exists, so host memory is needed.

    Raises `TransportUnavailableError` where the configured route is impossible.
    """
    found = decided(config.route, io.transport.memory_kinds, device, keep=keep) or _faster(io, index, layout, device)
    _log.info("%s: pages go %s: %s", config.path, found.route, found.reason)
    return found


def decided(asked: AskedRoute, kinds: Collection[str], device: torch.device, *, keep: bool) -> RouteChoice | None:
    """The route for planes on `device` with a transport that moves `kinds` of memory; None where both are possible and
    `_faster` decides. Raises as `choose` does."""
    if "host" not in kinds and (keep or asked == "via_cpu"):
        what = "ssd.route is via_cpu" if asked == "via_cpu" else "there is a CPU tier"
        raise TransportUnavailableError(f"{what}, but the transport moves no host memory", "set another ssd.transport")
    direct = device.type == "cuda" and "cuda" in kinds
    if asked == "direct" and not direct:
        cause = f"the planes are on {device}" if device.type != "cuda" else "the transport moves no GPU memory"
        raise TransportUnavailableError(
            f"ssd.route is direct, but {cause}", "set ssd.transport to cufile, kvikio or nixl, or ssd.route to auto"
        )
    if asked != "auto":
        return RouteChoice(asked, "configured")
    if not direct:
        return RouteChoice(
            "via_cpu", f"the transport moves {' and '.join(sorted(kinds))} memory, the planes are on {device}"
        )
    if "host" not in kinds:
        return RouteChoice("direct", "the transport moves GPU memory only")
    return None


def _faster(io: SlabIO, index: PageIndex, layout: PageLayout, device: torch.device) -> RouteChoice:
    pages = max(1, min(_BYTES // layout.extent_bytes, index.slots))
    with contextlib.ExitStack() as undo:
        host = HostExtents(layout, pages * layout.extent_bytes, "auto")
        undo.callback(host.close)
        try:
            there = DeviceExtents(layout, pages * layout.extent_bytes, device)
            undo.callback(there.close)
            return _measured(io, index, host, there, undo)
        except (StorageError, NoMemoryError) as error:
            return RouteChoice("via_cpu", f"the direct route cannot be measured: {error}")


def _measured(
    io: SlabIO, index: PageIndex, host: HostExtents, there: DeviceExtents, undo: contextlib.ExitStack
) -> RouteChoice:
    """Read the same slots both ways: free slots, after writing noise to them, or the slab's present bytes."""
    slots, free = _slots(index, host.slots)
    for memory in (host.buffer.view, there.rows.view(-1)):
        io.transport.register(memory)
        undo.callback(io.transport.deregister, memory)
    if free:
        noise = np.random.default_rng(0).integers(0, 256, host.rows.shape, dtype=np.uint8)
        host.rows.copy_(torch.from_numpy(noise))
        _move(io, Op.WRITE, slots, host, undo)
    host.rows.zero_()
    reading = _best(lambda: _move(io, Op.READ, slots, host, undo))
    copied = torch.empty_like(there.rows)
    copying = _best(lambda: _copy(copied, host.rows))
    straight = _best(lambda: _move(io, Op.READ, slots, there, undo))
    same = torch.equal(copied, there.rows)
    nbytes = len(slots) * host.layout.extent_bytes
    rates = {"direct": nbytes / straight / 1e9, "via_cpu": nbytes / max(reading, copying) / 1e9}
    if not same:
        return RouteChoice("via_cpu", "the direct route reads other bytes", rates)
    route: SsdRoute = "direct" if rates["direct"] > rates["via_cpu"] else "via_cpu"
    return RouteChoice(route, f"{rates['direct']:.1f} GB/s direct, {rates['via_cpu']:.1f} via the CPU", rates)


def _slots(index: PageIndex, pages: int) -> tuple[Int64Array, bool]:
    free = [slot for first, count in index.free_runs() for slot in range(first, first + count)][:pages]
    if len(free) == pages:
        return np.array(free, dtype=np.int64), True
    return np.arange(pages, dtype=np.int64), False


def _move(
    io: SlabIO, op: Op, slots: Int64Array, extents: HostExtents | DeviceExtents, undo: contextlib.ExitStack
) -> None:
    """`undo` frees the memory, after any late I/O."""
    size, flat = extents.layout.extent_bytes, extents.flat
    memory: Memory = flat if isinstance(flat, memoryview) else memory_of(flat)
    pieces = (
        (file, offset, part(memory, first * size, (first + count) * size))
        for file, offset, first, count in io.stretches(slots, _PIECE_BYTES)
    )
    carry(io.transport, op, pieces, _DEADLINE_S, undo)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
    torch.cuda.synchronize(target.device)


def _best(action: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times)
