"""Files of transports that move host memory: past the page cache, or not, and why."""

import errno
import logging
import mmap
import os
from pathlib import Path

import pytest

from gdscache.errors import IOFailedError, TransportUnavailableError
from gdscache.storage import files
from gdscache.storage.base import Switch
from gdscache.storage.files import NativeTransport, probe_direct_io
from gdscache.testing.transport_suite import SECTOR, random_bytes


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(random_bytes(1))
    return path


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refusing(path: object, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *args, **more)

    monkeypatch.setattr(files.os, "open", refusing)


def test_no_o_direct(slab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING, "gdscache.storage"), NativeTransport(1, "auto", uring=False) as transport:
        for _ in range(3):
            file = transport.open(slab)
        assert not transport.direct
        assert transport.read(file, 0, memoryview(bytearray(SECTOR))) == SECTOR
        assert str(slab.parent) in str(transport.describe()["direct_refused"])
    assert len(caplog.records) == 1
    assert "Invalid argument" in caplog.text
    with (
        NativeTransport(1, "on", uring=False) as transport,
        pytest.raises(TransportUnavailableError, match="Invalid argument"),
    ):
        transport.open(slab)
    assert sorted(path.name for path in slab.parent.iterdir()) == ["slab"]


def test_direct_io_that_lies_is_not_used(slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "preadv", lambda file, views, offset: views[0].nbytes)
    with (
        NativeTransport(1, "on", uring=False) as transport,
        pytest.raises(TransportUnavailableError, match="not the bytes written"),
    ):
        transport.open(slab)


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
    with NativeTransport(1, direct_io, uring=False) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "open", refuses)
            with pytest.raises(IOFailedError, match="O_DIRECT cannot be probed") as caught:
                transport.open(slab)
        assert caught.value.errno == code
        assert "ulimit -n" in caught.value.hint
        assert transport.describe()["direct_refused"] == {}
        if direct_io == "auto" or not cause:
            transport.open(slab)  # the cause is gone, and nothing of it is remembered
            assert transport.direct is not bool(cause)
    assert list(slab.parent.iterdir()) == [slab]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_taken_for_a_file_system_without_direct_io(
    slab: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(file: int, views: list[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    if cause := probe_direct_io(slab.parent):
        pytest.skip(f"no O_DIRECT here: {cause}")
    monkeypatch.setattr(files.os, "pwritev", full)
    with NativeTransport(1, "on", uring=False) as transport:
        file = transport.open(slab)  # the slab has its room
        assert transport.direct
        assert transport.describe()["direct_refused"] == {}
        memory = mmap.mmap(-1, SECTOR)
        assert transport.read(file, 0, memoryview(memory)) == SECTOR
    assert list(slab.parent.iterdir()) == [slab]


def test_a_close_that_fails_closes_no_number_twice(slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has closed it all the same, and may give the number to another file."""
    transport, closed, real = NativeTransport(1, "off", uring=False), list[int](), os.close
    opened = [transport.open(slab) for _ in range(3)]

    def fails(file: int) -> None:
        closed.append(file)
        real(file)
        if len(closed) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "close", fails)
    with pytest.raises(OSError, match="Input/output error"):
        transport.close()
    transport.close()
    assert sorted(closed) == sorted(opened)
