"""Fetches of waiting requests in a hybrid model: all pages that a hit needs in all groups, or none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gdscache.errors import LoadOrderError
from gdscache.groups.names import Chain, GroupNames
from gdscache.integrations.fetching import Pinned, PinnedFetch
from gdscache.moves import PrefetchEnd
from gdscache.pages.hit import Hit

if TYPE_CHECKING:
    from gdscache.engine.hybrid import HybridEngine
    from gdscache.engine.hybrid_handles import HybridHit, HybridPrefetch
    from gdscache.integrations.fetching import PinningCache


class GroupFetch(Pinned):
    """See `PinnedFetch`. A page is `alignment` tokens of all groups; the cached pages are wanted and verified as a
    whole."""

    asking = False  # no tier beyond this machine is asked
    _prefetch: HybridPrefetch | None

    def __init__(
        self, engine: HybridEngine, names: GroupNames, most: int, tokens: int, seconds: float, start: int = 0
    ) -> None:
        """`most`: the greatest useful end of a hit, in tokens. `tokens`: of the request. `start`: tokens before page 0
        of the fetch."""
        super().__init__(seconds)
        self.found: HybridHit = engine.lookup_named(names, most, tokens, start)
        self.parted = self.found.parted  # grows with other requests' stores while this one waits
        self.cached = (self.found.tokens + self.found.declined) // engine.alignment
        self.wanted = self.found.tokens // engine.alignment
        begun = any(self.pages) and engine.config.cpu is not None
        self._prefetch = engine.prefetch(self.found, pin=seconds) if begun else None
        self._engine, self._gate, self._engines = engine, engine.gate, engine.engines

    @property
    def pages(self) -> Sequence[Chain]:
        """The hit's pages in each pool, in the order of a load."""
        return self.found.order

    def done(self) -> bool:
        return self._prefetch is None or self._prefetch.done() or self.verified() == self.wanted

    def verified(self) -> int:
        """`wanted` if all pages are checked and pinned, else 0."""
        there = not any(self.pages) if self._prefetch is None else self._prefetch.verified
        return self.wanted if there else 0

    def loadable(self, pages: int) -> bool:
        """Whether these pages are the whole hit, checked and pinned: a part of it would lack its window."""
        return pages == self.verified()

    def outpaced(self) -> bool:
        if self._prefetch is None:
            return False
        slow = begun = 0  # bytes
        for engine, part, turns in zip(self._engines, self.found.parts, self._prefetch.begun, strict=True):
            sizes = {name: engine.layout.bytes_in(name) * (kind == "files") for name, kind in engine.tiers.items()}
            slow += sum(sizes[name] for name in part.tiers)
            begun += sum(sizes[name] for name in part.tiers[:turns])
        return self._gate.outpaced(time.monotonic() - self._since, begun, slow - begun, self.found.tokens, 0)

    def crowded(self) -> bool:
        if self._prefetch is None:
            return any(self.pages)
        if not self._prefetch.done() or self.verified() == self.wanted:
            return False
        return any(report.end is PrefetchEnd.NO_ROOM for report in self._prefetch.result(0))

    def unused(self, first: int) -> str:
        states = Counter(
            told.cause
            for engine, pages in zip(self._engines, self.pages, strict=True)
            for told in engine.told([one.page for one in pages])
        )
        return ", ".join(f"{count} pages {cause}" for cause, count in states.items())

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """For `pages` times `alignment` tokens: the number that each tier had at the begin, in proportion to its
        pages."""
        found: Counter[str] = Counter(tier for part in self.found.parts for tier in part.tiers)
        whole, told = sum(found.values()), Counter[str]()
        for name, some in found.most_common():
            told[name] = round(pages * some / whole)
        if told:
            told[found.most_common(1)[0][0]] += pages - sum(told.values())
        return told

    def checked(self, first: int, pages: int) -> HybridHit:
        """All pages, for a load that cannot fail. Raises `LoadOrderError` unless all are verified."""
        if self._prefetch is None or self.verified() < self.wanted:
            raise LoadOrderError(
                f"{sum(map(len, self.pages))} pages of a hit are to be loaded without a check, and some had none",
                "load the pages that the connector's own scheduler orders",
            )
        return self._prefetch.hit()

    def unchecked(self, first: int, pages: int) -> HybridHit:
        return self.found


Fetch = PinnedFetch | GroupFetch


class GroupPart:
    """Some pages of a fetch in one pool, by number, for a load."""

    def __init__(self, fetch: GroupFetch, pool: int, numbers: Sequence[int]) -> None:
        self._fetch, self._pool, self._numbers = fetch, pool, numbers

    def release(self) -> None:
        self._fetch.release()

    def checked(self, first: int, pages: int) -> Hit:
        return self._part(self._fetch.checked(first, pages).parts[self._pool])

    def unchecked(self, first: int, pages: int) -> Hit:
        return self._part(self._fetch.unchecked(first, pages).parts[self._pool])

    def _part(self, hit: Hit) -> Hit:
        some = [number for number in self._numbers if number < len(hit.pages)]
        return hit.part(some)


class GroupCache:
    """An engine as the cache of a table of a hybrid model's requests: `PinningCache`, in all groups at once."""

    def __init__(self, cache: PinningCache, engine: HybridEngine, digest_tokens: int) -> None:
        """`cache`: of the same engine. `digest_tokens`: tokens that each digest of a request adds to the one before."""
        self._cache = cache
        self._engine = engine
        self._digest_tokens = digest_tokens

    def names(self) -> GroupNames:
        """Names for a new request, under the inference engine's present weights."""
        return self._engine.group_names(self._cache.salt, self._digest_tokens)

    def fetch(self, names: GroupNames, most: int, tokens: int) -> GroupFetch:
        """Begin to bring the pages of a hit of up to `most` tokens, for a request of `tokens`."""
        return GroupFetch(self._engine, names, most, tokens, self._cache.pin_seconds)

    def stand(self, names: GroupNames, wanted: Sequence[Sequence[int]]) -> None:
        self._engine.states.stand(names, wanted)

    def reach(self, names: GroupNames, most: int) -> tuple[int, int]:
        return self._engine.reach(names, most)
