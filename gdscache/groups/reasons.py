"""Why tokens of a hybrid model's request come from a tier or from none, group by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gdscache.groups.base import Group
from gdscache.groups.names import GroupNames
from gdscache.pages.hit import CACHED, Reason, Told, joined, words

GroupReasons = dict[str, tuple[Reason, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class AskedGroup:
    """A group as it was looked up: its number in `names`, and the source of its pages' states (`TierManager.told`)."""

    group: Group
    names: GroupNames
    at: int
    told: Callable[[Sequence[bytes]], list[Told]]


def group_reasons(asked: Sequence[AskedGroup], start: int, stop: int, declined: int = 0) -> GroupReasons:
    """By group name, the states of its pages from token `start` to `stop`.

    Where a group keeps all tokens, pages behind a missing one are `behind` it, and the first `declined` tokens are the
    `gate`'s. Every page of a window is told, needed or not: a window is stored where a prompt ends.
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
    return "; ".join(f"{name}: {words(some)}" for name, some in reasons.items())
