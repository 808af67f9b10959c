"""The linker's requests, from SGLang's lookup to its load. Plain state over a cache, without bytes or threads.

A request's first lookup starts to bring its pages to the CPU tier, where they are checked and pinned. Only pages there
are promised to SGLang. A lookup waits for pages on their way, at most `wait` seconds, and only while no other request
runs. Pins outlast promises, so that loads find their pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from gdscache.errors import LoadOrderError
from gdscache.integrations.fetching import ENDING_S, Fetch
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.pages.keys import PageHashes
from gdscache.ranks.executor import UNORDERED_S

LOOK_AGAIN_S = 1.0  # a waiting request is looked up again after this time: other requests may have stored its pages
GONE_S = 10.0  # a request without lookups for this time, while others had some, may have been aborted
LOOK_S = 0.001  # the longest single wait in a lookup
LOOKED_S = 2 * ENDING_S  # seconds, beside the wait, that pins outlast the lookup that promises their pages
# Seconds that pins last beyond `pin_seconds`: a process that stops between a lookup and its load, this one or another
# rank's that SGLang waits for, breaks no promise.
STOPPED_S = UNORDERED_S
SOUGHT_KEPT = 4096  # most requests whose pages are held; SGLang does not report the end of each request


@dataclasses.dataclass(slots=True)
class _Sought:
    """A waiting request. `keys`: of its pages. `looked`: time of the last search in the tiers. `asked`: time of the
    last lookup. `batch`: number of batches begun by then."""

    keys: list[str]
    hashes: PageHashes
    fetch: Fetch
    looked: float
    asked: float
    batch: int

    def place(self, keys: Sequence[str]) -> int | None:
        """The place of consecutive keys among the request's. A key names all pages before it, so the last one
        decides."""
        try:
            first = self.keys.index(keys[0])
        except ValueError:
            return None
        last = first + len(keys) - 1
        return first if last < len(self.keys) and self.keys[last] == keys[-1] else None


@dataclasses.dataclass(frozen=True, slots=True)
class QueuedLoad:
    """Checked and pinned pages, which the taker releases. `fetch`: None if the leader has them, or they have gone.
    `blocks()` waits for the numbers of their target blocks."""

    rid: str
    fetch: Fetch | None
    first: int
    pages: int
    blocks: Callable[[], Any]

    def hit(self) -> Any:
        if self.fetch is None:
            raise LoadOrderError(
                f"{self.pages} pages that were promised are not there: the requests of their batch are aborted",
                "raise pin_seconds in linker_extra_config",
            )
        return self.fetch.checked(self.first, self.pages)

    def release(self) -> None:
        if self.fetch is not None:
            self.fetch.release()


class RankTable:
    """Loads that have not begun, on a rank that follows the leader's promises. Not thread-safe: the scheduler is one
    thread."""

    def __init__(self, counts: Counter[str]) -> None:
        self._queued: dict[str, QueuedLoad] = {}
        self.counts = counts

    def __len__(self) -> int:
        return len(self._queued)

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Any]]) -> bool:
        """Queue a load of promised pages. False if they were not promised, or their pins have ended.

        `blocks()` returns a function that waits for the numbers of their target blocks.
        """
        self.cancel(rid)
        self._queued[rid] = QueuedLoad(rid, None, 0, len(keys), blocks())
        return True

    def cancel(self, rid: str) -> bool:
        """Drop a load that has not begun. False if there is none."""
        queued = self._queued.pop(rid, None)
        if queued is not None:
            queued.release()
        return queued is not None

    def take(self) -> list[QueuedLoad]:
        queued, self._queued = list(self._queued.values()), {}
        return queued

    def computed(self, keys: Sequence[str]) -> None:
        """SGLang has these pages: release the fetches of requests that begin with one of them, since they find it
        there."""

    def reset(self) -> None:
        for queued in self.take():
            queued.release()


class LoadTable(RankTable):
    """Waiting requests, and their loads."""

    def __init__(
        self,
        cache: Any,
        links: PageLinks,
        *,
        wait: float,
        alone: Callable[[], bool],
        ranked: bool = False,
        counts: Counter[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cache`: a `SinglePool` or `SeveralPools`. `wait`: seconds, for all lookups of a batch together. `alone()`:
        whether no other request runs. `ranked`: other ranks load promised pages too. So a load whose pages have gone is
        queued, and fails, because the others begin it."""
        super().__init__(Counter() if counts is None else counts)
        self._cache = cache
        self._links = links
        self._wait = wait
        self._alone = alone
        self._ranked = ranked
        self._clock = clock
        self._sought: OrderedDict[str, _Sought] = OrderedDict()
        self._batch = 0  # batches begun so far
        self._until: float | None = None  # the end of the waits for the next one

    def __len__(self) -> int:
        return len(self._sought) + len(self._queued)

    def lookup(self, rid: str, keys: Sequence[str]) -> int:
        """The number of the first pages that a load may have: they are checked and pinned. Begins to bring pages that
        the CPU tier lacks, and waits for pages that should come in time."""
        self.counts["lookups"] += 1
        found = self._seek(rid, keys) if keys else None
        if found is None:
            return 0
        fetch, first = found[0].fetch, found[1]
        self._wait_while(lambda: fetch.asking)  # a tier beyond this machine
        end = min(fetch.wanted, first + len(keys))
        if fetch.verified() < end and not fetch.done() and self._soon(end - fetch.verified()):
            self._wait_while(lambda: fetch.verified() < end and not fetch.done())
            self.counts["late"] += fetch.verified() < end
        return max(0, min(fetch.verified() - first, len(keys)))

    def fetch(self, rid: str, keys: Sequence[str]) -> tuple[Fetch, int] | None:
        """The fetch of a request that was looked up, and the place of these keys among its pages."""
        sought = self._sought.get(rid)
        first = None if sought is None or not keys else sought.place(keys)
        return None if sought is None or first is None else (sought.fetch, first)

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Any]]) -> bool:
        self.cancel(rid)
        found, sought = self.fetch(rid, keys), self._sought.pop(rid, None)
        with contextlib.ExitStack() as undo:
            if sought is not None:
                undo.callback(sought.fetch.release)
            if found is None or not found[0].loadable(found[1] + len(keys)):
                self.counts["refused"] += 1
                return self._ranked and super().load(rid, keys, blocks)
            self._queued[rid] = QueuedLoad(rid, *found, len(keys), blocks())
            undo.pop_all()
        return True

    def take(self) -> list[QueuedLoad]:
        self._until = None
        self._batch += 1
        return super().take()

    def computed(self, keys: Sequence[str]) -> None:
        if not self._sought:
            return
        have = set(keys)
        for rid in [rid for rid, sought in self._sought.items() if sought.keys[0] in have]:
            self._sought.pop(rid).fetch.release()

    def reset(self) -> None:
        for sought in self._sought.values():
            sought.fetch.release()
        self._sought.clear()
        super().reset()

    def _left(self) -> float:
        """Seconds that lookups for this batch may still wait."""
        now = self._clock()
        self._until = now + self._wait if self._until is None else self._until
        return self._until - now

    def _soon(self, pages: int) -> bool:
        expected, left = self._cache.seconds(pages), self._left()
        return left > 0 and self._alone() and (expected is None or expected <= left)

    def _wait_while(self, on_their_way: Callable[[], bool]) -> None:
        """Wait, up to `wait` seconds for all lookups of a batch together, and only while no other request runs."""
        while on_their_way() and self._alone():
            left = self._left()
            if left <= 0:
                return
            self._cache.rest(min(left, LOOK_S))

    def _seek(self, rid: str, keys: Sequence[str]) -> tuple[_Sought, int] | None:
        """The request, and the place of these keys among its pages. None if too many requests wait."""
        now = self._clock()
        sought = self._sought.get(rid)
        first = None if sought is None else sought.place(keys)
        if sought is not None and first is not None and not self._outdated(sought, first, len(keys), now):
            self._sought.move_to_end(rid)
            sought.asked, sought.batch = now, self._batch
            return sought, first
        if sought is not None:
            self._sought.pop(rid).fetch.release()
        self._forget_gone(now)
        if len(self._sought) >= SOUGHT_KEPT:
            return None
        hashes = self._links.named(keys)
        sought = _Sought(list(keys), hashes, self._cache.fetch(hashes, len(keys)), now, now, self._batch)
        self._sought[rid] = sought
        return sought, 0

    def _outdated(self, sought: _Sought, first: int, pages: int, now: float) -> bool:
        """Whether the request's pins have ended, fewer pages are asked for, the gate has declined some of them when
        SGLang had fewer itself, or other requests have stored more of them."""
        fetch = sought.fetch
        if fetch.lapsed(STOPPED_S + LOOKED_S + self._wait) or first + pages < fetch.wanted:
            return True
        if first and fetch.wanted < min(fetch.cached, len(sought.keys)):
            return True
        if fetch.cached >= len(sought.keys) or now < sought.looked + LOOK_AGAIN_S:
            return False
        sought.looked = now
        return bool(self._cache.cached(sought.hashes) > fetch.cached)

    def _forget_gone(self, now: float) -> None:
        """Release requests without recent lookups, because SGLang does not report aborts of waiting ones; but none that
        may be in the next batch.

        A request that still waits begins anew, and finds its pages in the CPU tier.
        """
        while self._sought:
            rid, oldest = next(iter(self._sought.items()))
            if oldest.batch == self._batch or (now < oldest.asked + GONE_S and len(self._sought) < SOUGHT_KEPT):
                return
            self._sought.pop(rid).fetch.release()
