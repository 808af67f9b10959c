"""Where the pages of a prompt lie, pages that go, and what was missed."""

from __future__ import annotations

from collections.abc import Iterable

from gdscache import CacheEngine

FAULTY = "tests.support.faulty:FaultyTransport"


def slot_of(engine: CacheEngine, tokens: list[int], page: int, tier: str = "ssd") -> int:
    """The slot of one page of a prompt in a tier that has it."""
    entry = engine.manager.tiers[tier].index.get(engine.pages(tokens)[page].key)
    return entry.slot


def offset_of(engine: CacheEngine, tokens: list[int], page: int) -> int:
    return slot_of(engine, tokens, page) * engine.layout.extent_bytes


def lose(engine: CacheEngine, tokens: list[int], pages: Iterable[int], *tiers: str) -> None:
    """Drop single pages of a prompt from these tiers, or from all; each tier must have them."""
    names = engine.pages(tokens)
    with engine.manager.lock:
        for name in tiers or engine.manager.tiers:
            index = engine.manager.tiers[name].index
            for page in pages:
                index.drop(index.get(names[page].key))


def misses(engine: CacheEngine) -> dict[str, int]:
    """Misses by cause, but for pages that were never there."""
    return {cause: n for cause, n in engine.stats().get("misses", {}).items() if cause != "absent"}
