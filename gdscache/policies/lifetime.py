"""An eviction order whose pages stay as long as pages of their class are worth it, learned from the traffic."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import ClassVar

from gdscache.policies.levels import Levels
from gdscache.policies.reuse import Classes, ReuseMonitor

# A page's state, bits from the lowest: 4, its uses; 3, its group when it was stored; 8, its lot; above, its last use.
_USES = 0x0F
_LOT = 7
_WHEN = 15


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
    __slots__ = ("_ghosts", "_lifetimes", "_mask", "_monitor", "_run", "_share", "_size", "_stored")

    def _clear(self) -> None:
        super()._clear()
        self._lifetimes = [[0] * self.CLASSES.all] * 2  # in steps: of lots from `_share` on, and of those below
        self._share = 0
        self._monitor = self.monitor(self.CLASSES, self._pages)
        self._stored = 0
        self._run: list[tuple[bytes, bytes]] = []  # new pages, each with its parent, the page before it in the list
        self._size = 0  # class of the run that is stored
        self._ghosts = array("H")  # 12 bits of the key and, below, its uses; 0: nothing
        self._mask = -1
        self._widen()

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        if self._run and self._run[-1][0] != parent:
            self._settle()
        self._run.append((key, parent))

    def touch(self, key: bytes) -> None:
        if self._run:
            self._settle()
        super().touch(key)

    def remove(self, key: bytes) -> None:
        if self._run:
            self._settle()
        super().remove(key)

    def __iter__(self) -> Iterator[bytes]:
        if self._run:
            self._settle()
        return super().__iter__()

    def _settle(self) -> None:
        """The pages of a run come in, now that it is known how many they are."""
        run, self._run = self._run, []
        self._size = sum(len(run) >= least for least in (4, 16, 64))
        for key, parent in run:
            super().insert(key, parent)
        self._size = 0  # of a restored page nothing is known

    def _insert(self, key: bytes, parent: bytes) -> None:
        bits = int.from_bytes(key[:8], "little")
        uses = self._recalled(bits)
        above = self._at.get(parent)
        group, lot = 0, bits >> 28 & 0xFF
        if above is not None:
            state = above.uses[parent]
            before = state & _USES
            group = before.bit_length() or state >> 4 & 7
            if before < self.USES:
                lot = state >> _LOT & 0xFF
        classes = self.CLASSES
        number = classes.used(uses, classes.gaps - 1) if uses else group * classes.sizes + self._size
        lifetime = self._lifetimes[lot < self._share][number]
        self._put(key, self._now + lifetime, self._stored << _WHEN | lot << _LOT | group << 4 | uses)
        self._stored += 1
        self._tick()
        monitor = self._monitor
        if bits >> 36 & 0xFFFF < monitor.limit:
            monitor.see(bits, number, self._stored, stored=True)
        if self._stored >= monitor.due:
            found = monitor.learn(self._pages, self._stored)
            if found is not None:
                self._share = round(self.LOTS * found.share)
                step = self._pages / self.STEPS
                self._lifetimes = [[int(age / step) for age in ages] for ages in (found.less, found.more)]
        if self._pages * self.GHOSTS > self._mask + 1:
            self._widen()

    def _touch(self, key: bytes) -> bool:
        level = self._at.get(key)
        if level is None:
            return False
        state = level.uses[key]
        uses = state & _USES
        if uses < self.USES:
            uses += 1
            state += 1
        gap = 8 * (self._stored - (state >> _WHEN)) // self._pages
        number = self.CLASSES.used(uses, min(gap.bit_length(), self.CLASSES.gaps - 1))
        state = state & (1 << _WHEN) - 1 | self._stored << _WHEN
        lifetime = self._lifetimes[(state >> _LOT & 0xFF) < self._share][number]
        self._move(key, level, self._now + lifetime, state)
        bits = int.from_bytes(key[:8], "little")
        if bits >> 36 & 0xFFFF < self._monitor.limit:
            self._monitor.see(bits, number, self._stored)
        return True

    def _remove(self, key: bytes) -> bool:
        level = self._at.pop(key, None)
        if level is None:
            return False
        uses = level.uses[key] & _USES
        self._take(key, level)
        bits = int.from_bytes(key[:8], "little")
        self._ghosts[bits & self._mask] = bits >> 52 << 4 | (uses + 1 if uses < self.USES else uses)
        return True

    def _recalled(self, bits: int) -> int:
        """The uses of a page that was evicted and comes back, its store counted; 0 for one that is not known."""
        ghost = self._ghosts[bits & self._mask]
        if ghost >> 4 != bits >> 52 or not ghost:
            return 0
        self._ghosts[bits & self._mask] = 0
        return ghost & _USES

    def _widen(self) -> None:
        """A larger table. Nothing worth keeping is lost: a tier that grows has not evicted yet."""
        cells = 1 << (self.GHOSTS * max(self._pages, 64) - 1).bit_length()
        self._ghosts, self._mask = array("H", bytes(2 * cells)), cells - 1
