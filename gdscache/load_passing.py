"""Pages of a load that have no place in the CPU tier: through the bounce reserve, group of layers by group."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from gdscache.layout import GroupSizes, PageLayout
from gdscache.load_reads import Landed, LoadReads, Reading
from gdscache.load_verdicts import Batch, Verdicts
from gdscache.tiers.bounce import Bounce
from gdscache.tiers.manager import PageStatus, PageTask

ROUND_BYTES = 32 << 20  # SSD bytes that one round asks for at once
_ROUNDS = 2  # the next is read under the copy of the one before


def passing_sizes(sizes: GroupSizes, bounce: Bounce) -> GroupSizes:
    """Sizes of groups with which a round, a slot for each page, is still worth its waits."""
    least = ROUND_BYTES // 8 // max(1, bounce.loads.slots // _ROUNDS)
    return dataclasses.replace(sizes, least=max(sizes.least, least))


class PassingReads:
    """Rounds of reads into bounce slots, each a group of layers of some pages. Land each group once, in order.

    A slot holds what is read of a page for one group, and is given back when that is copied, so that a load of any size
    goes by layers through a reserve of any size. Waits for a slot only while it holds none, so two loads never wait for
    each other. `copied` returns when all that was handed on is in the planes and checked.
    """

    def __init__(
        self,
        reads: LoadReads,
        verdicts: Verdicts,
        bounce: Bounce,
        layout: PageLayout,
        tasks: Sequence[PageTask],
        groups: Sequence[range],
        copied: Callable[[], None],
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
        self._rounds: deque[Reading] = deque()
        self._copied = copied
        self._cancelled = cancelled

    def page_bytes(self, layers: range) -> int:
        """What is read of a page for a group, at least 1."""
        start, stop = self._layout.read_span(layers, alone=True)
        return max(1, stop - start)

    def land(self, group: range, most: int, landed: Landed) -> None:
        """Wait for a group, and hand it on as it comes, about `most` pages at a time; the next one is begun."""
        while True:
            while self._begin():
                pass
            if not self._rounds or self._rounds[0].layers != group:
                break
            over = self._reads.land(self._rounds.popleft(), most, landed)
            self._copied()
            self._reads.give_bounced(over)
        if not self._rounds and self._cancelled():
            self._verdicts.say(self._tasks, PageStatus.CANCELLED)

    def _begin(self) -> bool:
        """Start a round, or refuse what may not be read any more; False when one has to land first, or all is begun."""
        while not self._rest and self._groups:
            self._layers = self._groups.popleft()
            self._rest.extend(task for task in self._tasks if task.status is PageStatus.PENDING)
        if not self._rest or len(self._rounds) == _ROUNDS or self._cancelled():
            return False
        if not self._reads.may_begin(self._rest):
            self._rest.clear()
            return True
        most = max(1, min(self._bounce.loads.slots // _ROUNDS, ROUND_BYTES // self.page_bytes(self._layers)))
        slots = self._reads.take_bounced(min(most, len(self._rest)), wait=not self._rounds)
        if slots:
            batch = Batch.of([self._rest.popleft() for _ in slots], self._bounce.extents, slots)
            self._rounds.append(self._reads.begin(batch, self._layers, alone=True))
        return bool(slots) or not self._rounds
