"""The kernel operations of kvcacheio: every byte against the definition of the layouts, on a GPU.

The same tests run without one on the kernel's arithmetic in slow Python; only csrc/kvcacheio.cu is left out then.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdscache import kvcacheio
from gdscache.errors import CaptureUnsupportedError, KernelUnavailableError, TransferArgumentError
from gdscache.kvcacheio import launch as kvcacheio_launch
from tests.support.helpers import SENTINEL
from tests.support.kvcacheio_parts import OPERATIONS, Pool, Positions, Rig, Shape, SlowKernels

HEADS = {8: 8, 24: 3, 512: 4, 576: 9, 656: 2, 1024: 8, 1152: 8, 4104: 3}  # by the bytes of an item
COUNTS = [1, 63, 64, 65, 67, 128, 129]
GPU_ONLY = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

Places = list[tuple[str, str]]


@pytest.fixture(params=["slow", pytest.param("gpu", marks=pytest.mark.gpu)])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Where the pools are: sources and destinations."""
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return [("cuda", "pinned"), ("pinned", "cuda"), ("cuda", "cuda")]
    slow = SlowKernels()
    monkeypatch.setattr(kvcacheio_launch, "find_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(kvcacheio_launch, "kernels_of", lambda device: slow)
    return [("cpu", "cpu")]


def maps(tokens: int, seed: int = 1) -> Iterator[tuple[Positions, Positions]]:
    """Source and destination indices: in order, reversed, shuffled, in runs, one."""
    rng, every = np.random.default_rng(seed), np.arange(tokens)
    yield every, every
    yield every, every[::-1]
    yield rng.permutation(tokens)[: tokens * 2 // 3], rng.permutation(tokens)[: tokens * 2 // 3]
    runs = np.concatenate([np.arange(a, a + 5) for a in range(0, tokens - 5, 13)])
    yield runs, np.roll(runs, 7)
    yield every[-1:], every[:1]
    yield every[:1], every[-1:]


def page_maps(pages: int, page: int, count: int, seed: int = 2) -> tuple[Positions, Positions]:
    """Tokens of `count` shuffled pages, in order within each."""
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(pages)[:count] for _ in range(2)]
    first, second = ((p[:, None] * page + np.arange(page)).ravel() for p in chosen)
    return first, second


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", HEADS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_copies_what_the_indices_name_and_nothing_else(name: str, item: int, places: Places) -> None:
    shape = Shape(item, layers=3, heads=HEADS[item], page=6, tokens=66)
    for number, where in enumerate(places):
        for i, (sources, targets) in enumerate(maps(shape.tokens)):
            rig = Rig(name, shape, where, layer=i % 3)
            rig.check(sources, targets, (torch.int64, torch.int32)[(i + number) % 2])


@pytest.mark.suite
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_pages_with_any_number_of_warps(count: int, page: int, places: Places) -> None:
    shape = Shape(item=64, layers=2, heads=2, page=page, tokens=130 * page)
    sources, targets = page_maps(130, page, count)
    quotas: list[dict[str, int | None]] = [{}, {"block_quota": 1, "num_warps_per_block": 1}, {"block_quota": 3}]
    for options in [*quotas, {"block_quota": 132, "num_warps_per_block": 5}]:
        for name in ("transfer_kv_all_layer_lf_ph", "transfer_kv_per_layer_mla_pf_lf"):
            Rig(name, shape, places[0]).check(sources, targets, **options)


@pytest.mark.parametrize("shifts", [(1, 0), (0, 1), (2, 2), (4, 8), (8, 4), (8, 8), (3, 3)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_pools_at_any_address(name: str, shifts: tuple[int, int], places: Places) -> None:
    """The widest access that fits is chosen, on both sides together."""
    for where in places:
        rig = Rig(name, Shape(item=144, heads=3, tokens=48, page=8), where, shifts)
        rig.check(*page_maps(6, 8, 5))


@pytest.mark.parametrize("name", [name for name, (*_, mla) in OPERATIONS.items() if not mla])
def test_k_on_the_grid_and_v_off_it(name: str, places: Places) -> None:
    for source, target in ((4, 0), (0, 1)):
        rig = Rig(name, Shape(item=128, heads=4, page=8), places[0])
        rig.src[1] = Pool(rig.src[1].layout, rig.shape, places[0][0], 7, source)
        rig.dst[1] = Pool(rig.dst[1].layout, rig.shape, places[0][1], None, target)
        rig.check(*page_maps(12, 8, 5))


def test_one_layer_off_the_grid(places: Places) -> None:
    """A table whose bases differ in their alignment."""
    for odd in range(3):
        rig = Rig("transfer_kv_all_layer_mla", Shape(tokens=32, page=1), places[0])
        arguments = rig.arguments(np.arange(1, 32), np.arange(31))
        moved = rig.dst[0].layer(odd)[3 : 3 + 31 * 512]
        arguments["dst_layers"] = torch.tensor(
            [(moved if i == odd else rig.dst[0].layer(i)).data_ptr() for i in range(3)],
            dtype=torch.uint64,
            device=rig.device,
        )
        kvcacheio.transfer_kv_all_layer_mla(**arguments)
        for i in range(3):
            there = moved if i == odd else rig.dst[0].layer(i)[: 31 * 512]
            assert torch.equal(there.cpu(), rig.src[0].layer(i)[512:].cpu())
        assert bool((rig.dst[0].layer(odd)[:3] == SENTINEL).all())


@pytest.mark.parametrize("slack", [4, 8, 32, 96, 1 << 17])
@pytest.mark.parametrize("name", [n for n, (a, b, *_) in OPERATIONS.items() if (a, b) != ("lf", "lf")])
def test_a_layout_dim_with_more_than_these_layers(name: str, slack: int, places: Places) -> None:
    """A buffer that holds other layers too: theirs stay as they are."""
    shape = Shape(item=96, heads=4, page=4, tokens=12 if slack > 96 else 64, slack=slack)
    Rig(name, shape, places[0], layer=2).check(*page_maps(shape.tokens // 4, 4, 3))


@pytest.mark.parametrize(("layers", "page", "heads"), [(1, 1, 1), (1, 5, 3), (61, 16, 1), (9, 7, 12)])
def test_shapes_of_models(layers: int, page: int, heads: int, places: Places) -> None:
    shape = Shape(item=heads * 32, layers=layers, heads=heads, page=page, tokens=page * 3)
    for name in OPERATIONS:
        Rig(name, shape, places[0], layer=layers - 1).check(*page_maps(3, page, 2))


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_indices_are_no_work(name: str, places: Places) -> None:
    rig = Rig(name, Shape(tokens=32), places[0])
    nothing = np.zeros(0, np.int64)
    rig.check(nothing, nothing)
    if isinstance(kernels := kvcacheio_launch.kernels_of(torch.device("cuda", 0)), SlowKernels):
        assert kernels.launches == 0


def test_pools_of_any_type_and_shape(places: Places) -> None:
    """Bytes are bytes: a bfloat16 pool of many dimensions."""
    src, dst = Pool("pf", Shape(), places[0][0], 1), Pool("lf", Shape(), places[0][1])
    indices = torch.arange(7, device="cuda" if places[0][0] != "cpu" else "cpu")
    kvcacheio.transfer_kv_per_layer_mla_pf_lf(
        src.tensor.view(torch.bfloat16).view(96, 3, 4, 64),
        dst.layer(2).view(torch.float8_e4m3fn).view(96, 8, 64),
        indices,
        indices,
        0,
        512,
        3 * 512,
    )
    assert torch.equal(dst.layer(2)[: 7 * 512].cpu(), src.tensor.view(96, -1)[:7, :512].reshape(-1).cpu())
    assert bool((dst.layer(2)[7 * 512 :] == SENTINEL).all())


# -- indices out of range ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_indices_out_of_range_are_skipped_and_counted(name: str, places: Places) -> None:
    source, target, all_layers, _ = OPERATIONS[name]
    unknown = [all_layers and layout == "lf" for layout in (source, target)]  # a table: how many tokens it does not say
    for dtype in (torch.int64, torch.int32):
        far = [1 << 40, 1 << 62, -(1 << 62)] if dtype is torch.int64 else []
        highest = (1 << 31) - 1
        wrong = [[-1, -(1 << 31), *far, *([] if u else [96, 97, 96 * 3, highest])] for u in unknown]
        rig = Rig(name, Shape(item=88, heads=2, tokens=96), places[0])
        sources, targets = page_maps(6, 16, 3)
        good = (sources.copy(), targets.copy())
        keep = np.ones(len(sources), np.bool_)
        for values, indices, first in zip(wrong, (sources, targets), (0, 5), strict=True):
            for i, value in enumerate(values):
                indices[first + 3 * i] = value
                keep[first + 3 * i] = False
        sources[-1] = targets[-1] = -7  # both: two indices, one row
        keep[-1] = False
        before = kvcacheio.skipped("cuda:0")
        expected = rig.expected(good[0][keep], good[1][keep])
        rig.run(sources, targets, dtype)
        for pool, data in zip(rig.dst, expected, strict=True):
            assert np.array_equal(pool.bytes(), data)
        assert kvcacheio.skipped(0) - before == len(wrong[0]) + len(wrong[1]) + 2


def test_the_smaller_of_two_pools_counts(places: Places) -> None:
    rig = Rig("transfer_kv_per_layer", Shape(tokens=64), places[0])
    arguments = rig.arguments(np.array([3, 63, 40]), np.array([1, 2, 3]))
    arguments["src_v"] = arguments["src_v"][: 40 * 512]
    before = kvcacheio.skipped("cuda")
    kvcacheio.transfer_kv_per_layer(**arguments)
    assert kvcacheio.skipped("cuda") == before + 2
    for pool in rig.dst:
        rows = pool.layer(1).view(64, 512)
        assert bool((rows[2:] == SENTINEL).all())
        assert not bool((rows[1] == SENTINEL).all())


def test_a_part_of_a_page_is_none(places: Places) -> None:
    """Tokens of a last page that the tensor does not hold whole are out of range."""
    rig = Rig("transfer_kv_per_layer_ph_lf", Shape(tokens=64), places[0])
    arguments = rig.arguments(np.array([47, 48]), np.array([1, 2]))
    for side in ("src_k", "src_v"):
        arguments[side] = arguments[side][:-1]
    before = kvcacheio.skipped("cuda")
    kvcacheio.transfer_kv_per_layer_ph_lf(**arguments)
    assert kvcacheio.skipped("cuda") == before + 1


@given(page=st.one_of(st.integers(1, 300), st.integers(1, 1 << 20)), data=st.data())
def test_the_reciprocal_of_a_page_size_is_exact(page: int, data: st.DataObject) -> None:
    side = kvcacheio_launch.tensor_side([torch.empty(0, dtype=torch.uint8)], 8, page_size=page)
    reciprocal, shift = (int(n) for n in side.arguments()[6:8])
    most = (1 << 31) - 1
    around = data.draw(st.integers(0, most // page)) * page
    for token in (0, 1, page - 1, page, around, around - 1, most, data.draw(st.integers(0, most))):
        if 0 <= token <= most:
            assert token * reciprocal >> shift == token // page
            assert token * reciprocal < 1 << 64


# -- what is refused --------------------------------------------------------------------------------------------------

TINY = torch.zeros(4096, dtype=torch.uint8)
INDICES = torch.arange(4)
ARGUMENTS: dict[str, Any] = {
    "src_indices": INDICES,
    "dst_indices": INDICES,
    "item_size": 64,
    "layer_id": 1,
    "src_layout_dim": 128,
    "dst_layout_dim": 128,
    "num_layers": 2,
    "page_size": 4,
    "head_num": 2,
    **{f"{side}{part}": TINY for side in ("src", "dst") for part in ("", "_k", "_v")},
    **{f"{s}{p}_layers": torch.zeros(2, dtype=torch.uint64) for s in ("src", "dst") for p in ("", "_k", "_v")},
}


def call(name: str, **changes: Any) -> None:
    """An operation with small arguments in CPU memory, of which none is wrong but that, and what is changed."""
    function = getattr(kvcacheio, name)
    names = inspect.signature(function).parameters
    function(**{key: value for key, value in (ARGUMENTS | changes).items() if key in names})


REFUSED = {
    "item_size": [
        (0, "item_size is 0"), (-8, "item_size is -8"), (12, "multiple of 8"), (1 << 31, "multiple"), (64.0, "integer"),
    ],
    "block_quota": [(0, "block_quota is 0"), (-1, "block_quota is -1")],
    "num_warps_per_block": [(0, "num_warps_per_block is 0"), (33, "at most 32")],
    "layer_id": [(2, "not in a layout_dim of 128"), (-1, "layer_id is -1"), (1 << 40, "layer_id is 1099511627776")],
    "src_layout_dim": [
        (127, "layout_dim"),
        (0, "layout_dim is 0"),
        (1 << 31, "too large"),
        (None, "not in a layout_dim"),
    ],
    "dst_layout_dim": [(127, "layout_dim"), (-128, "layout_dim is -128"), (1 << 31, "too large")],
    "num_layers": [(0, "num_layers is 0"), (3, "too short for 3|not in a layout_dim")],
    "page_size": [(0, "page_size is 0"), (-4, "page_size is -4"), (1 << 24, "too large")],
    "head_num": [(0, "head_num is 0"), (3, "no 3 equal heads"), (128, "no 128 equal heads")],
    "src_indices": [
        (INDICES[:3], "3 source and 4 destination"),
        (INDICES.int(), "int32 and torch.int64"),
        (torch.arange(8)[::2], "not contiguous"),
    ],
    "dst_indices": [(INDICES.double(), "float64"), (INDICES.to(torch.int16), "int16"), (INDICES.bool(), "bool")],
    "src_k": [(TINY.view(64, 64).t(), "not contiguous"), (TINY[::2], "not contiguous")],
    "dst_v": [(TINY[::2], "not contiguous")],
    "src": [(TINY[::2], "not contiguous")],
    "src_k_layers": [(torch.zeros(2, dtype=torch.int64), "uint64"), (torch.zeros(1, dtype=torch.uint64), "too short")],
    "dst_v_layers": [(torch.zeros(4, dtype=torch.uint64)[::2], "contiguous"), (torch.zeros(2), "float32")],
    "dst_layers": [(torch.zeros(1, dtype=torch.uint64), "too short")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument"),
    [(n, a) for n in OPERATIONS for a in REFUSED if a in inspect.signature(getattr(kvcacheio, n)).parameters],
)
def test_arguments_that_do_not_fit_are_refused(name: str, argument: str) -> None:
    for value, message in REFUSED[argument]:
        with pytest.raises(TransferArgumentError, match=message):
            call(name, **{argument: value})


@pytest.mark.parametrize("name", OPERATIONS)
def test_indices_in_host_memory_are_refused(name: str) -> None:
    for changes in ({}, {"src_indices": INDICES[:0], "dst_indices": INDICES[:0]}):
        with pytest.raises(TransferArgumentError, match="on one GPU"):
            call(name, **changes)


def test_heads_divide_the_layout_dim() -> None:
    with pytest.raises(TransferArgumentError, match="129 bytes has no 2 equal heads"):
        call("transfer_kv_per_layer_ph_lf", src_layout_dim=129)


def test_names_arguments_and_defaults_are_the_promised_ones() -> None:
    kv, idx, end = "src_k dst_k src_v dst_v", "src_indices dst_indices", "block_quota=2 num_warps_per_block=32"
    layers, mixed = "src_k_layers dst_k_layers src_v_layers dst_v_layers", "src_k_layers dst_k src_v_layers dst_v"
    mla = end.replace("=2", "=None", 1)
    promised = {
        "transfer_kv_per_layer": f"{kv} {idx} item_size {end}",
        "transfer_kv_per_layer_pf_lf": f"{kv} {idx} layer_id item_size src_layout_dim {end}",
        "transfer_kv_per_layer_ph_lf": f"{kv} {idx} layer_id item_size src_layout_dim page_size head_num {end}",
        "transfer_kv_all_layer": f"{layers} {idx} item_size num_layers {end}",
        "transfer_kv_all_layer_lf_pf": f"{mixed} {idx} item_size dst_layout_dim num_layers {end}",
        "transfer_kv_all_layer_lf_ph": f"{mixed} {idx} item_size dst_layout_dim num_layers page_size head_num {end}",
        "transfer_kv_direct": f"src_layers dst_layers {idx} page_size",
        "transfer_kv_per_layer_direct_pf_lf": f"src_ptrs dst_ptrs {idx} layer_id page_size",
        "transfer_kv_all_layer_direct_lf_pf": f"src_ptrs dst_ptrs {idx} page_size",
        "transfer_kv_per_layer_mla": f"src dst {idx} item_size {mla}",
        "transfer_kv_per_layer_mla_pf_lf": f"src dst {idx} layer_id item_size src_layout_dim {mla}",
        "transfer_kv_all_layer_mla": f"src_layers dst_layers {idx} item_size num_layers {end}",
        "transfer_kv_all_layer_mla_lf_pf": f"src_layers dst {idx} item_size dst_layout_dim num_layers {end}",
    }
    assert {name for name in kvcacheio.__all__ if name.startswith("transfer_")} == set(promised)
    for name, text in promised.items():
        found = inspect.signature(getattr(kvcacheio, name)).parameters.values()
        words = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found]
        assert words == text.split(), name


@pytest.mark.parametrize("quota", [None, 2])
def test_a_quota_of_none_is_two_blocks(quota: int | None, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tokens fill two blocks of 32 warps; so many are asked for, however few SMs that is."""
    seen: list[tuple[int, int]] = []
    kernels = kvcacheio_launch.kernels_of(torch.device("cuda", 0))
    launch = kernels.launch

    def spy(name: str, blocks: int, threads: int, arguments: Any) -> None:
        seen.append((blocks, threads))
        launch(name, blocks, threads, arguments)

    monkeypatch.setattr(kernels, "launch", spy)
    rig = Rig("transfer_kv_per_layer_mla", Shape(item=8, tokens=1000), places[0])
    rig.check(np.arange(1000), np.arange(1000), block_quota=quota)
    rig.run(np.arange(33), np.arange(33), block_quota=7, num_warps_per_block=4)
    rig.run(np.arange(3), np.arange(3))
    assert seen == [(2, 1024), (5, 128), (1, 1024)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to build for")
def test_without_a_gpu_nothing_can_be_built() -> None:
    for device in ("cuda:0", "cuda", 0, torch.device("cuda", 1)):
        with pytest.raises(KernelUnavailableError, match=r"kvcacheio\.cu"):
            kvcacheio.build(device)
    with pytest.raises(KernelUnavailableError):
        kvcacheio.skipped("cuda")


def test_only_a_gpu_can_be_built_for() -> None:
    with pytest.raises(TransferArgumentError, match="cpu is no GPU"):
        kvcacheio.build("cpu")


# -- on a GPU only ----------------------------------------------------------------------------------------------------


class TestOnAGpu:
    pytestmark = GPU_ONLY

    @pytest.mark.parametrize("name", ["transfer_kv_per_layer_pf_lf", "transfer_kv_all_layer_lf_ph"])
    def test_side_streams_and_the_legacy_stream_are_in_order(self, name: str) -> None:
        rig = Rig(name, Shape(tokens=160), ("cuda", "cuda"))
        kvcacheio.build("cuda")
        sources, targets = page_maps(10, 16, 7)
        expected, arguments = rig.expected(sources, targets), rig.arguments(sources, targets)
        fresh = [pool.flat.clone() for pool in rig.src]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.default_stream())
        for stream in (side, torch.cuda.default_stream()):
            for pool in [*rig.src, *rig.dst]:
                pool.flat.fill_(SENTINEL)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)  # a launch that went elsewhere would copy what is not there yet
                for pool, tensor in zip(rig.src, fresh, strict=True):
                    pool.flat.copy_(tensor)
                getattr(kvcacheio, name)(**arguments)
                assert not stream.query(), "the call waited for the stream"
            stream.synchronize()
            for pool, data in zip(rig.dst, expected, strict=True):
                assert np.array_equal(pool.bytes(), data)

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_recorded_into_a_graph_and_replayed(self, name: str) -> None:
        layouts = OPERATIONS[name][:2]
        places = ("pinned", "cuda") if layouts[1] == "lf" else ("cuda", "pinned")
        rig = Rig(name, Shape(tokens=96), places)
        kvcacheio.build(0)
        first, second = page_maps(6, 16, 4), page_maps(6, 16, 4, seed=9)
        arguments = rig.arguments(*first)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = [pool.bytes() for pool in rig.dst]
        with torch.cuda.graph(graph):
            getattr(kvcacheio, name)(**arguments)
        torch.cuda.synchronize()
        assert all(np.array_equal(p.bytes(), b) for p, b in zip(rig.dst, before, strict=True)), "it ran when recorded"
        for indices in (first, second):  # other indices, same graph
            expected = rig.expected(*indices)
            for tensor, values in zip(("src_indices", "dst_indices"), indices, strict=True):
                arguments[tensor].copy_(torch.from_numpy(values))
            graph.replay()
            torch.cuda.synchronize()
            for pool, data in zip(rig.dst, expected, strict=True):
                assert np.array_equal(pool.bytes(), data)

    def test_a_graph_needs_the_kernels_built_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig("transfer_kv_per_layer", Shape(), ("cuda", "cuda"))
        rig.run(np.arange(3), np.arange(3))
        arguments = rig.arguments(np.arange(3), np.arange(3))
        nothing_built: Any = kvcacheio_launch._build.__wrapped__
        monkeypatch.setattr(kvcacheio_launch, "_build", nothing_built)
        scratch = torch.zeros(8, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scratch.add_(1)  # an empty graph is a warning
            with pytest.raises(CaptureUnsupportedError, match="build"):
                kvcacheio.transfer_kv_per_layer(**arguments)

    def test_beyond_four_gib(self) -> None:
        """Tokens of a layer, bytes of a page-first and of a page-head pool, layers of a table."""
        kvcacheio.build(0)
        free = torch.cuda.mem_get_info()[0]
        if free < 12 << 30:  # other tests' pools
            pytest.skip(f"needs 12 GiB of GPU memory, and {free >> 30} are free")
        item, tokens = 4096, 5 << 18
        big = torch.zeros(tokens * item, dtype=torch.int8, device="cuda")
        small = torch.randint(-128, 128, (4, item), dtype=torch.int8, device="cuda")
        where, rows = torch.tensor([tokens - 1, 0, tokens // 5 * 4 + 1], device="cuda"), torch.arange(3, device="cuda")
        kvcacheio.transfer_kv_per_layer_mla(small, big, rows, where, item)
        view = big.view(tokens, item)
        assert torch.equal(view[where], small[:3])
        assert view.any(1).nonzero().flatten().tolist() == sorted(where.tolist())  # counting would take 40 GiB
        back = torch.zeros_like(small)
        kvcacheio.transfer_kv_per_layer_mla(big, back, where, rows, item)
        assert torch.equal(back[:3], small[:3])
        assert not bool(back[3].any())
        table = torch.tensor([big.data_ptr()], dtype=torch.uint64, device="cuda")
        back.zero_()
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, back, where, rows, item, item, 1)
        assert torch.equal(back[:3], small[:3])
        # Five pages of 1 GiB: 64 tokens of 16 MiB.
        dim, heads, page = 16 << 20, 2, 64
        other = back.zero_().clone()
        end = torch.tensor([5 * page - 1], device="cuda")  # its last layer is the end of the pool
        kvcacheio.transfer_kv_per_layer_pf_lf(big, back, big, other, end, rows[:1], dim // item - 1, item, dim)
        assert torch.equal(back[0], small[0])
        assert torch.equal(other[0], small[0])
        big.zero_()
        tables = [torch.tensor([t.data_ptr()], dtype=torch.uint64, device="cuda") for t in (small, back)]
        kvcacheio.transfer_kv_all_layer_lf_ph(
            tables[0], big, tables[1], big.clone(), rows[:1], end, item, dim, 1, page, heads
        )
        head = big.view(5, heads, page, dim // item, item // heads)[4, :, 63, 0]
        assert torch.equal(head.reshape(-1), small[0])
        assert int(big.count_nonzero()) == int(small[0].count_nonzero())

    def test_a_slice_of_registered_memory(self) -> None:
        """cudaHostRegister, as SGLang and `HostBuffer` have it, is page-locked too."""
        from gdscache.cuda.host_memory import HostBuffer

        with HostBuffer(1 << 20, "on") as buffer:
            buffer.tensor.fill_(SENTINEL)
            pool = torch.randint(0, 256, (64, 512), dtype=torch.uint8, device="cuda")
            rows = torch.arange(64, device="cuda").flip(0).contiguous()
            host = buffer.tensor[4096 : 4096 + 64 * 512]
            kvcacheio.transfer_kv_per_layer_mla(pool, host, torch.arange(64, device="cuda"), rows, 512)
            torch.cuda.synchronize()
            assert torch.equal(host.view(64, 512), pool.flip(0).cpu())
            assert bool((buffer.tensor[:4096] == SENTINEL).all())

    def test_memory_that_the_gpu_cannot_reach_is_refused(self) -> None:
        rig = Rig("transfer_kv_per_layer", Shape(), ("cuda", "cuda"))
        good = rig.arguments(np.arange(3), np.arange(3))
        before = [pool.bytes() for pool in rig.dst]
        for changes, message in (
            ({"dst_v": torch.zeros(4096, dtype=torch.uint8)}, "pageable"),
            ({"src_indices": torch.arange(3)}, "on one GPU"),
            ({"dst_indices": torch.arange(3).pin_memory()}, "on one GPU"),
        ):
            with pytest.raises(TransferArgumentError, match=message):
                kvcacheio.transfer_kv_per_layer(**(good | changes))
        tables = Rig("transfer_kv_all_layer", Shape(), ("cuda", "cuda")).arguments(np.arange(3), np.arange(3))
        tables["src_v_layers"] = tables["src_v_layers"].cpu()
        with pytest.raises(TransferArgumentError, match="table of layers is on cpu"):
            kvcacheio.transfer_kv_all_layer(**tables)
        torch.cuda.synchronize()
        assert all(np.array_equal(p.bytes(), b) for p, b in zip(rig.dst, before, strict=True))

    def test_the_counter_adds_up_over_streams(self) -> None:
        rig = Rig("transfer_kv_per_layer_mla", Shape(), ("cuda", "cuda"))
        before = kvcacheio.skipped("cuda")
        arguments = rig.arguments(np.full(1000, -1), np.zeros(1000, np.int64))
        torch.cuda.synchronize()
        for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()):
            with torch.cuda.stream(stream):
                kvcacheio.transfer_kv_per_layer_mla(**arguments)
        assert kvcacheio.skipped("cuda") - before == 3000
