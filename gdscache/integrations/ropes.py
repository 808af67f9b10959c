"""Rotary embeddings whose rotation depends on the sequence's length, or on earlier sequences.

A prefix from a short sequence has other keys than the same tokens in a long one. So a cache keeps such a model's
requests to one side of the length at which the rotation changes. Written against transformers 5.23
(`modeling_rope_utils.dynamic_rope_update`). Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gdscache.errors import RopeByLengthError

# Types that rotate a key by its position alone. An unknown type may depend on anything.
STEADY = frozenset({"default", "linear", "yarn", "llama3", "proportional", "mrope"})


class RopeLimit(NamedTuple):
    """A sequence's keys are rotated in one way up to `most` tokens. `long`: beyond them in one other way."""

    kind: str
    most: int
    long: bool


def ropes(parameters: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each rope and its type, of a model's `rope_parameters` or `rope_scaling`: there may be one a kind of layer."""
    if not isinstance(parameters, Mapping) or not parameters:
        return
    named = parameters.get("rope_type") or parameters.get("type")
    if named is None and all(one is None or isinstance(one, Mapping) for one in parameters.values()):
        for one in parameters.values():
            yield from ropes(one)
    else:
        yield str(named or "default"), parameters


def rope_limit(config: Any) -> RopeLimit | None:
    """The length at which a transformers model's rotation changes; None if there is none.

    `config`: of its text model. Raises `RopeByLengthError` for an unknown type of rope.
    """
    limits = set()
    for kind, rope in ropes(getattr(config, "rope_parameters", None)):
        if kind in STEADY:
            continue
        if kind == "longrope":
            trained = rope.get("original_max_position_embeddings")
            limits.add(RopeLimit(kind, int(trained or config.original_max_position_embeddings), long=True))
        elif "dynamic" in kind:
            # at `max_position_embeddings` itself, earlier requests decide
            limits.add(RopeLimit(kind, int(config.max_position_embeddings) - 1, long=False))
        else:
            raise RopeByLengthError(
                f"nothing is known of rope_type {kind!r}: it may rotate keys by the length of their sequence",
                f"types that are known: {', '.join(sorted({*STEADY, 'longrope', 'dynamic'}))}",
            )
    if len(limits) > 1:
        raise RopeByLengthError(
            f"kinds of layers change their rope at unequal lengths: {', '.join(map(str, sorted(limits)))}",
            "run this model without the cache",
        )
    return limits.pop() if limits else None
