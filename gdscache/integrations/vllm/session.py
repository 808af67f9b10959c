"""One engine for vLLM's connector objects.

In one process, vLLM makes the worker's object first, which opens the engine for the KV cache's tensors. The scheduler's
object joins it by their `engine_id`. The last one to leave closes the engine. If workers are other processes, only the
scheduler's object has the session (`ranks.py`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import InterfaceUnsupportedError
from gdscache.integrations.fetching import PinningCache
from gdscache.runtime.threads import in_turn

if TYPE_CHECKING:
    from gdscache.integrations.vllm.worker import Stores


class VllmSession(PinningCache):
    """An engine over vLLM's tensors, and its users. `hybrid`: the engine of a model with groups of layers."""

    def __init__(self, engine: CacheEngine | HybridEngine, pin_seconds: float) -> None:
        super().__init__(engine, pin_seconds)
        self.hybrid = engine if isinstance(engine, HybridEngine) else None
        self.observe_prefill, self.close = engine.observe_prefill, engine.close
        self._stores: Stores | None = None
        self.busy: Callable[[], bool] = bool

    def attend(self, stores: Stores, busy: Callable[[], bool]) -> None:
        """Use this owner of stores. `busy()`: whether loads between steps are under way."""
        self._stores, self.busy = stores, busy

    def wait_until_read(self, blocks: Set[int]) -> None:
        """Wait until no store reads these blocks: they are about to be written.

        The scheduler calls it before anything of a step reaches the worker. All stores of earlier steps have begun by
        then, since both are one thread.
        """
        if self._stores is not None:
            self._stores.wait_until_read(blocks)

    def reads(self) -> Set[int]:
        """Blocks that stores of the steps so far read, or will read."""
        return frozenset[int]() if self._stores is None else self._stores.reads()

    def weights_changed(self) -> None:
        """Drop every page of this model, and all waiting stores.

        Later pages have another salt: their weights may be in no file, so an engine that starts with the files' weights
        must not find them. The salt changes first, so that an error of a drop leaves no page to be found.
        """
        self.renew_salt()
        if self._stores is not None:
            self._stores.begin_anew(self.salt)
        in_turn(*(functools.partial(engine.invalidate, *engine.namespaces()) for engine in self.engines))

    def on_host(self, tier: str) -> bool:
        """Whether a tier's pages lie in this machine's memory. A pool whose pages are not packed has fewer tiers."""
        return any(engine.tiers.get(tier) == "memory" for engine in self.engines)


class Sessions:
    """The sessions of this process by vLLM's `engine_id`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, VllmSession] = {}
        self._users = Counter[VllmSession]()

    def open(self, engine_id: str, make: Callable[[], VllmSession]) -> VllmSession:
        """Open a session, for the worker."""
        session = make()
        with self._lock:
            self._open[engine_id] = session
            self._users[session] += 1
        return session

    def join(self, engine_id: str) -> VllmSession:
        """Join the session, for the scheduler. Raises `InterfaceUnsupportedError` if the worker is in another
        process."""
        with self._lock:
            session = self._open.get(engine_id)
            if session is None:
                raise InterfaceUnsupportedError(
                    f"no worker of engine {engine_id} has registered its KV cache in process {os.getpid()}",
                    "set --distributed-executor-backend mp",
                )
            self._users[session] += 1
        return session

    def leave(self, engine_id: str, session: VllmSession) -> None:
        """Leave the session. The last one closes the engine, after its accepted stores."""
        with self._lock:
            self._users[session] -= 1
            if last := not self._users[session]:
                del self._users[session]
            if last and self._open.get(engine_id) is session:
                del self._open[engine_id]
        if last:
            session.close()
