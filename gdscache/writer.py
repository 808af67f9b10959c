"""The way to the SSD: pages that are ready in host or staging memory, written in batches on a thread of its own.

A batch is reserved, written and committed; the bytes of the next batch are under way while one is committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gdscache.checksum import Checksums
from gdscache.errors import StorageError
from gdscache.storage.base import Submission
from gdscache.tiers.bounce import Extents
from gdscache.tiers.index import Entry, Page
from gdscache.tiers.manager import TierManager
from gdscache.tiers.ssd import SlotWrite, SsdTier

_log = logging.getLogger("gdscache.store")
BATCH_BYTES = 32 << 20  # what one gather, and one write batch, takes at once


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """A page to write. `finish` is called once, under the manager's lock: with "" when committed, else why not."""

    page: Page
    epoch: int
    extents: Extents
    slot: int
    finish: Callable[[str], None]

    @property
    def checksums(self) -> Checksums:
        """Of the bytes in the slot, uint64 of shape (layers,)."""
        sums: Checksums = self.extents.checksums[self.slot]
        return sums


class SsdWriter:
    """Writes pages to the SSD tier in the background. `keys`: pages on their way; the manager's lock guards it."""

    def __init__(self, manager: TierManager, ssd: SsdTier, extent_bytes: int) -> None:
        self.keys: set[bytes] = set()
        self._manager = manager
        self._ssd = ssd
        self._most = max(1, BATCH_BYTES // extent_bytes)
        self._ready: deque[Outgoing] = deque()
        self._flying: deque[tuple[list[tuple[Outgoing, SlotWrite]], Submission]] = deque()
        self._dropping = False
        self._thread = ThreadPoolExecutor(1, "gdscache-write")

    def put(self, pages: Sequence[Outgoing]) -> None:
        """Take pages over; their keys are in `keys` already."""
        if pages:
            with self._manager.lock:
                self._ready.extend(pages)
            self._thread.submit(self._run).add_done_callback(log_failure)

    def close(self, *, drain: bool) -> None:
        """Write what was taken over (or drop it), then end the thread."""
        self._dropping = not drain
        self._thread.shutdown(wait=True)

    def _run(self) -> None:
        while True:
            with self._manager.lock:
                batch = [self._ready.popleft() for _ in range(min(self._most, len(self._ready)))]
            if batch:
                self._start(batch)
            if self._flying and (len(self._flying) > 1 or not batch):
                self._complete(*self._flying.popleft())
            elif not batch:
                return

    def _start(self, batch: Sequence[Outgoing]) -> None:
        entries: dict[bytes, Entry] = {}
        with self._failing(batch, entries):
            try:
                pages = () if self._dropping else [out.page for out in batch]
                entries.update((entry.key, entry) for entry in self._ssd.reserve(pages))
            except StorageError as error:
                _log.warning("the SSD tier takes no pages: %s", error)
            writes = self._admit(batch, entries)
            if writes:
                self._flying.append((writes, self._ssd.write([write for _, write in writes])))

    def _admit(self, batch: Sequence[Outgoing], entries: dict[bytes, Entry]) -> list[tuple[Outgoing, SlotWrite]]:
        """What is still wanted and has a slot."""
        writes = []
        with self._manager.lock:
            for out in batch:
                entry = entries.get(out.page.key)
                if entry is None:
                    self._finish(out, "closed" if self._dropping else "ssd_full")
                elif self._manager.epoch(out.page.namespace) != out.epoch:
                    self._give_up(entries.pop(out.page.key))
                    self._finish(out, "cleared")
                else:
                    writes.append((out, SlotWrite(entry, out.extents.memory(out.slot), out.checksums.copy())))
        return writes

    def _complete(self, writes: list[tuple[Outgoing, SlotWrite]], submission: Submission) -> None:
        entries = {write.entry.key: write.entry for _, write in writes}
        with self._failing([out for out, _ in writes], entries):
            errors = submission.wait()
            failed = {w.entry.key for (_, w), error in zip(writes, errors, strict=True) if error is not None}
            causes = dict.fromkeys(entries, "io_error")
            written = [write for _, write in writes if write.entry.key not in failed]
            for error in [e for e in errors if e is not None][:1]:
                _log.warning("%d pages were not written: %s", len(failed), error)
            try:
                for write, visible in zip(written, self._ssd.commit(written), strict=True):
                    causes[write.entry.key] = "" if visible else "cleared"
            except StorageError as error:
                _log.warning("the catalogue takes no pages: %s", error)
            with self._manager.lock:
                for out, write in writes:
                    entry = entries.pop(write.entry.key)
                    if causes[entry.key]:
                        self._ssd.index.drop(entry)
                    self._ssd.index.release(entry)
                    self._finish(out, causes[entry.key])

    @contextlib.contextmanager
    def _failing(self, batch: Sequence[Outgoing], entries: dict[bytes, Entry]) -> Iterator[None]:
        """An exception costs the batch at hand, and nothing else waits for ever."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abandon, batch, entries)
            yield
            on_failure.pop_all()

    def _abandon(self, batch: Sequence[Outgoing], entries: dict[bytes, Entry]) -> None:
        with self._manager.lock:
            for entry in entries.values():
                self._give_up(entry)
            for out in batch:
                if out.page.key in self.keys:
                    self._finish(out, "error")
            self._thread.submit(self._run).add_done_callback(log_failure)

    def _give_up(self, entry: Entry) -> None:
        self._ssd.index.drop(entry)
        self._ssd.index.release(entry)

    def _finish(self, out: Outgoing, cause: str) -> None:
        self.keys.discard(out.page.key)
        out.finish(cause)


def log_failure(future: Future[None]) -> None:
    """Done-callback of background work: an exception nobody waits for is written to the log."""
    error = future.exception()
    if error is not None:
        _log.error("background work broke off", exc_info=error)
