"""Stores that a thread passes to an engine: naming, planning and accounting pages is Python's work of some 0.1 ms a
store and 1 us a page, for which an inference engine's loop does not wait."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from gdscache.runtime.threads import Flag, Workers
from gdscache.store.handle import StoreHandle

Store = Callable[[], Sequence[StoreHandle]]  # begins a store, and returns its handles, of several pools


class HandedStore:
    """A store that is passed on, or will be."""

    def __init__(self, worker: Workers | None, store: Store) -> None:
        """A thread of `worker` calls `store()` soon, and an error goes to the log; None: it is called at once. Its
        reads must follow an event that is recorded already."""
        self._handed = Flag()
        self._handles: Sequence[StoreHandle] | None = None
        if worker is None:
            self._hand_over(store)
        else:
            worker.submit(functools.partial(self._hand_over, store))

    @property
    def taken(self) -> bool:
        """Whether the engine took it; false before it was passed on."""
        return self._handles is not None

    def done(self) -> bool:
        """Whether nothing reads its blocks any more; never waits."""
        return self._handed.is_set() and all(one.release_event.done() for one in self._handles or ())

    def wait(self) -> None:
        self._handed.wait()
        for one in self._handles or ():
            one.release_event.synchronize()

    def _hand_over(self, store: Store) -> None:
        """Keep the handles of `store()`. If it raises, nothing reads the blocks."""
        try:
            self._handles = store()
        finally:
            self._handed.set()
