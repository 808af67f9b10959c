"""The contract of eviction orders, LRU, and their shared part. The table of all orders is in `policies`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from gdscache.native import LifetimeOrder, ReuseSample


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


class NativeOrder(LifetimeOrder):
    """An order in the native library, of which a kind has `restore`."""

    def __init__(self) -> None:
        super().__init__()
        self.restore((), ())

    def empty(self) -> Self:
        return type(self)()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        raise NotImplementedError

    def remove(self, key: bytes) -> None:
        self.evict_all(((key, None),))

    def __iter__(self) -> Iterator[bytes]:
        return itertools.chain.from_iterable(iter(self.walk(), []))


class LRU(NativeOrder):
    """Least recently used first: the order of lifetimes (`Lifetime`) where all lifetimes are equal, and no page is
    deferred. Callers touch a prefix tail first, so that heads outlive tails."""

    def __init__(self, groups: int = 1) -> None:
        """`groups`: as every order in `POLICIES`. LRU is the same for any number."""
        super().__init__()

    def restore(self, keys: Sequence[bytes], order: Sequence[int] | npt.NDArray[np.int64]) -> None:
        groups, sizes, uses, gaps = self.SHAPE
        unused = ReuseSample(groups * sizes + uses * gaps, 1, 1)
        unused.last = 1 << 62  # so that no conclusion is ever due
        self.begin(keys, order, unused, lambda pages, stored: None)

    def defer_all(self, keys: Sequence[bytes]) -> None:
        return

    def deferring(self) -> Sequence[LifetimeOrder]:
        return ()
