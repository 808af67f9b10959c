"""The engine's metrics among SGLang's own, as `sglang:gdscache_*`, with --enable-metrics.

The scheduler process has the engine, and another process answers scrapes: they share Prometheus' files. A thread
updates these once a second, so that no scheduler step waits.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from gdscache.engine.engine import CacheEngine
from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import EngineClosedError
from gdscache.runtime.threads import failure_of, log_failure, start

EVERY_S = 1.0


class ToldMetrics:
    """Reports engines to SGLang's registry until `close`."""

    def __init__(self, engine: CacheEngine | HybridEngine, server: Any, every: float = EVERY_S) -> None:
        """`server`: SGLang's settings (`setup.resolved`). `every`: seconds between two reports."""
        # Not before: Prometheus' client reads PROMETHEUS_MULTIPROC_DIR once, which SGLang has set by now.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        from gdscache.metrics.mirror import Differences, Mirror

        self._engines = engine.by_groups if isinstance(engine, HybridEngine) else {"": engine}
        self._every, self._over = every, threading.Event()
        self._mirror = Mirror("sglang:", Counter, Gauge, Histogram, ["model_name", "group"], registry=REGISTRY)
        self._model = server.served_model_name or server.model_path
        self._figures = {group: Differences(every, time.monotonic) for group in self._engines}
        for group, one in self._engines.items():
            self._mirror.born([self._model, group], one.tiers)
        self._tell()
        self._thread = threading.Thread(target=self._serve, name="gdscache-metrics", daemon=True)
        start([self._thread], self._mirror.close)

    def close(self) -> None:
        """Report once more, and stop. Call it once, before the engine's close."""
        self._over.set()
        self._thread.join()
        self._mirror.close()

    def _serve(self) -> None:
        ending = False
        while not ending:
            ending = self._over.wait(self._every)
            error = failure_of(self._tell)
            if isinstance(error, EngineClosedError):
                return
            log_failure(error)

    def _tell(self) -> None:
        for group, engine in self._engines.items():
            self._mirror.add([self._model, group], self._figures[group].take(engine.stats()))
