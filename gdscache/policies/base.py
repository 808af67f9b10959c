"""The contract of eviction orders, LRU, and their shared part. The table of all orders is in `policies`."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdscache.native import LifetimeOrder

WARMED = 8  # restored keys that enter the order with each page that comes or goes


class EvictionPolicy(Protocol):
    """The order in which a tier evicts its pages. Knows keys only; the index decides whether a page may go.

    By default eviction is removal, and pages that are passed over stay: they were stored together, and soon go
    together.
    """

    __slots__ = ()

    def empty(self) -> EvictionPolicy:
        """Another order of this kind, without pages."""
        ...

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Start over with the pages `keys[order[0]], keys[order[1]], ...`, the first to evict first."""

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        """New pages, absent before: the key of each, and that of the page before it, present or not."""

    def touch_all(self, keys: Sequence[bytes]) -> None: ...

    def remove(self, key: bytes) -> None: ...

    def evict_all(self, gone: Sequence[tuple[bytes, bytes | None]]) -> None:
        """`remove` each evicted page, in this order.

        Each comes with the page that has no follower left without it, or None; that page is then `hasten`ed.
        """
        for key, freed in gone:
            self.remove(key)
            if freed is not None:
                self.hasten(freed)

    def defer_all(self, keys: Sequence[bytes]) -> None:
        """Present pages were passed over, since others follow them. They may come behind all others until `hasten` or
        a use.

        For orders in which such pages gather in front; other orders do nothing.
        """
        return

    def hasten(self, key: bytes) -> None:
        """A present page has no follower left. If it is deferred, it is the first of its rank again."""
        return

    def deferring(self) -> Sequence[LifetimeOrder]:
        """The native orders that say which pages are deferred; none: no page is."""
        return ()

    def __iter__(self) -> Iterator[bytes]:
        """Keys, the first to evict first. The order must not change meanwhile."""
        ...


class LRU(EvictionPolicy):
    """Least recently used first. Callers touch a prefix tail first, so that heads outlive tails.

    Restored keys enter the order little by little: a million at once take more than a second. Until then they are in
    `_cold[_cold_from:_cold_to]`, the first to evict first; keys used meanwhile are in `_order` too, removed ones in
    `_gone`.
    """

    __slots__ = ("_cold", "_cold_from", "_cold_to", "_gone", "_keys", "_order")

    def __init__(self, groups: int = 1) -> None:
        """`groups`: as every order in `POLICIES`. LRU is the same for any number."""
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self.restore((), ())

    def empty(self) -> LRU:
        return LRU()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._order = OrderedDict()
        self._keys = keys
        self._cold = array("i", np.asarray(order, np.intc).tobytes())
        self._cold_from, self._cold_to = 0, len(order)
        self._gone: set[bytes] = set()

    def insert_all(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        self._order.update(dict.fromkeys([key for key, _ in pages]))
        for _ in pages if self._cold_to else ():
            self._warm()

    def touch_all(self, keys: Sequence[bytes]) -> None:
        if self._cold_to:
            self._order.update(dict.fromkeys(keys))
        for key in keys:
            self._order.move_to_end(key)

    def evict_all(self, gone: Sequence[tuple[bytes, bytes | None]]) -> None:
        if self._cold_to:
            super().evict_all(gone)
        else:
            for key, _ in gone:
                del self._order[key]

    def remove(self, key: bytes) -> None:
        if not self._cold_to:
            del self._order[key]
            return
        self._order.pop(key, None)
        self._gone.add(key)
        self._warm()

    def __iter__(self) -> Iterator[bytes]:
        if self._cold_from == self._cold_to:
            return iter(self._order)
        return itertools.chain(self._still_cold(), self._order)

    def _still_cold(self) -> Iterator[bytes]:
        order, gone = self._order, self._gone
        for i in range(self._cold_from, self._cold_to):
            key = self._keys[self._cold[i]]
            if key not in order and key not in gone:
                yield key
            elif i == self._cold_from:
                self._cold_from += 1  # skip it next time

    def _warm(self) -> None:
        order, gone, end = self._order, self._gone, self._cold_to
        first = max(self._cold_from, end - WARMED)
        for i in range(end - 1, first - 1, -1):
            key = self._keys[self._cold[i]]
            if key not in order and key not in gone:
                order[key] = None
                order.move_to_end(key, last=False)
        self._cold_to = first
        if first == self._cold_from:
            self._keys, self._cold, self._cold_from, self._cold_to = (), array("i"), 0, 0
            self._gone = set()
