"""Why tokens of a hybrid model's request come from a tier or from none, group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gdscache.groups.names import GroupNames
from gdscache.pages.hit import CACHED, Reason, Told, joined, words

GroupReasons = dict[str, tuple[Reason, ...]]


def group_reasons(
    told: Mapping[int, Callable[[Sequence[bytes]], list[Told]]], names: GroupNames, start: int, stop: int, declined: int
) -> GroupReasons:
    """By group name, the states of its pages from token `start` to `stop`. `told`: of each group by its number, the
    source of its pages' states (`TierManager.told`).

    Where a group keeps all tokens, pages behind a missing one are `behind` it, and the first `declined` tokens are the
    `gate`'s. Every page of a window is told, needed or not: a window is stored where a prompt ends.
    """
    found: GroupReasons = {}
    for g, states in told.items():
        group, gap = names.groups[g], False
        size = group.page_tokens
        first = start // size
        pages = states(names.keys(g, first, stop // size))
        for n, page in enumerate(pages):
            if page.cause != CACHED:
                gap = True
            elif (n + 1) * size <= declined:
                pages[n] = Told("gate", page.tier)
            elif gap and group.keeps == "all":
                pages[n] = Told("behind", page.tier)
        found[group.name] = joined(first * size, size, pages)
    return found


def group_words(reasons: GroupReasons) -> str:
    return "; ".join(f"{name}: {words(some)}" for name, some in reasons.items())
