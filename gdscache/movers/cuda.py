"""The mover for a GPU: the native library's lanes (csrc/host/gpu/gpu.h), by the way that suits the size of the pieces.

The copy engine between page-locked extents and a ring in GPU memory, kernels between ring and planes; or one kernel
that reads and writes host memory itself; or the copy engine alone, into and out of the planes, which needs no kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gdscache.cuda.driver import Driver
from gdscache.cuda.streams import Event
from gdscache.errors import CapacityError, KernelUnavailableError
from gdscache.extents.base import Extents
from gdscache.kernels.cuda import PageKernels, plane_runs
from gdscache.kernels.gpu import ROUTES, ChunkSizes, CopyRoute, NativeGpu, events_of
from gdscache.movers.base import Mover, PageCopies, QueuedCopies
from gdscache.movers.choice import Calibration, Choice, Direction, Paths
from gdscache.pages.planes import PagedPlanes
from gdscache.tracing import OFF, Timeline


def staged(driver: Driver) -> None:
    """No calibration: copies are staged, whatever their size."""


class CudaMover(Mover):
    """`staging_bytes` of GPU memory are the ring: half for loads, half for stores, and neither borrows.

    `load_path` and `store_path` force a path; `auto` takes the one that `calibrate` found fastest on this machine for
    pieces of that size: `calibration.calibrated_if_possible`, which measures with movers that are forced. `kernels`:
    None where there are none, as `cause` says; then the copy engine does it alone, and checksums are taken on the host.
    Raises `CapacityError` when a share of the ring holds no page, `DeviceError` where the driver refuses.
    """

    def __init__(
        self,
        planes: PagedPlanes,
        staging_bytes: int,
        load_path: Choice,
        store_path: Choice,
        kernels: PageKernels | None,
        cause: str = "",
        sizes: ChunkSizes | None = None,
        calibrate: Callable[[Driver], Calibration | None] = staged,
        timeline: Timeline = OFF,
    ) -> None:
        self.name = "cuda" if kernels is not None else "copy_engine"
        self.planes = planes
        self.layout = planes.layout
        self.kernels = kernels
        self.driver = Driver(planes.device)
        self._cause = cause
        self._timeline = timeline
        share, extent = staging_bytes // 2, self.layout.extent_bytes
        if share < extent:
            raise CapacityError(
                f"half of gpu.staging is {share} bytes, a page has {extent}",
                f"set gpu.staging to at least {2 * extent}",
            )
        self._runs = plane_runs(planes) if kernels is None else kernels.runs
        if kernels is None:
            for choice in (load_path, store_path):
                if choice not in ("auto", "copy_engine"):
                    raise KernelUnavailableError(f"a path is {choice}, and {cause}", "set gpu.kernels to auto")
            load_path = store_path = "copy_engine"
        self.paths = Paths(load_path, store_path, functools.partial(calibrate, self.driver))
        self._routes: dict[tuple[Direction, range, bool], CopyRoute] = {}
        self.gpu: NativeGpu = NativeGpu(planes, self.driver, self._runs, kernels, staging_bytes, sizes)

    def _move(self, copies: PageCopies) -> QueuedCopies:
        direction, extents, slots, blocks, layers, after, sums = copies
        if not len(slots) or not layers:
            return QueuedCopies(None, None, lambda: np.empty((len(slots), len(layers)), np.uint64))
        route = self.path(direction, extents, layers, sums=sums)
        load = direction == "load"
        about = {"layers": layers, "pages": len(slots)}
        with self._timeline.span("scatter" if load else "gather", **about):
            point, read, ticket = self.gpu.copy(
                extents, slots, blocks, layers, events_of(after), route, load=load, sums=sums
            )
        return QueuedCopies(point, read, functools.partial(self.gpu.finish, ticket))

    def path(self, direction: Direction, extents: Extents, layers: range, *, sums: bool) -> CopyRoute:
        """The way that these layers of a page take; `device` where the extents are in GPU memory themselves."""
        if extents.rows.is_cuda:
            return "device"
        return self.route(direction, layers, sums=sums) if extents.pinned else "staged"

    def route(self, direction: Direction, layers: range, *, sums: bool) -> CopyRoute:
        """The way of these layers of a page between the planes and page-locked memory."""
        key = direction, layers, sums
        found = self._routes.get(key)
        if found is None:
            bounds = self.layout.layer_bounds
            span = bounds[layers.stop - 1][1] - bounds[layers.start][0]
            run = min(runs.run_bytes for layer in layers for runs in self._runs[layer])
            on_gpu = sums and self.kernels is not None and self.kernels.has_sums
            fused = self.kernels is not None and not self.kernels.can_look
            found = self._routes[key] = self.paths.choose(direction, span, run, sums=on_gpu, fused=fused)
        return found

    def routes(self, direction: Direction, layers: range) -> tuple[int, int]:
        plain, summed = (ROUTES.index(self.route(direction, layers, sums=sums)) for sums in (False, True))
        return plain, summed

    @property
    def on_gpu(self) -> NativeGpu:
        return self.gpu

    def mark_stores(self) -> Event:
        return self.gpu.last_point(loads=False)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": self._cause, "copy_engine": self.gpu.api, **self.paths.describe()}

    def close(self) -> None:
        self.gpu.close()
