"""`gdscache.testing`: the suite finds broken transports, and the faults happen as the rules say, over any transport."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gdscache.testing.faults as faults_module
from gdscache import PageStatus
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import EngineClosedError, InvalidValueError, IOFailedError, ShortIOError, TransportUnavailableError
from gdscache.storage import IORequest, Op, Transport, open_transport
from gdscache.testing.faults import ExtentPart, Fault, FaultPlan, FaultRule, FaultyTransport, faulty
from tests.support.helpers import MHA as MODEL
from tests.support.helpers import drop_from, layout_of, prompt, quiet, until
from tests.support.places import ROOT
from tests.support.posix_transport import PosixTransport
from tests.support.transport_parts import FILE_BYTES, SECTOR, soon

pytestmark = pytest.mark.suite

SIZE = 4 * SECTOR  # of a request here
COUNT = 16

PLAN = FaultPlan()
Configured = faulty(PLAN)

# -- the suite --------------------------------------------------------------------------------------------------------

# Each class breaks one promise; the test named is the one that finds it.
BROKEN = """
import os, threading, time
from collections import deque
from gdscache.storage import Op
from tests.support.posix_transport import PosixTransport
from gdscache.storage.workers import IORun
import gdscache.testing.suite_base as base
import gdscache.testing.suite_order as order
from gdscache.testing.transport_suite import TransportSuite

base.soon = order.soon = lambda: time.monotonic() + 2

class Posix(PosixTransport):
    def __init__(self, threads):
        super().__init__(threads, "off")

class Waits(Posix):  # test_submit_does_not_wait_and_a_deadline_leaves_the_rest_going
    def submit(self, op, requests):
        submission = super().submit(op, requests)
        submission.wait()
        return submission

class FirstComeFirstServed(Posix):  # test_reads_go_before_queued_writes
    def submit(self, op, requests):
        held, self._writes = self._writes, self._reads
        try:
            return super().submit(op, requests)
        finally:
            self._writes = held

class Starves(Posix):  # test_writes_go_on_while_reads_keep_coming
    def _next(self):
        self._reads_in_row = 0
        return super()._next()

    def move(self, run):
        if run.op is Op.READ:
            time.sleep(0.02)  # so that the next batch of reads is there before this one ends
        return super().move(run)

class Believes(Posix):  # test_past_the_end_fails_alone_and_later_reads_work
    def move(self, run):
        return [(index, piece.nbytes, error) for piece, (index, _, error) in zip(run.pieces, super().move(run))]

class Condemns(Posix):  # test_a_file_truncated_in_mid_use
    def move(self, run):
        results = super().move(run)
        return [(index, min(r[1] for r in results), error) for index, _, error in results]

class Misplaces(Posix):  # test_shuffled_extents_come_back_equal
    def move(self, run):
        if len(run.pieces) > 2 and run.op is Op.READ:
            run.pieces[0], run.pieces[1] = run.pieces[1], run.pieces[0]
        return super().move(run)

class Remembers(Posix):  # test_memory_is_free_when_its_requests_have_ended
    def move(self, run):
        self.last = run
        return super().move(run)

class Abandons(Posix):  # test_close_ends_what_was_submitted
    def move(self, run):
        until = time.monotonic() + 1
        while not self._closing and time.monotonic() < until:
            time.sleep(0.01)
        return super().move(run)

    def close(self):
        with self._work:
            self._reads.clear()
            self._writes.clear()
        super().close()

class LeavesFiles(Posix):  # test_no_descriptor_and_no_thread_is_left
    def release(self):
        self._paths.clear()
        super().release()

class LeavesThreads(Posix):  # test_no_descriptor_and_no_thread_is_left
    def close(self):
        if not self._closing:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        super().close()

class Multiplies(Posix):  # test_a_long_queue_takes_no_more_threads_or_files
    def submit(self, op, requests):
        if len(requests) > 100:
            for _ in range(20):
                threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
        return super().submit(op, requests)

class Anonymous(Posix):  # test_an_error_names_its_file_and_offset
    def _path(self, file):
        super()._path(file)
        return "some file"

class Secretive(Posix):  # test_describe_is_plain_data
    def describe(self):
        return {"name": self.name, "lock": self._work}
"""


def run_suite(directory: Path, code: str, wanted: dict[str, str]) -> dict[str, str]:
    """Run the suite over classes of the module `code`, of each the test named or, for "", all; what failed of each."""
    lines = [code, "from gdscache.testing.transport_suite import TransportSuite"]
    for name in wanted:
        lines += [f"class Test{name}(TransportSuite):", "    def make_transport(self, threads):"]
        lines += [f"        return {name}(threads)"]
    (directory / "test_suite.py").write_text("\n".join(lines))
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\n")
    # As in CI, and with -v, pytest explains a failed comparison at full length; a case that hangs is ended alone.
    command = [sys.executable, "-m", "pytest", "-v", "-rA", "--tb=no", "-p", "no:cacheprovider", "--timeout=60"]
    command += [f"--basetemp={directory / 'inner'}", f"--rootdir={directory}"]
    command += [f"test_suite.py::Test{name}" + (f"::{test}" if test else "") for name, test in wanted.items()]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CI": "1", "PYTHONPATH": paths}
    try:
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"the suite did not end: {expired.stdout!r}")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    verdicts = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::Test(\w+)::(\w+)", done.stdout, re.MULTILINE)
    assert {name for _, name, _ in verdicts} == set(wanted), done.stdout + done.stderr
    return {name: test for verdict, name, test in verdicts if verdict != "PASSED"}


def test_the_suite_finds_broken_transports(tmp_path: Path) -> None:
    broken = dict(re.findall(r"^class (\w+)\(Posix\):  # (\w+)$", BROKEN, re.MULTILINE))
    assert len(broken) == BROKEN.count("(Posix)")
    assert run_suite(tmp_path, BROKEN, broken) == broken


def test_the_transport_of_the_documentation_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "embedding.md").read_text()
    [block] = [b for b in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "class MyTransport" in b]
    assert run_suite(tmp_path, block, {"MyTransport": ""}) == {}


def test_without_pytest_only_the_suite_is_missing() -> None:
    code = """
import sys
sys.modules["pytest"] = None
import gdscache.testing, gdscache.testing.faults
from gdscache.errors import MissingPackageError
try:
    import gdscache.testing.transport_suite
except MissingPackageError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("install gdscache[test]\n", "")


# -- faults, request by request --------------------------------------------------------------------------------------


class Bench:
    """A faulty transport over `inner`, a file of `COUNT` requests, and memory of as many."""

    def __init__(self, directory: Path, inner: Any, kind: str) -> None:
        self.path = directory / "data"
        self.old = random.Random(1).randbytes(COUNT * SIZE)
        self.new = random.Random(2).randbytes(COUNT * SIZE)
        self.path.write_bytes(self.old)
        self.plan = FaultPlan(seed=3, trace=True)
        self.transport = FaultyTransport(2, plan=self.plan, inner=inner)
        self.file = self.transport.open(self.path)
        self.host = HostBuffer(COUNT * SIZE, "off")
        self.memory: Any = self.host.view
        if kind == "cuda":
            self.memory = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")[: COUNT * SIZE]
        self.transport.register(self.memory)

    def run(self, op: Op) -> list[Any]:
        return self.begin(op).wait(soon())

    def begin(self, op: Op) -> Any:
        """Read all of the file into zeros, or write all of it anew from memory."""
        data = bytes(COUNT * SIZE) if op is Op.READ else self.new
        if isinstance(self.memory, memoryview):
            self.memory[:] = data
        else:
            self.memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            torch.cuda.synchronize()
        batch = [IORequest(self.file, at, self.memory[at : at + SIZE]) for at in range(0, COUNT * SIZE, SIZE)]
        return self.transport.submit(op, batch)

    def moved(self, op: Op) -> bytes:
        """What is there now: in memory after reads, in the file after writes."""
        if op is Op.WRITE:
            assert self.in_memory() == self.new, "a write changed the caller's memory"
            return self.path.read_bytes()
        assert self.path.read_bytes() == self.old, "a read changed the file"
        return self.in_memory()

    def in_memory(self) -> bytes:
        return bytes(self.memory) if isinstance(self.memory, memoryview) else self.memory.cpu().numpy().tobytes()

    def close(self) -> None:
        self.plan.reset()
        if not self.transport._closing:
            self.transport.deregister(self.memory)
        self.transport.close()


@pytest.fixture(params=["posix", "uring", "nixl", pytest.param("kvikio", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    kind = "host"
    inner = request.param
    if inner == "kvikio":
        kind = "cuda"
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    try:
        made = Bench(tmp_path, inner, kind)
    except TransportUnavailableError as error:
        pytest.skip(error.message)
    yield made
    made.close()


HALF = SIZE // 2


@pytest.mark.parametrize(
    ("fault", "op", "error"),
    [
        (Fault.EIO, Op.READ, errno.EIO),
        (Fault.EIO, Op.WRITE, errno.EIO),
        (Fault.ENOSPC, Op.WRITE, errno.ENOSPC),
        (Fault.SHORT, Op.READ, "short"),
        (Fault.SHORT, Op.WRITE, "short"),
        (Fault.FLIP, Op.READ, None),
        (Fault.FLIP, Op.WRITE, None),
        (Fault.ZERO, Op.READ, None),
        (Fault.ZERO, Op.WRITE, None),
        (Fault.LOST, Op.WRITE, None),
        (Fault.TORN, Op.WRITE, None),
        (Fault.DELAY, Op.READ, None),
        (Fault.DELAY, Op.WRITE, None),
    ],
)
def test_a_fault_does_what_it_says_to_its_request_alone(bench: Bench, fault: Fault, op: Op, error: object) -> None:
    bad = 5
    late = {"seconds": 0.1} if fault is Fault.DELAY else {}
    chosen = bench.plan.rule(fault, where=lambda path, at: at == bad * SIZE, bit=8 * 4097 + 3, **late)
    begun = time.monotonic()
    with chosen as rule:
        errors = bench.run(op)
    good, stale = (bench.old, bytes(COUNT * SIZE)) if op is Op.READ else (bench.new, bench.old)
    there = bench.moved(op)
    pages = [there[at : at + SIZE] for at in range(0, COUNT * SIZE, SIZE)]
    goods = [good[at : at + SIZE] for at in range(0, COUNT * SIZE, SIZE)]
    assert [n for n in range(COUNT) if n != bad and (pages[n] != goods[n] or errors[n] is not None)] == []
    page, right, before = pages[bad], goods[bad], stale[bad * SIZE :][:SIZE]
    if error is None:
        assert errors[bad] is None
    elif error == "short":
        assert isinstance(errors[bad], ShortIOError)
        assert f"{HALF} of {SIZE} bytes" in str(errors[bad])
    else:
        assert isinstance(errors[bad], IOFailedError)
        assert errors[bad].errno == error
        assert f"offset {bad * SIZE} of {bench.path}" in errors[bad].message
    if fault is Fault.DELAY:
        assert page == right
        assert time.monotonic() - begun >= 0.1
    elif fault in (Fault.SHORT, Fault.TORN):
        assert page == right[:HALF] + before[HALF:]
    elif fault is Fault.FLIP:
        assert page == right[:4097] + bytes([right[4097] ^ 8]) + right[4098:]
    elif fault is Fault.ZERO:
        assert page == bytes(SIZE)
    else:
        assert page == before
    assert rule.met == 1
    assert bench.plan.describe() == {fault.value: 1}
    assert len(bench.plan.ended) == COUNT
    assert bench.run(op) == [None] * COUNT, "the rule is gone"
    assert bench.moved(op) == good


def test_a_hang_holds_its_own_requests_until_it_is_released(bench: Bench) -> None:
    odd = [n for n in range(COUNT) if n % 2]
    with bench.plan.rule(Fault.HANG, Op.READ, where=lambda path, at: at // SIZE in odd) as rule:
        submission = bench.begin(Op.READ)
        arrived = submission.completions(soon())
        assert sorted(next(arrived)[0] for _ in range(COUNT // 2)) == [n for n in range(COUNT) if n not in odd]
        time.sleep(0.05)
        assert submission.pending == bench.plan.held == COUNT // 2
        there = bench.in_memory()
        assert not any(any(there[n * SIZE : (n + 1) * SIZE]) for n in odd)
        assert bench.begin(Op.WRITE).wait(soon()) == [None] * COUNT, "others go on meanwhile"
        bench.path.write_bytes(bench.old)
        rule.release()
        assert submission.wait(soon()) == [None] * COUNT
    assert bench.plan.held == 0
    assert bench.run(Op.READ) == [None] * COUNT


@pytest.mark.parametrize("op", list(Op))
def test_one_layer_of_every_page(bench: Bench, op: Op) -> None:
    part = ExtentPart(700, 1900, 2 * SECTOR)  # two extents a request
    with bench.plan.rule(Fault.ZERO, part=part):
        assert bench.run(op) == [None] * COUNT
    good, there = bench.old if op is Op.READ else bench.new, bench.moved(op)
    expected = bytearray(good)
    for extent in range(0, COUNT * SIZE, 2 * SECTOR):
        expected[extent + 700 : extent + 1900] = bytes(1200)
    assert there == expected


def test_a_flip_without_a_bit_stays_in_its_part(bench: Bench) -> None:
    part = ExtentPart(4100, 4103, 2 * SECTOR)
    with bench.plan.rule(Fault.FLIP, Op.READ, part=part):
        assert bench.run(Op.READ) == [None] * COUNT
    differences = [n for n, (a, b) in enumerate(zip(bench.moved(Op.READ), bench.old, strict=True)) if a != b]
    assert len(differences) == COUNT
    assert {n % (2 * SECTOR) for n in differences} <= {4100, 4101, 4102}
    assert len({(n // SIZE, n % (2 * SECTOR)) for n in differences}) == COUNT
    assert len({n % (2 * SECTOR) for n in differences}) > 1, "drawn, not always the same"


def test_a_bad_request_meets_no_rule(bench: Bench) -> None:
    with bench.plan.rule(Fault.LOST) as rule:
        bad = [IORequest(bench.file, 1, bench.memory[:SECTOR]), IORequest(999, 0, bench.memory[:SECTOR])]
        errors = bench.transport.submit(Op.WRITE, bad).wait(soon())
    assert [error.errno for error in errors] == [errno.EINVAL, errno.EBADF]
    assert rule.met == 0


# -- which requests ---------------------------------------------------------------------------------------------------


def meet(plan: FaultPlan, rounds: int = 1, order: random.Random | None = None) -> dict[tuple[int, int, int], str]:
    """The faults of reads at 200 offsets of two files, asked for `rounds` times, in any order."""
    found = {}
    for visit in range(rounds):
        offsets = [(file, n * SIZE) for file in range(2) for n in range(200)]
        if order is not None:
            order.shuffle(offsets)
        for file, offset in offsets:
            if met := plan.meet(Op.READ, file, "data", offset, SIZE):
                found[visit, file, offset] = met.rule.fault.value + str(met.draw.randrange(1 << 30))
    return found


def random_plan(seed: int) -> FaultPlan:
    return FaultPlan(FaultRule(Fault.EIO, rate=0.05), FaultRule(Fault.FLIP, Op.READ, rate=0.1), seed=seed)


def test_the_same_seed_gives_the_same_faults_in_any_order() -> None:
    first = meet(random_plan(7), 3)
    assert meet(random_plan(7), 3, random.Random(1)) == first
    assert meet(random_plan(8), 3) != first
    kinds = [value.rstrip("0123456789") for value in first.values()]
    assert 30 < kinds.count("eio") < 95  # 1,200 draws: 60 of one, 114 of the other
    assert 75 < kinds.count("flip") < 160
    by_round = [{key[1:] for key in first if key[0] == visit} for visit in range(3)]
    assert by_round[0] != by_round[1] != by_round[2]
    assert {offset for _, file, offset in first if file == 0} != {offset for _, file, offset in first if file == 1}
    plan = random_plan(7)
    assert meet(plan, 3) == first
    plan.reset()
    assert meet(plan) == {}
    for rule in (FaultRule(Fault.EIO, rate=0.05), FaultRule(Fault.FLIP, Op.READ, rate=0.1)):
        plan.add(rule)
    assert meet(plan, 3) == first, "reset begins anew"


def test_conditions_of_a_rule() -> None:
    def offsets(**conditions: Any) -> list[int]:
        found = meet(FaultPlan(FaultRule(Fault.EIO, **conditions)))
        return [offset // SIZE for _, file, offset in found if file == 0]

    assert offsets() == list(range(200))
    assert offsets(op=Op.WRITE) == []
    assert offsets(skip=5, times=3) == [5, 6, 7]
    assert offsets(where=lambda path, at: path == "data" and at < 3 * SIZE) == [0, 1, 2]
    assert offsets(where=lambda path, at: path == "other") == []
    assert offsets(part=ExtentPart(0, 1, 50 * SIZE)) == [0, 50, 100, 150]
    assert offsets(part=ExtentPart(SIZE - 1, SIZE + 1, 100 * SIZE)) == [0, 1, 100, 101]
    first, second = FaultRule(Fault.EIO, times=2), FaultRule(Fault.SHORT, times=1)
    assert len(meet(FaultPlan(first, second))) == 3
    assert (first.met, second.met) == (2, 1)


def test_where_a_layer_lies() -> None:
    layout = layout_of(MODEL)
    parts = [ExtentPart.layer(layout, layer) for layer in range(layout.n_layers)]
    assert [(part.start, part.stop) for part in parts] == list(layout.layer_bounds)
    assert parts[1].within(3 * layout.extent_bytes, layout.extent_bytes) == [layout.layer_bounds[1]]
    start, stop = layout.layer_bounds[2]  # 4096 ... 6144
    assert parts[2].within(layout.extent_bytes, SECTOR) == []
    assert parts[2].within(layout.extent_bytes + SECTOR, SECTOR) == [(start - SECTOR, stop - SECTOR)]
    assert parts[2].within(SECTOR, 2 * layout.extent_bytes) == [(0, 2048), (8192, 10240)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FaultRule(Fault.LOST, Op.READ),
        lambda: FaultRule(Fault.ENOSPC, Op.READ),
        lambda: FaultRule(Fault.EIO, rate=0),
        lambda: FaultRule(Fault.EIO, rate=1.5),
        lambda: FaultRule(Fault.DELAY),
        lambda: FaultRule(Fault.EIO, seconds=1),
        lambda: ExtentPart(5, 5, 10),
        lambda: ExtentPart(5, 11, 10),
        lambda: ExtentPart(-1, 5, 10),
    ],
)
def test_rules_that_can_meet_nothing_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError) as caught:
        make()
    assert caught.value.hint


# -- the wrapper ------------------------------------------------------------------------------------------------------


def test_without_rules_a_batch_is_the_inner_transports_own(tmp_path: Path) -> None:
    made: list[Any] = []

    class Inner(PosixTransport):
        def submit(self, op: Op, requests: Any) -> Any:
            made.append(super().submit(op, requests))
            return made[-1]

    path = tmp_path / "data"
    path.write_bytes(bytes(FILE_BYTES))
    plan = FaultPlan(FaultRule(Fault.EIO, Op.WRITE))
    with FaultyTransport(2, "off", plan=plan, inner=Inner) as transport, HostBuffer(SIZE, "off") as memory:
        file = transport.open(path)
        submission = transport.submit(Op.READ, [IORequest(file, 0, memory.view)])
        assert submission is made[0]
        assert submission.wait(soon()) == [None]
        shown = transport.describe()
        assert (shown["name"], shown["inner"], shown["threads"]) == ("faulty", "python", 2)


def test_an_inner_transport_that_raises_is_heard_of(tmp_path: Path) -> None:
    class Inner(PosixTransport):
        def submit(self, op: Op, requests: Any) -> Any:
            raise EngineClosedError("gone")

    path = tmp_path / "data"
    path.write_bytes(bytes(SIZE))
    plan = FaultPlan(FaultRule(Fault.DELAY, Op.READ, seconds=0.01))
    stopped: list[Any] = []
    hook, threading.excepthook = threading.excepthook, stopped.append
    try:
        with FaultyTransport(1, "off", plan=plan, inner=Inner) as transport, HostBuffer(SIZE, "off") as memory:
            file = transport.open(path)
            [error] = transport.submit(Op.READ, [IORequest(file, 0, memory.view)]).wait(soon())
            assert isinstance(error, IOFailedError)
            assert plan.held == 0
    finally:
        threading.excepthook = hook
    assert len(stopped) == 1


def test_close_waits_for_what_hangs_and_then_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(faults_module, "CLOSE_S", 0.3)
    bench = Bench(tmp_path, "posix", "host")
    with bench.plan.rule(Fault.HANG, Op.READ, times=1):
        submission = bench.begin(Op.READ)
        begun = time.monotonic()
        bench.transport.close()
        bench.transport.close()
        assert 0.25 < time.monotonic() - begun < 10
        assert submission.pending == 1
        with pytest.raises(EngineClosedError):
            bench.transport.submit(Op.READ, [])
        os.fstat(bench.file)  # open: the hung request may still need it
        assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert submission.wait(soon()) == [None] * COUNT
    assert bench.moved(Op.READ) == bench.old
    until(lambda: not bench.transport.inner._paths, "the inner transport is closed")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bench.file)


def test_a_transport_without_host_memory_is_refused() -> None:
    class Inner(PosixTransport):
        memory_kinds = frozenset({"cuda"})

    before = threading.active_count()
    with pytest.raises(InvalidValueError, match="host"):
        FaultyTransport(1, plan=FaultPlan(), inner=Inner)
    assert threading.active_count() == before


# -- by name, and from a file ----------------------------------------------------------------------------------------


def opened(directory: Path, name: str) -> Transport:
    return open_transport(name, directory=directory, device="cpu", threads=2, direct_io="auto", gds="auto")


def test_a_config_names_it_and_the_engine_meets_the_faults(slab: Path, open_host: Callable[..., Any]) -> None:
    host = open_host(transport=f"{__name__}:Configured", cpu=8)
    tokens = prompt(1, 5)
    host.store(tokens)
    quiet(host.engine)
    drop_from(host.engine, "cpu")
    part = ExtentPart.layer(host.layout, 1)
    with PLAN.rule(Fault.FLIP, Op.READ, part=part, skip=2, times=1):
        report = host.load(tokens)
    assert sorted(status.value for status in report.pages) == ["checksum"] + ["loaded"] * 4
    assert host.engine.stats()["tiers"]["ssd"]["transport"]["faults"] == {"flip": 1}
    PLAN.reset()


def test_a_plan_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_host: Callable[..., Any]) -> None:
    path = tmp_path / "faults.json"
    rules = [
        {"fault": "flip", "op": "read", "part": [2048, 4096, 8192], "skip": 1, "times": 1, "bit": 9},
        {"fault": "delay", "seconds": 0.001, "rate": 0.5},
    ]
    path.write_text(json.dumps({"seed": 4, "inner": "posix", "rules": rules}))
    monkeypatch.setenv("GDSCACHE_FAULTS", str(path))
    host = open_host(transport="gdscache.testing.faults:FaultyTransport", cpu=None)
    tokens = prompt(1, 4)
    host.store(tokens)
    quiet(host.engine)
    assert sorted(s.value for s in host.load(tokens).pages).count(PageStatus.CHECKSUM.value) == 1
    shown = host.engine.stats()["tiers"]["ssd"]["transport"]
    assert shown["inner"] == "posix"
    assert shown["faults"]["flip"] == 1


def test_without_a_plan_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDSCACHE_FAULTS", raising=False)
    with pytest.raises(InvalidValueError) as caught:
        opened(tmp_path, "gdscache.testing.faults:FaultyTransport")
    assert "GDSCACHE_FAULTS" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"rule": []}',
        '{"seed": "7"}',
        '{"rules": {}}',
        '{"rules": [7]}',
        '{"rules": [{}]}',
        '{"rules": [{"fault": "fire"}]}',
        '{"rules": [{"fault": "eio", "op": "rewrite"}]}',
        '{"rules": [{"fault": "eio", "rate": "often"}]}',
        '{"rules": [{"fault": "eio", "rate": 2}]}',
        '{"rules": [{"fault": "eio", "times": true}]}',
        '{"rules": [{"fault": "eio", "part": [1, 2]}]}',
        '{"rules": [{"fault": "eio", "part": ["a", 2, 3]}]}',
        '{"rules": [{"fault": "eio", "where": "x"}]}',
    ],
)
def test_a_file_that_holds_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError):
        FaultPlan.from_file(path)
    with pytest.raises(InvalidValueError):
        FaultPlan.from_file(tmp_path / "missing.json")
