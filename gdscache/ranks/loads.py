"""A load, or another move, as one rank carries it out."""

from __future__ import annotations

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
