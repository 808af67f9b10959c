"""The engine's metrics among SGLang's own, as `sglang:gdscache_*`, with --enable-metrics.

The scheduler process has the engine, and another process answers scrapes: they share Prometheus' files. A thread
updates these once a second, so that no scheduler step waits.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from gdscache.engine.hybrid import HybridEngine
from gdscache.errors import EngineClosedError
from gdscache.runtime.threads import failure_of, log_failure, start

if TYPE_CHECKING:
    from gdscache.engine.engine import CacheEngine
    from gdscache.metrics.mirror import Differences, Mirror

EVERY_S = 1.0


class ToldMetrics:
    """Reports engines to SGLang's registry, if SGLang has one, until `close`."""

    def __init__(self, engine: CacheEngine | HybridEngine, server: Any, every: float = EVERY_S) -> None:
        """`server`: SGLang's settings (`setup.resolved`). `every`: seconds between two reports."""
        engines = engine.by_groups if isinstance(engine, HybridEngine) else {"": engine}
        self._engines, self._every = engines, every
        self._over = threading.Event()
        self._mirror: Mirror | None = None
        self._figures: dict[str, Differences] = {}
        if not getattr(server, "enable_metrics", False):
            return
        # Not before: Prometheus' client reads PROMETHEUS_MULTIPROC_DIR once, which SGLang has set by now.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        from gdscache.metrics.mirror import Differences, Mirror

        labels = ["model_name", "group"]
        self._mirror = mirror = Mirror("sglang:", Counter, Gauge, Histogram, labels, registry=REGISTRY)
        self._model = server.served_model_name or server.model_path
        self._figures = {group: Differences(every, time.monotonic) for group in engines}
        for group, engine in engines.items():
            mirror.born([self._model, group], engine.tiers)
        self._tell(mirror)
        self._thread = threading.Thread(target=self._serve, args=(mirror,), name="gdscache-metrics", daemon=True)
        start([self._thread], self.close)

    def close(self) -> None:
        """Report once more, and stop. Call it before the engine's close; repeated calls are fine."""
        self._over.set()
        if self._mirror is not None:
            if self._thread.is_alive():
                self._thread.join()
            self._mirror.close()
            self._mirror = None

    def _serve(self, mirror: Mirror) -> None:
        ending = False
        while not ending:
            ending = self._over.wait(self._every)
            error = failure_of(functools.partial(self._tell, mirror))
            if isinstance(error, EngineClosedError):
                return
            log_failure(error)

    def _tell(self, mirror: Mirror) -> None:
        for group, engine in self._engines.items():
            mirror.add([self._model, group], self._figures[group].take(engine.stats()))
