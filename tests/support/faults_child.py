"""Faults that pass, alone and in twos, over an engine in use. Run under `io_shim.c` and `memory_shim.c`.

Started by test_faults_that_pass.py: both shims, a directory to work in, the first episode, a seed, and seconds (0: each
kind of fault once and from now on). An episode is a directory, a transport and some rounds; it follows from the seed
and its number alone. A round is a fault, often with a second one while the engine recovers from the first, and what is
left when both are over. Prints one JSON object: what was counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import logging
import random
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gdscache import PageStatus
from gdscache.errors import GdsCacheError, TransportUnavailableError
from gdscache.storage.base import Op
from gdscache.storage.native import NativeTransport
from gdscache.store.handle import StoreHandle
from gdscache.testing.faults import FaultRule
from gdscache.tiers.failed_reads import OFF_S, TRY_S
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import Host, drop_from, expected, flip_file, make_config, prompt, read_page, settle
from tests.support.io_child import Shim
from tests.support.memory_child import aim
from tests.support.rings import break_rings

LONGEST_S = 120.0  # of one call: what takes longer hangs, and ends the process
OVER_S = 60.0  # within which everything must be well again when the faults are over
DEADLINE_S = 0.5  # of loads and stores
ROUNDS = 8  # of an episode
KEPT, CLEARED = "", "cleared"  # salts: of documents that stay, and of those that are cleared again and again
PAGES = {KEPT: [4] * 5, CLEARED: [4] * 5}  # of each document
ONCE, OFTEN, ON = "once", "often", "from now on"
WAYS = (ONCE, OFTEN, ON)
ALONE, OVERLAP, REOPEN, CLOSING = "alone", "overlap", "reopen", "closing"

FAULTS = {
    "read error": (Op.READ, Fault.EIO),
    "short read": (Op.READ, Fault.SHORT),
    "late read": (Op.READ, Fault.DELAY),
    "hung read": (Op.READ, Fault.HANG),
    "write error": (Op.WRITE, Fault.EIO),
    "full": (Op.WRITE, Fault.ENOSPC),
    "short write": (Op.WRITE, Fault.SHORT),
    "lost write": (Op.WRITE, Fault.LOST),
    "torn write": (Op.WRITE, Fault.TORN),
    "late write": (Op.WRITE, Fault.DELAY),
    "hung write": (Op.WRITE, Fault.HANG),
}
HARM = ("lost write", "torn write")  # what is written meanwhile is really damaged
# Of calls of the C library: below which name, reads, writes or syncs, and the errno.
CALLS = {
    "catalogue read": ("catalog.sqlite", "r", 5),
    "catalogue write": ("catalog.sqlite", "w", 5),
    "catalogue sync": ("catalog.sqlite", "s", 5),
    "catalogue full": ("catalog.sqlite", "w", 28),
    "catalogue": ("catalog.sqlite", "rws", 5),
    "slab sync": ("slab-", "s", 5),
}
NATIVE_CALLS = {"slab read": ("slab-", "r", 5), "slab write": ("slab-", "w", 5), "device": ("", "rws", 5)}
READS = ("read error", "short read", "slab read", "device", "catalogue read", "catalogue", "late read", "hung read")


def kinds_of(transport: str) -> list[str]:
    """What can happen to an engine over a transport."""
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


@dataclasses.dataclass(eq=False)
class Document:
    tokens: list[int]
    salt: str
    keys: list[bytes] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Counts:
    """Of all episodes."""

    rounds: int = 0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)  # kind and way -> rounds that had it
    met: Counter[str] = dataclasses.field(default_factory=Counter)  # means -> calls that failed
    statuses: Counter[str] = dataclasses.field(default_factory=Counter)  # of pages that were loaded
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)  # of pages that were stored
    errors: Counter[str] = dataclasses.field(default_factory=Counter)  # that calls raised
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
    """Brings faults about, and lifts them."""

    def __init__(self, shim: Shim, memory: Any, counts: Counts) -> None:
        self._shim = shim
        self._memory = memory
        self._counts = counts
        aim(memory)
        self._armed = threading.RLock()  # a fault may begin in another thread
        self._ticks: list[Callable[[], None]] = []

    def tick(self) -> None:
        """Before each call of the engine."""
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

    def begin(self, kind: str, way: str, rng: random.Random, episode: Episode) -> Callable[[], None]:
        """What lifts the fault again."""
        self._counts.faults[f"{kind}, {way}"] += 1
        if kind in FAULTS:
            return self._plan(kind, way)
        if kind in CALLS or kind in NATIVE_CALLS:
            return self._calls(kind, way, rng, episode.path)
        if kind == "memory":
            return self._no_memory(way, rng)
        if kind == "thread":
            return self._no_thread(way)
        act = episode.damage if kind == "damage" else self._break_rings
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


bytes_of = functools.lru_cache(1 << 12)(expected)


class Watched:
    """A call, which ends in time and raises the engine's own errors alone."""

    def __init__(self, episode: Episode, what: str) -> None:
        self._episode = episode
        self._what = what
        self._began = 0.0

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        faulthandler.cancel_dump_traceback_later()
        counts = self._episode.counts
        counts.longest_s = max(counts.longest_s, time.monotonic() - self._began)
        if isinstance(error, (GdsCacheError, MemoryError)):
            counts.errors[f"{self._what}: {type(error).__name__}"] += 1
        elif isinstance(error, Exception):
            counts.unnamed += 1
            self._episode.say(f"{self._what}: {''.join(traceback.format_exception(error))}")
        return error is None or isinstance(error, Exception)


class Episode:
    """An engine over a directory, and what a plain model knows of it."""

    def __init__(self, number: int, seed: int, transport: str, work: Path, faults: Faults, counts: Counts) -> None:
        self.number = number
        self.path = work / f"cache-{number}"
        self.rng = random.Random(f"{seed}/{number}")
        self.counts = counts
        self.faults = faults
        self.transport = transport
        self.now = 0.0  # of what failed reads say
        self.round = Round("", "")
        self.cpu = self.rng.choice((None, 16))
        self.config = make_config(
            self.path,
            cpu=self.cpu,
            ssd=96,
            bounce=8,
            transport=transport,
            deadline=DEADLINE_S,
            ssd_options={"durability": self.rng.choice(("process", "power"))},
        )
        self.generation: Counter[str] = Counter()  # salt -> how often it was cleared
        self.salt_of: dict[bytes, str] = {}
        self.committed: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.unsure = False  # whether the salt that is cleared was to be, and an error was the answer
        self.harm = 0  # faults under way that damage what is written
        self.slots: dict[bytes, int] | None = (
            None  # where the pages lie, while the engine is being closed and opened again
        )
        self.refused: dict[int, str] = {}  # pages of the last store
        self.copy: Path | None = None  # what a kill would have left
        self.documents: list[Document] = []
        self.host = self.open()
        number = 0
        for salt, pages in PAGES.items():
            for some in pages:
                document = Document(prompt(number, some), salt)
                document.keys = [page.key for page in self.host.engine.pages(document.tokens, salt)]
                self.salt_of.update(dict.fromkeys(document.keys, salt))
                self.documents.append(document)
                number += 1

    # -- calls, each of which ends in time and raises the engine's own errors ---------------------------------------

    def watched(self, what: str) -> Watched:
        self.faults.tick()
        return Watched(self, what)

    def say(self, what: str) -> None:
        where = f"episode {self.number} ({self.transport}, cpu {self.cpu}, {self.config['ssd']['durability']})"
        said = f"{where}, {self.round}: {what}"
        print(said, file=sys.stderr, flush=True)
        if len(self.counts.said) < 20:
            self.counts.said.append(said[:3000])

    def data(self, key: bytes) -> Any:
        generation = self.generation[self.salt_of[key]]
        number = (int.from_bytes(key[:8], "little") + generation) % (1 << 64)
        return bytes_of(self.host.layout, number.to_bytes(8, "little"))

    def open(self, path: Path | None = None) -> Host:
        """Raises the engine's own errors."""
        config = self.config if path is None else self.config | {"ssd": self.config["ssd"] | {"path": str(path)}}
        host = Host(config, blocks=48)
        host.data = self.data
        host.engine.manager.quarantine.failed_reads.clock = lambda: self.now
        self.counts.opened += 1
        return host

    def begin_store(self, document: Document) -> tuple[Document, StoreHandle] | None:
        """The bytes are out of the planes when this returns."""
        blocks = self.host.compute(document.tokens, salt=document.salt)
        try:
            with self.watched("store"):
                handle = self.host.engine.store(document.tokens, blocks, 0, document.salt)
                handle.release_event.synchronize(LONGEST_S / 2)
                return document, handle
            return None
        finally:
            self.host.give(blocks)

    def end_store(self, begun: tuple[Document, StoreHandle] | None) -> None:
        if begun is None:
            return
        document, handle = begun
        report = None
        with self.watched("result of a store"):
            report = handle.result(LONGEST_S / 2)
            self.counts.dropped.update(report.dropped.values())
            self.refused = dict(report.dropped)
            for i, (key, tiers) in enumerate(zip(document.keys, report.tiers, strict=True)):
                if "ssd" in tiers:
                    (self.damaged.add if self.harm else self.damaged.discard)(key)
                if i not in report.dropped:  # or it was there already
                    self.committed.add(key)
        if report is None and self.harm:  # whatever became of them
            self.damaged.update(set(document.keys) - self.committed)

    def store(self, document: Document) -> None:
        self.end_store(self.begin_store(document))

    def load(self, document: Document, start: int = 0, host: Host | None = None) -> set[bytes]:
        """The keys of the pages that came, each of which has its bytes."""
        host = host or self.host
        came, blocks = set[bytes](), list[int]()
        with self.watched("load"):
            hit = host.engine.lookup(document.tokens, start * host.layout.page_tokens, document.salt)
            blocks = host.take(len(hit.pages))
            load = host.engine.load(hit, blocks)
            try:
                for layer in range(host.layout.n_layers):
                    load.wait(layer)
                report = load.result(LONGEST_S / 2)
            finally:
                load.release_event.synchronize(LONGEST_S / 2)
            for i, (page, status) in enumerate(zip(hit.pages, report.pages, strict=True)):
                self.counts.statuses[status.value] += 1
                if status is PageStatus.LOADED:
                    came.add(page.key)
                    self.counts.compared += 1
                    if not np.array_equal(
                        read_page(host.planes, host.layout, host.page(blocks, i)), self.data(page.key)
                    ):
                        self.counts.wrong += 1
                        self.say(f"page {start + i} of {document.salt!r} has other bytes")
                elif status is PageStatus.CHECKSUM and page.key not in self.damaged:
                    self.say(f"page {start + i} of {document.salt!r} is called bad, and nobody damaged it")
                    self.counts.lost += 1
        host.give(blocks)
        return came

    def prefetch(self, document: Document) -> None:
        if self.cpu is not None:
            with self.watched("prefetch"), self.host.engine.prefetch(document.tokens, salt=document.salt) as handle:
                handle.result(LONGEST_S / 2)

    def clear(self) -> None:
        """What is refused is asked for again when the fault is over; the bytes that belong to the pages are others when
        that was done."""
        done = False
        with self.watched("clear"):
            self.host.engine.invalidate(self.host.engine.namespace(CLEARED))
            done = True
        cleared = {key for key, salt in self.salt_of.items() if salt == CLEARED}
        self.committed -= cleared
        self.unsure = not done
        if done:
            self.damaged -= cleared
            self.generation[CLEARED] += 1

    def damage(self) -> None:
        """Flip bits of a page in the slab."""
        slots = self.slots_of_pages() if self.slots is None else self.slots
        keys = sorted((self.committed - self.damaged) & slots.keys())
        key = self.rng.choice(keys) if keys else b""
        slot = slots.get(key)
        if slot is not None:
            with self.faults.quiet():
                for _ in range(3):
                    at = slot * self.host.layout.extent_bytes + self.rng.randrange(self.host.layout.page_bytes)
                    flip_file(self.path / "slab-0.bin", at, self.rng.randrange(8))
            self.damaged.add(key)
            self.counts.damaged += 1
            self.counts.met["damage"] += 1

    def slots_of_pages(self, keys: Set[bytes] | None = None) -> dict[bytes, int]:
        """Of these pages, or of all that were committed."""
        index = self.host.engine.manager.tiers["ssd"].index
        with self.host.engine.manager.lock:
            found = {key: index.slot(key) for key in (self.committed if keys is None else keys)}
        return {key: slot for key, slot in found.items() if slot is not None}

    # -- a round ------------------------------------------------------------------------------------------------------

    def stored(self, document: Document) -> bool:
        return self.committed >= set(document.keys)

    def work(self, calls: int = 8) -> None:
        """What an engine is asked for, drawn."""
        rng = self.rng
        kept = [document for document in self.documents if document.salt == KEPT]
        new = [document for document in self.documents if not self.stored(document)]
        rng.shuffle(new)
        for _ in range(calls):
            what = rng.random()
            if new and what < 0.4:
                self.store(new.pop())
            elif what < 0.5:
                self.prefetch(rng.choice(self.documents))
            elif what < 0.54:
                self.clear()
            elif len(new) > 1 and what < 0.6:  # side by side
                for begun in [self.begin_store(new.pop()), self.begin_store(new.pop())]:
                    self.load(rng.choice(kept))
                    self.end_store(begun)
            elif what < 0.65:
                self.cool()
            else:
                self.load(rng.choice(self.documents if rng.random() < 0.3 else kept))

    def cool(self) -> None:
        if self.cpu is not None:
            drop_from(self.host.engine, "cpu")

    def fail_until_off(self) -> None:
        """Some seconds pass, of the clock of failed reads, in which nothing but errors may have come."""
        self.cool()
        for document in self.documents[:4]:
            self.load(document)
        self.now += OFF_S
        self.cool()
        self.load(self.documents[0])

    def attempt(self, round_: Round) -> None:
        self.round = round_
        self.counts.rounds += 1
        rng, lifts = self.rng, list[Callable[[], None]]()

        def begin(kind: str, way: str) -> Callable[[], None]:
            lift = self.faults.begin(kind, way, rng, self)
            harm = kind in HARM
            self.harm += harm

            def over() -> None:
                if over in lifts:
                    lifts.remove(over)
                    lift()
                    self.harm -= harm

            lifts.append(over)
            return over

        if "catalogue" in round_.kind and rng.random() < 0.7:
            self.reopen()  # no checksums are in memory
        self.cool()
        first = begin(round_.kind, round_.way)
        self.work()
        if round_.kind in READS and round_.way == ON:
            self.fail_until_off()
            self.work(3)
        if round_.stage == OVERLAP:
            second = begin(round_.second, round_.second_way)
            self.work(5)
            first()
            self.now += TRY_S
            self.work(5)
            second()
        elif round_.stage in (REOPEN, CLOSING):
            self.restart(round_, begin, first)
        elif rng.random() < 0.3:
            self.killed()
        for lift in list(lifts):
            lift()
        self.over()

    def restart(
        self, round_: Round, begin: Callable[[str, str], Callable[[], None]], first: Callable[[], None]
    ) -> None:
        """Close under the first fault; the second begins meanwhile, or before the directory is opened again."""
        new = [document for document in self.documents if not self.stored(document)]
        stores = [self.begin_store(document) for document in new[:3]]
        self.slots = self.slots_of_pages()
        begun: list[Callable[[], None]] = []
        timer = threading.Timer(
            self.rng.uniform(0, 0.01), lambda: begun.append(begin(round_.second, round_.second_way))
        )
        if round_.stage == CLOSING and means(round_.second) != "thread":
            timer.start()
        with self.watched("close"):
            self.host.engine.close(drain=self.rng.random() < 0.7)
        for store in stores:
            self.end_store(store)
        if timer.ident is not None:
            timer.join()
        first()
        second = begun[0] if begun else begin(round_.second, round_.second_way)
        opened = False
        for _ in range(3):
            with self.watched("open"):
                self.host = self.open()
                opened = True
            if opened:
                break
        if opened:
            self.slots = None
            self.work(4)
        second()
        if not opened:
            self.open_again()
        self.slots = None

    def open_again(self) -> None:
        """Without a fault: late I/O of the engine before may still be on its way to its end."""
        until = time.monotonic() + OVER_S
        while True:
            try:
                self.host = self.open()
                return
            except GdsCacheError as error:
                if time.monotonic() > until:
                    self.counts.lost += len(self.committed)
                    self.say(f"the directory cannot be opened: {error}")
                    raise
                time.sleep(0.02)

    def reopen(self) -> None:
        with self.watched("close"):
            self.host.engine.close(drain=self.rng.random() < 0.5)
        self.open_again()

    # -- what is left when it is over ---------------------------------------------------------------------------------

    def over(self) -> None:
        """All is well again: on the tier, in use, behind a restart, and in what a kill leaves."""
        self.recover()
        self.look_at_the_copy()
        if self.unsure:
            self.clear()
        assert not self.unsure, "a clear is refused when no fault is left"
        self.nothing_is_left()
        self.all_is_there(self.host)
        self.now += TRY_S
        for document in self.documents:
            self.store(document)
        self.committed_all()
        if self.rng.random() < 0.4:
            self.reopen()
        elif self.rng.random() < 0.3:
            self.killed()
            self.look_at_the_copy()
        self.cool()
        self.all_is_there(self.host)
        self.nothing_is_left()
        self.clear()  # something to store during the next fault
        for document in self.documents[-2:]:
            self.store(document)

    def recover(self) -> None:
        until = time.monotonic() + OVER_S
        while True:
            state = self.host.engine.stats()["tiers"]["ssd"]["quarantine"]
            late = state["late_reads"] + state["late_writes"]
            if not (late or state["switched_off"] or state["switched_off_by_errors"]):
                self.counts.switched_off += state["switch_offs"] + state["error_switch_offs"]
                return
            if time.monotonic() > until:
                self.counts.lost += len(self.committed)
                self.say(f"the tier is not switched on again: {state}")
                return
            if state["switched_off_by_errors"]:
                self.now += TRY_S
                self.cool()
                for document in self.documents[:3]:
                    self.load(document)
            time.sleep(0.005)

    def committed_all(self) -> None:
        """Stores work again: every page is there."""
        missing = [key for document in self.documents for key in document.keys if key not in self.committed]
        until = time.monotonic() + OVER_S
        while missing and time.monotonic() < until:  # a deadline passes on a machine that is busy
            for document in self.documents:
                self.store(document)
            missing = [key for key in missing if key not in self.committed]
        if missing:
            self.counts.lost += len(missing)
            self.say(f"{len(missing)} pages cannot be stored when no fault is left: {self.refused}")

    def all_is_there(self, host: Host) -> None:
        """Every page that was committed comes, unless it was damaged; those that were come, or are given up."""
        if self.cpu is not None:
            drop_from(host.engine, "cpu")
        for document in self.documents:
            wanted = {key for key in document.keys if key in self.committed and key not in self.damaged}
            came, until = set[bytes](), time.monotonic() + OVER_S
            while True:
                for start, key in enumerate(document.keys):
                    if key in wanted - came:
                        came |= self.load(document, start, host)
                missing = wanted - came
                if not missing or time.monotonic() > until:
                    break
                time.sleep(0.01)
            if missing:
                self.counts.lost += len(missing)
                self.committed -= missing
                pages = [n for n, key in enumerate(document.keys) if key in missing]
                self.say(f"pages {pages} of {document.salt!r} are lost")
        for document in self.documents if host is self.host else ():
            for start, key in enumerate(document.keys):
                if key in self.damaged:  # it comes, as it was harmed where it does not matter, or it goes
                    self.judge(document, start, key)

    def judge(self, document: Document, start: int, key: bytes) -> None:
        came, until = False, time.monotonic() + OVER_S
        while not came and key in self.slots_of_pages({key}):
            if time.monotonic() > until:
                self.counts.lost += 1
                self.say(f"page {start} of {document.salt!r} neither comes nor goes")
                break
            came = key in self.load(document, start)
        self.damaged.discard(key)
        if not came:
            self.committed.discard(key)

    def killed(self) -> None:
        """What a kill now would leave, opened and read."""
        copy = self.path.with_name(f"{self.path.name}-killed")
        with self.faults.quiet():
            with self.watched("drain"):
                self.host.engine.drain(LONGEST_S / 2)
            shutil.copytree(self.path, copy)
        self.counts.killed += 1
        self.copy = copy

    def look_at_the_copy(self) -> None:
        """Open what a kill left, and read it."""
        if self.copy is not None:
            host = self.open(self.copy)
            self.all_is_there(host)
            with self.watched("close"):
                host.engine.close()
            shutil.rmtree(self.copy)
            self.copy = None

    def nothing_is_left(self) -> None:
        try:
            with self.watched("drain"):
                self.host.engine.drain(LONGEST_S / 2)
            settle(self.host.engine)
        except AssertionError as error:
            self.counts.left += 1
            self.say(f"left: {error}")


# -- which rounds -----------------------------------------------------------------------------------------------------

FAULTY = [f"tests.support.faulty:{name}" for name in ("FaultyTransport", "FaultyMerging")]
RINGS = ["tests.support.faulty:FaultyUring", "uring"]


def transports() -> list[str]:
    try:
        NativeTransport(1).close()
    except TransportUnavailableError:
        return [*FAULTY, "posix"]
    return [*FAULTY, "posix", *RINGS]


def drawn(rng: random.Random, transport: str) -> Round:
    kinds = kinds_of(transport)
    kind, way, stage = rng.choice(kinds), rng.choice(WAYS), rng.choice((ALONE, OVERLAP, OVERLAP, REOPEN, CLOSING))
    seconds = [k for k in kinds if means(k) != means(kind) or (means(k) == "plan" and k != kind)]
    if stage == REOPEN and "Faulty" not in transport:  # whose own threads would be refused, too
        seconds.append("thread")
    return Round(kind, way) if stage == ALONE else Round(kind, way, rng.choice(seconds), rng.choice(WAYS), stage)


def short_form(some: Sequence[str]) -> list[tuple[str, list[Round]]]:
    """Each kind once and from now on, half of them with a second one. The transports take turns."""
    rng, rounds = random.Random(5), {transport: list[Round]() for transport in some}
    for number, kind in enumerate(dict.fromkeys(kind for transport in some for kind in kinds_of(transport))):
        able = [transport for transport in some if kind in kinds_of(transport)]
        transport = able[number % len(able)]
        others = [k for k in kinds_of(transport) if not k.startswith(("late", "hung")) and means(k) != means(kind)]
        stage = (ALONE, OVERLAP, ALONE, CLOSING if means(kind) == "calls" else OVERLAP, ALONE, REOPEN)[number % 6]
        for way in (ONCE, ON):
            second = (rng.choice(others), rng.choice(WAYS), stage) if stage != ALONE else ()
            rounds[transport].append(Round(kind, way, *second))
    rounds["posix"] += [Round("catalogue write", way, "thread", way, REOPEN) for way in (ONCE, ON)]
    return list(rounds.items())


def main() -> None:
    shim, memory, place, first, seed, seconds = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    counts = Counts()
    faults = Faults(Shim(shim), ctypes.CDLL(memory), counts)
    some, until = transports(), time.monotonic() + float(seconds)
    plans = short_form(some) if not float(seconds) else None
    number = int(first)
    while plans or (plans is None and time.monotonic() < until):
        transport, rounds = plans.pop(0) if plans else (some[number % len(some)], [])
        PLAN.reset()
        episode = Episode(number, int(seed), transport, Path(place), faults, counts)
        episode.over()
        for round_ in rounds or [drawn(episode.rng, transport) for _ in range(ROUNDS)]:
            began = time.monotonic()
            episode.attempt(round_)
            print(f"{number} {round_} {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
            if time.monotonic() > until and plans is None:
                break
        episode.round = Round("", "")
        with episode.watched("close"):
            episode.host.engine.close()
        shutil.rmtree(episode.path)
        number += 1
    print(json.dumps(vars(counts) | {"episodes": number - int(first), "transports": some}))


if __name__ == "__main__":
    main()
