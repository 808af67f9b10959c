"""The gate decides for every hit whether to load it or compute it again, by the costs (costs.py), and counts its
decisions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gdscache.gate.costs import Costs, Prices

GateMode = Literal["off", "advisory", "enforcing"]
EXPLORE_EVERY = 64  # an enforcing gate loads declined pages at every 64th hit of which it declines any,
_TRIAL_SHARE = 0.5  # one page at least, and at most this share of the time to recompute the hit


class Decision(NamedTuple):
    """`pages` of a hit to load, and `worth` that pay. Seconds for `pages`: to load, and to compute instead."""

    pages: int
    worth: int
    seconds: float | None
    recompute_seconds: float | None


class Gate:
    """Decides how many pages of a hit are loaded, and counts the decisions. Thread-safe.

    `off`: load all. `advisory`: load all, and say how many pay. `enforcing`: load those pages that pay, once prefills
    and every tier of files in the hit are measured (`ENOUGH` times each). To notice a tier that got faster, at every
    `EXPLORE_EVERY`th hit with declined pages some of them are loaded all the same. If that was far faster than
    expected, so are some of the next hit's, until the figures have changed or the measure proves an outlier.
    """

    def __init__(self, mode: GateMode, costs: Costs, page_tokens: int, bytes_in: Callable[[str], int]) -> None:
        """`bytes_in`: bytes of a page in a tier."""
        self.mode: GateMode = mode
        self.costs = costs
        self._page_tokens, self._bytes_in = page_tokens, bytes_in
        self._hits: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._declined = 0  # hits with declined pages since the last trial
        self._lock = threading.Lock()

    def decide(self, tiers: Sequence[str], start: int, tokens: int, ahead: Mapping[str, int]) -> Decision:
        """For a hit with pages on `tiers`, behind `start` tokens of a request of `tokens`; `ahead` as in `Prices`."""
        costs, whole, below = self.costs, len(tiers), set(tiers) - {"gpu"}
        prices = Prices(costs, tiers, self._bytes_in, ahead, start, tokens, self._page_tokens)
        kind, worth, pages = "unmeasured", whole, whole
        if self.mode != "off" and below and costs.measured(below):
            worth = prices.best()
            kind = "loaded" if worth == whole else "declined" if set(tiers[:worth]) <= {"gpu"} else "cut"
            pages = worth
            if self.mode == "enforcing" and worth < whole and self._explores(set(tiers[worth:]), costs):
                kind, pages = "explored", prices.trial(worth, _TRIAL_SHARE)
        pages = self._counted(kind, tiers, worth, pages)
        seconds = prices.load(pages) if prices.known else None
        return Decision(pages, worth, seconds, self._saved(prices, pages))

    def decide_whole(self, loads: Sequence[Prices], start: int, tokens: int, hit: int) -> Decision:
        """For a hit whose pages save `hit` tokens together, and fewer of them none: all pay, or none does.

        `loads`: of each pool's pages, which load one pool after another. `start` and `tokens` as above.
        """
        tiers = [tier for load in loads for tier in load.tiers]
        whole, below = len(tiers), set(tiers) - {"gpu"}
        seconds = sum(load.load(load.pages) for load in loads)
        computing = Prices(self.costs, ("gpu",), self._bytes_in, {}, start, tokens, hit)
        kind, worth, pages = "unmeasured", whole, whole
        if self.mode != "off" and below and all(one.costs.measured(set(one.tiers)) for one in loads):
            worth = whole if computing.total(1, seconds) <= computing.total(0) else 0
            kind, pages = ("loaded", whole) if worth else ("declined", 0)
            if self.mode == "enforcing" and not worth and self._explores(below, *(one.costs for one in loads)):
                kind, pages = "explored", whole
        pages = self._counted(kind, tiers, worth, pages, hit)
        expected = (seconds if pages else 0.0) if all(load.known for load in loads) else None
        return Decision(pages, worth, expected, self._saved(computing, min(pages, 1)))

    def outpaced(self, seconds: float, begun: int, left: int, missing: int, cached: int) -> bool:
        """Whether pages that come from a slow tier are no longer worth waiting for, by certain facts alone.

        In `seconds` at most the `begun` bytes have come, and `left` more have not begun. The request lacks `missing`
        tokens behind `cached` ones. True if computing these tokens takes less time than the bytes that are left would
        at that pace. This works before loads from the tier are measured, so that the first requests after a restart do
        not pay for a slow disk. Always False unless the gate is enforcing and prefills are measured.
        """
        if self.mode != "enforcing" or not begun or not self.costs.prefill.enough:
            return False
        computing = self.costs.prefill_seconds(missing, cached)
        return computing is not None and seconds * left / begun > computing

    def _explores(self, tiers: Collection[str], *costs: Costs) -> bool:
        with self._lock:
            self._declined += 1
            if self._declined < EXPLORE_EVERY and not any(one.maybe_faster(tiers) for one in costs):
                return False
            self._declined = 0
            return True

    def _saved(self, prices: Prices, pages: int) -> float | None:
        """Seconds to compute what these pages save."""
        if self.mode == "off" or self.costs.prefill.coefficients is None:
            return None
        return max(0.0, prices.rest(0) - prices.rest(pages))

    def _counted(self, kind: str, tiers: Sequence[str], worth: int, loaded: int, hit: int | None = None) -> int:
        """Count the decision, unless the gate is off or all pages are on the GPU. Returns the pages to load. `hit`:
        tokens that all pages save together; None: each saves its own."""
        if self.mode == "off" or tiers.count("gpu") == len(tiers):
            return loaded
        below = [len(some) - some.count("gpu") for some in (tiers[:worth], tiers[worth:loaded], tiers[loaded:])]
        names = "unmeasured" if kind == "unmeasured" else "loaded", "explored", "declined"
        with self._lock:
            self._hits[kind] += 1
            for name, pages in zip(names, below, strict=True):
                self._pages[name] += pages
                self._tokens[name] += pages * self._page_tokens if hit is None else hit * (pages > 0)
        return len(tiers) if self.mode == "advisory" else loaded

    def stats(self) -> dict[str, Any]:
        with self._lock:
            hits = {kind: self._hits[kind] for kind in ("loaded", "cut", "declined", "explored", "unmeasured")}
            kinds = "loaded", "declined", "explored", "unmeasured"
            pages, tokens = ({kind: counts[kind] for kind in kinds} for counts in (self._pages, self._tokens))
        return {"mode": self.mode, "hits": hits, "pages": pages, "tokens": tokens, **self.costs.describe()}
