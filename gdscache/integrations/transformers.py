"""Hugging Face transformers: a `Cache` that begins with the cached prefix of a prompt and stores the computed pages.

    prefixes = PrefixCache(engine, model)        # its config has the `model` section that model_section() makes
    with prefixes.open(input_ids) as cache:
        output = model.generate(input_ids, past_key_values=cache)
        cache.commit(output)

The engine is a `CacheEngine` that owns its pool, or a `HybridEngine` for a model with sliding windows or states.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from gdscache import arguments
from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.engine.hybrid_handles import HybridStore
from gdscache.errors import GeometryError, RopeByLengthError, SequenceStateError, TokensError, UnsupportedRequestError
from gdscache.integrations.forwards import Forwards
from gdscache.integrations.live_model import LiveModel, nameless
from gdscache.integrations.transformers_layers import (
    KEPT,
    MODEL,
    SECTION,
    FullStateLayer,
    LayerPart,
    StateLayer,
    WindowLayer,
    cache_name,
    groups_of,
    parts_of,
    planes_of,
    text_config,
)
from gdscache.integrations.transformers_rows import HybridRows, PoolRows
from gdscache.limits import MAX_COUNT
from gdscache.pages.keys import as_tokens
from gdscache.pages.layout import DTYPE_BYTES
from gdscache.store.handle import StoreHandle

OLDEST = "5.18"  # before it, MLA models keep expanded keys, and calls behind a cached prefix get other tokens and masks


def model_section(
    hf_config: PreTrainedConfig,
    *,
    dtype: torch.dtype | str,
    name: str,
    weights: str = "",
    page_tokens: int = 64,
    model: torch.nn.Module | None = None,
) -> dict[str, Any]:
    """The `model` section of our configuration for a Hugging Face model.

    `dtype`: of the model and its cache. `name` and `weights` (a version) go into the namespace, with the rope
    parameters, since another rope makes other keys. A model with sliding windows or states gets `groups`: its layers
    that keep all tokens, those of each window size, and those with a state.

    `model`: the model itself, needed if it has states, or heads of unequal shapes (Gemma 4, MiMo-V2): a call with two
    tokens shows shapes and types. A layer with attention and a state is two here. Raises `GeometryError` for an unknown
    `dtype`, and for all other models: states of unproven families, indexers, encoders, attention to later tokens.
    """
    elements = str(dtype).removeprefix("torch.")
    if elements not in DTYPE_BYTES:
        raise GeometryError(f"dtype is {elements!r}, an unknown element type", f"one of {', '.join(DTYPE_BYTES)}")
    parts, config = parts_of(hf_config), text_config(hf_config)
    rope = json.dumps(getattr(config, "rope_parameters", None), sort_keys=True).encode()
    section: dict[str, Any] = {
        "name": name,
        "weights": f"{weights};rope={hashlib.blake2b(rope, digest_size=8).hexdigest()}",
        "dtype": elements,
        "layers": len(parts),
        "page_tokens": page_tokens,
    }
    if any(part.keeps != "all" for part in parts):
        section["groups"] = groups_of(parts)
    uneven = any(part.keeps == "state" for part in parts) or getattr(config, "is_heterogeneous", False)
    if model is not None and (uneven or "groups" in section):
        return {**section, "planes": planes_of(model, parts)}
    if uneven:
        raise GeometryError(f"{config.model_type} has states or heads whose shapes its config does not tell", MODEL)
    if getattr(config, "kv_lora_rank", None):
        return {**section, "kv_lora_rank": config.kv_lora_rank, "rope_dim": config.qk_rope_head_dim}
    try:
        heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise GeometryError(f"{config.model_type} says nothing of its attention heads: {error}", KEPT) from None
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # of Falcon
    section |= {"kv_heads": getattr(config, "num_key_value_heads", None) or heads, "head_dim": head_dim}
    v_head_dim = getattr(config, "v_head_dim", None) or head_dim
    return section if v_head_dim == head_dim else {**section, "v_head_dim": v_head_dim}


class PrefixCache:
    """Opens caches for requests. `engine` owns its pool, and its layers have two planes: K and V, or latent and rope.

    A `HybridEngine`, for a model with sliding windows or states, owns its planes, with the groups of `model_section`.
    It keeps no pages there: the planes need room for one prompt and its answer. If layers keep a state, a call of
    several tokens is carried out in pieces, each ending at a wanted state (see `HybridRows.cuts`), with the logits of
    all pieces together.

    `model`: the module that is called with the caches, by `generate` or by hand. A call is refused before it computes
    if its keys and values do not follow from the token ids alone: an attention mask that hides tokens, positions of its
    own, embeddings, images, audio (`UnsupportedRequestError`).

    If the model's rotation depends on the sequence's length (longrope, dynamic), requests are kept to one side of the
    length at which it changes: see `open`.

    Thread-safe; the caller closes the engine. Raises `GeometryError` for other layouts and a model that takes no cache,
    `RopeByLengthError` for an unknown kind of rope, `UnsupportedRequestError` for an engine of another type, a model
    that is no module, or a transformers before `OLDEST`.
    """

    def __init__(self, engine: CacheEngine | HybridEngine, model: torch.nn.Module) -> None:
        if Version(transformers.__version__) < Version(OLDEST):
            raise UnsupportedRequestError(
                f"transformers {transformers.__version__} is older than {OLDEST}",
                f'pip install "transformers>={OLDEST}"',
            )
        if not isinstance(engine, (CacheEngine, HybridEngine)) or not isinstance(model, torch.nn.Module):
            raise UnsupportedRequestError(
                f"the engine is of type {type(engine).__name__}, the model of type {type(model).__name__}",
                "pass an engine, and the module whose forward is called with the cache",
            )
        states = {n for g in engine.groups if g.keeps == "state" for n in g.layers}
        for number, planes in enumerate(engine.config.model.layout().layers):
            if len(planes) != 2 and number not in states:
                raise GeometryError(
                    f"layer {number} has {len(planes)} planes, a transformers cache keeps two tensors a layer",
                    "make the model section with model_section()",
                )
        self._parts = _check_groups(engine, model) if isinstance(engine, HybridEngine) else []
        cache_name(model)  # raises
        self.engine = engine
        self.model = model
        self._live = LiveModel(model)
        self._checked: object = None  # the facts of the model that has `_parts`

    def salt(self, salt: str = "", *, rope: str = "") -> str:
        """The salt of this model's present pages, for the engine's `lookup`, `prefetch` and `pin`.

        It names the model in memory: classes and configuration, sums over every tensor, the active adapters, the
        attention's implementation, hooks, autocast, transformers' version. So a trained, merged or exchanged model
        finds no earlier pages, and the same model finds its pages after a restart. With dropout, in training, each salt
        is new. `salt`: the request's own. `rope`: `short` or `long`, for a rope that changes with the length. Waits for
        the model's device.
        """
        return _salt_of(self._live.identity(), salt, rope)

    def open(
        self, input_ids: Any, *, attention_mask: Any = None, salt: str = "", max_length: int | None = None
    ) -> GdsCache:
        """A cache with the longest cached prefix of a prompt, verified; at most all tokens but the last.

        `input_ids`: integers of shape (tokens,) or (rows, tokens), a tensor or lists. A batch's rows start from their
        shortest prefix. Prompts must not be padded: pads shift the positions of later tokens, which token ids do not
        tell. With the tokenizer's `attention_mask`, a padded prompt is refused here instead of by the first forward
        call.

        `max_length`: the most tokens, prompt and answer, of the model's calls; a longer call is refused. A model whose
        rope changes with the length needs it: at most the length at which it changes. With longrope a longer prompt
        needs none, and has pages of its own.

        Raises `UnsupportedRequestError` for pads and rows of unequal length, `TokensError` for invalid token ids,
        `RopeByLengthError` if a request may cross the length at which the rope changes, and `PoolFullError` if the
        prompt does not fit into the pool now: run the request without a cache then.
        """
        prompts = _rows(input_ids)
        if attention_mask is not None and _hides(attention_mask):
            raise UnsupportedRequestError("the attention mask hides tokens", "run prompts of unequal length one by one")
        facts, writes = self._live.identity(), self._live.writes()
        if isinstance(self.engine, HybridEngine) and facts is not self._checked:
            self._parts, self._checked = _check_groups(self.engine, self.model), facts
        least, most, side = self._side(len(prompts[0]), max_length)
        salt = _salt_of(facts, salt, side)
        with contextlib.ExitStack() as opened:
            with torch.inference_mode(mode=False), torch.no_grad():  # makes the cache usable in any mode
                if isinstance(self.engine, HybridEngine):
                    rows: PoolRows | HybridRows = HybridRows(self.engine, self.model, self._parts, prompts, salt)
                else:
                    rows = PoolRows(self.engine, prompts, salt)
            opened.callback(rows.close)
            unchanged = functools.partial(self._is_still, facts, writes)
            cache = GdsCache(rows, self.model, least, most, unchanged, self._live.switches)
            opened.pop_all()
        return cache

    def _is_still(self, facts: Mapping[str, object], writes: Sequence[int]) -> bool:
        """Whether the model has these facts now, and no weights were written meanwhile, which may have been swapped and
        swapped back. Weights that cannot be looked at (on `meta` between the calls) have another name each time, and no
        later request finds their pages."""
        now = self._live.identity()
        if nameless(now) and nameless(facts):
            return {**now, "weights": facts["weights"]} == facts
        return now == facts and self._live.writes() == writes

    def _side(self, tokens: int, max_length: int | None) -> tuple[int, float, str]:
        """The least and most tokens at which a call may end, and that side of the rope's limit."""
        most = math.inf if max_length is None else arguments.whole(max_length, "max_length", tokens, MAX_COUNT)
        rope = self._live.rope
        if rope is None:
            return 0, most, ""
        if rope.long and tokens > rope.most and not _drops_caches(self.model):
            return rope.most + 1, most, "long"
        if most <= rope.most:
            return 0, most, "short"
        raise RopeByLengthError(
            f"rope_type {rope.kind!r} rotates keys in another way beyond {rope.most} tokens, and a prompt of {tokens} "
            f"may grow to {'any length' if max_length is None else max_length}",
            f"open(..., max_length=N) with N of at most {rope.most}, or run the request without the cache",
        )


def _salt_of(facts: Mapping[str, object], salt: str, rope: str) -> str:
    named = {**facts, "rope": rope, "salt": arguments.text(salt, "salt")}
    return json.dumps(named, sort_keys=True, separators=(",", ":"))


class GdsCache(DynamicCache):
    """The cache of one request, for `generate(..., past_key_values=cache)` and for plain forward calls.

    One thread at a time. Holds pages of the engine's pool until it is closed. Made by `PrefixCache.open`.
    """

    def __init__(
        self,
        rows: PoolRows | HybridRows,
        model: torch.nn.Module,
        least: int,
        most: float,
        unchanged: Callable[[], bool],
        adapters: Callable[[], tuple[object, object]],
    ) -> None:
        """`least`, `most`: tokens at which a call of the model may end. `unchanged`: whether the model is still the one
        that names the pages. `adapters`: see `LiveModel.switches`."""
        super().__init__()
        self._rows, self._unchanged = rows, unchanged
        self.cached_tokens: int = rows.cached_tokens
        self.layer_class_to_replicate = None
        self.layers = list(rows.layers)
        ends = rows if isinstance(rows, HybridRows) and rows.states else None
        self._forwards = Forwards(len(rows.prompts), self.cached_tokens, least, most, ends, adapters)
        self._forwards.watch(model, self, functools.partial(_let_go, weakref.ref(self)))

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the rows: those of `open`, and those committed since."""
        return self._rows.prompts

    @property
    def sources(self) -> dict[str, int]:
        """Tokens of the found prefixes by their tier, over all rows; for a model with sliding layers in proportion to
        the bytes."""
        return self._rows.sources

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by a layer's attention; see transformers."""
        if layer_idx >= len(self.layers):
            raise GeometryError(f"the model has a layer {layer_idx}, the cache has {len(self.layers)}", SECTION)
        self._forwards.allow(self.get_seq_length(layer_idx) + key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut tokens off all layers, or off none: see transformers. Raises `UnsupportedRequestError` if the window
        before them was dropped, or a layer keeps a state."""
        for layer in self.layers:
            if isinstance(layer, (WindowLayer, StateLayer, FullStateLayer)):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self._forwards.crop(self.get_seq_length())

    def reset(self) -> None:
        """Empty all layers. The prompt may be computed again: see transformers."""
        super().reset()  # type: ignore[no-untyped-call]
        if isinstance(self._rows, HybridRows):
            self._rows.reset()
        self._forwards.reset()

    def commit(self, token_ids: Any) -> tuple[StoreHandle | HybridStore, ...]:
        """Store the pages of all computed tokens; returns a handle a row. May be called again after more tokens.

        `token_ids`: the prompt and its continuation, (tokens,) or (rows, tokens), as returned by `generate`, or the
        prompt alone; uncomputed tokens (the last generated one) are ignored. Raises `SequenceStateError` for other
        tokens than this cache's, and if the model is another than at `open`: other weights, adapters, settings or
        hooks; and `PoolFullError` if the pool has no room for the new ones. Nothing of that row is published then.

        Sliding layers store the windows that end with these tokens, with the prompt, and where another prompt parted
        from it; layers with a state store the states there. Returns when the tiers have read them.
        """
        computed = self.get_seq_length()
        rows = [as_tokens(row)[:computed] for row in _rows(token_ids)]
        self._check(rows, computed)
        with torch.no_grad():
            return tuple(self._rows.commit(number, row) for number, row in enumerate(rows))

    def close(self) -> None:
        """Release the engine's pages; committed pages stay cached. Repeated calls are fine."""
        self._forwards.stop()
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedRequestError(
            "a cache holds pages of its engine, so it is neither copied nor pickled", "open another one for the copy"
        )

    def _check(self, rows: Sequence[Any], computed: int) -> None:
        prompts = self.prompts
        if len(rows) != len(prompts):
            raise SequenceStateError(f"{len(rows)} rows are committed to a cache of {len(prompts)}")
        self._forwards.check()
        attention = [layer for layer in self._rows.layers if isinstance(layer, DynamicLayer)]
        if any(not layer.is_initialized for layer in attention):
            raise SequenceStateError("not every layer has been computed", f"run the model first; {SECTION}")
        if any(layer.get_seq_length() != computed for layer in attention):
            raise SequenceStateError("the layers hold unequal numbers of tokens", "reset the cache, and compute again")
        if self._forwards.switched or not self._unchanged():
            raise SequenceStateError(
                "the model has other weights or adapters, another configuration or mode, other numbers or texts in its "
                "modules, or other hooks or autocast than when the cache was opened",
                "open a cache behind each change; what this one has computed cannot be stored",
            )
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            if len(prompt) > len(row):
                raise SequenceStateError(
                    f"{computed} tokens are computed, {len(row)} of them given; the prompt has {len(prompt)}",
                    "compute the whole prompt, then commit it with the generated tokens",
                )
            if row[: len(prompt)].tolist() != prompt:
                raise SequenceStateError(
                    "the tokens that are committed do not begin with those of the cache", "commit the computed tokens"
                )
            if row.tolist() != self._forwards.tokens(prompt, number, computed)[: len(row)]:
                raise SequenceStateError(
                    "the committed tokens are not the tokens that the model computed", "commit the computed tokens"
                )


_IDS = "pass integers of shape (tokens,) or (rows, tokens): the input_ids that a tokenizer returns"


def _check_groups(engine: HybridEngine, model: torch.nn.Module) -> list[LayerPart]:
    """The parts that the model's layers keep. Raises if the engine's groups keep other tokens, or its planes were
    given."""
    if not engine.owns_planes:
        raise GeometryError("the HybridEngine was given its planes", "open it without planes, with a gpu.capacity")
    if (config := getattr(model, "config", None)) is None:
        raise GeometryError(f"{type(model).__name__} has no config to tell its windows from", "pass the model itself")
    given = {layer: (g.keeps, g.span) for g in engine.groups for layer in g.layers}
    parts = parts_of(config)
    made = {number: (part.keeps, part.span) for number, part in enumerate(parts)}
    if given != made or sum(len(group.layers) for group in engine.groups) != len(parts):
        raise GeometryError(
            "the engine's groups keep other tokens than the model's layers: " + ", ".join(map(str, engine.groups)),
            SECTION,
        )
    devices = {str(tensor.device) for tensor in model.parameters()}
    if len(devices) > 1 and any(part.keeps == "state" for part in parts):
        raise GeometryError(
            f"the model lies on {', '.join(sorted(devices))}, and its states are loaded to one device",
            "load the model onto one device",
        )
    return parts


def _let_go(cache: weakref.ref[GdsCache], ids: Any, past: int, anew: bool | None) -> bool:
    """Empty the cache if the model computes the whole prompt again. Its slots stay, and it can be committed. Raises
    `UnsupportedRequestError` for ids that are not the prompt's behind the prefix."""
    own = cache()
    if own is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != len(own.prompts):
        return False
    prompts, behind, given = own.prompts, own.cached_tokens, ids.tolist()
    if anew is False or [row[: len(prompts[0])] for row in given] != prompts:
        rest = [prompt[past : past + ids.shape[1]] for prompt in prompts]
        if past == behind and [row[: len(rest[0])] for row in given] != rest:
            raise UnsupportedRequestError(
                f"the model is called with other tokens than the prompt's behind the first {past}, which are cached: a "
                "wrapper of the model cuts or changes them, as PEFT's virtual tokens do",
                "open the cache with the tokens that the model is called with; run virtual tokens without it",
            )
        return False
    if anew is None and all(row[: len(row) - behind] == row[behind:] for row in prompts):
        raise UnsupportedRequestError(
            "the model is called with tokens that are the prompt, and that continue it too: it repeats itself",
            "call the model with position_ids, or with an attention mask",
        )
    own.reset()
    own.cached_tokens = 0
    return True


def _hides(mask: Any) -> bool:
    try:
        tensor = mask if isinstance(mask, torch.Tensor) else torch.as_tensor(mask, device="cpu")
        return not bool((tensor != 0).all())
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedRequestError(
            f"the attention mask is of type {type(mask).__name__}: {error}", "pass that of the tokenizer, or None"
        ) from None


def _drops_caches(model: torch.nn.Module) -> bool:
    """Whether `generate` may replace a given cache by its own: Phi-3's does at the rope's limit."""
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    return prepare not in (None, GenerationMixin.prepare_inputs_for_generation)


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
