"""The SSD tier alone, for `gdscache bench io`: stores and loads of whole pages, in host memory.

A store is what `gdscache.store.writer` does: slots reserved (the slab is full, so older pages are evicted), bytes
written, rows committed, keys visible. A load is what `Loader.bring` does for a prefetch: CPU slots reserved, bytes
read, checksums verified, pages published. Both use the engine's own parts.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from gdscache.commands.bench.geometry import model_of
from gdscache.commands.bench.measure import Closeable, rate
from gdscache.config import Config
from gdscache.errors import IOFailedError
from gdscache.opening import build
from gdscache.pages.keys import Page
from gdscache.pages.layout import PageLayout
from gdscache.store.writer import Outgoing, TierWriter
from gdscache.tiers.base import Tier
from gdscache.tiers.manager import TierManager

if TYPE_CHECKING:
    from gdscache.extents.host import HostExtents

CHAIN = 32  # pages of one prefix
NAMESPACE = bytes(32)


def forget(manager: TierManager, tier: Tier) -> None:
    """Drop a tier's pages, so that the next load comes from the tier below."""
    with manager.lock:
        for key in tier.index.select(None):
            entry = tier.index.find(key)
            if entry is not None:
                tier.index.drop(entry)


class TierUnderTest(Closeable):
    """An SSD tier below a CPU pool of `total` bytes that is touched and full of random bytes."""

    def __init__(self, directory: Path, page_bytes: int, total: int, threads: int) -> None:
        self.pages = max(1, total // page_bytes)
        self.nbytes = self.pages * page_bytes
        self.threads = threads
        spare = self.pages // 4 + 64  # so that all pages of a round stay although slots are kept in reserve
        config = Config.from_dict(
            {
                "model": model_of(page_bytes),
                "gpu": {"device": "cpu", "capacity": page_bytes, "staging": 2 * page_bytes},
                "cpu": {"capacity": self.nbytes},
                "ssd": {
                    "path": str(directory / f"tier-{page_bytes}"),
                    "capacity": (self.pages + spare) * page_bytes,
                    "gds": "off",
                    "threads": threads,
                },
                "host_buffer": 2 * page_bytes,
                "store": {"write_policy": "never", "queue": self.nbytes},
                "deadline": 600.0,
            }
        )
        self.layout: PageLayout = config.model.layout()
        self._parts = build(config, None)
        manager = self._parts.manager
        assert manager.cpu is not None, "no CPU tier"
        assert manager.ssd is not None, "no SSD tier"
        self._cpu, self._ssd = manager.cpu, manager.ssd
        self._writer = TierWriter(manager, self._ssd, self._parts.executor, self.layout.extent_bytes)
        self.slab = next(iter(self._ssd.path.glob("slab-*.bin")))
        self._generation = 0
        self._names: list[Page] = []
        generator, extents = torch.Generator().manual_seed(0), cast("HostExtents", self._cpu.extents)
        for slot in range(self.pages):
            words = extents.rows[slot].view(torch.int64)
            words.random_(generator=generator)
            extents.sign(slot)

    @property
    def transport(self) -> str:
        """The name of the tier's transport."""
        return str(self._ssd.describe()["transport"]["name"])

    @property
    def direct(self) -> bool:
        """Whether the tier's transport goes past the page cache."""
        return bool(self._ssd.describe()["transport"]["direct"])

    def store(self) -> float:
        """Write every page of the CPU pool under a new name; GB/s until the last is visible."""
        self._generation += 1
        self._names = _names(self._generation, self.pages)
        causes: Counter[str] = Counter()
        done = threading.Event()

        def finish(rows: Sequence[int], cause: str) -> None:  # under the manager's lock
            causes[cause] += len(rows)
            if causes.total() == self.pages:
                done.set()

        manager = self._parts.manager
        epoch = manager.clearing.epoch(NAMESPACE)
        outgoing = Outgoing(self._names, epoch, self._cpu.name, range(self.pages), finish)
        start = time.perf_counter()
        self._writer.put([outgoing])
        done.wait()
        elapsed = time.perf_counter() - start
        if causes[""] != self.pages:
            raise IOFailedError(f"the SSD tier did not take all {self.pages} pages: {dict(causes)}", "see the log")
        return rate(self.nbytes, elapsed)

    def load(self) -> float:
        """Bring every stored page into the CPU pool; GB/s until the verdict."""
        start = time.perf_counter()
        loader = self._parts.loader
        plan = loader.planner.plan_prefetch(self._names, 0, len(self._names), keep=())
        report = loader.executor.finish(loader.bring(plan.chunk))
        elapsed = time.perf_counter() - start
        if report.bytes_by_tier != {"ssd": self.nbytes}:
            raise IOFailedError(f"{self.nbytes} bytes were to come from the SSD: {report.bytes_by_tier}", "see the log")
        forget(self._parts.manager, self._cpu)
        return rate(self.nbytes, elapsed)

    def close(self) -> None:
        self._writer.close(drain=True)
        self._parts.close(drain=True)


def _names(generation: int, pages: int) -> list[Page]:
    """Names of so many pages in chains of `CHAIN`, different in each generation."""
    names, parent = [], NAMESPACE
    for number in range(pages):
        key = hashlib.blake2b(f"{generation}/{number}".encode(), digest_size=32).digest()
        names.append(Page(key, parent if number % CHAIN else NAMESPACE, NAMESPACE))
        parent = key
    return names
