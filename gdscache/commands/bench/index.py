"""What the index costs: lookups, reopening a catalogue of many pages, memory. Behind `gdscache bench index`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.bench import kit, memory
from gdscache.commands.bench.lookup import lookup
from gdscache.commands.bench.measure import Series, target
from gdscache.commands.console import Progress, Table, duration, figure, silent, verdict
from gdscache.config import Config, SsdConfig
from gdscache.disk.catalog import Catalog, PageRecord
from gdscache.disk.slab import Slab
from gdscache.pages.layout import PageLayout
from gdscache.tiers.ssd import SsdTier

BATCH_PAGES = 1024
KEY_BYTES = 32
REOPEN_TARGET = 2.0
BYTES_PER_PAGE_TARGET = 1024


@dataclasses.dataclass(frozen=True)
class Settings(kit.Settings):
    """`pages` of the catalogue, with `layers` checksums each; `repeat` rounds a figure, of lookups 20 times."""

    pages: int = 1_000_000
    layers: int = 32
    repeat: int = 3
    lookup_pages: int = 2048

    @classmethod
    def of(cls, profile: str) -> Settings:
        return cls(profile, pages=10_000, repeat=1) if profile == "quick" else cls(profile)


def measure(run: kit.Run, settings: Settings, directory: Path) -> None:
    """Lookups, and what a catalogue of so many pages costs."""
    run.plan(list(BENCH.sections))
    pages, layers, repeat = settings.pages, settings.layers, settings.repeat
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        looked_up = Path(name), settings.lookup_pages, 20 * repeat, run.progress
        run.case("lookup", lambda: {"lookup": lookup(*looked_up)})
    if not any(map(run.wants, BENCH.sections)):
        return
    with filled(pages, layers, run.progress, directory) as path:
        size = path, pages, layers
        run.case("reopen", lambda: {"reopen": reopen(*size, repeat)})
        run.case("memory", lambda: {"memory": index_memory(*size)})


def tables(report: kit.Report) -> list[Table]:
    """Times and sizes, with their targets."""
    judged = not kit.quick(report)
    table = Table("Index", "what", "figure", *(["target"] if judged else []))

    def row(what: str, shown: str, part: dict[str, Any] | None = None) -> None:
        table.add_row(what, shown, *([verdict(part, "at most")] if judged and part is not None else []))

    if (found := report["lookup"]) is not None:
        labels = {
            "hash": "bare hash loop",
            "numpy": "lookup, numpy tokens",
            "list": "lookup, list tokens",
            "again": "lookup of a prompt that is remembered",
            "in_a_row": "lookups in a row, numpy tokens",
        }
        for name, label in labels.items():
            row(f"{label}, {found['pages']:,} pages", duration(found[f"{name}_seconds"]["median"]))
        spread = f"({figure(found['ratio_min'])} to {figure(found['ratio_max'])})"
        row("lookup / hash loop, numpy", f"{figure(found['ratio'])} {spread}", found)
        row("lookup / hash loop, list", figure(found["list_ratio"]))
    if (found := report["reopen"]) is not None:
        row("SSD tier, reopened", duration(found["seconds"]["median"]), found)
    if (found := report["memory"]) is not None:
        row("memory a page, opened", figure(found["bytes_per_page_opened"], "bytes"))
        row("memory a page, checksums read", figure(found["bytes_per_page"], "bytes"), found)
    return [table]


SECTIONS = dict.fromkeys(("lookup", "reopen", "memory"))
BENCH = kit.Bench("index", "gdscache.bench.index/2", SECTIONS, measure, tables)


def reopen(path: Path, pages: int, layers: int, repeat: int) -> dict[str, Any]:
    """Open the SSD tier of a filled directory `repeat` times, as an engine does: until its index answers."""
    layout, config = tier_of(path, pages, layers)
    opened = []
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        tier = SsdTier(layout, config, "cpu", threading.RLock())
        opened.append(time.perf_counter() - start)
        found = len(tier.index)
        tier.close()
        del tier
        _expect(found, pages)
    median = statistics.median(opened)
    return {
        "pages": pages,
        "layers": layers,
        "seconds": Series(tuple(opened)).describe(),
        **target(median, REOPEN_TARGET, at_least=False),
    }


def index_memory(path: Path, pages: int, layers: int) -> dict[str, Any]:
    """Resident bytes a page of the SSD tier's index, in a child process: after open, and with all checksums read."""
    found = memory.child("index_of_catalog", str(path), pages, layers)
    _expect(found["pages"], pages)
    return {
        "pages": pages,
        "layers": layers,
        "bytes_per_page_opened": found["opened"] / pages,
        "bytes_per_page": found["touched"] / pages,
        "bytes_per_page_peak": found["peak"] / pages,
        **target(found["touched"] / pages, BYTES_PER_PAGE_TARGET, at_least=False),
    }


def tier_of(path: Path, pages: int, layers: int) -> tuple[PageLayout, SsdConfig]:
    """The smallest pages of so many layers, and the SSD tier that holds `pages` of them in `path`."""
    plane = {"name": "rows", "shape": [2], "dtype": "uint8"}
    model = {"name": "bench", "layers": layers, "page_tokens": 64, "planes": [plane]}
    config = Config.from_dict({"model": model, "gpu": {"device": "cpu"}})
    layout = config.model.layout()
    ssd = SsdConfig(path=path, capacity=pages * layout.extent_bytes, transport="posix", threads=1)
    return layout, ssd


@contextlib.contextmanager
def filled(pages: int, layers: int, progress: Progress = silent, directory: Path | None = None) -> Iterator[Path]:
    """A temporary directory whose catalogue has `pages` synthetic pages, used in random order.

    The slab is preallocated and never written: nothing here reads a page.
    """
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        path = Path(name)
        layout, _ = tier_of(path, pages, layers)
        Slab.open(path, layout.extent_bytes, pages)
        with Catalog.open(path, extent_bytes=layout.extent_bytes, durability="process") as catalog:
            done = 0
            for batch in _batches(pages, layers, layout.page_bytes):
                catalog.commit(batch, (), {})
                done += len(batch)
                progress(done, pages, "committing pages")
        yield path


def _expect(found: int, pages: int) -> None:
    if found != pages:
        raise RuntimeError(f"the catalogue gave {found} of {pages} pages back")


def _batches(pages: int, layers: int, page_bytes: int) -> Iterator[list[PageRecord]]:
    random = np.random.default_rng(0)
    recency = random.permutation(pages)
    namespace = random.bytes(KEY_BYTES)
    parent = namespace
    for first in range(0, pages, BATCH_PAGES):
        count = min(BATCH_PAGES, pages - first)
        keys = random.bytes(KEY_BYTES * count)
        sums = random.integers(0, 1 << 64, (count, layers), np.uint64)
        batch = []
        for i in range(count):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            batch.append(PageRecord(first + i, key, parent, namespace, page_bytes, int(recency[first + i]), sums[i]))
            parent = key
        yield batch
