"""The groups of a hybrid model that share a pool of pages, each pool's share of a tier, and how densely windows are
kept.

Groups with layers in the same planes draw their blocks from one pool, as in vLLM: a block holds a page of any of these
groups. Groups with planes of their own have pools of their own.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from gdscache.groups.base import Group
from gdscache.limits import MAX_COUNT

_PROMPT = 8192  # tokens of a typical prompt, for the planes' sizes
EVERY = 8192  # tokens from one kept window to the next, by default
_WORTH = 16  # a state inside a prompt is kept if the pages before it have this many times its bytes
_LEAST = 0.01  # least share of a tier for states, so that a hit does not lack small states
# windows in use: at a prompt's end, before its last token, where it parts from others, at the answer's end
_WINDOWS = 4
_RECENT = 64  # requests over which partings are averaged
_OFTEN = 1 / 6  # share of requests that part: in a trace of conversations it stays below 0.152
_LASTS = 1024  # requests for which windows are kept densely: their worth does not show meanwhile
_DENSE = 1024  # tokens from one densely kept window to the next, or twice the longest window


@dataclasses.dataclass(frozen=True)
class Pool:
    """Groups, by their places in the model, that share planes. `layers`: of the model, in order."""

    groups: tuple[int, ...]
    layers: tuple[int, ...]

    def local(self, group: Group) -> tuple[int, ...]:
        return tuple(self.layers.index(layer) for layer in group.layers)


def pools_of(groups: Sequence[Group]) -> list[Pool]:
    found: list[Pool] = []
    for number, group in enumerate(groups):
        joined = [pool for pool in found if not set(pool.layers).isdisjoint(group.layers)]
        members = sorted({number, *(g for pool in joined for g in pool.groups)})
        layers = sorted({*group.layers, *(layer for pool in joined for layer in pool.layers)})
        found = [pool for pool in found if pool not in joined]
        found.append(Pool(tuple(members), tuple(layers)))
    return sorted(found, key=lambda pool: pool.groups)


def rows_of(groups: Sequence[Group], pool: Pool, page_tokens: int) -> int:
    """Rows of a page in each plane of a pool: the page's tokens if all its groups agree, else the model's
    `page_tokens`; 1 if all groups keep a state."""
    own = [groups[g] for g in pool.groups]
    if all(group.keeps == "state" for group in own):
        return 1
    sizes = {group.page_tokens for group in own}
    return sizes.pop() if len(sizes) == 1 else page_tokens


def interval(groups: Sequence[Group], pools: Sequence[Pool], page_bytes: Sequence[int]) -> int:
    """Tokens from one kept window or state of a prompt to the next: `EVERY`, or more where states are large.

    Prompts come back to places where one ended or parted; one in seven comes back to a place between these. So a state
    there is kept if it has at most 1 / `_WORTH` of the bytes of the pages since the last one. `page_bytes`: as for
    `shares`.
    """
    state = token = 0.0
    for pool, each in zip(pools, page_bytes, strict=True):
        own = [groups[g] for g in pool.groups]
        state += each * sum(group.keeps == "state" for group in own)
        token += each * sum(1 / group.page_tokens for group in own if group.keeps == "all")
    return max(EVERY, math.ceil(_WORTH * state / token)) if token else EVERY


def kept_tokens(group: Group, every: int, prompt: int) -> float:
    """Tokens kept for each token of a prompt of `prompt` tokens: all, or a window at its end and every `every` tokens.
    A state counts as the tokens of its page."""
    if group.keeps == "all":
        return 1.0
    windows = 1 + (prompt // every if every else 0)
    return min(1.0, windows / prompt * (group.span + group.page_tokens))


def shares(
    groups: Sequence[Group], pools: Sequence[Pool], page_bytes: Sequence[int], every: int, prompt: int
) -> list[float]:
    """Each pool's share of a tier's bytes, in proportion to the bytes that a prompt of `prompt` tokens leaves in it.
    `page_bytes`: of a page in all layers of the pool; `every`: tokens from one kept window to the next."""
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
    """Pages of each pool in planes of `capacity` bytes that keep only prompts in use: the pages of the longest prompt
    that fits, or of as many tokens in prompts of `_PROMPT` tokens. Zeros if no token fits."""

    def pages(tokens: int) -> list[int]:
        windows = _WINDOWS + tokens // _PROMPT + (tokens // every if every else 0)
        return [sum(_in_use(groups[g], tokens, windows) for g in pool.groups) for pool in pools]

    def too_long(tokens: int) -> bool:
        return sum(n * each for n, each in zip(pages(tokens), page_bytes, strict=True)) > capacity

    return pages(bisect.bisect_left(range(1, MAX_COUNT), True, key=too_long))


def _in_use(group: Group, tokens: int, windows: int) -> int:
    if group.keeps == "state":
        return min(windows, -(-tokens // group.page_tokens))
    wanted = tokens if group.keeps == "all" else min(tokens, windows * (group.span + group.page_tokens))
    return -(-wanted // group.page_tokens)


class Partings:
    """The tokens from one kept window of a prompt to the next: `every`, or fewer while requests part often.

    Where prompts part, the second one computes their common beginning again, and the third one hits. Traffic in which
    few prompts share a beginning needs the second one to hit. Dense windows take room from others' pages. Each stored
    page also takes some 40 us from a model's thread in the same process. So at most half of a window's pages are kept:
    a prompt that parts computes up to two windows of tokens again, once.

    `adapts`: False if `every` is a user's. Models with states, or without layers that keep all tokens, do not adapt:
    states do not come at will, and without such layers no parting is seen.
    """

    __slots__ = ("_dense", "_every", "_left", "_share")

    def __init__(self, groups: Sequence[Group], every: int, *, adapts: bool) -> None:
        keeps, spans = {group.keeps for group in groups}, [one.span for one in groups if one.keeps == "window"]
        adapts = adapts and keeps == {"all", "window"}
        self._every, self._dense = every, min(every, max(_DENSE, 2 * max(spans))) if adapts else every
        self._share, self._left = 0.0, 0

    def every(self, lost: int) -> int:
        """Of one more request. `lost`: tokens that it computes although layers that keep all tokens have them."""
        self._share += ((lost >= self._dense) - self._share) / _RECENT
        self._left = _LASTS if self._share > _OFTEN else max(0, self._left - 1)
        return self._dense if self._left else self._every
