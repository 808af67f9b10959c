"""The contract of tiers.

A tier is an index (`PageIndex`: names, slots, states, leases) and the bytes of its slots. The manager decides under its
lock, on indexes alone; bytes move outside the lock, between slots that are leased. Every operation has three phases:

1. *Reserve and pin.* Under the lock: slots are taken (clean, unleased pages are evicted for them), and the pages are
inserted as `PENDING` and leased by the operation that will fill them; sources are leased. A load takes all its slots in
this one step and never waits for more. 2. *Move bytes.* Outside the lock. Results are per page: complete bytes that
match their checksums, or a cause. 3. *Commit or drop.* Under the lock: a page becomes visible, or its reservation is
undone; leases end.

A tier promises: `slots` times the extent size never exceeds its capacity, which is reserved when it opens; a slot is
never reused while its page is leased; `check()` recomputes its invariants; `close()` may be called twice.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gdscache.errors import TierAnswerError, TierUnavailableError
from gdscache.index.index import PageIndex
from gdscache.index.retention import Retention
from gdscache.index.table import Entry
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.storage.base import named_class, named_object

if TYPE_CHECKING:
    import torch

    from gdscache.config import TierConfig
    from gdscache.storage.base import Files

NO_RETENTIONS: Mapping[bytes, Retention] = {}
_TAKEN = ("gpu", "cpu", "ssd", "planes", "bounce")


class Tier(abc.ABC):
    """One level of the cache: an index and the bytes of its slots.

    `kind` says how the bytes are reached: by kernels of the model (`planes`), by copies (`memory`) or by I/O (`files`).
    `served`: lookups and loads see the tier's pages; otherwise only a prefetch brings them, after `ask`, and pages with
    a time to live are not put there. `plain`: its extents are plain where those of the other tiers are packed, and it
    has the pages that do not fit into these.
    """

    name: str
    kind: Literal["planes", "memory", "files"]
    index: PageIndex
    served: bool = True
    plain: bool = False

    @property
    @abc.abstractmethod
    def capacity(self) -> int: ...

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """The tier's own part of `stats()`: location and means of access."""

    def check(self, lock: threading.RLock) -> list[str]:
        """Contradictions between the tier's index, slots and bytes. Takes the manager's `lock` itself, since it may
        read files."""
        with lock:
            return self.index.check()

    def place(self, slot: int) -> str:
        """The location of a slot's bytes, for people: a directory for files."""
        return {"planes": "the planes", "memory": "host memory"}.get(self.kind, f"the {self.name} tier")

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page, tail first. Under the manager's lock."""
        self.index.touch(keys)

    def retain(self, key: bytes, retention: Retention) -> None:
        """A page is stored again: see `PageIndex.retain`. Under the manager's lock."""
        self.index.retain(key, retention)

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. May be called twice."""


class DurableTier(Tier):
    """A tier of files: moves fill its slots, and its pages are committed in batches.

    `io` hands over the files, and the transport that reads and writes them. Methods with a default are optional.
    """

    kind = "files"
    io: Files

    @property
    def spare_slots(self) -> int:
        """Slots for pages that need not evict others."""
        return self.index.free_slots

    @abc.abstractmethod
    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """Reserve and lease slots for the first of `pages`, until no slot is left. May take time: without the lock.

        `retentions`: by key, where they are not the default. Raises `StorageError` when the tier takes no pages.
        """

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Announce memory that pages move through until `close`: once, before any I/O on it."""

    def asks(self, pages: Sequence[Page]) -> bool:
        """Whether `ask` may find pages that the index lacks. Under the manager's lock."""
        return False

    def ask(self, pages: Sequence[Page]) -> None:
        """Find out which of the consecutive pages the tier has, and add them to the index. Takes a bounded time:
        without the lock, and never in a thread that a caller waits for."""

    def expect(self, entries: Sequence[Entry], sums: Checksums) -> None:
        """The bytes of reserved pages are written next, and have these checksums; `commit` gets them again."""

    @abc.abstractmethod
    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        """Make written pages visible. True for each page that is visible now, False for one that was dropped meanwhile.
        `sums`: uint64 (pages, layers).

        Raises `StorageError`; then nothing was committed.
        """

    @abc.abstractmethod
    def checksums(self, entries: Sequence[Entry]) -> Checksums | None:
        """The expected checksums of leased pages, uint64 of shape (pages, layers); zeros for a page whose bytes cannot
        be right. A page that is not `at_hand` after `learn` is not read, and stays.

        None, for tiers that are not `served`: the checksums come with the bytes, and `io` compares them
        (`Descriptors.sums`).
        """

    def learn(self, entries: Sequence[Entry]) -> None:
        """Read the checksums of these that are not in memory. Takes time, and may fail: then they are not `at_hand`."""

    def at_hand(self, entries: Sequence[Entry]) -> bool:
        """Whether `checksums` of these needs no I/O."""
        return True

    def commit_deletions(self) -> None:
        """Pages were dropped: write their deletion down, if any is pending."""

    def commit_all_deletions(self, namespace: bytes | None = None) -> None:
        """Return when no page of the namespace (None: no page at all) that was dropped by now can come back, including
        pages that the index does not know."""

    def lock_lost(self, *, thorough: bool = False) -> str:
        """Why another process may use the tier's files; "" while none may. `thorough` may cost more than an
        `os.stat`."""
        return ""

    def describe_namespace(self, digest: bytes, description: dict[str, object]) -> None: ...

    def close_unfinished(self, *, writing: bool) -> Callable[[], None]:
        """Close all parts that hanging I/O does not need, in bounded time. The result closes the rest, after that I/O
        has ended.

        `writing`: writes hang.
        """
        return self.close


def checked_sums(tier: DurableTier, entries: Sequence[Entry], layers: int) -> Checksums | None:
    """`tier.checksums(entries)`, contiguous. Raises `TierAnswerError` if the shape or dtype is wrong."""
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
    """Pins on pages of any tiers, with an owner. Made and ended by the manager, under its lock."""

    __slots__ = ("_held", "_taken", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._taken: list[tuple[PageIndex, list[Entry]]] = []  # pages with an entry
        self._held: list[tuple[PageIndex, Sequence[Page], Sequence[int]]] = []  # pages by slot

    def __len__(self) -> int:
        return sum(len(entries) for _, entries in self._taken) + sum(len(slots) for _, _, slots in self._held)

    def __iter__(self) -> Iterator[tuple[PageIndex, Entry]]:
        for index, entries in self._taken:
            yield from ((index, entry) for entry in entries)

    def runs(self) -> Iterator[tuple[PageIndex, Sequence[Page], Sequence[int]]]:
        """All pins: an index, its pages and their slots."""
        for index, entries in self._taken:
            yield index, [entry.page for entry in entries], [entry.slot for entry in entries]
        yield from self._held

    def add(self, index: PageIndex, entry: Entry) -> None:
        self.take(index, (entry,))  # first: it may find no memory
        index.lease(entry)

    def take(self, index: PageIndex, entries: Sequence[Entry]) -> None:
        self._taken.append((index, [*entries]))

    def hold(self, index: PageIndex, pages: Sequence[Page], slots: Sequence[int]) -> None:
        self._held.append((index, pages, slots))

    def release(self, entries: Collection[Entry]) -> None:
        for index, mine in self._part(entries):
            index.release_all(mine)

    def hand_over(self, entries: Collection[Entry], other: Lease) -> None:
        for index, mine in self._part(entries):
            other.take(index, mine)

    def _part(self, entries: Collection[Entry]) -> list[tuple[PageIndex, list[Entry]]]:
        if len(self._taken) == 1 and self._taken[0][1] == entries:  # the usual case: all pages
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
        taken, self._taken = self._taken, []
        for index, entries in taken:
            index.release_all(entries)
        held, self._held = self._held, []
        for index, pages, slots in held:
            index.let_go(pages, slots)


def tier_class(name: str) -> type[DurableTier]:
    """The class that `tiers[].tier` names. Raises `TierUnavailableError`; and its module's own exceptions."""
    found: type[DurableTier] = named_class(name, DurableTier, functools.partial(_bad_class, name))
    return found


def open_tier(
    config: TierConfig, layout: PageLayout, lock: threading.RLock, others: Collection[str] = ()
) -> DurableTier:
    """An instance of the class that `config` names: `Class(layout, capacity, lock, **options)`. `others`: names of the
    tiers that are open.

    Raises `TierUnavailableError` if the class is missing or does not take these arguments; and the class's own
    exceptions.
    """
    refuse, options = functools.partial(_bad_class, config.tier), config.options or {}
    tier: DurableTier = named_object(config.tier, DurableTier, refuse, layout, config.capacity, lock, **options)
    if tier.name in (*_TAKEN, *others) or tier.name.endswith(PLAIN):
        tier.close()
        raise _bad_class(config.tier, f"its name is {tier.name!r}, which another tier or memory may have")
    return tier


def _bad_class(target: str, cause: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"tier {target!r}: {cause}",
        "name a subclass of gdscache.tiers.base.DurableTier as package.module:Class, and its keywords in `options`",
    )
