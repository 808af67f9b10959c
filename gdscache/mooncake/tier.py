"""The tier beyond this machine: pages in a Mooncake Store, which other engines use too.

The pool evicts by itself, and loses the pages of a dead process. The index here only has names of pages that this
engine put, or asked for and found; a name without a page is a miss, and is dropped. Lookups and loads do not see these
pages (`served`): a prefetch asks for them once (`ask`), and brings them to the CPU tier.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gdscache import arguments
from gdscache.arrays import integers
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import GeometryError, IOFailedError, PageBytesError, PageGoneError, StorageError, TierAnswerError
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import PENDING, Entry, PageState
from gdscache.limits import KEY_BYTES, MAX_SECONDS
from gdscache.mooncake.client import (
    CODES,
    DONE,
    GONE,
    MISFIT,
    NO_MASTER,
    NO_SPACE,
    TRANSFER_FAILED,
    Connect,
    Lines,
    MooncakeAddress,
    MooncakeClient,
    load_package,
    mooncake,
    size_of,
)
from gdscache.native import layer_sums
from gdscache.pages.checksum import Checksums, bound
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.runtime.threads import log_failure
from gdscache.storage.base import Descriptors, Memory, Transport, address_of
from gdscache.tiers.base import NO_RETENTIONS, DurableTier
from gdscache.tiers.clear import PAUSE_S, PIECE

if TYPE_CHECKING:
    import torch


TRAILER_BYTES = 4096
_HEAD = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}sQ")  # magic, layers, page bytes, key, namespace, its own hash
_MAGIC = b"gdspage1"
MOST_LAYERS = (TRAILER_BYTES - _HEAD.size) // 8
BATCH_PAGES = 128
SIDE_BY_SIDE = 2  # puts at a time, and gets: bounds the memory and threads of hanging calls
FULL_S, FULL_LONGEST_S = 0.02, 0.5  # seconds until a put that finds the pool full tries again, and in all
FULL_AGAIN_S = 1.0  # after a put that waited in vain, others do not wait for this time
_ERRNO = {NO_SPACE: errno.ENOSPC, NO_MASTER: errno.EHOSTUNREACH}
_Pieces = list[tuple[int, int]]
_End = tuple[str, StorageError | None]  # a page's outcome, and its error
_Call = Callable[[range, list[int], int], list[_End]]  # slots, addresses of their pages, offset of the trailers


def trailer(page: Page, page_bytes: int, stored: Checksums) -> bytes:
    """The bytes behind a page's extent. `stored`: its checksums, uint64 (layers,), bound to its key."""
    sums = np.ascontiguousarray(stored, dtype="<u8").tobytes()
    own = xxhash.xxh3_64_intdigest(_HEAD.pack(_MAGIC, len(stored), page_bytes, page.key, page.namespace, 0) + sums)
    head = _HEAD.pack(_MAGIC, len(stored), page_bytes, page.key, page.namespace, own)
    return (head + sums).ljust(TRAILER_BYTES, b"\0")


def is_stored(found: bytes, page: Page, layout: PageLayout, sums: Checksums) -> bool:
    """Whether bytes with the checksums `sums` and this trailer are the page as it was put."""
    return found == trailer(page, layout.page_bytes, bound(sums[None], [page.key])[0])


class MooncakeFiles(Transport):
    """Slots of a tier as objects of the pool, in one file. `pages[slot]`: the page in a leased slot.

    A page is an object, its extent followed by a trailer that names the page and has its checksums, bound to the page's
    key: any reader of the object can verify it. Pages are put from and got into their own memory, without a copy.

    `sums[slot]`: checksums, uint64 (slots, layers): expected ones of written slots, actual ones of read slots, which
    are compared with the trailer. `written(slots, pages)` is called when a put has ended, well or not.
    """

    name = "mooncake"
    call_bytes = 32 << 20
    direct = True

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        lines: Lines,
        name_of: Callable[[Page], str],
        written: Callable[[Sequence[int], Sequence[Page]], None],
    ) -> None:
        super().__init__(2 * SIDE_BY_SIDE + 1)  # if all calls hang, one thread is left to refuse others
        self.pages: list[Page | None] = [None] * slots
        self.sums = np.zeros((slots, layout.n_layers), np.uint64)
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._layout = layout
        self._lines = lines
        self._name_of = name_of
        self._written = written
        self._gave_up = 0.0  # the last time that a put waited for room in vain
        area = BATCH_PAGES * TRAILER_BYTES
        self._trailers = HostBuffer(self.threads * area, "off", TRAILER_BYTES, setting="pool trailers")
        # offsets of free areas for one call's trailers, enough for all threads
        self._areas: SimpleQueue[int] = SimpleQueue()
        for n in range(self.threads):
            self._areas.put(n * area)

    @property
    def buffer(self) -> tuple[int, int]:
        return self._trailers.address, self._trailers.nbytes

    def hand_over(self) -> Descriptors:
        return Descriptors((0,), max(1, len(self.pages)), self.threads, transport=self, sums=self.sums)

    def open(self, path: Path) -> int:
        return 0

    def flush(self, file: int) -> None:
        pass

    def close(self) -> None:
        self._trailers.close()

    def read(self, file: int, offset: int, memory: Memory) -> int:
        return self._move(self._get, offset, memory)

    def write(self, file: int, offset: int, memory: Memory) -> int:
        return self._move(self._put, offset, memory)

    def _move(self, call: _Call, offset: int, memory: Memory) -> int:
        """Move whole pages; returns the bytes of the pages before the first that failed, or raises its error if it is
        the first of all. The library then asks for each other page alone, and only a page that is moved alone is
        judged."""
        extent = self._layout.extent_bytes
        first, count, moved = offset // extent, memory.nbytes // extent, 0
        if not isinstance(memory, memoryview) or (first * extent, count * extent) != (offset, memory.nbytes):
            raise _failed("a part of an object, or memory of a device", "give the pages a CPU tier", errno.EINVAL)
        place, error = address_of(memory), None
        while moved < count and error is None:
            slots = range(first + moved, first + min(count, moved + BATCH_PAGES))
            ends = self._ends(call, slots, [place + (slot - first) * extent for slot in slots])
            good = list(itertools.takewhile(lambda end: end[1] is None, ends))
            moved += len(good)
            error = None if len(good) == len(ends) else ends[len(good)][1]
            with self._counting:
                self.counts.update(cause for cause, _ in (ends if count == 1 else good))
        if error is None or moved:
            return moved * extent
        if count == 1 and isinstance(error, PageBytesError):  # remove it, so that the page can be put again
            name = self._name_of(self._page(first))
            self._lines.begin(lambda client: self._lines.answered(client.remove([name])))
        raise error

    def _ends(self, call: _Call, slots: range, places: list[int]) -> list[_End]:
        area = self._areas.get()
        try:
            return call(slots, places, area)
        except IOFailedError as error:
            return [("refused", error)] * len(slots)
        except Exception as error:  # noqa: BLE001 - the client's library may raise any error
            log_failure(error)
            return [("failed", _failed("a call broke off", "see the log"))] * len(slots)
        finally:
            self._areas.put(area)

    def _objects(self, places: Sequence[int], area: int) -> list[_Pieces]:
        extent, trailers = self._layout.extent_bytes, self._trailers.address + area
        tails = range(trailers, trailers + len(places) * TRAILER_BYTES, TRAILER_BYTES)
        return [[(place, extent), (tail, TRAILER_BYTES)] for place, tail in zip(places, tails, strict=True)]

    def _put(self, slots: range, places: list[int], area: int) -> list[_End]:
        pages = [self._page(slot) for slot in slots]
        stored = bound(self.sums[slots.start : slots.stop], [page.key for page in pages])
        tails = b"".join(trailer(page, self._layout.page_bytes, sums) for page, sums in zip(pages, stored, strict=True))
        self._trailers.view[area : area + len(tails)] = tails
        names, objects, ends = [self._name_of(page) for page in pages], self._objects(places, area), dict[int, _End]()

        def put(client: MooncakeClient) -> None:
            try:
                self._put_all(client, names, objects, ends)
            finally:
                self._written(slots, pages)

        self._lines.call("puts", put)
        return [ends[n] for n in range(len(slots))]

    def _put_all(self, client: MooncakeClient, names: list[str], objects: list[_Pieces], ends: dict[int, _End]) -> None:
        begun, pause = time.monotonic(), FULL_S
        until = begun + (FULL_LONGEST_S if begun > self._gave_up + FULL_AGAIN_S else 0.0)
        codes = client.exist(names)  # putting an existing object is done at once, and changes nothing
        self._lines.answered(codes)
        ends.update((n, ("existed", None)) for n, code in enumerate(codes) if code == 1)
        while rows := [n for n in range(len(names)) if n not in ends]:
            codes = client.put([names[n] for n in rows], [objects[n] for n in rows])
            self._lines.answered(codes)
            over = time.monotonic() + pause > until or not self._lines.ready
            for n, code in zip(rows, codes, strict=True):
                if code == DONE:
                    ends[n], self._gave_up = ("put", None), 0.0
                elif code != NO_SPACE:
                    ends[n] = "not_put", _error(code)
                elif over:
                    ends[n] = "full", _failed(CODES[NO_SPACE], "add segments, or store less", errno.ENOSPC)
                    self._gave_up = time.monotonic()
            if len(ends) < len(names):
                with self._counting:
                    self.counts["waits"] += 1
                time.sleep(pause)
                pause *= 2

    def _get(self, slots: range, places: list[int], area: int) -> list[_End]:
        layout, pages = self._layout, [self._page(slot) for slot in slots]
        names, objects = [self._name_of(page) for page in pages], self._objects(places, area)
        whole = layout.extent_bytes + TRAILER_BYTES

        def get(client: MooncakeClient) -> list[int]:
            codes = client.get(names, objects)
            short = codes == [TRANSFER_FAILED] and 0 <= client.size(names[0]) < whole  # else its owner is gone
            return [MISFIT] if short else codes

        codes = self._lines.call("gets", get)
        self._lines.answered(codes)
        if len(codes) != len(slots):
            raise TierAnswerError(
                f"{len(codes)} answers came for {len(slots)} objects", "see the package of the pool's client"
            )
        came = [n for n, code in enumerate(codes) if code == whole]
        sums = layer_sums(np.array([places[n] for n in came], np.uint64), integers(layout.layer_bounds))
        found, ends = dict(zip(came, sums, strict=True)), list[_End]()
        for n, code in enumerate(codes):
            tail = bytes(self._trailers.view[area + n * TRAILER_BYTES :][:TRAILER_BYTES])
            if n in found and is_stored(tail, pages[n], layout, found[n]):
                self.sums[slots[n]] = found[n]
                ends.append(("got", None))
            elif n in found or code == MISFIT:
                error = PageBytesError(
                    "the shared pool: a page's bytes differ from the stored ones",
                    "check the other programs that write to the pool",
                )
                ends.append(("spoiled", error))
            else:
                ends.append(("not_got", _error(code)))
        return ends

    def _page(self, slot: int) -> Page:
        page = self.pages[slot]
        assert page is not None, "a slot without a page"
        return page


def _error(code: int) -> StorageError:
    if code == GONE:
        return PageGoneError(f"the shared pool: {CODES[code]}", "see how the pool evicts")
    return _failed(CODES.get(code, f"code {code}"), "see the master's log", _ERRNO.get(code, errno.EIO))


def _failed(cause: str, hint: str, code: int = errno.EIO) -> IOFailedError:
    return IOFailedError(f"the shared pool: {cause}", hint, code)


PREFIX = "gdscache1"  # prefix of all names in the pool; the digit is the trailer's format
_ASKED = 512  # pages a query
_NAMESPACES = 4096  # most removals that are owed apart
_PATTERNS = 64  # patterns of names a removal
_OPEN_S = 1.5  # seconds that opening an engine waits for the pool
_log = logging.getLogger("gdscache.mooncake")


class MooncakeTier(DurableTier):
    """Pages in the pool of a `mooncake_master`; `capacity` bounds the pages that this engine knows by name.

    `master`: host:port. `segment`: memory of this process that it adds to the pool (bytes, or text as "4GiB"); 0: none.
    `replicas`: copies of each page. `tenant`: the store's name for this group of users, whose pages it keeps apart.
    `hostname`: the name by which other machines reach this process. `devices`: RDMA devices. `deadline`: seconds of a
    call, after which the pool is not used until it answers again.

    Many methods: those of `DurableTier`, and the questions to the pool.
    """

    name = "mooncake"
    served = False
    io: MooncakeFiles

    def __init__(
        self,
        layout: PageLayout,
        capacity: int,
        lock: threading.RLock,
        *,
        master: str,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        hostname: str = "127.0.0.1",
        segment: int | str = 0,
        replicas: int = 1,
        tenant: str = "default",
        deadline: float = 2.0,
    ) -> None:
        deadline = arguments.span(deadline, "the mooncake tier's deadline", MAX_SECONDS)
        if layout.n_layers > MOST_LAYERS:
            raise GeometryError(
                f"the model has {layout.n_layers} layers, the trailer of a page has room for {MOST_LAYERS} checksums",
                "leave the mooncake tier out",
            )
        self.layout = layout
        self.lock = lock
        self.index = PageIndex(capacity // layout.extent_bytes)
        self._owed: dict[str, object] = {}  # patterns of names that are still to be removed from the pool; lock
        self._cleared = 0  # clears so far
        self._namespaces: dict[bytes, int] = {}  # of this engine's pages, the first ones: clears up to their last one
        self._taken = [0] * self.index.slots  # clears up to when the slot was taken
        self._asked = self._found = 0
        address = MooncakeAddress(master, protocol, devices, metadata, hostname, size_of(segment), replicas, tenant)
        about = address.checked(), self.connection(), f"{PREFIX}/probe", self._come_back, lambda: not self._owed
        self._lines = Lines(*about, deadline=deadline, most=SIDE_BY_SIDE)
        with contextlib.ExitStack() as undo:
            undo.callback(self._lines.close)
            self.io = MooncakeFiles(layout, self.index.slots, self._lines, self._name_of, self._written)
            undo.callback(self.close)
            self._lines.register(*self.io.buffer)
            undo.pop_all()
        changed = self._lines.changed
        with changed:
            ready = changed.wait_for(lambda: self._lines.ready, _OPEN_S)
        if not ready:
            _log.warning(
                "the shared pool %s is not there yet: the engine goes on without it, and connects when it is", master
            )

    @classmethod
    def connection(cls) -> Connect:
        """Connects to the pool. Raises `MissingPackageError`."""
        load_package()
        return mooncake

    def register(self, memory: memoryview | torch.Tensor) -> None:
        if isinstance(memory, memoryview):
            self._lines.register(address_of(memory), memory.nbytes)

    def _come_back(self, client: MooncakeClient) -> None:
        """The pool answers (again), and may have lost everything: forget its pages, and do the removals that are still
        owed."""
        evicted = PIECE
        while evicted == PIECE:
            with self.lock:
                evicted = self.index.evict(PIECE)
            time.sleep(PAUSE_S)
        self._pay(client)

    # -- asking ------------------------------------------------------------------------------------------------------

    def asks(self, pages: Sequence[Page]) -> bool:
        return bool(pages) and self._lines.ready and not self._owed

    def ask(self, pages: Sequence[Page]) -> None:
        cleared = self._cleared
        for at in range(0, len(pages), _ASKED):
            some = pages[at : at + _ASKED]
            codes = self._lines.finish(lambda client, some=some: self._exist(some))  # type: ignore[misc]
            if codes is None:
                return
            with self.lock:
                if cleared != self._cleared:
                    return
                self._note(some, codes)
            if not all(code == 1 for code in codes):
                return

    def _exist(self, pages: Sequence[Page]) -> list[int]:
        codes = self._lines.exist([self._name_of(page) for page in pages])
        self._lines.answered(codes)
        return codes

    def _note(self, pages: Sequence[Page], codes: Sequence[int]) -> None:
        self._asked += len(pages)
        there = [page for page, code in zip(pages, codes, strict=True) if code == 1]
        self._found += len(there)
        for page, code in zip(pages, codes, strict=True):
            entry = self.index.find(page.key) if code == 0 and page.key in self.index else None
            if entry is not None and entry.state is not PENDING:
                self.index.drop(entry)
        fresh = [page for page in there if page.key not in self.index]
        slots = self.index.allocate_some(len(fresh), pages=pages)
        entries = self._insert(fresh, slots, [DEFAULT] * len(fresh))
        self.index.commit_all(entries)
        self.index.release_all(entries)

    def _insert(self, pages: Sequence[Page], slots: Sequence[int], kept: Sequence[Retention]) -> list[Entry]:
        entries = self.index.insert_all(pages, slots, PageState.PENDING, kept, leases=1)
        for entry in entries:
            self.io.pages[entry.slot], self._taken[entry.slot] = entry.page, self._cleared
        for namespace in {entry.namespace for entry in entries}:
            self.describe_namespace(namespace, {})
        return entries

    def checksums(self, entries: Sequence[Entry]) -> None:
        """None: they come with the bytes, of any writer; the pool keeps the first page of a name."""

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, pages: Sequence[Page], retentions: Mapping[bytes, Retention] = NO_RETENTIONS) -> list[Entry]:
        """Slots for the first of `pages`. None while the pool does not answer, or removals are owed."""
        if not self.asks(pages):
            return []
        with self.lock:
            self.index.make_room(pages, 0)
            fresh = [page for page in pages if page.key not in self.index]
            kept = [retentions.get(page.key, DEFAULT) for page in fresh]
            return self._insert(fresh, self.index.take_free(len(fresh)), kept)

    def expect(self, entries: Sequence[Entry], sums: Checksums) -> None:
        self.io.sums[[entry.slot for entry in entries]] = sums

    def commit(self, entries: Sequence[Entry], sums: Checksums) -> list[bool]:
        with self.lock:
            return [self.index.commit(entry) for entry in entries]

    def _written(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        """Pages are in the pool, or may be: owe the removal of pages that a clear dropped since `reserve`."""
        with self.lock:
            late = [
                self._name_of(page)
                for slot, page in zip(slots, pages, strict=True)
                if self.index.slot(page.key) != slot
                and self._namespaces.get(page.namespace, self._cleared) > self._taken[slot]
            ]
            self._owe(late)
        if late:
            self._lines.begin(self._pay)

    # -- removing ----------------------------------------------------------------------------------------------------

    def describe_namespace(self, digest: bytes, description: dict[str, object]) -> None:
        with self.lock:  # a clear goes through them
            if len(self._namespaces) <= _NAMESPACES:  # with one more than that, `_owe` owes all
                self._namespaces.setdefault(digest, self._cleared)

    def commit_all_deletions(self, namespace: bytes | None = None) -> None:
        """Remove the pages of a namespace (None: of all namespaces of this engine) from the pool, for every engine.

        Waits `deadline` seconds at most. Until a removal has succeeded, it is owed, and no page is asked for or put.
        """
        with self.lock:
            self._cleared += 1
            digests = [*self._namespaces] if namespace is None else [namespace]
            self._namespaces |= dict.fromkeys(self._namespaces.keys() & digests, self._cleared)
            self._owe([f"{_directory(digest)}.*" for digest in digests])
        self._lines.finish(self._pay)

    def _owe(self, patterns: Sequence[str]) -> None:
        self._owed |= {pattern: object() for pattern in patterns}
        if len(self._owed) > _NAMESPACES:  # at other models' cost rather than leave pages that were cleared
            self._owed = {f"{PREFIX}/.*": object()}

    def _some_owed(self) -> dict[str, object]:
        with self.lock:
            return dict(itertools.islice(self._owed.items(), _PATTERNS))

    def _pay(self, client: MooncakeClient) -> None:
        while some := self._some_owed():
            try:
                code = client.remove_matching(f"^({'|'.join(some)})")
            except Exception as error:  # noqa: BLE001 - the client's library may raise any error
                log_failure(error)
                self._lines.open("pages that were cleared cannot be removed: see the log")
                return
            if code < 0:
                self._lines.open(f"pages that were cleared cannot be removed: code {code}")
                return
            with self.lock:  # patterns that were owed again meanwhile stay
                self._owed = dict(self._owed.items() - some.items())

    @property
    def capacity(self) -> int:
        return self.index.slots * self.layout.extent_bytes

    def _name_of(self, page: Page) -> str:
        return _directory(page.namespace) + page.key.hex()

    def describe(self) -> dict[str, Any]:
        asked = {"asked": self._asked, "found": self._found, "removals_owed": len(self._owed)}
        return {
            **self._lines.describe(),
            **asked,
            "moved": dict(self.io.counts),
            "segment_bytes": self._lines.address.segment,
        }

    def close(self) -> None:
        """Drop queued calls, and leave the pool with our segment. A call that hangs keeps the memory that it may
        touch."""
        if self._lines.close():
            self.io.close()


def _directory(namespace: bytes) -> str:
    return f"{PREFIX}/{namespace.hex()}/"
