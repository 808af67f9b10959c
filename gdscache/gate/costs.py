"""The measured costs of loads and prefills, and the part of a hit that is worth loading.

Arithmetic only; nothing here reads a clock.

* A load from a tier: `latency + bytes / bandwidth`, after the bytes of loads that are under way there.
* A prefill of n tokens behind c cached ones: `step + a n + b n (c + n / 2)`; the last term is attention, each token
  with all before it. It adds up over chunks, except `step`.
* Both together: `load + prefill - overlap * min(load, prefill)`. `overlap` is 0, the careful assumption, until prefills
  that ran during their load were reported with the time of both.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache import arguments
from gdscache.gate.fit import ENOUGH, Fit, spread
from gdscache.limits import MAX_COUNT, MAX_SECONDS
from gdscache.pages.layout import PLAIN

Observations = list[tuple[tuple[float, ...], float]]  # (features of `Fit`, seconds)

_OVERLAPS_KEPT = 32
_COMPARABLE = 0.1  # the shorter of a load and a prefill must have this share of the longer one to measure overlap


def _columns_of_loads(rows: npt.NDArray[np.float64]) -> list[int]:
    return [0, 1] if spread(rows[:, 0]) >= 1.5 else [0]


def _columns_of_prefills(rows: npt.NDArray[np.float64]) -> list[int]:
    context = rows[:, 1] / rows[:, 0]
    return [0, *([1] if spread(context) >= 2 else []), *([2] if spread(rows[:, 0]) >= 2 else [])]


class Costs:
    """Learns the times of loads and prefills from reports. Thread-safe."""

    def __init__(self, memory: Collection[str] = ()) -> None:
        """`memory`: tiers in memory. They count as free until they are measured, which a busy engine's are not: the
        hit's other tiers then decide."""
        self._assumed = frozenset(("gpu", *memory))
        self.tiers: dict[str, Fit] = defaultdict(lambda: Fit(2, _columns_of_loads))
        self.prefill = Fit(3, _columns_of_prefills)
        self.overlap = 0.0
        self._overlaps: deque[float] = deque(maxlen=_OVERLAPS_KEPT)
        self._lock = threading.Lock()

    # -- measuring -------------------------------------------------------------------------------------------------

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        if nbytes > 0 and 0 < seconds < math.inf:
            with self._lock:
                self.tiers[tier].observe((float(nbytes), 1.0), seconds)

    def observe_prefill(
        self, tokens: int, cached_tokens: int, seconds: float, load_seconds: float | None = None
    ) -> None:
        """See `CacheEngine.observe_prefill`. Raises `InvalidValueError`."""
        tokens = arguments.whole(tokens, "tokens", 1, MAX_COUNT)
        cached_tokens = arguments.whole(cached_tokens, "cached_tokens", 0, MAX_COUNT)
        seconds = arguments.span(seconds, "seconds", MAX_SECONDS)
        with self._lock:
            if load_seconds is None:
                self.prefill.observe(_features(tokens, cached_tokens), seconds)
            else:
                load = arguments.span(load_seconds, "load_seconds", MAX_SECONDS)
                self._observe_overlap(self.prefill_seconds(tokens, cached_tokens), load, seconds)

    def _observe_overlap(self, prefill: float | None, load: float, both: float) -> None:
        if prefill is None or not self.prefill.enough or min(prefill, load) < _COMPARABLE * max(prefill, load):
            return
        self._overlaps.append(min(1.0, max(0.0, (prefill + load - both) / min(prefill, load))))
        if len(self._overlaps) >= ENOUGH:
            self.overlap = statistics.median(self._overlaps)

    # -- for the next engine ---------------------------------------------------------------------------------------

    def observations(self) -> tuple[Observations, dict[str, Observations]]:
        with self._lock:
            return self.prefill.kept(), {name: fit.kept() for name, fit in self.tiers.items()}

    def restore_prefills(self, rows: Observations) -> None:
        with self._lock:
            self.prefill.restore(rows)

    def restore_loads(self, tier: str, rows: Observations) -> None:
        if rows:
            with self._lock:
                self.tiers[tier].restore(rows)

    # -- expecting -------------------------------------------------------------------------------------------------

    def load_price(self, tier: str) -> tuple[float, float] | None:
        """(seconds a byte, seconds to begin) of a load from a tier; None before one was measured. The GPU's is free."""
        if tier == "gpu":
            return 0.0, 0.0
        fit = self._fit(tier)
        prices = None if fit is None else fit.coefficients
        return None if prices is None else (prices[0], prices[1])

    def load_seconds(self, tiers: Sequence[str], bytes_in: Callable[[str], int]) -> float | None:
        """Of a load of one page from each of `tiers`; None before all were measured. `bytes_in`: as of `Prices`."""
        prices = Prices(self, tiers, bytes_in, {})
        return prices.load(prices.pages) if prices.known else None

    def prefill_seconds(self, tokens: int, cached_tokens: int) -> float | None:
        return 0.0 if tokens <= 0 else self.prefill.seconds(_features(tokens, cached_tokens))

    def measured(self, tiers: Collection[str]) -> bool:
        return self.prefill.enough and all(tier in self._assumed or self.knows(tier) for tier in tiers)

    def knows(self, tier: str) -> bool:
        fit = self._fit(tier)
        return fit is not None and fit.enough

    def _fit(self, tier: str) -> Fit | None:
        """A plain tier has the device of its packed one, which more loads measure."""
        own, packed = self.tiers.get(tier), self.tiers.get(tier.removesuffix(PLAIN))
        return own if packed is None or (own is not None and own.enough) else packed

    def maybe_faster(self, tiers: Collection[str]) -> bool:
        """Whether the last load from one of `tiers` was far faster than expected, and no change is established yet."""
        return any(fit.off < 0 for tier in tiers if (fit := self._fit(tier)) is not None)

    def bandwidths(self) -> dict[str, float]:
        prices = {name: fit.coefficients for name, fit in list(self.tiers.items())}
        return {name: 1.0 / found[0] for name, found in prices.items() if found is not None and found[0] > 0}

    def describe(self) -> dict[str, Any]:
        bandwidths = self.bandwidths()
        per_token = self.prefill.coefficients[0] if self.prefill.coefficients else None
        return {
            "tiers": {
                name: {
                    "bytes_per_second": bandwidths.get(name),
                    "latency_seconds": None if fit.coefficients is None else fit.coefficients[1],
                    "observations": fit.observations,
                    "relative_errors": fit.errors.describe(),
                }
                for name, fit in list(self.tiers.items())
            },
            "prefill": {
                "tokens_per_second": 1.0 / per_token if per_token else None,
                "observations": self.prefill.observations,
                "relative_errors": self.prefill.errors.describe(),
            },
            "overlap": self.overlap,
        }


def _features(tokens: int, cached: int) -> tuple[float, float, float]:
    return float(tokens), tokens * (cached + tokens / 2), 1.0


class _PricedRun(NamedTuple):
    """Neighbouring pages of one tier, `[begin, end)`. Seconds: `before` for all earlier pages, `entry` to begin, `page`
    for each."""

    begin: int
    end: int
    before: float
    entry: float
    page: float

    def load(self, pages: int) -> float:
        return self.before + self.entry + self.page * (pages - self.begin)


class Prices:
    """The cost of loading the first k pages of one hit, and of computing the rest.

    `start` tokens of the request's `tokens` come before the hit. `bytes_in`: bytes of a page in a tier. `ahead`: pages
    under way, by tier. `known`: every tier has a price; a tier without one counts as free.
    """

    def __init__(
        self,
        costs: Costs,
        tiers: Sequence[str],
        bytes_in: Callable[[str], int],
        ahead: Mapping[str, int],
        start: int = 0,
        tokens: int = 0,
        page_tokens: float = 0.0,
    ) -> None:
        self.costs, self.tiers = costs, tiers
        self._overlap, self._prefill = costs.overlap, costs.prefill.coefficients or (0.0, 0.0, 0.0)
        self._start, self._tokens, self._page_tokens = start, tokens, page_tokens
        self._runs: list[_PricedRun] = []
        self.known = True
        at, before, begun = 0, 0.0, {"gpu"}
        for tier, group in itertools.groupby(tiers):
            price = costs.load_price(tier)
            self.known = self.known and price is not None
            per_byte, latency = price or (0.0, 0.0)
            page = per_byte * bytes_in(tier)
            entry = 0.0 if tier in begun else latency + ahead.get(tier, 0) * page
            begun.add(tier)
            run = _PricedRun(at, at + len(list(group)), before, entry, page)
            self._runs.append(run)
            at, before = run.end, run.load(run.end)
        self.pages = at

    def load(self, pages: int) -> float:
        return self._runs[bisect.bisect_left(self._runs, pages, key=lambda run: run.end)].load(pages) if pages else 0.0

    def rest(self, pages: int) -> float:
        cached = self._start + pages * self._page_tokens
        left = self._tokens - cached
        if left <= 0:
            return 0.0
        per_token, per_pair, step = self._prefill
        return step + left * (per_token + per_pair * (cached + left / 2))

    def total(self, pages: int, beside: float = 0.0) -> float:
        return self._together(self.load(pages) + beside, self.rest(pages))

    def _together(self, load: float, rest: float) -> float:
        return load + rest - self._overlap * min(load, rest)

    def best(self) -> int:
        """The number of pages with the least total; the larger one of two.

        Within a run of one tier each page costs the same to load, except the first, which costs more; and the later a
        page, the more prefill it saves. So the least total is at the end of a run, or next to the page where loading
        begins to take longer than the rest; only these are tried.
        """
        best, least, load, rest = 0, self.total(0), 0.0, self.rest(0)
        for run in self._runs:
            below = load <= rest
            load, rest = run.load(run.end), self.rest(run.end)
            if self._overlap and below and load > rest:
                inside = range(run.begin + 1, run.end)
                cross = run.begin + 1 + bisect.bisect_left(inside, True, key=lambda k: self.load(k) > self.rest(k))
                for pages in (cross - 1, cross):
                    total = self.total(pages)
                    if total <= least:
                        best, least = pages, total
            total = self._together(load, rest)
            if total <= least:
                best, least = run.end, total
        return best

    def trial(self, worth: int, share: float) -> int:
        """More pages than are `worth` it: one more, or as many as load in `share` of the time that computing all of
        them takes."""
        most = share * max(0.0, self.rest(0) - self.rest(self.pages))
        return max(worth + 1, bisect.bisect_right(range(self.pages + 1), most, key=self.load) - 1)
