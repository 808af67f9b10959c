"""Eviction orders in lists by level: LFU with aging, and LRU with credit. See `policies`."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from gdscache.policies.base import AfterRestored


class Levels(AfterRestored):
    """Pages on levels, lowest level first, within a level the one that came to it first.

    `_now` is the level of this moment; it rises by one each time that as many pages as are present / `STEPS` ticked.
    Pages that nobody uses stay where they are and are overtaken: nothing is ever recounted. Deferred pages keep their
    level's number, aside.
    """

    STEPS = 1
    __slots__ = ("_aside", "_at", "_levels", "_now", "_numbers", "_ticks")

    def _clear(self) -> None:
        self._levels: dict[int, _Level] = {}  # those with pages
        self._numbers: list[int] = []  # of `_levels`, ascending
        self._aside: dict[int, _Level] = {}  # of deferred pages
        self._at: dict[bytes, _Level] = {}
        self._now = 0
        self._ticks = 0

    def defer(self, key: bytes) -> None:
        level = self._at.get(key)
        if level is None or level.aside:
            return
        uses = level.uses[key]
        self._take(key, level)
        aside = self._aside.get(level.number)
        if aside is None:
            aside = self._aside[level.number] = _Level(level.number, aside=True)
        aside.uses[key] = uses
        self._at[key] = aside

    def hasten(self, key: bytes) -> None:
        level = self._at.get(key)
        if level is None or not level.aside:
            return
        uses = level.uses[key]
        self._take(key, level)
        self._put(key, level.number, uses)
        self._levels[level.number].uses.move_to_end(key, last=False)

    def is_deferred(self, key: bytes) -> bool:
        level = self._at.get(key)
        return level is not None and level.aside

    def _remove(self, key: bytes) -> bool:
        level = self._at.pop(key, None)
        if level is not None:
            self._take(key, level)
        return level is not None

    def _order(self) -> Iterator[bytes]:
        return chain.from_iterable(self._lists())

    def _lists(self) -> Iterator[Iterable[bytes]]:
        """The pages of each level; the levels set aside are sorted only when somebody comes to them."""
        for number in self._numbers:
            yield self._levels[number].uses
        for number in sorted(self._aside):
            yield self._aside[number].uses

    def _level(self, number: int) -> _Level:
        """The level, for a page that comes to it."""
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level(number)
            insort(self._numbers, number)
        return level

    def _put(self, key: bytes, number: int, uses: int) -> None:
        self._at[key] = level = self._level(number)
        level.uses[key] = uses

    def _take(self, key: bytes, level: _Level) -> None:
        del level.uses[key]
        if level.uses:
            return
        if level.aside:
            del self._aside[level.number]
        else:
            del self._levels[level.number]
            del self._numbers[bisect_left(self._numbers, level.number)]

    def _move(self, key: bytes, level: _Level, number: int, uses: int) -> None:
        if number == level.number and not level.aside:
            level.uses[key] = uses
            level.uses.move_to_end(key)
        else:
            self._take(key, level)
            self._put(key, number, uses)

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks * self.STEPS >= self._pages:
            self._ticks = 0
            self._now += 1


class _Level:
    """Pages of one level, each with its uses as far as they count, or what else its policy knows of it."""

    __slots__ = ("aside", "number", "uses")

    def __init__(self, number: int, *, aside: bool = False) -> None:
        self.number = number
        self.aside = aside
        self.uses: OrderedDict[bytes, int] = OrderedDict()


class _ByUses(Levels):
    """A new page is on the level of now, and a use raises it. Uses and new pages tick."""

    __slots__ = ()

    @abstractmethod
    def _rise(self, level: int, uses: int) -> tuple[int, int]:
        """The level of a page that is used now, and its uses from now on; `level`, `uses`: until now."""

    def _insert(self, key: bytes, parent: bytes) -> None:
        self._put(key, self._now, 0)
        self._tick()

    def _touch(self, key: bytes) -> bool:
        level = self._at.get(key)
        if level is None:
            return False
        self._move(key, level, *self._rise(level.number, level.uses[key]))
        self._tick()
        return True


class LFU(_ByUses):
    """Least frequently used first, in lists by frequency (Shah, Mitra, Matani: An O(1) Algorithm for Implementing the
    LFU Cache Eviction Scheme, 2010), with aging (Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating Content
    Management Techniques for Web Proxy Caches, 2000).

    The age is a clock, not the last victim's frequency: in each period of as many uses as there are pages, a page loses
    one use. More than `USES` are not counted.
    """

    USES = 15
    __slots__ = ()

    def _rise(self, level: int, uses: int) -> tuple[int, int]:
        return min(max(level, self._now) + 1, self._now + self.USES), 0


class CreditLRU(_ByUses):
    """LRU in which each use of a page counts as if it came `CREDIT / STEPS` periods later, up to `USES` of them.

    A point between recency and frequency, as in LRFU (Lee et al.: LRFU: A Spectrum of Policies that Subsumes the Least
    Recently Used and Least Frequently Used Policies, 2001), kept in a calendar queue (Brown: Calendar Queues, 1988)
    and not in a heap. A period is as many uses as there are pages.
    """

    STEPS = 32
    CREDIT = 16
    USES = 8
    __slots__ = ()

    def _rise(self, level: int, uses: int) -> tuple[int, int]:
        uses = min(uses + 1, self.USES)
        return self._now + self.CREDIT * uses, uses
