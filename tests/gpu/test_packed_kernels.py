"""The CUDA kernels of packed pages against the library's codec, which the oracle holds: bytes, sums, and any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gdscache.errors import NativeCallError
from gdscache.kernels.packed import THREADS, PackedKernels
from gdscache.moves.native import NativePlanes
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from tests.support.hooks import hooks
from tests.support.native_parts import address
from tests.support.packed_pages import KINDS, bits, drawn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYOUTS = {
    "gqa": PageLayout.uniform([Plane("k", (8, 128), "bfloat16"), Plane("v", (8, 128), "bfloat16")], 2, 64, packed=True),
    "smol": PageLayout.uniform([Plane("k", (3, 64), "bfloat16"), Plane("v", (3, 64), "bfloat16")], 3, 64, packed=True),
    "mla": PageLayout.uniform([Plane("latent", (576,), "bfloat16")], 3, 16, packed=True),
    "odd": PageLayout.uniform([Plane("k", (3,), "bfloat16"), Plane("v", (5, 7), "bfloat16")], 2, 48, packed=True),
}


class Rig:
    """The same values on the host and on the GPU, in blocks of 16 tokens, and room for packed extents on both."""

    def __init__(self, layout: PageLayout, kind: str, pages: int = 6, gap: int = 0) -> None:
        rng = np.random.default_rng(11)
        self.layout, self.pages, per_page = layout, pages, layout.page_tokens // 16
        self.blocks = rng.permutation(pages * per_page + 2)[: pages * per_page].reshape(pages, per_page)
        host = []
        for planes in layout.layers:
            row = []
            for plane in planes:
                tensor = torch.zeros((pages * per_page + 2, 16 + gap, *plane.shape), dtype=torch.bfloat16)[:, :16]
                bits(tensor)[:] = drawn(kind, tensor.numel(), rng).reshape(tensor.shape)
                row.append(tensor)
            host.append(row)
        self.host = host
        self.gpu = [[self._there(tensor, gap) for tensor in row] for row in host]
        self.pool = NativePlanes(PagedPlanes(layout, host))
        self.kernels = PackedKernels(PagedPlanes(layout, self.gpu))
        self.extents = np.zeros((pages, layout.extent_bytes), np.uint8)
        self.there = torch.zeros((pages, layout.extent_bytes), dtype=torch.uint8, device="cuda")

    @staticmethod
    def _there(tensor: torch.Tensor, gap: int) -> torch.Tensor:
        whole = torch.zeros((len(tensor), 16 + gap, *tensor.shape[2:]), dtype=torch.bfloat16, device="cuda")
        whole[:, :16] = tensor.cuda()
        return whole[:, :16]

    def addresses(self, page: int) -> np.ndarray:
        return np.array([address(self.extents) + page * self.layout.extent_bytes], np.uint64)

    def launch(self, name: str, grid: int = 64) -> tuple[np.ndarray, list[int]]:
        digests = torch.zeros((self.pages, self.layout.n_layers), dtype=torch.int64, device="cuda")
        unfit = torch.zeros(self.pages, dtype=torch.int32, device="cuda")
        blocks = torch.from_numpy(self.blocks).cuda()
        kernels, layers = self.kernels, self.layout.n_layers
        table, count = kernels.table.data_ptr(), sum(map(len, kernels.runs))
        memory = [table, table + layers * 32, blocks.data_ptr(), 0]
        places = [self.there.data_ptr(), self.there.stride(0), 0, len(self.there), kernels.planes.blocks]
        counts = [self.pages, layers, 0, count, 0, kernels.planes.blocks_per_page, 1, 0, b""]
        arguments = [*memory, *places, *counts, 1, digests.data_ptr(), unfit.data_ptr()]
        blocks_of_threads, stream = min(grid, self.pages * layers), torch.cuda.current_stream()
        kernels.kernels[name].launch(blocks_of_threads, THREADS, arguments, stream)
        torch.cuda.synchronize()
        return digests.cpu().numpy().view(np.uint64), unfit.tolist()


@pytest.mark.parametrize("grid", [1, 64])
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_lie_and_come_back_as_on_the_host(layout: str, kind: str, gap: int, grid: int) -> None:
    rig = Rig(LAYOUTS[layout], kind, gap=gap)
    sums, unfit = rig.launch("gather_packed", grid)
    layers, nbytes = range(rig.layout.n_layers), rig.layout.page_bytes
    for page in range(rig.pages):
        try:
            wanted = hooks.gather(rig.pool, rig.blocks[page : page + 1], rig.addresses(page), layers)
        except NativeCallError:
            assert unfit[page]
            continue
        assert not unfit[page]
        assert np.array_equal(rig.there[page, :nbytes].cpu().numpy(), rig.extents[page, :nbytes])
        assert np.array_equal(sums[page], wanted[0])
    if any(unfit):
        return
    before = [[tensor.clone() for tensor in layer] for layer in rig.gpu]
    for layer in rig.gpu:
        for tensor in layer:
            tensor[rig.blocks.reshape(-1)] = 9
    assert np.array_equal(rig.launch("scatter_packed", grid)[0], sums)
    for ours, saved in zip(rig.gpu, before, strict=True):
        for tensor, wanted in zip(ours, saved, strict=True):
            assert torch.equal(tensor.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_bytes_touch_nothing_but_the_pages(layout: str) -> None:
    """Under compute-sanitizer, too. Lists that name a place twice are not compared: one of the two wins."""
    rig = Rig(LAYOUTS[layout], "equal")
    others = sorted(set(range(len(rig.gpu[0][0]))) - set(rig.blocks.reshape(-1).tolist()))
    before = [[tensor[others].clone() for tensor in layer] for layer in rig.gpu]
    rig.there.random_(0, 256)
    sums, _ = rig.launch("scatter_packed")
    rig.extents[:] = rig.there.cpu().numpy()
    for page in range(rig.pages):
        wanted = hooks.scatter(rig.pool, rig.blocks[page : page + 1], rig.addresses(page), range(rig.layout.n_layers))
        assert np.array_equal(sums[page], wanted[0])
    for layer, saved in zip(rig.gpu, before, strict=True):
        for tensor, kept in zip(layer, saved, strict=True):
            assert torch.equal(tensor[others].view(torch.int16), kept.view(torch.int16))
