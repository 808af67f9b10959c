"""An eviction order that may differ from LRU's as long as it does not lose to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gdscache.native import LruShadow
from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.lifetime import Lifetime


class Bets:
    """Which of two orders chooses the better victims, by pages of both: the one that is wanted first was worth more.

    A bet is on two pages that the tier has, the first victims of either order. At most `MOST` are open, the oldest is
    forgotten.
    """

    MOST = 1024
    LEAST = 6  # bets that are enough to tell ...
    CLEAR = 2.0  # ... where so many standard deviations more are won than lost
    FADE = 400  # bets after which those before them count half
    __slots__ = ("_lost", "_won", "open")

    def __init__(self) -> None:
        self.open: dict[bytes, tuple[bytes, bool]] = {}  # a page -> the other, whether the order wins by this one
        self._won = self._lost = 0

    def add(self, kept: bytes, given: bytes) -> None:
        """The order would keep one page, which LRU gives up, and give up the other."""
        self.open[given] = kept, False
        self.open[kept] = given, True
        if len(self.open) > 2 * self.MOST:
            oldest = next(iter(self.open))
            del self.open[self.open.pop(oldest)[0]]

    def wanted(self, key: bytes) -> None:
        """A page of an open bet is used, or stored again."""
        other, wins = self.open.pop(key)
        del self.open[other]
        self._won += wins
        self._lost += not wins
        if self._won + self._lost >= self.FADE:
            self._won, self._lost = self._won // 2, self._lost // 2

    @property
    def won(self) -> bool:
        settled = self._won + self._lost
        return settled >= self.LEAST and self._won - self._lost >= self.CLEAR * math.sqrt(settled)

    def clear(self) -> None:
        self.open.clear()
        self._won = self._lost = 0


class Guarded:
    """Another order's victims while that costs few hits against LRU, else those that LRU has given up.

    A shadow of LRU (`LruShadow`) is shown the same uses and stores. The order is *free* while the debt, LRU's hits less
    its own, and the part `risk` of the pages that only LRU still has stay within a budget; `risk` is how many of such
    pages were used before LRU gave them up too. Past that it *follows*: it gives up the pages that LRU has given up,
    and so becomes LRU little by little. It is free again when it has won bets on its victims against LRU's.

    Traffic that changes may want all of these pages at once, whatever was their part before. So it follows, eviction by
    eviction, also while the debt, and of these pages as large a part as LRU finds of all that is asked for, are above
    what may be at `STAKE`.

    The bound: with a debt L and d pages that only LRU has, following never raises L + d, since each hit that only LRU
    has takes a page from d. So L never passes the budget within which the order is free by more than d, and d is at
    most the tier's pages: over any traffic the order has LRU's hits, less `MOST_HITS` of them, less a constant of the
    tier's size (`bound`). docs/replay.md has the proof, and what it leaves out.

    With more than `EXACT` pages the shadow is that of a sample of `SAMPLE` pages or more, up to twice as many; then the
    bound holds as far as the sample tells, and following is the order of LRU over the pages that are there.
    """

    EXACT = 100_000
    SAMPLE = 8192
    TRIAL = 0.025  # budget of each time that the order is free: a share of the pages, ...
    TRIAL_HITS = 0.002  # ... and of the hits that LRU had meanwhile
    MOST = 0.02  # budget of all times together: a share of the pages, ...
    MOST_HITS = 0.003  # ... and of all hits that LRU had
    STAKE = 0.025  # a share of the pages, ...
    STAKE_HITS = 0.0175  # ... and of LRU's hits and of `STAKE_SEEN` of all that was asked for
    STAKE_SEEN = 0.01
    CREDIT = 0.25  # hits ahead of LRU that count at most, a share of the pages: what was won long ago is not lost now
    LEAST_RISK = 0.02
    SUSPECT = 16  # pages that count as used in `risk`, before any is known
    LOOKED_AT = 64  # of the first victims of the order, for a bet
    PATIENCE = 256  # it is judged each time that such a part of its pages was evicted
    order: ClassVar[type[EvictionPolicy]] = Lifetime
    __slots__ = (
        *("_bets", "_due", "_fading", "_from", "_hits_from", "_lags", "_order", "_recency", "_seen", "_shadow"),
        *("_wagered", "judged"),
    )

    def __init__(self) -> None:
        self.restore((), ())

    def empty(self) -> Guarded:
        return type(self)()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._order: EvictionPolicy = self.order()
        self._order.restore(keys, order)
        self._bets = Bets()
        self._wagered = self._bets.open
        self.judged = False  # it follows until it has won bets
        self._from = 0.0  # the debt that the budget of this time counts from
        self._hits_from = 0
        self._seen = (0, 0)  # `lost` and `spared` of the shadow at the last fading ...
        self._fading = (0.0, 0.0)  # ... and what was counted before, faded
        self._due = 0  # pages until it is judged
        self._lags: bool | None = None  # too much is lost or at stake; None: not known since the shadow changed
        self._recency: LRU | None = None  # of all pages, where the shadow is a sample
        sampled = len(order) > self.EXACT
        if sampled:
            self._recency = LRU()
            self._recency.restore(keys, order)
        self._shadow = LruShadow([keys[i] for i in order], _shift(len(order), self.SAMPLE) if sampled else 0)

    # -- pages come, are used, and go ---------------------------------------------------------------------------------

    def insert(self, key: bytes, parent: bytes = b"") -> None:
        self.insert_all(((key, parent),))

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        self._order.insert_all(pages)
        self._show(pages)
        if self._wagered:
            self._want([key for key, _ in pages])

    def _show(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        """The shadow sees new pages, and becomes that of a sample where it is too large then."""
        self._lags = None
        while pages:
            shown, too_large = self._shadow.insert(pages, self.EXACT if self._recency is None else 2 * self.SAMPLE)
            if self._recency is not None:
                self._recency.insert_all(pages[:shown])
            if too_large:
                self._sample()
            pages = pages[shown:]

    def touch(self, key: bytes) -> None:
        self.touch_all((key,))

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
            some = gone[at : at + max(self._due, 1)]  # up to the one before which it is judged again
            self._due -= len(some) - 1
            at += len(some)
            self._order.evict_all(some)
            if self._recency is not None:
                self._recency.evict_all(some)
            self._shadow.evict([key for key, _ in some])
            self._lags = None

    # -- for eviction -------------------------------------------------------------------------------------------------

    def defer(self, key: bytes) -> None:
        if not self.following:  # what LRU passes over says nothing of the other order
            self._order.defer(key)

    def hasten(self, key: bytes) -> None:
        self._order.hasten(key)

    def is_deferred(self, key: bytes) -> bool:
        return not self.following and self._order.is_deferred(key)

    def __iter__(self) -> Iterator[bytes]:
        return self._as_lru() if self.following else iter(self._order)

    def _as_lru(self) -> Iterator[bytes]:
        return chain.from_iterable(iter(self._shadow.walk(), [])) if self._recency is None else iter(self._recency)

    # -- the judge ----------------------------------------------------------------------------------------------------

    @property
    def bound(self) -> float:
        """Hits that LRU may be ahead at most, by what it has had so far; the pages of one store come on top."""
        shadow = self._shadow
        return (self._most() + shadow.room) * (1 << shadow.shift)

    @property
    def debt(self) -> int:
        """Hits that LRU is ahead; below 0 where it is behind. With a sample, an estimate."""
        return self._shadow.debt << self._shadow.shift

    def _most(self) -> float:
        return self.MOST * self._shadow.room + self.MOST_HITS * self._shadow.hits

    @property
    def following(self) -> bool:
        """Whether it gives up the pages that LRU has given up: it was judged so, or too much is lost or at stake."""
        if self.judged:
            return True
        if self._lags is None:
            shadow = self._shadow
            debt, hits, seen = shadow.debt, shadow.hits, shadow.seen
            stake = self.STAKE * shadow.room + self.STAKE_HITS * (hits + self.STAKE_SEEN * seen)
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
        trial = self._from + self.TRIAL * shadow.room + self.TRIAL_HITS * (shadow.hits - self._hits_from)
        if debt + self._risk() * shadow.owed > min(trial, self._most()):
            self.judged = True

    def _risk(self) -> float:
        """The part of the pages that only LRU has which will be a hit of it, by those of the last two periods or so."""
        lost, spared = self._shadow.lost - self._seen[0], self._shadow.spared - self._seen[1]
        if lost + spared >= self._shadow.room:
            self._fading = (self._fading[0] + lost) / 2, (self._fading[1] + spared) / 2
            self._seen = self._shadow.lost, self._shadow.spared
            lost = spared = 0
        used = self._fading[0] + lost + self.SUSPECT
        return max(self.LEAST_RISK, used / (used + self._fading[1] + spared))

    def _bet(self) -> None:
        """On the first victims of either order, where they differ and no bet is open on them."""
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
        """The shadow is too large: from now on that of a sample, or of a smaller one."""
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
