"""From a configuration to the parts of an engine: tiers, buffers, threads, in the order in which they are needed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Sequence

import torch

from gdscache.config import Config, GpuConfig
from gdscache.errors import PinnedMemoryError
from gdscache.layout import PageLayout
from gdscache.loader import Loader
from gdscache.planes import PagedPlanes
from gdscache.storer import Storer
from gdscache.streams import resolve_device
from gdscache.tiers.bounce import Bounce, Extents
from gdscache.tiers.cpu import CpuTier, HostExtents
from gdscache.tiers.gpu import DeviceExtents, GpuTier
from gdscache.tiers.manager import TierManager
from gdscache.tiers.ssd import SsdTier
from gdscache.tiers.transfer import Mover, open_mover
from gdscache.writer import SsdWriter

_log = logging.getLogger("gdscache")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    planes: PagedPlanes
    manager: TierManager
    mover: Mover
    bounce: Bounce | None
    loader: Loader
    storer: Storer

    def close(self) -> None:
        """Close the tiers and give the buffers back. Loads and stores have ended."""
        with contextlib.ExitStack() as stack:
            if self.bounce is not None:
                stack.callback(self.bounce.close)
            stack.callback(self.manager.close)
            self.mover.close()


def build(config: Config, layout: PageLayout, attached: Sequence[Sequence[torch.Tensor]] | None) -> Parts:
    """Open everything, or raise and leave nothing open."""
    with contextlib.ExitStack() as undo:
        lock = threading.RLock()
        gpu = None
        if attached is None:
            gpu = GpuTier(layout, config.gpu.capacity, resolve_device(config.gpu.device))
            undo.callback(gpu.close)
            planes = gpu.pool
        else:
            planes = PagedPlanes(layout, attached)
        cpu = None
        if config.cpu is not None:
            cpu = CpuTier(layout, config.cpu.capacity, config.cpu.pin)
            undo.callback(cpu.close)
        ssd = None
        if config.ssd is not None:
            ssd = SsdTier(layout, config.ssd, str(planes.device), lock)
            undo.callback(ssd.close)
        bounce = _bounce(config, layout, planes.device, cpu, ssd)
        if bounce is not None:
            undo.callback(bounce.close)
        _check_paths(config.gpu, planes.device, [tier.extents for tier in (cpu, bounce) if tier is not None])
        manager = TierManager(lock, gpu, cpu, ssd)
        mover = open_mover(planes, config.gpu)
        undo.callback(mover.close)
        loader = Loader(manager, mover, bounce, layout, config.load)
        writer = None
        if ssd is not None and config.store.write_through:
            writer = SsdWriter(manager, ssd, layout.extent_bytes)
        storer = Storer(manager, mover, bounce, writer, layout, config.store)
        undo.pop_all()
    _log.info("tiers %s, pages of %d bytes, device %s", " -> ".join(manager.tiers), layout.page_bytes, planes.device)
    return Parts(planes, manager, mover, bounce, loader, storer)


def _check_paths(config: GpuConfig, device: torch.device, extents: Sequence[Extents]) -> None:
    """Refuse a path that host memory as it is cannot take; the mover would stage."""
    if device.type == "cuda" and not all(e.pinned for e in extents):
        for name, path in (("load_path", config.load_path), ("store_path", config.store_path)):
            if path not in ("auto", "staged"):
                raise PinnedMemoryError(
                    f"gpu.{name} is {path}, and host memory is not page-locked",
                    f"set cpu.pin to on, or gpu.{name} to auto",
                )


def _bounce(
    config: Config, layout: PageLayout, device: torch.device, cpu: CpuTier | None, ssd: SsdTier | None
) -> Bounce | None:
    """The bounce reserve: on the device where the SSD is reached from there and no CPU tier wants the bytes."""
    if ssd is None:
        return None
    if device.type in ssd.memory_kinds and device.type != "cpu" and cpu is None:
        on_device = DeviceExtents(layout, config.host_buffer, device)
        ssd.register(on_device.rows.view(-1))
        return Bounce(on_device)
    on_host = HostExtents(layout, config.host_buffer, config.cpu.pin if config.cpu is not None else "auto")
    ssd.register(on_host.buffer.view)
    if cpu is not None:
        ssd.register(cpu.extents.buffer.view)
    return Bounce(on_host)
