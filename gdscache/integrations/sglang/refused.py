"""Settings that the SGLang integrations refuse at SGLang's start, each by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gdscache.errors import CacheGroupsUnsupportedError, MediaUnsupportedError, RopeByLengthError
from gdscache.integrations.ropes import ropes
from gdscache.integrations.sglang.setup import table

_BY_POSITION = ("default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope")
_BY_LENGTH = ("longrope", "dynamic")  # up to the length of the model's training they rotate in one way
_NATIVE = "sglang"  # of `ModelImpl`: SGLang's own code of a model


def refuse_setup(server: Any) -> None:
    """Raise the `IntegrationError` subclass of an unsupported setting. `server`: SGLang's `ServerArgs`."""
    table().refuse(ServerArgs=server)


def refuse_components(names: Collection[str], params: Any) -> None:
    """Raise for components of the tree beside full attention, windows and states. `names`: of SGLang's `ComponentType`.
    `params`: its `CacheInitParams`."""
    if "FULL" not in names or not set(names) <= {"FULL", "SWA", "MAMBA"}:
        raise CacheGroupsUnsupportedError(
            f"the model's cache has {', '.join(sorted(names)) or 'nothing'}; FULL, SWA and MAMBA are supported, the "
            "last two beside the first",
            "use a model whose layers keep all tokens, a sliding window, or a state",
        )
    if "SWA" in names and not params.swa_gates_prefix_match:
        raise CacheGroupsUnsupportedError(
            "the model's sliding windows are kept for each request, and are not in SGLang's tree",
            "use another model, or leave the cache out of this server",
        )


def refuse_model(model: Any) -> None:
    """Raise if K and V depend on more than SGLang's page name. `model`: SGLang's `ModelConfig`.

    A page's name covers the tokens up to its end. An image's tokens are 62 bits of a digest of the model's input, or
    any number that a request gives in its `mm_hashes`.
    """
    if model.is_multimodal or model.is_encoder_decoder:
        raise MediaUnsupportedError(
            "the model takes images, sounds or videos: a request may name them itself (mm_hashes), and a page's name "
            "has no more of them than that",
            "set --language-model-only for text alone, or leave the cache out of this server",
        )
    text = model.hf_text_config
    for kind, rope in ropes(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        _refuse_rope(kind, rope, model)


def _refuse_rope(kind: str, rope: Mapping[str, Any], model: Any) -> None:
    """Refuse a rope whose rotation depends on other requests. SGLang's longrope takes the long factors for a whole
    batch when one position is beyond the limit. Its dynamic rope depends on the model alone; transformers' on the
    longest request so far."""
    impl = getattr(model, "_resolved_model_impl", None) or model.model_impl
    native = str(getattr(impl, "value", impl)) == _NATIVE
    if kind in _BY_POSITION or (kind == "dynamic" and native):
        return
    limit = _limit(rope, model.hf_text_config) if kind in _BY_LENGTH else None
    if limit is not None and model.context_len <= limit:
        return
    raise RopeByLengthError(
        f"rope_type is {kind!r}: keys are rotated by the longest length in the batch, and requests have up to "
        f"{model.context_len} tokens",
        "leave the cache out of this server"
        if limit is None
        else f"set --context-length {limit}, which keeps every request to one side"
        + (", or --model-impl sglang" if kind == "dynamic" else ""),
    )


def _limit(rope: Mapping[str, Any], text: Any) -> int | None:
    """The shortest length that may be the limit. transformers writes one into the rope if the model's file has it
    beside the rope, and SGLang takes one or the other by the model's code."""
    name = "original_max_position_embeddings"
    known = [found for found in (rope.get(name), getattr(text, name, None)) if found is not None]
    known = known or [found for found in (getattr(text, "max_position_embeddings", None),) if found is not None]
    return min(map(int, known), default=None)
