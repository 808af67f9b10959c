"""The caller's side of loads: the handle of a load that is under way, and the report when it is over."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from gdscache.errors import DeadlineError
from gdscache.layout import PageLayout
from gdscache.streams import Event, Fence
from gdscache.tiers.manager import LoadPlan, PageStatus


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a load ended. `tokens` counts the good prefix; `pages` has a status for each page asked for."""

    tokens: int
    pages: tuple[PageStatus, ...]
    bytes_by_tier: dict[str, int]
    seconds: float

    @property
    def first_bad(self) -> int | None:
        """Position of the first page that is not loaded, or None."""
        return next((i for i, status in enumerate(self.pages) if status is not PageStatus.LOADED), None)


@dataclasses.dataclass(slots=True)
class LoadPart:
    """One request of a load: its plan and the blocks that its pages go to, int64 (pages, blocks_per_page)."""

    plan: LoadPlan
    blocks: torch.Tensor
    report: LoadReport | None = None


class LayerwiseLoad:
    """The handle of one load, or of a batch of them. Made by `CacheEngine.load` and `load_many`; thread-safe."""

    def __init__(self, parts: Sequence[LoadPart], layout: PageLayout, deadline: float) -> None:
        self.parts = parts
        self.release_event = Fence()
        self._layout = layout
        self._deadline = deadline
        self._layers = [Fence() for _ in range(layout.n_layers)]
        self._cancelled = threading.Event()
        self.future: Future[None] = Future()

    @property
    def tokens(self) -> int:
        """Tokens that are being loaded, over all requests; what `result()` confirms may be fewer."""
        return sum(len(part.plan.tasks) for part in self.parts) * self._layout.page_tokens

    def wait(self, layer: int, seconds: float | None = None) -> None:
        """Order the current stream after this layer's pages; on a CPU-only machine, wait for their bytes.

        The thread waits until the copies are queued, `load.deadline` by default; then raises `DeadlineError`.
        """
        self._layers[layer].wait(self._deadline if seconds is None else seconds)

    def results(self, seconds: float | None = None) -> list[LoadReport]:
        """The verdict on each request, in order. Never raises for a bad page; `DeadlineError` when it is late."""
        try:
            self.future.result(self._deadline if seconds is None else seconds)
        except TimeoutError:
            raise DeadlineError("a load has no verdict yet", "raise load.deadline, or cancel() the load") from None
        return [part.report for part in self.parts if part.report is not None]

    def result(self, seconds: float | None = None) -> LoadReport:
        """The verdict; of a batch, that on all its requests as one, whose `tokens` are the sum of the good prefixes."""
        reports = self.results(seconds)
        if len(reports) == 1:
            return reports[0]
        by_tier: Counter[str] = Counter()
        for report in reports:
            by_tier.update(report.bytes_by_tier)
        pages = tuple(status for report in reports for status in report.pages)
        return LoadReport(
            sum(r.tokens for r in reports), pages, dict(by_tier), max((r.seconds for r in reports), default=0.0)
        )

    def done(self) -> bool:
        """True when the verdict is there; never waits."""
        return self.future.done()

    def signal(self, layer: int, event: Event) -> None:
        """Called by the worker: this layer's copies are queued, and done when `event` is."""
        self._layers[layer].signal(event)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop early. The slots stay the engine's until `release_event`; what was not loaded by then is `CANCELLED`."""
        self._cancelled.set()
