"""What a client of `gdscache bench ttft` answers, and what several answers come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gdscache import CacheEngine
from gdscache.commands.bench.measure import Series
from gdscache.errors import IOFailedError

_OTHER_PRODUCTS = 4  # near ties that are allowed where the same sums were made in another order
_BY_WORTH = ("same", "near tie", "other")


def stored_bytes(cache: CacheEngine, tokens: Any) -> int:
    """Bytes of a prompt's pages, all of which are on every tier: raises `IOFailedError` where some are not."""
    pages = cache.pages(tokens)
    for name, tier in cache.manager.tiers.items():
        missing = sum(page.key not in tier.index for page in pages)
        if missing:
            raise IOFailedError(f"{missing} of {len(pages)} pages did not reach the {name} tier", "see the log")
    return len(pages) * cache.layout.page_bytes


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request. Seconds: to the first token, and (`whole`) until all tokens were there and the pages handed over.

    `sources`: tokens that were not computed, by where from. `waits`: the host's seconds in `wait`, a layer each.
    """

    ttft: float
    whole: float
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    sources: dict[str, int]
    waits: tuple[float, ...]
    recomputed: int


def compare(ours: Sequence[Answer], plain: Sequence[Answer], near_tie: float) -> str:
    """`same` tokens, `near tie` (16 bits decide otherwise by the size of the batch), or `other` ones."""
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
    """The tokens of hits against those without a cache, and against those of the same forward pass with the prefix
    resident. Only the latter has the same products, so in 16 bits the former may be further off. What the gate cuts has
    others than both."""
    found = [compare(mine, plain, _OTHER_PRODUCTS * near_tie)]
    if not gated:
        found.append(compare(mine, resident, near_tie))
    return max(found, key=_BY_WORTH.index)


def series_of(series: Series) -> dict[str, Any]:
    """A series as plain data, with its 99th percentile."""
    return {**series.describe(), "p99": float(np.percentile(series.values, 99))}


def percentiles(values: Sequence[float]) -> dict[str, Any] | None:
    """The median and the 99th percentile of some values, as plain data; None for none."""
    if not values:
        return None
    median, high = np.percentile(values, (50, 99))
    return {"median": float(median), "p99": float(high), "count": len(values)}
