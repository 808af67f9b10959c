"""The reference of `gdscache bench io`: one file a page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gdscache.commands.bench import io_cache
from gdscache.commands.bench.measure import rate
from gdscache.errors import IOFailedError, ShortIOError


class FilePerPage:
    """A cache with one file a page, written and read through the page cache, page after page.

    A write goes to a temporary file that is renamed. A read opens the file and reads it into existing memory. `pages`:
    uint8 (pages, bytes).
    """

    def __init__(self, directory: Path, pages: int, page_bytes: int) -> None:
        self.directory = directory
        rng = np.random.default_rng(2)
        self.pages = np.frombuffer(bytearray(rng.bytes(pages * page_bytes)), np.uint8).reshape(pages, page_bytes)
        self._into = np.empty_like(self.pages)
        self._into.fill(1)
        self._order: list[int] = rng.permutation(pages).tolist()

    @property
    def files(self) -> list[Path]:
        return [self._file(number) for number in range(len(self.pages))]

    def write(self) -> tuple[float, float]:
        """Write every page; GB/s until the last call returns, and until all bytes are on the device."""
        start = time.perf_counter()
        self._each(self._write, 1)
        returned = time.perf_counter() - start
        io_cache.sync(self.directory)
        return rate(self.pages.nbytes, returned), rate(self.pages.nbytes, time.perf_counter() - start)

    def read(self, threads: int = 1) -> float:
        """Read every page once, in random order, shared among threads, after the files are dropped from the page cache;
        GB/s."""
        io_cache.drop(self.files)
        start = time.perf_counter()
        self._each(self._read, threads)
        return rate(self.pages.nbytes, time.perf_counter() - start)

    def check(self) -> None:
        """Compare the last read with the written bytes. Raises `IOFailedError`."""
        if not np.array_equal(self._into, self.pages):
            raise IOFailedError("files of pages gave other bytes than were written", "see the kernel log")

    def _each(self, action: Callable[[int], None], threads: int) -> None:
        if threads == 1:
            for number in self._order:
                action(number)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(action, self._order):
                pass

    def _write(self, number: int) -> None:
        path = self._file(number)
        temporary = path.with_suffix(".tmp")
        self.pages[number].tofile(temporary)
        os.rename(temporary, path)

    def _read(self, number: int) -> None:
        with self._file(number).open("rb", buffering=0) as file:
            moved = file.readinto(self._into[number].data)
        if moved != self.pages.shape[1]:
            raise ShortIOError(f"a page's file gave {moved} of {self.pages.shape[1]} bytes")

    def _file(self, number: int) -> Path:
        return self.directory / f"{number:08x}.bin"
