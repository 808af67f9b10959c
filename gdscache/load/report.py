"""How loads end: what is said of each request, and of each page."""

from __future__ import annotations

import dataclasses

from gdscache.moves import PageStatus
from gdscache.pages.reasons import CACHED, Reason, Told


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a load ended. `tokens` counts the good prefix; `pages` has a status for each page that it found.

    `reasons`: where the tokens of a request come from, and why others that were asked for have not come; those of a
    batch's requests one after the other.
    """

    tokens: int
    pages: tuple[PageStatus, ...]
    bytes_by_tier: dict[str, int]
    seconds: float
    reasons: tuple[Reason, ...] = ()

    @property
    def first_bad(self) -> int | None:
        """Position of the first page that is not loaded, or None."""
        return next((i for i, status in enumerate(self.pages) if status is not PageStatus.LOADED), None)


@dataclasses.dataclass(slots=True)
class LoadPart:
    """One request of a load: how many pages are moved, and the token of the prompt that the first begins with."""

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
    """A page's end as a `Reason` has it."""
    cause = _CAUSES.get(status, "off")
    return Told(cause, tier, "" if cause in (CACHED, "late") else status.value)
