"""Layers of a transformers cache that begin with a cached prefix: full attention, sliding windows, and states (linear
attention, Mamba-2, short convolutions).

An engine layer is a part of a cache layer: of all tokens, a window, or a state. Most layers have one part; layers with
attention and a state have two, layers without a cache (experts alone) none.

A sliding layer of transformers holds the last `window - 1` tokens. Ours holds their pages, and copies of windows at
which a later request may start, taken during the forward pass. A state stands for all earlier tokens, and each call
replaces it. So it exists only where a call ends: states at which a later request may begin are copied there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from gdscache.errors import GeometryError, UnsupportedRequestError
from gdscache.groups.base import Group, Keeps, kept
from gdscache.integrations.forwards import CACHE_NAMES, check_rows, takes
from gdscache.pages.layout import Plane

# Families whose prefill is proven to go on from a state, by `model_type` of their text configuration.
STATES = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
)  # fmt: skip


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
    if any(one.is_encoder_decoder for one in (hf_config, config)):
        raise GeometryError(f"{config.model_type} is an encoder-decoder model", KEPT)
    return config


def parts_of(hf_config: PreTrainedConfig) -> list[LayerPart]:
    """The parts of a model's cache, by transformers' own account; each is an engine layer. Layers of chunked attention
    are windows of a chunk's size: transformers keeps the same tokens of both, and only masks differ. Raises
    `GeometryError` for other kinds of layers."""
    config = text_config(hf_config)
    hint, kind = KEPT, config.model_type
    if kind in _REFUSED:
        raise GeometryError(f"{kind} {_REFUSED[kind]}", hint)
    later = [name for name, causal in _CAUSAL.items() if getattr(config, name, None) not in causal]
    if hasattr(type(config), "is_decoder") and not config.is_decoder and kind not in _DECODERS:
        later.append("is_decoder")
    if later:
        wrong = f"{later[0]}={getattr(config, later[0])!r}"
        raise GeometryError(f"{kind} has {wrong}, so its keys depend on later tokens", hint)
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
        if type(layer) not in _KEPT:
            raise GeometryError(f"layer {number} of {kind} keeps its cache in a {type(layer).__name__}", hint)
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window < 2:
            raise GeometryError(f"layer {number} of {kind} has a window of {layer.sliding_window}", hint)
        found += [LayerPart(number, keeps, getattr(layer, "sliding_window", 0)) for keeps in _KEPT[type(layer)]]
        if isinstance(layer, LinearAttentionLayer) and (kind not in STATES or layer.number_of_states > 1):
            what = f"layer {number} of {kind} keeps a state ({type(layer).__name__})"
            raise GeometryError(f"{what}: states are cached of {', '.join(STATES)}", hint)
    return found


def layers_of(model: torch.nn.Module) -> DynamicCache:
    """An empty cache for a model, made by transformers."""
    return DynamicCache(config=cast(PreTrainedConfig, model.config))


def cache_name(model: torch.nn.Module) -> str:
    """The name by which a model's forward takes a cache. Raises `GeometryError` if it takes none."""
    for name in CACHE_NAMES:
        if takes(model, name):
            return name
    raise GeometryError(
        f"{type(model).__name__} takes no cache: neither {' nor '.join(CACHE_NAMES)}",
        "pass the module whose forward is called with the cache",
    )


def planes_of(model: torch.nn.Module, parts: Sequence[LayerPart]) -> list[dict[str, Any]]:
    """`model.planes` of the parts, from a call of the model for two tokens. Waits for its device. Raises
    `GeometryError` if it takes no cache, or fills none."""
    cache, name = layers_of(model), cache_name(model)
    with torch.inference_mode(mode=False), torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        model(input_ids=ids, use_cache=True, **{name: cache})
    planes: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for number, part in enumerate(parts):
        layer = cache.layers[part.layer]
        if not (tensors := _tensors(layer, part)):
            raise GeometryError(
                f"{type(model).__name__} has computed two tokens, and kept none of them in the cache",
                "call model.eval(): in training, gradient checkpointing keeps none",
            )
        for name, made in tensors.items():
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
    made: dict[Keeps, dict[str, Any]] = {"all": {"name": "full"}, "state": {"name": "state", "state": True}}
    return [
        {**made.get(keeps, {"name": f"window-{span}", "window": span}), "layers": layers}
        for (keeps, span), layers in sorted(kinds.items())
    ]


def _tensors(layer: Any, part: LayerPart) -> dict[str, torch.Tensor]:
    names, made = (STATE_PLANES, state_tensors(layer)) if part.keeps == "state" else ("kv", (layer.keys, layer.values))
    return {name: one for name, one in zip(names, made, strict=True) if one is not None}


def state_tensors(layer: LinearAttentionLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The states of a layer, (rows, *row) each: of its convolution, and the recurrent one. None: it has none."""
    return layer.conv_states[0], layer.recurrent_states[0]


MODEL = "pass model=, which is called for two tokens"
STATE_PLANES = ("conv", "recurrent")
KEPT = "models can be cached whose layers keep keys and values of all tokens or of a sliding window, or one state"
_CAUSAL = {"use_bidirectional_attention": (None, False, "vision"), "is_causal": (None, True)}  # and their values
_REFUSED = {  # families, and why
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        "counts a call's positions from its padding token, or without it",
    ),
    **dict.fromkeys(("jamba", "zamba"), "begins a prefill of several tokens from an empty state, also behind a prefix"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "has no attention, so its cache does not know its length"),
    **dict.fromkeys(("flaubert", "xlm"), "has another kind of cache"),
    "cpmant": "computes tokens of its own before a prompt's",
    "mllama_text_model": "has layers that keep images, and nothing of text",
    "prophetnet": "takes one token a call behind a prefix",
}
_DECODERS = ("gpt_neox", "gpt_neox_japanese")  # they do not ask is_decoder, as BERT and its like do
_KEPT: dict[type, tuple[Keeps, ...]] = {
    DynamicLayer: ("all",),
    DynamicSlidingWindowLayer: ("window",),
    LinearAttentionLayer: ("state",),
    LinearAttentionAndFullAttentionLayer: ("all", "state"),
    **({cache_utils.DummyLayer: ()} if hasattr(cache_utils, "DummyLayer") else {}),  # 5.18 has none
}


KeysValues = tuple[torch.Tensor, torch.Tensor]  # K and V of some tokens, (rows, heads, tokens, head_dim)
SECTION = "make the engine's model section with model_section() from this model's config and dtype, and model=model"


class FixedRows:
    def reorder_cache(self, *given: Any, **named: Any) -> None:
        raise UnsupportedRequestError("rows of this cache cannot be reordered, repeated or selected", "use one beam")

    batch_repeat_interleave = batch_select_indices = reorder_cache


class _Rows(FixedRows):
    """A layer that checks the keys and values of each call."""

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool
    device: torch.device

    def _expect(self, planes: Sequence[Plane], rows: int) -> None:
        self._planes = planes
        self._shapes = [(rows, *plane.shape) if len(plane.shape) == 2 else (rows, 1, *plane.shape) for plane in planes]

    def _check(self, given: KeysValues) -> None:
        """Raises for states of other rows, heads or dtype; moves held states to their device."""
        for states, plane, (rows, *shape) in zip(given, self._planes, self._shapes, strict=True):
            check_rows(len(states), rows)
            made = [states.shape[1], states.shape[3]]
            if made != shape or states.dtype != getattr(torch, plane.dtype):
                raise GeometryError(
                    f"plane {plane.name!r}: the model makes {states.dtype} with (heads, head_dim) {made}, the engine "
                    f"keeps torch.{plane.dtype} with {shape}",
                    SECTION,
                )
        device = given[0].device
        if self.is_initialized and self.device != device:
            self._hold(self.keys.to(device), self.values.to(device))

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.lazy_initialization(keys, values)  # type: ignore[attr-defined]
        self.keys, self.values = keys, values


class Layer(_Rows, DynamicLayer):  # type: ignore[misc]
    """A layer that keeps all tokens. On the engine's device until the model's is known."""

    def __init__(self, planes: Sequence[Plane], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expect(planes, rows)

    def begin(self, pages: Sequence[torch.Tensor], tokens: int) -> None:
        """Start with the K and V of the first `tokens` tokens: of each plane, (rows, pages, page_tokens, *row)."""
        self._hold(*map(_as_heads, pages))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check((key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)

    def has(self, first: int, stop: int) -> bool:
        return stop <= self.get_seq_length()

    def pages(self, row: int, numbers: Sequence[int], page_tokens: int) -> KeysValues:
        """K and V of consecutive pages, (pages, page_tokens, heads, head_dim) each."""
        first, stop = numbers[0] * page_tokens, (numbers[-1] + 1) * page_tokens
        keys, values = (
            states[row, :, first:stop].transpose(0, 1).view(len(numbers), page_tokens, states.shape[1], -1)
            for states in (self.keys, self.values)
        )
        return keys, values


class WindowLayer(_Rows, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding layer of `group`, whose pages end together with those of all groups at multiples of `align` tokens.

    `ends`: lengths whose windows are copied during the forward pass. The last window of whole pages is held anyway.
    """

    def __init__(self, planes: Sequence[Plane], rows: int, group: Group, align: int, ends: Collection[int]) -> None:
        super().__init__(group.span)  # type: ignore[no-untyped-call]
        self._expect(planes, rows)
        self._group, self._align, self._ends = group, align, ends
        self._copies: dict[int, KeysValues] = {}  # by page

    def begin(self, pages: Sequence[torch.Tensor], tokens: int) -> None:
        """Start behind `tokens` tokens, with the last pages before them, in the form of `Layer.begin`."""
        self._hold(*map(_as_heads, pages))
        self.cumulative_length = tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check((key_states, value_states))
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, before = key_states.shape[-2], self.cumulative_length
        self.cumulative_length += new
        full = torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)
        self._copy(full, [end for end in self._ends if before < end <= self.cumulative_length])
        self._trim(full)
        seen = max(0, full[0].shape[-2] - (self.sliding_window - 1 + new))  # tokens beyond those of get_mask_sizes()
        return full[0][:, :, seen:], full[1][:, :, seen:]

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if self.is_initialized:
            left = self.keys.shape[-2] + tokens_to_remove
            self.cumulative_length += tokens_to_remove
            whole = self.cumulative_length // self._group.page_tokens
            self._copies = {page: states for page, states in self._copies.items() if page < whole}
            self._trim((self.keys[:, :, :left], self.values[:, :, :left]), cropped=True)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises if the window before the remaining tokens' end was dropped."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, of tokens to remove")
        if self.is_initialized and tokens_to_remove:
            left = self.cumulative_length + tokens_to_remove
            if left < 0 or self._start > max(0, left - self.sliding_window + 1):
                raise UnsupportedRequestError(
                    f"{-tokens_to_remove} of {self.cumulative_length} tokens are cut off, and the window of "
                    f"{self.sliding_window} before them was let go",
                    "reset() the cache and compute the prompt again, or call activate_past_recording() before",
                )

    def reset(self) -> None:
        super().reset()
        self._copies = {}

    def has(self, first: int, stop: int) -> bool:
        return first // self._group.page_tokens in self._copies or (
            self._start <= first and stop <= self.cumulative_length
        )

    def pages(self, row: int, numbers: Sequence[int], page_tokens: int) -> KeysValues:
        """K and V of held pages, (pages, page_tokens, heads, head_dim) each."""
        start = self._start
        found: list[KeysValues] = []
        for number in numbers:
            at = number * page_tokens - start
            copy = self._copies.get(number)
            found.append(copy or (self.keys[:, :, at : at + page_tokens], self.values[:, :, at : at + page_tokens]))
        keys, values = (
            torch.stack([page[row] for page in pages]).transpose(1, 2) for pages in zip(*found, strict=True)
        )
        return keys, values

    @property
    def _start(self) -> int:
        return self.cumulative_length - (self.keys.shape[-2] if self.is_initialized else 0)

    def _copy(self, full: KeysValues, ends: Collection[int]) -> None:
        """Copy the pages of the windows that end at `ends`, from states up to the last token."""
        if not ends:
            return
        size, start = self._group.page_tokens, self.cumulative_length - full[0].shape[-2]
        for number in kept(self._group, ends, -(-start // size), self.cumulative_length // size):
            if number not in self._copies:
                at = number * size - start
                keys, values = (states[:, :, at : at + size].detach().clone() for states in full)
                self._copies[number] = keys, values

    def _trim(self, full: KeysValues, *, cropped: bool = False) -> None:
        """Keep the tokens that the next ones attend to, and the pages of the window that ends with the last full
        one."""
        first = 0
        if cropped or not self.record_past:
            page = self._group.first(self.cumulative_length // self._align * self._align)
            first = max(0, page * self._group.page_tokens - (self.cumulative_length - full[0].shape[-2]))
        self.keys, self.values = full[0][:, :, first:], full[1][:, :, first:]


def _as_heads(pages: torch.Tensor) -> torch.Tensor:
    """(rows, pages, page_tokens, heads, head_dim) or (..., width) as (rows, heads, tokens, head_dim); a view."""
    rows = pages.flatten(1, 2)
    return rows.transpose(1, 2) if rows.dim() == 4 else rows.unsqueeze(1)


class _Uncut(FixedRows):
    """A layer whose tokens cannot be taken back."""

    is_croppable = False

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedRequestError(
                f"crop({tokens_to_remove}): a state stands for all tokens before, and none is taken back", _ANEW
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        raise UnsupportedRequestError("a state cannot go back to tokens before, as assisted generation asks", _ANEW)


class StateLayer(_Uncut, LinearAttentionLayer):
    """A layer that keeps a state alone."""


class FullStateLayer(_Uncut, Layer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,no-untyped-call]
    """A layer that keeps a state, and keys and values of all tokens."""


class States:
    """The state of a layer, and copies of it at lengths where a request may begin. The layer is of a cache of `rows`
    rows, on `device`; a page is the state behind `page_tokens` more tokens."""

    def __init__(
        self, layer: LinearAttentionLayer, planes: Sequence[Plane], rows: int, page_tokens: int, device: torch.device
    ) -> None:
        self._layer, self._planes, self._rows = layer, planes, rows
        self._page_tokens, self._device = page_tokens, device
        self._copies: dict[int, list[torch.Tensor]] = {}  # by page
        self._passing = -1  # the page that the next copy replaces

    def begin(self, pages: Sequence[torch.Tensor], tokens: int) -> None:
        """Start behind `tokens` tokens, with their state: of each plane, (rows, 1, 1, *row)."""
        layer = self._layer
        for plane, page in zip(self._planes, pages, strict=True):
            state = page[:, 0, 0].to(self._device).contiguous()
            if plane.name == STATE_PLANES[0]:
                layer.lazy_initialization(conv_states=state)
                layer.conv_states[0] = state
            else:
                layer.lazy_initialization(recurrent_states=state)
                layer.recurrent_states[0] = state
        layer.has_previous_state[0] = True

    def take(self, tokens: int, *, passing: bool) -> None:
        """Copy the state behind `tokens` tokens, where a call has ended. `passing`: only until the next copy."""
        self._copies.pop(self._passing, None)
        page = tokens // self._page_tokens - 1
        self._passing = page if passing else -1
        self._copies[page] = [state.detach().clone() for state in self._states()]

    def reset(self) -> None:
        self._copies = {}

    def forget(self, tokens: int) -> None:
        """Drop copies behind `tokens` tokens, or fewer."""
        self._copies = {page: one for page, one in self._copies.items() if (page + 1) * self._page_tokens > tokens}

    def has(self, first: int, stop: int) -> bool:
        return stop // self._page_tokens - 1 in self._copies

    def pages(self, row: int, numbers: Sequence[int], page_tokens: int) -> list[torch.Tensor]:
        """The states of held pages, of each plane (pages, 1, *row)."""
        copies = [self._copies[number] for number in numbers]
        return [torch.stack([one[row] for one in plane]).unsqueeze(1) for plane in zip(*copies, strict=True)]

    def _states(self) -> list[torch.Tensor]:
        """The layer's states, in the order of its planes. Raises for states of other rows or dtype."""
        found = [one for one in state_tensors(self._layer) if one is not None]
        made = [(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in found]
        kept = [(plane.dtype, (self._rows, *plane.shape)) for plane in self._planes]
        if made != kept:
            raise GeometryError(f"the model makes states {made}, the engine keeps {kept}", SECTION)
        return found


_ANEW = "reset() the cache and compute the prompt again, or run the request without the cache"
