"""KV events: the pages that a tier gets and loses, in vLLM's form, for routers and other views of an engine.

A *batch* has a number, one more than the batch before it. A listener that misses a number has lost its events. Blocks
are pages: `block_hashes` are their keys (32 bytes). `medium` is vLLM's word (`GPU`, `CPU`, `STORAGE`), `ownership` the
tier's name, and `locality` is `LOCAL`, or `REMOTE` for a tier beyond this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gdscache.pages.keys import Page
from gdscache.runtime.limited_log import LimitedLog
from gdscache.runtime.threads import failure_of, log_failure, start

if TYPE_CHECKING:
    from gdscache.events.socket import ZmqPublisher
    from gdscache.groups.base import Group
    from gdscache.tiers.base import Tier

GATHER_S = 0.002  # events within this time are one batch
WAKE_S = 0.05
BATCH_PAGES = 1024  # of one event, at most
QUEUE = 1 << 18  # most pages with waiting events
_log = logging.getLogger("gdscache.events.base")


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive pages, each the follower of the one before. `parent_block_hash`: None for a first page.

    `token_ids` is empty: a page is named by its key, and its tokens are not kept. The last three are of hybrid models:
    the number of the pages' group, its kind in vLLM's words, and its window. A parent may be of another group there.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    locality: str
    ownership: str
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that a tier has lost, in no order, of any group: a key names one page of one group."""

    block_hashes: list[bytes]
    medium: str
    locality: str
    ownership: str


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No tier has any page."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclasses.dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events in order. `ts`: seconds since the epoch. `seq` counts from 0."""

    seq: int
    ts: float
    events: list[KVEvent]


class Place(NamedTuple):
    """The tier of an event, in an event's words."""

    medium: str
    locality: str
    ownership: str

    @classmethod
    def of(cls, tier: Tier) -> Place:
        return cls(_MEDIA[tier.kind], "LOCAL" if tier.served else "REMOTE", tier.name)


class GroupFacts(NamedTuple):
    """Facts of pages for events: their tokens, and in a hybrid model their group's number, vLLM's kind, and window."""

    page_tokens: int
    number: int | None = None
    kind: str | None = None
    window: int | None = None

    @classmethod
    def of(cls, number: int, group: Group) -> GroupFacts:
        return cls(group.page_tokens, number, _KINDS[group.keeps], group.span if group.keeps == "window" else None)


_KINDS = {"all": "full_attention", "window": "sliding_window", "chunk": "chunked_local_attention", "state": "mamba"}
_MEDIA = {"planes": "GPU", "memory": "CPU", "files": "STORAGE"}
_ALL = Place("", "", "")  # all tiers are cleared together


class KVEventHub:
    """Gathers the indexes' events, and passes them on in a thread of its own. Events of at most `queue` pages wait,
    and those of the pages that are there when it begins to watch. Further ones are dropped and counted. They are seen
    as a missing number behind the batch of those that waited, with an empty batch behind it."""

    def __init__(
        self, page_tokens: int, publisher: ZmqPublisher | None = None, queue: int = QUEUE, *, alone: bool = True
    ) -> None:
        """`alone`: False for one of several pools: its clears are told as removed pages, since others stay."""
        self.dropped = 0  # pages
        self._alone = alone
        self._said = LimitedLog()  # a callback that raises does so at each batch
        self._all = GroupFacts(page_tokens)
        self._groups: dict[bytes, GroupFacts] = {}  # by namespace
        self._limit = queue
        self._publisher = publisher
        self._lock = threading.Lock()
        self._callbacks: tuple[Callable[[KVEventBatch], object], ...] = ()
        self._noted: list[tuple[Place, str, Collection[Any]]] = []
        self._pages = 0
        self._lost = False
        self._seq = 0
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="gdscache-events", daemon=True)
        start([self._thread], lambda: None)

    def watch(self, tiers: Iterable[Tier]) -> None:
        """Listen to all tiers, and report their present pages. The manager's lock is held."""
        for tier in tiers:
            place = Place.of(tier)
            tier.index.on_change = functools.partial(self.note, place)
            if there := [entry.page for entry in tier.index]:
                with self._lock:
                    self._noted.append((place, "stored", there))
        self._wake.set()

    def name(self, namespace: bytes, facts: GroupFacts) -> None:
        """The group of a namespace's pages. Call it for a bounded number of namespaces, before their pages come."""
        self._groups[namespace] = facts

    def add(self, callback: Callable[[KVEventBatch], object]) -> Callable[[], None]:
        """Call `callback(batch)` for each batch, in a thread of the hub's. Returns a function that stops it."""
        own = functools.partial(callback)  # the same callback may be added twice
        with self._lock:
            self._callbacks += (own,)

        def remove() -> None:
            with self._lock:
                self._callbacks = tuple(other for other in self._callbacks if other is not own)

        return remove

    def note(self, place: Place, what: str, some: Collection[Any]) -> None:
        """Note an event: see `PageIndex.on_change`. Never waits."""
        pages = 0 if what == "cleared" else len(some)  # of a clear they may be more than may wait
        if what == "cleared":
            place, what, some = (_ALL, what, ()) if self._alone else (place, "removed", some)
        if not some and what != "cleared":
            return
        with self._lock:
            if self._lost or self._pages + pages > self._limit:  # none behind a lost one before its number
                self.dropped += len(some)
                self._lost = True
                return
            self._pages += pages
            self._noted.append((place, what, some))
        if not self._wake.is_set():
            self._wake.set()

    def describe(self) -> dict[str, int]:
        with self._lock:
            return {"batches": self._seq, "dropped_pages": self.dropped, "waiting_pages": self._pages}

    def close(self) -> None:
        """Pass on waiting events, and end. Repeated calls are fine."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed or self._noted or self._lost:
            if self._wake.wait(WAKE_S) and not self._closed:
                time.sleep(GATHER_S)
            self._wake.clear()
            log_failure(failure_of(self._publish))
        self._said.flush(last=True)
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self) -> None:
        with self._lock:
            noted, self._noted, self._pages = self._noted, [], 0
            lost, self._lost = self._lost, False
            seq, callbacks = self._seq, self._callbacks
            self._seq += bool(noted) + 2 * lost
        if noted:
            self._pass_on(KVEventBatch(seq, time.time(), list(self._events(noted))), callbacks)
        if lost:  # a number is left out, which this batch tells
            self._pass_on(KVEventBatch(seq + bool(noted) + 1, time.time(), []), callbacks)
        if self._publisher is not None:
            self._publisher.serve()

    def _pass_on(self, batch: KVEventBatch, callbacks: Iterable[Callable[[KVEventBatch], object]]) -> None:
        for callback in callbacks:
            if (error := failure_of(functools.partial(callback, batch))) is not None:
                told = "".join(traceback.format_exception(error))
                self._said.say(_log, logging.ERROR, "callback", "a callback of KV events raised:\n%s", told)
        self._said.flush()
        if self._publisher is not None:
            self._publisher.publish(batch)

    def _events(self, noted: Sequence[tuple[Place, str, Collection[Any]]]) -> Iterator[KVEvent]:
        for (place, what), alike in itertools.groupby(noted, operator.itemgetter(0, 1)):
            some = [*itertools.chain.from_iterable(pages for _, _, pages in alike)]
            if what == "cleared":
                yield AllBlocksCleared()
            elif what == "removed":
                for at in range(0, len(some), BATCH_PAGES):
                    yield BlockRemoved(some[at : at + BATCH_PAGES], *place)
            else:
                yield from (self._stored(run, place) for run in _runs(some))

    def _stored(self, run: Sequence[Page], place: Place) -> BlockStored:
        _, parent, namespace = run[0]
        tokens, number, kind, window = self._groups.get(namespace, self._all)
        keys, before = [page.key for page in run], None if parent == namespace else parent
        return BlockStored(keys, before, [], tokens, None, place.medium, None, *place[1:], number, kind, window)


def _runs(pages: Sequence[Page]) -> Iterator[list[Page]]:
    """Pages cut where a page is not the follower of the last, or is of another namespace."""
    run: list[Page] = []
    for page in pages:
        if run and (page[1:] != (run[-1].key, run[-1].namespace) or len(run) == BATCH_PAGES):
            yield run
            run = []
        run.append(page)
    if run:
        yield run
