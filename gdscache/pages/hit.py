"""Hit: the cached pages of a request, as the argument of a load; and why tokens come from a tier, or from none."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gdscache.errors import InvalidValueError
from gdscache.pages.keys import Page

CACHED = "cached"
# The values of `Reason.cause`, and their meanings.
CAUSES = {
    CACHED: "on `tier`",
    "gate": "on `tier`, and slower to load than to compute: left out (`load.gate: enforcing`)",
    "behind": "on `tier`, behind a page that is missing: a hit is a prefix",
    "storing": "on its way to `tier`",
    "stored_since": "on `tier`, stored there after the lookup (`detail`: its cause before)",
    "elsewhere": "on `tier`, which only a prefetch asks",
    "absent": "never stored, cleared, or gone for longer than is remembered",
    "evicted": "probably evicted: a filter says so, which errs for some 2 % of the pages that were never stored",
    "expired": "its time to live was over",
    "refused": "not written to a slower tier (`detail`: why), and evicted from the faster one",
    "no_room": "its store was dropped (`detail`: why)",
    "bad": "dropped from `tier`, since its bytes were wrong or missing (`detail`)",
    "failing": "on `tier`; its last read failed (`detail`)",
    "late": "on `tier`; a read of it has missed its deadline",
    "off": "on `tier`, which is switched off, or not ours alone any more (`detail`)",
    "cancelled": "the load was cancelled, or broke off (`detail`)",
}


def refuse_twins(names: Sequence[object]) -> None:
    """Raises `InvalidValueError` for pages of which one is named twice: a load brings each into one block."""
    if len({*names}) < len(names):
        raise InvalidValueError("a page is there twice", "name each page once")


class Told(NamedTuple):
    """The knowledge about one page."""

    cause: str
    tier: str = ""
    detail: str = ""


class Reason(NamedTuple):
    """Tokens `first` to `stop` (exclusive) of a request, whole pages, and their cause: see `CAUSES`."""

    first: int
    stop: int
    cause: str
    tier: str = ""
    detail: str = ""


def joined(start: int, page_tokens: int, told: Iterable[Told]) -> tuple[Reason, ...]:
    """Consecutive pages with equal causes, joined. `start`: the first page's first token."""
    found, at = list[Reason](), start
    for one, some in itertools.groupby(told):
        first, at = at, at + page_tokens * sum(1 for _ in some)
        found.append(Reason(first, at, *one))
    return tuple(found)


_RUNS = 8  # most runs of a line


def words(reasons: Sequence[Reason]) -> str:
    """Reasons as a line; only the first `_RUNS` in full."""
    told = [_word(reason) for reason in reasons[:_RUNS]]
    if len(reasons) > _RUNS:
        told.append(f"and {len(reasons) - _RUNS} more")
    return ", ".join(told)


def _word(reason: Reason) -> str:
    where = f" on {reason.tier}" if reason.tier else ""
    why = f" ({reason.detail})" if reason.detail else ""
    return f"tokens {reason.first:,} to {reason.stop:,} {reason.cause.replace('_', ' ')}{where}{why}"


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
        gdscache/pages/hit.py).
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
        """Some of its pages, each once, by number, for a load into their blocks. Raises `InvalidValueError`."""
        refuse_twins(numbers)
        pages, tiers = self.pages, self.tiers
        return dataclasses.replace(self, pages=tuple(pages[i] for i in numbers), tiers=tuple(tiers[i] for i in numbers))
