"""Engines with a write policy, and what has been written."""

from __future__ import annotations

from gdscache.storage.base import Op
from tests.support.faulty import PLAN
from tests.support.helpers import Host

FAULTY = "tests.support.faulty:FaultyTransport"


def on(host: Host, tier: str, tokens: list[int]) -> list[int]:
    """The places of a prompt's pages that a tier shows."""
    with host.engine.manager.lock:
        index = host.engine.manager.tiers[tier].index
        return [i for i, page in enumerate(host.engine.pages(tokens)) if index.has(page.key)]


def dirty(host: Host) -> int:
    return int(host.engine.stats()["tiers"]["cpu"]["dirty_pages"])


def written() -> int:
    return len(PLAN.moved[Op.WRITE])
