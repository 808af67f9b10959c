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
from gdscache.pages.layout import PageLayout

PENDING, LOADED = CODES[PageStatus.PENDING], CODES[PageStatus.LOADED]


class Verdicts:
    """Collects the statuses of a move's pages, which begin with `status`."""

    def __init__(self, pages: int, status: PageStatus = PageStatus.PENDING) -> None:
        self.statuses: npt.NDArray[np.uint8] = np.full(pages, CODES[status], np.uint8)
        self.rows = np.arange(pages)

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        self.statuses[rows] = CODES[status]

    def ready(self, layers: range, event: Event) -> None: ...


class RankLoad:
    """Passes layers and verdicts to `handle`. Some moves bring its pages; the last of them brings the layers."""

    def __init__(self, handle: LayerwiseLoad, layout: PageLayout) -> None:
        self.handle = handle
        self._layout = layout
        self._begun = time.monotonic()
        self._statuses: npt.NDArray[np.uint8] = np.full(sum(part.pages for part in handle.parts), PENDING, np.uint8)
        self._lock = threading.Lock()
        self._left = 0

    def expect(self, moves: int) -> None:
        self._left = moves
        if not moves:
            self._end()

    def signal(self, layers: range, event: Event) -> None:
        self.handle.signal(layers, event)

    def moved(self, rows: Int64Array, statuses: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._statuses[rows] = statuses
            self._left -= 1
            over = not self._left
        if over:
            self._end()

    def _end(self) -> None:
        statuses, at = self._statuses, 0
        statuses[statuses == PENDING] = CODES[PageStatus.ABORTED]
        seconds = time.monotonic() - self._begun
        for part in self.handle.parts:
            mine, at = statuses[at : at + part.pages], at + part.pages
            bad = np.flatnonzero(mine != LOADED)
            good = int(bad[0]) if len(bad) else part.pages
            pages = tuple(STATUSES[code] for code in mine.tolist())
            part.report = LoadReport(good * self._layout.page_tokens, pages, {}, seconds)
        self.signal(range(self._layout.n_layers), None)
        self.handle.released()
        self.handle.end(None)
