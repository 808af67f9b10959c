"""vLLM's KV cache as planes of gdscache: a layer is one plane of opaque bytes, a block is a page.

Here a block's bytes only move, or are packed in two parts, keys and values. So the layout's name, and each layer's
shape, strides and type, go into the namespace.
vLLM pads a state to the other layers' block size. So layers with states have their own planes over the same memory, of
the state's bytes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gdscache.errors import CacheLayoutUnsupportedError, CacheTypeUnsupportedError
from gdscache.integrations.settings import Rows, planes_section


@dataclasses.dataclass(frozen=True)
class VllmPlanes:
    """`tensors[i]` is a plane: uint8, (blocks, block_tokens, bytes), or (blocks, 1, bytes) of states. `layers`: the
    number of the plane, by layer name. `described`: shapes, strides and types. `rows`: of each plane."""

    tensors: list[torch.Tensor]
    layers: dict[str, int]
    described: list[object]
    rows: list[Rows]

    def model(self) -> dict[str, object]:
        """The keys of a configuration's section `model` that describe a page."""
        tokens = max(int(tensor.shape[1]) for tensor in self.tensors)
        return planes_section([{"kv": rows} for rows in self.rows], tokens)


def planes_of(
    caches: Mapping[str, torch.Tensor],
    blocks: int,
    block_tokens: int | Mapping[str, int],
    layout: str,
    states: Mapping[str, int] | None = None,
    keys: Mapping[str, int] | None = None,
) -> VllmPlanes:
    """Planes over vLLM's tensors by layer name, each tensor (blocks or a multiple, heads, tokens, content).

    `block_tokens`: of all layers, or of each layer in a group; a layer in no group shares another one's cache.
    `states`: of layers that keep a state, the number of layers in their group. `keys`: elements of a head's key, of
    layers whose content is a key and a value.

    Layers at one address are one plane. They share their cache, or their groups draw blocks from one pool; the plane is
    then as wide as the widest. A row of a plane has the block's bytes divided by the fewest tokens of a block. A state
    is one row. It shares its plane only with states of its size, of groups with equally many layers, so that a page has
    no padding. Raises `CacheLayoutUnsupportedError` if a block is not one run of bytes.
    """
    tokens = dict.fromkeys(caches, block_tokens) if isinstance(block_tokens, int) else block_tokens
    runs: list[_Run] = []
    layers: dict[str, int] = {}
    described: dict[tuple[int, object], object] = {}
    seen: dict[tuple[int, ...], int] = {}
    states, keys = states or {}, keys or {}
    for name in [*tokens, *(name for name in caches if name not in tokens)]:
        cache = caches[name]
        where: tuple[int, ...] = (cache.data_ptr(),)
        if name in tokens:
            run = _run(name, cache, blocks, tokens[name], layout, keys.get(name, 0))
            where += (states[name], run.nbytes) if name in states else ()
            if where not in seen:
                seen[where] = len(runs)
                runs.append(run)
            elif runs[seen[where]].step != run.step:
                raise _not_one_run(name, cache, blocks, tokens[name], layout)
            elif run.nbytes > runs[seen[where]].nbytes:
                runs[seen[where]] = run
        if where not in seen:
            raise CacheLayoutUnsupportedError(
                f"layer {name} is in no group, and shares its cache with none that is", "leave the connector out"
            )
        layers[name] = seen[where]
        shape = [list(cache.shape[1:]), list(cache.stride()[1:]), str(cache.dtype)]
        described.setdefault((seen[where], str(shape)), shape)
    least = min((some for name, some in tokens.items() if name not in states), default=1)
    rows = [least] * len(runs)
    for name in tokens:
        if name in states:
            rows[layers[name]] = 1
        elif runs[layers[name]].nbytes % least:
            raise _not_one_run(name, caches[name], blocks, least, layout)
    views = [run.view(number) for run, number in zip(runs, rows, strict=True)]
    rows_of = [Rows.of(int(view.shape[2]), run.cache.dtype, run.parts) for run, view in zip(runs, views, strict=True)]
    return VllmPlanes(views, layers, list(described.values()), rows_of)


def write_first_scales(layers: Iterable[Any]) -> None:
    """Have vLLM's attention layers that keep scales per token and head make their views of them, before any block is
    loaded: a layer writes ones over the scales of all blocks then, and would do so in its first forward pass.

    Raises `CacheTypeUnsupportedError` if a layer makes them in no way that is known.
    """
    for layer in layers:
        impl = getattr(layer, "impl", None)  # layers with states have none
        if "per_token_head" not in (kept_as := str(getattr(impl, "kv_cache_dtype", ""))):
            continue
        make = getattr(impl, "_ensure_scale_caches", None)
        if make is None:
            raise CacheTypeUnsupportedError(
                f"kv_cache_dtype is {kept_as}: {type(impl).__name__} may write over the scales of loaded blocks in its "
                "first forward pass",
                "use fp8",
            )
        make(layer.kv_cache)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The blocks of a layer: bytes of the cache's storage from one block to the next, and bytes of one. `parts`: see
    `_parts`."""

    cache: torch.Tensor
    blocks: int
    step: int
    nbytes: int
    parts: tuple[int, ...]

    def view(self, tokens: int) -> torch.Tensor:
        """As uint8, (blocks, tokens, bytes)."""
        everything = torch.empty(0, dtype=torch.uint8, device=self.cache.device).set_(self.cache.untyped_storage())
        width = self.nbytes // tokens
        offset = self.cache.storage_offset() * self.cache.element_size()
        return torch.as_strided(everything, (self.blocks, tokens, width), (self.step, width, 1), offset)


def _run(name: str, cache: torch.Tensor, blocks: int, tokens: int, layout: str, key: int) -> _Run:
    item, kernel_blocks = cache.element_size(), int(cache.shape[0])
    each = cache[0].numel()  # elements of a kernel block; a block consists of one or more
    ratio, rest = divmod(kernel_blocks, blocks)
    step = int(cache.stride(0))
    nbytes = each * ratio * item
    dense = torch.ops.aten.is_non_overlapping_and_dense(cache[0])
    if rest or not ratio or not dense or (ratio > 1 and step != each):
        raise _not_one_run(name, cache, blocks, tokens, layout)
    return _Run(cache, blocks, step * ratio * item, nbytes, _parts(cache, key))


def _parts(cache: torch.Tensor, key: int) -> tuple[int, ...]:
    """Bytes of keys and of values, which take turns in a block: of a head and token, and in host memory of a head."""
    tokens, content = cache.shape[2:]
    if not 0 < key < content or cache.stride(3) != 1:
        return ()
    together = cache.element_size() * (tokens if cache.device.type == "cpu" else 1)
    return key * together, (content - key) * together


def _not_one_run(name: str, cache: torch.Tensor, blocks: int, tokens: int, layout: str) -> CacheLayoutUnsupportedError:
    return CacheLayoutUnsupportedError(
        f"layer {name}: {cache.shape[0]} kernel blocks for {blocks} blocks of {tokens} tokens, shape "
        f"{tuple(cache.shape)}, strides {cache.stride()}, layout {layout}: a block is not one run of bytes",
        "set VLLM_KV_CACHE_LAYOUT to LBNHC, LBHNC, BLNHC or BLHNC, as the attention backend allows",
    )
