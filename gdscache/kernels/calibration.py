"""The calibration of one GPU's bus: staged copies and the copy engine alone by piece size, and a zero-copy kernel, each
way. Under a second.

It measures an engine's own copies, with pages of one plane in random order.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

import gdscache
from gdscache.cuda.driver import Driver
from gdscache.errors import GdsCacheError
from gdscache.extents import HostExtents
from gdscache.kernels import choice as paths
from gdscache.kernels import jit
from gdscache.kernels.choice import Calibration, Direction, Path, Rates
from gdscache.kernels.copy_engine import CopyEngine
from gdscache.kernels.cuda import PageKernels
from gdscache.kernels.gpu import NativeGpu
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes

_log = logging.getLogger("gdscache")

PIECES = (8 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 2 << 20)
ENGINE_PIECES = (128 << 10, 256 << 10, 512 << 10, 2 << 20)
_ZERO_COPY_PIECE = 8 << 10
_BUFFER = 128 << 20
_REPEATS = 3
_DIRECTIONS: tuple[Direction, ...] = ("load", "store")


def calibrated_if_possible(driver: Driver) -> Calibration | None:
    """`calibrated`; None, and a warning, if this machine cannot be measured."""
    try:
        return calibrated(driver, CopyEngine(driver))
    except (GdsCacheError, torch.cuda.OutOfMemoryError) as error:
        _log.warning("copies of every size between GPU and host are staged: %s", error)
        return None


def calibrated(driver: Driver, engine: CopyEngine, *, fresh: bool = False) -> Calibration:
    """The calibration of this GPU with this driver and this library: as kept, or measured now and kept."""
    key = calibration_key(driver, engine)
    with _alone(key):  # otherwise two processes that open at once would measure each other
        found = None if fresh else paths.read(key)
        if found is None:
            found = measure(driver, key)
            paths.write(found)
        return found


def calibration_key(driver: Driver, engine: CopyEngine) -> dict[str, str]:
    """The facts for which a calibration holds."""
    properties = torch.cuda.get_device_properties(driver.device)
    return {
        "gpu": properties.name,
        "gpu_uuid": str(getattr(properties, "uuid", f"number-{driver.device.index}")),
        "driver": str(driver.version),
        "copy_engine": engine.api,
        "gdscache": gdscache.__version__,
        "kernels": jit.source_digest(),
    }


def measure(driver: Driver, key: dict[str, str]) -> Calibration:
    """Measure now. Takes 128 MiB of page-locked memory and twice as much of the GPU's while it runs."""
    began = time.perf_counter()
    staged: dict[Direction, dict[int, float]] = {"load": {}, "store": {}}
    alone: dict[Direction, dict[int, float]] = {"load": {}, "store": {}}
    kernels: PageKernels | None = None
    plan: tuple[tuple[Path, dict[Direction, dict[int, float]], tuple[int, ...]], ...]
    plan = (("staged", staged, PIECES), ("copy_engine", alone, ENGINE_PIECES))
    for path, found, pieces in plan:
        for piece in pieces:
            kernels, rates = _rates(driver, piece, path, kernels)
            for direction in _DIRECTIONS:
                found[direction][piece] = rates[direction]
    _, zero_copy = _rates(driver, _ZERO_COPY_PIECE, "zero_copy", kernels)
    load, store = (Rates(staged[direction], alone[direction], zero_copy[direction]) for direction in _DIRECTIONS)
    return Calibration(load, store, key, time.perf_counter() - began)


def _rates(
    driver: Driver, piece: int, path: Path, like: PageKernels | None
) -> tuple[PageKernels, dict[Direction, float]]:
    """GB/s each way of one path for pages of `piece` bytes: the best of a few runs after a warm-up."""
    layout = PageLayout.uniform([Plane("bytes", (piece,), "uint8")], 1, 1)
    pages = _BUFFER // piece
    planes = PagedPlanes.allocate(layout, pages, driver.device)
    kernels = PageKernels(planes, like)
    with contextlib.ExitStack() as stack:
        extents = HostExtents(layout, pages * piece, "on")
        stack.callback(extents.close)
        gpu = NativeGpu(planes, driver, kernels.runs, kernels, max(2 * piece, _BUFFER))
        stack.callback(gpu.close)
        slots, blocks = (np.random.default_rng(n).permutation(pages) for n in (piece, piece + 1))
        table, found = blocks.reshape(-1, 1), dict.fromkeys(_DIRECTIONS, 0.0)
        for direction in _DIRECTIONS:
            for _ in range(1 + _REPEATS):
                start = time.perf_counter()
                gpu.copy(extents, slots, table, range(1), (), path, load=direction == "load")[0].synchronize()
                found[direction] = max(found[direction], pages * piece / (time.perf_counter() - start) / 1e9)
        return kernels, found


@contextlib.contextmanager
def _alone(key: dict[str, str]) -> Iterator[None]:
    """One process at a time; without a place for the lock, any number."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # also of file systems without locks
            path = paths.cache_file(key).with_suffix(".lock")
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
