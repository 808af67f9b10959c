"""The reads of one load, on its thread: begun, landed, and left to the quarantine where they are late."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from gdscache.errors import DeadlineError, ShortIOError
from gdscache.layout import PageLayout
from gdscache.load_verdicts import Batch, Verdicts
from gdscache.tiers.bounce import Bounce, LateSlots, Window
from gdscache.tiers.manager import PageStatus, PageTask, TierManager
from gdscache.tiers.page_io import PageIO
from gdscache.tiers.quarantine import Late

Landed = Callable[[Batch, range], object]

READ_BYTES = 64 << 20  # of one submit: the first are on their way while the others are prepared
FLYING_BYTES = 8 * READ_BYTES  # that a load reads at a time: what fails, or is switched off, is not read further


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Reads in flight: some layers of some pages."""

    batch: Batch
    layers: range
    io: PageIO


class LoadReads:
    """What one load reads from the SSD until `until` (`time.monotonic()` seconds), and its slots of `bounce`.

    Pages that come to harm get their verdict here. What has landed is handed on, a page or more at a time.
    """

    def __init__(self, manager: TierManager, bounce: Bounce | None, verdicts: Verdicts, until: float) -> None:
        self._manager = manager
        self._bounce = bounce
        self._verdicts = verdicts
        self._until = until
        self._flying: list[Reading] = []
        self._late: list[tuple[Reading, int]] = []  # pages of readings that are not in quarantine yet
        self._bounced: set[int] = set()  # bounce slots that are ours
        self._late_slots = None if bounce is None else LateSlots(bounce.loads)

    def may_begin(self, tasks: Iterable[PageTask]) -> bool:
        """Whether I/O may still begin, which would pin more memory; if not, these pages have their verdict."""
        self._manager.watch()
        if time.monotonic() >= self._until:
            status = PageStatus.DEADLINE
        elif self._manager.quarantine.off:
            status = PageStatus(self._manager.quarantine.cause)
        else:
            return True
        self._verdicts.say(tasks, status)
        return False

    def begin(self, batch: Batch, layers: range, *, alone: bool = False) -> Reading:
        """Start to read these layers of pages whose layers before them have landed or are on their way, or `alone`."""
        ssd = self._manager.ssd
        assert ssd is not None, "a page of the SSD tier without one"
        start, stop = ssd.layout.read_span(layers, alone=alone)
        about = {"layers": layers, "pages": len(batch.tasks), "bytes": len(batch.tasks) * (stop - start)}
        with self._manager.timeline.flight("read", "SSD reads", transport=ssd.io.transport.name, **about) as flight:
            io = ssd.read([t.source for t in batch.tasks], batch.extents, batch.slots, layers, alone=alone)
            reading = Reading(batch, layers, io)
            self._flying.append(reading)
            flight.follow(io, len(batch.tasks))
        return reading

    def land(self, reading: Reading, most: int, landed: Landed) -> set[int]:
        """Hand pages on as their reads complete, about `most` at a time; the pages whose I/O is late."""
        batch = reading.batch
        ended = np.zeros(len(batch.tasks), dtype=bool)
        ready: list[int] = []
        late: set[int] = set()
        for again, at_least in ((False, most), (True, 1)):  # at the deadline once more, for what has ended by then
            try:
                for pages, error in reading.io.ended(self._until, at_least):
                    new = [page for page in pages if not ended[page]] if again else pages
                    ended[new] = True
                    if error is None:
                        ready.extend(new)
                    else:
                        short = isinstance(error, ShortIOError)
                        failed = [batch.tasks[page] for page in new]
                        self._verdicts.say(failed, PageStatus.SHORT_READ if short else PageStatus.IO_ERROR)
                    if len(ready) >= most:
                        self._hand_on(reading, ready, landed)
                        ready = []
                self._flying.remove(reading)
                break
            except DeadlineError:
                continue
        else:
            late = self._drain(reading)
            self._verdicts.say([batch.tasks[i] for i in np.flatnonzero(~ended).tolist()], PageStatus.DEADLINE)
        self._hand_on(reading, ready, landed)
        if not self._flying:
            self._hold_late()
        return late

    def _hand_on(self, reading: Reading, ready: Sequence[int], landed: Landed) -> None:
        batch = reading.batch.some(ready).pending()  # of a page that failed meanwhile nothing is moved any more
        if len(batch.tasks):
            landed(batch, reading.layers)
        self._verdicts.check()

    # -- what is left behind ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for all reads that nobody takes any more."""
        while self._flying:
            self._drain(self._flying[0])
        self._hold_late()

    def _drain(self, reading: Reading) -> set[int]:
        """Wait for reads that nobody takes any more; which of them are still in flight at the deadline."""
        self._flying.remove(reading)
        flying = set(range(len(reading.batch.tasks)))
        with contextlib.suppress(DeadlineError):
            for pages, _ in reading.io.ended(self._until):
                flying.difference_update(pages)
        self._late += [(reading, page) for page in sorted(flying)]
        return flying

    def _hold_late(self) -> None:
        """Late reads keep their pages' slots until they end: each slot once, whatever groups of its page are late."""
        if not self._late:
            return
        try:
            self._verdicts.check(wait=True)  # a bounce slot has parts of other pages too, which are still copied
        finally:
            self._hold()

    def _hold(self) -> None:
        held: dict[tuple[int, int, int], tuple[PageIO, int]] = {}
        late: dict[PageIO, dict[int, Late]] = {}
        also: dict[tuple[PageIO, PageIO], dict[int, int]] = {}
        for reading, page in self._late:
            batch, io = reading.batch, reading.io
            place = int(batch.rows[page]), id(batch.extents), int(batch.slots[page])
            if place in held:
                first, number = held[place]
                also.setdefault((first, io), {})[page] = number
            else:
                held[place] = io, page
                late.setdefault(io, {})[page] = self._kept(batch, page)
        self._late.clear()
        for (first, io), pages in also.items():
            first.also(io, pages)
        for io, kept in late.items():
            self._manager.quarantine.hold(io, kept)

    def _kept(self, batch: Batch, page: int) -> Late:
        task, window, late = batch.tasks[page], batch.extents, self._late_slots
        if task.target is not None:
            return self._manager.hold_read(task)
        assert isinstance(window, Window), "a page without a slot"
        assert late is not None, "no bounce reserve"
        slots = window.reserve_slots(int(batch.slots[page]))
        self._bounced.difference_update(slots)
        with self._manager.lock:
            return self._manager.hold_read(task, (late.hold(slots), functools.partial(late.end, slots)))

    # -- slots of the bounce reserve ----------------------------------------------------------------------------------

    def take_bounced(self, wanted: int, *, wait: bool) -> list[int]:
        """Up to so many slots, ascending; none at once, or (`wait`) none until the deadline."""
        assert self._bounce is not None, "no bounce reserve"
        pool = self._bounce.loads
        slots = pool.take(wanted, max(0.0, self._until - time.monotonic())) if wait else pool.try_take(wanted)
        self._bounced.update(slots)
        return slots

    def give_bounced(self, slots: Iterable[int] | None = None) -> None:
        """Give back slots whose bytes nobody moves any more; all by default."""
        given = [slot for slot in (list(self._bounced) if slots is None else slots) if slot in self._bounced]
        if given and self._bounce is not None:
            self._bounced.difference_update(given)
            self._bounce.loads.give(given)


class LayeredReads:
    """Reads of pages into the slots that they have, one group of layers of all pages after the other.

    `FLYING_BYTES` at most are in flight, so that the next groups are read while one is copied. A page that has its
    verdict is not read further. Land each group once, in order.
    """

    def __init__(self, reads: LoadReads, layout: PageLayout, batch: Batch, groups: Sequence[range]) -> None:
        self._reads = reads
        self._layout = layout
        self._left = deque(self._submits(batch, groups))
        self._begun: deque[tuple[range, Reading | None]] = deque()
        self._flying = 0  # bytes
        self._landing = 0  # of them, those of the reading at hand that were not handed on

    def page_bytes(self, layers: range) -> int:
        """What is read of a page for a group, at least 1."""
        start, stop = self._layout.read_span(layers)
        return max(1, stop - start)

    def _submits(self, batch: Batch, groups: Sequence[range]) -> Iterator[tuple[range, slice, Batch]]:
        for layers in groups:
            most = max(1, READ_BYTES // self.page_bytes(layers))
            for at in range(0, len(batch.tasks), most):
                yield layers, slice(at, at + most), batch

    def begin(self, *, first: bool = False) -> None:
        """Start as many reads as may be in flight; or the `first`, and no more."""
        while self._left and self._flying < (1 if first else FLYING_BYTES):
            layers, part, pages = self._left.popleft()
            batch = pages.part(part).pending()
            reading = None
            if batch.tasks and self._reads.may_begin(batch.tasks):
                reading = self._reads.begin(batch, layers)
                self._flying += len(batch.tasks) * self.page_bytes(layers)
            self._begun.append((layers, reading))

    def land(self, group: range, most: int, landed: Landed) -> None:
        """Wait for a group, and hand it on as it comes, about `most` pages at a time."""
        self.begin()
        while self._begun and self._begun[0][0] == group:
            _, reading = self._begun.popleft()
            if reading is not None:
                self._landing = len(reading.batch.tasks) * self.page_bytes(group)
                self._reads.land(reading, most, functools.partial(self._landed, landed))
                self._over(self._landing)

    def _landed(self, landed: Landed, batch: Batch, layers: range) -> None:
        """The next reads are on their way before these pages are copied, which takes its time."""
        self._over(len(batch.tasks) * self.page_bytes(layers))
        landed(batch.pending(), layers)

    def _over(self, nbytes: int) -> None:
        self._landing -= nbytes
        self._flying -= nbytes
        self.begin()
