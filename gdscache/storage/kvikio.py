"""cuFile through kvikio: straight between files and GPU memory where GPUDirect Storage works, through bounce buffers
where it does not.

kvikio's settings belong to the process and are shared with everything else in it that uses kvikio: the thread count,
`gds_threshold` 0, `auto_direct_io_*` and the compatibility mode are set when a `KvikioTransport` is made, so the last
one made decides. Each cuFile request on GPU memory first synchronises CUDA's legacy default stream.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdscache.errors import DeadlineError, InvalidValueError, TransportUnavailableError
from gdscache.runtime.threads import start
from gdscache.storage.base import Op, Switch, failed
from gdscache.storage.workers import MAX_RUN, IOPiece, IORun, QueuedTransport, Result

if TYPE_CHECKING:
    import torch

PROC_MODULES = "/proc/modules"
CALL_S = 60.0

_log = logging.getLogger("gdscache.storage")


class KvikioTransport(QueuedTransport):
    """Reads and writes host and CUDA memory; `threads` runs are in flight on as many threads of kvikio's pool.

    `compat="on"` never calls cuFile, `"off"` raises where cuFile cannot be used for a file, `"auto"` leaves the choice
    to kvikio, file by file. Without `/proc/modules` cuFile never answers (its versions 1.16 to 1.20), so `"auto"`
    becomes `"on"` there and `"off"` is refused.

    Raises `TransportUnavailableError` when kvikio or `libcuda.so.1` is missing: kvikio needs the driver even for host
    memory. `open` raises `DeadlineError` when cuFile does not answer within `CALL_S`.
    """

    name = "kvikio"
    memory_kinds = frozenset({"host", "cuda"})

    def __init__(self, threads: int, direct_io: Switch = "auto", compat: Switch = "auto") -> None:
        for key, value in (("direct_io", direct_io), ("compat", compat)):
            if value not in ("auto", "on", "off"):
                raise InvalidValueError(f"{key} is {value!r}", f"set {key} to auto, on or off")
        if not os.path.exists(PROC_MODULES):
            if compat == "off":
                raise TransportUnavailableError(
                    f"cuFile never answers on a kernel without {PROC_MODULES}", "set gds to auto or off"
                )
            compat = "on"
        self._kvikio = _import_kvikio()
        direct = direct_io != "off"
        settings: dict[str, object] = {
            "num_threads": max(threads, 1),
            "task_size": MAX_RUN,
            "gds_threshold": 0,
            "auto_direct_io_read": direct,
            "auto_direct_io_write": direct,
            "compat_mode": getattr(self._kvikio.CompatMode, compat.upper()),
        }
        self._kvikio.defaults.set(settings)
        _log.debug("kvikio's settings of this process are now %s", settings)
        self._direct_io, self._compat = direct_io, compat
        self._files: dict[int, Any] = {}
        self._open_lock = threading.Lock()
        super().__init__(threads)

    @property
    def direct(self) -> bool:
        files = list(self._files.values())
        return self._direct_io != "off" and bool(files) and all(file.is_direct_io_supported() for file in files)

    def open(self, path: Path) -> int:
        with self._open_lock:
            self.check_open()
            try:
                # kvikio would hide the system's errno in the text of a RuntimeError.
                os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                file = self._opened(path)
            except (OSError, RuntimeError) as error:
                raise failed("open", str(path), 0, error) from error
            if self._direct_io == "on" and not file.is_direct_io_supported():
                file.close()
                raise TransportUnavailableError(
                    f"direct_io is on, but kvikio cannot open {path} with O_DIRECT", "set direct_io to auto or off"
                )
            handle: int = file.fileno()
            self._files[handle] = file
            self.add_file(handle, path)
            return handle

    def _opened(self, path: Path) -> Any:
        """kvikio's file; opened in a thread of its own where cuFile is asked, which can hang for ever."""
        if self._compat == "on":
            return self._kvikio.CuFile(path, "r+")
        opened: Future[Any] = Future()

        def run() -> None:
            try:
                opened.set_result(self._kvikio.CuFile(path, "r+"))
            except (OSError, RuntimeError) as error:
                opened.set_exception(error)

        start([threading.Thread(target=run, name="gdscache-kvikio-open", daemon=True)], lambda: None)
        done, _ = wait([opened], CALL_S)
        if not done:
            raise DeadlineError(
                f"kvikio did not open {path} within {CALL_S:g} s", "cuFile hangs: set gds to off, or transport to posix"
            )
        return opened.result()

    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Register the CUDA allocation that holds `memory` with cuFile; nothing in compatibility mode or for the host.

        Raises `TransportUnavailableError` when cuFile refuses.
        """
        if self._compat == "on" or isinstance(memory, memoryview):
            return
        try:
            self._kvikio.memory_register(memory)
        except RuntimeError as error:
            raise TransportUnavailableError(
                f"cuFile cannot register {memory.numel()} bytes of GPU memory: {error}",
                "make the staging ring smaller (BAR1 limits it), or set gds to off",
            ) from error

    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        if self._compat != "on" and not isinstance(memory, memoryview):
            self._kvikio.memory_deregister(memory)

    def flush(self, file: int) -> None:
        self.sync_file(file)

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name,
            "threads": len(self._threads),
            "direct": self.direct,
            "compat": self._compat,
            "kvikio": str(self._kvikio.__version__),
        }

    def move(self, run: IORun) -> list[Result]:
        file = self._files[run.file]
        call = file.pread if run.op is Op.READ else file.pwrite
        results: list[Result] = []
        # kvikio's futures keep neither the buffer nor the file alive: all of them end before this returns.
        started: list[tuple[IOPiece, object, Any]] = []
        for piece in run.pieces:
            memory = piece.memory
            buffer = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
            try:
                started.append((piece, buffer, call(buffer, piece.nbytes, piece.offset)))
            except (RuntimeError, OSError, ValueError, MemoryError) as error:
                results.append(self._failure(run, piece, error))
        for piece, _, future in started:
            try:
                moved = future.get()
                if moved > piece.nbytes:  # else it would make up for what another piece of the request lacks
                    raise RuntimeError(f"kvikio counts {moved} of {piece.nbytes} bytes")
                results.append((piece.index, moved, None))
            except (RuntimeError, OSError, ValueError, MemoryError) as error:
                results.append(self._failure(run, piece, error))
        return results

    def release(self) -> None:
        with self._open_lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._paths.clear()

    def _failure(self, run: IORun, piece: IOPiece, error: RuntimeError | OSError | ValueError | MemoryError) -> Result:
        """What kvikio's error means: it says neither errno nor how far it came, so the file's size is asked."""
        left = max(os.fstat(run.file).st_size - piece.offset, 0)
        if run.op is Op.READ and left < piece.nbytes:
            return piece.index, left, None
        return piece.index, 0, failed(run.op.value, self._path(run.file), piece.offset, error)


def _import_kvikio() -> Any:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailableError(
            f"kvikio needs the CUDA driver, for host memory too: {error}", "set transport to posix or auto"
        ) from error
    try:
        import kvikio
        import kvikio.defaults
    except (ImportError, RuntimeError, OSError) as error:
        raise TransportUnavailableError(
            f"kvikio cannot be imported: {error}",
            "install gdscache[cuda12] or gdscache[cuda13], or set transport to posix",
        ) from error
    return kvikio
