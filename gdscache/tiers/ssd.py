"""The SSD tier: a preallocated slab of extents, a durable catalogue, and a transport that moves the bytes.

A store writes the bytes, then commits the row, then makes the key visible. The row of a dropped page is *doomed*: the
next commit deletes it, and its slot is free after that, once no lease is left. A reserve of free slots keeps stores
from waiting for such a commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdscache.arrays import integers
from gdscache.config import SsdConfig
from gdscache.disk.catalog import Catalog, Recovered
from gdscache.disk.catalog_file import lacking_room
from gdscache.disk.directory import CacheDirectory
from gdscache.disk.slab import Slab, SlabFiles, SlabIO, claim_stripes, missing_files, remove_files
from gdscache.errors import IOFailedError, LockLostError
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, HIGHEST, LOWEST, Retention
from gdscache.index.table import Entry, PageState
from gdscache.limits import LIMITS
from gdscache.native import put_rows, take_rows, take_unbound, trim_heap
from gdscache.pages.checksum import Checksums, bound
from gdscache.pages.keys import Page
from gdscache.pages.layout import PLAIN, PageLayout
from gdscache.policies import POLICIES
from gdscache.policies.base import EvictionPolicy
from gdscache.runtime.limited_log import LimitedLog
from gdscache.sizes import about
from gdscache.storage import open_transport
from gdscache.tiers.base import NO_RETENTIONS, DurableTier

if TYPE_CHECKING:
    import torch

    from gdscache.tiers.ssd_route import RouteChoice

_log = logging.getLogger("gdscache.ssd")
_TOUCHES_KEPT = 1 << 16  # pages whose last uses wait for a commit
_NOTED = 1 << 13  # uses that wait; a call brings in at most this many
_DELETIONS = 1 << 14  # rows that one commit deletes: a store may wait for it
LOST_HINT = "see who removes or replaces files there (cleaners of temporary folders?), then open the engine again"
_CLOCK_LIMIT = 1 << 62  # a damaged row must not push the clock out of SQLite's integers


class SsdTier(DurableTier):
    """Pages on an SSD. `lock` is the manager's lock; it guards the index and is never held over I/O.

    `reserve`: free slots that are kept ready, at most an eighth of all. `wall_clock`: seconds since the epoch; pages
    that have expired by then are dropped at once. `open_slab(slots)` opens the slab; by default in this process.

    Many methods: those of `DurableTier`, and the steps of opening, commits and checks.
    """

    name = "ssd"
    io: SlabFiles
    close_s = 5.0  # seconds for closing the catalogue while I/O hangs

    def __init__(
        self,
        layout: PageLayout,
        config: SsdConfig,
        device: str,
        lock: threading.RLock,
        *,
        eviction: str = "lifetime",
        groups: int = 1,
        reserve: int = LIMITS.ssd_reserve,
        wall_clock: Callable[[], float] = time.time,
        open_slab: Callable[[int], SlabFiles] | None = None,
        log: LimitedLog | None = None,
        plain: bool = False,
    ) -> None:
        self.layout = layout
        self.plain = plain
        self.name = SsdTier.name + PLAIN * plain
        self._said = LimitedLog() if log is None else log
        self.lock = lock
        self.path = path = config.path
        self.route: RouteChoice | None = None
        self.lost: Counter[str] = Counter()  # pages that recovery dropped, by cause
        slots = config.capacity // (layout.extent_bytes * layout.shards)
        with contextlib.ExitStack() as undo:
            self._directory = undo.enter_context(CacheDirectory.open(path, *config.stripes))
            self._made = missing_files((path, *config.stripes), layout.shards)
            undo.callback(lambda: remove_files(() if self._directory.lost(thorough=True) else self._made))
            claim_stripes((path, *config.stripes))
            if open_slab is None:
                open_slab = self._slab_here(config, device, undo)
            self._catalog = Catalog(
                path,
                extent_bytes=layout.extent_bytes,
                durability=config.durability,
                shards=layout.shards,
                wall_clock=wall_clock,
            )
            undo.callback(self._catalog.close)
            self.io = open_slab(slots)
            undo.callback(self.io.close)
            self._slab = self.io.slab
            self._say_room(slots)
            self._spared: Recovered | None = None  # by the catalogue, until `settle`
            self._recover(slots, POLICIES[eviction](groups), wall_clock())
            self._directory.watch_catalog()
            trim_heap()  # recovery needed as much memory again as the index keeps
            undo.pop_all()
        self._power = config.durability == "power"
        self._reserve = min(reserve, slots // 8)
        self._checksums = np.zeros((slots, layout.n_sums), dtype=np.uint64)  # as stored: bound to the keys
        self._known = bytearray(slots)  # 1 for a slot whose checksums are in memory
        self._doomed: dict[int, None] = {}  # slots whose rows the next commits delete, oldest first
        self._deleting: set[int] = set()  # slots whose rows the current commit deletes
        self._returned: set[int] = set()  # slots that are free once their row is deleted
        self._touched: dict[int, int] = {}  # slot -> its last use, for the next commit
        # uses that are not in `_touched` yet: keys, time of the first
        self._touches: list[tuple[Sequence[bytes], int]] = []
        self._noted = 0  # keys in `_touches`
        self.described: dict[bytes, dict[str, object]] = {}  # namespaces of pages that this engine stored
        self._retained: dict[int, bytes] = {}  # slot -> key of pages whose retention the next commit writes
        self._commit_lock = threading.Lock()
        self._lost = ""  # why another process may use the directory
        self._closed = False

    def _slab_here(self, config: SsdConfig, device: str, undo: contextlib.ExitStack) -> Callable[[int], SlabIO]:
        """A function that opens the slab. The transport opens first: it needs threads, and may get none later."""
        path, how = config.path, {"direct_io": "auto", "gds": config.gds}
        transport = open_transport(config.transport, directory=path, device=device, threads=config.threads, **how)
        undo.callback(transport.close)
        self._directory.hold_slabs()

        def opened(slots: int) -> SlabIO:
            slab = Slab.open(path, self.layout.extent_bytes, slots, config.stripes)
            self._directory.hold_slabs()  # the new files
            return SlabIO(slab, transport)

        return opened

    def _say_room(self, slots: int) -> None:
        lacking = lacking_room(self.path, slots, self.layout.n_sums)
        if lacking:
            _log.warning(
                "%s: the catalogue may need %s more than are free there. Free them, or lower ssd.capacity. Where "
                "it finds no room, pages are not stored (disk_full), and none is lost",
                self.path,
                about(lacking),
            )

    def _recover(self, slots: int, policy: EvictionPolicy, now: float) -> None:
        whole = self._slab.valid_slots == slots  # else the bytes of later slots are gone
        found = self._catalog.recover(min(slots, self._slab.valid_slots), now, spare=whole)
        if whole and found.dropped["slot"]:
            self._spared = found
        self.index = PageIndex(slots, policy, forget=self._doom, recycle=self._return)
        kept = _retentions(found)
        columns = (found.keys, found.parents, found.digests, found.namespaces, found.slots, found.order)
        self.index.restore(*columns, kept, found.above)
        self._clock = min(int(found.recency.max(initial=0)), _CLOCK_LIMIT) + 1
        self._set_aside = found.set_aside
        self.lost.update(found.dropped)
        if self._spared is None:
            self._say_lost()
        _log.info("%s: %d pages of %d bytes recovered", self.path, len(found.slots), self.layout.extent_bytes)

    def settle(self) -> None:
        """Nothing refuses the open any more: give up what is beyond the capacity, and keep the files that were made.
        Without it, `close` leaves the directory as it was unless something was stored. Raises `IOFailedError`."""
        if self._spared is not None:  # the rows first: none may lead to bytes that are gone
            self._catalog.clean(self._spared, self.index.slots)
            self._spared = None
            self._say_lost()
        self.io.cut()
        self._made = []

    def _say_lost(self) -> None:
        if self.lost:
            log = _log.info if self.lost.keys() <= {"expired"} else _log.warning
            causes = ", ".join(f"{n:,} ({cause})" for cause, n in self.lost.items())
            log("%s: recovery gave up pages: %s", self.path, causes)

    @property
    def direct(self) -> bool:
        return self.route is not None and self.route.route == "direct"

    @property
    def capacity(self) -> int:
        return self.index.slots * self.layout.extent_bytes

    def place(self, slot: int) -> str:
        return str(self._slab.files[self._slab.locate(slot)[0]].parent)

    @property
    def spare_slots(self) -> int:
        return self.index.free_slots + len(self._returned) - self._reserve

    def register(self, memory: memoryview | torch.Tensor) -> None:
        self.io.register(memory)

    # -- reading --------------------------------------------------------------------------------------------------

    def checksums(self, entries: Sequence[Entry]) -> Checksums:
        """See `DurableTier.checksums`.

        They are unbound with the requested key, so the checksums of another page or owner match no bytes. A page whose
        row has another namespace gets zeros: clearing either namespace would miss it.
        """
        self.learn(entries)
        slots = [e.slot for e in entries]
        rows = integers(slots)
        sums = take_unbound(self._checksums, rows, b"".join([e.key for e in entries]))
        wanted, found = [e.page.namespace for e in entries], self.index.namespaces_at(slots)
        if wanted != found:
            sums[[i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b]] = 0
        return sums

    # -- writing --------------------------------------------------------------------------------------------------

    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """May commit deletions first. Only pages that continue a prefix of this tier may evict others: after a restart
        no lookup reaches the rest. Where pages are packed, a prefix may lie in two tiers (`PageIndex.others`).
        Raises `IOFailedError`; `LockLostError` when another process may use the directory.
        """
        self._keep_out()
        with self.lock:
            self.index.make_room(pages, self._reserve, len(self._returned))
            commit_first = self.index.free_slots < len(pages) and bool(self._returned)
        if commit_first:
            self.commit_waiting()
        with self.lock:
            self._touched_slots()  # before slots change hands: uses are of the pages that are present now
            fresh = [pages[i] for i in self.index.lacking(pages)]
            kept = [retentions.get(page.key, DEFAULT) for page in fresh]
            # Behind the page that they follow if possible: reading the prefix then takes few long stretches.
            slots = self.index.take_free(len(fresh), self.index.slot(fresh[0].parent)) if fresh else []
            return self.index.insert_all(fresh, slots, PageState.PENDING, kept, leases=1)

    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        """Make written pages durable and visible, and free retired slots. True for each page that is visible now.

        Raises `IOFailedError` when the catalogue cannot be written, `LockLostError` when another process may use the
        directory; then nothing was committed.
        """
        with self._commit_lock, contextlib.ExitStack() as on_failure:
            self._keep_out()
            self._made = [] if entries else self._made
            if self._power and entries:
                self.io.flush()
            stored = bound(sums, [entry.key for entry in entries])
            with self.lock:
                live = [entry for entry in entries if not entry.dropped]
                if len(live) < len(entries):
                    stored = take_rows(stored, [i for i, entry in enumerate(entries) if not entry.dropped])
                written = [entry.slot for entry in live]
                touched, retained = self._touched_slots(), self._retained
                on_failure.callback(self._undo, retained, written)
                self._deleting = set(itertools.islice(self._doomed, _DELETIONS))
                for slot in self._deleting:
                    del self._doomed[slot]
                self._touched, self._retained = {}, {}
                still = {slot: key for slot, key in retained.items() if self.index.slot(key) == slot}
                wanted = {slot: self.index.retention(key) or DEFAULT for slot, key in still.items()}
                leased = [slot for slot in self._deleting - self._returned if not self._known[slot]]
                clock = self._clock
                self._clock += len(live)
                columns = (
                    *(written, *zip(*(entry.page for entry in live), strict=True)),
                    *(itertools.repeat(self.layout.page_bytes), itertools.count(clock), stored),
                    *zip(*(entry.retention for entry in live), strict=True),
                    itertools.repeat(self.layout.packed),
                )
                records = list(zip(*columns, strict=False)) if live else []  # in the order of `PageRecord`
            self._learn_checksums(leased)  # a load that still reads them needs the checksums
            with self.lock:
                put_rows(self._checksums, written, stored)  # known from the commit on
            self._catalog.commit(records, sorted(self._deleting), touched, wanted, self.described)
            with self.lock:
                on_failure.pop_all()
                np.frombuffer(self._known, np.uint8)[written] = 1
                self.index.commit_all(live)
                self._doom([entry.slot for entry in live if entry.dropped])  # meanwhile: their rows must be deleted
                self.index.free(self._deleting & self._returned)
                self._returned -= self._deleting
                self._deleting = set()
                return [not entry.dropped for entry in entries]

    def commit_waiting(self) -> None:
        self.commit((), np.zeros((0, self.layout.n_sums), np.uint64))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each present page, tail first, under the manager's lock. The last uses are kept for the next
        commit."""
        self.index.touch(keys)
        if not keys:
            return
        self._touches.append((keys, self._clock))
        self._noted += len(keys)
        self._clock += len(keys)
        if self._noted > _NOTED:
            self._touched_slots()

    def _touched_slots(self) -> dict[int, int]:
        """Slot -> last use since the last commit, the oldest first. The lock is held."""
        touched, touches, self._touches, self._noted = self._touched, self._touches, [], 0
        for keys, clock in touches:
            for slot in (slots := self.index.slots_of(keys)):
                touched.pop(slot, None)
            touched.update(zip(slots, itertools.count(clock), strict=False))
        for slot in [*itertools.islice(touched, max(0, len(touched) - _TOUCHES_KEPT))]:
            del touched[slot]
        return touched

    def retain(self, key: bytes, retention: Retention) -> None:
        """See `PageIndex.retain`. The next commit writes the retention. Under the manager's lock."""
        slot = self.index.slot(key)
        if slot is not None and self.index.retain(key, retention):
            self._retained[slot] = key

    def commit_all_deletions(self, namespace: bytes | None = None) -> None:
        """Commit every deletion that waits by now, in transactions of bounded size. Raises `IOFailedError`."""
        self.commit_waiting()  # after the current commit, whose pages may have been dropped meanwhile
        with self.lock:
            waiting = len(self._doomed)
        for _ in range(0, waiting, _DELETIONS):
            self.commit_waiting()

    def commit_deletions(self) -> None:
        if self._doomed:
            try:
                self.commit_waiting()
            except IOFailedError as error:
                text = "%s: deletions wait for a later commit: %s"
                self._said.say(_log, logging.WARNING, "deletions wait", text, self.path, error)

    def learn(self, entries: Sequence[Entry]) -> None:
        if not self.at_hand(entries):
            self._learn_checksums([entry.slot for entry in entries if not self._known[entry.slot]])

    def at_hand(self, entries: Sequence[Entry]) -> bool:
        slots = integers([entry.slot for entry in entries])
        return 0 not in take_rows(np.frombuffer(self._known, np.uint8), slots).tobytes()

    def _learn_checksums(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        try:
            found, sums = self._catalog.checksum_rows(slots, self.layout.n_layers)
        except IOFailedError as error:  # they stay unknown, and loads of these pages miss
            text, about = "%s: checksums of %d pages cannot be read: %s", (self.path, len(slots), error)
            self._said.say(_log, logging.WARNING, "checksums unread", text, *about)
            return
        with self.lock:
            known = np.frombuffer(self._known, dtype=np.bool_)
            # Checksums written meanwhile are newer.
            asked = np.array([slot for slot in slots if not known[slot]], np.int64)
            self._checksums[asked] = 0  # no row: no bytes match
            new = ~known[found]
            self._checksums[found[new]] = sums[new]
            known[asked] = True

    def _doom(self, slots: Sequence[int]) -> None:
        self._doomed.update(dict.fromkeys(slots))

    def _return(self, slots: Sequence[int]) -> None:
        free, touched, retained = [], self._touched_slots(), self._retained
        for slot in slots:
            touched.pop(slot, None)
            retained.pop(slot, None)
            self._known[slot] = 0
            if slot in self._doomed or slot in self._deleting:
                self._returned.add(slot)
            else:
                free.append(slot)
        self.index.free(free)

    def _undo(self, retained: Mapping[int, bytes], written: Sequence[int]) -> None:
        """The commit failed: its deletions and retentions wait for the next one. So do deletions of the `written`
        slots, whose rows a restart may find."""
        with self.lock:
            self._retained = {**retained, **self._retained}
            self._doomed = dict.fromkeys(sorted(self._deleting)) | self._doomed | dict.fromkeys(written)
            self._deleting = set()

    def namespaces(self) -> dict[bytes, dict[str, object]]:
        return self._catalog.namespaces()

    def describe_namespace(self, digest: bytes, description: dict[str, object]) -> None:
        with self.lock:
            self.described[digest] = description

    def lock_lost(self, *, thorough: bool = False) -> str:
        if not self._lost:
            self._lost = self._directory.lost(thorough=thorough)
        return self._lost

    def owned(self) -> bool:
        """Whether the directory is this engine's, and open."""
        return not (self._directory.closed or self.lock_lost())

    def _keep_out(self) -> None:
        if why := self.lock_lost(thorough=True):
            raise LockLostError(f"{why}: {self.path} is not this engine's alone any more", LOST_HINT)

    def check(self, lock: threading.RLock) -> list[str]:
        if why := self.lock_lost(thorough=True):
            return [f"{why}; the tier has stopped: close and open the engine"]
        damaged = self.io.check()
        with self._commit_lock:
            try:
                rows, given = self._catalog.rows(), self._catalog.retentions()
                kept = {slot: (min(max(priority, LOWEST), HIGHEST), ends) for slot, (priority, ends) in given.items()}
            except IOFailedError as error:
                return [*damaged, error.message]
            with lock:
                problems = self.index.check(elsewhere=list(self._returned))
                for slot in self._doomed:
                    rows.pop(slot, None)
                pages = {e.slot: e for e in self.index if e.state is not PageState.PENDING}
                unknown = [slot for slot, key in rows.items() if slot not in pages or pages[slot].key != key]
                missing = [e for slot, e in pages.items() if rows.get(slot) != e.key]
                known = {slot: _kept(e.retention) for slot, e in pages.items() if rows.get(slot) == e.key}
                wrong = [s for s, r in known.items() if s not in self._retained and r != kept.get(s, _kept(DEFAULT))]
        problems += damaged
        problems += [f"the catalogue has another retention for the page in slot {slot}" for slot in wrong]
        problems += [f"the catalogue's row for slot {slot} names no page" for slot in unknown]
        return problems + [f"page {e.key.hex()[:16]} in slot {e.slot} has no row in the catalogue" for e in missing]

    def describe(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "route": None if self.route is None else dataclasses.asdict(self.route),
            "stripes": [str(file.parent) for file in self._slab.files[1 : self._slab.directories]],
            "lost_at_recovery": dict(self.lost),
            "catalogue_set_aside": None if self._set_aside is None else str(self._set_aside),
            "transport": self.io.describe(),
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        lost = self.lock_lost(thorough=True)  # before the catalogue's log goes
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._directory.close)
            last_to_first.callback(remove_files, () if lost else self._made)
            last_to_first.callback(self._close_catalog)
            self.io.close()

    def close_unfinished(self, *, writing: bool) -> Callable[[], None]:
        """While writes hang the directory stays locked, so that they cannot reach the slots of another owner."""
        self._closed = True
        closing = threading.Thread(target=self._close_catalog, name="gdscache-close", daemon=True)
        closing.start()  # the catalogue may be on the device that hangs
        closing.join(self.close_s)
        if closing.is_alive():
            _log.error("%s: the catalogue was not closed within %g s", self.path, self.close_s)
        elif not writing:
            self._directory.close()

        def rest() -> None:
            with contextlib.ExitStack() as last_to_first:
                last_to_first.callback(self._directory.close)
                last_to_first.callback(closing.join)
                self.io.close()

        return rest

    def _close_catalog(self) -> None:
        try:
            self.commit_all_deletions()
        except IOFailedError as error:
            _log.warning("%s: the last uses and deletions are lost: %s", self.path, error)
        finally:
            self._catalog.close()


def _retentions(found: Recovered) -> dict[int, Retention]:
    same: dict[Retention, Retention] = {}
    kept = {}
    priorities = np.clip(found.priorities, LOWEST, HIGHEST).tolist()
    for position, priority, at in zip(found.retained.tolist(), priorities, found.expires.tolist(), strict=True):
        retention = Retention(priority, None if at == math.inf else at)
        if retention != DEFAULT:
            kept[position] = same.setdefault(retention, retention)
    return kept


def _kept(retention: Retention) -> tuple[int, float | None]:
    return retention.priority, None if retention.expires is None else math.floor(retention.expires * 1000) / 1000
