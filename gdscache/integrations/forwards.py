"""Checks of a model's calls: whether its keys and values follow from the token ids alone.

A transformers `Cache` gets sizes, but neither the mask nor the ids. So a hook before the model's forward refuses
arguments outside page names (padding, positions of its own, embeddings, images), and keeps the ids for `commit`.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from gdscache.errors import SequenceStateError, UnsupportedRequestError

if TYPE_CHECKING:
    from gdscache.integrations.transformers_rows import HybridRows

CACHE_NAMES = ("cache", "past_key_values")  # of a call's cache: since transformers 5.24, and before
_HARMLESS = {
    *CACHE_NAMES, "labels", "logits_to_keep", "num_items_in_batch", "num_logits_to_keep", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
}  # fmt: skip
_CHECKED = {"input_ids", "attention_mask", "position_ids", "cache_position"}
_WHOLE = ("output_attentions", "output_hidden_states", "output_router_logits")  # a call for these is not cut


class Forwards:
    """The forward calls of one cache: `watch` before them, `allow` for each layer's states, `tokens` at the end.

    `cached`: tokens in the cache at its begin. `rows`: of the batch. `least`, `most`: tokens at which a call may end.
    `ends`: cuts calls into pieces, since layers keep a state. `adapters`: how the model's adapters, dropout and hooks
    are switched now, and the number of each adapter's hooks. `switched`: whether a call had others than the begin.
    """

    def __init__(
        self,
        rows: int,
        cached: int,
        least: int,
        most: float,
        ends: HybridRows | None,
        adapters: Callable[[], tuple[object, object]],
    ) -> None:
        self._adapters, (self._at_begin, self._hooks) = adapters, adapters()
        self.switched = False
        self._rows = rows
        self._ends = ends
        self._running = False  # a call has begun and not ended; kept with `ends` only
        self._shifting: list[Any] = []  # modules that count positions on from a request with images
        self._before: list[torch.Tensor] = []  # outputs of the pieces before the last one
        self._keep = 0  # logits that the call is to return, 0: all
        self._least, self._most = least, most
        self._cached = self._end = cached  # tokens that the model has, or was called for
        self._calls: list[tuple[int, torch.Tensor]] = []  # first token, ids (rows, tokens)
        self._handles: list[Any] = []

    def watch(self, model: torch.nn.Module, cache: Cache, let_go: Callable[[Any, int, bool | None], bool]) -> None:
        """Check each call of `model` with `cache` until `stop`. The hook holds the cache weakly.

        `let_go(ids, past, anew)`, of the first call: drops the prefix if these ids are the whole prompt again, as where
        assisted generation begins, and refuses ids that are not the prompt's behind `past` tokens. `anew`: whether
        positions or mask show that the call begins at token 0, or None.
        """
        signature, mine = inspect.signature(model.forward), weakref.ref(cache)
        takes_positions = takes(model, "position_ids")
        self._shifting = [one for one in model.modules() if takes_positions and "rope_deltas" in one.__dict__]
        configs: list[Any] = [vars(one).get("config") for one in model.modules()]
        falcons = [config for config in configs if getattr(config, "model_type", "") == "falcon"]
        # Some models (Bamba) would count from 0 behind a prefix. Models with images go on from an earlier request, with
        # as many rows of positions.
        placed = takes_positions and (self._ends is not None or bool(self._shifting))

        def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            given = dict(signature.bind_partial(*args, **kwargs).arguments)
            for name, parameter in signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given |= given.pop(name, {})
            return given

        # Another thread may call while this one adds or removes the hooks: torch does both in two steps, and passes no
        # keyword arguments between them.

        def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            given, own = bound(args, kwargs or {}), mine()
            past = 0 if own is None else int(own.get_seq_length())
            if kwargs is not None and own is not None and _has_cache(given, own):
                self.check()
                self._look_at_adapters()
                if past and not self._calls and let_go(given.get("input_ids"), past, _begins_anew(given)):
                    past = 0
                    self._look_at_adapters()  # the reset has forgotten how they were
                if past and given.get("use_cache") is False and _begins_anew(given) is not False:
                    raise UnsupportedRequestError(
                        "the model is called with use_cache=False: `generate` gives it all tokens again then, which "
                        "the cache has",
                        "pass use_cache=True, also to generate(), where the model's config has it off",
                    )
                sdpa = [config for config in falcons if config._attn_implementation == "sdpa"]
                if any(_asks(config, given, "output_attentions") for config in sdpa):
                    raise UnsupportedRequestError(
                        "Falcon attends to later tokens when sdpa is asked for output_attentions",
                        "leave output_attentions out, or load the model with attn_implementation='eager'",
                    )
                told = {n: v for n, v in given.items() if n in _CHECKED or not _is_default(signature, n, v)}
                self._called(told, past)
                if placed:
                    ids = given["input_ids"]
                    given["position_ids"] = torch.arange(past, self._end, device=ids.device).unsqueeze(0)
                if self._ends is not None:
                    given = self._last_piece(module, signature, given, past)
                    self._running = True
                if placed or self._ends is not None:
                    return (), given
            return None

        def seen(_module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            own = mine()
            if len(rest) == 2 and own is not None and _has_cache(bound(args, rest[0]), own):
                return self._ended(rest[1])
            return None

        self._handles.append(model.register_forward_pre_hook(look, with_kwargs=True))
        if self._ends is not None:
            self._handles.append(model.register_forward_hook(seen, with_kwargs=True))

    def _look_at_adapters(self) -> None:
        switched, hooks = self._adapters()
        if hooks != self._hooks:
            raise UnsupportedRequestError(
                "a hook tells adapters what to do in this call (PEFT's adapter_names, an activated LoRA): the names of "
                "pages do not tell what it computes",
                "choose adapters by set_adapter before open(), and run activated LoRAs without the cache",
            )
        self.switched = self.switched or switched != self._at_begin

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Raises `SequenceStateError` if a call did not end and layers keep a state: their states may be of different
        tokens."""
        if self._running:
            raise SequenceStateError(
                "a call of the model did not end, so that its layers may keep states of different tokens",
                "reset() the cache and compute the prompt again, or open another one",
            )

    def reset(self) -> None:
        """The cache is empty: forget all calls, and the outputs of their pieces."""
        self._running, self.switched, self._before = False, False, []
        self._cached, self._end, self._calls = 0, 0, []

    def crop(self, tokens: int) -> None:
        """The cache keeps its first `tokens` tokens."""
        self._cached, self._end = min(self._cached, tokens), tokens
        self._calls = [(first, call[:, : max(0, tokens - first)]) for first, call in self._calls]

    def allow(self, end: int) -> None:
        """A layer gets states up to token `end`. Raises `UnsupportedRequestError` if no watched call makes them."""
        if end > self._end:
            raise UnsupportedRequestError(
                f"{end} tokens are computed, the model was called for {self._end}: another module computes them",
                "give PrefixCache the module whose forward is called with the cache",
            )

    def tokens(self, prompt: list[int], row: int, computed: int) -> list[int]:
        """The ids of a row's first `computed` tokens; the prefix's ids are the prompt's."""
        ids = prompt[: self._cached]
        if self._calls:
            ids += torch.cat([call[row] for _, call in self._calls]).tolist()  # one wait for the device
        if len(ids) < computed:
            raise SequenceStateError(f"{computed} tokens are in the cache, the model was called for {len(ids)}")
        return ids[:computed]

    def _last_piece(
        self, module: torch.nn.Module, signature: inspect.Signature, given: dict[str, Any], past: int
    ) -> dict[str, Any]:
        """Call the model for all pieces of a call but the last, whose arguments are returned."""
        assert self._ends is not None
        end, keep = self._end, given.get("logits_to_keep", 0)
        whole = end - past == 1 or not isinstance(keep, int) or given.get("labels") is not None
        whole = whole or _asks(getattr(module, "config", None), given, *_WHOLE)
        cuts = [] if whole else [one for one in self._ends.cuts(past, end) if one >= self._least]
        if not cuts:
            return given
        alone = 0 < keep <= end - cuts[-1]  # the last piece has all wanted logits
        found: list[torch.Tensor] = []
        for begin, stop in itertools.pairwise([past, *cuts]):
            piece = _cut(given, past, begin, stop)
            if "logits_to_keep" in signature.parameters:
                piece["logits_to_keep"] = 1 if alone else 0
            output = module(**piece)
            if not alone:
                found.append(output[_main(output)])
        self._before = found
        last = _cut(given, past, cuts[-1], end)
        if not alone and "logits_to_keep" in given:
            last["logits_to_keep"] = 0
        self._keep = keep
        self._called({name: value for name, value in last.items() if name in _CHECKED}, cuts[-1])
        return last

    def _ended(self, output: Any) -> Any:
        """A call has ended: join its output with those of the pieces before."""
        assert self._ends is not None
        self._ends.ended(self._end)
        self._running = False
        before, self._before = self._before, []
        if not before:
            return None
        main = _main(output)
        joined = torch.cat([*before, output[main]], dim=1)
        joined = joined[:, -self._keep :] if self._keep else joined
        if isinstance(main, int):
            return (joined, *output[1:])
        output[main] = joined
        return output

    def _called(self, given: Mapping[str, Any], past: int) -> None:
        ids = given.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or given.get("inputs_embeds") is not None:
            raise _refused("the model is called with embeddings and not with token ids")
        check_rows(len(ids), self._rows)
        for name, value in given.items():
            if name not in _HARMLESS | _CHECKED:
                tensors = any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))
                what = ", as with images or audio" if tensors else f" of type {type(value).__name__}"
                raise _refused(f"the model is called with {name}{what}, which page names do not hold")
        end = past + ids.shape[1]
        if not self._least <= end <= self._most:
            raise UnsupportedRequestError(
                f"the model is called up to token {end}, the cache was opened for calls that end at "
                f"{self._least} to {self._most}",
                "open(max_length=...) sets the longest; compute a prompt beyond the rope's limit in one call",
            )
        _check_mask(given.get("attention_mask"), end)
        _check_positions(given.get("position_ids"), past, end, [one.rope_deltas for one in self._shifting])
        _check_positions(given.get("cache_position"), past, end)  # some models make the others of it
        self._calls = [(first, call[:, : past - first]) for first, call in self._calls if first < past]
        self._calls.append((past, ids.detach().clone()))
        self._cached = min(self._cached, past)  # the part cut off a prefix is computed again
        self._end = end


def takes(model: torch.nn.Module, name: str) -> bool:
    """Whether a model's forward has an argument, or a wrapper's (PEFT's) hands it to such a module."""
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return name in parameters or (hands_on and any(takes(one, name) for one in model.children()))


def check_rows(made: int, rows: int) -> None:
    """Raises `UnsupportedRequestError` for rows of states, or of ids, that a cache of `rows` rows does not have."""
    if made != rows:
        raise UnsupportedRequestError(
            f"the model computes {made} rows, the cache was opened for {rows}",
            "open the cache with the rows that the model sees; use one beam and one returned sequence",
        )


def _has_cache(given: Mapping[str, Any], cache: Cache) -> bool:
    """Whether a call has this cache, by either name."""
    return any(given.get(name) is cache for name in CACHE_NAMES)


def _asks(config: Any, given: Mapping[str, Any], *names: str) -> bool:
    """Whether a call, or else a model's configuration, asks for one of these outputs."""
    return any(given.get(name) or getattr(config, name, False) for name in names)


def _cut(given: Mapping[str, Any], past: int, begin: int, stop: int) -> dict[str, Any]:
    """The arguments of the piece `begin ... stop-1` of a call that begins at token `past`."""
    piece = dict(given)
    for name in ("input_ids", "position_ids", "cache_position"):
        if piece.get(name) is not None:
            piece[name] = piece[name][..., begin - past : stop - past]
    if piece.get("attention_mask") is not None:
        piece["attention_mask"] = piece["attention_mask"][:, :stop]
    return piece


def _main(output: Any) -> str | int:
    """The key of an output's logits, or of a base model's hidden states."""
    if isinstance(output, tuple):
        return 0
    return "logits" if "logits" in output else "last_hidden_state"


def _check_mask(mask: Any, end: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        kind = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
        raise _refused(f"the model is called with an attention mask of {kind}, not with a value a token")
    if mask.shape[1] != end or not bool((mask != 0).all()):
        raise _refused("the model is called with an attention mask that hides tokens")


def _check_positions(positions: Any, past: int, end: int, shifts: Sequence[torch.Tensor | None] = ()) -> None:
    """`shifts`: what `generate` adds to the positions of text, left in the model by a request with images. The call
    gets others then."""
    if positions is None:
        return
    if positions.shape[-1] == end - past:
        off = positions - torch.arange(past, end, device=positions.device)
        if not bool(off.any()):
            return
        even = bool((off == off[..., :1]).all())
        if even and any(one is not None and bool(torch.isin(off, one.to(off.device)).all()) for one in shifts):
            return
    raise _refused(f"the model is called with positions other than {past} ... {end - 1}")


def _begins_anew(given: Mapping[str, Any]) -> bool | None:
    """Whether a call begins at token 0, by its positions, or else its mask. None: it has neither."""
    positions, mask, ids = (given.get(name) for name in ("position_ids", "attention_mask", "input_ids"))
    if isinstance(positions, torch.Tensor) and positions.numel():
        return not bool(positions[..., 0].any())
    if isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor):
        return mask.dim() == 2 and mask.shape[-1] == ids.shape[-1]
    return None


def _is_default(signature: inspect.Signature, name: str, value: Any) -> bool:
    """Whether an argument has its default value."""
    if all(leaf is None for leaf in _leaves(value)):
        return True
    default = signature.parameters[name].default if name in signature.parameters else None
    return isinstance(value, (bool, int, float, str)) and type(value) is type(default) and value == default


def _leaves(value: Any) -> list[Any]:
    """The values in nested lists and tables."""
    inner = list(value.values()) if isinstance(value, Mapping) else value
    return [leaf for one in inner for leaf in _leaves(one)] if isinstance(inner, (list, tuple)) else [value]


def _refused(message: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{message}: the token ids alone do not determine its keys and values",
        "run prompts of unequal length one by one, and requests with images, audio or embeddings without this cache",
    )
