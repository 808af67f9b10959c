"""The caller's handle of a load: waits, verdicts, and the gaps that are left."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from gdscache import arguments
from gdscache.cuda.streams import Event, Fence, LayerFences
from gdscache.errors import DeadlineError
from gdscache.load.plan import LoadPart, LoadReport
from gdscache.moves import Moving, Orders
from gdscache.pages.layout import PageLayout
from gdscache.runtime.calls import Caller
from gdscache.runtime.threads import Flag
from gdscache.tracing import OFF, Timeline

_VERDICT_S = 1.0  # from the deadline, at which reads are given up, to the verdict of a busy machine


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Tokens `first` to `stop` (exclusive) of a prompt that a load promised and did not bring.

    `first` begins the first bad page of request number `request` (its place in `load_many`, else 0); `stop` is the
    load's end. Later tokens that were computed while the load ran depend on these.
    """

    request: int
    first: int
    stop: int


class LayerwiseLoad:
    """The handle of one load, or of a batch of loads. Made by `CacheEngine.load` and `load_many`; thread-safe.
    `release_event` (`done`, `wait`, `synchronize`): nothing writes to the slots any more. `number`: in timelines."""

    def __init__(
        self,
        parts: Sequence[LoadPart],
        layout: PageLayout,
        deadline: float,
        *,
        timeline: Timeline = OFF,
        calls: Caller | None = None,
        checked: bool = False,
        orders: Orders | None = None,
        waited: Callable[[str, float], object] = lambda what, seconds: None,
    ) -> None:
        """`checked`: waits have no limit unless the caller names one. `orders` makes `order`. `waited("layer" or
        "verdict", seconds)` reports each wait."""
        self.number = timeline.number()
        self._timeline = timeline
        self.parts = parts
        self.release_event = Fence()
        self.released = self.release_event.signal
        self.layout = layout
        self.deadline = deadline
        self.checked = checked
        self._patience = None if checked else deadline + _VERDICT_S
        self._layers = LayerFences(layout.n_layers)
        self.cancelled = False
        self._moving: Moving | None = None
        self._begun = Flag()  # the last move has all its pages
        self._orders = orders
        self._waited = waited
        self._calls = Caller() if calls is None else calls
        self._over = Flag()
        self._error: BaseException | None = None  # raised by the run
        self.broken: BaseException | None = None  # raised by `begin`, in the caller's thread

    @property
    def tokens(self) -> int:
        """Tokens planned, over all requests; `result()` may confirm fewer."""
        return sum(part.pages for part in self.parts) * self.layout.page_tokens

    @property
    def tokens_by_request(self) -> tuple[int, ...]:
        return tuple(part.pages * self.layout.page_tokens for part in self.parts)

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's copies; without a GPU, wait for the bytes.

        The thread waits until the copies are queued: by default a second longer than `deadline`, and without limit for
        a load of checked hits. Then it raises `DeadlineError`.
        """
        self._calls.check()
        layer = arguments.whole(layer, "layer", 0, len(self._layers) - 1)
        start = time.monotonic()
        with self._timeline.span("wait", layer=layer, load=self.number):
            self._layers.wait(layer, self._patience if seconds is None else arguments.seconds(seconds))
        self._waited("layer", time.monotonic() - start)

    def results(self, seconds: float | None = None) -> list[LoadReport]:
        """The verdict on each request, in order. Never raises for a bad page; `DeadlineError` when the verdict is
        late."""
        self._calls.check()
        limit = arguments.seconds(seconds)
        start = time.monotonic()
        over = self._over.wait(self._patience if limit is None else limit)
        self._waited("verdict", time.monotonic() - start)
        return self._reports(over)

    def _reports(self, over: bool) -> list[LoadReport]:
        if not over:
            raise DeadlineError("a load has no verdict yet", "raise deadline, or cancel() the load")
        if self._error is not None:
            raise self._error
        return [part.report for part in self.parts if part.report is not None]

    def result(self, seconds: float | None = None) -> LoadReport:
        """The verdict. A batch gives one report over all its requests: `tokens` is the sum of their good prefixes."""
        return self._as_one(self.results(seconds))

    def __await__(self) -> Generator[Any, None, LoadReport]:
        """`result()` in asyncio's event loop. Cancelling the await does not cancel the load."""
        over = yield from self._calls.until(self._over, self._patience).__await__()
        return self._as_one(self._reports(over))

    def _as_one(self, reports: list[LoadReport]) -> LoadReport:
        if len(reports) == 1:
            return reports[0]
        by_tier: Counter[str] = Counter()
        for report in reports:
            by_tier.update(report.bytes_by_tier)
        pages = tuple(status for report in reports for status in report.pages)
        reasons = tuple(reason for report in reports for reason in report.reasons)
        seconds = max((r.seconds for r in reports), default=0.0)
        return LoadReport(sum(r.tokens for r in reports), pages, dict(by_tier), seconds, reasons)

    def settle(self, recompute: Callable[[Gap], object], seconds: float | None = None) -> LoadReport:
        """Wait for the verdict, have the missing tokens computed, and return the report of `result()`.

        Call it after the forward pass, before any of its output is used. `recompute(gap)` is called in this thread for
        each request with a bad page, in order. It computes the tokens from `gap.first` on, and everything behind them,
        into the same slots, which belong to the caller again. Then every promised token is in its slot.

        Raises `DeadlineError` if the verdict is late: nothing was recomputed, and the slots are still being written
        (`cancel()`, and `release_event`). An exception of `recompute` is passed on; then no output may be used.
        """
        report = self.result(seconds)
        for gap in self.gaps(seconds):
            recompute(gap)
        return report

    def gaps(self, seconds: float | None = None) -> list[Gap]:
        """The gaps of all requests with a bad page, in order, for callers that compute them in one pass.

        Waits for the verdict as `result()` does.
        """
        self.results(seconds)
        found = []
        for request, part in enumerate(self.parts):
            promised = part.start + part.pages * self.layout.page_tokens
            good = part.start + (part.report.tokens if part.report is not None else 0)
            if good < promised:
                found.append(Gap(request, good, promised))
        return found

    @property
    def order(self) -> bytes:
        """The bytes that each rank begins the load with (`Rank.load`), in the order of its own steps; b"" without
        ranks.

        Waits until the whole load is planned, which may read checksums or wait for another load.
        """
        if self._orders is None:
            return b""
        self._begun.wait()
        requests = [(part.pages, part.start) for part in self.parts]
        about = {"page_tokens": self.layout.page_tokens, "deadline": self.deadline, "checked": self.checked}
        return self._orders(self._moving, requests, about)  # with ranks a load has one move at most

    @property
    def ordered(self) -> bool:
        """Whether `order` returns at once."""
        return self._orders is None or self._begun.is_set()

    def done(self) -> bool:
        """Whether the verdict is known; never waits."""
        return self._over.is_set()

    def signal(self, layers: range, event: Event) -> None:
        """Called by the run: the copies of these layers are queued, and done when `event` is."""
        if self._timeline is not OFF and not self._layers.watched:  # else the executor has traced it
            for layer in layers:
                if not self._layers.queued(layer):
                    self._timeline.instant("ready", layer=layer, load=self.number)
        self._layers.signal(layers, event)

    def end(self, error: BaseException | None) -> None:
        """Called by the loader: the verdict is known, or `error` ended the run."""
        self._error = error
        self._over.set()
        self._begun.set()
        self._calls.ended()

    def cancel(self) -> None:
        """Stop early. The slots stay the engine's until `release_event`; pages not loaded by then are `CANCELLED`."""
        self._calls.check()
        self.cancelled = True
        if self._moving is not None:
            self._moving.cancel()

    def begun(self) -> None:
        """Raise the error of `begin`, if it failed, once nothing moves any more."""
        if self.broken is not None:
            self._over.wait()
            raise self.broken

    def carried_by(self, moving: Moving, *, last: bool) -> None:
        """Called by the run: `cancel` cancels this move too. `last`: this move brings the layers, and no move follows
        it."""
        self._moving = moving
        if last:
            self._begun.set()
        if last and moving.lands is not None:
            self._layers.watch(moving.lands)
        if self.cancelled:
            moving.cancel()
