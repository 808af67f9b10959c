"""An executor whose moves are carried out by the ranks of an engine, each with its part of the bytes.

A move among the cache's own spaces goes to the ranks at once. A move into the planes goes by the caller, in the order
of its own steps: `LayerwiseLoad.order` has the bytes that each rank begins it with (`Rank.load`). The ranks' verdicts
are joined: a page is good if it is good on all of them.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.cuda.streams import Event, Landed
from gdscache.errors import InvalidValueError, RankLostError
from gdscache.extents import SlotMemory
from gdscache.load.plan import CODES, STATUSES
from gdscache.moves import PLANES, End, Listener, Move, Orders, PageStatus, Priority, Spent, Steps, Way
from gdscache.moves.native import ThreadDriver, write_error
from gdscache.ranks import wire
from gdscache.ranks.address import StoreMark
from gdscache.ranks.leader import GRACE_S, Link, RankSet
from gdscache.ranks.loads import LOADED
from gdscache.ranks.wire import Fields
from gdscache.runtime.threads import Flag

_SPENT = 64
# Seconds to wait for a load without a deadline, or whose order the caller does not pass on. Its pages were promised,
# and one process may have stopped: engines end a step that takes longer (SGLang's --watchdog-timeout is 300 s).
UNORDERED_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of a move that one rank moves; None: all rows."""

    link: Link
    rows: Int64Array | None = None

    def numbers(self, count: int) -> Int64Array:
        return np.arange(count) if self.rows is None else self.rows


class RanksMoving:
    """Many methods: those of `Moving`, and one for each answer of a rank."""

    lands: Callable[[int, float], Landed | None] | None = None

    def __init__(self, executor: RanksExecutor, number: int, move: Move, listener: Listener | None) -> None:
        self.number = number
        self.move = move
        self.listener = listener
        self.into_planes = any(way.target == PLANES for way in move.ways)
        self._untold = self.into_planes
        self._ordered: bool | None = None
        self._refused: int | None = None  # the status of all rows, if no rank gets the move
        self._executor = executor
        self._ways = [*move.ways]
        self._lock = threading.Lock()
        self._over = Flag()
        self._waiting: dict[int, _Part] = {}  # by rank: parts without an answer
        self._parts: dict[int, _Part] = {}  # all parts
        self._statuses: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._failed: dict[int, int] = {}  # row -> errno
        self._late: dict[int, set[int]] = {}  # by rank: late rows that it may still touch
        self._unfit: set[int] = set()  # rows that do not fit into a packed extent on some rank
        self._why = ""
        self._spent: Spent | None = None  # of the slowest rank
        self._end: End | None = None
        self._callback: Callable[[int], None] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._ways))

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        self._executor.expect(ways)
        with self._lock:
            self._ways += ways
            begun = len(self._waiting) == len(self._parts)  # else a rank has answered a cancel
            status = LOADED if begun else CODES[PageStatus.ABORTED]
            more = np.full(len(self) - len(self._statuses), status, np.uint8)
            self._statuses = np.concatenate([self._statuses, more])

    def cancel(self) -> None:
        for part in [*self._waiting.values()] if self._end is None else ():
            part.link.channel.send(wire.pack({"do": "cancel", "id": self.number}))

    def end(self) -> Steps[End]:
        if self._end is None:
            yield self._await
            self._end = self._finish()
            if self._end.error is not None and self.listener is None:
                raise self._end.error
        return self._end

    def on_end(self, callback: Callable[[int], None]) -> None:
        with self._lock:
            self._callback = callback
            touched = self._touched()
        for row in range(len(self)):
            if row not in touched:
                callback(row)

    # -- for its executor ----------------------------------------------------------------------------------------------

    def whole(self) -> Move:
        return dataclasses.replace(self.move, ways=tuple(self._ways), open=False)

    @property
    def known(self) -> bool:
        return self._end is not None

    def lose(self) -> Sequence[int]:
        """No caller waits for it: wait for its end, and return its late rows."""
        self.listener = None
        self._await()
        self._end = self._finish()
        return self._end.late

    def begun(self, parts: Sequence[_Part]) -> None:
        """These ranks get it: now, or, for a move into planes, once it is `ordered`."""
        self._parts = {part.link.rank: part for part in parts}
        self._waiting = dict(self._parts)
        self._statuses = np.full(len(self), LOADED, np.uint8)

    def ordered(self) -> bool:
        """The ranks will get it, whole. False if it is over: the slots that it names may belong to others; or if a rank
        has answered, to a cancel: the others were told of that, too. The same whenever the caller asks for the order:
        for the next rank, while the first ones answer."""
        with self._lock:
            if self._ordered is None:
                unheard = len(self._waiting) == len(self._parts)
                self._ordered = unheard and not self._over.is_set() and self._end is None
                if self._ordered:
                    self._statuses = np.full(len(self), LOADED, np.uint8)
                    self._untold = False
            return self._ordered

    def refuse(self, status: PageStatus) -> None:
        self._refused = CODES[status]
        self._why = status.value
        self._over.set()

    def answered(self, link: Link, fields: Fields) -> None:
        with self._lock:
            part = self._waiting.pop(link.rank, None)
            if part is None:
                return
            rows = part.numbers(len(self))
            if self._end is None:
                self._join(part, rows, fields)
            freed = self._touches(link, {int(rows[row]) for row in fields["late"]})
            over = not self._waiting
        self._tell(freed)
        if over:
            self._over.set()

    def row_ended(self, link: Link, row: int) -> None:
        with self._lock:
            ended = int(self._parts[link.rank].numbers(len(self))[row])
            freed = self._touches(link, self._late.get(link.rank, set()) - {ended})
        self._tell(freed)

    def lost(self, link: Link) -> None:
        """A rank's process has ended, and touches nothing any more.

        A move that no rank was told of is over. If the caller told only some of the ranks, the others may never hear of
        it, so all are told to cancel, and answer at once.
        """
        with self._lock:
            if self._untold and not self._over.is_set():
                self._waiting.clear()
                self.refuse(PageStatus.RANK_LOST)
        self.answered(link, {"why": f"rank {link.rank} {link.lost}", "failed": (), "late": ()})
        if self.into_planes or self.move.priority is Priority.STORE:
            self.cancel()
        with self._lock:
            freed = self._touches(link, set())
        self._tell(freed)

    def _touched(self) -> set[int]:
        return set[int]().union(*self._late.values())

    def _touches(self, link: Link, rows: set[int]) -> set[int]:
        """From now on a rank may touch only these rows. Returns the rows that no rank touches any more. The lock is
        held."""
        before, self._late[link.rank] = self._touched(), rows
        return before - self._touched()

    def _join(self, part: _Part, rows: Int64Array, fields: Fields) -> None:
        """Join a rank's statuses of its rows with the others': a page is good if it is good on all of them."""
        mine = self._statuses[rows]
        if not fields.get("begun", True):  # its order came behind the cancel, or does not come
            self._statuses[rows] = _worse(mine, CODES[PageStatus.ABORTED])
            self._why = self._why or f"rank {part.link.rank} has not begun it"
        elif fields["why"]:
            self._why = self._why or str(fields["why"])
            self._statuses[rows] = _worse(mine, CODES[PageStatus.IO_ERROR])
        elif self.move.priority is Priority.STORE:
            self._executor.keep_sums(self._ways, rows, part.link.shard, fields["sums"])
            self._unfit.update(rows[fields["unfit"]].tolist())
        elif self.listener is not None:
            self._statuses[rows] = _worse(mine, fields["statuses"])
        if spent := fields.get("spent"):
            its, before = Spent(*spent), self._spent or Spent(0.0, waited=False)
            self._spent = Spent(max(its.seconds, before.seconds), its.waited or before.waited)
        for row, code in fields["failed"]:
            self._failed.setdefault(int(rows[row]), int(code))

    def _tell(self, rows: Iterable[int]) -> None:
        callback = self._callback
        if callback is not None:
            for row in rows:
                callback(row)
        with self._lock:
            over = self._end is not None and not self._waiting and not self._touched()
        if over:
            self._executor.forget(self)

    def _await(self) -> None:
        """Wait for all ranks' answers; a rank without one, some time after the deadline, is away."""
        seconds = UNORDERED_S if math.isinf(self.move.seconds) else self.move.seconds
        if self._over.wait_awake(seconds + GRACE_S):
            return
        self.cancel()
        if not self._over.wait_awake(GRACE_S):
            for part in [*self._waiting.values()]:
                self._executor.ranks.late(part.link, self.number, self._waiting)

    def _finish(self) -> End:
        with self._lock:
            statuses = self._statuses
            if self._refused is not None:
                statuses = np.full(len(self), self._refused, np.uint8)
            for rank, part in self._waiting.items():  # ranks that have not answered
                self._late[rank] = {*part.numbers(len(self)).tolist()}
                self._why = self._why or f"rank {rank} has not answered in time"
            touched = self._touched()
            late, over = sorted(touched), not touched and not self._waiting
            statuses[late] = _worse(statuses[late], CODES[PageStatus.DEADLINE])
            failed = {row: code for row, code in self._failed.items() if row not in touched}
            if self._why and self.move.priority is Priority.DEMOTION:
                failed = {row: failed.get(row, errno.EIO) for row in range(len(self)) if row not in touched}
        listener, error = self.listener, None
        if listener is not None:
            for code in sorted(set(statuses.tobytes())):
                listener.judged(np.flatnonzero(statuses == code), STATUSES[code])
            if self.into_planes:
                listener.ready(range(self._executor.layers), None)
        elif self.move.priority is Priority.STORE and (self._why or late):
            error = RankLostError(f"a store broke off: {self._why or 'a rank is late'}", "see the log of its process")
        if over:
            self._executor.forget(self)
        files = self.move.ways[0].target
        errors = {row: write_error(files, code, self._why) for row, code in failed.items()}
        return End(errors, late, error, self._spent, unfit=sorted(self._unfit - touched))


class RanksExecutor(ThreadDriver):
    """See `Executor`. `memories`: the checksums of the slots in the ranks' memories, by name."""

    def __init__(
        self, ranks: RankSet, memories: Mapping[str, SlotMemory], layers: int, stop: Callable[[str], object]
    ) -> None:
        """`stop(why)`: another process may use a slab."""
        super().__init__(memories)
        self.ranks = ranks
        self.layers = layers
        self._numbers = itertools.count(1)
        self._marks = itertools.count(1)
        self._under_way: dict[int, RanksMoving] = {}
        self._marking = threading.Lock()
        self._users: Counter[int] = Counter()  # users of each mark
        self._spent: list[int] = []  # marks without users
        self._closed = False
        self._stop = stop
        ranks.heard = self._heard
        ranks.gone = self._gone

    def begin(self, move: Move, after: Sequence[Any] = (), listener: Listener | None = None) -> RanksMoving:
        moving = RanksMoving(self, next(self._numbers), move, listener)
        if listener is not None:
            self.expect(move.ways)
        absent = self.ranks.absent
        if absent == PageStatus.RANK_AWAY.value and moving.into_planes and math.isinf(move.seconds):
            absent = ""  # the pages were promised: the rank begins when it gets the caller's order
        if absent or self._closed:
            moving.refuse(PageStatus(absent) if absent else PageStatus.ABORTED)
            return moving
        parts = self._parts(move)
        moving.begun(parts)
        self._under_way[moving.number] = moving
        if not moving.into_planes:
            marks = [mark.number for mark in after if isinstance(mark, StoreMark)]
            self._send(moving, parts, marks)
        for part in parts:
            if part.link.lost:  # lost before the move was registered: `_gone` has missed it
                moving.lost(part.link)
        return moving

    def behind(self, after: object) -> None:
        """None: streams are the ranks' own."""
        if after is not None:
            raise InvalidValueError(
                "after is given to an engine of ranks", "have each rank's stream wait before its order"
            )

    def mark(self, after: object) -> StoreMark:
        """The mark of one or several stores that are about to begin. `after` may be a mark made here that still has a
        user. Raises `InvalidValueError` for an event."""
        if isinstance(after, StoreMark):
            with self._marking:
                self._users[after.number] += 1
            return after
        self.behind(after)
        number = next(self._marks)
        with self._marking:
            self._users[number] = 1
        return StoreMark(number, wire.pack({"store": number, "leader": self.ranks.leader}))

    def passed(self, mark: object) -> None:
        """One user needs the mark no more; without users, the ranks forget it."""
        if not isinstance(mark, StoreMark):
            return
        spent: list[int] = []
        with self._marking:
            self._users[mark.number] -= 1
            if not self._users[mark.number]:
                del self._users[mark.number]
                self._spent.append(mark.number)
            if len(self._spent) >= _SPENT:
                spent, self._spent = self._spent, []
        for link in self.ranks.links if spent else ():
            link.channel.send(wire.pack({"do": "forget", "marks": spent}))

    @property
    def orders(self) -> Orders | None:
        """See `Rank.load`: the requests, each with its number of pages and its first token, and the move that brings
        them."""
        return self._order

    def _order(
        self, moving: RanksMoving | None, requests: Sequence[tuple[int, int]], about: Mapping[str, Any]
    ) -> bytes:
        told = None
        if moving is not None and moving.ordered():
            assert moving.listener is not None, "a load has a listener"
            told = {**wire.described(moving.whole()), "id": moving.number, "places": moving.listener.rows}
        return wire.pack({**about, "leader": self.ranks.leader, "requests": [*requests], "move": told})

    def keep_sums(self, ways: Sequence[Way], rows: Int64Array, shard: int, sums: npt.NDArray[Any]) -> None:
        at, columns = 0, wire.columns(shard, self.layers)
        for way in ways:
            here = np.flatnonzero((rows >= at) & (rows < at + len(way)))
            self._memories[way.target].checksums[way.targets[rows[here] - at], columns] = sums[here]
            at += len(way)

    def reads_queued(self) -> Event:
        """None: the moves of a store have ended when it asks."""
        return None

    def _parts(self, move: Move) -> list[_Part]:
        """The rows for each rank. A move with planes goes whole to every rank. Otherwise, among ranks with equal bytes,
        the first writes files, and a slot of memory is filled by rank number (slot modulo their count)."""
        ranks = self.ranks
        if len(ranks.links) == ranks.shards or any(way.target == PLANES for way in move.ways):
            return [_Part(link) for link in ranks.links]
        if move.priority is Priority.DEMOTION:
            return [_Part(link) for link in ranks.owners]
        slots = np.concatenate([way.targets for way in move.ways])
        found = []
        for shard in range(ranks.shards):
            same = ranks.of_shard(shard)
            for n, link in enumerate(same):
                rows = np.flatnonzero(slots % len(same) == n)
                if len(rows):
                    found.append(_Part(link, rows))
        return found

    def _send(self, moving: RanksMoving, parts: Sequence[_Part], marks: Sequence[int]) -> None:
        summed = any(way.sums is not None for way in moving.move.ways)
        packed: dict[int, bytes] = {}  # by shard
        for part in parts:
            shard = part.link.shard if summed else 0
            message = packed.get(shard) if part.rows is None else None
            if message is None:
                fields = wire.described(_share_of(moving.move, part.rows, part.link.shard, self.layers))
                message = wire.pack({"do": "move", "id": moving.number, "after": [*marks], "move": fields})
                if part.rows is None:
                    packed[shard] = message
            part.link.channel.send(message)

    def _heard(self, link: Link, fields: Fields) -> None:
        if "lock_lost" in fields:
            self._stop(fields["lock_lost"])
            return
        number = fields.get("ended") or fields.get("of", 0)
        moving = self._under_way.get(number)
        if moving is None:
            return
        if "ended" in fields:
            moving.answered(link, fields)
            self.ranks.answered(link, number)
        else:
            moving.row_ended(link, fields["row"])

    def _gone(self, link: Link) -> None:
        for moving in [*self._under_way.values()]:
            moving.lost(link)

    def forget(self, moving: RanksMoving) -> None:
        self._under_way.pop(moving.number, None)

    def end_lost(self) -> Iterator[tuple[RanksMoving, Sequence[int]]]:
        for moving in [*self._under_way.values()]:
            if not moving.known:
                moving.cancel()
                yield moving, moving.lose()

    def stop(self) -> None:
        self._closed = True

    def close(self) -> None:
        self.stop()
        self.ranks.close()


def _worse(statuses: npt.NDArray[np.uint8], others: npt.NDArray[np.uint8] | int) -> npt.NDArray[np.uint8]:
    """The first cause against each page. `CANCELLED` is none: that rank has read the page, and it is good."""
    good = (statuses == LOADED) | (statuses == CODES[PageStatus.CANCELLED])
    worse: npt.NDArray[np.uint8] = np.where(good & (others != LOADED), others, statuses).astype(np.uint8)
    return worse


def _share_of(move: Move, rows: Int64Array | None, shard: int, layers: int) -> Move:
    ways, at, columns = [], 0, wire.columns(shard, layers)
    for way in move.ways:
        mine = slice(None) if rows is None else rows[(rows >= at) & (rows < at + len(way))] - at
        if isinstance(mine, slice) or len(mine):
            places = None if way.places is None else way.places[mine]
            sums = None if way.sums is None else way.sums[mine][:, columns]
            ways.append(Way(way.source, way.target, way.sources[mine], way.targets[mine], way.through, places, sums))
        at += len(way)
    return Move(move.priority, tuple(ways), move.seconds, move.groups, move.number)
