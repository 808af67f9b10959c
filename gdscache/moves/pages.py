"""Pages of one move into the planes: those that move together, and what is still to be found out about them."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from gdscache.moves.base import Listener, PageStatus, Steps, Wait
from gdscache.tiers.page_io import PageIO, Positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdscache.checksum import Checksums
    from gdscache.errors import StorageError
    from gdscache.storage.base import Op
    from gdscache.streams import Event
    from gdscache.tiers.base import SlotPool
    from gdscache.tiers.bounce import Extents
    from gdscache.tiers.transfer import Moved
    from gdscache.timeline import Timeline


class Files(Protocol):
    """Where the bytes of a tier are that no copy reaches."""

    def transfer(
        self,
        op: Op,
        slots: Positions,
        ends: Sequence[tuple[Extents, Positions]],
        span: tuple[int, int] | None = None,
    ) -> PageIO:
        """Start I/O of slots, or of the bytes `span` of their extents; see `SlabIO.transfer`."""
        ...

    def describe(self) -> str:
        """What moves these bytes, in a word."""
        ...


class Landing(Wait, Protocol):
    """Pages of some I/O, as they end."""

    def ended(self) -> tuple[Sequence[int], StorageError | None] | None:
        """What the iterator had to say, once the wait is over; None behind its last word. Raises what it raised."""
        ...


class Waits(Protocol):
    """What a move waits for, to be yielded to whoever drives it."""

    def landing(self, io: PageIO, ends: Iterator[tuple[Sequence[int], StorageError | None]]) -> Landing:
        """The next word of `io.ended(...)`."""
        ...

    def copied(self, moved: Moved) -> Wait:
        """Copies."""
        ...

    def happened(self, event: Event) -> Wait:
        """An event."""
        ...

    def room(self, pool: SlotPool, seconds: float) -> Wait:
        """That a slot of a pool is free; for so many seconds at most."""
        ...

    def now(self) -> float:
        """Seconds, of the clock that deadlines are told by."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pages that move together, all int64 of shape (pages,): their `rows` in the move; the `places` in `extents` that
    have, or will have, their bytes; and the slots of `files` that these come from, if they do."""

    rows: Positions
    extents: Extents
    places: Positions
    files: str = ""
    sources: Positions = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, which: npt.NDArray[np.bool_] | Positions | slice) -> Batch:
        """A part of the pages."""
        sources = self.sources[which] if self.files else self.sources
        return Batch(self.rows[which], self.extents, self.places[which], self.files, sources)

    def placed(self, extents: Extents) -> Batch:
        """The pages with the first places of other extents."""
        return Batch(self.rows, extents, np.arange(len(self.rows), dtype=np.int64), self.files, self.sources)


class Verdicts:
    """The verdicts of one move. A page is good when every group of its layers was, and what is wrong with the first bad
    one otherwise; whatever becomes of its other groups changes nothing.

    `sums`: what the bytes of each page have to give, uint64 (pages, layers); `groups`: in which they move.
    """

    def __init__(self, sums: Checksums, groups: int, listener: Listener, waits: Waits, timeline: Timeline) -> None:
        self._sums = sums
        self._listener = listener
        self._waits = waits
        self._timeline = timeline
        self._open = np.ones(len(sums), dtype=np.bool_)  # pages without a verdict
        self._left = np.full(len(sums), groups, dtype=np.int64)  # groups of each page that are not known to be good
        self._copied: deque[tuple[Batch, range, Moved]] = deque()
        self.copies = 0  # that were handed in so far
        self.judged = 0  # of them, in that order

    def pending(self, batch: Batch) -> Batch:
        """The pages that have no verdict yet."""
        which = self._open[batch.rows]
        return batch if which.all() else batch.some(which)

    def copied(self, batch: Batch, layers: range, moved: Moved) -> None:
        """A group of layers is on its way into the planes; its bytes are checked when they are there."""
        self._copied.append((batch, layers, moved))
        self.copies += 1

    def hashed(self, batch: Batch, layers: range) -> None:
        """A group of layers is not copied: check its bytes where they lie, now."""
        batch = self.pending(batch)
        if len(batch):
            with self._timeline.span("check", layers=layers, pages=len(batch)):
                found = np.stack([batch.extents.digest(place, layers) for place in batch.places.tolist()])
            self._judge(batch, layers, found)

    def check(self) -> None:
        """Judge the groups that are in the planes."""
        while self._copied:
            event = self._copied[0][2].event
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            self._judge_first()

    def settle(self, first: int | None = None) -> Steps[None]:
        """Wait for all groups that are on their way, or for the `first` that were handed in, and judge them."""
        while self._copied and (first is None or self.judged < first):
            yield self._waits.copied(self._copied[0][2])
            if self._copied:
                self._judge_first()

    def _judge_first(self) -> None:
        batch, layers, moved = self._copied.popleft()
        self.judged += 1
        with self._timeline.span("check", layers=layers, pages=len(batch)):
            found = moved.checksums()
        self._judge(batch, layers, found)

    def _judge(self, batch: Batch, layers: range, found: Checksums) -> None:
        rows = batch.rows
        good = (found == self._sums[rows, layers.start : layers.stop]).all(axis=1)
        if not good.all():
            self.say(rows[~good], PageStatus.CHECKSUM)
            rows = rows[good]
        self._left[rows] -= 1
        self.say(rows[self._left[rows] == 0], PageStatus.LOADED)

    def say(self, rows: Positions, status: PageStatus) -> None:
        """The verdict on those of the pages that have none."""
        rows = rows[self._open[rows]]
        if len(rows):
            self._open[rows] = False
            self._listener.judged(rows, status)
