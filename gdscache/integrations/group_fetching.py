"""How the pages of a waiting request are fetched in a hybrid model: all that a hit needs in all groups, or none.

Nothing of an inference engine is imported.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gdscache.errors import LoadOrderError
from gdscache.groups.base import alignment
from gdscache.groups.hits import GroupHit, find, longest
from gdscache.groups.names import GroupNames, GroupPage
from gdscache.integrations.fetching import Pinned
from gdscache.pages.hit import Hit
from gdscache.prefetch.queue import PrefetchEnd

if TYPE_CHECKING:
    from gdscache.engine import CacheEngine
    from gdscache.integrations.fetching import PinningCache


class GroupFetch(Pinned):
    """The pages of one request, on their way to the CPU tier and pinned there for `seconds` at most.

    As `fetching.Fetch`, where a page is `alignment` tokens of all groups: what is cached is wanted as a whole, and is
    verified as a whole.
    """

    asking = False  # no tier beyond this machine is asked

    def __init__(self, engine: CacheEngine, names: GroupNames, most: int, tokens: int, seconds: float) -> None:
        """`most`: tokens of a hit that can be of use; `tokens`: of the request."""
        super().__init__(seconds)
        self._told_of = engine.manager.told
        self._align = alignment(names.groups)
        self.found: GroupHit = find(engine, names, most, tokens)
        hit = self.found.hit
        self.cached = (hit.tokens + hit.declined) // self._align
        self.wanted = hit.tokens // self._align
        self._page_tokens = engine.layout.page_tokens
        begun = bool(hit.pages) and engine.config.cpu is not None
        self._prefetch = engine.prefetch(hit, pin=seconds) if begun else None
        self._gate, self._files = engine.gate, {tier.name for tier in engine.manager.files}

    @property
    def pages(self) -> tuple[GroupPage, ...]:
        """What the hit needs, in the order in which it is loaded."""
        return self.found.pages

    def done(self) -> bool:
        """Whether no more pages come, or all have come."""
        return self._prefetch is None or self._prefetch.done() or self.verified() == self.wanted

    def verified(self) -> int:
        """All that is wanted, where all of it is checked and pinned; else 0."""
        there = 0 if self._prefetch is None else self._prefetch.verified // self._page_tokens
        return self.wanted if there == len(self.pages) else 0

    def outpaced(self) -> bool:
        """Whether computing the hit takes less time than waiting for what has not come, at its best possible pace."""
        if self._prefetch is None:
            return False
        slow = sum(name in self._files for name in self.found.hit.tiers)
        begun = max(0, slow - (len(self.pages) - self._prefetch.begun))
        return self._gate.outpaced(time.monotonic() - self._since, begun, slow - begun, self.found.hit.tokens, 0)

    def crowded(self) -> bool:
        """Whether the CPU tier has no room for its pages."""
        if self._prefetch is None:
            return bool(self.pages)
        if not self._prefetch.done() or self.verified() == self.wanted:
            return False
        return self._prefetch.result(0).end is PrefetchEnd.NO_ROOM

    def unused(self, first: int) -> str:
        """What is known now of its pages, for a line of the log."""
        states = Counter(one.cause for one in self._told_of([one.page.key for one in self.pages]))
        return ", ".join(f"{count} pages {cause}" for cause, count in states.items())

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """How many of `pages` times `alignment` tokens each tier had when it began, by the pages that end in them."""
        found: Counter[str] = Counter(self.found.hit.tiers)
        whole, told = sum(found.values()), Counter[str]()
        for name, some in found.most_common():
            told[name] = round(pages * some / whole)
        if told:
            told[found.most_common(1)[0][0]] += pages - sum(told.values())
        return told

    def checked(self, first: int, pages: int) -> Hit:
        """All pages, for a load that cannot fail. Raises `LoadOrderError` where they were not found good."""
        if self._prefetch is None or self.verified() < self.wanted:
            raise LoadOrderError(
                f"{len(self.pages)} pages of a hit are to be loaded without a check, and some had none",
                "load what the connector's own scheduler orders",
            )
        return self._prefetch.hit(0)

    def unchecked(self, first: int, pages: int) -> Hit:
        """All pages from wherever they are, for a load with a verdict."""
        return self.found.hit


class GroupPart:
    """Some pages of a fetch, by their numbers: what a load takes of it."""

    def __init__(self, fetch: GroupFetch, numbers: Sequence[int]) -> None:
        self._fetch, self._numbers = fetch, numbers

    def release(self) -> None:
        self._fetch.release()

    def checked(self, first: int, pages: int) -> Hit:
        """See `GroupFetch.checked`."""
        return self._part(self._fetch.checked(first, pages))

    def unchecked(self, first: int, pages: int) -> Hit:
        """See `GroupFetch.unchecked`."""
        return self._part(self._fetch.unchecked(first, pages))

    def _part(self, hit: Hit) -> Hit:
        some = [number for number in self._numbers if number < len(hit.pages)]
        return hit.part(some)


class GroupCache:
    """An engine as the cache of a table of a hybrid model's requests: `PinningCache`, in all groups at once."""

    def __init__(self, cache: PinningCache, digest_tokens: int) -> None:
        """`digest_tokens`: tokens that each digest of a request names more than the one before."""
        self._cache = cache
        self._digest_tokens = digest_tokens

    def names(self) -> GroupNames:
        """Names for a new request, whose pages are of the weights that the inference engine has now."""
        engine = self._cache.engine
        return GroupNames(engine.groups, engine.namespaces(self._cache.salt), self._digest_tokens)

    def fetch(self, names: GroupNames, most: int, tokens: int) -> GroupFetch:
        """Begin to bring what a hit of up to `most` tokens needs, for a request of `tokens`."""
        return GroupFetch(self._cache.engine, names, most, tokens, self._cache.pin_seconds)

    def longest(self, names: GroupNames, most: int) -> int:
        """Tokens of the longest hit. Counts as no use of its pages."""
        return longest(self._cache.engine, names, most)
