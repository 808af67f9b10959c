"""The mover for a GPU: the copy engine between page-locked extents and a ring in GPU memory, kernels between ring and
planes; or one kernel that reads and writes host memory itself; or the copy engine alone, into and out of the planes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from gdscache.driver import Driver
from gdscache.errors import CapacityError, GdsCacheError
from gdscache.kernels.copy_engine import BATCH, Addresses, CopyEngine, joined, merge
from gdscache.kernels.cuda import LISTED_BYTES, ZERO_COPY_THREADS, ExtentArray, Indices, PageKernels
from gdscache.planes import PagedPlanes
from gdscache.streams import Event
from gdscache.tiers.bounce import Extents
from gdscache.tiers.chunks import Chunk, Transfer
from gdscache.tiers.lanes import SEGMENTS, Lane
from gdscache.tiers.paths import Calibration, Choice, Direction, Path, Paths
from gdscache.tiers.pieces import Pieces
from gdscache.tiers.transfer import Moved, Mover, Slots, host_digests
from gdscache.timeline.base import Span

_log = logging.getLogger("gdscache")

Route = Path | Literal["device"]

_CHUNK_BYTES = 512 << 20  # that one kernel moves over the bus: each start and end costs some 30 us of it
_LOOK_BYTES = 256 << 20  # that one kernel looks at behind a load's copies: each wait for them costs some 15 us
_LAST_LOOK_BYTES = 32 << 20  # ... behind the last ones, when nothing is copied any more
# The first chunk of a store is smaller than the others by so much: its copies wait for its kernel. A load's do not.
_FIRST: dict[Direction, int] = {"load": 1, "store": 4}


class CudaMover(Mover):
    """`staging_bytes` of GPU memory are the ring: half for loads, half for stores, and neither borrows.

    `load_path` and `store_path` force a path; `auto` takes the one that a calibration of this machine found fastest for
    pieces of that size. Raises `KernelUnavailableError` when the kernels cannot be built, `CapacityError` when a share
    of the ring holds no page.
    """

    name = "cuda"

    def __init__(
        self,
        planes: PagedPlanes,
        staging_bytes: int,
        load_path: Choice,
        store_path: Choice,
        kernels: PageKernels | None = None,
    ) -> None:
        self.planes = planes
        self.layout = planes.layout
        self.kernels = PageKernels(planes) if kernels is None else kernels
        self.driver = Driver(planes.device)
        self.engine = CopyEngine(self.driver)
        self._pageable = CopyEngine(self.driver, "single")
        share, extent = staging_bytes // 2, self.layout.extent_bytes
        if share < extent:
            raise CapacityError(
                f"half of gpu.staging is {share} bytes, a page has {extent}",
                f"set gpu.staging to at least {2 * extent}",
            )
        self.paths = Paths(load_path, store_path, self._calibration)
        self._pieces: dict[range, Pieces] = {}  # of layers that were moved together
        tables = max(64 << 10, share // SEGMENTS // 64, self._table_bytes(1))
        self._loads = Lane(self.driver, share, extent, tables, loads=True)
        try:
            self._stores = Lane(self.driver, share, extent, tables, loads=False)
        except GdsCacheError:  # no GPU memory for it
            self._loads.close()
            raise

    def _calibration(self) -> Calibration | None:
        """What this machine was measured to give; None, and a warning, where it cannot be measured."""
        from gdscache.tiers.calibrate import calibrated  # which measures with movers of this class

        try:
            return calibrated(self.driver, self.engine)
        except (GdsCacheError, torch.cuda.OutOfMemoryError) as error:
            _log.warning("copies between GPU and host are staged, whatever their size: %s", error)
            return None

    # -- the two directions --------------------------------------------------------------------------------------------

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
        on_gpu = sums and self.kernels.has_sums
        if not len(slots) or not layers:
            return Moved(None, None, host_digests(extents, (), layers))
        path = self.path(direction, extents, layers, sums=on_gpu)
        lane = self._loads if direction == "load" else self._stores
        on_gpu = on_gpu and (path != "copy_engine" or self.kernels.can_look)
        with lane.entered():
            transfer = Transfer(self.planes, extents, slots, blocks, layers, sums=on_gpu)
            try:
                if on_gpu or path != "copy_engine":
                    lane.follow(after, kernels=True)
                if path == "copy_engine":
                    lane.follow(after, kernels=False)
                    self._copy_alone(direction, lane, transfer)
                else:
                    step = self._load_chunk if direction == "load" else self._store_chunk
                    for chunk in self._chunks(direction, lane, transfer, path):
                        step(lane, transfer, chunk, path)
                read = None if path == "copy_engine" else lane.mark_kernels()
            finally:  # what is queued reads the transfer's tables, whatever else went wrong
                event = lane.keep(transfer)
        taken = transfer.read_digests if on_gpu else host_digests(extents, slots, layers)
        return Moved(event, read or event, taken)

    def path(self, direction: Direction, extents: Extents, layers: range, *, sums: bool) -> Route:
        """The way that these layers of a page take; `device` where the extents are in GPU memory themselves."""
        if extents.rows.is_cuda:
            return "device"
        if not extents.pinned:
            return "staged"
        bounds = self.layout.layer_bounds
        span = bounds[layers.stop - 1][1] - bounds[layers.start][0]
        run = min(runs.run_bytes for layer in layers for runs in self.kernels.runs[layer])
        return self.paths.choose(direction, span, run, sums=sums, fused=not self.kernels.can_look)

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _table_bytes(self, pages: int) -> int:
        """What the block indices and extent slots of so many pages take at most."""
        return pages * 8 * (self.planes.blocks_per_page + 1)

    def _chunks(self, direction: Direction, lane: Lane, transfer: Transfer, path: Route) -> Iterator[Chunk]:
        """Cut a transfer into chunks, each in a segment of its own."""
        most = {"staged": lane.segment_bytes, "copy_engine": _LOOK_BYTES}.get(path, _CHUNK_BYTES) // transfer.stride
        most = max(1, min(most, lane.table_bytes // self._table_bytes(1)))
        listed = LISTED_BYTES // (self.planes.blocks_per_page * transfer.item)  # pages whose blocks go with a launch
        listable = path in ("staged", "copy_engine")
        if listable and listed >= min(transfer.pages, most // 2):
            most = min(most, listed)
        first, size, last = 0, -(-most // _FIRST[direction]), max(1, _LAST_LOOK_BYTES // transfer.stride)
        while first < transfer.pages:
            left, segment = transfer.pages - first, lane.take()
            pages = min(size, left)
            if path == "copy_engine" and last < pages == left:
                pages -= last
            if listable and pages <= listed:
                yield Chunk(first, pages, segment, None, 0)
            else:
                table = transfer.table(first, pages)
                rows = segment.table + pages * self.planes.blocks_per_page * transfer.item
                yield Chunk(first, pages, segment, table, rows)
            first, size = first + pages, most

    def _bytes(self, direction: Direction, transfer: Transfer, chunk: Chunk) -> tuple[Addresses, Addresses, Addresses]:
        """The copies of a chunk's pages between extents and ring, neighbours merged."""
        pages = slice(chunk.first, chunk.first + chunk.pages)
        ring = transfer.steps[: chunk.pages] + np.uint64(chunk.segment.data)
        dst, src = (ring, transfer.sources[pages]) if direction == "load" else (transfer.sources[pages], ring)
        if not transfer.has_neighbours:
            return dst, src, transfer.sizes[pages]
        return merge(dst, src, transfer.sizes[pages], transfer.borders(chunk.first, chunk.pages))

    def _submit(self, lane: Lane, transfer: Transfer, parts: Sequence[Addresses]) -> None:
        """Queue copies: a batch runs when all of it is submitted, so long lists go as several."""
        engine = self.engine if transfer.extents.pinned else self._pageable
        with self.timeline.on_stream("copies", self._track(lane, "copy stream"), lane.copies, pieces=len(parts[0])):
            for at in range(0, len(parts[0]), BATCH):
                dst, src, sizes = (part[at : at + BATCH] for part in parts)
                engine.submit(dst, src, sizes, lane.copies.cuda_stream)

    def _load_chunk(self, lane: Lane, transfer: Transfer, chunk: Chunk, path: Route) -> None:
        driver, segment = lane.driver, chunk.segment
        copies, kernels = lane.copies.cuda_stream, lane.kernels.cuda_stream
        driver.wait(copies, segment.done)
        if path == "staged":
            parts = self._bytes("load", transfer, chunk)
            if (
                chunk.table is not None
            ):  # one batch with the table: by itself, so small a copy takes as long as a large one
                parts = joined(chunk.copy_of_table(), parts)
            self._submit(lane, transfer, parts)
        elif chunk.table is not None:
            self.engine.submit(*chunk.copy_of_table(), copies)
        driver.record(segment.copied, copies)
        driver.wait(kernels, segment.copied)
        self._launch(self.kernels.scatter, lane, transfer, chunk, path)
        driver.record(segment.done, kernels)

    def _store_chunk(self, lane: Lane, transfer: Transfer, chunk: Chunk, path: Route) -> None:
        driver, segment = lane.driver, chunk.segment
        copies, kernels = lane.copies.cuda_stream, lane.kernels.cuda_stream
        driver.wait(kernels, segment.copied)
        if chunk.table is not None:
            self.engine.submit(*chunk.copy_of_table(), kernels)
        self._launch(self.kernels.gather, lane, transfer, chunk, path)
        driver.record(segment.done, kernels)
        if path == "staged":
            driver.wait(copies, segment.done)
            self._submit(lane, transfer, self._bytes("store", transfer, chunk))
            driver.record(segment.copied, copies)

    def _launch(self, kernel: Callable[..., None], lane: Lane, transfer: Transfer, chunk: Chunk, path: Route) -> None:
        layers = transfer.layers
        if path == "staged":
            array = ExtentArray(chunk.segment.data, transfer.stride, chunk.pages, transfer.origin)
        else:
            extents = transfer.extents.rows
            array = ExtentArray(extents.data_ptr(), extents.stride(0), len(extents))
        indices = self._indices(transfer, chunk, 0 if path == "staged" else chunk.rows)
        with self._kernel_span(lane, transfer, chunk, path):
            if path == "zero_copy":
                blocks = self.kernels.zero_copy_blocks(layers)
                kernel(array, indices, layers, lane.kernels, transfer.digests_of(chunk), blocks, ZERO_COPY_THREADS)
            else:
                kernel(array, indices, layers, lane.kernels, transfer.digests_of(chunk))

    def _indices(self, transfer: Transfer, chunk: Chunk, rows: int) -> Indices:
        if chunk.table is None:
            listed = transfer.listed(chunk.first, chunk.pages)
            return Indices(0, 0, chunk.pages, transfer.wide, checked=True, listed=listed)
        return Indices(chunk.segment.table, rows, chunk.pages, transfer.wide, checked=True)

    def _kernel_span(self, lane: Lane, transfer: Transfer, chunk: Chunk, path: Route) -> Span:
        about = {"layers": transfer.layers, "pages": chunk.pages, "path": path}
        return self.timeline.on_stream("kernel", self._track(lane, "kernel stream"), lane.kernels, **about)

    def _track(self, lane: Lane, stream: str) -> str:
        return f"{'loads' if lane is self._loads else 'stores'}: {stream}"

    # -- the copy engine alone -----------------------------------------------------------------------------------------

    def _copy_alone(self, direction: Direction, lane: Lane, transfer: Transfer) -> None:
        """Pieces between extents and planes, and where checksums are wanted a kernel that looks at the planes: at what
        a load has brought there, and at what a store takes while it does."""
        if transfer.digests is None:
            self._copy_pieces(direction, lane, transfer, 0, transfer.pages)
            return
        driver, copies, kernels = lane.driver, lane.copies.cuda_stream, lane.kernels.cuda_stream
        for chunk in self._chunks(direction, lane, transfer, "copy_engine"):
            segment, end = chunk.segment, chunk.first + chunk.pages
            if direction == "load":
                driver.wait(copies, segment.done)
                if chunk.table is not None:
                    self.engine.submit(*chunk.copy_of_table(), copies)
                self._copy_pieces(direction, lane, transfer, chunk.first, end)
                driver.record(segment.copied, copies)
                driver.wait(kernels, segment.copied)
            elif chunk.table is not None:
                self.engine.submit(*chunk.copy_of_table(), kernels)
            with self._kernel_span(lane, transfer, chunk, "copy_engine"):
                digests = transfer.digests_of(chunk)
                assert digests is not None, "a look for nothing"
                self.kernels.look(self._indices(transfer, chunk, 0), transfer.layers, lane.kernels, digests)
            driver.record(segment.done, kernels)
            if direction == "store":
                self._copy_pieces(direction, lane, transfer, chunk.first, end)

    def _copy_pieces(self, direction: Direction, lane: Lane, transfer: Transfer, first: int, end: int) -> None:
        pieces = self._pieces.get(transfer.layers)
        if pieces is None:
            pieces = Pieces.of(self.kernels.runs, self.layout.layer_bounds, transfer.layers)
            self._pieces[transfer.layers] = pieces
        for planes, host, sizes in pieces.lists(transfer, first, end):
            self._submit(lane, transfer, (planes, host, sizes) if direction == "load" else (host, planes, sizes))

    # -- the rest ------------------------------------------------------------------------------------------------------

    def queues(self, extents: Extents) -> bool:
        return extents.pinned

    def mark_loads(self) -> Event:
        return self._loads.mark()

    def mark_stores(self) -> Event:
        return self._stores.mark()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": "", "copy_engine": self.engine.api, **self.paths.describe()}

    def close(self) -> None:
        self._loads.close()
        self._stores.close()
        self.engine.close()
        self._pageable.close()
