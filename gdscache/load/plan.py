"""What a load or a prefetch moves, as its plan has it: which pages, out of which tiers, and what becomes of each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.index.table import Entry
from gdscache.load.report import told_of
from gdscache.moves import PageStatus
from gdscache.pages.keys import Page
from gdscache.pages.reasons import CACHED, Reason, joined
from gdscache.tiers.base import Lease, Tier

STATUSES = tuple(PageStatus)
CODES = {status: code for code, status in enumerate(STATUSES)}
_LOADED = CODES[PageStatus.LOADED]
_IS_LOADED = bytes(code == _LOADED for code in range(256))
_NONE = np.empty(0, np.int64)
Behind = Literal["more", "busy", "missing", "no_room"]


@dataclasses.dataclass(slots=True, eq=False)
class TierRun:
    """Consecutive pages of a plan that one tier has. `filling`: the page of another plan that brings this one there.

    Not changed once made; `frozen` would take three times as long to make.
    """

    tier: Tier
    rows: range
    filling: tuple[LoadPlan, int] | None = None


@dataclasses.dataclass(slots=True, eq=False)
class LoadRequest:
    """The pages that a load is asked for, one sequence a request, and how far its plan has come: up to page `at` of
    request number `request`."""

    requests: Sequence[Sequence[Page]] = ()
    owner: str = ""
    keep: bool = True
    checked: bool = False
    request: int = 0
    at: int = 0

    @property
    def pages(self) -> int:
        """How many there are."""
        return sum(map(len, self.requests))

    @property
    def left(self) -> int:
        """Pages that no part of the plan has asked for."""
        return sum(map(len, self.requests[self.request :])) - self.at


class LoadPlan:
    """The pages that a load will move, in order, and the leases on everything that it touches, one a request.

    A page's row is its place in `pages`. `slots` are theirs in the tiers that `runs` say. `sources`: their entries in
    these, None for a page in memory that is complete. `targets`: the entries that they get in the landing tier, None
    where they get none. `requests`: the rows of each request. `statuses` are codes, places in `STATUSES`, uint8 of
    shape (pages,); the manager's lock guards them. A plan may be made in parts: then all of it grows
    (`LoadPlanner.go_on`) until it is `whole`.
    """

    def __init__(self, asked: LoadRequest | None = None) -> None:
        self.asked = LoadRequest() if asked is None else asked
        self.leases: list[Lease] = []
        self.pages: list[Page] = []
        self.slots: list[int] = []
        self.sources: list[Entry | None] = []
        self.runs: list[TierRun] = []
        self.targets: list[Entry | None] = []
        self.requests: list[range] = []
        self.statuses: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.under_way: Counter[str] = Counter()  # pages by tier, while they are counted
        self._rows: dict[int, int] = {}  # by the slots of the targets, once somebody asked

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def whole(self) -> bool:
        """Whether no part is to come."""
        return self.asked.request == len(self.asked.requests)

    def status(self, row: int) -> PageStatus:
        return STATUSES[int(self.statuses[row])]

    def pending(self) -> Int64Array:
        """The rows that have no verdict."""
        code = CODES[PageStatus.PENDING]
        return np.flatnonzero(self.statuses == code) if code in self.statuses.tobytes() else _NONE

    def loaded(self, rows: range | None = None) -> bytes:
        """1 for each page that is, else 0; of some rows, or of all."""
        mask = self.statuses.tobytes().translate(_IS_LOADED)
        return mask if rows is None else mask[rows.start : rows.stop]

    def told(self, rows: range) -> tuple[PageStatus, ...]:
        """The statuses of some rows."""
        codes = self.statuses.tobytes()[rows.start : rows.stop]
        if codes.count(_LOADED) == len(codes):
            return (PageStatus.LOADED,) * len(codes)
        return tuple([STATUSES[code] for code in codes])

    def reasons(self, rows: range, start: int, page_tokens: int) -> Iterator[Reason]:
        """Where the pages of a request come from, or why they have not come. `start`: the token of the first."""
        good = self.loaded()
        for run in self.runs:
            first, stop = max(rows.start, run.rows.start), min(rows.stop, run.rows.stop)
            if first >= stop:
                continue
            tier, at = run.tier.name, start + (first - rows.start) * page_tokens
            if 0 in good[first:stop]:
                yield from joined(at, page_tokens, (told_of(self.status(row), tier) for row in range(first, stop)))
            else:
                yield Reason(at, at + (stop - first) * page_tokens, CACHED, tier)

    def by_tier(self, good: bytes | bytearray, rows: range | None = None) -> dict[str, int]:
        """Pages of each tier for which `good` has a 1; of some rows, or of all."""
        found: dict[str, int] = {}
        start, stop = (0, len(good)) if rows is None else (rows.start, rows.stop)
        for run in self.runs:
            pages = good.count(1, max(start, run.rows.start), min(stop, run.rows.stop))
            if pages:
                found[run.tier.name] = found.get(run.tier.name, 0) + pages
        return found

    def entries(self, rows: Iterable[int]) -> list[Entry]:
        """The sources of pages that have one."""
        return cast("list[Entry]", [*map(self.sources.__getitem__, rows)])

    def row_of(self, target: Entry) -> int:
        """The row of the page that gets this slot of the landing tier."""
        if target.slot not in self._rows:
            self._rows = {one.slot: row for row, one in enumerate(self.targets) if one is not None}
        return self._rows[target.slot]

    def tier_of(self, row: int) -> Tier:
        return next(run.tier for run in self.runs if row in run.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """The next pages of a prefetch: whether each moves, or is at hand. `chunk` has those that do.

    `then` says what comes behind them: `more`, or a page that is somebody else's to bring (`busy`), that is not there
    any more (`missing`), or that finds no slot (`no_room`).
    """

    found: list[bool]
    then: Behind
    chunk: LoadPlan
