"""Moves between the tiers and SGLang's device pools: loads by layers, and offloads.

A load's pages are checked and pinned in the CPU tier, so only a device error makes it fail. An offload is over when its
pages have been read: SGLang does not evict them earlier.

The GPU knows the page numbers first. SGLang's stream may be a forward pass behind, so the scheduler never waits for
them: the thread of offloads does, and a load does at the launch of its forward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from gdscache.cuda.streams import Event
from gdscache.errors import GdsCacheError
from gdscache.integrations.handing import HandedStore
from gdscache.integrations.sglang.linker_ranks import LinkerRanks
from gdscache.integrations.sglang.loads import QueuedLoad
from gdscache.integrations.sglang.served import PoolLoads, SeveralPools, SinglePool
from gdscache.pages.keys import PageHashes
from gdscache.ranks.address import StoreMark
from gdscache.runtime.threads import Workers, log_failure


@dataclasses.dataclass(slots=True)
class _Batch:
    """Loads that begin together. `load` is None before they begin, and if they could not."""

    queued: Sequence[QueuedLoad]
    load: PoolLoads | None = None
    waited: set[int] = dataclasses.field(default_factory=set)
    failed: bool = False

    def fail(self, error: GdsCacheError) -> None:
        self.failed = True
        log_failure(error)

    def release(self) -> None:
        for one in self.queued:
            one.release()


class LayerLoads:
    """Batches of loads under way. It is the `layer_done_counter` that SGLang's pools wait on.

    A batch begins right before its forward pass is launched: its first layer comes while the kernels before the
    attention are launched. SGLang has copied the pass's inputs to the GPU by then; behind an earlier load they would
    wait, since a copy engine works in order.
    """

    def __init__(
        self, load: Callable[[int, Sequence[QueuedLoad]], PoolLoads], layers: int, counts: Counter[str]
    ) -> None:
        """`load(number, queued)`: begin the loads of a batch, behind all writes to their slots."""
        self.num_layers = layers
        self._load = load
        self._counts = counts
        self._batches: dict[int, _Batch] = {}
        self._next = 0
        self.consumer_index = -1  # the batch of the forward pass that is launched

    def queue(self, queued: Sequence[QueuedLoad]) -> int:
        """Queue loads for the next forward pass. Returns their batch's number, -1 for none."""
        if not queued:
            return -1
        number = self.take_number()
        self._batches[number] = _Batch(queued)
        return number

    def take_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def set_consumer(self, index: int) -> None:
        """The next forward pass uses batch `index`, which begins; -1: none. Never raises."""
        self.consumer_index = index
        batch = self._batches.get(index)
        if batch is not None and batch.load is None and not batch.failed:
            self._begin(index, batch)

    def wait_until(self, threshold: int) -> None:
        """Order the current stream after layer `threshold` of the batch. Never raises: `finish` reports failures.

        A pass that is one CUDA graph asks for the last layer only, and waits for all.
        """
        batch = self._batches.get(self.consumer_index)
        if batch is None or batch.load is None or batch.failed or threshold in batch.waited:
            return
        layers = range(0 if not batch.waited and threshold == self.num_layers - 1 else threshold, threshold + 1)
        batch.waited.update(layers)
        try:
            for layer in layers:
                batch.load.wait(layer)
        except GdsCacheError as error:
            batch.fail(error)

    def finish(self, index: int) -> bool:
        """Wait until nothing writes to the batch's pages. Returns whether the forward pass had all of them."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        landed = False
        if batch.load is None:
            batch.release()
        else:
            try:
                landed = batch.load.landed() and bool(batch.waited) and not batch.failed
            except GdsCacheError as error:
                log_failure(error)
            finally:
                batch.load.wait_until_written()
        self._counts["failed_loads"] += not landed
        return landed

    def reset(self) -> None:
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1

    def _begin(self, number: int, batch: _Batch) -> None:
        try:
            batch.load = self._load(number, batch.queued)
            self._counts.update(loads=len(batch.queued), loaded_pages=sum(one.pages for one in batch.queued))
        except GdsCacheError as error:
            batch.fail(error)
        finally:
            batch.release()


class _Offload(NamedTuple):
    """`number`: of its place on the ranks. `ends`: see `Junctions.ends`."""

    number: int
    store: HandedStore
    ends: Collection[tuple[str, str]]


class Offloads:
    """Stores that still read the pools' pages, the oldest first. A thread passes them on, in order.

    Of several ranks each reports the places of the pages; the leader stores them.
    """

    def __init__(
        self, leading: SinglePool | SeveralPools | None, counts: Counter[str], ranks: LinkerRanks | None = None
    ) -> None:
        """`leading`: the engine of all pools, None on a rank that does not lead. `ranks`: of this process, if there are
        several."""
        self._leading, self._ranks, self._counts = leading, ranks, counts
        self._offloads: deque[_Offload] = deque()
        self._numbers = itertools.count(-1, -1)  # equal on all ranks
        self._thread = Workers(1, "gdscache-offloads")

    def start(
        self,
        hashes: PageHashes | Sequence[str],
        blocks: Callable[[], Any],
        salt: str,
        after: Event,
        ends: Collection[tuple[str, str]] = (),
    ) -> None:
        """Begin to store pages. `blocks()` waits for their blocks, which are read after `after`. Pages already stored
        are not read again. Ranks that do not lead ignore the names of the pages. `ends`: see `Junctions.ends`."""
        leading, number = self._leading, next(self._numbers)
        if self._ranks is not None:
            self._ranks.place(number, blocks, after)
            after = StoreMark(number, b"")
        if leading is None:  # the leader begins and ends it
            handed = HandedStore(None, list)
        else:
            handed = HandedStore(self._thread, lambda: leading.store(hashes, blocks(), salt=salt, after=after))
        self._offloads.append(_Offload(number, handed, ends))
        self._counts.update(offloads=1, offloaded_pages=len(hashes))

    def completed(self) -> int:
        """The number of the oldest offloads that have read their pages, or were not taken."""
        return sum(1 for _ in itertools.takewhile(lambda one: one.store.done(), self._offloads))

    def reads(self, end: tuple[str, str]) -> bool:
        """Whether an offload that is not popped was begun with this one of its `ends`."""
        return any(end in one.ends for one in self._offloads)

    def pop(self) -> bool:
        """Forget the oldest offload, which is completed. Returns whether it was taken: its pages are stored, or will
        be, as far as they found room."""
        oldest = self._offloads.popleft()
        if self._ranks is not None:
            self._ranks.passed(oldest.number)
        return oldest.store.taken

    def wait(self) -> None:
        """Wait until the leader's engine reads no page any more; other ranks': see `LinkerRanks.reset`."""
        for one in self._offloads:
            one.store.wait()

    def forget(self) -> None:
        """Forget all offloads. No rank may read a page for them."""
        while self._offloads:
            self.pop()

    def close(self) -> None:
        """`wait`, and end the thread. Repeated calls are fine."""
        self.wait()
        self._thread.shutdown()
