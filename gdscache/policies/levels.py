"""An eviction order in lists by level, for the order by lifetimes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from gdscache.policies.base import AfterRestored


class Levels(AfterRestored):
    """Pages on levels, lowest level first, within a level the one that came to it first.

    `_now` is the level of this moment, which a subclass lets rise. Pages that nobody uses stay where they are and are
    overtaken: nothing is ever recounted. Deferred pages keep their level's number, aside.
    """

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


class _Level:
    """Pages of one level, each with its uses as far as they count, or what else its policy knows of it."""

    __slots__ = ("aside", "number", "uses")

    def __init__(self, number: int, *, aside: bool = False) -> None:
        self.number = number
        self.aside = aside
        self.uses: OrderedDict[bytes, int] = OrderedDict()
