"""Faults that pass, alone and in twos, over an engine in use. Run under `io_shim.c` and `memory_shim.c`.

Started by test_faults_that_pass.py: both shims, a directory to work in, the first episode, a seed, and seconds (0: each
kind of fault once or from now on; else each in both ways, and then drawn ones until the time is over). An episode is a
directory, a transport and some rounds; those that are drawn follow from the seed and its number alone. A round is a
fault, often with a second one while the engine recovers from the first, and what is left when both are over. Prints one
JSON object: what was counted.
"""

from __future__ import annotations

import ctypes
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gdscache.errors import GdsCacheError
from gdscache.tiers.quarantine import OFF_S, TRY_S
from tests.support.faults_engine import KEPT, LONGEST_S, Document, UsedEngine
from tests.support.faulty import PLAN
from tests.support.helpers import Host, drop_from, settle
from tests.support.io_child import Shim
from tests.support.passing_faults import (
    CLOSING,
    HARM,
    ON,
    OVERLAP,
    READS,
    REOPEN,
    Counts,
    Faults,
    Round,
    drawn,
    each_kind,
    means,
    transports,
)

OVER_S = 60.0  # within which everything must be well again when the faults are over
ROUNDS = 8  # of an episode


class Episode(UsedEngine):
    """Rounds over an engine, and what is left behind each."""

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
        copy = self.path.with_name(f"{self.path.name}-killed")
        with self.faults.quiet():
            with self.watched("drain"):
                self.host.engine.drain(LONGEST_S / 2)
            shutil.copytree(self.path, copy)
        self.counts.killed += 1
        self.copy = copy

    def look_at_the_copy(self) -> None:
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


def main() -> None:
    shim, memory, place, first, seed, seconds = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    counts = Counts()
    faults = Faults(Shim(shim), ctypes.CDLL(memory), counts)
    some, until = transports(), time.monotonic() + float(seconds)
    plans = each_kind(some, whole=bool(float(seconds)))
    number = int(first)
    while plans or time.monotonic() < until:
        transport, rounds = plans.pop(0) if plans else (some[number % len(some)], [])
        PLAN.reset()
        episode = Episode(number, int(seed), transport, Path(place), faults, counts)
        episode.over()
        for round_ in rounds or [drawn(episode.rng, transport) for _ in range(ROUNDS)]:
            began = time.monotonic()
            episode.attempt(round_)
            print(f"{number} {round_} {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
            if time.monotonic() > until and not rounds:
                break
        episode.round = Round("", "")
        with episode.watched("close"):
            episode.host.engine.close()
        shutil.rmtree(episode.path)
        number += 1
    print(json.dumps(vars(counts) | {"episodes": number - int(first), "transports": some}))


if __name__ == "__main__":
    main()
