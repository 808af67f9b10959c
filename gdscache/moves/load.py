"""A move towards the planes, carried out: out of memory and files, through memory, into the planes.

Layers move in groups. What files have is read into the places that its pages have in memory, or passes through the
bounce reserve, and is copied as it lands, together with the same layers of pages that lie in memory; the next groups
are read meanwhile. The copy takes the checksums on its way. These are steps: they wait only where they yield.

Python's time counts here: what is done for each page is done for many at once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gdscache.moves.base import PLANES, End, Listener, Move, PageStatus, Steps, Way, failure
from gdscache.moves.pages import Batch, Files, Verdicts, Waits
from gdscache.moves.passing import PassingReads, give_late
from gdscache.moves.reads import LayeredReads, Reading, Reads
from gdscache.timeline import OFF, Timeline

if TYPE_CHECKING:
    from gdscache.checksum import Checksums
    from gdscache.streams import Event
    from gdscache.tiers.bounce import Bounce, Extents
    from gdscache.tiers.page_io import Positions
    from gdscache.tiers.transfer import Moved, Mover

_SCATTER_BYTES = 64 << 20  # landed pages that are copied with one call, at most
_SCATTERS = 16  # ... and a load is copied with about so many


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What moves bytes: the planes' mover, memories and files by the names of their spaces, the bounce reserve.

    `refusal`: why no further read may begin, or None. It may cost a system call.
    """

    mover: Mover
    memories: Mapping[str, Extents]
    files: Mapping[str, Files]
    bounce: Bounce | None = None
    refusal: Callable[[], PageStatus | None] = lambda: None
    timeline: Timeline = OFF


class LoadMove:
    """A load or a prefetch under way; see `Moving`. Its pages are in memory, to be read into it, or to pass it by."""

    read = False
    read_event: Event = None

    def __init__(self, machine: Machine, waits: Waits, move: Move, after: Sequence[Event], listener: Listener) -> None:
        self._machine = machine
        self._waits = waits
        self._move = move
        self._after = after
        self._listener = listener
        self._mover = machine.mover
        self._layout = layout = machine.mover.layout
        self._cancelled = False
        self._every = range(layout.n_layers)
        self._groups = move.groups or (self._every,)
        self._copies = any(way.target == PLANES for way in move.ways)
        self._blocks = _stacked([way.targets for way in move.ways]) if self._copies else np.empty((0, 1), np.int64)
        timeline = machine.timeline
        sums = np.concatenate([self._sums(way) for way in move.ways])
        self._verdicts = Verdicts(sums, len(self._groups), listener, waits, timeline)
        until = waits.now() + move.seconds
        self._reads = Reads(machine.files, machine.refusal, layout, self._verdicts, until, waits, timeline)
        self._known: list[Batch] = []  # pages in memory whose bytes are known to be right
        self._there: list[Batch] = []  # ... those that are checked
        self._staying: list[LayeredReads] = []
        passing: list[Batch] = []
        row = 0
        for way in move.ways:
            rows = np.arange(row, row + len(way), dtype=np.int64)
            row += len(way)
            self._place(way, rows, passing)
        self._passing = self._through(passing)
        self._sources: list[LayeredReads | PassingReads] = [*self._staying]
        if self._passing is not None:
            self._sources.append(self._passing)
        self._queued = range(0)  # layers whose copies were queued by `first`
        self._broken: BaseException | None = None
        self._ran = False
        self._lock = threading.Lock()
        self._ending: Counter[int] = Counter()  # late reads of a row

    def _sums(self, way: Way) -> Checksums:
        return np.zeros((len(way), self._layout.n_layers), dtype=np.uint64) if way.sums is None else way.sums

    def _place(self, way: Way, rows: Positions, passing: list[Batch]) -> None:
        """Pages of a way, to where they are or are read to."""
        memories = self._machine.memories
        if way.source in memories:
            there = self._known if way.sums is None else self._there
            there.append(Batch(rows, memories[way.source], way.sources))
            return
        space, places = (way.through, way.places) if way.target == PLANES else (way.target, way.targets)
        if places is None:
            bounce = self._machine.bounce
            assert bounce is not None, "no bounce reserve"
            passing.append(Batch(rows, bounce.extents, rows, way.source, way.sources))  # placed round by round
            return
        if way.sums is not None:
            memories[space].checksums[places] = way.sums
        batch = Batch(rows, memories[space], places, way.source, way.sources)
        self._staying.append(LayeredReads(self._reads, self._verdicts, self._layout, batch, self._groups))

    def _through(self, batches: Sequence[Batch]) -> PassingReads | None:
        if not batches or self._machine.bounce is None:
            return None
        return PassingReads(
            self._reads,
            self._verdicts,
            self._machine.bounce,
            self._layout,
            batches,
            self._groups,
            self._waits,
            lambda: self._cancelled,
        )

    # -- the move ----------------------------------------------------------------------------------------------------

    def first(self) -> None:
        """Queue the first copies, or else the first reads, in the caller's thread.

        A thread of the pool begins when the caller's lets go of the interpreter's lock, and who launches a model does
        that seldom: some 2 ms in which neither the bus nor the SSD would have anything to do. Nothing waits here, so
        a mover that copies at once is left to the steps. What it raises comes out of `end`.
        """
        try:
            self._first()
        except BaseException as error:  # noqa: BLE001 - what was begun has to end
            self._broken = error

    def _first(self) -> None:
        there = [*self._known, *self._there]
        for reads in self._staying:
            reads.begin(first=True)
        if self._sources or not there:
            return
        if all(self._mover.queues(batch.extents) for batch in there):
            layers = self._groups[0]
            moved = self._copy_resident(layers)
            if moved is not None:
                self._listener.ready(layers, moved.event)
            self._queued = layers

    @property
    def broken(self) -> BaseException | None:
        """What ended it at its begin."""
        return self._broken

    def cancel(self) -> None:
        """Copy no further."""
        self._cancelled = True

    def end(self) -> Steps[End]:
        """As `Moving.end`. Again, behind one that broke off, it moves nothing more, and ends what was begun."""
        broken = self._broken
        begun, self._ran = self._ran, True
        run = () if begun or broken is not None else (self._run(),)
        for steps in (*run, self._reads.drain(), self._verdicts.settle(), self._end_copies()):
            error = yield from failure(steps)
            broken = broken or error
        if self._passing is not None:
            self._passing.end()
        late = sorted({int(reading.batch.rows[page]) for reading, page in self._reads.late})
        return End(late=late, error=broken)

    def _run(self) -> Steps[None]:
        for layers in self._groups:
            queued = layers == self._queued
            for reads in self._staying:
                reads.begin()
            moved = None if queued else self._copy_resident(layers)
            if layers.stop == self._every.stop:
                for batch in self._known:
                    self._verdicts.say(batch.rows, PageStatus.LOADED)
            for source in self._sources:
                part = max(1, source.page_bytes(layers))
                most = min(len(self._move) * len(self._groups) // _SCATTERS, _SCATTER_BYTES // part)
                yield from source.land(layers, max(1, most), self._landed)
            if self._copying and not queued:
                event = moved.event if moved is not None and not self._sources else self._mover.mark_loads()
                self._listener.ready(layers, event)

    def _end_copies(self) -> Steps[None]:
        """All copies are queued, or never will be: wait for them."""
        if not self._copies:
            return
        event = self._mover.mark_loads()
        self._listener.ready(self._every, event)
        yield self._waits.happened(event)

    @property
    def _copying(self) -> bool:
        return self._copies and not self._cancelled

    def _copy_resident(self, layers: range) -> Moved | None:
        """Copy layers of pages that are in memory; of those whose bytes are known to be right no verdict waits."""
        moved = None
        for batch in self._there:
            moved = self._landed(batch, layers) or moved
        if self._copying:
            for batch in self._known:
                moved = self._scatter(batch, layers, sums=False)
        return moved

    def _landed(self, batch: Batch, layers: range) -> Moved | None:
        """Copy layers of pages whose bytes are there. What is not copied (a prefetch, a cancelled load) is checked
        here: its bytes stay in memory."""
        if not self._copying:
            self._verdicts.hashed(batch, layers)
            return None
        moved = self._scatter(batch, layers, sums=True)
        self._verdicts.copied(batch, layers, moved)
        return moved

    def _scatter(self, batch: Batch, layers: range, *, sums: bool) -> Moved:
        blocks = torch.from_numpy(self._blocks[batch.rows])
        bounds = self._layout.layer_bounds
        nbytes = len(batch) * (bounds[layers.stop - 1][1] - bounds[layers.start][0])
        with self._machine.timeline.span("scatter", layers=layers, pages=len(batch), bytes=nbytes):
            return self._mover.scatter(batch.extents, batch.places, blocks, layers, self._after, sums=sums)

    # -- what is late ------------------------------------------------------------------------------------------------

    def on_end(self, callback: Callable[[int], None]) -> None:
        late: dict[Reading, list[int]] = {}
        for reading, page in self._reads.late:
            late.setdefault(reading, []).append(page)
            self._ending[int(reading.batch.rows[page])] += 1
        for row in range(len(self._move)):
            if row not in self._ending:
                callback(row)
        for reading, pages in late.items():
            reading.io.on_end(self._page_ended(reading, set(pages), callback))

    def _page_ended(self, reading: Reading, pages: set[int], callback: Callable[[int], None]) -> Callable[[int], None]:
        """What a reading calls for each page that nothing touches any more: the row has ended with the last of them."""

        def ended(page: int) -> None:
            if page not in pages:
                return
            row = int(reading.batch.rows[page])
            if self._machine.bounce is not None:
                give_late(self._machine.bounce, reading, page)
            with self._lock:
                self._ending[row] -= 1
                last = not self._ending[row]
            if last:
                callback(row)

        return ended


def _stacked(tables: Sequence[Positions]) -> Positions:
    return tables[0] if len(tables) == 1 else np.concatenate(tables)
