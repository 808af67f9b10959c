"""An executor for tests: nothing happens until the test says so, so that every order of events can be tried.

What may happen next are the executor's `choices`: a lane goes on whose wait is over, a move lands, a page of it fails,
its deadline passes, late I/O ends at last. Of stores, instead of bytes a slot has a tag, which moves copy when they
land; so what lies where a page is said to be can be compared with what was stored. Loads are carried out as an engine
does, by a machine whose reads and copies are choices too (stepped_machine.py).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import numpy as np

from gdscache.cuda.streams import Event, Landed
from gdscache.errors import IOFailedError, StorageError
from gdscache.index.free_slots import SlotShare
from gdscache.moves import PLANES, End, Listener, Move, Moving, Priority, Steps, Wait, Way
from gdscache.moves.native import NativeMoving
from gdscache.native import NEVER
from gdscache.pages.checksum import Checksums
from gdscache.pages.keys import Page
from gdscache.runtime.threads import Flag
from tests.support.stepped_machine import NS, Choice, SteppedEvent, SteppedMachine, When

_T = TypeVar("_T")
Place = tuple[str, int]  # a space, and a slot of it; of the planes, the first block
SPACE = b"n" * 32


def prompt(seed: int, pages: int) -> list[Page]:
    """Pages of a prompt; `seed` also says what comes behind the first page, which all prompts share."""
    keys = [SPACE, *(bytes([page, 0 if page == 0 else seed]) * 16 for page in range(pages))]
    return [Page(key, parent, SPACE) for parent, key in itertools.pairwise(keys)]


class Order:
    """One order of what may happen: `order` says which choice is taken; behind its end, the first, or one of `rng`.

    `faults`: how many there may be. `acts` are what the caller does, in turn, while it is not `busy` with a call.
    """

    def __init__(self, order: Sequence[int], rng: random.Random | None, faults: int) -> None:
        self.taken: list[tuple[int, int]] = []  # the number of a choice, of so many
        self.names: list[str] = []
        self.faults = faults
        self.acts: list[Choice] = []
        self.busy = False
        self._order = order
        self._rng = rng

    def choose(self, found: Sequence[Choice]) -> Choice:
        some = [choice for choice in found if self.faults or not choice.fault]
        if self.acts and not self.busy:
            some.append(self.acts[0])
        depth = len(self.taken)
        number = self._order[depth] if depth < len(self._order) else 0
        if self._rng is not None:
            number = self._rng.randrange(len(some))
        self.taken.append((number, len(some)))
        choice = some[number]
        self.names.append(choice.name)
        self.faults -= choice.fault
        if self.acts and choice is self.acts[0]:
            self.acts.pop(0)
        return choice

    def __call__(self) -> None:
        """Let everything happen in this order, with all checks; what fails says what the order was."""
        try:
            self.play()
        except BaseException as error:
            raise AssertionError(f"{' | '.join(self.names)}: {error!r}") from error

    def play(self) -> None:
        raise NotImplementedError


def every_order(run: Callable[[Sequence[int], random.Random | None], Order], most: int) -> int:
    """Try orders, depth first, until all were tried, or `most`; how many were."""
    order: list[int] = []
    for tried in range(1, most + 1):
        played = run(order, None)
        played()
        taken = played.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return tried
        order = [number for number, _ in taken[:-1]] + [taken[-1][0] + 1]
    return most


def random_orders(run: Callable[[Sequence[int], random.Random | None], Order], runs: int, seed: int) -> None:
    for number in range(runs):
        run((), random.Random(seed + number))()


class SteppedExecutor:
    """`tags`: what lies where. `choose` picks one of the choices while a call of the caller waits for others.

    `machine`: for loads, which its `choices` are part of.
    """

    def __init__(self, choose: Callable[[Sequence[Choice]], Choice], machine: SteppedMachine | None = None) -> None:
        self.tags: dict[Place, Hashable] = {}
        self.machine = machine
        self._choose = choose
        self._lanes: list[_Lane] = []
        self._moving: list[_Moving] = []
        self._numbers = 0
        self._loads: dict[int, tuple[NativeMoving, Listener]] = {}
        if machine is not None:
            self.moves = machine.moves

    def choices(self) -> list[Choice]:
        """What may happen now, in a fixed order."""
        of_machine = [] if self.machine is None else self.machine.choices()  # first: jobs that break end a move
        if self.machine is not None:
            self.tell_late()
        found = [choice for lane in self._lanes for choice in lane.choices()]
        for moving in self._moving:
            found += moving.choices()
        return found + of_machine

    def lane(self, priority: Priority, rest: Callable[[], object], threads: int = 1) -> _Lane:
        lane = _Lane(self, priority.name.lower(), threads)
        self._lanes.append(lane)
        return lane

    def finish(self, steps: Steps[_T]) -> _T:
        """What else may happen happens while the caller waits."""
        try:
            while True:
                wait = next(steps)
                while not wait.over():
                    self.pause(None, 0.0)  # type: ignore[arg-type]
        except StopIteration as end:
            return cast(_T, end.value)

    def begin(self, move: Move, after: Sequence[Event] = (), listener: Listener | None = None) -> Moving:
        if listener is not None:
            assert self.machine is not None, "a load without a machine"
            self._numbers += 1
            load = NativeMoving(self, self._numbers, move, listener)
            self._loads[load.number] = load, listener
            until = NEVER if move.seconds == math.inf else int((self.now() + move.seconds) * NS)
            self.moves.start(load.number, move, until)
            return load
        self._numbers += 1
        moving = _Moving(self, move, self._numbers)
        self._moving.append(moving)
        return moving

    def copy(self, move: Move, row: int) -> None:
        """The bytes of a page of a move are where they go, as they are now."""
        source, target = places(move)[row]
        self.tags[target] = self.tags.get(source)

    def room(self, pool: SlotShare) -> Wait:
        return When(lambda: pool.free_slots > 0)

    def changed(self, condition: threading.Condition, over: Callable[[], bool], seconds: float) -> Wait:
        until = self.now() + seconds
        return When(lambda: over() or self.now() >= until)

    def now(self) -> float:
        return 0.0 if self.machine is None else self.machine.now

    def over(self, number: int) -> Wait:
        return When(lambda: self.moves.wait(number, 0) is not None)

    def expect(self, ways: Sequence[Way]) -> None:
        """These checksums lie by their slots."""

    def tell_spans(self) -> None:
        """Nobody keeps times here."""

    def forget(self, moving: NativeMoving) -> None:
        """Its steps may be run again."""

    def await_move(self, number: int, group: int, seconds: float) -> Landed | None:
        assert seconds == 0, "a test waited"
        assert self.machine is not None, "a load without a machine"
        point = self.moves.wait(number, 0, group)
        return None if point is None else Landed(cast("Event", SteppedEvent(self.machine, point)))

    def tell_late(self) -> None:
        """Late pages whose I/O has ended are told."""
        while found := self.moves.take_late(0):
            for number, row in found:
                self._loads[number][0].ended(row)

    orders = None

    def behind(self, after: object) -> Event:
        return None

    mark = behind

    def passed(self, mark: Event) -> None:
        """There is nothing to keep."""

    def reads_queued(self) -> Event:
        return None  # a gather that has ended has read

    def happened(self, event: Event) -> Wait:
        return When(lambda: event is None or bool(event.query()))  # type: ignore[no-untyped-call]

    def checksums(self, space: str, slots: Sequence[int]) -> Checksums:
        if self.machine is None:
            return np.zeros((len(slots), 0), dtype=np.uint64)
        found: Checksums = self.machine.memories[space].checksums[list(slots)]
        return found

    def pause(self, changed: Flag, seconds: float) -> None:
        """One of the choices happens while somebody waits."""
        found = self.choices()
        assert found, "somebody waits, and nothing will ever happen"
        self._choose(found).do()


class _Lane:
    def __init__(self, executor: SteppedExecutor, name: str, threads: int) -> None:
        self._executor = executor
        self._name = name
        self._threads = threads
        self._queue: deque[Steps[None]] = deque()
        self._waits: dict[Steps[None], When | None] = {}  # steps that have a thread

    def start(self, steps: Steps[None], lost: Callable[[], Steps[None]] | None = None) -> None:
        self._queue.append(steps)

    def choices(self) -> list[Choice]:
        while self._queue and len(self._waits) < self._threads:
            self._waits[self._queue.popleft()] = None
        ready = [steps for steps, wait in self._waits.items() if wait is None or wait.over()]
        return [Choice(f"{self._name} {i} goes on", functools.partial(self._go_on, s)) for i, s in enumerate(ready)]

    def _go_on(self, steps: Steps[None]) -> None:
        try:
            wait = next(steps)
        except StopIteration:
            del self._waits[steps]
            return
        self._waits[steps] = wait

    def close(self) -> None:
        while self._queue or self._waits:
            self._executor.pause(None, 0.0)  # type: ignore[arg-type]


class _Moving:
    """A move of which each page lands, fails or is late."""

    lands: Callable[[int, float], Landed | None] | None = None

    def __init__(self, executor: SteppedExecutor, move: Move, number: int) -> None:
        self._executor = executor
        self._move = move
        self._name = f"move {number}"
        self._left = set(range(len(move)))  # rows that touch their places
        self._errors: dict[int, StorageError] = {}
        self._late: list[int] | None = None  # at the deadline
        self._callbacks: list[Callable[[int], None]] = []

    def choices(self) -> list[Choice]:
        found = []
        files = self._move.ways[0].source != PLANES
        if self._left:
            found.append(Choice(f"{self._name} lands", self._land_all))
            row = min(self._left)
            if files and len(self._left) > 1:
                found.append(Choice(f"page {row} of {self._name} lands", lambda: self._land(row)))
            if files and self._late is None:
                found.append(Choice(f"page {row} of {self._name} fails", lambda: self._fail(row), fault=True))
                found.append(Choice(f"{self._name} is late", self._pass_deadline, fault=True))
        return found

    def _land_all(self) -> None:
        for row in sorted(self._left):
            self._land(row)

    def _land(self, row: int) -> None:
        self._executor.copy(self._move, row)
        self._end_of(row)

    def _fail(self, row: int) -> None:
        self._errors[row] = IOFailedError("injected", "")
        self._end_of(row)

    def _end_of(self, row: int) -> None:
        self._left.discard(row)
        for callback in self._callbacks:
            callback(row)

    def _pass_deadline(self) -> None:
        self._late = sorted(self._left)

    def end(self) -> Steps[End]:
        yield When(lambda: not self._left or self._late is not None)
        return End(self._errors, tuple(self._late or ()))

    def extend(self, ways: Sequence[Way], *, last: bool) -> None:
        raise AssertionError("a store is begun as a whole")

    def cancel(self) -> None:
        """A store goes on."""

    def on_end(self, callback: Callable[[int], None]) -> None:
        self._callbacks.append(callback)
        for row in range(len(self._move)):
            if row not in self._left:
                callback(row)


def places(move: Move) -> list[tuple[Place, Place]]:
    """From where to where each page of a move goes, row by row."""
    found = []
    for way in move.ways:
        for source, target in zip(way.sources.reshape(len(way), -1), way.targets.reshape(len(way), -1), strict=True):
            found.append(((way.source, int(source[0])), (way.target, int(target[0]))))
    return found
