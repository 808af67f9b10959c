"""What happens to an engine in use while faults pass: their kinds, what brings them about, and rounds of them.

A round is a fault, often with a second one while the engine recovers from the first, and what is left when both are
over.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdscache.storage.base import Op
from tests.support.faults import FaultRule
from tests.support.faulty import PLAN, Fault
from tests.support.io_child import Shim
from tests.support.memory_child import aim
from tests.support.native_parts import has_ring
from tests.support.rings import break_rings

if TYPE_CHECKING:
    from tests.support.faults_engine import UsedEngine

DEADLINE_S = 0.5  # of loads and stores
ONCE, OFTEN, ON = "once", "often", "from now on"
WAYS = (ONCE, OFTEN, ON)
ALONE, OVERLAP, REOPEN, CLOSING = "alone", "overlap", "reopen", "closing"

FAULTS = {
    "read error": (Op.READ, Fault.EIO), "short read": (Op.READ, Fault.SHORT), "late read": (Op.READ, Fault.DELAY),
    "hung read": (Op.READ, Fault.HANG), "write error": (Op.WRITE, Fault.EIO), "full": (Op.WRITE, Fault.ENOSPC),
    "short write": (Op.WRITE, Fault.SHORT), "lost write": (Op.WRITE, Fault.LOST),
    "torn write": (Op.WRITE, Fault.TORN), "late write": (Op.WRITE, Fault.DELAY), "hung write": (Op.WRITE, Fault.HANG),
}  # fmt: skip
HARM = ("lost write", "torn write")  # what is written meanwhile is really damaged
# Of calls of the C library: below which name, reads, writes or syncs, and the errno.
CALLS = {
    "catalogue read": ("catalog.sqlite", "r", 5), "catalogue write": ("catalog.sqlite", "w", 5),
    "catalogue sync": ("catalog.sqlite", "s", 5), "catalogue full": ("catalog.sqlite", "w", 28),
    "catalogue": ("catalog.sqlite", "rws", 5), "slab sync": ("slab-", "s", 5),
}  # fmt: skip
NATIVE_CALLS = {"slab read": ("slab-", "r", 5), "slab write": ("slab-", "w", 5), "device": ("", "rws", 5)}
READS = ("read error", "short read", "slab read", "device", "catalogue read", "catalogue", "late read", "hung read")


def kinds_of(transport: str) -> list[str]:
    kinds = [*CALLS, "damage", "memory"]
    if "Faulty" in transport:
        kinds += FAULTS
    if "ring" in transport.lower():
        kinds += ["ring"]
    if transport == "posix":
        kinds += NATIVE_CALLS
    return kinds


def means(kind: str) -> str:
    """What brings a fault about. Two faults of one round have two of these, or are both of the plan."""
    return "plan" if kind in FAULTS else "calls" if kind in CALLS or kind in NATIVE_CALLS else kind


@dataclasses.dataclass(frozen=True)
class Round:
    kind: str
    way: str
    second: str = ""
    second_way: str = ""
    stage: str = ALONE


@dataclasses.dataclass
class Counts:
    """Of all episodes."""

    rounds: int = 0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)  # kind and way -> rounds that had it
    met: Counter[str] = dataclasses.field(default_factory=Counter)  # means -> calls that failed
    statuses: Counter[str] = dataclasses.field(default_factory=Counter)  # of pages that were loaded
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)  # of pages that were stored
    errors: Counter[str] = dataclasses.field(default_factory=Counter)  # that calls raised
    stored: Counter[str] = dataclasses.field(default_factory=Counter)  # pages by tier
    compared: int = 0
    opened: int = 0
    killed: int = 0
    switched_off: int = 0
    damaged: int = 0
    wrong: int = 0
    lost: int = 0
    left: int = 0  # rounds behind which leases or slots were left, or a check found problems
    unnamed: int = 0  # errors that are not the engine's own
    longest_s: float = 0.0
    said: list[str] = dataclasses.field(default_factory=list)


class Faults:
    def __init__(self, shim: Shim, memory: Any, counts: Counts) -> None:
        self._shim = shim
        self._memory = memory
        self._counts = counts
        aim(memory)
        self._armed = threading.RLock()  # a fault may begin in another thread
        self._ticks: list[Callable[[], None]] = []

    def tick(self) -> None:
        for tick in list(self._ticks):
            tick()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No call of the C library fails meanwhile."""
        name = (ctypes.c_char * 4096).in_dll(self._shim._library, "shim_dir")
        with self._armed:
            before, name.value = name.value, b""
            yield
            name.value = before

    def begin(self, kind: str, way: str, rng: random.Random, used: UsedEngine) -> Callable[[], None]:
        """What lifts the fault again."""
        self._counts.faults[f"{kind}, {way}"] += 1
        if kind in FAULTS:
            return self._plan(kind, way)
        if kind in CALLS or kind in NATIVE_CALLS:
            return self._calls(kind, way, rng, rng.choice(used.places))
        if kind == "memory":
            return self._no_memory(way, rng)
        if kind == "thread":
            return self._no_thread(way)
        act = used.damage if kind == "damage" else self._break_rings
        act()
        if way == ONCE:
            return lambda: None
        beat = 0

        def tick() -> None:
            nonlocal beat
            beat += 1
            if way == ON or not beat % 3:
                act()

        self._ticks.append(tick)
        return lambda: self._ticks.remove(tick)

    def _plan(self, kind: str, way: str) -> Callable[[], None]:
        op, fault = FAULTS[kind]
        passed = 0

        def every_third(path: str, offset: int) -> bool:
            nonlocal passed
            passed += 1
            return passed % 3 == 1

        rule = FaultRule(
            fault,
            op,
            where=every_third if way == OFTEN else None,
            times=1 if way == ONCE else None,
            seconds=1.5 * DEADLINE_S if fault is Fault.DELAY else 0.0,
        )
        PLAN.add(rule)

        def lift() -> None:
            PLAN.remove(rule)
            self._counts.met["plan"] += rule.met

        return lift

    def _calls(self, kind: str, way: str, rng: random.Random, path: Path) -> Callable[[], None]:
        name, kinds, errno = (CALLS | NATIVE_CALLS)[kind]
        chance = {"at": rng.randint(1, 4)} if way == ONCE else {"share": 300_000 if way == OFTEN else 1_000_000}
        seed = rng.getrandbits(30)
        with self._armed:  # "" is the whole directory, with whatever is behind its name
            self._shim.arm(path / name if name else path, kinds, errno=errno, seed=seed, **chance)

        def lift() -> None:
            with self._armed:
                self._counts.met["calls"] += self._shim.disarm()[1]

        return lift

    def _no_memory(self, way: str, rng: random.Random) -> Callable[[], None]:
        seen, first, count = (ctypes.c_long.in_dll(self._memory, f"shim_{name}") for name in ("seen", "first", "count"))
        count.value = {ONCE: 1, OFTEN: 40, ON: 1 << 40}[way]
        first.value = seen.value + 1 + rng.randrange(30 if way == ONCE else 200)

        def lift() -> None:
            self._counts.met["memory"] += min(max(0, seen.value - first.value + 1), count.value)
            first.value = 0

        return lift

    def _no_thread(self, way: str) -> Callable[[], None]:
        start, met, asked = threading.Thread.start, self._counts.met, 0

        def refuse(self: threading.Thread) -> None:
            nonlocal asked
            asked += 1
            if way == ON or (asked == 1 if way == ONCE else asked % 3 == 1):
                met["thread"] += 1
                raise RuntimeError("can't start new thread")
            start(self)

        threading.Thread.start = refuse  # type: ignore[method-assign]

        def lift() -> None:
            threading.Thread.start = start  # type: ignore[method-assign]

        return lift

    def _break_rings(self) -> None:
        self._counts.met["ring"] += break_rings()


FAULTY = [f"tests.support.faulty:{name}" for name in ("FaultyTransport", "FaultyMerging")]
RINGS = ["tests.support.faulty:FaultyUring", "uring"]


def transports() -> list[str]:
    return [*FAULTY, "posix", *(RINGS if has_ring() else ())]


def drawn(rng: random.Random, transport: str) -> Round:
    kinds = kinds_of(transport)
    kind, way, stage = rng.choice(kinds), rng.choice(WAYS), rng.choice((ALONE, OVERLAP, OVERLAP, REOPEN, CLOSING))
    seconds = [k for k in kinds if means(k) != means(kind) or (means(k) == "plan" and k != kind)]
    if stage == REOPEN and "Faulty" not in transport:  # whose own threads would be refused, too
        seconds.append("thread")
    return Round(kind, way) if stage == ALONE else Round(kind, way, rng.choice(seconds), rng.choice(WAYS), stage)


def each_kind(some: Sequence[str], *, whole: bool) -> list[tuple[str, list[Round]]]:
    """Each kind once, from now on, or both (`whole`), half of them with a second one. The transports take turns."""
    rng, rounds = random.Random(5), {transport: list[Round]() for transport in some}
    for number, kind in enumerate(dict.fromkeys(kind for transport in some for kind in kinds_of(transport))):
        able = [transport for transport in some if kind in kinds_of(transport)]
        transport = able[number % len(able)]
        others = [k for k in kinds_of(transport) if not k.startswith(("late", "hung")) and means(k) != means(kind)]
        stage = (ALONE, OVERLAP, ALONE, CLOSING if means(kind) == "calls" else OVERLAP, ALONE, REOPEN)[number % 6]
        for way in (ONCE, ON) if whole else ((ONCE, ON)[number // 6 % 2],):
            second = (rng.choice(others), rng.choice(WAYS), stage) if stage != ALONE else ()
            rounds[transport].append(Round(kind, way, *second))
    rounds["posix"] += [Round("catalogue write", way, "thread", way, REOPEN) for way in (ONCE, ON)]
    return list(rounds.items())
