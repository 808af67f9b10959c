"""Pins: what a request keeps from eviction for a time. `Pin` is the caller's handle, `Claim` the pin of a prefetch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from gdscache.errors import EngineClosedError, ForkedProcessError
from gdscache.index.table import Entry
from gdscache.pages.keys import Page
from gdscache.tiers.base import Lease

if TYPE_CHECKING:
    from gdscache.index.index import PageIndex
    from gdscache.tiers.pinning import Pins


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

        Fewer than asked for if pages were not cached, or if every tier that has the next page has pinned all it may
        (`PIN_SHARE` of its slots). 0 once the pin has ended.
        """
        with self._pins.manager.calls, self._pins.manager.lock:
            self._pins.end_due()
            return self.count() * self._page_tokens

    def count(self) -> int:
        """Pages of it that are held, and not dropped. The lock is held."""
        return sum(1 for _ in itertools.takewhile(lambda some: not all(e.dropped for e in some), self._pages))

    def release(self) -> None:
        """Let the pages go; twice is fine."""
        with contextlib.suppress(EngineClosedError), self._pins.manager.calls, self._pins.manager.lock:
            self._pins.end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ForkedProcessError):
            self.release()


class Claim(Pin):
    """The pins of a prefetch: pages that lie in the landing tier, and room there for those that are to come.

    `pages`: those that found room, in order; `promised`: the keys of those to come, by their numbers. The manager's
    lock guards it, but `good` may be asked for without.
    """

    def __init__(self, pins: Pins, lease: Lease, index: PageIndex, page_tokens: int, until: float) -> None:
        super().__init__(pins, lease, [], page_tokens, until)
        self.pages: list[Page] = []
        self.promised: dict[int, bytes] = {}
        self.slots: list[int | None] = []  # of each page: where it lies and is held, None before it has come
        self._index = index
        self._good = 0  # pages from the first on that are held, when the index had `_torn` pages torn
        self._torn = index.torn

    def take(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """The next pages are there: each with a lease, which the claim has from now on."""
        self._lease.hold(self._index, pages, slots)
        self._good += len(slots) if self._good == len(self.pages) else 0
        self.pages += pages
        self.slots += slots

    def expect(self, pages: Sequence[Page]) -> None:
        """The next pages are to come."""
        first = len(self.pages)
        self.promised.update((first + i, page.key) for i, page in enumerate(pages))
        self.pages += pages
        self.slots += [None] * len(pages)

    def holds(self, number: int) -> bool:
        """Whether it has a page that was not dropped: one that was, and came again, is in another slot."""
        slot = self.slots[number]
        return slot is not None and self._index.slot(self.pages[number].key) == slot

    def put(self, number: int, slot: int) -> None:
        """A page has come."""
        self.slots[number] = slot
        self._good = self._held_from(self._good)

    def cut(self, pages: int) -> None:
        """Only the first `pages` are left."""
        del self.pages[pages:], self.slots[pages:]

    def gone(self) -> None:
        """It has ended."""
        self.promised, self.slots = {}, []
        self._good = 0

    def _held_from(self, first: int) -> int:
        """Where the first page behind `first` is that is not held, or dropped."""
        return next(itertools.filterfalse(self.holds, range(first, len(self.slots))), len(self.slots))

    def count(self) -> int:
        """Pages from the first on that are held, and not dropped."""
        if self._torn != self._index.torn:
            self._good = self._held_from(0)  # before what says that it is right: it is read without the lock
            self._torn = self._index.torn
        return self._good

    @property
    def good(self) -> int:
        """Pages from the first on that are held and not dropped; 0 when it has ended. Costs little."""
        pins = self._pins
        if pins.clock() >= self.until:
            return 0
        if self._torn == self._index.torn:
            return self._good
        with pins.manager.lock:
            return self.count()
