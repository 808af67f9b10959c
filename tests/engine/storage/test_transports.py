"""The suite that every transport passes (gdscache.testing.transport_suite), over those that come with the package."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gdscache.errors import TransportUnavailableError
from gdscache.storage import Transport, probe
from gdscache.storage.base import Memory as Piece
from gdscache.storage.base import Op, Switch
from gdscache.storage.files import NativeTransport, probe_direct_io
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.nixl import NixlTransport
from gdscache.testing.transport_suite import Memory, TransportSuite, random_bytes
from tests.engine.storage.by_disk import NativeByDisk
from tests.support.faults import Fault, FaultPlan, FaultRule, FaultyTransport
from tests.support.places import SUPPORT
from tests.support.posix_transport import PosixTransport
from tests.support.transport_parts import has_libcuda

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
needs_kvikio = pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")
needs_driver = pytest.mark.skipif(
    not has_libcuda(), reason="no libcuda.so.1 (the stand-in test runs this suite with one)"
)


@pytest.fixture
def _direct(tmp_path: Path) -> None:
    if cause := probe_direct_io(tmp_path):
        pytest.skip(f"no O_DIRECT here: {cause}")


@pytest.mark.usefixtures("_direct")
class TestPosixDirect(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return NativeTransport(threads, "on", uring=False)


class TestPosixBuffered(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return NativeTransport(threads, "off", uring=False)


@pytest.fixture
def _uring() -> None:
    try:
        NativeTransport(1).close()
    except TransportUnavailableError as error:
        pytest.skip(error.message)


@pytest.mark.usefixtures("_uring", "_direct")
class TestUringDirect(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return NativeByDisk(threads, "on")


@pytest.mark.usefixtures("_uring")
class TestUringBuffered(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return NativeByDisk(threads, "off")


@pytest.mark.suite
@pytest.mark.usefixtures("_uring")
class TestEverySectorByItself(TransportSuite):
    sectors = 2048  # the whole file
    make_transport = TestUringBuffered.make_transport


@needs_kvikio
@needs_driver
class TestKvikio(TransportSuite):
    memory_kinds = ("host", "cuda")

    def make_transport(self, threads: int) -> Transport:
        return KvikioTransport(threads, compat="on")


@needs_kvikio
@pytest.mark.suite
@pytest.mark.skipif(has_libcuda(), reason="a real libcuda.so.1 is here: the suite runs with that")
def test_kvikio_with_a_stand_in_driver(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in")
    source, library = SUPPORT / "stand_ins" / "libcuda.c", tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    arguments = [
        "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "TestKvikio", f"--basetemp={tmp_path / 'inner'}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, __file__],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert " passed" in done.stdout


@needs_nixl
@pytest.mark.usefixtures("_direct")
class TestNixlDirect(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return NixlTransport(threads, "on")


@needs_nixl
class TestNixlBuffered(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return NixlTransport(threads, "off")


# Through cuFile, where the probe proves it.


@pytest.fixture(scope="module")
def _cufile(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A probe takes seconds, so there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if (found := probe.probe("kvikio", tmp_path_factory.mktemp("probe"), 0, 60)).mode != "gds":
        pytest.skip(f"cuFile does not work here: {found.reason}")


@pytest.mark.gpu
@needs_kvikio
@pytest.mark.usefixtures("_cufile")
class TestKvikioThroughCufile(TransportSuite):
    memory_kinds = ("cuda",)

    def make_transport(self, threads: int) -> Transport:
        return KvikioTransport(threads, compat="off")


@pytest.mark.gpu
@needs_nixl
@pytest.mark.usefixtures("gds_mt")
class TestNixlGdsMt(TransportSuite):
    memory_kinds = ("cuda",)

    def make_transport(self, threads: int) -> Transport:
        return NixlTransport(threads, gds=True)


# The wrapper that makes others fail is a transport, too: as long as no fault changes bytes, nobody sees a difference.


class TestFaultyThatDelays(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        plan = FaultPlan(FaultRule(Fault.DELAY, rate=0.1, seconds=0.002), trace=True)
        return FaultyTransport(threads, "off", plan=plan)


@needs_nixl
class TestFaultyOverNixl(TransportSuite):
    def make_transport(self, threads: int) -> Transport:
        return FaultyTransport(threads, plan=FaultPlan(trace=True), inner="nixl")


# What breaks a promise fails the suite.


class Wraps(PosixTransport):
    """Offsets have 32 bits."""

    def _move(self, op: Op, file: int, offset: int, memory: Piece) -> int:
        return super()._move(op, file, offset % (1 << 32), memory)


class Holds(PosixTransport):
    """Writes reach the file with the next read, or a flush."""

    def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
        super().__init__(threads, direct_io)
        self._held: list[tuple[int, int, bytes]] = []

    def write(self, file: int, offset: int, memory: Piece) -> int:
        assert isinstance(memory, memoryview)
        self._held.append((file, offset, bytes(memory)))
        return len(memory)

    def read(self, file: int, offset: int, memory: Piece) -> int:
        self.flush(file)
        return super().read(file, offset, memory)

    def flush(self, file: int) -> None:
        while self._held:
            one, offset, data = self._held.pop()
            os.pwrite(one, data, offset)


class Keeps(PosixTransport):
    """Registered memory stays registered."""

    def __init__(self, threads: int, direct_io: Switch = "auto") -> None:
        super().__init__(threads, direct_io)
        self._kept: list[object] = []

    def register(self, memory: memoryview | torch.Tensor) -> None:
        self._kept.append(np.frombuffer(memory, np.uint8))


@pytest.mark.parametrize(
    ("wrong", "test", "seen"),
    [
        (Wraps, TransportSuite.test_an_offset_of_more_than_32_bits, "of 8388608 bytes differ"),
        (Holds, TransportSuite.test_shuffled_extents_come_back_equal, "bytes differ"),
        (Keeps, TransportSuite.test_memory_is_not_kept, "exported"),
    ],
)
def test_a_transport_that_breaks_a_promise_fails(
    tmp_path: Path, wrong: type[PosixTransport], test: Callable[..., None], seen: str
) -> None:
    (path := tmp_path / "data").write_bytes(random_bytes(1))
    with contextlib.ExitStack() as ends, wrong(4, "off") as transport:

        def memory(transport: Transport, nbytes: int, kind: str) -> Memory:
            return ends.enter_context(contextlib.closing(Memory(kind, transport, nbytes)))

        given = {"make": lambda: transport, "memory": memory, "data_file": path}
        given |= {"kind": "host", "largest": 2100, "op": Op.READ}
        takes = {name: given[name] for name in inspect.signature(test).parameters if name in given}
        with pytest.raises((pytest.fail.Exception, BufferError), match=seen):
            test(TransportSuite(), **takes)
