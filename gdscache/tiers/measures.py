"""Measures of lookups, loads, stores and waits, by tier and by class of size."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gdscache.histograms import SECONDS, SIZE_CLASSES, Histogram, size_class
from gdscache.moves import PLANES
from gdscache.pages.layout import PLAIN

WAITS = ("layer", "verdict", "pages")  # a layer of a load, a load's end, a prefetch's end


class TokenCounts:
    """Tokens that lookups asked for, and tokens that they found, by tier. Thread-safe."""

    def __init__(self, tiers: Iterable[str]) -> None:
        self._asked = 0
        self._hit = dict.fromkeys(tiers, 0)
        self._lock = threading.Lock()

    def answered(self, asked: int, hit: int, tiers: Sequence[str]) -> None:
        """A lookup asked for `asked` tokens and found `hit`, in pages of `tiers`, which share them equally."""
        with self._lock:
            self._asked += asked
            if not tiers:
                return
            left, pages = hit, len(tiers)
            one = tiers[0]
            for tier, some in ((one, pages),) if tiers.count(one) == pages else Counter(tiers).items():
                part = left * some // pages
                self._hit[tier] += part
                left, pages = left - part, pages - some

    def describe(self) -> dict[str, Any]:
        with self._lock:
            return {"asked": self._asked, "hit": dict(self._hit)}


class Measures:
    """Every series exists from the beginning. Thread-safe, except `moved`, which the manager's lock guards."""

    def __init__(self, tiers: Mapping[str, str]) -> None:
        self.tokens = TokenCounts(tiers)
        self._lock = threading.Lock()
        moving = [name for name, kind in tiers.items() if kind != PLANES]
        self._loads = {(tier, size): Histogram(SECONDS) for tier in moving for size in SIZE_CLASSES}
        self._stores = {(tier, size): Histogram(SECONDS) for tier in moving for size in SIZE_CLASSES}
        self._waits = {what: Histogram(SECONDS) for what in WAITS}
        memories, files = ([name for name in moving if tiers[name] == kind] for kind in ("memory", "files"))
        pairs = [(a, b) for a in memories for b in files if a.endswith(PLAIN) == b.endswith(PLAIN)]
        inner = [*pairs, *((b, a) for a, b in pairs)]
        outer = [path for name in moving for path in ((PLANES, name), (name, PLANES))]
        self._moved = dict.fromkeys([*outer, *inner], 0)

    def loaded(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` with this slowest tier took `seconds` from its begin to its verdict."""
        if (histogram := self._loads.get((tier, size_class(nbytes)))) is not None:
            with self._lock:
                histogram.note(seconds)

    def stored(self, tier: str, nbytes: int, seconds: float) -> None:
        """Pages of a store of `nbytes` were committed on a tier `seconds` after it was accepted."""
        with self._lock:
            self._stores[tier, size_class(nbytes)].note(seconds)

    def waited(self, what: str, seconds: float) -> None:
        with self._lock:
            self._waits[what].note(seconds)

    def moved(self, source: str, target: str, pages: int) -> None:
        if pages:
            self._moved[source, target] += pages

    def describe(self) -> dict[str, Any]:
        return {
            "load_seconds": nested({key: histogram.describe() for key, histogram in self._loads.items()}),
            "store_seconds": nested({key: histogram.describe() for key, histogram in self._stores.items()}),
            "wait_seconds": {what: histogram.describe() for what, histogram in self._waits.items()},
            "moved_pages": nested(self._moved),
        }


def nested(figures: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    """Figures by their first name, then by their second."""
    found: dict[str, dict[str, Any]] = {}
    for (first, second), figure in figures.items():
        found.setdefault(first, {})[second] = figure
    return found
