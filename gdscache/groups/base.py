"""Groups of layers that keep the same tokens, and the lengths at which a cached prefix serves all groups.

Pure: no tier, no engine. The rules are those of vLLM's managers of block tables (0.32 and 0.33): a token attends to
itself and to the tokens before it that its layer keeps, so a hit of `n` tokens needs the pages that token `n` attends
to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

Keeps = Literal["all", "window", "chunk", "state"]
Presence = Callable[[int, int, int], bytes]  # (group, first page, page behind the last) -> 1 or 0 for each page
_PIECE = 256  # pages asked for at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same tokens. `layers`: by number, from 0; `page_tokens`: tokens of a page.

    `keeps`: `all` tokens; a `window` of the last `span` tokens, including the token itself; the tokens before it in its
    `chunk` of `span` tokens; or a `state` that stands for all tokens before. A state is a page: the one that ends at a
    multiple of `page_tokens`.
    """

    name: str
    layers: tuple[int, ...]
    page_tokens: int
    keeps: Keeps = "all"
    span: int = 0

    def first(self, tokens: int) -> int:
        """The first page that a hit of `tokens` tokens needs. The last is the page that ends there."""
        if self.keeps == "window":
            return max(0, tokens - self.span + 1) // self.page_tokens
        if self.keeps == "chunk":
            return tokens // self.span * self.span // self.page_tokens
        if self.keeps == "state":
            return max(0, tokens // self.page_tokens - 1)
        return 0

    @property
    def words(self) -> str:
        """The tokens that the layers keep: `full: all tokens`, `window: the last 1,024`."""
        span = f"{self.span:,}"
        kept = {"all": "all tokens", "window": f"the last {span}", "chunk": f"chunks of {span}", "state": "a state"}
        return f"{self.name}: {kept[self.keeps]}"

    def describe(self) -> dict[str, object]:
        """The facts that tell one group's pages from another's, as plain data."""
        return {
            "name": self.name,
            "layers": list(self.layers),
            "keeps": self.keeps,
            "span": self.span,
            "page_tokens": self.page_tokens,
        }


def alignment(groups: Sequence[Group]) -> int:
    """Every length of a hit is a multiple of this number of tokens: all groups have a page that ends there."""
    return math.lcm(*(group.page_tokens for group in groups))


def lengths(
    groups: Sequence[Group],
    has: Presence,
    most: int,
    *,
    align: int | None = None,
    local: int = 0,
    whole: int | None = None,
) -> Iterator[int]:
    """The lengths in tokens at which every group has the pages that a hit needs, the longest first.

    Multiples of `align` (`alignment` of the groups) above `local` and up to `most`. `local`: tokens that all groups
    have already; no page before them is needed. `has(g, first, stop)` is asked for pages of `groups[g]`, and only for
    pages that can matter. `whole`: the result of `complete`, if known.
    """
    align = align or alignment(groups)
    whole = complete(groups, has, most, local=local) if whole is None else whole
    tails = [
        (group, _Tail(has, g, most // group.page_tokens)) for g, group in enumerate(groups) if group.keeps != "all"
    ]
    length = min(most, whole) // align * align
    while length > local:
        for group, tail in tails:
            size = group.page_tokens
            absent = tail.last_absent(max(group.first(length), local // size), length // size)
            if absent >= 0:  # a shorter length that ends behind the absent page lacks it too
                length = min(length - align, absent * size // align * align)
                break
        else:
            yield length
            length -= align


def complete(groups: Sequence[Group], has: Presence, most: int, *, local: int = 0) -> int:
    """Tokens up to which every group that keeps all has every page; `most` if no group keeps all."""
    for g, group in enumerate(groups):
        if group.keeps == "all":
            at, stop = local // group.page_tokens, most // group.page_tokens
            while at < stop:
                piece = has(g, at, min(stop, at + _PIECE))
                absent = piece.find(0)
                if absent >= 0:
                    most = min(most, (at + absent) * group.page_tokens)
                    break
                at += len(piece)
    return most


class _Tail:
    """The presence of a group's pages, asked from the end of ever shorter lengths backwards, each page at most once."""

    def __init__(self, has: Presence, group: int, pages: int) -> None:
        self._has, self._group = has, group
        self._mask, self._from = bytearray(pages), pages
        self._ahead = 0  # least pages of the next question: few, until some are absent

    def last_absent(self, first: int, stop: int) -> int:
        """The last absent page of `first ... stop-1`, or -1. `stop` never grows from call to call."""
        end = min(stop, self._from)
        if first < end:
            start = max(0, min(first, end - self._ahead))
            self._mask[start:end] = self._has(self._group, start, end)
            self._from, self._ahead = start, min(_PIECE, 2 * (end - start))
        return self._mask.rfind(0, first, stop)


def needed(groups: Sequence[Group], length: int, local: int = 0) -> list[range]:
    """The pages of each group that a hit of `length` tokens needs, except pages before `local`."""
    return [
        range(max(group.first(length), local // group.page_tokens), length // group.page_tokens) for group in groups
    ]


def kept(group: Group, ends: Iterable[int], first: int, stop: int) -> list[int]:
    """The pages in `first ... stop-1` that a hit of one of the lengths `ends` needs, ascending."""
    if group.keeps == "all":
        return list(range(first, stop))
    found: set[int] = set()
    for end in ends:
        found.update(range(max(first, group.first(end)), min(stop, end // group.page_tokens)))
    return sorted(found)


def marks(every: int, align: int, stop: int) -> range:
    """The lengths below `stop` at which windows are kept in any prompt: one in `every` tokens, multiples of `align`.
    Empty if `every` is 0."""
    step = max(align, every // align * align)
    return range(step, stop if every else 0, step)
