"""Why tokens of a request come from a tier, or from none, for a request's statistics and for log lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
    found: list[Reason] = []
    last: Told | None = None
    at = first = start
    for one in told:
        if one != last:
            if last is not None:
                found.append(Reason(first, at, *last))
            last, first = one, at
        at += page_tokens
    if last is not None:
        found.append(Reason(first, at, *last))
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
