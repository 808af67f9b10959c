"""What a load still has to find out about its pages: the copies whose checksums are awaited, and the verdicts.

A page is moved in one group of layers or in several. It is `LOADED` when every group of it was good, and what is wrong
with the first bad one otherwise; whatever becomes of its other groups changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gdscache.loading import LayerwiseLoad
from gdscache.tiers.bounce import Extents
from gdscache.tiers.manager import PageStatus, PageTask, TierManager
from gdscache.tiers.page_io import Positions
from gdscache.tiers.transfer import Moved


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Pages of a load that are moved together, and the `slots` of `extents` that have, or will have, their bytes.

    `rows`: their places among the load's pages. Both int64 of shape (pages,).
    """

    tasks: Sequence[PageTask]
    rows: Positions
    extents: Extents
    slots: Positions

    @classmethod
    def of(cls, tasks: Sequence[PageTask], extents: Extents, slots: Iterable[int]) -> Batch:
        rows = np.array([t.row for t in tasks], dtype=np.int64)
        return cls(tasks, rows, extents, np.fromiter(slots, dtype=np.int64, count=len(tasks)))

    def some(self, which: Sequence[int]) -> Batch:
        """The pages at these positions."""
        at = np.array(which, dtype=np.int64)
        return Batch([self.tasks[i] for i in which], self.rows[at], self.extents, self.slots[at])

    def part(self, pages: slice) -> Batch:
        """A stretch of the pages."""
        return Batch(self.tasks[pages], self.rows[pages], self.extents, self.slots[pages])

    def pending(self) -> Batch:
        """The pages that have no verdict yet."""
        which = [i for i, t in enumerate(self.tasks) if t.status is PageStatus.PENDING]
        return self if len(which) == len(self.tasks) else self.some(which)


class Verdicts:
    """The verdicts of one load, on its thread."""

    def __init__(self, manager: TierManager, load: LayerwiseLoad, pages: int) -> None:
        self._manager = manager
        self._load = load
        self._left = np.ones(pages, dtype=np.int64)  # groups of each page that are not known to be good
        self._copied: deque[tuple[Batch, range, Moved]] = deque()
        self.copies = 0  # that were handed in so far
        self.judged = 0  # of them, in that order

    def expect(self, groups: int) -> None:
        """All pages that have no verdict are moved in so many groups of layers (one, if nothing is said)."""
        self._left[:] = groups

    def copied(self, batch: Batch, layers: range, moved: Moved) -> None:
        """A group of layers is on its way into the planes; its bytes are checked when they are there."""
        self._copied.append((batch, layers, moved))
        self.copies += 1

    def hashed(self, batch: Batch, layers: range) -> None:
        """A group of layers is not copied: check its bytes where they lie, now."""
        batch = batch.pending()
        if len(batch.tasks):
            with self._manager.timeline.span("check", layers=layers, pages=len(batch.tasks)):
                found = np.stack([batch.extents.digest(slot, layers) for slot in batch.slots.tolist()])
            self._judge(batch, layers, found)

    def check(self, *, wait: bool = False, first: int = 0) -> None:
        """Judge the groups that are in the planes; with `wait`, all that are on their way there, or the `first` copies
        that were handed in."""
        while self._copied:
            batch, layers, moved = self._copied[0]
            if not (wait or self.judged < first or moved.event is None or moved.event.query()):  # type: ignore[no-untyped-call]
                return
            self._copied.popleft()
            self.judged += 1
            with self._manager.timeline.span("check", layers=layers, pages=len(batch.tasks)):
                found = moved.checksums()
            self._judge(batch, layers, found)

    def _judge(self, batch: Batch, layers: range, found: npt.NDArray[np.uint64]) -> None:
        expected = batch.extents.checksums[batch.slots, layers.start : layers.stop]
        good = (found == expected).all(axis=1)
        if not good.all():
            self.say([batch.tasks[i] for i in np.flatnonzero(~good).tolist()], PageStatus.CHECKSUM)
        self._left[batch.rows[good]] -= 1
        over = good & (self._left[batch.rows] == 0)
        self.say([batch.tasks[i] for i in np.flatnonzero(over).tolist()], PageStatus.LOADED)

    def say(self, tasks: Iterable[PageTask], status: PageStatus) -> None:
        """The verdict on those of the pages that have none."""
        if status is PageStatus.LOADED and self._load.cancelled:
            status = PageStatus.CANCELLED
        none = PageStatus.PENDING
        pending = [task for task in tasks if task.status is none]
        if pending:
            self._manager.finish_pages(pending, status)
