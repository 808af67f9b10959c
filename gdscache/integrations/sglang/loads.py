"""What the linker knows of requests that SGLang looks up and loads. Plain state over a `Cache`; no bytes, no threads.

Nothing of SGLang is imported. A request's pages begin to come to the CPU tier when it is looked up for the first time,
are checked there, and stay pinned. What is promised to SGLang is there, or should be within `wait` seconds; a load then
waits so long for them, and only while no other request runs. A load that is begun has all its pages in the CPU tier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from gdscache.integrations.fetching import ENDING_S, Cache, Fetch
from gdscache.integrations.sglang.pages import PageLinks
from gdscache.pages.keys import PageHashes

LOOK_AGAIN_S = 1.0  # a request that waits is looked up again after this: others may have stored its pages meanwhile
GONE_S = 10.0  # a request that was looked up, and then not for so long while others were, may have been aborted
LOOK_S = 0.001  # how long a load waits for pages before it looks whether it may go on waiting
SOUGHT_KEPT = 4096  # requests whose pages are held; SGLang does not say of all of them that they have gone


@dataclasses.dataclass(slots=True)
class _Sought:
    """A request that waits. `keys`: the pages that were looked up; `looked`: when they were; `asked`: the last time."""

    keys: list[str]
    hashes: PageHashes
    fetch: Fetch
    looked: float
    asked: float

    def place(self, keys: Sequence[str]) -> int | None:
        """Where these keys begin among its own; None where they are others."""
        try:
            first = self.keys.index(keys[0])
        except ValueError:
            return None
        ours = self.keys[first : first + len(keys)]
        return first if len(ours) == len(keys) and ours == list(keys) else None


@dataclasses.dataclass(frozen=True, slots=True)
class QueuedLoad:
    """Pages that are checked and pinned. Whoever takes it releases `fetch`. `blocks()` waits for the numbers of the
    blocks that they go to."""

    rid: str
    fetch: Fetch
    first: int
    pages: int
    blocks: Callable[[], Sequence[int]]

    def hit(self) -> Any:
        """What a load takes."""
        return self.fetch.checked(self.first, self.pages)


class LoadTable:
    """Requests that wait, and loads that were not begun. Not thread-safe: the scheduler is one thread."""

    def __init__(
        self,
        cache: Cache,
        links: PageLinks,
        *,
        wait: float,
        alone: Callable[[], bool],
        rest: Callable[[float], object],
        seconds: Callable[[int], float | None] = lambda pages: None,
        counts: Counter[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait`: seconds, of all loads of a batch together, and of all its lookups. `alone`: whether no other request
        runs. `rest(s)`: wait until something has come, for `s` seconds at most. `seconds(n)`: what bringing so many
        pages should take, None before that was measured."""
        self._cache = cache
        self._links = links
        self._wait = wait
        self._alone = alone
        self._rest = rest
        self._seconds = seconds
        self._clock = clock
        self._sought: OrderedDict[str, _Sought] = OrderedDict()
        self._queued: dict[str, QueuedLoad] = {}
        self._until: dict[str, float] = {}  # when the lookups of this batch, or its loads, have waited long enough
        self.counts: Counter[str] = Counter() if counts is None else counts

    def __len__(self) -> int:
        """Requests of which something is held."""
        return len(self._sought) + len(self._queued)

    def lookup(self, rid: str, keys: Sequence[str]) -> int:
        """How many of the first pages a load may have. Begins to bring what is missing in the CPU tier."""
        self.counts["lookups"] += 1
        if not keys:
            return 0
        sought, first = self._seek(rid, keys)
        fetch = sought.fetch
        self._wait_while(lambda: fetch.asking, "lookups")  # a tier beyond this machine
        there = max(0, min(fetch.verified() - first, len(keys)))
        coming = max(0, min(fetch.wanted - first, len(keys)))
        if coming <= there or fetch.done():
            return there
        expected = self._seconds(coming - there)
        soon = self._wait > 0 and (expected is None or expected <= self._wait) and self._alone()
        return coming if soon else there

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Sequence[int]]]) -> bool:
        """Queue a load of pages that were looked up; False: they are not there, or not in time, and are to be computed.

        `blocks()`, called when the pages are there, gives what waits for the numbers of the blocks that they go to.
        """
        self.cancel(rid)
        sought = self._sought.pop(rid, None)
        first = None if sought is None or not keys else sought.place(keys)
        if sought is None or first is None:
            self.counts["refused"] += 1
            if sought is not None:
                sought.fetch.release()
            return False
        fetch, end = sought.fetch, first + len(keys)
        self._wait_while(lambda: fetch.verified() < end and not fetch.done(), "loads")
        if fetch.verified() < end or fetch.lapsed(ENDING_S):
            self.counts["late"] += 1
            fetch.release()
            return False
        with contextlib.ExitStack() as undo:
            undo.callback(fetch.release)
            self._queued[rid] = QueuedLoad(rid, fetch, first, len(keys), blocks())
            undo.pop_all()
        return True

    def cancel(self, rid: str) -> bool:
        """Drop a load that was not begun. False where there is none."""
        queued = self._queued.pop(rid, None)
        if queued is not None:
            queued.fetch.release()
        return queued is not None

    def take(self) -> list[QueuedLoad]:
        """The loads that are to begin; they are the caller's."""
        queued, self._queued, self._until = list(self._queued.values()), {}, {}
        return queued

    def computed(self, keys: Sequence[str]) -> None:
        """SGLang has these pages: who waits for them finds them there, and what is held of them goes back."""
        if not self._sought:
            return
        have = set(keys)
        for rid in [rid for rid, sought in self._sought.items() if sought.keys[0] in have]:
            self._sought.pop(rid).fetch.release()

    def reset(self) -> None:
        """Forget all requests, and let go of what is held of them."""
        for sought in self._sought.values():
            sought.fetch.release()
        self._sought.clear()
        for queued in self.take():
            queued.fetch.release()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _wait_while(self, on_their_way: Callable[[], bool], who: str) -> None:
        """Wait within `wait`, all of a batch together that are `who`, and only while no other request runs."""
        while on_their_way() and self._alone():
            now = self._clock()
            left = self._until.setdefault(who, now + self._wait) - now
            if left <= 0:
                return
            self._rest(min(left, LOOK_S))

    def _seek(self, rid: str, keys: Sequence[str]) -> tuple[_Sought, int]:
        """The request, and where these keys begin among its pages."""
        now = self._clock()
        sought = self._sought.get(rid)
        first = None if sought is None else sought.place(keys)
        if sought is not None and first is not None and not self._outdated(sought, now):
            self._sought.move_to_end(rid)
            sought.asked = now
            return sought, first
        if sought is not None:
            del self._sought[rid]
            sought.fetch.release()
        self._forget_gone(now)
        hashes = self._links.named(keys)
        sought = _Sought(list(keys), hashes, self._cache.fetch(hashes, len(keys)), now, now)
        self._sought[rid] = sought
        return sought, 0

    def _outdated(self, sought: _Sought, now: float) -> bool:
        """Whether its pins have ended, or others have stored more of its pages meanwhile."""
        if sought.fetch.lapsed(ENDING_S):
            return True
        if sought.fetch.cached >= len(sought.keys) or now < sought.looked + LOOK_AGAIN_S:
            return False
        sought.looked = now
        return self._cache.cached(sought.hashes) > sought.fetch.cached

    def _forget_gone(self, now: float) -> None:
        """SGLang does not say when a request that waits is aborted: let go of those that were not looked up lately.

        One that waits after all begins anew, and finds what has come in the CPU tier.
        """
        while self._sought:
            rid, oldest = next(iter(self._sought.items()))
            if now < oldest.asked + GONE_S and len(self._sought) < SOUGHT_KEPT:
                return
            del self._sought[rid]
            oldest.fetch.release()
