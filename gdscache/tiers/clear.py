"""Clearing: pages go from every tier at once, durably, and what was accepted before they went does not come back."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from gdscache.tiers.base import DurableTier, Tier

_NAMESPACE_EPOCHS_KEPT = 4096
PIECE = 1024  # pages that a clear drops, or slots that it gives back, while it holds the lock once
PAUSE_S = 0.0005  # ... and then leaves the lock to others: it would have it again before they wake up
_T = TypeVar("_T")


class Clearing:
    """Drops all pages of all tiers, or those of a namespace, and knows by epochs what came before. `lock` guards the
    tiers' indexes. `alone` is held while a clear drops pages: one at a time. `piece` pages are dropped while the lock
    is held once, and `sleep` is called between two pieces; both may be set to others."""

    def __init__(self, lock: threading.RLock, tiers: Mapping[str, Tier], files: Sequence[DurableTier]) -> None:
        self.alone = threading.Lock()
        self.piece = PIECE
        self.sleep: Callable[[float], None] = time.sleep
        self._lock = lock
        self._tiers = tiers
        self._files = files
        self._epoch = 0
        self._epochs: dict[bytes, int] = {}
        self._swept: frozenset[bytes] = frozenset()  # the namespaces that are being cleared
        self._refusals = itertools.count(1)

    def epoch(self, namespace: bytes) -> int:
        """Grows when the namespace is cleared: what was accepted in an older epoch must not become visible.

        While its pages are being dropped no two answers are the same: what is accepted then may come from a page that
        is still to go.
        """
        if namespace in self._swept:
            return -next(self._refusals)
        return self._epoch + self._epochs.get(namespace, 0)

    def clear(self, *namespaces: bytes) -> dict[str, int]:
        """Drop every page (of these namespaces, if some are given) from every tier, durably; the pages removed by tier.

        Everything goes in one step. Namespaces go piece by piece; what is stored of them meanwhile is dropped. When
        several clear at once, each returns when what the others dropped before it is gone for good, too.
        """
        with self.alone:
            removed = self._sweep(frozenset(namespaces)) if namespaces else self._drop_everything()
        for tier in self._files:
            for namespace in namespaces or (None,):
                tier.commit_all_deletions(namespace)
        return removed

    def _drop_everything(self) -> dict[str, int]:
        """Make all pages invisible at once. The slots of files, each of which costs work, follow in pieces."""
        with self._lock:
            self._epoch += 1
            detached = {name: tier.index.detach() for name, tier in self._tiers.items()}
            slots = {name: iter(some.slots) for name, some in detached.items()}
            for name, tier in self._tiers.items():  # at once for whoever needs some now
                tier.index.retire(itertools.islice(slots[name], self.piece) if tier in self._files else slots[name])
        with contextlib.ExitStack() as ends:
            for tier in self._files:
                ends.callback(self._retire, tier, slots[tier.name])  # nothing, unless what follows is broken off
            for tier in self._files:
                for piece in self._pieces(slots[tier.name]):
                    self._retire(tier, piece)
        return {name: some.visible for name, some in detached.items()}

    def _retire(self, tier: Tier, slots: Iterable[int]) -> None:
        with self._lock:
            tier.index.retire(slots)

    def _sweep(self, namespaces: frozenset[bytes]) -> dict[str, int]:
        """Drop the pages of namespaces, each from all tiers at once: no load can bring it back from another tier.

        None of its pages is new meanwhile, for `epoch` refuses stores; a load may only copy what is among the keys.
        """
        removed = dict.fromkeys(self._tiers, 0)
        try:
            with self._lock:
                if len(self._epochs) >= _NAMESPACE_EPOCHS_KEPT:  # forget them all: a newer epoch for everybody
                    self._epoch += max(self._epochs.values())
                    self._epochs.clear()
                for namespace in namespaces:
                    self._epochs[namespace] = self._epochs.get(namespace, 0) + 1
                self._swept = namespaces
                keys = [tier.index.select(None) for tier in self._tiers.values()]
            for piece in self._pieces(itertools.chain.from_iterable(keys)):
                with self._lock:
                    for name, tier in self._tiers.items():
                        removed[name] += tier.index.drop_all(piece, namespaces)
        finally:
            self._swept = frozenset()
        return removed

    def _pieces(self, items: Iterable[_T]) -> Iterator[list[_T]]:
        """`items`, a piece at a time, with a pause after each."""
        rest = iter(items)
        while piece := list(itertools.islice(rest, self.piece)):
            yield piece
            self.sleep(PAUSE_S)
