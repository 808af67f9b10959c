"""What moves between the tiers and SGLang's device pools: loads by layers, and offloads. Nothing of SGLang is imported.

A load is of pages that were checked and are pinned in the CPU tier, so it cannot fail but by an error of the device. An
offload is over when its pages have been read: SGLang keeps them from eviction until then.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gdscache.cuda.streams import Event
from gdscache.engine import CacheEngine
from gdscache.errors import GdsCacheError
from gdscache.integrations.sglang.loads import QueuedLoad
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.keys import PageHashes
from gdscache.runtime.threads import log_failure
from gdscache.store.handle import StoreHandle


@dataclasses.dataclass(slots=True)
class _Batch:
    """Loads that begin together. `load` is None until they have begun, and where they could not begin."""

    queued: Sequence[QueuedLoad]
    load: LayerwiseLoad | None = None
    waited: set[int] = dataclasses.field(default_factory=set)
    failed: bool = False

    def release(self) -> None:
        """Let go of the pins."""
        for one in self.queued:
            one.fetch.release()


class LayerLoads:
    """Batches of loads under way. It is the `layer_done_counter` that SGLang's pools wait on.

    A batch begins when the forward pass waits for its first layer. SGLang copies a forward pass's inputs to the GPU
    after it has named the batch, and a copy engine carries copies out in their order: behind loads that begin earlier
    the inputs wait until all bytes are there.
    """

    def __init__(
        self, engine: CacheEngine, layers: int, counts: Counter[str], slots_free: Callable[[], Event] = lambda: None
    ) -> None:
        """`slots_free()`: the event after which nothing that was launched before writes to the slots of a load."""
        self.num_layers = layers
        self._engine = engine
        self._counts = counts
        self._slots_free = slots_free
        self._batches: dict[int, _Batch] = {}
        self._next = 0
        self._consumer = -1

    def queue(self, queued: Sequence[QueuedLoad]) -> int:
        """Loads of the next forward pass; the number of their batch, -1 for none."""
        if not queued:
            return -1
        number, self._next = self._next, self._next + 1
        self._batches[number] = _Batch(queued)
        return number

    def set_consumer(self, index: int) -> None:
        """The forward pass that is to be launched uses batch `index`; -1: none."""
        self._consumer = index

    def wait_until(self, threshold: int) -> None:
        """Order the current stream after layer `threshold` of the batch. Never raises: `finish` tells."""
        batch = self._batches.get(self._consumer)
        if batch is None or batch.failed or threshold in batch.waited:
            return
        batch.waited.add(threshold)
        try:
            if batch.load is None:
                batch.load = self._begin(batch)
            batch.load.wait(threshold)
        except GdsCacheError as error:
            batch.failed = True
            log_failure(error)

    def finish(self, index: int) -> bool:
        """Wait until nothing of the batch is written any more; whether the forward pass had all its pages."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        load, good = batch.load, 0
        if load is None:
            batch.release()
        else:
            try:
                good = sum(status is PageStatus.LOADED for report in load.results() for status in report.pages)
            except GdsCacheError as error:
                log_failure(error)
            finally:
                load.release_event.synchronize()
        landed = not batch.failed and good == sum(len(one.blocks) for one in batch.queued)
        self._counts["failed_loads"] += not landed
        return landed

    def reset(self) -> None:
        """Wait for all batches, and forget them."""
        for index in list(self._batches):
            self.finish(index)
        self._consumer = -1

    def _begin(self, batch: _Batch) -> LayerwiseLoad:
        try:
            load = self._engine.load_many([(one.hit(), list(one.blocks)) for one in batch.queued], self._slots_free())
        finally:
            batch.release()
        self._counts.update(loads=len(batch.queued), loaded_pages=sum(len(one.blocks) for one in batch.queued))
        return load


class Offloads:
    """Stores that still read the pools' pages, the oldest first."""

    def __init__(self, engine: CacheEngine, counts: Counter[str]) -> None:
        self._engine = engine
        self._counts = counts
        self._handles: deque[StoreHandle] = deque()

    def start(self, hashes: PageHashes, blocks: Sequence[int], salt: str, after: torch.cuda.Event | None) -> bool:
        """Begin to store pages that are in these blocks, which are read after `after`. What is stored already is not
        read again. False where nothing was taken."""
        try:
            handle = self._engine.store(hashes, np.asarray(blocks, np.int64), salt=salt, after=after)
        except GdsCacheError as error:
            log_failure(error)
            return False
        self._handles.append(handle)
        self._counts.update(offloads=1, offloaded_pages=len(blocks))
        return True

    def completed(self) -> int:
        """How many of the oldest have read their pages."""
        done = 0
        for handle in self._handles:
            if not handle.release_event.done():
                break
            done += 1
        return done

    def pop(self) -> bool:
        """Forget the oldest, which is completed. True: as far as its pages found room they are, or will be, stored."""
        self._handles.popleft()
        return True

    def reset(self) -> None:
        """Wait until no page is read any more, and forget them all."""
        while self._handles:
            self._handles.popleft().release_event.synchronize()
