"""Sequence: one object for the life of a request, for engines that have no block manager of their own."""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gdscache import arguments
from gdscache.errors import DeadlineError, LoadFailedError, PoolFullError, SequenceStateError
from gdscache.keys import Page, as_tokens
from gdscache.loading import LayerwiseLoad
from gdscache.storing import StoreHandle
from gdscache.streams import record
from gdscache.tiers.base import Lease
from gdscache.tiers.gpu import GpuTier
from gdscache.tiers.pages import Entry, PageState
from gdscache.tiers.retention import Retention

if TYPE_CHECKING:
    from gdscache.engine import CacheEngine

_log = logging.getLogger("gdscache.sequence")


class Sequence:
    """Slots for the pages of one token sequence, and the load of its longest cached prefix, begun.

    Made by `CacheEngine.sequence`. `slots[i]` is the slot of page `i` in the planes, a partial tail included; the first
    `cached_tokens // page_tokens` pages are cached, the others are the caller's to compute. Pages shared with other
    sequences are read-only. Leaving without `commit` publishes nothing. One thread at a time.
    """

    def __init__(self, engine: CacheEngine, gpu: GpuTier, tokens: Any, salt: str) -> None:
        self._engine = engine
        self._manager = engine.manager
        self._gpu = gpu
        self._salt = salt
        self._tokens = as_tokens(tokens)
        self._pages = engine.pages(self._tokens, salt)
        self._entries: list[Entry | None] = []  # per slot: the published page in it, None while it is private
        self._slots: list[int] = []
        self._load: LayerwiseLoad | None = None
        self._verified = False
        self._left = False
        self._begin()

    # -- what the caller sees ------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """The token ids so far."""
        return [int(t) for t in self._tokens]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of all pages, int64 of shape (pages,), on the host."""
        return torch.tensor(self._slots, dtype=torch.int64)

    @property
    def cached_tokens(self) -> int:
        """Tokens that need no computing: at most `len(tokens) - 1`. `verify` may lower it, nothing else changes it."""
        return self._cached * self._engine.layout.page_tokens

    @property
    def load(self) -> LayerwiseLoad | None:
        """The load of what was not on the GPU yet, or None."""
        return self._load

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's cached pages; see `LayerwiseLoad.wait`."""
        self._check_open()
        layer = arguments.whole(layer, "layer", 0, self._engine.layout.n_layers - 1)
        seconds = arguments.seconds(seconds)
        if self._load is not None:
            self._load.wait(layer, seconds)

    def verify(self, seconds: float | None = None) -> int:
        """Wait for the verdict and lower `cached_tokens` to the good prefix, which is returned.

        For callers who would rather recompute from the first bad page than start again: after this, `commit` publishes
        all pages, those recomputed included.
        """
        self._check_open()
        seconds = arguments.seconds(seconds)
        if self._load is not None and not self._verified:
            self._cached = self._shared + self._load.result(seconds).tokens // self._engine.layout.page_tokens
        self._verified = True
        return self.cached_tokens

    def append(self, tokens: Any) -> None:
        """Add tokens that are to be computed. Raises `PoolFullError`, and changes nothing, when no slot is left."""
        self._check_open()
        grown = np.concatenate([self._tokens, as_tokens(tokens)])
        layout = self._engine.layout
        self._slots += self._take(layout.pages_for(len(grown)) - len(self._slots))
        self._entries += [None] * (len(self._slots) - len(self._entries))
        self._tokens = grown
        if layout.full_pages(len(grown)) > len(self._pages):
            self._pages = self._engine.pages(grown, self._salt)

    def commit(self, *, priority: int = 0, ttl: float | None = None) -> StoreHandle:
        """The verdict on the load, then every full page exists on the GPU and is on its way to the tiers below.

        The caller has computed all tokens, on its current stream. Raises `LoadFailedError`, which names the first bad
        page, and publishes nothing from that page on. May be called again after `append`. `priority` and `ttl` are
        those of `CacheEngine.store`, for every full page; raises `InvalidValueError`.
        """
        self._check_open()
        retention = Retention.of(priority, ttl, self._manager.expiry.clock)
        bad = self._first_bad()
        pages, sources = self._publish(len(self._pages) if bad is None else bad, retention)
        if bad is not None:
            self._manager.end(sources)
            cause = self._load.result().pages[bad - self._shared].value if self._load is not None else ""
            raise LoadFailedError(
                f"page {bad} of the sequence was not loaded: {cause}",
                "recompute from there: a new sequence() ends before it, or call verify() before computing",
                bad,
                cause,
            )
        blocks = torch.tensor([e.slot for e in sources.entries], dtype=torch.int64).view(-1, 1)
        return self._engine.submit_store(pages, blocks, self._epoch, self._salt, sources=sources, retention=retention)

    def close(self) -> None:
        """Leave: private slots go free after the current stream's work; shared ones lose a reference."""
        if self._left:
            return
        self._left = True
        over = self._load_is_over()  # waits for a thread that needs the lock
        event = record(self._gpu.pool.device)
        with self._manager.lock:
            self._gpu.used(self._slots, event)
            if over:
                self._gpu.give(s for s, e in zip(self._slots, self._entries, strict=True) if e is None)
        self._manager.end(self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._left:
            raise SequenceStateError("the sequence was left", "make a new one with engine.sequence(tokens)")

    def _begin(self) -> None:
        layout, gpu = self._engine.layout, self._gpu
        most = max(0, len(self._tokens) - 1) // layout.page_tokens
        candidates = self._pages[:most]
        with self._manager.lock, contextlib.ExitStack() as undo:
            self._epoch = self._manager.clearing.epoch(self._engine.namespace(self._salt))
            with self._manager.timeline.span("lookup", pages=len(candidates)):
                found = self._manager.lookup(candidates, 0)
            keep = self._engine.gate.decide(found, 0, len(self._tokens), self._manager.under_way).pages
            if keep < len(found):
                candidates = candidates[:keep]
            self._lease = self._manager.lease("sequence")
            undo.callback(self._manager.end, self._lease)
            shared = gpu.index.pin_run(candidates, 0, len(candidates))
            self._lease.entries.update(dict.fromkeys(shared, gpu.index))
            self._shared = len(shared)
            private = self._take(layout.pages_for(len(self._tokens)) - self._shared)
            undo.callback(gpu.give, private)
            self._slots = [entry.slot for entry in shared] + private
            self._entries = [*shared, *[None] * len(private)]
            gpu.order_after(self._slots[: self._shared])
            self._start_load(candidates)
            undo.pop_all()
        self._cached = self._shared + (len(self._load.parts[0].plan.tasks) if self._load is not None else 0)

    def _start_load(self, candidates: list[Page]) -> None:
        rest = candidates[self._shared :]
        if rest:
            blocks = self.slots[self._shared : self._shared + len(rest)].view(-1, 1)
            start = self._shared * self._engine.layout.page_tokens
            after = [record(self._gpu.pool.device)]
            load = self._engine.loader.start([(rest, blocks, start)], "sequence", after, here=False)
            self._load = load if load.tokens else None

    def _load_is_over(self) -> bool:
        """End the load. False when it still may write to our slots: then they are kept for good, and counted."""
        if self._load is not None:
            self._load.cancel()
            try:
                self._load.release_event.synchronize(self._engine.config.load.deadline)
            except DeadlineError as error:
                _log.error("slots of a sequence are kept, since its load hangs: %s", error)
                return False
        return True

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

    def _first_bad(self) -> int | None:
        if self._load is None or self._verified:
            return None
        bad = self._load.result().first_bad
        return None if bad is None else self._shared + bad

    def _publish(self, pages: int, retention: Retention) -> tuple[list[Page], Lease]:
        """Put the first `pages` pages into the GPU index; the pages that are there, under a lease on what holds them.

        A page that another sequence has published meanwhile is taken from its slot.
        """
        gpu, index = self._gpu, self._gpu.index
        event = record(gpu.pool.device)
        with self._manager.lock:
            sources = self._manager.lease("store")
            if self._manager.clearing.epoch(self._engine.namespace(self._salt)) != self._epoch:
                self._manager.count("dropped", "cleared", pages)
                return [], sources
            self._manager.retain(self._pages[:pages], retention)
            for i, page in enumerate(self._pages[:pages]):
                entry = self._entries[i] or index.find(page.key)
                if entry is None:
                    slot = self._slots[i]
                    gpu.private.remove(slot)
                    entry = self._entries[i] = index.insert(
                        page, slot, PageState.VERIFIED, self._manager.expiry.joined(page, retention)
                    )
                    self._lease.add(index, entry)
                    gpu.used((slot,), event)
                if not entry.dropped:
                    sources.add(index, entry)
            index.touch(page.key for page in reversed(self._pages[:pages]))
            return [entry.page for entry in sources.entries], sources
