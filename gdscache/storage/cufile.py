"""cuFile by the native library: straight between files and GPU memory if GPUDirect Storage works, else through cuFile's
own buffers in host memory (its compat mode).

Threads of the library call it, without the interpreter's lock. An engine's executor takes the files over, so that no
byte on the direct route passes through Python.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gdscache.errors import DeadlineError, DeviceError, NativeCallError, TransportUnavailableError
from gdscache.native import CuFiles, error_of
from gdscache.sizes import about
from gdscache.storage.base import Memory, Op, Switch, failed
from gdscache.storage.calls import cufile_hangs, within
from gdscache.storage.files import NativeTransport

if TYPE_CHECKING:
    import torch

    from gdscache.cuda.driver import Driver

CONFIGURATION = Path("/etc/cufile.json")
ROOT = Path("/")
_LIBRARIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
)

_T = TypeVar("_T")


class CufileTransport(NativeTransport):
    """Moves host memory, and that of `gpu`'s device, by `threads` threads of the library.

    GPU memory has to be registered before requests on it. cuFile's driver is the process's: it stays open after the
    transport's close.

    cuFile writes a log into the working directory unless it is configured. Without `CUFILE_LOGFILE_PATH`,
    `CUFILE_ENV_PATH_JSON` and /etc/cufile.json it is sent to the folder for temporary files, by a call and not by the
    process's environment.

    Raises `TransportUnavailableError` if cuFile is missing, refuses, or would never answer (without `/proc/modules`).
    Raises `DeadlineError`, as `open` and `register` do, if it does not answer within `CALL_S`.
    """

    memory_kinds = frozenset({"host", "cuda"})
    cufile: CuFiles

    def __init__(self, threads: int, direct_io: Switch = "auto", *, gpu: Driver) -> None:
        self._registered: dict[int, int] = {}  # bytes, by first address
        self._hangs = False  # a call has not answered, and may still use its arguments
        self.cufile = self._opened(gpu)
        try:
            super().__init__(threads, direct_io, uring=False, name="cufile")
        except BaseException:
            self.cufile.close()
            raise

    @property
    def is_own(self) -> bool:
        return type(self) is CufileTransport

    def _opened(self, gpu: Driver) -> CuFiles:
        if cause := cufile_hangs():
            raise TransportUnavailableError(cause, "set ssd.gds to off, or ssd.transport to posix")
        path = find_cufile()
        try:
            return self._within(
                "its driver was not open", lambda: CuFiles(gpu.library, gpu.context, path, log_folder())
            )
        except NativeCallError as error:
            raise TransportUnavailableError(
                f"cuFile cannot be used: {error.message}", "set ssd.gds to off, or ssd.transport to posix"
            ) from error

    def _within(self, what: str, work: Callable[[], _T]) -> _T:
        """The result of `work()`. A call of cuFile can hang for ever."""
        hint = "cuFile hangs: set ssd.gds to off, or ssd.transport to posix"
        try:
            return within("gdscache-cufile-call", work, f"cuFile: {what}", hint)
        except DeadlineError:
            self._hangs = True
            raise

    def _adopt(self, file: int, path: Path) -> None:
        try:
            self._within(f"{path} was not registered", lambda: self.cufile.add_file(file))
        except NativeCallError as error:
            raise failed("open", str(path), 0, RuntimeError(error.message)) from error

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Register GPU memory with cuFile; nothing for the host. Raises `TransportUnavailableError` if cuFile
        refuses."""
        if isinstance(memory, memoryview):
            return
        address, nbytes = memory.data_ptr(), memory.numel()
        try:
            self._within(f"{nbytes} bytes were not registered", lambda: self.cufile.add_memory(address, nbytes))
        except NativeCallError as error:
            raise TransportUnavailableError(
                f"cuFile cannot register {about(nbytes)} of GPU memory: {error.message}",
                "lower host_buffer (BAR1 limits it), or set ssd.gds to off",
            ) from error
        self._registered[address] = nbytes

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        """Nothing after `close`, which has deregistered all memory."""
        if not isinstance(memory, memoryview) and self._registered.pop(memory.data_ptr(), None) is not None:
            self.cufile.remove_memory(memory.data_ptr())

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        if isinstance(memory, memoryview):
            return super()._move(op, file, offset, memory)
        path = self.path(file)
        moved = self.cufile.move(file, offset, memory.address, memory.nbytes, write=op is Op.WRITE)
        if moved < 0:
            raise failed(op.value, path, offset, error_of(-moved))
        return moved

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "gds": True}

    def close(self) -> None:
        if not self._hangs and not self._closed:
            for address in self._registered:
                self.cufile.remove_memory(address)
            for file in self._paths:
                self.cufile.remove_file(file)
            self.cufile.close()
        self._registered.clear()
        super().close()


def open_cufile(threads: int, direct_io: Switch, device: str) -> CufileTransport:
    """`device`: the GPU whose memory to move, `cuda:N`."""
    import torch

    from gdscache.cuda.driver import Driver

    try:
        gpu = Driver(torch.device("cuda", int(device.partition(":")[2] or 0)))
    except DeviceError as error:
        raise TransportUnavailableError(
            f"cuFile needs the CUDA driver: {error.message}", "set ssd.transport to posix or auto"
        ) from error
    return CufileTransport(threads, direct_io, gpu=gpu)


def log_folder() -> str | None:
    """The folder of cuFile's log; None if the user has configured it."""
    told = any(name in os.environ for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"))
    return None if told or CONFIGURATION.exists() else tempfile.gettempdir()


def find_cufile(root: Path = ROOT, paths: Sequence[str] | None = None) -> str:
    """The path of libcufile, in the system or in the wheels below `paths` (the import path). It is not loaded.

    Raises `TransportUnavailableError` if it is not found.
    """
    places = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p] if root == ROOT else []
    places += [place for pattern in _LIBRARIES for place in sorted(root.glob(pattern))]
    for path in sys.path if paths is None else paths:
        places += [Path(path, "libcufile_cu12.libs"), *sorted(Path(path).glob("nvidia/*/lib"))]
    for place in places:
        if found := sorted(place.glob("libcufile.so*")):
            return str(found[0])
    raise TransportUnavailableError(
        "libcufile.so is not found", "install the CUDA toolkit's libcufile, or the wheel nvidia-cufile"
    )
