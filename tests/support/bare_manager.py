"""A manager over tiers without memory, and a clock that a test turns."""

from __future__ import annotations

import threading
from typing import Any

from gdscache.engine.engine import CacheEngine
from gdscache.index.index import PageIndex
from gdscache.index.retention import Retention
from gdscache.tiers.base import Tier
from gdscache.tiers.manager import TierManager


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class BareTier(Tier):
    """An index without bytes."""

    def __init__(self, tier: str, slots: int) -> None:
        self.name = tier
        self.kind = "memory" if tier == "cpu" else "files"
        self.index = PageIndex(slots)

    @property
    def capacity(self) -> int:
        return self.index.slots

    def describe(self) -> dict[str, Any]:
        return {}

    def retain(self, key: bytes, retention: Retention) -> None:
        self.index.retain(key, retention)

    def close(self) -> None: ...


def bare_manager(slots: int, clock: Clock) -> TierManager:
    tiers: list[Any] = [BareTier("cpu", slots), BareTier("ssd", slots)]
    return TierManager(threading.RLock(), tiers, wall_clock=clock, clock=clock)


def set_clock(engine: CacheEngine) -> Clock:
    """What expires in an engine goes by this clock from now on."""
    clock = Clock()
    engine.manager.expiry.clock = engine.manager.pins.clock = clock
    return clock
