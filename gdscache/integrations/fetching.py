"""Fetches of waiting requests: their pages come to the CPU tier, are checked there, and are pinned. In a hybrid model
these are all pages that a hit needs in all groups, or none."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import GdsCacheError, LoadOrderError
from gdscache.groups.names import Chain, GroupNames
from gdscache.integrations.weights import fresh_salt
from gdscache.moves import PrefetchEnd
from gdscache.pages.hit import Hit, joined, words
from gdscache.pages.keys import PageHashes
from gdscache.runtime.threads import Flag, log_failure

if TYPE_CHECKING:
    from gdscache.engine.engine import CacheEngine
    from gdscache.engine.hybrid_handles import HybridHit, HybridPrefetch
    from gdscache.prefetch.handle import Prefetch


ENDING_S = 5.0  # seconds; pins that end sooner are too old for a new load
_CROWDED = PrefetchEnd.NO_ROOM, PrefetchEnd.QUEUE_FULL


class Pinned(abc.ABC):
    """Pages of one request on their way to the CPU tier, and those pinned there for `seconds` at most, by a prefetch or
    by none. `_since`: its begin; `_until`: the end of its pins."""

    _prefetch: Prefetch | HybridPrefetch | None

    def __init__(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._until = self._since + seconds

    @property
    def asking(self) -> bool:
        """Whether a tier beyond this machine is still asked for more pages."""
        return False

    @property
    @abc.abstractmethod
    def wanted(self) -> int:
        """The number of the first pages that are worth loading."""

    @abc.abstractmethod
    def verified(self) -> int:
        """The number of the first pages that are checked and pinned."""

    def done(self) -> bool:
        """Whether no more pages come, or all wanted ones have come."""
        if self._prefetch is None or self._prefetch.done():
            return True
        return not self.asking and self.verified() == self.wanted

    def lapsed(self, within: float = 0.0) -> bool:
        """Whether the pins have ended, or end within `within` seconds."""
        return self._prefetch is not None and time.monotonic() + within >= self._until

    def release(self) -> None:
        """Bring no more, and release the pins. Repeated calls are fine."""
        if self._prefetch is not None:
            self._prefetch.release()


class PinnedFetch(Pinned):
    """The first pages of one request."""

    _prefetch: Prefetch | None

    def __init__(
        self, engine: CacheEngine, hashes: PageHashes, pages: int, seconds: float, salt: str = "", local: int = 0
    ) -> None:
        """`pages`: the most pages of use. `local`: of these, the first ones that the inference engine has; they are
        cached here too. Without a CPU tier, none is brought."""
        super().__init__(seconds)
        self._told_of = engine.told
        self._page_tokens = size = engine.layout.page_tokens
        self._local = local
        self._found: Hit = engine.lookup(hashes, local * size, salt)
        self._cached = local + (self._found.tokens + self._found.declined) // size
        self._here = min(pages, local + self._found.tokens // size)
        self._pages = pages
        useful = _part(self._found, local, 0, self._here - local, size)
        self._beyond = False
        if engine.config.cpu is not None and self._here == self._cached < pages:
            names = tuple(engine.pages(hashes, salt)[local:pages])
            self._beyond = engine.asks(names[self._here - local :])
            useful = dataclasses.replace(useful, pages=names) if self._beyond else useful
        begun = bool(useful.pages) and engine.config.cpu is not None
        self._prefetch = engine.prefetch(useful, pin=seconds) if begun else None
        sizes = {name: engine.layout.bytes_in(name) * (kind == "files") for name, kind in engine.tiers.items()}
        self._gate, self._sizes = engine.gate, sizes
        self._slow: list[int] = []  # running bytes of the first pages that only files had, once they are known

    @property
    def asking(self) -> bool:
        return self._beyond and self._prefetch is not None and self._prefetch.asking

    @property
    def cached(self) -> int:
        """The number of the first pages that were cached at the fetch's begin."""
        return max(self._cached, self._told)

    @property
    def wanted(self) -> int:
        """Without room in the CPU tier: those that a load sees itself."""
        return self._here if self._told <= self._here or self.crowded() else min(self._pages, self._told)

    @property
    def _told(self) -> int:
        """The number of pages that the prefetch has found, if it asked."""
        return self._local + len(self._prefetch.tiers) if self._beyond and self._prefetch is not None else 0

    def verified(self) -> int:
        there = 0 if self._prefetch is None else self._prefetch.verified // self._page_tokens
        return min(self._pages, self._local + there)

    def loadable(self, pages: int) -> bool:
        """Whether a load may bring exactly this number of the first pages: they are checked and pinned."""
        return pages <= self.verified()

    def outpaced(self) -> bool:
        """Whether computing the missing pages takes less time than waiting for them at their best possible pace."""
        if self._prefetch is None or not (tiers := self._prefetch.tiers):
            return False
        if not self._slow:
            self._slow = [0, *itertools.accumulate(self._sizes[name] for name in tiers)]
        wanted, verified, size = min(self.wanted - self._local, len(self._slow) - 1), self.verified(), self._page_tokens
        begun = self._slow[min(self._prefetch.begun, wanted)]
        left, missing = self._slow[wanted] - begun, max(0, self._local + wanted - verified) * size
        return self._gate.outpaced(time.monotonic() - self._since, begun, left, missing, verified * size)

    def crowded(self) -> bool:
        """Whether the fetch ended because the CPU tier, or the queue of prefetches, has no room for its pages."""
        if self._prefetch is None:
            return self._here > self._local
        if not self._prefetch.done() or self.verified() >= self._here:
            return False
        return self._prefetch.result(0).end in _CROWDED

    def unused(self, first: int) -> str:
        """The present state of the pages from page `first` on, for a log line."""
        pages, size = self._found.pages[first - self._local :], self._page_tokens
        return words(joined(first * size, size, self._told_of(pages)))

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """For `pages` pages from page `first` on: the number that each tier had at the fetch's begin."""
        tiers = self._prefetch.tiers if self._beyond and self._prefetch is not None else ()
        at = first - self._local
        return Counter(max(self._found.tiers, tiers, key=len)[at : at + pages])

    def checked(self, first: int, pages: int) -> Hit:
        """Pages counted by `verified`, for a load that cannot fail. Raises `LoadOrderError` for others."""
        if self._prefetch is None or first < self._local or first + pages > self.verified():
            raise LoadOrderError(
                f"pages {first} to {first + pages} are to be loaded without a check, of {self.verified()} that had one",
                "load the pages that the connector's own scheduler orders",
            )
        hit = self._prefetch.hit(first * self._page_tokens)
        return _part(hit, first, 0, pages, self._page_tokens)

    def unchecked(self, first: int, pages: int) -> Hit:
        """Pages from any tier, for a load with a verdict."""
        return _part(self._found, first, first - self._local, pages, self._page_tokens)


def _part(hit: Hit, first: int, at: int, pages: int, page_tokens: int) -> Hit:
    """`pages` pages of a hit from its page number `at` on, which begin with page `first` of the request."""
    names, tiers = hit.pages[at : at + pages], hit.tiers[at : at + pages]
    tokens = len(names) * page_tokens
    return dataclasses.replace(hit, start=first * page_tokens, tokens=tokens, pages=names, tiers=tiers, pays=tokens)


class GroupFetch(Pinned):
    """See `PinnedFetch`. A page is `alignment` tokens of all groups; the cached pages are wanted and verified as a
    whole."""

    wanted = 0
    _prefetch: HybridPrefetch | None

    def __init__(
        self,
        engine: HybridEngine,
        names: GroupNames,
        most: int,
        tokens: int,
        seconds: float,
        start: int = 0,
        local: int = 0,
        before: int = 0,
    ) -> None:
        """`most`: the greatest useful end of a hit, in tokens. `tokens`: of the request. `start`: tokens before page 0
        of the fetch. `local`: its first pages that the inference engine has; they are cached here too. `before`: tokens
        before all these."""
        super().__init__(seconds)
        self._local, start = local, start + local * engine.alignment
        self.found: HybridHit = engine.lookup_named(names, most, tokens, start, before)
        self.parted = self.found.parted  # grows with other requests' stores while this one waits
        self.cached = local + (self.found.tokens + self.found.declined) // engine.alignment
        self.wanted = local + self.found.tokens // engine.alignment
        begun = any(self.pages) and engine.config.cpu is not None
        self._prefetch = engine.prefetch(self.found, pin=seconds) if begun else None
        self._engine, self._gate, self._engines = engine, engine.gate, engine.engines

    @property
    def pages(self) -> Sequence[Chain]:
        """The hit's pages in each pool, in the order of a load."""
        return self.found.order

    def verified(self) -> int:
        """`wanted` if all pages are checked and pinned, else none."""
        there = not any(self.pages) if self._prefetch is None else self._prefetch.verified
        return self.wanted if there else self._local

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
        took = time.monotonic() - self._since
        return self._gate.outpaced(took, begun, slow - begun, self.found.tokens, self.found.start)

    def crowded(self) -> bool:
        if self._prefetch is None:
            return any(self.pages)
        if not self._prefetch.done() or self.verified() == self.wanted:
            return False
        return any(report.end in _CROWDED for report in self._prefetch.result(0))

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


class PinningCache:
    """An engine as the cache of a table of requests. `pin_seconds`: the longest time of a pin. `engines`: of all
    pools; the first is `engine`. `salt`: of the present weights; a new one begins without pages."""

    def __init__(self, engine: CacheEngine | HybridEngine, pin_seconds: float) -> None:
        self.whole, self.engines = engine, engine.engines if isinstance(engine, HybridEngine) else [engine]
        self.engine = self.engines[0]
        self.salt = ""
        self.pin_seconds = pin_seconds
        self._ends: list[Flag] = []

    def fetch(self, hashes: PageHashes, pages: int, local: int = 0) -> Fetch:
        """Begin to bring the first `pages` pages, as far as they are cached; but the first `local` ones, see
        `PinnedFetch`."""
        return PinnedFetch(self.engine, hashes, pages, self.pin_seconds, self.salt, local)

    def cached(self, hashes: PageHashes) -> int:
        """The number of the first pages that are cached, on any tier. Does not count as a use."""
        return self.engine.peek(hashes, self.salt) // self.engine.layout.page_tokens

    def keys(self, hashes: PageHashes) -> Sequence[bytes]:
        """The keys of the pages, for the inference engine's present weights."""
        return [page.key for page in self.engine.pages(hashes, self.salt)]

    def telling(self, request: str) -> AbstractContextManager[None]:
        """A block for the lookup of a request, so that log lines on its missing pages name it."""
        return self.engine.telling(request)

    def unused(self, request: str, fetch: Any, first: int, why: str) -> None:
        """Log cached pages from page `first` on that a request computes."""
        self.engine.tell(lambda: f"request {request}, pages that were cached, {why}: {fetch.unused(first)}")

    def waited(self, seconds: float) -> None:
        """A request has waited for its pages to come to the CPU tier."""
        self.engine.observe_wait(seconds)

    def renew_salt(self) -> None:
        """The weights have changed: find none of their pages. Pages under an earlier salt of our own are dropped."""
        old, self.salt = self.salt, fresh_salt()
        try:
            for engine in self.engines if old else ():
                engine.invalidate(*engine.namespaces(old))
        except GdsCacheError as error:  # the salt has changed already, and its pages are evicted in time
            log_failure(error)

    def rest(self, seconds: float) -> None:
        """Wait until a load, a store or a prefetch has ended since the last call, for `seconds` at most."""
        over, ends = Flag(), self._ends or [engine.calls.bell.next for engine in self.engines]
        for end in ends:
            end.watch(over)
        over.wait(seconds)
        for end in ends:
            end.forget(over)
        self._ends = [engine.calls.bell.next for engine in self.engines]
