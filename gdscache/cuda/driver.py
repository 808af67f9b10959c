"""The CUDA driver, by ctypes: the few calls that torch lacks. Nothing is loaded before a `Driver` is made.

Batches of copies go by `cuMemcpyBatchAsync` if the driver has it, else by one call a run. The function behind
`cudaMemcpyBatchAsync` came with CUDA 12.8 and lost an argument in CUDA 13. Both forms are looked up at run time, in the
driver, independently of torch's CUDA runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gdscache.arrays import UInt64Array
from gdscache.errors import CaptureUnsupportedError, DeviceError

_NON_BLOCKING = 1
_CAPTURE_NONE = 0
_PORTABLE = 1
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2


class _Arguments(ctypes.Structure):
    """The list that gives cuLaunchKernel its buffer of arguments."""

    _fields_ = (
        ("pointer_follows", ctypes.c_void_p),
        ("buffer", ctypes.c_char_p),
        ("size_follows", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
    )


class Driver:
    """libcuda for one device, in the primary context that torch uses too.

    Raises `DeviceError` if there is no driver or the driver refuses.
    """

    library = "libcuda.so.1"

    def __init__(self, device: torch.device) -> None:
        try:
            self._library = ctypes.CDLL(self.library)
        except OSError as error:
            raise DeviceError(f"there is no CUDA driver: {error}", "install the NVIDIA driver") from error
        self._quick = ctypes.PyDLL(self.library)  # keeps the GIL: releasing it costs more than these calls
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._quick.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        self.device = device
        self.call("cuInit", 0)
        ordinal = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(ordinal), device.index)
        self._context = ctypes.c_void_p()  # kept for good, as torch keeps it
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self.context = self._context.value or 0
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; an error code becomes a `DeviceError`."""
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise `DeviceError` for an error code of the function `name`."""
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(f"{name} answered {code} ({(text.value or b'unknown').decode()}) on {self.device}")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A block with the device's primary context current in the calling thread."""
        self.check("cuCtxPushCurrent", self._quick.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self.check("cuCtxPopCurrent", self._quick.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def lookup(self, name: str, version: int) -> Any | None:
        """The function `name` of CUDA `version` (12080 is 12.8), or None if the driver lacks it."""
        pointer, answer = ctypes.c_void_p(), ctypes.c_int()
        find = getattr(self._library, "cuGetProcAddress_v2", None)  # since CUDA 12
        if find is None:
            return None
        code = find(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(answer))
        return None if code or answer.value or not pointer.value else pointer.value

    def is_capturing(self, stream: torch.cuda.Stream) -> bool:
        status = ctypes.c_int()
        with self.entered():
            self.call("cuStreamIsCapturing", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status))
        return status.value != _CAPTURE_NONE

    def create_stream(self) -> torch.cuda.ExternalStream:
        """A non-blocking stream of our own (torch's few streams are shared by all users), for the process's life."""
        pointer = ctypes.c_void_p()
        with self.entered():
            self.call("cuStreamCreate", ctypes.byref(pointer), _NON_BLOCKING)
        return torch.cuda.ExternalStream(pointer.value, device=self.device)  # type: ignore[no-untyped-call]

    def launch(self, function: int, grid: int, block: int, arguments: bytes, stream: int) -> None:
        """Queue a kernel (its CUfunction) of `grid` blocks of `block` threads on `stream` (its pointer).

        `arguments`: the kernel's, packed like a C struct of them. Enters the context itself.
        """
        size = ctypes.c_size_t(len(arguments))
        extra = _Arguments(_BUFFER_POINTER, arguments, _BUFFER_SIZE, ctypes.addressof(size), None)
        with self.entered():
            code = self._quick.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, None, ctypes.byref(extra))
        if code:
            self.check("cuLaunchKernel", code)

    def page_lock(self, address: int, nbytes: int) -> None:
        with self.entered():
            self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE)

    def page_unlock(self, address: int) -> None:
        """Undo one `page_lock`, by its address."""
        with self.entered():
            self.call("cuMemHostUnregister", ctypes.c_void_p(address))


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
