"""Metrics at an address of their own (`metrics.port`), for processes that serve none."""

from __future__ import annotations

import weakref
from typing import Any

import prometheus_client

from gdscache.errors import EngineClosedError, MetricsAddressError
from gdscache.metrics.collector import EngineCollector, Source


class MetricsServer:
    """Serves an engine's metrics from a thread. It holds the engine weakly: an engine without other owners is
    closed."""

    def __init__(self, engine: Source, host: str, port: int) -> None:
        """Raises `MetricsAddressError` if the address cannot be served. Port 0: any free one."""
        registry = prometheus_client.CollectorRegistry()
        registry.register(EngineCollector(_Weakly(engine)))
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


class _Weakly:
    """A weak reference to an engine."""

    def __init__(self, engine: Source) -> None:
        self._engine = weakref.ref(engine)
        self.pools = getattr(engine, "pools", ())

    def stats(self) -> dict[str, Any]:
        engine = self._engine()
        if engine is None:
            raise EngineClosedError("the engine is closed", "open a new one with from_config")
        return engine.stats()
