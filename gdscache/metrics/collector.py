"""A collector for a registry of Prometheus' client, which reads `engine.stats()` at each scrape and keeps nothing; and
its server at an address of its own (`metrics.port`), for processes that serve no metrics."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gdscache.arguments import shown
from gdscache.errors import EngineClosedError, InvalidValueError, MetricsAddressError
from gdscache.histograms import Buckets
from gdscache.metrics.table import FAMILIES, Family, Labels, parts_of


class Source(Protocol):
    def stats(self) -> dict[str, Any]: ...


class EngineCollector(Collector):
    """Register it in a registry of your own. `engines`: one engine, or engines by the value of the label `engine`.

    The pools of a `HybridEngine` have the label `group`, the names of their groups; it is empty for whole hits, and for
    engines without pools. A closed engine shows `gdscache_open` 0 and nothing else. Raises `InvalidValueError`.
    """

    def __init__(self, engines: Source | Mapping[str, Source]) -> None:
        named = isinstance(engines, Mapping)
        given = engines if isinstance(engines, Mapping) else {"": engines}
        for name, engine in given.items():
            if not isinstance(name, str) or not hasattr(engine, "stats"):
                message = f"engines has {shown(name)}: {shown(engine)}" if named else f"engines is {shown(engines)}"
                raise InvalidValueError(message, "pass an engine, or a mapping of engines by names that are texts")
        self._engines: dict[Labels, Source] = {(name,) if named else (): engine for name, engine in given.items()}
        self._named: Labels = ("engine",) if named else ()
        pools = any(getattr(engine, "pools", ()) for engine in self._engines.values())
        self._labels: Labels = (*self._named, "group") if pools else self._named

    def describe(self) -> Iterable[Metric]:
        """The metrics without values, so that a registry finds repeated names without asking the engine."""
        return [self._open(), *(_empty(family, self._labels) for family in FAMILIES)]

    def collect(self) -> Iterator[Metric]:
        """One snapshot of every engine."""
        is_open = self._open()
        found = [(family, _empty(family, self._labels)) for family in FAMILIES]
        for name, engine in self._engines.items():
            try:
                stats = engine.stats()
            except (EngineClosedError, ReferenceError):  # of a weak reference, whose engine is gone
                is_open.add_metric(name, 0)
                continue
            is_open.add_metric(name, 1)
            for group, part in parts_of(stats).items():
                place = (*name, group) if len(self._labels) > len(self._named) else name
                for family, metric in found:
                    for labels, value in family.read(part).items():
                        _add(metric, [*place, *labels], value, family)
        yield is_open
        for _, metric in found:
            yield metric

    def _open(self) -> GaugeMetricFamily:
        return GaugeMetricFamily("gdscache_open", "1 while the engine is open.", labels=self._named)


_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def _empty(family: Family, labels: Labels) -> Metric:
    kind: Any = _KINDS[family.kind]
    made: Metric = kind(family.name, family.help, labels=[*labels, *family.labels])
    return made


def _add(metric: Any, labels: list[str], value: float | Buckets, family: Family) -> None:
    if not isinstance(value, Mapping):
        metric.add_metric(labels, value)
        return
    bounds, counts = map(floatToGoString, (*family.bounds, math.inf)), itertools.accumulate(value["counts"])
    metric.add_metric(labels, [*zip(bounds, counts, strict=True)], sum(value["sums"]))


class MetricsServer:
    """Serves an engine's metrics from a thread. It holds the engine weakly: an engine without other owners is
    closed."""

    def __init__(self, engine: Source, host: str, port: int) -> None:
        """Raises `MetricsAddressError` if the address cannot be served. Port 0: any free one."""
        registry = prometheus_client.CollectorRegistry()
        registry.register(EngineCollector(weakref.proxy(engine)))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a host that can be no name
            raise MetricsAddressError(
                f"metrics cannot be served at {host}:{port}: {error}", "set metrics.port and metrics.host to others"
            ) from error
        self._thread.name = "gdscache-metrics"

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
