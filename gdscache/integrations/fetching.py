"""How the pages of a waiting request are fetched: brought to the CPU tier, checked there, and pinned.

Nothing of an inference engine is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from gdscache.errors import GdsCacheError, LoadOrderError
from gdscache.integrations.weights import fresh_salt
from gdscache.pages.hit import Hit
from gdscache.pages.keys import PageHashes
from gdscache.pages.reasons import joined, words
from gdscache.prefetch.queue import PrefetchEnd
from gdscache.runtime.threads import log_failure

if TYPE_CHECKING:
    from gdscache.engine.engine import CacheEngine
    from gdscache.engine.hybrid_handles import HybridPrefetch
    from gdscache.prefetch.handle import Prefetch


ENDING_S = 5.0  # pins that end so soon are too old to begin a load from


class Fetched(Protocol):
    """What a load takes of a fetch."""

    def release(self) -> None:
        """Bring no more, and let go of what is pinned. Twice is fine."""

    def checked(self, first: int, pages: int) -> Any:
        """Those pages, which were verified: what a load takes that cannot fail."""

    def unchecked(self, first: int, pages: int) -> Any:
        """Those pages from wherever they are: what a load takes that has a verdict."""


class Fetch(Fetched, Protocol):
    """Pages of one request on their way to the CPU tier, and those that are there, pinned."""

    @property
    def cached(self) -> int:
        """How many of the first pages were cached when it began."""

    @property
    def wanted(self) -> int:
        """How many of them are worth loading."""

    @property
    def asking(self) -> bool:
        """Whether a tier beyond this machine is still asked for more than these."""

    def done(self) -> bool:
        """Whether no more pages come, or all that are wanted have come."""

    def verified(self) -> int:
        """How many of the first pages are checked and pinned."""

    def loadable(self, pages: int) -> bool:
        """Whether a load may bring so many of the first pages, and no more: they are checked and pinned."""

    def outpaced(self) -> bool:
        """Whether computing what has not come takes less time than waiting for it, at its best possible pace."""

    def crowded(self) -> bool:
        """Whether it ended because the CPU tier has no room for its pages."""

    def lapsed(self, within: float = 0.0) -> bool:
        """Whether its pins have ended, or end within so many seconds."""

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """How many of `pages` pages from page `first` on each tier had when it began."""


class Cache(Protocol):
    """What tables of requests need of an engine: `PinningCache`, or a test's."""

    def fetch(self, hashes: PageHashes, pages: int) -> Fetch:
        """Begin to bring the first `pages` pages, as far as they are cached."""

    def cached(self, hashes: PageHashes) -> int:
        """How many of the first pages are cached, on any tier."""

    def keys(self, hashes: PageHashes) -> Sequence[bytes]:
        """The keys of the pages, of the weights that the inference engine has now."""


class Pinned:
    """What is fetched by a prefetch with pins, or by none. `_since`: when it began; `_until`: when its pins end."""

    _prefetch: Prefetch | HybridPrefetch | None

    def __init__(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._until = self._since + seconds

    def lapsed(self, within: float = 0.0) -> bool:
        """Whether its pins have ended, or end within so many seconds."""
        return self._prefetch is not None and time.monotonic() + within >= self._until

    def release(self) -> None:
        """Bring no more, and let go of what is pinned. Twice is fine."""
        if self._prefetch is not None:
            self._prefetch.release()


class PinnedFetch(Pinned):
    """The pages of one request: brought to the CPU tier, checked as they land, and pinned for `seconds` at most."""

    _prefetch: Prefetch | None

    def __init__(self, engine: CacheEngine, hashes: PageHashes, pages: int, seconds: float, salt: str = "") -> None:
        """`pages`: how many of the first pages can be of use. Without a CPU tier, none is brought."""
        super().__init__(seconds)
        self._told_of = engine.told
        self._page_tokens = size = engine.layout.page_tokens
        self._found: Hit = engine.lookup(hashes, salt=salt)
        self._cached = (self._found.tokens + self._found.declined) // size
        self._here = min(pages, self._found.tokens // size)
        self._pages = pages
        useful = _part(self._found, 0, 0, self._here, size)
        self._beyond = False
        if engine.config.cpu is not None and self._here == self._cached < pages:
            names = tuple(engine.pages(hashes, salt)[:pages])
            self._beyond = engine.asks(names[self._here :])
            useful = dataclasses.replace(useful, pages=names) if self._beyond else useful
        begun = bool(useful.pages) and engine.config.cpu is not None
        self._prefetch = engine.prefetch(useful, pin=seconds) if begun else None
        self._gate, self._files = engine.gate, {name for name, kind in engine.tiers.items() if kind == "files"}
        self._slow: list[int] = []  # of the first pages, those that only files had; once that is known

    @property
    def asking(self) -> bool:
        """Whether a tier beyond this machine is still asked for more pages."""
        return self._beyond and self._prefetch is not None and self._prefetch.asking

    @property
    def cached(self) -> int:
        """How many of the first pages were cached when it began, on any tier as far as that is known."""
        return max(self._cached, self._told)

    @property
    def wanted(self) -> int:
        """How many of the first pages are to come: where the CPU tier has no room, those that loads see themselves."""
        return self._here if self._told <= self._here or self.crowded() else min(self._pages, self._told)

    @property
    def _told(self) -> int:
        """How many pages its prefetch has found, where it has asked."""
        return len(self._prefetch.tiers) if self._beyond and self._prefetch is not None else 0

    def done(self) -> bool:
        """Whether no more pages come, or all that are wanted have come."""
        if self._prefetch is None or self._prefetch.done():
            return True
        return not self.asking and self.verified() == self.wanted

    def verified(self) -> int:
        """How many of the first pages are checked and pinned."""
        return 0 if self._prefetch is None else min(self._pages, self._prefetch.verified // self._page_tokens)

    def loadable(self, pages: int) -> bool:
        """Whether these first pages are checked and pinned."""
        return pages <= self.verified()

    def outpaced(self) -> bool:
        """Whether computing what has not come takes less time than waiting for it, at its best possible pace."""
        if self._prefetch is None or not (tiers := self._prefetch.tiers):
            return False
        if not self._slow:
            self._slow = [0, *itertools.accumulate(name in self._files for name in tiers)]
        wanted, verified, size = min(self.wanted, len(self._slow) - 1), self.verified(), self._page_tokens
        begun = self._slow[min(self._prefetch.begun, wanted)]
        left, missing = self._slow[wanted] - begun, max(0, wanted - verified) * size
        return self._gate.outpaced(time.monotonic() - self._since, begun, left, missing, verified * size)

    def crowded(self) -> bool:
        """Whether the CPU tier has no room for its pages."""
        if self._prefetch is None:
            return self._here > 0
        if not self._prefetch.done() or self.verified() >= self._here:
            return False
        return self._prefetch.result(0).end is PrefetchEnd.NO_ROOM

    def unused(self, first: int) -> str:
        """What is known now of its pages from page `first` on, for a line of the log."""
        pages, size = self._found.pages[first:], self._page_tokens
        return words(joined(first * size, size, self._told_of(pages)))

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """How many of `pages` pages from page `first` on each tier had when it began."""
        tiers = self._prefetch.tiers if self._beyond and self._prefetch is not None else ()
        return Counter(max(self._found.tiers, tiers, key=len)[first : first + pages])

    def checked(self, first: int, pages: int) -> Hit:
        """Pages that `verified` counts, for a load that cannot fail. Raises `LoadOrderError` for others."""
        if self._prefetch is None or first < 0 or first + pages > self.verified():
            raise LoadOrderError(
                f"pages {first} to {first + pages} are to be loaded without a check, of {self.verified()} that had one",
                "load what the connector's own scheduler orders",
            )
        hit = self._prefetch.hit(first * self._page_tokens)
        return _part(hit, first, 0, pages, self._page_tokens)

    def unchecked(self, first: int, pages: int) -> Hit:
        """Pages from wherever they are, for a load with a verdict."""
        return _part(self._found, first, first, pages, self._page_tokens)


def _part(hit: Hit, first: int, at: int, pages: int, page_tokens: int) -> Hit:
    """`pages` pages of a hit from its page number `at` on; they begin with page `first` of the request."""
    names, tiers = hit.pages[at : at + pages], hit.tiers[at : at + pages]
    tokens = len(names) * page_tokens
    return dataclasses.replace(hit, start=first * page_tokens, tokens=tokens, pages=names, tiers=tiers, pays=tokens)


class PinningCache:
    """An engine as the `Cache` of a table of requests. `pin_seconds`: how long what was brought is kept at most.

    `engines`: those of all pools, the first of which is `engine`. `salt` is that of the weights which the inference
    engine has now: another one begins with no pages.
    """

    def __init__(self, engine: CacheEngine, pin_seconds: float, *others: CacheEngine) -> None:
        """`others`: the engines of further pools of a hybrid model."""
        self.engine, self.engines = engine, (engine, *others)
        self.salt = ""
        self.pin_seconds = pin_seconds

    def fetch(self, hashes: PageHashes, pages: int) -> PinnedFetch:
        """Begin to bring the first `pages` pages, as far as they are cached and worth loading."""
        return PinnedFetch(self.engine, hashes, pages, self.pin_seconds, self.salt)

    def cached(self, hashes: PageHashes) -> int:
        """How many of the first pages are cached, on any tier. Counts as no use of them."""
        return self.engine.peek(hashes, self.salt) // self.engine.layout.page_tokens

    def keys(self, hashes: PageHashes) -> Sequence[bytes]:
        """The keys of the pages, of the weights that the inference engine has now."""
        return [page.key for page in self.engine.pages(hashes, self.salt)]

    def telling(self, request: str) -> AbstractContextManager[None]:
        """A block in which a request is looked up, so that a line on its missing pages says whose they are."""
        return self.engine.telling(request)

    def unused(self, request: str, fetch: Any, first: int, why: str) -> None:
        """A request computes pages from page `first` on that were cached when it came: for a line of the log."""
        self.engine.tell(lambda: f"request {request}, pages that were cached, {why}: {fetch.unused(first)}")

    def renew_salt(self) -> None:
        """Other weights have come: find no page of before. What had a name of its own is not found again, and goes."""
        old, self.salt = self.salt, fresh_salt()
        try:
            for engine in self.engines if old else ():
                engine.invalidate(*engine.namespaces(old))
        except GdsCacheError as error:  # it has another name by now, and is evicted in time
            log_failure(error)

    def rest(self, seconds: float) -> None:
        """Wait until a load, a store or a prefetch has ended, for so many seconds at most."""
        ready = select.poll()
        for engine in self.engines:
            ready.register(engine.fileno(), select.POLLIN)
        for descriptor, _ in ready.poll(max(1.0, seconds * 1e3)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(descriptor)
