"""A move that the native library carries out: its begin, its end, and its late pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gdscache.cuda.streams import Landed
from gdscache.errors import DeviceError, IOFailedError, NativeCallError, ShortIOError, StorageError
from gdscache.moves.base import PLANES, End, Listener, Move, PageStatus, Steps, Wait, Way
from gdscache.moves.library import NativeMoves
from gdscache.native import SHORT, error_of

_STATUSES = tuple(PageStatus)
_UNFIT = _STATUSES.index(PageStatus.UNFIT)


class Carrier(Protocol):
    """Drives native moves."""

    moves: NativeMoves

    def tell_spans(self) -> None: ...

    def expect(self, ways: Sequence[Way]) -> None:
        """Note the checksums of pages that are read into a memory to stay there."""
        ...

    def over(self, number: int) -> Wait: ...

    def forget(self, moving: NativeMoving) -> None:
        """The move and its late pages have ended; `moving.ended(row)` was called for each late page."""
        ...

    def await_move(self, number: int, group: int, seconds: float) -> Landed | None:
        """Wait until the copies of a group of layers are queued, or never will be; None after `seconds`."""
        ...


class NativeMoving:
    """See `Moving`. Loads and prefetches have a `listener`."""

    def __init__(
        self, carrier: Carrier, number: int, move: Move, listener: Listener | None, *, in_order: bool = False
    ) -> None:
        """`in_order`: moves' copies run in the order of their begin, so reads of the planes by one come after all
        earlier ones."""
        self.number = number
        self._carrier = carrier
        self.move = move
        self._rows = len(move)
        self._listener = listener
        self._end: End | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._late: int | None = None  # late rows, once known
        self._ended: set[int] = set()
        self._callback: Callable[[int], None] | None = None
        self.into_planes = any(way.target == PLANES for way in move.ways)
        known = self.into_planes or (in_order and any(way.source == PLANES for way in move.ways))
        self.lands: Callable[[int, float], Landed | None] | None = self._wait if known else None

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        self._carrier.expect(ways)
        self._carrier.moves.extend(self.number, ways, last=last)
        self._rows += sum(map(len, ways))

    def cancel(self) -> None:
        if self._end is None:
            self._cancelled = True
            self._carrier.moves.cancel(self.number)

    def _wait(self, layer: int, seconds: float) -> Landed | None:
        if self._end is not None:
            return Landed(None)
        group, layers = next(((n, some) for n, some in enumerate(self.move.groups) if layer in some), (0, range(0)))
        try:
            landed = self._carrier.await_move(self.number, group, seconds)
        except NativeCallError:
            if not self.known:
                raise
            return Landed(None)  # `close` has ended the move and the executor meanwhile
        return None if landed is None else Landed(landed.event, layers)

    def end(self) -> Steps[End]:
        if self._end is None:
            yield self._carrier.over(self.number)
            self._end = self._finish()
            if self._end.error is not None and self._listener is None:
                raise self._end.error
        return self._end

    @property
    def known(self) -> bool:
        return self._end is not None

    def lose(self) -> Sequence[int]:
        """The move has ended and no caller waits for it. Returns its late rows."""
        self._listener = None
        self._end = self._finish()
        return self._end.late

    def _finish(self) -> End:
        statuses, failed, late, why = self._carrier.moves.outcome(self.number)
        self._carrier.tell_spans()
        listener, codes = self._listener, sorted(set(statuses.tobytes()))
        if listener is not None:
            for code in codes:
                if _STATUSES[code] is not PageStatus.PENDING:
                    listener.judged(np.flatnonzero(statuses == code), self._told(_STATUSES[code]))
            if self.into_planes:
                listener.ready(range(self._carrier.moves.layers), None)
        errors = {row: write_error(self.move.ways[0].target, code) for row, code in failed}
        broken = f"a copy failed: {why}" if why else ""
        unfit = np.flatnonzero(statuses == _UNFIT).tolist() if _UNFIT in codes else ()
        end = End(errors, late, DeviceError(broken, "see the system log") if broken else None, unfit=unfit)
        with self._lock:
            self._late = len(end.late)
            over = len(self._ended) == self._late
        if over:
            self._carrier.forget(self)
        return end

    def _told(self, status: PageStatus) -> PageStatus:
        """`CANCELLED` for pages of a cancelled load into the planes that the library calls loaded: it reads them to the
        end but does not copy them."""
        gone = status is PageStatus.LOADED and self._cancelled and self.into_planes
        return PageStatus.CANCELLED if gone else status

    def on_end(self, callback: Callable[[int], None]) -> None:
        late = set() if self._end is None else set(self._end.late)
        with self._lock:
            self._callback = callback
            over = [row for row in range(self._rows) if row not in late or row in self._ended]
        for row in over:
            callback(row)

    def ended(self, row: int) -> None:
        with self._lock:
            self._ended.add(row)
            over = len(self._ended) == self._late
            callback = self._callback
        if callback is not None:
            callback(row)
        if over:
            self._carrier.forget(self)


def write_error(files: str, code: int, why: str = "") -> StorageError:
    """The error of a page that was not written to a tier's files. `code`: an errno or the library's code; `why`
    replaces its text."""
    if code == SHORT:
        return ShortIOError(f"a write to {files} moved too few bytes", "the file system is full or limited")
    error = error_of(code)
    return IOFailedError(f"a write to {files} failed: {why or error.strerror}", "see the system log", error.errno)
