"""The worker's side of the vLLM connector: what moves between the engine's tiers and vLLM's blocks in a step.

Nothing of vLLM is imported. Where workers are processes of their own, `Loads` is in each of them and beside the
scheduler, and `Stores` beside the scheduler (`ranks.py`).

A load within the step is of pages that were checked and are pinned. A load between steps may meet a bad page; its
blocks are named, and vLLM computes them. A store reads its blocks after the steps that were submitted when it is
flushed; until it has read them, whoever is to write to them waits (`settle`). What a step with a load has computed is
stored once that load is proven: from a bad page on it would be wrong, under a right name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gdscache.cuda.streams import Event, record
from gdscache.errors import GdsCacheError, LayerHooksError, VerifiedLoadError
from gdscache.integrations.handing import HandedStore, StoreThread
from gdscache.integrations.vllm.prefills import Prefills
from gdscache.integrations.vllm.requests import LoadOrder
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.keys import Page
from gdscache.runtime.threads import log_failure

if TYPE_CHECKING:
    import torch

    from gdscache.engine.engine import CacheEngine
    from gdscache.integrations.vllm.session import VllmSession
    from gdscache.store.handle import StoreHandle


class Place(Protocol):
    """Where pages of a request go: a `LoadOrder`, or what a rank is told of it."""

    @property
    def request_id(self) -> str: ...

    @property
    def blocks(self) -> tuple[int, ...]: ...


class StoreOrder(Protocol):
    """Pages of a request, in one pool, that are in `blocks` when the step has been computed: see `requests` and
    `groups`."""

    @property
    def request_id(self) -> str: ...

    @property
    def pool(self) -> int: ...

    @property
    def blocks(self) -> tuple[int, ...]: ...

    def pages(self, namespace: bytes) -> Sequence[Page]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class BegunLoad:
    """A load that was begun in one pool, and the places of its requests there. `load`: None where it could not be: all
    is bad then."""

    pool: int
    load: LayerwiseLoad | None
    places: Sequence[Place]

    def done(self) -> bool:
        return self.load is None or self.load.done()

    def bad_blocks(self) -> set[int]:
        """Blocks that the load has not filled with good pages. Waits for its verdict."""
        bad: set[int] = set()
        try:
            reports = self.load.results() if self.load is not None else ()
        except GdsCacheError as error:  # what broke it off
            log_failure(error)
            reports = ()
        for report, place in itertools.zip_longest(reports, self.places):
            good = [status is PageStatus.LOADED for status in report.pages] if report is not None else []
            good += [False] * (len(place.blocks) - len(good))
            bad.update(block for block, loaded in zip(place.blocks, good, strict=True) if not loaded)
        return bad


@dataclasses.dataclass(frozen=True, slots=True)
class LoadBatch:
    """A load that was begun. `between`: its request waits until it has ended, and `pools` are those that have pages of
    it; else it is of all requests of a step, in the one pool of their model."""

    pools: Sequence[BegunLoad]
    between: bool = False

    def wait(self, layer: int) -> None:
        """See `LayerwiseLoad.wait`."""
        for one in self.pools:
            if one.load is not None:
                one.load.wait(layer)

    def done(self) -> bool:
        return all(one.done() for one in self.pools)

    def bad_blocks(self) -> set[int]:
        """See `BegunLoad.bad_blocks`."""
        return set().union(*(one.bad_blocks() for one in self.pools))

    def requests(self) -> set[str]:
        """Whose pages it brings."""
        return {place.request_id for one in self.pools for place in one.places}


def begin_loads(engines: Sequence[CacheEngine], orders: Sequence[LoadOrder], counts: Counter[str]) -> list[LoadBatch]:
    """Begin the loads of a step: one for all that the step computes with, and one for each request between steps.

    `engines`: of each pool; of several, all loads go between steps. The pages stay where they are until each load has
    them.
    """
    within = [order for order in orders if not order.between]
    batches = [[within]] if within else []
    between: dict[str, list[list[LoadOrder]]] = {}
    for order in orders:
        if order.between:
            between.setdefault(order.request_id, []).append([order])
    batches += between.values()
    try:
        begun = [
            LoadBatch(
                [BegunLoad(of[0].pool, _begun(engines[of[0].pool], of, counts), of) for of in batch],
                batch[0][0].between,
            )
            for batch in batches
        ]
        counts["loads"] += sum(len(one.requests()) for one in begun if all(part.load is not None for part in one.pools))
        return begun
    finally:
        for order in orders:
            order.fetch.release()


def _begun(engine: CacheEngine, orders: Sequence[LoadOrder], counts: Counter[str]) -> LayerwiseLoad | None:
    batch = []
    try:
        for order in orders:
            take = order.fetch.unchecked if order.between else order.fetch.checked
            hit = take(order.first, len(order.blocks))
            batch.append((hit, list(order.blocks[: len(hit.pages)])))
        load = engine.load_many(batch)
    except GdsCacheError as error:
        log_failure(error)
        return None
    counts["begun_pages"] += sum(len(order.blocks) for order in orders)
    return load


class OrderOfSteps(Protocol):
    """The order in which vLLM's steps are carried out: what a store comes behind."""

    def now(self) -> Event:
        """A place behind the steps so far, which is kept until it is `passed`."""

    def passed(self, place: Event) -> None:
        """Nothing asks for the place any more; stores that were given it have it."""


class StreamOfSteps:
    """The order is that of the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Event:
        return record(self._device)

    def passed(self, place: Event) -> None:
        """An event goes with whoever has it."""


_PAGES, _STEPS = 16, 8  # single pages, as decoding fills them, are handed over by so many, or after so many steps


class Stores:
    """What is to be stored, and stores that still read blocks of vLLM's. A thread hands them over to the engine.

    To hand pages over takes some 0.1 ms of Python, however few they are. So single pages wait for others: their blocks
    keep their bytes until somebody is to write to them.
    """

    def __init__(
        self,
        engine: CacheEngine,
        steps: OrderOfSteps,
        counts: Counter[str],
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """`prove()`: wait for the verdicts on all loads so far (`Loads.prove`)."""
        self._engine = engine
        self._prove = prove
        self._order = steps
        self._counts = counts
        self._salt = ""
        self._single = max(1, len(engine.groups))  # pages that a request fills at a time while it decodes
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
        pages = [len(order.blocks) for order in self._waiting]
        many = sum(pages) >= _PAGES * self._single or max(pages, default=0) > self._single
        if many or ending or self._steps >= _STEPS:
            self.flush()

    def begin_anew(self, salt: str) -> None:
        """Store nothing of what waits; what comes has this salt."""
        self._held.clear()
        self._waiting, self._steps, self._salt = [], 0, salt

    def flush(self) -> None:
        """Hand over what waits and is proven. The blocks are read after the steps so far."""
        self._forget_read()
        orders, self._waiting, self._steps = self._waiting, [], 0
        if not orders:
            return
        engine, salt, pages, blocks = self._engine, self._salt, list[Page](), list[int]()
        namespace = engine.namespaces(salt)[0]
        for order in orders:
            pages += order.pages(namespace)
            blocks += order.blocks
        epoch, after = engine.epoch(salt), self._order.now()

        def store() -> StoreHandle:
            try:
                return engine.store_pages(pages, np.array(blocks, np.int64).reshape(-1, 1), salt, after, epoch=epoch)
            finally:
                self._order.passed(after)

        self._reading.append((self._thread.start(store), frozenset(blocks)))
        self._counts["offered_pages"] += len(pages)

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

    def reads(self) -> Set[int]:
        """Blocks that a store reads, or will. Never waits."""
        self._forget_read()
        waiting = [*self._waiting, *(order for step, _ in self._held for order in step)]
        return {block for order in waiting for block in order.blocks}.union(*(its for _, its in self._reading))

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


class PoolStores:
    """The `Stores` of each pool, as one."""

    def __init__(self, pools: Sequence[Stores]) -> None:
        self._pools = pools

    def begin(self, orders: Sequence[StoreOrder], *, last: bool = False, unproven: int = 0) -> None:
        """See `Stores.begin`."""
        for pool, stores in enumerate(self._pools):
            stores.begin([order for order in orders if order.pool == pool], last=last, unproven=unproven)

    def begin_anew(self, salt: str) -> None:
        """See `Stores.begin_anew`."""
        for stores in self._pools:
            stores.begin_anew(salt)

    def settle(self, blocks: Set[int]) -> None:
        """See `Stores.settle`."""
        for stores in self._pools:
            stores.settle(blocks)

    def reads(self) -> Set[int]:
        """See `Stores.reads`."""
        return set[int]().union(*(stores.reads() for stores in self._pools))

    def close(self) -> None:
        """See `Stores.close`."""
        for stores in self._pools:
            stores.close()


class Loads:
    """Loads within a step, and those between steps."""

    def __init__(self, layers: int, counts: Counter[str], *, overlapping: bool) -> None:
        """`layers`: that a step with a load waits for. `overlapping`: vLLM submits a step before it knows how the one
        before has ended."""
        self._layers = layers
        self._counts = counts
        self._overlapping = overlapping
        self._now: LoadBatch | None = None
        self._waited: set[int] = set()
        self._step = 0
        self._unproven: list[tuple[int, LoadBatch]] = []  # with the step of each, oldest first
        self._between: list[LoadBatch] = []
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
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

    def begin(self, batches: Sequence[LoadBatch]) -> None:
        """These belong to the step that begins."""
        for batch in batches:
            if batch.between:
                self._between.append(batch)
            else:
                self._now, self._waited = batch, set()

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
            self._unproven.append((step, self._now))
            self._now = None
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

    def take_failed(self) -> set[str]:
        """Those of them whose load was not well, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_bad(self) -> set[int]:
        """Blocks that were not loaded, since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    # -- inside ------------------------------------------------------------------------------------------------------

    def _judge(self, *, wait: bool) -> bool:
        """Look at the verdicts of loads within steps, of those that have ended if `wait` is not set; all are good."""
        good, left = True, []
        for number, batch in self._unproven:
            if not (wait or batch.done()):
                left.append((number, batch))
                continue
            bad = batch.bad_blocks()
            if bad and self._overlapping:
                raise VerifiedLoadError(
                    f"{len(bad)} blocks of {len(batch.requests())} requests were not loaded, and the next step goes on "
                    "from them",
                    "see the log for a CUDA error, and restart; without one, raise pin_seconds",
                )
            self._bad |= bad
            good = good and not bad
        self._unproven = left
        return good

    def _poll(self) -> None:
        left = []
        for batch in self._between:
            if batch.done():
                bad, requests = batch.bad_blocks(), batch.requests()
                self._arrived |= requests
                self._failed |= requests if bad else set()
                self._bad |= bad
                self._counts["bad_pages"] += len(bad)
            else:
                left.append(batch)
        self._between = left


def end_step(
    loads: Loads, stores: Stores | PoolStores, orders: Sequence[StoreOrder], *, idle: bool = False, last: bool = False
) -> None:
    """A step has been submitted: store what it has computed as soon as that is known to be right.

    `orders`: what became full in it; `idle`, `last`: of `Loads.end_step`, `Stores.begin`. Raises what the former does.
    """
    good = loads.end_step(idle=idle)
    stores.begin(orders if good else [], last=last, unproven=loads.unproven)


class EngineWorker:
    """The worker where it is in one process with the scheduler, and shares its engine. `begin` and `end` are called in
    each step, around its forward pass."""

    def __init__(
        self, session: VllmSession, tensors: Sequence[torch.Tensor], counts: Counter[str], *, overlapping: bool
    ) -> None:
        """`tensors`: the planes. `overlapping`: see `Loads`."""
        device = tensors[0].device
        self._engines = session.engines
        self._counts = counts
        self.loads = Loads(len(tensors), counts, overlapping=overlapping)
        steps = StreamOfSteps(device)
        self.stores = PoolStores([Stores(one, steps, counts, self.loads.prove) for one in session.engines])
        self.prefills = Prefills(session.observe_prefill, device)

    def begin(self, loads: Sequence[LoadOrder]) -> None:
        self.loads.begin(begin_loads(self._engines, loads, self._counts))

    def end(self, stores: Sequence[StoreOrder], *, idle: bool, last: bool) -> None:
        end_step(self.loads, self.stores, stores, idle=idle, last=last)
        self.prefills.end()

    def close(self) -> None:
        self.stores.close()
