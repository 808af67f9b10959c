"""The engine from door to door: stores until they are on the SSD, loads from each tier, hits on the GPU.

Both faces are measured: `sequence`, where the engine owns the pool, and `load` and `store` into attached planes. A load
counts from the call to the verdict. What comes from or goes to the SSD is compared with the bare loop on the same slab,
a load from the CPU tier with a plain copy of the same bytes from that tier's memory (pinned where CUDA is) to the
planes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdscache import CacheEngine
from gdscache.commands.bench.bare import BareLoop, Way
from gdscache.commands.bench.faces import AttachedFace, Face, OwnedFace
from gdscache.commands.bench.geometry import model_of
from gdscache.commands.bench.measure import Progress, Series, interleave, rate, ratio, silent
from gdscache.commands.bench.ssd_tier import forget
from gdscache.config import Config
from gdscache.storage.base import Op


def run(
    directory: Path,
    page_bytes: int,
    total: int,
    repeat: int,
    threads: int,
    ways: dict[Op, Way],
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Measure both faces with `total` bytes a round; `ways` are the bare loops to compare with. Plain data."""
    setting = Setting(directory, page_bytes, total, threads)
    found: list[dict[str, Any]] = []
    planes: list[tuple[torch.Tensor, ...]] = []
    for attached in (False, True):
        round_ = Rounds(setting, ways, repeat, progress, "attached" if attached else "sequence")
        with setting.open(planes if attached else None) as engine:
            planes = planes or list(engine.gpu.pool.tensors)
            face = _face(engine, setting, planes, attached=attached)
            found += round_.stores(engine, face)
            if isinstance(face, OwnedFace):
                found.append(round_.hits(face))
                forget(engine.manager, engine.gpu)
            found.append(round_.loads_from_cpu(engine, face))
        with setting.open(planes if attached else None) as engine:
            face = _face(engine, setting, planes if attached else list(engine.gpu.pool.tensors), attached=attached)
            found.append(round_.loads_from_ssd(engine, face))
            transport = engine.stats()["tiers"]["ssd"]["transport"]["name"]
    return [{**part, "transport": transport} for part in found]


class Setting:
    """The configuration, and the prompt whose pages are moved: one token more than `pages` full pages."""

    def __init__(self, directory: Path, page_bytes: int, total: int, threads: int) -> None:
        self.pages = max(1, total // page_bytes)
        self.nbytes = self.pages * page_bytes
        self.page_bytes = page_bytes
        self.threads = threads
        self.config = Config.from_dict(
            {
                "model": model_of(page_bytes),
                "gpu": {"capacity": (self.pages + 1) * page_bytes, "staging": max(64 << 20, 2 * page_bytes)},
                "cpu": {"capacity": self.nbytes},
                "ssd": {
                    "path": str(directory / "end-to-end"),
                    "capacity": (self.pages + self.pages // 4 + 64) * page_bytes,
                    "threads": threads,
                },
                "host_buffer": max(64 << 20, 2 * page_bytes),
                "store": {"queue": self.nbytes},
                "load": {"deadline": 600.0},
            }
        )
        self.tokens = np.arange(self.pages * self.config.model.page_tokens + 1, dtype=np.uint32)

    @contextlib.contextmanager
    def open(self, planes: list[tuple[torch.Tensor, ...]] | None) -> Iterator[CacheEngine]:
        """An engine whose pools are touched: the first use of memory is not what is measured."""
        with CacheEngine.from_config(self.config, planes) as engine:
            if engine.manager.cpu is not None:
                engine.manager.cpu.extents.rows.fill_(1)
            if planes is None:
                for layer in engine.gpu.pool.tensors:
                    for tensor in layer:
                        tensor.fill_(1)
            yield engine


class Rounds:
    """The measurements of one face."""

    def __init__(self, setting: Setting, ways: dict[Op, Way], repeat: int, progress: Progress, label: str) -> None:
        self._setting = setting
        self._ways = ways
        self._repeat = repeat
        self._progress = progress
        self._label = label
        self._round = 0

    def stores(self, engine: CacheEngine, face: Face) -> list[dict[str, Any]]:
        """Store until on the SSD. Ends with the pages of the prompt on all tiers."""
        face.store("warm-up")

        def store() -> float:
            engine.clear()
            self._round += 1
            return self._rate(face.store(f"round {self._round}"))

        assert engine.manager.ssd is not None, "no SSD tier"
        slab = next(iter(engine.manager.ssd.path.glob("slab-*.bin")))
        with BareLoop(slab, self._setting.nbytes) as bare:

            def write() -> float:
                engine.clear()  # the loop writes over every page
                return bare.run(Op.WRITE, self._ways[Op.WRITE])

            found = self._interleave("store to SSD", store, write)
        engine.clear()
        face.store("")
        return [self._report("store", "ssd", "bare loop", found)]

    def hits(self, face: OwnedFace) -> dict[str, Any]:
        """Pages that are on the GPU: nothing moves, so GB/s only says what a copy would have to reach."""
        hits: list[float] = []

        def hit() -> float:
            hits.append(face.hit())
            return self._rate(hits[-1])

        found = self._interleave("hit on GPU", hit, None)
        us_per_page = sorted(hits)[len(hits) // 2] / self._setting.pages * 1e6
        return {**self._report("hit", "gpu", None, found), "us_per_page": us_per_page}

    def loads_from_cpu(self, engine: CacheEngine, face: Face) -> dict[str, Any]:
        """Load pages that the CPU tier holds."""
        face.load("cpu")
        found = self._interleave(
            "load from CPU", lambda: self._rate(face.load("cpu")), lambda: self._copy(engine, face)
        )
        face.load("cpu")
        face.check()
        return self._report("load", "cpu", "copy", found)

    def loads_from_ssd(self, engine: CacheEngine, face: Face) -> dict[str, Any]:
        """Load pages that only the SSD holds; the engine was opened anew."""
        manager = engine.manager
        assert manager.cpu is not None, "no CPU tier"
        assert manager.ssd is not None, "no SSD tier"
        cpu = manager.cpu

        def load() -> float:
            forget(manager, cpu)
            return self._rate(face.load("ssd"))

        with BareLoop(next(iter(manager.ssd.path.glob("slab-*.bin"))), self._setting.nbytes) as bare:
            found = self._interleave("load from SSD", load, lambda: bare.run(Op.READ, self._ways[Op.READ]))
        face.check()
        return self._report("load", "ssd", "bare loop", found)

    def _rate(self, elapsed: float) -> float:
        return rate(self._setting.nbytes, elapsed)

    def _copy(self, engine: CacheEngine, face: Face) -> float:
        assert engine.manager.cpu is not None, "no CPU tier"
        flat = engine.manager.cpu.extents.rows.view(-1)
        start, at = time.perf_counter(), 0
        for layer in face.planes:
            for tensor in layer:
                bytes_ = tensor[: self._setting.pages].view(-1).view(torch.uint8)
                bytes_.copy_(flat[at : at + bytes_.numel()], non_blocking=True)
                at += bytes_.numel()
        _synchronize(face.planes[0][0])
        return self._rate(time.perf_counter() - start)

    def _interleave(self, what: str, ours: Callable[[], float], other: Callable[[], float] | None) -> dict[str, Series]:
        ways = {"ours": ours} if other is None else {"other": other, "ours": ours}
        return interleave(ways, self._repeat, self._progress, f"{self._label}: {what}")

    def _report(self, name: str, tier: str, against: str | None, found: dict[str, Series]) -> dict[str, Any]:
        report: dict[str, Any] = {
            "name": name,
            "tier": tier,
            "face": self._label,
            "page_bytes": self._setting.page_bytes,
            "pages": self._setting.pages,
            "bytes": self._setting.nbytes,
            "gb_per_second": found["ours"].describe(),
            "against": against,
        }
        if against is not None:
            report |= {"against_gb_per_second": found["other"].describe(), **ratio(found["ours"], found["other"])}
        return report


def _face(engine: CacheEngine, setting: Setting, planes: list[tuple[torch.Tensor, ...]], *, attached: bool) -> Face:
    return (AttachedFace if attached else OwnedFace)(engine, setting.tokens, setting.pages, planes)


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
