"""Timelines: each span is there and ends whatever happens, the file is what Perfetto reads, and off costs nothing."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdscache import CacheEngine, PageStatus
from gdscache.errors import InvalidValueError
from gdscache.kernels.cuda import CopyRoute
from gdscache.load import run as load_run
from gdscache.pages.layout import GroupSizes
from gdscache.storage.base import Op
from gdscache.tracing import OFF, NvtxTimeline, Timeline, TraceTimeline, timeline_from_environment
from gdscache.tracing.trace import lanes
from tests.support import fake_gpu
from tests.support.faulty import PLAN, Fault
from tests.support.helpers import MHA, WAIT, Host, OpenHost, drop_from, prompt, raising, settle, until

FAULTY = "tests.support.faulty:FaultyTransport"
SIX = MHA | {"layers": 6, "head_dim": 72}  # of 4,608 bytes each, read in four groups
PAGES = 4
KINDS = {"lookup", "plan", "begin", "load", "read", "scatter", "wait", "ready", "store", "gather", "write", "commit"}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_run, "GROUP_SIZES", GroupSizes(least=4096, first=1))
    for name in ("NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def traced(open_host: OpenHost, slab: Path) -> Callable[..., Host]:
    """`traced(timeline, **make_config arguments)`: a host whose cache tells that timeline."""

    hosts: list[Host] = []

    def opens(timeline: Timeline, **options: Any) -> Host:
        host = open_host(**{"model": SIX, "transport": FAULTY, "cpu": 8, "ssd": 16} | options)
        config = host.engine.config
        host.engine.close()
        host.engine = CacheEngine.from_config(config, planes=host.planes, timeline=timeline)
        hosts.append(host)
        return host

    yield opens
    for host in hosts:
        if not host.engine._closing.begun:
            settle(host.engine)
        host.engine.close()


def stored(host: Host, tokens: Sequence[int], *, drop: Sequence[str] = ("cpu",)) -> None:
    host.keep(list(tokens))
    drop_from(host.engine, *drop)


def events(timeline: TraceTimeline, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a trace, checked: those of one kind, or all."""
    data = timeline.describe()
    check_schema(data)
    return [e for e in data["traceEvents"] if e["ph"] != "M" and kind in (None, e["cat"])]


def finished(timeline: TraceTimeline) -> list[dict[str, Any]]:
    """The events when each span has ended, which is later than what its thread did is known."""
    until(lambda: not [e for e in events(timeline) if "unfinished" in e["args"]], "all spans end")
    assert not timeline.stack
    return events(timeline)


def check_schema(data: dict[str, Any]) -> None:
    """What the trace-event format asks for, and that no two spans of a track cross."""
    assert json.loads(json.dumps(data)) == data
    assert data["otherData"]["format"] == 1
    names: dict[int, str] = {}
    last = 0.0
    open_ends: dict[int, list[float]] = {}
    for event in data["traceEvents"]:
        assert event["pid"] == 1
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                assert event["tid"] not in names
                names[event["tid"]] = event["args"]["name"]
            continue
        assert event["tid"] in names, "an event of a track without a name"
        assert event["ts"] >= last >= 0, "events are not sorted"
        last = event["ts"]
        assert event["name"].startswith(event["cat"])
        assert isinstance(event["args"], dict)
        if event["ph"] == "i":
            assert event["s"] == "t"
            continue
        assert event["dur"] >= 0
        stack = open_ends.setdefault(event["tid"], [])
        while stack and stack[-1] <= event["ts"] + 0.0005:
            stack.pop()
        end = event["ts"] + event["dur"]
        assert not stack or end <= stack[-1] + 0.0005, f"{event} crosses a span of {names[event['tid']]}"
        stack.append(end)
    assert len(set(names.values())) == len(names)


def track_names(data: dict[str, Any]) -> dict[int, str]:
    """The names of a file's tracks by their number; Perfetto shows the least number on top."""
    return {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}


def tracks_by_kind(data: dict[str, Any]) -> dict[str, str]:
    """The name of the track that the spans of each kind are on."""
    names = track_names(data)
    return {e["cat"]: names[e["tid"]] for e in data["traceEvents"] if e["ph"] == "X"}


def layers_of(event: dict[str, Any]) -> range:
    return range(event["args"]["first_layer"], event["args"]["last_layer"] + 1)


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_every_read_and_copy_of_an_ssd_hit_is_there(traced: OpenHost) -> None:
    timeline = TraceTimeline()
    host = traced(timeline)
    tokens, layout = prompt(1, PAGES), host.layout
    stored(host, tokens)
    report = host.load(tokens)
    settle(host.engine)
    found = finished(timeline)
    assert {event["cat"] for event in found} == KINDS
    reads, copies = ([e for e in found if e["cat"] == kind] for kind in ("read", "scatter"))
    assert report.bytes_by_tier == {"ssd": PAGES * layout.page_bytes}
    assert sum(e["args"]["bytes"] for e in reads) == PAGES * layout.extent_bytes
    assert sum(e["args"]["bytes"] for e in copies) == report.bytes_by_tier["ssd"]
    assert [list(layers_of(e)) for e in reads] == [[0], [1, 2], [3, 4], [5]]
    assert all(e["args"]["pages"] == PAGES for e in reads)
    (load,) = (e for e in found if e["cat"] == "load")
    number = load["args"]["load"]
    of_load = [e for e in found if e["cat"] in ("read", "scatter", "wait", "ready")]
    assert {e["args"]["load"] for e in of_load} == {number}
    ready = {e["args"]["layer"]: e["ts"] for e in found if e["cat"] == "ready"}
    waits = {e["args"]["layer"]: e["ts"] + e["dur"] for e in found if e["cat"] == "wait"}
    assert sorted(ready) == sorted(waits) == list(range(6))
    for layer in range(6):
        assert ready[layer] <= waits[layer]
        group = [e for e in (*reads, *copies) if layer in layers_of(e)]
        assert sum(e["args"]["pages"] for e in group if e["cat"] == "scatter") == PAGES
        assert min(e["ts"] for e in group if e["cat"] == "read") <= min(e["ts"] for e in group if e["cat"] == "scatter")
        assert max(e["ts"] + e["dur"] for e in group if e["cat"] == "scatter") <= ready[layer]
    stores = {kind: [e for e in found if e["cat"] == kind] for kind in ("gather", "write", "commit")}
    assert sum(e["args"]["bytes"] for e in stores["gather"]) == PAGES * layout.page_bytes
    assert sum(e["args"]["bytes"] for e in stores["write"]) == PAGES * layout.extent_bytes
    assert sum(e["args"]["pages"] for e in stores["commit"]) == PAGES
    assert all("error" not in e["args"] for e in found)


def test_tracks_have_the_names_of_what_they_do(traced: OpenHost, tmp_path: Path) -> None:
    timeline = TraceTimeline()
    host = traced(timeline)
    stored(host, prompt(1, PAGES))
    host.load(prompt(1, PAGES))
    settle(host.engine)
    data = json.loads(timeline.write(tmp_path / "t.json").read_text())
    by_kind = tracks_by_kind(data)
    assert by_kind["wait"] == track_names(data)[min(track_names(data))] == "model thread"
    assert by_kind["lookup"] == by_kind["plan"] == "model thread"  # who calls carries it out
    assert by_kind["load"].startswith("load ")
    assert by_kind["read"].startswith("SSD reads")
    assert (by_kind["gather"], by_kind["write"]) == ("copies", "SSD writes")
    assert by_kind["commit"] in ("write 0", "write 1")  # a second batch has a track of its own


@pytest.mark.parametrize("bounce", [2, 4])
def test_a_hit_of_several_tiers_and_through_the_bounce_reserve(traced: OpenHost, bounce: int) -> None:
    timeline = TraceTimeline()
    host = traced(timeline, cpu=2, ssd=16, bounce=bounce)
    tokens = prompt(2, 6)
    stored(host, tokens, drop=())
    report = host.load(tokens)
    copies = events(timeline, "scatter")
    assert report.tokens == 24
    assert {s.value for s in report.pages} == {"loaded"}
    assert sum(e["args"]["bytes"] for e in copies) == sum(report.bytes_by_tier.values())
    reads = events(timeline, "read")
    assert {layer for e in reads for layer in layers_of(e)} == set(range(6))
    assert {e["args"]["load"] for e in (*reads, *copies)} == {1}


def test_a_prefetch_is_no_load(traced: OpenHost) -> None:
    timeline = TraceTimeline()
    host = traced(timeline)
    tokens = prompt(1, PAGES)
    stored(host, tokens)
    with host.engine.prefetch(tokens) as prefetch:
        assert prefetch.result(WAIT).tokens == 16
    until(lambda: bool(events(timeline, "prefetch")), "the span of a prefetch ends")
    assert not events(timeline, "load")
    assert sum(e["args"]["pages"] for e in events(timeline, "read")) == PAGES
    assert not events(timeline, "scatter")
    assert events(timeline, "check")


# -- whatever goes wrong, what began ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["staged", "copy_engine"])
def test_what_the_streams_of_a_gpu_did(
    traced: OpenHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: CopyRoute
) -> None:
    """Copies and kernels of both directions, on tracks of their own, within the load that they are of."""
    fake_gpu.use(monkeypatch, route)
    timeline = TraceTimeline()
    host = traced(timeline, load={"verify": "always"})
    stored(host, prompt(1, PAGES))
    host.load(prompt(1, PAGES))
    settle(host.engine)
    found, names = finished(timeline), track_names(timeline.describe())
    for way in ("load", "store"):
        tracks = {
            kind: {names[e["tid"]] for e in found if e["cat"] == f"{way} {kind}"} for kind in ("copies", "kernel")
        }
        assert tracks["copies"] == {f"{way}s: copy stream"}
        kernels = f"{way}s: kernel stream"  # of a lane's three; the times of all four groups may overlap
        assert {kernels} <= tracks["kernel"] <= {kernels, *(f"{kernels} ({number})" for number in (2, 3, 4))}
    begun, load = ([e for e in found if e["cat"] == kind] for kind in ("begin", "load"))
    work = [e for e in found if e["cat"] in ("load copies", "load kernel")]
    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    # The two clocks are compared once, by a thread that may lose its turn meanwhile: all are off by the same time.
    assert last - first <= load[0]["ts"] + load[0]["dur"] - begun[0]["ts"] + 1
    assert abs(first - begun[0]["ts"]) < WAIT * 1e6


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.SHORT, Fault.FLIP])
@pytest.mark.parametrize("skip", [0, 15])
def test_reads_that_fail_end(traced: OpenHost, fault: Fault, skip: int) -> None:
    timeline = TraceTimeline()
    host = traced(timeline)
    tokens = prompt(3, PAGES)
    stored(host, tokens)
    with PLAN.rule(Op.READ, fault, skip=skip, times=1) as rule:
        report = host.load(tokens)
    assert rule.met == 1
    assert report.first_bad is not None
    settle(host.engine)
    reads = [e for e in finished(timeline) if e["cat"] == "read"]
    assert reads
    good = sum(e["args"]["bytes"] for e in events(timeline, "scatter"))
    assert good >= sum(report.bytes_by_tier.values())


def test_a_read_that_hangs_ends_later(traced: OpenHost) -> None:
    timeline = TraceTimeline()
    host = traced(timeline, deadline=2.0)  # so long that the reads begin, however busy the machine is
    tokens = prompt(3, PAGES)
    stored(host, tokens)
    with PLAN.rule(Op.READ, Fault.HANG, times=1) as rule:
        load, blocks, _ = host.begin(tokens)
        report = load.result(WAIT)
        assert rule.met == 1
        assert PageStatus.DEADLINE in report.pages
        released = (time.perf_counter_ns() - timeline._zero) / 1000
        rule.release()
    until(lambda: any(e["ts"] + e["dur"] >= released for e in events(timeline, "read")), "the read's span ends")
    load.release_event.synchronize(WAIT)
    host.give(blocks)
    settle(host.engine)
    finished(timeline)


def test_a_load_that_is_cancelled_ends(traced: OpenHost) -> None:
    timeline = TraceTimeline()
    host = traced(timeline)
    tokens = prompt(3, PAGES)
    stored(host, tokens)
    with PLAN.rule(Op.READ, Fault.DELAY, seconds=0.05):
        load, blocks, keys = host.begin(tokens)
        load.cancel()
        host.finish(load, blocks, keys)
    settle(host.engine)
    found = finished(timeline)
    assert all(e["dur"] >= 50_000 for e in found if e["cat"] == "read"), "a read's span ends before the read"
    assert [e for e in found if e["cat"] == "load"]
    assert sum(e["args"]["bytes"] for e in found if e["cat"] == "read") <= PAGES * host.layout.extent_bytes


def test_an_exception_is_passed_on_and_said(traced: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = TraceTimeline()
    host = traced(timeline)
    tokens = prompt(3, PAGES)
    stored(host, tokens)
    with monkeypatch.context() as patched:
        patched.setattr(host.engine.manager.tiers["ssd"].index, "pin_run", raising(ZeroDivisionError("on order")))
        with pytest.raises(ZeroDivisionError):
            host.begin(tokens)
    settle(host.engine)
    assert {e["cat"] for e in finished(timeline) if e["args"].get("error") == "ZeroDivisionError"} == {"plan"}


# -- off ---------------------------------------------------------------------------------------------------------------


def test_off_keeps_nothing(open_host: OpenHost) -> None:
    host = open_host(model=SIX)
    engine = host.engine
    assert engine.timeline is OFF
    assert engine.manager.timeline is OFF
    tokens = prompt(1, 2)
    host.keep(tokens)
    load, blocks, keys = host.begin(tokens)
    assert load.number == 0
    host.finish(load, blocks, keys)
    assert not hasattr(OFF, "__dict__")
    spans = [OFF.span("a", layer=1), OFF.span("b")]
    assert len({id(span) for span in spans}) == 1
    with pytest.raises(ZeroDivisionError), OFF.span("a"):
        raise ZeroDivisionError
    OFF.instant("a")
    OFF.past("a", "b", 1, 2)


def test_a_failed_span_of_a_thread_is_no_span_of_the_next(traced: OpenHost) -> None:
    """What spans inherit ends with the span that has it."""
    timeline = TraceTimeline()
    with pytest.raises(ZeroDivisionError), timeline.span("load", load=7):
        raise ZeroDivisionError
    with timeline.span("check"):
        pass
    assert "load" not in events(timeline, "check")[0]["args"]
    assert events(timeline, "load")[0]["args"] == {"load": 7, "error": "ZeroDivisionError"}


# -- the bound, and many threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 30])
def test_no_more_events_than_the_limit(limit: int) -> None:
    timeline = TraceTimeline(limit=limit)
    for number in range(10):
        with timeline.span("load", load=number):
            timeline.past("read", "SSD reads", time.perf_counter_ns(), time.perf_counter_ns() + 1, load=number)
        timeline.instant("ready", layer=number)
    data = timeline.describe()
    check_schema(data)
    assert len([e for e in data["traceEvents"] if e["ph"] != "M"]) == limit
    assert data["otherData"]["events_left_out"] == 30 - limit
    assert "unfinished" not in json.dumps(data)


def test_many_threads() -> None:
    timeline, threads, rounds = TraceTimeline(), 8, 60
    start = threading.Barrier(threads + 1)

    def work(number: int) -> None:
        start.wait()
        for turn in range(rounds):
            with timeline.span("load", load=number):
                now = time.perf_counter_ns()
                timeline.past("read", "SSD reads", now, now + 1000, load=number, turn=turn)
                with timeline.span("scatter"), timeline.span("check", layers=range(2)):
                    timeline.instant("ready", layer=turn)

    workers = [threading.Thread(target=work, args=(n,), name=f"gdscache-load_{n}") for n in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    while any(worker.is_alive() for worker in workers):
        check_schema(timeline.describe())  # while they work
    for worker in workers:
        worker.join(WAIT)
    found = events(timeline)
    assert len(found) == threads * rounds * 5
    for number in range(threads):
        own = [e for e in found if e["args"]["load"] == number]
        assert len(own) == rounds * 5
        assert len({e["tid"] for e in own if e["cat"] in ("load", "scatter", "check", "ready")}) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_spans_that_overlap_get_lanes(spans: list[tuple[int, int]]) -> None:
    given_events = [("read", ("SSD reads", 0), start, start + n, {"i": i}) for i, (start, n) in enumerate(spans)]
    placed, tracks = lanes(given_events)
    assert sorted(about["i"] for *_, about in placed) == list(range(len(spans)))
    for tid in tracks.values():
        own = sorted((start, end or 0) for _, number, start, end, _ in placed if number == tid)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))
    points = [sum(start <= at < start + n for start, n in spans) for at in range(71)]
    assert len(tracks) <= max(1, max(points) + sum(n == 0 for _, n in spans))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("old")
    timeline = TraceTimeline()
    with timeline.span("layer", layer=3):
        pass
    assert timeline.write(file) == file
    data = json.loads(file.read_text())
    check_schema(data)
    assert [e["name"] for e in data["traceEvents"] if e["ph"] == "X"] == ["layer 3"]
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_bad_path_is_refused(tmp_path: Path) -> None:
    timeline = TraceTimeline()
    with pytest.raises(InvalidValueError, match=r"missing/t\.json: No such file"):
        timeline.write(tmp_path / "missing" / "t.json")
    with pytest.raises(InvalidValueError, match="Is a directory"):
        timeline.write(tmp_path)
    with pytest.raises(InvalidValueError, match="limit is 0"):
        TraceTimeline(limit=0)
    tmp_path.chmod(0o500)
    if not os.access(tmp_path, os.W_OK):  # root may write everywhere
        with pytest.raises(InvalidValueError, match="cannot be written"):
            timeline.write(tmp_path / "t.json")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    timeline = TraceTimeline()
    file.write_text("old")
    monkeypatch.setattr(Path, "replace", raising(OSError(28, "No space left on device")))
    with pytest.raises(InvalidValueError, match="No space left"):
        timeline.write(file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.json"]


# -- NVTX --------------------------------------------------------------------------------------------------------------


class FakeNvtx:
    """Counts what is open, by thread."""

    def __init__(self) -> None:
        self.pushed: dict[int, list[str]] = {}
        self.texts: list[str] = []
        self.marks: list[str] = []

    def range_push(self, text: str) -> int:
        self.texts.append(text)
        stack = self.pushed.setdefault(threading.get_ident(), [])
        stack.append(text)
        return len(stack)

    def range_pop(self) -> int:
        self.pushed[threading.get_ident()].pop()
        return 0

    def mark(self, text: str) -> None:
        self.marks.append(text)

    @property
    def balanced(self) -> bool:
        return not any(self.pushed.values())


@pytest.mark.parametrize("faults", [0, 2])
def test_nvtx_ranges_are_balanced(traced: OpenHost, faults: int) -> None:
    nvtx = FakeNvtx()
    host = traced(NvtxTimeline(nvtx))
    tokens = prompt(1, PAGES)
    stored(host, tokens)
    with PLAN.rule(Op.READ, Fault.EIO, times=faults):
        host.load(tokens)
    settle(host.engine)
    until(lambda: nvtx.balanced, f"all ranges end: {nvtx.pushed}")
    kinds = {text.removeprefix("gdscache: ").split(" ")[0] for text in nvtx.texts}
    assert kinds >= KINDS - {"ready", "scatter", "gather", "read", "write"}  # the library has no ranges


PROFILERS = [
    ({}, False),
    ({"NSYS_PROFILING_SESSION_ID": "1"}, True),
    ({"NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "1"}, True),
    ({"NVTX_INJECTION64_PATH": "/opt/nvidia/libToolsInjection64.so"}, True),
    ({"NVTX_INJECTION64_PATH": ""}, False),
    ({"NVTX_INJECTION64_PATH": "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"}, False),
    ({"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so", "NSYS_PROFILING_SESSION_ID": "1"}, True),
]


@pytest.mark.parametrize(("environ", "profiled"), PROFILERS)
def test_when_a_profiler_is_attached(environ: dict[str, str], profiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    timeline = timeline_from_environment()
    assert isinstance(timeline, NvtxTimeline) == profiled
    assert (timeline is OFF) != profiled
    assert nvtx.marks == ["gdscache"] * profiled


def test_an_engine_under_a_profiler_has_ranges(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    host = open_host()
    host.keep(prompt(1, 2))
    host.load(prompt(1, 2))
    assert "gdscache: load (load 1, 2 pages)" in nvtx.texts


def test_torch_without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = raising(RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?"))
    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(mark=missing))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert timeline_from_environment() is OFF
    with pytest.raises(RuntimeError):
        NvtxTimeline()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_times_on_streams(traced: OpenHost) -> None:
    timeline = TraceTimeline()
    host = traced(timeline, device="cuda")
    tokens = prompt(1, PAGES)
    stored(host, tokens)
    host.load(tokens)
    settle(host.engine)
    data = timeline.describe()
    check_schema(data)
    names = track_names(data)
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    kernels = [e for e in spans if names[e["tid"]].startswith("loads: kernel stream")]
    on_copies = [e for e in spans if names[e["tid"]].startswith("loads: copy stream")]
    begun, load = (next(e for e in spans if e["cat"] == kind) for kind in ("begin", "load"))
    slack = 200.0  # us: the anchor is as good as the host's wake-ups
    for event in (*kernels, *on_copies):
        assert event["args"]["load"] == load["args"]["load"]
        assert begun["ts"] - slack <= event["ts"]
        assert event["ts"] + event["dur"] <= load["ts"] + load["dur"] + slack
    assert kernels or on_copies
    for copy, kernel in zip(on_copies, kernels, strict=False):  # a chunk's kernel comes after its copies
        assert copy["ts"] + copy["dur"] <= kernel["ts"] + kernel["dur"] + slack
