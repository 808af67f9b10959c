"""cuFile through kvikio: straight between files and GPU memory if GPUDirect Storage works, else through bounce buffers.

kvikio's settings belong to the process and are shared with its other users of kvikio: the thread count, `gds_threshold`
0, `auto_direct_io_*` and the compatibility mode are set when a `KvikioTransport` is made, so the last one made decides.
Each cuFile request on GPU memory first synchronises CUDA's legacy default stream.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, TransportUnavailableError
from gdscache.sizes import about
from gdscache.storage.base import EitherWay, Memory, Op, Switch, failed
from gdscache.storage.calls import cufile_hangs, within

if TYPE_CHECKING:
    import torch

TASK_BYTES = 4 << 20

_log = logging.getLogger("gdscache.storage")


class KvikioTransport(EitherWay):
    """Moves host and CUDA memory, by as many threads of kvikio's pool as call it.

    `compat="on"` never calls cuFile, `"off"` raises if cuFile cannot be used for a file, `"auto"` leaves the choice to
    kvikio, file by file. Without `/proc/modules` cuFile never answers (its versions 1.16 to 1.20), so `"auto"` becomes
    `"on"` there and `"off"` is refused.

    Raises `TransportUnavailableError` if kvikio or `libcuda.so.1` is missing: kvikio needs the driver even for host
    memory. `open` raises `DeadlineError` if cuFile does not answer within `CALL_S`.
    """

    name = "kvikio"
    memory_kinds = frozenset({"host", "cuda"})

    def __init__(self, threads: int, direct_io: Switch = "auto", compat: Switch = "auto") -> None:
        super().__init__(threads, direct_io)
        if compat not in ("auto", "on", "off"):
            raise InvalidValueError(f"compat is {compat!r}", "set compat to auto, on or off")
        if cause := cufile_hangs():
            if compat == "off":
                raise TransportUnavailableError(cause, "set ssd.gds to auto or off")
            compat = "on"
        self._kvikio = _import_kvikio()
        direct = direct_io != "off"
        settings: dict[str, object] = {
            "num_threads": threads,
            "task_size": TASK_BYTES,
            "gds_threshold": 0,
            "auto_direct_io_read": direct,
            "auto_direct_io_write": direct,
            "compat_mode": getattr(self._kvikio.CompatMode, compat.upper()),
        }
        self._kvikio.defaults.set(settings)
        _log.debug("kvikio's settings of this process are now %s", settings)
        self._compat = compat
        self._files: dict[int, Any] = {}
        self._closed = False
        self._open_lock = threading.Lock()

    @property
    def direct(self) -> bool:
        files = list(self._files.values())
        return self.direct_io != "off" and bool(files) and all(file.is_direct_io_supported() for file in files)

    def open(self, path: Path) -> int:
        with self._open_lock:
            if self._closed:
                raise EngineClosedError("the kvikio transport was closed", "open files before close")
            try:
                # kvikio would hide the system's errno in the text of a RuntimeError
                os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                file = self._opened(path)
            except (OSError, RuntimeError) as error:
                raise failed("open", str(path), 0, error) from error
            if self.direct_io == "on" and not file.is_direct_io_supported():
                file.close()
                raise TransportUnavailableError(
                    f"direct_io is on, but kvikio cannot open {path} with O_DIRECT", "set direct_io to auto or off"
                )
            handle: int = file.fileno()
            self._files[handle] = file
            return handle

    def _opened(self, path: Path) -> Any:
        """kvikio's file. If cuFile is used, which may hang for ever, it is opened in a thread of its own."""
        if self._compat == "on":
            return self._kvikio.CuFile(path, "r+")
        return within(
            "gdscache-kvikio-open",
            lambda: self._kvikio.CuFile(path, "r+"),
            f"kvikio did not open {path}",
            "cuFile hangs: set ssd.gds to off, or ssd.transport to posix",
        )

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Register the CUDA allocation that holds `memory` with cuFile; nothing in compatibility mode or for the host.

        Raises `TransportUnavailableError` if cuFile refuses.
        """
        if self._compat == "on" or isinstance(memory, memoryview):
            return
        try:
            self._kvikio.memory_register(memory)
        except RuntimeError as error:
            raise TransportUnavailableError(
                f"cuFile cannot register {about(memory.numel())} of GPU memory: {error}",
                "make the staging ring smaller (BAR1 limits it), or set ssd.gds to off",
            ) from error

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        if self._compat != "on" and not isinstance(memory, memoryview):
            self._kvikio.memory_deregister(memory)

    def flush(self, file: int) -> None:
        self._file(file)
        try:
            os.fdatasync(file)
        except OSError as error:
            raise failed("flush", f"file {file}", 0, error) from error

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "compat": self._compat, "kvikio": str(self._kvikio.__version__)}

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        found, nbytes = self._file(file), memory.nbytes
        buffer = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
        try:
            # kvikio's futures keep neither the buffer nor the file alive: wait for the end
            moved = int((found.pread if op is Op.READ else found.pwrite)(buffer, nbytes, offset).get())
            if moved > nbytes:
                raise RuntimeError(f"kvikio counts {moved} of {nbytes} bytes")
            return moved
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            # its error has neither errno nor byte count, so the file's size decides
            left = max(os.fstat(file).st_size - offset, 0)
            if op is Op.READ and left < nbytes:
                return left
            raise failed(op.value, f"file {file}", offset, error) from error

    def _file(self, file: int) -> Any:
        found = self._files.get(file)
        if found is None:
            raise IOFailedError(f"{file} is no open file of this transport", "pass a handle from open()", errno.EBADF)
        return found

    def close(self) -> None:
        with self._open_lock:
            self._closed = True
            for file in self._files.values():
                file.close()
            self._files.clear()


def _import_kvikio() -> Any:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailableError(
            f"kvikio needs the CUDA driver, for host memory too: {error}", "set ssd.transport to posix or auto"
        ) from error
    try:
        import kvikio
        import kvikio.defaults
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportUnavailableError(
            f"kvikio cannot be imported: {error}",
            "install gdscache[cuda12] or gdscache[cuda13], or set ssd.transport to posix",
        ) from error
    return kvikio
