"""cuFile for tests, over the GPU that is not there (fake_gpu.py): the direct route, in memory that is the host's.

The library is csrc/host/tests/fake_cufile.cc; what it can be told is in fake_cufile.h.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gdscache import storage
from gdscache.engine import opening as build
from gdscache.pages.checksum import Checksums, layer_checksums
from gdscache.pages.layout import PageLayout
from gdscache.storage import calls, cufile
from gdscache.storage.base import Switch
from gdscache.storage.cufile import CufileTransport
from gdscache.tiers import ssd_route as routes
from tests.support import fake_gpu
from tests.support.cufile_parts import FakeCufile, GpuBytes

_BIT = 1 << 56


@functools.cache
def library() -> ctypes.CDLL:
    """cuFile, which looks whether threads have entered the context."""
    made = fake_gpu.built("fake_cufile")
    made.fake_cufile_contexts(fake_gpu.driver().fake_entered_here)
    return made


def _of(name: str) -> Callable[..., Any]:
    return lambda *given, **options: getattr(FakeCufile(library()), name)(*given, **options)


fault, refuse, release, well_after, moves, waiting, living = map(
    _of, ("fault", "refuse", "release", "well_after", "moves", "waiting", "living")
)


class DeviceBytes(GpuBytes):
    """The same of the GPU that is not there, whose addresses are not the host's."""

    is_cuda = True

    @property
    def host(self) -> memoryview:
        return self.memory

    def address(self) -> int:
        """Of the host's."""
        return super().data_ptr()

    def data_ptr(self) -> int:
        return self.address() | _BIT

    def view(self, *shape: int) -> DeviceBytes:
        return self


def allocate(nbytes: int) -> DeviceBytes:
    """Memory of that GPU, whole pages; see `free`."""
    made = DeviceBytes(memoryview(mmap.mmap(-1, nbytes)))
    fake_gpu.driver().fake_device(made.address(), nbytes)
    return made


def free(memory: DeviceBytes) -> None:
    fake_gpu.driver().fake_forget(memory.address())


class FakeDeviceExtents:
    pinned = True
    fence_slots = 0

    def __init__(self, layout: PageLayout, capacity: int, device: object = None) -> None:
        self.layout = layout
        self.slots = capacity // layout.extent_bytes
        self.rows: Any = allocate(self.slots * layout.extent_bytes)
        self.checksums = np.zeros((self.slots, layout.n_layers), dtype=np.uint64)
        self._open = True

    @property
    def flat(self) -> Any:
        return self.rows

    def digest(self, slot: int, layers: range) -> Checksums:
        at = slot * self.layout.extent_bytes
        view = self.rows.host[at : at + self.layout.extent_bytes]
        return layer_checksums(view, self.layout.layer_bounds[layers.start : layers.stop])

    def close(self) -> None:
        if self._open:
            self._open = False
            free(self.rows)


def opened(threads: int = 3, direct_io: Switch = "auto") -> CufileTransport:
    path = str(library()._name)
    with (
        mock.patch.object(calls, "PROC_MODULES", os.devnull),
        mock.patch.object(cufile, "find_cufile", return_value=path),
    ):
        return CufileTransport(threads, direct_io, gpu=fake_gpu.FakeDriver())


def use(monkeypatch: pytest.MonkeyPatch, *, kernels: bool = True) -> None:
    """Engines that are opened from now on with `transport: cufile`, and planes in host memory, copy as on a GPU, and
    read and write its memory directly."""
    fake_gpu.use(monkeypatch, kernels=kernels)
    chosen = storage._choose
    found: Any = lambda name, *rest: (name, "off", "a test") if name == "cufile" else chosen(name, *rest)  # noqa: E731
    monkeypatch.setattr(storage, "_choose", found)
    monkeypatch.setattr(cufile, "open_cufile", lambda threads, direct_io, device: opened(threads, direct_io))
    monkeypatch.setattr(build, "DeviceExtents", FakeDeviceExtents)
    monkeypatch.setattr(routes, "choose", lambda *_, **__: routes.RouteChoice("direct", "a test"))
