"""The linker for a model over several ranks of one host, each with its own scheduler process.

All ranks call their linkers alike, in the same order. Rank 0's process leads: its engine has the index, decides the
promised pages, and plans loads and stores. Every rank has its part of the bytes (`Rank`).

* SGLang intersects the ranks' answers of `lookup`. So the other ranks answer every length, and the leader decides
  without a message.
* SGLang takes each rank's own answer of `load`. It is `True` everywhere: promised pages are pinned on all ranks.
* Orders of loads use the ranks' own channel. Each rank waits for its order, up to a limit, before it launches its
  forward pass. Without it the batch fails on that rank, and by SGLang's reduction on all.
* What else a rank has to know of the tiers has connections of its own (`Agreement`), since all ranks have to have the
  same answer, also when a rank's channel is lost.
* The leader says when a store is over: SGLang takes the least number of completed stores over the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdscache.cuda.streams import Event
from gdscache.errors import EngineClosedError, GdsCacheError, LoadOrderError, RankLostError
from gdscache.integrations.fetching import Fetched
from gdscache.integrations.handing import HandedStore, Stored
from gdscache.integrations.sglang.loads import LoadTable, QueuedLoad
from gdscache.integrations.sglang.moves import Offloads
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.sglang.served import AllRead, Blocks, LinkedStore, SeveralPools, SinglePool
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.report import LoadReport
from gdscache.moves import PageStatus
from gdscache.pages.keys import PageHashes
from gdscache.ranks.address import RankAddress, StoreMark
from gdscache.ranks.executor import UNORDERED_S
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import in_turn, log_failure

ORDER_S = UNORDERED_S  # a rank's wait for the leader's orders: its own pass waits for the leader's too
LEFT_S = 60.0  # the other ranks' stay at the end, while the leader stores its accepted pages
_QUIET = b"quiet"
_LENGTH = struct.Struct("<Q")
_log = logging.getLogger("gdscache")


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """A rank's report to the leader. `addresses`: one a pool; none for a single rank. `numbers`: see `Agreement`.
    `model`: see `setup.model_of`."""

    addresses: Sequence[RankAddress]
    numbers: RankAddress
    model: dict[str, object]


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

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Blocks]]) -> bool:
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

    def load(self, rid: str, keys: Sequence[str], blocks: Callable[[], Callable[[], Blocks]]) -> bool:
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


class PoolRanks:
    """This process's ranks, one a pool. A failure of one is that of all."""

    def __init__(self, planes: PoolPlanes, ranks: Sequence[Rank]) -> None:
        self.pools, self.ranks = planes.pools(), ranks
        self.layers: dict[int, list[tuple[int, int]]] = {}  # of the model: pool, and layer of the pool
        at = {place: (p, n) for p, pool in enumerate(self.pools) for n, place in enumerate(pool.layers)}
        places = planes.layers or {layer: [layer] for layer in range(len(planes.tensors))}
        for layer, some in places.items():
            self.layers[layer] = [at[place] for place in some]

    def load(self, orders: Sequence[bytes], queued: Sequence[QueuedLoad]) -> RankedLoad:
        given = [one.blocks() for one in queued]
        loads: list[LayerwiseLoad | None] = []
        filled: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: AllRead([load for load in loads if load is not None]).synchronize())
            for pool, rank, order in zip(self.pools, self.ranks, orders, strict=True):
                blocks = [block for one in given for block in one.get(pool.name, ())]
                filled.append(len(blocks))
                loads.append(rank.load(order, blocks) if order else None)
            undo.pop_all()
        return RankedLoad(loads, self.layers, [one.pages for one in queued], filled)

    def place(self, number: int, blocks: Callable[[], Blocks], after: Event) -> None:
        """See `Rank.place`."""
        for pool, rank in zip(self.pools, self.ranks, strict=True):
            rank.place(number, functools.partial(_of_pool, blocks, pool.name), after)

    def passed(self, number: int) -> None:
        for rank in self.ranks:
            rank.passed(number)

    def left(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for rank in self.ranks:
            rank.left(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        in_turn(*(rank.close for rank in self.ranks))


def _of_pool(blocks: Callable[[], Blocks], name: str) -> Sequence[int]:
    return blocks().get(name, ())


class RankedLoad:
    """A load of this rank in all pools. Layers are the model's."""

    def __init__(
        self,
        loads: Sequence[LayerwiseLoad | None],
        layers: Mapping[int, Sequence[tuple[int, int]]],
        pages: Sequence[int],
        filled: Sequence[int],
    ) -> None:
        """`pages`: of each request. `filled`: the blocks that each pool's load has to fill."""
        self._loads, self._layers, self._pages, self._filled = loads, layers, pages, filled
        self.release_event = AllRead([load for load in loads if load is not None])

    def wait(self, layer: int) -> None:
        for pool, local in self._layers.get(layer, ()):
            load = self._loads[pool]
            if load is not None:
                load.wait(local)

    def results(self) -> list[LoadReport]:
        """All pages are loaded, or none counts: SGLang aborts a batch as a whole. An order may have fewer pages than
        were promised: some were dropped meanwhile, and those behind them lie in other blocks."""
        reports = [load.results() if load is not None else [] for load in self._loads]
        loaded = [[status is PageStatus.LOADED for one in some for status in one.pages] for some in reports]
        whole = all(all(good) and len(good) == n for good, n in zip(loaded, self._filled, strict=True))
        status = PageStatus.LOADED if whole else PageStatus.ABORTED
        seconds = max((one.seconds for some in reports for one in some), default=0.0)
        return [LoadReport(0, (status,) * pages, {}, seconds) for pages in self._pages]


class RankOffloads(Offloads):
    """See `Offloads`. Each rank reports the places of the pages; the leader stores them."""

    def __init__(self, ranks: PoolRanks, leading: SinglePool | SeveralPools | None, counts: Counter[str]) -> None:
        """`leading`: the engine of all pools, on the leader alone."""
        super().__init__(None, counts)
        self._ranks, self._leading = ranks, leading
        self._numbers = itertools.count(1)  # equal on all ranks
        self._places: deque[int] = deque()  # of offloads that are not forgotten

    def start(self, hashes: PageHashes | Sequence[str], blocks: Callable[[], Blocks], salt: str, after: Event) -> None:
        """See `Offloads.start`. The other ranks ignore the names of the pages."""
        number = -next(self._numbers)
        self._ranks.place(number, blocks, after)
        self._places.append(number)
        leading = self._leading

        def store() -> Stored:
            assert leading is not None, "the leader stores"
            return leading.store(hashes, blocks(), salt=salt, after=StoreMark(number, b""))

        if leading is not None:
            handed = self._thread.start(store)
        else:  # the leader begins and ends it
            handed = HandedStore()
            handed.hand_over(lambda: LinkedStore([]))
        self._offloads.append(handed)
        self._counts.update(offloads=1, offloaded_pages=len(hashes))

    def pop(self) -> bool:
        self._ranks.passed(self._places.popleft())
        return super().pop()

    def forget(self) -> None:
        """Forget all offloads: after the leader's message behind `reset`, no rank reads a page for them."""
        while self._places:
            self._ranks.passed(self._places.popleft())


class RankLoads:
    """Loads of this rank, and on the leader their plans."""

    def __init__(self, ranks: PoolRanks, leading: SinglePool | SeveralPools | None, offloads: RankOffloads) -> None:
        """`leading`: on the leader alone. `offloads`: of this rank."""
        self._ranks, self._leading = ranks, leading
        self._offloads = offloads
        self._planned: dict[int, Sequence[LayerwiseLoad | None]] = {}  # loads that this rank has not begun
        self._quiet = True  # the leader has reported the end of each flush so far

    def order(self, number: int, queued: Sequence[QueuedLoad]) -> None:
        """On the leader: plan the loads of batch `number`, lease their pages, and send the order to all ranks."""
        if self._leading is None or number < 0:
            return
        order = b""
        try:
            loads = self._leading.plan([one.hit() for one in queued])
            self._planned[number] = loads
            order = b"".join(_LENGTH.pack(len(one)) + one for one in [b"" if ld is None else ld.order for ld in loads])
        except GdsCacheError as error:
            log_failure(error)
        finally:
            for one in queued:
                one.fetch.release()
            self._tell(number, order)

    def begin(self, number: int, queued: Sequence[QueuedLoad]) -> RankedLoad:
        """Begin this rank's part, after the current stream's work so far. Raises `RankLostError`."""
        asked = time.monotonic()
        order = self._told(number)
        for before in [one for one in self._planned if one < number]:  # the pass of that batch was not launched
            self._cancel(before)
        if not order:
            self._cancel(number)
            waited = f"this rank waited {time.monotonic() - asked:.1f} s of {ORDER_S:g} s"
            raise RankLostError(
                f"rank 0 has promised a load, and has ordered none: {waited}", "see the log of its process"
            )
        self._planned.pop(number, None)
        orders, at = list[bytes](), 0
        while at < len(order):
            (length,) = _LENGTH.unpack_from(order, at)
            at += _LENGTH.size + length
            orders.append(order[at - length : at])
        return self._ranks.load(orders, queued)

    def reset(self, number: int) -> None:
        """End all loads of this rank, and wait until the leader has ended its work too: it waits for reads of pages on
        all ranks. `number`: as of a batch."""
        for planned in [*self._planned]:
            self._cancel(planned)
        self._tell(number, _QUIET)
        quiet = self._told(number) == _QUIET
        if self._quiet and not quiet:
            _log.error("rank 0 has not said of a flush that its transfers are over: see the log of its process")
        self._quiet = quiet
        self._offloads.forget()

    def _cancel(self, number: int) -> None:
        for load in self._planned.pop(number, ()):
            if load is not None:
                load.cancel()

    def _told(self, number: int) -> bytes:
        return self._ranks.ranks[0].told(number, ORDER_S)

    def _tell(self, number: int, what: bytes) -> None:
        if self._leading is not None:
            with contextlib.suppress(EngineClosedError):  # no rank waits after a close
                self._leading.tell_ranks(number, what)
