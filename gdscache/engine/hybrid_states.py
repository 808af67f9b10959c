"""States leave with the page that they stand behind: without it they are part of no hit.

Pools evict by themselves, and learn from the uses of their own pages how long these are worth keeping. A state is as
worth keeping as the full pages in front of it, of which there are more to learn from. So a state goes when no tier has
the last of these any more, and makes room for one whose pages stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from gdscache.groups.base import Group
from gdscache.groups.names import GroupNames
from gdscache.tiers.manager import TierManager


class StandingStates:
    """Which states stand behind which page, of pools that have states alone. Thread-safe.

    `managers`: one a pool. What is stored and what is hit since the engine was opened is known; a state that is not
    known goes by its pool's own order.
    """

    def __init__(
        self, groups: Sequence[Group], pools: Sequence[Sequence[int]], managers: Sequence[TierManager]
    ) -> None:
        keeps = [{groups[g].keeps for g in pool} for pool in pools]
        self._groups = groups
        self._states = [(g, managers[p]) for p, pool in enumerate(pools) if keeps[p] == {"state"} for g in pool]
        whole = [(g, managers[p]) for p, pool in enumerate(pools) for g in pool if groups[g].keeps == "all"]
        self._whole = whole[:1] if self._states else []
        self._behind: dict[bytes, list[tuple[TierManager, bytes]]] = {}  # by the key of the page
        self._gone = deque[bytes]()  # pages that a tier has evicted
        self._most = sum(tier.index.slots for _, manager in self._states for tier in manager.tiers.values())
        for _, manager in self._whole:
            for tier in manager.tiers.values():
                tier.index.on_evict = self._told(tier.index.on_evict)

    def stand(self, names: GroupNames, wanted: Sequence[Sequence[int]]) -> None:
        """These pages of each group are stored now, or are a hit. States whose page has gone meanwhile go."""
        for whole, manager in self._whole:
            size = self._groups[whole].page_tokens
            for g, states in self._states:
                for number in wanted[g]:
                    page = (number + 1) * self._groups[g].page_tokens // size - 1
                    known, state = self._behind.setdefault(names.key(whole, page), []), (states, names.key(g, number))
                    if state not in known:
                        known.append(state)
            while len(self._behind) > self._most:
                self._behind.pop(next(iter(self._behind)))
            self._leave(manager)

    def _leave(self, pages: TierManager) -> None:
        while self._gone:
            key = self._gone.popleft()
            with pages.lock:
                if any(tier.index.has(key) for tier in pages.tiers.values()):
                    continue
            for manager, state in self._behind.pop(key, ()):
                with manager.lock:
                    for tier in manager.tiers.values():
                        entry = tier.index.find(state)
                        if entry is not None and not entry.leases:  # what is under way stays
                            tier.index.drop(entry)
                            manager.fates.evict((state,))

    def _told(self, before: Callable[[Collection[bytes]], object]) -> Callable[[Collection[bytes]], None]:
        """Told of victims, under the lock of their pool: notes them."""

        def told(keys: Collection[bytes]) -> None:
            before(keys)
            self._gone.extend(key for key in keys if key in self._behind)

        return told
