"""The contract that every tier fulfils.

A tier is an index (`PageIndex`: names, slots, states, leases) and the bytes of its slots. The manager decides under its
lock, on indexes alone; bytes move outside the lock, between slots that are leased. Every operation has its phases:

1. *Reserve and pin.* Under the lock: slots are taken (clean, unleased pages are evicted for them), the pages are
   inserted as `PENDING` and leased by whoever will fill them; sources are leased. A load takes what it gets in this
   one step and never waits for more.
2. *Move bytes.* Outside the lock. Results are per page: complete bytes that match their checksums, or a cause.
3. *Commit or drop.* Under the lock: a page becomes visible, or its reservation is undone; leases end.

What a tier promises: `slots` times the extent size never exceeds its configured capacity, which is reserved when it
opens; a slot is never given out while its page is leased; `check()` restates its invariants from scratch; `close()`
may be called twice.
"""

from __future__ import annotations

import abc
import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gdscache.errors import TierAnswerError, TierUnavailableError
from gdscache.index.index import PageIndex
from gdscache.index.retention import Retention
from gdscache.index.table import Entry
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.runtime.named_class import named_class

if TYPE_CHECKING:
    import torch

    from gdscache.config import TierConfig
    from gdscache.moves.machine import Files
    from gdscache.pages.layout import PageLayout

NO_RETENTIONS: Mapping[bytes, Retention] = {}
_TAKEN = ("gpu", "cpu", "ssd", "planes", "bounce")  # names of tiers and memories that there are


class Tier(abc.ABC):
    """One level of the cache: an index and the bytes of its slots.

    `kind` says what reaches these: whoever computes (`planes`), copies (`memory`), or only I/O (`files`). `served`:
    whether lookups and loads see its pages; else only a prefetch brings them, which asks for them first.
    """

    name: str
    kind: Literal["planes", "memory", "files"]
    index: PageIndex
    served: bool = True

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Bytes reserved for slots."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What `stats()` shows besides the counts: where the bytes are and how they are reached."""

    def check(self, lock: threading.RLock, *, fix: bool) -> list[str]:
        """What disagrees between the tier's index, its slots and its bytes; `fix` drops the pages concerned.

        Takes the manager's `lock` itself, since reading records may need I/O.
        """
        with lock:
            return self.index.check()

    def place(self, slot: int) -> str:
        """Where a slot's bytes are, for people: a directory, where there is one."""
        return {"planes": "the planes", "memory": "host memory"}.get(self.kind, f"the {self.name} tier")

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page, tail first, under the manager's lock."""
        self.index.touch(keys)

    def retain(self, key: bytes, retention: Retention) -> None:
        """A page is stored again: see `PageIndex.retain`. Under the manager's lock."""
        self.index.retain(key, retention)

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. May be called twice."""


class DurableTier(Tier):
    """A tier that only I/O reaches: its slots are filled by moves, and its pages are committed in batches.

    `io` is where the bytes are: it hands over files and the transport that reads and writes them. What a tier does not
    have, the defaults do without.
    """

    kind = "files"
    io: Files

    @property
    def spare_slots(self) -> int:
        """Slots for pages that need not push others out."""
        return self.index.free_slots

    @abc.abstractmethod
    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """Reserve and lease slots for the first of `pages`, as many as find room. May take time: without the lock.

        `retentions`: by key, where they are not the default. Raises `StorageError` when the tier takes none.
        """

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Announce memory that pages come from and go to until `close`: once, before any I/O on it."""

    def asks(self, pages: Sequence[Page]) -> bool:
        """Whether `ask` may find some of these that the index does not know of. Under the manager's lock."""
        return False

    def ask(self, pages: Sequence[Page]) -> None:
        """Find out which of the consecutive pages the tier has, and have the index say so. Takes time, within bounds:
        without the lock, and never for who is waited for."""

    def expect(self, entries: Sequence[Entry], sums: Checksums) -> None:
        """The bytes of reserved pages are written next, and have to give this; `commit` says it again."""

    @abc.abstractmethod
    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        """Make pages visible whose bytes are in their slots; True for each that is now, False for one that was dropped
        meanwhile. `sums`: what the bytes have to give, uint64 (pages, layers).

        Raises `StorageError`; then nothing was committed.
        """

    @abc.abstractmethod
    def checksums(self, entries: Sequence[Entry]) -> Checksums | None:
        """What the bytes of leased pages have to give, uint64 of shape (pages, layers); zeros where nothing is right.
        What is not `at_hand` behind `learn` could not be found out for now: these pages are not read, and stay.

        None: that comes with the bytes, and `io` compares them itself (`Descriptors.sums`). For tiers that are not
        `served`.
        """

    def learn(self, entries: Sequence[Entry]) -> None:
        """Read what `checksums` of these needs I/O for. Takes time, and may fail: then they are not `at_hand`."""

    def at_hand(self, entries: Sequence[Entry]) -> bool:
        """Whether `checksums` of these needs no I/O."""
        return True

    def commit_deletions(self) -> None:
        """Pages were dropped: let go of what waits for that, if anything does."""

    def commit_all_deletions(self, namespace: bytes | None = None) -> None:
        """Return when nothing of the pages that were dropped by now can come back.

        Those are all pages of a namespace, or all there are, also where the index does not know of them.
        """

    def lock_lost(self, *, thorough: bool = False) -> str:
        """Why the tier is not ours alone any more; "" while it is. `thorough` may cost more than an `os.stat`."""
        return ""

    def describe_namespace(self, digest: bytes, description: dict[str, object]) -> None:
        """Note what a namespace means: for people who look at what the tier keeps."""

    def close_unfinished(self, *, writing: bool) -> Callable[[], None]:
        """Close what I/O that hangs does not need, in bounded time; the answer closes the rest, when it has ended.

        `writing`: writes hang.
        """
        return self.close


def checked_sums(tier: DurableTier, entries: Sequence[Entry], layers: int) -> Checksums | None:
    """`tier.checksums(entries)`, in one piece. Raises `TierAnswerError` where it is not an array of that shape."""
    sums = tier.checksums(entries)
    if sums is None:
        return None
    shape, dtype = getattr(sums, "shape", None), getattr(sums, "dtype", type(sums).__name__)
    if shape != (len(entries), layers) or dtype != np.uint64:
        raise TierAnswerError(
            f"checksums of {len(entries)} pages of the {tier.name} tier are {dtype} of shape {shape}",
            f"return uint64 of shape (pages, {layers})",
        )
    return np.ascontiguousarray(sums)


class Lease:
    """Pins on pages of any tiers, with an owner and an end. Made and ended by the manager, under its lock."""

    __slots__ = ("_held", "_taken", "owner", "since")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.since = time.monotonic()
        self._taken: list[tuple[PageIndex, list[Entry]]] = []  # pages that were taken together
        self._held: list[tuple[PageIndex, Sequence[Page], Sequence[int]]] = []  # pages by their slots

    def __len__(self) -> int:
        """Pins."""
        return sum(len(entries) for _, entries in self._taken) + sum(len(slots) for _, _, slots in self._held)

    def __iter__(self) -> Iterator[tuple[PageIndex, Entry]]:
        """Every pin that has an object, in the order in which they came."""
        for index, entries in self._taken:
            yield from zip(itertools.repeat(index), entries, strict=False)

    def runs(self) -> Iterator[tuple[PageIndex, Sequence[Page], Sequence[int]]]:
        """All pins: pages of an index, and their slots."""
        for index, entries in self._taken:
            yield index, [entry.page for entry in entries], [entry.slot for entry in entries]
        yield from self._held

    def add(self, index: PageIndex, entry: Entry) -> None:
        """Pin one page."""
        index.lease(entry)
        self.take(index, (entry,))

    def take(self, index: PageIndex, entries: Sequence[Entry]) -> None:
        """Take over one pin on each of some pages."""
        self._taken.append((index, [*entries]))

    def hold(self, index: PageIndex, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """Take over one pin on each of some pages, by their slots, until the end."""
        self._held.append((index, pages, slots))

    def remove(self, entry: Entry) -> None:
        """End a pin on one page before the others."""
        index, entries = next(taken for taken in self._taken if entry in taken[1])
        entries.remove(entry)
        index.release(entry)

    def release(self, entries: Collection[Entry]) -> None:
        """End the pins on these pages, where it has any, before those on the others."""
        for index, mine in self._part(entries):
            index.release_all(mine)

    def hand_over(self, entries: Collection[Entry], other: Lease) -> None:
        """Let another lease have the pins on these pages."""
        for index, mine in self._part(entries):
            other.take(index, mine)

    def _part(self, entries: Collection[Entry]) -> list[tuple[PageIndex, list[Entry]]]:
        """Take these pages out: those that it has pins on, by index."""
        if len(self._taken) == 1 and self._taken[0][1] == entries:  # all of them, as is usual
            taken, self._taken = self._taken, []
            return taken
        wanted = set(entries)
        parted = [
            (index, [e for e in taken if e in wanted], [e for e in taken if e not in wanted])
            for index, taken in self._taken
        ]
        self._taken = [(index, kept) for index, _, kept in parted if kept]
        return [(index, mine) for index, mine, _ in parted if mine]

    def end(self) -> None:
        """Release every page. A second call does nothing."""
        taken, self._taken = self._taken, []
        for index, entries in taken:
            index.release_all(entries)
        held, self._held = self._held, []
        for index, pages, slots in held:
            index.let_go(pages, slots)


def open_tier(config: TierConfig, layout: PageLayout, lock: threading.RLock) -> DurableTier:
    """An instance of the class that `config` names: `Class(layout, capacity, lock, **options)`.

    Raises `TierUnavailableError` where there is no such class, or it does not take these; and what the class raises.
    """
    given, options = (layout, config.capacity, lock), config.options or {}
    refuse = functools.partial(_bad_class, config.tier)
    tier: DurableTier = named_class(config.tier, DurableTier, refuse, *given, **options)(*given, **options)
    if tier.name in _TAKEN:
        tier.close()
        raise _bad_class(config.tier, f"its name is {tier.name!r}, which another tier or memory has")
    return tier


def _bad_class(target: str, cause: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"tier {target!r}: {cause}", "name a subclass of gdscache.tiers.base.DurableTier as package.module:Class"
    )
