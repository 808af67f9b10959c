"""A load, or another move, as one rank carries it out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.cuda.streams import Event, Landed
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import CODES, STATUSES, LoadReport
from gdscache.moves import End, Listener, Move, Moving, PageStatus, Steps, Way
from gdscache.moves.native import NativeExecutor
from gdscache.pages.layout import is_plain
from gdscache.runtime.threads import Flag

PENDING, LOADED = CODES[PageStatus.PENDING], CODES[PageStatus.LOADED]


class Verdicts:
    """Collects the statuses of a move's pages, which begin with `status`. Passes the layers of a load on to `handle`,
    and ends it. `places`: in the load, of the move's pages."""

    def __init__(
        self,
        pages: int,
        status: PageStatus = PageStatus.PENDING,
        handle: LayerwiseLoad | None = None,
        places: Int64Array | slice = slice(None),
    ) -> None:
        self.statuses: npt.NDArray[np.uint8] = np.full(pages, CODES[status], np.uint8)
        self.rows = np.arange(pages)
        self.begun = time.monotonic()
        self.handle, self._places = handle, places

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        self.statuses[rows] = CODES[status]

    def ready(self, layers: range, event: Event) -> None:
        if self.handle is not None:
            self.handle.signal(layers, event)

    def end(self) -> None:
        """The move has ended, and with it the load, if it is one's. Pages without a status are `ABORTED`."""
        handle, seconds = self.handle, time.monotonic() - self.begun
        if handle is None:
            return
        statuses, at = np.full(sum(part.pages for part in handle.parts), PENDING, np.uint8), 0
        statuses[self._places] = self.statuses
        statuses[statuses == PENDING] = CODES[PageStatus.ABORTED]
        for part in handle.parts:
            mine, at = statuses[at : at + part.pages], at + part.pages
            bad = np.flatnonzero(mine != LOADED)
            good = int(bad[0]) if len(bad) else part.pages
            pages = tuple(STATUSES[code] for code in mine.tolist())
            part.report = LoadReport(good * handle.layout.page_tokens, pages, {}, seconds)
        handle.signal(range(handle.layout.n_layers), None)
        handle.released()
        handle.end(None)


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
