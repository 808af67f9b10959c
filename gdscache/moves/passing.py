"""Pages of a move that have no place in memory: through the bounce reserve, group of layers by group."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from gdscache.moves.base import PageStatus, Steps
from gdscache.moves.pages import Batch, Verdicts, Waits
from gdscache.moves.reads import Landed, Reading, Reads
from gdscache.tiers.bounce import Bounce, Window

if TYPE_CHECKING:
    from gdscache.layout import PageLayout

ROUND_BYTES = 32 << 20  # of files that one round asks for at once
ROUNDS = 4  # that are read or copied at a time, at most: while one is copied, the others are read
_WORTH_BYTES = 16 << 20  # of a round, below which there are rather fewer than smaller ones: each costs the interpreter


class PassingReads:
    """Rounds of reads into bounce slots, each a group of layers of some pages. Land each group once, in order.

    A round has some slots, which are cut for what is read of a page for one group, and gives them back when that is in
    the planes and checked, so that a load of any size goes by layers through a reserve of any size. The next rounds are
    read meanwhile. The slots that come back are the next that are taken, so that what passes through stays in the
    processor's cache. Waits for a slot only while it holds none, so two moves never wait for each other.
    """

    def __init__(
        self,
        reads: Reads,
        verdicts: Verdicts,
        bounce: Bounce,
        layout: PageLayout,
        batches: Sequence[Batch],
        groups: Sequence[range],
        waits: Waits,
        cancelled: Callable[[], bool],
    ) -> None:
        """`batches`: pages without places, those of one tier's files each."""
        self._reads = reads
        self._verdicts = verdicts
        self._bounce = bounce
        self._layout = layout
        self._batches = batches
        self._waits = waits
        self._groups = deque(groups)  # that are not begun
        self._layers = range(0)  # the group that is being begun, and its pages
        self._rest: deque[Batch] = deque()
        self._rounds: deque[tuple[Reading, list[int]]] = deque()  # with their slots of the reserve
        self._landing = False  # a round that is in `_rounds` no more
        self._copying: deque[tuple[Sequence[int], int]] = deque()  # slots, and the copies behind which they are free
        self._held: set[int] = set()  # slots of the reserve that are ours
        self._left = 0  # late reads whose slots are kept for them
        self._cancelled = cancelled
        share = bounce.loads.slots * layout.extent_bytes
        self._most = min(ROUNDS, max(2, share // _WORTH_BYTES))  # rounds

    def page_bytes(self, layers: range) -> int:
        """What is read of a page for a group."""
        start, stop = self._layout.read_span(layers, alone=True)
        return stop - start

    def land(self, group: range, most: int, landed: Landed) -> Steps[None]:
        """Wait for a group, and hand it on as it comes, about `most` pages at a time; the next ones are begun."""
        yield from self._begin()
        while self._rounds and self._rounds[0][0].layers == group:
            reading, slots = self._rounds.popleft()
            self._landing = True
            late = yield from self._reads.land(reading, most, functools.partial(self._landed, landed))
            self._landing = False
            self._copying.append((_without(slots, reading, late), self._verdicts.copies))
            yield from self._begin()
        if not self._rounds and self._cancelled():
            for batch in self._batches:
                self._verdicts.say(batch.rows, PageStatus.CANCELLED)

    def _landed(self, landed: Landed, batch: Batch, layers: range) -> None:
        landed(batch, layers)
        self._begin_all()

    def _begin(self) -> Steps[None]:
        """Start the rounds that there are slots for, one at least where nothing is under way."""
        self._begin_all()
        while self._rest and not self._rounds and not self._cancelled():
            if self._copying:
                yield from self._verdicts.settle(self._copying[0][1])
            else:
                yield self._waits.room(self._bounce.loads, self._reads.until - self._waits.now())
            self._begin_all()

    def _begin_all(self) -> None:
        """Start the rounds that there are slots for, and refuse what may not be read any more."""
        while self._begin_one():
            pass

    def _begin_one(self) -> bool:
        """False when a round has to land first, or all is begun."""
        self._free()
        while not self._rest and self._groups:
            self._layers = self._groups.popleft()
            self._rest.extend(batch for batch in map(self._verdicts.pending, self._batches) if len(batch))
        reading = len(self._rounds) + self._landing
        full = reading and reading + len(self._copying) >= self._most
        if not self._rest or full or self._cancelled():
            return False
        batch = self._rest[0]
        if not self._reads.may_begin(batch.rows):
            self._rest.popleft()
            return True
        slots = self._bounce.loads.try_take(self._wanted(len(batch)))
        if slots:
            self._held.update(slots)
            self._read_into(slots)
        return bool(slots)

    def _wanted(self, pages: int) -> int:
        """The slots of a round, for the next of so many pages."""
        part = self.page_bytes(self._layers)
        pages = max(1, min(pages, ROUND_BYTES // part))
        return max(1, min(self._bounce.loads.slots // self._most, -(-pages * part // self._layout.extent_bytes)))

    def _read_into(self, slots: Sequence[int]) -> None:
        window, others = self._bounce.window(slots, self._layout.read_span(self._layers, alone=True))
        self._give(others)
        batch = self._rest.popleft()
        if len(batch) > window.slots:
            self._rest.appendleft(batch.some(slice(window.slots, None)))
            batch = batch.some(slice(window.slots))
        reading = self._reads.begin(batch.placed(window), self._layers, alone=True)
        self._rounds.append((reading, [slot for slot in slots if slot not in others]))

    def _free(self) -> None:
        """Give back the slots whose bytes are in the planes and checked."""
        self._verdicts.check()
        while self._copying and self._copying[0][1] <= self._verdicts.judged:
            self._give(self._copying.popleft()[0])

    def _give(self, slots: Collection[int]) -> None:
        self._held.difference_update(slots)
        self._bounce.loads.give(sorted(slots))

    def end(self) -> None:
        """Everything that was read is copied, or never will be: give back all slots but those that late reads touch."""
        late = [(reading, page) for reading, page in self._reads.late if isinstance(reading.batch.extents, Window)]
        left, self._left = late[self._left :], len(late)  # once each, however often this is called
        for reading, page in left:
            slots = _touched(reading, page)
            self._held.difference_update(slots)
            self._bounce.late.hold(slots)
        self._give(list(self._held))


def give_late(bounce: Bounce, reading: Reading, page: int) -> None:
    """A late read has ended: its slots of the reserve are free when no other late one is at them."""
    if isinstance(reading.batch.extents, Window):
        bounce.late.end(_touched(reading, page))


def _touched(reading: Reading, page: int) -> range:
    """The slots of the reserve that a page's read writes to."""
    window = reading.batch.extents
    assert isinstance(window, Window), "a round elsewhere than in the reserve"
    return window.reserve_slots(int(reading.batch.places[page]))


def _without(slots: Sequence[int], reading: Reading, late: Collection[int]) -> list[int]:
    """The slots of a round without those that its late reads may still write to."""
    written = {slot for page in late for slot in _touched(reading, page)}
    return [slot for slot in slots if slot not in written]
