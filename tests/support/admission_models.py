"""Slow and obvious models of what counts keys, and of the endurance budget: dicts, lists, fractions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from gdscache.pages.keys import Page

DAY = 86_400


class ExactRecent:
    """Counts every add by its number: those of the current generation of `period` adds and of the one before count."""

    def __init__(self, period: int, most: int) -> None:
        self.period, self.most = period, most
        self.adds: list[bytes] = []

    def add(self, key: bytes) -> int:
        begin = max(0, len(self.adds) // self.period - 1) * self.period
        current = len(self.adds) // self.period * self.period
        # Nothing beyond `most` is counted in a generation either.
        before = min(self.most, self.adds[current:].count(key)) + min(self.most, self.adds[begin:current].count(key))
        self.adds.append(key)
        return min(self.most, before)


class ExactFrequency:
    """A counter for each key, halved as the sketch is; the first use since a halving is kept apart."""

    def __init__(self, sample: int) -> None:
        self.sample = sample
        self.seen: set[bytes] = set()
        self.counts: Counter[bytes] = Counter()
        self.uses = 0
        self.halvings = 0

    def add(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self.uses >= self.sample:
                self.counts = Counter({k: n // 2 for k, n in self.counts.items()})
                self.seen.clear()
                self.uses //= 2
                self.halvings += 1
            self.uses += 1
            if key in self.seen:
                self.counts[key] = min(15, self.counts[key] + 1)
            self.seen.add(key)

    def count(self, key: bytes) -> int:
        return self.counts[key] + (key in self.seen)


class ExactBudget:
    """The bucket in fractions of a byte."""

    def __init__(self, bytes_per_day: int, now: Fraction) -> None:
        self.burst = Fraction(bytes_per_day // 8)
        self.rate = (bytes_per_day - self.burst) / DAY
        self.level, self.now = self.burst, now

    def at(self, now: Fraction) -> Fraction:
        self.level = min(self.burst, self.level + (now - self.now) * self.rate)
        self.now = now
        return self.level

    def take(self, nbytes: int, now: Fraction) -> bool:
        if nbytes > self.at(now):
            return False
        self.level -= nbytes
        return True

    def give_back(self, nbytes: int, now: Fraction) -> None:
        self.level = min(self.burst, self.at(now) + nbytes)


class ExactAdmission:
    """The gate over exact counters. `kept`: how many refused pages it remembers."""

    def __init__(self, policy: str, offers: int, recent: ExactRecent, frequency: ExactFrequency, kept: int) -> None:
        self.policy, self.offers, self.recent, self.frequency, self.kept = policy, offers, recent, frequency, kept
        self.refused: list[bytes] = []  # and not used since then, the oldest first
        self.budget: ExactBudget | None = None

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        again = [key for key in keys if key in self.refused]
        self.refused = [key for key in self.refused if key not in keys]
        self.frequency.add(keys)
        return again

    def admit(self, page: Page, victim: bytes | None, room: bool, nbytes: int, now: Fraction) -> str:
        cause = self._cause(page, victim, room, nbytes, now)
        if not cause:
            self.refused = [key for key in self.refused if key != page.key]
        elif page.key not in self.refused:
            self.refused = [*self.refused, page.key][-self.kept :]
        return cause

    def _cause(self, page: Page, victim: bytes | None, room: bool, nbytes: int, now: Fraction) -> str:
        if self.policy == "second_offer" and self.recent.add(page.key) < self.offers - 1:
            return "second_offer"
        count = self.frequency.count
        if self.policy == "tinylfu" and victim is not None and count(page.key) <= count(victim):
            return "tinylfu"
        if not room:
            return "queue_full"
        if page.parent in self.refused:
            return "no_prefix"
        if self.budget is not None and not self.budget.take(nbytes, now):
            return "endurance"
        return ""
