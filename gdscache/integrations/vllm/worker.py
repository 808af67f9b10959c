"""The worker's side of the vLLM connector: moves between the engine's tiers and vLLM's blocks in a step.

With workers in other processes, `Loads` is in each of them and beside the scheduler, `Stores` beside the scheduler
(`ranks.py`).

A load within the step brings checked, pinned pages. A load between steps may meet a bad page; its blocks are reported,
and vLLM computes them. A store reads its blocks after the steps submitted before its flush; steps that write the blocks
wait until it has read them (`wait_until_read`). Pages of a step with a load are stored once that load is proven: after
a bad page they would be wrong, under a right name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

from gdscache.cuda.streams import Event
from gdscache.errors import GdsCacheError, LayerHooksError, VerifiedLoadError
from gdscache.integrations.handing import HandedStore
from gdscache.integrations.prefills import Prefills
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.load.handle import LayerwiseLoad
from gdscache.moves import PageStatus
from gdscache.pages.keys import Page
from gdscache.runtime.threads import Workers, log_failure

if TYPE_CHECKING:
    import torch

    from gdscache.engine.engine import CacheEngine
    from gdscache.integrations.vllm.session import VllmSession
    from gdscache.store.handle import StoreHandle


Place = tuple[str, tuple[int, ...]]  # a request, and the blocks for pages of it


@dataclasses.dataclass(frozen=True, slots=True)
class BegunLoad:
    """A begun load in one pool, and the blocks of its requests. `load` is None if it could not begin: all its pages are
    bad. `between`: its request waits for its end, and for those in its other pools. `order`: for `Rank.load`, on the
    way to ranks; empty if the load could not begin."""

    pool: int
    load: LayerwiseLoad | None
    places: Sequence[Place]
    between: bool = False
    order: bytes = b""

    def done(self) -> bool:
        return self.load is None or self.load.done()

    def bad_blocks(self) -> set[int]:
        """Blocks that the load has not filled with good pages. Waits for its verdict."""
        bad: set[int] = set()
        try:
            reports = self.load.results() if self.load is not None else ()
        except GdsCacheError as error:  # the error that broke the load off
            log_failure(error)
            reports = ()
        for report, (_, blocks) in itertools.zip_longest(reports, self.places):
            good = [status is PageStatus.LOADED for status in report.pages] if report is not None else []
            good += [False] * (len(blocks) - len(good))
            bad.update(block for block, loaded in zip(blocks, good, strict=True) if not loaded)
        return bad


# The one load of all requests within a step, in their model's only pool; or those of a request between steps, a pool.
LoadBatch = Sequence[BegunLoad]


def requests_of(batch: LoadBatch) -> set[str]:
    return {request_id for one in batch for request_id, _ in one.places}


def begin_loads(engines: Sequence[CacheEngine], orders: Sequence[LoadOrder], counts: Counter[str]) -> list[LoadBatch]:
    """Begin a step's loads: one for all requests that the step computes, and one for each request between steps.

    `engines`: of each pool; with several, all loads go between steps. Fetched pages are kept until each load has leased
    them.
    """
    within = [order for order in orders if not order.between]
    batches: dict[str, list[list[LoadOrder]]] = {"": [within]} if within else {}  # by request; "": within the step
    for order in orders:
        if order.between:
            batches.setdefault(order.request_id, []).append([order])
    try:
        loads = [[_begun(engines[of[0].pool], of, counts) for of in batch] for batch in batches.values()]
    finally:
        for order in orders:
            order.fetch.release()
    counts["loads"] += sum(len(requests_of(some)) for some in loads if all(one.load is not None for one in some))
    return [*loads]


def _begun(engine: CacheEngine, orders: Sequence[LoadOrder], counts: Counter[str]) -> BegunLoad:
    load = None
    try:
        hits = [(order.hit(), order.blocks) for order in orders]
        with engine.timeline.requests(order.trace for order in orders):
            load = engine.load_many([(hit, list(blocks[: len(hit.pages)])) for hit, blocks in hits])
        counts["begun_pages"] += sum(len(order.blocks) for order in orders)
    except GdsCacheError as error:
        log_failure(error)
    places = [(order.request_id, order.blocks) for order in orders]
    return BegunLoad(orders[0].pool, load, places, orders[0].between)


class Marks:
    """The order of steps by the marks that ranks come to, in one pool. Without ranks, an engine's own `mark` is in the
    order of the device's current stream."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._last: Event = None
        self.passed = engine.passed

    def begin(self) -> bytes:
        """A mark behind the step that begins, as the bytes for each rank's `Rank.store`."""
        before, self._last = self._last, self._engine.mark()
        self._engine.passed(before)
        return getattr(self._last, "order", b"")

    @property
    def begun(self) -> bool:
        return self._last is not None

    def mark(self) -> Event:
        return self._engine.mark(self._last)


_PAGES, _STEPS = 16, 8  # waiting single pages and steps until a flush while requests decode


class Stores:
    """Waiting stores of all pools, and stores that still read vLLM's blocks. A thread passes them to the engines.

    A pass costs some 0.1 ms of Python for any number of pages. So single pages wait for others: their blocks keep their
    bytes until a step is about to write them.
    """

    def __init__(
        self,
        engines: Sequence[CacheEngine],
        counts: Counter[str],
        prove: Callable[[], object] = lambda: None,
        marks: Sequence[Marks] = (),
    ) -> None:
        """`engines`, and `marks` of ranks: of each pool. `prove()`: wait for the verdicts on all loads so far
        (`Loads.prove`)."""
        self._engines = engines
        self._prove = prove
        self._marks: Sequence[Marks | CacheEngine] = marks or engines
        self._counts = counts
        self._salt = ""
        self._single = [max(1, len(engine.groups)) for engine in engines]  # pages that decoding fills at a time
        self._waiting: list[StoreOrder] = []
        self._steps = 0  # since the first waiting page
        self._held: deque[tuple[list[StoreOrder], bool]] = deque()  # the latest, unproven steps, with their `last`
        self._reading: list[tuple[HandedStore, frozenset[int]]] = []  # with their blocks
        self._thread = Workers(1, "gdscache-stores")

    def step(
        self, loads: Sequence[LoadOrder], stores: Sequence[StoreOrder], fresh: Set[int], *, idle: bool, last: bool
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """For the scheduler, as a step begins: its loads and stores as its metadata brings them to the worker. `fresh`:
        blocks that it may write. `idle`, `last`: of `end_step`. Raises like `wait_until_read`."""
        self.wait_until_read(fresh)
        return loads, stores

    def begin(self, orders: Sequence[StoreOrder], *, last: bool = False, unproven: int = 0) -> None:
        """Store a step's pages, of all requests together. Never waits for a disk.

        `last`: a request has ended, and there may be no further step. `unproven`: the number of latest steps, this one
        included, that may have begun on bad pages (`Loads.unproven`).
        """
        self._held.append((list(orders), last))
        ending = self._let_go(unproven)
        self._steps += bool(self._waiting)
        pages, many = Counter[int](), False
        for order in self._waiting:
            pages[order.pool] += len(order.blocks)
            single = self._single[order.pool]
            many = many or len(order.blocks) > single or pages[order.pool] >= _PAGES * single
        if many or ending or self._steps >= _STEPS:
            self.flush()

    def end(self, orders: Sequence[StoreOrder]) -> None:
        """A request is over, of which the steps so far have filled these pages, too. vLLM in its caller's process may
        make no further step."""
        (self._held[-1][0] if self._held else self._waiting).extend(orders)
        self.flush()

    def begin_anew(self, salt: str) -> None:
        """Drop waiting stores; later ones have this salt."""
        self._held.clear()
        self._waiting, self._steps, self._salt = [], 0, salt

    def flush(self) -> None:
        """Pass on the waiting, proven pages. Their blocks are read after the steps so far."""
        self._forget_read()
        waiting, self._waiting, self._steps = self._waiting, [], 0
        for pool in sorted({order.pool for order in waiting}):
            self._start(pool, [order for order in waiting if order.pool == pool])

    def wait_until_read(self, blocks: Set[int]) -> None:
        """Wait until no store reads one of these blocks. Raises like `prove`, without storing unproven pages."""
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
        """Blocks that a store reads, or will read. Never waits."""
        self._forget_read()
        waiting = [*self._waiting, *(order for step, _ in self._held for order in step)]
        return {block for order in waiting for block in order.blocks}.union(*(its for _, its in self._reading))

    def close(self) -> None:
        """Pass on the waiting pages, except those of steps with a bad load, and end the thread. Repeated calls are
        fine."""
        try:
            self._let_all_go()
        except GdsCacheError as error:
            log_failure(error)
            self._held.clear()
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _start(self, pool: int, orders: Sequence[StoreOrder]) -> None:
        engine, marks, salt = self._engines[pool], self._marks[pool], self._salt
        namespace, shared = engine.namespaces(salt)[0], dict[tuple[int, bytes], Page]()
        for order in orders:  # requests may share blocks that a step fills; of a hybrid model, behind unequal pages
            for block, page in zip(order.blocks, order.pages(namespace), strict=True):
                shared.setdefault((block, page.key), page)
        blocks, pages = [block for block, _ in shared], [*shared.values()]
        epoch, after = engine.epoch(salt), marks.mark()

        def store() -> list[StoreHandle]:
            try:
                return [engine.store_pages(pages, blocks, salt, after, epoch=epoch)]
            finally:
                marks.passed(after)

        self._reading.append((HandedStore(self._thread, store), frozenset(blocks)))
        self._counts["offered_pages"] += len(pages)

    def _let_go(self, unproven: int) -> bool:
        """Release steps except for the latest `unproven`. Returns whether a request has ended in them."""
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
        left = []
        for store, blocks in self._reading:
            if not store.done():
                left.append((store, blocks))
            elif not store.taken:  # an error, which the log has
                self._counts["unstored_pages"] += len(blocks)
        self._reading = left


class Loads:
    """Loads within a step, and between steps."""

    def __init__(self, layers: int, counts: Counter[str], *, overlapping: bool) -> None:
        """`layers`: for which a step with a load waits. `overlapping`: vLLM submits a step before it knows the end of
        the one before."""
        self._layers = layers
        self._counts = counts
        self._overlapping = overlapping
        self._now: BegunLoad | None = None
        self._waited: set[int] = set()
        self._step = 0
        self._unproven: list[tuple[int, BegunLoad]] = []  # with the number of each one's step, oldest first
        self._between: list[LoadBatch] = []
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
        self._bad: set[int] = set()

    @property
    def under_way(self) -> bool:
        return bool(self._between)

    @property
    def within(self) -> bool:
        """Whether the present step has a load of its own."""
        return self._now is not None

    @property
    def unproven(self) -> int:
        """The number of the latest steps that may have begun on bad pages."""
        return self._step - self._unproven[0][0] if self._unproven else 0

    def begin(self, batches: Sequence[LoadBatch]) -> None:
        for batch in batches:
            if batch[0].between:
                self._between.append(batch)
            else:
                (self._now,), self._waited = batch, set()

    def wait(self, layer: int) -> None:
        """Order the current stream after this layer of the step's load."""
        if self._now is not None and layer not in self._waited:
            self._waited.add(layer)
            if self._now.load is not None:
                self._now.load.wait(layer)

    def wait_all(self) -> None:
        for layer in range(self._layers if self._now is not None else 0):
            self.wait(layer)

    def end_step(self, *, idle: bool = False) -> bool:
        """The forward pass has been submitted. False if vLLM takes the step back: nothing of it may be stored.

        vLLM takes a step back if pages of its load were bad; their blocks are reported. Overlapping steps cannot be
        taken back (`VerifiedLoadError`). Raises `LayerHooksError` if the pass did not wait for a layer. `idle`: without
        a pass, so this waits for the verdicts on earlier loads.
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
        """Wait for the verdicts on the loads of all submitted steps. Returns and raises like `end_step`."""
        return self._judge(wait=True)

    def take_arrived(self) -> set[str]:
        """Requests whose load between steps has ended since the last call, well or badly."""
        arrived, self._arrived = self._arrived, set()
        return arrived

    def take_failed(self) -> set[str]:
        """Requests whose load between steps has failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_bad(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def _judge(self, *, wait: bool) -> bool:
        """Check the verdicts of loads within steps: of ended ones, or with `wait` of all. True if all are good."""
        good, left = True, []
        for number, one in self._unproven:
            if not (wait or one.done()):
                left.append((number, one))
                continue
            bad = one.bad_blocks()
            if bad and self._overlapping:
                raise VerifiedLoadError(
                    f"{len(bad)} blocks of {len(one.places)} requests were not loaded, and the next step goes on "
                    "from them",
                    "see the log for a CUDA error, and restart; without one, raise pin_seconds",
                )
            self._bad |= bad
            good = good and not bad
        self._unproven = left
        return good

    def _poll(self) -> None:
        between, self._between = self._between, []
        for batch in between:
            if not all(one.done() for one in batch):
                self._between.append(batch)
                continue
            bad, requests = set[int]().union(*(one.bad_blocks() for one in batch)), requests_of(batch)
            self._arrived |= requests
            self._failed |= requests if bad else set()
            self._bad |= bad
            self._counts["bad_pages"] += len(bad)


def end_step(
    loads: Loads, stores: Stores, orders: Sequence[StoreOrder], *, idle: bool = False, last: bool = False
) -> None:
    """A step has been submitted: store its pages as soon as they are known to be right.

    `orders`: pages that it filled. `idle`, `last`: of `Loads.end_step`, `Stores.begin`. Raises like the former.
    """
    good = loads.end_step(idle=idle)
    stores.begin(orders if good else [], last=last, unproven=loads.unproven)


class EngineWorker:
    """The worker in one process with the scheduler, sharing its engine. `begin` and `end` are called around each step's
    forward pass."""

    def __init__(
        self, session: VllmSession, tensors: Sequence[torch.Tensor], counts: Counter[str], *, overlapping: bool
    ) -> None:
        """`tensors`: the planes. `overlapping`: see `Loads`."""
        self._engines = session.engines
        self._counts = counts
        self.loads = Loads(len(tensors), counts, overlapping=overlapping)
        self.stores = Stores(session.engines, counts, self.loads.prove)
        self.prefills = Prefills(session.observe_prefill, tensors[0].device)

    def begin(self, loads: Sequence[LoadOrder]) -> None:
        self.loads.begin(begin_loads(self._engines, loads, self._counts))

    def end(self, stores: Sequence[StoreOrder], *, idle: bool, last: bool) -> None:
        end_step(self.loads, self.stores, stores, idle=idle, last=last)
        self.prefills.end()

    def close(self) -> None:
        self.stores.close()
