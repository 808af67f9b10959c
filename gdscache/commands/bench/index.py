"""What the index costs: lookups, reopening a catalogue of many pages, memory. Behind `gdscache bench index`."""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gdscache.commands.bench import memory
from gdscache.commands.bench.lookup import PAGES as LOOKUP_PAGES
from gdscache.commands.bench.lookup import lookup
from gdscache.commands.bench.measure import Progress, Series, seconds, silent, target
from gdscache.config import Config, SsdConfig
from gdscache.disk.catalog import Catalog, PageRecord
from gdscache.disk.slab import Slab
from gdscache.pages.layout import PageLayout
from gdscache.tiers.ssd import SsdTier

BATCH_PAGES = 1024
KEY_BYTES = 32
REOPEN_TARGET = 2.0
BYTES_PER_PAGE_TARGET = 1024


def run(
    pages: int = 1_000_000,
    layers: int = 32,
    repeat: int = 3,
    progress: Progress = silent,
    directory: Path | None = None,
    lookup_pages: int = LOOKUP_PAGES,
) -> dict[str, dict[str, Any]]:
    """All index measurements, by name. `progress(done, total, text)` is called now and then."""
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        found = {"lookup": lookup(Path(name), lookup_pages, 20 * repeat, progress)}
    with filled(pages, layers, progress, directory) as (path, commits):
        found["catalog_recovery"] = _recovery(path, pages, layers, repeat, commits, progress)
        found["reopen"] = reopen(path, pages, layers, repeat, progress)
        found["memory"] = index_memory(path, pages, layers, progress)
    return found


def catalog_recovery(
    pages: int, layers: int, repeat: int = 3, progress: Progress = silent, directory: Path | None = None
) -> dict[str, Any]:
    """Build a catalogue of `pages` synthetic pages in a temporary directory, then open and recover it `repeat` times.

    Recency is in random order, as after use. The file is in the system's page cache, as after a restart of the
    process. Times are in seconds and the medians of `repeat`; `commit_seconds` is one batch of `BATCH_PAGES`.
    `directory` is where the temporary directory is made.
    """
    with filled(pages, layers, progress, directory) as (path, commits):
        return _recovery(path, pages, layers, repeat, commits, progress)


def reopen(path: Path, pages: int, layers: int, repeat: int, progress: Progress = silent) -> dict[str, Any]:
    """Open the SSD tier of a filled directory `repeat` times, as an engine does: until its index answers."""
    layout, config = tier_of(path, pages, layers)
    opened = []
    for turn in range(repeat):
        progress(turn, repeat, "reopening the SSD tier")
        gc.collect()
        start = time.perf_counter()
        tier = SsdTier(layout, config, "cpu", threading.RLock())
        opened.append(time.perf_counter() - start)
        found = len(tier.index)
        tier.close()
        del tier
        _expect(found, pages)
    progress(repeat, repeat, "reopening the SSD tier")
    median = statistics.median(opened)
    return {
        "pages": pages,
        "layers": layers,
        "seconds": Series(tuple(opened)).describe(),
        **target(median, REOPEN_TARGET, at_least=False),
    }


def index_memory(path: Path, pages: int, layers: int, progress: Progress = silent) -> dict[str, Any]:
    """Resident bytes a page of the SSD tier's index, in a child process: after open, and with all checksums read."""
    progress(0, 1, "memory of the index")
    found = memory.child("index_of_catalog", str(path), pages, layers)
    progress(1, 1, "memory of the index")
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
    model = {"name": "bench", "kind": "planes", "layers": layers, "page_tokens": 64, "planes": [plane]}
    config = Config.from_dict({"model": model, "gpu": {"device": "cpu"}})
    layout = config.model.layout()
    ssd = SsdConfig(path=path, capacity=pages * layout.extent_bytes, transport="posix", threads=1)
    return layout, ssd


@contextlib.contextmanager
def filled(
    pages: int, layers: int, progress: Progress = silent, directory: Path | None = None
) -> Iterator[tuple[Path, Sequence[float]]]:
    """A temporary directory whose catalogue has `pages` synthetic pages, and the seconds of each commit.

    The slab is preallocated and never written: nothing here reads a page.
    """
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        path = Path(name)
        layout, _ = tier_of(path, pages, layers)
        Slab.open(path, layout.extent_bytes, pages)
        commits = []
        with Catalog.open(path, extent_bytes=layout.extent_bytes, durability="process") as catalog:
            done = 0
            for batch in _batches(pages, layers, layout.page_bytes):
                commits.append(seconds(lambda batch=batch: catalog.commit(batch, (), {})))  # type: ignore[misc]
                done += len(batch)
                progress(done, pages, "committing pages")
        yield path, commits


def _recovery(
    path: Path, pages: int, layers: int, repeat: int, commits: Sequence[float], progress: Progress
) -> dict[str, Any]:
    extent_bytes = tier_of(path, pages, layers)[0].extent_bytes
    opened, recovered = [], []
    for turn in range(repeat):
        progress(turn, repeat, "recovering")
        gc.collect()
        start = time.perf_counter()
        with Catalog.open(path, extent_bytes=extent_bytes, durability="process") as catalog:
            opened.append(time.perf_counter() - start)
            found = len(catalog.recover(pages))
            recovered.append(time.perf_counter() - start)
        _expect(found, pages)
    progress(repeat, repeat, "recovering")
    size = (path / "catalog.sqlite").stat().st_size
    return {
        "pages": pages,
        "layers": layers,
        "repeat": repeat,
        "open_seconds": statistics.median(opened),
        "open_and_recover_seconds": statistics.median(recovered),
        "open_and_recover_seconds_worst": max(recovered),
        "commit_seconds": statistics.median(commits),
        "commit_pages": min(BATCH_PAGES, pages),
        "catalog_bytes": size,
        "catalog_bytes_per_page": size / pages,
    }


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
