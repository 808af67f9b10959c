"""The reads of one move: begun, landed, and left behind where they are late."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdscache.errors import DeadlineError, ShortIOError, StorageError
from gdscache.moves.base import PageStatus, Steps
from gdscache.moves.pages import Batch, Files, Verdicts, Waits
from gdscache.storage.base import Op
from gdscache.tiers.page_io import PageIO, Positions

if TYPE_CHECKING:
    from gdscache.layout import PageLayout
    from gdscache.timeline import Timeline

Landed = Callable[[Batch, range], object]
Ended = tuple[Sequence[int], StorageError | None]

READ_BYTES = 64 << 20  # of one submit: the first are on their way while the others are prepared
FLYING_BYTES = 8 * READ_BYTES  # that a load reads at a time: what fails, or is switched off, is not read further


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Reads in flight: some layers of some pages."""

    batch: Batch
    layers: range
    io: PageIO


class Reads:
    """What one move reads until `until`, in seconds of `waits`.

    Pages that come to harm get their verdict here. What has landed is handed on, a page or more at a time. `late`:
    what had not ended by `until`, each as the reading, and the page's place in it.
    """

    def __init__(
        self,
        files: Mapping[str, Files],
        refusal: Callable[[], PageStatus | None],
        layout: PageLayout,
        verdicts: Verdicts,
        until: float,
        waits: Waits,
        timeline: Timeline,
    ) -> None:
        self.until = until
        self.late: list[tuple[Reading, int]] = []
        self._files = files
        self._refusal = refusal
        self._layout = layout
        self._verdicts = verdicts
        self._waits = waits
        self._timeline = timeline
        self._flying: list[Reading] = []

    def may_begin(self, rows: Positions) -> bool:
        """Whether I/O may still begin, which would pin more memory; if not, these pages have their verdict."""
        refusal = self._refusal()
        if self._waits.now() >= self.until:
            refusal = PageStatus.DEADLINE
        if refusal is not None:
            self._verdicts.say(rows, refusal)
        return refusal is None

    def begin(self, batch: Batch, layers: range, *, alone: bool = False) -> Reading:
        """Start to read these layers of pages whose layers before them have landed or are on their way, or `alone`."""
        span = self._layout.read_span(layers, alone=alone)
        files = self._files[batch.files]
        about = {"layers": layers, "pages": len(batch), "bytes": len(batch) * (span[1] - span[0])}
        with self._timeline.flight("read", "SSD reads", transport=files.describe(), **about) as flight:
            io = files.transfer(Op.READ, batch.sources, [(batch.extents, batch.places)], span)
            reading = Reading(batch, layers, io)
            self._flying.append(reading)
            flight.follow(io, len(batch))
        return reading

    def land(self, reading: Reading, most: int, landed: Landed) -> Steps[set[int]]:
        """Hand pages on as their reads complete, about `most` pages at a time; the pages whose I/O is late."""
        batch = reading.batch
        ended = np.zeros(len(batch), dtype=np.bool_)
        ready: list[int] = []
        late: set[int] = set()
        for again, at_least in ((False, most), (True, 1)):  # at the deadline once more, for what has ended by then
            ends = reading.io.ended(self.until, at_least)
            try:
                while (word := (yield from self._next(reading.io, ends))) is not None:
                    pages, error = word
                    new = [page for page in pages if not ended[page]] if again else pages
                    ended[new] = True
                    if error is None:
                        ready.extend(new)
                    else:
                        short = isinstance(error, ShortIOError)
                        self._verdicts.say(batch.rows[new], PageStatus.SHORT_READ if short else PageStatus.IO_ERROR)
                    if len(ready) >= most:
                        self._hand_on(reading, ready, landed)
                        ready = []
                self._flying.remove(reading)
                break
            except DeadlineError:
                continue
        else:
            late = yield from self._leave(reading)
            self._verdicts.say(batch.rows[~ended], PageStatus.DEADLINE)
        self._hand_on(reading, ready, landed)
        return late

    def _next(self, io: PageIO, ends: Iterator[Ended]) -> Steps[Ended | None]:
        landing = self._waits.landing(io, ends)
        yield landing
        return landing.ended()

    def _hand_on(self, reading: Reading, ready: Sequence[int], landed: Landed) -> None:
        batch = self._verdicts.pending(reading.batch.some(np.array(ready, dtype=np.int64)))
        if len(batch):  # of a page that failed meanwhile nothing is moved any more
            landed(batch, reading.layers)
        self._verdicts.check()

    def drain(self) -> Steps[None]:
        """Wait for all reads that nobody takes any more."""
        while self._flying:
            yield from self._leave(self._flying[0])

    def _leave(self, reading: Reading) -> Steps[set[int]]:
        """Wait for reads that nobody takes any more; which of them are still in flight at the deadline."""
        flying = set(range(len(reading.batch)))
        ends = reading.io.ended(self.until)
        try:
            while (word := (yield from self._next(reading.io, ends))) is not None:
                flying.difference_update(word[0])
        except DeadlineError:
            pass
        finally:
            self._flying.remove(reading)
            self.late += [(reading, page) for page in sorted(flying)]
        return flying


class LayeredReads:
    """Reads of pages into the places that they have, one group of layers of all pages after the other.

    `FLYING_BYTES` at most are in flight, so that the next groups are read while one is copied. A page that has its
    verdict is not read further. Land each group once, in order.
    """

    def __init__(
        self, reads: Reads, verdicts: Verdicts, layout: PageLayout, batch: Batch, groups: Sequence[range]
    ) -> None:
        self._reads = reads
        self._verdicts = verdicts
        self._layout = layout
        self._left = deque(self._submits(batch, groups))
        self._begun: deque[tuple[range, Reading | None]] = deque()
        self._flying = 0  # bytes
        self._landing = 0  # of them, those of the reading at hand that were not handed on

    def page_bytes(self, layers: range) -> int:
        """What is read of a page for a group, at least 1."""
        start, stop = self._layout.read_span(layers)
        return max(1, stop - start)

    def _submits(self, batch: Batch, groups: Sequence[range]) -> Iterator[tuple[range, Batch]]:
        for layers in groups:
            most = max(1, READ_BYTES // self.page_bytes(layers))
            for at in range(0, len(batch), most):
                yield layers, batch.some(slice(at, at + most))

    def begin(self, *, first: bool = False) -> None:
        """Start as many reads as may be in flight; or the `first`, and no more."""
        while self._left and self._flying < (1 if first else FLYING_BYTES):
            layers, part = self._left.popleft()
            batch = self._verdicts.pending(part)
            reading = None
            if len(batch) and self._reads.may_begin(batch.rows):
                reading = self._reads.begin(batch, layers)
                self._flying += len(batch) * self.page_bytes(layers)
            self._begun.append((layers, reading))

    def land(self, group: range, most: int, landed: Landed) -> Steps[None]:
        """Wait for a group, and hand it on as it comes, about `most` pages at a time."""
        self.begin()
        while self._begun and self._begun[0][0] == group:
            _, reading = self._begun.popleft()
            if reading is not None:
                self._landing = len(reading.batch) * self.page_bytes(group)
                yield from self._reads.land(reading, most, functools.partial(self._landed, landed))
                self._over(self._landing)

    def _landed(self, landed: Landed, batch: Batch, layers: range) -> None:
        """The next reads are on their way before these pages are copied, which takes its time."""
        self._over(len(batch) * self.page_bytes(layers))
        batch = self._verdicts.pending(batch)
        if len(batch):
            landed(batch, layers)

    def _over(self, nbytes: int) -> None:
        self._landing -= nbytes
        self._flying -= nbytes
        self.begin()
