"""An eviction order whose pages stay as long as pages of their class are worth it, learned from the traffic."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import ClassVar

from gdscache.policies.levels import Levels
from gdscache.policies.reuse import Classes, ReuseMonitor

# A page's state, bits from the lowest: 4, its uses; 3, its group when it was stored; 8, its lot; above, its last use.
_USES = 0x0F
_LOT = 7
_WHEN = 15
_SIZES = (4, 16, 64)  # pages that are stored together, from which on they are of the next size
_bits = struct.Struct("<Q").unpack_from  # the first 64 of a key


class Lifetime(Levels):
    """Earliest deadline first: each use gives a page the lifetime of its class anew.

    A page that was not used yet belongs to the class of the page that its prefix branched off from (none, or one of 1,
    2 to 3, 4 to 7, 8 uses) and of the pages that were stored with it (up to 3, 15, 63, more): a new conversation behind
    a system prompt that all use, the next turn of one, and a long document that somebody asks about are told apart so.
    A page that was used belongs to the class of its uses (1, 2 to 3, 4 to 7, 8 or more) and of the time since the last
    one (up to 1/8, 1/4, 1/2, 1, 2 periods, more). All classes with one lifetime are LRU; which lifetimes pay is what
    `ReuseMonitor` finds. Time is counted in stored pages: a period is as many as are present, and has `STEPS` steps.

    There are two lifetimes a class, and a page has one of them by its lot, which is drawn by its key, or taken over
    from the page that it follows: what is worth keeping only in part is kept in part, as a round of documents that is
    larger than the tier (after Beckmann and Sanchez: Talus, HPCA 2015).

    Uses are remembered beyond eviction in a table of `GHOSTS` cells a page, in which a page overwrites what was in its
    cell.
    """

    STEPS = 32
    USES = 8
    LOTS = 256
    CLASSES = Classes(groups=5, sizes=4, uses=4, gaps=6)
    GHOSTS = 16
    monitor: ClassVar[type[ReuseMonitor]] = ReuseMonitor
    __slots__ = ("_ghosts", "_lifetimes", "_mask", "_monitor", "_run", "_share", "_stored")

    def _clear(self) -> None:
        super()._clear()
        self._lifetimes = [[0] * self.CLASSES.all] * 2  # in steps: of lots from `_share` on, and of those below
        self._share = 0
        self._monitor = self.monitor(self.CLASSES, self._pages)
        self._stored = 0
        self._run: list[tuple[bytes, bytes]] = []  # new pages, each with its parent, the page before it in the list
        self._ghosts = array("H")  # 12 bits of the key and, below, its uses; 0: nothing
        self._mask = -1
        self._widen(self._pages)

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        self.insert_all(((key, parent),))

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        run = self._run
        for page in pages:
            if run and run[-1][0] != page[1]:
                self._settle()
                run = self._run
            run.append(page)

    def touch(self, key: bytes) -> None:
        self.touch_all((key,))

    def touch_all(self, keys: Sequence[bytes]) -> None:
        if self._run:
            self._settle()
        if len(self._at) == self._pages:
            self._use(keys)
        else:  # some are restored ones
            for key in keys:
                super().touch(key)

    def remove(self, key: bytes) -> None:
        self.evict_all(((key, None),))

    def evict_all(self, gone: Sequence[tuple[bytes, bytes | None]]) -> None:
        if self._run:
            self._settle()
        at, ghosts, mask = self._at, self._ghosts, self._mask
        self._pages -= len(gone)
        for (key, freed), following in zip_longest(gone, [key for key, _ in gone[1:]]):
            level = at.pop(key, None)
            if level is None:
                self._restored.remove(key)
            else:
                uses = level.uses[key] & _USES
                self._take(key, level)
                (bits,) = _bits(key)
                ghosts[bits & mask] = bits >> 52 << 4 | (uses + 1 if uses < self.USES else uses)
            if freed is not None and freed != following:  # that one goes, wherever it is
                self.hasten(freed)

    def __iter__(self) -> Iterator[bytes]:
        if self._run:
            self._settle()
        return super().__iter__()

    def _settle(self) -> None:
        """The pages of a run come in, now that it is known how many they are."""
        run, self._run = self._run, []
        self._enter(run, bisect_right(_SIZES, len(run)))

    def _insert(self, key: bytes, parent: bytes) -> None:
        self._pages -= 1  # it is counted already, and restored: nothing is known of it
        self._enter(((key, parent),), 0)

    def _enter(self, run: Sequence[tuple[bytes, bytes]], size: int) -> None:
        """New pages come into the order, stored with so many that they are of this `size`."""
        at, monitor, classes, steps = self._at, self._monitor, self.CLASSES, self.STEPS
        ghosts, mask, share, lifetimes = self._ghosts, self._mask, self._share, self._lifetimes
        pages, stored, now, ticks = self._pages, self._stored, self._now, self._ticks
        limit, due, seen = monitor.limit, monitor.due(pages), list[tuple[int, int, int]]()
        sizes, widest, level = classes.sizes, (mask + 1) // self.GHOSTS, None
        before, used, group, lot = None, 0, 0, 0  # the page before, of which these are known
        for key, parent in run:
            pages += 1
            (bits,) = _bits(key)
            uses, ghost = 0, ghosts[bits & mask]
            if ghost and ghost >> 4 == bits >> 52:  # it was evicted, and comes back
                ghosts[bits & mask], uses = 0, ghost & _USES
            if parent != before:
                above = at.get(parent)
                state = 0 if above is None else above.uses[parent]
                used, group = state & _USES, state >> 4 & 7
                lot = bits >> 28 & 0xFF if above is None else state >> _LOT & 0xFF
            if used:
                group = used.bit_length()
                if used >= self.USES:
                    lot = bits >> 28 & 0xFF
            number = classes.used(uses, classes.gaps - 1) if uses else group * sizes + size
            before, used = key, uses
            deadline = now + lifetimes[lot < share][number]
            if level is None or level.number != deadline:
                level = self._level(deadline)
            level.uses[key] = stored << _WHEN | lot << _LOT | group << 4 | uses
            at[key] = level
            stored += 1
            ticks += 1
            if ticks * steps >= pages:
                ticks, now = 0, now + 1
            if bits >> 36 & 0xFFFF < limit:
                seen.append((bits, number, stored))
            if stored >= due:
                monitor.see(seen, stored=True)
                self._learn(pages, stored)
                seen, limit, due, share, lifetimes = [], monitor.limit, monitor.due(pages), self._share, self._lifetimes
            if pages > widest:
                self._widen(pages)
                ghosts, mask = self._ghosts, self._mask
                widest = (mask + 1) // self.GHOSTS
        self._pages, self._stored, self._now, self._ticks = pages, stored, now, ticks
        monitor.see(seen, stored=True)

    def _learn(self, pages: int, stored: int) -> None:
        """Other lifetimes, where the monitor comes to a conclusion."""
        found = self._monitor.learn(pages, stored)
        if found is not None:
            self._share = round(self.LOTS * found.share)
            step = pages / self.STEPS
            self._lifetimes = [[int(age / step) for age in ages] for ages in (found.less, found.more)]

    def _touch(self, key: bytes) -> bool:
        there = key in self._at
        if there:
            self._use((key,))
        return there

    def _use(self, keys: Sequence[bytes]) -> None:
        """Uses of pages in the order."""
        at, monitor, classes, stored, pages = self._at, self._monitor, self.CLASSES, self._stored, self._pages
        limit, seen = monitor.limit, list[tuple[int, int, int]]()
        first, gaps = classes.new, classes.gaps
        for key in keys:
            level = at[key]
            state = level.uses[key]
            uses = state & _USES
            if uses < self.USES:
                uses += 1
                state += 1
            gap = (8 * (stored - (state >> _WHEN)) // pages).bit_length()
            number = first + (uses.bit_length() - 1) * gaps + (gap if gap < gaps else gaps - 1)  # as `Classes.used`
            state = state & (1 << _WHEN) - 1 | stored << _WHEN
            lifetime = self._lifetimes[(state >> _LOT & 0xFF) < self._share][number]
            self._move(key, level, self._now + lifetime, state)
            (bits,) = _bits(key)
            if bits >> 36 & 0xFFFF < limit:
                seen.append((bits, number, stored))
        monitor.see(seen)

    def _widen(self, pages: int) -> None:
        """A larger table. Nothing worth keeping is lost: a tier that grows has not evicted yet."""
        cells = 1 << (self.GHOSTS * max(pages, 64) - 1).bit_length()
        self._ghosts, self._mask = array("H", bytes(2 * cells)), cells - 1
