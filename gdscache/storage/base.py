"""The contract of transports: blocking calls that move bytes between files and memory, a piece a call.

A transport is not a tier: the same files work under each. The library's reads and writes lie at multiples of 4,096.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import enum
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from gdscache.errors import InvalidValueError, IOFailedError

if TYPE_CHECKING:
    import torch

    from gdscache.native import CuFiles
    from gdscache.pages.checksum import Checksums


Switch = Literal["auto", "on", "off"]
GDS = ("cufile", "kvikio", "nixl")  # transports that may use GPUDirect Storage
PROBE_PREFIX = ".gdscache-probe-"  # of files that exist while a transport probes a directory


class Op(enum.Enum):
    READ = "read"
    WRITE = "write"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`nbytes` of a GPU, by their address and the index of its device. The maker keeps the memory alive."""

    address: int
    nbytes: int
    device: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False), "strides": None}


Memory = memoryview | DeviceMemory
"""Exactly the bytes to move. A view of the host's memory is of plain bytes, and read-only for writes."""


class Transport(abc.ABC):
    """Moves bytes between preallocated files and memory. A call returns when its bytes have moved.

    The library does order, merging, limits, deadlines and the retry of each page behind an error. Its threads call
    `read` and `write`, `threads` of them at a time. They hold the interpreter's lock for the call, so code that waits
    for a device should release it meanwhile. Thread-safe, except that `close` runs last.

    A subclass named in the config (`package.module:Class`) is constructed with the keyword arguments `threads` (int)
    and `direct_io` (`auto`, `on` or `off`).
    """

    name: str
    """Short name for logs and stats."""
    memory_kinds: frozenset[str] = frozenset({"host"})
    """The memory that it moves: a subset of {"host", "cuda"}."""
    merges: bool = True
    """Whether adjacent pages, in the file and in memory, may come as one call."""
    call_bytes: int = 0
    """Most bytes of a call, for transports that want few: neighbours go together, and no page is cut, however large. 0:
    neighbours are spread over the threads, and a page larger than 4 MiB is several calls."""

    def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
        if not 1 <= threads <= 1024:
            raise InvalidValueError(f"a transport with {threads} threads", "set threads from 1 to 1024")
        if direct_io not in ("auto", "on", "off"):
            raise InvalidValueError(f"direct_io is {direct_io!r}", "set direct_io to auto, on or off")
        self.threads = threads
        self.direct_io = direct_io

    @property
    @abc.abstractmethod
    def direct(self) -> bool:
        """Whether all open files bypass the page cache (O_DIRECT or GDS); False while none is open."""

    @abc.abstractmethod
    def open(self, path: Path) -> int:
        """Open an existing, preallocated file for reading and writing. Returns a handle of at least 0, valid until
        `close`.

        Raises `IOFailedError` (`errno` kept), and `TransportUnavailableError` if direct I/O is `on` and refused.
        """

    @abc.abstractmethod
    def read(self, file: int, offset: int, memory: Memory) -> int:
        """Fill memory from a file's byte `offset` on. Returns the number of bytes read, fewer than asked for only at
        the file's end.

        The memory is the library's again when the call returns or raises: nothing may touch it any more, and a view is
        released. CUDA work on it has ended before, and no stream waits for later work. Raises `OSError` or
        `IOFailedError` with an `errno`; `PageGoneError` for a page that is gone, and `PageBytesError` for bytes that
        are not the stored ones: both pages are dropped. Any other exception is logged, and counts as EIO. After an
        error of a call for several pages, each page gets a call of its own.
        """

    @abc.abstractmethod
    def write(self, file: int, offset: int, memory: Memory) -> int:
        """The inverse; fewer bytes than asked for only if the file takes no more."""

    @abc.abstractmethod
    def flush(self, file: int) -> None:
        """Make ended writes of the file survive a power cut (fdatasync). Raises `IOFailedError`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files. Nothing is under way; repeated calls are fine."""

    def register(self, memory: memoryview | torch.Tensor) -> None:  # noqa: B027 - most have nothing to do
        """Announce a long-lived buffer, once, before calls with parts of it."""

    def deregister(self, memory: memoryview | torch.Tensor) -> None:  # noqa: B027
        """Undo `register`; no call is under way on the buffer."""

    def describe(self) -> dict[str, object]:
        """The transport's settings as plain data, for stats and `gdscache doctor`."""
        return {"name": self.name, "threads": self.threads, "direct": self.direct}

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Files that the library reads and writes. Slots are striped over `files`, `stretch` slots at a time.

    `threads`: of the kernel with `uring`, else of the library. `cufile`: reads and writes go by cuFile, which reaches a
    GPU's memory. `transport`: reads and writes call this, with its handles for `files`. Both None: system calls, which
    reach only host memory. `sums`: uint64 (slots, layers), for a transport whose checksums come with the bytes: its
    `read` verifies them, and writes the checksums of each slot's bytes here before it returns.
    """

    files: Sequence[int]
    stretch: int
    threads: int
    uring: bool = False
    cufile: CuFiles | None = None
    transport: Transport | None = None
    sums: Checksums | None = None

    @property
    def means(self) -> tuple[object, object]:
        """Files with equal means share one disk of an executor."""
        return self.cufile, self.transport


class Files(Protocol):
    """The files of a tier."""

    def hand_over(self) -> Descriptors: ...


class EitherWay(Transport):
    """A transport with one method for reads and writes."""

    def read(self, file: int, offset: int, memory: Memory) -> int:
        return self._move(Op.READ, file, offset, memory)

    def write(self, file: int, offset: int, memory: Memory) -> int:
        return self._move(Op.WRITE, file, offset, memory)

    @abc.abstractmethod
    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int: ...


def failed(op: str, path: str, offset: int, error: OSError | RuntimeError | ValueError | MemoryError) -> IOFailedError:
    """The error of a call that the system or a library refused."""
    code = error.errno if isinstance(error, OSError) else None
    return IOFailedError(
        f"{op} at offset {offset} of {path} failed: {error}", "see the system log for the device", code
    )


def memory_of(tensor: torch.Tensor) -> DeviceMemory:
    return DeviceMemory(tensor.data_ptr(), tensor.numel(), tensor.device.index or 0)


def part(memory: Memory, start: int, stop: int) -> Memory:
    if isinstance(memory, memoryview):
        return memory[start:stop]
    return DeviceMemory(memory.address + start, stop - start, memory.device)


def address_of(memory: Memory) -> int:
    """The address of memory of a GPU, or of a contiguous view of bytes."""
    if isinstance(memory, DeviceMemory):
        return memory.address
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # ten times as fast as numpy, for writable memory only


def named_class(target: str, base: type, refuse: Callable[[str], Exception]) -> Any:
    """The subclass of `base` that `target` names. `refuse(cause)`: the error to raise if there is none, or it is
    abstract."""
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise refuse(f"{module_name} cannot be imported: {error}") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise refuse(f"{class_name!r} of {module_name} is no subclass of {base.__name__}")
    if inspect.isabstract(found):
        raise refuse(f"it lacks {', '.join(sorted(getattr(found, '__abstractmethods__', ())))}")
    return found


def named_object(target: str, base: type, refuse: Callable[[str], Exception], *given: Any, **keywords: Any) -> Any:
    """A new object of a `named_class`. `refuse(cause)`: the error to raise also if the class does not take the
    arguments."""
    found = named_class(target, base, refuse)
    try:
        inspect.signature(found).bind(*given, **keywords)
    except TypeError as error:
        takes = ", ".join(
            one.name for one in inspect.signature(found).parameters.values() if one.kind is one.KEYWORD_ONLY
        )
        cause = f"it does not take the keywords {', '.join(sorted(keywords))}: {error}"
        raise refuse(f"{cause}. It takes {takes}" if takes else cause) from error
    return found(*given, **keywords)
