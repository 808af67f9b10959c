"""The caller's handle of a prefetch, and the report at its end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from gdscache import arguments
from gdscache.errors import DeadlineError, EngineClosedError, InvalidValueError, TokensError
from gdscache.moves import PrefetchEnd
from gdscache.pages.hit import Hit
from gdscache.prefetch.queue import PrefetchRequest
from gdscache.runtime.calls import Released

if TYPE_CHECKING:
    from gdscache.prefetch.prefetcher import Prefetcher


@dataclasses.dataclass(frozen=True)
class PrefetchReport:
    """How a prefetch ended; `end` is the cause.

    `tokens` counts the leading tokens that were in the CPU tier or faster when their turn came. `pages` counts the
    pages that the lookup found: `present` (no need to move), `left` (not begun), `loaded`, or the error's name
    (`PageStatus`). `nbytes` were read and found good, within `seconds` from the call.
    """

    tokens: int
    pages: dict[str, int]
    nbytes: int
    seconds: float
    end: PrefetchEnd


class Prefetch(Released):
    """The handle of one prefetch. Made by `CacheEngine.prefetch`; thread-safe. Leaving its `with` block cancels it.

    It runs by itself: pages are in the CPU tier as soon as they are checked, and its leases end with it. With pins it
    keeps the pages that it has brought, or found in the CPU tier, until `release`, `cancel`, the end of its `with`
    block, or until their time is up. `hit()` names them for a load.
    """

    def __init__(self, owner: Prefetcher, request: PrefetchRequest, start: int) -> None:
        """`start`: the token that its first page begins with."""
        self._owner = owner
        self._request = request
        self._start = start

    @property
    def tokens(self) -> int:
        """Tokens from `start` on that it has found in the CPU tier, or in a faster one, so far. It grows."""
        return self._request.good * self._owner.layout.page_tokens

    @property
    def verified(self) -> int:
        """Tokens from `start` on that are in the CPU tier now, pinned and verified. Costs little; never waits.

        It grows while pages come. It falls when pages are cleared, invalidated, found bad or expire, and to 0 when the
        pins have ended. Without pins it is 0.
        """
        self._owner.calls.check()
        claim = self._request.claim
        return 0 if claim is None else claim.good * self._owner.layout.page_tokens

    def hit(self, start: int | None = None) -> Hit:
        """The tokens that are `verified` now, from token `start` on (None: all), for `load`.

        Such a load takes pages from the CPU tier alone, hashes none again and has no deadline, so only a copy can fail.
        While the pins hold, `load.tokens` is `hit.tokens`. The load keeps its pages itself, so the pins may be released
        as soon as `load` has returned. If the pins had ended before, or pages were cleared or invalidated meanwhile,
        `load.tokens` counts the remaining ones. Raises `InvalidValueError` without pins, and `TokensError` for a
        `start` that is not a page of the prefetch.
        """
        self._owner.calls.check()
        claim, page_tokens = self._request.claim, self._owner.layout.page_tokens
        if self._request.pin is None:
            raise InvalidValueError("this prefetch has no pins", "pass pin=SECONDS to prefetch()")
        first, begins = 0, self._start  # a hit of groups may begin within a page of the planes
        if start is not None:
            begins = arguments.start_page(start, page_tokens) * page_tokens
            first = begins // page_tokens - self._start // page_tokens
        if first < 0:
            message = f"start is {start}, the prefetch begins with token {self._start}"
            raise TokensError(message, "pass that, or a later token at a page boundary")
        tiers = () if claim is None else tuple(tier.name for tier in claim.tiers[first : claim.good])
        pages = tuple(self._request.pages[first : first + len(tiers)])  # the claim may have been cut meanwhile
        tokens = len(pages) * page_tokens
        return Hit(begins, tokens, tiers, self._owner.seconds(tiers), pages, pays=tokens, checked=True)

    @property
    def asking(self) -> bool:
        """Whether a tier beyond this machine is still asked for its pages; the prefetch moves none before."""
        return not self._request.begun and not self._request.over.is_set()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tier of each page when the prefetch began; empty while `asking`."""
        return self._request.tiers

    @property
    def begun(self) -> int:
        """Leading pages that are present, under way, or bad. It grows."""
        return self._request.at

    @property
    def short(self) -> bool:
        """Whether pins had no room for some of its pages when it began."""
        return self._request.beyond > 0

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        return self._request.over.is_set()

    def wait(self, seconds: float | None = 0.0) -> int:
        """Wait up to `seconds` for its end, then stop it, and return `tokens`. Call it when the request is to run.

        0 stops the prefetch now; None waits for its end, and stops it after `deadline`. A chunk that is under way goes
        on, and a load that needs its pages waits for them.
        """
        limit = arguments.seconds(seconds)
        patience, why = (self._owner.deadline, PrefetchEnd.DEADLINE) if limit is None else (limit, PrefetchEnd.STOPPED)
        calls = self._owner.calls
        calls.check()
        if not self._owner.awaited(self._request.over, patience):
            with contextlib.suppress(EngineClosedError), calls:
                self._owner.stop(self._request, why)
        return self.tokens

    def release(self) -> None:
        """End it, after the chunk under way, and its pins. Pages that came stay in the CPU tier like any others; pages
        that are still under way are not pinned.

        Never waits; may be called again, and after the end.
        """
        with contextlib.suppress(EngineClosedError), self._owner.calls:
            self._owner.stop(self._request, PrefetchEnd.CANCELLED)

    cancel = release

    def result(self, seconds: float | None = None) -> PrefetchReport:
        """Wait until it has ended; never raises for a page.

        Raises `DeadlineError` when it has not ended within `seconds`, `deadline` by default. It goes on then.
        """
        self._owner.calls.check()
        limit = arguments.seconds(seconds)
        deadline = self._owner.deadline if limit is None else limit
        return self._report(self._owner.awaited(self._request.over, deadline), deadline)

    def __await__(self) -> Generator[Any, None, PrefetchReport]:
        """`result()` in asyncio's event loop. Cancelling the await does not cancel the prefetch."""
        deadline = self._owner.deadline
        over = yield from self._owner.calls.until(self._request.over, deadline).__await__()
        return self._report(over, deadline)

    def _report(self, over: bool, deadline: float) -> PrefetchReport:
        request = self._request
        if not over:
            pages = f"{request.left} of {len(request.pages)} pages"
            raise DeadlineError(
                f"a prefetch has not ended after {deadline:g} s: {pages} have not begun",
                "loads go first: wait longer, or cancel() it",
            )
        assert request.end is not None, "over without a cause"
        return PrefetchReport(self.tokens, dict(request.counts), request.nbytes, request.seconds, request.end)
