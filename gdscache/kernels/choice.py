"""The way of bytes between page-locked extents and planes, chosen by the size of their pieces, from a calibration.

`staged`: the copy engine between extents and the ring, a kernel between ring and planes. `zero_copy`: one kernel that
reads or writes host memory over the bus. `copy_engine`: the copy engine alone, straight into or out of the planes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter

import gdscache
from gdscache.cuda.driver import CopyEngine, Driver
from gdscache.errors import GdsCacheError
from gdscache.extents import HostExtents
from gdscache.kernels import jit
from gdscache.kernels.cuda import NativeGpu, PageKernels
from gdscache.pages.layout import PageLayout, Plane
from gdscache.pages.planes import PagedPlanes
from gdscache.runtime.files import user_cache, write_whole

_log = logging.getLogger("gdscache")

Path = Literal["staged", "zero_copy", "copy_engine"]
Choice = Literal["auto", "staged", "zero_copy", "copy_engine"]
Direction = Literal["load", "store"]

# A zero-copy kernel loses a quarter of its speed beside a model's kernels and takes SMs from them: prompts of 32k
# tokens took 4 % longer beside stores. Beside staged copies the other way both reached 0.55 of their rates alone. So it
# has to win clearly when alone. For small copies staging has to win: a busy host submits long lists of them at two
# thirds of the speed of the calibration, whose lists are short.
_ZERO_COPY_MUST_WIN_BY = 1.25
_STAGING_MUST_WIN_BY = 1.05  # for small pieces
_SMALL = 64 << 10
# Loads by the copy engine alone may be a little slower, since they lose nothing beside a model's kernels, while staged
# ones lose 5 %; the last layers more, since a staged copy's last kernel waits for a model's, 0.8 ms of 20. The
# calibration flatters small pieces: in a load of 1 GiB on an H200, 128 KiB came to 51 GB/s, and staged to 54. Otherwise
# it has to win: it holds the driver's lock for an entry a piece, and the model's thread waits.
_COPY_ENGINE_MAY_LOSE = 0.97
_COPY_ENGINE_MAY_LOSE_LAST = 0.9
_COPY_ENGINE_MUST_WIN_SMALL_BY = 1.05
_COPY_ENGINE_SMALL = 256 << 10
_COPY_ENGINE_MUST_WIN_BY = 1.02
COPY_ENGINE_FROM = 128 << 10  # bytes of a piece: smaller ones cost the host more than they save


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_BySize = Annotated[dict[Annotated[int, Field(ge=1)], _Positive], Field(min_length=1)]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one direction in GB/s: staged copies and the copy engine alone, by the bytes of a piece, and a
    zero-copy kernel."""

    staged: _BySize
    copy_engine: _BySize
    zero_copy: _Positive

    def staging(self, piece: int) -> float:
        return _between(self.staged, piece)

    def engine(self, piece: int) -> float:
        """The rate of the copy engine alone for pieces of `piece` bytes in the planes; 0 for small ones."""
        return _between(self.copy_engine, piece) if piece >= COPY_ENGINE_FROM else 0.0


def _between(rates: Mapping[int, float], piece: int) -> float:
    """The rate for pieces of `piece` bytes, interpolated on a logarithmic scale."""
    sizes = sorted(rates)
    if piece <= sizes[0]:  # a piece takes constant time there
        return rates[sizes[0]] * piece / sizes[0]
    for low, high in itertools.pairwise(sizes):
        if piece <= high:
            part = math.log(piece / low) / math.log(high / low)
            return rates[low] * float((rates[high] / rates[low]) ** part)
    return rates[sizes[-1]]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The measured rates of one GPU, and the facts for which they hold."""

    load: Rates
    store: Rates
    key: dict[str, str]
    seconds: _Positive

    def rates(self, direction: Direction) -> Rates:
        return self.load if direction == "load" else self.store


class Paths:
    """The choice of a path. `measure` is called here unless both paths are forced."""

    def __init__(self, load: Choice, store: Choice, measure: Callable[[], Calibration | None]) -> None:
        self._forced: dict[Direction, Choice] = {"load": load, "store": store}
        self.calibration = measure() if "auto" in (load, store) else None

    def choose(
        self, direction: Direction, span: int, run: int, *, sums: bool, fused: bool = False, last: bool = False
    ) -> Path:
        """The path for pages with runs of `span` bytes in the extent and `run` bytes in the planes.

        `sums`: checksums are wanted. `fused`: only the kernel that moves the bytes can take them. `last`: of the last
        layers.
        """
        forced = self._forced[direction]
        if forced != "auto" or self.calibration is None:
            return "staged" if forced == "auto" else forced
        rates = self.calibration.rates(direction)
        staged, engine = rates.staging(span), rates.engine(run)
        handicap = _COPY_ENGINE_MUST_WIN_BY
        if direction == "load" and not sums:
            small = _COPY_ENGINE_MUST_WIN_SMALL_BY if run < _COPY_ENGINE_SMALL else _COPY_ENGINE_MAY_LOSE
            handicap = _COPY_ENGINE_MAY_LOSE_LAST if last else small
        needed = _ZERO_COPY_MUST_WIN_BY if span >= _SMALL else 1 / _STAGING_MUST_WIN_BY
        kernel_alone = rates.zero_copy > needed * staged
        if not (sums and fused) and engine >= handicap * (rates.zero_copy if kernel_alone else staged):
            return "copy_engine"
        return "zero_copy" if kernel_alone else "staged"

    def describe(self) -> dict[str, Any]:
        """The choice as plain data: forced paths, and the calibration."""
        found = self.calibration
        return {
            "load_path": self._forced["load"],
            "store_path": self._forced["store"],
            "calibration": None if found is None else dataclasses.asdict(found),
        }


# -- the calibration's file --------------------------------------------------------------------------------------------


def cache_file(key: Mapping[str, str]) -> FilePath:
    """The calibration file of one GPU: below $GDSCACHE_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache.

    Raises `FileNotFoundError` if all are unknown.
    """
    return user_cache() / f"calibration-{key['gpu_uuid']}.json"


def read(key: Mapping[str, str]) -> Calibration | None:
    """The calibration for exactly this key; None if it is missing, another's, or unreadable."""
    try:
        found = TypeAdapter(Calibration).validate_json(cache_file(key).read_bytes())
    except (OSError, ValueError) as error:
        _log.debug("no calibration for GPU %s: %s", key["gpu_uuid"], error)
        return None
    return found if found.key == dict(key) else None


def write(calibration: Calibration) -> None:
    """Write a calibration, whole or not at all. If that fails it is measured again next time."""
    try:
        path = cache_file(calibration.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(calibration), indent=1).encode())
    except OSError as error:
        _log.info("the calibration cannot be kept: %s", error)


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
        found = None if fresh else read(key)
        if found is None:
            found = measure(driver, key)
            write(found)
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
            kernels, rates = _measured(driver, piece, path, kernels)
            for direction in _DIRECTIONS:
                found[direction][piece] = rates[direction]
    _, zero_copy = _measured(driver, _ZERO_COPY_PIECE, "zero_copy", kernels)
    load, store = (Rates(staged[direction], alone[direction], zero_copy[direction]) for direction in _DIRECTIONS)
    return Calibration(load, store, key, time.perf_counter() - began)


def _measured(
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
            path = cache_file(key).with_suffix(".lock")
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
