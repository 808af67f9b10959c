"""How loads end: what is said of each request, and of each page."""

from __future__ import annotations

import dataclasses

from gdscache.moves import PageStatus


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a load ended. `tokens` counts the good prefix; `pages` has a status for each page asked for."""

    tokens: int
    pages: tuple[PageStatus, ...]
    bytes_by_tier: dict[str, int]
    seconds: float

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
