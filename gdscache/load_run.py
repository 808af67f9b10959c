"""One load on its thread: pages from the CPU tier and the SSD into the planes, and a verdict on each.

Layers move in groups. Pages of the SSD are read into the CPU slots reserved for them, or pass through the bounce
reserve, and are copied as they land, together with the same layers of pages that are in the CPU tier; the next groups
are read meanwhile. The copy takes the checksums on its way. A verdict exists for every page before `result()` returns,
and nothing is published from here except CPU copies of verified pages.

Python's time counts here: what is done for each page is done for many at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gdscache.config import LoadConfig
from gdscache.layout import GroupSizes, PageLayout, copy_groups, read_groups
from gdscache.load_passing import PassingReads
from gdscache.load_reads import LayeredReads, LoadReads
from gdscache.load_verdicts import Batch, Verdicts
from gdscache.loading import LayerwiseLoad, LoadReport
from gdscache.streams import Event
from gdscache.tiers.bounce import Bounce
from gdscache.tiers.manager import PageStatus, PageTask, TierManager
from gdscache.tiers.transfer import Moved, Mover

GROUP_SIZES = GroupSizes()  # layers that are read at a time
_SCATTER_BYTES = 64 << 20  # landed pages that are copied with one call, at most
_SCATTERS = 16  # ... and a load is copied with about so many


@dataclasses.dataclass(frozen=True, slots=True)
class _Moves:
    """Pages that move together, in `groups` of layers: those that are `resident` in the CPU tier (as a batch: `here`),
    those that are read into it, and those that pass it by."""

    groups: Sequence[range]
    resident: Sequence[PageTask]
    here: Batch | None
    reads: LayeredReads | None
    through: PassingReads | None


class LoadRun:
    """The execution of one load. Call it once."""

    def __init__(
        self,
        manager: TierManager,
        mover: Mover,
        bounce: Bounce | None,
        layout: PageLayout,
        config: LoadConfig,
        load: LayerwiseLoad,
        after: tuple[Event, ...],
        *,
        copy: bool,
    ) -> None:
        self._manager = manager
        self._mover = mover
        self._bounce = bounce
        self._layout = layout
        self._every = range(layout.n_layers)
        self._always = config.verify == "always"
        self._until = time.monotonic() + config.deadline
        self._load = load
        self._copy = copy
        self._after = after
        self._blocks = torch.cat([part.blocks for part in load.parts]).numpy() if load.parts else np.empty((0, 1))
        self._tasks = [task for part in load.parts for task in part.plan.tasks]
        for row, task in enumerate(self._tasks):
            task.row = row
        self._verdicts = Verdicts(manager, load, len(self._tasks))
        self._reads = LoadReads(manager, bounce, self._verdicts, self._until)
        self._resident = [t for t in self._tasks if t.tier == "cpu" and t.filling is None]
        self._shared = [t for t in self._tasks if t.filling is not None]
        self._from_ssd = [t for t in self._tasks if t.tier == "ssd"]
        self._moves: _Moves | None = None
        self._queued = range(0)  # layers whose copies are queued before the run
        self._started: float | None = None

    def begin(self) -> None:
        """Queue the first copies, or else the first reads, in the caller's thread, before the run.

        A thread of the pool begins when the caller's lets go of the interpreter's lock, and who launches a model does
        that seldom: some 2 ms in which neither the bus nor the SSD would have anything to do. Nothing waits here, so
        a mover that copies at once is left to the run.
        """
        self._started = time.monotonic()
        with self._manager.timeline.span("begin", load=self._load.number, pages=len(self._tasks)):
            self._moves = moves = self._prepared(self._resident, self._from_ssd, last=not self._shared)
            if moves.reads is not None:
                moves.reads.begin(first=True)
            elif moves.here is not None and moves.through is None and self._mover.queues(moves.here.extents):
                moved = self._scatter_resident(moves.here, moves.groups[0])
                if moved is not None and not self._shared:
                    self._signal(moves.groups[0], moved.event)
                self._queued = moves.groups[0]

    def break_off(self) -> None:
        """In place of the run, or behind one that raised: end what was begun."""
        with self._ended():
            pass

    def __call__(self) -> None:
        kind = "load" if self._copy else "prefetch"
        with self._manager.timeline.span(kind, load=self._load.number, pages=len(self._tasks)):
            self._run()

    def _run(self) -> None:
        with self._ended():
            self._move()

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        started = self._started or time.monotonic()
        with contextlib.ExitStack() as ends:  # the last first, each whatever became of those before it
            ends.callback(lambda: self._finish(time.monotonic() - started))
            ends.callback(self._reads.give_bounced)
            ends.callback(self._end_copies)
            ends.callback(self._reads.drain)  # nothing but an exception leaves reads behind
            yield

    def _end_copies(self) -> None:
        """Nobody waits for a layer any more: all are queued, or never will be. Then wait for the copies."""
        if not self._copy:
            return
        event = None
        try:
            event = self._mover.mark_loads()
        finally:
            self._signal(self._every, event)
        if event is not None:
            event.synchronize()

    def _move(self) -> None:
        moves = self._moves or self._prepared(self._resident, self._from_ssd, last=not self._shared)
        with self._measured("ssd", self._from_ssd) if self._from_ssd else self._measured("cpu", self._resident):
            self._move_by_layer(moves, last=not self._shared)
            self._verdicts.check(wait=True)
        self._wait_for_others(self._shared)
        self._verdicts.check(wait=True)

    @contextlib.contextmanager
    def _measured(self, tier: str, tasks: Sequence[PageTask]) -> Iterator[None]:
        """Tell the cost model what pages of a tier took. A chunk of a prefetch says little about a load."""
        if not (self._copy and tasks):
            yield
            return
        busy = self._manager.busy
        busy.begin(tier, self._started or time.monotonic())
        try:
            yield
        finally:
            good = all(task.status is PageStatus.LOADED for task in tasks)
            busy.end(tier, len(tasks) * self._layout.page_bytes if good else None, time.monotonic())

    def _prepared(self, resident: Sequence[PageTask], read: Sequence[PageTask], *, last: bool) -> _Moves:
        """How pages move that are in the CPU tier, and those that are read."""
        staying = [t for t in read if t.target is not None]
        passing = [t for t in read if t.target is None]
        groups = self._groups(len(resident), len(read), layered=last and self._copy)
        self._verdicts.expect(len(groups))
        here = self._resting(resident, [t.source.slot for t in resident])
        there = self._resting(staying, [t.target.slot for t in staying if t.target is not None])
        reads = None if there is None else LayeredReads(self._reads, self._layout, there, groups)
        return _Moves(groups, resident, here, reads, self._passing(passing, groups))

    def _move_by_layer(self, moves: _Moves, *, last: bool) -> None:
        """Copy pages group by group. `last`: nothing comes behind them, so a group's layers are ready when these pages
        have them."""
        groups, here, reads = moves.groups, moves.here, moves.reads
        if here is None and reads is None and moves.through is None:
            return
        for layers in groups:
            queued = layers == self._queued
            if reads is not None:
                reads.begin()
            moved = None if here is None or queued else self._scatter_resident(here, layers)
            if layers.stop == self._every.stop and not self._always:
                self._verdicts.say(moves.resident, PageStatus.LOADED)
            for source in (reads, moves.through):
                if source is not None:
                    most = min(len(self._tasks) * len(groups) // _SCATTERS, _SCATTER_BYTES // source.page_bytes(layers))
                    source.land(layers, max(1, most), self._scatter)
            if last and self._copying and not queued:
                nothing_read = reads is None and moves.through is None
                self._signal(layers, moved.event if moved is not None and nothing_read else self._mover.mark_loads())

    def _groups(self, resident: int, read: int, *, layered: bool) -> Sequence[range]:
        """The layers that move together, when so many pages are there or read."""
        if not layered:
            return (self._every,)
        if not read:
            return copy_groups(self._layout, resident)
        return read_groups(self._layout, read, GROUP_SIZES.paced(self._manager.costs.bandwidths().get("ssd")))

    def _resting(self, tasks: Sequence[PageTask], slots: Sequence[int]) -> Batch | None:
        """Pages that have, or get, a place in the CPU tier."""
        cpu = self._manager.cpu
        return None if cpu is None or not tasks else Batch.of(tasks, cpu.extents, slots)

    def _passing(self, tasks: Sequence[PageTask], groups: Sequence[range]) -> PassingReads | None:
        """Pages that have none."""
        if not tasks or self._bounce is None:
            return None
        return PassingReads(
            self._reads,
            self._verdicts,
            self._bounce,
            self._layout,
            tasks,
            groups,
            cancelled=lambda: self._load.cancelled,
        )

    def _scatter_resident(self, batch: Batch, layers: range) -> Moved | None:
        """Copy layers of pages whose bytes are known to be there; their verdict does not wait for it."""
        if self._always:
            return self._scatter(batch, layers)
        return self._scattered(batch, layers, sums=False) if self._copying else None

    def _wait_for_others(self, tasks: Sequence[PageTask]) -> None:
        """Pages that another load, planned before this one, is reading. Waits only for earlier loads, so it ends."""
        there = []
        for task in tasks:
            assert task.filling is not None, "nobody to wait for"
            status = self._manager.await_filling(task.filling, max(0.0, self._until - time.monotonic()))
            if status is PageStatus.LOADED:
                there.append(task)
            else:
                self._verdicts.say([task], status)
        self._queued = range(0)
        self._move_by_layer(self._prepared(there, (), last=False), last=False)

    def _scatter(self, batch: Batch, layers: range) -> Moved | None:
        """Copy layers of pages whose bytes are there. What is not copied (a prefetch, a cancelled load) is checked
        here: its bytes stay in the CPU tier."""
        if not batch.tasks:
            return None
        if not self._copying:
            self._verdicts.hashed(batch, layers)
            return None
        moved = self._scattered(batch, layers, sums=True)
        self._verdicts.copied(batch, layers, moved)
        return moved

    def _scattered(self, batch: Batch, layers: range, *, sums: bool) -> Moved:
        blocks = torch.from_numpy(self._blocks[batch.rows])
        bounds = self._layout.layer_bounds
        nbytes = len(batch.tasks) * (bounds[layers.stop - 1][1] - bounds[layers.start][0])
        with self._manager.timeline.span("scatter", layers=layers, pages=len(batch.tasks), bytes=nbytes):
            return self._mover.scatter(batch.extents, batch.slots, blocks, layers, self._after, sums=sums)

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def _copying(self) -> bool:
        return self._copy and not self._load.cancelled

    def _signal(self, layers: range, event: Event) -> None:
        for layer in layers:
            self._load.signal(layer, event)

    def _finish(self, seconds: float) -> None:
        failed, pending = False, PageStatus.PENDING
        for part in self._load.parts:
            tasks = part.plan.tasks
            self._manager.finish_pages([t for t in tasks if t.status is pending], PageStatus.ABORTED)
            part.report = part.report or self._report(tasks, seconds)
            failed = failed or part.report.tokens < len(tasks) * self._layout.page_tokens
            self._manager.end(part.plan.lease)
        self._load.release_event.signal()
        if failed and self._manager.ssd is not None:
            self._manager.ssd.commit_deletions()

    def _report(self, tasks: Sequence[PageTask], seconds: float) -> LoadReport:
        loaded = PageStatus.LOADED
        statuses = tuple([task.status for task in tasks])
        by_tier = Counter([task.tier for task in tasks if task.status is loaded])
        for name, pages in by_tier.items():
            self._manager.count("bytes_loaded", name, pages * self._layout.page_bytes)
        good = next((i for i, status in enumerate(statuses) if status is not loaded), len(statuses))
        nbytes = {name: pages * self._layout.page_bytes for name, pages in by_tier.items()}
        return LoadReport(good * self._layout.page_tokens, statuses, nbytes, seconds)
