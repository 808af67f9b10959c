"""The parts of a transformers cache's layers: all tokens, a sliding window, or a state.

An engine layer is a part of a cache layer. Most layers have one part; layers with attention and a state have two,
layers without a cache (experts alone) none.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from gdscache.errors import GeometryError
from gdscache.groups.base import Keeps
from gdscache.integrations.forwards import CACHE_NAMES

# Families whose prefill is proven to go on from a state, by `model_type` of their text configuration.
STATES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
)
_NO_STATE = {  # known reasons for refusing others
    **dict.fromkeys(
        ("jamba", "zamba"), "its prefill of several tokens begins from an empty state, even after a cached prefix"
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "without attention its cache does not know its length"),
}


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """A part of a cache's layer. `layer`: its number there. `span`: tokens of a window."""

    layer: int
    keeps: Keeps
    span: int = 0


def text_config(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder. Raises `GeometryError` if there is none, or it has an encoder beside it."""
    try:
        config = hf_config.get_text_config(decoder=True)
    except (ValueError, AttributeError) as error:  # several text models; no model's configuration
        raise GeometryError(f"{type(hf_config).__name__} has no text model of its own: {error}", KEPT) from None
    if any(one.is_encoder_decoder or getattr(one, "is_heterogeneous", False) for one in (hf_config, config)):
        raise GeometryError(f"{config.model_type} is an encoder-decoder model, or its layers differ in shape", KEPT)
    return config


def parts_of(hf_config: PreTrainedConfig) -> list[LayerPart]:
    """The parts of a model's cache, by transformers' own account; each is an engine layer. Layers of chunked attention
    are windows of a chunk's size: transformers keeps the same tokens of both, and only masks differ. Raises
    `GeometryError` for other kinds of layers."""
    config = text_config(hf_config)
    hint, kind = KEPT, config.model_type
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise GeometryError(f"{kind} has use_bidirectional_attention, so its keys depend on later tokens", hint)
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise GeometryError(f"{kind} has layers of type {error}, which keep a state of their own", hint) from None
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise GeometryError(f"transformers makes no cache for {kind}: {error}", hint) from None
    # transformers 5.19 leaves layers that share keys and values out of the cache; 5.23 has another class for them.
    if len(layers) != (hidden := getattr(config, "num_hidden_layers", len(layers))):
        raise GeometryError(f"{kind} has {hidden} layers, of which {len(layers)} keep a cache of their own", hint)
    found: list[LayerPart] = []
    for number, layer in enumerate(layers):
        if type(layer) not in _KEPT or (not _KEPT[type(layer)] and kind not in STATES):
            raise GeometryError(f"layer {number} of {kind} keeps its cache in a {type(layer).__name__}", hint)
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window < 2:
            raise GeometryError(f"layer {number} of {kind} has a window of {layer.sliding_window}", hint)
        found += [LayerPart(number, keeps, getattr(layer, "sliding_window", 0)) for keeps in _KEPT[type(layer)]]
        if isinstance(layer, LinearAttentionLayer) and (kind not in STATES or layer.number_of_states > 1):
            why = _NO_STATE.get(kind, f"states are cached of {', '.join(STATES)}")
            raise GeometryError(f"layer {number} of {kind} keeps a state ({type(layer).__name__}): {why}", hint)
    return found


def layers_of(model: torch.nn.Module) -> DynamicCache:
    """An empty cache for a model, made by transformers."""
    return DynamicCache(config=cast(PreTrainedConfig, model.config))


def planes_of(model: torch.nn.Module, parts: Sequence[LayerPart]) -> list[dict[str, Any]]:
    """`model.planes` of the parts, from a call of the model for two tokens. Waits for its device."""
    cache = layers_of(model)
    with torch.inference_mode(mode=False), torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        name = next(one for one in CACHE_NAMES if one in inspect.signature(model.forward).parameters)
        model(input_ids=ids, use_cache=True, **{name: cache})
    planes: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for number, part in enumerate(parts):
        layer = cache.layers[part.layer]
        for name, made in _tensors(layer, part).items():
            shape = tuple(made.shape[1:]) if part.keeps == "state" else (made.shape[1], made.shape[3])
            planes.setdefault((name, shape, str(made.dtype).removeprefix("torch.")), []).append(number)
    return [
        {"name": name, "shape": list(shape), "dtype": dtype, "layers": layers}
        for (name, shape, dtype), layers in planes.items()
    ]


def groups_of(parts: Sequence[LayerPart]) -> list[dict[str, Any]]:
    """`model.groups` of the parts: parts that keep all tokens, windows by size, and states."""
    kinds: dict[tuple[Keeps, int], list[int]] = {}
    for number, part in enumerate(parts):
        kinds.setdefault((part.keeps, part.span), []).append(number)
    made: Mapping[Keeps, Any] = {
        "all": lambda span: {"name": "full"},
        "window": lambda span: {"name": f"window-{span}", "window": span},
        "state": lambda span: {"name": "state", "state": True},
    }
    return [{**made[keeps](span), "layers": layers} for (keeps, span), layers in sorted(kinds.items())]


def _tensors(layer: Any, part: LayerPart) -> dict[str, torch.Tensor]:
    if part.keeps == "state":
        return {n: one for n, one in zip(STATE_PLANES, state_tensors(layer), strict=True) if one is not None}
    return {"k": layer.keys, "v": layer.values}


def state_tensors(layer: LinearAttentionLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The states of a layer, (rows, *row) each: of its convolution, and the recurrent one. None: it has none."""
    return layer.conv_states[0], layer.recurrent_states[0]


STATE_PLANES = ("conv", "recurrent")
KEPT = "models can be cached whose layers keep keys and values of all tokens or of a sliding window, or one state"
_KEPT: dict[type, tuple[Keeps, ...]] = {
    DynamicLayer: ("all",),
    DynamicSlidingWindowLayer: ("window",),
    LinearAttentionLayer: ("state",),
    LinearAttentionAndFullAttentionLayer: ("all", "state"),
    **({cache_utils.DummyLayer: ()} if hasattr(cache_utils, "DummyLayer") else {}),  # versions before 5.13 have none
}
