"""The linker for a model over several ranks of one host, each with its own scheduler process.

All ranks call their linkers alike, in the same order. Rank 0's process leads: its engine has the index, decides the
promised pages, and plans loads and stores. Every rank has its part of the bytes (`Rank`).

* SGLang intersects the ranks' answers of `lookup`. So the other ranks answer every length, and the leader decides
  without a message.
* SGLang takes each rank's own answer of `load`. It is `True` everywhere: promised pages are pinned on all ranks.
* Orders of loads use the ranks' own channel. Each rank waits for its order, up to a limit, before it launches its
  forward pass. Without it the batch fails on that rank, and by SGLang's reduction on all.
* The leader says when a store is over: SGLang takes the least number of completed stores over the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from gdscache.cuda.streams import Event
from gdscache.engine.engine import CacheEngine
from gdscache.errors import EngineClosedError, GdsCacheError, LoadOrderError, RankError, RankLostError
from gdscache.integrations.fetching import Fetched
from gdscache.integrations.handing import Stored
from gdscache.integrations.sglang.loads import LoadTable, QueuedLoad
from gdscache.integrations.sglang.moves import Offloads
from gdscache.load.handle import LayerwiseLoad
from gdscache.pages.keys import PageHashes
from gdscache.ranks.address import RankAddress, StoreMark
from gdscache.ranks.executor import UNORDERED_S
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import log_failure

ORDER_S = UNORDERED_S  # a rank's wait for the leader's orders: its own pass waits for the leader's too
LEFT_S = 60.0  # the other ranks' stay at the end, while the leader stores its accepted pages
_QUIET = b"quiet"
_Made = TypeVar("_Made")
_log = logging.getLogger("gdscache")


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """A rank's report to the leader. `address`: None for a single rank. `model`: see `setup.model_of`."""

    address: RankAddress | None
    model: dict[str, object]


def place_in(group: Any) -> tuple[int, int]:
    """This process's rank in a group of torch.distributed's, and the number of ranks. (0, 1) without a group."""
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def together(group: Any, work: Callable[[], _Made]) -> list[_Made]:
    """Call `work()` on every rank. Returns all ranks' results.

    If one rank fails, all raise. Every rank enters the one collective, even after a failure.
    """
    _, ranks = place_in(group)
    if ranks == 1:
        return [work()]
    made: _Made | None = None
    error: Exception | None = None
    try:
        made = work()
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for this one's result
        error = raised
    message, hint = getattr(error, "message", repr(error)), getattr(error, "hint", "")
    told: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(told, (made, error and (message, hint)), group=group)
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(told):
        if failed:
            raise RankError(f"rank {rank} cannot be opened: {failed[0]}", failed[1] or "see its log")
    return [made for made, _ in told]


def shard_of(pool: Any, heads: int, rank: int, ranks: int) -> int:
    """A tensor-parallel rank's part of the heads. Ranks with equal bytes have one shard.

    Latents (MLA) are on all ranks. With more ranks than key heads, consecutive ranks have the same head. `heads`: the
    whole model's key heads.
    """
    if not hasattr(pool, "k_buffer"):
        return 0
    if pool.head_num == 1 and 0 < heads < ranks and ranks % heads == 0:
        return rank // (ranks // heads)
    return rank


class _Elsewhere:
    """A `Fetched` without pages: the leader has them, or has lost them."""

    def release(self) -> None: ...

    def checked(self, first: int, pages: int) -> Any:
        raise LoadOrderError(
            f"{pages} pages that were promised are not there: the requests of their batch are aborted",
            "raise pin_seconds in linker_extra_config",
        )

    unchecked = checked


_ELSEWHERE: Fetched = _Elsewhere()


class LeadTable(LoadTable):
    """The leader's requests. Promised pages are loaded on every rank."""

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Sequence[int]]]) -> bool:
        """Like `LoadTable.load`. A load whose pages have gone is queued too, and fails, because the other ranks begin
        it."""
        if not super().load(rid, keys, blocks):
            self._queued[rid] = QueuedLoad(rid, _ELSEWHERE, 0, len(keys), blocks())
        return True


class RankTable:
    """Loads on the other ranks, which follow the leader's promises. The same calls as those of `LoadTable`."""

    def __init__(self, counts: Counter[str]) -> None:
        self._queued: dict[str, QueuedLoad] = {}
        self.counts = counts

    def __len__(self) -> int:
        return len(self._queued)

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Sequence[int]]]) -> bool:
        self._queued[rid] = QueuedLoad(rid, _ELSEWHERE, 0, len(keys), blocks())
        return True

    def cancel(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def take(self) -> list[QueuedLoad]:
        queued, self._queued = list(self._queued.values()), {}
        return queued

    def computed(self, keys: Sequence[str]) -> None:
        """Nothing is held."""

    def reset(self) -> None:
        self._queued.clear()


class _Told:
    """An offload that the leader begins and ends."""

    taken = True

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing: the leader waits."""


class RankOffloads(Offloads):
    """See `Offloads`. Each rank reports the places of the pages; the leader stores them."""

    def __init__(self, rank: Rank, engine: CacheEngine | None, counts: Counter[str]) -> None:
        """`engine`: the leader's, on the leader alone."""
        super().__init__(engine, counts)
        self._rank = rank
        self._numbers = itertools.count(1)  # equal on all ranks
        self._places: deque[int] = deque()  # of offloads that are not forgotten

    def start(
        self, hashes: PageHashes | Sequence[str], blocks: Callable[[], Sequence[int]], salt: str, after: Event
    ) -> None:
        """See `Offloads.start`. The other ranks ignore the names of the pages."""
        number = -next(self._numbers)
        self._rank.place(number, blocks, after)
        self._places.append(number)
        engine = self._engine

        def store() -> Stored:
            assert engine is not None, "the leader has one"
            return engine.store(hashes, np.arange(len(hashes)), salt=salt, after=StoreMark(number, b""))

        self._offloads.append(_Told() if engine is None else self._thread.start(store))
        self._counts.update(offloads=1, offloaded_pages=len(hashes))

    def pop(self) -> bool:
        self._rank.passed(self._places.popleft())
        return super().pop()

    def forget(self) -> None:
        """Forget all offloads: after the leader's message behind `reset`, no rank reads a page for them."""
        while self._places:
            self._rank.passed(self._places.popleft())


class RankLoads:
    """Loads of this rank, and on the leader their plans."""

    def __init__(self, rank: Rank, engine: CacheEngine | None, offloads: RankOffloads) -> None:
        """`engine`: the leader's, on the leader alone. `offloads`: of this rank."""
        self._rank = rank
        self._engine = engine
        self._offloads = offloads
        self._planned: dict[int, LayerwiseLoad] = {}  # loads that this rank has not begun
        self._quiet = True  # the leader has reported the end of each flush so far

    def order(self, number: int, queued: Sequence[QueuedLoad]) -> None:
        """On the leader: plan the loads of batch `number`, lease their pages, and send the order to all ranks."""
        if self._engine is None or number < 0:
            return
        order = b""
        try:
            ends = [*itertools.accumulate(one.pages for one in queued)]
            places = [np.arange(end - one.pages, end) for one, end in zip(queued, ends, strict=True)]
            load = self._engine.load_many([(one.hit(), some) for one, some in zip(queued, places, strict=True)])
            order, self._planned[number] = load.order, load
        except GdsCacheError as error:
            log_failure(error)
        finally:
            for one in queued:
                one.fetch.release()
            self._tell(number, order)

    def begin(self, number: int, queued: Sequence[QueuedLoad]) -> LayerwiseLoad:
        """Begin this rank's part, after the current stream's work so far. Raises `RankLostError`."""
        asked = time.monotonic()
        order = self._rank.told(number, ORDER_S)
        for before in [one for one in self._planned if one < number]:  # the pass of that batch was not launched
            self._planned.pop(before).cancel()
        planned = self._planned.pop(number, None)
        if not order:
            if planned is not None:
                planned.cancel()
            waited = f"this rank waited {time.monotonic() - asked:.1f} s of {ORDER_S:g} s"
            raise RankLostError(
                f"rank 0 has promised a load, and has ordered none: {waited}", "see the log of its process"
            )
        return self._rank.load(order, [block for one in queued for block in one.blocks()])

    def reset(self, number: int) -> None:
        """End all loads of this rank, and wait until the leader has ended its work too: it waits for reads of pages on
        all ranks. `number`: as of a batch."""
        for load in self._planned.values():
            load.cancel()
        self._planned.clear()
        self._tell(number, _QUIET)
        quiet = self._rank.told(number, ORDER_S) == _QUIET
        if self._quiet and not quiet:
            _log.error("rank 0 has not said of a flush that its transfers are over: see the log of its process")
        self._quiet = quiet
        self._offloads.forget()

    def _tell(self, number: int, what: bytes) -> None:
        if self._engine is not None:
            with contextlib.suppress(EngineClosedError):  # no rank waits after a close
                self._engine.tell_ranks(number, what)
