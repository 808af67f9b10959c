"""Tiers of classes that the configuration names."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from gdscache.errors import TierUnavailableError
from gdscache.tiers.base import DurableTier

if TYPE_CHECKING:
    from gdscache.config import TierConfig
    from gdscache.pages.layout import PageLayout

_TAKEN = ("gpu", "cpu", "ssd", "planes", "bounce")  # names of tiers and memories that there are


def open_tier(config: TierConfig, layout: PageLayout, lock: threading.RLock) -> DurableTier:
    """An instance of the class that `config` names: `Class(layout, capacity, lock, **options)`.

    Raises `TierUnavailableError` where there is no such class, or it does not take these; and what the class raises.
    """
    module_name, _, class_name = config.tier.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _bad_class(config.tier, f"{module_name} cannot be imported: {error}") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, DurableTier)):
        raise _bad_class(config.tier, f"{class_name!r} of {module_name} is no subclass of DurableTier")
    if inspect.isabstract(found):
        raise _bad_class(config.tier, f"it lacks {', '.join(sorted(found.__abstractmethods__))}")
    constructor: Callable[..., DurableTier] = found
    options = config.options or {}
    try:
        inspect.signature(constructor).bind(layout, config.capacity, lock, **options)
    except TypeError as error:
        raise _bad_class(config.tier, f"it does not take the options {sorted(options)}: {error}") from error
    tier = constructor(layout, config.capacity, lock, **options)
    if tier.name in _TAKEN:
        tier.close()
        raise _bad_class(config.tier, f"its name is {tier.name!r}, which another tier or memory has")
    return tier


def _bad_class(target: str, cause: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"tier {target!r}: {cause}", "name a subclass of gdscache.tiers.base.DurableTier as package.module:Class"
    )
