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
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import InterfaceUnsupportedError
from gdscache.groups.names import GroupNames
from gdscache.integrations.fetching import GroupFetch, PinningCache
from gdscache.runtime.threads import in_turn

if TYPE_CHECKING:
    from gdscache.integrations.vllm.worker import Stores


class VllmSession(PinningCache):
    """An engine over vLLM's tensors, and its users."""

    def __init__(self, engine: CacheEngine | HybridEngine, pin_seconds: float) -> None:
        super().__init__(engine, pin_seconds)
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

    def flush(self) -> None:
        """Pass on waiting pages: a request has ended, and vLLM in its caller's process may make no further step."""
        if self._stores is not None:
            self._stores.flush()

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


class GroupSession(VllmSession):
    """Of a hybrid model: the cache of a `GroupTable`, in all groups at once."""

    def __init__(self, engine: HybridEngine, pin_seconds: float, digest_tokens: int) -> None:
        """`digest_tokens`: tokens that each digest of a request adds to the one before."""
        super().__init__(engine, pin_seconds)
        self._hybrid, self._digest_tokens = engine, digest_tokens
        self.groups, self.window_every = engine.groups, engine.window_every
        self.adapts = engine.config.store.window_every is None  # windows are fewer while requests part often

    def names(self) -> GroupNames:
        """Names for a new request, under the inference engine's present weights."""
        return self._hybrid.group_names(self.salt, self._digest_tokens)

    def fetch_groups(self, names: GroupNames, most: int, tokens: int, local: int = 0) -> GroupFetch:
        """Begin to bring the pages of a hit of up to `most` tokens, for a request of `tokens`; `local`: see
        `GroupFetch`."""
        return GroupFetch(self._hybrid, names, most, tokens, self.pin_seconds, local=local)

    def stand(self, names: GroupNames, wanted: Sequence[Sequence[int]]) -> None:
        self._hybrid.states.stand(names, wanted)

    def reach(self, names: GroupNames, most: int) -> tuple[int, int]:
        return self._hybrid.reach(names, most)


class Sessions:
    """The sessions of this process by vLLM's `engine_id`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, VllmSession] = {}
        self._users = Counter[VllmSession]()

    def open(self, engine_id: str, session: VllmSession) -> None:
        """The worker has opened it, and uses it."""
        with self._lock:
            self._open[engine_id] = session
            self._users[session] += 1

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
