"""SGLang's pools as planes of gdscache: rows of opaque bytes over the pools' own memory.

A device pool has a K and a V plane in each layer (MLA: one), with a row for each token slot. A host pool has all layers
of a page side by side, K and V apart: one layer with two planes (MLA: one), whose pages are one run each.

Of a hybrid model each kind of layer has a pool, and a component in the tree: FULL, SWA, MAMBA. All pages have the same
tokens; a state has a slot in its own pool, as wide as its tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch

from gdscache.errors import CacheGroupsUnsupportedError, CacheLayoutUnsupportedError
from gdscache.integrations.settings import Rows, planes_section

KV, WINDOWS, STATES = "kv", "swa", "mamba"  # SGLang's names of its pools
# Each kind of device pool: the planes of a layer by name, and the attributes with their buffers, one a layer.
_DEVICE_POOLS = {
    "MHATokenToKVPool": {"k": "k_buffer", "v": "v_buffer"},
    "MLATokenToKVPool": {"latent": "kv_buffer"},
}
# Latents, and the keys of a sparse attention's indexer, a row of which is a page: it follows the contract, and no GPU
# has run it.
_INDEXED = "DSATokenToKVPool", {"latent": "kv_buffer", "index": "index_k_with_scale_buffer"}
_HOST_POOLS, _HOST_STATES = {"MHATokenToKVPoolHost": ("k", "v"), "MLATokenToKVPoolHost": ("latent",)}, "MambaPoolHost"
HOST_LAYOUTS = {"page_first": 1, "page_first_direct": 1, "page_head": 3}  # the axis of the layers, K and V apart
_SCALES = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")


@dataclasses.dataclass(frozen=True)
class PoolPlanes:
    """`tensors[layer][plane]`: uint8, (pages, page_tokens, bytes), or (slots, 1, bytes) of states. `described`: facts
    that decide the bytes. `rows`: of each layer's planes, by name.

    If layers keep different tokens: `groups` as in `model.groups`, and `layers`, each model layer's places in
    `tensors`.
    """

    tensors: list[tuple[torch.Tensor, ...]]
    described: dict[str, object]
    rows: Sequence[Mapping[str, Rows]]
    groups: Sequence[Mapping[str, object]] = ()
    layers: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layers: Sequence[Mapping[str, torch.Tensor]],
        described: Mapping[str, object],
        dtype: torch.dtype | None = None,
        parts: Sequence[tuple[int, ...]] = (),
    ) -> PoolPlanes:
        """`layers`: each layer's planes by name. `dtype`: of all values, None for states and planes of several types.
        `parts`: bytes of those that take turns in each plane."""
        each = [zip(some.items(), parts or [()] * len(some), strict=True) for some in layers]
        rows = [{name: Rows.of(int(own.shape[2]), dtype, its) for (name, own), its in some} for some in each]
        return cls([tuple(some.values()) for some in layers], dict(described), rows)

    def pools(self) -> dict[str, Sequence[int]]:
        """Places in `tensors` by pool, in the order of an engine's: each kind of layer has a pool."""
        if not self.groups:
            return {KV: range(len(self.tensors))}
        return {str(group["name"]): cast("Sequence[int]", group["layers"]) for group in self.groups}

    def places(self) -> dict[int, list[tuple[int, int]]]:
        """Each model layer's places: a pool, and a layer of it."""
        at = {place: (p, n) for p, some in enumerate(self.pools().values()) for n, place in enumerate(some)}
        layers = self.layers or {layer: [layer] for layer in range(len(self.tensors))}
        return {layer: [at[place] for place in some] for layer, some in layers.items()}

    def model(self) -> dict[str, object]:
        """The keys of a configuration's section `model` that describe a page."""
        section = planes_section(self.rows, max(int(planes[0].shape[1]) for planes in self.tensors))
        return {**section, "groups": [dict(group) for group in self.groups]} if self.groups else section


def group_of(name: str, layers: Sequence[int], page_tokens: int, window: int) -> dict[str, object]:
    """A pool as one of `model.groups`. `window`: of a pool of windows, with the token itself."""
    keeps: dict[str, object] = {"window": window} if name == WINDOWS else {"state": True} if name == STATES else {}
    return {"name": name, "layers": layers, "page_tokens": page_tokens, **keeps}


def device_planes(pool: Any, page_tokens: int, *, untried: bool = False) -> PoolPlanes:
    """A device pool of token rows. `untried`: see `LinkerOptions`. Raises `CacheLayoutUnsupportedError`."""
    kind, (indexed, attributes) = type(pool).__name__, _INDEXED
    if kind != indexed:
        _refuse_kind(kind, _DEVICE_POOLS)
        attributes = _DEVICE_POOLS[kind]
    elif not untried:
        raise CacheLayoutUnsupportedError(
            "the model keeps an indexer's keys beside its latents (sparse attention), which no GPU has run with this "
            "linker",
            'use another model; to try it, add "untried": true to linker_extra_config, and compare answers',
        )
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if "k" in attributes and layout != "nhd":
        raise CacheLayoutUnsupportedError(
            f"the KV cache's layout is {layout!r}: rows are no tokens", "unset SGLANG_USE_HND_KVCACHE"
        )
    scaled = [name for name in _SCALES if getattr(pool, name, None) is not None]
    if scaled or getattr(pool, "post_capture_active", False):
        what = f"has scales beside it ({scaled[0]})" if scaled else "has its memory only after graphs were captured"
        raise CacheLayoutUnsupportedError(f"the KV cache {what}", "set --kv-cache-dtype auto, and no flag that does so")
    buffers: dict[str, list[Any]] = {name: [*getattr(pool, attribute)] for name, attribute in attributes.items()}
    if kind == indexed:
        index = buffers["index"] = [part for part in buffers["index"] if part is not None and part.numel()]
        latents, tokens = len(buffers["latent"]), getattr(pool, "index_kpool", 1)
        if tokens != 1 or len(index) != latents:
            raise CacheLayoutUnsupportedError(
                f"{len(index)} of {latents} layers have an indexer's keys, one of {tokens} tokens",
                "use a model in which each layer has an indexer's key of each token",
            )
    layers = [dict(zip(buffers, layer, strict=True)) for layer in zip(*buffers.values(), strict=True)]
    shapes = [[list(buffer.shape[1:]) for buffer in layer.values()] for layer in layers]

    def rows(name: str, buffer: Any, layer: Mapping[str, Any]) -> torch.Tensor:
        if name != "index":
            return rows_of(buffer, page_tokens)
        return rows_of(buffer[: int(layer["latent"].shape[0]) // page_tokens], page_tokens, rows_are_pages=True)

    planes = [{name: rows(name, buffer, layer) for name, buffer in layer.items()} for layer in layers]
    described = {"pool": kind, "dtype": str(pool.dtype), "rows": shapes}
    return PoolPlanes.of(planes, described, None if kind == indexed else pool.dtype)


def host_planes(pool: Any) -> PoolPlanes:
    """A host pool of HiCache, a page of which is one run (K and V apart). Raises `CacheLayoutUnsupportedError`."""
    kind = type(pool).__name__
    _refuse_kind(kind, _HOST_POOLS)
    refuse_layout(pool.layout)
    if getattr(pool, "dcp_size", 1) != 1:
        raise CacheLayoutUnsupportedError(f"pages are spread over {pool.dcp_size} ranks", "set --dcp-size 1")
    buffer, page = pool.kv_buffer, int(pool.page_size)
    names, parts = _HOST_POOLS[kind], list(buffer) if kind == "MHATokenToKVPoolHost" else [buffer]
    whole = [rows_of(part.reshape(-1, _page_elements(pool, part)), page, rows_are_pages=True) for part in parts]
    described: dict[str, object] = {"pool": kind, "layout": pool.layout, "dtype": str(pool.dtype)}
    described |= {"page": [list(part.shape[1:]) for part in parts]}
    axis = HOST_LAYOUTS[pool.layout]
    layers = [(math.prod(part.shape[axis + 1 :]) * part.element_size(),) * int(part.shape[axis]) for part in parts]
    return PoolPlanes.of([dict(zip(names, whole, strict=True))], described, pool.dtype, layers)


def refuse_layout(layout: str) -> None:
    """Raise for a host pool's layout in which a page is not one run of bytes."""
    if layout not in HOST_LAYOUTS:
        raise CacheLayoutUnsupportedError(
            f"the host pool's layout is {layout!r}: a page is not one run of bytes",
            f"set --hicache-mem-layout to {', '.join(HOST_LAYOUTS)}",
        )


def _refuse_kind(kind: str, known: Collection[str]) -> None:
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


def rows_of(buffer: torch.Tensor, page_tokens: int, *, rows_are_pages: bool = False) -> torch.Tensor:
    """The buffer's bytes as (pages, page_tokens, bytes of a token), over the same memory."""
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


GROUPS = {"FULL": KV, "SWA": WINDOWS, "MAMBA": STATES}  # the pools of SGLang's components
_HYBRID_POOLS = ("SWAKVPool", "HybridLinearKVPool")
_MODEL = "use a model whose layers keep all tokens, a sliding window, or a state"


def grouped_planes(
    pool: Any, states: Any, window: int | None, page_tokens: int, *, untried: bool = False
) -> PoolPlanes:
    """The planes of all components. `pool`: the device pool. `states`: SGLang's pool of requests if it has states, else
    None. `window`: tokens before a token that it attends to. Raises `CacheLayoutUnsupportedError`."""
    kind = type(pool).__name__
    if kind not in _HYBRID_POOLS:
        raise CacheLayoutUnsupportedError(
            f"the KV cache is a {kind}; {' and '.join(_HYBRID_POOLS)} are supported beside pools of one kind", _MODEL
        )
    own: dict[str, tuple[PoolPlanes, dict[int, int]]] = {}
    if kind == "SWAKVPool":
        for name, part, windowed in ((KV, pool.full_kv_pool, False), (WINDOWS, pool.swa_kv_pool, True)):
            where = {layer: at for layer, (at, its) in pool.layers_mapping.items() if its == windowed}
            if where:
                own[name] = device_planes(part, page_tokens, untried=untried), where
    else:
        where = dict(pool.full_attention_layer_id_mapping)
        own[KV] = device_planes(pool.full_kv_pool, page_tokens, untried=untried), where
    if states is not None:
        own[STATES] = _state_planes(states), dict(states.mamba_map)
    # the layers of all pools in the model's order; one of the model may have planes in two pools
    order = sorted((layer, name) for name, (_, where) in own.items() for layer in where)
    tensors, rows, layers = list[tuple[torch.Tensor, ...]](), list[Mapping[str, Rows]](), dict[int, list[int]]()
    in_group: dict[str, list[int]] = {name: [] for name in own}
    for place, (layer, name) in enumerate(order):
        planes, where = own[name]
        at = where[layer]
        tensors.append(planes.tensors[at])
        rows.append(planes.rows[at])
        layers.setdefault(layer, []).append(place)
        in_group[name].append(place)
    groups = [group_of(name, some, page_tokens, (window or 0) + 1) for name, some in in_group.items()]
    described = {name: {**planes.described, "layers": sorted(where)} for name, (planes, where) in own.items()}
    return PoolPlanes(tensors, {"pools": described, "window": window}, rows, groups, layers)


def _state_planes(states: Any) -> PoolPlanes:
    """The states of a model's layers: a slot is a row, of each tensor of a state."""
    if beside := [name for name in ("short_conv_pool", "ngram_pool") if getattr(states, name).enabled]:
        raise CacheLayoutUnsupportedError(f"the model has more of a state than its slot: {', '.join(beside)}", _MODEL)
    cache = states.mamba_pool.mamba_cache
    parts = [(f"conv{n}" if n else "conv", part) for n, part in enumerate(cache.conv)] + [("state", cache.temporal)]
    parts = [(name, part) for name, part in parts if part.numel()]
    layers = [{name: rows_of(part[layer], 1) for name, part in parts} for layer in range(len(states.mamba_map))]
    return PoolPlanes.of(layers, {name: [str(part.dtype), list(part.shape[2:])] for name, part in parts})


def refuse_pool(name: str) -> None:
    """Raise for a host pool that is not kept, by SGLang's name."""
    if name not in (KV, WINDOWS, STATES):
        raise CacheGroupsUnsupportedError(
            f"the model has a host pool {name!r}; {KV}, {WINDOWS} and {STATES} are supported",
            f"{_MODEL}, or leave --hicache-storage-backend out",
        )


def pools_planes(pools: Mapping[str, Any], window: int | None) -> PoolPlanes:
    """The planes of host pools, by SGLang's names: a layer each. `window`: tokens that a token attends to.

    Raises `CacheLayoutUnsupportedError`, and `CacheGroupsUnsupportedError` for pools that are not kept.
    """
    for name in pools:
        refuse_pool(name)
    if {*pools} == {KV}:
        return host_planes(pools[KV])
    page = int(pools[KV].page_size)
    names = sorted(pools)
    each = {name: _host_states(pool) if name == STATES else host_planes(pool) for name, pool in pools.items()}
    groups = [group_of(name, [at], page, window or page) for at, name in enumerate(names)]
    described: dict[str, object] = {"pools": {name: each[name].described for name in names}}
    return PoolPlanes(
        [each[name].tensors[0] for name in names], described, [each[name].rows[0] for name in names], groups
    )


def _host_states(pool: Any) -> PoolPlanes:
    """A pool of states: each slot has the states of all layers side by side."""
    kind = type(pool).__name__
    if kind != _HOST_STATES:
        raise CacheGroupsUnsupportedError(
            f"the model's states are in a {kind}; {_HOST_STATES} is supported", "leave --hicache-storage-backend out"
        )
    refuse_layout(pool.layout)
    parts = {"state": pool.temporal_buffer} | {f"conv{n}": part for n, part in enumerate(pool.conv_buffer)}
    parts |= {f"beside{n}": part for n, part in enumerate(pool.slot_state_buffers)}
    parts = {name: part for name, part in parts.items() if part.numel()}
    shapes: dict[str, object] = {name: [str(part.dtype), list(part.shape[1:])] for name, part in parts.items()}
    described = {"pool": kind, "layout": pool.layout, **shapes}
    return PoolPlanes.of([{name: rows_of(part, 1) for name, part in parts.items()}], described)
