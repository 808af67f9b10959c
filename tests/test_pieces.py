"""The copies that the copy engine is to do alone, done here by memmove: the bytes of the host's mover and no others."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import EXTRA, MHA, MLA, Bytes, layout_of
from hypothesis import given
from hypothesis import strategies as st

from gdscache.kernels.cuda import PageKernels, PlaneRuns
from gdscache.layout import DTYPE_BYTES, PageLayout, Plane
from gdscache.planes import PagedPlanes
from gdscache.tiers import pieces
from gdscache.tiers.chunks import Transfer
from gdscache.tiers.cpu import HostExtents
from gdscache.tiers.host_mover import HostMover
from gdscache.tiers.pieces import Pieces

FULL = PageLayout.uniform([Plane("p", (512,), "uint8")], 4, 2)  # pages of 4,096 bytes: no padding between two
LAYOUTS = [layout_of(MHA), layout_of(MLA), layout_of(EXTRA), FULL]
Copy = tuple[int, int, int]  # planes, host, bytes

plane_shapes = st.tuples(
    st.sampled_from([(1,), (3,), (5, 7), (64,), (241,)]), st.sampled_from(["uint8", "bfloat16", "float32"])
)
drawn_layers = st.lists(st.lists(plane_shapes, min_size=1, max_size=3), min_size=1, max_size=4)
drawn_layouts = st.builds(
    lambda layers, tokens: PageLayout(
        tuple(tuple(Plane(f"p{i}", *plane) for i, plane in enumerate(planes)) for planes in layers), tokens
    ),
    drawn_layers,
    st.sampled_from([1, 2, 4, 6]),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Which pages of which planes. `blocks` has shape (pages, blocks_per_page)."""

    layout: PageLayout
    order: str
    block_tokens: int
    pool: int  # blocks of the planes
    blocks: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    layers: range
    fence_slots: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(LAYOUTS) | drawn_layouts)
    tokens = draw(st.sampled_from([n for n in range(1, layout.page_tokens + 1) if layout.page_tokens % n == 0]))
    pages, per_page, seed = draw(st.integers(1, 12)), layout.page_tokens // tokens, draw(st.integers(0, 1 << 32))
    rng, pool = np.random.default_rng(seed), pages * per_page + 2
    blocks, slots = (
        rng.permutation(n) if draw(st.booleans()) else np.arange(n)[:: draw(st.sampled_from([1, -1]))]
        for n in (pool, pages + 2)
    )
    first = draw(st.integers(0, layout.n_layers - 1))
    return Case(
        layout,
        draw(st.sampled_from(["plain", "apart", "side by side", "behind"])),
        tokens,
        pool,
        blocks[: pages * per_page].reshape(pages, per_page).copy(),
        slots[:pages].copy(),
        range(first, draw(st.integers(first + 1, layout.n_layers))),
        draw(st.sampled_from([0, 0, 1, 2, 3, 5])),
        seed,
    )


class Bench:
    """Planes and extents in host memory, full of random bytes; the same ones for the same case.

    `order` of the planes: `plain` is one array each; `apart` leaves gaps between a block's tokens; `side by side` is
    one array for all, block after block, and in a block plane after plane; `behind` is one array, plane after plane.
    """

    def __init__(self, case: Case) -> None:
        self.case, layout = case, case.layout
        rng = np.random.default_rng(case.seed)
        self.memory: list[Bytes] = []
        self.planes = PagedPlanes(layout, self._tensors(rng))
        self.extents = HostExtents(layout, (len(case.slots) + 2) * layout.extent_bytes, "off")
        self.extents.fence_slots = case.fence_slots
        self.extents.rows.numpy()[:] = rng.integers(0, 256, self.extents.rows.shape, dtype=np.uint8)

    def _tensors(self, rng: np.random.Generator) -> list[list[torch.Tensor]]:
        case, tokens = self.case, self.case.block_tokens
        sizes = [[plane.row_bytes * tokens for plane in planes] for planes in case.layout.layers]
        gap = 12 if case.order == "apart" else 0
        together = all(n % 4 == 0 for planes in sizes for n in planes) and case.order in ("side by side", "behind")
        behind, block = case.order == "behind", sum(map(sum, sizes))
        tensors: list[list[torch.Tensor]] = []
        at, base = 0, self._array(rng, case.pool * block) if together else None
        for planes, counts in zip(case.layout.layers, sizes, strict=True):
            tensors.append([])
            for plane, nbytes in zip(planes, counts, strict=True):
                row = plane.row_bytes + gap
                array = self._array(rng, case.pool * tokens * row) if base is None else base[at:]
                strides = (tokens * row, row) if base is None or behind else (block, row)
                tensors[-1].append(_strided(array, plane, (case.pool, tokens), strides))
                at += nbytes * case.pool if behind else nbytes
        return tensors

    def _array(self, rng: np.random.Generator, nbytes: int) -> torch.Tensor:
        self.memory.append(rng.integers(0, 256, nbytes, dtype=np.uint8))
        return torch.from_numpy(self.memory[-1])

    @property
    def runs(self) -> list[list[PlaneRuns]]:
        """What the kernels know of the planes, which needs no GPU."""
        kernels = object.__new__(PageKernels)
        kernels.layout, kernels.planes = self.case.layout, self.planes
        return kernels._describe()

    def lists(self, first: int = 0, end: int | None = None) -> list[list[Copy]]:
        """The lists of copies for pages `first ... end - 1`, checked to be as the copy engine takes them."""
        case = self.case
        taken = Pieces.of(self.runs, case.layout.layer_bounds, case.layers)
        table = torch.from_numpy(case.blocks)
        transfer = Transfer(self.planes, self.extents, case.slots, table, case.layers, sums=False)
        found = []
        for parts in taken.lists(transfer, first, len(case.slots) if end is None else end):
            assert all(part.dtype == np.uint64 and part.flags.c_contiguous for part in parts)
            found.append(list(zip(*(part.tolist() for part in parts), strict=True)))
        return found

    def copy(self, copies: list[Copy], *, load: bool) -> None:
        """Do the copies, each of which stays in one array and in the extents."""
        rows = self.extents.rows
        for there, host, nbytes in copies:
            assert nbytes > 0
            assert rows.data_ptr() <= host <= host + nbytes <= rows.data_ptr() + rows.numel()
            starts = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in self.memory]
            assert any(start <= there <= there + nbytes <= stop for start, stop in starts)
            ctypes.memmove(*((there, host) if load else (host, there)), nbytes)

    def move(self, pages: slice, *, load: bool) -> None:
        """What the host's mover does."""
        case, mover = self.case, HostMover(self.planes)
        move = mover.scatter if load else mover.gather
        move(self.extents, case.slots[pages], torch.from_numpy(case.blocks[pages]), case.layers)

    def close(self) -> None:
        self.extents.close()


def _strided(array: torch.Tensor, plane: Plane, shape: tuple[int, int], strides: tuple[int, int]) -> torch.Tensor:
    """Bytes as a plane whose blocks and tokens are so many bytes apart."""
    item = DTYPE_BYTES[plane.dtype]
    words = array[: len(array) // item * item].view(getattr(torch, plane.dtype))
    inner = torch.empty(plane.shape).stride()
    return words.as_strided((*shape, *plane.shape), (strides[0] // item, strides[1] // item, *inner))


@pytest.fixture(scope="module", autouse=True)
def few_at_a_time() -> Any:
    """Few entries at a time, so that a few pages are many lists; tests set their own where it matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_ENTRIES", 24)
        patch.setattr(pieces, "_FIRST", 6)
        yield


def same(one: Bench, other: Bench) -> bool:
    """Whether every byte is equal, in gaps, padding and blocks that nobody named, too."""
    memory = all(np.array_equal(a, b) for a, b in zip(one.memory, other.memory, strict=True))
    return memory and torch.equal(one.extents.rows, other.extents.rows)


@given(cases(), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.data())
def test_the_bytes_are_those_of_the_hosts_mover(case: Case, entries: int, few: int, load: bool, data: Any) -> None:
    first = data.draw(st.integers(0, len(case.slots) - 1))
    end = data.draw(st.integers(first, len(case.slots)))
    mine, hosts = Bench(case), Bench(case)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "_ENTRIES", entries)
            patch.setattr(pieces, "_FIRST", few)
            lists = mine.lists(first, end)
        for copies in lists:
            mine.copy(copies, load=load)
        hosts.move(slice(first, end), load=load)
        assert same(mine, hosts)
        of_a_page = sum((r.end - r.start) // r.run_bytes for layer in case.layers for r in mine.runs[layer])
        most = [max(few, of_a_page), *[max(entries, of_a_page)] * len(lists)]
        assert all(0 < len(copies) <= limit for copies, limit in zip(lists, most, strict=False))
    finally:
        mine.close()
        hosts.close()


def whole(pages: int, *, order: str = "side by side", slots: Any = None, fence_slots: int = 0) -> Case:
    """Pages without padding in ascending blocks and, by default, slots."""
    numbers = np.arange(pages)
    layers = range(FULL.n_layers)
    found = numbers if slots is None else np.asarray(slots)
    return Case(FULL, order, 2, pages + 2, numbers[:, None].copy(), found, layers, fence_slots, 3)


neighbours = st.builds(
    lambda pages, start, fence_slots: whole(pages, slots=np.arange(start, start + pages), fence_slots=fence_slots),
    st.integers(2, 20),
    st.integers(0, 2),
    st.integers(1, 5),
)


@given(cases() | neighbours)
def test_no_copy_crosses_from_one_registration_into_the_next(case: Case) -> None:
    bench = Bench(case)
    try:
        start, registration = bench.extents.rows.data_ptr(), case.fence_slots * case.layout.extent_bytes
        for _, host, nbytes in [copy for copies in bench.lists() for copy in copies]:
            if registration:
                assert (host - start) // registration == (host + nbytes - 1 - start) // registration
    finally:
        bench.close()


def entries_of(case: Case) -> list[list[int]]:
    """The bytes of every copy, list by list."""
    bench = Bench(case)
    try:
        return [[nbytes for _, _, nbytes in copies] for copies in bench.lists()]
    finally:
        bench.close()


def test_the_first_list_is_short_and_the_others_have_as_many_pages_as_fit() -> None:
    pages = entries_of(whole(15, order="plain"))
    assert [len(sizes) for sizes in pages] == [4, 24, 24, 8]  # 6 // 4, 24 // 4 pages of four pieces
    assert {size for sizes in pages for size in sizes} == {1024}


def test_more_pieces_a_page_than_entries_are_a_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_ENTRIES", 3)
    monkeypatch.setattr(pieces, "_FIRST", 2)
    assert [len(sizes) for sizes in entries_of(whole(5, order="plain"))] == [4] * 5


@pytest.mark.parametrize(("blocks", "sizes"), [([0, 1], [1024] * 4), ([1, 0], [512] * 8), ([0, 2], [512] * 8)])
def test_neighbouring_blocks_of_a_plane_are_one_copy(blocks: list[int], sizes: list[int]) -> None:
    case = dataclasses.replace(whole(1, order="plain"), block_tokens=1, blocks=np.array([blocks]))
    assert entries_of(case) == [sizes]


def test_planes_that_lie_side_by_side_are_not() -> None:
    """They may be two allocations, which one copy cannot cross."""
    case = dataclasses.replace(whole(1, order="behind"), block_tokens=1, pool=2, blocks=np.array([[0, 1]]))
    assert entries_of(case) == [[1024] * 4]


@given(cases())
def test_no_copy_crosses_from_one_plane_into_the_next(case: Case) -> None:
    bench = Bench(dataclasses.replace(case, order="behind"))
    try:
        tensors = [tensor for planes in bench.planes.tensors for tensor in planes]
        places = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        for there, _, nbytes in [copy for copies in bench.lists() for copy in copies]:
            assert any(start <= there < there + nbytes <= end for start, end in places)
    finally:
        bench.close()


def test_no_pages_are_no_list() -> None:
    bench = Bench(whole(3))
    assert bench.lists(2, 2) == []
    bench.close()
