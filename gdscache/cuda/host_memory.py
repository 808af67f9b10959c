"""Host memory for the tiers' bytes: page-aligned, of an exact size, page-locked if CUDA is available."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from typing import Literal

import numpy as np
import torch

from gdscache.cuda.driver import Driver
from gdscache.errors import CapacityError, DeviceError, EngineClosedError, PinnedMemoryError
from gdscache.runtime.allocation import allocating
from gdscache.runtime.threads import Workers
from gdscache.sizes import about

HOST_PAGE = 4096
MAX_REGISTRATION = 4 << 30

PageLocking = Literal["auto", "on", "off"]

_HOST = torch.device("cpu")
_TOUCH_BYTES = 64 << 20
_log = logging.getLogger("gdscache.cuda.host_memory")


class HostBuffer:
    """Exactly `nbytes` of anonymous, zeroed, page-aligned host memory. Every page is backed when the constructor
    returns.

    `pin="auto"` page-locks the memory if CUDA is available and goes on without when the driver refuses (one warning
    names the cause, `pinned` is False); `"on"` raises `PinnedMemoryError` instead; `"off"` leaves it pageable. The lock
    is taken on the current CUDA device and holds for all of them.

    Registrations are at most 4 GiB each. One CUDA copy must not cross from one registration into the next, so pass the
    size of a copy as `unit` (bytes, at most 4 GiB): borders then fall on multiples of it.

    `shared`: other processes may map the memory by its `descriptor`. `descriptor`: of a buffer to map, instead of new
    memory.

    Raises `CapacityError` for a size below one byte, and `NoMemoryError`, which names `setting`, if there is less
    memory.
    """

    def __init__(
        self,
        nbytes: int,
        pin: PageLocking = "auto",
        unit: int = HOST_PAGE,
        *,
        setting: str = "a host buffer",
        descriptor: int | None = None,
        shared: bool = False,
    ) -> None:
        if nbytes < 1:
            raise CapacityError(f"a host buffer of {nbytes} bytes was asked for", "give the tier at least one page")
        if not 1 <= unit <= MAX_REGISTRATION:
            raise CapacityError(f"the unit of a host buffer is {unit} bytes", f"use 1 ... {MAX_REGISTRATION}")
        with allocating(setting, nbytes, _HOST):
            self.descriptor = _memory_file(nbytes) if shared and descriptor is None else -1
            self._map: mmap.mmap | None = _map(nbytes, self.descriptor if descriptor is None else descriptor)
        self.nbytes = nbytes
        self._step = MAX_REGISTRATION // unit * unit  # bytes of a registration
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        _touch(self._map)
        # The tensor gets its bytes through a view that only it can release: torch keeps the object alive but not its
        # buffer export, and without an export mmap would unmap the memory below a living tensor.
        self._tensor: torch.Tensor | None = torch.frombuffer(memoryview(self._map), dtype=torch.uint8)
        self._view: memoryview | None = memoryview(self._map)
        self.address = self._tensor.data_ptr()
        self._registered: list[int] = []
        if pin != "off":
            cause = self._register()
            if cause and pin == "on":
                self.close()
                raise PinnedMemoryError(
                    f"{about(nbytes)} of host memory cannot be page-locked: {cause}",
                    "set pin to auto or off, make the pool smaller, or raise the locked-memory limit (ulimit -l)",
                )
            if cause and torch.cuda.is_available():
                _log.warning("%s of host memory stay pageable: %s", about(nbytes), cause)

    @property
    def pinned(self) -> bool:
        return bool(self._registered)

    @property
    def registration_bytes(self) -> int:
        """Bytes of each page-locked registration (the last may have fewer); 0 for one registration or none."""
        return self._step if len(self._registered) > 1 else 0

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a uint8 tensor of shape (nbytes,), sharing the memory."""
        if self._tensor is None:
            raise _closed()
        return self._tensor

    @property
    def view(self) -> memoryview:
        """The bytes as a writable memoryview, sharing the memory."""
        if self._view is None:
            raise _closed()
        return self._view

    def close(self) -> None:
        """Release the page-lock and the memory; repeated calls are fine.

        Views and tensors of other owners stay valid: the memory goes with the last of them. The caller ensures that no
        CUDA copy and no I/O is in flight.
        """
        self._unregister()
        self._tensor = self._view = None
        region, self._map = self._map, None
        if region is not None and self.descriptor >= 0:
            os.close(self.descriptor)
        if region is not None:
            try:
                region.close()
            except BufferError:
                _log.debug("%d bytes of host memory are still in use; they go with the last view", self.nbytes)

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _register(self) -> str:
        """Page-lock all of it or nothing. Returns the cause of a refusal, or an empty string.

        By the driver, not by torch's runtime: torch's next operation would raise a refusal of the runtime again.
        """
        if not torch.cuda.is_available():
            return "CUDA is not available"
        driver = current_driver()
        for offset in range(0, self.nbytes, self._step):
            size = min(self._step, self.nbytes - offset)
            try:
                driver.page_lock(self.address + offset, size)
            except DeviceError as error:
                self._unregister()
                return f"{error.message}, for {size} bytes at offset {offset}"
            self._registered.append(self.address + offset)
        return ""

    def _unregister(self) -> None:
        if not self._registered:
            return
        driver = current_driver()
        while self._registered:
            try:
                driver.page_unlock(self._registered.pop())
            except DeviceError as error:
                _log.warning("memory stays page-locked: %s", error.message)


def _map(nbytes: int, descriptor: int) -> mmap.mmap:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(descriptor, nbytes, flags=private if descriptor < 0 else mmap.MAP_SHARED)
    except OSError as error:
        raise MemoryError(error.strerror) from error


def _memory_file(nbytes: int) -> int:
    descriptor = os.memfd_create("gdscache", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(error.strerror) from error
    return descriptor


def _touch(region: mmap.mmap) -> None:
    """Have the kernel back every page now, with several threads: a first touch in the serving path costs far more."""
    pages = np.frombuffer(memoryview(region), np.uint8)[::HOST_PAGE]
    step = _TOUCH_BYTES // HOST_PAGE
    chunks = [pages[at : at + step] for at in range(0, len(pages), step)]
    if len(chunks) == 1:
        chunks[0].fill(0)
        return
    threads = Workers(min(8, os.cpu_count() or 1, len(chunks)), "gdscache-touch")
    for chunk in chunks:
        threads.submit(functools.partial(chunk.fill, 0))
    threads.shutdown()


def current_driver() -> Driver:
    return Driver(torch.device("cuda", torch.cuda.current_device()))


def _closed() -> EngineClosedError:
    return EngineClosedError("the host buffer was closed", "keep the owner open while its memory is used")
