"""Batches of copies by the GPU's copy engines: `cuMemcpyBatchAsync` if the driver has it, else one call a run.

The function behind `cudaMemcpyBatchAsync` came with CUDA 12.8 and lost an argument in CUDA 13. Both forms are looked up
at run time, in the driver, independently of torch's CUDA runtime.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gdscache.arrays import UInt64Array
from gdscache.cuda.driver import Driver
from gdscache.errors import CaptureUnsupportedError

Api = Literal["batch_13", "batch_12_8", "single"]

_VERSIONS: dict[Api, int] = {"batch_13": 13000, "batch_12_8": 12080}  # the newest first
_LEGACY_STREAM = 0
_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


def merge(
    dst: UInt64Array, src: UInt64Array, nbytes: UInt64Array, fences: npt.NDArray[np.bool_] | None = None
) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Join neighbours: entry `i + 1` goes into entry `i` if both its ends follow on directly.

    All arguments have shape (entries,). `fences[i]`, if true, keeps entry `i` apart from entry `i - 1`: a border
    between two registrations of host memory, which no single copy may cross.
    """
    if len(dst) < 2:
        return dst, src, nbytes
    joined = (dst[1:] == dst[:-1] + nbytes[:-1]) & (src[1:] == src[:-1] + nbytes[:-1])
    if fences is not None:
        joined &= ~fences[1:]
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return dst[starts], src[starts], np.add.reduceat(nbytes, starts)


class CopyEngine:
    """Copies between host and device memory of one GPU, many at a time, without an SM.

    `api`: the form of the driver's call, the newest that the driver has.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.api: Api = "single"
        self._function: Any = None
        for name, version in _VERSIONS.items():
            pointer = driver.lookup("cuMemcpyBatchAsync", version)
            if pointer is not None:
                self.api, self._function = name, _prototype(name)(pointer)
                break
        attributes = _Attributes(source_order=_SOURCE_IN_STREAM_ORDER)
        self._attributes = (_Attributes * 1)(attributes)
        self._first = (ctypes.c_size_t * 1)(0)
        self._hop: torch.cuda.ExternalStream | None = None
        self._hopping = threading.Lock()

    def copy(self, dst: UInt64Array, src: UInt64Array, nbytes: UInt64Array, stream: torch.cuda.Stream) -> None:
        """Queue `nbytes[i]` bytes from `src[i]` to `dst[i]` for all `i`, in no promised order.

        The addresses (uint64, of shape (entries,)) are of this GPU's memory and of page-locked host memory; no two
        destinations overlap, no entry is empty. One native call, or one a run if the driver has no batches. The driver
        refuses batches on the legacy default stream: there the copies run on a stream of our own between two events.
        Raises `CaptureUnsupportedError` while a CUDA graph is recorded on `stream`.
        """
        if not len(dst):
            return
        dst, src, nbytes = (np.ascontiguousarray(part, dtype=np.uint64) for part in (dst, src, nbytes))
        if self.driver.is_capturing(stream):
            raise CaptureUnsupportedError(
                "a batch of copies cannot be recorded into a CUDA graph", "copy outside the graph, or use the kernels"
            )
        if stream.cuda_stream != _LEGACY_STREAM:
            with self.driver.entered():
                self.submit(dst, src, nbytes, stream.cuda_stream)
            return
        with self._hopping:
            if self._hop is None:
                self._hop = self.driver.create_stream()
            self._hop.wait_stream(stream)
            with self.driver.entered():
                self.submit(dst, src, nbytes, self._hop.cuda_stream)
            stream.wait_stream(self._hop)

    def submit(self, dst: UInt64Array, src: UInt64Array, nbytes: UInt64Array, stream: int) -> None:
        """`copy` without its checks, for a stream of our own (its pointer). The caller has entered the driver.

        The arrays, or slices of arrays, are contiguous.
        """
        if self._function is None:
            for to, of, size in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
                ends = ctypes.c_uint64(to), ctypes.c_uint64(of)
                self.driver.call("cuMemcpyAsync", *ends, ctypes.c_size_t(size), ctypes.c_void_p(stream))
            return
        arguments = [dst.ctypes.data, src.ctypes.data, nbytes.ctypes.data, len(dst), self._attributes, self._first, 1]
        if self.api == "batch_12_8":
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        code = self._function(*arguments, stream)
        if code:
            self.driver.check("cuMemcpyBatchAsync", code)


def _prototype(api: Api) -> Any:
    """The C type of the batch function: before CUDA 13 with an output for the number of a failed entry."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    failed = [pointer] if api == "batch_12_8" else []
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, *failed, pointer)
