"""The queue of prefetches: turns, chunks, the quota, and causes of ends. No bytes, no threads, no torch.

A prefetch moves in *chunks*, requests in turn. While a load is under way, only one chunk begins every `DEMAND_PAUSE_S`,
so that endless loads cannot starve prefetches. The clock is the caller's.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gdscache.moves import PageStatus, PrefetchEnd
from gdscache.pages.keys import Page
from gdscache.runtime.threads import Flag

if TYPE_CHECKING:
    from gdscache.tiers.pins import Claim

MOST = 1024  # prefetches that are under way or wait
DEMAND_PAUSE_S = 0.1  # seconds from one chunk to the next while loads are under way
PARKED_S = 0.002  # a request that waits for a page of another plan is tried again after this
SWEPT = 1024  # pages that one turn looks up in the tier, to find evicted ones


class PrefetchedPages:
    """The pages that prefetches hold in the CPU tier, on their way or unused, against their quota of `limit` pages.

    A page is *used* by the first load that plans to read it, and *lost* if it left the tier before. `slot_of(key)`: the
    page's slot in the CPU tier now, or None. Evictions are only found by `use` and `sweep`. The caller locks.
    """

    def __init__(self, limit: int, slot_of: Callable[[bytes], int | None]) -> None:
        self.limit = limit
        self.used = 0
        self.lost = 0
        self._slot_of = slot_of
        self._flying: dict[bytes, tuple[int, bool]] = {}  # key -> (moves under way, used already)
        self._unused: OrderedDict[bytes, int] = OrderedDict()  # key -> slot

    def __len__(self) -> int:
        return len(self._flying) + len(self._unused)

    @property
    def room(self) -> int:
        return max(0, self.limit - len(self))

    @property
    def unused(self) -> int:
        return len(self._unused)

    def begin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._unused.pop(key, None) is not None:
                self.lost += 1  # it was evicted, else it would not come again
            ways, used = self._flying.get(key, (0, False))
            self._flying[key] = ways + 1, used

    def land(self, key: bytes, slot: int | None) -> None:
        ways, used = self._flying.pop(key)
        if ways > 1:  # it came, was evicted, and was begun again before this call
            self._flying[key] = ways - 1, used and slot is None
            if slot is not None:
                self.used += used
                self.lost += not used
        elif slot is not None and used:
            self.used += 1
        elif slot is not None:
            self._unused[key] = slot

    def use(self, key: bytes, slot: int | None) -> None:
        """A load reads the page: from this slot of the CPU tier, or from another tier (None)."""
        if key in self._flying:
            self._flying[key] = self._flying[key][0], True
            return
        had = self._unused.pop(key, None)
        if had is not None:
            if had == slot:
                self.used += 1
            else:
                self.lost += 1

    def sweep(self, most: int) -> int:
        """Look up to `most` unused pages in the tier, the longest unchecked first. Returns the number of pages
        checked."""
        unused = self._unused
        looked = min(most, len(unused))
        for _ in range(looked):
            key = next(iter(unused))
            if self._slot_of(key) == unused[key]:
                unused.move_to_end(key)
            else:
                del unused[key]
                self.lost += 1
        return looked


class PrefetchRequest:
    """A prefetch: its turns in the queue, its pages and their progress. The manager's lock guards it.

    `left`: pages that have not had their turn. `end`: why it ends; it is over when its chunks have landed.
    `pin`: seconds that the pages are pinned; None: no pins. Requests with pins are bounded by these, not by the quota.
    `whole`: all pages are pinned, or none. `bad`: a page's bytes differed from the stored ones. `chunks`: begun so far.
    `keep`: keys that its own slots may not evict. `claim`: its pins; they had no room for `beyond` more pages that were
    found.
    """

    def __init__(self, left: int = 0, pin: float | None = None, *, whole: bool = False) -> None:
        self.left = left
        self.pin, self.whole = pin, whole
        self.bad = False
        self.since = time.monotonic()  # when it was asked for
        self.parked: float | None = None  # skipped until this time
        self.swept = 0  # unused pages swept since it found the quota used up
        self.chunks = 0
        self.end: PrefetchEnd | None = None
        self.begun = False
        self.pages: Sequence[Page] = ()
        self.tiers: tuple[str, ...] = ()
        self.claim: Claim | None = None
        self.beyond = 0
        self.keep: set[bytes] = set()
        self.at = self.good = 0  # pages before `at` have had their turn; all before `good` are present
        self.counts: Counter[str] = Counter()
        self.nbytes, self.seconds = 0, 0.0
        self.over = Flag()
        self._lacking: set[int] = set()

    @property
    def until(self) -> float | None:
        """When its pins end, by the queue's clock; None: no pins."""
        return None if self.claim is None else self.claim.until

    def begin(self, pages: Sequence[Page], tiers: tuple[str, ...], present: int) -> None:
        """The pages are on these tiers, the first `present` of them in the landing tier or faster."""
        self.pages, self.tiers, self.begun = pages, tiers, True
        self.at = self.good = present
        self.left = len(pages) - present
        if present:
            self.counts["present"] = present

    def take(self, found: Sequence[bool]) -> list[int]:
        """The next pages are present, or begin to move if `found` says so. Returns the numbers of the moving ones."""
        moving = [self.at + i for i, moves in enumerate(found) if moves]
        if len(found) > len(moving):
            self.counts["present"] += len(found) - len(moving)
        self.at += len(found)
        self.left = len(self.pages) - self.at
        self._lacking.update(moving)
        self._advance()
        return moving

    def land(self, numbers: Sequence[int], statuses: Sequence[str], nbytes: int) -> None:
        """Pages have ended, of which `nbytes` were read and found good."""
        self.counts.update(statuses)
        self.nbytes += nbytes
        good = PageStatus.LOADED.value
        self._lacking.difference_update(n for n, status in zip(numbers, statuses, strict=True) if status == good)
        self._advance()

    def _advance(self) -> None:
        while self.good < self.at and self.good not in self._lacking:
            self.good += 1

    def finish(self, seconds: float) -> None:
        self.seconds, self.keep = seconds, set()
        if self.left + self.beyond:
            self.counts["left"] = self.left + self.beyond
        self.over.set()


class PrefetchQueue:
    """Gives requests their turns. `ended` is called once for each request that is over, and again after `lose`. The
    caller locks. `chunks`: those under way, by the caller's object for each.

    Requests take turns, with chunks of up to `chunk_pages`, `concurrent` at once: while one waits for its turn, no
    other gets two chunks more. `first_pages`: of a request's first chunk while a tier is not measured; each next one
    doubles. So a slow tier is soon measured.
    """

    def __init__(
        self,
        chunk_pages: int,
        concurrent: int,
        pages: PrefetchedPages,
        ended: Callable[[PrefetchRequest], None],
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST,
        *,
        first_pages: int = 1,
    ) -> None:
        self._most = most
        self._first_pages = first_pages
        self._concurrent = concurrent
        self._chunk_pages = chunk_pages
        self._pages = pages
        self._ended = ended
        self._clock = clock
        self._turns: deque[PrefetchRequest] = deque()  # requests that may begin another chunk, the next first
        self._live: set[PrefetchRequest] = set()
        self._held_back: float | None = None  # when loads began to hold chunks back, or when they last let one go
        self._again = False
        self.chunks: dict[object, PrefetchRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: PrefetchRequest) -> None:
        """Add a request whose pages are known; it may be over at once."""
        self._live.add(request)
        if not request.left:
            self.stop(request, _through(request))
        elif len(self._live) > self._most:
            self.stop(request, PrefetchEnd.QUEUE_FULL)
        else:
            self._turns.append(request)

    def next(self, *, demand: bool, measured: bool = True) -> tuple[PrefetchRequest, int] | None:
        """The request that may begin a chunk now, and the most pages for it. `demand`: a load is under way. `measured`:
        every tier's speed is known.

        The caller answers with `begin`, `park` or `stop`. Ends requests whose time is up, or for which the quota is
        used up.
        """
        now = self._clock()
        self._again = False
        for over in [r for r in self._turns if r.until is not None and now >= r.until]:
            self.stop(over, PrefetchEnd.DEADLINE)
        while (request := self._ready(now)) is not None:
            if self._waits(now, demand=demand):
                return None
            chunk = self._chunk_pages if measured else min(self._chunk_pages, self._first_pages << request.chunks)
            most = min(chunk, request.left, self._pages.room if request.until is None else request.left)
            if most:
                request.swept = 0
                return request, most
            if request.swept >= self._pages.unused:
                self.stop(request, PrefetchEnd.QUOTA)
                continue
            request.swept += self._pages.sweep(SWEPT)
            if not self._pages.room and request.swept < self._pages.unused:
                self._again = True  # leave the lock to others
                return None
        self._held_back = None
        return None

    def begin(self, request: PrefetchRequest, chunk: object | None) -> None:
        """The request has begun a chunk, or (None) skipped pages that are present, and has up to `request.left` pages
        to go."""
        if chunk is not None:
            request.chunks += 1
            self.chunks[chunk] = request
            if self._held_back is not None:
                self._held_back = self._clock()
            self._turns.remove(request)
            if request.left:
                self._turns.append(request)
        elif not request.left:
            self._turns.remove(request)
        self._complete(request)

    def park(self, request: PrefetchRequest) -> None:
        """It keeps its turn until another plan has brought the next page."""
        request.parked = self._clock() + PARKED_S

    def land(self, chunk: object, *, good: bool, bad: bool = False) -> None:
        """A chunk has ended; the request too, unless it is good: all its pages could be read.

        `bad`: the bytes of some pages differed from the stored ones. The pages behind them come all the same: a
        request that computes these pages again stores the pages that their tiers lack, so every bad page must have
        left its tier by then.
        """
        request = self.chunks.pop(chunk)
        request.bad = request.bad or bad
        if good and request.end is None:
            self._complete(request)
        else:
            self.lose(request, chunk)

    def lose(self, request: PrefetchRequest, chunk: object) -> None:
        """The landing of a chunk raised, perhaps behind `land`: the request ends."""
        self.chunks.pop(chunk, None)
        if request.end is None:
            self.stop(request, PrefetchEnd.ERROR)
        else:
            self._end_if_over(request)

    def stop(self, request: PrefetchRequest, why: PrefetchEnd) -> None:
        """Begin no more chunks of it; it is over when the current one is. A request that has ended keeps its cause."""
        if request.end is None:
            request.end = why
            if request in self._turns:
                self._turns.remove(request)
            self._end_if_over(request)

    def drop(self, request: PrefetchRequest) -> None:
        """Forget a request whose begin or end an exception has interrupted. Its end is not told."""
        if request in self._turns:
            self._turns.remove(request)
        self._live.discard(request)

    def wake(self) -> float | None:
        """Seconds until the clock alone may change the answer of `next`; None: it cannot."""
        if self._again:
            return 0.0
        times = [at for r in self._turns for at in (r.parked, r.until) if at is not None]
        if self._held_back is not None and not self.chunks:
            times.append(self._held_back + DEMAND_PAUSE_S)
        return max(0.0, min(times) - self._clock()) if times else None

    def _ready(self, now: float) -> PrefetchRequest | None:
        ready = None
        for request in self._turns:
            if request.parked is not None and now >= request.parked:
                request.parked = None
            if request.parked is None and ready is None:
                ready = request
        return ready

    def _waits(self, now: float, *, demand: bool) -> bool:
        if not demand:
            self._held_back = None
            return len(self.chunks) >= self._concurrent
        if self._held_back is None:
            self._held_back = now
        return bool(self.chunks) or now < self._held_back + DEMAND_PAUSE_S

    def _end_if_over(self, request: PrefetchRequest) -> None:
        if request not in self.chunks.values():
            self._live.discard(request)
            self._ended(request)

    def _complete(self, request: PrefetchRequest) -> None:
        if not request.left and request not in self.chunks.values():
            self.stop(request, _through(request))


def _through(request: PrefetchRequest) -> PrefetchEnd:
    if request.bad:
        return PrefetchEnd.ERROR
    return PrefetchEnd.NO_ROOM if request.beyond else PrefetchEnd.COMPLETE
