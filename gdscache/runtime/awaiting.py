"""Handles that are awaited in asyncio's event loops.

An engine has a reader in each loop with awaits of its handles, from the first of these awaits to the last. The thread
in which a handle ends rings the reader's descriptor. That thread may hold the manager's lock, so it neither waits nor
runs code of the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections import deque
from typing import Any

from gdscache.errors import EngineClosedError, IOFailedError
from gdscache.runtime.threads import Flag


class EventDescriptor:
    """An eventfd that any thread may ring until it is closed; later rings never reach a reused number. Raises
    `IOFailedError` if the process may open no more."""

    def __init__(self) -> None:
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            message = f"no descriptor for handles that end: {error.strerror}"
            raise IOFailedError(message, "raise ulimit -n", error.errno) from error
        self._lock = threading.Lock()
        # Like `os.eventfd_write`, but with the interpreter's lock: it never waits, and the caller may hold the
        # manager's lock.
        self._write: Any = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = ctypes.c_int, ctypes.c_uint64

    def fileno(self) -> int:
        """Its number; -1 after `close`."""
        return self._fd

    def ring(self) -> None:
        """Make it readable. Without effect after `close`."""
        with self._lock:
            if self._fd >= 0:
                self._write(self._fd, 1)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LoopReaders:
    """The readers of one engine, by event loop. Each is used in its loop's thread, except for `close`."""

    def __init__(self) -> None:
        self.closed = False
        self._readers: dict[asyncio.AbstractEventLoop, _Reader] = {}

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        """Wait until the flag is set; False after `seconds`. Raises `EngineClosedError` after `close` if the flag is
        not set."""
        if flag.is_set():
            return True
        loop = asyncio.get_running_loop()
        reader = self._readers.get(loop)
        if reader is None:
            self._drop_closed_loops()
            reader = self._readers[loop] = _Reader(loop)
        waiter = _Waiter(reader, loop.create_future())
        reader.waiters.add(waiter)
        timer = None if seconds is None else loop.call_later(seconds, waiter.wake)
        try:
            flag.watch(waiter)
            if self.closed:  # perhaps set before the reader existed
                waiter.wake()
            await waiter.future
        finally:
            if timer is not None:
                timer.cancel()
            flag.forget(waiter)
            reader.waiters.discard(waiter)
            if not reader.waiters:
                self._readers.pop(loop, None)
                reader.close()
        if self.closed and not flag.is_set():
            raise EngineClosedError("the engine was closed meanwhile", "await handles before the engine is closed")
        return flag.is_set()

    def close(self) -> None:
        """No handle ends any more: end all awaits."""
        self.closed = True
        for reader in list(self._readers.values()):
            reader.end()
        self._drop_closed_loops()

    def _drop_closed_loops(self) -> None:
        """Drop the readers of loops that were closed during awaits, which never continue."""
        for loop in [loop for loop in list(self._readers) if loop.is_closed()]:
            reader = self._readers.pop(loop, None)
            if reader is not None:
                reader.close()


class _Waiter:
    """One await, in place of a lock among a flag's waiters."""

    __slots__ = ("_reader", "future")

    def __init__(self, reader: _Reader, future: asyncio.Future[None]) -> None:
        self._reader, self.future = reader, future

    def release(self) -> None:
        """The flag is set. In any thread; repeated calls are fine."""
        self._reader.ring(self)

    def wake(self) -> None:
        """Let the await go on. In the loop's thread."""
        if not self.future.done():
            self.future.set_result(None)


class _Reader:
    """Wakes the awaits of one engine in one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiters: set[_Waiter] = set()
        self._over: deque[_Waiter] = deque()
        self._ended = False
        self._loop = loop
        self._rung = EventDescriptor()
        loop.add_reader(self._rung.fileno(), self._read)

    def ring(self, waiter: _Waiter) -> None:
        """Wake this one. In any thread."""
        self._over.append(waiter)
        self._rung.ring()

    def end(self) -> None:
        """Wake all. In any thread."""
        self._ended = True
        self._rung.ring()

    def _read(self) -> None:
        """The descriptor is read after the wakes: an interrupt between them leaves it readable."""
        self._wake()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._rung.fileno())
        self._wake()  # rings before the read

    def _wake(self) -> None:
        while self._over:
            self._over[0].wake()
            self._over.popleft()
        for waiter in list(self.waiters) if self._ended else ():
            waiter.wake()

    def close(self) -> None:
        if self._rung.fileno() >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._rung.fileno())
        self._rung.close()
