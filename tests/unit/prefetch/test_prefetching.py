"""The queue and the quota of prefetches against slow models of themselves, by a clock of their own."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gdscache.prefetch import queue as prefetching
from gdscache.prefetch.queue import (
    DEMAND_PAUSE_S,
    PARKED_S,
    PrefetchedPages,
    PrefetchEnd,
    PrefetchQueue,
    PrefetchRequest,
)

# -- the quota's ledger ----------------------------------------------------------------------------------------------


keys = st.integers(0, 7).map(lambda n: bytes([n]))
steps = st.lists(st.tuples(st.sampled_from(["begin", "land", "fail", "use", "evict", "sweep"]), keys), max_size=80)


@given(steps)
def test_every_prefetched_page_is_used_or_lost_or_still_held(actions: list[tuple[str, bytes]]) -> None:
    """The model knows at once when a page is evicted; the ledger finds out when somebody looks."""
    tier: dict[bytes, int] = {}  # what the CPU tier has, by slot
    slots = iter(range(1000))
    held = PrefetchedPages(8, tier.get)
    flying: dict[bytes, bool] = {}
    unused: set[bytes] = set()
    used = gone = 0
    for action, key in actions:
        if action == "begin" and key not in flying and key not in tier:
            held.begin([key])
            flying[key] = False
        elif action in ("land", "fail") and key in flying:
            good = action == "land"
            if good:
                tier[key] = next(slots)
            held.land(key, tier[key] if good else None)
            if flying.pop(key):
                used += good
            elif good:
                unused.add(key)
        elif action == "use" and (key in flying or key in tier):
            held.use(key, tier.get(key))
            if key in flying:
                flying[key] = True
            elif key in unused:
                unused.remove(key)
                used += 1
        elif action == "evict" and key in tier:
            del tier[key]
            if key in unused:
                unused.remove(key)
                gone += 1
        elif action == "sweep":
            assert held.sweep(3) <= 3
        assert len(held) >= len(flying) + len(unused), "it holds more than it says"
        assert held.used == used
        assert held.lost <= gone
    held.sweep(100)
    assert (len(held), held.unused, held.lost) == (len(flying) + len(unused), len(unused), gone)
    assert held.room == 8 - len(held)


def test_a_page_that_came_back_by_another_way_was_lost_before() -> None:
    tier = {b"a": 1}
    held = PrefetchedPages(4, tier.get)
    held.begin([b"a"])
    held.land(b"a", 1)
    tier[b"a"] = 2  # evicted, and stored again
    held.use(b"a", 2)
    assert (held.used, held.lost, len(held)) == (0, 1, 0)
    held.use(b"a", 2)
    assert (held.used, held.lost, len(held)) == (0, 1, 0)


# -- the queue against a slow model of itself -------------------------------------------------------------------------


def test_a_page_that_left_before_its_landing_was_told_may_come_again() -> None:
    """A chunk's pages are there, and may be evicted and begun again, a moment before its end is told."""
    for used, slots, expected in (
        (False, (5, 6), (0, 1, 1)),
        (True, (5, 6), (1, 0, 1)),
        (True, (None, 6), (1, 0, 0)),
        (False, (None, None), (0, 0, 0)),
        (False, (5, None), (0, 1, 0)),
    ):
        held = PrefetchedPages(8, {b"a": 6}.get)
        held.begin([b"a"])
        if used:
            held.use(b"a", 5)
        held.begin([b"a"])
        assert len(held) == 1
        for slot in slots:
            held.land(b"a", slot)
        assert (held.used, held.lost, held.unused) == expected
        assert len(held) == held.unused


class Queue(RuleBasedStateMachine):
    """Requests, turns, landings, evictions and time in any order. The model has no deque, no counters, no laziness."""

    SWEPT: ClassVar[int] = 1024

    @initialize(
        concurrent=st.integers(1, 3), limit=st.sampled_from([1, 2, 4, 8, 100]), queue=st.sampled_from([100, 100, 2])
    )
    def begin_with(self, concurrent: int, limit: int, queue: int) -> None:
        self.now = 100.0
        self.tier: dict[bytes, int] = {}
        self.held = PrefetchedPages(limit, self.tier.get)
        self.concurrent = concurrent
        self.most = queue
        self.ended: list[PrefetchRequest] = []
        self.queue = PrefetchQueue(3, concurrent, self.held, self.ended.append, lambda: self.now, queue)
        self.requests: list[PrefetchRequest] = []
        self.left: dict[PrefetchRequest, int] = {}
        self.expected: dict[PrefetchRequest, PrefetchEnd] = {}
        self.bad: set[PrefetchRequest] = set()
        self.turn: dict[PrefetchRequest, int] = {}  # the number of its last turn: the smallest is next
        self.parked: dict[PrefetchRequest, float] = {}
        self.chunks: list[tuple[PrefetchRequest, list[bytes]]] = []  # under way
        self.unused: set[bytes] = set()
        self.turns = self.keys = 0
        self.held_back: float | None = None
        self.lead: dict[tuple[PrefetchRequest, PrefetchRequest], int] = {}

    def live(self) -> list[PrefetchRequest]:
        return [r for r in self.requests if r not in self.ended]

    def waiting(self) -> list[PrefetchRequest]:
        some = [r for r in self.requests if r not in self.expected and self.left[r]]
        return sorted(some, key=lambda r: self.turn[r])

    def room(self) -> int:
        return self.held.limit - len(self.unused) - sum(len(keys) for _, keys in self.chunks)

    def flying(self, request: PrefetchRequest) -> int:
        return sum(r is request for r, _ in self.chunks)

    def decide(self, request: PrefetchRequest, why: PrefetchEnd) -> None:
        self.expected.setdefault(request, why)

    @rule(pages=st.sampled_from([0, 1, 4, 7, 9, 9]))
    def add(self, pages: int) -> None:
        request, full = PrefetchRequest(pages), len(self.live()) >= self.most
        self.requests.append(request)
        self.left[request] = pages
        self.turn[request] = self.turns = self.turns + 1
        if not pages:
            self.decide(request, PrefetchEnd.COMPLETE)
        elif full:
            self.decide(request, PrefetchEnd.QUEUE_FULL)
        self.queue.add(request)

    @rule(
        demand=st.sampled_from([False, False, True]),
        take=st.sampled_from([1, 3, 0, 1, 3, 3]),
        then=st.sampled_from(["", "", "", "", "busy", "skip", "no_room"]),
    )
    def next(self, demand: bool, take: int, then: str) -> None:
        ready = [r for r in self.waiting() if self.parked.get(r, 0.0) <= self.now]
        if not ready:
            self.held_back = None
        elif not demand:
            self.held_back = None
            ready = ready if len(self.chunks) < self.concurrent else []
        else:
            self.held_back = self.now if self.held_back is None else self.held_back
            if self.chunks or self.now < self.held_back + DEMAND_PAUSE_S:
                ready = []
        if ready and not self.room():
            for request in ready:
                self.decide(request, PrefetchEnd.QUOTA)
            ready, self.held_back = [], None
        turn = self.queue.next(demand=demand)
        for _ in range(200):  # requests, each of which looks for pages two at a time
            if turn is None and self.queue.wake() == 0:
                turn = self.queue.next(demand=demand)
        if not ready:
            assert turn is None
            return
        assert turn is not None, "it was somebody's turn"
        request, most = turn
        assert request is ready[0]
        assert 1 <= most <= min(3, self.left[request], self.room())
        self.answer(request, min(take, most), then)

    def answer(self, request: PrefetchRequest, pages: int, then: str) -> None:
        if pages:
            keys = [b"%d" % (self.keys + i) for i in range(pages)]
            self.keys += pages
            self.held.begin(keys)
            self.chunks.append((request, keys))
            self.left[request] -= pages
            for other in self.waiting():
                if other is not request and not self.parked.get(other):
                    self.lead[request, other] = self.lead.get((request, other), 0) + 1
                    assert self.lead[request, other] <= 1, "two chunks more"
                self.lead[other, request] = 0
            self.turn[request] = self.turns = self.turns + 1
            self.held_back = None if self.held_back is None else self.now
            request.left = self.left[request]
            self.queue.begin(request, keys[0])
        elif then == "busy":
            self.parked[request] = self.now + PARKED_S
            self.queue.park(request)
        else:
            if then == "skip":
                self.left[request] -= 1
            else:
                self.decide(request, PrefetchEnd.NO_ROOM)
            request.left = self.left[request]
            self.queue.begin(request, None)
            if not self.left[request] and not self.flying(request):
                self.decide(request, PrefetchEnd.ERROR if request in self.bad else PrefetchEnd.COMPLETE)
        if then == "no_room":
            self.decide(request, PrefetchEnd.NO_ROOM)
        if request in self.expected:
            self.queue.stop(request, self.expected[request])

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), what=st.sampled_from(["good", "good", "good", "bad", "unread"]))
    def land(self, data: st.DataObject, what: str) -> None:
        request, landed = self.chunks.pop(data.draw(st.integers(0, len(self.chunks) - 1)))
        for key in landed:
            if what == "good":
                self.tier[key] = int(key)
                self.unused.add(key)
            self.held.land(key, int(key) if what == "good" else None)
        if what == "bad":
            self.bad.add(request)
        if what == "unread":
            self.decide(request, PrefetchEnd.ERROR)
        elif not self.left[request] and not self.flying(request):
            self.decide(request, PrefetchEnd.ERROR if request in self.bad else PrefetchEnd.COMPLETE)
        self.queue.land(landed[0], good=what != "unread", bad=what == "bad")

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), why=st.sampled_from([PrefetchEnd.CANCELLED, PrefetchEnd.STOPPED, PrefetchEnd.CLOSED]))
    def stop(self, data: st.DataObject, why: PrefetchEnd) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.decide(request, why)
        self.queue.stop(request, why)

    @precondition(lambda self: self.unused)
    @rule(data=st.data(), used=st.booleans())
    def use_or_evict(self, data: st.DataObject, used: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.unused)))
        self.unused.remove(key)
        if used:
            self.held.use(key, self.tier[key])
        else:
            del self.tier[key]

    @rule(seconds=st.sampled_from([0.001, PARKED_S, 0.05, 0.05, DEMAND_PAUSE_S, 0.4]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_request_ends_once_and_nothing_is_exceeded(self) -> None:
        if not hasattr(self, "requests"):
            return
        assert len(set(self.ended)) == len(self.ended)
        for request in self.requests:
            over = request in self.expected and not self.flying(request)
            assert (request in self.ended) == over
            if over:
                assert request.end is self.expected[request]
        assert len(self.queue) == len(self.live())
        assert len(self.held) <= self.held.limit
        assert len(self.queue.chunks) == len(self.chunks) <= self.concurrent


class QueueThatSweepsLittle(Queue):
    """The queue looks for two pages at a time, and comes back for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.swept, prefetching.SWEPT = prefetching.SWEPT, 2

    def teardown(self) -> None:
        prefetching.SWEPT = self.swept


TestQueue = Queue.TestCase
TestQueueThatSweepsLittle = QueueThatSweepsLittle.TestCase
TestQueue.settings = TestQueueThatSweepsLittle.settings = settings(
    max_examples=3 * settings.default.max_examples, stateful_step_count=50
)
