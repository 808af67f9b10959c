"""Slow and obvious models of the eviction orders: lists that are searched, sorted and replayed."""

from __future__ import annotations

from collections.abc import Sequence

from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.guarded import Lifetime


class Undeferred:
    """Pages that are passed over stay where they are."""

    def defer(self, key: bytes) -> None: ...

    def hasten(self, key: bytes) -> None: ...

    def is_deferred(self, key: bytes) -> bool:
        return False


class SlowLRU(Undeferred):
    def __init__(self, restored: Sequence[bytes] = ()) -> None:
        self.keys = list(restored)

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        self.keys.append(key)

    def touch(self, key: bytes) -> None:
        self.keys.remove(key)
        self.keys.append(key)

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)

    def order(self) -> list[bytes]:
        return list(self.keys)


class SlowLevels:
    """Pages sorted by (level, when they came to it), deferred ones behind; those that were hastened came first."""

    def __init__(self, restored: Sequence[bytes] = ()) -> None:
        self.restored = list(restored)
        self.pages: dict[bytes, tuple[int, int]] = {}
        self.uses: dict[bytes, int] = {}
        self.deferred: set[bytes] = set()
        self.moves = self.now = self.ticks = 0

    def remove(self, key: bytes) -> None:
        if key in self.restored:
            self.restored.remove(key)
        else:
            del self.pages[key], self.uses[key]
            self.deferred.discard(key)

    def defer(self, key: bytes) -> None:
        if key in self.pages and key not in self.deferred:
            self.moves += 1
            self.pages[key] = (self.pages[key][0], self.moves)
            self.deferred.add(key)

    def hasten(self, key: bytes) -> None:
        if key in self.deferred:
            self.moves += 1
            self.pages[key] = (self.pages[key][0], -self.moves)
            self.deferred.remove(key)

    def is_deferred(self, key: bytes) -> bool:
        return key in self.deferred

    def order(self) -> list[bytes]:
        return self.restored + sorted(self.pages, key=lambda key: (key in self.deferred, self.pages[key]))


class SlowLifetime(SlowLevels):
    """Lifetimes come from a monitor that sees the same uses; it has a test of its own."""

    policy = Lifetime

    def __init__(self, restored: Sequence[bytes] = ()) -> None:
        super().__init__(restored)
        self.steps = self.policy.STEPS
        self.lifetimes = [[0] * 44] * 2
        self.share = 0
        self.monitor = self.policy.monitor(self.policy.CLASSES, len(restored))
        self.branched: dict[bytes, int] = {}  # new page -> group of its prefix
        self.lots: dict[bytes, int] = {}
        self.classes: dict[bytes, int] = {}
        self.last: dict[bytes, int] = {}  # pages stored before the last use
        self.run: list[tuple[bytes, bytes]] = []
        self.ghosts: list[tuple[int, int, int]] = []  # (cell, bits of the key, uses), the last one of a cell counts
        self.cells = self.stored = 0
        self.widen()

    def present(self) -> int:
        return len(self.restored) + len(self.pages)

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        if self.run and parent != self.run[-1][0]:
            self.settle()
        self.run.append((key, parent))

    def settle(self) -> None:
        run, self.run = self.run, []
        for key, parent in run:
            self.pages[key] = (0, 0)
            self.come(key, parent, len(run))

    def come(self, key: bytes, parent: bytes, together: int) -> None:
        bits = int.from_bytes(key[:8], "little")
        cell = [ghost for ghost in self.ghosts if ghost[0] == bits % self.cells][-1:]
        above = self.uses.get(parent)
        uses = self.uses[key] = cell[0][2] if cell and cell[0][1] == bits >> 52 else 0
        if uses:
            self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != bits % self.cells]
        if above is None:
            self.branched[key] = 0
        elif above == 0:
            self.branched[key] = self.branched[parent]
        else:
            self.branched[key] = {1: 1, 2: 2, 3: 2, 8: 4}.get(above, 3)
        self.lots[key] = bits // 2**28 % 256 if above in (None, 8) else self.lots[parent]
        size = 0 if together < 4 else 1 if together < 16 else 2 if together < 64 else 3
        self.enter(key, self.used(uses, 5) if uses else 4 * self.branched[key] + size)
        self.last[key] = self.stored
        self.stored += 1
        self.ticks += 1
        if self.ticks >= self.present() / self.steps:
            self.ticks = 0
            self.now += 1
        self.see(key, stored=True)
        found = self.monitor.learn(self.present(), self.stored)
        if found is not None:
            self.share = round(256 * found.share)
            step = self.present() / self.steps
            self.lifetimes = [[int(age / step) for age in ages] for ages in (found.less, found.more)]
        if 16 * self.present() > self.cells:
            self.widen()

    def touch(self, key: bytes) -> None:
        self.settle()
        if key in self.restored:
            self.restored.remove(key)
            self.pages[key] = (0, 0)
            self.come(key, b"", 1)
        self.uses[key] = min(self.uses[key] + 1, 8)
        parts = 8 * (self.stored - self.last[key]) / self.present()
        self.last[key] = self.stored
        self.enter(key, self.used(self.uses[key], sum(parts >= least for least in (1, 2, 4, 8, 16))))
        self.see(key)

    def enter(self, key: bytes, number: int) -> None:
        self.classes[key] = number
        self.deferred.discard(key)
        self.moves += 1
        lifetimes = self.lifetimes[1 if self.lots[key] < self.share else 0]
        self.pages[key] = (self.now + lifetimes[number], self.moves)

    def remove(self, key: bytes) -> None:
        self.settle()
        if key in self.pages:
            bits = int.from_bytes(key[:8], "little")
            self.ghosts.append((bits % self.cells, bits >> 52, min(self.uses[key] + 1, 8)))
        super().remove(key)

    def order(self) -> list[bytes]:
        self.settle()
        return super().order()

    def see(self, key: bytes, stored: bool = False) -> None:
        bits = int.from_bytes(key[:8], "little")
        if (bits >> 36) % 65536 < self.monitor.sample.limit:
            self.monitor.sample.see([(bits, self.classes[key], self.stored)], stored)

    def used(self, uses: int, gap: int) -> int:
        return 20 + 6 * {1: 0, 2: 1, 3: 1, 8: 3}.get(uses, 2) + gap

    def widen(self) -> None:
        self.cells = 1024
        while self.cells < 16 * self.present():
            self.cells *= 2
        self.ghosts = []


class SlowShadow:
    """LRU as a list: tails before heads; which pages it has, and which of them the tier has."""

    def __init__(self, restored: Sequence[bytes] = ()) -> None:
        self.recent = list(restored)  # LRU's pages
        self.tier = list(restored)
        self.parents: dict[bytes, bytes] = dict.fromkeys(restored, b"")
        self.left: list[bytes] = []
        self.room = len(restored)
        self.hits = self.used = 0

    def insert(self, key: bytes, parent: bytes) -> None:
        self.tier.append(key)
        self.room = max(self.room, len(self.tier))
        self.hits += key in self.recent
        self._use(key, self.parents[key] if key in self.recent else parent)
        while parent in self.left:
            parent = self._use(parent, self.parents[parent])

    def touch(self, key: bytes) -> None:
        self.used += 1
        self.hits += key in self.recent
        self._use(key, self.parents[key])

    def evict(self, key: bytes) -> None:
        self.tier.remove(key)
        if key in self.left:
            self.left.remove(key)

    def drop(self, key: bytes) -> None:
        self.evict(key)
        if key in self.recent:
            self.recent.remove(key)

    def _use(self, key: bytes, parent: bytes) -> bytes:
        for keys in (self.recent, self.left):
            if key in keys:
                keys.remove(key)
        self.recent.append(key)
        self.parents[key] = parent
        while len(self.recent) > self.room:
            gone = self.next_of(self.recent)
            self.recent.remove(gone)
            if gone in self.tier:
                self.left.append(gone)
        return parent

    def next_of(self, pages: Sequence[bytes]) -> bytes:
        """The first of `pages` that none of them follows."""
        followed = {self.parents[key] for key in pages}
        return next(key for key in pages if key not in followed)

    def order(self) -> list[bytes]:
        """LRU's pages given up one after the other."""
        left, order = list(self.recent), list(self.left)
        while left:
            gone = self.next_of(left)
            left.remove(gone)
            if gone in self.tier:
                order.append(gone)
        return order


# The order `lifetime`, which is `Lifetime` or LRU by turns, has tests of its own: test_guarded.py.
Model = SlowLRU | SlowLevels
MODELS: dict[type[EvictionPolicy], type[Model]] = {LRU: SlowLRU, Lifetime: SlowLifetime}
