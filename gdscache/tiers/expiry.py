"""Times to live, over all tiers. The manager's lock is held in every call.

There is no thread: the next lookup, plan or store drops expired pages. The clock is the manager's: a steady one, since
the system's may be set while an engine is open.
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

PIECE = 1024  # expired pages of a tier that one call drops, besides the call's own pages
EXPIRED_KEPT = 1 << 16  # keys of expired pages, to tell their misses from others


def steady_clock(now: float) -> Callable[[], float]:
    """Seconds since the epoch, by a clock that begins at `now` and cannot be set. It goes on while the machine
    sleeps."""
    since = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: since + time.clock_gettime(time.CLOCK_BOOTTIME)


class Expiry:
    """Drops pages whose time to live is over. `clock`: seconds since the epoch, as `Retention.expires`. `kept`:
    remembered keys of expired pages."""

    def __init__(self, manager: TierManager, clock: Callable[[], float], kept: int = EXPIRED_KEPT) -> None:
        self.clock = clock
        self._kept = kept
        self._manager = manager
        self._expired: OrderedDict[bytes, None] = OrderedDict()

    def run(self, pages: Sequence[Page]) -> None:
        """Drop the expired pages among `pages`, and a bounded number of others."""
        tiers = [tier for tier in self._manager.tiers.values() if tier.index.orders.expiries.first < math.inf]
        now = self.clock() if tiers else -math.inf
        for tier in tiers:
            if tier.index.orders.expiries.first <= now:
                gone = tier.index.expire_among(pages, now) + tier.index.expire(now, PIECE)
                self._manager.counts["expired", tier.name] += len(gone)
                self._expired.update(dict.fromkeys(gone))
        while len(self._expired) > self._kept:
            self._expired.popitem(last=False)

    def was(self, key: bytes) -> bool:
        return key in self._expired

    def stored(self, pages: Sequence[Page], retention: Retention) -> None:
        """Pages are stored: where they are present, they get the greater priority and the later expiry."""
        if self._expired:
            for page in pages:
                self._expired.pop(page.key, None)
        for tier in self._manager.tiers.values():
            if retention == DEFAULT and not tier.index.orders.retained:
                continue
            for page in pages:
                tier.retain(page.key, retention)

    @property
    def retains(self) -> bool:
        return any(tier.index.orders.retained for tier in self._manager.tiers.values())

    def joined(self, page: Page, retention: Retention) -> Retention:
        for tier in self._manager.tiers.values():
            known = tier.index.retention(page.key)
            retention = retention if known is None else retention.joined(known)
        return retention

    def joined_all(self, pages: Sequence[Page], retention: Retention) -> list[Retention]:
        if retention == DEFAULT and not self.retains:
            return [retention] * len(pages)
        return [self.joined(page, retention) for page in pages]
