"""The caller's side of loads: the handle of a load that is under way, and what is missing when it is over."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from gdscache import arguments
from gdscache.cuda.streams import Event, Fence, LayerFences
from gdscache.errors import DeadlineError
from gdscache.load.report import LoadPart, LoadReport
from gdscache.moves import Moving
from gdscache.moves.base import Orders
from gdscache.pages.layout import PageLayout
from gdscache.runtime.calls import Caller, Direct
from gdscache.runtime.threads import Flag
from gdscache.tracing import OFF, Timeline


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Tokens of a prompt, from number `first` to `stop` (exclusive), that a load promised and did not bring.

    `first` begins the first bad page of request number `request` (its place in `load_many`, else 0). The load ends at
    `stop`. Tokens behind `stop` that were computed while the load was under way rest on these tokens.
    """

    request: int
    first: int
    stop: int


class LayerwiseLoad:
    """The handle of one load, or of a batch of them. Made by `CacheEngine.load` and `load_many`; thread-safe."""

    def __init__(
        self,
        parts: Sequence[LoadPart],
        layout: PageLayout,
        deadline: float,
        *,
        layered: bool = True,
        timeline: Timeline = OFF,
        device: torch.device | None = None,
        calls: Caller | None = None,
        checked: bool = False,
        orders: Orders | None = None,
        waited: Callable[[str, float], object] = lambda what, seconds: None,
    ) -> None:
        """Without `layered` (a load into the CPU tier) there are no layers to wait for. `device`: the planes'.
        `checked`: it takes as long as it takes, so whoever waits does, unless they say for how long. `orders`: what
        makes its `order`, where ranks carry it out. `waited`: told how many seconds a caller waited for a `layer`,
        or for the `verdict`."""
        self.number = timeline.number()
        self._timeline = timeline
        self._device = device
        self.parts = parts
        self.release_event = Fence()
        self._layout = layout
        self.deadline = deadline
        self.checked = checked
        self._patience = None if checked else deadline
        self._layers = LayerFences(layout.n_layers if layered else 0)
        self.cancelled = False
        self._moving: Moving | None = None
        self._moves: list[Moving] = []
        self._begun = Flag()  # nothing comes behind these
        self._orders = orders
        self._waited = waited
        self._calls: Caller = Direct() if calls is None else calls
        self._over = Flag()
        self._error: BaseException | None = None  # what broke the run off
        self._broken: BaseException | None = None  # what broke its begin off, in the caller's thread

    @property
    def tokens(self) -> int:
        """Tokens that are being loaded, over all requests; what `result()` confirms may be fewer."""
        return sum(part.pages for part in self.parts) * self._layout.page_tokens

    @property
    def tokens_by_request(self) -> tuple[int, ...]:
        """`tokens` of each request, in the order in which they were given."""
        return tuple(part.pages * self._layout.page_tokens for part in self.parts)

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's pages; on a CPU-only machine, wait for their bytes.

        The thread waits until the copies are queued, for `deadline` by default (without limit for a load of
        checked hits). Then it raises `DeadlineError`.
        """
        self._calls.check()
        layer = arguments.whole(layer, "layer", 0, len(self._layers) - 1)
        start = time.monotonic()
        with self._timeline.compute("wait", self._device, layer=layer, load=self.number):
            self._layers.wait(layer, self._patience if seconds is None else arguments.seconds(seconds))
        self._waited("layer", time.monotonic() - start)

    def results(self, seconds: float | None = None) -> list[LoadReport]:
        """The verdict on each request, in order. Never raises for a bad page; `DeadlineError` when it is late."""
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
        """The verdict; of a batch, that on all its requests as one, whose `tokens` are the sum of the good prefixes."""
        return self._as_one(self.results(seconds))

    def __await__(self) -> Generator[Any, None, LoadReport]:
        """`result()` in an event loop of asyncio's. The load goes on where the await is cancelled."""
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
        """Wait for the verdict, have computed what is missing, and return the report that `result()` returns.

        Call it after the forward pass, before any of its output is used. `recompute(gap)` is called in this thread for
        each request with a bad page, in order. It computes the tokens from `gap.first` on into the same slots, which
        are the caller's again, and everything that the forward pass computed behind them. When `settle` returns, every
        promised token is in its slot. Without a bad page `recompute` is not called.

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
            promised = part.start + part.pages * self._layout.page_tokens
            good = part.start + (part.report.tokens if part.report is not None else 0)
            if good < promised:
                found.append(Gap(request, good, promised))
        return found

    @property
    def order(self) -> bytes:
        """What each rank of the engine begins (`Rank.load`), in the order of its own steps; b"" without ranks.

        Waits until all of it is planned: only where a page's checksums have to be read, or another load brings it.
        """
        if self._orders is None:
            return b""
        self._begun.wait()
        requests = [(part.pages, part.start) for part in self.parts]
        about = {"page_tokens": self._layout.page_tokens, "deadline": self.deadline, "checked": self.checked}
        return self._orders(self._moves, requests, about)

    @property
    def ordered(self) -> bool:
        """Whether `order` is there, so that asking for it waits for nothing."""
        return self._orders is None or self._begun.is_set()

    def done(self) -> bool:
        """True when the verdict is there; never waits."""
        return self._over.is_set()

    def signal(self, layer: int, event: Event) -> None:
        """Called by the worker: this layer's copies are queued, and done when `event` is."""
        if not (self._layers.queued(layer) or self._layers.watched):  # else whoever moves the bytes has said so
            self._timeline.instant("ready", layer=layer, load=self.number)
        self._layers.signal(layer, event)

    def released(self) -> None:
        """Called by the worker: nothing writes to the slots any more."""
        self.release_event.signal()

    def end(self, error: BaseException | None) -> None:
        """Called by the worker: the verdict is there, or what broke the run off."""
        self._error = error
        self._over.set()
        self._begun.set()
        self._calls.ended()

    def cancel(self) -> None:
        """Stop early. The slots stay the engine's until `release_event`; what was not loaded by then is `CANCELLED`."""
        self._calls.check()
        self.cancelled = True
        if self._moving is not None:
            self._moving.cancel()

    def begun(self) -> None:
        """Raises what broke the begin off, when nothing is under way any more."""
        if self._broken is not None:
            self._over.wait()
            raise self._broken

    def broken_off(self, error: BaseException) -> None:
        """Called where it begins: that was broken off, which `begun` raises when the load is over."""
        self._broken = error

    def carried_by(self, moving: Moving, *, last: bool) -> None:
        """Called by the worker: what `cancel` is passed on to. `last`: with this move the layers are there."""
        self._moving = moving
        if moving not in self._moves:
            self._moves.append(moving)
        if last:
            self._begun.set()
        if last and moving.lands is not None:
            self._layers.watch(moving.lands)
        if self.cancelled:
            moving.cancel()
