"""The suite that every transport passes (gdscache.testing.transport_suite), over those that come with the package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdscache.errors import TransportUnavailableError
from gdscache.storage import Transport, probe
from gdscache.storage.files import NativeTransport, probe_direct_io
from gdscache.storage.kvikio import KvikioTransport
from gdscache.storage.nixl import NixlTransport
from gdscache.testing.transport_suite import TransportSuite
from tests.engine.storage.by_disk import NativeByDisk
from tests.support.faults import Fault, FaultPlan, FaultRule, FaultyTransport
from tests.support.places import SUPPORT
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
