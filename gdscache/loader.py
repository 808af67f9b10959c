"""The worker side of loads: plans them, and has each moved by one of a few threads (load_run.py)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence

import torch

from gdscache.config import LoadConfig
from gdscache.errors import EngineClosedError
from gdscache.keys import Page
from gdscache.layout import PageLayout
from gdscache.load_run import LoadRun
from gdscache.loading import LayerwiseLoad, LoadPart, LoadReport
from gdscache.streams import Event
from gdscache.threads import Workers, failure_of, log_failure
from gdscache.tiers.bounce import Bounce
from gdscache.tiers.manager import LoadPlan, PageStatus, TierManager
from gdscache.tiers.transfer import Mover

_NO_BLOCKS = torch.empty((0, 1), dtype=torch.int64)


class Loader:
    """Runs loads on a few threads. `keep`: pages from the SSD stay in the CPU tier, as far as there is room."""

    def __init__(
        self,
        manager: TierManager,
        mover: Mover,
        bounce: Bounce | None,
        layout: PageLayout,
        config: LoadConfig,
        *,
        keep: bool = True,
    ) -> None:
        self.manager = manager
        self.mover = mover
        self.bounce = bounce
        if bounce is not None:
            manager.adopt(bounce)
        self.layout = layout
        self.config = config
        self.keep = keep
        self._running: set[LayerwiseLoad] = set()  # or waiting for a thread; the manager's lock guards it
        self.changed = threading.Condition(manager.lock)  # notified when there are none any more
        self._pool = Workers(config.threads, "gdscache-load")
        self._closed = False
        self._order = threading.Lock()  # of plans; taken before the manager's lock

    @property
    def loads(self) -> int:
        """Loads under way or waiting for a thread. The manager's lock is held."""
        return len(self._running)

    def start(
        self,
        requests: Sequence[tuple[Sequence[Page], torch.Tensor, int]],
        owner: str,
        after: Iterable[Event] = (),
        *,
        here: bool = True,
    ) -> LayerwiseLoad:
        """Start moving pages into planes.

        A request is its pages, their blocks, int64 (pages, blocks_per_page), and the token that its first page begins
        with. `here`: the first copies or reads are begun in this thread; not for who holds the manager's lock.
        """
        # Plans and the order of execution agree, so that waiting for another load ends.
        with self._order if here else contextlib.nullcontext():
            with self.manager.lock, contextlib.ExitStack() as undo:
                self._check_open()
                parts = []
                for pages, blocks, start in requests:
                    with self.manager.timeline.span("plan", pages=len(pages)):
                        plan = self.manager.plan_load(pages, owner, keep=self.keep)
                    undo.callback(self._abandon, plan)
                    parts.append(LoadPart(plan, blocks[: len(plan.tasks)], start))
                timeline, device = self.manager.timeline, self.mover.planes.device
                load = LayerwiseLoad(
                    parts,
                    self.layout,
                    self.config.deadline,
                    timeline=timeline,
                    device=device,
                    calls=self.manager.calls,
                )
                run = self._run(load, tuple(after), copy=True)
                if not here:
                    self._submit(load, run)
                undo.pop_all()
            if here:
                self._begin(load, run)
        return load

    def _begin(self, load: LayerwiseLoad, run: LoadRun) -> None:
        """Begin in this thread, and leave the rest to one of the pool."""
        try:
            run.begin()
            with self.manager.lock:
                self._submit(load, run)
        except BaseException:
            run.break_off()
            raise

    def bring(self, plan: LoadPlan) -> LoadReport:
        """Read pages of the SSD into the CPU slots that the plan has for them, in this thread, and no further.

        No page of the plan may be somebody else's to read. Ends the plan's lease.
        """
        part = LoadPart(plan, _NO_BLOCKS)
        timeline = self.manager.timeline
        load = LayerwiseLoad([part], self.layout, self.config.deadline, layered=False, timeline=timeline)
        self._run(load, (), copy=False)()
        assert part.report is not None, "a run that returns has a report"
        return part.report

    def _abandon(self, plan: LoadPlan) -> None:
        """A batch that is not begun after all: nobody will read into the slots that its plans have."""
        self.manager.finish_pages(plan.tasks, PageStatus.ABORTED)
        self.manager.end(plan.lease)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed meanwhile", "open a new one with CacheEngine.from_config")

    def _run(self, load: LayerwiseLoad, after: tuple[Event, ...], *, copy: bool) -> LoadRun:
        return LoadRun(self.manager, self.mover, self.bounce, self.layout, self.config, load, after, copy=copy)

    def _submit(self, load: LayerwiseLoad, run: LoadRun) -> None:
        if load.tokens:
            self._running.add(load)
        self._pool.submit(functools.partial(self._carry_out, load, run), functools.partial(self._lost, load, run))

    def _carry_out(self, load: LayerwiseLoad, run: LoadRun) -> None:
        """A load on its thread. Whatever ends it, whoever waits for it goes on."""
        error = failure_of(run)
        if error is not None:
            log_failure(error)
            run.break_off()
        self._end(load, error)
        if load.tokens:
            self.manager.settle()

    def _lost(self, load: LayerwiseLoad, run: LoadRun) -> None:
        run.break_off()
        self._end(load, None)

    def _end(self, load: LayerwiseLoad, error: BaseException | None) -> None:
        load.end(error)
        with self.manager.lock:
            self._running.discard(load)
            if not self._running:
                self.changed.notify_all()

    def close(self) -> None:
        """Refuse new loads and wait for those that run."""
        with self._order, self.manager.lock:
            self._closed = True
        self._pool.shutdown()
