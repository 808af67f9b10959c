"""Quarantine: what I/O that missed its deadline may still touch, kept out of use until that I/O truly ends.

A late request keeps its memory (a CPU or bounce slot) and its SSD slot. Nobody waits for it: its transport calls back
when it ends, and everything goes back then. Where late requests hold more than a quarter of a pool of memory, the SSD
tier is switched off, so that a device that hangs cannot take the rest: its pages miss and nothing is written, until no
pool has more than an eighth in quarantine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from gdscache.runtime.limited_log import LimitedLog
from gdscache.tiers.failed_reads import FailedReads

_log = logging.getLogger("gdscache.ssd")
_OFF_ABOVE, _ON_BELOW = 4, 8  # parts of a pool: off above a quarter, on again at an eighth or less


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """A request that missed its deadline: the pool that its memory is of, the slot of a tier of files that it reads or
    writes, and what gives both back.

    `give_back` is called once, when the request has ended, under the manager's lock and in a thread of the transport:
    it does bookkeeping only and does not raise.
    """

    op: Literal["read", "write"]
    pool: str
    tier: str
    slot: int
    give_back: Callable[[], object]


class Unended(Protocol):
    """Pages of which some are late."""

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(index)` once for each page, when nothing touches its memory any more; perhaps at once."""
        ...


class Quarantine:
    """The late requests of one engine. Thread-safe; `lock` is the manager's.

    `off` is whether the SSD tier is switched off since its I/O hangs; `stopped` why it is for good, "" where it is not.
    `failed_reads` may switch single tiers off. `log`: the engine's.
    """

    def __init__(
        self, lock: threading.RLock, clock: Callable[[], float] = time.monotonic, log: LimitedLog | None = None
    ) -> None:
        self.log = LimitedLog(clock) if log is None else log
        self.failed_reads = FailedReads(clock, self._tell, self.log)
        self.off = False
        self.stopped = ""
        self.absent: Callable[[], str] = lambda: ""  # why nothing is loaded or stored, where ranks do not answer
        self._lock = lock
        self._ended = threading.Condition(lock)
        self._slots: dict[str, int] = {}
        self._holds: dict[str, Callable[[], int]] = {}  # pools that know how many of their slots late requests hold
        self._requests: Counter[str] = Counter()  # late requests by pool: of the others, a slot each
        self._late: Counter[str] = Counter()  # by op
        self._counts = {"switch_offs": 0, "held": 0, "ended": 0}  # since the engine was opened
        self._reading: Counter[tuple[str, int]] = Counter()  # tiers and slots that late reads are at
        self._afterwards: list[Callable[[], None]] = []
        self._switched: list[Callable[[], None]] = []
        self._finishing = False

    def on_switch(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the tier was switched off, or on. The lock may be held; it must be quick."""
        self._switched.append(callback)

    def _tell(self) -> None:
        for callback in self._switched:
            callback()

    def add_pool(self, name: str, slots: int, held: Callable[[], int] | None = None) -> None:
        """Watch over a pool of memory of so many slots. `held`: how many late requests hold; None: one each."""
        with self._lock:
            self._slots[name] = slots
            if held is not None:
                self._holds[name] = held

    def hold(self, submission: Unended, late: Mapping[int, Late]) -> None:
        """Take over late pages of a move, by their index in it. The lock may be held."""
        if not late:
            return
        left = dict(late)

        def ended(index: int) -> None:
            request = left.pop(index, None)
            if request is not None:
                self._end(request)

        with self._lock:
            self._counts["held"] += len(late)
            for request in late.values():
                self._late[request.op] += 1
                self._requests[request.pool] += 1
                if request.op == "read":
                    self._reading[request.tier, request.slot] += 1
            submission.on_end(ended)  # now, for what has ended meanwhile
            full = None if self.off else self._fullest(_OFF_ABOVE)
            if full is not None:
                self.off = True
                self._counts["switch_offs"] += 1
                self._tell()
        if full is not None:
            self.log.say(
                *(_log, logging.ERROR, "switched off"),
                "the SSD tier is switched off: I/O that has not ended within its deadline holds %d of %d slots of %s. "
                "Its pages miss and nothing is written to it until I/O ends. See the system log for the device; if it "
                "stays away, start again with another ssd.path, or without the tier",
                self._held(full),
                self._slots[full],
                full,
            )
            self.log.flush()

    def stop(self, why: str) -> None:
        """Switch the SSD tier off for good. The lock may be held."""
        with self._lock:
            if self.stopped:
                return
            self.off, self.stopped = True, why
            self._tell()
        _log.error(
            "the SSD tier has stopped: %s, so that another process may use its directory. Its pages miss (lock_lost) "
            "and nothing is written to it until the engine is closed and opened again",
            why,
        )

    @property
    def cause(self) -> str:
        """What pages that miss, and stores that are dropped, are counted under while the tier is switched off."""
        return self.absent() or ("lock_lost" if self.stopped else "switched_off")

    def hides(self, tier: str, slot: int) -> bool:
        """Whether a page of a tier of files misses for now: a late read is at it, or these tiers are switched off."""
        return self.off or (tier, slot) in self._reading or self.failed_reads.off(tier)

    def refuses(self, tier: str) -> bool:
        """Whether nothing is written to a tier of files for now."""
        return self.off or bool(self.absent()) or self.failed_reads.off(tier)

    @property
    def hiding(self) -> bool:
        """Whether `hides` may say so of any page."""
        return self.off or self.failed_reads.any_off or bool(self.requests) or bool(self.absent())

    @property
    def requests(self) -> int:
        """Late requests that have not ended."""
        return self._late["read"] + self._late["write"]

    @property
    def writes(self) -> int:
        """Late writes that have not ended."""
        return self._late["write"]

    def wait(self, seconds: float) -> bool:
        """Wait until no late request is left; False when `seconds` pass before."""
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
        """Plain data for `stats()`: the switch, late requests now and ever, and slots of each pool that they hold."""
        with self._lock:
            return {
                "switched_off": self.off,
                "stopped": self.stopped or None,
                "late_reads": self._late["read"],
                "late_writes": self._late["write"],
                **self._counts,
                **self.failed_reads.describe(),
                "held_slots": {name: self._held(name) for name in self._slots},
            }

    # -- inside -------------------------------------------------------------------------------------------------------

    def _end(self, request: Late) -> None:
        """A late request has ended: called by the transport."""
        with self._lock:
            request.give_back()
            self._requests[request.pool] -= 1
            self._counts["ended"] += 1
            self._late[request.op] -= 1
            if request.op == "read":
                self._reading[request.tier, request.slot] -= 1
                if not self._reading[request.tier, request.slot]:
                    del self._reading[request.tier, request.slot]
            switched_on = self.off and not self.stopped and self._fullest(_ON_BELOW) is None
            if switched_on:
                self.off = False
                self._tell()
            finish = not self.requests and bool(self._afterwards) and not self._finishing
            self._finishing = self._finishing or finish
            self._ended.notify_all()
        if switched_on:
            self.log.say(
                _log, logging.WARNING, "switched on", "the SSD tier is switched on again: I/O that hung has ended"
            )
            self.log.flush()
        if finish:  # not in this thread: closing a transport waits for it
            threading.Thread(target=self._finish, name="gdscache-late-close", daemon=True).start()

    def _finish(self) -> None:
        """Run what was left for now, each action whatever becomes of the others."""
        while True:
            with self._lock:
                actions, self._afterwards = self._afterwards, []
                if not actions:
                    self._finishing = False
                    return
            with contextlib.ExitStack() as first_to_last:
                for action in reversed(actions):
                    first_to_last.callback(action)

    def _held(self, pool: str) -> int:
        """Slots of a pool that late requests hold."""
        return self._holds[pool]() if pool in self._holds else self._requests[pool]

    def _fullest(self, parts: int) -> str | None:
        """A pool of which more than one of so many parts is held, if there is one."""
        return next((name for name, slots in self._slots.items() if self._held(name) * parts > slots), None)
