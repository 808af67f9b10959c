"""The tier beyond this machine: pages in a Mooncake Store, which other engines use too.

The pool evicts by itself, and loses the pages of a dead process. The index here only has names of pages that this
engine put, or asked for and found; a name without a page is a miss, and is dropped. Lookups and loads do not see these
pages (`served`): a prefetch asks for them once (`ask`), and brings them to the CPU tier.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gdscache import arguments
from gdscache.errors import GeometryError
from gdscache.index.index import PageIndex
from gdscache.index.retention import DEFAULT, Retention
from gdscache.index.table import PENDING, Entry, PageState
from gdscache.limits import MAX_SECONDS
from gdscache.mooncake.calls import Lines
from gdscache.mooncake.client import (
    Connect,
    MooncakeAddress,
    MooncakeClient,
    MooncakeLink,
    load_package,
    mooncake,
    size_of,
)
from gdscache.mooncake.io import MOST_LAYERS, SIDE_BY_SIDE, MooncakeFiles
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.storage.base import address_of
from gdscache.tiers.base import NO_RETENTIONS, DurableTier

if TYPE_CHECKING:
    import torch

PREFIX = "gdscache1"  # prefix of all names in the pool; the digit is the trailer's format
_ASKED = 512  # pages a query
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
        self._owed: dict[bytes | None, str] = {}  # namespaces that are still to be removed from the pool; lock
        self._namespaces: set[bytes] = set()  # namespaces of this engine's pages
        self._cleared = 0  # clears so far
        self._asked = self._found = 0
        address = MooncakeAddress(master, protocol, devices, metadata, hostname, size_of(segment), replicas, tenant)
        self._link = MooncakeLink(address.checked(), self.connection(), f"{PREFIX}/probe", self._come_back)
        self._lines = Lines(self._link, deadline=deadline, most=SIDE_BY_SIDE)
        self.io = MooncakeFiles(layout, self.index.slots, self._lines, self._name_of, self._written)
        self._link.register(*self.io.buffer)
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
            self._link.register(address_of(memory), memory.nbytes)

    def _come_back(self, client: MooncakeClient) -> bool:
        """The pool answers (again), and may have lost everything: forget its pages, and do the removals that are still
        owed."""
        with self.lock:
            self.index.evict(len(self.index))
        self._pay(client)
        return not self._owed

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
        codes = self._link.exist([self._name_of(page) for page in pages])
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
            self.io.pages[entry.slot] = entry.page
            self._namespaces.add(entry.namespace)
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

    def _written(self, slots: Sequence[int]) -> None:
        """Pages are in the pool: remove pages that were cleared meanwhile."""
        with self.lock:
            pages = [page for slot in slots if (page := self.io.pages[slot]) is not None]
            cleared = [page for slot, page in zip(slots, pages, strict=True) if self.index.slot(page.key) != slot]
        self._remove(cleared)

    # -- removing ----------------------------------------------------------------------------------------------------

    def describe_namespace(self, digest: bytes, description: dict[str, object]) -> None:
        with self.lock:  # a clear goes through them
            self._namespaces.add(digest)

    def commit_all_deletions(self, namespace: bytes | None = None) -> None:
        """Remove the pages of a namespace (None: of all namespaces of this engine) from the pool, for every engine.

        Waits `deadline` seconds at most. Until a removal has succeeded, it is owed, and no page is asked for or put.
        """
        with self.lock:
            self._cleared += 1
            for digest in self._namespaces if namespace is None else (namespace,):
                self._owed[digest] = f"^{re.escape(_directory(digest))}.*"
        self._lines.finish(self._pay)

    def _pay(self, client: MooncakeClient) -> None:
        for digest, pattern in list(self._owed.items()):
            cleared = self._cleared
            code = client.remove_matching(pattern)
            if code < 0:
                self._lines.open(f"pages that were cleared cannot be removed: code {code}")
                return
            with self.lock:
                if cleared == self._cleared:  # else a later clear may owe it again, and pays
                    self._owed.pop(digest, None)

    def _remove(self, pages: Sequence[Page]) -> None:
        names = [self._name_of(page) for page in pages]
        if names:
            self._lines.begin(lambda client: self._lines.answered(client.remove(names)))

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
            "segment_bytes": self._link.address.segment,
        }

    def close(self) -> None:
        """Drop queued calls, and leave the pool with our segment. A call that hangs keeps the memory that it may
        touch."""
        if not self._lines.close():
            _log.error("closed while a call to the shared pool %s hangs: its memory is kept", self._link.master)
            return
        client, self._lines.client = self._lines.client, None
        if client is not None:
            self._link.leave(client)
            self.io.close()


def _directory(namespace: bytes) -> str:
    return f"{PREFIX}/{namespace.hex()}/"
