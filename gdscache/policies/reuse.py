"""How soon pages of a class are used again, watched on a sample, and what lifetimes of the classes follow from it.

Time is counted in pages that are stored.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from gdscache.arrays import Float64Array
from gdscache.native import ReuseSample

# 0, 1, 2, 3, 4, 6, 8, 12, 16, ...: age i is from AGES[i] on; a use that comes later than the last is not counted.
AGES = np.array([0, 1] + [(2 + i % 2) << i // 2 for i in range(52)], np.float64)
NEGLIGIBLE = 0.01  # gain over one lifetime for all that is not trusted at all
CERTAIN = 0.03  # gain that is trusted in full
SLIGHT = 0.01  # share of all uses and stores below which gains are small, whatever they are compared with
PRIOR = 200.0  # pages of the average class that are added to each class


class Classes(NamedTuple):
    """Classes of pages: first those of new pages, by group and by size of what they are stored with; then those of used
    ones, by uses and by the time since the last one."""

    groups: int
    sizes: int
    uses: int
    gaps: int

    @property
    def new(self) -> int:
        return self.groups * self.sizes

    @property
    def all(self) -> int:
        return self.new + self.uses * self.gaps

    def merged(self, rows: Float64Array) -> Float64Array:
        """In the place of each class the sum of all of its group, or of its uses: float64 (C, ...)."""
        new, used = rows[: self.new], rows[self.new :]
        groups = new.reshape(self.groups, self.sizes, -1).sum(axis=1).repeat(self.sizes, axis=0)
        uses = used.reshape(self.uses, self.gaps, -1).sum(axis=1).repeat(self.gaps, axis=0)
        return np.concatenate((groups, uses))


class Lifetimes(NamedTuple):
    """Two lifetimes for each class, float64 (C,), and the part of the pages that has the second."""

    less: Float64Array
    more: Float64Array
    share: float


class ReuseMonitor:
    """Ages at which pages of each class are used again, on keys chosen by their bits, whether they are present or not.

    Of so many keys that about `SAMPLES` are known at a time (Waldspurger, Park, Garthwaite, Ahmad: Efficient MRC
    Construction with SHARDS, FAST 2015). What was counted fades by half in `FADE` periods; a period is as many stored
    pages as there are in the tier.
    """

    SAMPLES = 32768
    FADE = 16.0
    ROUND = 256  # stored pages between two conclusions, or a quarter of a period if that is more
    HORIZON = 32  # periods: no lifetime is longer
    __slots__ = ("_arrived", "_classes", "_hits", "_past", "sample")

    def __init__(self, classes: Classes, pages: int) -> None:
        self._classes = classes
        self.sample = ReuseSample(classes.all, self.SAMPLES, self.ROUND)  # which knows the last uses, and counts them
        self.sample.limit = self._chosen(pages)
        self._arrived: Float64Array = np.zeros(classes.all + 1)  # uses that made a page one of a class; pages stored
        self._hits: Float64Array = np.zeros((classes.all, len(AGES)))  # uses of pages of a class, by age
        self._past = deque([(-1, self._arrived)])  # (time, `_arrived`) of each conclusion

    def learn(self, pages: int, now: int) -> Lifetimes | None:
        """The lifetimes of the classes in a tier of `pages`; None when it is too soon to conclude."""
        if now < self.sample.due(pages):
            return None
        keep = 0.5 ** ((now - self.sample.last) / (self.FADE * pages))
        arrived, hits = self.sample.take()
        self._arrived = self._arrived * keep + arrived
        self._hits = self._hits * keep + hits
        self.sample.last = now
        self.sample.limit = self._chosen(pages)
        ages = AGES[: int(np.searchsorted(AGES, self.HORIZON * pages)) + 1]
        self._past.append((now, self._arrived))
        while self._past[1][0] < now - ages[-1]:
            self._past.popleft()
        # As many pages as the tier has, each for as long as they were stored in.
        room = pages * float(self._arrived[-1])
        found = best_lifetimes(ages, self.chances(ages), self._arrived[:-1], room)
        for lifetimes in found[:2]:  # a page is used no less than what follows it, and stays as long
            used = lifetimes[self._classes.new :].reshape(self._classes.uses, self._classes.gaps)
            np.maximum.accumulate(used, axis=0, out=used)
        return found

    def _chosen(self, pages: int) -> int:
        """Keys are watched that have 16 bits below this, so that those of some periods are known at a time."""
        return int((1 << 16) * min(1.0, self.SAMPLES / (8 * max(pages, 1))))

    def chances(self, ages: Float64Array) -> Float64Array:
        """For each class and each range of `ages` (B,), the chance of a use at such an age: float64 (C, B - 1).

        Uses at an age are compared with the pages that are old enough, not with all. Classes with few pages are taken
        to be like the others of their group, or of as many uses, and
        these like all, with the weight of `PRIOR` pages. Where no page is old enough it is 0.
        """
        times = np.array([time for time, _ in self._past], np.float64)
        arrived = np.array([arrived[:-1] for _, arrived in self._past])
        born = times[-1] - (ages[1:] + ages[:-1]) / 2  # when pages of such an age arrived: between two conclusions
        after = np.clip(np.searchsorted(times, born), 1, len(times) - 1)
        part = np.clip((born - times[after - 1]) / (times[after] - times[after - 1]), 0, 1)[:, None]
        reached = ((1 - part) * arrived[after - 1] + part * arrived[after]).T
        hits = self._hits[:, : len(ages) - 1]
        every = reached.sum(axis=0)
        pooled = np.divide(hits.sum(axis=0), every, out=np.zeros_like(every), where=every > 0)
        merged = self._classes.merged
        alike = (merged(hits) + PRIOR * pooled) / (merged(reached) + PRIOR)
        chances: Float64Array = (hits + PRIOR * alike) / (reached + PRIOR)
        chances[:, every <= 0] = 0
        return chances


def best_lifetimes(ages: Float64Array, chances: Float64Array, arrived: Float64Array, room: float) -> Lifetimes:
    """The lifetimes, two a class, with the most hits for `room`: pages times time.

    `chances` (C, B - 1): of a use in each range of `ages` (B,); `arrived` (C,): pages, each use and each store counted.
    At the best ones, a longer life brings as many hits for its room in each class: at the price of room, which is
    bisected. Where two lifetimes are as good, what is left of the room decides which part of the pages has the longer
    one: so a class is worth its part where its hits come late and all at once (the hull of Beckmann and Sanchez:
    Talus, HPCA 2015). As far as the gain over one lifetime for all is small it is not trusted; both come near to it.
    """
    chance = np.zeros((len(chances), len(ages)))
    chance[:, 1:] = np.minimum(np.cumsum(chances, axis=1), 1.0)
    alive = 1.0 - chance
    lived = np.zeros_like(chance)
    lived[:, 1:] = np.cumsum((alive[:, 1:] + alive[:, :-1]) / 2 * np.diff(ages), axis=1)
    hits, used = arrived[:, None] * chance, arrived[:, None] * lived
    same = float(np.interp(room, used.sum(axis=0), ages))
    same_hits = float(np.interp(same, ages, hits.sum(axis=0)))
    rows = np.arange(len(hits))
    cheap, dear = 0.0, 1.0  # hits for a page and a time of one
    firsts, flat, gains = rows * len(ages), used.ravel(), np.empty_like(used)
    for _ in range(32):
        price = (cheap + dear) / 2
        np.subtract(hits, np.multiply(used, price, out=gains), out=gains)
        taken = flat.take(gains.argmax(axis=1) + firsts).sum()
        cheap, dear = (price, dear) if taken > room else (cheap, price)
    less, more = (np.argmax(hits - price * used, axis=1) for price in (dear, cheap))
    least, most = used[rows, less].sum(), used[rows, more].sum()
    share = min(1.0, max(0.0, (room - least) / (most - least))) if most > least else 0.0
    found = hits[rows, less].sum() * (1 - share) + hits[rows, more].sum() * share
    gain = (found - same_hits) / (same_hits + SLIGHT * arrived.sum()) if same_hits + found > 0 else 0.0
    trust = min(1.0, max(0.0, (gain - NEGLIGIBLE) / (CERTAIN - NEGLIGIBLE)))
    return Lifetimes(same + trust * (ages[less] - same), same + trust * (ages[more] - same), share)
