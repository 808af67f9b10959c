"""Times of an inference engine's prefills, for the gate: measured around its passes, without waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

LEAST_TOKENS = 16  # of a pass whose time is used


class Prefills:
    """Times the passes over one prompt each. On a GPU by two events around the forward pass, read when the second is
    done; on a CPU by the host's clock."""

    def __init__(self, observe: Callable[[int, int, float], object], device: torch.device) -> None:
        """`observe`: called with each time, like `CacheEngine.observe_prefill`."""
        self._observe = observe
        self._device = device
        self._now: tuple[tuple[int, int], Any] | None = None
        self._ended: deque[tuple[tuple[int, int], Any, Any]] = deque()

    def begin(self, prefill: tuple[int, int] | None) -> None:
        """Before a forward pass, with (tokens, tokens before them). None: its time is not used."""
        self._now = None if prefill is None else (prefill, self._mark())

    def end(self) -> None:
        """After the forward pass, whose kernels may not have run. Reports the passes that are over."""
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
