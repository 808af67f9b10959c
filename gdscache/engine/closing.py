"""The end of an engine, once and in order: by `close`, by the last reference, or by the end of the process.

Nothing here refers to the engine itself, so that an engine without references is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import parent_process, util
from typing import TYPE_CHECKING, Any

from gdscache.engine.opening import Parts
from gdscache.errors import DeadlineError
from gdscache.runtime.calls import Calls
from gdscache.runtime.threads import Flag

if TYPE_CHECKING:
    from gdscache.config import MetricsConfig
    from gdscache.engine.engine import CacheEngine
    from gdscache.engine.hybrid import HybridEngine
    from gdscache.metrics.collector import MetricsServer

EXIT_S = 30.0  # seconds that a process which ends, or drops an engine, waits for accepted stores
_LEAVE_S = 0.5  # seconds for threads to leave their waits in a process that ends
_log = logging.getLogger("gdscache")


class EngineClosing:
    def __init__(self, parts: Parts, calls: Calls, deadline: float) -> None:
        self.begun = False
        self._patience = deadline + EXIT_S  # for the end of an engine after an interrupted call
        self._parts = parts
        self._calls = calls
        self.server: MetricsServer | None = None
        self._turn = threading.Lock()
        self._over = Flag()

    def close(self, *, drain: bool) -> None:
        """Close, or wait for the thread that closes; returns when all is freed.

        Locks of an interrupted call were released when its `with` blocks ended. Two that a debugger's interrupt may
        have left to this thread are released here; in case another is left, the wait has a limit.
        """
        if self._calls.here:
            self.run(drain)
        elif not self._over.is_set():
            self._calls.post(functools.partial(self.run, drain and not self._calls.broken_by))
        if self._calls.inside:
            return
        for lock in (self._parts.loader.order, self._parts.manager.lock) if self._calls.broken_by else ():
            while lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
        if not self._calls.join(self._patience if self._calls.broken_by else None):
            raise DeadlineError(
                f"an engine is not closed after {self._patience:g} s: a call of it was interrupted",
                "end the process, which frees the directory",
            )

    def run(self, drain: bool) -> None:
        """The work of `close`, in the thread for calls, which is never interrupted."""
        with self._turn:
            if self._over.is_set():
                return
            self.begun = True
            with contextlib.ExitStack() as last_to_first:
                last_to_first.callback(self._calls.end)
                last_to_first.callback(self._calls.end_awaits)
                last_to_first.callback(self._over.set)
                last_to_first.callback(self._parts.close, drain=drain)
                if self.server is not None:
                    last_to_first.callback(self.server.close)

    def forgotten(self, ending: bool = False) -> None:
        """The engine has no references any more, or the process is `ending`: finish accepted stores, within `EXIT_S`.

        May run in any thread, at any point. It does not wait if the wait would be for its own thread.
        """
        if self._calls.forked or (self.begun and not self._calls.broken_by):
            return
        self._calls.post(functools.partial(self.run, True))  # first: a warning may be an error
        # The main thread has ended when Python calls this at the exit.
        ending = ending or not threading.main_thread().is_alive()
        if not (self.begun or ending):
            warnings.warn("an engine was dropped without close(): it is closed now", ResourceWarning, stacklevel=2)
        ours = threading.current_thread().name.startswith("gdscache-")
        if not ours and not self._parts.manager.lock._is_owned() and not self._calls.join(EXIT_S):  # type: ignore[attr-defined]
            _log.error("stores are still on their way after %g s: they are lost when the process ends", EXIT_S)
            if ending:  # a thread that returns from a native wait to an interpreter that has ended aborts the process
                self._parts.executor.stop()
                self._calls.join(_LEAVE_S)


def settled(
    engine: CacheEngine | HybridEngine, at: MetricsConfig | None, pools: Sequence[Parts]
) -> MetricsServer | None:
    """The last steps of opening: the server of an engine's metrics, if the configuration has one, and then what cannot
    be undone. Where one fails, the engine is closed."""
    server = None
    with contextlib.ExitStack() as undo:
        undo.callback(engine.close, drain=False)
        if at is not None:
            from gdscache.metrics.collector import MetricsServer

            server = MetricsServer(engine, at.host, at.port)
            undo.callback(server.close)
        for parts in pools:
            parts.settle()
        undo.pop_all()
    return server


def at_exit_of_child(action: Callable[[], None]) -> Callable[[], Any]:
    """Run `action` at the end of a process that `multiprocessing` started, which skips `atexit`. Returns a function
    that cancels this. Other processes need nothing."""
    if parent_process() is None:
        return lambda: None
    return util.Finalize(None, action, exitpriority=0).cancel
