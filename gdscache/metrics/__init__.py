"""Prometheus metrics of an engine.

    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine))

`table.py` lists the metrics, `collector.py` shows them in a registry and serves them, and `mirror.py` brings
them to registries of other processes.
"""

from gdscache.metrics.collector import EngineCollector
from gdscache.metrics.table import FAMILIES

__all__ = ["FAMILIES", "EngineCollector"]
