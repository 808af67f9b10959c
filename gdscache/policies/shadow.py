"""LRU in the shadow of another order: what it would hold, and how many hits it is ahead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain


class LRUShadow:
    """The keys that LRU would hold after the same uses and stores, in as much room; no bytes.

    LRU gives up the least recently used page that no other page of it follows: tails before heads, as tiers do. Beside
    its own pages it knows which of them the tier lacks (`owed`: each may become a hit that only LRU has), and which
    pages of the tier it has given up (`left`, in that order). Both are as many while both are full, so there is always
    a page in `left` for one of `owed` that is stored again. Every operation is O(1), amortised; where pages were
    dropped, giving one up is O(log n) of those that nothing follows any more.

    `room` is the most pages that the tier had in a period, which is as many stores; a tier that grows has more at once.
    A shadow may also stand for a tier of which it is shown a sample of the keys; then all its figures are the sample's.
    """

    __slots__ = (
        *("_aside", "_children", "_coming", "_first", "_passed", "_peak", "_ready", "_recent", "_stored"),
        *("gained", "left", "lost", "owed", "pages", "room", "seen", "spared", "used"),
    )

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        """`keys`: pages that the tier has, the least recently used first; which follow others is not known."""
        self._recent: OrderedDict[bytes, bytes] = OrderedDict.fromkeys(keys, b"")  # key -> parent, the oldest use first
        # Older uses than those, and followed by pages of the shadow: key -> number, parent. The older use, the lower.
        self._aside: dict[bytes, tuple[int, bytes]] = {}
        self._passed = 0  # numbers that were given
        self._ready: list[tuple[int, bytes]] = []  # a heap: of these, perhaps, not followed any more
        self._children: dict[bytes, int] = {}  # pages of the shadow that follow a page, there or not
        self.left: OrderedDict[bytes, bytes] = OrderedDict()  # key -> parent
        self.owed: set[bytes] = set()
        self.pages = self.room = self._peak = len(self._recent)  # `pages`: of the tier
        self._stored = 0  # in this period
        self._coming: Iterator[bytes] | None = None  # what LRU would give up next, the first ones taken ...
        self._first: bytes | None = None  # ... and the last of them, while only the tier gives up pages
        self.lost = 0  # hits that only LRU had
        self.gained = 0  # hits that it had not
        self.seen = 0  # pages that were asked for: used, or stored
        self.used = 0  # hits of the tier
        self.spared = 0  # pages of `owed` that LRU gave up before any use

    @property
    def debt(self) -> int:
        """Hits of LRU's, less those of the tier; below 0 where the tier had more."""
        return self.lost - self.gained

    @property
    def hits(self) -> int:
        """Hits that LRU had."""
        return self.used + self.debt

    def followed(self, key: bytes) -> bool:
        """Whether pages of the shadow follow one."""
        return key in self._children

    def recency(self) -> Iterator[bytes]:
        """The pages of the tier, those that LRU has given up first; else by their last uses, about."""
        return chain(self.left, (key for key in chain(self._aside, self._recent) if key not in self.owed))

    def thinned(self, shift: int, chosen: Callable[[bytes], bool]) -> LRUShadow:
        """That of a sample of the keys, one of `2 ** shift`, with what was counted so far in that proportion."""
        thin = LRUShadow(filter(chosen, chain(self._aside, self._recent)))
        thin.left = OrderedDict.fromkeys(filter(chosen, self.left), b"")
        thin.owed = set(filter(chosen, self.owed))
        thin.pages = len(thin) - len(thin.owed) + len(thin.left)
        thin.room = thin._peak = max(self.room >> shift, thin.pages)
        thin._stored = self._stored >> shift
        counted = (n >> shift for n in (self.lost, self.gained, self.seen, self.used, self.spared))
        thin.lost, thin.gained, thin.seen, thin.used, thin.spared = counted
        return thin

    def __len__(self) -> int:
        return len(self._recent) + len(self._aside)

    def insert(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        """The tier stores pages that it lacked: (key, parent), the page before each, there or not; b"": none known."""
        self._coming = None
        n = len(pages)
        one_by_one = self.pages + n > self.room or self._stored + n >= self.room  # `room` may change with one of them
        if not one_by_one:
            self._count(n)
        owed, left, recent, aside, children = self.owed, self.left, self._recent, self._aside, self._children
        for key, parent in pages:
            if one_by_one:
                self._count(1)
            if key in owed:
                owed.remove(key)
                self.lost += 1
                self._refresh(key)
            else:
                recent[key] = parent
                if parent:
                    children[parent] = children.get(parent, 0) + 1
            if len(recent) + len(aside) > self.room:  # also where `room` has just become less
                self._give_up(len(recent) + len(aside) - self.room)
            if parent in left:
                self._follow(parent)

    def _count(self, stored: int) -> None:
        """The tier has so many pages more: one, or as many as leave `room` as it is."""
        self.seen += stored
        self.pages += stored
        self._stored += stored
        self._peak = max(self._peak, self.pages)
        self.room = max(self.room, self._peak)
        if self._stored >= self.room:
            self.room, self._peak, self._stored = self._peak, self.pages, 0

    def touch(self, keys: Sequence[bytes]) -> None:
        """The tier uses pages that it has."""
        self._coming = None
        recent = self._recent
        self.seen += len(keys)
        self.used += len(keys)
        for key in keys:
            if key in recent:
                recent.move_to_end(key)
            elif key in self._aside:
                self._refresh(key)
            else:
                self.gained += 1
                self._add(key, self.left.pop(key))

    def evict(self, keys: Sequence[bytes]) -> None:
        """The tier gives up pages for others."""
        left, owed = self.left, self.owed
        self.pages -= len(keys)
        for key in keys:
            if key in left:
                del left[key]
            else:
                owed.add(key)

    def drop(self, key: bytes) -> None:
        """A page is gone for another reason: LRU would have it no more either."""
        self._coming = None
        self.pages -= 1
        if key in self.left:
            del self.left[key]
            return
        parent = self._aside.pop(key)[1] if key in self._aside else self._recent.pop(key)
        self._unlink(parent)

    def __iter__(self) -> Iterator[bytes]:
        """The pages of the tier, in the order in which LRU has given them up and would."""
        return chain(self.left, self._would_go())

    def first(self) -> bytes | None:
        """The first of these. However often it is asked while the tier only gives up pages, each is looked at once."""
        for key in self.left:
            return key
        if self._coming is None:
            self._coming, self._first = self._would_go(), None
        while self._first is None or self._first in self.owed:
            self._first = next(self._coming, None)
            if self._first is None:
                break
        return self._first

    # -- inside -------------------------------------------------------------------------------------------------------

    def _would_go(self) -> Iterator[bytes]:
        owed, aside, children = self.owed, self._aside, self._children
        gone: dict[bytes, int] = {}  # children of a page that went before
        passed: dict[bytes, tuple[int, bytes]] = {}
        ready, out, coming = list(self._ready), set[bytes](), iter(self._recent.items())
        while True:
            if ready:
                number, key = heappop(ready)
                at = aside.get(key) or passed.get(key)
                if at is None or at[0] != number or key in out or children.get(key, 0) > gone.get(key, 0):
                    continue
                parent = at[1]
            else:
                key, parent = next(coming, (b"", b""))
                if not key:
                    break
                if children.get(key, 0) > gone.get(key, 0):
                    passed[key] = (self._passed + len(passed), parent)
                    continue
            out.add(key)
            if key not in owed:
                yield key
            if parent:
                gone[parent] = gone.get(parent, 0) + 1
                at = aside.get(parent) or passed.get(parent)
                if at is not None:
                    heappush(ready, (at[0], parent))
        yield from (key for key in chain(aside, passed) if key not in out and key not in owed)

    def _follow(self, key: bytes) -> None:
        """A page is stored behind one that LRU has given up: without it and those before it, it would find nothing."""
        while key in self.left:
            parent = self.left.pop(key)
            self._add(key, parent)
            key = parent

    def _refresh(self, key: bytes) -> None:
        if key in self._aside:
            self._recent[key] = self._aside.pop(key)[1]
        else:
            self._recent.move_to_end(key)

    def _add(self, key: bytes, parent: bytes) -> None:
        self._recent[key] = parent
        if parent:
            self._children[parent] = self._children.get(parent, 0) + 1
        over = len(self._recent) + len(self._aside) - self.room
        if over > 0:
            self._give_up(over)

    def _give_up(self, n: int) -> None:
        """The `n` least recently used pages that none of the shadow follows are out."""
        recent, aside, children, ready = self._recent, self._aside, self._children, self._ready
        owed, left = self.owed, self.left
        while n:
            if ready:
                number, key = heappop(ready)
                at = aside.get(key)
                if at is None or at[0] != number or key in children:
                    continue
                _, parent = aside.pop(key)
            elif recent:
                key, parent = recent.popitem(last=False)
                if key in children:
                    aside[key] = (self._passed, parent)
                    self._passed += 1
                    continue
            else:  # pages that follow each other in a circle, as only damaged rows have it
                key, (_, parent) = next(iter(aside.items()))
                del aside[key]
            if parent:
                followed = children[parent] - 1
                if followed:
                    children[parent] = followed
                else:
                    del children[parent]
                    if parent in aside:
                        heappush(ready, (aside[parent][0], parent))
            if key in owed:
                owed.remove(key)
                self.spared += 1
            else:
                left[key] = parent
            n -= 1

    def _unlink(self, parent: bytes) -> None:
        """One page less follows `parent`."""
        if not parent:
            return
        followed = self._children[parent] - 1
        if followed:
            self._children[parent] = followed
        else:
            del self._children[parent]
            if parent in self._aside:
                heappush(self._ready, (self._aside[parent][0], parent))
