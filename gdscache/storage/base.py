"""What a transport promises: bytes between files and memory, submitted in batches, answered request by request.

A transport is not a tier: the same files work under each. Requests are multiples of 4,096 bytes at multiples of 4,096.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import enum
import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from gdscache.errors import DeadlineError, IOFailedError, ShortIOError, StorageError
from gdscache.pages.layout import EXTENT_ALIGNMENT

if TYPE_CHECKING:
    import torch


Switch = Literal["auto", "on", "off"]
PROBE_PREFIX = ".gdscache-probe-"  # of files that exist while a transport tries what the directory can do


class Op(enum.Enum):
    READ = "read"
    WRITE = "write"


@dataclasses.dataclass(frozen=True, slots=True)
class IORequest:
    """One piece of a file and the memory it goes to or comes from.

    `file` is a handle from `Transport.open`, `offset` is in bytes. `memory` is exactly the bytes to move: a host
    memoryview, or a flat contiguous uint8 CUDA tensor where the transport has `"cuda"` in `memory_kinds`. The transport
    holds on to the memory until the request has ended, whatever becomes of the caller.

    Requests that overlap, within a batch or across batches, run in no particular order. CUDA work on the memory must
    have ended before the submit, since no transport waits for the caller's streams.
    """

    file: int
    offset: int
    memory: memoryview | torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """Where a request lies, for its messages: what a `Submission` keeps of it, so that it keeps no memory alive."""

    path: str
    offset: int
    nbytes: int


class Submission:
    """A batch in flight. Thread-safe; several threads may wait for the same batch.

    Made by a transport: one span a request, and the number of pieces that each request is moved in. The transport calls
    `finish` once a piece. A request ends with its last piece, when nothing touches its memory any more, and only then
    is it reported: with its first error, or with `ShortIOError` if its pieces moved fewer bytes than asked for.
    """

    def __init__(
        self, op: Op, spans: Sequence[FileRange], pieces: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """`sizes`: the bytes of the requests, where `spans` would have to be asked for each."""
        self._op = op
        self._spans = spans
        self._sizes = [span.nbytes for span in spans] if sizes is None else sizes
        self._left = list(pieces)
        self._moved = [0] * len(spans)
        self._errors: list[StorageError | None] = [None] * len(spans)
        self._failed = False
        self._ended: list[int] = []
        self._wanted: list[int] = []  # how many ended requests waiters wait for; none is woken before
        self._callbacks: tuple[Callable[[int], None], ...] = ()
        self._changed = threading.Condition(threading.Lock())

    def finish(self, results: Sequence[tuple[int, int, StorageError | None]]) -> None:
        """For transports: pieces that ended, each as (index of the request, bytes moved, error or None)."""
        over: list[int] = []
        with self._changed:
            for index, moved, error in results:
                self._moved[index] += moved
                self._errors[index] = self._errors[index] or error
                self._left[index] -= 1
                if self._left[index] == 0:
                    if self._errors[index] is None and self._moved[index] != self._sizes[index]:
                        self._errors[index] = self._short(index)
                    self._failed = self._failed or self._errors[index] is not None
                    over.append(index)
            callbacks = self._end(over)
        _call(callbacks, over)

    def finish_whole(self, indices: Sequence[int]) -> None:
        """For transports: `finish` for requests of one piece each that moved all their bytes, many at a time."""
        with self._changed:
            callbacks = self._end(indices)
        _call(callbacks, indices)

    def _end(self, indices: Sequence[int]) -> tuple[Callable[[int], None], ...]:
        """These have ended; who is to be told when the lock is free again."""
        self._ended.extend(indices)
        if self._wanted and min(self._wanted) <= len(self._ended):
            self._changed.notify_all()
        return self._callbacks

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call `callback(index)` once for each request, when it has ended: for those that have, now and in this thread;
        for the others in the transport's, so it must be quick, must not raise, and must not wait for a transport."""
        with self._changed:
            self._callbacks += (callback,)
            ended = list(self._ended)
        _call((callback,), ended)

    def completions(
        self, deadline: float | None = None, at_least: int = 1
    ) -> Iterator[tuple[int, StorageError | None]]:
        """`(index of the request, its error or None)`, about in the order of their ends, each once an iterator.

        It waits for `at_least` further ends at a time, or for all that are left: to be woken costs time.

        Raises `DeadlineError` when nothing has ended by `deadline` (`time.monotonic()` seconds; None waits for ever)
        although requests are left. They go on, and keep their memory.
        """
        seen = 0
        while seen < len(self._spans):
            with self._changed:
                self._wait_for(min(seen + at_least, len(self._spans)), deadline)
            good, bad, seen = self.since(seen)
            for index in good:
                yield index, None
            yield from bad

    def since(self, seen: int) -> tuple[list[int], list[tuple[int, StorageError]], int]:
        """The requests that have ended since `seen` of them had: the good, the others with their errors, and how many
        have ended now."""
        with self._changed:
            ended, failed = self._ended[seen:], self._failed
        if not failed:
            return ended, [], seen + len(ended)
        good = [index for index in ended if self._errors[index] is None]
        return good, [(i, e) for i in ended if (e := self._errors[i]) is not None], seen + len(ended)

    def wait(self, deadline: float | None = None) -> list[StorageError | None]:
        """Wait for all requests; the error or None of each, in their order. Raises `DeadlineError` as above."""
        with self._changed:
            self._wait_for(len(self._spans), deadline)
            return list(self._errors)

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        with self._changed:
            return len(self._spans) - len(self._ended)

    def _wait_for(self, count: int, deadline: float | None) -> None:
        while len(self._ended) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineError(
                    f"{len(self._spans) - len(self._ended)} of {len(self._spans)} {self._op.value}s have not ended",
                    "the device is slow or hangs; what is left keeps its memory until it ends",
                )
            self._wanted.append(count)
            self._changed.wait(left)
            self._wanted.remove(count)

    def _short(self, index: int) -> ShortIOError:
        span = self._spans[index]
        moved = f"{self._moved[index]} of {span.nbytes} bytes"
        return ShortIOError(
            f"{self._op.value} moved {moved} at offset {span.offset} of {span.path}",
            "the file was truncated" if self._op is Op.READ else "the file system is full or the file is limited",
        )


def _call(callbacks: Iterable[Callable[[int], None]], indices: Iterable[int]) -> None:
    for index, callback in itertools.product(indices, callbacks):
        callback(index)


class Transport(abc.ABC):
    """Moves bytes between preallocated files and memory.

    Thread-safe, except that `close` runs last. A subclass named in the config (`package.module:Class`) is constructed
    with the keyword arguments `threads` (int) and `direct_io` (`auto`, `on` or `off`).
    """

    name: str
    """Short name for logs and stats."""
    memory_kinds: frozenset[str]
    """What `IORequest.memory` may be: a subset of {"host", "cuda"}."""
    merge_bytes: int = 4 << 20
    """Pages that lie side by side, in the file and in memory, come as one request of up to so many bytes; 0: never."""

    @property
    @abc.abstractmethod
    def direct(self) -> bool:
        """Whether all open files bypass the page cache (O_DIRECT or GDS); False while none is open."""

    @abc.abstractmethod
    def open(self, path: Path) -> int:
        """Open an existing, preallocated file for reading and writing; a handle, valid until `close`.

        Raises `IOFailedError` (`errno` kept), and `TransportUnavailableError` when direct I/O is `on` and refused.
        """

    @abc.abstractmethod
    def register(self, memory: memoryview | torch.Tensor) -> None:
        """Announce a long-lived buffer, once, before requests on it; may do nothing."""

    @abc.abstractmethod
    def deregister(self, memory: memoryview | torch.Tensor) -> None:
        """Take `register` back; nothing may be in flight on the buffer."""

    @abc.abstractmethod
    def submit(self, op: Op, requests: Sequence[IORequest]) -> Submission:
        """Queue a batch; never waits for I/O. Reads go before queued writes, which keep a guaranteed share.

        A request that cannot be done (misaligned, unknown handle, wrong memory) ends with its own error, and harms no
        other. Raises `EngineClosedError` after `close`.
        """

    @abc.abstractmethod
    def flush(self, file: int) -> None:
        """Make ended writes of the file survive a power cut (fdatasync). Raises `IOFailedError`."""

    @abc.abstractmethod
    def describe(self) -> dict[str, object]:
        """What runs here, as plain data, for stats and `gdscache doctor`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for what was submitted, then give files and threads back; again is fine.

        The engine does not call it while I/O hangs, but when the last of it has ended (see `Submission.on_end`).
        """

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def refused(message: str, hint: str, code: int = errno.EINVAL) -> IOFailedError:
    """The error of a request that was not tried, with `errno` set as the system would."""
    return IOFailedError(message, hint, code)


def failed(op: str, path: str, offset: int, error: OSError | RuntimeError | ValueError | MemoryError) -> IOFailedError:
    """The error of a request that the system or a library refused."""
    code = error.errno if isinstance(error, OSError) else None
    return IOFailedError(
        f"{op} at offset {offset} of {path} failed: {error}", "see the system log for the device", code
    )


def check_memory(
    op: Op, offset: int, memory: memoryview | torch.Tensor, kinds: frozenset[str]
) -> memoryview | torch.Tensor:
    """The bytes of a request, once they are known to be fit for I/O; a host view is returned as a view of our own.

    Raises `IOFailedError` (EINVAL) for an offset, length or address that is no multiple of 4,096, for memory of a kind
    that the transport cannot move, not contiguous, or read-only where it is to be written.
    """
    if isinstance(memory, memoryview):
        try:
            memory = memory.cast("B")
        except (TypeError, ValueError) as error:
            raise refused(f"host memory is no run of bytes: {error}", "pass a contiguous view of bytes") from None
        if memory.readonly and op is Op.READ:
            raise refused("host memory is read-only", "pass a writable view")
        kind, nbytes = "host", memory.nbytes
        address = address_of(memory) if nbytes else 0
    else:
        if str(memory.dtype) != "torch.uint8" or memory.dim() != 1 or not memory.is_contiguous():
            shape = tuple(memory.shape)
            raise refused(
                f"a tensor of {memory.dtype}, shape {shape}, is no run of bytes", "pass flat contiguous uint8"
            )
        kind, nbytes, address = memory.device.type, memory.numel(), memory.data_ptr()
        if kind == "cpu":
            raise refused("host memory was given as a tensor", "pass a memoryview (HostBuffer.view)")
    if kind not in kinds:
        raise refused(f"this transport cannot move {kind} memory", f"it moves {', '.join(sorted(kinds))} memory")
    if nbytes < 1 or offset < 0 or (offset | nbytes | address) % EXTENT_ALIGNMENT:
        raise refused(
            f"{op.value} of {nbytes} bytes at offset {offset}, memory at {address:#x}: not on {EXTENT_ALIGNMENT}",
            f"offset, length and address must be multiples of {EXTENT_ALIGNMENT}",
        )
    return memory


def host_memory(memory: memoryview | torch.Tensor) -> memoryview:
    """The memory of a request that `check_memory` let through for a transport of host memory only."""
    assert isinstance(memory, memoryview)  # check_memory let nothing else through
    return memory


def address_of(memory: memoryview) -> int:
    """Where a contiguous view of bytes begins."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(
        ctypes.c_char.from_buffer(memory)
    )  # ten times as fast as numpy, but for writable memory only
