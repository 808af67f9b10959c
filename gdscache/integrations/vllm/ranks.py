"""vLLM's workers as processes of their own, for tensor parallelism: the scheduler's process has the engine and decides
(`Lead`); the workers have the planes and carry out (`RankWorker`).

A step's metadata brings plain data to the ranks: orders of loads, and a mark. Ranks reach the mark when the step's
forward pass is submitted; stores of the step's pages come behind it, even if the engine begins them later.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from gdscache.errors import GdsCacheError, RankMismatchError
from gdscache.integrations.prefills import Prefills
from gdscache.integrations.vllm.requests import LoadOrder, StoreOrder
from gdscache.integrations.vllm.worker import BegunLoad, LoadBatch, Loads, Marks, Stores, begin_loads, end_step
from gdscache.ranks.address import RankAddress
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import in_turn, log_failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from gdscache.engine.engine import CacheEngine

Observed = tuple[int, int, float]  # of `CacheEngine.observe_prefill`


class Lead(Stores):
    """The leader of the ranks, step by step: their stores, and their loads."""

    def __init__(self, engines: Sequence[CacheEngine], counts: Counter[str], *, overlapping: bool) -> None:
        """`engines`: of each pool. `overlapping`: see `Loads`."""
        self.loads = Loads(0, counts, overlapping=overlapping)
        self._order = [Marks(engine) for engine in engines]
        super().__init__(engines, counts, self.loads.prove, self._order)
        self._computed: Sequence[StoreOrder] = ()  # by the step before, whose end this process does not see
        self._untold: list[LoadBatch] = []  # batches whose orders have not come

    def step(
        self, loads: Sequence[LoadOrder], stores: Sequence[StoreOrder], fresh: Set[int], *, idle: bool, last: bool
    ) -> tuple[list[LoadBatch], list[bytes]]:
        """See `Stores.step`: a step's loads for the ranks, and the marks behind it, one a pool, if it has stores.

        The step before is submitted, though perhaps not carried out: its pages are stored as soon as they are known to
        be right. Raises like `Loads.end_step`.
        """
        self._end_step(idle=idle, last=last)
        self.wait_until_read(fresh)
        batches = begin_loads(self._engines, loads, self._counts)
        self.loads.begin(batches)
        self._computed = [*stores]
        pools = {order.pool for order in stores}
        marks = [of.begin() if pool in pools else b"" for pool, of in enumerate(self._order)] if pools else []
        return self._told(batches), marks

    def end(self, orders: Sequence[StoreOrder]) -> None:
        """See `Stores.end`. Ranks have computed these pages: vLLM has the tokens behind them. So an earlier step's mark
        will do."""
        self._computed = [*self._computed, *(order for order in orders if self._order[order.pool].begun)]
        self._end_step(idle=False, last=True)

    def reads(self) -> Set[int]:
        return super().reads() | {block for order in self._computed for block in order.blocks}

    def begin_anew(self, salt: str) -> None:
        self._computed = ()
        super().begin_anew(salt)

    def close(self) -> None:
        """Store computed pages while the ranks live. Repeated calls are fine."""
        try:
            self._end_step(idle=True, last=True)
        except GdsCacheError as error:
            log_failure(error)
        super().close()

    def _end_step(self, *, idle: bool, last: bool) -> None:
        computed, self._computed = self._computed, ()
        end_step(self.loads, self, computed, idle=idle, last=last)
        self.loads.take_arrived()  # the ranks report these themselves
        self.loads.take_failed()
        self.loads.take_bad()

    def _told(self, batches: Sequence[LoadBatch]) -> list[LoadBatch]:
        """For the ranks: the batches whose orders have come. A load between steps may wait for another one that brings
        its pages."""
        told: list[LoadBatch] = []
        waiting, self._untold = [*self._untold, *batches], []
        for batch in waiting:
            if any(one.between and one.load is not None and not one.load.ordered for one in batch):
                self._untold.append(batch)
            else:
                orders = [b"" if one.load is None else one.load.order for one in batch]
                both = zip(batch, orders, strict=True)
                told.append([dataclasses.replace(one, load=None, order=order) for one, order in both])
        return told


class RankWorker:
    """The worker as one of several ranks. `begin` and `end` are called around each step's forward pass."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        rank: int,
        shard: int,
        *,
        overlapping: bool,
        pools: Sequence[Sequence[int]] = (),
    ) -> None:
        """`tensors`: the planes. `shard`: of `Rank`. `overlapping`: see `Loads`. `pools`: the planes of each pool;
        none: one pool. Raises `RankError`."""
        with contextlib.ExitStack() as undo:
            self.ranks = [
                undo.enter_context(Rank([(tensors[plane],) for plane in pool], rank, shard=shard))
                for pool in pools or (range(len(tensors)),)
            ]
            undo.pop_all()
        self.loads = Loads(len(tensors), Counter(), overlapping=overlapping)  # pages are counted once, by the leader
        self._observed: list[Observed] = []
        self.prefills = Prefills(lambda *one: self._observed.append(one), tensors[0].device)

    def begin(self, loads: Sequence[LoadBatch]) -> None:
        """`loads`: from the step's metadata, with orders."""
        self.loads.begin([[self._begun(one) for one in batch] for batch in loads])

    def end(self, marks: Sequence[bytes], *, idle: bool, last: bool = False) -> None:
        """`marks`: of each pool, from the step's metadata, or none. `last` is the leader's (`Lead.step`)."""
        self.loads.end_step(idle=idle)
        for rank, mark in zip(self.ranks, marks, strict=False):
            rank.store(mark)
        self.prefills.end()

    def take_observed(self) -> list[Observed]:
        observed, self._observed = self._observed, []
        return observed

    def close(self) -> None:
        in_turn(*(rank.close for rank in self.ranks))

    def _begun(self, one: BegunLoad) -> BegunLoad:
        try:
            return dataclasses.replace(one, load=self.ranks[one.pool].load(one.order)) if one.order else one
        except GdsCacheError as error:  # the load is answered as bad: a rank that raises ends vLLM
            log_failure(error)
            return one


def addresses_of(addresses: Mapping[int, Sequence[RankAddress]], ranks: int) -> list[list[RankAddress]]:
    """The addresses of all ranks, by pool. `addresses`: each rank's, of each pool. Raises `RankMismatchError` for
    missing ranks."""
    if missing := sorted({*range(ranks)} - {*addresses}):
        raise RankMismatchError(
            f"ranks {missing} of {ranks} have told nothing of themselves", "see the logs of the workers"
        )
    return [list(pool) for pool in zip(*(addresses[rank] for rank in range(ranks)), strict=True)]
