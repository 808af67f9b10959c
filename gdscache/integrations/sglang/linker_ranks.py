"""The linker where SGLang spreads a model over several ranks of one host, each with a scheduler process of its own.

Nothing of SGLang is imported. All ranks call their linkers alike, in the same order. Rank 0's process leads: its engine
has the index, decides what is promised, and plans loads and stores. Every rank has its part of the bytes (`Rank`).

* SGLang intersects what `lookup` answers over the ranks. So the others answer every length, and the leader alone says
  which ones: they need not hear of it, nor wait for it.
* SGLang takes what `load` answers as it is, so it is `True` everywhere: what was promised is pinned on all ranks.
* The order of a batch's loads goes by the ranks' own channel. Each rank waits for it, within a time, when its forward
  pass is about to be launched; without it the batch fails on that rank, and so, by SGLang's reduction, on all.
* A store is over when the leader says so: of what is completed, SGLang takes the least over the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
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
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import log_failure

ORDER_S = 60.0  # that a rank waits for what the leader orders: its own pass waits for the leader's, too
LEFT_S = 60.0  # that the others stay at the end, while the leader stores what it has accepted
_QUIET = b"quiet"
_Made = TypeVar("_Made")
_log = logging.getLogger("gdscache")


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """What a rank tells the leader of itself. `address`: None where it is alone. `model`: see `setup.model_of`."""

    address: RankAddress | None
    model: dict[str, object]


def place_in(group: Any) -> tuple[int, int]:
    """This process's rank in a group of torch.distributed's, and how many there are. None: it is alone."""
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def together(group: Any, work: Callable[[], _Made]) -> list[_Made]:
    """Have `work()` done on every rank; what each has made of it.

    Raises where one has failed, on all of them. Every rank enters the one collective, whatever becomes of its work.
    """
    _, ranks = place_in(group)
    if ranks == 1:
        return [work()]
    made: _Made | None = None
    error: Exception | None = None
    try:
        made = work()
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for what becomes of it
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
    """Which part of the heads a rank of tensor parallelism has. Ranks with equal bytes have one shard.

    Latents (MLA) are on all ranks. With more ranks than heads of keys, consecutive ranks have the same head. `heads`:
    those of keys, of the whole model.
    """
    if not hasattr(pool, "k_buffer"):
        return 0
    if pool.head_num == 1 and 0 < heads < ranks and ranks % heads == 0:
        return rank // (ranks // heads)
    return rank


class _Elsewhere:
    """The pages of a load that the leader has, or of one that it has lost: a `Fetched` with nothing to load."""

    def release(self) -> None:
        """There is nothing."""

    def checked(self, first: int, pages: int) -> Any:
        raise LoadOrderError(
            f"{pages} pages that were promised are not there: the requests of their batch are aborted",
            "raise pin_seconds in linker_extra_config",
        )

    unchecked = checked


_ELSEWHERE: Fetched = _Elsewhere()


class LeadTable(LoadTable):
    """The leader's requests. What it has promised is loaded on every rank."""

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Sequence[int]]]) -> bool:
        """See `LoadTable.load`, but for a load whose pages have gone: that one fails, as the others begin it."""
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
        """The leader does."""


class RankOffloads(Offloads):
    """See `Offloads`. Each rank says where the pages are; the leader stores them."""

    def __init__(self, rank: Rank, engine: CacheEngine | None, counts: Counter[str]) -> None:
        """`engine`: the leader's, on the leader alone."""
        super().__init__(engine, counts)
        self._rank = rank
        self._numbers = itertools.count(1)  # equal on all ranks
        self._places: deque[int] = deque()  # of those that were not forgotten

    def start(
        self, hashes: PageHashes | Sequence[str], blocks: Callable[[], Sequence[int]], salt: str, after: Event
    ) -> None:
        """See `Offloads.start`. On the other ranks the names of the pages are not used."""
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
        """None of them reads a page any more, on any rank: behind `reset`, and what the leader says then."""
        while self._places:
            self._rank.passed(self._places.popleft())


class RankLoads:
    """Loads of this rank, and on the leader their plans."""

    def __init__(self, rank: Rank, engine: CacheEngine | None, offloads: RankOffloads) -> None:
        """`engine`: the leader's, on the leader alone. `offloads`: of this rank."""
        self._rank = rank
        self._engine = engine
        self._offloads = offloads
        self._planned: dict[int, LayerwiseLoad] = {}  # which this rank has not begun
        self._quiet = True  # the leader has said of each flush that it is over

    def order(self, number: int, queued: Sequence[QueuedLoad]) -> None:
        """The leader plans the loads of batch `number`, whose pages it leases, and tells all ranks of them."""
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
        order = self._rank.told(number, ORDER_S)
        planned = self._planned.pop(number, None)
        if not order:
            if planned is not None:
                planned.cancel()
            raise RankLostError("rank 0 has ordered no load where it has promised one", "see the log of its process")
        return self._rank.load(order, [block for one in queued for block in one.blocks()])

    def reset(self, number: int) -> None:
        """All ranks have ended what they do. Return when the leader has, too: it waits for what reads pages anywhere.

        `number`: as of a batch.
        """
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
            with contextlib.suppress(EngineClosedError):  # nor does anybody wait for it then
                self._engine.tell_ranks(number, what)
