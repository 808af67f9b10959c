"""Gather and scatter of packed pages as CUDA kernels (csrc/packed.cu), with the checksums of the packed bytes.

The extents lie in GPU memory, or in page-locked host memory. Everything is queued on the stream given and nothing
synchronises.
"""

from __future__ import annotations

from typing import Any

import torch

from gdscache.kernels import jit
from gdscache.kernels.cuda import LISTED_BYTES, PlaneRuns, plane_runs, uploaded
from gdscache.pages.planes import PagedPlanes

SOURCE = "packed.cu"
_FORM = f"PPPPPqqqq7IP{LISTED_BYTES}sIPP"
FORMS = {"gather_packed": _FORM, "scatter_packed": _FORM}
VARIANTS = tuple({"VECTOR": width} for width in (16, 2))
THREADS = 256


class PackedKernels:
    """The kernels for one set of packed planes. Raises `KernelUnavailableError` when they cannot be built."""

    def __init__(self, planes: PagedPlanes) -> None:
        self.planes, self.layout, self.device = planes, planes.layout, planes.device
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.has_sums, self.can_look = True, False
        self.runs = plane_runs(planes)
        self.table = uploaded(planes, self.runs)
        self.kernels = jit.build(SOURCE, FORMS, self.device, VECTOR=self._vector(self.runs))

    def spec(self) -> dict[str, Any]:
        """Their part of a `GpuSpec`. Extents are read and written in words of 8 bytes."""
        gather, scatter = (self.kernels[name].pointer for name in FORMS)
        functions = {"gather": gather, "scatter": scatter, "gather_sums": gather, "scatter_sums": scatter}
        about = {"vector": 8, "processors": self.processors, "sums": True, "looks": False}
        return functions | about | {"table": self.table.data_ptr()}

    @staticmethod
    def _vector(runs: list[list[PlaneRuns]]) -> int:
        """16, where all rows lie at multiples of 16 bytes."""
        steps = [step for layer in runs for r in layer for step in (r.base, r.block_stride, r.run_stride, r.run_bytes)]
        return 2 if any(step % 16 for step in steps) else 16
