"""The rules of a `FaultyTransport`: faults, their places and their numbers."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gdscache.pages.layout import PageLayout
from gdscache.storage.base import Op


class Fault(enum.Enum):
    EIO = "eio"
    """Not tried, and answered with the errno EIO."""
    ENOSPC = "enospc"
    """A write is not tried, and answered with the errno ENOSPC."""
    SHORT = "short"
    """Half of the bytes, in whole sectors, are moved, and the answer says so."""
    FLIP = "flip"
    """One bit is moved wrong, without an error."""
    ZERO = "zero"
    """Zeros replace the bytes, without an error."""
    LOST = "lost"
    """A write is acknowledged and never done."""
    TORN = "torn"
    """A write is acknowledged, and half of it, in whole sectors, is done."""
    DELAY = "delay"
    """Begun `seconds` late, then without fault."""
    HANG = "hang"
    """Not begun before the rule is released, then without fault. The transport keeps the memory until then."""


_OF_WRITES = (Fault.ENOSPC, Fault.LOST, Fault.TORN)


@dataclasses.dataclass(frozen=True, slots=True)
class ExtentPart:
    """The bytes `start` to `stop` (exclusive) of every extent of `extent_bytes`, extents lying back to back from 0."""

    start: int
    stop: int
    extent_bytes: int

    @classmethod
    def layer(cls, layout: PageLayout, layer: int) -> ExtentPart:
        """The part of layer number `layer` in pages of `layout`."""
        start, stop = layout.layer_bounds[layer]
        return cls(start, stop, layout.extent_bytes)

    def within(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """`(start, stop)` of the parts in a request of `nbytes` at `offset`, counted from the request's start."""
        found = []
        for extent in range(offset - offset % self.extent_bytes, offset + nbytes, self.extent_bytes):
            start = max(extent + self.start - offset, 0)
            stop = min(extent + self.stop - offset, nbytes)
            if start < stop:
                found.append((start, stop))
        return found


@dataclasses.dataclass(eq=False)
class FaultRule:
    """One fault, and the requests that it meets: all of them, or only requests that pass every given condition.

    `op`: reads or writes only. `where(path, offset)`: the file, and the offset of the request in it, in bytes; called
    under a lock, one request at a time. `part`: requests that touch this part of an extent; FLIP and ZERO then damage
    nothing else. `rate`: this share of them, 0 to 1, drawn. `skip`: the number of first requests to leave alone;
    `times`: the most requests to meet after these.

    `bit` is the bit that FLIP inverts, counted through the request, or through the part; drawn if it is None. `seconds`
    is the time of a DELAY. `met` counts the requests met.
    """

    fault: Fault
    op: Op | None = None
    where: Callable[[str, int], bool] | None = None
    part: ExtentPart | None = None
    rate: float = 1.0
    skip: int = 0
    times: int | None = None
    bit: int | None = None
    seconds: float = 0.0
    met: int = dataclasses.field(default=0, init=False)
    _passed: int = dataclasses.field(default=0, init=False)
    gate: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        if self.fault in _OF_WRITES:
            self.op = Op.WRITE

    def release(self) -> None:
        """Let hanging requests go on; later ones do not hang by this rule."""
        self.gate.set()

    def wait(self) -> None:
        """For the transport: the wait of a DELAY or a HANG."""
        if self.fault is Fault.HANG:
            self.gate.wait()
        else:
            self.gate.wait(self.seconds)

    @property
    def is_late(self) -> bool:
        return self.fault in (Fault.DELAY, Fault.HANG)


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """A rule that meets a request, and the random numbers for it."""

    rule: FaultRule
    draw: random.Random

    def where(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The damaged ranges of a request, counted from its start."""
        return [(0, nbytes)] if self.rule.part is None else self.rule.part.within(offset, nbytes)


class FaultPlan:
    """The rules in force, for any number of transports. The first matching rule meets a request. Thread-safe.

    Draws depend on `seed`, the rule's place among all rules ever added, the file (in the order of `open`), the offset,
    and the number of earlier requests there: the order of threads has no influence. With `trace`, `ended` lists (op,
    path, offset) of the requests, met or not, in the order of their ends.
    """

    def __init__(self, *rules: FaultRule, seed: int = 0, trace: bool = False) -> None:
        self.seed = seed
        self.trace = trace
        self.ended: list[tuple[Op, str, int]] = []
        self._lock = threading.Lock()
        self._rules: dict[FaultRule, int] = {}
        self._added = 0
        self._visits: Counter[tuple[Op, int, int]] = Counter()
        self._held = 0
        self._counts: Counter[str] = Counter()
        for rule in rules:
            self.add(rule)

    def add(self, rule: FaultRule) -> FaultRule:
        with self._lock:
            self._rules[rule] = self._added
            self._added += 1
        return rule

    def remove(self, rule: FaultRule) -> None:
        """Remove the rule, and release its hanging requests. Repeated calls are fine."""
        with self._lock:
            self._rules.pop(rule, None)
        rule.release()

    @contextmanager
    def rule(self, fault: Fault, op: Op | None = None, **conditions: Any) -> Iterator[FaultRule]:
        """A `FaultRule(fault, op, **conditions)` for the length of a block."""
        rule = self.add(FaultRule(fault, op, **conditions))
        try:
            yield rule
        finally:
            self.remove(rule)

    def reset(self) -> None:
        """Remove all rules, release hanging requests, forget the counts; draws begin anew."""
        with self._lock:
            rules, self._rules = list(self._rules), {}
            self._added = 0
            self._visits.clear()
            self._counts.clear()
            self.ended = []
        for rule in rules:
            rule.release()

    @property
    def active(self) -> bool:
        """Whether requests need any treatment."""
        return self.trace or bool(self._rules)

    @property
    def held(self) -> int:
        """Requests that a DELAY or a HANG has met and that have not ended."""
        with self._lock:
            return self._held

    def describe(self) -> dict[str, int]:
        """The number of requests that met each kind of fault."""
        with self._lock:
            return dict(self._counts)

    def meet(self, op: Op, file: int, path: str, offset: int, nbytes: int) -> Met | None:
        """The rule that meets this request. `file` is the number of the file among the transport's opened files."""
        with self._lock:
            if not self._rules:
                return None
            self._visits[op, file, offset] += 1
            visit = self._visits[op, file, offset]
            for rule, number in self._rules.items():
                if rule.op not in (None, op) or (rule.times is not None and rule.met >= rule.times):
                    continue
                if rule.where is not None and not rule.where(path, offset):
                    continue
                if rule.part is not None and not rule.part.within(offset, nbytes):
                    continue
                draw = random.Random(f"{self.seed}/{number}/{op.value}/{file}/{offset}/{visit}")
                if rule.rate < 1 and draw.random() >= rule.rate:
                    continue
                rule._passed += 1
                if rule._passed <= rule.skip:
                    continue
                rule.met += 1
                self._counts[rule.fault.value] += 1
                self._held += rule.is_late
                return Met(rule, draw)
        return None

    def end(self, op: Op, path: str, offset: int, met: Met | None) -> None:
        with self._lock:
            if met is not None and met.rule.is_late:
                self._held -= 1
            if self.trace:
                self.ended.append((op, path, offset))

    @classmethod
    def from_file(cls, path: Path) -> tuple[FaultPlan, str]:
        """The plan of a JSON file, and the name of the transport to wrap.

        `{"seed": 7, "inner": "posix", "rules": [{"fault": "flip", "op": "read", "rate": 0.01}]}`: a rule has the fields
        of `FaultRule` except `where`; `part` is `[start, stop, extent_bytes]`.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(*map(_rule, data["rules"]), seed=data.get("seed", 0)), data.get("inner", "posix")


def _rule(entry: dict[str, Any]) -> FaultRule:
    fields = {**entry, "fault": Fault(entry["fault"])}
    if "op" in fields:
        fields["op"] = Op(fields["op"])
    if "part" in fields:
        fields["part"] = ExtentPart(*fields["part"])
    return FaultRule(**fields)
