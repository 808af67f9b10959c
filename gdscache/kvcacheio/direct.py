"""The direct operations of SGLang's `kvcacheio`: by the GPU's copy engine, one batch a call.

`src_indices[i]` goes to `dst_indices[i]`, token by token. Tokens that are consecutive on both sides are one copy, so
whole pages in order are copied as such. Indices are integer tensors in host memory: fetching them from a GPU would be a
hidden synchronisation. Every index is checked before anything is copied.

A layer (`lf`) is a tensor of shape (tokens, ...); a page-first buffer for these operations (`pf`) is one of shape
(pages, layers, page_size, ...). A token's row of a layer is contiguous, and both sides have the same dtype and row
bytes. Source and destination do not overlap, and no destination is named twice.

If any tensor is on a GPU, the others are there too or in page-locked host memory, each in one registration (no copy may
cross from one into the next). The copies are queued on that GPU's current stream; the caller keeps the tensors until
they have run. If all tensors are in CPU memory they are copied before the call returns.

Raises `TransferArgumentError` for arguments that do not fit together, and `CaptureUnsupportedError` while a CUDA graph
is recorded, which cannot contain such copies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from gdscache.arrays import Int64Array, UInt64Array
from gdscache.cuda.driver import CopyEngine, Driver, merge
from gdscache.errors import TransferArgumentError
from gdscache.kvcacheio.launch import refuse_capture, whole

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Tokens of layer `src_layers[j]` to `dst_layers[j]`, for all `j`; the number of tokens is a multiple of a page."""
    if len(src_layers) != len(dst_layers):
        raise TransferArgumentError(f"there are {len(src_layers)} source and {len(dst_layers)} destination layers")
    src, dst = [_layer(t) for t in src_layers], [_layer(t) for t in dst_layers]
    _copy(src, dst, src_indices, dst_indices, page_size)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Layer `layer_id` of page-first buffers, [k, v] or [one], to that layer's tensors, in the same order.

    Further tensors are those of the following layers: first every layer's K, then every layer's V.
    """
    src = _paged(src_ptrs, len(dst_ptrs), whole("layer_id", layer_id, least=0), page_size)
    _copy(src, [_layer(t) for t in dst_ptrs], src_indices, dst_indices, page_size)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers, first every layer's K and then every layer's V, to page-first buffers, [k, v] or [one]."""
    dst = _paged(dst_ptrs, len(src_ptrs), 0, page_size)
    _copy([_layer(t) for t in src_ptrs], dst, src_indices, dst_indices, page_size)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Token `t` of one layer is `view[t // page, t % page]`, of shape (pages, page, values of a row)."""

    view: torch.Tensor
    paged: bool  # else all tokens are one page

    @property
    def page(self) -> int:
        return self.view.shape[1]

    @property
    def tokens(self) -> int:
        return self.view.shape[0] * self.view.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.view.shape[2] * self.view.itemsize

    @property
    def dense(self) -> bool:
        """Whether the tokens of a page are adjacent."""
        return self.view.stride(1) == self.view.shape[2]

    def run(self, token: int, count: int) -> torch.Tensor:
        page, inside = divmod(token, self.page)
        return self.view[page, inside : inside + count]


def _layer(tensor: torch.Tensor) -> _Rows:
    if tensor.dim() < 1:
        raise TransferArgumentError("a layer is a scalar", "its first dimension is tokens")
    return _Rows(_with_rows(tensor.unsqueeze(0)), paged=False)


def _paged(buffers: Sequence[torch.Tensor], tensors: int, first: int, page_size: int) -> list[_Rows]:
    """The layers of page-first buffers for `tensors` tensors: of the first buffer, then of the second."""
    if len(buffers) not in (1, 2) or tensors % len(buffers):
        raise TransferArgumentError(
            f"{len(buffers)} page-first buffers do not go with {tensors} layers", "give [k, v], or [one] for MLA"
        )
    layers = tensors // len(buffers)
    for buffer in buffers:
        if buffer.dim() < 3 or buffer.shape[2] != whole("page_size", page_size):
            raise TransferArgumentError(
                f"a page-first buffer has the shape {tuple(buffer.shape)}",
                f"give (pages, layers, {page_size}, ...), or another page_size",
            )
        if first + layers > buffer.shape[1]:
            raise TransferArgumentError(
                f"layers {first} ... {first + layers - 1} are not in a page-first buffer of {buffer.shape[1]} layers"
            )
    return [_Rows(_with_rows(b[:, first + j]), paged=True) for b in buffers for j in range(layers)]


def _with_rows(view: torch.Tensor) -> torch.Tensor:
    if not view[:1, :1].is_contiguous():
        raise TransferArgumentError(f"a token's row of shape {tuple(view.shape[2:])} is not contiguous")
    return view.view(*view.shape[:2], math.prod(view.shape[2:]))


def _copy(
    src: Sequence[_Rows], dst: Sequence[_Rows], src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    sources, targets = _indices("source", src_indices), _indices("destination", dst_indices)
    if len(sources) != len(targets) or len(sources) % whole("page_size", page_size):
        raise TransferArgumentError(
            f"there are {len(sources)} source and {len(targets)} destination indices, in pages of {page_size}",
            "give equal numbers of both, in whole pages",
        )
    _check_range("source", sources, src)
    _check_range("destination", targets, dst)
    if len(np.unique(targets)) != len(targets):
        raise TransferArgumentError("a destination index is named twice")
    for a, b in zip(src, dst, strict=True):
        if a.view.dtype is not b.view.dtype or a.row_bytes != b.row_bytes:
            raise TransferArgumentError(
                f"rows of {a.row_bytes} bytes ({a.view.dtype}) do not go to {b.row_bytes} bytes ({b.view.dtype})"
            )
    device = _device([*src, *dst])
    pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a.row_bytes]
    if not pairs or not len(sources):
        return
    to, of, counts = _runs(src, dst, sources, targets)
    if device is None:
        for a, b in pairs:
            for token, other, count in zip(of.tolist(), to.tolist(), counts.tolist(), strict=True):
                b.run(other, count).copy_(a.run(token, count))
        return
    nbytes = np.concatenate([counts * a.row_bytes for a, _ in pairs]).astype(np.uint64)
    starts, ends = _addresses([a for a, _ in pairs], of), _addresses([b for _, b in pairs], to)
    _engine(device).copy(ends, starts, nbytes, torch.cuda.current_stream(device))


def _runs(
    src: Sequence[_Rows], dst: Sequence[_Rows], sources: Int64Array, targets: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """First destination, first source and number of tokens of every run; no run crosses the end of a page."""
    fences = np.zeros(len(sources), dtype=np.bool_)
    for rows, tokens in ((src[0], sources), (dst[0], targets)):
        if rows.paged:
            fences |= tokens % rows.page == 0
    if not all(rows.dense for rows in (*src, *dst)):
        fences[:] = True
    ones = np.ones(len(sources), dtype=np.uint64)
    to, of, counts = merge(targets.astype(np.uint64), sources.astype(np.uint64), ones, fences)
    return to.astype(np.int64), of.astype(np.int64), counts.astype(np.int64)


def _addresses(rows: Sequence[_Rows], tokens: Int64Array) -> UInt64Array:
    """The addresses of tokens: all of `rows[0]`, then all of `rows[1]`, and so on."""
    page, inside = np.divmod(tokens, max(r.page for r in rows))  # not paged: page 0, and `inside` is the token
    columns = [(r.view.data_ptr(), *(step * r.view.itemsize for step in r.view.stride()[:2])) for r in rows]
    base, page_stride, token_stride = np.array(columns, dtype=np.int64).T[:, :, None]
    return np.asarray(base + page * page_stride + inside * token_stride).astype(np.uint64).ravel()


def _device(rows: Sequence[_Rows]) -> torch.device | None:
    """The GPU in the copy, or None if all is in CPU memory."""
    tensors = [r.view for r in rows]
    gpus = {t.device for t in tensors if t.device.type == "cuda"}
    others = {str(t.device) for t in tensors if t.device.type not in ("cuda", "cpu")}
    if len(gpus) > 1 or others:
        raise TransferArgumentError(f"tensors are on {', '.join(sorted({*map(str, gpus), *others}))}", "use one GPU")
    if gpus and not all(t.is_pinned() for t in tensors if t.device.type == "cpu"):
        raise TransferArgumentError(
            "a tensor is in pageable host memory", "page-lock it: pin_memory(), or cudaHostRegister"
        )
    return gpus.pop() if gpus else None


@functools.cache
def _engine(device: torch.device) -> CopyEngine:
    refuse_capture(device, "a batch of copies cannot be queued", "copy outside the graph, or use the kernel operations")
    return CopyEngine(Driver(device))


def _indices(name: str, indices: torch.Tensor) -> Int64Array:
    if indices.device.type != "cpu":
        raise TransferArgumentError(
            f"{name} indices are on {indices.device}", "take them to the host, indices.cpu(), where a wait does no harm"
        )
    if indices.dtype not in _INTEGERS:
        raise TransferArgumentError(f"{name} indices are {indices.dtype}, not integers")
    return indices.detach().reshape(-1).numpy().astype(np.int64)


def _check_range(name: str, tokens: Int64Array, rows: Sequence[_Rows]) -> None:
    if len(tokens) and rows:
        known, low, high = min(r.tokens for r in rows), int(tokens.min()), int(tokens.max())
        if low < 0 or high >= known:
            raise TransferArgumentError(
                f"{name} index {low if low < 0 else high} is out of range", f"there are {known} tokens"
            )
