"""A state leaves with the page that it stands behind: without that page no hit needs the state.

Pools evict by themselves, and learn the lifetimes of their pages from uses. A state is worth as much as the full pages
before it, of which there are more to learn from. So a state goes when no tier has the last of these pages any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

from gdscache.groups.base import Group
from gdscache.groups.names import GroupNames
from gdscache.tiers.manager import TierManager


class StandingStates:
    """The states behind each page, of pools with states alone. Thread-safe.

    `managers`: one a pool. Known are the states stored or hit since the engine was opened; its pool's own order evicts
    other states.
    """

    def __init__(
        self, groups: Sequence[Group], pools: Sequence[Sequence[int]], managers: Sequence[TierManager]
    ) -> None:
        keeps = [{groups[g].keeps for g in pool} for pool in pools]
        self._groups = groups
        self._states = [(g, managers[p]) for p, pool in enumerate(pools) if keeps[p] == {"state"} for g in pool]
        whole = [(g, managers[p]) for p, pool in enumerate(pools) for g in pool if groups[g].keeps == "all"]
        self._whole = whole[:1] if self._states else []
        self._behind: dict[bytes, list[tuple[TierManager, bytes]]] = {}  # by the page's key
        self._gone = deque[bytes]()
        self._lock = threading.Lock()  # no other lock is taken while it is held
        self._most = sum(tier.index.slots for _, manager in self._states for tier in manager.tiers.values())
        for _, manager in self._whole:
            for tier in manager.tiers.values():
                tier.index.on_evict = self._told(tier.index.on_evict)

    def stand(self, names: GroupNames, wanted: Sequence[Sequence[int]]) -> None:
        """These pages of each group are stored now, or are a hit. States whose page has gone meanwhile go."""
        for whole, manager in self._whole:
            self._leave(manager)  # first: a page that comes again has its state again
            size = self._groups[whole].page_tokens
            for g, states in self._states:
                for number in wanted[g]:
                    page = (number + 1) * self._groups[g].page_tokens // size - 1
                    if page < 0:  # a state before the first full page's end
                        continue
                    key, state = names.key(whole, page), (states, names.key(g, number))
                    with self._lock:
                        known = self._behind.setdefault(key, [])
                        if state not in known:
                            known.append(state)
            with self._lock:
                while len(self._behind) > self._most:
                    self._behind.pop(next(iter(self._behind)))

    def _leave(self, pages: TierManager) -> None:
        while key := self._next_gone():
            with pages.lock:
                if any(tier.index.has(key) for tier in pages.tiers.values()):
                    continue
            with self._lock:
                states = self._behind.pop(key, ())
            for manager, state in states:
                with manager.calls, manager.lock:  # an interrupt may leave an index half changed
                    for tier in manager.tiers.values():
                        entry = tier.index.find(state)
                        if entry is not None and not entry.leases:  # a leased state stays
                            tier.index.drop(entry)
                            manager.fates.evict((state,))

    def _next_gone(self) -> bytes:
        """b"": none, since other threads take them too."""
        with self._lock:
            return self._gone.popleft() if self._gone else b""

    def _told(self, before: Callable[[Collection[bytes]], object]) -> Callable[[Collection[bytes]], None]:
        def told(keys: Collection[bytes]) -> None:
            before(keys)
            self._gone.extend(key for key in keys if key in self._behind)

        return told
