"""What of a request is cached in all groups of a hybrid model at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from gdscache.groups.base import Group, Presence, complete, lengths, needed
from gdscache.groups.names import GroupNames, GroupPage
from gdscache.groups.reasons import AskedGroup, group_reasons, group_words
from gdscache.pages.hit import Hit

if TYPE_CHECKING:
    from gdscache.engine import CacheEngine

Used = TypeVar("Used")
_TRIES = 4  # pages may go while one looks for others


@dataclasses.dataclass(frozen=True)
class GroupHit:
    """`hit.tokens` tokens are cached in all groups, in `pages`, which are `hit.pages` in that order. `whole`: up to how
    many tokens the groups that keep all tokens have every page: where a prompt that parts later may have parted."""

    hit: Hit
    pages: tuple[GroupPage, ...]
    whole: int


def longest(engine: CacheEngine, names: GroupNames, most: int) -> int:
    """The length in tokens of the longest hit, up to `most`. Counts as no use of its pages."""
    return next(lengths(names.groups, names.presence(engine.manager.visible), min(most, names.tokens)), 0)


def settled(
    groups: Sequence[Group], has: Presence, most: int, use: Callable[[int], Used | None], *, local: int = 0
) -> tuple[Used | None, int]:
    """What `use` makes of the longest hit of up to `most` tokens, and up to how many tokens the groups that keep all
    tokens have every page. `local`: tokens that need no page.

    `use(tokens)` uses the pages of a hit and returns None where one has gone since they were asked for; None is
    returned where that happens again and again.
    """
    whole = local
    for _ in range(_TRIES):
        whole = complete(groups, has, most, local=local)
        used = use(next(lengths(groups, has, most, local=local, whole=whole), local))
        if used is not None:
            return used, whole
    return None, whole


def find(engine: CacheEngine, names: GroupNames, most: int, tokens: int) -> GroupHit:
    """The longest hit of up to `most` tokens, of a request of `tokens`. Counts a use of its pages.

    With `load.gate: enforcing`, a hit that takes longer to load than to compute is left out as a whole.
    """
    manager, groups, most = engine.manager, names.groups, min(most, names.tokens)

    def use(length: int) -> tuple[int, tuple[GroupPage, ...], list[str]] | None:
        pages = tuple(names.chain(needed(groups, length)))
        with engine.calls:
            tiers = manager.lookup([one.page for one in pages], 0)
        return (length, pages, tiers) if len(tiers) == len(pages) else None

    manager.have_watched()
    with engine.timeline.span("lookup", pages=most // engine.layout.page_tokens):
        used, whole = settled(groups, names.presence(manager.visible), most, use)
        length, pages, found = used or (0, (), [])
        with engine.calls:
            manager.missed((most - length) // engine.layout.page_tokens)
            manager.measures.tokens.answered(most, length, found)
    if length < most:
        asked = [AskedGroup(group, names, g, manager.told) for g, group in enumerate(groups)]
        manager.sample = lambda: group_words(group_reasons(asked, 0, most))
    decided = engine.gate.decide_whole([engine.pool_load(found)], 0, tokens, length)
    declined = length if pages and not decided.pages else 0
    if declined:
        pages, found, length = (), [], 0
    named = tuple(one.page for one in pages)
    paying = length if decided.worth == len(found) else 0
    hit = Hit(0, length, tuple(found), decided.seconds, named, decided.recompute_seconds, paying, declined)
    return GroupHit(hit, pages, whole)
