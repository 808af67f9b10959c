"""Hit: the cached pages of a request, as the argument of a load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gdscache.pages.keys import Page
from gdscache.pages.reasons import CACHED, Reason, Told, joined, words


@dataclasses.dataclass(frozen=True)
class Hit:
    """The result of `lookup`: a snapshot, without a lease.

    `tokens` tokens from `start` on are cached, in full pages. `tiers` names the fastest tier of each page. `seconds` is
    the expected time of loading them, behind the loads under way, by the measurements so far; None before there are
    any.

    `pays`: the number of first tokens that are faster to load than to compute; all of them before that is known.
    `declined`: cached tokens that were left out for that reason (`load.gate: enforcing`). `recompute_seconds` is the
    expected time of computing `tokens` tokens; None before `observe_prefill`, and without a gate.

    `checked`: the pages are in the CPU tier and verified, and the hit was made by `Prefetch.hit`. A load takes them
    from there alone, hashes none of them again and has no deadline. `why` is for `reasons`.
    """

    start: int
    tokens: int
    tiers: tuple[str, ...]
    seconds: float | None
    pages: tuple[Page, ...] = dataclasses.field(repr=False)
    recompute_seconds: float | None = None
    pays: int = 0
    declined: int = 0
    checked: bool = False
    why: Callable[[], Sequence[Reason]] | None = dataclasses.field(default=None, repr=False, compare=False)

    def reasons(self) -> tuple[Reason, ...]:
        """The source of the tokens from `start` on, and why the others of the request's full pages are missing.

        Computed at the call: for missing pages it tells the knowledge of that time (`CAUSES` of
        gdscache/pages/reasons.py).
        """
        size = self.tokens // len(self.tiers) if self.tiers else 1
        here = joined(self.start, size, (Told(CACHED, tier) for tier in self.tiers))
        return here if self.why is None else (*here, *self.why())

    def missing(self) -> Reason | None:
        """Why the hit ends; None if no full page of the request is missing. See `reasons`."""
        return None if self.why is None else next(iter(self.why()), None)

    def words(self) -> str:
        return words(self.reasons())

    def part(self, numbers: Sequence[int]) -> Hit:
        """Some of its pages, by number, for a load into their blocks."""
        pages, tiers = self.pages, self.tiers
        return dataclasses.replace(self, pages=tuple(pages[i] for i in numbers), tiers=tuple(tiers[i] for i in numbers))
