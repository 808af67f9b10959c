"""Retentions that end, over all tiers. The manager's lock is held in every call.

There is no thread of its own: what has ended is found by the next lookup, plan or store. Time comes from a clock that
the manager was given: a steady one, since somebody may set the system's while an engine is open.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gdscache.index.retention import DEFAULT, Retention
from gdscache.pages.keys import Page

if TYPE_CHECKING:
    from gdscache.tiers.manager import TierManager

PIECE = 1024  # expired pages of a tier that one call drops, besides those that it is about
EXPIRED_KEPT = 1 << 16  # keys of expired pages, to tell their misses from others


def steady_clock(now: float) -> Callable[[], float]:
    """Seconds since the epoch, by a clock that begins at `now` and that nobody sets. It goes on while the machine
    sleeps."""
    since = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: since + time.clock_gettime(time.CLOCK_BOOTTIME)


class Expiry:
    """Drops pages whose time to live is over. `clock`: seconds since the epoch, as `Retention.expires`. `kept`: keys of
    expired pages that are remembered."""

    def __init__(self, manager: TierManager, clock: Callable[[], float], kept: int = EXPIRED_KEPT) -> None:
        self.clock = clock
        self._kept = kept
        self._manager = manager
        self._expired: OrderedDict[bytes, None] = OrderedDict()

    def run(self, pages: Sequence[Page]) -> None:
        """Drop expired pages: those among `pages`, so that none of them is found, and some of the others."""
        tiers = [(name, tier.index) for name, tier in self._manager.tiers.items() if tier.index.next_expiry < math.inf]
        now = self.clock() if tiers else -math.inf
        for name, index in tiers:
            if index.next_expiry <= now:
                gone = index.expire_among(pages, now) + index.expire(now, PIECE)
                self._manager.counts["expired", name] += len(gone)
                self._expired.update(dict.fromkeys(gone))
        while len(self._expired) > self._kept:
            self._expired.popitem(last=False)

    def was(self, key: bytes) -> bool:
        """Whether a page that is not there has expired, as far as that is remembered."""
        return key in self._expired

    def stored(self, pages: Sequence[Page], retention: Retention) -> None:
        """Pages are stored: what is there of them gets the greater priority and the later expiry."""
        if self._expired:
            for page in pages:
                self._expired.pop(page.key, None)
        for tier in self._manager.tiers.values():
            if retention == DEFAULT and not tier.index.retained_pages:
                continue
            for page in pages:
                tier.retain(page.key, retention)

    @property
    def retains(self) -> bool:
        """Whether a tier has pages with a retention of their own."""
        return any(tier.index.retained_pages for tier in self._manager.tiers.values())

    def joined(self, page: Page, retention: Retention) -> Retention:
        """`retention`, and what the tiers that have the page were told before."""
        for tier in self._manager.tiers.values():
            if tier.index.retained_pages:
                known = tier.index.retention(page.key)
                retention = retention if known is None else retention.joined(known)
        return retention

    def joined_all(self, pages: Sequence[Page], retention: Retention) -> list[Retention]:
        """`joined` of each page."""
        if not self.retains:
            return [retention] * len(pages)
        return [self.joined(page, retention) for page in pages]
