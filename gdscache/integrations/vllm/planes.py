"""vLLM's KV cache as planes of gdscache: a layer is one plane of opaque bytes, a block is a page.

vLLM says how a block's heads and tokens lie in its bytes; here they only move. So the layout's name, and the shape, the
strides and the type of each layer go into the namespace. Nothing of vLLM is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from gdscache.errors import CacheLayoutUnsupportedError
from gdscache.integrations.settings import planes_section


@dataclasses.dataclass(frozen=True)
class VllmPlanes:
    """`tensors[i]` is the plane of layer `i`: uint8, (blocks, block_tokens, bytes). `layers`: each of vLLM's names."""

    tensors: list[torch.Tensor]
    layers: dict[str, int]
    described: list[object]

    def model(self) -> dict[str, object]:
        """The keys of a configuration's section `model` that say what a page is made of."""
        tokens = int(self.tensors[0].shape[1])
        return planes_section([{"kv": int(tensor.shape[2])} for tensor in self.tensors], tokens)


def planes_of(caches: Mapping[str, torch.Tensor], blocks: int, block_tokens: int, layout: str) -> VllmPlanes:
    """Planes over vLLM's tensors by layer name, each (blocks or a multiple, heads, tokens, content).

    Layers that share their cache are one plane. Raises `CacheLayoutUnsupportedError` where a block is not one run of
    bytes.
    """
    tensors: list[torch.Tensor] = []
    layers: dict[str, int] = {}
    described: list[object] = []
    seen: dict[tuple[object, ...], int] = {}
    for name, cache in caches.items():
        alias = (cache.data_ptr(), tuple(cache.shape), cache.stride(), cache.dtype)
        if alias not in seen:
            seen[alias] = len(tensors)
            tensors.append(_plane(name, cache, blocks, block_tokens, layout))
            described.append([list(cache.shape[1:]), list(cache.stride()[1:]), str(cache.dtype)])
        layers[name] = seen[alias]
    return VllmPlanes(tensors, layers, described)


def _plane(name: str, cache: torch.Tensor, blocks: int, block_tokens: int, layout: str) -> torch.Tensor:
    item, kernel_blocks = cache.element_size(), int(cache.shape[0])
    each = cache[0].numel()  # of one of vLLM's kernel blocks, a whole number of which are a block
    ratio, rest = divmod(kernel_blocks, blocks)
    step = int(cache.stride(0))
    nbytes = each * ratio * item
    run = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    dense = all(stride == size_below for (stride, _), size_below in zip(run, _sizes(run), strict=True))
    if rest or not ratio or not dense or (ratio > 1 and step != each) or nbytes % block_tokens:
        raise CacheLayoutUnsupportedError(
            f"layer {name}: {kernel_blocks} kernel blocks for {blocks} blocks of {block_tokens} tokens, shape "
            f"{tuple(cache.shape)}, strides {cache.stride()}, layout {layout}: a block is not one run of bytes",
            "set VLLM_KV_CACHE_LAYOUT to LBNHC, LBHNC, BLNHC or BLHNC, as the attention backend allows",
        )
    storage = cache.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
    width = nbytes // block_tokens
    return torch.as_strided(
        everything, (blocks, block_tokens, width), (step * ratio * item, width, 1), cache.storage_offset() * item
    )


def _sizes(run: list[tuple[int, int]]) -> list[int]:
    """The stride that each dimension has where those below it leave no gap; of one element it does not matter."""
    sizes, below = [], 1
    for stride, size in run:
        sizes.append(below if size > 1 else stride)
        below *= size
    return sizes
