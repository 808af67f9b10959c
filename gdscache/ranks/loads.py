"""A load as one rank carries it out."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.cuda.streams import Event
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import CODES, STATUSES
from gdscache.load.report import LoadReport
from gdscache.moves import PageStatus

PENDING, LOADED = CODES[PageStatus.PENDING], CODES[PageStatus.LOADED]


class Verdicts:
    """Collects the statuses of a move's pages, which begin with `status`. Passes the layers on to `handle`, if any."""

    def __init__(
        self, pages: int, status: PageStatus = PageStatus.PENDING, handle: LayerwiseLoad | None = None
    ) -> None:
        self.statuses: npt.NDArray[np.uint8] = np.full(pages, CODES[status], np.uint8)
        self.rows = np.arange(pages)
        self.begun = time.monotonic()
        self._handle = handle

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        self.statuses[rows] = CODES[status]

    def ready(self, layers: range, event: Event) -> None:
        if self._handle is not None:
            self._handle.signal(layers, event)


class RankLoad:
    """Passes verdicts to `handle`. Some moves bring its pages; the last of them brings the layers."""

    def __init__(self, handle: LayerwiseLoad) -> None:
        self.handle = handle
        self._begun = time.monotonic()
        self._statuses: npt.NDArray[np.uint8] = np.full(sum(part.pages for part in handle.parts), PENDING, np.uint8)
        self._lock = threading.Lock()
        self._left = 0

    def expect(self, moves: int) -> None:
        self._left = moves
        if not moves:
            self._end()

    def moved(self, rows: Int64Array, statuses: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._statuses[rows] = statuses
            self._left -= 1
            over = not self._left
        if over:
            self._end()

    def _end(self) -> None:
        statuses, at, layout = self._statuses, 0, self.handle.layout
        statuses[statuses == PENDING] = CODES[PageStatus.ABORTED]
        seconds = time.monotonic() - self._begun
        for part in self.handle.parts:
            mine, at = statuses[at : at + part.pages], at + part.pages
            bad = np.flatnonzero(mine != LOADED)
            good = int(bad[0]) if len(bad) else part.pages
            pages = tuple(STATUSES[code] for code in mine.tolist())
            part.report = LoadReport(good * layout.page_tokens, pages, {}, seconds)
        self.handle.signal(range(layout.n_layers), None)
        self.handle.released()
        self.handle.end(None)
