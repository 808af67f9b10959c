"""The transport `cufile`, over a cuFile and a GPU that are not there; and through the real ones where they are."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gdscache.errors import DeadlineError, EngineClosedError, IOFailedError, TransportUnavailableError
from gdscache.storage import Transport, calls, cufile, open_transport
from gdscache.storage.base import DeviceMemory
from gdscache.storage.cufile import CufileTransport
from gdscache.testing.transport_suite import FILE_BYTES, SECTOR, Make, Remember, TransportSuite
from tests.engine.storage.by_disk import CufileByDisk
from tests.support import fake_cufile
from tests.support.cufile_parts import HANG, NOT_ON_THIS_FILE, TOO_MUCH_MEMORY, Call, Fault
from tests.support.fake_cufile import DeviceBytes
from tests.support.helpers import until


@pytest.fixture(autouse=True)
def _well(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
        return
    before = fake_cufile.living()
    yield
    fake_cufile.release()
    assert fake_cufile.living() == before, "files or memory of cuFile are left"


class OnDevice:
    """What the suite asks of memory, on the GPU that is not there."""

    def __init__(self, transport: Transport, nbytes: int) -> None:
        self.kind, self.nbytes, self._transport = "cuda", nbytes, transport
        self._whole: Any = fake_cufile.allocate(nbytes)
        transport.register(self._whole)

    def part(self, at: int, nbytes: int) -> DeviceMemory:
        return DeviceMemory(self._whole.data_ptr() + at, nbytes, 0)

    def fill(self, data: bytes) -> None:
        self._whole.host[:] = data

    def bytes(self, at: int = 0, nbytes: int | None = None) -> bytes:
        return bytes(self._whole.host[at : at + (self.nbytes if nbytes is None else nbytes)])

    def close(self) -> None:
        if self.nbytes:
            self.nbytes = 0
            self._transport.deregister(self._whole)
            fake_cufile.free(self._whole)


class OverTheFake(TransportSuite):
    """All memory of the cases is the GPU's, and cuFile moves it."""

    made_by: type[CufileTransport] = CufileByDisk

    def make_transport(self, threads: int) -> Transport:
        with mock.patch.object(fake_cufile, "CufileTransport", self.made_by):
            return fake_cufile.opened(threads)

    @pytest.fixture
    def memory(self, make: Make) -> Iterator[Remember]:
        made: list[OnDevice] = []

        def build(transport: Transport, nbytes: int = FILE_BYTES, kind: str = "host") -> Any:
            made.append(OnDevice(transport, nbytes))
            return made[-1]

        before = fake_cufile.moves()
        yield build
        for one in made:
            one.close()
        assert fake_cufile.moves() > before or not made, "cuFile moved nothing"


class TestByCalls(OverTheFake):
    pass


class TestOutsideAnEngine(OverTheFake):
    made_by = CufileTransport


class TestHostMemory(TransportSuite):
    """With a GPU, and memory of the host: cuFile moves none of it."""

    def make_transport(self, threads: int) -> Transport:
        return fake_cufile.opened(threads)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(random.Random(1).randbytes(16 * SECTOR))
    return path


def test_without_a_gpu_cufile_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cufile, "find_cufile", lambda: pytest.fail("nobody may look for it"))
    with open_transport(
        "cufile", directory=path.parent, device="cpu", threads=1, direct_io="auto", gds="auto"
    ) as transport:
        assert (transport.name, transport.memory_kinds) == ("cufile", {"host"})
        file = transport.open(path)
        gpu = fake_cufile.allocate(SECTOR)
        with pytest.raises(IOFailedError):
            transport.read(file, 0, part(gpu))
        fake_cufile.free(gpu)


def part(memory: DeviceBytes, start: int = 0, nbytes: int | None = None) -> DeviceMemory:
    return DeviceMemory(memory.data_ptr() + start, memory.nbytes if nbytes is None else nbytes, 0)


def test_memory_that_is_not_registered_is_an_error(path: Path) -> None:
    known, strange = fake_cufile.allocate(SECTOR), fake_cufile.allocate(SECTOR)
    with fake_cufile.opened(2) as transport:
        file = transport.open(path)
        transport.register(known)  # type: ignore[arg-type]
        with pytest.raises(IOFailedError):
            transport.read(file, 0, part(strange))
        assert transport.read(file, 0, part(known)) == SECTOR
        transport.deregister(known)  # type: ignore[arg-type]
        with pytest.raises(IOFailedError):
            transport.read(file, 0, part(known))
    for memory in (known, strange):
        fake_cufile.free(memory)


def test_errors_of_cufile_are_said_in_words(path: Path) -> None:
    gpu = fake_cufile.allocate(SECTOR)
    with fake_cufile.opened(1) as transport:
        file = transport.open(path)
        transport.register(gpu)  # type: ignore[arg-type]
        fake_cufile.fault(False, Fault.ERROR, 5011, times=2)
        with pytest.raises(IOFailedError, match="cuFile answers 5011: a call of the CUDA driver failed") as caught:
            transport.read(file, 0, part(gpu))
        assert caught.value.errno == errno.EIO
    fake_cufile.free(gpu)


def test_refusals_leave_nothing_behind(path: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    gpu = fake_cufile.allocate(SECTOR)
    with fake_cufile.opened(1) as transport:
        before = len(os.listdir("/proc/self/fd"))
        fake_cufile.refuse(Call.HANDLE, NOT_ON_THIS_FILE)
        with pytest.raises(IOFailedError, match=r"5027.*udev"):
            transport.open(path)
        assert len(os.listdir("/proc/self/fd")) == before
        fake_cufile.refuse(Call.BUFFER, TOO_MUCH_MEMORY)
        with pytest.raises(TransportUnavailableError, match=f"{SECTOR} bytes.*5016") as caught:
            transport.register(gpu)  # type: ignore[arg-type]
        assert "host_buffer" in caught.value.hint
        fake_cufile.release()
        transport.open(path)
    with pytest.raises(EngineClosedError):
        transport.open(path)
    fake_cufile.refuse(Call.DRIVER, 5001)
    with pytest.raises(TransportUnavailableError, match="5001") as caught:
        fake_cufile.opened(1)
    assert "posix" in caught.value.hint
    fake_cufile.free(gpu)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("call", [Call.DRIVER, Call.HANDLE, Call.BUFFER])
def test_a_call_that_hangs_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(calls, "CALL_S", 0.2)
    gpu = fake_cufile.allocate(SECTOR)
    with fake_cufile.well_after():
        if call is Call.DRIVER:
            fake_cufile.refuse(call, HANG)
            with pytest.raises(DeadlineError, match=r"driver.*0\.2 s"):
                fake_cufile.opened(1)
        else:
            with fake_cufile.opened(1) as transport:
                fake_cufile.refuse(call, HANG)
                with pytest.raises(DeadlineError, match=str(path) if call is Call.HANDLE else f"{SECTOR} bytes"):
                    transport.open(path) if call is Call.HANDLE else transport.register(gpu)  # type: ignore[arg-type]
        assert fake_cufile.waiting() == 1
    until(lambda: fake_cufile.waiting() == 0, "the call returns")
    until(lambda: call is Call.DRIVER or fake_cufile.living() > 0, "it is registered, for good")
    fake_cufile.library().fake_cufile_forget()
    fake_cufile.free(gpu)


def test_without_proc_modules_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import fake_gpu

    monkeypatch.setattr(calls, "PROC_MODULES", str(tmp_path / "missing"))
    with pytest.raises(TransportUnavailableError, match="never answers"):
        CufileTransport(1, gpu=fake_gpu.FakeDriver())


def test_the_log_goes_where_somebody_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ENV_PATH_JSON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cufile, "CONFIGURATION", tmp_path / "cufile.json")
    assert cufile.log_folder() is not None
    (tmp_path / "cufile.json").touch()
    assert cufile.log_folder() is None
    monkeypatch.setattr(cufile, "CONFIGURATION", tmp_path / "missing")
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", "/dev/null")
    assert cufile.log_folder() is None


# Through the real cuFile.


@pytest.mark.gpu
@pytest.mark.usefixtures("real_cufile")
class TestRealByCalls(TransportSuite):
    memory_kinds = ("cuda",)

    def make_transport(self, threads: int) -> Transport:
        from gdscache.cuda.driver import Driver

        return CufileByDisk(threads, gpu=Driver(torch.device("cuda", 0)))
