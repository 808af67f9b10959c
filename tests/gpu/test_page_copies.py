"""Copies of pages on a GPU: every path gives the bytes and checksums of the host, in any order of pages and layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gdscache.cuda.streams import record
from gdscache.errors import CapacityError
from gdscache.extents import DeviceExtents, Extents, HostExtents
from gdscache.kernels.copies import GpuCopies
from gdscache.kernels.cuda import ChunkSizes, CopyRoute, PageKernels, StreamPoint
from gdscache.pages.checksum import layer_checksums
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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROW = PageLayout.uniform([Plane("latent", (656,), "uint8")], 5, 1)
LATENT = PageLayout.uniform([Plane("latent", (576,), "bfloat16")], 5, 16)
MANY = PageLayout.uniform([Plane("latent", (16,), "bfloat16")], 2, 32)
ODD = PageLayout.uniform([Plane("p", (250,), "uint8")], 3, 1)  # a kernel sums such layers only while it moves them
SHORT = PageLayout.uniform([Plane("p", (40,), "uint8")], 3, 2)  # its checksums are the host's
LARGE = PageLayout.uniform([Plane("p", (65536,), "uint8")], 8, 16)  # 8 MiB a page
LAYOUTS = {"mha": layout_of(MHA), "mla": layout_of(MLA), "extra": layout_of(EXTRA), "row": ROW, "latent": LATENT}
PATHS = ["staged", "zero_copy", "copy_engine", "auto", "device", "pageable", "no kernels", "device, no kernels"]


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


@dataclasses.dataclass
class Moved:
    """Copies that are queued."""

    rig: Rig
    point: StreamPoint
    ticket: int

    def checksums(self) -> Any:
        self.point.synchronize()
        return self.rig.copies.gpu.finish(self.ticket)


class Rig:
    """Copies of planes in shuffled blocks and extents in shuffled slots."""

    def __init__(
        self,
        layout: PageLayout,
        path: str,
        pages: int = 5,
        block_tokens: int | None = None,
        staging: int | None = None,
        sizes: ChunkSizes | None = None,
    ) -> None:
        tokens = block_tokens or layout.page_tokens
        per_page = layout.page_tokens // tokens
        self.layout, self.pages = layout, pages
        self.pool = new_planes(layout, pages * per_page + 2, tokens, "cuda")
        planes = PagedPlanes(layout, self.pool)
        choice: Any = path if path in ("staged", "zero_copy", "copy_engine") else "auto"
        nbytes = staging or 64 * (layout.extent_bytes + 4096)
        kernels = None if "no kernels" in path else PageKernels(planes)
        self.copies = GpuCopies(planes, nbytes, choice, choice, kernels, "a test", sizes)
        capacity = (pages + 2) * layout.extent_bytes
        self.extents: Extents = (
            DeviceExtents(layout, capacity, torch.device("cuda", 0))
            if "device" in path
            else HostExtents(layout, capacity, "off" if path == "pageable" else "on")
        )
        self.extents.rows.fill_(SENTINEL)
        rng = np.random.default_rng(5)
        self.blocks = rng.permutation(pages * per_page + 2)[: pages * per_page].reshape(pages, per_page)
        self.slots = rng.permutation(pages + 2)[:pages].tolist()
        self.data = [expected(layout, page(i)) for i in range(pages)]

    def move(self, layers: range | None = None, after: Sequence[Any] = (), *, load: bool, sums: bool = False) -> Moved:
        """Queue copies of all pages, by the way that an engine takes."""
        layers = range(self.layout.n_layers) if layers is None else layers
        route: CopyRoute = "device" if self.extents.rows.is_cuda else "staged"
        if self.extents.pinned and not self.extents.rows.is_cuda:
            route = self.copies.route("load" if load else "store", layers, sums=sums)
        given = self.extents, np.array(self.slots, np.int64), self.blocks, layers, after, route
        point, ticket = self.copies.gpu.copy(*given, load=load, sums=sums)
        return Moved(self, point, ticket)

    def scatter(self, *given: Any, **options: Any) -> Moved:
        return self.move(*given, load=True, **options)

    def gather(self, *given: Any, **options: Any) -> Moved:
        return self.move(*given, load=False, **options)

    def close(self) -> None:
        self.copies.close()
        self.extents.close()

    def fill_planes(self) -> None:
        for blocks, data in zip(self.blocks.tolist(), self.data, strict=True):
            write_page(self.pool, self.layout, blocks, data)

    def fill_extents(self) -> None:
        for slot, data in zip(self.slots, self.data, strict=True):
            self.extents.rows[slot, : len(data)] = torch.from_numpy(data).to(self.extents.rows.device)
        torch.cuda.synchronize()

    def sums(self, layers: range | None = None) -> Any:
        which = layers or range(self.layout.n_layers)
        bounds = self.layout.layer_bounds[which.start : which.stop]
        return np.stack([layer_checksums(data.data, bounds) for data in self.data])

    def assert_planes(self) -> None:
        for blocks, data in zip(self.blocks.tolist(), self.data, strict=True):
            assert np.array_equal(read_page(self.pool, self.layout, blocks), data)
        assert untouched(self.pool, set(range(self.copies.planes.blocks)) - set(self.blocks.reshape(-1).tolist()))

    def assert_extents(self) -> None:
        rows = self.extents.rows.cpu()
        for slot, data in zip(self.slots, self.data, strict=True):
            assert np.array_equal(rows[slot, : len(data)].numpy(), data)
            assert bool((rows[slot, len(data) :] == SENTINEL).all()), "the padding was written"
        assert bool((rows[sorted(set(range(self.pages + 2)) - set(self.slots))] == SENTINEL).all())


@pytest.fixture
def rigs() -> Iterator[Any]:
    opened: list[Rig] = []

    def make(*given: Any, **options: Any) -> Rig:
        opened.append(Rig(*given, **options))
        return opened[-1]

    yield make
    for rig in opened:
        rig.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_with_checksums(rigs: Any, name: str, path: str) -> None:
    layout = LAYOUTS[name]
    for tokens in sorted({1, layout.page_tokens}):
        rig = rigs(layout, path, block_tokens=tokens)
        rig.fill_planes()
        moved = rig.gather(None, (record(torch.device("cuda", 0)),), sums=True)
        assert np.array_equal(moved.checksums(), rig.sums())
        rig.assert_extents()
        rig = rigs(layout, path, block_tokens=tokens)
        rig.fill_extents()
        moved = rig.scatter(sums=True)
        assert np.array_equal(moved.checksums(), rig.sums())
        rig.assert_planes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layers", [range(1, 2), range(1, 4), range(4, 5)], ids=str)
@pytest.mark.parametrize("layout", [ROW, LATENT], ids=["row", "latent"])
def test_some_layers_leave_the_others_alone(rigs: Any, path: str, layers: range, layout: PageLayout) -> None:
    """Layers of the first layout begin off every grid but that of 16 bytes."""
    start, end = layout.layer_bounds[layers.start][0], layout.layer_bounds[layers.stop - 1][1]
    rig = rigs(layout, path)
    rig.fill_extents()
    moved = rig.scatter(layers, sums=True)
    assert np.array_equal(moved.checksums(), rig.sums(layers))
    for blocks, data in zip(rig.blocks.tolist(), rig.data, strict=True):
        got = read_page(rig.pool, layout, blocks)
        assert np.array_equal(got[start:end], data[start:end])
        assert (np.delete(got, np.s_[start:end]) == SENTINEL).all()
    rig.extents.rows.fill_(SENTINEL)
    torch.cuda.synchronize()
    rig.gather(layers).point.synchronize()
    rows = rig.extents.rows.cpu().numpy()
    for slot, data in zip(rig.slots, rig.data, strict=True):
        assert np.array_equal(rows[slot, start:end], data[start:end])
        assert (np.delete(rows[slot], np.s_[start:end]) == SENTINEL).all()


@pytest.mark.parametrize("path", ["staged", "zero_copy", "copy_engine", "device"])
@pytest.mark.parametrize("pages", [1, 63, 64, 65, 67, 128, 129])
def test_more_pages_than_the_ring_holds(rigs: Any, path: str, pages: int) -> None:
    """The ring's share is a few pages, so that every segment is used again and again, both ways at once."""
    layout = LAYOUTS["latent"]
    rig = rigs(layout, path, pages=pages, staging=20 * (layout.extent_bytes + 8192))
    rig.fill_extents()
    other = rigs(layout, path, pages=pages, staging=20 * (layout.extent_bytes + 8192))
    other.fill_planes()
    torch.cuda.synchronize()
    up = rig.scatter(sums=True)
    down = other.gather(sums=True)
    assert np.array_equal(up.checksums(), rig.sums())
    assert np.array_equal(down.checksums(), other.sums())
    rig.assert_planes()
    other.assert_extents()


@pytest.mark.parametrize("order", ["identity", "reversed", "runs"])
@pytest.mark.parametrize("path", ["staged", "zero_copy", "copy_engine"])
def test_page_maps(rigs: Any, path: str, order: str) -> None:
    """Neighbours that are merged into one copy, and some that must not be."""
    rig = rigs(LAYOUTS["mha"], path, pages=12)
    slots = list(range(12))
    maps = {"identity": slots, "reversed": slots[::-1], "runs": [8, 9, 10, 3, 4, 0, 1, 2, 11, 12, 13, 7]}
    rig.slots = maps[order]
    rig.blocks = np.array(maps["identity" if order == "runs" else order]).reshape(12, 1)
    rig.fill_extents()
    rig.scatter().point.synchronize()
    rig.assert_planes()
    rig.extents.rows.fill_(SENTINEL)
    torch.cuda.synchronize()
    rig.gather().point.synchronize()
    rig.assert_extents()


@pytest.mark.parametrize(
    ("name", "block_tokens", "pages", "at_once"),
    [
        ("mha", 4, 100, 8),
        ("mha", 1, 100, 8),
        ("mla", 4, 61, 6),
        ("row", 1, 50, 1),
        ("row", 1, 4000, 1800),  # 880 indices go with a launch
        ("many", 32, 100, 8),
        ("many", 1, 240, 27),  # those of 27 pages
        ("many", 1, 240, 60),
    ],
)
def test_the_copy_engine_alone_leaves_checksums_to_a_look_at_the_planes(
    rigs: Any, name: str, block_tokens: int, pages: int, at_once: int
) -> None:
    """Every segment is used several times, with indices that go with the launch or lie in its table."""
    layout = (LAYOUTS | {"many": MANY})[name]
    stride = -(-layout.page_bytes // 16) * 16
    sizes = ChunkSizes(looked=at_once * stride, looked_last=max(1, at_once // 3) * stride)
    for load in (False, True):
        rig = rigs(layout, "copy_engine", pages, block_tokens, sizes=sizes)
        (rig.fill_extents if load else rig.fill_planes)()
        move = rig.scatter if load else rig.gather
        after = (record(torch.device("cuda", 0)),)
        moves = [move(None, after, sums=True) for _ in range(2)]
        for moved in moves:
            assert np.array_equal(moved.checksums(), rig.sums())
        (rig.assert_planes if load else rig.assert_extents)()


def test_some_layers_are_looked_at_alone(rigs: Any) -> None:
    rig = rigs(ROW, "copy_engine", 40, sizes=ChunkSizes(looked=8 * 656))
    rig.fill_extents()
    layers = [range(layer, layer + 1) for layer in range(ROW.n_layers)]
    moves = [rig.scatter(layer, sums=True) for layer in layers]
    for layer, moved in zip(layers, moves, strict=True):
        assert np.array_equal(moved.checksums(), rig.sums(layer))
    rig.assert_planes()


@pytest.mark.parametrize("layout", [ODD, layout_of(EXTRA), SHORT], ids=["odd", "extra", "short"])
def test_layers_that_cannot_be_looked_at_are_summed_on_the_host(rigs: Any, layout: PageLayout) -> None:
    for load in (False, True):
        rig = rigs(layout, "copy_engine", 20)
        assert not rig.copies.kernels.can_look
        (rig.fill_extents if load else rig.fill_planes)()
        after = (record(torch.device("cuda", 0)),)
        move = rig.scatter if load else rig.gather
        assert np.array_equal(move(None, after, sums=True).checksums(), rig.sums())
        (rig.assert_planes if load else rig.assert_extents)()


def test_short_layers_are_summed_on_the_host(rigs: Any) -> None:
    rig = rigs(SHORT, "staged")
    rig.fill_extents()
    moved = rig.scatter(sums=True)
    assert np.array_equal(moved.checksums(), rig.sums())
    rig.assert_planes()


@pytest.mark.parametrize("path", ["staged", "copy_engine"])
def test_copies_wait_for_the_events_given(rigs: Any, path: str) -> None:
    """What is still writing the planes comes first; what comes later is not overwritten."""
    rig = rigs(LAYOUTS["mha"], path)
    rig.fill_extents()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for tensors in rig.pool:
            for t in tensors:
                t.view(torch.uint8).fill_(SENTINEL)
    moved = rig.scatter(None, (record_on_side(side),))
    moved.point.synchronize()
    rig.assert_planes()


def record_on_side(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


@pytest.mark.parametrize("path", ["staged", "copy_engine"])
@pytest.mark.parametrize("way", ["loads", "stores"])
def test_a_model_s_own_copies_pass_the_pages_that_are_queued(rigs: Any, path: str, way: str) -> None:
    """The inputs of a step pass loads, its tokens pass stores. A copy engine would work off 1.3 GiB before them."""
    rig = rigs(LARGE, path, 4, staging=8 * LARGE.extent_bytes)
    (rig.fill_extents if way == "loads" else rig.fill_planes)()
    move = rig.scatter if way == "loads" else rig.gather
    step = torch.arange(1 << 15)  # 256 KiB: what is far smaller goes to the GPU without the copy engine
    source = step.pin_memory() if way == "loads" else step.cuda()
    target = torch.zeros_like(step, device="cuda") if way == "loads" else torch.zeros_like(step).pin_memory()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    moves = [move() for _ in range(40)]
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    record_on_side(side).synchronize()
    assert not moves[-1].point.query()
    assert torch.equal(target.cpu(), step)
    moves[-1].point.synchronize()
    (rig.assert_planes if way == "loads" else rig.assert_extents)()


def test_a_ring_that_holds_no_page_is_refused(rigs: Any) -> None:
    layout = LAYOUTS["mha"]
    with pytest.raises(CapacityError, match="staging"):
        rigs(layout, "auto", staging=layout.extent_bytes)


def test_close_gives_the_ring_back_and_twice_is_fine() -> None:
    layout = PageLayout.uniform([Plane("k", (8, 128), "bfloat16")], 4, 64)
    rig = Rig(layout, "staged")
    rig.close()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        rig = Rig(layout, "staged", staging=256 << 20)
        rig.scatter()
        rig.close()
        rig.copies.close()
    del rig
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
