"""Plans loads and has each carried out (load/run.py): begun in the caller's thread, ended by a thread of a lane."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from gdscache.config import LoadConfig
from gdscache.cuda.streams import Event
from gdscache.errors import EngineClosedError
from gdscache.limits import LIMITS
from gdscache.load.handle import LayerwiseLoad
from gdscache.load.plan import LoadPart, LoadPlan
from gdscache.load.planner import LoadPlanner
from gdscache.load.run import LoadRun
from gdscache.moves import Executor, PageStatus, Priority, Steps, failure
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.pages.planes import Blocks
from gdscache.runtime.threads import log_failure
from gdscache.tracing import OFF

FIRST_PAGES = 16  # pages of a large load's first part, or more, up to `FIRST_BYTES`
FIRST_BYTES = 64 << 20
PLANNED_BYTES = 1 << 20  # a page of this size takes 20 us on the bus, and planning one takes less
_Request = tuple[Sequence[Page], Blocks, int]


class Loader:
    """Runs loads into the planes, `threads` at once.

    `keep`: pages read from slower tiers stay in the landing tier, as far as it has room.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        executor: Executor,
        layout: PageLayout,
        config: LoadConfig,
        deadline: float,
        *,
        threads: int = LIMITS.load_threads,
        keep: bool = True,
        plain: Executor | None = None,
    ) -> None:
        """`plain` moves the pages of plain tiers."""
        self.planner = planner
        self.manager = planner.manager
        self.executor = executor
        self.layout = layout
        self.deadline = deadline
        self.keep = keep
        self._run = functools.partial(LoadRun, planner, executor, config, layout, deadline, plain=plain)
        # loads that a thread of the lane has or will get, and that may read files; the manager's lock guards it
        self._running: set[LoadRun] = set()
        self.changed = threading.Condition(self.manager.lock)  # notified when `_running` becomes empty
        self._lane = executor.lane(Priority.LOAD, self.manager.bring_in, threads)
        self._closed = False
        self.order = threading.RLock()  # serializes plans; taken before the manager's lock

    @property
    def loads(self) -> int:
        """Loads in the lane that may read files. Takes no lock."""
        return len(self._running)

    def start(
        self, requests: Sequence[_Request], owner: str, after: Iterable[Event] = (), *, checked: bool = False
    ) -> LayerwiseLoad:
        """Start moving pages into planes. This thread begins the first copies or reads; it must not hold the manager's
        lock.

        A request is (pages, blocks, start): blocks are int64 (pages, blocks_per_page), and `start` is the token that
        the first page begins with. `checked`: load only pages that are complete in the landing tier, without hashing
        them again and without a deadline. `start` never waits. `LayerwiseLoad.begun`, which may wait, raises the error
        of a failed begin.
        """
        first = self._first_part(sum([len(pages) for pages, _, _ in requests]))
        with self.order:  # plans begin in this order too, so a load only ever waits for earlier loads
            with self.manager.lock:
                load, run, brief = self._plan(requests, owner, after, checked=checked, most=first)
            if brief:
                self._begin(load, run, first)
        return load

    def queue(self, requests: Sequence[_Request], owner: str, after: Iterable[Event] = ()) -> LayerwiseLoad:
        """`start` for a caller that holds the manager's lock: a thread of the lane begins the load."""
        with self.manager.lock:
            return self._plan(requests, owner, after, begins=False)[0]

    def _plan(
        self,
        requests: Sequence[_Request],
        owner: str,
        after: Iterable[Event],
        *,
        checked: bool = False,
        most: int | None = None,
        begins: bool = True,
    ) -> tuple[LayerwiseLoad, LoadRun, bool]:
        """A load, its run, and whether this thread is to begin it: if it `begins` loads, and the begin waits for
        nothing. Else the load is in the lane. The manager's lock is held."""
        if self._closed:
            raise EngineClosedError("the engine was closed meanwhile", "open a new one with from_config")
        manager = self.manager
        asked, tables, starts = zip(*requests, strict=True) if requests else ((), (), ())
        plan = self.planner.plan(asked, owner, keep=self.keep, checked=checked, most=most)
        try:
            parts = [LoadPart(0, start) for start in starts]
            load = LayerwiseLoad(
                parts,
                self.layout,
                self.deadline,
                timeline=manager.timeline,
                calls=manager.calls,
                checked=checked,
                orders=self.executor.orders,
                waited=manager.measures.waited,
            )
            run = self._run(plan, parts, tables, tuple(after), load)
            brief = begins and run.brief
            if not brief:
                self._leave(run)
        except BaseException:
            self.planner.abandon(plan)
            raise
        return load, run, brief

    def _first_part(self, pages: int) -> int | None:
        first = max(FIRST_PAGES, FIRST_BYTES // self.layout.page_bytes)
        return first if pages > 2 * first else None

    def _next_part(self, part: int) -> int:
        """Pages of the part that follows a part of `part` pages: as many as can be planned while the bus carries that
        one, and at least twice as many."""
        return part * max(2, self.layout.page_bytes // PLANNED_BYTES)

    def _begin(self, load: LayerwiseLoad, run: LoadRun, part: int | None) -> None:
        """Begin the load in this thread. A large load begins part by part, each larger than the one before, so that the
        next is planned while the bus carries the last. A thread of the lane does the rest, and ends the load if this
        fails."""
        try:
            run.begin()
            while part is not None and not run.plan.whole:
                part = self._next_part(part)
                with self.manager.lock:
                    run.grow(part if run.plan.left >= 2 * part else None)
                    brief = run.brief
                if not brief:
                    break
                run.begin()
            with self.manager.lock:
                self._leave(run)
        except BaseException as error:
            self._lane.start(self._lost(run))
            if not isinstance(error, Exception):  # an interrupt, which ends the engine
                raise
            load.broken = error

    def _leave(self, run: LoadRun) -> None:
        """Plan the pages that are left, and queue the load in the lane. The manager's lock is held."""
        if not run.plan.whole:
            run.grow()
        if run.plan.pages and not run.plan.checked:
            self._running.add(run)
        self._lane.start(self._carry_out(run), functools.partial(self._lost, run))

    def bring(self, plan: LoadPlan) -> Steps[None]:
        """Read pages into their slots of the landing tier, and no further. Ends the plan.

        No page of the plan may be one that another plan reads.
        """
        error = yield from self._ended("prefetch", self._run(plan, [LoadPart(len(plan))]))
        if error is not None:
            raise error

    def _ended(self, kind: str, run: LoadRun) -> Steps[BaseException | None]:
        error = yield from failure(self._timed(kind, run))
        if error is not None:
            yield from run.abort()
        return error

    def _timed(self, kind: str, run: LoadRun) -> Steps[None]:
        timeline = self.manager.timeline
        with timeline.span(kind, load=run.number, pages=len(run.plan.pages)) as span:
            yield from run.steps()
            if timeline is not OFF:
                span.add(**_moved(run.parts))

    def _carry_out(self, run: LoadRun) -> Steps[None]:
        error = yield from self._ended("load", run)
        log_failure(error)
        self._end(run, error)

    def _lost(self, run: LoadRun) -> Steps[None]:
        """Ends a load whose begin or thread failed. `LayerwiseLoad.begun` raises the begin's error."""
        yield from run.abort()
        self._end(run, None)

    def _end(self, run: LoadRun, error: BaseException | None) -> None:
        assert run.load is not None, "a prefetch, which ends by itself"
        run.load.end(error)
        with self.manager.lock:
            self._running.discard(run)
            if not self._running:
                self.changed.notify_all()

    def close(self) -> None:
        """Refuse new loads and wait for the running ones."""
        with self.order, self.manager.lock:
            self._closed = True
        self._lane.close()


def _moved(parts: Iterable[LoadPart]) -> dict[str, Any]:
    """The bytes by tier, and the number of bad pages, of a finished load."""
    tiers: Counter[str] = Counter()
    bad = 0
    for part in parts:
        if part.report is not None:
            tiers.update(part.report.bytes_by_tier)
            bad += sum(status is not PageStatus.LOADED for status in part.report.pages)
    return {"bytes": tiers.total(), "tiers": dict(tiers), "bad_pages": bad}
