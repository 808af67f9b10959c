"""The plan of a load or a prefetch: its pages, their tiers and slots, and a status for each; and its reports."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from gdscache.arrays import Int64Array
from gdscache.index.table import Entry
from gdscache.moves import PageStatus
from gdscache.pages.hit import CACHED, Reason, Told, joined
from gdscache.pages.keys import Page
from gdscache.tiers.base import Lease, Tier

STATUSES = tuple(PageStatus)
CODES = {status: code for code, status in enumerate(STATUSES)}
_LOADED = CODES[PageStatus.LOADED]
_IS_LOADED = bytes(code == _LOADED for code in range(256))
_NONE = np.empty(0, np.int64)
# The state of the page behind a prefetch's chunk: it can be planned, another plan brings it, no tier has it any more,
# or the landing tier has no slot.
Behind = Literal["more", "busy", "missing", "no_room"]


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a load ended. `tokens` counts the good prefix; `pages` has a status for each page that the load found.
    `bytes_by_tier`: of good pages, by the tiers that they came from. `seconds`: from the call to the verdict.

    `reasons` says which tiers the tokens of a request come from, and why others have not come. A batch has its
    requests' reasons one after the other.
    """

    tokens: int
    pages: tuple[PageStatus, ...]
    bytes_by_tier: dict[str, int]
    seconds: float
    reasons: tuple[Reason, ...] = ()

    @property
    def first_bad(self) -> int | None:
        return next((i for i, status in enumerate(self.pages) if status is not PageStatus.LOADED), None)


@dataclasses.dataclass(slots=True)
class LoadPart:
    """One request of a load: its number of pages, and the token of the prompt that the first page begins with."""

    pages: int
    start: int = 0
    report: LoadReport | None = None


_CAUSES = {
    PageStatus.LOADED: CACHED,
    PageStatus.CHECKSUM: "bad",
    PageStatus.GONE: "bad",
    PageStatus.IO_ERROR: "failing",
    PageStatus.SHORT_READ: "failing",
    PageStatus.DEADLINE: "late",
    PageStatus.CANCELLED: "cancelled",
    PageStatus.ABORTED: "cancelled",
}


def told_of(status: PageStatus, tier: str) -> Told:
    cause = _CAUSES.get(status, "off")
    return Told(cause, tier, "" if cause in (CACHED, "late") else status.value)


@dataclasses.dataclass(slots=True, eq=False)
class TierRun:
    """Consecutive rows of a plan whose pages are in one tier. `filling`: (plan, row) of another plan's page that brings
    this one into `tier`.

    Never changed; `frozen` would take three times as long to make.
    """

    tier: Tier
    rows: range
    filling: tuple[LoadPlan, int] | None = None


class LoadPlan:
    """The pages that a load moves, in order, and one lease a request on every page and slot in use.

    A page's row is its place in `pages`. `slots` has its slot in the tier that `runs` says. `sources` has its entry
    there, or None for a complete page in memory. `targets` has its entry in the landing tier of that tier, or None
    where it gets none. `requests` has the rows of each request. `statuses` are places in `STATUSES`, uint8 of shape
    (pages,); the manager's lock guards them. A plan may be made in parts: all lists grow (`LoadPlanner.go_on`) until it
    is `whole`. `asked`: the pages that the load is asked for, one sequence a request; planned are all pages before page
    `at` of request number `request`.
    """

    def __init__(
        self, asked: Sequence[Sequence[Page]] = (), owner: str = "", *, keep: bool = True, checked: bool = False
    ) -> None:
        self.asked, self.owner, self.keep, self.checked = asked, owner, keep, checked
        self.request = self.at = 0
        self.leases: list[Lease] = []
        self.pages: list[Page] = []
        self.slots: list[int] = []
        self.sources: list[Entry | None] = []
        self.runs: list[TierRun] = []
        self.targets: list[Entry | None] = []
        self.requests: list[range] = []
        self.statuses: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.own: set[bytes] = set()  # keys of pages still to plan when a landing tier was first full: it keeps them
        self.under_way: Counter[str] = Counter()  # pages by tier that `LoadPlanner.under_way` counts
        self._rows: dict[Entry, int] = {}  # row by its target; filled by the first `row_of`

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def whole(self) -> bool:
        return self.request == len(self.asked)

    @property
    def left(self) -> int:
        return sum(map(len, self.asked[self.request :])) - self.at

    def status(self, row: int) -> PageStatus:
        return STATUSES[int(self.statuses[row])]

    def has_ended(self, row: int) -> bool:
        return self.status(row) is not PageStatus.PENDING

    def pending(self) -> Int64Array:
        code = CODES[PageStatus.PENDING]
        return np.flatnonzero(self.statuses == code) if code in self.statuses.tobytes() else _NONE

    def loaded(self) -> bytes:
        """A byte for each row: 1 if the page is loaded, else 0."""
        return self.statuses.tobytes().translate(_IS_LOADED)

    def brought(self, tier: str) -> int | None:
        """The number of the plan's own pages from a tier; None unless all of them are loaded."""
        rows = [run.rows for run in self.runs if run.tier.name == tier and run.filling is None]
        good = self.loaded()
        if 0 in good and any(0 in good[some.start : some.stop] for some in rows):
            return None
        return sum(map(len, rows))

    def told(self, rows: range) -> tuple[PageStatus, ...]:
        codes = self.statuses.tobytes()[rows.start : rows.stop]
        if codes.count(_LOADED) == len(codes):
            return (PageStatus.LOADED,) * len(codes)
        return tuple([STATUSES[code] for code in codes])

    def reasons(self, good: bytes, rows: range, start: int, page_tokens: int) -> Iterator[Reason]:
        """The tiers that a request's pages come from, or why they have not come. `good`: see `loaded`. `start`: the
        token that the first begins with."""
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
        """Pages by tier, of those rows (all by default) for which `good` has a 1."""
        found: dict[str, int] = {}
        start, stop = (0, len(good)) if rows is None else (rows.start, rows.stop)
        for run in self.runs:
            pages = good.count(1, max(start, run.rows.start), min(stop, run.rows.stop))
            if pages:
                found[run.tier.name] = found.get(run.tier.name, 0) + pages
        return found

    def entries(self, rows: Iterable[int]) -> list[Entry]:
        return cast("list[Entry]", [*map(self.sources.__getitem__, rows)])

    def row_of(self, target: Entry) -> int:
        if target not in self._rows:
            self._rows = {one: row for row, one in enumerate(self.targets) if one is not None}
        return self._rows[target]

    def tier_of(self, row: int) -> Tier:
        return next(run.tier for run in self.runs if row in run.rows)


def slowest_of(runs: Sequence[TierRun], tiers: Iterable[str]) -> tuple[str, bool]:
    """The slowest tier of runs, and whether it has half of their pages at least: less is little of the time that all
    of them take. `tiers`: names, the fastest first."""
    slowest = max((run.tier.name for run in runs), key=[*tiers].index)
    own = sum(len(run.rows) for run in runs if run.tier.name == slowest)
    return slowest, 2 * own >= sum(len(run.rows) for run in runs)
