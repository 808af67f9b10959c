import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gdscache.storage.nixl as nixl_module
from gdscache.config import SsdConfig
from gdscache.cuda.host_memory import HostBuffer
from gdscache.errors import (
    DeadlineError,
    EngineClosedError,
    InvalidValueError,
    IOFailedError,
    ShortIOError,
    TransportUnavailableError,
)
from gdscache.storage import IORequest, Op, Transport, open_transport, probe
from gdscache.storage.nixl import NixlTransport
from gdscache.storage.workers import READS_PER_WRITE
from gdscache.testing.suite_order import mappings_of
from tests.support.posix_transport import PosixTransport
from tests.support.transport_parts import FILE_BYTES, SECTOR, random_bytes, soon

installed = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random_bytes(1))
    return path


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    with HostBuffer(FILE_BYTES, "off") as made:
        yield made


@installed
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_file_that_fails_harms_no_other(slab: Path, buffer: HostBuffer, direct_io: str) -> None:
    other = slab.with_name("other")
    other.write_bytes(bytes(FILE_BYTES))
    buffer.view[:] = random_bytes(8)
    with NixlTransport(8, direct_io) as transport:
        good, bad = transport.open(slab), transport.open(other)
        read_only = os.open(other, os.O_RDONLY)
        os.dup2(read_only, bad)
        os.close(read_only)
        pairs = zip(pages(good, buffer, 512), pages(bad, buffer, 512), strict=True)
        batch = [request for pair in pairs for request in pair]
        for _ in range(5):
            errors = transport.submit(Op.WRITE, batch).wait(soon())
            assert not any(errors[::2])
            assert all(isinstance(error, IOFailedError) for error in errors[1::2])
        assert slab.read_bytes()[: 512 * SECTOR] == buffer.view[: 512 * SECTOR]
        assert not any(other.read_bytes())


# A stand-in for NIXL: transfers end when a test lets them.


class RefusalError(Exception):
    """As NIXL's own errors: no more than an Exception."""


class Handle:
    def __init__(self, agent: "Agent", op: str, memory: list, part: list, plugin: str) -> None:
        self.agent, self.op, self.memory, self.part, self.plugin = agent, op, memory, part, plugin
        self.released = False

    def release(self) -> None:
        assert self.agent.state_of(self) != "PROC", "released in flight"
        assert not self.released, "released twice"
        self.released = True


class Agent:
    name = "agent"

    def __init__(self, name: str, config: object) -> None:
        self.owner = threading.get_ident()
        self.begun: list[Handle] = []
        self.ended: set[int] = set()  # offsets in the file
        self.failing: set[int] = set()
        self.all_end = False
        self.most = 0
        self.registered: list[tuple] = []
        self.backends: dict[str, dict[str, str]] = {}
        agents.append(self)

    def check_thread(self) -> None:
        assert threading.get_ident() == self.owner, "NIXL's agents are not thread-safe"

    def create_backend(self, name: str, settings: dict[str, str]) -> None:
        self.check_thread()
        self.backends[name] = settings

    def register_memory(self, entries: list, kind: str, backends: list[str]) -> tuple:
        self.check_thread()
        self.registered.append((kind, tuple(entries), tuple(backends)))
        return self.registered[-1]

    def deregister_memory(self, descriptors: tuple, backends: list[str]) -> None:
        self.check_thread()
        assert descriptors[2] == tuple(backends), "taken back from other plugins than it was given to"
        self.registered.remove(descriptors)

    def get_xfer_descs(self, entries: list, kind: str) -> list:
        return [(kind, *entry) for entry in entries]

    def initialize_xfer(self, op: str, memory: list, part: list, name: str, backends: list[str]) -> Handle:
        self.check_thread()
        return Handle(self, op, memory, part, *backends)

    def transfer(self, handle: Handle) -> str:
        self.check_thread()
        self.begun.append(handle)
        self.most = max(self.most, sum(not other.released for other in self.begun))
        return "PROC"

    def state_of(self, handle: Handle) -> str:
        return "DONE" if self.all_end or handle.part[0][1] in self.ended | self.failing else "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        self.check_thread()
        if handle.part[0][1] in self.failing:
            raise RefusalError("NIXL_ERR_BACKEND")
        return self.state_of(handle)


agents: list[Agent] = []


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    class Module:
        class _bindings:  # noqa: N801
            nixlBackendError = RefusalError  # noqa: N815

        nixl_agent = Agent

        @staticmethod
        def nixl_agent_config(**settings: object) -> object:
            assert settings["backends"] == []  # else it starts UCX
            return settings

    monkeypatch.setitem(sys.modules, "nixl", Module)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.5.1")
    agents.clear()
    yield agents
    for agent in agents:
        agent.all_end = True
    agents.clear()


def until(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def pages(file: int, buffer: HostBuffer, count: int, first: int = 0) -> list[IORequest]:
    return [
        IORequest(file, n * SECTOR, buffer.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(first, first + count)
    ]


def test_one_transfer_a_piece_and_a_bounded_number_in_flight(stand_in, slab: Path, buffer: HostBuffer) -> None:
    with NixlTransport(2, "off") as transport:
        [agent] = stand_in
        file = transport.open(slab)
        submission = transport.submit(Op.READ, pages(file, buffer, 200))
        until(lambda: len(agent.begun) == 32)
        time.sleep(0.02)
        assert len(agent.begun) == 32
        assert all(len(handle.memory) == 1 for handle in agent.begun)
        assert {handle.plugin for handle in agent.begun} == {"POSIX"}
        agent.ended.add(0)
        until(lambda: len(agent.begun) == 33)
        arrived = submission.completions(soon())
        assert next(arrived) == (0, None)
        assert submission.pending == 199
        agent.all_end = True
        assert submission.wait(soon()) == [None] * 200
        assert agent.most == 32
        assert int(agent.backends["POSIX"]["kernel_queue_size"]) >= 32
    assert agent.registered == []


def test_bytes_in_flight_are_bounded(stand_in, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 64 << 20)
    with NixlTransport(2, "off") as transport, HostBuffer(64 << 20, "off") as memory:
        file = transport.open(path)
        submission = transport.submit(Op.READ, [IORequest(file, 0, memory.view)])
        [agent] = stand_in
        until(lambda: len(agent.begun) >= 2)
        time.sleep(0.02)
        assert sum(handle.part[0][2] for handle in agent.begun) == 2 * nixl_module.MAX_RUN
        agent.all_end = True
        assert submission.wait(soon()) == [None]


def test_reads_go_before_writes_which_go_on(
    stand_in, tmp_path: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_module, "IN_FLIGHT_PER_THREAD", 1)
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 30)
    with NixlTransport(1, "off") as transport:
        [agent] = stand_in
        file, page = transport.open(path), buffer.view[:SECTOR]
        apart = 2 * SECTOR
        writes = transport.submit(Op.WRITE, [IORequest(file, n * apart, page) for n in range(40)])
        until(lambda: len(agent.begun) == 1)
        reads = transport.submit(Op.READ, [IORequest(file, n * apart, page) for n in range(80)])
        agent.all_end = True
        assert not any(reads.wait(soon()))
        assert not any(writes.wait(soon()))
        order = [handle.op for handle in agent.begun][1:]
        assert order[:READS_PER_WRITE] == ["READ"] * READS_PER_WRITE
        before = order[: max(n for n, op in enumerate(order) if op == "READ")]
        assert before.count("WRITE") in (80 // READS_PER_WRITE - 1, 80 // READS_PER_WRITE)


def test_an_error_is_its_own_request_s(stand_in, slab: Path, buffer: HostBuffer) -> None:
    with NixlTransport(4, "off") as transport:
        [agent] = stand_in
        file = transport.open(slab)
        agent.failing.add(5 * SECTOR)
        submission = transport.submit(Op.READ, pages(file, buffer, 40))
        arrived = submission.completions(soon())
        index, error = next(arrived)
        assert index == 5
        assert isinstance(error, IOFailedError)
        assert not isinstance(error, ShortIOError)
        assert "NIXL_ERR_BACKEND" in str(error)
        assert submission.pending == 39  # the others are in flight, and not reported because one failed
        agent.all_end = True
        assert [n for n, error in enumerate(submission.wait(soon())) if error] == [5]
        assert all(handle.released for handle in agent.begun)


@pytest.mark.parametrize("failing", [False, True])
def test_done_is_not_believed_past_the_end_of_the_file(stand_in, slab: Path, buffer: HostBuffer, failing: bool) -> None:
    with NixlTransport(1, "off") as transport:
        [agent] = stand_in
        file = transport.open(slab)
        offset = FILE_BYTES - SECTOR
        (agent.failing if failing else agent.ended).add(offset)
        [error] = transport.submit(Op.READ, [IORequest(file, offset, buffer.view[: 2 * SECTOR])]).wait(soon())
        assert isinstance(error, ShortIOError)
        assert f"{SECTOR} of {2 * SECTOR}" in str(error)


def test_a_hung_transfer_keeps_its_memory_and_close_returns(
    stand_in, slab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_module, "HANG_S", 0.3)
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    file = transport.open(slab)
    memory = HostBuffer(4 * SECTOR, "off")
    address, view = memory.address, weakref.ref(memory)
    submission = transport.submit(Op.READ, pages(file, memory, 4))
    agent.ended.update([0, SECTOR, 3 * SECTOR])
    until(lambda: submission.pending == 1)
    memory.close()
    begun = time.monotonic()
    with caplog.at_level(logging.ERROR, "gdscache.storage"):
        transport.close()
        transport.close()
    assert 0.25 < time.monotonic() - begun < 10
    assert len(caplog.records) == 1
    assert "1 transfers" in caplog.text
    assert submission.pending == 1
    with pytest.raises(DeadlineError):
        submission.wait(time.monotonic() + 0.01)
    with pytest.raises(EngineClosedError):
        transport.submit(Op.READ, [])
    os.fstat(file)  # open: the transfer may still touch it
    del memory
    assert view() is None
    assert mappings_of(address)
    assert not agent.begun[2].released
    agent.ended.add(2 * SECTOR)  # and if it ends after all, everything is given back
    assert submission.wait(soon()) == [None] * 4
    until(lambda: not mappings_of(address) and not transport._threads[0].is_alive())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert agent.registered == []


def test_close_waits_as_long_as_transfers_end(
    stand_in, slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_module, "HANG_S", 0.5)
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    submission = transport.submit(Op.READ, pages(transport.open(slab), buffer, 8))

    def slowly() -> None:
        for n in range(8):
            time.sleep(0.2)
            agent.ended.add(n * SECTOR)

    device = threading.Thread(target=slowly)
    device.start()
    transport.close()
    device.join()
    assert submission.pending == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_tells_who_waits(stand_in, slab: Path, buffer: HostBuffer) -> None:
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    file = transport.open(slab)
    submission = transport.submit(Op.READ, pages(file, buffer, 40))
    until(lambda: len(agent.begun) == 16)
    agent.check_xfer_state = lambda handle: 1 / 0  # no error that NIXL has
    until(lambda: not transport._threads[0].is_alive())
    assert submission.pending == 16  # what NIXL holds has not ended for all that we know
    arrived = submission.completions(soon())
    assert isinstance(next(arrived)[1], IOFailedError)
    with pytest.raises(EngineClosedError):
        transport.submit(Op.READ, [])
    transport.close()


def test_a_call_into_nixl_that_hangs_is_an_error(stand_in, slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    gate = threading.Event()
    monkeypatch.setattr(nixl_module, "CALL_S", 0.2)
    monkeypatch.setattr(nixl_module, "HANG_S", 0.2)
    agent.register_memory = lambda *_, **__: gate.wait()
    with pytest.raises(DeadlineError, match="register"):
        transport.open(slab)
    transport.close()
    gate.set()
    agent.deregister_memory = lambda *_, **__: None
    until(lambda: not transport._threads[0].is_alive())


class Cuda:
    """As much of a CUDA tensor as a transport looks at."""

    dtype = torch.uint8

    class device:  # noqa: N801
        type, index = "cuda", 3

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes, self.shape = address, nbytes, (nbytes,)

    def dim(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.nbytes

    def data_ptr(self) -> int:
        return self.address


def test_gpu_memory_goes_through_gds_mt_where_it_is_registered(
    stand_in, slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pathfinder:
        @staticmethod
        def load_nvidia_dynamic_lib(name: str) -> None:
            assert name in ("cudart", "cufile")

    monkeypatch.setattr(nixl_module, "PROC_MODULES", os.devnull)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", Pathfinder)
    with NixlTransport(4, "off", gds=True) as transport:
        [agent] = stand_in
        agent.all_end = True
        assert set(agent.backends) == {"POSIX", "GDS_MT"}
        assert transport.memory_kinds == {"host", "cuda"}
        file = transport.open(slab)
        ring = Cuda(1 << 30, 8 * SECTOR)
        transport.register(ring)
        with pytest.raises(IOFailedError, match="already"):
            transport.register(Cuda((1 << 30) + SECTOR, SECTOR))
        batch = [
            IORequest(file, 0, Cuda((1 << 30) + SECTOR, SECTOR)),
            IORequest(file, SECTOR, Cuda((1 << 30) + 7 * SECTOR, 2 * SECTOR)),
            IORequest(file, SECTOR, buffer.view[:SECTOR]),
        ]
        errors = transport.submit(Op.READ, batch).wait(soon())
        assert [type(error) for error in errors] == [type(None), IOFailedError, type(None)]
        assert "register" in errors[1].hint
        assert [(handle.plugin, handle.memory[0][0]) for handle in agent.begun] == [
            ("GDS_MT", "VRAM"),
            ("POSIX", "DRAM"),
        ]
        assert agent.begun[0].memory == [("VRAM", (1 << 30) + SECTOR, SECTOR, 3)]
        transport.deregister(ring)
        with pytest.raises(IOFailedError, match="not registered"):
            transport.deregister(ring)
        transport.register(ring)
    assert agent.registered == []


# What cannot be had.


def opened(tmp_path: Path, device: str = "cpu", gds: str = "auto") -> Transport:
    return open_transport("nixl", directory=tmp_path, device=device, threads=2, direct_io="auto", gds=gds)


def test_without_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    before = threading.active_count()
    with pytest.raises(TransportUnavailableError, match="nixl") as caught:
        opened(tmp_path)
    assert "cuda13" in caught.value.hint
    assert threading.active_count() == before


@installed
def test_a_nixl_that_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.4.10")
    with pytest.raises(TransportUnavailableError, match=r"1\.4\.10"):
        opened(tmp_path)


def test_an_agent_that_cannot_be_made_leaves_no_thread(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Agent, name: str, settings: dict[str, str]) -> None:
        raise RefusalError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(Agent, "create_backend", refuse)
    before = threading.active_count()
    with pytest.raises(TransportUnavailableError, match="NIXL_ERR_BACKEND"):
        NixlTransport(1)
    assert threading.active_count() == before


@pytest.mark.parametrize("settings", [{"threads": 0}, {"threads": 1, "direct_io": "yes"}])
def test_bad_settings_start_no_thread(stand_in, settings: dict[str, object]) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidValueError):
        NixlTransport(**settings)
    assert threading.active_count() == before


def test_cufile_needs_proc_modules(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_module, "PROC_MODULES", str(tmp_path / "missing"))
    with pytest.raises(TransportUnavailableError, match="missing"):
        NixlTransport(1, gds=True)
    monkeypatch.setattr(probe, "PROC_MODULES", tmp_path / "missing")
    monkeypatch.setattr(probe, "run_child", lambda *_: pytest.fail("it would hang"))
    assert probe.probe_nixl(tmp_path, 0).mode == "posix"


# The choice.


@pytest.mark.parametrize(
    ("device", "gds", "mode", "want"),
    [
        ("cpu", "auto", "gds", {"host"}),
        ("cuda:1", "off", "gds", {"host"}),
        ("cuda:1", "auto", "compat", {"host"}),
        ("cuda:1", "auto", "posix", {"host"}),
        ("cuda:1", "auto", "gds", {"host", "cuda"}),
        ("cuda:1", "on", "gds", {"host", "cuda"}),
        ("cuda:1", "on", "compat", None),
        ("cpu", "on", "gds", None),
    ],
)
def test_gpu_memory_only_where_it_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gds: str, mode: str, want: set[str] | None
) -> None:
    asked: list[dict[str, object]] = []

    class Recorded(PosixTransport):
        name = "nixl"

        def __init__(self, threads: int, direct_io: str, gds: bool) -> None:
            asked.append({"threads": threads, "gds": gds})
            super().__init__(threads, direct_io)

    monkeypatch.setattr(nixl_module, "NixlTransport", Recorded)
    monkeypatch.setattr(probe, "no_gds_driver", lambda: "")
    monkeypatch.setattr(probe, "probe_nixl", lambda *_: probe.ProbeResult(mode != "posix", mode, "because"))
    if want is None:
        with pytest.raises(TransportUnavailableError):
            opened(tmp_path, device, gds)
        return
    opened(tmp_path, device, gds).close()
    assert asked == [{"threads": 2, "gds": "cuda" in want}]


@installed
def test_the_configured_name_opens_it(tmp_path: Path) -> None:
    assert SsdConfig(path=tmp_path, transport="nixl").transport == "nixl"
    with opened(tmp_path) as chosen:
        assert chosen.name == "nixl"
        assert chosen.memory_kinds == {"host"}
        assert chosen.describe()["nixl"] == importlib.metadata.version("nixl")


@installed
def test_it_says_nothing_on_the_standard_output(tmp_path: Path) -> None:
    code = "from gdscache.storage.nixl import NixlTransport\nNixlTransport(1).close()"
    environment = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True, env=environment
    )
    assert done.stdout == ""
