"""One engine for the objects that vLLM makes of a connector.

In one process vLLM makes the worker's object first, which opens the engine when it learns of the KV cache's tensors;
the scheduler's joins it by the `engine_id` that both were given. The engine is closed when the last of them leaves.
Where workers are other processes, the scheduler's object alone has the session (`ranks.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Set
from typing import Protocol

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import InterfaceUnsupportedError
from gdscache.integrations.fetching import PinningCache


class Storing(Protocol):
    """Who stores: `Stores`, or `Lead`."""

    def settle(self, blocks: Set[int]) -> None: ...

    def reads(self) -> Set[int]: ...

    def begin_anew(self, salt: str) -> None: ...


class VllmSession(PinningCache):
    """An engine over vLLM's tensors, and who uses it. `hybrid`: it, for a model with groups of layers."""

    def __init__(self, engine: CacheEngine | HybridEngine, pin_seconds: float) -> None:
        self.hybrid = engine if isinstance(engine, HybridEngine) else None
        first, *others = [engine] if isinstance(engine, CacheEngine) else engine.engines
        super().__init__(first, pin_seconds, *others)
        self._users = 0
        self._stores: Storing | None = None
        self._busy: Callable[[], bool] = bool

    def attend(self, stores: Storing, busy: Callable[[], bool]) -> None:
        """Who stores says so, and whether loads between steps are under way."""
        self._stores, self._busy = stores, busy

    def settle(self, blocks: Set[int]) -> None:
        """Wait until no store reads these blocks: somebody is to write to them.

        The scheduler calls it before anything of a step reaches the worker. All stores of earlier steps have begun by
        then, since both are one thread.
        """
        if self._stores is not None:
            self._stores.settle(blocks)

    def reads(self) -> Set[int]:
        """Blocks that stores of the steps so far read, or will."""
        return frozenset[int]() if self._stores is None else self._stores.reads()

    def weights_changed(self) -> None:
        """Drop every page of this model, and store nothing of what waits to be stored.

        From now on pages have another salt: they are of weights that no file has, as far as anybody knows, so that an
        engine that begins with the files' weights again must not find them.
        """
        for engine in self.engines:
            engine.invalidate(*engine.namespaces())
        self.renew_salt()
        if self._stores is not None:
            self._stores.begin_anew(self.salt)

    def observe_prefill(self, tokens: int, cached: int, seconds: float) -> None:
        """Tell every pool's gate what a prefill took: see `CacheEngine.observe_prefill`."""
        for engine in self.engines:
            engine.observe_prefill(tokens, cached, seconds)

    def close(self) -> None:
        """Close the engine; what was accepted for storing is stored first."""
        (self.hybrid or self.engine).close()

    def busy(self) -> bool:
        """Whether loads between steps are under way."""
        return self._busy()

    # -- who uses it -------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> bool:
        """True for the last one."""
        self._users -= 1
        return self._users == 0


class Sessions:
    """The sessions of this process by vLLM's `engine_id`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, VllmSession] = {}

    def open(self, engine_id: str, make: Callable[[], VllmSession]) -> VllmSession:
        """The worker's call: open one."""
        session = make()
        with self._lock:
            self._open[engine_id] = session
            session.enter()
        return session

    def join(self, engine_id: str) -> VllmSession:
        """The scheduler's call. Raises `InterfaceUnsupportedError` where the worker is in another process after all."""
        with self._lock:
            session = self._open.get(engine_id)
            if session is None:
                raise InterfaceUnsupportedError(
                    f"no worker of engine {engine_id} has registered its KV cache in process {os.getpid()}",
                    "set --distributed-executor-backend mp",
                )
            session.enter()
        return session

    def leave(self, engine_id: str, session: VllmSession) -> None:
        """The last who leaves closes the engine; what was accepted for storing is stored first."""
        with self._lock:
            last = session.leave()
            if last and self._open.get(engine_id) is session:
                del self._open[engine_id]
        if last:
            session.close()
