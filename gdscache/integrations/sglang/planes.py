"""SGLang's pools as planes of gdscache: rows of opaque bytes over the pools' own memory. Nothing of SGLang is imported.

A device pool has a plane for K and one for V in each layer (MLA: one), token slots being rows. A host pool has all
layers of a page side by side, K and V apart: one layer with two planes (MLA: one), whose pages are one run each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from gdscache.errors import CacheLayoutUnsupportedError
from gdscache.integrations.settings import planes_section

_DEVICE_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
_HOST_POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
HOST_LAYOUTS = ("page_first", "page_first_direct")
_SCALES = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")


@dataclasses.dataclass(frozen=True)
class PoolPlanes:
    """`tensors[layer][plane]`: uint8, (pages, page_tokens, bytes). `described`: what makes the bytes what they are."""

    tensors: list[tuple[torch.Tensor, ...]]
    described: dict[str, object]

    def model(self) -> dict[str, object]:
        """The keys of a configuration's section `model` that say what a page is made of."""
        layers = [dict(zip(_names(planes), (int(t.shape[2]) for t in planes), strict=True)) for planes in self.tensors]
        return planes_section(layers, int(self.tensors[0][0].shape[1]))


def _names(planes: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    return ("k", "v") if len(planes) == 2 else ("latent",)


def device_planes(pool: Any, page_tokens: int) -> PoolPlanes:
    """A device pool of token rows. Raises `CacheLayoutUnsupportedError`."""
    kind = type(pool).__name__
    _refuse_kind(kind, _DEVICE_POOLS)
    if kind == "MHATokenToKVPool":
        layout = getattr(pool, "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise CacheLayoutUnsupportedError(
                f"the KV cache's layout is {layout!r}: rows are no tokens", "unset SGLANG_USE_HND_KVCACHE"
            )
        layers: list[tuple[Any, ...]] = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    else:
        layers = [(buffer,) for buffer in pool.kv_buffer]
    scaled = [name for name in _SCALES if getattr(pool, name, None) is not None]
    if scaled or getattr(pool, "post_capture_active", False):
        what = f"has scales beside it ({scaled[0]})" if scaled else "has its memory only after graphs were captured"
        raise CacheLayoutUnsupportedError(f"the KV cache {what}", "set --kv-cache-dtype auto, and no flag that does so")
    tensors = [tuple(_rows(buffer, page_tokens) for buffer in layer) for layer in layers]
    shapes = [[list(buffer.shape[1:]) for buffer in layer] for layer in layers]
    return PoolPlanes(tensors, {"pool": kind, "dtype": str(pool.dtype), "rows": shapes})


def host_planes(pool: Any) -> PoolPlanes:
    """A host pool of HiCache, a page of which is one run (K and V apart). Raises `CacheLayoutUnsupportedError`."""
    kind = type(pool).__name__
    _refuse_kind(kind, _HOST_POOLS)
    if pool.layout not in HOST_LAYOUTS:
        raise CacheLayoutUnsupportedError(
            f"the host pool's layout is {pool.layout!r}: a page is not one run of bytes",
            f"set --hicache-mem-layout to {' or '.join(HOST_LAYOUTS)}",
        )
    if getattr(pool, "dcp_size", 1) != 1:
        raise CacheLayoutUnsupportedError(f"pages are spread over {pool.dcp_size} ranks", "set --dcp-size 1")
    buffer, page = pool.kv_buffer, int(pool.page_size)
    parts = list(buffer) if kind == "MHATokenToKVPoolHost" else [buffer]
    tensors = tuple(_rows(part.reshape(-1, _page_elements(pool, part)), page, rows_are_pages=True) for part in parts)
    described: dict[str, object] = {"pool": kind, "layout": pool.layout, "dtype": str(pool.dtype)}
    return PoolPlanes([tensors], {**described, "page": [list(part.shape[1:]) for part in parts]})


def _refuse_kind(kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise CacheLayoutUnsupportedError(
            f"the KV cache is a {kind}; {' and '.join(known)} are supported",
            "use a model whose layers all keep K and V, or an MLA latent, of every token, and --kv-cache-dtype auto",
        )


def _page_elements(pool: Any, part: torch.Tensor) -> int:
    pages = int(pool.size) // int(pool.page_size)
    if part.numel() % pages or not part.is_contiguous():
        raise CacheLayoutUnsupportedError(
            f"the host pool has {pages} pages, shape {tuple(part.shape)} and strides {part.stride()}",
            "report it: this layout is unknown",
        )
    return part.numel() // pages


def _rows(buffer: torch.Tensor, page_tokens: int, *, rows_are_pages: bool = False) -> torch.Tensor:
    """Its bytes as (pages, page_tokens, bytes of a token), over the same memory."""
    slots = int(buffer.shape[0]) * (page_tokens if rows_are_pages else 1)
    each = math.prod(buffer.shape[1:]) * buffer.element_size()
    if slots % page_tokens or not buffer.is_contiguous() or (rows_are_pages and each % page_tokens):
        raise CacheLayoutUnsupportedError(
            f"a buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not whole pages of "
            f"{page_tokens} tokens",
            "report it: this layout is unknown",
        )
    width = each // page_tokens if rows_are_pages else each
    return buffer.reshape(-1).view(torch.uint8).view(slots // page_tokens, page_tokens, width)
