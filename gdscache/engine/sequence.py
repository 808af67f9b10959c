"""Sequence: one object for the life of a request, for engines without a block manager of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gdscache import arguments
from gdscache.cuda.streams import on_stream_of_caller, record
from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    ForkedProcessError,
    LoadFailedError,
    PoolFullError,
    SequenceStateError,
)
from gdscache.index.retention import Retention
from gdscache.index.table import Entry, PageState
from gdscache.load.handle import LayerwiseLoad
from gdscache.pages.keys import Page, as_tokens
from gdscache.store.handle import StoreHandle
from gdscache.tiers.base import Lease
from gdscache.tiers.gpu import GpuTier
from gdscache.tiers.manager import TierManager

if TYPE_CHECKING:
    from gdscache.engine.engine import CacheEngine

_log = logging.getLogger("gdscache.sequence")


@dataclasses.dataclass(slots=True)
class _Held:
    """A sequence's slots, lease and load, which are given back when it is left, or has no references any more.

    `entries`: the published page in each slot, None while it is private.
    """

    manager: TierManager
    gpu: GpuTier
    deadline: float
    slots: list[int] = dataclasses.field(default_factory=list)
    entries: list[Entry | None] = dataclasses.field(default_factory=list)
    lease: Lease | None = None
    load: LayerwiseLoad | None = None
    left: bool = False

    def leave(self) -> None:
        self.give_back(over=self.load_is_over())

    def give_back(self, *, over: bool) -> None:
        """Give all back, reusable after the current stream's work; may be called again. `over`: the load has ended."""
        if self.left:
            return
        self.left = True
        event = record(self.gpu.paged.device)
        with self.manager.lock:
            self.gpu.used(self.slots, event)
            if over:
                self.gpu.give(s for s, e in zip(self.slots, self.entries, strict=True) if e is None)
        if self.lease is not None:
            self.manager.end(self.lease)

    def load_is_over(self) -> bool:
        """End the load. False if it may still write to our slots: then they are kept for good, and counted. The caller
        must not hold the manager's lock, which the load's thread needs."""
        if self.load is not None:
            self.load.cancel()
            try:
                self.load.release_event.synchronize(self.deadline)
            except DeadlineError as error:
                _log.error("slots of a sequence are kept, since its load hangs: %s", error)
                return False
        return True


class Sequence:
    """Slots for the pages of one token sequence, and the load of its longest cached prefix, begun.

    Made by `CacheEngine.sequence`. `slots[i]` is the slot of page `i` in the planes, a partial tail included; the first
    `cached_tokens // page_tokens` pages are cached, the caller computes the others. Pages shared with other sequences
    are read-only. Leaving without `commit` publishes nothing. One thread at a time.
    """

    def __init__(self, engine: CacheEngine, gpu: GpuTier, tokens: Any, salt: str) -> None:
        self._engine = engine
        self._manager = engine.manager
        self._gpu = gpu
        self._salt = salt
        self._tokens = as_tokens(tokens)
        self._pages = engine.pages(self._tokens, salt)
        self._held = _Held(self._manager, gpu, engine.config.deadline)
        self._verified = False
        self._begin()
        self._unwatch = engine.calls.watch(self, on_stream_of_caller(gpu.paged.device, self._held.leave))

    # -- for the caller ------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        return [int(t) for t in self._tokens]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of all pages, int64 of shape (pages,), on the host."""
        return torch.tensor(self._held.slots, dtype=torch.int64, device="cpu")

    @property
    def cached_tokens(self) -> int:
        """Tokens that need no computing: at most `len(tokens) - 1`. Only `verify` may lower it."""
        return self._cached * self._engine.layout.page_tokens

    @property
    def load(self) -> LayerwiseLoad | None:
        return self._held.load

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's cached pages; see `LayerwiseLoad.wait`."""
        self._check_open()
        layer = arguments.whole(layer, "layer", 0, self._engine.layout.n_layers - 1)
        seconds = arguments.seconds(seconds)
        if self._held.load is not None:
            self._held.load.wait(layer, seconds)

    def verify(self, seconds: float | None = None) -> int:
        """Wait for the verdict and lower `cached_tokens` to the good prefix, which is returned.

        For callers that recompute from the first bad page instead of starting again. After this, `commit` publishes all
        pages, also recomputed ones.
        """
        self._check_open()
        seconds = arguments.seconds(seconds)
        if self._held.load is not None and not self._verified:
            self._cached = self._shared + self._held.load.result(seconds).tokens // self._engine.layout.page_tokens
        self._verified = True
        return self.cached_tokens

    def append(self, tokens: Any) -> None:
        """Add tokens that are to be computed. Raises `PoolFullError`, and changes nothing, when no slot is left."""
        self._check_open()
        with self._engine.calls:
            grown = np.concatenate([self._tokens, as_tokens(tokens)])
            layout = self._engine.layout
            self._held.slots += self._take(layout.pages_for(len(grown)) - len(self._held.slots))
            self._held.entries += [None] * (len(self._held.slots) - len(self._held.entries))
            self._tokens = grown
            if len(grown) // layout.page_tokens > len(self._pages):
                self._pages = self._engine.pages(grown, self._salt)

    def commit(self, *, priority: int = 0, ttl: float | None = None) -> StoreHandle:
        """Wait for the verdict on the load, then publish every full page on the GPU and store it to the tiers below.

        The caller has computed all tokens, on its current stream. Raises `LoadFailedError`, which names the first bad
        page, and publishes nothing from that page on. May be called again after `append`. `priority` and `ttl` are
        those of `CacheEngine.store`, for every full page; raises `InvalidValueError`.
        """
        self._check_open()
        retention = Retention.of(priority, ttl, self._manager.expiry.clock)
        report = None if self._held.load is None or self._verified else self._held.load.result()
        bad = None if report is None else report.first_bad
        with self._engine.calls:
            pages, sources = self._publish(len(self._pages) if bad is None else self._shared + bad, retention)
            if report is not None and bad is not None:
                self._manager.end(sources)
                page, cause = self._shared + bad, report.pages[bad].value
                raise LoadFailedError(
                    f"page {page} of the sequence was not loaded: {cause}",
                    "recompute from there: a new sequence() ends before it, or call verify() before computing",
                    page,
                    cause,
                )
            blocks = np.array([e.slot for _, e in sources], np.int64).reshape(-1, 1)
            store = self._engine.submit_store
            return store(pages, blocks, self._epoch, self._salt, sources=sources, retention=retention)

    def close(self) -> None:
        """Leave: private slots are free after the current stream's work; shared ones lose a reference."""
        # A forked child has nothing of the engine, nor has a sequence of an engine that ended inside a call.
        if not self._held.left:
            with contextlib.suppress(ForkedProcessError, EngineClosedError):
                self._engine.calls.check_whole()
                over = self._held.load_is_over()
                with self._engine.calls:
                    self._unwatch()
                    self._held.give_back(over=over)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._held.left:
            raise SequenceStateError("the sequence was left", "make a new one with engine.sequence(tokens)")

    def _begin(self) -> None:
        layout, gpu = self._engine.layout, self._gpu
        most = max(0, len(self._tokens) - 1) // layout.page_tokens
        candidates = self._pages[:most]
        self._manager.have_watched()
        with self._manager.lock, contextlib.ExitStack() as undo:
            self._epoch = self._manager.clearing.epoch(self._engine.namespace(self._salt))
            with self._manager.timeline.span("lookup", pages=len(candidates)):
                found = self._manager.lookup(candidates, 0)
            keep = self._engine.gate.decide(found, 0, len(self._tokens), self._engine.loader.planner.under_way).pages
            candidates = candidates[:keep] if keep < len(found) else candidates
            self._held.lease = lease = self._manager.lease("sequence")
            undo.callback(self._manager.end, lease)
            shared = gpu.index.pin_run(candidates, 0, len(candidates))
            lease.take(gpu.index, shared)
            self._shared = len(shared)
            private = self._take(layout.pages_for(len(self._tokens)) - self._shared)
            undo.callback(gpu.give, private)
            self._held.slots = [entry.slot for entry in shared] + private
            self._held.entries = [*shared, *[None] * len(private)]
            gpu.order_after(self._held.slots[: self._shared])
            if rest := candidates[self._shared :]:
                blocks = np.array(private[: len(rest)], np.int64).reshape(-1, 1)
                asked = [(rest, blocks, self._shared * layout.page_tokens)]
                load = self._engine.loader.queue(asked, "sequence", [record(gpu.paged.device)])
                self._held.load = load if load.tokens else None
            undo.pop_all()
        self._cached = self._shared + (self._held.load.parts[0].pages if self._held.load is not None else 0)

    def _take(self, n: int) -> list[int]:
        if n <= 0:
            return []
        with self._manager.lock:
            self._manager.expire()
            slots = self._gpu.take(n)
            if slots is None:
                raise PoolFullError(
                    f"{n} pages do not fit: {self._gpu.index.free_slots} of {self._gpu.index.slots} slots are free and "
                    f"{len(self._gpu.private)} belong to open sequences",
                    "raise gpu.capacity, or close sequences first",
                )
            self._gpu.order_after(slots, forget=True)
            return slots

    def _publish(self, pages: int, retention: Retention) -> tuple[list[Page], Lease]:
        """Put the first `pages` pages into the GPU index. Returns these pages, none after a clear, and a lease on them.

        A page that another sequence has published meanwhile is taken from its slot.
        """
        gpu, index = self._gpu, self._gpu.index
        event = record(gpu.paged.device)
        with self._manager.lock, contextlib.ExitStack() as undo:
            sources, lease = self._manager.lease("store"), self._held.lease
            undo.callback(self._manager.end, sources)
            assert lease is not None, "a sequence that was not begun"
            if self._manager.clearing.epoch(self._engine.namespace(self._salt)) != self._epoch:
                self._manager.count("dropped", "cleared", pages)
                pages = 0
            self._manager.retain(self._pages[:pages], retention)
            for i, page in enumerate(self._pages[:pages]):
                entry = self._held.entries[i] or index.find(page.key)
                if entry is None:
                    slot = self._held.slots[i]
                    gpu.private.remove(slot)
                    entry = self._held.entries[i] = index.insert(
                        page, slot, PageState.VERIFIED, self._manager.expiry.joined(page, retention)
                    )
                    lease.add(index, entry)
                    gpu.used((slot,), event)
                elif self._held.entries[i] is None:
                    gpu.order_after((entry.slot,))  # another sequence's stream may still compute it
                sources.add(index, entry)  # also one that has expired: its bytes are there until the last lease ends
            index.touch([page.key for page in reversed(self._pages[:pages])])
            undo.pop_all()
            return [entry.page for _, entry in sources], sources
