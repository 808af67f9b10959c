"""The transports `uring` and `posix`: files that the library itself reads and writes, without the interpreter."""

from __future__ import annotations

import errno
import os

import numpy as np

from gdscache.errors import IOFailedError, RefusedDiskError, ThreadStartError, TransportUnavailableError
from gdscache.native import CuFiles, move_pieces
from gdscache.storage.base import Memory, Op, Switch, failed
from gdscache.storage.files import DirectFiles


class NativeTransport(DirectFiles):
    """Files of `DirectFiles`. An engine's executor moves their bytes: with `uring` by at most `threads` threads of the
    kernel, else by as many of the library. `carry` does the same without an engine. Its own `read` and `write`, for
    subclasses, are system calls.

    Raises `TransportUnavailableError` if io_uring is refused, `IOFailedError` if the process may open no more files,
    and `ThreadStartError` if it may start no more threads.
    """

    cufile: CuFiles | None = None  # moves GPU memory

    def __init__(self, threads: int, direct_io: Switch = "auto", *, uring: bool = True, name: str = "") -> None:
        """`name`: of a subclass."""
        super().__init__(threads, direct_io)
        self.name = name or ("uring" if uring else "posix")
        self.uring = uring
        self._try_disk()

    @property
    def is_own(self) -> bool:
        """Whether it is this class itself, so that the library can move the bytes alone."""
        return type(self) is NativeTransport

    def _try_disk(self) -> None:
        """Open an executor's disk and close it, so that a refusal is reported before there are files."""
        try:
            move_pieces("ring" if self.uring else "threads", self.threads, np.empty((0, 4), np.int64), write=False)
        except RefusedDiskError as error:
            what = f"the transport {self.name} cannot be set up: {error.message}"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise IOFailedError(what, "raise ulimit -n, or free memory", error.errno) from error
            if self.uring:
                raise TransportUnavailableError(
                    error.message, "set ssd.transport to posix, which uses threads"
                ) from error
            raise ThreadStartError(
                f"{what}: {os.strerror(error.errno or 0)}", "raise ulimit -u, or lower ssd.threads"
            ) from error

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        path = self.path(file)
        if not isinstance(memory, memoryview):
            raise IOFailedError(f"{self.name} cannot move GPU memory", "use a transport that does", errno.EINVAL)
        try:
            return (os.preadv if op is Op.READ else os.pwritev)(file, [memory], offset)
        except OSError as error:
            raise failed(op.value, path, offset, error) from error
