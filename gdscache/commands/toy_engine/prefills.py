"""What prefills take, for the gate of the cache: measured by events on a GPU, so that nothing waits for the figures."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import torch

from gdscache import CacheEngine
from gdscache.commands.toy_engine.request import Request


@dataclasses.dataclass
class Prefill:
    """One chunk of one request. `lead`: seconds that its load was under way before it began; None without a load."""

    request: Request
    tokens: int
    cached: int
    begun: float
    lead: float | None
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    seconds: float = 0.0


class PrefillClock:
    """Times forward passes over a chunk of one request, and reports them by `CacheEngine.observe_prefill`.

    What is done for several requests at once belongs to none of them and is not timed. On a GPU two events stand around
    the pass, and are read once the second is done; on the CPU it is the host's clock.
    """

    def __init__(self, cache: CacheEngine | None, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._ended: deque[Prefill] = deque()

    def begin(self, work: Sequence[tuple[Request, int]]) -> Prefill | None:
        """Before the forward pass; None for a pass that is not timed."""
        if self._cache is None or len(work) != 1 or work[0][1] < 2:
            return None
        (request, tokens), now = work[0], time.perf_counter()
        loading = request.load is not None and not request.load.done()
        return Prefill(
            request, tokens, request.computed, now, now - request.load_begun if loading else None, self._event()
        )

    def end(self, prefill: Prefill | None) -> None:
        """Right after the forward pass, whose kernels may be still to run."""
        if prefill is not None:
            prefill.end, prefill.seconds = self._event(), time.perf_counter() - prefill.begun
            self._ended.append(prefill)

    def report(self) -> None:
        """Tell the cache of the passes that are done and whose loads have a verdict. Waits for nothing."""
        while self._ended and (self._ended[0].end is None or self._ended[0].end.query()):  # type: ignore[no-untyped-call]
            done = self._ended.popleft()
            if done.start is not None and done.end is not None:
                done.seconds = float(done.start.elapsed_time(done.end)) / 1e3
            load_seconds = done.request.load_seconds if done.lead is not None else None
            if self._cache is None or done.seconds <= 0 or (done.lead is not None and not load_seconds):
                continue  # a load that failed, or ended with the pass thrown away, says nothing
            self._cache.observe_prefill(done.tokens, done.cached, done.seconds + (done.lead or 0.0), load_seconds)

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
