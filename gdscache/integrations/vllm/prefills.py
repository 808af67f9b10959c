"""Times of vLLM's prefills, for the engine's gate: measured around steps, without waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

LEAST_TOKENS = 16  # of a step whose time is used


def prefill_of(step: Any) -> tuple[int, int] | None:
    """(tokens, tokens before them) of a step that computes only a part of one request's prompt; else None.

    `step`: vLLM's `SchedulerOutput`.
    """
    scheduled: Mapping[str, int] = step.num_scheduled_tokens
    if len(scheduled) != 1:
        return None
    ((request, tokens),) = scheduled.items()
    if tokens < LEAST_TOKENS:
        return None
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
    return (tokens, computed[request]) if request in computed else None


class Prefills:
    """Times the steps of one prompt each. On a GPU by two events around the forward pass, read when the second is done;
    on a CPU by the host's clock."""

    def __init__(self, observe: Callable[[int, int, float], object], device: torch.device) -> None:
        """`observe`: called with each time, like `CacheEngine.observe_prefill`."""
        self._observe = observe
        self._device = device
        self._now: tuple[tuple[int, int], Any] | None = None
        self._ended: deque[tuple[tuple[int, int], Any, Any]] = deque()

    def begin(self, prefill: tuple[int, int] | None) -> None:
        """Before the forward pass of a step. None: its time is not used."""
        self._now = None if prefill is None else (prefill, self._mark())

    def end(self) -> None:
        """After the forward pass, whose kernels may not have run. Reports the steps that are over."""
        if self._now is not None:
            self._ended.append((*self._now, self._mark()))
            self._now = None
        while self._ended and (isinstance(last := self._ended[0][2], float) or last.query()):
            (tokens, before), start, last = self._ended.popleft()
            seconds = last - start if isinstance(last, float) else float(start.elapsed_time(last)) / 1e3
            if seconds > 0:
                self._observe(tokens, before, seconds)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
