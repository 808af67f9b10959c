"""An engine with its pages on the SSD only: cold loads into the planes through the CPU tier, for `bench io`."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from gdscache import CacheEngine
from gdscache.commands.bench import machine
from gdscache.commands.bench.figures import copy_rate, idle, rate
from gdscache.commands.bench.shapes import LLAMAS, token_bytes
from gdscache.commands.console import Progress, silent
from gdscache.config import Config
from gdscache.errors import IOFailedError
from gdscache.pages.hit import Hit
from gdscache.pages.planes import PagedPlanes
from gdscache.sizes import MIB

if TYPE_CHECKING:
    from gdscache.extents import HostExtents


PATIENCE_S, SLOWEST = 60.0, 10e6  # a transport that takes longer, and a second for each so many bytes, hangs


@dataclasses.dataclass(frozen=True)
class Place:
    """The place and size of engines: a round moves `nbytes`, a figure has `repeat` rounds. `threads`: of the
    transport."""

    directory: Path
    nbytes: int
    repeat: int
    threads: int
    device: torch.device
    progress: Progress = silent

    @property
    def on_disk(self) -> bool:
        return not machine.in_memory(self.directory)


class ColdEngine:
    """An engine with attached planes, a CPU tier and an SSD tier (`auto`, no GDS) in a temporary directory, and one
    prompt's pages, of Llama-3-8B's shape.

    Opening stores `place.nbytes` of pages. It needs about 1.3 times as much of disk, twice as much of host memory and
    twice as much on the device.
    """

    def __init__(
        self, place: Place, page_bytes: int, ssd: Mapping[str, Any] | None = None, *, pack: bool = False
    ) -> None:
        """`ssd`: changed keys of the section. `pack`: keep pages packed; their values are drawn then."""
        self.device = place.device
        self.pages = max(1, place.nbytes // page_bytes)
        self.nbytes = self.pages * page_bytes
        self._patience = PATIENCE_S + self.nbytes / SLOWEST
        with contextlib.ExitStack() as undo:
            directory = undo.enter_context(tempfile.TemporaryDirectory(dir=place.directory))
            config = Config.from_dict(
                {
                    "model": {**_model(page_bytes), "pack": "on" if pack else "off"},
                    "gpu": {
                        "device": str(place.device),
                        "capacity": page_bytes,
                        "staging": max(256 * MIB, 2 * page_bytes),
                    },
                    "cpu": {"capacity": self.nbytes + (page_bytes if pack else 0)},  # and a page that cannot be packed
                    "ssd": {
                        "path": directory,
                        "capacity": (self.pages + self.pages // 4 + 64) * page_bytes,
                        "threads": place.threads,
                        "gds": "off",
                        **(ssd or {}),
                    },
                    # with packed pages two of its slots are for pages that cannot be packed
                    "host_buffer": max(min(256 * MIB, self.nbytes), (4 if pack else 2) * page_bytes),
                    "store": {"queue": self.nbytes},
                    "deadline": self._patience,
                }
            )
            layout = config.model.layout()
            self._lying = self.pages * layout.page_bytes
            self._planes = PagedPlanes.allocate(layout, self.pages, place.device).tensors
            undo.callback(self._forget_planes)
            for layer in self._planes:
                for tensor in layer:
                    tensor.normal_() if pack else tensor.fill_(1)
            self.engine = undo.enter_context(CacheEngine.from_config(config, self._planes))
            self._tokens = np.arange(self.pages * layout.page_tokens + 1, dtype=np.uint32)
            self._slots = torch.arange(self.pages)
            for tensor in self._outer():
                tensor[:] = self._pattern(tensor)
            self.store()
            manager = self.engine.manager
            assert manager.cpu is not None, "no CPU tier"
            assert manager.ssd is not None, "no SSD tier"
            self._cpu = manager.cpu
            self.slab = next(iter(manager.ssd.path.glob("slab-*.bin")))
            self._flat: torch.Tensor | None = None
            self._undo = undo.pop_all()

    @property
    def transport(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.stats()["tiers"]["ssd"]["transport"]
        return found

    # -- measurements, in GB/s -----------------------------------------------------------------------------------------

    def store(self) -> float:
        """Store every page from the planes, from the call until all are on the SSD. No tier has them before."""
        self.engine.clear()
        start = time.perf_counter()
        report = self.engine.store(self._tokens, self._slots).result(2 * self._patience)
        elapsed = time.perf_counter() - start
        if any("ssd" not in tiers for tiers in report.tiers):
            raise self._failed("not all pages reached the SSD", report.dropped.values())
        return rate(self.nbytes, elapsed)

    def load(self) -> float:
        """Load every page from the SSD into the planes, from the call to the verdict, without the lookup."""
        index = self._cpu.index
        with self.engine.manager.lock:
            for key in index.all_keys():
                if (entry := index.find(key)) is not None:
                    index.drop(entry)
        if not self.transport["direct"]:  # reads through the page cache are to be cold
            machine.drop_cached([self.slab])
        hit = self.engine.lookup(self._tokens)
        return self._loaded(lambda: hit, "ssd")

    def load_passing(self) -> float:
        """`load` past the CPU tier: no page stays there, all go through the bounce reserve."""
        loader = self.engine.loader
        before, loader.keep = loader.keep, False
        try:
            return self.load()
        finally:
            loader.keep = before

    def load_from_cpu(self) -> float:
        """Look up and load every page from the CPU tier, into which another load has just brought it."""
        self.load()
        return self._loaded(lambda: self.engine.lookup(self._tokens), "cpu")

    def copy(self) -> float:
        """One copy of the same size from the CPU tier's memory (page-locked with CUDA) to the device."""
        source = cast("HostExtents", self._cpu.extents).rows.view(-1)[: self.nbytes]
        if self._flat is None:
            self._flat = torch.empty_like(source, device=self.device)
            self._flat.fill_(1)
        return copy_rate(source, self._flat)

    def check(self) -> None:
        """Load once more, into overwritten planes, and compare the first and last layer with the stored bytes. Raises
        `IOFailedError`."""
        for layer in self._planes:
            for tensor in layer:
                tensor.zero_()
        idle(self.device)
        self.load()
        for tensor in self._outer():
            if not torch.equal(tensor, self._pattern(tensor)):
                raise IOFailedError("a load gave other bytes than were stored", "please report it")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _loaded(self, hit: Callable[[], Hit], tier: str) -> float:
        start = time.perf_counter()
        report = self.engine.load(hit(), self._slots).result()
        elapsed = time.perf_counter() - start
        if report.bytes_by_tier != {tier: self._lying}:
            what = f"{self._lying} bytes were to come from the {tier} tier: {report.bytes_by_tier}"
            raise self._failed(what, (status.value for status in report.pages))
        return rate(self.nbytes, elapsed)

    def _failed(self, what: str, causes: Iterable[str]) -> IOFailedError:
        counted = ", ".join(f"{cause} {pages}" for cause, pages in Counter(causes).items())
        hint = f"see the log; deadline: the transport hangs, or takes more than {self._patience:.0f} s"
        return IOFailedError(f"{what}; pages: {counted}", hint)

    def _outer(self) -> list[torch.Tensor]:
        return [*self._planes[0], *self._planes[-1]]

    def _pattern(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows that tell pages apart: the page's number, as far as bfloat16 can count."""
        numbers = torch.arange(self.pages, device=tensor.device) % 251
        return numbers.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)).expand(-1, *tensor.shape[1:])

    def _forget_planes(self) -> None:
        self._planes, self._flat = [], None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Close the engine, delete its files and free all memory."""
        self._undo.close()


def _model(page_bytes: int) -> dict[str, Any]:
    """A model section with pages of `page_bytes`."""
    shape = LLAMAS["8b"]
    return {
        "name": "bench",
        "layers": shape["num_hidden_layers"],
        "kv_heads": shape["num_key_value_heads"],
        "head_dim": shape["head_dim"],
        "page_tokens": page_bytes // token_bytes("8b"),
    }
