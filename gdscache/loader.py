"""The worker side of loads: plans them and moves their pages, each load on one thread.

Pages of the CPU tier are copied layer by layer; pages of the SSD are read into the CPU slots reserved for them, or
through the bounce reserve, and copied with all layers as they land. The copy takes the checksums on its way. A verdict
exists for every page before `result()` returns, and nothing is published from here except CPU copies of verified pages.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from gdscache.config import LoadConfig
from gdscache.errors import DeadlineError, EngineClosedError, ShortIOError
from gdscache.layout import PageLayout
from gdscache.loading import LayerwiseLoad, LoadPart, LoadReport
from gdscache.storage.base import Submission
from gdscache.streams import Event
from gdscache.tiers.base import Lease
from gdscache.tiers.bounce import Bounce, Extents
from gdscache.tiers.index import Page
from gdscache.tiers.manager import PageStatus, PageTask, TierManager
from gdscache.tiers.transfer import Moved, Mover

_ROUND_BYTES = 32 << 20  # SSD bytes that one round through the bounce reserve asks for at once
_READ_PAGES = 128  # SSD pages of one submit: the first are on their way while the others are prepared
_SCATTER_PAGES = 16  # landed pages that are copied with one call


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """A task of a load, the lease that pins its pages, and its row in the load's block table."""

    task: PageTask
    lease: Lease
    row: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """Reads in flight, what they are for, and the slots that they land in."""

    extents: Extents
    submission: Submission
    work: Sequence[_Work]
    slots: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Copied:
    """Pages on their way into the planes, layer group by layer group; their bytes are checked when they are there."""

    work: Sequence[_Work]
    slots: Sequence[int]
    extents: Extents
    moves: Sequence[tuple[range, Moved]]

    def done(self) -> bool:
        return all(m.event is None or m.event.query() for _, m in self.moves)  # type: ignore[no-untyped-call]

    def bad(self) -> npt.NDArray[np.bool_]:
        """Which pages are not what was stored. Waits for the copies."""
        expected = self.extents.checksums[self.slots]
        bad = np.zeros(len(self.work), dtype=bool)
        for group, moved in self.moves:
            bad |= (moved.checksums() != expected[:, group.start : group.stop]).any(axis=1)
        return bad


class Loader:
    """Runs loads on a few threads."""

    def __init__(
        self, manager: TierManager, mover: Mover, bounce: Bounce | None, layout: PageLayout, config: LoadConfig
    ) -> None:
        self.manager = manager
        self.mover = mover
        self.bounce = bounce
        self.layout = layout
        self.config = config
        self._pool = ThreadPoolExecutor(config.threads, "gdscache-load")
        self._closed = False

    def start(
        self, requests: Sequence[tuple[Sequence[Page], torch.Tensor]], owner: str, after: Iterable[Event] = ()
    ) -> LayerwiseLoad:
        """Start moving pages into planes; a request is its pages and their blocks, int64 (pages, blocks_per_page)."""
        with self.manager.lock:  # plans and the order of execution agree, so that waiting for another load ends
            self._check_open()
            parts = []
            for pages, blocks in requests:
                plan = self.manager.plan_load(pages, owner)
                parts.append(LoadPart(plan, blocks[: len(plan.tasks)]))
            return self._submit(parts, tuple(after), copy=True)

    def prefetch(self, pages: Sequence[Page], owner: str) -> LayerwiseLoad:
        """Bring pages from the SSD into the CPU tier, as many as find a slot there, and no further."""
        with self.manager.lock:
            self._check_open()
            plan = self.manager.plan_load(pages, owner, pass_through=False)
            return self._submit([LoadPart(plan, torch.empty((0, 1), dtype=torch.int64))], (), copy=False)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed meanwhile", "open a new one with CacheEngine.from_config")

    def _submit(self, parts: Sequence[LoadPart], after: tuple[Event, ...], *, copy: bool) -> LayerwiseLoad:
        load = LayerwiseLoad(parts, self.layout, self.config.deadline)
        load.future = self._pool.submit(_Run(self, load, after, copy=copy))
        return load

    def close(self) -> None:
        """Refuse new loads and wait for those that run."""
        with self.manager.lock:
            self._closed = True
        self._pool.shutdown(wait=True)


class _Run:
    """The execution of one load, on one thread."""

    def __init__(self, loader: Loader, load: LayerwiseLoad, after: tuple[Event, ...], *, copy: bool) -> None:
        self._manager = loader.manager
        self._mover = loader.mover
        self._bounce = loader.bounce
        self._layout = loader.layout
        self._always = loader.config.verify == "always"
        self._until = time.monotonic() + loader.config.deadline
        self._load = load
        self._copy = copy
        self._after = after
        self._blocks = torch.cat([part.blocks for part in load.parts]) if load.parts else torch.empty((0, 1))
        tasks = [(task, part.plan.lease) for part in load.parts for task in part.plan.tasks]
        self._work = [_Work(task, lease, row) for row, (task, lease) in enumerate(tasks)]
        self._readings: list[_Reading] = []
        self._copied: deque[_Copied] = deque()

    def __call__(self) -> None:
        started = time.monotonic()
        try:
            self._move()
        finally:
            while self._readings:  # nothing but an exception leaves reads behind
                self._drain(self._readings[0])
            event = self._mover.mark_loads() if self._copy else None
            for layer in range(self._layout.n_layers):
                self._load.signal(layer, event)
            if event is not None:
                event.synchronize()
            self._finish(time.monotonic() - started)

    def _move(self) -> None:
        resident = [w for w in self._work if w.task.tier == "cpu" and w.task.filling is None]
        shared = [w for w in self._work if w.task.filling is not None]
        from_ssd = [w for w in self._work if w.task.tier == "ssd"]
        kept = [(w, w.task.target.slot) for w in from_ssd if w.task.target is not None]
        passing = [w for w in from_ssd if w.task.target is None]
        begun = time.monotonic()
        cpu, readings = self._manager.cpu, []
        for at in range(0, len(kept) if cpu is not None else 0, _READ_PAGES):
            assert cpu is not None
            some = kept[at : at + _READ_PAGES]
            readings.append(self._read([w for w, _ in some], cpu.extents, [slot for _, slot in some]))
        self._scatter_resident(resident, by_layer=not from_ssd and not shared)
        for reading in readings:
            self._land(reading)
        self._pass_through(passing)
        self._check_copied(wait=True)
        tier, moved = ("ssd", from_ssd) if from_ssd else ("cpu", resident)  # resident pages wait beside reads
        self._manager.observe(tier, len(moved) * self._layout.page_bytes, time.monotonic() - begun)
        self._wait_for_others(shared)
        self._check_copied(wait=True)

    # -- pages that are in the CPU tier ------------------------------------------------------------------------------

    def _scatter_resident(self, work: Sequence[_Work], *, by_layer: bool) -> None:
        if not work or self._manager.cpu is None:
            return
        extents = self._manager.cpu.extents
        slots, moves = [w.task.source.slot for w in work], []
        if self._copying:
            blocks = self._blocks[[w.row for w in work]]
            for group in self._layout.layer_groups if by_layer else (range(self._layout.n_layers),):
                moved = self._mover.scatter(extents, slots, blocks, group, self._after, sums=self._always)
                moves.append((group, moved))
                for layer in group if by_layer else ():
                    self._load.signal(layer, moved.event)
        if moves and self._always:
            self._copied.append(_Copied(work, slots, extents, moves))
            return
        for w, slot in zip(work, slots, strict=True):
            bad = self._always and not moves and extents.bad_layer(slot) is not None
            self._verdict(w, PageStatus.CHECKSUM if bad else PageStatus.LOADED)

    def _wait_for_others(self, work: Sequence[_Work]) -> None:
        """Pages that another load, planned before this one, is reading. Waits only for earlier loads, so it ends."""
        there = []
        for w in work:
            assert w.task.filling is not None, "nobody to wait for"
            status = self._manager.await_filling(w.task.filling, max(0.0, self._until - time.monotonic()))
            if status is PageStatus.LOADED:
                there.append(w)
            else:
                self._verdict(w, status)
        self._scatter_resident(there, by_layer=False)

    # -- pages that come from the SSD --------------------------------------------------------------------------------

    def _read(self, work: Sequence[_Work], extents: Extents, slots: Sequence[int]) -> _Reading:
        ssd = self._manager.ssd
        assert ssd is not None, "a page of the SSD tier without one"
        for slot, sums in zip(slots, ssd.checksums([w.task.source for w in work]), strict=True):
            extents.checksums[slot] = 0 if sums is None else sums
        pages = [(w.task.source, extents.memory(slot)) for w, slot in zip(work, slots, strict=True)]
        reading = _Reading(extents, ssd.read(pages), work, slots)
        self._readings.append(reading)
        return reading

    def _land(self, reading: _Reading) -> list[int]:
        """Check and copy pages as their reads complete; the slots whose I/O is over."""
        over: list[int] = []
        ready: list[tuple[_Work, int]] = []
        try:
            for i, error in reading.submission.completions(self._until):
                slot = reading.slots[i]
                over.append(slot)
                if error is None:
                    ready.append((reading.work[i], slot))
                else:
                    short = isinstance(error, ShortIOError)
                    self._verdict(reading.work[i], PageStatus.SHORT_READ if short else PageStatus.IO_ERROR)
                if len(ready) == _SCATTER_PAGES:
                    self._scatter_landed(ready, reading.extents)
                    ready = []
            self._readings.remove(reading)
        except DeadlineError:
            self._scatter_landed(ready, reading.extents)
            ready, late = [], self._drain(reading)
            over = [slot for i, slot in enumerate(reading.slots) if i not in late]
        self._scatter_landed(ready, reading.extents)
        return over

    def _scatter_landed(self, ready: Sequence[tuple[_Work, int]], extents: Extents) -> None:
        """Copy pages whose bytes are there. What is not copied (a prefetch, a cancelled load) is checked here: its
        bytes stay in the CPU tier."""
        work, slots = [w for w, _ in ready], [slot for _, slot in ready]
        if ready and self._copying:
            blocks, every = self._blocks[[w.row for w in work]], range(self._layout.n_layers)
            moved = self._mover.scatter(extents, slots, blocks, every, self._after, sums=True)
            self._copied.append(_Copied(work, slots, extents, [(every, moved)]))
        else:
            for w, slot in ready:
                self._verdict(w, PageStatus.LOADED if extents.bad_layer(slot) is None else PageStatus.CHECKSUM)
        self._check_copied(wait=False)

    def _check_copied(self, *, wait: bool) -> None:
        """The verdicts on pages that are in the planes; with `wait`, on all that are on their way there."""
        while self._copied and (wait or self._copied[0].done()):
            copied = self._copied.popleft()
            for w, bad in zip(copied.work, copied.bad().tolist(), strict=True):
                self._verdict(w, PageStatus.CHECKSUM if bad else PageStatus.LOADED)

    def _pass_through(self, work: Sequence[_Work]) -> None:
        """Pages with no place in the CPU tier: rounds through the bounce reserve, the next read under the copy.

        Waits for a slot only while it holds none, so two loads never wait for each other.
        """
        if not work or self._bounce is None:
            return
        pool, extents, rest = self._bounce.loads, self._bounce.extents, list(work)
        most = max(1, min(pool.slots // 2, _ROUND_BYTES // self._layout.extent_bytes))
        rounds: list[_Reading] = []
        while rest or rounds:
            if rest and len(rounds) < 2 and not self._load.cancelled:
                wanted = min(most, len(rest))
                seconds = max(0.0, self._until - time.monotonic())
                slots = pool.try_take(wanted) if rounds else pool.take(wanted, seconds)
                if slots:
                    rounds.append(self._read(rest[: len(slots)], extents, slots))
                    del rest[: len(slots)]
                    continue
            if not rounds:
                for w in rest:
                    self._verdict(w, PageStatus.CANCELLED if self._load.cancelled else PageStatus.DEADLINE)
                return
            over = self._land(rounds.pop(0))
            self._check_copied(wait=True)
            event = self._mover.mark_loads()  # a load that was cancelled meanwhile has copies that nobody checks
            if event is not None:
                event.synchronize()
            pool.give(over)

    def _drain(self, reading: _Reading) -> set[int]:
        """Wait for reads that nobody takes any more; which of them are still in flight at the deadline.

        Those keep their memory for good.
        """
        self._readings.remove(reading)
        late = set(range(len(reading.work)))
        try:
            for i, _ in reading.submission.completions(self._until):
                late.remove(i)
        except DeadlineError:
            self._manager.count("quarantined", "slots", len(late))
        for i, w in enumerate(reading.work):
            if w.task.status is PageStatus.PENDING:
                self._verdict(w, PageStatus.DEADLINE)
            if i in late and w.task.target is not None:
                self._manager.quarantine(w.lease, [w.task.target])
        return late

    # -- verdicts ----------------------------------------------------------------------------------------------------

    @property
    def _copying(self) -> bool:
        return self._copy and not self._load.cancelled

    def _verdict(self, work: _Work, status: PageStatus) -> None:
        if status is PageStatus.LOADED and self._load.cancelled:
            status = PageStatus.CANCELLED
        self._manager.finish_page(work.task, status)

    def _finish(self, seconds: float) -> None:
        failed = False
        for part in self._load.parts:
            for task in part.plan.tasks:
                if task.status is PageStatus.PENDING:
                    self._manager.finish_page(task, PageStatus.ABORTED)
            part.report = self._report(part.plan.tasks, seconds)
            failed = failed or part.report.first_bad is not None
            self._manager.end(part.plan.lease)
        self._load.release_event.signal()
        if failed and self._manager.ssd is not None:
            self._manager.ssd.commit_deletions()

    def _report(self, tasks: Sequence[PageTask], seconds: float) -> LoadReport:
        statuses = tuple(task.status for task in tasks)
        by_tier = Counter(task.tier for task in tasks if task.status is PageStatus.LOADED)
        for name, pages in by_tier.items():
            self._manager.count("bytes_loaded", name, pages * self._layout.page_bytes)
        good = next((i for i, status in enumerate(statuses) if status is not PageStatus.LOADED), len(statuses))
        nbytes = {name: pages * self._layout.page_bytes for name, pages in by_tier.items()}
        return LoadReport(good * self._layout.page_tokens, statuses, nbytes, seconds)
