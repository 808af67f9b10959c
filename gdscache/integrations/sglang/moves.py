"""What moves between the tiers and SGLang's device pools: loads by layers, and offloads. Nothing of SGLang is imported.

A load is of pages that were checked and are pinned in the CPU tier, so it cannot fail but by an error of the device. An
offload is over when its pages have been read: SGLang keeps them from eviction until then.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence

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
    """Loads that were begun together. `load` is None where they could not be."""

    load: LayerwiseLoad | None
    pages: int
    waited: set[int] = dataclasses.field(default_factory=set)
    failed: bool = False


class LayerLoads:
    """Batches of loads under way. It is the `layer_done_counter` that SGLang's pools wait on."""

    def __init__(self, engine: CacheEngine, layers: int, counts: Counter[str]) -> None:
        self.num_layers = layers
        self._engine = engine
        self._counts = counts
        self._batches: dict[int, _Batch] = {}
        self._next = 0
        self._consumer = -1

    def start(self, queued: Sequence[QueuedLoad], after: Event) -> int:
        """Begin loads, which write to their blocks after `after`; the number of the batch, -1 for none."""
        if not queued:
            return -1
        number, self._next = self._next, self._next + 1
        load = None
        try:
            load = self._engine.load_many([(one.hit(), list(one.blocks)) for one in queued], after)
        except GdsCacheError as error:
            log_failure(error)
        finally:
            for one in queued:
                one.fetch.release()
        pages = sum(len(one.blocks) for one in queued)
        self._batches[number] = _Batch(load, pages)
        self._counts.update(loads=len(queued), loaded_pages=pages)
        return number

    def set_consumer(self, index: int) -> None:
        """The forward pass that is to be launched uses batch `index`; -1: none."""
        self._consumer = index

    def wait_until(self, threshold: int) -> None:
        """Order the current stream after layer `threshold` of the batch. Never raises: `finish` tells."""
        batch = self._batches.get(self._consumer)
        if batch is None or batch.load is None or threshold in batch.waited:
            return
        batch.waited.add(threshold)
        try:
            batch.load.wait(threshold)
        except GdsCacheError as error:
            batch.failed = True
            log_failure(error)

    def finish(self, index: int) -> bool:
        """Wait until nothing of the batch is written any more; whether all its pages are there."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        if batch.load is None:
            self._counts["failed_loads"] += 1
            return False
        good = 0
        try:
            reports = batch.load.results()
            good = sum(status is PageStatus.LOADED for report in reports for status in report.pages)
        except GdsCacheError as error:
            log_failure(error)
        finally:
            batch.load.release_event.synchronize()
        landed = good == batch.pages and not batch.failed
        self._counts["failed_loads"] += not landed
        return landed

    def reset(self) -> None:
        """Wait for all batches, and forget them."""
        for index in list(self._batches):
            self.finish(index)
        self._consumer = -1


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
