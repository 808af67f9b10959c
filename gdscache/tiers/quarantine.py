"""Quarantine: keeps memory and slots of I/O that missed its deadline out of use until that I/O truly ends.

A late request keeps its memory (a CPU or bounce slot) and its SSD slot. No caller waits for it: its transport calls
back when it ends, and everything is freed then. Where late requests hold more than a quarter of a memory, the
SSD tier is switched off, so that a device that hangs cannot take the rest: its pages miss and nothing is written, until
no memory has more than an eighth in quarantine. The small memory of plain pages switches their tier off alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from gdscache.runtime.limited_log import LimitedLog
from gdscache.tiers.failed_reads import FailedReads

if TYPE_CHECKING:
    from gdscache.moves import Moving

_log = logging.getLogger("gdscache.ssd")
_OFF_ABOVE, _ON_BELOW = 4, 8  # off above a quarter of a memory, on again at an eighth or less


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
                self._requests[request.memory] += 1
                if request.op == "read":
                    self._reading[request.tier, request.slot] += 1
            submission.on_end(ended)  # called now for pages that have ended
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
            self.log.flush()

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
            self.log.say(
                *(_log, logging.WARNING, "switched on"),
                "%s is switched on again: I/O that hung has ended",
                _named(only),
            )
            self.log.flush()
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
