"""An eviction order that gives pages the lifetime of their class, learned from the traffic; and its guard, by which it
may differ from LRU's while it does not lose to it.

A sample tells how soon pages of each class are used again. Time is counted in pages that are stored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Float64Array
from gdscache.native import LifetimeOrder, LruShadow, ReuseSample
from gdscache.policies.base import LRU, EvictionPolicy, NativeOrder

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


class Lifetime(NativeOrder):
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

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        monitor = self.monitor(self.CLASSES, len(order))
        self.begin(keys, order, monitor.sample, partial(_learn, monitor))

    def deferring(self) -> Sequence[LifetimeOrder]:
        return (self,)


def _learn(monitor: ReuseMonitor, pages: int, stored: int) -> tuple[int, list[int], list[int]] | None:
    """New lifetimes in steps, and the number of lots with the second lifetime; None if the monitor has no new
    conclusion."""
    found = monitor.learn(pages, stored)
    if found is None:
        return None
    step = pages / Lifetime.STEPS
    less, more = ([int(age / step) for age in ages] for ages in (found.less, found.more))
    return round(Lifetime.LOTS * found.share), less, more


class Bets:
    """Judges which of two orders chooses the better victims, by pages of both: the page that is wanted first was worth
    more.

    A bet is on two present pages, the first victims of either order. At most `MOST` are open; the oldest is forgotten.
    """

    MOST = 1024
    LEAST = 6  # least number of ended bets,
    CLEAR = 2.0  # and standard deviations more won than lost, for a verdict
    FADE = 400  # ended bets after which all count half
    __slots__ = ("_lost", "_won", "open")

    def __init__(self) -> None:
        # page -> (the other page, whether the order wins if this one is wanted)
        self.open: dict[bytes, tuple[bytes, bool]] = {}
        self._won = self._lost = 0

    def add(self, kept: bytes, given: bytes) -> None:
        """The order would evict `given` and keep `kept`; LRU would do the opposite."""
        self.open[given] = kept, False
        self.open[kept] = given, True
        if len(self.open) > 2 * self.MOST:
            oldest = next(iter(self.open))
            del self.open[self.open.pop(oldest)[0]]

    def wanted(self, key: bytes) -> None:
        other, wins = self.open.pop(key)
        del self.open[other]
        self._won += wins
        self._lost += not wins
        if self._won + self._lost >= self.FADE:
            self._won, self._lost = self._won // 2, self._lost // 2

    @property
    def won(self) -> bool:
        decided = self._won + self._lost
        return decided >= self.LEAST and self._won - self._lost >= self.CLEAR * math.sqrt(decided)

    def clear(self) -> None:
        self.open.clear()
        self._won = self._lost = 0


class Guarded:
    """Another order's victims while that costs few hits against LRU, else the victims of LRU.

    A shadow of LRU (`LruShadow`) sees the same uses and stores. The order is *free* while the debt (LRU's hits less its
    own) and the part `risk` of the pages that only LRU still has stay within a budget; `risk` is the share of earlier
    such pages that were used before LRU evicted them too. Above the budget it *follows*: it evicts the pages that LRU
    has evicted, and so becomes LRU little by little. It is free again when it has won bets on its victims against
    LRU's.

    Changing traffic may want all of these pages at once, even if few were wanted before. So the order also follows,
    eviction by eviction, while the debt, and of these pages as large a part as LRU's hits are of all requested pages,
    exceed the limit of `STAKE`.

    The bound: with a debt L and d pages that only LRU has, following never raises L + d, since each hit that only LRU
    has takes a page from d. So L never exceeds the budget of a free order by more than d, and d is at most the tier's
    pages: over any traffic the order has LRU's hits, less `MOST_HITS` of them, less a constant of the tier's size.
    docs/design/lifetime.md has the proof, and its limits.

    Where pages are of several groups of layers, one page of tokens has up to a page in each, and a lost hit counts all
    that are stored anew: the windows inside its prompt too, which no hit needs. So the budgets are that many times as
    large. With budgets of one group a single long prompt bound the order for most of a trace.

    With more than `EXACT` pages the shadow covers a sample of `SAMPLE` to twice `SAMPLE` pages; then the bound is an
    estimate from the sample, and following is the LRU order of the present pages.
    """

    EXACT = 100_000
    SAMPLE = 8192
    TRIAL = 0.025  # budget of one free time, times the groups: a share of the pages, ...
    TRIAL_HITS = 0.002  # ... and of the hits that LRU had meanwhile
    MOST = 0.02  # budget of all free times, times the groups: a share of the pages, ...
    MOST_HITS = 0.003  # ... and of all hits that LRU had
    STAKE = 0.025  # times the groups: a share of the pages, ...
    STAKE_HITS = 0.0175  # ... and of LRU's hits and of `STAKE_SEEN` of all requested pages
    STAKE_SEEN = 0.01
    CREDIT = 0.25  # most hits ahead of LRU that count, as a share of the pages: an old lead may not be lost now
    LEAST_RISK = 0.02
    SUSPECT = 16  # used pages that `risk` assumes at first
    LOOKED_AT = 64  # victims of the order that are tried for a bet
    PATIENCE = 256  # it is judged each time that one part in 256 of its pages was evicted
    order: ClassVar[type[EvictionPolicy]] = Lifetime
    __slots__ = (
        *("_bets", "_due", "_fading", "_from", "_hits_from", "_lags", "_order", "_recency", "_seen"),
        *("_shadow", "_wagered", "groups", "judged"),
    )

    def __init__(self, groups: int = 1) -> None:
        """`groups`: of layers, whose pages are in the order."""
        self.groups = groups
        self.restore((), ())

    def empty(self) -> Guarded:
        return type(self)(self.groups)

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._order: EvictionPolicy = self.order()
        self._order.restore(keys, order)
        self._bets = Bets()
        self._wagered = self._bets.open
        self.judged = False  # True: it follows until it has won bets
        self._from = 0.0  # the debt at which this free time's budget begins
        self._hits_from = 0
        self._seen = (0, 0)  # `lost` and `spared` of the shadow at the last fading ...
        self._fading = (0.0, 0.0)  # ... and earlier counts, faded
        self._due = 0  # pages to evict until it is judged
        self._lags: bool | None = None  # too much is lost or at stake; None: unknown since the shadow changed
        self._recency: LRU | None = None  # all pages, if the shadow is of a sample
        sampled = len(order) > self.EXACT
        if sampled:
            self._recency = LRU()
            self._recency.restore(keys, order)
        self._shadow = LruShadow(keys, _shift(len(order), self.SAMPLE) if sampled else 0, order)

    # -- pages come, are used, and go ---------------------------------------------------------------------------------

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        self._order.insert_all(pages)
        self._show(pages)
        if self._wagered:
            self._want([key for key, _ in pages])

    def _show(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        self._lags = None
        while pages:
            shown, too_large = self._shadow.insert(pages, self.EXACT if self._recency is None else 2 * self.SAMPLE)
            if self._recency is not None:
                self._recency.insert_all(pages[:shown])
            if too_large:
                self._sample()
            pages = pages[shown:]

    def touch_all(self, keys: Sequence[bytes]) -> None:
        self._lags = None
        self._order.touch_all(keys)
        self._shadow.touch(keys)
        if self._recency is not None:
            self._recency.touch_all(keys)
        if self._wagered:
            self._want(keys)

    def _want(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._wagered:
                self._bets.wanted(key)

    def remove(self, key: bytes) -> None:
        self._lags = None
        self._order.remove(key)
        if self._recency is not None:
            self._recency.remove(key)
        self._shadow.drop(key)

    def evict_all(self, gone: Sequence[tuple[bytes, bytes | None]]) -> None:
        at = 0
        while at < len(gone):
            self._due -= 1
            if self._due <= 0:
                self._due = (self._shadow.room << self._shadow.shift) // self.PATIENCE
                self._judge()
            some = gone[at : at + max(self._due, 1)]  # up to the page before which it is judged again
            self._due -= len(some) - 1
            at += len(some)
            self._order.evict_all(some)
            if self._recency is not None:
                self._recency.evict_all(some)
            self._shadow.evict([key for key, _ in some])
            self._lags = None

    # -- for eviction -------------------------------------------------------------------------------------------------

    def defer_all(self, keys: Sequence[bytes]) -> None:
        if not self.following:  # pages that LRU passes over say nothing about the other order
            self._order.defer_all(keys)

    def hasten(self, key: bytes) -> None:
        self._order.hasten(key)

    def deferring(self) -> Sequence[LifetimeOrder]:
        return () if self.following else self._order.deferring()

    def __iter__(self) -> Iterator[bytes]:
        if not self.following:
            return iter(self._order)
        return chain.from_iterable(iter(self._shadow.walk(), [])) if self._recency is None else iter(self._recency)

    # -- the judge ----------------------------------------------------------------------------------------------------

    @property
    def debt(self) -> int:
        """Hits that LRU is ahead (below 0: behind). With a sample, an estimate."""
        return self._shadow.debt << self._shadow.shift

    def _most(self) -> float:
        return self.groups * (self.MOST * self._shadow.room + self.MOST_HITS * self._shadow.hits)

    @property
    def following(self) -> bool:
        """Whether it evicts the pages that LRU has evicted: it was judged so, or too much is lost or at stake."""
        if self.judged:
            return True
        if self._lags is None:
            shadow = self._shadow
            debt, hits, seen = shadow.debt, shadow.hits, shadow.seen
            stake = self.groups * (self.STAKE * shadow.room + self.STAKE_HITS * (hits + self.STAKE_SEEN * seen))
            self._lags = debt > self._most() or debt * seen + hits * shadow.owed > stake * seen
        return self._lags

    def _judge(self) -> None:
        shadow, debt = self._shadow, self._shadow.debt
        if self.judged:
            self._bet()
            if self._bets.won and debt < self._most():
                self._bets.clear()
                self.judged = False
                self._from, self._hits_from = debt, shadow.hits
            return
        self._from = min(self._from, debt + self.CREDIT * shadow.room)
        hits = shadow.hits - self._hits_from
        trial = self._from + self.groups * (self.TRIAL * shadow.room + self.TRIAL_HITS * hits)
        if debt + self._risk() * shadow.owed > min(trial, self._most()):
            self.judged = True

    def _risk(self) -> float:
        """The part of the pages only LRU has that will be hits of LRU, by such pages of about the last two periods."""
        lost, spared = self._shadow.lost - self._seen[0], self._shadow.spared - self._seen[1]
        if lost + spared >= self._shadow.room:
            self._fading = (self._fading[0] + lost) / 2, (self._fading[1] + spared) / 2
            self._seen = self._shadow.lost, self._shadow.spared
            lost = spared = 0
        used = self._fading[0] + lost + self.SUSPECT
        return max(self.LEAST_RISK, used / (used + self._fading[1] + spared))

    def _bet(self) -> None:
        kept = self._shadow.first() if self._recency is None else next(iter(self._recency), None)
        if kept is None or kept in self._wagered:
            return
        for given in islice(self._order, self.LOOKED_AT):
            if given == kept:
                return
            if given not in self._wagered and not self._shadow.has_left(given) and not self._shadow.followed(given):
                self._bets.add(kept, given)
                return

    # -- a sample -----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        if self._recency is None:
            keys = self._shadow.recency()
            self._recency = LRU()
            self._recency.restore(keys, np.arange(len(keys)))
        self._lags = None
        more = _shift(self._shadow.room, self.SAMPLE)
        self._shadow = self._shadow.thinned(more)
        self._from, self._hits_from = self._from / (1 << more), self._hits_from >> more
        self._seen = self._seen[0] >> more, self._seen[1] >> more
        self._fading = self._fading[0] / (1 << more), self._fading[1] / (1 << more)


def _shift(pages: int, sample: int) -> int:
    """How often `pages` may be halved so that `sample` are left."""
    return max(0, (pages // sample).bit_length() - 1)
