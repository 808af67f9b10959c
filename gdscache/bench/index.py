"""What the index costs: reopening a catalogue of many pages. Behind `gdscache bench index`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gdscache.catalog import Catalog, PageRecord

EXTENT_BYTES = 1 << 20
BATCH_PAGES = 1024
KEY_BYTES = 32

Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, text: str) -> None:
    """A progress callback that says nothing."""


def run(
    pages: int = 1_000_000, layers: int = 32, repeat: int = 3, progress: Progress = silent
) -> dict[str, dict[str, float | int]]:
    """All index measurements, by name. `progress(done, total, text)` is called now and then."""
    return {"catalog_recovery": catalog_recovery(pages, layers, repeat, progress)}


def catalog_recovery(
    pages: int, layers: int, repeat: int = 3, progress: Progress = silent, directory: Path | None = None
) -> dict[str, float | int]:
    """Build a catalogue of `pages` synthetic pages in a temporary directory, then open and recover it `repeat` times.

    Recency is in random order, as after use. The file is in the system's page cache, as after a restart of the
    process. Times are in seconds and the medians of `repeat`; `commit_seconds` is one batch of `BATCH_PAGES`.
    `directory` is where the temporary directory is made.
    """
    with tempfile.TemporaryDirectory(prefix="gdscache-bench-", dir=directory) as name:
        path = Path(name)
        commits = []
        with Catalog.open(path, extent_bytes=EXTENT_BYTES, durability="process") as catalog:
            done = 0
            for batch in _batches(pages, layers):
                start = time.perf_counter()
                catalog.commit(batch, (), {})
                commits.append(time.perf_counter() - start)
                done += len(batch)
                progress(done, pages, "committing pages")
        opened, recovered = [], []
        for turn in range(repeat):
            progress(turn, repeat, "recovering")
            start = time.perf_counter()
            with Catalog.open(path, extent_bytes=EXTENT_BYTES, durability="process") as catalog:
                opened.append(time.perf_counter() - start)
                found = len(catalog.recover(pages))
                recovered.append(time.perf_counter() - start)
            if found != pages:
                raise RuntimeError(f"the catalogue gave {found} of {pages} pages back")
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


def _batches(pages: int, layers: int) -> Iterator[list[PageRecord]]:
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
            batch.append(PageRecord(first + i, key, parent, namespace, EXTENT_BYTES, int(recency[first + i]), sums[i]))
            parent = key
        yield batch
