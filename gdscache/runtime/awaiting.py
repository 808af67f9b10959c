"""Handles that are awaited in asyncio's event loops."""

from __future__ import annotations

import asyncio
import contextlib

from gdscache.errors import EngineClosedError
from gdscache.runtime.threads import Flag


class Awaits:
    """The awaits of one engine's handles, in any loops and threads."""

    def __init__(self) -> None:
        self.closed = False
        self._waiters: set[_Waiter] = set()

    async def until(self, flag: Flag, seconds: float | None) -> bool:
        """Wait until the flag is set; False after `seconds`. Raises `EngineClosedError` after `close` if the flag is
        not set."""
        if flag.is_set():
            return True
        waiter = _Waiter(self._waiters)
        self._waiters.add(waiter)
        try:
            flag.watch(waiter)
            if self.closed:  # perhaps set before the waiter existed
                waiter.event.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiter.event.wait()
        finally:
            flag.forget(waiter)
            self._waiters.discard(waiter)
        if self.closed and not flag.is_set():
            raise EngineClosedError("the engine was closed meanwhile", "await handles before the engine is closed")
        return flag.is_set()

    def close(self) -> None:
        """No handle ends any more: end all awaits."""
        self.closed = True
        for waiter in list(self._waiters):
            waiter.release()


class _Waiter:
    """One await, in place of a lock among a flag's waiters."""

    def __init__(self, others: set[_Waiter]) -> None:
        self.loop, self.event, self._others = asyncio.get_running_loop(), asyncio.Event(), others

    def release(self) -> None:
        """The flag is set. In any thread; repeated calls are fine."""
        try:
            self.loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:  # the loop was closed during the await, which never continues
            self._others.discard(self)
