"""Hit: what is cached of a request, in words that a load takes."""

from __future__ import annotations

import dataclasses

from gdscache.pages.keys import Page


@dataclasses.dataclass(frozen=True)
class Hit:
    """What `lookup` found: a snapshot, without a lease.

    `tokens` tokens from `start` on are cached, in full pages; `tiers` names the fastest tier of each page; `seconds` is
    what loading them should take by what was measured so far, what is under way included, None before anything was.

    `pays`: the first tokens of what was found that are faster to load than to compute; all, before that is known.
    `declined`: tokens that are cached and left out for that reason (`load.gate: enforcing`). `recompute_seconds` is
    what computing the `tokens` tokens should take; None before `observe_prefill`, and without a gate.

    `checked`: the pages are in the CPU tier, their bytes were found good, and `Prefetch.hit` made this of them. A load
    takes them from there alone, hashes none of them again and has no deadline.
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
