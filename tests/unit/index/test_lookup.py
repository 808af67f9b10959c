"""A lookup's answer, page by page, against the plainest one: the first tier that shows the page."""

from __future__ import annotations

import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from gdscache.commands.replay.hierarchy import ModelSsd, ModelTier
from gdscache.index.table import PageState
from gdscache.pages.keys import Page
from gdscache.tiers.manager import TierManager

SPACE = b"n" * 32
PAGES = 600  # more than are looked for at a time
KEYS = [SPACE, *(number.to_bytes(32, "big") for number in range(1, PAGES + 1))]
PROMPT = [Page(key, parent, SPACE) for parent, key in itertools.pairwise(KEYS)]

runs = st.lists(st.tuples(st.integers(1, 300), st.sets(st.sampled_from(["gpu", "cpu", "ssd"]))), max_size=8)


@given(runs, st.sets(st.integers(0, PAGES - 1), max_size=3), st.integers(0, PAGES))
def test_each_page_is_found_in_the_fastest_tier_that_shows_it(
    where: list[tuple[int, set[str]]], reserved: set[int], start: int
) -> None:
    tiers = {"gpu": ModelTier("gpu", PAGES, 4096, "lru"), "cpu": ModelTier("cpu", PAGES, 4096, "lru")}
    tiers["ssd"] = ModelSsd(PAGES, 4096, "lru", 0)
    manager = TierManager(threading.RLock(), list(tiers.values()))
    shown = [name_set for pages, name_set in where for _ in range(pages)][:PAGES]
    for number, names in enumerate(shown):
        for name in names:
            state = PageState.PENDING if number in reserved and name == "cpu" else PageState.VERIFIED
            tiers[name].index.insert(PROMPT[number], number, state)
    expected = []
    for page in PROMPT[start:]:
        first = next((name for name, tier in tiers.items() if tier.index.has(page.key)), None)
        if first is None:
            break
        expected.append(first)
    assert manager.peek(PROMPT) == manager.lookup(PROMPT, 0)
    before = manager.stats().get("hits", {})
    assert manager.lookup(PROMPT, start) == expected
    after = manager.stats().get("hits", {})
    assert {name: after[name] - before.get(name, 0) for name in after} == {name: expected.count(name) for name in after}
