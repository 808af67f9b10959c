"""Moves the chunks of prefetches from SSD to the CPU tier, one request in turn.

The queue decides which request may begin a chunk, and when. A chunk reserves its CPU slots when it begins, is read and
checked as a load's pages are, and waits for no load. Between two chunks a prefetch only holds the names of its pages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdscache.errors import EngineClosedError
from gdscache.limits import EngineLimits
from gdscache.load.loader import Loader
from gdscache.load.plan import LoadPlan, slowest_of
from gdscache.moves import PageStatus, PrefetchEnd, Priority, Steps, failure
from gdscache.pages.keys import Page
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.prefetch.handle import Prefetch
from gdscache.prefetch.queue import MOST, SWEPT, PrefetchedPages, PrefetchQueue, PrefetchRequest
from gdscache.runtime.threads import Flag, Workers, failure_of, log_failure

if TYPE_CHECKING:
    from gdscache.tiers.base import DurableTier
    from gdscache.tiers.manager import TierManager


class Prefetcher:
    """Carries prefetches out: a few threads move chunks, and one waits until the next may begin."""

    def __init__(self, loader: Loader, held: PrefetchedPages, layout: PageLayout, limits: EngineLimits) -> None:
        """`held` hears which prefetched pages loads use."""
        self.layout = layout
        self.deadline = loader.deadline
        self._manager = manager = loader.manager
        self.calls = manager.calls
        self._loader = loader
        self._planner = loader.planner
        self._held = held
        pages, first = (max(1, n // layout.extent_bytes) for n in (limits.prefetch_bytes, limits.prefetch_first))
        self._queue = PrefetchQueue(pages, limits.prefetch_chunks, held, self._ended, first_pages=first)
        self._live: set[PrefetchRequest] = set()
        self._timed: dict[LoadPlan, str] = {}  # chunks under way, and the tier that each measures
        self._requests = 0
        self._ends: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._bytes = 0
        self._changed = loader.changed
        self._closed = False
        self._landing = landing = self._planner.landing
        # without both, prefetches have no work
        both = landing is not None and any(tier.kind == "files" for tier in manager.tiers.values())
        self._unserved = [tier for tier in manager.files if not tier.served]
        self._asking = 0
        self._lane = loader.executor.lane(Priority.PREFETCH, manager.learn, limits.prefetch_chunks if both else 0)
        with contextlib.ExitStack() as undo:
            undo.callback(self._lane.close)
            self._turns = Workers(1 if both else 0, "gdscache-prefetch-turns")
            undo.callback(self._turns.shutdown)
            self._asks = Workers(1 if self._unserved else 0, "gdscache-prefetch-asks")
            undo.pop_all()
        self._turns.submit(self._serve, self._serve)

    def start(
        self, pages: Sequence[Page], start: int = 0, pin: float | None = None, *, whole: bool = False
    ) -> Prefetch:
        """Begin to bring the consecutive cached pages that only slower tiers have to the CPU tier.

        `start`: the token that the first begins with. `pin`: seconds to keep them there at most; `whole`: keep all of
        them, or bring none. If a tier beyond this machine has to be asked for pages, that comes first, in the
        background.
        """
        manager = self._manager
        with manager.lock, contextlib.ExitStack() as undo:
            if self._closed:
                raise EngineClosedError("the engine was closed meanwhile", "open a new one with from_config")
            request = PrefetchRequest(0, pin, whole=whole)
            self._requests += 1
            self._live.add(request)
            undo.callback(self._live.discard, request)
            undo.callback(self._queue.drop, request)
            asked = self._to_ask(pages)
            if asked:
                self._asking += 1
                self._asks.submit(functools.partial(self._ask, request, pages, asked))
            else:
                self._begin(request, pages)
            undo.pop_all()
            return Prefetch(self, request, start)

    def _to_ask(self, pages: Sequence[Page]) -> list[tuple[DurableTier, Sequence[Page]]]:
        """The tiers that may have pages which no index knows of, with these pages. The lock is held."""
        if self._unserved and self._landing is not None and self._asking < MOST:
            rest = pages[len(self._manager.peek(pages)) :]
            if rest:
                return [(tier, rest) for tier in self._unserved if tier.asks(rest)]
        return []

    def _ask(
        self, request: PrefetchRequest, pages: Sequence[Page], asked: Sequence[tuple[DurableTier, Sequence[Page]]]
    ) -> None:
        for tier, rest in asked:
            if request.end is None:
                log_failure(failure_of(functools.partial(tier.ask, rest)))
        with self._manager.lock:
            self._asking -= 1
            if request.end is None:
                error = failure_of(functools.partial(self._begin, request, pages))
                if error is not None:
                    log_failure(error)
                    self._queue.stop(request, PrefetchEnd.ERROR)
        self.calls.ended()

    def _begin(self, request: PrefetchRequest, pages: Sequence[Page]) -> None:
        """Tiers are asked: queue the pages of slow ones. The lock is held."""
        manager, landing, keep = self._manager, self._landing, set[bytes]()
        claim, beyond = None, 0
        manager.pins.end_due()
        with contextlib.ExitStack() as undo:
            found = manager.peek(pages, unserved=True)
            if request.pin is not None:
                claim = manager.pins.claim(pages[: len(found)], request.pin, self.layout.page_tokens, found)
                undo.callback(manager.pins.end, claim)
                held = len(claim.pages)
                if request.whole and held < len(found):
                    manager.pins.end(claim)
                    held = 0
                beyond = len(found) - held
                del found[held:]
            slow = {name for name, tier in manager.tiers.items() if tier.kind == "files"}
            present = min((found.index(name) for name in slow if name in found), default=len(found))
            if landing is None:
                del found[present:]
            if present < len(found) and landing is not None:
                keep = {page.key for page in pages}.union(*(one.index.family(pages[:1]) for one in manager.landings))
            pages = pages[: len(found)]
            request.claim, request.beyond, request.keep = claim, beyond, keep
            request.begin(pages, tuple(found), present)
            self._queue.add(request)
            if request.end is None:  # a thread that wakes up for nothing takes the interpreter from the caller
                self._changed.notify_all()
            undo.pop_all()

    def awaited(self, over: Flag, seconds: float) -> bool:
        start = time.monotonic()
        ended = over.wait(seconds)
        self._manager.measures.waited("pages", time.monotonic() - start)
        return ended

    def seconds(self, tiers: Sequence[str]) -> float | None:
        """Expected seconds to load pages from these tiers; None before each was measured."""
        return self._manager.costs.load_seconds(tiers, self.layout.bytes_in)

    def stop(self, request: PrefetchRequest, why: PrefetchEnd) -> None:
        """`CANCELLED` ends its pins, too."""
        with self._manager.lock:
            self._queue.stop(request, why)
            if why is PrefetchEnd.CANCELLED and request.claim is not None:
                self._manager.pins.end(request.claim)

    @property
    def under_way(self) -> int:
        """Prefetches that have not ended. Takes no lock."""
        return len(self._queue)

    def stats(self) -> dict[str, Any]:
        """Plain data: prefetches by end, pages by status, and prefetched pages that were used, or lost unused."""
        lock, held = self._manager.lock, self._held
        left = held.unused
        while left > 0:
            with lock:
                left -= held.sweep(SWEPT) or left
        with lock:
            return {
                "requests": self._requests,
                "under_way": self.under_way,
                "ended": {end.value: self._ends[end.value] for end in PrefetchEnd},
                "pages": dict(self._pages),
                "bytes": self._bytes,
                "used_pages": held.used,
                "lost_pages": held.lost,
                "unused_pages": held.unused,
                "held_pages": len(held),
                "quota_pages": held.limit,
                **self._manager.pins.describe(),
            }

    def close(self) -> None:
        """Refuse new prefetches, end the present ones, and wait for the chunks under way. May be called twice."""
        with self._manager.lock:
            self._closed = True
            self._stop_all(PrefetchEnd.CLOSED)
            self._changed.notify_all()
        self._asks.shutdown()
        self._turns.shutdown()
        self._lane.close()

    def _serve(self) -> None:
        with self._manager.lock:
            while not self._closed:
                error = failure_of(self._turn)
                if error is not None:
                    log_failure(error)
                    self._stop_all(PrefetchEnd.ERROR)
                    self._changed.wait(_PAUSE_S)  # if turns go on to fail, others get the lock

    def _turn(self) -> None:
        self._pump()
        self._changed.wait(self._queue.wake())

    def _stop_all(self, why: PrefetchEnd) -> None:
        for request in list(self._live):
            self._queue.stop(request, why)

    def _pump(self) -> None:
        manager = self._manager
        manager.pins.end_due()
        while not self._closed:
            measured = all(manager.costs.knows(tier.name) for tier in manager.files if not tier.plain)
            turn = self._queue.next(demand=self._loader.loads > 0, measured=measured)
            if turn is None:
                return
            request, most = turn
            if request not in self._live:
                self._queue.drop(request)
                continue
            chunk, found, then = self._planner.plan_prefetch(request.pages, request.at, most, request.keep)
            begun = time.monotonic()
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self._planner.abandon, chunk)
                there = [request.at + i for i, moves in enumerate(found) if not moves]
                numbers = request.take(found)
                if request.claim is not None:
                    manager.pins.fill(request.claim, there)
                elif chunk.pages:
                    self._held.begin(page.key for page in chunk.pages)
                if chunk.pages:
                    again = functools.partial(self._land_again, request, chunk, numbers)
                    self._lane.start(self._bring(request, chunk, numbers), again)
                on_failure.pop_all()
            if chunk.pages:
                runs = [run for run in chunk.runs if not run.tier.plain] or chunk.runs
                tier, half = slowest_of(runs, manager.tiers)
                if half:
                    self._timed[chunk] = tier
                    manager.busy.begin(tier, begun)
                self._queue.begin(request, chunk)
            elif then == "busy":
                self._queue.park(request)
            else:
                self._queue.begin(request, None)
            if then in _ENDS:
                self._queue.stop(request, _ENDS[then])

    def _bring(self, request: PrefetchRequest, chunk: LoadPlan, numbers: Sequence[int]) -> Steps[None]:
        log_failure((yield from failure(self._loader.bring(chunk))))
        self._landed(request, chunk, numbers)

    def _land_again(self, request: PrefetchRequest, chunk: LoadPlan, numbers: Sequence[int]) -> Steps[None]:
        self._landed(request, chunk, numbers)
        yield from ()

    def _measure(self, chunk: LoadPlan, now: float) -> None:
        """The chunk has landed at `now`. Called behind the next one's begin, so that a busy tier has no pause."""
        name = self._timed.pop(chunk, "")
        if name:
            both = [(tier, chunk.brought(tier)) for tier in (name, name + PLAIN)]  # of one device, in one time
            there = all(pages is not None for _, pages in both)
            nbytes = sum(self.layout.bytes_in(tier) * (pages or 0) for tier, pages in both)
            self._manager.busy.end(name, nbytes if there else None, now)

    def _landed(self, request: PrefetchRequest, chunk: LoadPlan, numbers: Sequence[int]) -> None:
        now = time.monotonic()
        with self._manager.lock, contextlib.ExitStack() as last, contextlib.ExitStack() as on_failure:
            last.callback(self._measure, chunk, now)
            on_failure.callback(self._queue.lose, request, chunk)
            if chunk not in self._queue.chunks:  # called again after a landing that raised
                self._changed.notify_all()
                return
            on_failure.callback(self._planner.abandon, chunk)
            statuses, claim = [], request.claim
            if claim is not None:
                landed = [*map(bool, chunk.loaded())]
                self._manager.pins.fill(claim, itertools.compress(numbers, landed))
            self._planner.abandon(chunk)
            told = chunk.told(range(len(chunk)))
            for page, target, status in zip(chunk.pages, chunk.targets, told, strict=True):
                assert target is not None, "a page that a prefetch brings nowhere"
                good = status is PageStatus.LOADED
                cleared = good and target.dropped
                statuses.append("cleared" if cleared else status.value)
                if claim is None:
                    self._held.land(page.key, target.slot if good and not cleared else None)
            self._pages.update(statuses)
            read = chunk.by_tier(bytes(status == PageStatus.LOADED.value for status in statuses))
            nbytes = sum(pages * self.layout.bytes_in(name) for name, pages in read.items())
            self._bytes += nbytes
            request.land(numbers, statuses, nbytes)
            if "cleared" in statuses:
                self._queue.stop(request, PrefetchEnd.MISSING)
            self._queue.land(chunk, good=_READ.issuperset(statuses), bad=PageStatus.CHECKSUM.value in statuses)
            on_failure.pop_all()
            self._pump()
            if self._queue.wake() is not None:
                self._changed.notify_all()

    def _ended(self, request: PrefetchRequest) -> None:
        assert request.end is not None, "over without a cause"
        live = request in self._live
        self._live.discard(request)
        if live:
            self._ends[request.end.value] += 1
            if request.claim is not None:
                self._manager.pins.keep_run(request.claim)
            request.finish(time.monotonic() - request.since)
            self.calls.ended()


_PAUSE_S = 0.05  # after a turn that failed
_READ = {PageStatus.LOADED.value, PageStatus.CHECKSUM.value}
_ENDS = {"missing": PrefetchEnd.MISSING, "no_room": PrefetchEnd.NO_ROOM}


def held_pages(manager: TierManager, limits: EngineLimits) -> PrefetchedPages:
    indices = [landing.index for landing in manager.landings]

    def slot_of(key: bytes) -> int | None:
        return next((slot for index in indices if (slot := index.slot(key)) is not None), None)

    most = int(limits.prefetch_share * sum(index.slots for index in indices))
    return PrefetchedPages(max(1, most) if indices else 0, slot_of)
