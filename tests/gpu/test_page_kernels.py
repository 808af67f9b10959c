"""The CUDA page kernels against the bytes of pages: every layout, checksums, skew, indices, streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xxhash

from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import SlotRangeError, UnsupportedRequestError
from gdscache.kernels.cuda import SHORTEST
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support.helpers import (
    EXTRA,
    MHA,
    MLA,
    SENTINEL,
    expected,
    layout_of,
    new_planes,
    read_page,
    untouched,
    write_page,
)
from tests.support.kernel_launcher import ExtentArray, Indices, Launcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GQA = PageLayout.uniform([Plane("k", (8, 128), "bfloat16"), Plane("v", (8, 128), "bfloat16")], 2, 16)
LATENT = PageLayout.uniform([Plane("latent", (576,), "bfloat16")], 3, 5)
FP8 = PageLayout.uniform([Plane("latent", (656,), "uint8")], 3, 1)  # layers off the 64 grid, one row a page
ODD = PageLayout.uniform([Plane("k", (3,), "float8_e4m3fn"), Plane("v", (5, 7), "bfloat16")], 2, 3)
WIDE = PageLayout.uniform([Plane("k", (2, 8), "float16"), Plane("v", (2, 8), "float16")], 2, 4)
LAYOUTS = {
    "mha": layout_of(MHA), "mla": layout_of(MLA), "extra": layout_of(EXTRA), "gqa": GQA, "latent": LATENT, "fp8": FP8,
    "odd": ODD, "strided": WIDE,
}  # fmt: skip


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


def digests(layout: PageLayout, data: Any, layers: range) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[a:b].tobytes()) for a, b in layout.layer_bounds[layers.start : layers.stop]]


@pytest.fixture(autouse=True)
def _closed_buffers() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    while Rig.buffers:
        Rig.buffers.pop().close()


class Rig:
    """Planes on the GPU with random pages in shuffled blocks, and extents on the GPU or in page-locked memory."""

    buffers: ClassVar[list[HostBuffer]] = []

    def __init__(
        self,
        layout: PageLayout,
        pages: int = 5,
        block_tokens: int | None = None,
        order: str = "plain",
        host: bool = False,
    ) -> None:
        tokens = block_tokens or layout.page_tokens
        per_page = layout.page_tokens // tokens
        self.layout, self.pages = layout, pages
        self.pool = new_planes(layout, pages * per_page + 3, tokens, "cuda", order)
        self.planes = PagedPlanes(layout, self.pool)
        self.kernels = Launcher(self.planes)
        rng = np.random.default_rng(3)
        self.blocks = rng.permutation(pages * per_page + 3)[: pages * per_page].reshape(pages, per_page)
        self.rows = rng.permutation(pages + 2)[:pages]
        self.buffer = HostBuffer((pages + 2) * layout.extent_bytes, "on") if host else None
        if self.buffer is not None:
            self.buffers.append(self.buffer)
        flat = self.buffer.tensor if self.buffer else torch.empty((pages + 2) * layout.extent_bytes, dtype=torch.uint8)
        self.extents = (flat if host else flat.cuda()).view(pages + 2, layout.extent_bytes)
        self.extents.fill_(SENTINEL)
        self.data = [expected(layout, page(i)) for i in range(pages)]
        self.digests = torch.zeros((pages, layout.n_layers), dtype=torch.int64, device="cuda")
        self._kept: list[torch.Tensor] = []

    def fill_planes(self) -> None:
        for blocks, data in zip(self.blocks.tolist(), self.data, strict=True):
            write_page(self.pool, self.layout, blocks, data)

    def fill_extents(self) -> None:
        for row, data in zip(self.rows.tolist(), self.data, strict=True):
            self.extents[row, : len(data)] = torch.from_numpy(data).to(self.extents.device)
        torch.cuda.synchronize()

    def indices(self, dtype: torch.dtype = torch.int64) -> Indices:
        self._kept = [torch.from_numpy(a).to(dtype).cuda() for a in (self.blocks, self.rows)]
        addresses = [t.data_ptr() for t in self._kept]
        return Indices(addresses[0], addresses[1], self.pages, wide=dtype is torch.int64)

    def array(self) -> ExtentArray:
        return ExtentArray(self.extents.data_ptr(), self.layout.extent_bytes, len(self.extents))

    def sums(self) -> int | None:
        return self.digests.data_ptr() if self.kernels.has_sums else None

    def every(self) -> range:
        return range(self.layout.n_layers)

    def assert_planes(self) -> None:
        for blocks, data in zip(self.blocks.tolist(), self.data, strict=True):
            assert np.array_equal(read_page(self.pool, self.layout, blocks), data)
        rest = set(range(self.planes.blocks)) - set(self.blocks.ravel().tolist())
        assert untouched(self.pool, rest)

    def assert_extents(self) -> None:
        torch.cuda.synchronize()
        for row, data in zip(self.rows.tolist(), self.data, strict=True):
            assert np.array_equal(self.extents[row, : len(data)].cpu().numpy(), data)
            assert bool((self.extents[row, len(data) :] == SENTINEL).all()), "the padding was written"
        rest = sorted(set(range(self.pages + 2)) - set(self.rows.tolist()))
        assert bool((self.extents[rest] == SENTINEL).all())

    def assert_digests(self, layers: range | None = None) -> None:
        if not self.kernels.has_sums:
            return
        which = layers or self.every()
        got = self.digests.view(-1)[: self.pages * len(which)].cpu().numpy().view(np.uint64).reshape(self.pages, -1)
        assert got.tolist() == [digests(self.layout, data, which) for data in self.data]


@pytest.mark.parametrize("host", [False, True], ids=["device", "zero-copy"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("name", "order"), [*((name, "plain") for name in LAYOUTS), ("strided", "kv_first"), ("strided", "blocks_first")]
)
def test_moves_bytes_and_takes_the_librarys_checksums(name: str, order: str, dtype: torch.dtype, host: bool) -> None:
    layout, stream = LAYOUTS[name], torch.cuda.current_stream()
    for tokens in sorted({1, layout.page_tokens}):
        rig = Rig(layout, block_tokens=tokens, order=order, host=host)
        rig.fill_planes()
        rig.kernels.gather(rig.array(), rig.indices(dtype), rig.every(), stream, rig.sums())
        rig.assert_extents()
        rig.assert_digests()
        rig = Rig(layout, block_tokens=tokens, order=order, host=host)
        rig.fill_extents()
        rig.kernels.scatter(rig.array(), rig.indices(dtype), rig.every(), stream, rig.sums(), 2, 1024)
        rig.assert_planes()
        rig.assert_digests()


def test_checksums_of_every_length() -> None:
    """Around the borders of stripes (64), blocks (1,024) and words; rows of one byte, so that any length is a layer."""
    lengths = [*range(SHORTEST, 330), *range(1000, 1100), *range(2030, 2060), *range(5115, 5125), 8192, 16401]
    layout = PageLayout(tuple((Plane("p", (n,), "uint8"),) for n in lengths), 1)
    rig = Rig(layout, pages=2)
    rig.fill_extents()
    rig.kernels.scatter(rig.array(), rig.indices(), rig.every(), torch.cuda.current_stream(), rig.sums())
    rig.assert_planes()
    rig.assert_digests()
    for stride in (16, 8, 4, 2):  # the same by wider accesses
        lengths = [n for n in range(SHORTEST, 4200) if n % stride == 0][:: 37 // stride + 1]
        layout = PageLayout(tuple((Plane("p", (n,), "uint8"),) for n in lengths), 1)
        rig = Rig(layout, pages=3)
        rig.fill_planes()
        rig.kernels.gather(rig.array(), rig.indices(), rig.every(), torch.cuda.current_stream(), rig.sums())
        rig.assert_extents()
        rig.assert_digests()


def test_a_layer_too_short_for_the_kernel_is_refused_with_checksums_and_moved_without() -> None:
    layout = PageLayout.uniform([Plane("p", (SHORTEST - 1,), "uint8")], 2, 1)
    rig = Rig(layout)
    rig.fill_extents()
    assert not rig.kernels.has_sums
    with pytest.raises(UnsupportedRequestError, match="241"):
        rig.kernels.scatter(
            rig.array(), rig.indices(), rig.every(), torch.cuda.current_stream(), rig.digests.data_ptr()
        )
    rig.kernels.scatter(rig.array(), rig.indices(), rig.every(), torch.cuda.current_stream())
    rig.assert_planes()


@pytest.mark.parametrize("layers", [range(1, 2), range(1, 3), range(2, 3)], ids=str)
@pytest.mark.parametrize("skew", [0, 1, 8, 48, 4095])
def test_part_of_the_layers_from_a_packed_row_with_a_byte_skew(layers: range, skew: int) -> None:
    layout = LATENT
    rig = Rig(layout, pages=4)
    start, end = layout.layer_bounds[layers.start][0], layout.layer_bounds[layers.stop - 1][1]
    stride = end - start + skew + 3
    packed = torch.full((4 * stride,), SENTINEL, dtype=torch.uint8)
    for i, data in enumerate(rig.data):
        packed[i * stride + skew : i * stride + skew + end - start] = torch.from_numpy(data[start:end])
    packed = packed.cuda()
    array = ExtentArray(packed.data_ptr(), stride, 4, origin=start - skew)
    given = rig.indices()
    indices = Indices(given.blocks, 0, 4, wide=True)
    stream = torch.cuda.current_stream()
    rig.kernels.scatter(array, indices, layers, stream, rig.sums())
    rig.assert_digests(layers)
    for blocks, data in zip(rig.blocks.tolist(), rig.data, strict=True):
        got = read_page(rig.pool, layout, blocks)
        assert np.array_equal(got[start:end], data[start:end])
        assert (np.delete(got, np.s_[start:end]) == SENTINEL).all()
    before = packed.clone()
    packed.fill_(SENTINEL)
    rig.kernels.gather(array, indices, layers, stream)
    assert torch.equal(packed, before)


def test_indices_out_of_range_are_skipped_counted_and_never_followed() -> None:
    rig = Rig(LAYOUTS["mha"], pages=6, block_tokens=2)
    rig.fill_extents()
    good = rig.blocks.copy()
    bad_page = {1: -1, 3: rig.planes.blocks, 4: 1 << 40}
    for i, value in bad_page.items():
        rig.blocks[i, 1] = value
    rig.rows[5] = len(rig.extents)
    rig.kernels.scatter(rig.array(), rig.indices(), rig.every(), torch.cuda.current_stream())
    assert rig.kernels.skipped() == 4
    for i in (0, 2):
        assert np.array_equal(read_page(rig.pool, rig.layout, good[i].tolist()), rig.data[i])
    first_tokens = [good[i, 0] for i in bad_page]  # the good half of a page with a bad block
    assert not untouched(rig.pool, first_tokens)
    named = {int(b) for i in range(5) for b in rig.blocks[i] if 0 <= b < rig.planes.blocks}
    assert untouched(rig.pool, set(range(rig.planes.blocks)) - named)
    before = rig.extents.clone()
    rig.blocks[:] = -5
    rig.kernels.gather(rig.array(), rig.indices(torch.int32), rig.every(), torch.cuda.current_stream())
    assert torch.equal(rig.extents, before)
    assert rig.kernels.skipped() == 4 + 12 + 1


@pytest.mark.parametrize("pages", [1, 63, 64, 65, 67, 128, 129])
@pytest.mark.parametrize("quota", [1, 3, None])
def test_any_number_of_pages_with_any_number_of_blocks(pages: int, quota: int | None) -> None:
    rig = Rig(FP8, pages=pages)
    rig.fill_planes()
    rig.kernels.gather(rig.array(), rig.indices(), rig.every(), torch.cuda.current_stream(), rig.sums(), quota)
    rig.assert_extents()
    rig.assert_digests()


def test_no_pages_and_no_layers_are_no_work() -> None:
    rig = Rig(GQA)
    nothing = Indices(0, 0, 0, wide=False)
    for move in (rig.kernels.gather, rig.kernels.scatter):
        move(rig.array(), nothing, rig.every(), torch.cuda.current_stream(), rig.sums())
        move(rig.array(), rig.indices(), range(0), torch.cuda.current_stream())
    assert untouched(rig.pool, range(rig.planes.blocks))
    for wrong in (range(1, 9), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(SlotRangeError):
            rig.kernels.scatter(rig.array(), rig.indices(), wrong, torch.cuda.current_stream())


def test_side_streams_and_the_legacy_stream_are_in_order() -> None:
    rig = Rig(GQA)
    rig.fill_extents()
    indices, side = rig.indices(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.default_stream())
    for stream in (side, torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # a launch that went elsewhere would be early, and then overwritten
            for tensors in rig.pool:
                for t in tensors:
                    t.view(torch.uint8).fill_(SENTINEL)
            rig.kernels.scatter(rig.array(), indices, rig.every(), stream)
        stream.synchronize()
        rig.assert_planes()


def test_recorded_into_a_graph_and_replayed() -> None:
    rig = Rig(GQA)
    rig.fill_extents()
    indices, sums = rig.indices(), rig.sums()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.kernels.scatter(rig.array(), indices, rig.every(), torch.cuda.current_stream(), sums)
    assert untouched(rig.pool, range(rig.planes.blocks)), "it ran while it was recorded"
    for shift in (0, 1):  # new bytes, same graph
        rig.data = [np.roll(data, shift) for data in rig.data]
        rig.fill_extents()
        graph.replay()
        torch.cuda.synchronize()
        rig.assert_planes()
        rig.assert_digests()


def test_offsets_beyond_four_gib() -> None:
    """Both sides: a pool of more than 2**32 bytes, and extents beyond that distance."""
    layout = PageLayout.uniform([Plane("latent", (4096,), "uint8")], 1, 512)  # 2 MiB a page
    pages = (5 << 30) // layout.page_bytes
    pool = [[torch.zeros((pages, 512, 4096), dtype=torch.uint8, device="cuda")]]
    planes = PagedPlanes(layout, pool)
    kernels = Launcher(planes)
    extents = torch.zeros((pages, layout.extent_bytes), dtype=torch.uint8, device="cuda")
    blocks, rows = torch.tensor([pages - 1, 0, pages - 2]).cuda(), torch.tensor([0, pages - 1, pages - 2]).cuda()
    fresh = torch.randint(0, 256, (3, 512, 4096), dtype=torch.uint8, device="cuda")
    pool[0][0][blocks] = fresh
    array = ExtentArray(extents.data_ptr(), layout.extent_bytes, pages)
    stream = torch.cuda.current_stream()
    kernels.gather(array, Indices(blocks.data_ptr(), rows.data_ptr(), 3, wide=True), range(1), stream)
    assert torch.equal(extents[rows].view(fresh.shape), fresh)
    assert int(extents.any(dim=1).count_nonzero()) == 3
    pool[0][0].zero_()
    kernels.scatter(array, Indices(blocks.data_ptr(), rows.data_ptr(), 3, wide=True), range(1), stream)
    assert torch.equal(pool[0][0][blocks], fresh)
