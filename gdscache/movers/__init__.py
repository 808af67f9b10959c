"""Movers copy pages between extents and planes: in host memory, or on a GPU. `open_mover` chooses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gdscache.errors import KernelUnavailableError
from gdscache.movers.base import Mover
from gdscache.pages.planes import PagedPlanes
from gdscache.runtime.allocation import allocating
from gdscache.tracing import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.config import GpuConfig

_log = logging.getLogger("gdscache")


def open_mover(planes: PagedPlanes, config: GpuConfig, timeline: Timeline = OFF) -> Mover:
    """The mover for these planes. Raises `KernelUnavailableError` where `gpu.kernels: on` cannot be had."""
    if planes.device.type == "cpu":
        from gdscache.movers.host import HostMover

        if config.kernels == "on":
            raise KernelUnavailableError("gpu.kernels is on and the planes are in host memory", "set it to auto")
        return HostMover(planes)
    from gdscache.kernels.cuda import PageKernels
    from gdscache.movers.calibration import calibrated_if_possible
    from gdscache.movers.cuda import CudaMover

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
        return CudaMover(
            *(planes, config.staging, "auto", "auto", kernels, cause),
            calibrate=calibrated_if_possible,
            timeline=timeline,
        )
