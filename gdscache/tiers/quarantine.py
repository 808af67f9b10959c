"""Tiers of files whose I/O hangs or fails.

Quarantine keeps memory and slots of I/O that missed its deadline out of use until that I/O truly ends. A late request
keeps its memory (a CPU or bounce slot) and its SSD slot. No caller waits for it: its transport calls back when it ends,
and everything is freed then. Where late requests hold more than a quarter of a memory, the SSD tier is switched off, so
that a device that hangs cannot take the rest: its pages miss and nothing is written, until no memory has more than an
eighth in quarantine. The small memory of plain pages switches their tier off alone.

A read error says more about the way to a page than about the page: a device resets, a path fails over. So the page
stays, and is a miss. It is given up when a read of it fails again, half a minute after the first failure, while reads
of other pages succeed. A tier whose reads have all failed for some seconds is switched off, and tried again every
second: the next load's first read decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from gdscache.runtime.limited_log import LimitedLog

if TYPE_CHECKING:
    from gdscache.index.index import PageIndex
    from gdscache.index.table import Entry
    from gdscache.moves import Moving
    from gdscache.tiers.base import Tier

_log = logging.getLogger("gdscache.ssd")
AGAIN_S = 30.0  # from a page's first failed read to the failure that it is given up for
OFF_S, OFF_PAGES = 5.0, 8  # seconds of errors alone, and pages with errors, after which a tier is switched off
TRY_S = 1.0  # until it is tried again; errors of several pages for this long are the tier's fault
_MOST_PAGES = 1 << 16  # pages with failed reads that are remembered
_OFF_ABOVE, _ON_BELOW = 4, 8  # off above a quarter of a memory, on again at an eighth or less


@dataclasses.dataclass(slots=True)
class _Errors:
    """Errors of one tier; times in seconds of the clock."""

    index: PageIndex
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
        now, errors = self.clock(), self._tiers.setdefault(tier.name, _Errors(tier.index))
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

    def forget(self, tier: str, keys: Iterable[bytes]) -> None:
        """These pages are new on the tier: failed reads were of others."""
        if (errors := self._tiers.get(tier)) is not None:
            for key in keys:
                errors.pages.pop(key, None)

    def failing(self, tier: str, key: bytes) -> bool:
        errors = self._tiers.get(tier)
        return errors is not None and key in errors.pages

    def off(self, tier: str) -> bool:
        errors = self._tiers.get(tier) if self.any_off else None
        return errors is not None and errors.until is not None and self.clock() < errors.until

    def describe(self) -> dict[str, Any]:
        for errors in self._tiers.values():  # pages that went otherwise than by failed reads fail no more
            errors.pages = {key: first for key, first in errors.pages.items() if key in errors.index}
        return {
            "failing_pages": sum(len(errors.pages) for errors in self._tiers.values()),
            "switched_off_by_errors": [name for name, errors in self._tiers.items() if errors.until is not None],
            **self._counts,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """A request that missed its deadline: the name of its memory, and the slot of a tier of files that it reads or
    writes.

    `give_back` frees both. It is called once, when the request has ended, under the manager's lock and in a thread of
    the transport: it does bookkeeping only and does not raise.
    """

    op: Literal["read", "write"]
    memory: str
    tier: str
    slot: int
    give_back: Callable[[], object]


class Quarantine:
    """The late requests of one engine. Thread-safe; `lock` is the manager's.

    `off`: all tiers of files are switched off since their I/O hangs. `stopped`: why they are off for good, or "".
    `failed_reads` may switch single tiers off.
    """

    def __init__(
        self, lock: threading.RLock, clock: Callable[[], float] = time.monotonic, log: LimitedLog | None = None
    ) -> None:
        self.log = LimitedLog(clock) if log is None else log
        self.failed_reads = FailedReads(clock, lambda: self.switched(), self.log)
        self._off: set[str] = set()  # tiers that are switched off since their I/O hangs; "": all
        self.stopped = ""
        # why nothing is loaded or stored while ranks do not answer; "" while they do
        self.absent: Callable[[], str] = lambda: ""
        # called when a tier is switched off or on, perhaps under the lock: it must be quick
        self.switched: Callable[[], object] = lambda: None
        self._lock = lock
        self._ended = threading.Condition(lock)
        # by memory: its slots, a count of those that late requests hold, the one tier that is off for it ("": all)
        self._memories: dict[str, tuple[int, Callable[[], int], str]] = {}
        self._requests: Counter[str] = Counter()
        self._late: Counter[str] = Counter()  # by op
        self._counts = {"switch_offs": 0, "held": 0, "ended": 0}
        self._reading: Counter[tuple[str, int]] = Counter()  # tier and slot of late reads
        self._afterwards: list[Callable[[], None]] = []
        self._finishing = False

    def add_memory(self, name: str, slots: int, held: Callable[[], int] | None = None, only: str = "") -> None:
        """Watch a memory. `held` counts the slots that late requests hold; None: one a request. `only`: the tier of
        files that is switched off for it; "": all are."""
        with self._lock:
            self._memories[name] = slots, held or (lambda: self._requests[name]), only

    def hold(self, submission: Moving, late: Mapping[int, Late]) -> None:
        """Take over late pages of a move, by their index in it. The lock may be held, so lines of the log wait."""
        if not late:
            return
        left, here = dict(late), True

        def ended(index: int) -> None:
            request = left.pop(index, None)
            if request is not None:
                self._end(request)
                if not here:  # else the caller may hold the lock
                    self.log.flush()

        with self._lock:
            self._counts["held"] += len(late)
            for request in late.values():
                self._late[request.op] += 1
                self._requests[request.memory] += 1
                if request.op == "read":
                    self._reading[request.tier, request.slot] += 1
            submission.on_end(ended)  # called now for pages that have ended
            here = False
            full = {only: name for only, name in self._crowded(_OFF_ABOVE).items() if only not in self._off}
            self._off.update(full)
            if full:
                self._counts["switch_offs"] += len(full)
                self.switched()
        for only, name in full.items():
            self.log.say(
                *(_log, logging.ERROR, "switched off"),
                "%s is switched off: I/O that has not ended within its deadline holds %d of %d slots of %s. "
                "Its pages miss and nothing is written to it until I/O ends. See the system log for the device; if it "
                "stays away, start again with another ssd.path, or without the tier",
                _named(only),
                *(self._memories[name][1](), self._memories[name][0], name),
            )

    def stop(self, why: str) -> None:
        """Switch the SSD tier off for good. The lock may be held."""
        with self._lock:
            if self.stopped:
                return
            self._off.add("")
            self.stopped = why
            self.switched()
        _log.error(
            "the SSD tier has stopped: %s, so that another process may use its directory. Its pages miss (lock_lost) "
            "and nothing is written to it until the engine is closed and opened again",
            why,
        )

    @property
    def off(self) -> bool:
        return "" in self._off

    @property
    def cause(self) -> str:
        """The cause that misses and dropped stores are counted under while the tier is switched off."""
        return self.absent() or ("lock_lost" if self.stopped else "switched_off")

    def hides(self, tier: str, slot: int) -> bool:
        """Whether a page of a tier of files misses for now: a late read is reading it, or the tier is switched off."""
        return self.hangs(tier) or (tier, slot) in self._reading or self.failed_reads.off(tier)

    def hangs(self, tier: str) -> bool:
        """Whether a tier of files is switched off since its I/O hangs."""
        return bool(self._off) and ("" in self._off or tier in self._off)

    def refuses(self, tier: str) -> bool:
        return self.hangs(tier) or bool(self.absent()) or self.failed_reads.off(tier)

    @property
    def hiding(self) -> bool:
        return bool(self._off) or self.failed_reads.any_off or bool(self.requests) or bool(self.absent())

    @property
    def requests(self) -> int:
        return self._late["read"] + self._late["write"]

    @property
    def writes(self) -> int:
        return self._late["write"]

    def wait(self, seconds: float) -> bool:
        """Wait until no late request is left; False after `seconds`."""
        with self._ended:
            return self._ended.wait_for(lambda: not self.requests, seconds)

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run `action` when no late request is left: at once, or then, in a thread of its own and in order."""
        with self._lock:
            if self.requests or self._finishing:
                self._afterwards.append(action)
                return
        action()

    def describe(self) -> dict[str, Any]:
        with self._lock:
            return {
                "switched_off": self.off,
                "switched_off_alone": sorted(self._off - {""}),
                "stopped": self.stopped or None,
                "late_reads": self._late["read"],
                "late_writes": self._late["write"],
                **self._counts,
                **self.failed_reads.describe(),
                "held_slots": {name: held() for name, (_, held, _) in self._memories.items()},
            }

    def _end(self, request: Late) -> None:
        with self._lock:
            request.give_back()
            self._requests[request.memory] -= 1
            self._counts["ended"] += 1
            self._late[request.op] -= 1
            if request.op == "read":
                self._reading[request.tier, request.slot] -= 1
                if not self._reading[request.tier, request.slot]:
                    del self._reading[request.tier, request.slot]
            crowded = self._crowded(_ON_BELOW)
            on = sorted(only for only in self._off - crowded.keys() if only or not self.stopped)
            self._off.difference_update(on)
            if on:
                self.switched()
            finish = not self.requests and bool(self._afterwards) and not self._finishing
            self._finishing = self._finishing or finish
            self._ended.notify_all()
        for only in on:
            text = "%s is switched on again: I/O that hung has ended"
            self.log.say(_log, logging.WARNING, "switched on", text, _named(only))
        if finish:  # not in this thread: closing a transport waits for it
            threading.Thread(target=self._finish, name="gdscache-late-close", daemon=True).start()

    def _finish(self) -> None:
        while True:
            with self._lock:
                actions, self._afterwards = self._afterwards, []
                if not actions:
                    self._finishing = False
                    return
            with contextlib.ExitStack() as first_to_last:
                for action in reversed(actions):
                    first_to_last.callback(action)

    def _crowded(self, parts: int) -> dict[str, str]:
        """A memory of which late requests hold more than one of `parts` parts, by the tier that is switched off for
        it."""
        memories = reversed(self._memories.items())
        return {only: name for name, (slots, held, only) in memories if held() * parts > slots}


def _named(only: str) -> str:
    return f"the tier {only}" if only else "the SSD tier"
