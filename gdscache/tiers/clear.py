"""Clearing: pages go from every tier at once, durably, and pages accepted before a clear do not come back after it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from gdscache.index.index import Detached
from gdscache.runtime.threads import in_turn
from gdscache.tiers.base import DurableTier, Tier

_NAMESPACE_EPOCHS_KEPT = 4096
PIECE = 1024  # pages that a clear drops, or slots that it frees, under the lock at a time
PAUSE_S = 0.0005  # then a pause: without it the clear would take the lock again before others wake up
_T = TypeVar("_T")


class Clearing:
    """Drops all pages of all tiers, or those of a namespace. Epochs tell older pages from newer. `lock` guards the
    tiers' indexes. `alone` is held while a clear drops pages: one clear at a time. Tests may set `piece` and
    `sleep`."""

    def __init__(self, lock: threading.RLock, tiers: Mapping[str, Tier], files: Sequence[DurableTier]) -> None:
        self.alone = threading.Lock()
        self.piece = PIECE
        self.sleep: Callable[[float], None] = time.sleep
        self._lock = lock
        self._tiers = tiers
        self._files = files
        self._epoch = 0
        self._epochs: dict[bytes, int] = {}
        self._swept: frozenset[bytes] = frozenset()  # namespaces that a clear is dropping
        self._refusals = itertools.count(1)

    def epoch(self, namespace: bytes) -> int:
        """Grows when the namespace is cleared: pages accepted in an older epoch must not become visible.

        During a clear every call returns another number: pages accepted then may come from pages that the clear has yet
        to drop.
        """
        if namespace in self._swept:
            return -next(self._refusals)
        return self._epoch + self._epochs.get(namespace, 0)

    def clear(self, *namespaces: bytes) -> dict[str, int]:
        """Drop every page (of these namespaces, if any are given) from every tier, durably. Returns the pages removed
        by tier.

        All pages together go in one step. Namespaces go piece by piece; pages of them that are stored meanwhile are
        dropped. When several clears run at once, each returns when the pages that the others dropped before it are gone
        for good, too.
        """
        with self.alone:
            removed = self._sweep(frozenset(namespaces)) if namespaces else self._drop_everything()
        in_turn(
            *(
                functools.partial(tier.commit_all_deletions, namespace)
                for tier in self._files
                for namespace in namespaces or (None,)
            )
        )
        return removed

    def _drop_everything(self) -> dict[str, int]:
        """Make all pages invisible at once. The slots of files, each of which costs work, follow in pieces."""
        detached, slots = dict[str, Detached](), dict[str, Iterator[int]]()
        with contextlib.ExitStack() as ends:
            with self._lock:
                self._epoch += 1
                for name, tier in self._tiers.items():
                    detached[name] = tier.index.detach()
                    slots[name] = iter(detached[name].slots)
                    ends.callback(self._retire, tier, slots[name])  # the slots that are left if anything below raises
                for name, tier in self._tiers.items():  # first slots at once, for stores that need some now
                    tier.index.retire(itertools.islice(slots[name], self.piece) if tier in self._files else slots[name])
            for tier in self._files:
                for piece in self._pieces(slots[tier.name]):
                    self._retire(tier, piece)
        return {name: some.visible for name, some in detached.items()}

    def _retire(self, tier: Tier, slots: Iterable[int]) -> None:
        with self._lock:
            tier.index.retire(slots)

    def _sweep(self, namespaces: frozenset[bytes]) -> dict[str, int]:
        """Drop the pages of namespaces, each from all tiers at once: no load can bring it back from another tier.

        No new page comes meanwhile, for `epoch` refuses stores; a load only copies pages that are among the keys.
        """
        removed = dict.fromkeys(self._tiers, 0)
        try:
            with self._lock:
                if len(self._epochs) >= _NAMESPACE_EPOCHS_KEPT:  # forget them all, in a newer epoch for every namespace
                    self._epoch += max(self._epochs.values())
                    self._epochs.clear()
                for namespace in namespaces:
                    self._epochs[namespace] = self._epochs.get(namespace, 0) + 1
                self._swept = namespaces
                keys = [tier.index.all_keys() for tier in self._tiers.values()]
            for piece in self._pieces(itertools.chain.from_iterable(keys)):
                with self._lock:
                    for name, tier in self._tiers.items():
                        removed[name] += tier.index.drop_all(piece, namespaces)
        finally:
            self._swept = frozenset()
        return removed

    def _pieces(self, items: Iterable[_T]) -> Iterator[list[_T]]:
        rest = iter(items)
        while piece := list(itertools.islice(rest, self.piece)):
            yield piece
            self.sleep(PAUSE_S)
