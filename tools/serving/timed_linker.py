"""gdscache's linker, which notes what its calls take of SGLang's scheduler, on rank 0. See sglang_run.py."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import parts

from gdscache.integrations.sglang.linker import GdsCacheLinker

CALLS = (
    *("lookup", "load", "start_layer_wise_loading", "finish_layer_wise_loading", "cancel_queued_load"),
    *("offload", "num_completed_offloads", "pop_completed_offload"),
)
EVERY_S = 0.5


class TimedLinker(GdsCacheLinker):
    """Writes the seconds of its calls, and of waits of a forward pass for layers, every half a second."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if self.engine is None:
            return
        self._seconds: Counter[str] = Counter()
        self._path = Path(os.environ[parts.CALLS])
        self._written = 0.0
        for name in CALLS:
            setattr(self, name, self._timed(name, getattr(self, name)))
        counter: Any = self.layer_done_counter
        counter.wait_until = self._timed("wait_until", counter.wait_until)

    def _timed(self, name: str, method: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*given, **more)
            finally:
                now = time.perf_counter()
                self._seconds[name] += now - start  # type: ignore[assignment]
                self._seconds[f"{name} calls"] += 1
                if now > self._written + EVERY_S:
                    self._written = now
                    found = {**self._seconds, **{f"counted {k}": v for k, v in self.counts.items()}}
                    self._path.write_text(json.dumps(found))

        return call
