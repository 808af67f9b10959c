"""Eviction orders by the names of the setting `eviction`. Every operation is O(1), amortised.

An order does not know the tier's capacity: shares are of the present pages, which is the same once the tier is full.
Iterating changes nothing.
"""

from __future__ import annotations

from gdscache.policies.base import LRU
from gdscache.policies.guarded import Guarded

POLICIES: dict[str, type[LRU] | type[Guarded]] = {"lru": LRU, "lifetime": Guarded}
