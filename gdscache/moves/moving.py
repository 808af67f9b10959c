"""A move that the native library carries out: its begin, its end, and what is late of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gdscache.errors import IOFailedError, ShortIOError, StorageError
from gdscache.moves.base import PLANES, End, Listener, Move, PageStatus, Steps, Wait
from gdscache.native.moves import SHORT, NativeMoves

if TYPE_CHECKING:
    from gdscache.streams import Event

_STATUSES = tuple(PageStatus)


class Carrier(Protocol):
    """Who drives native moves."""

    moves: NativeMoves

    def tell_spans(self) -> None:
        """Tell the timeline what was done so far."""
        ...

    def over(self, number: int) -> Wait:
        """That a move has ended."""
        ...

    def cause(self, number: int) -> BaseException | None:
        """What broke a copy of it; asked for once."""
        ...

    def forget(self, moving: NativeMoving) -> None:
        """Nothing of a move is under way any more. Before, `moving.ended(row)` is told of each late page that ends."""
        ...

    def await_move(self, number: int, group: int, seconds: float) -> bool:
        """Wait until a group of layers is in the planes, or never will be; False when that takes longer."""
        ...


class NativeMoving:
    """See `Moving`. `listener`: of loads and prefetches."""

    read = False
    read_event: Event = None
    broken: BaseException | None = None

    def __init__(
        self, carrier: Carrier, number: int, move: Move, listener: Listener | None, *, tells: bool = True
    ) -> None:
        """`tells`: the carrier tells the listener of layers that are ready."""
        self.number = number
        self._carrier = carrier
        self.move = move
        self._listener = listener
        self._end: End | None = None
        self._lock = threading.Lock()
        self._late: int | None = None  # rows, once that is known
        self._ended: set[int] = set()  # late rows that have ended by now
        self._callback: Callable[[int], None] | None = None
        self.into_planes = not tells and any(way.target == PLANES for way in move.ways)
        self.lands: Callable[[int, float], bool] | None = None if tells else self._wait

    def cancel(self) -> None:
        if self._end is None:
            self._carrier.moves.cancel(self.number)

    def _wait(self, layer: int, seconds: float) -> bool:
        """See `Moving.lands`."""
        group = next((n for n, layers in enumerate(self.move.groups) if layer in layers), 0)
        return self._end is not None or self._carrier.await_move(self.number, group, seconds)

    def end(self) -> Steps[End]:
        if self._end is None:
            yield self._carrier.over(self.number)
            self._end = self._finish()
        return self._end

    def _finish(self) -> End:
        """It has ended: say what became of its pages."""
        outcome = self._carrier.moves.outcome(self.number, len(self.move))
        self._carrier.tell_spans()
        listener = self._listener
        if listener is not None:
            for code in np.unique(outcome.statuses).tolist():
                if _STATUSES[code] is not PageStatus.PENDING:
                    listener.judged(np.flatnonzero(outcome.statuses == code), _STATUSES[code])
            if self.into_planes:
                listener.ready(range(self._carrier.moves.layers), None)
        errors = {row: self._error(code) for row, code in outcome.errors.tolist()}
        end = End(errors, outcome.late.tolist(), self._carrier.cause(self.number))
        with self._lock:
            self._late = len(end.late)
            over = len(self._ended) == self._late
        if over:
            self._carrier.forget(self)
        return end

    def _error(self, code: int) -> StorageError:
        """Why the I/O of a page failed."""
        files = self.move.ways[0].target
        if code == SHORT:
            return ShortIOError(f"a write to {files} moved too few bytes", "the file system is full or limited")
        return IOFailedError(f"a write to {files} failed: {os.strerror(code)}", "see the system log", code)

    def on_end(self, callback: Callable[[int], None]) -> None:
        late = set() if self._end is None else set(self._end.late)
        with self._lock:
            self._callback = callback
            over = [row for row in range(len(self.move)) if row not in late or row in self._ended]
        for row in over:
            callback(row)

    def ended(self, row: int) -> None:
        """Nothing touches a late page any more."""
        with self._lock:
            self._ended.add(row)
            over = len(self._ended) == self._late
            callback = self._callback
        if callback is not None:
            callback(row)
        if over:
            self._carrier.forget(self)
