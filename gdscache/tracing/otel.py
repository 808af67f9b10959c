"""Loads as spans of OpenTelemetry, below the span that is current where `load()` is called."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from gdscache.errors import MissingPackageError
from gdscache.tracing.base import Span, Timeline

_KEPT = 4096  # loads that were numbered and have not run yet; the oldest beyond them lose their parent


class _LoadSpan(Span):
    """A span that begins where the load was called."""

    __slots__ = ("_span", "_status")

    def __init__(self, span: Any, status: Any) -> None:
        self._span = span
        self._status = status

    def add(self, /, **about: Any) -> None:
        tiers = about.pop("tiers", {})
        told = {"tiers": list(tiers), **about, **{f"bytes.{tier}": nbytes for tier, nbytes in tiers.items()}}
        self._span.set_attributes({f"gdscache.{name}": value for name, value in told.items()})

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], BaseException):
            self._span.record_exception(error[1])
            self._span.set_status(self._status)
        self._span.end()


class OtelTimeline(Timeline):
    """A span `gdscache.load` for each load, from its call to its verdict, told to the process's tracer provider.

    Its attributes are `gdscache.load` (a number), `gdscache.pages`, `gdscache.tiers`, `gdscache.bytes`,
    `gdscache.bytes.<tier>` and `gdscache.bad_pages`. `provider`: another one than the process's. Raises
    `MissingPackageError` without `gdscache[otel]`.
    """

    __slots__ = ("_called", "_context", "_lock", "_next", "_status", "_tracer")

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry import context, trace
        except ImportError as error:
            raise MissingPackageError(
                f"traces need OpenTelemetry, which cannot be imported: {error}", "install gdscache[otel]"
            ) from error
        self._context = context
        self._tracer = trace.get_tracer("gdscache", tracer_provider=provider)
        self._status = trace.StatusCode.ERROR
        self._next = itertools.count(1)
        self._lock = threading.Lock()
        self._called: dict[int, tuple[Any, int]] = {}  # by a load's number: the caller's context, and when

    def number(self) -> int:
        number, called = next(self._next), (self._context.get_current(), time.time_ns())
        with self._lock:
            self._called[number] = called
            if len(self._called) > _KEPT:
                del self._called[next(iter(self._called))]
        return number

    def span(self, kind: str, /, **about: Any) -> Span:
        if kind not in ("load", "prefetch"):
            return super().span(kind)
        with self._lock:
            context, began = self._called.pop(about["load"], (None, None))
        if kind == "prefetch":
            return super().span(kind)
        span = _LoadSpan(self._tracer.start_span("gdscache.load", context, start_time=began), self._status)
        span.add(**about)
        return span

    def compute(self, kind: str, device: Any, /, **about: Any) -> Span:
        return super().span(kind)
