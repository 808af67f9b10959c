"""Why tokens of a hybrid model's request come from a tier or from none, group by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gdscache.groups.base import Group
from gdscache.groups.names import GroupNames
from gdscache.pages.reasons import CACHED, Reason, Told, joined, words

GroupReasons = dict[str, tuple[Reason, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class AskedGroup:
    """A group as it was looked up: its number in `names`, and what says where pages are (`TierManager.told`)."""

    group: Group
    names: GroupNames
    at: int
    told: Callable[[Sequence[bytes]], list[Told]]


def group_reasons(asked: Sequence[AskedGroup], start: int, stop: int, declined: int = 0) -> GroupReasons:
    """By the names of the groups, what is known now of their pages from token `start` to `stop`.

    Where a group keeps all tokens, those behind a missing page are `behind` it, and the first `declined` tokens are the
    `gate`'s. Of windows every page is told, whether a hit needs it or not: a window is stored where a prompt ends.
    """
    found: GroupReasons = {}
    for one in asked:
        size = one.group.page_tokens
        first = start // size
        told, gap = one.told(one.names.keys(one.at, first, stop // size)), False
        for n, page in enumerate(told):
            if page.cause != CACHED:
                gap = True
            elif (n + 1) * size <= declined:
                told[n] = Told("gate", page.tier)
            elif gap and one.group.keeps == "all":
                told[n] = Told("behind", page.tier)
        found[one.group.name] = joined(first * size, size, told)
    return found


def group_words(reasons: GroupReasons) -> str:
    """The same as a line."""
    return "; ".join(f"{name}: {words(some)}" for name, some in reasons.items())
