import errno
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gdscache.storage.nixl as nixl_module
from gdscache import errors
from gdscache.config import SsdConfig
from gdscache.cuda.host_memory import HostBuffer
from gdscache.storage import Transport, calls, open_transport, probe
from gdscache.storage.base import DeviceMemory, Switch
from gdscache.storage.calls import begin
from gdscache.storage.nixl import NixlTransport
from gdscache.testing.transport_suite import FILE_BYTES, SECTOR, random_bytes
from tests.support.helpers import until
from tests.support.posix_transport import PosixTransport

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

        def fails(n: int) -> bool:
            try:
                return transport.write((good, bad)[n % 2], n // 2 * SECTOR, page(buffer, n // 2)) != SECTOR
            except errors.IOFailedError:
                return True

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(fails, range(1024))) == [False, True] * 512
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
        self.inside = threading.Lock()
        self.begun: list[Handle] = []
        self.ended: set[int] = set()  # offsets in the file
        self.failing: set[int] = set()
        self.all_end = False
        self.registered: list[tuple] = []
        self.backends: dict[str, dict[str, str]] = {}
        agents.append(self)

    @contextmanager
    def alone(self) -> Iterator[None]:
        assert self.inside.acquire(blocking=False), "NIXL's agents are not thread-safe"
        try:
            yield
        finally:
            self.inside.release()

    def create_backend(self, name: str, settings: dict[str, str]) -> None:
        with self.alone():
            self.backends[name] = settings

    def register_memory(self, entries: list, kind: str, backends: list[str]) -> tuple:
        with self.alone():
            self.registered.append((kind, tuple(entries), tuple(backends)))
            return self.registered[-1]

    def deregister_memory(self, descriptors: tuple, backends: list[str]) -> None:
        with self.alone():
            assert descriptors[2] == tuple(backends), "taken back from other plugins than it was given to"
            self.registered.remove(descriptors)

    def get_xfer_descs(self, entries: list, kind: str) -> list:
        return [(kind, *entry) for entry in entries]

    def initialize_xfer(self, op: str, memory: list, part: list, name: str, backends: list[str]) -> Handle:
        with self.alone():
            return Handle(self, op, memory, part, *backends)

    def transfer(self, handle: Handle) -> str:
        with self.alone():
            self.begun.append(handle)
        return "PROC"

    def state_of(self, handle: Handle) -> str:
        return "DONE" if self.all_end or handle.part[0][1] in self.ended | self.failing else "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        with self.alone():
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


def page(buffer: HostBuffer, number: int) -> memoryview:
    return buffer.view[number * SECTOR : (number + 1) * SECTOR]


def reads(transport: Transport, file: int, buffer: HostBuffer, numbers: Iterable[int]) -> list[Future[int]]:
    """A call for each page, in a thread of its own."""
    return [begin("read", partial(transport.read, file, n * SECTOR, page(buffer, n))) for n in numbers]


def test_calls_go_at_once_and_each_ends_with_its_own_transfer(stand_in, slab: Path, buffer: HostBuffer) -> None:
    with NixlTransport(2, "off") as transport:
        [agent] = stand_in
        calls = reads(transport, transport.open(slab), buffer, range(12))
        until(lambda: len(agent.begun) == 12, "all of them begin")
        assert all(len(handle.memory) == 1 for handle in agent.begun)
        assert {handle.plugin for handle in agent.begun} == {"POSIX"}
        agent.ended.add(0)
        agent.failing.add(5 * SECTOR)
        assert calls[0].result(20) == SECTOR
        error = calls[5].exception(20)
        assert isinstance(error, errors.IOFailedError)
        assert "NIXL_ERR_BACKEND" in str(error)
        assert sum(call.done() for call in calls) == 2
        agent.all_end = True
        assert [call.result(20) for n, call in enumerate(calls) if n != 5] == [SECTOR] * 11
        assert all(handle.released for handle in agent.begun)
    assert agent.registered == []


@pytest.mark.parametrize("failing", [False, True])
def test_done_is_not_believed_past_the_end_of_the_file(stand_in, slab: Path, buffer: HostBuffer, failing: bool) -> None:
    with NixlTransport(1, "off") as transport:
        [agent] = stand_in
        file = transport.open(slab)
        offset = FILE_BYTES - SECTOR
        (agent.failing if failing else agent.ended).add(offset)
        assert transport.read(file, offset, buffer.view[: 2 * SECTOR]) == SECTOR


def test_a_file_whose_size_cannot_be_had_keeps_no_transfer(
    stand_in, slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NixlTransport(1, "off") as transport, monkeypatch.context() as patch:
        [agent] = stand_in
        file = transport.open(slab)
        agent.all_end = True

        def stale(_: int) -> os.stat_result:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        patch.setattr(nixl_module.os, "fstat", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            transport.read(file, 0, page(buffer, 0))
        assert agent.begun[0].released
    assert agent.registered == []  # the close has given everything back


def test_close_leaves_a_hung_transfer_what_it_has(stand_in, slab: Path, buffer: HostBuffer) -> None:
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    file = transport.open(slab)
    [call] = reads(transport, file, buffer, [2])
    until(lambda: len(agent.begun) == 1, "it begins")
    transport.close()
    transport.close()
    with pytest.raises(errors.EngineClosedError):
        transport.open(slab)
    os.fstat(file)  # open: the transfer may still touch it
    assert not agent.begun[0].released
    agent.ended.add(2 * SECTOR)  # and if it ends after all, everything is given back
    until(lambda: call.done() and agent.registered == [], "all is given back")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_call_into_nixl_that_hangs_is_an_error(stand_in, slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    gate = threading.Event()
    monkeypatch.setattr(calls, "CALL_S", 0.2)
    monkeypatch.setattr(nixl_module, "HANG_S", 0.2)
    register = agent.register_memory
    agent.register_memory = lambda *some, **options: (gate.wait(), register(*some, **options))[1]
    try:
        with pytest.raises(errors.DeadlineError, match="register"):
            transport.open(slab)
        [file] = transport._paths
        assert begin("close", transport.close).result(20) is None
        with pytest.raises(errors.EngineClosedError):
            transport.open(slab)
        os.fstat(file)  # open: the call may still use it
    finally:
        gate.set()
    until(lambda: not transport._paths, "all is given back")  # and when it ends after all, everything is given back
    assert agent.registered == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_transfer_that_hangs_at_its_begin_gives_back_at_its_end(
    stand_in, slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = NixlTransport(1, "off")
    [agent] = stand_in
    gate, inside = threading.Event(), threading.Event()
    monkeypatch.setattr(nixl_module, "HANG_S", 0.1)

    def hangs(*_: object, **__: object) -> Handle:
        inside.set()
        gate.wait()
        raise RefusalError("NIXL_ERR_BACKEND")

    agent.initialize_xfer = hangs
    [call] = reads(transport, transport.open(slab), buffer, [2])
    inside.wait(20)
    transport.close()
    assert transport._paths
    gate.set()
    assert isinstance(call.exception(20), errors.IOFailedError)
    until(lambda: not transport._paths, "all is given back")
    assert agent.registered == []


def on_gpu(address: int, nbytes: int) -> Any:
    """As much of a CUDA tensor as a transport looks at."""
    device = SimpleNamespace(type="cuda", index=3)
    return SimpleNamespace(
        device=device, nbytes=nbytes, numel=lambda: nbytes, element_size=lambda: 1, data_ptr=lambda: address
    )


def test_gpu_memory_goes_through_gds_mt_where_it_is_registered(
    stand_in, slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pathfinder:
        @staticmethod
        def load_nvidia_dynamic_lib(name: str) -> None:
            assert name in ("cudart", "cufile")

    monkeypatch.setattr(calls, "PROC_MODULES", os.devnull)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", Pathfinder)
    with NixlTransport(4, "off", gds=True) as transport:
        [agent] = stand_in
        agent.all_end = True
        assert set(agent.backends) == {"POSIX", "GDS_MT"}
        assert transport.memory_kinds == {"host", "cuda"}
        file = transport.open(slab)
        ring = on_gpu(1 << 30, 8 * SECTOR)
        transport.register(ring)
        with pytest.raises(errors.IOFailedError, match="already"):
            transport.register(on_gpu((1 << 30) + SECTOR, SECTOR))
        assert transport.read(file, 0, DeviceMemory((1 << 30) + SECTOR, SECTOR, 3)) == SECTOR
        with pytest.raises(errors.IOFailedError) as caught:
            transport.read(file, SECTOR, DeviceMemory((1 << 30) + 7 * SECTOR, 2 * SECTOR, 3))
        assert "register" in caught.value.hint
        assert transport.read(file, SECTOR, page(buffer, 0)) == SECTOR
        assert [(handle.plugin, handle.memory[0][0]) for handle in agent.begun] == [
            ("GDS_MT", "VRAM"),
            ("POSIX", "DRAM"),
        ]
        assert agent.begun[0].memory == [("VRAM", (1 << 30) + SECTOR, SECTOR, 3)]
        transport.deregister(ring)
        with pytest.raises(errors.IOFailedError, match="not registered"):
            transport.deregister(ring)
        transport.register(ring)
    assert agent.registered == []


# What cannot be had.


def opened(tmp_path: Path, device: str = "cpu", gds: str = "auto") -> Transport:
    return open_transport("nixl", directory=tmp_path, device=device, threads=2, direct_io="auto", gds=gds)


def test_without_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    before = threading.active_count()
    with pytest.raises(errors.TransportUnavailableError, match="nixl") as caught:
        opened(tmp_path)
    assert "cuda13" in caught.value.hint
    assert threading.active_count() == before


@installed
def test_a_nixl_that_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.4.10")
    with pytest.raises(errors.TransportUnavailableError, match=r"1\.4\.10"):
        opened(tmp_path)


def test_an_agent_that_cannot_be_made_leaves_no_thread(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Agent, name: str, settings: dict[str, str]) -> None:
        raise RefusalError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(Agent, "create_backend", refuse)
    before = threading.active_count()
    with pytest.raises(errors.TransportUnavailableError, match="NIXL_ERR_BACKEND"):
        NixlTransport(1)
    assert threading.active_count() == before


@pytest.mark.parametrize("settings", [{"threads": 0}, {"threads": 1, "direct_io": "yes"}])
def test_bad_settings_start_no_thread(stand_in, settings: dict[str, object]) -> None:
    before = threading.active_count()
    with pytest.raises(errors.InvalidValueError):
        NixlTransport(**settings)
    assert threading.active_count() == before


def test_cufile_needs_proc_modules(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PROC_MODULES", str(tmp_path / "missing"))
    with pytest.raises(errors.TransportUnavailableError, match="missing"):
        NixlTransport(1, gds=True)
    monkeypatch.setattr(probe, "run_child", lambda *_: pytest.fail("it would hang"))
    assert probe.probe("nixl", tmp_path, 0).mode == "posix"


# The choice.


@pytest.mark.parametrize(
    ("device", "gds", "mode", "want"),
    [
        ("cpu", "auto", "gds", {"host"}), ("cuda:1", "off", "gds", {"host"}), ("cuda:1", "auto", "compat", {"host"}),
        ("cuda:1", "auto", "posix", {"host"}), ("cuda:1", "auto", "gds", {"host", "cuda"}),
        ("cuda:1", "on", "gds", {"host", "cuda"}), ("cuda:1", "on", "compat", None), ("cpu", "on", "gds", None),
    ],
)  # fmt: skip
def test_gpu_memory_only_where_it_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gds: str, mode: str, want: set[str] | None
) -> None:
    asked: list[dict[str, object]] = []

    class Recorded(PosixTransport):
        name = "nixl"

        def __init__(self, threads: int, direct_io: Switch, gds: bool) -> None:
            asked.append({"threads": threads, "gds": gds})
            super().__init__(threads, direct_io)

    monkeypatch.setattr(nixl_module, "NixlTransport", Recorded)
    monkeypatch.setattr(probe, "no_gds_driver", lambda: "")
    monkeypatch.setattr(probe, "probe", lambda *_: probe.ProbeResult(mode != "posix", mode, "because"))
    if want is None:
        with pytest.raises(errors.TransportUnavailableError):
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
