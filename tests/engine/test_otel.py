"""A span of OpenTelemetry for each load: in its caller's trace, with tiers and bytes; nothing of it without the key."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gdscache import CacheEngine
from gdscache.errors import MissingPackageError
from gdscache.load.run import LoadRun
from gdscache.storage.base import Op
from gdscache.tracing import OtelTimeline
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import WAIT, Host, drop_from, make_config, prompt, settle, together

SDK = "no opentelemetry-sdk: pip install gdscache[test]"


@pytest.fixture
def exporter() -> Any:
    return pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=SDK
    ).InMemorySpanExporter()


@pytest.fixture
def provider(exporter: Any) -> Iterator[Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


@pytest.fixture
def host(tmp_path: Path, provider: Any) -> Iterator[Host]:
    """A host whose engine tells of loads."""
    config = make_config(tmp_path / "cache", cpu=8, ssd=16, transport="tests.support.faulty:FaultyTransport")
    opened = Host(config)
    opened.engine.close()
    opened.engine = CacheEngine.from_config(config, planes=opened.planes, timeline=OtelTimeline(provider))
    yield opened
    settle(opened.engine)
    opened.engine.close()


def spans(host: Host, exporter: Any) -> list[Any]:
    settle(host.engine)
    return list(exporter.get_finished_spans())


def test_a_load_is_a_span_in_its_callers_trace_with_tiers_and_bytes(host: Host, provider: Any, exporter: Any) -> None:
    host.keep(prompt(1, 4)).result(WAIT)
    drop_from(host.engine, "cpu")
    host.load(prompt(1, 2))  # two pages are in the CPU tier again
    exporter.clear()
    with provider.get_tracer("engine").start_as_current_span("request"):
        load, *_ = host.begin(prompt(1, 4))
    assert load.result(WAIT).tokens == 16
    by_name = {span.name: span for span in spans(host, exporter)}
    assert by_name.keys() == {"request", "gdscache.load"}
    request, span = by_name["request"], by_name["gdscache.load"]
    assert span.parent.span_id == request.context.span_id
    assert request.start_time <= span.start_time <= request.end_time, "it begins where load() is called"
    assert span.end_time > span.start_time
    half = 2 * host.layout.page_bytes
    assert dict(span.attributes) == {
        "gdscache.load": 2, "gdscache.pages": 4, "gdscache.bytes": 2 * half, "gdscache.bad_pages": 0,
        "gdscache.tiers": ("cpu", "ssd"), "gdscache.bytes.cpu": half, "gdscache.bytes.ssd": half,
    }  # fmt: skip
    assert span.status.is_unset


def test_threads_that_load_at_once_have_their_own_traces(host: Host, provider: Any, exporter: Any) -> None:
    host.keep(prompt(1, 4)).result(WAIT)
    tracer, start = provider.get_tracer("engine"), threading.Barrier(4)

    def request(number: int) -> None:
        start.wait(WAIT)
        with tracer.start_as_current_span(f"request {number}"):
            host.begin(prompt(1, 4))[0].result(WAIT)

    together(request, 4)
    found = spans(host, exporter)
    requests = {span.context.span_id for span in found if span.name != "gdscache.load"}
    assert {span.parent.span_id for span in found if span.name == "gdscache.load"} == requests
    assert len(requests) == 4


def test_a_load_of_requests_is_in_the_trace_of_the_first_and_linked_to_the_others(host: Host, exporter: Any) -> None:
    """By the headers that an engine got with its requests."""
    host.keep(prompt(1, 2)).result(WAIT)
    headers = [{"traceparent": f"00-{trace:032x}-{7:016x}-01"} for trace in (1, 2, 3)]
    timeline = host.engine.timeline
    with timeline.requests([None, *headers, {}]):
        host.load(prompt(1, 2))
    with timeline.requests([None, {"traceparent": "nonsense"}]), timeline.requests([]):
        host.load(prompt(1, 2))
    host.load(prompt(1, 2))
    joined, *alone = spans(host, exporter)
    assert (joined.context.trace_id, joined.parent.span_id) == (1, 7)
    assert [link.context.trace_id for link in joined.links] == [2, 3]
    assert [(span.parent, len(span.links)) for span in alone] == [(None, 0)] * 2


def test_bad_pages_are_counted_and_a_load_that_breaks_off_is_an_error(
    host: Host, exporter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.keep(prompt(1, 3)).result(WAIT)
    drop_from(host.engine, "cpu")
    with PLAN.rule(Op.READ, Fault.EIO, times=1):
        host.load(prompt(1, 3))
    [span] = spans(host, exporter)
    assert span.attributes["gdscache.bad_pages"] >= 1
    assert span.parent is None
    exporter.clear()

    once = iter(["on purpose"])

    def broken(run: LoadRun) -> None:
        if message := next(once, ""):
            raise RuntimeError(message)

    host.keep(prompt(2, 3)).result(WAIT)
    monkeypatch.setattr(LoadRun, "_measure", broken)
    load, *_ = host.begin(prompt(2, 3))
    with pytest.raises(RuntimeError, match="on purpose"):
        load.result(WAIT)
    [span] = spans(host, exporter)
    assert not span.status.is_ok
    assert not span.status.is_unset


def test_the_key_switches_it_on_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: Any
) -> None:
    with CacheEngine.from_config(make_config(traces=True)) as engine:
        assert isinstance(engine.timeline, OtelTimeline)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingPackageError, match=r"gdscache\[otel\]"):
        CacheEngine.from_config(make_config(traces=True))


def test_loads_that_never_ran_are_forgotten(provider: Any, exporter: Any) -> None:
    timeline = OtelTimeline(provider)
    for _ in range(5000):
        last = timeline.number()
    assert len(timeline._called) == 4096
    with timeline.span("load", load=1, pages=1):
        pass
    assert last == 5000
    assert exporter.get_finished_spans()[0].parent is None
