"""A move that the native library carries out: its begin, its end, and what is late of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gdscache.errors import IOFailedError, ShortIOError, StorageError
from gdscache.moves.base import End, Listener, Move, PageStatus, Steps, Wait
from gdscache.native.moves import SHORT, NativeMoves

if TYPE_CHECKING:
    from gdscache.streams import Event

_STATUSES = tuple(PageStatus)


class Carrier(Protocol):
    """Who drives native moves."""

    moves: NativeMoves

    def over(self, number: int) -> Wait:
        """That a move has ended."""
        ...

    def cause(self, number: int) -> BaseException | None:
        """What broke a copy of it; asked for once."""
        ...

    def ended(self, moving: NativeMoving, late: int) -> None:
        """A move has ended but for so many late pages. Of each, `moving.ended(row)` is told when its I/O has."""
        ...


class NativeMoving:
    """See `Moving`. `listener`: of loads and prefetches."""

    read = False
    read_event: Event = None
    broken: BaseException | None = None

    def __init__(self, carrier: Carrier, number: int, move: Move, listener: Listener | None) -> None:
        self.number = number
        self._carrier = carrier
        self._move = move
        self._listener = listener
        self._end: End | None = None
        self._lock = threading.Lock()
        self._ended: set[int] = set()  # late rows that have ended by now
        self._callback: Callable[[int], None] | None = None

    def cancel(self) -> None:
        if self._end is None:
            self._carrier.moves.cancel(self.number)

    def end(self) -> Steps[End]:
        if self._end is None:
            yield self._carrier.over(self.number)
            self._end = self._finish()
        return self._end

    def _finish(self) -> End:
        """It has ended: say what became of its pages."""
        outcome = self._carrier.moves.outcome(self.number, len(self._move))
        self._carrier.ended(self, len(outcome.late))
        listener = self._listener
        if listener is not None:
            for code in np.unique(outcome.statuses).tolist():
                if _STATUSES[code] is not PageStatus.PENDING:
                    listener.judged(np.flatnonzero(outcome.statuses == code), _STATUSES[code])
        errors = {row: self._error(code) for row, code in outcome.errors.tolist()}
        cause = self._carrier.cause(self.number)
        return End(errors, outcome.late.tolist(), cause)

    def _error(self, code: int) -> StorageError:
        """Why the I/O of a page failed."""
        files = self._move.ways[0].target
        if code == SHORT:
            return ShortIOError(f"a write to {files} moved too few bytes", "the file system is full or limited")
        return IOFailedError(f"a write to {files} failed: {os.strerror(code)}", "see the system log", code)

    def on_end(self, callback: Callable[[int], None]) -> None:
        late = set() if self._end is None else set(self._end.late)
        with self._lock:
            self._callback = callback
            over = [row for row in range(len(self._move)) if row not in late or row in self._ended]
        for row in over:
            callback(row)

    def ended(self, row: int) -> None:
        """Nothing touches a late page any more."""
        with self._lock:
            self._ended.add(row)
            callback = self._callback
        if callback is not None:
            callback(row)
