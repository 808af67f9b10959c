"""Tiers of classes that the configuration names."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from gdscache.errors import TierUnavailableError
from gdscache.runtime.named_class import named_class
from gdscache.tiers.base import DurableTier

if TYPE_CHECKING:
    from gdscache.config import TierConfig
    from gdscache.pages.layout import PageLayout

_TAKEN = ("gpu", "cpu", "ssd", "planes", "bounce")  # names of tiers and memories that there are


def open_tier(config: TierConfig, layout: PageLayout, lock: threading.RLock) -> DurableTier:
    """An instance of the class that `config` names: `Class(layout, capacity, lock, **options)`.

    Raises `TierUnavailableError` where there is no such class, or it does not take these; and what the class raises.
    """
    given, options = (layout, config.capacity, lock), config.options or {}
    refuse = functools.partial(_bad_class, config.tier)
    tier: DurableTier = named_class(config.tier, DurableTier, refuse, *given, **options)(*given, **options)
    if tier.name in _TAKEN:
        tier.close()
        raise _bad_class(config.tier, f"its name is {tier.name!r}, which another tier or memory has")
    return tier


def _bad_class(target: str, cause: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"tier {target!r}: {cause}", "name a subclass of gdscache.tiers.base.DurableTier as package.module:Class"
    )
