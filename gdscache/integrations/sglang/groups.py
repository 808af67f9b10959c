"""SGLang's pools of hybrid models as planes: layers with a sliding window or a state, beside full attention.

Each kind of layer has a pool, and a component in the tree: FULL, SWA, MAMBA. All pages have the same tokens; a state
has a slot in its own pool, as wide as its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gdscache.errors import CacheLayoutUnsupportedError
from gdscache.integrations.settings import Rows
from gdscache.integrations.sglang.planes import KV, STATES, WINDOWS, PoolPlanes, device_planes, group_of, named, rows_of

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
    return _joined(own, window, page_tokens)


def _joined(
    own: Mapping[str, tuple[PoolPlanes, Mapping[int, int]]], window: int | None, page_tokens: int
) -> PoolPlanes:
    """The layers of all pools in the model's order. A layer of the model may have planes in two pools."""
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
    tensors = [tuple(rows_of(part[layer], 1) for _, part in parts) for layer in range(len(states.mamba_map))]
    described: dict[str, object] = {name: [str(part.dtype), list(part.shape[2:])] for name, part in parts}
    return PoolPlanes(tensors, described, [named(planes, names=[name for name, _ in parts]) for planes in tensors])
