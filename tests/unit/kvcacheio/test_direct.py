"""The direct operations of kvcacheio: every byte against plain indexing, in CPU memory and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gdscache.cuda.driver import CopyEngine
from gdscache.errors import CaptureUnsupportedError, TransferArgumentError
from gdscache.kvcacheio import (
    direct,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)
from tests.support.helpers import SENTINEL

Positions = npt.NDArray[np.int64]
Tensors = Sequence[torch.Tensor]


def pool(shape: Sequence[int], place: str, seed: int | None, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bytes, or sentinels. `place` is cpu, pinned or cuda."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.full(size, SENTINEL, np.uint8)
    if seed is not None:
        data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    host = torch.from_numpy(data).view(dtype).view(*shape)
    return host.cuda() if place == "cuda" else host.pin_memory() if place == "pinned" else host


def raw(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A copy of its bytes, a dimension of them added."""
    return np.array(tensor.cpu().unsqueeze(-1).view(torch.uint8).numpy())


def snapshot(tensors: Tensors) -> list[npt.NDArray[np.uint8]]:
    if any(t.device.type == "cuda" or t.is_pinned() for t in tensors) and torch.cuda.is_available():
        torch.cuda.synchronize()
    return [raw(t) for t in tensors]


def assert_bytes(tensors: Tensors, expected: Sequence[npt.NDArray[np.uint8]]) -> None:
    for found, wanted in zip(snapshot(tensors), expected, strict=True):
        assert np.array_equal(found, wanted)


def places(device: str) -> list[tuple[str, str]]:
    return [("cpu", "cpu")] if device == "cpu" else [("pinned", "cuda"), ("cuda", "pinned"), ("cuda", "cuda")]


def pages_of(pages: Sequence[int] | Positions, page: int) -> Positions:
    """The tokens of pages, in order."""
    return np.asarray((np.asarray(pages)[:, None] * page + np.arange(page)).ravel(), dtype=np.int64)


def page_maps(pages: int, page: int) -> list[tuple[Positions, Positions]]:
    """Source and destination tokens: pages in order, reversed, shuffled, in runs, one."""
    rng, every = np.random.default_rng(4), np.arange(pages)
    runs = np.array([i for i in every if i % 5 < 3])
    lists = [
        (every, every),
        (every, every[::-1]),
        (rng.permutation(pages)[: pages // 2], rng.permutation(pages)[: pages // 2]),
        (runs, np.roll(runs, 3)),
        (every[-1:], every[:1]),
    ]
    return [(pages_of(a, page), pages_of(b, page)) for a, b in lists]


def tensor(indices: Positions, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(np.array(indices)).to(dtype)


# -- layers to layers -------------------------------------------------------------------------------------------------


def check_layers(src: Tensors, dst: Tensors, sources: Positions, targets: Positions, page: int, **kinds: Any) -> None:
    before, expected = snapshot(src), snapshot(dst)
    for a, b in zip(before, expected, strict=True):
        b[targets] = a[sources].reshape(len(sources), *b.shape[1:])
    transfer_kv_direct(list(src), list(dst), tensor(sources, **kinds), tensor(targets, **kinds), page)
    assert_bytes(dst, expected)
    assert_bytes(src, before)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        ((8,), torch.uint8), ((4, 64), torch.bfloat16), ((1, 576), torch.float8_e4m3fn), ((656,), torch.int8),
        ((), torch.int32),
    ],
    ids=str,
)  # fmt: skip
def test_layers(device: str, row: tuple[int, ...], dtype: torch.dtype, page: int) -> None:
    for where in places(device):
        for sources, targets in page_maps(12, page):
            src = [pool((12 * page, *row), where[0], i, dtype) for i in range(4)]
            dst = [pool((12 * page, *row), where[1], None, dtype) for _ in range(4)]
            check_layers(src, dst, sources, targets, page)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_tokens_in_any_order(device: str, dtype: torch.dtype) -> None:
    """Pages need not be whole: every index counts by itself."""
    rng = np.random.default_rng(1)
    for where in places(device):
        src = [pool((200, 3, 8), where[0], i) for i in range(2)]
        dst = [pool((160, 24), where[1], None) for _ in range(2)]  # as many bytes a row in another shape
        check_layers(src, dst, rng.permutation(200)[:96], rng.permutation(160)[:96], 16, dtype=dtype)


def test_layers_of_any_stride_and_width(device: str) -> None:
    """K and V of different widths; rows with room between them; layers of one tensor."""
    for where in places(device):
        wide = pool((3, 64, 40), where[0], 1)
        src = [wide[0, :, :24], wide[1, :, 8:16], wide[2]]
        dst = [pool((64, 24), where[1], None), pool((64, 16), where[1], None)[:, 4:12], pool((64, 40), where[1], None)]
        before = snapshot([wide])
        for sources, targets in page_maps(4, 16):
            check_layers(src, dst, sources, targets, 16)
        assert_bytes([wide], before)


def test_nothing_is_no_work(device: str) -> None:
    for where in places(device):
        src, dst = [pool((16, 8), where[0], 1)], [pool((16, 8), where[1], None)]
        none = np.zeros(0, np.int64)
        check_layers(src, dst, none, none, 16)
        check_layers([], [], np.arange(16), np.arange(16), 16)
        check_layers([src[0][:, :0]], [dst[0][:, :0]], np.arange(16), np.arange(16), 16)


# -- page-first buffers -----------------------------------------------------------------------------------------------

Geometry = tuple[int, int, int, int, tuple[int, ...]]  # parts (2 for K and V), layers, pages, tokens of a page, row


def layers_of(geometry: Geometry, place: str, seed: int | None, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    parts, layers, pages, page, row = geometry
    return [pool((pages * page, *row), place, seed and seed + i, dtype) for i in range(parts * layers)]


def buffers_of(
    geometry: Geometry, place: str, seed: int | None, dtype: torch.dtype = torch.uint8
) -> list[torch.Tensor]:
    parts, layers, pages, page, row = geometry
    return [pool((pages, layers, page, *row), place, seed and seed + i, dtype) for i in range(parts)]


def check_write(geometry: Geometry, layers: Tensors, buffers: Tensors, tokens: Positions, slots: Positions) -> None:
    """`transfer_kv_all_layer_direct_lf_pf` against plain indexing."""
    parts, n, _, page, _ = geometry
    before, expected = snapshot(layers), snapshot(buffers)
    for part in range(parts):
        for layer in range(n):
            for token, slot in zip(tokens, slots, strict=True):
                expected[part][slot // page, layer, slot % page] = before[part * n + layer][token]
    transfer_kv_all_layer_direct_lf_pf(list(layers), list(buffers), tensor(tokens), tensor(slots), page)
    assert_bytes(buffers, expected)
    assert_bytes(layers, before)


def check_read(geometry: Geometry, buffers: Tensors, layers: Tensors, slots: Positions, tokens: Positions) -> None:
    """`transfer_kv_per_layer_direct_pf_lf` against plain indexing, layer by layer."""
    parts, n, _, page, _ = geometry
    before, expected = snapshot(buffers), snapshot(layers)
    for layer in range(n):
        chosen = [part * n + layer for part in range(parts)]
        for part, number in enumerate(chosen):
            for token, slot in zip(tokens, slots, strict=True):
                expected[number][token] = before[part][slot // page, layer, slot % page]
        transfer_kv_per_layer_direct_pf_lf(
            list(buffers), [layers[i] for i in chosen], tensor(slots), tensor(tokens), layer, page
        )
        assert_bytes(layers, expected)
    assert_bytes(buffers, before)


GEOMETRIES: list[Geometry] = [
    (2, 3, 10, 16, (4, 32)),
    (1, 3, 10, 16, (1, 576)),
    (2, 2, 40, 1, (24,)),
    (1, 1, 12, 7, (656,)),  # one layer: neighbouring pages follow on each other in memory
    (2, 1, 12, 5, ()),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_page_first_buffers(device: str, geometry: Geometry) -> None:
    _, _, pages, page, _ = geometry
    dtype = torch.bfloat16 if geometry[4] == (4, 32) else torch.uint8
    for where in places(device):
        for tokens, slots in page_maps(pages, page):
            layers, buffers = layers_of(geometry, where[0], 1, dtype), buffers_of(geometry, where[1], None, dtype)
            check_write(geometry, layers, buffers, tokens, slots)
            layers, buffers = layers_of(geometry, where[1], None, dtype), buffers_of(geometry, where[0], 9, dtype)
            check_read(geometry, buffers, layers, slots, tokens)


def test_pages_out_of_step_with_the_buffers(device: str) -> None:
    """Tokens that begin in the middle of a page, and lie in any order: still every index by itself."""
    geometry: Geometry = (2, 2, 6, 8, (16,))
    rng = np.random.default_rng(3)
    for where in places(device):
        for tokens, slots in (
            (np.arange(16), np.arange(3, 19)),
            (np.arange(5, 29), np.arange(24)),
            (rng.permutation(48)[:40], rng.permutation(48)[:40]),
        ):
            layers, buffers = layers_of(geometry, where[0], 1), buffers_of(geometry, where[1], None)
            check_write(geometry, layers, buffers, tokens, slots)
            layers, buffers = layers_of(geometry, where[1], None), buffers_of(geometry, where[0], 1)
            check_read(geometry, buffers, layers, slots, tokens)


def test_several_layers_of_a_buffer_at_once(device: str) -> None:
    """From `layer_id` on, K of every layer before V of every layer; the other layers stay."""
    geometry: Geometry = (2, 5, 6, 4, (8,))
    where = places(device)[0]
    buffers, layers = buffers_of(geometry, where[0], 1), layers_of((2, 2, 6, 4, (8,)), where[1], None)
    slots, tokens = pages_of([5, 0, 3], 4), pages_of([1, 2, 4], 4)
    data, expected = snapshot(buffers), snapshot(layers)
    for number in range(4):
        for token, slot in zip(tokens, slots, strict=True):
            expected[number][token] = data[number // 2][slot // 4, 2 + number % 2, slot % 4]
    transfer_kv_per_layer_direct_pf_lf(buffers, layers, tensor(slots), tensor(tokens), 2, 4)
    assert_bytes(layers, expected)


# -- how many copies --------------------------------------------------------------------------------------------------


def test_neighbours_are_one_copy() -> None:
    """Runs of tokens, cut where a page of a page-first buffer ends, or where rows have room between them."""
    lf, wide = direct._layer(torch.zeros(64, 8)), direct._layer(torch.zeros(64, 16)[:, :8])
    pf = torch.zeros(8, 8, 8)
    every, half = np.arange(64), np.concatenate([np.arange(8, 24), np.arange(40, 56)])
    for src, dst, sources, targets, counts in (
        (lf, lf, every, every, [64]),
        (lf, lf, half, np.arange(32), [16, 16]),
        (lf, lf, np.arange(32), half, [16, 16]),
        (lf, lf, np.arange(4), np.arange(4)[::-1], [1, 1, 1, 1]),
        (lf, pf, every, every, [8] * 8),
        (pf, lf, half, half - 8, [8] * 4),
        (lf, pf, np.arange(12), np.arange(4, 16), [4, 8]),
        (pf, pf, np.arange(12), np.arange(4, 16), [4, 4, 4]),
        (wide, lf, np.arange(3), np.arange(3), [1, 1, 1]),
        (lf, wide, np.arange(3), np.arange(3), [1, 1, 1]),
    ):
        to, of, found = direct._runs([src], [dst], sources, targets)
        assert found.tolist() == counts
        firsts = np.cumsum([0, *counts[:-1]])
        assert (to.tolist(), of.tolist()) == (targets[firsts].tolist(), sources[firsts].tolist())


# -- what is refused --------------------------------------------------------------------------------------------------

FOUR = torch.arange(4)


def layer(tokens: int = 16, width: int = 8, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full((tokens, width), SENTINEL, dtype=torch.uint8).view(dtype)


def buffer(pages: int = 4, layers: int = 2, page: int = 4, width: int = 8) -> torch.Tensor:
    return torch.full((pages, layers, page, width), SENTINEL, dtype=torch.uint8)


BAD_INDICES: list[tuple[torch.Tensor, torch.Tensor, str]] = [
    (FOUR, torch.arange(8), "4 source and 8 destination"),
    (torch.arange(3), torch.arange(3), "3 source and 3 destination indices, in pages of 4"),
    (FOUR.double(), FOUR, "float64, not integers"),
    (FOUR, FOUR.bool(), "bool, not integers"),
    (torch.tensor([0, 1, 2, -1]), FOUR, "source index -1 is out of range"),
    (torch.tensor([0, 16, 2, 1]), FOUR, "source index 16 is out of range"),
    (FOUR, torch.tensor([0, 1, -9, 3]), "destination index -9 is out of range"),
    (FOUR, torch.tensor([0, 1, 1 << 62, 3]), "destination index .* is out of range"),
    (FOUR, torch.tensor([0, 1, 2, 1]), "named twice"),
    (torch.empty(4, device="meta", dtype=torch.int64), FOUR, "are on meta"),
]
CALLS: dict[str, tuple[Callable[..., None], list[torch.Tensor], list[torch.Tensor], tuple[int, ...]]] = {
    "direct": (transfer_kv_direct, [layer()], [layer()], ()),
    "pf_lf": (transfer_kv_per_layer_direct_pf_lf, [buffer()], [layer()], (1,)),
    "lf_pf": (transfer_kv_all_layer_direct_lf_pf, [layer(), layer()], [buffer()], ()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("sources", "targets", "message"), BAD_INDICES, ids=[m for _, _, m in BAD_INDICES])
def test_indices_that_cannot_be_are_refused(
    name: str, sources: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    function, src, dst, more = CALLS[name]
    with pytest.raises(TransferArgumentError, match=message):
        function(src, dst, sources, targets, *more, 4)
    assert all(bool((t == SENTINEL).all()) for t in dst), "something was copied before the refusal"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("page", [0, -4, 4.0, 3])
def test_page_sizes_that_cannot_be_are_refused(name: str, page: Any) -> None:
    function, src, dst, more = CALLS[name]
    with pytest.raises(TransferArgumentError, match=r"page_size|pages of 3"):
        function(src, dst, FOUR, FOUR, *more, page)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([layer()], [layer(), layer()], "1 source and 2 destination layers"),
        ([layer()], [layer(width=16)], "rows of 8 bytes .* do not go to 16 bytes"),
        ([layer(dtype=torch.int8)], [layer()], "int8.* do not go to .*uint8"),
        ([layer(width=16).t()], [layer(8, 16)], "not contiguous"),
        ([layer(), layer(3)], [layer(), layer()], "source index 3 is out of range"),
        ([torch.tensor(1)], [layer()], "scalar"),
        ([torch.empty(16, 8, device="meta")], [torch.empty(16, 8)], "on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_do_not_fit_are_refused(src: Tensors, dst: Tensors, message: str) -> None:
    with pytest.raises(TransferArgumentError, match=message):
        transfer_kv_direct(src, dst, FOUR, FOUR, 4)


@pytest.mark.parametrize(
    ("buffers", "layers", "first", "message"),
    [
        ([], [layer()], 0, "0 page-first buffers"),
        ([buffer()] * 2, [layer()], 0, "2 page-first buffers do not go with 1 layers"),
        ([buffer()], [layer()], 2, "layers 2 ... 2 are not in a page-first buffer of 2 layers"),
        ([buffer()], [layer()], -1, "layer_id is -1"),
        ([buffer(page=8)], [layer()], 0, "page-first buffer has the shape"),
        ([buffer(width=16)], [layer()], 0, r"rows of .* do not go to"),
        ([buffer().transpose(2, 3)[:, :, :4]], [layer(width=4)], 0, "not contiguous"),
        ([buffer()[:0]], [layer()], 0, "index 3 is out of range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_buffers_that_do_not_fit_are_refused(buffers: Tensors, layers: Tensors, first: int, message: str) -> None:
    with pytest.raises(TransferArgumentError, match=message):
        transfer_kv_per_layer_direct_pf_lf(buffers, layers, FOUR, FOUR, first, 4)
    if first == 0:
        with pytest.raises(TransferArgumentError, match=message):
            transfer_kv_all_layer_direct_lf_pf(layers, buffers, FOUR, FOUR, 4)


# -- on a GPU only ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    def test_side_streams_and_the_legacy_stream_are_in_order(self) -> None:
        geometry: Geometry = (2, 3, 10, 16, (4, 32))
        fresh, layers = layers_of(geometry, "cuda", 1), layers_of(geometry, "cuda", None)
        buffers = buffers_of(geometry, "pinned", None)
        tokens, slots = pages_of([3, 4, 5, 9], 16), pages_of([9, 0, 1, 2], 16)
        check_write(geometry, layers, buffers, tokens, slots)  # what is made once is made
        expected = snapshot(buffers)
        for part in range(2):
            for number in range(3):
                rows = raw(fresh[part * 3 + number])[tokens].reshape(4, 16, 4, 32, 1)
                expected[part][slots[::16] // 16, number] = rows
        side = torch.cuda.Stream()
        for stream in (side, torch.cuda.default_stream()):
            for t in [*layers, *buffers]:
                t.fill_(SENTINEL)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)
                for of, to in zip(fresh, layers, strict=True):
                    to.copy_(of)
                transfer_kv_all_layer_direct_lf_pf(layers, buffers, tensor(tokens), tensor(slots), 16)
                assert not stream.query(), "the call waited for the stream"
                for t in layers:
                    t.fill_(SENTINEL)  # after the copies, which must not see it
            stream.synchronize()
            assert_bytes(buffers, expected)

    def test_one_batch_of_whole_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        geometry: Geometry = (2, 3, 10, 16, (64,))
        batches: list[list[int]] = []
        copy = CopyEngine.copy

        def spy(self: CopyEngine, dst: Any, src: Any, nbytes: Any, stream: Any) -> None:
            batches.append(sorted(nbytes.tolist()))
            copy(self, dst, src, nbytes, stream)

        monkeypatch.setattr(CopyEngine, "copy", spy)
        layers, buffers = layers_of(geometry, "cuda", 1), buffers_of(geometry, "pinned", None)
        check_write(geometry, layers, buffers, pages_of([1, 2, 3, 7], 16), pages_of([4, 5, 6, 0], 16))
        assert batches == [[1024] * 24]
        check_layers(layers, layers_of(geometry, "pinned", None), pages_of([1, 2, 3, 7], 16), np.arange(64), 16)
        assert batches[1] == [1024] * 6 + [3072] * 6

    def test_it_cannot_be_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        src, dst = [pool((16, 8), "cuda", 1)], [pool((16, 8), "pinned", None)]
        scratch, before = torch.zeros(8, device="cuda"), snapshot(dst)
        other = [pool((16, 8), "pinned", None)]
        transfer_kv_direct(src, other, FOUR, FOUR, 4)
        torch.cuda.synchronize()
        for engine in (direct._engine, direct._engine.__wrapped__):  # made before, and not yet
            monkeypatch.setattr(direct, "_engine", engine)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                scratch.add_(1)  # an empty graph is a warning
                with pytest.raises(CaptureUnsupportedError):
                    transfer_kv_direct(src, dst, FOUR, FOUR, 4)
        assert_bytes(dst, before)

    def test_what_the_gpu_cannot_reach_and_hidden_waits_are_refused(self) -> None:
        src, dst = [pool((16, 8), "cuda", 1)], [pool((16, 8), "pinned", None)]
        before = snapshot(dst)
        with pytest.raises(TransferArgumentError, match="pageable"):
            transfer_kv_direct(src, [pool((16, 8), "cpu", None)], FOUR, FOUR, 4)
        for indices in ((FOUR.cuda(), FOUR), (FOUR, FOUR.cuda())):
            with pytest.raises(TransferArgumentError, match=r"on cuda:0\n.*indices\.cpu"):
                transfer_kv_direct(src, dst, *indices, 4)
        assert_bytes(dst, before)

    def test_beyond_four_gib(self) -> None:
        """A page-first buffer of 5 GiB, of which the last page is written and read."""
        whole = torch.zeros((5, 1024, 16, 65536), dtype=torch.uint8, device="cuda")
        rows = torch.randint(1, 256, (1024, 16, 65536), dtype=torch.uint8, device="cuda")
        last, first = torch.arange(64, 80), torch.arange(16)
        transfer_kv_all_layer_direct_lf_pf(list(rows), [whole], first, last, 16)
        assert torch.equal(whole[4], rows)
        assert not bool(whole[:4].any())
        back = torch.zeros_like(rows[0])
        transfer_kv_per_layer_direct_pf_lf([whole], [back], last, first, 1023, 16)
        assert torch.equal(back, rows[1023])
