"""Copies of pages between memory and planes: by the native library on the host, or on a GPU by the fastest way.

On a GPU (csrc/host/gpu) there are three ways. The copy engine copies between page-locked extents and a ring in GPU
memory, and kernels between ring and planes; or one kernel reads and writes host memory itself; or the copy engine
copies straight into and out of the planes, which needs no kernels.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from gdscache.cuda.driver import Driver
from gdscache.cuda.host_memory import allocating
from gdscache.errors import CapacityError, KernelUnavailableError
from gdscache.kernels.choice import Choice, Direction, Path, Paths, calibrated_if_possible
from gdscache.kernels.cuda import ROUTES, ChunkSizes, NativeGpu, PageKernels, plane_runs
from gdscache.kernels.packed import PackedKernels
from gdscache.pages.planes import PagedPlanes

if TYPE_CHECKING:
    from gdscache.config import GpuConfig

_log = logging.getLogger("gdscache")

_LAST = 8  # the last layers are one part of this many


class PageCopies:
    """Planes in host memory, whose pages the library copies itself. `gpu`: the copies of a GPU's planes."""

    name = "native"
    gpu: NativeGpu | None = None

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes = planes

    def routes(self, direction: Direction, layers: range) -> tuple[int, int]:
        """The library's numbers for the way of these layers of a page, without checksums and with."""
        return 0, 0

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": "the planes are in host memory"}

    def close(self) -> None:
        """Wait for all queued copies, and release streams and buffers. Repeated calls are fine."""


class GpuCopies(PageCopies):
    """`staging_bytes` of GPU memory are the ring: half for loads, half for stores.

    `load_path` and `store_path` force a path; `auto` takes the one that the calibration found fastest on this machine
    for pieces of that size. `kernels`: None without kernels, for the reason `cause`: then the copy engine works alone,
    and checksums are taken on the host. Raises `CapacityError` if a share of the ring holds no page, `DeviceError` if
    the driver refuses.
    """

    gpu: NativeGpu

    def __init__(
        self,
        planes: PagedPlanes,
        staging_bytes: int,
        load_path: Choice,
        store_path: Choice,
        kernels: PageKernels | PackedKernels | None,
        cause: str = "",
        sizes: ChunkSizes | None = None,
    ) -> None:
        super().__init__(planes)
        self.name = "cuda" if kernels is not None else "copy_engine"
        self.kernels = kernels
        self.driver = Driver(planes.device)
        self._cause = cause
        share, extent = staging_bytes // 2, planes.layout.extent_bytes
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
        self.paths = Paths(load_path, store_path, functools.partial(calibrated_if_possible, self.driver))
        self._routes: dict[tuple[Direction, range, bool], Path] = {}
        self.gpu = NativeGpu(planes, self.driver, self._runs, kernels, staging_bytes, sizes)

    def route(self, direction: Direction, layers: range, *, sums: bool) -> Path:
        """The way of these layers of a page between the planes and page-locked memory."""
        key = direction, layers, sums
        found = self._routes.get(key)
        if found is None:
            bounds = self.planes.layout.layer_bounds
            span = bounds[layers.stop - 1][1] - bounds[layers.start][0]
            run = min(runs.run_bytes for layer in layers for runs in self._runs[layer])
            on_gpu = sums and self.kernels is not None and self.kernels.has_sums
            fused = self.kernels is not None and not self.kernels.can_look
            last = layers.start >= len(bounds) - len(bounds) // _LAST
            found = self._routes[key] = self.paths.choose(direction, span, run, sums=on_gpu, fused=fused, last=last)
        return found

    def routes(self, direction: Direction, layers: range) -> tuple[int, int]:
        plain, summed = (ROUTES.index(self.route(direction, layers, sums=sums)) for sums in (False, True))
        return plain, summed

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": self._cause, "copy_engine": self.gpu.api, **self.paths.describe()}

    def close(self) -> None:
        self.gpu.close()


def open_copies(planes: PagedPlanes, config: GpuConfig) -> PageCopies:
    """The copies for these planes. Raises `KernelUnavailableError` if `gpu.kernels` is `on` and there are none."""
    if planes.device.type == "cpu":
        if config.kernels == "on":
            raise KernelUnavailableError("gpu.kernels is on and the planes are in host memory", "set it to auto")
        return PageCopies(planes)
    if planes.layout.packed:  # nothing else packs pages there
        packed = PackedKernels(planes)
        with allocating("gpu.staging", config.staging, planes.device):
            return GpuCopies(planes, config.staging, "staged", "staged", packed)
    cause, kernels = "gpu.kernels is off", None
    if config.kernels != "off":
        try:
            kernels, cause = PageKernels(planes), ""
        except KernelUnavailableError as error:
            if config.kernels == "on":
                raise
            cause = error.message
            _log.warning(
                "pages are copied by the copy engine alone, and their checksums are taken on the host: %s", error
            )
    with allocating("gpu.staging", config.staging, planes.device):
        return GpuCopies(planes, config.staging, "auto", "auto", kernels, cause)
