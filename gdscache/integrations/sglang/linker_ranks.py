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
import logging
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from gdscache.cuda.streams import Event
from gdscache.errors import EngineClosedError, GdsCacheError, RankLostError
from gdscache.integrations.sglang.loads import QueuedLoad
from gdscache.integrations.sglang.planes import PoolPlanes
from gdscache.integrations.sglang.served import Blocks, PoolLoads, SeveralPools, SinglePool
from gdscache.load.handle import LayerwiseLoad
from gdscache.ranks.address import RankAddress
from gdscache.ranks.executor import UNORDERED_S
from gdscache.ranks.rank import Rank
from gdscache.runtime.threads import log_failure

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


class LinkerRanks:
    """This process's ranks, one a pool, and their loads; on the leader the plans of these, too. A failure of one rank
    is that of all."""

    def __init__(self, planes: PoolPlanes, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.leading: SinglePool | SeveralPools | None = None  # on the leader alone
        self._pools, self._layers = [*planes.pools()], planes.places()
        self._planned: dict[int, Sequence[LayerwiseLoad | None]] = {}  # loads that this rank has not begun
        self._quiet = True  # the leader has reported the end of each flush so far

    def place(self, number: int, blocks: Callable[[], Blocks], after: Event) -> None:
        """See `Rank.place`."""
        for name, rank in zip(self._pools, self.ranks, strict=True):
            rank.place(number, lambda name=name: blocks().get(name, ()), after)  # type: ignore[misc]

    def passed(self, number: int) -> None:
        for rank in self.ranks:
            rank.passed(number)

    def left(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for rank in self.ranks:
            rank.left(max(0.0, until - time.monotonic()))

    def order(self, number: int, queued: Sequence[QueuedLoad]) -> None:
        """On the leader: plan the loads of batch `number`, lease their pages, and send the order to all ranks."""
        if self.leading is None or number < 0:
            return
        order = b""
        try:
            loads = self.leading.plan([one.hit() for one in queued])
            self._planned[number] = loads
            order = b"".join(_LENGTH.pack(len(one)) + one for one in [b"" if ld is None else ld.order for ld in loads])
        except GdsCacheError as error:
            log_failure(error)
        finally:
            for one in queued:
                one.release()
            self._tell(number, order)

    def begin(self, number: int, queued: Sequence[QueuedLoad]) -> PoolLoads:
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
        return self.load(orders, queued)

    def load(self, orders: Sequence[bytes], queued: Sequence[QueuedLoad]) -> PoolLoads:
        """Begin the loads of all pools, by their orders; "": a pool has none."""
        given, loads = [one.blocks() for one in queued], list[LayerwiseLoad | None]()
        blocks = [[block for one in given for block in one.get(name, ())] for name in self._pools]
        begun = PoolLoads(loads, self._layers, [*map(len, blocks)])
        with contextlib.ExitStack() as undo:
            undo.callback(begun.wait_until_written)
            for rank, order, own in zip(self.ranks, orders, blocks, strict=True):
                loads.append(rank.load(order, own) if order else None)
            undo.pop_all()
        return begun

    def reset(self, number: int) -> None:
        """End all loads of this rank, and wait until the leader has ended its work too: it waits for reads of pages on
        all ranks. `number`: as of a batch. Behind it, no rank reads a page for an offload."""
        for planned in [*self._planned]:
            self._cancel(planned)
        self._tell(number, _QUIET)
        quiet = self._told(number) == _QUIET
        if self._quiet and not quiet:
            _log.error("rank 0 has not said of a flush that its transfers are over: see the log of its process")
        self._quiet = quiet

    def _cancel(self, number: int) -> None:
        for load in self._planned.pop(number, ()):
            if load is not None:
                load.cancel()

    def _told(self, number: int) -> bytes:
        return self.ranks[0].told(number, ORDER_S)

    def _tell(self, number: int, what: bytes) -> None:
        if self.leading is not None:
            with contextlib.suppress(EngineClosedError):  # no rank waits after a close
                self.leading.engine.tell_ranks(number, what)
