"""Which groups of a hybrid model share a pool of pages, and what share of each tier a pool has.

Groups whose layers lie in the same planes draw their blocks from one pool, as vLLM has it: a block holds a page of
whichever group it was given to. Groups with planes of their own have pools of their own.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from gdscache.groups.base import Group
from gdscache.limits import MAX_COUNT

_PROMPT = 8192  # tokens of the prompts that planes are meant for
EVERY = 8192  # tokens from one kept window to the next, where nothing is said of it
_WORTH = 16  # times a state's bytes that pages in front of it have, where it is kept though no prompt ends there
_LEAST = 0.01  # of a tier, for states: those that take little are not to be what a hit lacks
_WINDOWS = 4  # that are in use: where a prompt ends, where all but its last token end, where it parts, and the answer's


@dataclasses.dataclass(frozen=True)
class Pool:
    """Groups, by their places in the model, that share planes. `layers`: of the model, in order."""

    groups: tuple[int, ...]
    layers: tuple[int, ...]

    def local(self, group: Group) -> tuple[int, ...]:
        """The group's layers by their places in the pool."""
        return tuple(self.layers.index(layer) for layer in group.layers)


def pools_of(groups: Sequence[Group]) -> list[Pool]:
    """The pools, in the order of their first groups."""
    found: list[Pool] = []
    for number, group in enumerate(groups):
        joined = [pool for pool in found if not set(pool.layers).isdisjoint(group.layers)]
        members = sorted({number, *(g for pool in joined for g in pool.groups)})
        layers = sorted({*group.layers, *(layer for pool in joined for layer in pool.layers)})
        found = [pool for pool in found if pool not in joined]
        found.append(Pool(tuple(members), tuple(layers)))
    return sorted(found, key=lambda pool: pool.groups)


def rows_of(groups: Sequence[Group], pool: Pool, page_tokens: int) -> int:
    """Rows of each plane of a pool that a page has: as many as tokens in a page of each of its groups, or
    `page_tokens`, the model's, where they differ; 1 where all keep a state."""
    own = [groups[g] for g in pool.groups]
    if all(group.keeps == "state" for group in own):
        return 1
    sizes = {group.page_tokens for group in own}
    return sizes.pop() if len(sizes) == 1 else page_tokens


def interval(groups: Sequence[Group], pools: Sequence[Pool], page_bytes: Sequence[int]) -> int:
    """Tokens from one kept window or state of a prompt to the next: `EVERY`, or more where states take many bytes.

    Prompts come back to where one ended or parted; to a place between these one in seven does. So a state there is kept
    where it takes at most 1 / `_WORTH` of the bytes of the pages from the last one on. `page_bytes`: as for `shares`.
    """
    state = token = 0.0
    for pool, each in zip(pools, page_bytes, strict=True):
        own = [groups[g] for g in pool.groups]
        state += each * sum(group.keeps == "state" for group in own)
        token += each * sum(1 / group.page_tokens for group in own if group.keeps == "all")
    return max(EVERY, math.ceil(_WORTH * state / token)) if token else EVERY


def kept_tokens(group: Group, every: int, prompt: int) -> float:
    """Tokens that are kept of each token of a prompt of `prompt` tokens: all, or a window where it ends and at every so
    many tokens. A state counts as the tokens of its page."""
    if group.keeps == "all":
        return 1.0
    windows = 1 + (prompt // every if every else 0)
    return min(1.0, windows / prompt * (group.span + group.page_tokens))


def shares(
    groups: Sequence[Group], pools: Sequence[Pool], page_bytes: Sequence[int], every: int, prompt: int
) -> list[float]:
    """What part of a tier's bytes each pool gets: by what prompts of `prompt` tokens leave there. `page_bytes`: of a
    page in all layers of the pool; `every`: tokens from one kept window to the next."""
    needs = [
        each * sum(kept_tokens(groups[g], every, prompt) / groups[g].page_tokens for g in pool.groups)
        for pool, each in zip(pools, page_bytes, strict=True)
    ]
    least = _LEAST * sum(needs)
    states = [any(groups[g].keeps == "state" for g in pool.groups) for pool in pools]
    needs = [max(need, least) if state else need for need, state in zip(needs, states, strict=True)]
    return [need / sum(needs) for need in needs]


def plane_pages(
    groups: Sequence[Group], pools: Sequence[Pool], page_bytes: Sequence[int], capacity: int, every: int
) -> list[int]:
    """Pages of each pool in planes of `capacity` bytes that keep nothing but prompts in use: those of the longest that
    fits, or of as many tokens of prompts of `_PROMPT` tokens. Zeros where there is no room for a token."""

    def pages(tokens: int) -> list[int]:
        windows = _WINDOWS + tokens // _PROMPT + (tokens // every if every else 0)
        return [sum(_in_use(groups[g], tokens, windows) for g in pool.groups) for pool in pools]

    def too_long(tokens: int) -> bool:
        return sum(n * each for n, each in zip(pages(tokens), page_bytes, strict=True)) > capacity

    return pages(bisect.bisect_left(range(1, MAX_COUNT), True, key=too_long))


def _in_use(group: Group, tokens: int, windows: int) -> int:
    """Pages of a group for a prompt whose last tokens are wanted at so many lengths."""
    if group.keeps == "state":
        return min(windows, -(-tokens // group.page_tokens))
    wanted = tokens if group.keeps == "all" else min(tokens, windows * (group.span + group.page_tokens))
    return -(-wanted // group.page_tokens)
