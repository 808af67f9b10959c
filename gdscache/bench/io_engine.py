"""An engine whose pages lie on the SSD only: cold loads into the planes through the CPU tier, for `bench io`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from gdscache import CacheEngine
from gdscache.bench.faces import AttachedFace
from gdscache.bench.geometry import model_of
from gdscache.bench.measure import rate
from gdscache.bench.ssd_tier import forget
from gdscache.config import Config
from gdscache.engine import Hit
from gdscache.errors import IOFailedError
from gdscache.planes import PagedPlanes
from gdscache.streams import Event
from gdscache.tiers.bounce import Extents
from gdscache.tiers.paths import Direction
from gdscache.tiers.transfer import Moved, Mover, Slots


class ColdEngine:
    """An engine with attached planes on `device`, a CPU tier and an SSD tier (`auto`, no GDS), and one prompt's pages.

    `total` bytes of pages are stored when it is open. It needs about 1.3 times `total` of disk, twice as much of host
    memory and twice as much on the device.
    """

    def __init__(self, directory: Path, page_bytes: int, total: int, threads: int, device: torch.device) -> None:
        self.pages = max(1, total // page_bytes)
        self.nbytes = self.pages * page_bytes
        self.device = device
        config = Config.from_dict(
            {
                "model": model_of(page_bytes),
                "gpu": {"device": str(device), "capacity": page_bytes, "staging": max(256 << 20, 2 * page_bytes)},
                "cpu": {"capacity": self.nbytes},
                "ssd": {
                    "path": str(directory / f"cold-{page_bytes}"),
                    "capacity": (self.pages + self.pages // 4 + 64) * page_bytes,
                    "threads": threads,
                    "gds": "off",
                },
                "host_buffer": max(256 << 20, 2 * page_bytes),
                "store": {"queue": self.nbytes},
                "load": {"deadline": 600.0},
            }
        )
        layout = config.model.layout()
        with contextlib.ExitStack() as undo:
            planes = PagedPlanes.allocate(layout, self.pages, device).tensors
            for layer in planes:
                for tensor in layer:
                    tensor.fill_(1)
            self.engine = undo.enter_context(CacheEngine.from_config(config, planes))
            tokens = np.arange(self.pages * layout.page_tokens + 1, dtype=np.uint32)
            self._face = AttachedFace(self.engine, tokens, self.pages, list(planes))
            self._face.store("")
            manager = self.engine.manager
            assert manager.cpu is not None, "no CPU tier"
            assert manager.ssd is not None, "no SSD tier"
            self._cpu = manager.cpu
            self.slab = next(iter(manager.ssd.path.glob("slab-*.bin")))
            self._executor = self.engine.executor
            self._unchecked = Unchecked(self._executor.machine.mover)
            self._flat: torch.Tensor | None = None
            self._hit: Hit | None = None
            self._undo = undo.pop_all()

    @property
    def transport(self) -> dict[str, Any]:
        """What the SSD tier's transport says of itself."""
        found: dict[str, Any] = self.engine.stats()["tiers"]["ssd"]["transport"]
        return found

    @property
    def direct(self) -> bool:
        """Whether the transport bypasses the page cache."""
        return bool(self.transport["direct"])

    def prepare(self) -> Hit:
        """What a load needs: nothing in the CPU tier, and a lookup."""
        forget(self.engine.manager, self._cpu)
        self._hit = self.engine.lookup(self._face.tokens)
        return self._hit

    def load(self) -> float:
        """Load every page from the SSD into the planes, from the call to the verdict; GB/s."""
        hit = self._hit or self.prepare()
        self._hit = None
        start = time.perf_counter()
        sources = self.engine.load(hit, self._face.slots).result().bytes_by_tier
        elapsed = time.perf_counter() - start
        if sources != {"ssd": self.nbytes}:
            raise IOFailedError(f"{self.nbytes} bytes were to come from the SSD: {sources}", "see the log")
        return rate(self.nbytes, elapsed)

    def load_unchecked(self) -> float:
        """The same without checksums: the verdict takes the stored ones for those of the bytes."""
        before, machine = self._unchecked.moves, self._executor.machine
        self._executor.machine = dataclasses.replace(machine, mover=self._unchecked)
        try:
            found = self.load()
        finally:
            self._executor.machine = machine
        if self._unchecked.moves == before:
            raise IOFailedError("a load without checksums took some", "please report it")
        return found

    def load_passing(self) -> float:
        """The same past the CPU tier: no page stays there, all go through the bounce reserve."""
        loader = self.engine.loader
        before, loader.keep = loader.keep, False
        try:
            return self.load()
        finally:
            loader.keep = before

    def copy(self) -> float:
        """One copy of as many bytes from the CPU tier's memory (page-locked where CUDA is) to the device; GB/s."""
        source = self._cpu.extents.rows.view(-1)[: self.nbytes]
        if self._flat is None:
            self._flat = torch.empty_like(source, device=self.device)
            self._flat.fill_(1)
        self._idle()
        start = time.perf_counter()
        self._flat.copy_(source, non_blocking=True)
        self._idle()
        return rate(self.nbytes, time.perf_counter() - start)

    def flat(self) -> torch.Tensor:
        """Memory on the device for as many bytes as the pages have."""
        if self._flat is None:
            self._flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return self._flat

    def check(self) -> None:
        """The planes must hold what was stored. Raises `IOFailedError`."""
        self._face.check()

    def blank(self) -> None:
        """Overwrite the planes, so that `check` sees only what a load brings."""
        for layer in self._face.planes:
            for tensor in layer:
                tensor.zero_()
        self._idle()

    def _idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Close the engine and give all memory back."""
        self._undo.close()
        self._flat = None
        self._face.planes = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Unchecked(Mover):
    """A mover that takes no checksums, and answers with the stored ones when asked. `moves` counts its copies."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.name, self.planes, self.layout = mover.name, mover.planes, mover.layout
        self.moves = 0

    def _move(
        self,
        direction: Direction,
        extents: Extents,
        slots: Slots,
        blocks: torch.Tensor,
        layers: range,
        after: Sequence[Event],
        *,
        sums: bool,
    ) -> Moved:
        self.moves += 1
        move = self._mover.scatter if direction == "load" else self._mover.gather
        moved = move(extents, slots, blocks, layers, after, sums=False)
        return Moved(
            moved.event, moved.read_event, lambda: extents.checksums[list(slots)][:, layers.start : layers.stop]
        )

    def queues(self, extents: Extents) -> bool:
        return self._mover.queues(extents)

    def mark_loads(self) -> Event:
        return self._mover.mark_loads()

    def mark_stores(self) -> Event:
        return self._mover.mark_stores()

    def describe(self) -> dict[str, Any]:
        return self._mover.describe()

    def close(self) -> None:
        """Nothing: the mover belongs to somebody else."""
