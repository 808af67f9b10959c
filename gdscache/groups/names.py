"""The names of a request's pages in all groups of a hybrid model, made on demand.

A page's key comes from the digest of the request up to its end, in the namespace of its group: the digest names all
tokens before it, the namespace its layers. Parents are chosen for eviction: a page of a group that keeps all tokens
follows the windows that end with it, so that these outlive it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gdscache.groups.base import Group
from gdscache.native import keys_of
from gdscache.pages.keys import Page


class GroupPage(NamedTuple):
    """A page of a group: its number in the request, and its name."""

    group: int
    number: int
    page: Page


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Pages of groups, in columns: most chains have thousands of pages, few of which are looked at alone."""

    groups: Sequence[int] = ()
    numbers: Sequence[int] = ()
    pages: tuple[Page, ...] = ()

    def __len__(self) -> int:
        return len(self.pages)

    def __iter__(self) -> Iterator[GroupPage]:
        return map(GroupPage, self.groups, self.numbers, self.pages)

    def __getitem__(self, at: int) -> GroupPage:
        return GroupPage(self.groups[at], self.numbers[at], self.pages[at])

    def part(self, places: Sequence[int]) -> Chain:
        groups, numbers, pages = self.groups, self.numbers, self.pages
        return Chain([groups[at] for at in places], [numbers[at] for at in places], tuple(pages[at] for at in places))


class GroupNames:
    """The names of one request's pages. `digests`: one of 32 bytes for each `digest_tokens` tokens and all before them.

    `namespaces`: one a group. `pools`: the groups of each pool, by number; empty: one pool has all. A page follows
    pages of its own pool alone, since each pool evicts by itself. Not thread-safe.
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
        self._keys: list[list[bytes]] = [[] for _ in groups]  # key of each page, b"" until it is asked for
        self._full = {  # groups that keep all tokens, in the pool of each group
            g: [(one, groups[one].page_tokens) for one in pool if groups[one].keeps == "all"]
            for pool in self.pools
            for g in pool
        }

    @property
    def digests(self) -> int:
        return len(self._digests)

    @property
    def tokens(self) -> int:
        return len(self._digests) * self._digest_tokens

    def extend(self, digests: Sequence[bytes]) -> None:
        self._digests += digests
        for known, step in zip(self._keys, self._steps, strict=True):
            known += [b""] * (len(self._digests) // step - len(known))

    def key(self, group: int, number: int) -> bytes:
        return self._keys[group][number] or self.keys(group, number, number + 1)[0]

    def keys(self, group: int, first: int, stop: int) -> list[bytes]:
        known, step = self._keys[group], self._steps[group]
        found = known[first:stop]
        if b"" in found:
            found = keys_of(self._namespaces[group], self._digests[(first + 1) * step - 1 : stop * step : step])
            known[first:stop] = found
        return found

    def presence(self, *visible: Callable[[Sequence[bytes]], bytes]) -> Callable[[int, int, int], bytes]:
        """`base.Presence` from the `visible` function of each pool's tier, or of all its tiers."""
        says = {g: visible[p] for p, pool in enumerate(self.pools) for g in pool}
        return lambda group, first, stop: says[group](self.keys(group, first, stop))

    def chain(self, wanted: Sequence[Sequence[int]], after: Sequence[GroupPage | None] = ()) -> list[Chain]:
        """Pages of each group by number: a chain a pool, in the order of the pages' ends, windows before the page that
        follows them.

        If a group of the pool keeps all, each page follows the one before it here. The first page follows the last
        earlier page of such a group, or the pool's `after`, from an earlier part of the request, if that is later.
        Without such a group, a page follows none.
        """
        return [
            self._chain([(g, wanted[g]) for g in pool], after[p] if after else None)
            for p, pool in enumerate(self.pools)
        ]

    def _chain(self, wanted: Sequence[tuple[int, Sequence[int]]], after: GroupPage | None) -> Chain:
        places: list[int] = []
        groups: list[int] = []
        numbers: list[int] = []
        keys: list[bytes] = []
        for g, some in wanted:
            places += self._ends(g, some)
            groups += [g] * len(some)
            numbers += some
            keys += self._keys_at(g, some)
        if not places:
            return Chain()
        order = sorted(range(len(places)), key=places.__getitem__)
        groups, numbers = list(map(groups.__getitem__, order)), list(map(numbers.__getitem__, order))
        keys, namespaces = list(map(keys.__getitem__, order)), list(map(self._namespaces.__getitem__, groups))
        first = (self._before(groups[0], numbers[0], after) or namespaces[0],)
        parents = itertools.chain(first, keys) if self._full[groups[0]] else namespaces
        pages = zip(keys, parents, namespaces, strict=False)  # `Page._make` takes twice as long
        return Chain(groups, numbers, tuple(map(tuple.__new__, itertools.repeat(Page), pages)))

    def _keys_at(self, group: int, numbers: Sequence[int]) -> list[bytes]:
        if isinstance(numbers, range):
            return self.keys(group, numbers.start, numbers.stop)
        if not numbers:
            return []
        first = min(numbers)
        keys = self.keys(group, first, max(numbers) + 1)  # of pages between them, too: a call for each costs more
        return [keys[number - first] for number in numbers]

    def _ends(self, group: int, numbers: Sequence[int]) -> list[int]:
        about, count = self.groups[group], 2 * len(self.groups)
        step, last = about.page_tokens * count, (about.keeps == "all") * len(self.groups) + group
        return [number * step + step + last for number in numbers]

    def _before(self, group: int, number: int, after: GroupPage | None) -> bytes | None:
        if not (full := self._full[group]):
            return None
        end, (place,) = (number + 1) * self.groups[group].page_tokens, self._ends(group, (number,))
        found = [(g, end // size - back) for g, size in full for back in (1, 2)]
        found += [(after.group, after.number)] if after else []
        places = [(*self._ends(g, (one,)), g, one) for g, one in found]
        *_, last, page = max((one for one in places if one[0] < place), default=(0, -1))
        return self.key(last, page) if page >= 0 else None
