"""What requests want kept, over all tiers: retentions that end, and pins. The manager's lock is held in every call.

There is no thread of its own: what has ended is found by the next lookup, plan or store. Time comes from clocks that
the manager was given.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gdscache import arguments
from gdscache.errors import ForkedProcessError
from gdscache.keys import Page
from gdscache.tiers.base import Lease
from gdscache.tiers.pages import Entry
from gdscache.tiers.retention import DEFAULT, LONGEST_TTL, Retention

if TYPE_CHECKING:
    from gdscache.tiers.manager import TierManager

PIECE = 1024  # expired pages of a tier that one call drops, besides those that it is about
PIN_SHARE = 0.5  # of a tier's slots: what pins may hold together
_EXPIRED_KEPT = 1 << 16  # keys of expired pages, to tell their misses from others


class Pin:
    """The pages of a prefix, kept from eviction on every tier that has them, until `release` or until its time is up.

    Made by `CacheEngine.pin`. A page that is cleared, invalidated, found bad or expired goes all the same.
    """

    def __init__(self, pins: Pins, lease: Lease, pages: list[list[Entry]], page_tokens: int, until: float) -> None:
        self._pins = pins
        self._lease = lease
        self._pages = pages
        self._page_tokens = page_tokens
        self.until = until  # by the manager's monotonic clock

    @property
    def tokens(self) -> int:
        """Tokens of the prefix that it holds now.

        Fewer than asked for where pages were not cached, or where every tier that has the next page has as many pinned
        as it may (`PIN_SHARE` of its slots); 0 once it has ended.
        """
        return self._pins.manager.calls.run(self._count)

    def _count(self) -> int:
        with self._pins.manager.lock:
            self._pins.end_due()
            held = itertools.takewhile(lambda entries: not all(e.dropped for e in entries), self._pages)
            return sum(1 for _ in held) * self._page_tokens

    def release(self) -> None:
        """Let the pages go; twice is fine."""
        self._pins.manager.calls.run(self._end)

    def _end(self) -> None:
        with self._pins.manager.lock:
            self._pins.end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ForkedProcessError):
            self.release()


class Pins:
    """The pins that have not ended. `clock`: seconds, monotonic."""

    def __init__(self, manager: TierManager, clock: Callable[[], float]) -> None:
        self.manager = manager
        self.clock = clock
        self._pins: dict[Lease, Pin] = {}
        self._held: dict[str, Counter[Entry]] = {name: Counter() for name in manager.tiers}
        self._ends: list[tuple[float, int, Pin]] = []
        self._numbers = itertools.count()

    def begin(self, pages: Sequence[Page], seconds: float, page_tokens: int) -> Pin:
        """Lease the consecutive pages from the first on that some tier has, on every tier, up to its bound."""
        seconds = arguments.span(seconds, "seconds", LONGEST_TTL)
        lease = self.manager.lease("pin")
        distinct = {page.key: page for page in pages}.values()
        held = list(itertools.takewhile(bool, (self._hold(page, lease) for page in distinct)))
        pin = self._pins[lease] = Pin(self, lease, held, page_tokens, self.clock() + seconds)
        heapq.heappush(self._ends, (pin.until, next(self._numbers), pin))
        return pin

    def _hold(self, page: Page, lease: Lease) -> list[Entry]:
        found = []
        for name, tier in self.manager.tiers.items():
            entry, held = tier.index.get(page.key), self._held[name]
            if entry is None or self.manager.hidden(name, entry.slot):
                continue
            if entry in held or len(held) < int(PIN_SHARE * tier.index.slots):
                lease.add(tier.index, entry)
                held[entry] += 1
                found.append(entry)
        return found

    def end(self, pin: Pin) -> None:
        if self._pins.pop(pin._lease, None) is None:
            return
        for _, entry in pin._lease:
            for held in self._held.values():
                if held[entry] == 1:
                    del held[entry]
                elif entry in held:
                    held[entry] -= 1
        pin._pages = []
        self.manager.end(pin._lease)
        if len(self._ends) > 2 * len(self._pins) + 16:
            self._ends = sorted(end for end in self._ends if end[2]._lease in self._pins)

    def end_due(self) -> None:
        """End the pins whose time is up."""
        while self._ends and self._ends[0][0] <= self.clock():
            self.end(heapq.heappop(self._ends)[2])

    def seconds_left(self, lease: Lease) -> float | None:
        """Of the pin whose lease this is; None for a lease of somebody else."""
        pin = self._pins.get(lease)
        return None if pin is None else max(0.0, pin.until - self.clock())


class Expiry:
    """Drops pages whose time to live is over. `clock`: seconds since the epoch, as `Retention.expires`."""

    def __init__(self, manager: TierManager, clock: Callable[[], float]) -> None:
        self.clock = clock
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
        while len(self._expired) > _EXPIRED_KEPT:
            self._expired.popitem(last=False)

    def was(self, page: Page) -> bool:
        """Whether a page that is not there has expired, as far as that is remembered."""
        return page.key in self._expired

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

    def joined(self, page: Page, retention: Retention) -> Retention:
        """`retention`, and what the tiers that have the page were told before."""
        for tier in self._manager.tiers.values():
            if tier.index.retained_pages:
                known = tier.index.retention(page.key)
                retention = retention if known is None else retention.joined(known)
        return retention

    def joined_all(self, pages: Sequence[Page], retention: Retention) -> list[Retention]:
        """`joined` of each page."""
        if not any(tier.index.retained_pages for tier in self._manager.tiers.values()):
            return [retention] * len(pages)
        return [self.joined(page, retention) for page in pages]
