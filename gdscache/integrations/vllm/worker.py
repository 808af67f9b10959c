"""The worker's side of the vLLM connector: what moves between the engine's tiers and vLLM's blocks in a step.

Nothing of vLLM is imported. A load within the step is of pages that were checked and are pinned. A load between steps
may meet a bad page; its blocks are named, and vLLM computes them. A store reads its blocks after the work that the
current stream has when it is flushed; until it has read them, whoever is to write to them waits (`settle`). What a
step with a load has computed is stored once that load is proven: from a bad page on it would be wrong, under a right
name.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from gdscache.cuda.streams import record
from gdscache.errors import GdsCacheError, LayerHooksError, VerifiedLoadError
from gdscache.integrations.handing import HandedStore, StoreThread
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.keys import Page
from gdscache.runtime.threads import log_failure

if TYPE_CHECKING:
    import torch

    from gdscache.engine import CacheEngine
    from gdscache.store.handle import StoreHandle


_PAGES, _STEPS = 16, 8  # single pages, as decoding fills them, are handed over by so many, or after so many steps


class Stores:
    """What is to be stored, and stores that still read blocks of vLLM's. A thread hands them over to the engine.

    To hand pages over takes some 0.1 ms of Python, however few they are. So single pages wait for others: their blocks
    keep their bytes until somebody is to write to them.
    """

    def __init__(
        self,
        engine: CacheEngine,
        device: torch.device,
        counts: Counter[str],
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """`device`: of vLLM's blocks. `prove()`: wait for the verdicts on all loads so far (`Loads.prove`)."""
        self._engine = engine
        self._prove = prove
        self._device = device
        self._counts = counts
        self._salt = ""
        self._waiting: list[StoreOrder] = []
        self._steps = 0  # since the first of them came
        self._held: deque[tuple[list[StoreOrder], bool]] = deque()  # of the latest steps, which are not proven; `last`
        self._reading: list[tuple[HandedStore, frozenset[int]]] = []  # with their blocks
        self._thread = StoreThread("gdscache-stores")

    def begin(self, orders: Sequence[StoreOrder], *, last: bool = False, unproven: int = 0) -> None:
        """Store what the step has computed, all requests at once. Nothing of it waits for a disk.

        `last`: a request has ended, and there may be no further step. `unproven`: so many of the latest steps, this one
        among them, may have begun on bad pages (`Loads.unproven`).
        """
        self._held.append((list(orders), last))
        ending = self._let_go(unproven)
        self._steps += bool(self._waiting)
        many = len(self._waiting) >= _PAGES or any(len(order.blocks) > 1 for order in self._waiting)
        if many or ending or self._steps >= _STEPS:
            self.flush()

    def begin_anew(self, salt: str) -> None:
        """Store nothing of what waits; what comes has this salt."""
        self._held.clear()
        self._waiting, self._steps, self._salt = [], 0, salt

    def flush(self) -> None:
        """Hand over what waits and is proven. The blocks are read after what the current stream has to do by now."""
        self._forget_read()
        orders, self._waiting, self._steps = self._waiting, [], 0
        if not orders:
            return
        engine, salt, pages, blocks = self._engine, self._salt, list[Page](), list[int]()
        namespace = engine.namespace(salt)
        for order in orders:
            pages += order.hashes.pages(namespace)[order.first : order.first + len(order.blocks)]
            blocks += order.blocks
        epoch, after = engine.manager.clearing.epoch(namespace), record(self._device)

        def store() -> StoreHandle:
            table = np.array(blocks, np.int64).reshape(-1, 1)
            return engine.submit_store(pages, table, epoch, salt, after)

        self._reading.append((self._thread.start(store), frozenset(blocks)))
        self._counts["stored_pages"] += len(pages)

    def settle(self, blocks: Set[int]) -> None:
        """Wait until no store reads one of these blocks. Raises what `prove` raises; nothing is stored then that is not
        proven."""
        if not all(blocks.isdisjoint(order.blocks) for step, _ in self._held for order in step):
            self._let_all_go()
        if self._waiting and not {block for order in self._waiting for block in order.blocks}.isdisjoint(blocks):
            self.flush()
        for store, its in self._reading:
            if not its.isdisjoint(blocks) and not store.done():
                self._counts["blocks_awaited"] += 1
                store.wait()
        self._forget_read()

    def close(self) -> None:
        """Hand over what waits, but for steps with a bad load, and end the thread. Twice is fine."""
        try:
            self._let_all_go()
        except GdsCacheError as error:
            log_failure(error)
            self._held.clear()
        self.flush()
        self._thread.close()

    def _let_go(self, unproven: int) -> bool:
        """Let steps wait for others alone, but so many of the latest ones. Whether a request has ended in them."""
        ending = False
        while len(self._held) > unproven:
            proven, last = self._held.popleft()
            self._waiting += proven
            ending = ending or last
        return ending

    def _let_all_go(self) -> None:
        if self._held:
            self._prove()
            self._let_go(0)

    def _forget_read(self) -> None:
        self._reading = [entry for entry in self._reading if not entry[0].done()]


class Loads:
    """Loads within a step, and those between steps."""

    def __init__(self, engine: CacheEngine, layers: int, counts: Counter[str], *, overlapping: bool) -> None:
        """`overlapping`: vLLM submits a step before it knows how the one before has ended."""
        self._engine = engine
        self._layers = layers
        self._counts = counts
        self._overlapping = overlapping
        self._now: LayerwiseLoad | None = None
        self._orders: list[LoadOrder] = []
        self._waited: set[int] = set()
        self._step = 0
        self._unproven: list[tuple[int, LayerwiseLoad, list[LoadOrder]]] = []  # with the step of each, oldest first
        self._between: list[tuple[LayerwiseLoad, LoadOrder]] = []
        self._arrived: set[str] = set()
        self._bad: set[int] = set()

    @property
    def under_way(self) -> bool:
        """Whether loads between steps have not ended."""
        return bool(self._between)

    @property
    def within(self) -> bool:
        """Whether the step that is computed now has a load of its own."""
        return self._now is not None

    @property
    def unproven(self) -> int:
        """How many of the latest steps may have begun on bad pages, as far as is known."""
        return self._step - self._unproven[0][0] if self._unproven else 0

    def begin(self, orders: Sequence[LoadOrder]) -> None:
        """Begin the loads of a step; the pages stay where they are until each load has them."""
        within = [order for order in orders if not order.between]
        try:
            if within:
                self._now = self._start(within)
                self._orders, self._waited = within, set()
            for order in orders:
                if order.between:
                    self._begin_between(order)
        finally:
            for order in orders:
                order.fetch.release()

    def wait(self, layer: int) -> None:
        """Order the current stream after this layer of the step's load."""
        if self._now is not None and layer not in self._waited:
            self._waited.add(layer)
            self._now.wait(layer)

    def wait_all(self) -> None:
        """Order the current stream after all layers."""
        for layer in range(self._layers if self._now is not None else 0):
            self.wait(layer)

    def end_step(self, *, idle: bool = False) -> bool:
        """The forward pass has been submitted. False where vLLM takes the step back: nothing of it is to be stored.

        That is where the pages of a load were bad after all; their blocks are named. Where steps overlap, it cannot do
        that (`VerifiedLoadError`). Raises `LayerHooksError` where the pass did not wait for a layer. `idle`: there was
        no pass, so the verdicts on earlier loads are waited for.
        """
        step, self._step = self._step, self._step + 1
        if self._now is not None:
            if len(self._waited) < self._layers:
                missed = sorted(set(range(self._layers)) - self._waited)
                raise LayerHooksError(
                    f"the forward did not wait for {len(missed)} of {self._layers} layers, layer {missed[0]} first",
                    'set "layerwise": false in kv_connector_extra_config',
                )
            self._unproven.append((step, self._now, self._orders))
            self._now, self._orders = None, []
        good = self._judge(wait=idle or not self._overlapping)
        self._poll()
        return good

    def prove(self) -> bool:
        """Wait for the verdicts on the loads of all steps that have been submitted, as `end_step` does."""
        return self._judge(wait=True)

    def take_arrived(self) -> set[str]:
        """Requests whose load between steps has ended since the last call, well or not."""
        arrived, self._arrived = self._arrived, set()
        return arrived

    def take_bad(self) -> set[int]:
        """Blocks that were not loaded, since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, orders: Sequence[LoadOrder]) -> LayerwiseLoad:
        batch = []
        for order in orders:
            take = order.fetch.unchecked if order.between else order.fetch.checked
            hit = take(order.first, len(order.blocks))
            batch.append((hit, list(order.blocks[: len(hit.pages)])))
        load = self._engine.load_many(batch)
        self._counts["loads"] += len(orders)
        self._counts["loaded_pages"] += sum(len(order.blocks) for order in orders)
        return load

    def _judge(self, *, wait: bool) -> bool:
        """Look at the verdicts of loads within steps, of those that have ended if `wait` is not set; all are good."""
        good, left = True, []
        for number, load, orders in self._unproven:
            if not (wait or load.done()):
                left.append((number, load, orders))
                continue
            bad = _bad_blocks(load, orders)
            if bad and self._overlapping:
                raise VerifiedLoadError(
                    f"{len(bad)} blocks of {len(orders)} requests were not loaded, and the next step goes on from them",
                    "see the log for a CUDA error, and restart; without one, raise pin_seconds",
                )
            self._bad |= bad
            good = good and not bad
        self._unproven = left
        return good

    def _begin_between(self, order: LoadOrder) -> None:
        try:
            self._between.append((self._start([order]), order))
        except GdsCacheError as error:
            log_failure(error)
            self._end_between(order, set(order.blocks))

    def _poll(self) -> None:
        left = []
        for load, order in self._between:
            if load.done():
                self._end_between(order, _bad_blocks(load, [order]))
            else:
                left.append((load, order))
        self._between = left

    def _end_between(self, order: LoadOrder, bad: set[int]) -> None:
        self._arrived.add(order.request_id)
        self._bad |= bad
        self._counts["bad_pages"] += len(bad)


def end_step(
    loads: Loads, stores: Stores, orders: Sequence[StoreOrder], *, idle: bool = False, last: bool = False
) -> None:
    """A step has been submitted: store what it has computed as soon as that is known to be right.

    `orders`: what became full in it; `idle`, `last`: of `Loads.end_step`, `Stores.begin`. Raises what the former does.
    """
    good = loads.end_step(idle=idle)
    stores.begin(orders if good else [], last=last, unproven=loads.unproven)


def _bad_blocks(load: LayerwiseLoad, orders: Sequence[LoadOrder]) -> set[int]:
    """Blocks of the orders that the load has not filled with good pages. Waits for its verdict."""
    bad: set[int] = set()
    for report, order in zip(load.results(), orders, strict=True):
        good = [status is PageStatus.LOADED for status in report.pages]
        good += [False] * (len(order.blocks) - len(good))
        bad.update(block for block, loaded in zip(order.blocks, good, strict=True) if not loaded)
    return bad
