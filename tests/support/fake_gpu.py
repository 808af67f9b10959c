"""A GPU for tests where there is none: the engine's own copies, on a CUDA driver whose memory is the host's.

The driver is csrc/host/tests/fake_cuda.cc; what it can be told is in fake_cuda.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gdscache.engine import opening as build
from gdscache.kernels.choice import Direction
from gdscache.kernels.copies import PageCopies
from gdscache.kernels.cuda import (
    FORMS,
    ROUTES,
    SHORTEST,
    CopyRoute,
    NativeGpu,
    PlaneRuns,
    StreamPoint,
    can_look,
    plane_runs,
)
from gdscache.pages.planes import PagedPlanes
from tests.support.places import ROOT, tool
from tests.support.shims import built_once

_SOURCES = ROOT / "csrc" / "host"
_TESTS = _SOURCES / "tests"
_STAGING = 64 << 10  # so that segments are used again


def built(name: str) -> ctypes.CDLL:
    """A library of csrc/host/tests, built once for these sources."""
    own = [*sorted(_SOURCES.glob("hash/*.cc")), *sorted(_SOURCES.glob("pack/*.cc")), _SOURCES / "moves" / "pages.cc"]
    files = [*sorted(_TESTS.glob("fake_*")), *sorted(_SOURCES.glob("*/*.h")), *own]

    def command() -> list[object]:
        flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", f"-I{_SOURCES}"]
        return [*tool("native_build").compiler(), *flags, _TESTS / f"{name}.cc", *own]

    return ctypes.CDLL(str(built_once(name, files, command)))


@functools.cache
def driver() -> ctypes.CDLL:
    library = built("fake_cuda")
    library.fake_device.restype = ctypes.c_uint64
    library.fake_device.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.fake_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.fake_forget.argtypes = [ctypes.c_void_p]
    library.fake_context.restype = library.fake_kernel.restype = ctypes.c_void_p
    library.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.fake_calls.argtypes = [ctypes.c_char_p]
    library.fake_calls.restype = ctypes.c_int64
    return library


@contextlib.contextmanager
def held(*, copies_only: bool = False) -> Iterator[None]:
    """Streams begin nothing in the block; or no copies, but kernels."""
    hold = driver().fake_hold_copies if copies_only else driver().fake_hold
    hold(1)
    try:
        yield
    finally:
        hold(0)


@contextlib.contextmanager
def failing(function: str, nth: int = 0) -> Iterator[None]:
    """A call of the driver fails, the `nth` of those in the block."""
    driver().fake_fail(function.encode(), nth)
    try:
        yield
    finally:
        driver().fake_fail(function.encode(), -1)


def calls(function: str) -> int:
    return int(driver().fake_calls(function.encode()))


class FakeDriver:
    def __init__(self) -> None:
        self.library = str(driver()._name)
        self.context = int(driver().fake_context())


_USERS: Counter[int] = Counter()  # copies of the planes at each address: packed pages have two


class _Kernels:
    def __init__(self, planes: PagedPlanes, runs: Sequence[Sequence[PlaneRuns]], kept: dict[int, Any]) -> None:
        layout, layers, rows = planes.layout, list[int](), list[int]()
        for records, (start, end) in zip(runs, layout.layer_bounds, strict=True):
            layers += [len(rows) // 6, len(records), start, end - start]
            for r in records:
                rows += [r.base, r.block_stride, r.run_stride, r.run_bytes, r.runs_per_block, r.end]
        table = np.array(layers + rows, np.int64)
        kept[table.ctypes.data] = table
        self._table = int(driver().fake_device(table.ctypes.data, table.nbytes))
        self._sums = all(end - start >= SHORTEST for start, end in layout.layer_bounds)
        self._looks = can_look(layout) and not layout.packed
        self._which = (4, 5, 4, 5) if layout.packed else range(4)
        driver().fake_vector(1)

    def spec(self) -> dict[str, Any]:
        functions = dict(zip(FORMS, (int(driver().fake_kernel(which)) for which in self._which), strict=True))
        about = {"vector": 1, "processors": 4, "sums": self._sums, "looks": self._looks}
        return functions | about | {"table": self._table}


class _Point(StreamPoint):
    def wait(self, stream: Any = None) -> None:
        self.synchronize()  # the caller has no stream


class _Gpu(NativeGpu):
    def point(self, number: int) -> StreamPoint:
        return _Point(self, number)


class FakeGpuCopies(PageCopies):
    """Planes of host memory as if a GPU had them. `route`: of every copy; without `kernels`, the copy engine's."""

    name = "cuda"

    def __init__(
        self, planes: PagedPlanes, route: CopyRoute = "staged", *, kernels: bool = True, staging: int = _STAGING
    ) -> None:
        super().__init__(planes)
        self._route = route
        self._kept: dict[int, Any] = {}  # what the driver knows
        runs = [
            [self._on_gpu(r, t) for r, t in zip(*pair, strict=True)]
            for pair in zip(plane_runs(planes), planes.tensors, strict=True)
        ]
        built: Any = _Kernels(planes, runs, self._kept) if kernels else None
        fake: Any = FakeDriver()
        self.gpu = _Gpu(planes, fake, runs, built, max(staging, 6 * planes.layout.extent_bytes))

    def _on_gpu(self, runs: PlaneRuns, tensor: torch.Tensor) -> PlaneRuns:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = tensor
            _USERS[storage.data_ptr()] += 1
            if _USERS[storage.data_ptr()] == 1:
                driver().fake_device(storage.data_ptr(), storage.nbytes())
        return runs._replace(base=runs.base | (1 << 56))

    def routes(self, direction: Direction, layers: range) -> tuple[int, int]:
        return ROUTES.index(self._route), ROUTES.index(self._route)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "cause": "a test", "copy_engine": self.gpu.api}

    def close(self) -> None:
        self.gpu.close()
        for address in self._kept:
            _USERS[address] -= 1
            if _USERS[address] <= 0:
                driver().fake_forget(address)
                del _USERS[address]
        self._kept.clear()


def use(
    monkeypatch: pytest.MonkeyPatch, route: CopyRoute = "staged", *, kernels: bool = True, staging: int = _STAGING
) -> None:
    """Engines that are opened from now on, with planes in host memory, copy as on a GPU."""
    driver()

    real = build.open_copies

    def opened(planes: PagedPlanes, config: Any) -> PageCopies:
        if planes.device.type != "cpu":
            return real(planes, config)
        return FakeGpuCopies(planes, route, kernels=kernels, staging=staging)

    monkeypatch.setattr(build, "open_copies", opened)
