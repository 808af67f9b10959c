"""KV events in the names that an inference engine itself has for its blocks.

A page's key is gdscache's own. So the engine's adapter names the pages of its requests: digest, parent's digest and
tokens. Pages of an earlier process have no name until a request begins with them, and are reported then. Pages without
a name are not reported. Neither are pages of a tier beyond this machine, which are no reason to choose one engine.
Tiers of one medium count as one place.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from gdscache.events.base import AllBlocksCleared, BlockStored, KVEventBatch, Place

if TYPE_CHECKING:
    from gdscache.tiers.base import Tier

_LOOKED = 1024  # pages that are looked at in one hold of the manager's lock
EXPECTED = 1 << 16  # names of pages that no tier has, or not yet: about 30 MiB


class BlockName(NamedTuple):
    """A block in the inference engine's terms. `digest`: of all tokens up to its end, in that engine's form. `parent`:
    of the tokens before it. `tokens`: its own, uint32. `extra`: other inputs of the digest (salt, media), in that
    engine's form."""

    digest: Any
    parent: Any
    tokens: array[int]
    group: int = 0
    extra: Any = None


class NamedRun(NamedTuple):
    """Consecutive blocks that a medium has got, or (`stored` is False) blocks that it has lost."""

    stored: bool
    medium: str
    blocks: list[BlockName]


class NamedEvents:
    """Takes an engine's batches (`heard`), and returns their changes in names (`take`). Thread-safe."""

    def __init__(self, tiers: Iterable[Tier], lock: AbstractContextManager[Any], expected: int = EXPECTED) -> None:
        """`lock`: the manager's. `expected`: most names kept of pages that no tier has."""
        self._tiers = [tier for tier in tiers if tier.kind != "planes" and tier.served]
        self._media = {tier.name: Place.of(tier).medium for tier in self._tiers}
        self._manager_lock = lock
        self._most = expected
        self._lock = threading.Lock()
        self._next: int | None = None  # the next batch's number
        self._expected: OrderedDict[bytes, BlockName] = OrderedDict()
        self._there: dict[bytes, tuple[BlockName, set[str]]] = {}
        self._told: list[tuple[bool, str, BlockName]] = []

    def name(self, keys: Sequence[bytes], names: Sequence[BlockName]) -> None:
        """Name these pages, and report the ones present in tiers."""
        with self._lock:  # before the look: `heard` hears of later changes behind it
            for key, name, tiers in zip(keys, names, self._having(keys), strict=True):
                if key not in self._there:
                    self._expect(key, name)
                for tier in tiers:
                    self._got(key, tier)

    def heard(self, batch: KVEventBatch) -> None:
        """Take a batch of the engine's. Its pages may be reported already by `name`, or be gone again. Behind a missing
        number all tiers are looked at again."""
        with self._lock:
            missed, self._next = batch.seq != self._next, batch.seq + 1
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    self._lose_all()
                elif event.ownership in self._media:
                    change = self._got if isinstance(event, BlockStored) else self._lost
                    for key in event.block_hashes:
                        change(key, event.ownership)
            if missed:
                self._look_again()

    def forget_all(self) -> None:
        """Report all blocks as lost, and forget their names: with new weights, an engine gives these to other pages."""
        with self._lock:
            self._lose_all()
            self._expected.clear()

    def take(self) -> list[NamedRun]:
        """The changes since the last call, in order."""
        with self._lock:
            changes, self._told = self._told, []
        runs = list[NamedRun]()
        for stored, medium, name in changes:
            if runs and runs[-1][:2] == (stored, medium) and _together(runs[-1].blocks[-1], name, stored):
                runs[-1].blocks.append(name)
            else:
                runs.append(NamedRun(stored, medium, [name]))
        return runs

    def _having(self, keys: Sequence[bytes]) -> list[list[str]]:
        """The tiers that have each page now."""
        with self._manager_lock:
            return [[tier.name for tier in self._tiers if tier.index.has(key)] for key in keys]

    def _look_again(self) -> None:
        keys = [*self._there, *self._expected]
        for at in range(0, len(keys), _LOOKED):  # others need the manager's lock between
            some = keys[at : at + _LOOKED]
            for key, having in zip(some, self._having(some), strict=True):
                for tier in self._tiers:
                    change = self._got if tier.name in having else self._lost
                    change(key, tier.name)

    def _got(self, key: bytes, tier: str) -> None:
        name = self._expected.pop(key, None)
        if name is not None:
            self._there[key] = name, set()
        if key in self._there:
            name, tiers = self._there[key]
            if not self._has(tiers, tier):
                self._told.append((True, self._media[tier], name))
            tiers.add(tier)

    def _lost(self, key: bytes, tier: str) -> None:
        name, tiers = self._there.get(key, (None, set[str]()))
        if name is not None and tier in tiers:
            tiers.remove(tier)
            if not self._has(tiers, tier):
                self._told.append((False, self._media[tier], name))
            if not tiers:  # it may come back
                del self._there[key]
                self._expect(key, name)

    def _lose_all(self) -> None:
        for key, (_, tiers) in list(self._there.items()):
            for tier in list(tiers):
                self._lost(key, tier)

    def _has(self, tiers: Iterable[str], tier: str) -> bool:
        return any(self._media[other] == self._media[tier] for other in tiers)

    def _expect(self, key: bytes, name: BlockName) -> None:
        self._expected[key] = name
        self._expected.move_to_end(key)
        if len(self._expected) > self._most:
            self._expected.popitem(last=False)


def _together(last: BlockName, name: BlockName, stored: bool) -> bool:
    return last.group == name.group and (not stored or name.parent == last.digest)
