"""Loads as spans of OpenTelemetry, in the traces of their requests."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
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
    """A span `gdscache.load` for each load, from its call to its verdict, told to the process's tracer provider. It is
    below the span that is current where the load is called; within `requests`, in the trace of the first, and linked to
    those of the others.

    Its attributes are `gdscache.load` (a number), `gdscache.pages`, `gdscache.tiers`, `gdscache.bytes`,
    `gdscache.bytes.<tier>` and `gdscache.bad_pages`. `provider`: another one than the process's. Raises
    `MissingPackageError` without `gdscache[otel]`.
    """

    __slots__ = ("_called", "_context", "_headers", "_links", "_lock", "_next", "_status", "_trace", "_tracer")

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingPackageError(
                f"traces need OpenTelemetry, which cannot be imported: {error}", "install gdscache[otel]"
            ) from error
        self._context, self._trace = context, trace
        self._headers = TraceContextTextMapPropagator()
        self._links = context.create_key("gdscache-links")
        self._tracer = trace.get_tracer("gdscache", tracer_provider=provider)
        self._status = trace.StatusCode.ERROR
        self._next = itertools.count(1)
        self._lock = threading.Lock()
        self._called: dict[int, tuple[Any, int]] = {}  # by a load's number: the caller's context, and when

    @contextlib.contextmanager
    def requests(self, headers: Iterable[Mapping[str, str] | None], /) -> Iterator[None]:
        contexts = [self._headers.extract(one, self._context.Context()) for one in headers if one]
        if not contexts:
            yield
            return
        links = [self._trace.Link(self._trace.get_current_span(one).get_span_context()) for one in contexts[1:]]
        token = self._context.attach(self._context.set_value(self._links, links, contexts[0]))
        try:
            yield
        finally:
            self._context.detach(token)

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
        links: Any = self._context.get_value(self._links, context)
        span = _LoadSpan(self._tracer.start_span("gdscache.load", context, links=links, start_time=began), self._status)
        span.add(**about)
        return span
