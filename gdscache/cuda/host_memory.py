"""Host memory for the tiers' bytes: page-aligned, of an exact size, page-locked if CUDA is available; and how much
memory there is, with the error that names the setting which asked for more."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gdscache.cuda.driver import Driver
from gdscache.errors import CapacityError, DeviceError, EngineClosedError, NoMemoryError, PinnedMemoryError
from gdscache.runtime.files import text_of
from gdscache.runtime.threads import Workers
from gdscache.sizes import about

_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def allocating(setting: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """A block that allocates `nbytes` of `device`. `setting`: their key or purpose.

    Raises `NoMemoryError`. Host memory is checked before the allocation, since the kernel promises memory that it does
    not have, and kills the process that uses it.
    """
    if device.type == "cpu":
        there = host_bytes()
        if there is not None and nbytes > there:
            raise _refused(setting, nbytes, device)
    try:
        yield
    except (MemoryError, OverflowError, torch.cuda.OutOfMemoryError) as error:
        raise _refused(setting, nbytes, device, str(error)) from error
    except DeviceError as error:
        if "OUT_OF_MEMORY" not in error.message:
            raise
        raise _refused(setting, nbytes, device, error.message) from error
    except RuntimeError as error:  # raised by torch's allocator for host memory
        if "alloc" not in str(error):
            raise
        raise _refused(setting, nbytes, device, str(error)) from error


def host_bytes(groups: Iterable[Path] | None = None) -> int | None:
    """Bytes of host memory that this process may still take: the machine's, limited by its cgroups.

    `groups`: the directories of its memory cgroups; by default those visible from here. None if the system does not
    tell.
    """
    found = [_machine_bytes(), *map(_left, _groups() if groups is None else groups)]
    known = [nbytes for nbytes in found if nbytes is not None]
    return min(known, default=None)


def _refused(setting: str, nbytes: int, device: torch.device, cause: str = "") -> NoMemoryError:
    there, where = host_bytes(), "host memory"
    if device.type == "cuda":
        there, where = torch.cuda.mem_get_info(device)[0], f"memory on {device}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    message = f"{setting} asks for {nbytes:,} bytes ({about(nbytes)}) of {where}"
    message += "" if there is None else f", {there:,} bytes ({about(there)}) are available"
    if device.type == "cpu" and limit != resource.RLIM_INFINITY:
        message += f", and the process may have {limit:,} in all (ulimit -v)"
    return NoMemoryError(message + (f": {cause}" if cause else ""), f"lower {setting}, or free memory")


def _machine_bytes() -> int | None:
    """The bytes that the kernel can give without swapping, and those it can swap."""
    lines = text_of(Path("/proc/meminfo")).splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemAvailable"] + kib.get("SwapFree", 0)) << 10 if "MemAvailable" in kib else None


def _groups() -> Iterator[Path]:
    """The directories of this process's memory cgroups, as far as they are visible."""
    for line in text_of(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root = _CGROUPS if number == "0" else _CGROUPS / "memory"
            group = root / path.lstrip("/")
            while group != root and root in group.parents:
                yield group
                group = group.parent
            yield root


def _left(group: Path) -> int | None:
    """The rest of a cgroup's limit; file pages count as free, since the kernel drops them first."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if most.isdigit():
            files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            return max(0, int(most) - used + files)
    return None


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
                    "raise the limit of locked memory: ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
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
