"""One engine for the two objects that vLLM makes of a connector, and how a request's pages are fetched in it.

vLLM makes the worker's object first, which opens the engine when it learns of the KV cache's tensors; the scheduler's
joins it by the `engine_id` that both were given. The engine is closed when the last of them leaves.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from gdscache.engine import CacheEngine, Hit
from gdscache.errors import SeparateWorkerError
from gdscache.keys import PageHashes
from gdscache.prefetch.queue import PrefetchEnd
from gdscache.tiers.keeping import Pin

_CROWDED = frozenset({PrefetchEnd.QUOTA, PrefetchEnd.NO_ROOM})


class PinnedFetch:
    """The pages of one request: brought to the CPU tier, checked as they land, and pinned for `seconds` at most."""

    def __init__(self, engine: CacheEngine, hashes: PageHashes, pages: int, seconds: float) -> None:
        self._engine = engine
        size = engine.layout.page_tokens
        self.hit: Hit = engine.lookup(hashes)
        self.cached = (self.hit.tokens + self.hit.declined) // size
        self.wanted = min(pages, self.hit.tokens // size)
        self._hashes, self._seconds = hashes, seconds
        self._prefetch = engine.prefetch(hashes) if self.wanted else None
        self._pin: Pin | None = None
        self._stopped = False
        self._crowded = False

    def done(self) -> bool:
        """Whether no more pages come."""
        return self._prefetch is None or self._stopped or self._prefetch.done()

    def verified(self) -> int:
        """How many of the first pages are checked and pinned."""
        if self._prefetch is None:
            return 0
        if self._pin is None:
            self._pin = self._engine.pin(self._hashes, self._seconds)
        size = self._engine.layout.page_tokens
        return min(self.wanted, self._prefetch.tokens // size, self._pin.tokens // size)

    def crowded(self) -> bool:
        """Whether it ended because the CPU tier has no room for its pages."""
        if self._prefetch is None or not self._prefetch.done():
            return False
        return self._prefetch.result(0).end in _CROWDED

    def lapsed(self) -> bool:
        """Whether its pins have ended."""
        return False

    def stop(self) -> None:
        """Bring no more."""
        self._stopped = True
        if self._prefetch is not None:
            self._prefetch.cancel()

    def release(self) -> None:
        """Bring no more, and let go of what is pinned."""
        self.stop()
        if self._pin is not None:
            self._pin.release()

    def sources(self, first: int, pages: int) -> Mapping[str, int]:
        """How many of `pages` pages from page `first` on each tier had when it began."""
        return Counter(self.hit.tiers[first : first + pages])

    def pages(self, first: int, pages: int) -> Hit:
        """Those pages, to be loaded. They are all in memory, checked, where `verified` said so of them."""
        size = self._engine.layout.page_tokens
        names, tiers = self.hit.pages[first : first + pages], self.hit.tiers[first : first + pages]
        return Hit(first * size, len(names) * size, tiers, None, names)


class VllmSession:
    """An engine over vLLM's tensors, and who uses it."""

    def __init__(self, engine: CacheEngine, pin_seconds: float) -> None:
        self.engine = engine
        self._pin_seconds = pin_seconds
        self._users = 0
        self._settle: Callable[[Iterable[int]], object] = _nothing
        self._busy: Callable[[], bool] = bool

    def attend(self, settle: Callable[[Iterable[int]], object], busy: Callable[[], bool]) -> None:
        """The worker says how to wait for stores that read blocks, and whether loads between steps are under way."""
        self._settle, self._busy = settle, busy

    def settle(self, blocks: Iterable[int]) -> None:
        """Wait until no store reads these blocks: somebody is to write to them.

        The scheduler calls it before anything of a step reaches the worker. All stores of earlier steps have begun by
        then, since both are one thread.
        """
        self._settle(blocks)

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


def _nothing(blocks: Iterable[int]) -> None:
    pass
