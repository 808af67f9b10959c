"""A load or a prefetch of a rank with pages in packed extents and pages that do not fit into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from gdscache.arrays import Int64Array
from gdscache.cuda.streams import Event, Landed
from gdscache.moves import End, Listener, Move, Moving, PageStatus, Steps, Way
from gdscache.moves.native import NativeExecutor
from gdscache.pages.layout import is_plain
from gdscache.runtime.threads import Flag


def plain_rows(move: Move) -> Int64Array:
    """The rows of a move whose pages lie in spaces of plain pages."""
    plain = [_is_plain(way) for way in move.ways]
    return np.flatnonzero(np.repeat(plain, [len(way) for way in move.ways]))


class _Some:
    """Hears of some rows of a move. `rows`: their places in it."""

    def __init__(self, whole: Listener, rows: Int64Array, *, layers: bool) -> None:
        self.rows = rows
        self._whole, self._layers = whole, layers

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        self._whole.judged(self.rows[rows], status)

    def ready(self, layers: range, event: Event) -> None:
        if self._layers:
            self._whole.ready(layers, event)


class MixedMoving:
    """The plain pages, which are few, move first; when they are there the others follow, layer by layer. See
    `Moving`."""

    lands: Callable[[int, float], Landed | None] | None = None

    def __init__(
        self,
        packed: NativeExecutor,
        plain: NativeExecutor,
        move: Move,
        rows: Int64Array,
        after: Sequence[Event],
        listener: Listener,
    ) -> None:
        """`rows`: those of plain pages."""
        self._packed, self._after, self._listener = packed, after, listener
        self._until = time.monotonic() + move.seconds
        self._rest = np.setdiff1d(np.arange(len(move)), rows)
        self._move = Move(move.priority, _ways(move, plain=False), move.seconds, move.groups, move.number)
        self._cancelled = Flag()
        first = Move(move.priority, _ways(move, plain=True), move.seconds, number=move.number)
        begun: Moving = plain.begin(first, after, _Some(listener, rows, layers=False))
        self._moving = [(begun, rows)]

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        raise AssertionError("a rank's moves come whole")

    def cancel(self) -> None:
        self._cancelled.set()
        for moving, _ in [*self._moving]:
            moving.cancel()

    def end(self) -> Steps[End]:
        plain = yield from self._moving[0][0].end()
        self._move.seconds = max(0.0, self._until - time.monotonic())
        try:
            moving = self._packed.begin(self._move, self._after, _Some(self._listener, self._rest, layers=True))
        except Exception as error:  # noqa: BLE001 - late plain pages have to be told of after any error
            packed = End(error=error)
        else:
            self._moving.append((moving, self._rest))
            if self._cancelled.is_set():  # it still reads what is to stay in memory
                moving.cancel()
            packed = yield from moving.end()
        ends = (plain, self._moving[0][1]), (packed, self._rest)
        errors = {int(rows[row]): error for end, rows in ends for row, error in end.errors.items()}
        late = sorted(int(rows[row]) for end, rows in ends for row in end.late)
        return End(errors, late, plain.error or packed.error)

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Behind `end`: have `callback(row)` called when nothing touches the row's slots any more."""
        for moving, rows in self._moving:
            moving.on_end(lambda row, rows=rows: callback(int(rows[row])))  # type: ignore[misc]


def _ways(move: Move, *, plain: bool) -> tuple[Way, ...]:
    return tuple(way for way in move.ways if _is_plain(way) == plain)


def _is_plain(way: Way) -> bool:
    return is_plain(way.source) or is_plain(way.target)
