"""An eviction order whose pages stay as long as pages of their class are worth it, learned from the traffic."""

from __future__ import annotations

from array import array
from typing import ClassVar

from gdscache.policy_levels import Levels
from gdscache.reuse import ReuseMonitor

_USES = 0x0F  # bits of a page's state: its uses; above them: the uses of its parent when it was stored, in `KIN` groups


class Lifetime(Levels):
    """Earliest deadline first: each use gives a page the lifetime of its class anew.

    A page that was used belongs to the class of its uses, up to `USES`; one that was not belongs to the class of the
    page that its prefix branched off from: nothing, or a page of so many uses. A new conversation behind a system
    prompt that all use, the next turn of one, and another question about a document are told apart so. All classes with
    one lifetime are LRU; which lifetimes pay is what `ReuseMonitor` finds. Time is counted in stored pages: a period is
    as many as are present, and has `STEPS` steps.

    Uses are remembered beyond eviction in a table of `GHOSTS` cells a page, in which a page overwrites what was in its
    cell.
    """

    STEPS = 32
    USES = 8
    KIN = 5
    GHOSTS = 8
    monitor: ClassVar[type[ReuseMonitor]] = ReuseMonitor
    __slots__ = ("_ghosts", "_lifetimes", "_mask", "_monitor", "_stored")

    def _clear(self) -> None:
        super()._clear()
        self._lifetimes = [0] * (self.KIN + self.USES)  # in steps
        self._monitor = self.monitor(len(self._lifetimes), self.KIN, self._pages)
        self._stored = 0
        self._ghosts = array("H")  # 12 bits of the key and, below, its uses; 0: nothing
        self._mask = -1
        self._widen()

    def _insert(self, key: bytes, parent: bytes) -> None:
        bits = int.from_bytes(key[:8], "little")
        uses = self._recalled(bits)
        group = self._group(parent)
        number = self.KIN - 1 + uses if uses else group
        self._put(key, self._now + self._lifetimes[number], group << 4 | uses)
        self._stored += 1
        self._tick()
        monitor = self._monitor
        if bits >> 36 & 0xFFFF < monitor.limit:
            monitor.see(bits, number, self._stored, stored=True)
        if self._stored >= monitor.due:
            found = monitor.learn(self._pages, self._stored)
            if found is not None:
                self._lifetimes = [int(age * self.STEPS / self._pages) for age in found]
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
        number = self.KIN - 1 + uses
        self._move(key, level, self._now + self._lifetimes[number], state)
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

    def _group(self, parent: bytes) -> int:
        """Where the prefix of a new page branched off: 0 nowhere; else by the page's uses: 1, 2 to 3, 4 to 7, 8."""
        level = self._at.get(parent)
        if level is None:
            return 0
        state = level.uses[parent]
        return min((state & _USES).bit_length(), self.KIN - 1) or state >> 4

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
