"""The transports `uring` and `posix`: files that the library itself reads and writes, past the interpreter."""

from __future__ import annotations

import errno
import os

from gdscache.errors import IOFailedError, RefusedDiskError, ThreadStartError, TransportUnavailableError
from gdscache.native import CuFiles, Disk
from gdscache.storage.base import Memory, Op, Switch, failed, refused
from gdscache.storage.files import DirectFiles


class NativeTransport(DirectFiles):
    """Files as `DirectFiles` opens them. An engine's executor moves their bytes: with `uring` by `threads` threads of
    the kernel at most, else by as many of the library. So does `carry`, without an engine. Its own `read` and `write`
    are calls of the system, for transports that are made of it.

    Raises `TransportUnavailableError` where io_uring is refused, `IOFailedError` when the process may open no more
    files, and `ThreadStartError` when it may start no more threads.
    """

    cufile: CuFiles | None = None  # what GPU memory is moved by

    def __init__(self, threads: int, direct_io: Switch = "auto", *, uring: bool = True, name: str = "") -> None:
        """`name`: of a transport that is made of this one."""
        super().__init__(threads, direct_io)
        self.name = name or ("uring" if uring else "posix")
        self.uring = uring
        self._try_disk()

    @property
    def is_own(self) -> bool:
        """Whether it does no more than this class says, so that the library can do it alone."""
        return type(self) is NativeTransport

    def _try_disk(self) -> None:
        """Whether the executor will get its disk: that is said before there are files."""
        try:
            Disk("ring" if self.uring else "threads", self.threads, self.threads).close()
        except RefusedDiskError as error:
            what = f"the transport {self.name} cannot be set up: {error.message}"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise IOFailedError(what, "raise ulimit -n, or free memory", error.errno) from error
            if self.uring:
                raise TransportUnavailableError(error.message, "set transport to posix, which uses threads") from error
            raise ThreadStartError(
                f"{what}: {os.strerror(error.errno or 0)}", "raise ulimit -u, or lower ssd.threads"
            ) from error

    def _move(self, op: Op, file: int, offset: int, memory: Memory) -> int:
        path = self.path(file)
        if not isinstance(memory, memoryview):
            raise refused(f"{self.name} cannot move GPU memory", "use a transport that does", errno.EINVAL)
        try:
            return (os.preadv if op is Op.READ else os.pwritev)(file, [memory], offset)
        except OSError as error:
            raise failed(op.value, path, offset, error) from error
