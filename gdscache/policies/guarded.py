"""An eviction order that may differ from LRU's while it does not lose to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gdscache.native import LifetimeOrder, LruShadow
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.lifetime import Lifetime


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
        self._shadow = LruShadow([keys[i] for i in order], _shift(len(order), self.SAMPLE) if sampled else 0)

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
            self._recency.restore(keys, range(len(keys)))
        self._lags = None
        more = _shift(self._shadow.room, self.SAMPLE)
        self._shadow = self._shadow.thinned(more)
        self._from, self._hits_from = self._from / (1 << more), self._hits_from >> more
        self._seen = self._seen[0] >> more, self._seen[1] >> more
        self._fading = self._fading[0] / (1 << more), self._fading[1] / (1 << more)


def _shift(pages: int, sample: int) -> int:
    """How often `pages` may be halved so that `sample` are left."""
    return max(0, (pages // sample).bit_length() - 1)
