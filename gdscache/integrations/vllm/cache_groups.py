"""The groups of layers of vLLM's KV cache: the tokens that each keeps, and the supported kinds."""

from __future__ import annotations

import math
from typing import Any

from gdscache.errors import AttentionUnsupportedError, CacheGroupsUnsupportedError

_WINDOW, _CHUNK, _STATE = "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec"
_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", _WINDOW, _CHUNK, _STATE)


def layers_of(spec: Any) -> list[Any]:
    """The specs of a group's layers: one for all, or one a layer if these have unequal widths."""
    layers = getattr(spec, "kv_cache_specs", None)
    return [spec] if layers is None else [*layers.values()]


def kinds_of(spec: Any) -> list[str]:
    """The kinds of a group's layers, by vLLM's names; several if its layers have unequal widths."""
    return sorted({type(one).__name__ for one in layers_of(spec)})


def groups_of(cache: Any) -> list[dict[str, object]]:
    """The groups of a hybrid model, with the keys of `model.groups` except for the planes: `layers` has the layers'
    names. Empty for a single group whose layers keep all tokens. `cache`: a `KVCacheConfig`."""
    found: list[dict[str, object]] = []
    for number, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        about: dict[str, object] = {"page_tokens": spec.block_size, "layers": list(group.layer_names)}
        kind = kinds_of(spec)[0]
        if kind == _WINDOW:
            about |= {"name": f"{number} window", "window": spec.sliding_window}
        elif kind == _CHUNK:
            about |= {"name": f"{number} chunk", "chunk": spec.attention_chunk_size}
        elif kind == _STATE:
            about |= {"name": f"{number} state", "state": True}
        else:
            about["name"] = f"{number} all"
        found.append(about)
    return [] if len(found) == 1 and not found[0].keys() & {"window", "chunk", "state"} else found


def states_of(cache: Any) -> list[object]:
    """Of each group of states, the shapes and types of its layers' tensors, which lie in a state in this order."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups if kinds_of(group.kv_cache_spec)[0] == _STATE]
    return [[[layer.shapes, layer.dtypes] for layer in layers_of(spec)] for spec in specs]


def block_tokens(cache: Any) -> dict[str, int]:
    """The tokens of a block, by name of each layer in a group."""
    return {name: int(group.kv_cache_spec.block_size) for group in cache.kv_cache_groups for name in group.layer_names}


def key_elements(cache: Any) -> dict[str, int]:
    """The elements of a head's key, by name of each layer with keys and values. Latents count as keys alone."""
    specs = [(name, group.kv_cache_spec) for group in cache.kv_cache_groups for name in group.layer_names]
    return {name: getattr(getattr(spec, "kv_cache_specs", {}).get(name, spec), "head_size", 0) for name, spec in specs}


def state_layers(cache: Any) -> dict[str, int]:
    """The layers that keep a state, each with the number of layers in its group."""
    groups = [group.layer_names for group in cache.kv_cache_groups if kinds_of(group.kv_cache_spec)[0] == _STATE]
    return {name: len(names) for names in groups for name in names}


def refuse_groups(cache: Any, *, untried: bool = False) -> None:
    """Raise `CacheGroupsUnsupportedError` for groups that are not served, and `AttentionUnsupportedError` for layers
    that are not causal. `untried`: serve groups that follow the contract although no GPU has run them."""
    groups = cache.kv_cache_groups
    if any(getattr(layer, "non_causal", False) for group in groups for layer in layers_of(group.kv_cache_spec)):
        raise AttentionUnsupportedError(
            "the model has layers whose tokens attend to tokens behind them (non_causal), and no page's name has those",
            "leave the connector out",
        )
    kinds = [kinds_of(group.kv_cache_spec) for group in groups]
    every = sorted({kind for some in kinds for kind in some})
    mixed = (len(groups) > 1 and "MLAAttentionSpec" in every) or any(len(some) > 1 for some in kinds)
    if not set(every) <= set(_KINDS) or mixed:
        raise CacheGroupsUnsupportedError(
            f"the KV cache has {len(groups)} groups, of {', '.join(every)}; full attention, sliding windows, "
            "chunked attention and states beside each other, or latents (MLA) alone, are supported",
            "use another model; for one with sliding windows in some of its layers "
            "--disable-hybrid-kv-cache-manager keeps all tokens of all layers",
        )
    if not untried and any(_has_indexer(group.kv_cache_spec) for group in groups):
        raise CacheGroupsUnsupportedError(
            "the model keeps an indexer's keys beside its latents (sparse attention), which no GPU has run with this "
            "connector",
            'use another model; to try it, add "untried": true to kv_connector_extra_config, and compare answers',
        )
    for number, group in enumerate(groups):
        spec, what = group.kv_cache_spec, ""
        if getattr(group, "is_eagle_group", False):
            what = "is of a draft model"
        elif not (getattr(spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)):
            what = "has no prefix that could be cached"
        elif getattr(spec, "num_speculative_blocks", 0):
            what = f"has {spec.num_speculative_blocks} states for tokens that are speculated"
        elif kinds_of(spec)[0] == _STATE and (mode := getattr(spec, "mamba_cache_mode", "none")) != "align":
            raise CacheGroupsUnsupportedError(
                f"group {number} of the KV cache has states that are kept in the mode {mode!r}",
                "set --enable-prefix-caching and --mamba-cache-mode align: else no state is offered to a cache",
            )
        elif getattr(spec, "extra_retained_tokens", 0):
            what = f"keeps {spec.extra_retained_tokens} tokens more than its window"
        if what:
            raise CacheGroupsUnsupportedError(f"group {number} of the KV cache {what}", "leave speculation out")
    blocks, hashed = [group.kv_cache_spec.block_size for group in groups], getattr(cache, "hash_block_size", None)
    if hashed not in (None, math.gcd(*blocks)):
        raise CacheGroupsUnsupportedError(
            f"blocks have {', '.join(map(str, sorted(set(blocks))))} tokens, and hashes are of {hashed}",
            "leave --prefix-match-unit out",
        )


def _has_indexer(spec: Any) -> bool:
    """Whether a group of latents has layers of two widths: the latents' and those of a sparse attention's indexer."""
    layers = getattr(spec, "kv_cache_specs", {}).values()
    widths = {layer.page_size_bytes for layer in layers if type(layer).__name__ == "MLAAttentionSpec"}
    return len(widths) > 1
