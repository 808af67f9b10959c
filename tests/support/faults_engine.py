"""An engine that is used while faults pass, and what a plain model knows of it. For faults_child.py."""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from gdscache import PageStatus
from gdscache.config.pools import PLAIN_DIRECTORY
from gdscache.errors import GdsCacheError
from gdscache.store.handle import StoreHandle
from tests.support.helpers import MHA, PACKED, Host, expected, flip_file, make_config, on_ssd, prompt, read_page
from tests.support.passing_faults import DEADLINE_S, Counts, Faults, Round

LONGEST_S = 120.0  # of one call: what takes longer hangs, and ends the process
KEPT, CLEARED = "", "cleared"  # salts: of documents that stay, and of those that are cleared again and again
PAGES = {KEPT: [4] * 5, CLEARED: [4] * 5}  # of each document


@dataclasses.dataclass(eq=False)
class Document:
    tokens: list[int]
    salt: str
    keys: list[bytes] = dataclasses.field(default_factory=list)


bytes_of = functools.lru_cache(1 << 12)(expected)


class Watched:
    """A call, which ends in time and raises the engine's own errors alone."""

    def __init__(self, used: UsedEngine, what: str) -> None:
        self._used = used
        self._what = what
        self._began = 0.0

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        self._began = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        faulthandler.cancel_dump_traceback_later()
        counts = self._used.counts
        counts.longest_s = max(counts.longest_s, time.monotonic() - self._began)
        if isinstance(error, (GdsCacheError, MemoryError)):
            counts.errors[f"{self._what}: {type(error).__name__}"] += 1
        elif isinstance(error, Exception):
            counts.unnamed += 1
            self._used.say(f"{self._what}: {''.join(traceback.format_exception(error))}")
        return error is None or isinstance(error, Exception)


class UsedEngine:
    """An engine over a directory, and what a plain model knows of it. Every second one packs its pages."""

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
        packs = number % 2 == 1
        self.places = [self.path, *([self.path / PLAIN_DIRECTORY] if packs else [])]
        self.config = make_config(
            self.path,
            model=PACKED if packs else MHA,
            cpu=self.cpu,
            ssd=8192 if packs else 96,  # a 256th of which holds the pages that do not fit
            bounce=128 if packs else 8,
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
        # where the pages lie, while the engine is being closed and opened again
        self.slots: dict[bytes, tuple[Path, int]] | None = None
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
            there = self.slots_of_pages(set(document.keys))
            for key, tiers in zip(document.keys, report.tiers, strict=True):
                self.counts.stored.update(tiers)
                if on_ssd(tiers):
                    (self.damaged.add if self.harm else self.damaged.discard)(key)
                if on_ssd(tiers) or key in there:  # a page that a full queue keeps from the SSD is in memory alone
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
        slots = self.slots_of_pages() if self.slots is None else self.slots
        keys = sorted((self.committed - self.damaged) & slots.keys())
        key = self.rng.choice(keys) if keys else b""
        if key in slots:
            slab, begin = slots[key]
            with self.faults.quiet():
                for _ in range(3):
                    flip_file(slab, begin + self.rng.randrange(self.host.layout.page_bytes), self.rng.randrange(8))
            self.damaged.add(key)
            self.counts.damaged += 1
            self.counts.met["damage"] += 1

    def slots_of_pages(self, keys: Set[bytes] | None = None) -> dict[bytes, tuple[Path, int]]:
        """The slab and the offset of these pages, or of all that were committed."""
        found, wanted = dict[bytes, tuple[Path, int]](), self.committed if keys is None else keys
        with self.host.engine.manager.lock:
            for place, tier in zip(self.places, self.host.engine.manager.files, strict=True):
                size = self.host.layout.packed_as(packed=self.host.layout.packed and not tier.plain).extent_bytes
                slots = [(key, tier.index.slot(key)) for key in wanted]
                found |= {key: (place / "slab-0.bin", slot * size) for key, slot in slots if slot is not None}
        return found
