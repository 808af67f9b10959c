"""Pages of a load that have no place in the CPU tier: through the bounce reserve, group of layers by group."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Sequence

from gdscache.layout import PageLayout
from gdscache.load_reads import Landed, LoadReads, Reading
from gdscache.load_verdicts import Batch, Verdicts
from gdscache.tiers.bounce import Bounce, Window
from gdscache.tiers.manager import PageStatus, PageTask

ROUND_BYTES = 32 << 20  # SSD bytes that one round asks for at once
ROUNDS = 4  # that are read or copied at a time, at most: while one is copied, the others are read
_WORTH_BYTES = 16 << 20  # of a round, below which there are rather fewer than smaller ones: each costs the interpreter


class PassingReads:
    """Rounds of reads into bounce slots, each a group of layers of some pages. Land each group once, in order.

    A round has some slots, which are cut for what is read of a page for one group, and gives them back when that is in
    the planes and checked, so that a load of any size goes by layers through a reserve of any size. The next rounds are
    read meanwhile. The slots that come back are the next that are taken, so that what passes through stays in the
    processor's cache. Waits for a slot only while it holds none, so two loads never wait for each other.
    """

    def __init__(
        self,
        reads: LoadReads,
        verdicts: Verdicts,
        bounce: Bounce,
        layout: PageLayout,
        tasks: Sequence[PageTask],
        groups: Sequence[range],
        cancelled: Callable[[], bool],
    ) -> None:
        self._reads = reads
        self._verdicts = verdicts
        self._bounce = bounce
        self._layout = layout
        self._tasks = tasks
        self._groups = deque(groups)  # that are not begun
        self._layers = range(0)  # the group that is being begun, and its pages
        self._rest: deque[PageTask] = deque()
        self._rounds: deque[tuple[Reading, list[int]]] = deque()  # with their slots of the reserve
        self._landing = False  # a round that is in `_rounds` no more
        self._copying: deque[tuple[Sequence[int], int]] = deque()  # slots, and the copies behind which they are free
        self._cancelled = cancelled
        share = bounce.loads.slots * layout.extent_bytes
        self._most = min(ROUNDS, max(2, share // _WORTH_BYTES))  # rounds

    def page_bytes(self, layers: range) -> int:
        """What is read of a page for a group."""
        start, stop = self._layout.read_span(layers, alone=True)
        return stop - start

    def land(self, group: range, most: int, landed: Landed) -> None:
        """Wait for a group, and hand it on as it comes, about `most` pages at a time; the next ones are begun."""
        self._begin()
        while self._rounds and self._rounds[0][0].layers == group:
            reading, slots = self._rounds.popleft()
            self._landing = True
            late = self._reads.land(reading, most, functools.partial(self._landed, landed))
            self._landing = False
            self._copying.append((_without(slots, reading, late), self._verdicts.copies))
            self._begin()
        if not self._rounds and self._cancelled():
            self._verdicts.say(self._tasks, PageStatus.CANCELLED)

    def _landed(self, landed: Landed, batch: Batch, layers: range) -> None:
        landed(batch, layers)
        self._begin()

    def _begin(self) -> None:
        """Start the rounds that there are slots for, one at least where nothing is under way."""
        while self._begin_one():
            pass

    def _begin_one(self) -> bool:
        """Start a round, or refuse what may not be read any more; False when one has to land first, or all is begun."""
        self._free()
        while not self._rest and self._groups:
            self._layers = self._groups.popleft()
            self._rest.extend(task for task in self._tasks if task.status is PageStatus.PENDING)
        reading = len(self._rounds) + self._landing
        full = reading and reading + len(self._copying) >= self._most
        if not self._rest or full or self._cancelled():
            return False
        if not self._reads.may_begin(self._rest):
            self._rest.clear()
            return True
        slots = self._reads.take_bounced(self._wanted(), wait=not reading and not self._copying)
        if slots:
            self._read_into(slots)
        elif not reading and self._copying:
            self._free(wait=True)
        return bool(slots) or not reading

    def _wanted(self) -> int:
        """The slots of a round."""
        part = self.page_bytes(self._layers)
        pages = max(1, min(len(self._rest), ROUND_BYTES // part))
        return max(1, min(self._bounce.loads.slots // self._most, -(-pages * part // self._layout.extent_bytes)))

    def _read_into(self, slots: Sequence[int]) -> None:
        window, others = self._bounce.window(slots, self._layout.read_span(self._layers, alone=True))
        self._reads.give_bounced(others)
        pages = [self._rest.popleft() for _ in range(min(window.slots, len(self._rest)))]
        reading = self._reads.begin(Batch.of(pages, window, range(len(pages))), self._layers, alone=True)
        self._rounds.append((reading, [slot for slot in slots if slot not in others]))

    def _free(self, *, wait: bool = False) -> None:
        """Give back the slots whose bytes are in the planes and checked; with `wait`, one round's at least."""
        self._verdicts.check(first=self._copying[0][1] if wait else 0)
        while self._copying and self._copying[0][1] <= self._verdicts.judged:
            self._reads.give_bounced(self._copying.popleft()[0])


def _without(slots: Sequence[int], reading: Reading, late: Collection[int]) -> list[int]:
    """The slots of a round without those that its late reads may still write to."""
    window = reading.batch.extents
    assert isinstance(window, Window), "a round elsewhere than in the reserve"
    written = {slot for page in late for slot in window.reserve_slots(int(reading.batch.slots[page]))}
    return [slot for slot in slots if slot not in written]
