"""A transport that fails on order: `transport: faulty:FaultyTransport` in a configuration.

A test programs `PLAN`: each rule says what happens to which pieces of I/O. Without rules it is the POSIX transport.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gdscache.errors import IOFailedError
from gdscache.layout import EXTENT_ALIGNMENT
from gdscache.storage.base import Op
from gdscache.storage.posix import PosixTransport
from gdscache.storage.workers import Piece, Result, Run


class Fault(enum.Enum):
    EIO = "the system answers EIO"
    SHORT = "half of the bytes are moved, and that is said"
    FLIP = "one bit is moved wrong"
    LOST = "a write is acknowledged and never done"
    TORN = "a write is acknowledged and half done"
    WAIT = "nothing happens before the rule's gate opens"


@dataclasses.dataclass
class Rule:
    """What happens to pieces of `op`, those for which `chosen(offset)` is true, the first `times` of them."""

    op: Op
    fault: Fault
    chosen: Callable[[int], bool] = lambda offset: True
    times: int = 1 << 30
    bit: int = 0  # of the piece, for FLIP
    gate: threading.Event = dataclasses.field(default_factory=threading.Event)
    met: int = 0


class Plan:
    """The rules in force. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self.moved: dict[Op, list[int]] = {Op.READ: [], Op.WRITE: []}  # offsets, in the order of their ends

    @contextmanager
    def rule(self, op: Op, fault: Fault, chosen: Callable[[int], bool] | None = None, **options: int) -> Iterator[Rule]:
        """A rule for the length of a block; its gate opens at the end."""
        rule = Rule(op, fault, chosen or (lambda offset: True), **options)
        with self._lock:
            self._rules.append(rule)
        try:
            yield rule
        finally:
            with self._lock:
                self._rules.remove(rule)
            rule.gate.set()

    def take(self, op: Op, offset: int) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.op is op and rule.met < rule.times and rule.chosen(offset):
                    rule.met += 1
                    return rule
        return None

    def note(self, op: Op, offset: int) -> None:
        with self._lock:
            self.moved[op].append(offset)

    def reset(self) -> None:
        with self._lock:
            for rule in self._rules:
                rule.gate.set()
            self._rules.clear()
            self.moved = {Op.READ: [], Op.WRITE: []}


PLAN = Plan()


class FaultyTransport(PosixTransport):
    """POSIX, with the faults of `PLAN`."""

    name = "faulty"

    def move(self, run: Run) -> list[Result]:
        results: list[Result] = []
        for piece in run.pieces:
            rule = PLAN.take(run.op, piece.offset)
            results.append(self._one(run, piece) if rule is None else self._failing(run, piece, rule))
            PLAN.note(run.op, piece.offset)
        return results

    def _one(self, run: Run, piece: Piece) -> Result:
        return super().move(Run(run.op, run.file, run.submission, [piece], piece.nbytes))[0]

    def _failing(self, run: Run, piece: Piece, rule: Rule) -> Result:
        if rule.fault is Fault.EIO:
            return piece.index, 0, IOFailedError("injected", "take the rule away", errno.EIO)
        if rule.fault is Fault.LOST:
            return piece.index, piece.nbytes, None
        if rule.fault is Fault.WAIT:
            rule.gate.wait(60)
            return self._one(run, piece)
        if rule.fault is Fault.SHORT:
            self._part(run, piece, piece.nbytes // 2)
            return piece.index, piece.nbytes // 2, None
        if rule.fault is Fault.TORN:
            self._part(run, piece, piece.nbytes // 2)
            return piece.index, piece.nbytes, None
        return self._flipped(run, piece, rule.bit)

    def _part(self, run: Run, piece: Piece, nbytes: int) -> None:
        nbytes = nbytes // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        if nbytes:
            self._one(run, Piece(piece.index, piece.offset, nbytes, piece.memory[:nbytes]))

    def _flipped(self, run: Run, piece: Piece, bit: int) -> Result:
        with mmap.mmap(-1, piece.nbytes) as copy, memoryview(copy) as view:
            mine = Piece(piece.index, piece.offset, piece.nbytes, view)
            if run.op is Op.WRITE:
                view[:] = piece.memory
                view[bit // 8] ^= 1 << bit % 8
                return self._one(run, mine)
            result = self._one(run, mine)
            view[bit // 8] ^= 1 << bit % 8
            piece.memory[:] = view
            return result
