"""Eviction orders beside LRU, and the table of all of them. Every operation is O(1), amortised.

A policy does not know the tier's capacity: shares are of the pages that are present, which is the same once the tier
is full. Looking at the order changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from gdscache.policies.base import LRU, AfterRestored, EvictionPolicy
from gdscache.policies.guarded import Guarded
from gdscache.policies.levels import LFU, CreditLRU
from gdscache.policies.lifetime import Lifetime

ROUND = 2  # pages that go round again with each page that is taken out of a queue before its turn


class SLRU(AfterRestored):
    """Segmented LRU (Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, 1994).

    New pages are on probation; a use protects a page. When more than `PROTECTED` of all pages are protected, the least
    recently used of them goes back on probation, as its most recent page.
    """

    PROTECTED = 0.8
    __slots__ = ("_probation", "_protected")

    def _clear(self) -> None:
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._protected: OrderedDict[bytes, None] = OrderedDict()

    def _insert(self, key: bytes, parent: bytes) -> None:
        self._probation[key] = None

    def _touch(self, key: bytes) -> bool:
        if key in self._protected:
            self._protected.move_to_end(key)
            return True
        if key not in self._probation:
            return False
        del self._probation[key]
        self._protected[key] = None
        self._limit()
        return True

    def _remove(self, key: bytes) -> bool:
        segment = self._protected if key in self._protected else self._probation
        there = key in segment
        if there:
            del segment[key]
        self._limit()
        return there

    def _limit(self) -> None:
        while len(self._protected) > self.PROTECTED * self._pages:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def _order(self) -> Iterator[bytes]:
        yield from self._probation
        yield from self._protected


class S3FIFO(AfterRestored):
    """Three FIFO queues (Yang, Zhang, Qiu, Yue, Rashmi: FIFO Queues Are All You Need for Cache Eviction, SOSP 2023).

    New pages enter a small queue, pages that left it not long ago the main one. A page at the end of the small queue
    that was used twice moves to the main queue; one at the end of the main queue that was used goes round again, with a
    use less. The small queue gives up pages while it has more than `SMALL` of all.

    Unlike in the paper the tier chooses the victim, since the page at the end may be leased or followed by others. So
    the order is worked out ahead without changing a queue, and the ends of the queues move when a page is gone: what
    was passed over goes round again, or it would be passed over each time. Any page that leaves the small queue is
    remembered, and stays remembered when it comes back.
    """

    SMALL = 0.1
    USES = 3  # more are not counted
    __slots__ = ("_ghosts", "_ghosts_in_order", "_main", "_small")

    def _clear(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()  # key -> uses
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: set[int] = set()  # eight bytes of each key; at most as many as there are pages
        self._ghosts_in_order: deque[int] = deque()

    def _insert(self, key: bytes, parent: bytes) -> None:
        queue = self._main if _short(key) in self._ghosts else self._small
        queue[key] = 0

    def _touch(self, key: bytes) -> bool:
        queue = self._small if key in self._small else self._main
        uses = queue.get(key)
        if uses is None:
            return False
        if uses < self.USES:
            queue[key] = uses + 1
        return True

    def _remove(self, key: bytes) -> bool:
        small, main, there = self._small, self._main, True
        if key in small:
            _take_out(key, small)
            while small and small[first := next(iter(small))] > 1:
                del small[first]
                main[first] = 0
            self._remember(_short(key))
        elif key in main:
            _take_out(key, main)
            while main and (uses := main[first := next(iter(main))]):
                main[first] = uses - 1
                main.move_to_end(first)
        else:
            there = False
        while len(self._ghosts) > self._pages:
            self._ghosts.remove(self._ghosts_in_order.popleft())
        return there

    def _remember(self, ghost: int) -> None:
        if ghost not in self._ghosts:
            self._ghosts.add(ghost)
            self._ghosts_in_order.append(ghost)

    def _order(self) -> Iterator[bytes]:
        small, main = iter(self._small.items()), iter(self._main.items())
        again: deque[tuple[bytes, int]] = deque()  # behind those of `main`
        in_small, in_main = len(self._small), len(self._main)
        while in_small or in_main:
            if in_small and (not in_main or in_small > self.SMALL * (in_small + in_main)):
                key, uses = next(small)
                in_small -= 1
                if uses > 1:
                    again.append((key, 0))
                    in_main += 1
                else:
                    yield key
            else:
                key, uses = next(main, None) or again.popleft()
                if uses:
                    again.append((key, uses - 1))
                else:
                    in_main -= 1
                    yield key


def _take_out(key: bytes, queue: OrderedDict[bytes, int]) -> None:
    """Remove a page of a queue; where it was not at the end, up to `ROUND` pages there go round again."""
    for _ in range(ROUND):
        first = next(iter(queue))
        if first == key:
            break
        queue.move_to_end(first)
    del queue[key]


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "lfu": LFU,
    "credit_lru": CreditLRU,
    "unguarded": Lifetime,
    "lifetime": Guarded,
}


def new_policy(name: str) -> EvictionPolicy:
    """An order of a row of `POLICIES`, without pages. Raises KeyError for a name that is not in the table."""
    return POLICIES[name]()
