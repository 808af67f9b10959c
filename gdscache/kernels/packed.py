"""Gather and scatter of packed pages as CUDA kernels (csrc/packed.cu), with the checksums of the packed bytes.

The extents lie in GPU memory, or in page-locked host memory. Everything is queued on the stream given and nothing
synchronises.
"""

from __future__ import annotations

import torch

from gdscache.kernels import jit
from gdscache.kernels.cuda import LISTED_BYTES, PlaneRuns, plane_runs
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
        self._table = self._upload(self.runs)
        self._planes = sum(map(len, self.runs))
        self.kernels = jit.build(SOURCE, FORMS, self.device, VECTOR=self._vector(self.runs))

    def loaded(self) -> tuple[int, int, int, int, int]:
        """CUfunctions in the order of `PageKernels.loaded`, and the address of their table."""
        gather, scatter = (self.kernels[name].pointer for name in FORMS)
        return gather, scatter, gather, scatter, self._table.data_ptr()

    def about(self) -> tuple[int, int, bool, bool]:
        """As `PageKernels.about`. Extents are read and written in words of 8 bytes."""
        return 8, self.processors, True, False

    def launch(
        self,
        name: str,
        extents: torch.Tensor,
        rows: torch.Tensor | None,
        blocks: torch.Tensor,
        digests: torch.Tensor,
        unfit: torch.Tensor,
        grid: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Move all layers of pages.

        `extents`: uint8 (slots, extent_bytes); `rows`: int64 (pages,), the slot of each page, or None for 0, 1, 2, ...;
        `blocks`: int64 (pages, blocks_per_page); `digests`: 64 bits (pages, layers); `unfit`: 32 bits (pages,), zeros,
        where a 1 comes for a page that does not fit. All in memory that the GPU reaches. `grid`: thread blocks.
        """
        layers, pages = self.layout.n_layers, len(blocks)
        table = self._table.data_ptr()
        memory = [table, table + layers * 32, blocks.data_ptr(), 0 if rows is None else rows.data_ptr()]
        places = [extents.data_ptr(), extents.stride(0), 0, len(extents), self.planes.blocks]
        counts = [pages, layers, 0, self._planes, 0, self.planes.blocks_per_page, 1, 0, b""]
        tail = [1, digests.data_ptr(), unfit.data_ptr()]
        self.kernels[name].launch(min(grid, pages * layers), THREADS, [*memory, *places, *counts, *tail], stream)

    def _upload(self, runs: list[list[PlaneRuns]]) -> torch.Tensor:
        """The layers, then the planes, as the kernels read them."""
        layers: list[int] = []
        planes: list[int] = []
        for records, (start, end) in zip(runs, self.layout.layer_bounds, strict=True):
            layers += [len(planes) // 6, len(records), start, end - start]
            for r in records:
                planes += [r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.end]
        return torch.tensor(layers + planes, dtype=torch.int64, device=self.device)

    @staticmethod
    def _vector(runs: list[list[PlaneRuns]]) -> int:
        """16, where all rows lie at multiples of 16 bytes."""
        steps = [step for layer in runs for r in layer for step in (r.base, r.block_stride, r.run_stride, r.run_bytes)]
        return 2 if any(step % 16 for step in steps) else 16
