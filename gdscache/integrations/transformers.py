"""Hugging Face transformers: a `Cache` that starts with the cached prefix of a prompt and gives back what was computed.

    prefixes = PrefixCache(engine, model)        # its config has the `model` section that model_section() makes
    with prefixes.open(input_ids) as cache:
        output = model.generate(input_ids, past_key_values=cache)
        cache.commit(output)

Written against transformers 5.23. Layers cache tensors of shape (rows, heads, tokens, head_dim); MLA models cache the
latent in place of the keys and the rope part in place of the values, each with one head.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import numbers
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from gdscache import arguments
from gdscache.engine import CacheEngine
from gdscache.errors import (
    GeometryError,
    RopeByLengthError,
    SequenceStateError,
    TokensError,
    UnsupportedRequestError,
)
from gdscache.integrations.forwards import Forwards
from gdscache.integrations.live_model import LiveModel
from gdscache.integrations.ropes import rope_limit
from gdscache.limits import MAX_COUNT
from gdscache.pages.keys import as_tokens
from gdscache.pages.layout import Plane
from gdscache.sequence import Sequence as TokenSequence
from gdscache.store.handle import StoreHandle


def model_section(
    hf_config: PreTrainedConfig, *, dtype: torch.dtype | str, name: str, weights: str = "", page_tokens: int = 64
) -> dict[str, Any]:
    """The `model` section of our configuration for a Hugging Face model.

    `dtype` is that of the cache, which is the model's. `name` and `weights` (a version) go into the namespace, and the
    rope parameters with them, since the same weights under another rope make other keys. Raises `GeometryError` for a
    model that keeps anything but all keys and values of all layers: sliding windows, linear attention, indexers,
    encoders.
    """
    try:
        config = hf_config.get_text_config(decoder=True)
    except (ValueError, AttributeError) as error:  # several of them; no configuration of a model
        raise GeometryError(f"{type(hf_config).__name__} has no text model of its own: {error}", _ALL_KEYS) from None
    layers = _full_attention_layers(config)
    section = {
        "name": name,
        "weights": f"{weights};rope={_rope_digest(config)}",
        "dtype": str(dtype).removeprefix("torch."),
        "layers": layers,
        "page_tokens": page_tokens,
    }
    if getattr(config, "kv_lora_rank", None):
        return {**section, "kv_lora_rank": config.kv_lora_rank, "rope_dim": config.qk_rope_head_dim}
    try:
        heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise GeometryError(f"{config.model_type} says nothing of its attention heads: {error}", _ALL_KEYS) from None
    section |= {"kv_heads": getattr(config, "num_key_value_heads", None) or heads, "head_dim": head_dim}
    v_head_dim = getattr(config, "v_head_dim", None) or head_dim
    return section if v_head_dim == head_dim else {**section, "v_head_dim": v_head_dim}


def _full_attention_layers(config: PreTrainedConfig) -> int:
    """The number of cache layers, by transformers' own account of what each layer keeps."""
    hint, kind = _ALL_KEYS, config.model_type
    if config.is_encoder_decoder or getattr(config, "is_heterogeneous", False):
        raise GeometryError(f"{kind} is an encoder-decoder model, or its layers differ in shape", hint)
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise GeometryError(f"{kind} has layers of type {error}, which keep a state of their own", hint) from None
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise GeometryError(f"transformers makes no cache for {kind}: {error}", hint) from None
    for number, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise GeometryError(f"layer {number} of {kind} keeps its cache in a {type(layer).__name__}", hint)
    return len(layers)


def _rope_digest(config: PreTrainedConfig) -> str:
    text = json.dumps(getattr(config, "rope_parameters", None), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class PrefixCache:
    """Opens caches for requests. `engine` owns its pool, and its layers have two planes: K and V, or latent and rope.

    `model`: the module whose forward is called with the caches, by `generate` or by hand. Each call is looked at, and
    one whose keys and values do not follow from the token ids alone is refused before it computes: an attention mask
    that hides tokens, positions of its own, embeddings, images, audio (`UnsupportedRequestError`).

    Where the model rotates keys by the length of their sequence (longrope, dynamic), requests are kept to one side of
    the length at which that changes: see `open`.

    Thread-safe; the engine stays the caller's to close. Raises `GeometryError` for other layouts, and
    `RopeByLengthError` for a kind of rope that is not known.
    """

    def __init__(self, engine: CacheEngine, model: torch.nn.Module) -> None:
        for number, planes in enumerate(engine.layout.layers):
            if len(planes) != 2:
                raise GeometryError(
                    f"layer {number} has {len(planes)} planes, a transformers cache keeps two tensors a layer",
                    "make the model section with model_section()",
                )
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedRequestError(
                f"the model is of type {type(model).__name__}", "pass the module whose forward is called with the cache"
            )
        self.engine = engine
        self.model = model
        self._live = LiveModel(model)
        self._rope = None
        if (config := getattr(model, "config", None)) is not None:
            self._rope = rope_limit(config.get_text_config(decoder=True))
        if self._rope is not None and _drops_caches(model):
            self._rope = self._rope._replace(long=False)

    def salt(self, salt: str = "", *, rope: str = "") -> str:
        """Under which the engine has this model's pages now: for its `lookup`, `prefetch` and `pin`.

        It names the model in memory: class and configuration, some bytes of every tensor, the adapters that are active,
        transformers' version. So a model that was trained, merged or exchanged finds nothing of before, and the same
        model finds its pages after a restart. `salt`: the request's own; `rope`: `short` or `long`, the side of the
        limit of a rope that changes with the length. Waits for the model's device.
        """
        facts = {**self._live.identity(), "rope": rope, "salt": salt}
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))

    def open(
        self, input_ids: Any, *, attention_mask: Any = None, salt: str = "", max_length: int | None = None
    ) -> GdsCache:
        """A cache that holds the longest cached prefix of a prompt, verified; at most all tokens but the last.

        `input_ids`: integers of shape (tokens,) or (rows, tokens), a tensor or lists. The rows of a batch start from
        the shortest of their prefixes. Prompts must not be padded: pads shift the positions of the tokens behind them,
        which token ids do not tell. Give the tokenizer's `attention_mask`, and a padded prompt is refused here rather
        than by the first forward call.

        `max_length`: the most tokens, prompt and answer, that the model will be called for; a longer call is refused. A
        model whose rope changes with the length needs it: at most the length at which it changes. With longrope a
        prompt that is longer than that needs none, and has pages of its own.

        Raises `UnsupportedRequestError` for pads and for rows of unequal length, `TokensError` for no token ids,
        `RopeByLengthError` where a request may cross the length at which the model's rope changes, and `PoolFullError`
        when the prompt does not fit into the pool now: run the request without a cache then.
        """
        prompts = _rows(input_ids)
        if attention_mask is not None and _hides(attention_mask):
            raise UnsupportedRequestError("the attention mask hides tokens", "run prompts of unequal length one by one")
        least, most, side = self._side(len(prompts[0]), max_length)
        salt = self.salt(salt, rope=side)
        with contextlib.ExitStack() as opened:
            sequences = [opened.enter_context(self.engine.sequence(prompt, salt)) for prompt in prompts]
            cache = GdsCache(self.engine, sequences, self.model, least, most)
            opened.pop_all()
        return cache

    def _side(self, tokens: int, max_length: int | None) -> tuple[int, float, str]:
        """The least and most tokens that a call may end at, and that side of the rope's limit."""
        most = math.inf if max_length is None else arguments.whole(max_length, "max_length", tokens, MAX_COUNT)
        rope = self._rope
        if rope is None:
            return 0, most, ""
        if rope.long and tokens > rope.most:
            return rope.most + 1, most, "long"
        if most <= rope.most:
            return 0, most, "short"
        raise RopeByLengthError(
            f"rope_type {rope.kind!r} rotates keys in another way beyond {rope.most} tokens, and a prompt of {tokens} "
            f"may grow to {'any length' if max_length is None else max_length}",
            f"open(..., max_length=N) with N of at most {rope.most}, or run the request without the cache",
        )


class GdsCache(DynamicCache):
    """The cache of one request, for `generate(..., past_key_values=cache)` and for plain forward calls.

    One thread at a time. Holds pages of the engine's pool until it is closed. Made by `PrefixCache.open`.
    """

    def __init__(
        self,
        engine: CacheEngine,
        sequences: Sequence[TokenSequence],
        model: torch.nn.Module,
        least: int = 0,
        most: float = math.inf,
    ) -> None:
        """`least`, `most`: tokens that a call of the model may end at."""
        super().__init__()
        self._engine = engine
        self._sequences = tuple(sequences)
        for sequence in self._sequences:
            sequence.verify()
        self.cached_tokens: int = min(sequence.cached_tokens for sequence in self._sequences)
        self.layer_class_to_replicate = None
        self._layers = [_Layer(planes, len(self._sequences)) for planes in engine.layout.layers]
        self.layers = list(self._layers)
        self._done = [sequence.cached_tokens // engine.layout.page_tokens for sequence in self._sequences]
        if self.cached_tokens:
            with torch.inference_mode(mode=False), torch.no_grad():  # so that it can be used in any mode
                self._take_prefix()
        self._forwards = Forwards(len(self._sequences), self.cached_tokens, least, most)
        self._forwards.watch(model, self, functools.partial(_let_go, weakref.ref(self)))

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the rows, as the cache was opened with them and committed since."""
        return [sequence.tokens for sequence in self._sequences]

    @property
    def sources(self) -> dict[str, int]:
        """Tokens of the prefixes found, by the tier that they came from, over all rows."""
        layout, found = self._engine.layout, Counter[str]()
        for sequence in self._sequences:
            report = sequence.load.result() if sequence.load is not None else None
            loaded = report.bytes_by_tier if report is not None else {}
            found["gpu"] += sequence.cached_tokens - (report.tokens if report is not None else 0)
            found.update({tier: nbytes // layout.page_bytes * layout.page_tokens for tier, nbytes in loaded.items()})
        return {tier: tokens for tier, tokens in found.items() if tokens}

    @property
    def load_seconds(self) -> float:
        """Seconds that the slowest row's load took, 0.0 when nothing was loaded."""
        return max((s.load.result().seconds for s in self._sequences if s.load is not None), default=0.0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention of a layer calls; see transformers."""
        if layer_idx >= len(self.layers):
            raise GeometryError(f"the model has a layer {layer_idx}, the cache has {len(self.layers)}", _SECTION)
        self._forwards.allow(self.get_seq_length(layer_idx) + key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def commit(self, token_ids: Any) -> tuple[StoreHandle, ...]:
        """Give the pages of all computed tokens to the engine; a handle a row. May be called again after more tokens.

        `token_ids`: the prompt and what followed it, (tokens,) or (rows, tokens), as `generate` returns them, or the
        prompt alone; what was not computed (the last token generated) is left out. Raises `SequenceStateError` when
        they are not the tokens of this cache, and `PoolFullError` when the pool has no room for the new ones; nothing
        of that row is published then.
        """
        computed = self.get_seq_length()
        rows = [as_tokens(row)[:computed] for row in _rows(token_ids)]
        self._check(rows, computed)
        with torch.no_grad():
            return tuple(self._commit_row(number, row) for number, row in enumerate(rows))

    def close(self) -> None:
        """Release the engine's pages; what was committed stays cached. Twice is fine."""
        self._forwards.stop()
        for sequence in self._sequences:
            sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedRequestError(
            "a cache holds pages of its engine, so it is neither copied nor pickled", "open another one for the copy"
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take_prefix(self) -> None:
        pages = self.cached_tokens // self._engine.layout.page_tokens
        slots = torch.stack([sequence.slots[:pages] for sequence in self._sequences])
        slots = slots.to(self._engine.gpu.planes(0)[0].device)
        for number, layer in enumerate(self._layers):
            layer.begin(*(_as_heads(plane[slots].flatten(1, 2)) for plane in self._engine.gpu.planes(number)))

    def _check(self, rows: Sequence[Any], computed: int) -> None:
        if len(rows) != len(self._sequences):
            raise SequenceStateError(f"{len(rows)} rows are committed to a cache of {len(self._sequences)}")
        if any(not layer.is_initialized for layer in self._layers):
            raise SequenceStateError("not every layer has been computed", f"run the model first; {_SECTION}")
        for number, (sequence, row) in enumerate(zip(self._sequences, rows, strict=True)):
            prompt = sequence.tokens
            if len(prompt) > len(row):
                raise SequenceStateError(
                    f"{computed} tokens are computed, {len(row)} of them given; the prompt has {len(prompt)}",
                    "compute the whole prompt, then commit it with what was generated",
                )
            if row[: len(prompt)].tolist() != prompt:
                raise SequenceStateError(
                    "the tokens that are committed do not begin with those of the cache", "commit what was computed"
                )
            if row.tolist() != self._forwards.tokens(prompt, number, computed)[: len(row)]:
                raise SequenceStateError(
                    "the tokens that are committed are not those that the model computed", "commit what was computed"
                )

    def _commit_row(self, number: int, row: Any) -> StoreHandle:
        sequence, page_tokens = self._sequences[number], self._engine.layout.page_tokens
        first, last = self._done[number], len(row) // page_tokens
        sequence.append(row[len(sequence) :])
        slots = sequence.slots[first:last].to(self._engine.gpu.planes(0)[0].device)
        for index, layer in enumerate(self._layers if last > first else ()):
            for plane, states in zip(self._engine.gpu.planes(index), (layer.keys, layer.values), strict=True):
                states = states[number, :, first * page_tokens : last * page_tokens].transpose(0, 1)
                plane[slots] = states.reshape(last - first, page_tokens, *plane.shape[2:]).to(plane.device)
        handle = sequence.commit()
        self._done[number] = last
        return handle


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer that may start with a prefix, on the engine's device until the model's is known."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, planes: Sequence[Plane], rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._planes = planes
        self._shapes = [(rows, *plane.shape) if len(plane.shape) == 2 else (rows, 1, *plane.shape) for plane in planes]

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for states, plane, (rows, *shape) in zip((key_states, value_states), self._planes, self._shapes, strict=True):
            if len(states) != rows:
                raise UnsupportedRequestError(
                    f"the model computes {len(states)} rows, the cache was opened for {rows}",
                    "open the cache with the rows that the model sees; use one beam and one returned sequence",
                )
            given = [states.shape[1], states.shape[3]]
            if given != shape or states.dtype != getattr(torch, plane.dtype):
                raise GeometryError(
                    f"plane {plane.name!r}: the model makes {states.dtype} with (heads, head_dim) {given}, the engine "
                    f"keeps torch.{plane.dtype} with {shape}",
                    _SECTION,
                )
        if self.is_initialized and self.device != key_states.device:
            self.begin(self.keys.to(key_states.device), self.values.to(key_states.device))
        return super().update(key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise UnsupportedRequestError(*_FIXED_ROWS)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedRequestError(*_FIXED_ROWS)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UnsupportedRequestError(*_FIXED_ROWS)


_ALL_KEYS = "only models whose every layer keeps all keys and values of all tokens can be cached"
_SECTION = "make the engine's model section with model_section() from this model's config and dtype"
_IDS = "pass integers of shape (tokens,) or (rows, tokens): the input_ids of what a tokenizer returns"
_FIXED_ROWS = ("rows of this cache cannot be reordered, repeated or selected", "use one beam")


def _let_go(cache: weakref.ref[GdsCache], ids: Any, sure: bool) -> bool:
    """Empty the cache where the model computes the whole prompt again. Its slots stay, and it can be committed."""
    own = cache()
    if own is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return False
    prompts, behind = own.prompts, own.cached_tokens
    if len(ids) != len(prompts) or (given := ids[:, : len(prompts[0])].tolist()) != prompts:
        return False
    if not sure and all(row[: len(row) - behind] == row[behind:] for row in given):
        raise UnsupportedRequestError(
            "the model is called with tokens that are the prompt, and that continue it too: it repeats itself",
            "call the model with position_ids, or with an attention mask",
        )
    own.reset()  # type: ignore[no-untyped-call]
    own.cached_tokens = 0
    return True


def _hides(mask: Any) -> bool:
    """Whether a mask, a tensor or lists, hides a token."""
    try:
        tensor = mask if isinstance(mask, torch.Tensor) else torch.as_tensor(mask, device="cpu")
        return not bool((tensor != 0).all())
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedRequestError(
            f"the attention mask is of type {type(mask).__name__}: {error}", "pass that of the tokenizer, or None"
        ) from None


def _drops_caches(model: torch.nn.Module) -> bool:
    """Whether `generate` may put a cache of its own in the place of a given one: Phi-3's does at the rope's limit."""
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    return prepare not in (None, GenerationMixin.prepare_inputs_for_generation)


def _as_heads(rows: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, heads, head_dim) or (rows, tokens, width) as (rows, heads, tokens, head_dim); a view."""
    return rows.transpose(1, 2) if rows.dim() == 4 else rows.unsqueeze(1)


def _rows(ids: Any) -> list[Any]:
    """Token ids as rows of equal length, on the host."""
    if isinstance(ids, (str, bytes, Mapping)):
        raise TokensError(f"token ids are of type {type(ids).__name__}", _IDS)
    try:
        if isinstance(ids, torch.Tensor):
            ids = ids.detach().cpu()
            if not 1 <= ids.dim() <= 2:
                raise TokensError(f"token ids have shape {tuple(ids.shape)}", _IDS)
            rows = list(ids) if ids.dim() == 2 else [ids]
        else:
            rows = list(ids) if len(ids) and not isinstance(ids[0], numbers.Integral) else [ids]
        lengths = {len(row) for row in rows}
    except (TypeError, KeyError, IndexError, RuntimeError) as error:  # RuntimeError: a tensor without data
        raise TokensError(f"token ids are of type {type(ids).__name__}: {error}", _IDS) from None
    if len(lengths) != 1 or 0 in lengths:
        raise UnsupportedRequestError(
            f"rows have {sorted(lengths)} tokens", "rows of one batch need the same number of tokens, at least one"
        )
    return rows
