"""The clients' answers in `gdscache bench ttft`, and comparisons of several answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_OTHER_PRODUCTS = 4  # factor on near ties for equal sums computed in another order
_BY_WORTH = ("same", "near tie", "other")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A request's answer. `ttft`: seconds to the first token. `sources`: tokens that were not computed, by source.
    `waits`: the host's seconds in `wait`, a layer each."""

    ttft: float
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    sources: dict[str, int]
    waits: tuple[float, ...]
    recomputed: int


def compare(ours: Sequence[Answer], plain: Sequence[Answer], near_tie: float) -> str:
    """`same` tokens, `near tie` (16-bit results that depend on the batch size), or `other` ones."""
    found = "same"
    for mine, other in zip(ours, plain, strict=False):
        pairs = zip(mine.tokens, other.tokens, strict=True)
        where = next((number for number, (one, another) in enumerate(pairs) if one != another), None)
        if where is not None and other.margins[where] > near_tie:
            return "other"
        found = "near tie" if where is not None else found
    return found


def worst(
    mine: Sequence[Answer], plain: Sequence[Answer], resident: Sequence[Answer], near_tie: float, *, gated: bool
) -> str:
    """The tokens of hits against tokens without a cache, and against tokens of the same forward pass with a resident
    prefix. Only the second comparison has the same products, so in 16 bits the first may differ more. Hits that the
    gate cuts differ from both."""
    found = [compare(mine, plain, _OTHER_PRODUCTS * near_tie)]
    if not gated:
        found.append(compare(mine, resident, near_tie))
    return max(found, key=_BY_WORTH.index)
