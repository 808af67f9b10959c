"""An eviction order that gives pages the lifetime of their class, learned from the traffic.

A sample tells how soon pages of each class are used again. Time is counted in pages that are stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Float64Array
from gdscache.native import LifetimeOrder, ReuseSample

# 0, 1, 2, 3, 4, 6, 8, 12, 16, ...: age i begins at AGES[i]; later uses than the last age are not counted.
AGES = np.array([0, 1] + [(2 + i % 2) << i // 2 for i in range(52)], np.float64)
NEGLIGIBLE = 0.01  # a gain over one lifetime for all that is not trusted
CERTAIN = 0.03  # a gain that is trusted in full
SLIGHT = 0.01  # a gain below this share of all uses and stores is small, for any number of hits
PRIOR = 200.0  # pages of the average class that are added to each class


class Classes(NamedTuple):
    """Classes of pages: first new pages, by group and by the number of pages stored with them; then used pages, by uses
    and by the time since the last use."""

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
        """For each class the sum over its group, or over its number of uses: float64 (C, ...)."""
        new, used = rows[: self.new], rows[self.new :]
        groups = new.reshape(self.groups, self.sizes, -1).sum(axis=1).repeat(self.sizes, axis=0)
        uses = used.reshape(self.uses, self.gaps, -1).sum(axis=1).repeat(self.gaps, axis=0)
        return np.concatenate((groups, uses))


class Lifetimes(NamedTuple):
    """Two lifetimes for each class, float64 (C,), and the share of the pages that get the second."""

    less: Float64Array
    more: Float64Array
    share: float


class ReuseMonitor:
    """Ages at which pages of each class are used again, on keys chosen by their bits, present or not.

    The chosen keys are so few that about `SAMPLES` are known at a time (Waldspurger, Park, Garthwaite, Ahmad: Efficient
    MRC Construction with SHARDS, FAST 2015). Counts fade by half in `FADE` periods; a period is as many stored pages as
    the tier has.
    """

    SAMPLES = 32768
    FADE = 16.0
    ROUND = 256  # stored pages between two conclusions, or a quarter of a period if that is more
    HORIZON = 32  # periods: no lifetime is longer
    __slots__ = ("_arrived", "_classes", "_hits", "_past", "sample")

    def __init__(self, classes: Classes, pages: int) -> None:
        self._classes = classes
        self.sample = ReuseSample(classes.all, self.SAMPLES, self.ROUND)  # knows the last uses, and counts them
        self.sample.limit = self._chosen(pages)
        self._arrived: Float64Array = np.zeros(classes.all + 1)  # entries into each class; stored pages last
        self._hits: Float64Array = np.zeros((classes.all, len(AGES)))  # uses of pages of a class, by age
        self._past = deque([(-1, self._arrived)])  # (time, `_arrived`) of each conclusion

    def learn(self, pages: int, now: int) -> Lifetimes | None:
        """The lifetimes of the classes in a tier of `pages`; None if it is too soon."""
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
        # Room is the tier's pages times the time, which stored pages count.
        room = pages * float(self._arrived[-1])
        found = best_lifetimes(ages, self.chances(ages), self._arrived[:-1], room)
        for lifetimes in found[:2]:  # a page is used at least as often as its followers, and stays as long
            used = lifetimes[self._classes.new :].reshape(self._classes.uses, self._classes.gaps)
            np.maximum.accumulate(used, axis=0, out=used)
        return found

    def _chosen(self, pages: int) -> int:
        """Keys with 16 bits below this number are watched, so that the keys of some periods are known at a time."""
        return int((1 << 16) * min(1.0, self.SAMPLES / (8 * max(pages, 1))))

    def chances(self, ages: Float64Array) -> Float64Array:
        """For each class and each range of `ages` (B,), the chance of a use at such an age: float64 (C, B - 1).

        Uses at an age are compared only with pages that are old enough. Classes with few pages are taken to be like the
        others of their group or number of uses, and these like all, with the weight of `PRIOR` pages. 0 if no page is
        old enough.
        """
        times = np.array([time for time, _ in self._past], np.float64)
        arrived = np.array([arrived[:-1] for _, arrived in self._past])
        born = times[-1] - (ages[1:] + ages[:-1]) / 2  # arrival of pages of such an age: between two conclusions
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

    `chances` (C, B - 1): of a use in each range of `ages` (B,). `arrived` (C,): pages; each use and each store counts.
    At the optimum, a longer life brings the same hits for its room in each class: that price of room is bisected. Where
    two lifetimes are equally good, the room that is left decides the share of the pages with the longer one: so a class
    whose hits come late and all at once is kept in part (the hull of Beckmann and Sanchez: Talus, HPCA 2015). A small
    gain over one lifetime for all is not trusted; both lifetimes then come near that one.
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
    cheap, dear = 0.0, 1.0  # hits for one page and one unit of time
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


class Lifetime(LifetimeOrder):
    """Earliest deadline first: each use gives a page the lifetime of its class anew.

    The class of an unused page depends on the uses of the page that its prefix branched off from (none, or one of 1, 2
    to 3, 4 to 7, 8 uses), and on the number of pages stored with it (up to 3, 15, 63, more). So a new conversation
    behind a common system prompt, the next turn of a conversation, and a long document have different classes. The
    class of a used page depends on its uses (1, 2 to 3, 4 to 7, 8 or more) and on the time since the last one (up to
    1/8, 1/4, 1/2, 1, 2 periods, more). With one lifetime for all classes the order is LRU; `ReuseMonitor` finds the
    best lifetimes. Time is counted in stored pages: a period is the number of present pages, and has `STEPS` steps.

    A class has two lifetimes. A page gets one of them by its lot, which is drawn by its key, or taken over from the
    page that it follows: so a class can be kept in part, such as a round of documents that is larger than the tier
    (after Beckmann and Sanchez: Talus, HPCA 2015).

    Uses are remembered beyond eviction in a table of 16 cells a page, in which a page overwrites the last page of its
    cell. A restart only keeps the order of the last uses: restored pages go first, the least recently used first, until
    they are used again.
    """

    CLASSES = Classes(*LifetimeOrder.SHAPE)
    monitor: ClassVar[type[ReuseMonitor]] = ReuseMonitor

    def __init__(self) -> None:
        super().__init__()
        self.restore((), ())

    def empty(self) -> Self:
        return type(self)()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        monitor = self.monitor(self.CLASSES, len(order))
        self.begin(keys, order, monitor.sample, partial(_learn, monitor))

    def remove(self, key: bytes) -> None:
        self.evict_all(((key, None),))

    def deferring(self) -> Sequence[LifetimeOrder]:
        return (self,)

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(iter(self.walk(), []))


def _learn(monitor: ReuseMonitor, pages: int, stored: int) -> tuple[int, list[int], list[int]] | None:
    """New lifetimes in steps, and the number of lots with the second lifetime; None if the monitor has no new
    conclusion."""
    found = monitor.learn(pages, stored)
    if found is None:
        return None
    step = pages / Lifetime.STEPS
    less, more = ([int(age / step) for age in ages] for ages in (found.less, found.more))
    return round(Lifetime.LOTS * found.share), less, more
