import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transport_parts import FILE_BYTES, SECTOR, soon

import gdscache.storage.posix as posix_module
from gdscache.errors import (
    InvalidValueError,
    IOFailedError,
    TransportUnavailableError,
)
from gdscache.memory import HostBuffer
from gdscache.storage import IORequest, Op, Transport
from gdscache.storage.base import Switch
from gdscache.storage.files import probe_direct_io
from gdscache.storage.posix import PosixTransport


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random.Random(1).randbytes(FILE_BYTES))
    return path


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    with HostBuffer(FILE_BYTES, "off") as made:
        yield made


def read(transport: Transport, file: int, buffer: HostBuffer, offset: int, nbytes: int, at: int = 0) -> object:
    [error] = transport.submit(Op.READ, [IORequest(file, offset, buffer.view[at : at + nbytes])]).wait(soon())
    return error


def test_a_run_that_fails_is_retried_request_by_request(
    slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, calls = 7 * SECTOR, []
    preadv = os.preadv

    def faulty(file: int, views: list[memoryview], offset: int) -> int:
        calls.append(len(views))
        if offset <= bad < offset + sum(view.nbytes for view in views):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(file, views, offset)

    monkeypatch.setattr(posix_module.os, "preadv", faulty)
    with PosixTransport(2, "off") as transport:
        file = transport.open(slab)
        batch = [IORequest(file, n * SECTOR, buffer.view[n * SECTOR : (n + 1) * SECTOR]) for n in range(32)]
        errors = transport.submit(Op.READ, batch).wait(soon())
    assert [n for n, error in enumerate(errors) if error] == [7]
    assert isinstance(errors[7], IOFailedError)
    assert errors[7].errno == errno.EIO
    assert calls[0] == 32
    data = slab.read_bytes()
    assert all(
        buffer.view[n * SECTOR : (n + 1) * SECTOR] == data[n * SECTOR : (n + 1) * SECTOR] for n in range(32) if n != 7
    )


@pytest.mark.parametrize("step", [SECTOR, SECTOR + 1000, 3 * SECTOR])
def test_partial_reads_and_writes_are_continued(
    slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def part(views: list[memoryview]) -> list[memoryview]:
        room, parts = step, []
        for view in views:
            parts.append(view[: min(room, view.nbytes)])
            room -= parts[-1].nbytes
        return parts

    offsets: list[int] = []

    def faked(call: Callable[[int, list[memoryview], int], int]) -> Callable[[int, list[memoryview], int], int]:
        return lambda file, views, offset: offsets.append(offset) or call(file, part(views), offset)

    monkeypatch.setattr(posix_module.os, "preadv", faked(preadv))
    monkeypatch.setattr(posix_module.os, "pwritev", faked(pwritev))
    size = 5 * SECTOR
    with PosixTransport(2, "off") as transport:
        file = transport.open(slab)
        buffer.view[:] = random.Random(5).randbytes(FILE_BYTES)
        batch = [IORequest(file, at, buffer.view[at : at + size]) for at in range(0, 40 * size, size)]
        assert not any(transport.submit(Op.WRITE, batch).wait(soon()))
        want = bytes(buffer.view[: 40 * size])
        buffer.view[:] = bytes(FILE_BYTES)
        assert not any(transport.submit(Op.READ, batch).wait(soon()))
    assert buffer.view[: 40 * size] == want
    assert slab.read_bytes()[: 40 * size] == want
    assert not any(offset % SECTOR for offset in offsets)  # O_DIRECT would refuse others


# O_DIRECT: auto, on, off.


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refusing(path: object, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *args, **more)

    monkeypatch.setattr(posix_module.os, "open", refusing)


def test_no_o_direct(
    slab: Path, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING, "gdscache.storage"), PosixTransport(1, "auto") as transport:
        for _ in range(3):
            file = transport.open(slab)
        assert not transport.direct
        assert read(transport, file, buffer, 0, SECTOR) is None
        assert str(slab.parent) in str(transport.describe()["direct_refused"])
    assert len(caplog.records) == 1
    assert "Invalid argument" in caplog.text
    with (
        PosixTransport(1, "on") as transport,
        pytest.raises(TransportUnavailableError, match="Invalid argument"),
    ):
        transport.open(slab)
    assert sorted(path.name for path in slab.parent.iterdir()) == ["slab"]


def test_direct_io_that_lies_is_not_used(slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_module.os, "preadv", lambda file, views, offset: views[0].nbytes)
    with PosixTransport(1, "on") as transport, pytest.raises(TransportUnavailableError, match="not what was written"):
        transport.open(slab)


@pytest.mark.parametrize("settings", [{"threads": 0}, {"threads": 1, "direct_io": "yes"}])
def test_settings_out_of_range_start_no_thread(settings: dict[str, object]) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidValueError):
        PosixTransport(**settings)
    assert threading.active_count() == before


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("direct_io", ["auto", "on"])
def test_too_many_open_files_are_not_taken_for_a_file_system_without_direct_io(
    slab: Path, monkeypatch: pytest.MonkeyPatch, code: int, direct_io: Switch
) -> None:
    real = os.open

    def refuses(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    cause = probe_direct_io(slab.parent)
    with PosixTransport(1, direct_io) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(posix_module.os, "open", refuses)
            with pytest.raises(IOFailedError, match="O_DIRECT cannot be probed") as caught:
                transport.open(slab)
        assert caught.value.errno == code
        assert "ulimit -n" in caught.value.hint
        assert transport.describe()["direct_refused"] == {}
        if direct_io == "auto" or not cause:
            transport.open(slab)  # the cause is gone, and nothing of it is remembered
            assert transport.direct is not bool(cause)
    assert list(slab.parent.iterdir()) == [slab]
