"""One engine for vLLM's connector objects.

In one process, vLLM makes the worker's object first, which opens the engine for the KV cache's tensors. The scheduler's
object joins it by their `engine_id`. vLLM ends the worker first, which closes the engine, after its accepted stores. If
workers are other processes, only the scheduler's object has the session (`ranks.py`).
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import InterfaceUnsupportedError
from gdscache.groups.names import GroupNames
from gdscache.integrations.fetching import GroupFetch, PinningCache
from gdscache.runtime.threads import in_turn

if TYPE_CHECKING:
    from gdscache.integrations.vllm.worker import Loads, Stores


class VllmSession(PinningCache):
    """An engine over vLLM's tensors, with its stores, and its loads between steps."""

    stores: Stores
    loads: Loads

    def __init__(self, engine: CacheEngine | HybridEngine, pin_seconds: float) -> None:
        super().__init__(engine, pin_seconds)
        self.observe_prefill, self.close = engine.observe_prefill, engine.close

    def weights_changed(self) -> None:
        """Drop every page of this model, and all waiting stores.

        Later pages have another salt: their weights may be in no file, so an engine that starts with the files' weights
        must not find them. The salt changes first, so that an error of a drop leaves no page to be found.
        """
        self.renew_salt()
        self.stores.begin_anew(self.salt)
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
        self.stand, self.reach = engine.states.stand, engine.reach
        self.adapts = engine.config.store.window_every is None  # windows are fewer while requests part often

    def names(self) -> GroupNames:
        """Names for a new request, under the inference engine's present weights."""
        return self._hybrid.group_names(self.salt, self._digest_tokens)

    def fetch_groups(self, names: GroupNames, most: int, tokens: int, local: int = 0) -> GroupFetch:
        """Begin to bring the pages of a hit of up to `most` tokens, for a request of `tokens`; `local`: see
        `GroupFetch`."""
        return GroupFetch(self._hybrid, names, most, tokens, self.pin_seconds, local=local)


# The sessions of this process by vLLM's `engine_id`
SESSIONS: weakref.WeakValueDictionary[str, VllmSession] = weakref.WeakValueDictionary()


def joined(engine_id: str) -> VllmSession:
    """The worker's session, for the scheduler. Raises `InterfaceUnsupportedError` if the worker is in another
    process."""
    session = SESSIONS.get(engine_id)
    if session is None:
        raise InterfaceUnsupportedError(
            f"no worker of engine {engine_id} has registered its KV cache in process {os.getpid()}",
            "set --distributed-executor-backend mp",
        )
    return session
