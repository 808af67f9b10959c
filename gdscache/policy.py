"""Eviction orders: pure data structures over page keys, O(1) an operation, a row each in `POLICIES`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order in which a tier gives up its pages. Knows keys only; whether a page may go is the index's question."""

    def insert(self, key: bytes) -> None:
        """A new page, never present before the call."""

    def restore(self, keys: Sequence[bytes]) -> None:
        """Start over with these pages, the first to evict first."""

    def touch(self, key: bytes) -> None:
        """A use of a present page."""

    def remove(self, key: bytes) -> None:
        """The page is gone."""

    def __iter__(self) -> Iterator[bytes]:
        """Keys, the first to evict first. Not changed while it is iterated."""
        ...


class LRU:
    """Least recently used first. Whoever touches a prefix touches its tail first, so that heads outlive tails."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes) -> None:
        self._order[key] = None

    def restore(self, keys: Sequence[bytes]) -> None:
        self._order = OrderedDict.fromkeys(keys)

    def touch(self, key: bytes) -> None:
        self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._order[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._order)


POLICIES: dict[str, type[LRU]] = {"lru": LRU}
