"""Gather, scatter and checksums of fragmented pages as CUDA kernels (csrc/pages.cu).

They move bytes between paged planes and extents; the extents lie in GPU memory or in page-locked host memory, which the
kernels then read and write over the bus. All work is queued on the given stream, without synchronisation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from gdscache.kernels import jit
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import PagedPlanes

SOURCE = "pages.cu"
LISTED_BYTES = 3520  # of block indices that fit among a kernel's arguments
_COPY_FORM = f"PPPPPqqqq7IP{LISTED_BYTES}s"
FORMS = {
    "gather": _COPY_FORM,
    "scatter": _COPY_FORM,
    "gather_sums": f"{_COPY_FORM}IP",
    "scatter_sums": f"{_COPY_FORM}IP",
}
VARIANTS = tuple({"VECTOR": width} for width in (16, 8, 4, 2, 1))

SHORTEST = 241  # bytes: XXH3 has other forms for shorter inputs, which the host takes


@dataclasses.dataclass(frozen=True, slots=True)
class PlaneRuns:
    """The place of a plane's pages, in bytes. A block's tokens are one run, or one run a token if they are apart.
    `start`, `end`: of the plane in its layer of an extent."""

    base: int
    block_stride: int
    run_stride: int
    run_bytes: int
    runs_per_block: int
    start: int
    end: int


def can_look(layout: PageLayout) -> bool:
    """Whether a kernel can take the checksums of pages from the planes alone."""
    return all(end - start >= SHORTEST and (end - start) % 16 == 0 for start, end in layout.layer_bounds)


def plane_runs(planes: PagedPlanes) -> list[list[PlaneRuns]]:
    result = []
    for number, pieces in enumerate(planes.layout.pieces):
        start, records = planes.layout.layer_bounds[number][0], []
        for piece in pieces:
            base, block_stride, stride, run, count = planes.memory(piece)
            run, count = (run * count, 1) if count == 1 or stride == run else (run, count)
            begin = piece.offset - start
            records.append(PlaneRuns(base, block_stride, stride, run, count, begin, begin + piece.nbytes))
        result.append(records)
    return result


def uploaded(planes: PagedPlanes, runs: list[list[PlaneRuns]]) -> torch.Tensor:
    """The layers, then their planes, as the kernels read them: int64, in GPU memory."""
    layers: list[int] = []
    rows: list[int] = []
    for records, (start, end) in zip(runs, planes.layout.layer_bounds, strict=True):
        layers += [len(rows) // 6, len(records), start, end - start]
        for r in records:
            rows += [r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.end]
    return torch.tensor(layers + rows, dtype=torch.int64, device=planes.device)


class PageKernels:
    """The kernels for one set of planes, launched by the native library. Raises `KernelUnavailableError` if they cannot
    be built.

    `like`: kernels for other planes of the same GPU, whose compiled code is reused.
    """

    def __init__(self, planes: PagedPlanes, like: PageKernels | None = None) -> None:
        self.planes = planes
        self.device = planes.device
        self.layout = planes.layout
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.has_sums = all(end - start >= SHORTEST for start, end in self.layout.layer_bounds)
        self.can_look = can_look(self.layout)
        self.runs = plane_runs(planes)
        self._table = uploaded(planes, self.runs)
        self._vector = self._widest()
        self._built: dict[int, dict[str, jit.Kernel]] = {} if like is None else like._built
        self.build(self._vector)

    def spec(self) -> dict[str, Any]:
        """Their part of a `GpuSpec`."""
        functions = {name: kernel.pointer for name, kernel in self.build(self._vector).items()}
        about = {"vector": self._vector, "processors": self.processors, "sums": self.has_sums, "looks": self.can_look}
        return functions | about | {"table": self._table.data_ptr()}

    def build(self, vector: int) -> dict[str, jit.Kernel]:
        """The kernels for accesses of `vector` bytes; compiled, loaded and run once without pages."""
        if vector not in self._built:
            kernels = jit.build(SOURCE, FORMS, self.device, VECTOR=vector)
            stream = torch.cuda.current_stream(self.device)
            with torch.cuda.device(self.device):
                for name, kernel in kernels.items():  # the driver loads a kernel at its first launch, and may block
                    kernel.launch(1, 32, [*self._nothing(), *((1, 0) if name.endswith("sums") else ())], stream)
            self._built[vector] = kernels
        return self._built[vector]

    def _nothing(self) -> list[int | bytes]:
        """The arguments of a launch without pages. csrc/host/gpu/gpu_transfer.h has those of the others."""
        table = self._table.data_ptr()
        memory = [table, table + self.layout.n_layers * 32, 0, 0, 0, 0, 0, 0, self.planes.blocks]
        return [*memory, 0, 0, 0, 0, 1, self.planes.blocks_per_page, 0, 0, b""]

    def _widest(self) -> int:
        steps = [start for start, _ in self.layout.layer_bounds]
        for layer, records in zip(self.layout.layers, self.runs, strict=True):
            steps += [plane.row_bytes for plane in layer]
            for r in records:
                steps += [r.base, r.block_stride, *([r.run_stride] if r.runs_per_block > 1 else [])]
        return math.gcd(16, *steps)
