"""The CUDA driver, by ctypes: the few calls that torch lacks. Nothing is loaded before a `Driver` is made."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from gdscache.errors import DeviceError

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
