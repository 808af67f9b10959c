"""What moves between the tiers and SGLang's device pools: loads by layers, and offloads. Nothing of SGLang is imported.

A load is of pages that were checked and are pinned in the CPU tier, so it cannot fail but by an error of the device. An
offload is over when its pages have been read: SGLang keeps them from eviction until then.

Which pages they are is known to the GPU first. SGLang's stream may be behind a whole forward pass there, so its
scheduler never waits for these numbers: the thread of offloads does, and a load does when its forward pass is launched.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gdscache.cuda.streams import Event, record_on
from gdscache.errors import GdsCacheError
from gdscache.integrations.handing import Stored, StoreThread
from gdscache.integrations.sglang.loads import QueuedLoad
from gdscache.moves import PageStatus
from gdscache.pages.keys import PageHashes
from gdscache.runtime.threads import log_failure


class Load(Protocol):
    """A load under way: a `LayerwiseLoad`, or a `LinkedLoad` of a hybrid model."""

    @property
    def release_event(self) -> Any: ...

    def wait(self, layer: int) -> None: ...

    def results(self) -> Sequence[Any]: ...


class Engine(Protocol):
    """What stores pages: a `CacheEngine`, or several pools of a hybrid model, for which slots are blocks of each."""

    def store(self, tokens: Any, slots: Any, *, salt: str = "", after: Event = None) -> Stored:
        """See `CacheEngine.store`."""


@dataclasses.dataclass(slots=True)
class _Batch:
    """Loads that begin together. `load` is None until they have begun, and where they could not begin."""

    queued: Sequence[QueuedLoad]
    load: Load | None = None
    waited: set[int] = dataclasses.field(default_factory=set)
    failed: bool = False

    def fail(self, error: GdsCacheError) -> None:
        self.failed = True
        log_failure(error)

    def release(self) -> None:
        """Let go of the pins."""
        for one in self.queued:
            one.fetch.release()


class LayerLoads:
    """Batches of loads under way. It is the `layer_done_counter` that SGLang's pools wait on.

    A batch begins when the forward pass that uses it is about to be launched: its first layer comes while what precedes
    the attention is launched. SGLang has copied the pass's inputs to the GPU by then. Behind loads that begin earlier
    they would wait, as a copy engine carries copies out in their order.
    """

    def __init__(self, load: Callable[[int, Sequence[QueuedLoad]], Load], layers: int, counts: Counter[str]) -> None:
        """`load(number, queued)`: begin the loads of a batch, behind whatever writes to their slots."""
        self.num_layers = layers
        self._load = load
        self._counts = counts
        self._batches: dict[int, _Batch] = {}
        self._next = 0
        self.consumer_index = -1  # the batch of the forward pass that is launched

    def queue(self, queued: Sequence[QueuedLoad]) -> int:
        """Loads of the next forward pass; the number of their batch, -1 for none."""
        if not queued:
            return -1
        number = self.take_number()
        self._batches[number] = _Batch(queued)
        return number

    def take_number(self) -> int:
        """One that no batch has."""
        number, self._next = self._next, self._next + 1
        return number

    def set_consumer(self, index: int) -> None:
        """The forward pass that is to be launched uses batch `index`, which begins; -1: none. Never raises."""
        self.consumer_index = index
        batch = self._batches.get(index)
        if batch is not None and batch.load is None and not batch.failed:
            self._begin(index, batch)

    def wait_until(self, threshold: int) -> None:
        """Order the current stream after layer `threshold` of the batch. Never raises: `finish` tells.

        A pass that is one CUDA graph asks for the last layer alone, and waits for all.
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
        landed = bool(batch.waited) and not batch.failed and good == sum(one.pages for one in batch.queued)
        self._counts["failed_loads"] += not landed
        return landed

    def reset(self) -> None:
        """Wait for all batches, and forget them."""
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


class BlockReader:
    """Brings block numbers from SGLang's stream to the host, by a stream of its own."""

    def __init__(self, device: torch.device, page_tokens: int) -> None:
        self._device = device
        self._page_tokens = page_tokens
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, slots: torch.Tensor) -> Callable[[], list[int]]:
        """Begin to read the blocks of whole pages of slots, which the current stream has computed; what waits for them.

        `slots`: int64, (tokens,), of the pool.
        """
        firsts = slots[:: self._page_tokens]
        if self._stream is None:
            there = self._blocks(firsts)
            return lambda: there
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(firsts.shape, dtype=firsts.dtype, device="cpu", pin_memory=True)
            host.copy_(firsts, non_blocking=True)
            landed = record_on(self._stream, sleep=True)

        def wait(_read: torch.Tensor = firsts) -> list[int]:  # its memory is not another tensor's before it was read
            landed.synchronize()
            return self._blocks(host)

        return wait

    def _blocks(self, firsts: torch.Tensor) -> list[int]:
        return [slot // self._page_tokens for slot in firsts.tolist()]


class Handed(Protocol):
    """A store as SGLang asks for it: see `HandedStore`."""

    @property
    def taken(self) -> bool: ...

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Offloads:
    """Stores that still read the pools' pages, the oldest first. A thread hands them over, in their order."""

    def __init__(self, engine: Engine | None, counts: Counter[str]) -> None:
        self._engine = engine
        self._counts = counts
        self._offloads: deque[Handed] = deque()
        self._thread = StoreThread("gdscache-offloads")

    def __len__(self) -> int:
        """Offloads that were begun and not forgotten."""
        return len(self._offloads)

    def start(self, hashes: PageHashes | Sequence[str], blocks: Callable[[], Any], salt: str, after: Event) -> None:
        """Begin to store pages. `blocks()` waits for the blocks that they are in, which are read after `after`. What is
        stored already is not read again."""

        engine = self._engine

        def store() -> Stored:
            assert engine is not None, "pages of another process"
            return engine.store(hashes, blocks(), salt=salt, after=after)

        self._offloads.append(self._thread.start(store))
        self._counts.update(offloads=1, offloaded_pages=len(hashes))

    def completed(self) -> int:
        """How many of the oldest have read their pages, or were not taken."""
        done = 0
        for offload in self._offloads:
            if not offload.done():
                break
            done += 1
        return done

    def pop(self) -> bool:
        """Forget the oldest, which is completed. Whether it was taken: as far as its pages found room they are, or will
        be, stored."""
        return self._offloads.popleft().taken

    def reset(self) -> None:
        """Wait until no page is read any more, and forget them all."""
        while self._offloads:
            self._offloads.popleft().wait()

    def close(self) -> None:
        """`reset`, and end the thread. Twice is fine."""
        self.reset()
        self._thread.close()
