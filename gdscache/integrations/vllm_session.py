"""One engine for the two objects that vLLM makes of a connector, and how a request's pages are fetched in it.

vLLM makes the worker's object first, which opens the engine when it learns of the KV cache's tensors; the scheduler's
joins it by the `engine_id` that both were given. The engine is closed when the last of them leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from gdscache.engine import CacheEngine
from gdscache.errors import SeparateWorkerError
from gdscache.hit import Hit
from gdscache.integrations.vllm_worker import Stores
from gdscache.keys import PageHashes
from gdscache.prefetch.queue import PrefetchEnd


class PinnedFetch:
    """The pages of one request: brought to the CPU tier, checked as they land, and pinned for `seconds` at most."""

    def __init__(self, engine: CacheEngine, hashes: PageHashes, pages: int, seconds: float) -> None:
        """`pages`: how many of the first pages can be of use. Without a CPU tier, none is brought."""
        self._page_tokens = size = engine.layout.page_tokens
        self._found: Hit = engine.lookup(hashes)
        self.cached = (self._found.tokens + self._found.declined) // size
        self.wanted = min(pages, self._found.tokens // size)
        pinned = self.wanted > 0 and engine.config.cpu is not None
        useful = _part(self._found, 0, 0, self.wanted, size)
        self._prefetch = engine.prefetch(useful, pin=seconds) if pinned else None
        self._until = time.monotonic() + seconds

    def done(self) -> bool:
        """Whether no more pages come, or all that are wanted have come."""
        return self._prefetch is None or self._prefetch.done() or self.verified() == self.wanted

    def verified(self) -> int:
        """How many of the first pages are checked and pinned."""
        return 0 if self._prefetch is None else min(self.wanted, self._prefetch.verified // self._page_tokens)

    def crowded(self) -> bool:
        """Whether the CPU tier has no room for its pages."""
        if self._prefetch is None:
            return self.wanted > 0
        if not self._prefetch.done() or self.verified() == self.wanted:
            return False
        return self._prefetch.result(0).end is PrefetchEnd.NO_ROOM

    def lapsed(self) -> bool:
        """Whether its pins have ended."""
        return self._prefetch is not None and time.monotonic() >= self._until

    def release(self) -> None:
        """Bring no more, and let go of what is pinned. Twice is fine."""
        if self._prefetch is not None:
            self._prefetch.release()

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """How many of `pages` pages from page `first` on each tier had when it began."""
        return Counter(self._found.tiers[first : first + pages])

    def checked(self, first: int, pages: int) -> Hit:
        """Pages that `verified` counts, for a load that cannot fail."""
        assert self._prefetch is not None, "nothing was verified"
        hit = self._prefetch.hit(first * self._page_tokens)
        return _part(hit, first, 0, pages, self._page_tokens)

    def unchecked(self, first: int, pages: int) -> Hit:
        """Pages from wherever they are, for a load with a verdict."""
        return _part(self._found, first, first, pages, self._page_tokens)


def _part(hit: Hit, first: int, at: int, pages: int, page_tokens: int) -> Hit:
    """`pages` pages of a hit from its page number `at` on; they begin with page `first` of the request."""
    names, tiers = hit.pages[at : at + pages], hit.tiers[at : at + pages]
    tokens = len(names) * page_tokens
    return dataclasses.replace(hit, start=first * page_tokens, tokens=tokens, pages=names, tiers=tiers, pays=tokens)


class VllmSession:
    """An engine over vLLM's tensors, and who uses it."""

    def __init__(self, engine: CacheEngine, pin_seconds: float) -> None:
        self.engine = engine
        self._pin_seconds = pin_seconds
        self._users = 0
        self._stores: Stores | None = None
        self._busy: Callable[[], bool] = bool

    def attend(self, stores: Stores, busy: Callable[[], bool]) -> None:
        """The worker says what it stores, and whether loads between steps are under way."""
        self._stores, self._busy = stores, busy

    def settle(self, blocks: Collection[int]) -> None:
        """Wait until no store reads these blocks: somebody is to write to them.

        The scheduler calls it before anything of a step reaches the worker. All stores of earlier steps have begun by
        then, since both are one thread.
        """
        if self._stores is not None:
            self._stores.settle(blocks)

    def forget(self) -> None:
        """Store nothing of what waits to be stored."""
        if self._stores is not None:
            self._stores.forget()

    def busy(self) -> bool:
        """Whether loads between steps are under way."""
        return self._busy()

    def fetch(self, hashes: PageHashes, pages: int) -> PinnedFetch:
        """Begin to bring the first `pages` pages, as far as they are cached and worth loading."""
        return PinnedFetch(self.engine, hashes, pages, self._pin_seconds)

    def cached(self, hashes: PageHashes) -> int:
        """How many of the first pages are cached, on any tier. Counts as no use of them."""
        return len(self.engine.manager.peek(self.engine.pages(hashes)))

    def rest(self, seconds: float) -> None:
        """Wait until a load, a store or a prefetch has ended, for so many seconds at most."""
        ready = select.poll()
        ready.register(self.engine.fileno(), select.POLLIN)
        if ready.poll(seconds * 1e3):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.engine.fileno())

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
        """The scheduler's call. Raises `SeparateWorkerError` where the worker is in another process."""
        with self._lock:
            session = self._open.get(engine_id)
            if session is None:
                raise SeparateWorkerError(
                    f"no worker of engine {engine_id} has registered its KV cache in process {os.getpid()}",
                    "let one process have both: --distributed-executor-backend uni, with one GPU",
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
            session.engine.close()
