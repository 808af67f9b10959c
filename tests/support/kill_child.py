"""The process that is killed: two threads that store, load, clear and reopen at random, on one directory."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from gdscache import CacheEngine
from gdscache.disk import catalog_file, slab
from gdscache.errors import PoolFullError
from gdscache.load.plan import LoadReport
from gdscache.moves import PageStatus
from gdscache.pages.layout import PageLayout
from gdscache.store.handle import StoreHandle
from tests.support.helpers import SMALL, WAIT, layout_of, new_planes, on_ssd, read_page, write_page
from tests.support.kill_record import DOCUMENTS, PAGE_TOKENS, PAGES, SALTS, Log, Name, content, name

THREADS = 2
BLOCKS = max(PAGES)  # of each thread, where the planes are ours


def run(pipe: Connection, config: dict[str, Any], attached: bool, path: Path, seed: int, stretch: int) -> None:
    """Work on the directory until somebody kills the process. `stretch`: `STRETCH_BYTES` of the slab. The catalogue's
    log is folded in often, so that a kill meets that, too."""
    slab.STRETCH_BYTES, catalog_file.WAL_PAGES = stretch, 16
    log = Log(path)
    log.session()
    rng = random.Random(seed)
    pipe.send("running")
    while True:
        session = Session(config, attached, log)
        until = time.monotonic() + rng.uniform(0, 0.25)
        with ThreadPoolExecutor(THREADS) as pool:
            for work in [pool.submit(session.work, rng.random(), thread, until) for thread in range(THREADS)]:
                work.result()
        session.engine.close(drain=rng.random() < 0.5)
        session.acknowledge()


class Session:
    """One opening of the engine."""

    def __init__(self, config: dict[str, Any], attached: bool, log: Log) -> None:
        self.layout: PageLayout = layout_of(config["model"])
        self.log = log
        self.planes = new_planes(self.layout, THREADS * BLOCKS, PAGE_TOKENS) if attached else None
        self.engine = CacheEngine.from_config(config, self.planes, limits=SMALL)
        self.stores: dict[int, tuple[Sequence[int], StoreHandle]] = {}

    def work(self, seed: float, thread: int, until: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            what = rng.random()
            salt, document = rng.choice(SALTS), rng.randrange(len(DOCUMENTS))
            if what < 0.006:
                self.clear(None)
            elif what < 0.012:
                self.clear(salt)
            elif what < 0.04:
                self.engine.drain(WAIT)
            elif what < 0.07:
                self.engine.prefetch(DOCUMENTS[document], salt=salt).result(WAIT)
            elif self.planes is None:
                self.sequence(rng, salt, document)
            else:
                self.attached(rng, thread, salt, document)
            self.acknowledge()

    def clear(self, salt: str | None) -> None:
        number = self.log.clear(salt)
        if salt is None:
            self.engine.clear()
        else:
            self.engine.invalidate(self.engine.namespace(salt))
        self.log.cleared(number)

    def acknowledge(self) -> None:
        """Log what the engine says it has on its SSD by now."""
        for number, (pages, handle) in list(self.stores.items()):
            if handle.done() and self.stores.pop(number, None) is not None:
                tiers = handle.result(0).tiers
                self.log.kept(number, [page for page, names in zip(pages, tiers, strict=False) if on_ssd(names)])

    def sequence(self, rng: random.Random, salt: str, document: int) -> None:
        pages = range(rng.randint(1, PAGES[document]))
        tokens = [*DOCUMENTS[document][: len(pages) * PAGE_TOKENS], 7]
        number = self.log.store(salt, document, pages) if rng.random() < 0.9 else None
        try:
            with self.engine.sequence(tokens, salt) as seq:
                cached = seq.verify(WAIT)
                if seq.load is not None:
                    undamaged(seq.load.result())
                planes = [self.engine.gpu.planes(layer) for layer in range(self.layout.n_layers)]
                slots = seq.slots.tolist()
                for page in pages:
                    if page < cached // PAGE_TOKENS:
                        self.compare(planes, slots[page], name(salt, document, page))
                    else:
                        self.compute(planes, slots[page], name(salt, document, page))
                if number is not None:
                    self.stores[number] = pages, seq.commit()
        except PoolFullError:
            pass
        if number is not None:
            self.log.submitted(number)

    def attached(self, rng: random.Random, thread: int, salt: str, document: int) -> None:
        """A request to an engine that is attached to our planes."""
        tokens, slots = DOCUMENTS[document], [thread * BLOCKS + block for block in rng.sample(range(BLOCKS), BLOCKS)]
        hit = self.engine.lookup(tokens, salt=salt)
        load = self.engine.load(hit, slots[: len(hit.pages)])
        report = load.result(WAIT)
        undamaged(report)
        load.release_event.synchronize(WAIT)
        loaded = report.tokens // PAGE_TOKENS
        for page in range(loaded):
            self.compare(self.planes, slots[page], name(salt, document, page))
        rest = range(loaded, rng.randint(loaded, PAGES[document]))
        number = self.log.store(salt, document, rest)
        for page in rest:
            self.compute(self.planes, slots[page], name(salt, document, page))
        start, chosen = loaded * PAGE_TOKENS, [slots[page] for page in rest]
        handle = self.engine.store(tokens, chosen, start, salt)
        self.log.submitted(number)
        self.stores[number] = rest, handle
        handle.release_event.synchronize(WAIT)

    def compute(self, planes: Any, slot: int, page: Name) -> None:
        write_page(planes, self.layout, [slot], content(page, self.layout.plane_bytes))

    def compare(self, planes: Any, slot: int, page: Name) -> None:
        got = read_page(planes, self.layout, [slot])
        assert np.array_equal(got, content(page, self.layout.plane_bytes)), "a page has other bytes"


def undamaged(report: LoadReport) -> None:
    """Another thread's clear may take pages from a load; nothing here damages any."""
    damage = {PageStatus.CHECKSUM, PageStatus.SHORT_READ, PageStatus.IO_ERROR} & set(report.pages)
    assert not damage, f"a page counts as damaged: {report}"
