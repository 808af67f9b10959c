"""The names of a request's pages in all groups of a hybrid model, made when they are asked for.

A page is named by the digest of the request that ends where it does, in the namespace of its group: the digest names
all tokens before it, and the namespace the layers. What a page follows is told as eviction needs it: a page that all
tokens are kept of follows the windows that end with it, so that these outlive it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gdscache.groups.base import Group
from gdscache.limits import KEY_BYTES
from gdscache.pages.keys import Page


class GroupPage(NamedTuple):
    """A page of a group: its number in the request, and its name."""

    group: int
    number: int
    page: Page


class GroupNames:
    """The names of one request's pages. `digests`: of each `digest_tokens` tokens and all before them, 32 bytes.

    `namespaces`: one a group. `pools`: the groups of each pool, by their numbers; none: all are in one. A page follows
    pages of its pool alone, since each pool evicts by itself. Not thread-safe.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        namespaces: Sequence[bytes],
        digest_tokens: int,
        pools: Sequence[Sequence[int]] = (),
    ) -> None:
        self.groups = groups
        self.pools = pools or (tuple(range(len(groups))),)
        self._namespaces = namespaces
        self._steps = [group.page_tokens // digest_tokens for group in groups]
        self._digest_tokens = digest_tokens
        self._digests: list[bytes] = []
        self._keyed = [hashlib.blake2b(digest_size=KEY_BYTES, key=some) for some in namespaces]
        self._keys: list[dict[int, bytes]] = [{} for _ in groups]
        self._full = {  # the groups that keep all tokens, in the pool of each group
            g: [(one, groups[one].page_tokens) for one in pool if groups[one].keeps == "all"]
            for pool in self.pools
            for g in pool
        }

    @property
    def digests(self) -> int:
        """How many digests it has."""
        return len(self._digests)

    @property
    def tokens(self) -> int:
        """Tokens that have a digest."""
        return len(self._digests) * self._digest_tokens

    def extend(self, digests: Sequence[bytes]) -> None:
        """The request has grown."""
        self._digests += digests

    def key(self, group: int, number: int) -> bytes:
        """The key of a page."""
        return self._keys[group].get(number) or self.keys(group, number, number + 1)[0]

    def keys(self, group: int, first: int, stop: int) -> list[bytes]:
        """The keys of pages `first ... stop-1` of a group."""
        known, digests, step, copy = self._keys[group], self._digests, self._steps[group], self._keyed[group].copy
        found: list[bytes] = []
        for number in range(first, stop):
            key = known.get(number)
            if key is None:
                keyed = copy()
                keyed.update(digests[(number + 1) * step - 1])
                key = known[number] = keyed.digest()
            found.append(key)
        return found

    def presence(self, *visible: Callable[[Sequence[bytes]], bytes]) -> Callable[[int, int, int], bytes]:
        """`base.Presence`, by what a tier, or all of them, say of keys: in each pool."""
        says = {g: visible[p] for p, pool in enumerate(self.pools) for g in pool}
        return lambda group, first, stop: says[group](self.keys(group, first, stop))

    def chain(self, wanted: Sequence[Sequence[int]], after: Sequence[GroupPage | None] = ()) -> list[list[GroupPage]]:
        """Pages of each group by their numbers: those of each pool, named in the order of their ends, and windows
        before what follows them.

        Where a group of the pool keeps all, each page follows the one before it here. The first one follows the last
        page of such a group that comes before it, or `after`, of each pool, of an earlier part of the request, if that
        comes between the two. Where there is no such group, a page follows none.
        """
        return [
            self._chain([(g, wanted[g]) for g in pool], after[p] if after else None)
            for p, pool in enumerate(self.pools)
        ]

    def _chain(self, wanted: Sequence[tuple[int, Sequence[int]]], after: GroupPage | None) -> list[GroupPage]:
        """`chain`, of one pool."""
        keys, namespaces = self._keys, self._namespaces
        places = sorted(self._place(g, number) for g, numbers in wanted for number in numbers)
        named: list[GroupPage] = []
        before: bytes | None = None
        for place in places:
            *_, g, number = place
            namespace = namespaces[g]
            if before is None or not self._full[g]:
                before = self._before(place, after) or namespace
            key = keys[g].get(number) or self.key(g, number)
            named.append(GroupPage(g, number, Page(key, before, namespace)))
            before = key
        return named

    def _place(self, group: int, number: int) -> tuple[int, bool, int, int]:
        """Where a page comes in that order."""
        about = self.groups[group]
        return (number + 1) * about.page_tokens, about.keeps == "all", group, number

    def _before(self, place: tuple[int, bool, int, int], after: GroupPage | None) -> bytes | None:
        """The key of the page that the first page of a chain follows."""
        full = self._full[place[2]]
        if not full:
            return None
        found = [self._place(g, place[0] // size - back) for g, size in full for back in (1, 2)]
        found += [self._place(after.group, after.number)] if after else []
        *_, group, number = max((one for one in found if one < place), default=(0, -1))
        return self.key(group, number) if number >= 0 else None
