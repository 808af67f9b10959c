"""vLLM's workers as processes of their own, as tensor parallelism has them: the scheduler's process has the engine and
decides (`Lead`), the workers have the planes and carry out (`RankWorker`).

Nothing of vLLM is imported. What a step's metadata brings to the ranks is plain data: the orders of loads, and a mark.
Ranks come to the mark when the step's forward pass was submitted; stores of what it has computed come behind it,
however much later the engine begins them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from gdscache.cuda.streams import Event
from gdscache.errors import GdsCacheError, RankMismatchError
from gdscache.integrations.vllm.prefills import Prefills
from gdscache.integrations.vllm.requests import LoadOrder
from gdscache.integrations.vllm.worker import LoadBatch, Loads, StoreOrder, Stores, begin_loads, end_step
from gdscache.ranks.address import RankAddress
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import log_failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from gdscache.engine import CacheEngine
    from gdscache.load.handle import LayerwiseLoad
    from gdscache.moves.native import NativeExecutor
    from gdscache.ranks.executor import RanksExecutor

Observed = tuple[int, int, float]  # of `CacheEngine.observe_prefill`


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlace:
    """Blocks that pages of a request go into: see `worker.Place`."""

    request_id: str
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RankBatch:
    """A load as ranks are told of it. `order`: for `Rank.load`; empty where it could not be begun."""

    order: bytes
    places: tuple[RankPlace, ...]
    between: bool


class Marks:
    """The order of steps is that of the marks which ranks come to. See `worker.OrderOfSteps`."""

    def __init__(self, executor: NativeExecutor | RanksExecutor) -> None:
        self._executor = executor
        self._last: Event = None

    def begin(self) -> bytes:
        """A mark behind the step that begins: what each rank is told of it, for `Rank.store`."""
        before, self._last = self._last, self._executor.mark(None)
        self._executor.passed(before)
        return getattr(self._last, "order", b"")

    def now(self) -> Event:
        return self._executor.mark(self._last)

    def passed(self, place: Event) -> None:
        self._executor.passed(place)


class Lead:
    """What the scheduler has ranks do, step by step."""

    def __init__(self, engine: CacheEngine, counts: Counter[str], *, overlapping: bool) -> None:
        """`overlapping`: see `Loads`."""
        self._engine = engine
        self._counts = counts
        self._marks = Marks(engine.executor)
        self._loads = Loads(0, counts, overlapping=overlapping)
        self._stores = Stores(engine, self._marks, counts, self._loads.prove)
        self._computed: Sequence[StoreOrder] = ()  # by the step before, whose end nobody here sees
        self._untold: list[LoadBatch] = []  # whose orders are not there yet

    def busy(self) -> bool:
        """Whether loads between steps are under way."""
        return self._loads.under_way

    def step(
        self, loads: Sequence[LoadOrder], stores: Sequence[StoreOrder], fresh: Set[int], *, idle: bool, last: bool
    ) -> tuple[list[RankBatch], bytes]:
        """A step is about to be told to the ranks: its loads, and the mark behind it if it has one.

        The step before was submitted by then, if not carried out: what it has computed is stored now, as soon as that
        is known to be right. `fresh`: blocks that this step may write to. Raises what `Loads.end_step` does.
        """
        self._end_step(idle=idle, last=last)
        self.settle(fresh)
        batches = begin_loads(self._engine, loads, self._counts)
        self._loads.begin(batches)
        self._computed = [*stores]
        return self._told(batches), self._marks.begin() if stores else b""

    def settle(self, blocks: Set[int]) -> None:
        """See `Stores.settle`."""
        self._stores.settle(blocks)

    def begin_anew(self, salt: str) -> None:
        """See `Stores.begin_anew`."""
        self._computed = ()
        self._stores.begin_anew(salt)

    def close(self) -> None:
        """Have what was computed stored, while the ranks are there. Twice is fine."""
        try:
            self._end_step(idle=True, last=True)
        except GdsCacheError as error:
            log_failure(error)
        self._stores.close()

    def _end_step(self, *, idle: bool, last: bool) -> None:
        computed, self._computed = self._computed, ()
        end_step(self._loads, self._stores, computed, idle=idle, last=last)
        self._loads.take_arrived()  # the ranks say so themselves
        self._loads.take_failed()
        self._loads.take_bad()

    def _told(self, batches: Sequence[LoadBatch]) -> list[RankBatch]:
        """What ranks are told now. A load between steps may wait for another one that brings its pages."""
        told: list[RankBatch] = []
        waiting, self._untold = [*self._untold, *batches], []
        for batch in waiting:
            load = batch.load
            if load is not None and batch.between and not load.ordered:
                self._untold.append(batch)
                continue
            places = tuple(RankPlace(place.request_id, place.blocks) for place in batch.places)
            told.append(RankBatch(b"" if load is None else load.order, places, batch.between))
        return told


class RankWorker:
    """The worker as one of several ranks. `begin` and `end` are called in each step, around its forward pass."""

    def __init__(self, tensors: Sequence[torch.Tensor], rank: int, shard: int, *, overlapping: bool) -> None:
        """`tensors`: the planes; `shard`: of `Rank`; `overlapping`: see `Loads`. Raises `RankError`."""
        self.rank = Rank([(tensor,) for tensor in tensors], rank, shard=shard)
        self.loads = Loads(len(tensors), Counter(), overlapping=overlapping)  # pages are counted once, by the leader
        self.prefills = Prefills(self._observe, tensors[0].device)
        self._observed: list[Observed] = []

    def begin(self, loads: Sequence[RankBatch]) -> None:
        self.loads.begin([LoadBatch(self._begun(some.order), some.places, some.between) for some in loads])

    def end(self, mark: bytes, *, idle: bool) -> None:
        """`mark`: what the step's metadata says, or nothing."""
        self.loads.end_step(idle=idle)
        if mark:
            self.rank.store(mark)
        self.prefills.end()

    def take_observed(self) -> list[Observed]:
        """What prefills took, since the last call."""
        observed, self._observed = self._observed, []
        return observed

    def close(self) -> None:
        self.rank.close()

    def _begun(self, order: bytes) -> LayerwiseLoad | None:
        try:
            return self.rank.load(order) if order else None
        except GdsCacheError as error:  # an answer all the same: a rank that raises ends vLLM
            log_failure(error)
            return None

    def _observe(self, tokens: int, before: int, seconds: float) -> None:
        self._observed.append((tokens, before, seconds))


def one_model(models: Mapping[int, Mapping[str, object]]) -> Mapping[str, object]:
    """What all ranks say of the model. Raises `RankMismatchError` where they differ."""
    first = models[min(models)]
    for rank, model in sorted(models.items()):
        if wrong := sorted(name for name in {*first, *model} if first.get(name) != model.get(name)):
            raise RankMismatchError(
                f"rank {rank} describes its part of the model by another {', '.join(wrong)} than rank {min(models)}",
                "start all workers with the same environment and files",
            )
    return first


def addresses_of(addresses: Mapping[int, RankAddress], ranks: int) -> list[RankAddress]:
    """Those of all ranks. Raises `RankMismatchError` where some are missing."""
    if missing := sorted({*range(ranks)} - {*addresses}):
        raise RankMismatchError(
            f"ranks {missing} of {ranks} have told nothing of themselves", "see the logs of the workers"
        )
    return [addresses[rank] for rank in range(ranks)]
