"""How loads end: a report for each request, a status for each page."""

from __future__ import annotations

import dataclasses

from gdscache.moves import PageStatus
from gdscache.pages.hit import CACHED, Reason, Told


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a load ended. `tokens` counts the good prefix; `pages` has a status for each page that the load found.

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
