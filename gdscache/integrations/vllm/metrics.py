"""Counts of the connector and its engine in vLLM's own places: its log line of KV transfers, and its Prometheus
metrics, which may be in another process."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter as CounterMetric
from prometheus_client import Gauge as GaugeMetric
from prometheus_client import Histogram as HistogramMetric
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from gdscache.integrations.settings import tiers_named
from gdscache.metrics.mirror import Mirror, merged

ENGINE = "engine"  # in a step's data, beside these counts: `mirror.News` of the engine's figures, by group of layers
COUNTED = {
    "loads": "Loads of cached prefixes that were begun.",
    "begun_pages": "Pages of those loads.",
    "offered_pages": "Pages that were handed over to be stored.",
    "unstored_pages": "Pages of these whose store was refused as a whole; the log has the error.",
    "bad_pages": "Pages that a load between steps did not bring, and that were computed.",
    "deferred": "Times that a request was told to ask again, since its pages were on their way.",
    "late": "Requests whose pages did not come in time.",
    "alone_adapter": "Requests without the cache: of an adapter.",
    "alone_embeddings": "Requests without the cache: with embeddings in place of tokens.",
    "alone_media": "Requests without the cache: with images, sounds or videos (option media).",
    "alone_weights": "Requests without the cache: begun while vLLM's own has pages of old weights.",
    "alone_reads_nothing": "Requests without the cache: they want every token computed.",
    "blocks_awaited": "Stores that a step waited for, since it was to write to their blocks.",
    "scheduler_seconds": "Seconds that the connector took in the scheduler.",
    "worker_seconds": "Seconds that the connector took in the worker, waits for layers included.",
    "steps": "Steps of the scheduler.",
}


class GdsCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step, as plain data, since they go to another process."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> GdsCacheStats:
        """Add the other's counts to these, and return this object."""
        for name, value in other.data.items():
            if name != ENGINE:
                self.data[name] = self.data.get(name, 0) + value
            else:
                ours = self.data.setdefault(name, {})
                for group, news in value.items():
                    ours[group] = merged(ours[group], news) if group in ours else news
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items() if value and name != ENGINE}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reset(self) -> None:
        self.data = {}


class GdsCacheProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """The connector's counts as Prometheus counters, and the engine's metrics, for each of vLLM's engines."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[CounterMetric]
        self._counters = {
            name: kind(name=f"vllm:gdscache_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTED.items()
        }
        gauge, histogram = metric_types[GaugeMetric], metric_types[HistogramMetric]
        self._engines = Mirror("vllm:", kind, gauge, histogram, [*labelnames, "group"])
        tiers = tiers_named(vllm_config.kv_transfer_config.kv_connector_extra_config["config"])
        for labels in per_engine_labelvalues.values():
            self._engines.born([*labels, ""], tiers)
            for counter in self._counters.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == ENGINE:
                for group, news in value.items():
                    self._engines.add([*labels, group], news)
            elif value and name in self._counters:
                self._counters[name].labels(*labels).inc(value)
