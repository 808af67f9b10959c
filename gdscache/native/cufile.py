"""cuFile by csrc/host (cufile_files.h): which files and which memory of a GPU it knows, for disks and executors."""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol

from gdscache.errors import NativeCallError
from gdscache.native.library import library


class GpuDriver(Protocol):
    """A CUDA driver, and the primary context of the device whose memory it is. See `gdscache.cuda.driver.Driver`."""

    library: str

    @property
    def context(self) -> int: ...


class CuFiles:
    """Opens cuFile's driver, which may never answer, no more than `add_file` and `add_memory`. Thread-safe.

    `path`: of libcufile; `log_folder`: where its log goes, None leaves that to its configuration; `batched`: bytes of
    what goes through batches at most, below 0 as measured (cufile_disk.h).
    Raises `NativeCallError` where a library refuses, in its words, as the other calls do.
    """

    def __init__(self, gpu: GpuDriver, path: str, log_folder: str | None = None, batched: int = -1) -> None:
        self._library = library()
        self._lock = threading.Lock()
        self._gpu = gpu
        handle = ctypes.c_void_p()
        folder = None if log_folder is None else log_folder.encode()
        self._checked(
            self._library.cufile_open(
                gpu.library.encode(), gpu.context, path.encode(), folder, batched, ctypes.addressof(handle)
            )
        )
        self._handle: int | None = handle.value

    @property
    def handle(self) -> int:
        """What the library knows it by. Raises `NativeCallError` behind `close`."""
        if self._handle is None:
            raise NativeCallError("cuFile was closed", "use it before close")
        return self._handle

    def add_file(self, file: int) -> None:
        """A file by its descriptor, which stays open until `remove_file`."""
        self._checked(self._library.cufile_add_file(self.handle, file))

    def remove_file(self, file: int) -> None:
        self._checked(self._library.cufile_remove_file(self.handle, file))

    def add_memory(self, address: int, nbytes: int) -> None:
        self._checked(self._library.cufile_add_memory(self.handle, address, nbytes))

    def remove_memory(self, address: int) -> None:
        self._checked(self._library.cufile_remove_memory(self.handle, address))

    def run_bare(self, file: int, address: int, nbytes: int, piece_bytes: int, threads: int, *, write: bool) -> float:
        """Seconds of a loop over the first `nbytes` of a file and as much memory, both known: see bare_cufile.h."""
        seconds = ctypes.c_double()
        self._checked(
            self._library.cufile_bare(
                self.handle, file, write, nbytes, piece_bytes, threads, address, ctypes.addressof(seconds)
            )
        )
        return seconds.value

    def close(self) -> None:
        """Nobody uses it any more but disks and executors that are open; again is fine."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            self._library.cufile_close(handle)

    def _checked(self, answer: int) -> None:
        if answer < 0:
            raise NativeCallError(self._library.cufile_why().decode(), "see docs/gds.md", -answer)
