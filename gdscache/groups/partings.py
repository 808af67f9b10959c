"""How densely windows of prompts are kept, by how often prompts part from others where no window was kept."""

from __future__ import annotations

from collections.abc import Sequence

from gdscache.groups.base import Group

_RECENT = 64  # requests over which partings are averaged
_OFTEN = 1 / 6  # share of requests that part: in a trace of conversations it stays below 0.152
_LASTS = 1024  # requests for which windows are kept densely: their worth does not show meanwhile
_DENSE = 1024  # tokens from one densely kept window to the next, or twice the longest window


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
