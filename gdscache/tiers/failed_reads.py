"""Failed reads: pages that are given up for them, and tiers that are switched off for a while.

A read error says more about the way to a page than about the page: a device resets, a path fails over. So the page
stays, and is a miss. It is given up when a read of it fails again, half a minute after the first failure, while reads
of other pages succeed. A tier whose reads have all failed for some seconds is switched off, and tried again every
second: the next load's first read decides.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gdscache.runtime.limited_log import LimitedLog

if TYPE_CHECKING:
    from gdscache.index.table import Entry
    from gdscache.tiers.base import Tier

_log = logging.getLogger("gdscache.ssd")
AGAIN_S = 30.0  # from a page's first failed read to the failure that it is given up for
OFF_S, OFF_PAGES = 5.0, 8  # seconds of errors alone, and pages with errors, after which a tier is switched off
TRY_S = 1.0  # until it is tried again; errors of several pages for this long are the tier's fault
_MOST_PAGES = 1 << 16  # pages with failed reads that are remembered


@dataclasses.dataclass(slots=True)
class _Errors:
    """Errors of one tier; times in seconds of the clock."""

    pages: dict[bytes, float] = dataclasses.field(default_factory=dict)  # key -> its first failed read
    good: float = -1.0  # the last read that succeeded while `watching`
    since: float | None = None  # the first error of a series,
    last: float = 0.0  # and the last
    in_row: set[bytes] = dataclasses.field(default_factory=set)  # up to `OFF_PAGES` pages of the series
    until: float | None = None  # switched off until then, when a read tries it; None: on


class FailedReads:
    """Judges pages and tiers of files by their failed reads. The manager's lock guards it.

    `watching`: `read` wants to hear of reads that succeeded. `any_off`: `off` may be true of a tier. `on_switch` is
    called when a tier is switched off or on; it must be quick. `clock` is in seconds. `log` gets lines without writing
    them, since the lock is held.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_switch: Callable[[], object] = lambda: None,
        log: LimitedLog | None = None,
    ) -> None:
        self.watching = self.any_off = False
        self.clock = clock
        self._on_switch = on_switch
        self._log = LimitedLog(clock) if log is None else log
        self._tiers: dict[str, _Errors] = {}
        self._counts = {"error_switch_offs": 0, "given_up": 0}

    def failed(self, tier: Tier, entries: Iterable[Entry]) -> None:
        """Reads of these pages failed: drop the ones that are to be given up."""
        now, errors = self.clock(), self._tiers.setdefault(tier.name, _Errors())
        self.watching, given_up = True, list[bytes]()
        # a series ends with a read that succeeds, or with a pause of `OFF_S`
        if errors.since is None or (errors.until is None and now - errors.last > OFF_S):
            errors.since = now
            errors.in_row.clear()
        errors.last = now
        for entry in entries:
            first = errors.pages.setdefault(entry.key, now)
            if len(errors.in_row) < OFF_PAGES:
                errors.in_row.add(entry.key)
            if now - first >= AGAIN_S and errors.good > first and now - errors.since < TRY_S:
                del errors.pages[entry.key]
                given_up.append(entry.key)
                tier.index.drop(entry)
        if given_up:
            self._counts["given_up"] += len(given_up)
            self._log.say(
                *(_log, logging.WARNING, f"given up, {tier.name}"),
                "page %s of the %s tier is given up: reads of it fail, and others succeed",
                *(given_up[0].hex(), tier.name),
                times=len(given_up),
            )
        while len(errors.pages) > _MOST_PAGES:
            del errors.pages[next(iter(errors.pages))]
        if len(errors.in_row) == OFF_PAGES and now - errors.since >= OFF_S and tier.served:
            first_time, errors.until = errors.until is None, now + TRY_S
            if first_time:
                self.any_off = True
                self._counts["error_switch_offs"] += 1
                self._on_switch()
                self._log.say(
                    *(_log, logging.WARNING, f"switched off by errors, {tier.name}"),
                    "the %s tier is switched off: for %.0f s no read of it succeeded. Its pages stay, and miss, and "
                    "nothing is written to it. Every %g s it is tried again. See the system log for the device",
                    tier.name,
                    now - errors.since,
                    TRY_S,
                )

    def read(self, tier: Tier, keys: Iterable[bytes]) -> None:
        errors = self._tiers.get(tier.name)
        if errors is None:
            return
        errors.good = self.clock()
        for key in keys:
            errors.pages.pop(key, None)
        if errors.since is not None:
            # the series was the tier's fault, so its pages are not failing
            if errors.last - errors.since >= TRY_S and len(errors.in_row) > 1:
                errors.pages = {key: first for key, first in errors.pages.items() if first < errors.since}
            errors.since = None
            errors.in_row.clear()
            if errors.until is not None:
                errors.until = None
                self.any_off = any(one.until is not None for one in self._tiers.values())
                self._on_switch()
                self._log.say(
                    *(_log, logging.WARNING, f"switched on behind errors, {tier.name}"),
                    "the %s tier is switched on again: reads of it succeed",
                    tier.name,
                )
        if not errors.pages:
            del self._tiers[tier.name]
            self.watching = bool(self._tiers)

    def failing(self, tier: str, key: bytes) -> bool:
        errors = self._tiers.get(tier)
        return errors is not None and key in errors.pages

    def off(self, tier: str) -> bool:
        errors = self._tiers.get(tier) if self.any_off else None
        return errors is not None and errors.until is not None and self.clock() < errors.until

    def describe(self) -> dict[str, Any]:
        return {
            "failing_pages": sum(len(errors.pages) for errors in self._tiers.values()),
            "switched_off_by_errors": [name for name, errors in self._tiers.items() if errors.until is not None],
            **self._counts,
        }
