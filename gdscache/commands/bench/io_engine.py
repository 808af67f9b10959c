"""An engine with its pages on the SSD only: cold loads into the planes through the CPU tier, for `bench io`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from gdscache import CacheEngine
from gdscache.commands.bench.geometry import model_of
from gdscache.commands.bench.measure import Closeable, rate
from gdscache.config import Config
from gdscache.errors import IOFailedError
from gdscache.pages.hit import Hit
from gdscache.pages.planes import PagedPlanes

if TYPE_CHECKING:
    from gdscache.extents.host import HostExtents


class ColdEngine(Closeable):
    """An engine with attached planes on `device`, a CPU tier and an SSD tier (`auto`, no GDS), and one prompt's pages.

    Opening stores `total` bytes of pages. It needs about 1.3 times `total` of disk, twice `total` of host memory and
    twice `total` on the device.
    """

    def __init__(
        self,
        directory: Path,
        page_bytes: int,
        total: int,
        threads: int,
        device: torch.device,
        ssd: Mapping[str, Any] | None = None,
        *,
        pack: bool = False,
    ) -> None:
        """`ssd`: changed keys of the section. `pack`: keep pages packed; their values are drawn then."""
        self.pages = max(1, total // page_bytes)
        self.nbytes = self.pages * page_bytes
        self.device = device
        config = Config.from_dict(
            {
                "model": {**model_of(page_bytes), "pack": "on" if pack else "off"},
                "gpu": {"device": str(device), "capacity": page_bytes, "staging": max(256 << 20, 2 * page_bytes)},
                "cpu": {"capacity": self.nbytes + (page_bytes if pack else 0)},  # and a page that cannot be packed
                "ssd": {
                    "path": str(directory / f"cold-{page_bytes}"),
                    "capacity": (self.pages + self.pages // 4 + 64) * page_bytes,
                    "threads": threads,
                    "gds": "off",
                    **(ssd or {}),
                },
                "host_buffer": max(256 << 20, 2 * page_bytes),
                "store": {"queue": self.nbytes},
                "deadline": 600.0,
            }
        )
        layout = config.model.layout()
        self.page_bytes = page_bytes
        self._lying = self.pages * layout.page_bytes
        self.layer_bytes = layout.page_bytes // layout.n_layers
        with contextlib.ExitStack() as undo:
            planes = PagedPlanes.allocate(layout, self.pages, device).tensors
            for layer in planes:
                for tensor in layer:
                    tensor.normal_() if pack else tensor.fill_(1)
            self.engine = undo.enter_context(CacheEngine.from_config(config, planes))
            tokens = np.arange(self.pages * layout.page_tokens + 1, dtype=np.uint32)
            self._planes, self._tokens, self._slots = list(planes), tokens, torch.arange(self.pages)
            for tensor in self._outer():
                tensor[:] = self._pattern(tensor)
            self.store()
            manager = self.engine.manager
            assert manager.cpu is not None, "no CPU tier"
            assert manager.ssd is not None, "no SSD tier"
            self._cpu = manager.cpu
            self.slab = next(iter(manager.ssd.path.glob("slab-*.bin")))
            self._flat: torch.Tensor | None = None
            self._hit: Hit | None = None
            self._undo = undo.pop_all()

    @property
    def transport(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.stats()["tiers"]["ssd"]["transport"]
        return found

    @property
    def direct(self) -> bool:
        """Whether the transport bypasses the page cache."""
        return bool(self.transport["direct"])

    def prepare(self) -> Hit:
        """Prepare a load: empty the CPU tier, and look up the prompt."""
        self._forget_cpu()
        self._hit = self.engine.lookup(self._tokens)
        return self._hit

    def load(self) -> float:
        """Load every page from the SSD into the planes; GB/s from the call to the verdict."""
        hit = self._hit or self.prepare()
        self._hit = None
        return rate(self.nbytes, self._loaded(lambda: hit, "ssd"))

    def load_from_cpu(self) -> float:
        """Load every page from the CPU tier, into which another load has just brought it; GB/s, with the lookup."""
        self.load()
        return rate(self.nbytes, self._loaded(lambda: self.engine.lookup(self._tokens), "cpu"))

    def _loaded(self, hit: Callable[[], Hit], tier: str) -> float:
        """Seconds from the lookup to the verdict."""
        start = time.perf_counter()
        sources = self.engine.load(hit(), self._slots).result().bytes_by_tier
        elapsed = time.perf_counter() - start
        if sources != {tier: self._lying}:
            raise IOFailedError(f"{self._lying} bytes were to come from the {tier} tier: {sources}", "see the log")
        return elapsed

    def _forget_cpu(self) -> None:
        """Drop the CPU tier's pages, so that the next load is from the SSD."""
        with self.engine.manager.lock:
            index = self._cpu.index
            for key in index.all_keys():
                entry = index.find(key)
                if entry is not None:
                    index.drop(entry)

    def forget_all(self) -> None:
        """Prepare a store: remove the pages from all tiers."""
        self.engine.clear()
        self._hit = None

    def store(self) -> float:
        """Store every page from the planes; GB/s from the call until all are on the SSD."""
        if self.engine.lookup(self._tokens).tokens:
            self.forget_all()
        start = time.perf_counter()
        report = self.engine.store(self._tokens, self._slots).result(600.0)
        elapsed = time.perf_counter() - start
        if any("ssd" not in tiers for tiers in report.tiers):
            raise IOFailedError(f"not all pages reached the SSD: {report.dropped}", "see the log")
        return rate(self.nbytes, elapsed)

    def load_passing(self) -> float:
        """`load` past the CPU tier: no page stays there, all go through the bounce reserve."""
        loader = self.engine.loader
        before, loader.keep = loader.keep, False
        try:
            return self.load()
        finally:
            loader.keep = before

    def copy(self) -> float:
        """One copy of the same size from the CPU tier's memory (page-locked with CUDA) to the device; GB/s."""
        source = cast("HostExtents", self._cpu.extents).rows.view(-1)[: self.nbytes]
        if self._flat is None:
            self._flat = torch.empty_like(source, device=self.device)
            self._flat.fill_(1)
        self._idle()
        start = time.perf_counter()
        self._flat.copy_(source, non_blocking=True)
        self._idle()
        return rate(self.nbytes, time.perf_counter() - start)

    def check(self) -> None:
        """Compare the first and last layer with the stored bytes. Raises `IOFailedError`."""
        for tensor in self._outer():
            if not torch.equal(tensor, self._pattern(tensor)):
                raise IOFailedError("a load gave other bytes than were stored", "please report it")

    def _outer(self) -> list[torch.Tensor]:
        return [*self._planes[0], *self._planes[-1]]

    def _pattern(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows that tell pages apart: the page's number, as far as bfloat16 can count."""
        numbers = torch.arange(self.pages, device=tensor.device) % 251
        return numbers.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)).expand(-1, *tensor.shape[1:])

    def blank(self) -> None:
        """Overwrite the planes, so that `check` sees only loaded bytes."""
        for layer in self._planes:
            for tensor in layer:
                tensor.zero_()
        self._idle()

    def _idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Close the engine and free all memory."""
        self._undo.close()
        self._flat = None
        self._planes = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
