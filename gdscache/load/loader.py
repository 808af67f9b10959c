"""Who plans loads, and has each moved by one of a few threads (load/run.py)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from gdscache.arrays import Int64Array
from gdscache.config import LoadConfig
from gdscache.cuda.streams import Event
from gdscache.errors import EngineClosedError
from gdscache.limits import LIMITS
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadPlan
from gdscache.load.planner import LoadPlanner
from gdscache.load.report import LoadPart, LoadReport
from gdscache.load.run import LoadRun
from gdscache.moves import Executor, Priority, Steps, failure
from gdscache.pages.keys import Page
from gdscache.pages.layout import GroupSizes, PageLayout
from gdscache.pages.planes import Blocks
from gdscache.runtime.threads import log_failure

FIRST_PAGES = 16  # of a large load, and at least `FIRST_BYTES`, are planned before the first of them moves
FIRST_BYTES = 64 << 20
PLANNED_BYTES = 1 << 20  # the bus carries them in 20 us: in that time more than one page is planned
_Request = tuple[Sequence[Page], Blocks, int]


class Loader:
    """Runs loads into planes of `device`, `threads` at once.

    `keep`: what is read stays in the landing tier, as far as there is room.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        executor: Executor,
        layout: PageLayout,
        config: LoadConfig,
        deadline: float,
        device: torch.device,
        *,
        threads: int = LIMITS.load_threads,
        keep: bool = True,
        sizes: GroupSizes | None = None,
    ) -> None:
        """`sizes`: of the groups of layers that are read, where they are not the usual ones."""
        self.planner = planner
        self.manager = planner.manager
        self.executor = executor
        self.layout = layout
        self.config = config
        self.deadline = deadline
        self.keep = keep
        self.sizes = sizes
        self._device = device
        self._running: set[LayerwiseLoad] = set()  # or waiting for a thread; the manager's lock guards it
        self.changed = threading.Condition(self.manager.lock)  # notified when there are none any more
        self._lane = executor.lane(Priority.LOAD, self.manager.settle, threads)
        self._closed = False
        self.order = threading.RLock()  # of plans; taken before the manager's lock

    @property
    def loads(self) -> int:
        """Loads under way or waiting for a thread that may read files. The manager's lock is held."""
        return len(self._running)

    def start(
        self,
        requests: Sequence[_Request],
        owner: str,
        after: Iterable[Event] = (),
        *,
        here: bool = True,
        checked: bool = False,
    ) -> LayerwiseLoad:
        """Start moving pages into planes.

        A request is its pages, their blocks, int64 (pages, blocks_per_page), and the token that its first page begins
        with. `here`: the first copies or reads are begun in this thread; not for who holds the manager's lock.
        `checked`: only pages that are complete in the landing tier, without a second look and without a deadline.
        What is begun waits for nothing; ask the load whether it has `begun`, which may.
        """
        first = self._first_part(sum(len(pages) for pages, _, _ in requests)) if here else None
        # Plans and the order of execution agree, so that waiting for another load ends.
        with self.order if here else contextlib.nullcontext():
            with self.manager.lock:
                self._check_open()
                asked = [some for some, _, _ in requests]
                plan = self.planner.plan(asked, owner, keep=self.keep, checked=checked, most=first)
                try:
                    load = LayerwiseLoad(
                        [LoadPart(0, start) for _, _, start in requests],
                        self.layout,
                        self.deadline,
                        timeline=self.manager.timeline,
                        device=self._device,
                        calls=self.manager.calls,
                        checked=checked,
                        orders=self.executor.orders,
                        waited=self.manager.measures.waited,
                    )
                    run = self._run(load, plan, _grown(load, plan, requests), tuple(after), checked=checked)
                    begins = here and run.brief
                    if not begins:
                        self._leave(load, run, plan, requests)
                except BaseException:
                    self.planner.abandon(plan)
                    raise
            if begins:
                self._begin(load, run, plan, requests, first)
        return load

    def _first_part(self, pages: int) -> int | None:
        """How many pages are planned before the first of them moves; None: all of them."""
        first = max(FIRST_PAGES, FIRST_BYTES // self.layout.page_bytes)
        return first if pages > 2 * first else None

    def _next_part(self, part: int) -> int:
        """The pages of the part behind one of so many: as many as are planned while that is on the bus, two for each
        at least."""
        return part * max(2, self.layout.page_bytes // PLANNED_BYTES)

    def _begin(
        self, load: LayerwiseLoad, run: LoadRun, plan: LoadPlan, requests: Sequence[_Request], part: int | None
    ) -> None:
        """Begin in this thread, part by part of a large load, each as much larger than the one before as is planned
        while that is on the bus. The rest is left to a thread of the lane: the end too, where that breaks off."""
        try:
            run.begin()
            while part is not None and not plan.whole:
                part = self._next_part(part)
                with self.manager.lock:
                    self.planner.go_on(plan, part if plan.asked.left >= 2 * part else None)
                    run.grow(_grown(load, plan, requests))
                    brief = run.brief
                if not brief:
                    break
                run.begin()
            with self.manager.lock:
                self._leave(load, run, plan, requests)
        except BaseException as error:
            self._lane.start(self._lost(load, run))
            if not isinstance(error, Exception):  # which ends the engine
                raise
            load.broken_off(error)  # `LayerwiseLoad.begun` raises it

    def _leave(self, load: LayerwiseLoad, run: LoadRun, plan: LoadPlan, requests: Sequence[_Request]) -> None:
        """To a thread of the lane, with a plan that is whole. The manager's lock is held."""
        if not plan.whole:
            self.planner.go_on(plan)
            run.grow(_grown(load, plan, requests))
        self._submit(load, run)

    def bring(self, plan: LoadPlan) -> Steps[LoadReport]:
        """Read pages into the slots of the landing tier that the plan has for them, and no further. Ends the plan.

        No page of it may be somebody else's to read.
        """
        part, timeline = LoadPart(len(plan)), self.manager.timeline
        load = LayerwiseLoad([part], self.layout, self.deadline, layered=False, timeline=timeline)
        run = self._run(load, plan, None, ())
        error = yield from failure(self._timed("prefetch", load, run))
        if error is not None:
            yield from run.abort()
            raise error
        assert part.report is not None, "a run that returns has a report"
        return part.report

    def _run(
        self,
        load: LayerwiseLoad,
        plan: LoadPlan,
        blocks: Int64Array | None,
        after: Sequence[Event],
        *,
        checked: bool = False,
    ) -> LoadRun:
        parts = self.planner, self.executor, self.layout, self.config, self.deadline
        return LoadRun(*parts, load, plan, blocks, after, self.sizes, checked=checked)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed meanwhile", "open a new one with CacheEngine.from_config")

    def _submit(self, load: LayerwiseLoad, run: LoadRun) -> None:
        if load.tokens and not load.checked:
            self._running.add(load)
        self._lane.start(self._carry_out(load, run), functools.partial(self._lost, load, run))

    def _timed(self, kind: str, load: LayerwiseLoad, run: LoadRun) -> Steps[None]:
        with self.manager.timeline.span(kind, load=load.number, pages=sum(part.pages for part in load.parts)):
            yield from run.steps()

    def _carry_out(self, load: LayerwiseLoad, run: LoadRun) -> Steps[None]:
        """A load on its thread. Whatever ends it, whoever waits for it goes on."""
        error = yield from failure(self._timed("load", load, run))
        if error is not None:
            log_failure(error)
            yield from run.abort()
        self._end(load, error)

    def _lost(self, load: LayerwiseLoad, run: LoadRun) -> Steps[None]:
        yield from run.abort()
        self._end(load, None)

    def _end(self, load: LayerwiseLoad, error: BaseException | None) -> None:
        load.end(error)
        with self.manager.lock:
            self._running.discard(load)
            if not self._running:
                self.changed.notify_all()

    def close(self) -> None:
        """Refuse new loads and wait for those that run."""
        with self.order, self.manager.lock:
            self._closed = True
        self._lane.close()


def _grown(load: LayerwiseLoad, plan: LoadPlan, requests: Sequence[_Request]) -> Blocks:
    """Tell a load how many pages its plan has by now; their blocks, and perhaps more behind them."""
    for part, rows in zip(load.parts, plan.requests, strict=False):
        part.pages = len(rows)
    tables = [blocks[: len(rows)] for rows, (_, blocks, _) in zip(plan.requests, requests, strict=False)]
    if len(tables) == 1:
        return requests[0][1]
    return np.concatenate(tables) if tables else np.empty((0, 1), np.int64)
