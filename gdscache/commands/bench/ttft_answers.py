"""The clients' answers in `gdscache bench ttft`, and comparisons of several answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gdscache import CacheEngine
from gdscache.commands.bench.measure import Series
from gdscache.errors import IOFailedError

_OTHER_PRODUCTS = 4  # factor on near ties for equal sums computed in another order
_BY_WORTH = ("same", "near tie", "other")


def stored_bytes(cache: CacheEngine, tokens: Any) -> int:
    """Bytes of a prompt's pages. Raises `IOFailedError` unless all of them are on every tier."""
    pages = cache.pages(tokens)
    for name, tier in cache.manager.tiers.items():
        if tier.plain:  # of pages that cannot be packed
            continue
        missing = sum(page.key not in tier.index for page in pages)
        if missing:
            raise IOFailedError(f"{missing} of {len(pages)} pages did not reach the {name} tier", "see the log")
    return len(pages) * cache.layout.page_bytes


@dataclasses.dataclass(frozen=True)
class Answer:
    """A request's answer. Seconds: `ttft`, and `whole` until all tokens are computed and the pages handed over.
    `sources`: tokens that were not computed, by source. `waits`: the host's seconds in `wait`, a layer each."""

    ttft: float
    whole: float
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


def series_of(series: Series) -> dict[str, Any]:
    """A series as plain data, with its 99th percentile."""
    return {**series.describe(), "p99": float(np.percentile(series.values, 99))}


def percentiles(values: Sequence[float]) -> dict[str, Any] | None:
    """Median and 99th percentile, as plain data; None without values."""
    if not values:
        return None
    median, high = np.percentile(values, (50, 99))
    return {"median": float(median), "p99": float(high), "count": len(values)}
