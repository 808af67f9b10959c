"""The caller's handle of a store, and the report at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from gdscache import arguments
from gdscache.cuda.streams import Fence
from gdscache.errors import DeadlineError
from gdscache.runtime.calls import Caller
from gdscache.runtime.threads import Flag


@dataclasses.dataclass(frozen=True)
class StoreReport:
    """How a store ended: for each page the tiers that committed it now, and why pages were dropped, by page.

    A page that was stored already, or that another store is bringing, has no tiers and no cause. Until that other store
    has ended, a lookup may miss the page.
    """

    tiers: tuple[tuple[str, ...], ...]
    dropped: dict[int, str]


class StoreHandle:
    """The handle of one store. Made by `CacheEngine.store` and `Sequence.commit`; thread-safe. `release_event` (`done`,
    `wait`, `synchronize`): the blocks were read. `order`: for each rank (`Rank.store`), in the order of its own
    steps; b"" without ranks."""

    def __init__(self, pages: int, calls: Caller | None = None) -> None:
        self._calls = Caller() if calls is None else calls
        self.release_event = Fence()
        # Called by the storer: the blocks may be written again after the event that `lands(seconds)` waits for, or
        # after an event.
        self.reading, self.read = self.release_event.watch, self.release_event.signal
        self.order = b""
        self._tiers: list[tuple[str, ...]] = [()] * pages
        self._dropped: dict[int, str] = {}
        self._left = pages
        self._done = Flag()
        if not pages:
            self._done.set()

    def done(self) -> bool:
        """Whether every page has its outcome; never waits."""
        return self._done.is_set()

    def result(self, seconds: float | None = None) -> StoreReport:
        """The report. Waits up to `seconds` (None: without limit), then raises `DeadlineError`."""
        self._calls.check()
        return self._report(self._done.wait(arguments.seconds(seconds)))

    def __await__(self) -> Generator[Any, None, StoreReport]:
        """`result()` in asyncio's event loop. Cancelling the await does not cancel the store."""
        over = yield from self._calls.until(self._done, None).__await__()
        return self._report(over)

    def _report(self, over: bool) -> StoreReport:
        if not over:
            raise DeadlineError(
                f"{self._left} pages are still on their way",
                "wait longer; stats()['store_queue'] has the bytes on their way",
            )
        return StoreReport(tuple(self._tiers), dict(self._dropped))

    def committed(self, pages: Sequence[int], tier: str) -> None:
        for page in pages:
            self._tiers[page] += (tier,)

    def finish(self, pages: Sequence[int], cause: str = "") -> None:
        """Called by the storer, under the manager's lock: the outcome of these pages is final."""
        if cause:
            self._dropped.update(dict.fromkeys(pages, cause))
        self._left -= len(pages)
        if not self._left:
            self._done.set()
            self._calls.ended()
