"""The SSD tier: a preallocated slab of extents, a durable catalogue, and a transport that moves the bytes.

The order of a store is: bytes written, row committed, key visible. The row of a page that is gone is *doomed*: the
next commit deletes it, and its slot is free when that is done and no lease is left. A reserve of free slots keeps a
store from waiting for such a commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdscache.catalog import Catalog, PageRecord
from gdscache.checksum import Checksums
from gdscache.config import SsdConfig
from gdscache.directory import CacheDirectory
from gdscache.errors import IOFailedError
from gdscache.layout import PageLayout
from gdscache.slab import Slab
from gdscache.storage import open_transport
from gdscache.storage.base import IORequest, Op, Submission
from gdscache.tiers.base import Tier
from gdscache.tiers.index import Entry, Page, PageIndex, PageState

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("gdscache.ssd")
_TOUCHES_KEPT = 1 << 16
_CLOCK_LIMIT = 1 << 62  # a damaged row must not push the clock out of SQLite's integers


@dataclasses.dataclass(frozen=True, slots=True)
class SlotWrite:
    """A page to write: its reserved entry, its bytes, and their checksums."""

    entry: Entry
    memory: memoryview | torch.Tensor
    checksums: Checksums


class SsdTier(Tier):
    """Pages on an SSD. `lock` is the manager's lock; it guards the index and is never held over I/O."""

    name = "ssd"

    def __init__(self, layout: PageLayout, config: SsdConfig, device: str, lock: threading.RLock) -> None:
        self.layout = layout
        self.lock = lock
        self.path = path = config.path
        self.lost: Counter[str] = Counter()  # pages that recovery had to give up, by cause
        slots = config.capacity // layout.extent_bytes
        with contextlib.ExitStack() as undo:
            self._directory = CacheDirectory.open(path)
            undo.callback(self._directory.close)
            self._catalog = Catalog.open(path, extent_bytes=layout.extent_bytes, durability=config.durability)
            undo.callback(self._catalog.close)
            self._slab = Slab.open(path, layout.extent_bytes, slots)
            self._transport = open_transport(
                config.transport,
                directory=path,
                device=device,
                threads=config.threads,
                direct_io=config.direct_io,
                gds=config.gds,
            )
            undo.callback(self._transport.close)
            self._file = self._transport.open(self._slab.path)
            self._recover(slots)
            undo.pop_all()
        self._power = config.durability == "power"
        self._reserve = min(config.reserve, slots // 8)
        self._checksums = np.zeros((slots, layout.n_layers), dtype=np.uint64)
        self._known = bytearray(slots)  # slots whose checksums are in memory
        self._doomed: set[int] = set()  # slots whose rows the next commit deletes
        self._deleting: set[int] = set()  # ... the commit under way
        self._returned: set[int] = set()  # slots that are free once their row is deleted
        self._touched: dict[int, int] = {}
        self._commit_lock = threading.Lock()
        self._closed = False

    def _recover(self, slots: int) -> None:
        found = self._catalog.recover(min(slots, self._slab.valid_slots))
        self.index = PageIndex(slots, forget=self._doom, recycle=self._return)
        self.index.restore(found.keys, found.parents, found.namespaces, found.slots)
        self._clock = min(found.recency[-1] if found.recency else 0, _CLOCK_LIMIT) + 1
        self._set_aside = found.set_aside
        self.lost.update(found.dropped)
        if found.dropped:
            _log.warning("%s: recovery gave up pages: %s", self.path, dict(found.dropped))
        _log.info("%s: %d pages of %d bytes recovered", self.path, len(found.slots), self.layout.extent_bytes)

    @property
    def capacity(self) -> int:
        return self.index.slots * self.layout.extent_bytes

    @property
    def memory_kinds(self) -> frozenset[str]:
        """Where the transport can read to and write from: `host`, `cuda`."""
        return self._transport.memory_kinds

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Tell the transport about a buffer that will be used for the life of the tier."""
        self._transport.register(memory)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, pages: Sequence[tuple[Entry, memoryview | torch.Tensor]]) -> Submission:
        """Start reading leased pages, each into a buffer of one extent."""
        return self._submit(Op.READ, pages)

    def checksums(self, entries: Sequence[Entry]) -> list[Checksums | None]:
        """The stored checksums of pages, uint64 of shape (layers,); None where the catalogue has none."""
        self._learn_checksums([e.slot for e in entries if not self._known[e.slot]])
        return [self._checksums[e.slot] if self._known[e.slot] else None for e in entries]

    # -- writing --------------------------------------------------------------------------------------------------

    def reserve(self, pages: Sequence[Page]) -> list[Entry]:
        """Reserve and lease slots for the first of `pages`, as many as find room. May commit deletions first.

        Only pages that continue a prefix of this tier may push others out: after a restart, nobody reaches the others.
        """
        with self.lock:
            short = self.index.continuing(pages) + self._reserve - self.index.free_slots - len(self._returned)
            if short > 0:
                self.index.evict(short, keep=self.index.family(pages))
            commit_first = self.index.free_slots < len(pages) and bool(self._returned)
        if commit_first:
            self.commit(())
        with self.lock:
            fresh = [p for p in pages if p.key not in self.index]
            entries = []
            for page, slot in zip(fresh, self.index.take_free(len(fresh)), strict=False):
                entry = self.index.insert(page, slot, PageState.PENDING)
                self.index.lease(entry)
                entries.append(entry)
            return entries

    def write(self, writes: Sequence[SlotWrite]) -> Submission:
        """Start writing the bytes of reserved pages."""
        return self._submit(Op.WRITE, [(w.entry, w.memory) for w in writes])

    def commit(self, writes: Sequence[SlotWrite]) -> list[bool]:
        """Make written pages durable and visible, and retired slots free; True for each page that is visible now.

        Raises `IOFailedError` when the catalogue cannot be written; then nothing was committed.
        """
        with self._commit_lock:
            if self._power and writes:
                self._transport.flush(self._file)
            with self.lock:
                live = [w for w in writes if not w.entry.dropped]
                self._deleting, self._doomed = self._doomed, set()
                touched, self._touched = self._touched, {}
                leased = [slot for slot in self._deleting - self._returned if not self._known[slot]]
                clock = self._clock
                self._clock += len(live)
            self._learn_checksums(leased)  # a load that still reads them could not check them otherwise
            records = [self._record(w, clock + i) for i, w in enumerate(live)]
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self._undo_deletions)
                self._catalog.commit(records, sorted(self._deleting), touched)
                on_failure.pop_all()
            with self.lock:
                for w in live:
                    self._checksums[w.entry.slot] = w.checksums
                    self._known[w.entry.slot] = 1
                    if not self.index.commit(w.entry):  # dropped meanwhile: its row must go again
                        self._doom(w.entry.slot)
                self.index.free(self._deleting & self._returned)
                self._returned -= self._deleting
                self._deleting = set()
                return [not w.entry.dropped for w in writes]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count a use of each present page, tail first, under the manager's lock. What is kept for disk is bounded."""
        touched = self._touched
        room = len(touched) < _TOUCHES_KEPT
        for key in keys:
            slot = self.index.slot(key)
            if slot is not None:
                self.index.touch((key,))
                if room:
                    touched[slot] = self._clock
                    self._clock += 1

    def commit_deletions(self) -> None:
        """Commit deletions that wait for the next store, if there are any."""
        if self._doomed:
            try:
                self.commit(())
            except IOFailedError as error:
                _log.warning("%s: deletions wait for a later commit: %s", self.path, error)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _learn_checksums(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        try:
            found = self._catalog.checksums(slots)
        except IOFailedError as error:  # no checksum, no hit: these pages fail their check and are dropped
            _log.warning("%s: checksums of %d pages cannot be read: %s", self.path, len(slots), error)
            return
        for slot, sums in zip(slots, found, strict=True):
            if sums is not None and len(sums) == self.layout.n_layers and not self._known[slot]:
                self._checksums[slot] = sums
                self._known[slot] = 1

    def _doom(self, slot: int) -> None:
        self._touched.pop(slot, None)
        self._doomed.add(slot)

    def _return(self, slot: int) -> None:
        self._known[slot] = 0
        if slot in self._doomed or slot in self._deleting:
            self._returned.add(slot)
        else:
            self.index.free((slot,))

    def _undo_deletions(self) -> None:
        with self.lock:
            self._doomed |= self._deleting
            self._deleting = set()

    def _submit(self, op: Op, pages: Sequence[tuple[Entry, Any]]) -> Submission:
        return self._transport.submit(op, [IORequest(self._file, self._slab.offset(e.slot), m) for e, m in pages])

    def _record(self, write: SlotWrite, recency: int) -> PageRecord:
        e = write.entry
        return PageRecord(e.slot, e.key, e.parent, e.namespace, self.layout.page_bytes, recency, write.checksums)

    def describe_namespace(self, digest: bytes, description: dict[str, object]) -> None:
        """Write down what a namespace means, for people who inspect the directory; pages do without when it fails."""
        try:
            self._catalog.describe_namespace(digest, description)
        except IOFailedError as error:
            _log.warning("%s: a namespace stays without description: %s", self.path, error)

    def check(self, lock: threading.RLock, *, fix: bool) -> list[str]:
        with self._commit_lock:
            try:
                rows = self._catalog.rows()
            except IOFailedError as error:
                return [error.message]
            with lock:
                problems = self.index.check(elsewhere=list(self._returned))
                for slot in self._doomed:
                    rows.pop(slot, None)
                pages = {e.slot: e for e in self.index if e.state is not PageState.PENDING}
                unknown = [slot for slot, key in rows.items() if slot not in pages or pages[slot].key != key]
                missing = [e for slot, e in pages.items() if rows.get(slot) != e.key]
                for entry in filter(None, [self.index.find(e.key) for e in missing if fix]):
                    self.index.drop(entry)
            if fix and unknown:
                self._catalog.commit((), unknown, {})
        problems += [f"the catalogue's row for slot {slot} names no page" for slot in unknown]
        return problems + [f"page {e.key.hex()[:16]} in slot {e.slot} has no row in the catalogue" for e in missing]

    def describe(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "lost_at_recovery": dict(self.lost),
            "catalogue_set_aside": None if self._set_aside is None else str(self._set_aside),
            "transport": self._transport.describe(),
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._transport.close()
        try:
            self.commit(())
        except IOFailedError as error:
            _log.warning("%s: the last uses and deletions are lost: %s", self.path, error)
        finally:
            self._catalog.close()
            self._directory.close()
