"""What `gdscache bench io` measures: ways, operations, sizes, depths, threads; and what a profile takes. Arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdscache.config import SsdConfig
from gdscache.sizes import GIB, KIB, MIB, format_size
from gdscache.storage.base import Op


@dataclasses.dataclass(frozen=True)
class Way:
    """One way for bytes to go. `memory`: where they end or begin; `cufile`: whether cuFile has a part in it."""

    name: str
    label: str
    memory: str
    cufile: bool = False


WAYS = (
    Way("host", "host only", "host"),
    Way("uring", "host only, io_uring", "host"),
    Way("host_gpu", "host then GPU", "cuda"),
    Way("cufile", "direct GPU, native", "cuda", cufile=True),
    Way("direct", "direct GPU, kvikio", "cuda", cufile=True),
    Way("kvikio_compat", "kvikio compat", "cuda"),
    Way("nixl_posix", "NIXL POSIX", "host"),
    Way("nixl_gds_mt", "NIXL GDS_MT", "cuda", cufile=True),
)
BY_NAME = {way.name: way for way in WAYS}

OPS = ("read", "random read", "write", "mixed")
WRITE_EVERY = 4  # of the batches of `mixed`, one in so many is a write
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
DEPTHS = (1, 8, 32, 96)  # 96: cuFile was seen to hang with 256 in flight
THREADS = (1, 4, 16)
MEMORY = 512 * MIB  # the most that a cell's requests hold together
LANES = 4  # threads that submit and wait

BASE_SIZE, BASE_DEPTH, BASE_THREADS = 1 * MIB, 32, 16
FEWER_SIZES = (256 * KIB, 1 * MIB, 4 * MIB)
QUICK_SIZES = (64 * KIB, 1 * MIB)
RAM_DISK = "/dev/shm"
ENGINE_THREADS = int(SsdConfig.model_fields["threads"].default)
RAM_THREADS = max(ENGINE_THREADS, 12)  # a RAM disk is as fast as the cores that copy its bytes


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is measured: sizes in bytes.

    `total`: the file of the matrix; `row_total`: what a comparison moves a round, `ram_total` the same on the RAM disk.
    A cell runs `cell_rounds` times for `cell_seconds`, a comparison `repeat` rounds. After `budget_seconds` no cell is
    begun (None: never). `threads`: of the transport in comparisons; None is the engine's default, more on a RAM disk.
    `calls`: of an engine that a round times one by one.
    """

    profile: str = "default"
    total: int = 1 * GIB
    row_total: int = 512 * MIB
    ram_total: int = 1 * GIB
    repeat: int = 5
    cell_rounds: int = 3
    cell_seconds: float = 0.25
    budget_seconds: float | None = 420.0
    threads: int | None = None
    calls: int = 100
    pages: tuple[int, ...] = (256 * KIB, 1 * MIB)
    ways: tuple[str, ...] = tuple(way.name for way in WAYS)
    require_gds: bool = False
    ram_disk: str = RAM_DISK

    @classmethod
    def full(cls) -> Settings:
        """The whole matrix, however long it takes."""
        return cls(profile="full", total=4 * GIB, budget_seconds=None)

    @classmethod
    def quick(cls) -> Settings:
        """Seconds instead of minutes; its figures say that things work, not how fast."""
        return cls("quick", 32 * MIB, 16 * MIB, 16 * MIB, 2, 1, 0.02, None, 4, 10, (256 * KIB,))

    def threads_on(self, *, ram: bool) -> int:
        """Threads of a comparison, on a RAM disk or on a disk."""
        return self.threads or (RAM_THREADS if ram else ENGINE_THREADS)

    def describe(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "pages": list(self.pages), "ways": list(self.ways)}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One thing to measure: `depth` requests of `io_bytes` in flight, moved by `threads` threads of the transport."""

    way: str
    op: str
    io_bytes: int
    depth: int
    threads: int

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        return self.way, self.op, self.io_bytes, self.depth, self.threads

    @property
    def lanes(self) -> int:
        """Threads that keep requests in flight, a batch each."""
        return min(LANES, self.depth)

    @property
    def batch(self) -> int:
        """Requests of a batch."""
        return self.depth // self.lanes

    @property
    def label(self) -> str:
        size = format_size(self.io_bytes)
        return f"{BY_NAME[self.way].label}, {self.op}, {size}, depth {self.depth}, {self.threads} threads"

    def op_of(self, batch: int) -> Op:
        """What the batch of this number does."""
        if self.op == "mixed":
            return Op.WRITE if batch % WRITE_EVERY == WRITE_EVERY - 1 else Op.READ
        return Op.WRITE if self.op == "write" else Op.READ

    def offsets(self, total: int) -> npt.NDArray[np.int64]:
        """Where the requests of one pass over `total` bytes lie, in the order in which they are made."""
        count = max(total // self.io_bytes, self.depth)
        order = np.arange(count, dtype=np.int64)
        if self.op in ("random read", "mixed"):
            order = np.random.default_rng(0).permutation(order)
        return order * self.io_bytes

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def key_of(row: dict[str, Any]) -> tuple[str, str, int, int, int]:
    """The key of a cell that was described."""
    return row["way"], row["op"], row["io_bytes"], row["depth"], row["threads"]


def cells(profile: str, ways: Iterable[str], total: int) -> list[Cell]:
    """What a profile measures of these ways, way by way, and in each the most telling first.

    `full` is the matrix. Cells whose requests do not fit into `total` or `MEMORY` are left out.
    """
    found = []
    for way in ways:
        some = _full(way) if profile == "full" else _quick(way) if profile == "quick" else _default(way)
        most = min(total, MEMORY)
        found += [cell for cell in dict.fromkeys(some) if cell.io_bytes * cell.depth <= most]
    return found


def _full(way: str) -> list[Cell]:
    threads_first = itertools.product(THREADS, OPS, SIZES, DEPTHS)
    return [*_default(way), *(Cell(way, op, size, depth, threads) for threads, op, size, depth in threads_first)]


def _default(way: str) -> list[Cell]:
    """Sizes at one depth and thread count, then depths and threads at one size."""
    found = [Cell(way, op, BASE_SIZE, BASE_DEPTH, BASE_THREADS) for op in OPS]
    for op in OPS:
        sizes = SIZES if op in ("read", "random read") else FEWER_SIZES
        found += [Cell(way, op, size, BASE_DEPTH, BASE_THREADS) for size in sizes]
    found += [Cell(way, "random read", BASE_SIZE, depth, BASE_THREADS) for depth in DEPTHS]
    found += [Cell(way, "random read", BASE_SIZE, BASE_DEPTH, threads) for threads in THREADS]
    return found


def _quick(way: str) -> list[Cell]:
    return [Cell(way, op, size, 4, 4) for op in OPS for size in QUICK_SIZES]


def by_threads(some: Sequence[Cell]) -> list[tuple[int, list[Cell]]]:
    """The cells of one way, by the thread count that its transport is opened with, in their order."""
    found: dict[int, list[Cell]] = {}
    for cell in some:
        found.setdefault(cell.threads, []).append(cell)
    return list(found.items())


def percentiles(latencies: npt.NDArray[np.float64]) -> dict[str, float]:
    """p50, p99 and the largest, in the unit given. The percentiles are values that occurred."""
    p50, p99 = np.percentile(latencies, (50, 99), method="higher")
    return {"p50": float(p50), "p99": float(p99), "max": float(latencies.max())}


def mixed_rate(read: float, write: float) -> float:
    """GB/s of a ceiling that reads and writes in turns in the proportion of `mixed`."""
    return 1 / ((WRITE_EVERY - 1) / WRITE_EVERY / read + 1 / WRITE_EVERY / write)
