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


def _layer(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a layer, all tokens in one page."""
    if tensor.dim() < 1:
        raise TransferArgumentError("a layer is a scalar", "its first dimension is tokens")
    return _with_rows(tensor.unsqueeze(0))


def _paged(buffers: Sequence[torch.Tensor], tensors: int, first: int, page_size: int) -> list[torch.Tensor]:
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
    return [_with_rows(b[:, first + j]) for b in buffers for j in range(layers)]


def _with_rows(view: torch.Tensor) -> torch.Tensor:
    """One layer's rows: of shape (pages, page, values of a row), where token `t` is `[t // page, t % page]`."""
    if not view[:1, :1].is_contiguous():
        raise TransferArgumentError(f"a token's row of shape {tuple(view.shape[2:])} is not contiguous")
    return view.view(*view.shape[:2], math.prod(view.shape[2:]))


def _copy(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    sources, targets = _indices("source", src_indices, src), _indices("destination", dst_indices, dst)
    if len(sources) != len(targets) or len(sources) % whole("page_size", page_size):
        raise TransferArgumentError(
            f"there are {len(sources)} source and {len(targets)} destination indices, in pages of {page_size}",
            "give equal numbers of both, in whole pages",
        )
    if len(np.unique(targets)) != len(targets):
        raise TransferArgumentError("a destination index is named twice")
    for a, b in zip(src, dst, strict=True):
        if a.dtype is not b.dtype or a.shape[2] != b.shape[2]:
            raise TransferArgumentError(
                f"rows of {_row_bytes(a)} bytes ({a.dtype}) do not go to {_row_bytes(b)} bytes ({b.dtype})"
            )
    device = _device([*src, *dst])
    pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a.shape[2]]
    if not pairs or not len(sources):
        return
    to, of, counts = _runs(src, dst, sources, targets)
    if device is None:
        for a, b in pairs:
            for token, other, count in zip(of.tolist(), to.tolist(), counts.tolist(), strict=True):
                _run(b, other, count).copy_(_run(a, token, count))
        return
    nbytes = np.concatenate([counts * _row_bytes(a) for a, _ in pairs]).astype(np.uint64)
    starts, ends = _addresses([a for a, _ in pairs], of), _addresses([b for _, b in pairs], to)
    _engine(device).copy(ends, starts, nbytes, torch.cuda.current_stream(device))


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[2] * rows.itemsize


def _run(rows: torch.Tensor, token: int, count: int) -> torch.Tensor:
    page, inside = divmod(token, rows.shape[1])
    return rows[page, inside : inside + count]


def _runs(
    src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], sources: Int64Array, targets: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """First destination, first source and number of tokens of every run; no run crosses the end of a page."""
    fences = (sources % src[0].shape[1] == 0) | (targets % dst[0].shape[1] == 0)
    if any(rows.stride(1) != rows.shape[2] for rows in (*src, *dst)):  # tokens that are not adjacent
        fences[:] = True
    ones = np.ones(len(sources), dtype=np.uint64)
    to, of, counts = merge(targets.astype(np.uint64), sources.astype(np.uint64), ones, fences)
    return to.astype(np.int64), of.astype(np.int64), counts.astype(np.int64)


def _addresses(rows: Sequence[torch.Tensor], tokens: Int64Array) -> UInt64Array:
    """The addresses of tokens: all of `rows[0]`, then all of `rows[1]`, and so on."""
    page, inside = np.divmod(tokens, max(r.shape[1] for r in rows))  # layers may have unequal numbers of tokens
    columns = [(r.data_ptr(), *(step * r.itemsize for step in r.stride()[:2])) for r in rows]
    base, page_stride, token_stride = np.array(columns, dtype=np.int64).T[:, :, None]
    return np.asarray(base + page * page_stride + inside * token_stride).astype(np.uint64).ravel()


def _device(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The GPU in the copy, or None if all is in CPU memory."""
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


def _indices(name: str, indices: torch.Tensor, layers: Sequence[torch.Tensor]) -> Int64Array:
    if indices.device.type != "cpu":
        raise TransferArgumentError(
            f"{name} indices are on {indices.device}", "take them to the host, indices.cpu(), where a wait does no harm"
        )
    if indices.dtype not in _INTEGERS:
        raise TransferArgumentError(f"{name} indices are {indices.dtype}, not integers")
    tokens = indices.detach().reshape(-1).numpy().astype(np.int64)
    known = min((rows.shape[0] * rows.shape[1] for rows in layers), default=0)
    if len(tokens) and layers and not 0 <= tokens.min() <= tokens.max() < known:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise TransferArgumentError(f"{name} index {wrong} is out of range", f"there are {known} tokens")
    return tokens
