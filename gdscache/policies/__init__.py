"""Eviction orders, by the names that `eviction` of a configuration has. Every operation is O(1), amortised.

An order does not know the tier's capacity: shares are of the pages that are present, which is the same once the tier
is full. Looking at the order changes nothing.
"""

from __future__ import annotations

from gdscache.policies.base import LRU, EvictionPolicy
from gdscache.policies.guarded import Guarded

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "lifetime": Guarded}


def new_policy(name: str) -> EvictionPolicy:
    """An order of a row of `POLICIES`, without pages. Raises KeyError for a name that is not in the table."""
    return POLICIES[name]()
