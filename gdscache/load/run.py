"""One load as steps: begin its moves, wait for them, give each page its verdict before `result()` returns.

Only verified copies in the landing tier are published. Pages of plain tiers, which another executor moves, come behind
the others. Pages that another load brings come last: this load waits for them, then copies them from the landing tier.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gdscache.arrays import Int64Array, integers
from gdscache.load.plan import LoadPart, LoadPlan, LoadReport, TierRun, slowest_of
from gdscache.load.planner import LoadPlanner
from gdscache.moves import PLANES, Executor, Move, Moving, PageStatus, Priority, Spent, Steps, Way, failure
from gdscache.native import take_rows
from gdscache.pages.layout import PLAIN, GroupSizes, PageLayout, copy_groups, read_groups
from gdscache.runtime.threads import in_turn
from gdscache.tiers.base import DurableTier, Tier, checked_sums
from gdscache.tiers.quarantine import Late

if TYPE_CHECKING:
    from gdscache.config import LoadConfig
    from gdscache.cuda.streams import Event
    from gdscache.load.handle import LayerwiseLoad
    from gdscache.pages.checksum import Checksums

GROUP_SIZES = GroupSizes()  # groups of layers that are read together
_NONE = np.empty(0, np.int64)


class Stage(enum.Enum):
    """How much of a load's plan its move has."""

    NONE = enum.auto()
    OPEN = enum.auto()  # a part; `Moving.extend` adds the rest
    SHARED = enum.auto()  # all pages but those of plain tiers, or the ones that other loads bring: another move follows
    WHOLE = enum.auto()  # all pages
    ENDED = enum.auto()


class LoadRun:
    """The execution of one load, and the listener of its move. Drive `steps` once, and `abort` where they raise.

    `tables`: blocks of the planes, int64 (pages, blocks_per_page), a table a request, with at least the planned pages;
    None for a prefetch, whose pages stay in the landing tier. `parts`: of each request; its pages and its report are
    filled in. Pages of a plan that is `checked` are in memory and verified; they are not hashed again and have no
    deadline. `load`: the caller's handle, which hears how the load proceeds. `plain` moves the pages of plain tiers.

    Many methods: the steps of one load and the events of its move change one state.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        executor: Executor,
        config: LoadConfig,
        layout: PageLayout,
        deadline: float,
        plan: LoadPlan,
        parts: Sequence[LoadPart],
        tables: Sequence[Int64Array] | None = None,
        after: Sequence[Event] = (),
        load: LayerwiseLoad | None = None,
        *,
        plain: Executor | None = None,
    ) -> None:
        self._planner = planner
        self._executors = executor, executor if plain is None else plain  # of packed, and of plain tiers
        self._unpacked: list[TierRun] = []
        self._manager = planner.manager
        self._executor = executor
        self._layout = layout
        self._always = config.verify == "always" and not plan.checked
        self._start = executor.now()
        self._until = math.inf if plan.checked else self._start + deadline
        self._by_ranks = executor.orders is not None
        self.load, self.parts = load, parts
        self.number = self._manager.timeline.number() if load is None else load.number
        self.plan = plan
        self._tables = tables
        self._blocks: Int64Array | None = None
        self._after = after
        self._shared: list[TierRun] = []
        self._begun = 0  # runs of the plan that a move has
        self._stage = Stage.NONE
        self._moving: Moving | None = None
        self._parts: list[Int64Array] = []  # in pieces, the plan's row of each row of the move
        self._busy, self._since, self._little = "", self._start, False  # see `_watch`
        self._spent: Spent | None = None  # the ranks' times of the move
        self._grow()

    # -- the moves -----------------------------------------------------------------------------------------------------

    @property
    def brief(self) -> bool:
        """Whether `begin` waits for nothing: no checksum has to be read first."""
        plan = self.plan
        runs = plan.runs[self._begun :]
        return all(run.tier.at_hand(plan.entries(run.rows)) for run in runs if isinstance(run.tier, DurableTier))

    def grow(self, most: int | None = None) -> None:
        self._planner.go_on(self.plan, most)
        self._grow()

    def _grow(self) -> None:
        for part, rows in zip(self.parts, self.plan.requests, strict=False):
            part.pages = len(rows)
        if self._tables is not None and len(self._tables) == 1:
            self._blocks = self._tables[0]
        elif self._tables is not None:
            cut = [table[: len(rows)] for table, rows in zip(self._tables, self.plan.requests, strict=False)]
            self._blocks = np.concatenate(cut) if cut else np.empty((0, 1), np.int64)

    def begin(self) -> None:
        """Begin the planned pages that have no move yet. Any thread may call it. If it raises, `abort` ends the
        load."""
        plan = self.plan
        runs, self._begun, brought = plan.runs[self._begun :], len(plan.runs), list[TierRun]()
        for run in runs:
            apart = self._executors[run.tier.plain] is not self._executor  # ranks move all pages of a load in one
            (self._shared if run.filling is not None else self._unpacked if apart else brought).append(run)
        pages = len(plan.pages) - runs[0].rows.start if runs else 0
        with self._manager.timeline.span("begin", load=self.number, pages=pages):
            self._hand_over(*self._all_ways(brought))
            if self._blocks is not None and self._moving is not None and self._manager.measured:
                self._time()

    def _all_ways(self, runs: Sequence[TierRun]) -> tuple[list[Way], list[Int64Array]]:
        ways, order, there = list[Way](), list[Int64Array](), dict[Tier, list[range]]()
        for run in runs:
            there.setdefault(run.tier, []).append(run.rows)
        for tier in self._manager.tiers.values():  # the fastest first
            for part, way in self._ways(tier, there[tier]) if tier in there else ():
                order.append(part)
                ways.append(way)
        return ways, order

    def _hand_over(self, ways: Sequence[Way], order: Sequence[Int64Array]) -> None:
        left = self._shared or self._unpacked
        # ranks begin all pages of a load at once: the pages of other loads are added when they are there
        more = not self.plan.whole or (self._shared and self._by_ranks)
        stage = Stage.OPEN if more else Stage.SHARED if left else Stage.WHOLE
        if self._moving is not None:
            self._parts += order
            self._moving.extend(ways, last=stage is not Stage.OPEN)
            self._stage = stage
            if self.load is not None and stage is Stage.WHOLE:
                self.load.carried_by(self._moving, last=True)
        elif ways:
            self._move(ways, order, stage)
        else:
            self._stage = stage

    def _time(self) -> None:
        """Measure the speed of the slowest tier.

        Not of a memory tier while the blocks are in use, for example by a forward pass that the GPU has not begun: the
        pages then wait for the blocks, not for the tier, and do not hold up other loads. Ranks report at the load's end
        when they came to it, and whether it waited.
        """
        waits = self._by_ranks or any(event is not None and not event.query() for event in self._after)
        if waits:
            self._planner.waits(self.plan)
        if not self.plan.whole:
            return
        brought = [run for run in self.plan.runs if run.filling is None and not run.tier.plain]
        brought = brought or [run for run in self.plan.runs if run.filling is None]
        if (
            self._by_ranks
            or not waits
            or self._manager.tiers[slowest_of(brought, self._manager.tiers)[0]].kind == "files"
        ):
            self._watch(brought, self._start)

    def _watch(self, runs: Sequence[TierRun], since: float) -> None:
        """Measure the slowest tier of `runs`, which move since `since`."""
        self._busy, half = slowest_of(runs, self._manager.tiers)
        self._since, self._little = since, not half
        if half and not self._by_ranks:
            self._manager.busy.begin(self._busy, since)

    def _ways(self, tier: Tier, runs: list[range]) -> list[tuple[Int64Array, Way]]:
        if not isinstance(tier, DurableTier):
            return [self._out_of_memory(tier, runs)]
        rows = [*itertools.chain.from_iterable(runs)]
        if not tier.at_hand(self.plan.entries(rows)):
            rows = self._learned(tier, rows)
            if not rows:
                return []
        numbers, slots = integers(rows), integers([*map(self.plan.slots.__getitem__, rows)])
        tables = numbers, slots, checked_sums(tier, self.plan.entries(rows), self._layout.n_sums)
        targets = [*map(self.plan.targets.__getitem__, rows)]
        slots_there = [target.slot for target in targets if target is not None]
        found = []
        if slots_there:
            landing = self._manager.landing_of(tier)
            part, source, sums = _taken(tables, [n for n, target in enumerate(targets) if target is not None])
            places = integers(slots_there)
            if self._blocks is None:
                found.append((part, Way(tier.name, landing.name, source, places, sums=sums)))
            else:
                blocks = take_rows(self._blocks, part)
                found.append((part, Way(tier.name, PLANES, source, blocks, landing.name, places, sums)))
        if len(slots_there) < len(rows):
            assert self._blocks is not None, "a prefetch of a page that gets no slot"
            part, source, sums = _taken(tables, [n for n, target in enumerate(targets) if target is None])
            found.append((part, Way(tier.name, PLANES, source, take_rows(self._blocks, part), sums=sums)))
        return found

    def _learned(self, tier: DurableTier, rows: list[int]) -> list[int]:
        """Have the tier read the missing checksums. Returns the rows that have one now; a page without a checksum
        cannot be verified and fails. Asked before the checksums are taken: another load may read them meanwhile."""
        tier.learn(self.plan.entries(rows))
        there = [row for row in rows if tier.at_hand(self.plan.entries((row,)))]
        unread = sorted({*rows} - {*there})
        self._planner.finish(self.plan, integers(unread), PageStatus.IO_ERROR)
        return there

    def _out_of_memory(self, tier: Tier, runs: list[range]) -> tuple[Int64Array, Way]:
        assert self._blocks is not None, "a prefetch of a page that is in memory"
        numbers = [*itertools.chain.from_iterable(runs)]
        rows, slots = integers(numbers), integers([*map(self.plan.slots.__getitem__, numbers)])
        sums = self._executors[tier.plain].checksums(tier.name, slots) if self._always else None
        return rows, Way(tier.name, PLANES, slots, take_rows(self._blocks, rows), sums=sums)

    def _move(self, ways: Sequence[Way], order: Sequence[Int64Array], stage: Stage) -> None:
        priority = Priority.PREFETCH if self._blocks is None else Priority.LOAD
        seconds = max(0.0, self._until - self._executor.now())
        self._stage, self._moving, self._parts = stage, None, [*order]
        groups = () if stage is Stage.SHARED else self._groups(ways)
        move = Move(priority, tuple(ways), seconds, groups, self.number, stage is Stage.OPEN)
        executor = self._executors[self._manager.tiers[ways[0].source].plain]
        self._moving = moving = executor.begin(move, self._after, self)
        if self.load is not None:
            self.load.carried_by(moving, last=stage is Stage.WHOLE)

    def _groups(self, ways: Sequence[Way]) -> tuple[range, ...]:
        """The layers that move together, by the number of pages to read, or to copy where none is read; pages that are
        not planned yet count too."""
        if self._blocks is None:
            return ()
        tiers = self._manager.tiers
        read = [way for way in ways if isinstance(tiers[way.source], DurableTier)]
        ahead = self.plan.left
        files = read[-1].source if read else self._files_ahead() if ahead else ""
        if not files:
            return copy_groups(self._layout, sum(map(len, ways)) + ahead)
        speed = self._manager.costs.bandwidths().get(files)
        return read_groups(self._layout, sum(map(len, read)) + ahead, GROUP_SIZES.paced(speed))

    def _files_ahead(self) -> str:
        """The tier of files that has the last page asked for; "" if that page is in memory. The last page is the first
        to be evicted, so it stands for the pages not planned yet."""
        last = self.plan.asked[-1]
        with self._manager.lock:
            there = (tier for tier in self._manager.tiers.values() if last and tier.index.has(last[-1].key))
            tier = next(there, None)
        return tier.name if isinstance(tier, DurableTier) else ""

    def steps(self) -> Steps[None]:
        if self._stage in (Stage.NONE, Stage.OPEN):
            self.begin()
        if self._shared and self._by_ranks:
            self._hand_over(*(yield from self._share()))
        yield from self._end_move()
        self._measure()
        if self._unpacked:
            yield from self._end_plain()
        if self._shared:
            copies = yield from self._share()
            for left, way, rows in zip(range(len(copies[0]))[::-1], *copies, strict=True):
                self._move([way], [rows], Stage.SHARED if left else Stage.WHOLE)
                yield from self._end_move()
        self._finish()

    def _end_move(self) -> Steps[None]:
        moving = self._moving
        if moving is None or self._stage is Stage.ENDED:
            return
        if self._stage is Stage.OPEN:  # the planning failed
            moving.extend((), last=True)
            self._stage = Stage.SHARED
        end = yield from moving.end()
        self._stage, self._spent = Stage.ENDED, end.spent
        if end.late:  # late reads keep their slots until they end
            self._manager.quarantine.hold(moving, {row: self._late(int(self.rows[row])) for row in end.late})
        if end.error is not None:
            raise end.error

    def _end_plain(self) -> Steps[None]:
        """Move the pages of plain tiers."""
        ways, order = self._all_ways(self._unpacked)
        if ways:
            if self._blocks is not None and self._manager.measured:
                self._watch(self._unpacked, self._executor.now())
            self._move(ways, order, Stage.SHARED if self._shared else Stage.WHOLE)
            yield from self._end_move()
            self._measure()

    def _share(self) -> Steps[tuple[list[Way], list[Int64Array]]]:
        """Wait for the pages that another load, planned earlier, brings. Returns how they are copied. Waits only for
        earlier loads, so it ends."""
        planner, there = self._planner, dict[Tier, list[range]]()
        shared, self._shared = self._shared, []
        for run in shared:
            assert run.filling is not None, "a run without a plan that brings it"
            plan, row = run.filling
            known = functools.partial(plan.has_ended, row)
            yield self._executor.changed(planner.filled, known, max(0.0, self._until - self._executor.now()))
            status = plan.status(row)
            if status in (PageStatus.LOADED, PageStatus.CANCELLED):  # a cancelled page is good, too
                there.setdefault(run.tier, []).append(run.rows)
            else:
                late = status is PageStatus.PENDING
                planner.finish(self.plan, np.array(run.rows), PageStatus.DEADLINE if late else status)
        copies = [self._out_of_memory(tier, some) for tier, some in there.items()]
        return [way for _, way in copies], [rows for rows, _ in copies]

    def abort(self) -> Steps[None]:
        """End the load, in place of `steps` or after they raised, at any point."""
        yield from failure(self._end_move())  # its error is known already
        self._finish()

    # -- the listener of the move --------------------------------------------------------------------------------------

    @property
    def rows(self) -> Int64Array:
        """The plan's row of each row of the move. Not for the caller's thread: numpy releases the interpreter's lock
        for large arrays."""
        if len(self._parts) != 1:
            self._parts = [np.concatenate(self._parts) if self._parts else _NONE]
        return self._parts[0]

    def judged(self, rows: Int64Array, status: PageStatus) -> None:
        self._planner.finish(self.plan, self.rows[rows], status)

    def ready(self, layers: range, event: Event) -> None:
        if self.load is not None and self._stage is Stage.WHOLE:
            self.load.signal(layers, event)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _late(self, row: int) -> Late:
        plan, manager = self.plan, self._manager
        source, target = plan.sources[row], plan.targets[row]
        tier = plan.tier_of(row)
        with manager.lock:
            lease = manager.lease("quarantine")
            if source is not None:  # only a rank can be late with a page in memory, and it gets no other move meanwhile
                lease.add(tier.index, source)
            if target is not None:
                lease.add(manager.landing_of(tier).index, target)
        memory = f"bounce{PLAIN * tier.plain}_loads" if target is None else manager.landing_of(tier).name
        return Late("read", memory, tier.name, plan.slots[row], functools.partial(manager.end, lease))

    def _measure(self) -> None:
        """Tell the cost model how long the pages of a tier took. A prefetch is not measured: it says little about a
        load. Of a tier with a little of the pages, the time is an upper bound: it tells only that the tier got
        faster."""
        tier, self._busy = self._busy, ""
        if not tier:
            return
        manager, now = self._manager, self._executor.now()
        seconds = now - self._since
        if self._by_ranks:
            spent = self._spent
            if spent is None or (spent.waited and manager.tiers[tier].kind != "files"):
                return
            seconds = spent.seconds
        pages = self.plan.brought(tier)
        nbytes = None if pages is None else pages * self._layout.bytes_in(tier)
        if self._little and (nbytes is None or not self._telling(tier, nbytes, seconds)):
            return
        if self._by_ranks or self._little:
            manager.busy.begin(tier, now - seconds)
        manager.busy.end(tier, nbytes, now)

    def _telling(self, tier: str, nbytes: int, seconds: float) -> bool:
        """Whether a time tells of a tier with a little of the pages: the others take half of it at most, or it is
        shorter than expected."""
        costs, runs = self._manager.costs, [run for run in self.plan.runs if run.filling is None]
        others = [run.tier.name for run in runs if run.tier.name != tier for _ in run.rows]
        took, price = costs.load_seconds(others, self._layout.bytes_in), costs.load_price(tier)
        if took is not None and 2 * took <= seconds:
            return True
        return price is not None and seconds < price[0] * nbytes + price[1]

    def _finish(self) -> None:
        plan, planner = self.plan, self._planner
        in_turn(
            lambda: planner.finish(plan, plan.pending(), PageStatus.ABORTED),
            self._all_ready,  # no caller waits for a layer any more
            self._measure,
            self._report,
            lambda: planner.end(plan),
            lambda: self.load and self.load.released(),
            self._commit_deletions,
        )
        self._moving = None  # the move refers to this run as its listener: cut the circle

    def _all_ready(self) -> None:
        if self.load is not None:
            self.load.signal(range(self._layout.n_layers), None)

    def _report(self) -> None:
        seconds, good = self._executor.now() - self._start, self.plan.loaded()
        found = self.plan.by_tier(good)
        sizes = {name: self._layout.bytes_in(name) for name in found}
        first = any(part.report is None for part in self.parts)
        for number, (part, rows) in enumerate(zip(self.parts, self.plan.requests, strict=True)):
            if part.report is None:
                part.report = self._report_on(number, rows, part.start, seconds, good, sizes)
        if first and found:
            slowest = max(found, key=[*self._manager.tiers].index)
            self._tell(slowest, sum(pages * sizes[name] for name, pages in found.items()), seconds, good, found)

    def _tell(self, slowest: str, nbytes: int, seconds: float, good: bytes, found: dict[str, int]) -> None:
        plan, manager = self.plan, self._manager
        manager.measures.loaded(slowest, nbytes, seconds)
        if self._blocks is not None:
            manager.latencies.loaded(slowest, nbytes, seconds)
        landed: dict[str, int] = {}
        if plan.targets.count(None) < len(plan.targets):
            there = zip(good, plan.targets, strict=True)
            landed = plan.by_tier(bytes([page if target is not None else 0 for page, target in there]))
        moved = manager.measures.moved
        with manager.lock:
            for name, pages in found.items():
                through = landed.get(name, 0)
                if self._blocks is not None:
                    moved(name, PLANES, pages - through)
                if through:
                    landing = manager.landing_of(manager.tiers[name]).name
                    moved(name, landing, through)
                    moved(landing, PLANES, through if self._blocks is not None else 0)

    def _report_on(
        self, number: int, rows: range, start: int, seconds: float, good: bytes, sizes: dict[str, int]
    ) -> LoadReport:
        plan = self.plan
        nbytes = {name: pages * sizes[name] for name, pages in plan.by_tier(good, rows).items()}
        for name, moved in nbytes.items():
            self._manager.count("bytes_loaded", name, moved)
        bad = good.find(0, rows.start, rows.stop)
        prefix = len(rows) if bad < 0 else bad - rows.start
        size, asked = self._layout.page_tokens, plan.asked
        reasons = [*plan.reasons(good, rows, start, size)]
        if asked and len(rows) < len(asked[number]):  # pages that went after the lookup
            reasons += self._manager.missing(asked[number], len(rows), 0, start, size)
        return LoadReport(prefix * size, plan.told(rows), nbytes, seconds, tuple(reasons))

    def _commit_deletions(self) -> None:
        if 0 in self.plan.loaded():
            for tier in self._manager.files:
                tier.commit_deletions()


def _taken(
    tables: tuple[Int64Array, Int64Array, Checksums | None], rows: list[int]
) -> tuple[Int64Array, Int64Array, Checksums | None]:
    first, second, sums = tables
    if len(rows) == len(first):
        return tables
    return take_rows(first, rows), take_rows(second, rows), None if sums is None else take_rows(sums, rows)
